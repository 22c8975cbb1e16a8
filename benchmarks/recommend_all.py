"""`recspec recommend --all` by one process and by two: seconds, bytes and peak memory.

    python benchmarks/recommend_all.py [--users 1000000] [--items 100000] [--workers 1 2] [--out FILE]

The bundle is a `two_tower` of 64 numbers with random weights, which change no time, and each user acted on 20 items.
Each job is a process of its own, as a user starts it, with one thread a worker. Its memory is the sum of the shares
(PSS) of all its processes, looked at four times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from _side_by_side import where_and_when
from score_items import EVENTS, MODELS, made_up_run, made_up_spec


def main() -> None:
    """One line for each number of workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        kind, settings = MODELS["two_tower"]
        made_up_run(folder / "run", made_up_spec(folder, asked.users, asked.items), kind, settings)
        jobs = []
        for workers in asked.workers:
            jobs.append(measured(folder, workers))
            print(json.dumps(jobs[-1]), flush=True)
    if asked.out:
        sizes = {"users": asked.users, "items": asked.items, "events": EVENTS, "k": 10, "model": kind, **settings}
        told = {"what": (__doc__ or "").splitlines()[0], **where_and_when(), "sizes": sizes, "jobs": jobs}
        asked.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def measured(folder: Path, workers: int) -> dict[str, Any]:
    """One job."""
    out, started, before = folder / f"answers-{workers}", time.monotonic(), cpu_of_children()
    command = [sys.executable, "-m", "recspec", "recommend", str(folder / "run"), "--all", "-k", "10"]
    command += ["--out", str(out), "--workers", str(workers), "--json"]
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    process = subprocess.Popen(command, env=os.environ | threads, stdout=subprocess.PIPE, start_new_session=True)
    largest, processes = 0, 0
    while process.poll() is None:
        shares = [share for pid in members(process.pid) if (share := share_of(pid))]
        largest, processes = max(largest, sum(shares)), max(processes, len(shares))
        time.sleep(0.25)
    if process.returncode:
        sys.exit(process.returncode)
    files = list(out.glob("part-*.parquet"))
    return {
        "workers": workers,
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(cpu_of_children() - before, 1),
        "megabytes": round(sum(file.stat().st_size for file in files) / 1e6, 1),
        "shards": len(files),
        "peak_megabytes": round(largest / 1e6),
        "processes": processes,
    }


def members(group: int) -> list[int]:
    """The processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == group:
                found.append(int(folder.name))
    return found


def share_of(pid: int) -> int:
    """Bytes of a process: its own pages and its share of common ones; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_of_children() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
