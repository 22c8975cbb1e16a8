"""Rows a second and peak memory of `recspec prepare outbrain`, on made-up raw files of two million click rows.

    python benchmarks/prepare_outbrain.py [--rows 2000000] [--memory-limit 2GB] [--page-views] [--engine duckdb]

The raw files are made first, outside the clock. `prepare` is a process of its own; its peak is the most memory that
process ever held resident (what the kernel counted for it), which is what the limit is about.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recspec import machine

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Make raw files, prepare them, print what it took, write JSON."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        raw = make_raw(Path(scratch) / "raw", arguments)
        report = measure(raw, Path(scratch) / "out", arguments)
    print_table(report)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {arguments.out}")


def make_raw(folder: Path, arguments: argparse.Namespace) -> Path:
    """Raw files from the tests' generator."""
    sys.path.insert(0, str(ROOT))  # this file may be run from anywhere
    from tests import made_up_outbrain

    started = time.perf_counter()
    made_up_outbrain.write(
        folder, num_rows=arguments.rows, seed=arguments.seed, page_views=arguments.page_views, clicks_test=False
    )
    print(f"raw files made in {time.perf_counter() - started:.1f} s")
    return folder


def measure(raw: Path, out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One preparation in a process of its own."""
    command = [sys.executable, "-m", "recspec", "prepare", "outbrain", str(raw), str(out), "--engine", arguments.engine,
               "--memory-limit", arguments.memory_limit,
               "--set", f"page_views={str(arguments.page_views).lower()}"]  # fmt: skip
    started = time.perf_counter()
    with (raw.parent / "said.txt").open("w+b") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit((raw.parent / "said.txt").read_text(encoding="utf-8"))
    rows = sum(json.loads((out / "prepare.json").read_text(encoding="utf-8"))["summary"]["rows"].values())
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "load_when_it_ended": os.getloadavg()[0],
        "engine": arguments.engine,
        "page_views": arguments.page_views,
        "seed": arguments.seed,
        "raw_megabytes": round(sum(path.stat().st_size for path in raw.iterdir()) / 1e6, 1),
        "click_rows": rows,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "rows_per_second": round(rows / seconds),
        "rows_per_cpu_second": round(rows / (usage.ru_utime + usage.ru_stime)),
        "peak_megabytes": round(usage.ru_maxrss * 1024 / 1e6),
        "memory_limit_megabytes": round(machine.parse_bytes(arguments.memory_limit) / 1e6),
    }


def print_table(report: dict[str, Any]) -> None:
    """The report's numbers, one a line."""
    print(
        f"prepare outbrain: {report['click_rows']:,} click rows ({report['raw_megabytes']:,} MB raw) in "
        f"{report['seconds']:,} s: {report['rows_per_second']:,} rows/s, "
        f"{report['rows_per_cpu_second']:,} rows a CPU second"
    )
    print(f"peak memory {report['peak_megabytes']:,} MB under a limit of {report['memory_limit_megabytes']:,} MB")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="click rows, about")
    parser.add_argument("--memory-limit", default="2GB")
    parser.add_argument("--engine", default="duckdb")
    parser.add_argument("--page-views", action="store_true", help="with page_views.csv, about 6 rows a display")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, default=None, help="folder for raw files and spilling")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "prepare_outbrain.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
