"""Events from files into a journal, and a journal as Parquet files by day."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sqlalchemy as sa

from recspec.base.errors import DataError, SettingsError, listed, nearest, unknown
from recspec.base.files import mkdir_or_undo, whole_folder
from recspec.data.encoding import row_at
from recspec.loop.events import FIELDS, read_events
from recspec.loop.journal import NEWEST, REFUSALS, Journal, event, exposure, fields_of, now_us
from recspec.loop.upkeep import DAY_US, day_text

TimeUnit = Literal["s", "ms", "us"]
PER_SECOND: Mapping[TimeUnit, int] = {"s": 1, "ms": 1_000, "us": 1_000_000}
AT_ONCE = 1_000
"""Events of a transaction, so that a server beside it waits for less than a tenth of a second."""
MOST_SHOWN = 20
"""Refused rows that are named."""
NAMES = {"subject": "user", "event_id": "id", "occurred_at": "time", "request_id": "request"}
"""Columns of the journal -> their names in files, as in `POST /events`."""
TIMES = ("occurred_at", "received_at", "served_at")
LISTS = {"items": pa.list_(pa.string()), "propensities": pa.list_(pa.float64())}
OTHERWISE = {"type": ", or give all events one with --type", "time": "; without it, rows need an id"}
"""What else may be done about a column that is not there."""
_NUMBER = re.compile(r"[+-]?\d{1,20}(\.\d{0,20})?([eE][+-]?\d{1,3})?")


# --- into the journal -------------------------------------------------------------------------------------------------


@dataclass
class ImportedEvents:
    """What became of the rows of files."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("accepted", "duplicate", "refused"), 0))
    refusals: list[str] = field(default_factory=list)
    """The first refused rows, with file, row and reason."""
    left_out: list[str] = field(default_factory=list)
    """Columns that were not read."""

    def refuse(self, place: str, reason: str) -> None:
        """Count a row, and name it if it is among the first."""
        self.counts["refused"] += 1
        if len(self.refusals) < MOST_SHOWN:
            self.refusals.append(f"{place}: {reason}")


def import_events(
    journal: Journal,
    files: Sequence[Path],
    columns: Mapping[str, str],
    *,
    kind: str | None = None,
    context: Sequence[str] = (),
    time_unit: TimeUnit = "s",
    progress: Callable[[str, float, float | None], None] = lambda *_: None,
) -> ImportedEvents:
    """Store the rows of csv, jsonl and parquet files as events, in their order; rows that are stored already stay so.

    Args:
        columns: Field of an event -> column, where the file has another name for it.
        kind: Type of all events.
        context: Columns that are stored as the events' context.

    Raises:
        SettingsError: if a file lacks a column.
        DataError: if a file can't be read, no row of any is an event, or the database refuses.
    """
    if strange := [each for each in columns if each not in FIELDS]:
        raise SettingsError(f"columns: {unknown('field', strange, FIELDS)}")
    from recspec.inference import read_rows  # loads torch

    found = ImportedEvents()
    for path in files:
        number = 0
        for table in read_rows(path):
            names = _names(path, table.column_names, columns, kind, context)
            found.left_out += [each for each in table.column_names if each not in (*names.values(), *found.left_out)]
            values = {name: _values(table.column(name)) for name in {*names.values()}}
            given = (dict(zip(values, each, strict=True)) for each in zip(*values.values(), strict=True))
            rows = [_event_of(row, names, kind, time_unit) for row in given]
            for start in range(0, len(rows), AT_ONCE):
                _store(journal, rows[start : start + AT_ONCE], path, number + start, found)
            number += len(rows)
            progress(f"{path.name}: {number:,} rows", number, None)
    if found.refusals and not (found.counts["accepted"] or found.counts["duplicate"]):
        raise DataError.of(f"no event among {found.counts['refused']:,} rows", found.refusals)
    return found


def _names(
    path: Path, there: Sequence[str], columns: Mapping[str, str], kind: str | None, context: Sequence[str]
) -> dict[str, str]:
    """Key of a sent event -> column of the file."""
    named = {each: columns.get(each, each) for each in FIELDS} | {each: each for each in context}
    has = {key: name for key, name in named.items() if name in there}
    problems = [
        f"no column '{named[key]}'{nearest(named[key], there)}" for key in (*columns, *context) if key not in has
    ]
    needed = ("user", *(() if kind else ("type",)), *(() if "id" in has else ("time",)))
    problems += [
        f"no column '{key}'; name the one that holds it, such as --column {key}=NAME{OTHERWISE.get(key, '')}"
        for key in needed
        if key not in has and key not in columns
    ]
    SettingsError.refuse(f"{path}: has {listed(there)}", problems)
    return has


