"""Durable events a second of `recspec serve --journal`, through HTTP, and the time until a reader sees them.

    python benchmarks/journal.py
    python benchmarks/journal.py --url postgresql+psycopg://postgres@127.0.0.1/test --out FILE.json

Starts the server as a user would, with a popularity model of made-up data. Clients are connections of one process that
send an event, wait for the answer, and send the next; the process is a raw socket loop, so that it takes few cycles
from the server's cores. A reader in a process of its own asks for a user's events as soon as an answer says that one is
stored. SQLite writes with WAL and synchronous=FULL, PostgreSQL with its defaults. Every accepted event is counted in
the journal at the end.

CPU seconds are those of the server and its workers; of PostgreSQL's processes they are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


# --- clients, in a process of their own -------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """A connection that sends events, each after the answer to the one before."""

    def __init__(self, number: int, events: int, until: float, latencies: list[float]) -> None:
        self.number, self.events, self.until, self.latencies = number, events, until, latencies
        self.sent, self.accepted, self.buffer = 0, 0, b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Send the first request."""
        self.transport = transport
        self.send()

    def event(self) -> str:
        """An event as a shop sends it."""
        self.sent += 1
        ids = f'"id":"{self.number}-{self.sent}","user":"u{(self.sent * 37 + self.number) % 5000}"'
        return f'{{{ids},"item":"i{self.sent % 1000}","type":"view","time":{time.time():.3f}}}'

    def send(self) -> None:
        """The next request."""
        if time.perf_counter() > self.until:
            self.transport.close()
            self.done.set_result(None)
            return
        body = (
            self.event() if self.events == 1 else f'{{"events":[{",".join(self.event() for _ in range(self.events))}]}}'
        )
        head = (
            f"POST /events HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self.began = time.perf_counter()
        self.transport.write(f"{head}\r\n\r\n{body}".encode())

    def data_received(self, data: bytes) -> None:
        """Read an answer; a whole one ends with its JSON object."""
        self.buffer += data
        if not self.buffer.endswith(b"}"):
            return
        self.latencies.append(time.perf_counter() - self.began)
        assert self.buffer.startswith(b"HTTP/1.1 200"), self.buffer
        self.accepted += int(self.buffer.partition(b'"accepted":')[2].partition(b",")[0])
        self.buffer = b""
        self.send()

    def connection_lost(self, _: Exception | None) -> None:
        """The server must not hang up first."""
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server closed a connection"))


async def clients(port: int, connections: int, events: int, seconds: float) -> Figures:
    """Requests a second, latencies, and the number of accepted events."""
    loop, latencies = asyncio.get_running_loop(), list[float]()
    began, cpu = time.perf_counter(), time.process_time()

    numbers = itertools.count(1_000_000 * int(time.time()))

    def client() -> Client:
        return Client(next(numbers), events, began + seconds, latencies)

    made = [await loop.create_connection(client, "127.0.0.1", port) for _ in range(connections)]
    await asyncio.gather(*(each.done for _, each in made))
    took = time.perf_counter() - began
    accepted = sum(each.accepted for _, each in made)
    latencies.sort()
    return {
        "connections": connections,
        "events_of_a_request": events,
        "seconds": round(took, 2),
        "accepted": accepted,
        "events_per_second": round(accepted / took),
        **{f"p{q}_ms": round(1000 * latencies[int(len(latencies) * q / 100)], 1) for q in (50, 95, 99)},
        "max_ms": round(1000 * latencies[-1], 1),
        "client_cpu_seconds": round(time.process_time() - cpu, 2),
    }


def watch(url: str, port: int, times: int) -> Figures:
    """Milliseconds from an answer of 200 until a reader of another process has the event."""
    from recspec.loop import Journal

    found = []
    with Journal(url, read_only=True) as journal:
        for number in range(times):
            user = f"watch-{time.time_ns()}-{number}"
            sent = json.dumps({"user": user, "item": 1, "type": "view", "id": user}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/events", sent, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
            began = time.perf_counter()
            while not journal.history(user, most=1):
                pass
            found.append(1000 * (time.perf_counter() - began))
    found.sort()
    return {"times": times, "p50_ms": round(found[times // 2], 2), "p99_ms": round(found[int(times * 0.99)], 2)}


# --- the server ------------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """A popularity model of made-up data."""
    from recspec import api

    made = {"kind": "interactions", "num_users": 200, "num_items": 100, "num_rows": 5_000}
    api.prepare(folder, folder / "data", dataset="synthetic", settings=made)
    api.train("popularity", folder / "data", folder / "run", progress=False)
    return folder / "run"


@contextmanager
def serving(model: Path, url: str, workers: int, log: Path) -> Iterator[tuple[int, int]]:
    """The server as a process of its own: its id and its port."""
    options = ["--json", "--http-port", "0", "--no-grpc", "--workers", str(workers), "--journal", url]
    command = [sys.executable, "-m", "recspec", "serve", f"m={model}", *options]
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as served:
        assert served.stdout is not None
        try:
            told = json.loads("".join(iter(served.stdout.readline, "}\n")) + "}")
            yield served.pid, int(told["http"].rpartition(":")[2])
            served.send_signal(signal.SIGTERM)
            if served.wait(60):
                raise SystemExit(f"the server ended with status {served.returncode}; see {log}")
        finally:
            served.kill()


def cpu_seconds(pid: int) -> float:
    """Of a process and all of its descendants."""
    stats = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            stats[int(each.name)] = (each / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
    family = [pid]
    for parent in family:
        family += [each for each, parts in stats.items() if int(parts[1]) == parent]
    return sum(int(stats[each][11]) + int(stats[each][12]) for each in family) / os.sysconf("SC_CLK_TCK")


def own(*arguments: object) -> Figures:
    """What this file prints in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    figures: Figures = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    return figures


def measure(url: str, workers: int, seconds: float, folder: Path, model: Path) -> Figures:
    """All figures of one server."""
    from recspec.loop import Journal

    found: Figures = {"workers": workers, "load": []}
    accepted = 0
    with serving(model, url, workers, folder / "server.log") as (pid, port):
        own("--clients", port, 64, 1, 2)  # warms up
        for connections, events in ((1, 1), (8, 1), (64, 1), (64, 10), (8, 100)):
            before = cpu_seconds(pid)
            figures = own("--clients", port, connections, events, seconds)
            accepted += figures["accepted"]
            figures["server_cpu_ms_of_an_event"] = round(1000 * (cpu_seconds(pid) - before) / figures["accepted"], 3)
            found["load"].append(figures)
            print(json.dumps(figures), flush=True)
        found["visible"] = own("--watch", url, port, 200)
        print(json.dumps(found["visible"]), flush=True)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        accepted = sum(int(float(each.split()[1])) for each in lines if 'events_total{outcome="accepted"}' in each)
    with Journal(url, read_only=True) as journal:
        found["stored"] = sum(map(len, journal.events()))
    found["accepted"] = accepted
    return found


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an empty journal; by default SQLite in a temporary folder")
    parser.add_argument("--workers", default="1", help="numbers of workers, such as 1,2")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--watch", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.clients:
        port, connections, events, seconds = asked.clients
        print(json.dumps(asyncio.run(clients(int(port), int(connections), int(events), float(seconds)))))
        return
    if asked.watch:
        print(json.dumps(watch(asked.watch[0], int(asked.watch[1]), int(asked.watch[2]))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder)
        results = []
        for workers in map(int, asked.workers.split(",")):
            url = asked.url or f"sqlite:///{folder / f'{workers}.db'}"
            results.append(measure(url, workers, asked.seconds, folder, model))
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
        "load_before": os.getloadavg()[0],
        "database": "sqlite" if asked.url is None else asked.url.partition(":")[0],
        "results": results,
    }
    if any(each["stored"] < each["accepted"] for each in results):
        raise SystemExit(f"events were lost: {json.dumps(found)}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
