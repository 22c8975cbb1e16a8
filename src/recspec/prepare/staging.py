"""Staged Parquet files: their names, bounds and schemas, for both backends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import Table

from recspec.encoding import decoded_type
from recspec.errors import listed
from recspec.files import is_gzip, most_unpacked, too_much
from recspec.prepare.backend import Backend
from recspec.prepare.names import ROW
from recspec.prepare.tables import count_rows
from recspec.prepare.text_files import JsonFile, TextFile, explained

WATCH_SECONDS = 0.5


@contextmanager
def bounded(path: Path, folder: Path, stop: Callable[[], None]) -> Iterator[None]:
    """Stop staging a gzipped file, with an error, once `folder` exceeds the size to which such a file may unpack."""
    if not is_gzip(path):
        yield
        return
    most, ended, exceeded = most_unpacked(path.stat().st_size) + _size(folder), threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_SECONDS):
            if _size(folder) > most:
                exceeded.set()
                stop()
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    except Exception:
        if exceeded.is_set():
            raise too_much(path) from None
        raise
    finally:
        ended.set()
        watching.join()
    if exceeded.is_set() or _size(folder) > most:
        raise too_much(path)


def _size(folder: Path) -> int:
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed in the meantime
                found += (Path(parent) / name).lstat().st_size
    return found


def without_missing(backend: Backend, file: TextFile | JsonFile, table: Table) -> Table:
    """The table, after a check that no required value is missing."""
    if file.required:
        missing = table.filter(ibis.or_(*(table[name].isnull() for name in file.required)))
        if count_rows(backend, missing):
            raise explained(file, f"a value is missing in {listed(file.required)}")
    return table


def schema_of(path: Path, row: bool) -> dict[str, Any]:
    """Column names and Ibis types of a Parquet file, as engines read it."""
    fields = []
    for name, kind in _kinds(path):
        fields.append(pa.field(name, pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else kind))
    schema = ibis.Schema.from_pyarrow(pa.schema(fields))
    return {ROW: "int64", **schema} if row else dict(schema)


def nanosecond_columns(path: Path) -> list[tuple[str, bool]]:
    """Columns of nanoseconds, which engines read as microseconds, and whether they have a zone."""
    times = ((name, kind) for name, kind in _kinds(path) if pa.types.is_timestamp(kind) and kind.unit == "ns")
    return [(name, kind.tz is not None) for name, kind in times]


def _kinds(path: Path) -> list[tuple[str, pa.DataType]]:
    schema = pq.read_schema(path)
    return [(name, decoded_type(kind)) for name, kind in zip(schema.names, schema.types, strict=True)]


def quoted(name: str, mark: str = "'") -> str:
    """A text in SQL quotes."""
    return f"{mark}{name.replace(mark, mark + mark)}{mark}"