def _event_of(row: Mapping[str, Any], names: Mapping[str, str], kind: str | None, unit: TimeUnit) -> dict[str, Any]:
    """A row as it would be sent; texts of a CSV file become numbers where these are meant."""
    sent = {key: row[name] for key, name in names.items() if row[name] is not None}
    if kind is not None:
        sent["type"] = kind
    if isinstance(of_export := sent.get("context"), str) and of_export.startswith("{"):
        with suppress(ValueError, RecursionError):
            sent = {**json.loads(of_export), **{key: value for key, value in sent.items() if key != "context"}}
    for key, value in sent.items():
        if isinstance(value, Decimal):  # as databases write whole numbers, ids among them
            sent[key] = int(value) if value == value.to_integral_value() else float(value)
        elif key in ("value", "position", "time") and isinstance(value, str) and _NUMBER.fullmatch(value):
            number = float(value)
            sent[key] = int(number) if key == "position" and number.is_integer() else number
    time = sent.get("time")
    if isinstance(time, (int, float)) and not isinstance(time, bool) and abs(time) <= NEWEST:
        sent["time"] = time / PER_SECOND[unit]
    elif isinstance(time, (str, date)):
        sent["time"] = _with_zone(time)
    return sent


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Plain values; a time that Python has no form for becomes a text that is refused later."""
    try:
        found: list[Any] = column.to_pylist()
        return found
    except (OverflowError, ValueError):
        return [_plain(each) for each in column]


def _plain(value: pa.Scalar[Any]) -> object:
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return f"{value.cast(pa.int64() if value.type.bit_width == 64 else pa.int32()).as_py()} ({value.type})"


def _with_zone(time: str | date) -> str:
    """A time in ISO 8601; one without a zone is of UTC. What is none is refused later."""
    try:
        moment = datetime.fromisoformat(time if isinstance(time, str) else time.isoformat())
    except ValueError:
        return str(time)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).isoformat()


def _store(journal: Journal, rows: Sequence[Mapping[str, Any]], path: Path, first: int, found: ImportedEvents) -> None:
    """Store rows; `first` is the number of those before them in the file."""
    read = read_events(rows, now_us())
    for each in read.refused:
        found.refuse(f"{path}: {row_at(first + each.index)}", each.reason)
    for index, outcome in zip(read.places, journal.store(read.events), strict=True):
        if outcome in found.counts:
            found.counts[outcome] += 1
        else:
            found.refuse(f"{path}: {row_at(first + index)}", REFUSALS[outcome])


# --- out of the journal -----------------------------------------------------------------------------------------------


def export_days(
    journal: Journal, out: Path, *, since: date | None = None, until: date | None = None
) -> dict[str, dict[str, int]]:
    """Write events by day of receipt and answers by day, in UTC, as Parquet; a day that is there is replaced.

    The files are `events/day=2026-11-28/part-0.parquet` and `exposures/day=2026-11-28/part-0.parquet`.

    Args:
        since: The first day.
        until: The day after the last one.

    Returns:
        For events and exposures, the rows of each day.
    """
    written: dict[str, dict[str, int]] = {}
    kinds = {"events": (event, event.c.received_at), "exposures": (exposure, exposure.c.served_at)}
    for name, (table, time) in kinds.items():
        counts = written[name] = dict[str, int]()
        for day, first, last in _days(journal, table, time, since, until):
            own = sa.and_(time >= day * DAY_US, time < (day + 1) * DAY_US)
            text = day_text(day)
            with mkdir_or_undo(out / name), whole_folder(out / name / f"day={text}") as folder:
                counts[text] = _write(journal.blocks(table, first - 1, last, own), fields_of(table), folder)
    return written


def _days(
    journal: Journal, table: sa.Table, time: sa.Column[Any], since: date | None, until: date | None
) -> list[tuple[int, int, int]]:
    """Days since 1970, with the first and last `seq` of each."""
    day = sa.cast(time // DAY_US, sa.BigInteger)
    asked = sa.select(day, sa.func.min(table.c.seq), sa.func.max(table.c.seq)).group_by(day).order_by(day)
    if since is not None:
        asked = asked.where(time >= _micros(since))
    if until is not None:
        asked = asked.where(time < _micros(until))
    return [cast("tuple[int, int, int]", tuple(each)) for each in journal.rows(asked)]


def _micros(day: date) -> int:
    return (day - date(1970, 1, 1)).days * DAY_US


def _write(blocks: Iterator[pa.RecordBatch], fields: pa.Schema, folder: Path) -> int:
    """Write a part, and return the number of its rows."""
    schema, rows = _shown(fields.empty_table()).schema, 0
    with pq.ParquetWriter(folder / "part-0.parquet", schema, compression="zstd") as writer:
        for block in blocks:
            writer.write_table(_shown(pa.Table.from_batches([block])).cast(schema))
            rows += block.num_rows
    return rows


def _shown(table: pa.Table) -> pa.Table:
    """Times as timestamps, and lists as lists, under the names of `POST /events`."""
    for place, name in enumerate(table.column_names):
        column = table[name]
        if name in TIMES:
            column = pc.cast(column, pa.timestamp("us", "UTC"))
        elif name in LISTS:
            column = pa.array([None if each is None else json.loads(each) for each in column.to_pylist()], LISTS[name])
        table = table.set_column(place, NAMES.get(name, name), column)
    return table
