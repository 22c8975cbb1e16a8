"""One row an event from data with one row a user, and columns from objects inside of columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ibis.expr.datatypes import DataType
from ibis.expr.types import Table

from recspec.base.errors import DataError, how_many, listed, shortened
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.column_roles import column_of
from recspec.data.prepare.known_layouts import LineLayout, Row, TextLayout
from recspec.data.prepare.names import ROW, Notes
from recspec.data.prepare.tables import fetch
from recspec.data.prepare.text_files import ColumnType, TextFile, lines_of


def keys_of(structure: object) -> tuple[bool, list[str]]:
    """Whether a structure is a list, and the keys of its objects whose values are no lists or objects."""
    is_list = isinstance(structure, list)
    inner = structure[0] if isinstance(structure, list) and structure else structure
    return is_list, [key for key, kind in inner.items() if isinstance(kind, str)] if isinstance(inner, dict) else []


def fields_of(kind: DataType) -> tuple[bool, list[str]]:
    """`keys_of` for a column of structs in Parquet."""
    is_list = kind.is_array()
    inner = kind.value_type if is_list else kind
    return is_list, [key for key, each in inner.fields.items() if not each.is_nested()] if inner.is_struct() else []


def inside(keys: Mapping[str, tuple[bool, Sequence[str]]], asked: Collection[str]) -> dict[str, tuple[str, str]]:
    """The columns inside of objects that settings name, and all others of these objects: {column: (key, inner key)}."""
    found: dict[str, tuple[str, str]] = {}
    for name, (_, inner) in keys.items():
        columns = {f"{name}.{key}": (name, key) for key in inner if f"{name}.{key}" not in keys}
        found |= columns if {*asked} & {*columns} else {}
    return found


def check_items(keys: Mapping[str, tuple[bool, Sequence[str]]], item: str | None, where: str) -> None:
    """Refuse objects as items. Raises DataError, which names the setting for the key of their id."""
    items = item if item in keys else column_of("item", keys)
    is_inside = any((item or "").startswith(f"{name}.") for name in keys)
    if items is None and not is_inside and column_of("label", keys) is None:
        items = next((name for name, (_, inner) in keys.items() if column_of("item", inner)), None)
    if items is None or not keys[items][1] or is_inside:
        return
    is_list, inner = keys[items]
    likely = column_of("item", inner) or next((key for key in inner if key == "id"), inner[0])
    raise DataError(
        f"{where}: column '{shortened(items)}' holds {'lists of ' if is_list else ''}objects with "
        f"{listed(inner)}; expected ids; name the key of the item's id, such as --set "
        f"'item={items}.{likely}'"
    )


BLOCK_EVENTS = 100_000
BLOCK_USERS = 8_192


@dataclass(frozen=True)
class LineFile:
    """A text file whose lines become rows by a layout of their own."""

    file: TextFile
    layout: TextLayout
    columns: Mapping[str, ColumnType]

    @property
    def path(self) -> Path:
        return self.file.path

    def rows(self) -> Iterator[Row]:
        assert self.layout.lines is not None
        return self.layout.lines.rows(self.file, self.columns)


def _events(file: TextFile, columns: Mapping[str, ColumnType]) -> Iterator[Row]:  # noqa: ARG001
    """User and item of every event of a file of sequences."""
    for number, line in lines_of(file):
        if line.strip():
            user, *items = line.split() if file.separator == " " else map(str.strip, line.split(file.separator))
            yield from ((number, (user, item)) for item in items)


def read_lines(backend: Backend, part: LineFile, notes: Notes, target: Path) -> Table:
    """Stage the rows of a file that is read line by line."""
    kinds = {name: pa.list_(pa.string()) if kind == "list" else pa.string() for name, kind in part.columns.items()}
    schema = pa.schema([*kinds.items()])
    rows = part.rows()
    with pq.ParquetWriter(target, schema) as writer:
        while block := [values for _, values in islice(rows, BLOCK_EVENTS)]:
            arrays = [
                pa.array(values, kind) for values, kind in zip(zip(*block, strict=True), kinds.values(), strict=True)
            ]
            writer.write_table(pa.table(arrays, schema=schema))
    if part.layout.sequences:
        mark = None if part.file.separator == " " else part.file.separator
        if alone := sum(bool(line.strip()) and len(line.split(mark)) < 2 for _, line in lines_of(part.file)):
            notes.dropped.append(f"{alone:,} users of {part.path.name}: their line holds no item")
    return backend.read_parquet([target], row=True)


SEQUENCES = TextLayout(" ", False, (), quote="", lines=LineLayout(lambda _: {}, _events), sequences=True)
"""A user, then the user's items."""


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
    rows = events = empty = 0
    for batch in backend.batches(table.order_by(ROW), BLOCK_USERS):
        lists = batch.column(batch.schema.get_field_index(items))
        parents = pc.list_parent_indices(lists)
        empty += batch.num_rows - len(pc.unique(parents))
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
    if empty:
        notes.dropped.append(f"{how_many(empty, 'row')} whose '{items}' holds no item")
    notes.inferred.append(
        f"'{items}' holds lists, so each of {rows:,} rows is a sequence of items, oldest first: {events:,} events"
        + (f"; {listed(along[1:])} hold a value for each of them" if along[1:] else "")
    )
    return backend.read_parquet([target], row=True)
