"""Reviews a second and peak memory of `recspec prepare amazon`, on made-up raw files of three million reviews.

    python benchmarks/prepare_amazon.py [--reviews 3000000] [--memory-limit 2GB] [--engine duckdb] [--format tfrecord]

The raw files, packed as the publisher packs them, are made first, outside the clock. `prepare` is a process of its own;
its peak is the most memory that process ever held resident (what the kernel counted for it), which is what the limit is
about.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
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
        # In a process that ends: a child's peak counts what its parent held when it was started.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            raw = pool.apply(make_raw, (Path(scratch) / "raw", arguments))
        report = measure(raw, Path(scratch) / "out", arguments)
    print_table(report)
    write(report, arguments.out)


def make_raw(folder: Path, arguments: argparse.Namespace) -> Path:
    """Raw files from the tests' generator, about as many users and items a review as Books 2014 has."""
    sys.path.insert(0, str(ROOT))  # this file may be run from anywhere
    from tests import made_up_amazon

    started = time.perf_counter()
    made_up_amazon.write(
        folder,
        num_users=arguments.reviews // 3,
        num_items=arguments.reviews // 10,
        num_reviews=arguments.reviews,
        seed=arguments.seed,
    )
    print(f"raw files made in {time.perf_counter() - started:.1f} s")
    return folder


def measure(raw: Path, out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One preparation in a process of its own."""
    settings = (f"min_reviews={arguments.min_reviews}", f"format={arguments.format}")
    took = counted(prepare_command("amazon", raw, out, arguments, *settings))
    summary = json.loads((out / "prepare.json").read_text(encoding="utf-8"))["summary"]
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "engine": arguments.engine,
        "format": arguments.format,
        "seed": arguments.seed,
        "min_reviews": arguments.min_reviews,
        "raw_megabytes": megabytes(raw),
        "reviews": summary["reviews"],
        "reviews_kept": summary["interactions"],
        "users": summary["users"],
        "items": summary["items"],
        "rows": sum(summary["rows"].values()),
        "prepared_megabytes": megabytes(out),
        **took,
        "reviews_per_second": round(summary["reviews"] / took["seconds"]),
        "memory_limit_megabytes": round(machine.parse_bytes(arguments.memory_limit) / 1e6),
    }


def print_table(report: dict[str, Any]) -> None:
    """The report's numbers, one a line."""
    print(
        f"prepare amazon: {report['reviews']:,} reviews ({report['raw_megabytes']:,} MB raw), of which "
        f"{report['reviews_kept']:,} of {report['users']:,} users count, to {report['rows']:,} rows "
        f"({report['prepared_megabytes']:,} MB) in {report['seconds']:,} s ({report['cpu_seconds']:,} CPU seconds)"
    )
    print(f"peak memory {report['peak_megabytes']:,} MB under a limit of {report['memory_limit_megabytes']:,} MB")


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, __file__)
    parser.add_argument("--reviews", type=int, default=3_000_000)
    parser.add_argument("--min-reviews", type=int, default=20, help="of a user, as published")
    parser.add_argument("--format", default="parquet", choices=("parquet", "tfrecord"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
