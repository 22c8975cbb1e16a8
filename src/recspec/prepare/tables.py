"""Steps that datasets apply to tables, as Ibis expressions and as rows in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import ibis
import pyarrow as pa
from ibis.expr.types import Table

from recspec.prepare.backend import Backend


def fetch(backend: Backend, table: Table) -> pa.Table:
    """Load all rows of a small table, in the expression's order."""
    batches = list(backend.batches(table))
    return pa.Table.from_batches(batches) if batches else table.schema().to_pyarrow().empty_table()


BYTES_PER_VALUE = 1_500
"""Bytes of a memory limit per value of a block: a limit of 500 MB gives 55,555 rows of six columns."""


def blocks(backend: Backend, table: Table, rows: int) -> Iterator[pa.Table]:
    """Yield the rows of a table in the expression's order, about `rows` at a time; the last block is smaller.

    Under a memory limit, a block holds one value per `BYTES_PER_VALUE` of the limit. Encoding builds a hash table per
    block, so blocks should be larger than an engine's batches.
    """
    if backend.memory_limit is not None:
        rows = max(1, min(rows, backend.memory_limit // (BYTES_PER_VALUE * len(table.columns))))
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in backend.batches(table, min(rows, 65_536)):
        waiting.append(batch)
        count += batch.num_rows
        if count >= rows:
            yield pa.Table.from_batches(waiting)
            waiting, count = [], 0
    if count:
        yield pa.Table.from_batches(waiting)


def count_rows(backend: Backend, table: Table) -> int:
    """The number of rows of a table."""
    return int(fetch(backend, table.aggregate(rows=table.count())).column("rows")[0].as_py())


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
