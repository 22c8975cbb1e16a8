"""Users and items come and go in an update: new ones wait for some events, and those without events for long retire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import ibis
from ibis.expr.types import Table

from recspec.base.config import duration_in
from recspec.base.errors import DataError, how_many
from recspec.data.encoding import Encoders
from recspec.data.prepare import ITEM, ROW, SPLIT_BEFORE, USER, count_rows, fetch, figure
from recspec.datasets.table_features import Tables

WORDS = {USER: "user", ITEM: "item"}


def waiting(tables: Tables, admit_after: int) -> tuple[Table | None, list[str]]:
    """The rows of new users and items with fewer than `admit_after` events, and notes on these; None without any.

    An event of a known user with an item that waits, waits too.
    """
    rows, parts, notes = tables.rows, [], []
    for name, column in _columns(tables) if admit_after > 1 else ():
        counted = rows.group_by(_id=rows[column]).aggregate(_events=rows.count(), _known=rows[SPLIT_BEFORE].count())
        few = tables.backend.stage(counted.filter((counted["_events"] < admit_after) & (counted["_known"] == 0)))
        if count := count_rows(tables.backend, few):
            parts.append(rows.semi_join(few, rows[column] == few["_id"]).select(ROW))
            notes.append(f"{how_many(count, f'new {WORDS[name]}')} with fewer than {admit_after:,} events wait")
    return (tables.backend.stage(ibis.union(*parts, distinct=True)) if parts else None), notes


def retire(
    tables: Tables, before: Encoders, after: str, dated: bool, most: float
) -> tuple[Tables, Encoders, list[str]]:
    """Tables without the users and items of which no event is younger than `after`, counted back from the newest one.

    Their ids in the encoders are blank then, and stay theirs. Also returns notes.

    Raises:
        DataError: if these are a larger share of the users or items than `most`, as after an event of the far future.
    """
    time, backend, notes = tables.time, tables.backend, list[str]()
    if time is None:
        return tables, before, ["nothing was retired: the dataset has no times"]
    newest = figure(backend, tables.rows, tables.rows[time].max())
    limit = float(newest) - duration_in(after, "retire_after", dated=dated)
    vocabularies, rows, sides = dict(before.vocabularies), tables.rows, {USER: tables.users, ITEM: tables.items}
    for name, column in _columns(tables):
        last = tables.rows.group_by(_id=tables.rows[column]).aggregate(_last=tables.rows[time].max())
        old = backend.stage(last.filter(last["_last"] < limit).select("_id"))
        gone, of = fetch(backend, old).column("_id"), count_rows(backend, last)
        if len(gone) > most * of:
            raise DataError(
                f"retire_after={after} would retire {len(gone):,} of {how_many(of, WORDS[name])}, more than a share of "
                f"{most:g}: the newest time of an event is {_shown(newest, dated)}; if it is right, "
                "--set retire_most=1 retires them"
            )
        if not len(gone):
            continue
        rows = rows.anti_join(old, rows[column] == old["_id"])
        side = sides[name]
        if side is not None:
            sides[name] = backend.stage(side.anti_join(old, side[column].cast("string") == old["_id"].cast("string")))
        if name in vocabularies:
            ids = vocabularies[name].encode(gone)
            vocabularies[name] = vocabularies[name].blanked(ids[ids > 0])
        notes.append(f"{how_many(len(gone), WORDS[name])} without an event for {after} retired")
    if not notes:
        return tables, before, []
    left = backend.stage(rows)
    dropped = count_rows(backend, tables.rows) - count_rows(backend, left)
    tables = replace(tables, rows=left, users=sides[USER], items=sides[ITEM])
    return (
        tables,
        replace(before, vocabularies=vocabularies),
        [*notes, f"{how_many(dropped, 'event')} of theirs are gone"],
    )


def _shown(time: float, dated: bool) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}" if dated else f"{time:g}"


def _columns(tables: Tables) -> Iterator[tuple[str, str]]:
    """The id features that the dataset has, and their columns in raw rows."""
    for name, column in ((USER, tables.settings.user), (ITEM, tables.settings.item)):
        if column is not None:
            yield name, column
