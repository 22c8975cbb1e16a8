"""What the journal costs a recommendation of SASRec, and how soon an answer knows an event.

    python benchmarks/journal_latency.py
    python benchmarks/journal_latency.py --journal postgresql+psycopg://postgres@127.0.0.1/test --rounds 5

Two servers of one bundle (made-up events; 64 numbers a vector, lists of 50 events) answer `POST /recommend` over HTTP,
each in a process of its own, one with a journal. They take turns, request by request:

- `without`: the server without a journal;
- `nothing new`: the other one, for users of whom the journal holds no event;
- `new events`: the other one, for users with five new events.

Then a client sends an event of each of many users to `POST /events`, and asks for recommendations as soon as it is
answered: `known` is the time from that answer to a list that leaves the event's item out, `missed` counts lists that
hold it. Prints p50 and p99 in milliseconds, and writes results/journal_latency.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from _side_by_side import COLD, Found, where_and_when, write

USERS, ITEMS, EVENTS = 2_000, 5_000, 60_000
START = 1_700_000_000
CASES = ("without", "nothing new", "new events")


def main() -> None:
    """Both servers, the table, the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", default=None, help="URL of a journal to write to; by default a SQLite file")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=300, help="of each case in a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "journal_latency.json")
    asked = parser.parse_args()
    from recspec.base.machine import SPINS

    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run = made(folder)
        url = asked.journal or f"sqlite:///{folder / 'journal.db'}"
        found: Found = {
            "users": USERS,
            "items": ITEMS,
            "events": EVENTS,
            "threads": asked.threads,
            "rounds": asked.rounds,
            "database": url.partition(":")[0],
            **measured(run, url, asked),
            **where_and_when(),
        }
    for name, each in found["milliseconds"].items():
        print(f"{name:<12} p50 {each['p50']:8.3f} ms   p99 {each['p99']:8.3f} ms   ({each['requests']:,} requests)")
    print(f"missed: {found['missed']} of {found['milliseconds']['known']['requests']:,}")
    write(found, asked.out)


def made(folder: Path) -> Path:
    """A run of SASRec on events of popular and less popular items."""
    from recspec import api

    rng = np.random.default_rng(0)
    items = np.minimum(rng.zipf(1.2, EVENTS), ITEMS)
    users = rng.integers(0, USERS, EVENTS)
    rows = {
        "user_id": [f"u{each}" for each in users.tolist()],
        "item_id": [f"i{each}" for each in items.tolist()],
        "timestamp": (START + np.arange(EVENTS)).tolist(),
    }
    api.prepare(rows, folder / "data", split="none", repeats="last", progress=False)
    api.train("sasrec", folder / "data", folder / "run", epochs=1, dim=64, blocks=2, length=50, progress=False)
    return folder / "run"


def serve(run: Path, journal: str | None, threads: int, told: Any) -> None:
    """In a process of its own: a server, until the pipe closes."""
    from recspec.api import serve as start

    with start(run, journal=journal, http_port=0, grpc=False, threads=threads, watch=0) as server:
        told.send(server.url)
        told.recv()


def measured(run: Path, url: str, asked: argparse.Namespace) -> Found:
    """Milliseconds of each case, by turns, and lists that missed an event."""
    context = multiprocessing.get_context("spawn")
    pipes, clients = [], {}
    for journal in (None, url):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(run, journal, asked.threads, theirs), daemon=True).start()
        clients[journal] = Client(ours.recv())
        pipes.append(ours)
    plain, with_journal = clients[None], clients[url]
    rng = np.random.default_rng(1)
    half = USERS // 2  # users below have new events, those from here on none
    for start in range(0, half, 100):
        events = [
            {"user": f"u{user}", "item": f"i{rng.integers(1, ITEMS)}", "type": "view", "time": START + 10**6 + each}
            for user in range(start, start + 100)
            for each in range(5)
        ]
        with_journal.post("/events", {"events": events})
    times: dict[str, list[float]] = {case: [] for case in (*CASES, "known")}
    for _ in range(asked.rounds):
        users = {
            "without": rng.integers(0, USERS, asked.requests + COLD),
            "nothing new": rng.integers(half, USERS, asked.requests + COLD),
            "new events": rng.integers(0, half, asked.requests + COLD),
        }
        for at in range(asked.requests + COLD):
            for case in CASES:
                client = plain if case == "without" else with_journal
                spent, _ = client.post("/recommend", {"user": f"u{users[case][at]}", "k": 10})
                if at >= COLD:
                    times[case].append(spent)
    missed = 0
    for each in range(asked.rounds * asked.requests):
        user = {"user": f"u{rng.integers(0, USERS)}" if each % 4 else f"new{each}", "k": 10}
        item = with_journal.post("/recommend", user)[1]["items"][0]["item"]
        with_journal.post("/events", {"user": user["user"], "item": item, "type": "view"})
        spent, answer = with_journal.post("/recommend", user)
        times["known"].append(spent)
        missed += item in [found["item"] for found in answer["items"]]
    for pipe in pipes:
        pipe.send(None)
    told = {
        case: {"p50": float(np.percentile(each, 50)), "p99": float(np.percentile(each, 99)), "requests": len(each)}
        for case, each in times.items()
    }
    return {"milliseconds": told, "missed": missed}


class Client:
    """A connection that is kept open."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.partition("://")[2])

    def post(self, path: str, body: object) -> tuple[float, Any]:
        """Milliseconds, and the answer."""
        began = time.perf_counter()
        self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        found = self._connection.getresponse()
        data = found.read()
        spent = 1000 * (time.perf_counter() - began)
        if found.status != 200:
            raise RuntimeError(f"{path}: {found.status}: {data.decode()[:500]}")
        return spent, json.loads(data)


if __name__ == "__main__":
    main()
