"""Rows a second of shuffled training batches from a `split_binary` data set larger than the memory allowed.

    python benchmarks/read_split_binary.py [--rows 15000000] [--memory-budget 256MB] [--scratch FOLDER]

The data are made up in Criteo's published types: a label (bool), 13 numbers (float16) and 26 ids in the narrowest
integers of the cardinalities at a frequency limit of 15. Three ways through the same bytes, one after another in one
process: a plain sequential read of the files, what disk or page cache gives; the columns read and checked in order;
and `Loader`, streamed and shuffled.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from recspec.base import machine
from recspec.data.storage import BLOCK_ROWS, SplitWriter, open_split
from recspec.feature_spec import Feature, FeatureSpec
from recspec.loading.loader import Loader

ROOT = Path(__file__).parents[1]
CARDINALITIES = [
    7_912_889,
    33_823,
    17_139,
    7_339,
    20_046,
    4,
    7_105,
    1_382,
    63,
    5_554_114,
    582_469,
    245_828,
    11,
    2_209,
    10_667,
    104,
    4,
    968,
    15,
    8_165_896,
    2_675_940,
    7_156_453,
    302_516,
    12_022,
    97,
    35,
]
"""Ids of each table at T = 15, as published."""


def main() -> None:
    """Make the data set, read it in three ways, print and write JSON."""
    arguments = _arguments()
    budget = machine.parse_bytes(arguments.memory_budget)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        spec = made_up(Path(scratch), arguments.rows)
        files = sorted(path for path in Path(scratch).rglob("*.bin"))
        size = sum(path.stat().st_size for path in files)
        print(f"{size / 1e6:,.0f} MB in {len(files)} files, read with {budget / 1e6:,.0f} MB")
        loader = Loader(spec, "train", batch_size=arguments.batch_size, memory_budget=budget)
        assert loader.mode == "stream", "the data set fits the budget"
        ways: dict[str, Callable[[], int]] = {
            "sequential read": lambda: sum(_bytes_of(path) for path in files),
            "columns in order": lambda: sum(
                len(columns["label"]) for columns in open_split(spec, "train").batches(BLOCK_ROWS)
            ),
            "shuffled batches": lambda: sum(share.num_rows for share in loader.batches()),
        }
        results = {name: _measured(name, read, arguments.rows, size) for name, read in ways.items()}
    report = {
        "what": "shuffled training batches from split_binary larger than the memory budget, beside a plain read",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "rows": arguments.rows,
        "batch_size": arguments.batch_size,
        "megabytes": round(size / 1e6, 1),
        "memory_budget_megabytes": round(budget / 1e6),
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {arguments.out}")


def made_up(folder: Path, num_rows: int) -> FeatureSpec:
    """A train split of random rows."""
    numbers, ids = [f"num_{i}" for i in range(13)], [f"cat_{i}.bin" for i in range(len(CARDINALITIES))]
    features = {
        "label": Feature(dtype="bool"),
        **{name: Feature(dtype="float16") for name in numbers},
        **{name: Feature(dtype=_narrowest(c), cardinality=c) for name, c in zip(ids, CARDINALITIES, strict=True)},
    }
    random = np.random.default_rng(0)
    block = min(num_rows, 4 * BLOCK_ROWS)  # made once and repeated: what the values are does not change how fast
    columns = {
        "label": random.random(block) < 0.03,
        **{name: random.normal(2, 1, block).astype(np.float16) for name in numbers},
        **{n: random.integers(0, c, block).astype(_narrowest(c)) for n, c in zip(ids, CARDINALITIES, strict=True)},
    }
    with SplitWriter(folder, "train", features, "split_binary", label="label") as writer:
        for start in range(0, num_rows, block):
            writer.write({name: column[: num_rows - start] for name, column in columns.items()})
    channels = {"numerical": numbers, "categorical": ids, "label": ["label"]}
    plain = {name: feature.model_dump(exclude_none=True) for name, feature in features.items()}
    return FeatureSpec.from_dict({"feature_spec": plain, "channel_spec": channels}, folder).replace(
        sources={"train": writer.chunks}
    )


def _narrowest(cardinality: int) -> Any:
    return next(dtype for dtype in ("int8", "int16", "int32") if cardinality - 1 <= np.iinfo(dtype).max)


def _bytes_of(path: Path) -> int:
    read, room = 0, bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(room):
            read += count
    return read


def _measured(name: str, read: Callable[[], int], rows: int, size: int) -> dict[str, Any]:
    started, cpu = time.perf_counter(), time.process_time()
    done = read()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert done in (rows, size), f"{name} read {done}"
    speed = f"{rows / seconds:12,.0f} rows/s  {size / seconds / 1e6:8,.0f} MB/s"
    print(f"{name:18} {seconds:7.1f} s  {cpu:7.1f} CPU s  {speed}", flush=True)
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "rows_per_second": round(rows / seconds),
        "megabytes_per_second": round(size / seconds / 1e6, 1),
        "load_when_it_ended": round(os.getloadavg()[0], 2),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--batch-size", type=int, default=65_536)
    parser.add_argument("--memory-budget", default="256MB")
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the data set")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "read_split_binary.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
