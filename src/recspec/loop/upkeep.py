"""What a journal holds, whether it is whole, and the removal of what is too old."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from recspec.base.errors import DataError
from recspec.loop import journal as tables
from recspec.loop.events import EARLIEST_US, IMPRESSION, LATEST_US
from recspec.loop.journal import Journal, consumer, daily, event, exposure, now_us

DAY_US = 86_400_000_000
PRUNED_AT_ONCE = 10_000
"""Rows of a transaction, so that a server beside it does not wait for long."""
MOST_PROBLEMS = 20
"""Problems of a kind that a message names."""


def day_text(number: int) -> str:
    """The date of a day since 1970."""
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()


# --- what it holds ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JournalSummary:
    """What a journal holds."""

    url: str
    """Without a password."""
    newest_seq: int
    newest_received_at: int | None
    """Microseconds since 1970."""
    rows: Mapping[str, int]
    """Table -> rows."""
    days: Sequence[tuple[str, str, int]]
    """Day of receipt in UTC, type, and number of events; the newest day first."""
    pruned: int
    """Events of which only the daily numbers are left."""
    consumers: Mapping[str, int]
    """Consumer -> the newest event that it has read."""
    size_bytes: int


def summarize(journal: Journal) -> JournalSummary:
    """Count what a journal holds."""
    day = sa.cast(event.c.received_at // DAY_US, sa.BigInteger)
    asked = sa.select(day, event.c.type, sa.func.count()).group_by(day, event.c.type)
    rows_of_days = map(tuple, journal.rows(asked.order_by(day.desc(), event.c.type)))
    days = [(day_text(number), kind, count) for number, kind, count in rows_of_days]
    rows = {"event": sum(count for _, _, count in days)}
    for name in ("exposure", "experiment", "assignment", "version", "deletion"):
        rows[name] = int(journal.scalar(sa.select(sa.func.count()).select_from(tables.metadata.tables[name])))
    return JournalSummary(
        journal.shown,
        journal.newest_seq(),
        journal.newest_received_at(),
        rows,
        days,
        int(journal.scalar(sa.select(sa.func.coalesce(sa.func.sum(daily.c.events), 0)))),
        consumers_of(journal),
        _size(journal),
    )


def consumers_of(journal: Journal) -> dict[str, int]:
    """Consumer -> the newest event that it has read."""
    rows = journal.rows(sa.select(consumer.c.name, consumer.c.seq).order_by(consumer.c.name))
    return {each.name: each.seq for each in rows}


def _size(journal: Journal) -> int:
    """Bytes of the tables and their indexes, and of a write-ahead log of SQLite."""
    if journal.is_sqlite:
        file = str(journal.url.database)
        return sum(each.stat().st_size for each in (Path(file), Path(f"{file}-wal")) if each.exists())
    sizes = (sa.select(sa.func.pg_total_relation_size(name)) for name in tables.metadata.tables)
    return sum(int(journal.scalar(each)) for each in sizes)


# --- whether it is whole ----------------------------------------------------------------------------------------------


@dataclass
class Checked:
    """What a whole journal was found to hold."""

    events: int = 0
    exposures: int = 0
    unknown_requests: int = 0
    """Events that name an answer which the journal does not hold, such as one that was pruned."""


class _Problems:
    """Problems by kind, of which the first are named."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def add(self, what: str, place: str) -> None:
        """Add a problem at a place."""
        self.found.setdefault(what, []).append(place)

    def texts(self) -> list[str]:
        """A line for each kind."""
        lines = []
        for what, places in self.found.items():
            more = f" and {len(places) - MOST_PROBLEMS:,} more" if len(places) > MOST_PROBLEMS else ""
            lines.append(f"{what}: {', '.join(places[:MOST_PROBLEMS])}{more}")
        return lines


def verify_journal(journal: Journal) -> Checked:
    """Check a journal: the file, every row, and what the rows say of each other.

    Raises:
        DataError: names every problem.
    """
    checked, problems = Checked(), _Problems()
    if journal.is_sqlite:
        for (text,) in journal.rows(sa.text("PRAGMA integrity_check(20)")):
            if text != "ok":
                problems.add("the file is damaged", text)
    highest = _highest_seq(journal)
    for block in journal.events():
        checked.events += block.num_rows
        _check_events(journal, block.to_pylist(), problems)
    for block in journal.exposures():
        checked.exposures += block.num_rows
        for row in block.to_pylist():
            for problem in _exposure_problems(row, highest):
                problems.add(problem, f"exposure {row['seq']}")
    for table, column in ((event, event.c.event_id), (exposure, exposure.c.request_id)):
        twice = sa.select(column).group_by(column).having(sa.func.count() > 1)
        for (name,) in journal.rows(twice.limit(MOST_PROBLEMS)):
            problems.add(f"{table.name}: two rows have the id", repr(name))
    for name, seq in consumers_of(journal).items():
        if seq > highest:  # as after a restored backup; it would miss events
            problems.add(f"a consumer is ahead of the events ({highest})", f"{name} ({seq})")
    if problems.found:
        raise DataError.of(journal.shown, problems.texts())
    asked = sa.select(sa.func.count()).where(event.c.request_id.is_not(None))
    held = sa.exists().where(exposure.c.request_id == event.c.request_id)
    checked.unknown_requests = int(journal.scalar(asked.where(~held)))
    return checked


