"""Steps that datasets apply to tables, as Ibis expressions and as rows in memory."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import Table

from recspec.base.errors import DataError
from recspec.base.prefetch import prefetched
from recspec.data.encoding import Vocabulary
from recspec.data.prepare.backend import Backend, Part, count_rows, fetch, figures
from recspec.data.prepare.names import EVENT_WEIGHT, IS_TARGET, ITEM, ROW, TIMESTAMP, USER, Notes

SECONDS = (1e8, 1e10)  # timestamps in this range, March 1973 to November 2286, are shown as dates
BYTES_PER_VALUE = 1_500  # of a memory limit, per value of a block: 500 MB give 55,555 rows of six columns
WEIGHT_UNITS = 2**20  # of a weight, in which weights are added: whole numbers, so that their order does not matter
Repeats = Literal["keep", "first", "last", "sum"]


def blocks(backend: Backend, table: Table, rows: int) -> Generator[pa.Table]:
    """Yield the rows in the expression's order, about `rows` at a time; fewer under a memory limit.

    The engine makes a block while the one before is used, so it must not be asked anything else until the last one.
    """
    batches = partial(backend.batches, table)
    return prefetched(_blocks(batches, rows, len(table.columns), backend.memory_limit), 0)


def blocks_of_part(part: Part, rows: int) -> Generator[pa.Table]:
    """Yield the rows of a part, as `blocks` does."""
    return prefetched(_blocks(part.batches, rows, part.num_columns, part.memory_limit), 0)


def _blocks(
    batches: Callable[[int], Iterator[pa.RecordBatch]], rows: int, num_columns: int, memory_limit: int | None
) -> Generator[pa.Table]:
    if memory_limit is not None:
        rows = max(1, min(rows, memory_limit // (BYTES_PER_VALUE * num_columns)))
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches(min(rows, 65_536)):
        waiting.append(batch)
        count += batch.num_rows
        if count >= rows:
            yield pa.Table.from_batches(waiting)
            waiting, count = [], 0
    if count:
        yield pa.Table.from_batches(waiting)


def keep_earliest(table: Table, keys: Sequence[str], order: Sequence[str]) -> Table:
    """Keep the first row of each combination of `keys`; `order` must leave no tie."""
    place = ibis.row_number().over(ibis.window(group_by=list(keys), order_by=list(order)))
    return table.mutate(_place=place).filter(ibis._["_place"] == 0).drop("_place")


def at_least(table: Table, key: str, rows: int) -> Table:
    """Keep rows whose `key` occurs in at least `rows` rows."""
    counts = table.group_by(key).aggregate(_rows=table.count()).filter(ibis._["_rows"] >= rows)
    return table.semi_join(counts, key)


def left_join(table: Table, other: Table, *keys: str) -> Table:
    """All rows of a table with the other columns of `other`, joined by columns of the same names."""
    renamed = other.rename({f"_{key}": key for key in keys})
    joined = table.left_join(renamed, [table[key] == renamed[f"_{key}"] for key in keys])
    return joined.drop(*(f"_{key}" for key in keys))


def counts_by(table: Table, key: str) -> Table:
    """The distinct values of a column, sorted, with their number of `rows`; missing values are left out."""
    present = table.filter(table[key].notnull())
    return present.group_by(key).aggregate(rows=present.count()).order_by(key)


def time_range(backend: Backend, rows: Table) -> dict[str, object]:
    """First and last timestamp, as dates if they can be seconds since 1970."""
    times = rows[TIMESTAMP]
    found = figures(backend, rows, {"first": times.min(), "last": times.max()})
    if SECONDS[0] <= found["first"] and found["last"] <= SECONDS[1]:
        moments = {name: datetime.datetime.fromtimestamp(seconds, datetime.UTC) for name, seconds in found.items()}
        return {name: f"{moment.replace(tzinfo=None):%Y-%m-%d %H:%M:%S}" for name, moment in moments.items()}
    return {**found}


def is_dated(backend: Backend, rows: Table) -> bool:
    """Whether timestamps can be seconds since 1970."""
    return isinstance(time_range(backend, rows)["first"], str)


# --- interactions without repeats, nor users who have too few ---------------------------------------------------------


@dataclass(frozen=True)
class Cleaned:
    """Cleaned interactions, and the rows before each step."""

    rows: Table
    before: Table
    num_before: int
    distinct: Table
    num_distinct: int | None  # None if no user was left out, so that it equals the number kept
    min_interactions: int
    repeats: Repeats = "first"

    def summary(self, kept: int) -> dict[str, object]:
        """The numbers of dropped rows, given the number kept in the end."""
        distinct = self.num_distinct or kept
        return {"repeats_dropped": self.num_before - distinct, "of_users_with_too_few_dropped": distinct - kept}

    def note(self, backend: Backend, notes: Notes, kept: int) -> None:
        distinct = self.num_distinct or kept
        if self.num_before > distinct:
            left_out = first_left_out(backend, self.before, self.distinct)
            example = f"user '{left_out[USER]}' and item '{left_out[ITEM]}'"
            repeat, counts = ("an earlier", "earliest") if self.repeats == "first" else ("a later", "latest")
            summed = ", with the weights of all" if self.repeats == "sum" else ""
            notes.dropped.append(
                f"{self.num_before - distinct:,} of {self.num_before:,} rows repeat {repeat} one of "
                f"the same user and item, such as {example}; the {counts} counts{summed}"
            )
        if distinct > kept:
            left_out = first_left_out(backend, self.distinct, self.rows)
            notes.dropped.append(
                f"{distinct - kept:,} rows of users with fewer than {self.min_interactions:,} items, "
                f"such as user '{left_out[USER]}' (min_interactions)"
            )


def first_left_out(backend: Backend, rows: Table, kept: Table) -> Mapping[str, object]:
    """User and item of the first row of the file that is not kept."""
    left_out = rows.select(ROW, USER, ITEM).anti_join(kept.select(ROW), ROW)
    return dict(fetch(backend, left_out.order_by(ROW).limit(1)).to_pylist()[0])


def clean(
    backend: Backend, rows: Table, *, min_interactions: int, order: Sequence[str], repeats: Repeats = "first"
) -> Cleaned:
    """Remove repeats, then users with too few interactions.

    `repeats`: first keeps a user's earliest interaction with an item, last the latest, sum the latest with the weights
    of all, keep keeps all. Interactions that are predicted and others do not repeat each other.
    Raises DataError if there is no interaction, or no user has enough.
    """
    before = count_rows(backend, rows)
    if before == 0:
        raise DataError("the raw files hold no interaction, a header at most; expected one row at least")
    distinct, same = rows, [name for name in (USER, ITEM, IS_TARGET) if name in rows.columns]
    if repeats == "sum":
        units = ibis.greatest((rows[EVENT_WEIGHT] * WEIGHT_UNITS + 0.5).floor().cast("int64"), 1)
        summed = units.sum().over(ibis.window(group_by=same)).cast("float64") / WEIGHT_UNITS
        distinct = rows.mutate(**{EVENT_WEIGHT: summed})
    if repeats != "keep":
        distinct = keep_earliest(distinct, same, order if repeats == "first" else [ibis.desc(one) for one in order])
    if min_interactions <= 1:
        return Cleaned(distinct, rows, before, distinct, None, min_interactions, repeats)
    staged = backend.stage(distinct)  # it is read twice
    kept = at_least(staged, USER, min_interactions)
    if count_rows(backend, kept) == 0:
        raise DataError(f"no user has {min_interactions:,} items or more; set min_interactions lower")
    return Cleaned(kept, rows, before, staged, count_rows(backend, staged), min_interactions, repeats)


NUMBER = "__number__"  # column with the number of a row's user


def stage_by_number(backend: Backend, rows: Table, everyone: Vocabulary, order: Sequence[str], folder: Path) -> Table:
    """Rows sorted by the number of their user, so that the users of a dataset before keep their order."""
    file = folder / "work" / "numbers.parquet"
    pq.write_table(pa.table({USER: everyone.values}), file)
    numbers = backend.read_parquet([file], row=True)
    numbered = left_join(rows, numbers.select(USER, **{NUMBER: numbers[ROW]}), USER)
    return backend.stage_by(numbered, NUMBER, order)
