"""Rows a second and peak memory of `recspec prepare outbrain`, on made-up raw files of two million click rows.

    python benchmarks/prepare_outbrain.py [--rows 2000000] [--memory-limit 2GB] [--page-views] [--engine duckdb]

The raw files are made first, outside the clock. `prepare` is a process of its own; its peak is the most memory that
process ever held resident (what the kernel counted for it), which is what the limit is about.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _preparing import ROOT, counted, megabytes, options, prepare_command
from _side_by_side import write
from recspec.base import machine


def main() -> None:
    """Make raw files, prepare them, print what it took, write JSON."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        raw = make_raw(Path(scratch) / "raw", arguments)
        report = measure(raw, Path(scratch) / "out", arguments)
    print_table(report)
    write(report, arguments.out)


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
    took = counted(prepare_command("outbrain", raw, out, arguments, f"page_views={str(arguments.page_views).lower()}"))
    rows = sum(json.loads((out / "prepare.json").read_text(encoding="utf-8"))["summary"]["rows"].values())
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "engine": arguments.engine,
        "page_views": arguments.page_views,
        "seed": arguments.seed,
        "raw_megabytes": megabytes(raw),
        "click_rows": rows,
        **took,
        "rows_per_second": round(rows / took["seconds"]),
        "rows_per_cpu_second": round(rows / took["cpu_seconds"]),
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
    parser = options(__doc__, __file__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="click rows, about")
    parser.add_argument("--page-views", action="store_true", help="with page_views.csv, about 6 rows a display")
    return parser.parse_args()


if __name__ == "__main__":
    main()
