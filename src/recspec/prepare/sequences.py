"""One row an event from data with one row a user: lines of a user and their items, or columns that hold lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ibis.expr.types import Table

from recspec.errors import listed
from recspec.prepare.backend import Backend
from recspec.prepare.column_roles import column_of
from recspec.prepare.names import ROW
from recspec.prepare.notes import Notes
from recspec.prepare.tables import fetch
from recspec.prepare.text_files import TextFile, lines_of

BLOCK_EVENTS = 100_000
BLOCK_USERS = 8_192


def events_of(file: TextFile, notes: Notes | None = None) -> Iterator[tuple[int, str, str]]:
    """Yield line, user and item of every event of a file of sequences; notes users without an item."""
    alone = 0
    for number, line in lines_of(file):
        if not line.strip():
            continue
        user, *items = line.split() if file.separator == " " else [part.strip() for part in line.split(file.separator)]
        alone += not items
        for item in items:
            yield number, user, item
    if alone and notes is not None:
        notes.dropped.append(f"{alone:,} users of {file.path.name}: their line holds no item")


def read_sequences(backend: Backend, file: TextFile, ids: Sequence[str], notes: Notes, target: Path) -> Table:
    """Stage the events of a file of sequences as rows with the columns `ids` (user, item)."""
    user, item = ids
    schema = pa.schema({user: pa.string(), item: pa.string()}.items())
    events = events_of(file, notes)
    with pq.ParquetWriter(target, schema) as writer:
        while block := list(islice(events, BLOCK_EVENTS)):
            _, users, items = zip(*block, strict=True)
            writer.write_table(pa.table([pa.array(users), pa.array(items)], schema=schema))
    return backend.read_parquet([target], row=True)


def sequence_column(table: Table, item: str | None) -> str | None:
    """The column whose lists hold the items of a row: the item's, if it holds lists."""
    lists = [name for name in table.columns if table[name].type().is_array()]
    if item is not None and item in table.columns:
        return item if item in lists else None
    likely = column_of("item", table.columns)
    return likely if likely in lists else None


def flattened(backend: Backend, table: Table, items: str, notes: Notes, target: Path) -> Table:
    """One row for each value of the lists `items`; lists of the same lengths in other columns are read along."""
    others = [name for name in table.columns if name != items and table[name].type().is_array()]
    lengths = {name: table[name].length().fill_null(0) for name in (items, *others)}
    same = {f"_{place}": (lengths[name] == lengths[items]).cast("int64").min() for place, name in enumerate(others)}
    found = fetch(backend, table.aggregate(**same)).to_pylist()[0] if same else {}
    along = [items, *(name for place, name in enumerate(others) if found[f"_{place}"])]
    with_names = [name for name in table.columns if name != ROW]
    writer: pq.ParquetWriter | None = None
    rows = events = 0
    for batch in backend.batches(table.order_by(ROW), BLOCK_USERS):
        lists = batch.column(batch.schema.get_field_index(items))
        parents = pc.list_parent_indices(lists)
        columns = {}
        for name in with_names:
            column = batch.column(batch.schema.get_field_index(name))
            columns[name] = pc.list_flatten(column) if name in along else column.take(parents)
        block = pa.table(columns)
        writer = writer or pq.ParquetWriter(target, block.schema)
        writer.write_table(block)
        rows, events = rows + batch.num_rows, events + block.num_rows
    if writer is None:
        return table
    writer.close()
    notes.inferred.append(
        f"'{items}' holds lists, so each of {rows:,} rows is a sequence of items, oldest first: {events:,} events"
        + (f"; {listed(along[1:])} hold a value for each of them" if along[1:] else "")
    )
    return backend.read_parquet([target], row=True)
