"""`recspec serve --workers N`: memory of large tables, answers a second, and a worker killed under load.

    python benchmarks/stress/serve_workers.py
    python benchmarks/stress/serve_workers.py --workers 1,2 --users 1000000 --out benchmarks/results/serve_workers.json

Makes a NeuMF bundle of random weights with tables for `--users` users, starts the server as a user would, and sends
binary tensors of `--rows` rows over HTTP and gRPC from processes of their own, each connection again as soon as it has
its answer. Memory is PSS (pages divided among the processes that share them) and private pages, from
/proc/PID/smaps_rollup. With two workers or more, one is killed by SIGKILL under the load of clients that connect for
each request: lost answers are counted, and the seconds until another worker answers.

Clients and server share the machine's cores; the table gives the server's CPU seconds for each answer too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from _workers_client import ask_for
from recspec.base import machine
from recspec.bundle import folder as bundle
from recspec.bundle.folder import Card
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS

ITEMS = 20_000
SETTINGS = {"factors": 32, "layers": (64, 32, 16)}
SPEC = """
feature_spec:
  user_id: {{dtype: torch.int32, cardinality: {users}}}
  item_id: {{dtype: torch.int32, cardinality: {items}}}
  label: {{dtype: torch.float32}}
source_spec: {{}}
channel_spec: {{user_ch: [user_id], item_ch: [item_id], label_ch: [label]}}
"""
GOAL_MS = 10.0
"""p99 at which answers a second are compared."""


def make_model(folder: Path, users: int) -> Path:
    """A bundle of NeuMF with random weights."""
    (folder / "feature_spec.yaml").write_text(SPEC.format(users=users, items=ITEMS), encoding="utf-8")
    spec = FeatureSpec.load(folder)
    settings = MODELS["neumf"].Settings.model_validate(SETTINGS)
    torch.manual_seed(0)
    model = MODELS["neumf"](spec, settings)
    return bundle.save(folder / "model", model, Card(model="neumf", settings=settings.model_dump(mode="json")))


@contextmanager
def serving(model: Path, workers: int, log: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The server as a process of its own: its id and its addresses."""
    command = [
        sys.executable,
        "-m",
        "recspec",
        "serve",
        f"m={model}",
        "--json",
        "--http-port",
        "0",
        "--threads",
        "1",
        "--watch",
        "0",
        "--workers",
        str(workers),
    ]
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as served:
        assert served.stdout is not None
        try:
            yield served.pid, json.loads("".join(iter(served.stdout.readline, "}\n")) + "}")
            served.send_signal(signal.SIGTERM)
            if served.wait(60):
                raise SystemExit(f"the server ended with status {served.returncode}; see {log}")
        finally:
            served.kill()


def family(pid: int) -> dict[int, str]:
    """A process and all its descendants, with their command lines."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return {each: Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ")[:60] for each in found}


def memory(pid: int) -> dict[str, int]:
    """PSS and private bytes of a process."""
    sizes = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    private = int(sizes["Private_Clean:"]) + int(sizes["Private_Dirty:"])
    return {"pss": 1024 * int(sizes["Pss:"]), "private": 1024 * private}


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of processes that run."""
    parts = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in parts) / os.sysconf("SC_CLK_TCK")


def workers_of(pid: int, model: Path) -> list[int]:
    """The processes of a family that map the model's weights, or the only one."""
    maps = {each: Path(f"/proc/{each}/maps").read_text() for each in family(pid)}
    mapped = [each for each, text in maps.items() if str(model / "weights.safetensors") in text]
    return mapped or [pid]


def load(told: dict[str, Any], protocol: str, connections: int, rows: int, seconds: float) -> dict[str, float]:
    """Answers a second and percentiles in ms, of clients in a process of their own."""
    address = told["http" if protocol == "http" else "grpc"]
    client = Path(__file__).with_name("_workers_client.py")
    command = [sys.executable, client, protocol, address, str(connections), str(rows), str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def killed(told: dict[str, Any], pids: Sequence[int], rows: int) -> dict[str, Any]:
    """One worker killed while clients connect for each request: answers, lost ones, seconds until the next worker."""
    stop, done, lost = threading.Event(), list[float](), list[str]()

    def client() -> None:
        while not stop.is_set():
            try:
                ask_for(told["http"], rows)
                done.append(time.perf_counter())
            except OSError as error:
                lost.append(f"{type(error).__name__}: {error}")

    clients = [threading.Thread(target=client) for _ in range(8)]
    for each in clients:
        each.start()
    time.sleep(2)
    os.kill(pids[0], signal.SIGKILL)
    began = time.perf_counter()
    while metric(told, "recspec_worker_restarts_total") < 1 or metric(told, "recspec_workers") < len(pids):
        time.sleep(0.02)
    back = time.perf_counter() - began
    time.sleep(1)
    stop.set()
    for each in clients:
        each.join()
    after = [at for at in done if at > began]
    gaps = [b - a for a, b in zip([began, *after], after, strict=False)]
    return {
        "answers": len(done),
        "lost": len(lost),
        "what": sorted(set(lost)),
        "seconds_to_another": round(back, 2),
        "longest_pause_seconds": round(max(gaps), 3),
    }


def metric(told: dict[str, Any], name: str) -> float:
    """A value of /metrics."""
    with urllib.request.urlopen(f"{told['http']}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def measure(model: Path, workers: int, rows: int, seconds: float, folder: Path) -> dict[str, Any]:
    """All figures of a server with so many workers."""
    with serving(model, workers, folder / f"{workers}.log") as (pid, told):
        pids = workers_of(pid, model)
        for _ in range(8 * workers):
            ask_for(told["http"], 4096)
        whole = {each: memory(each) for each in family(pid)}
        found: dict[str, Any] = {
            "workers": workers,
            "pss_of_workers": [whole[each]["pss"] for each in pids],
            "private_of_workers": [whole[each]["private"] for each in pids],
            "pss_of_all": sum(each["pss"] for each in whole.values()),
            "processes": len(whole),
            "load": [],
        }
        for protocol in ("http", "grpc"):
            for connections in (1, 4, 16):
                before = cpu_seconds(pids)
                figures = load(told, protocol, connections, rows, seconds)
                spent = (cpu_seconds(pids) - before) / figures["answers"]
                line = {"protocol": protocol, "connections": connections, **figures, "cpu_ms": round(1000 * spent, 3)}
                print(workers, "workers", line, flush=True)
                found["load"].append(line)
        if workers > 1:
            found["killed"] = killed(told, pids, rows)
    return found


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--users", type=int, default=1_000_000, help="at least 100,000, whom clients ask for")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder, given.users)
        tables = (model / "weights.safetensors").stat().st_size
        print(f"weights: {tables:,} bytes", flush=True)
        lines = [measure(model, int(each), given.rows, given.seconds, folder) for each in given.workers.split(",")]
    for line in lines:
        best = {
            kind: max(
                (each["per_second"] for each in line["load"] if each["protocol"] == kind and each["p99_ms"] <= GOAL_MS),
                default=0.0,
            )
            for kind in ("http", "grpc")
        }
        line["per_second_at_goal"] = best
        print({name: line[name] for name in line if name != "load"})
    if given.out is not None:
        figures = {"weights_bytes": tables, "rows": given.rows, "lines": lines, "machine": machine.describe()}
        given.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
