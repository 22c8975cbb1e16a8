"""Rows a second and peak memory of `recspec prepare criteo` on made-up raw files, and again killed and resumed.

    python benchmarks/prepare_criteo.py [--rows 5000000] [--memory-limit 2GB] [--engine duckdb] [--scratch FOLDER]
                                        [--turns 3]

The raw file is made first, outside the clock. Each preparation is a process of its own; its peak is the most memory
that process ever held resident (what the kernel counted for it), which is what the limit is about. Beside it stands
what DuckDB takes in plain SQL for the same ids and logarithms: text into Parquet, counts, joins, Parquet again, without
a check, a split or a shuffle. Both take turns; `times plain SQL` is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from _preparing import ROOT, counted, options, prepare_command
from _side_by_side import write
from recspec.base import machine


def main() -> None:
    """Make a raw file, prepare it in three ways, print what it took, write JSON."""
    arguments = _arguments()
    if arguments.plain_sql:
        raw, folder = arguments.plain_sql
        plain_sql(raw, folder, arguments.memory_limit)
        return
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        report = compare(Path(scratch), arguments)
    write(report, arguments.out)


def compare(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements of a run."""
    sys.path.insert(0, str(ROOT))  # this file may be run from anywhere
    from tests import made_up_criteo

    raw = scratch / "train.txt"
    started = time.perf_counter()
    made_up_criteo.write(raw, num_rows=arguments.rows, seed=arguments.seed)
    print(f"{raw.stat().st_size / 1e6:,.0f} MB of raw rows made in {time.perf_counter() - started:.1f} s")
    command = prepare_command("criteo", raw, scratch / "out", arguments)
    sql = [sys.executable, __file__, "--memory-limit", arguments.memory_limit, "--plain-sql", str(raw), str(scratch)]
    turns = [_turn(command, sql, arguments.rows, scratch) for _ in range(arguments.turns)]
    results = dict(min(turns, key=lambda each: each["whole"]["seconds"]))
    killed = prepare_command("criteo", raw, scratch / "again", arguments)
    results["killed"] = _shown("killed half-way", _measured(killed, after=_half(scratch / "again")))
    results["resumed"] = _shown("resumed", _measured(killed))
    same = _same(scratch / "out", scratch / "again")
    print(f"resumed gives the same bytes: {same}")
    ratios = [each["whole"]["seconds"] / each["plain SQL"]["seconds"] for each in turns]
    print(f"times plain SQL: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    return {
        "what": "prepare criteo: raw text to a prepared dataset",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "engine": arguments.engine,
        "memory_limit_megabytes": round(machine.parse_bytes(arguments.memory_limit) / 1e6),
        "seed": arguments.seed,
        "rows": arguments.rows,
        "raw_megabytes": round(raw.stat().st_size / 1e6, 1),
        "vocabulary_values": sum(pq.read_metadata(path).num_rows for path in (scratch / "out/vocabularies").iterdir()),
        "prepared_megabytes": round(sum(path.stat().st_size for path in _files(scratch / "out")) / 1e6, 1),
        "resumed_gives_the_same_bytes": same,
        "seconds_of_turns": {name: [each[name]["seconds"] for each in turns] for name in ("whole", "plain SQL")},
        "times_plain_sql": round(statistics.median(ratios), 3),
        "results": results,
    }


def _turn(command: Sequence[str], sql: Sequence[str], rows: int, scratch: Path) -> dict[str, Any]:
    """A whole preparation and the plain SQL, one after the other; the prepared dataset stays."""
    shutil.rmtree(scratch / "out", ignore_errors=True)
    whole = _shown("whole", _measured(command, rows))
    return {"whole": whole, "plain SQL": _shown("plain SQL", _measured(sql, rows))}


def _half(out: Path) -> Path:
    """What is there once rows are read and all vocabularies found: about half of the work."""
    return out.with_name(f".{out.name}.unfinished.tmp") / "work" / "vocabularies" / "C26.parquet"


def _measured(command: Sequence[str], rows: int | None = None, *, after: Path | None = None) -> dict[str, Any]:
    """Run a command over so many rows, in a process of its own, killed once the file `after` is there."""
    took = counted(command, after=after)
    return {**took, **({} if rows is None else {"rows_per_second": round(rows / took["seconds"])})}


def _shown(name: str, result: dict[str, Any]) -> dict[str, Any]:
    speed = f"{result['rows_per_second']:9,} rows/s" if "rows_per_second" in result else ""
    took = f"{result['seconds']:7.1f} s  {result['cpu_seconds']:7.1f} CPU s  {result['peak_megabytes']:6,} MB"
    print(f"{name:16} {took}  {speed}", flush=True)
    return result


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "prepare.json")


def _same(first: Path, second: Path) -> bool:
    pairs = [[path.relative_to(folder) for path in _files(folder)] for folder in (first, second)]
    return pairs[0] == pairs[1] and all(
        (first / path).read_bytes() == (second / path).read_bytes() for path in pairs[0]
    )


def plain_sql(raw: str, folder: str, memory_limit: str) -> None:
    """The same ids and logarithms by DuckDB, written the short way."""
    import duckdb

    connection = duckdb.connect(config={"memory_limit": memory_limit, "temp_directory": f"{folder}/spill"})
    numbers, categories = [f"I{number}" for number in range(1, 14)], [f"C{number}" for number in range(1, 27)]
    types = ", ".join(
        f"'{name}': '{'VARCHAR' if name in categories else 'BIGINT'}'" for name in ("label", *numbers, *categories)
    )
    scan = f"read_csv('{raw}', delim='\t', header=false, quote='', escape='', columns={{{types}}}, auto_detect=false)"
    connection.execute(f"COPY (SELECT * FROM {scan}) TO '{folder}/raw.parquet' (COMPRESSION lz4)")
    for name in categories:
        connection.execute(
            f"CREATE TABLE ids_{name} AS SELECT {name} AS value, "
            f"row_number() OVER (ORDER BY count(*) DESC, {name}) AS id "
            f"FROM '{folder}/raw.parquet' WHERE {name} IS NOT NULL GROUP BY {name} HAVING count(*) >= 15"
        )
    logarithms = ", ".join(f"CASE WHEN {name} > -3 THEN ln({name} + 3) ELSE 0 END::FLOAT AS {name}" for name in numbers)
    ids = ", ".join(f"coalesce(ids_{name}.id, 0)::INTEGER AS {name}" for name in categories)
    joins = " ".join(f"LEFT JOIN ids_{name} ON rows.{name} = ids_{name}.value" for name in categories)
    connection.execute(
        f"COPY (SELECT label, {logarithms}, {ids} FROM '{folder}/raw.parquet' AS rows {joins}) "
        f"TO '{folder}/encoded.parquet' (COMPRESSION zstd)"
    )


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, __file__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--turns", type=int, default=1, help="whole preparations and runs of the plain SQL, in turns")
    parser.add_argument("--plain-sql", nargs=2, metavar=("RAW", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