def _highest_seq(journal: Journal) -> int:
    """The highest number that was given to an event, which may have been removed."""
    if journal.is_sqlite:
        text = "SELECT max(seq) FROM sqlite_sequence WHERE name = 'event'"
    else:
        text = "SELECT pg_sequence_last_value(pg_get_serial_sequence('event', 'seq')::regclass)"
    ((found,),) = journal.rows(sa.text(text))
    return found or 0


def _check_events(journal: Journal, rows: Sequence[Mapping[str, Any]], problems: _Problems) -> None:
    forgotten = journal.forgotten_among(row["subject"] for row in rows)
    for row in rows:
        place = f"event {row['seq']}"
        if not all(EARLIEST_US <= row[name] <= LATEST_US for name in ("occurred_at", "received_at")):
            problems.add("the time is out of range", place)
        if not row["type"] or not row["subject"] or (row["item"] is None and row["type"] != IMPRESSION):
            problems.add("the user, type or item is missing", place)
        if row["context"] is not None and not isinstance(_parsed(row["context"]), dict):
            problems.add("the context is no JSON object", place)
        if row["subject"] in forgotten:
            problems.add("the user was forgotten", place)


def _exposure_problems(row: Mapping[str, Any], highest: int) -> list[str]:
    """What is wrong with an answer."""
    items, policy = _parsed(row["items"]), _parsed(row["policy"])
    chances = None if row["propensities"] is None else _parsed(row["propensities"])
    found = []
    if not isinstance(items, list) or not all(isinstance(each, str) for each in items):
        found.append("items are no list of texts")
    elif chances is not None and not (
        isinstance(chances, list)
        and len(chances) == len(items)
        and all(isinstance(each, float | int) and 0 < each <= 1 for each in chances)
    ):
        found.append("propensities are no chance for each item")
    if not isinstance(policy, dict):
        found.append("the policy is no JSON object")
    if row["history_seq"] > highest:
        found.append(f"history_seq is ahead of the events ({highest})")
    return found


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- what is too old --------------------------------------------------------------------------------------------------


@dataclass
class Pruned:
    """What was removed."""

    events: int = 0
    exposures: int = 0
    unread: int = 0
    """Old events that stay because a consumer has not read them."""


def prune_journal(journal: Journal, *, exposures_days: int | None = None, events_days: int | None = None) -> Pruned:
    """Remove answers and events of days that are too old; of events the daily numbers stay, in the table `daily`.

    Whole days in UTC are removed, by receipt. An event that a consumer has not read stays.

    Args:
        exposures_days: Days before today of which answers stay; None for all.
        events_days: Days before today of which events stay; None for all.
    """
    done = Pruned()
    if exposures_days is not None:
        old = exposure.c.served_at < _first(exposures_days)
        done.exposures = _remove(journal, exposure, old)
    if events_days is not None:
        old = event.c.received_at < _first(events_days)
        read = journal.scalar(sa.select(sa.func.min(consumer.c.seq)))
        if read is not None:
            unread = sa.and_(old, event.c.seq > read)
            done.unread = int(journal.scalar(sa.select(sa.func.count()).select_from(event).where(unread)))
            old = sa.and_(old, event.c.seq <= read)
        done.events = _remove(journal, event, old)
    return done


def _first(days: int) -> int:
    """The first microsecond of the day so many days before today; 1970 at the earliest."""
    return max(0, now_us() // DAY_US - days) * DAY_US


def _remove(journal: Journal, table: sa.Table, old: sa.ColumnElement[bool]) -> int:
    """Remove rows, some at a time, each time with their daily numbers."""
    removed = 0
    while True:
        chosen = sa.select(table.c.seq).where(old).order_by(table.c.seq).limit(PRUNED_AT_ONCE)
        seqs = [each.seq for each in journal.rows(chosen)]
        if not seqs:
            return removed
        these = sa.and_(old, table.c.seq >= seqs[0], table.c.seq <= seqs[-1])

        def change(connection: sa.Connection, these: sa.ColumnElement[bool] = these) -> None:
            if table is event:
                _keep_daily(journal, connection, these)
            connection.execute(sa.delete(table).where(these))

        journal.write(change)
        removed += len(seqs)


def _keep_daily(journal: Journal, connection: sa.Connection, these: sa.ColumnElement[bool]) -> None:
    day = sa.cast(event.c.received_at // DAY_US, sa.BigInteger)
    value = sa.func.coalesce(sa.func.sum(event.c.value), 0.0)
    asked = sa.select(day, event.c.type, sa.func.count(), value).where(these).group_by(day, event.c.type)
    for number, kind, count, total in connection.execute(asked).all():
        insert = journal.upsert(daily).values(day=day_text(number), type=kind, events=count, value=total)
        added = {"events": daily.c.events + count, "value": daily.c.value + total}
        connection.execute(insert.on_conflict_do_update(index_elements=["day", "type"], set_=added))
