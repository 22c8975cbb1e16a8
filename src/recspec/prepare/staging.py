"""Staged Parquet files: what both backends need to name, bound and describe them."""

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

from recspec.errors import listed
from recspec.files import is_gzip, most_unpacked, too_much
from recspec.prepare.backend import Backend
from recspec.prepare.malformed import explained
from recspec.prepare.tables import count_rows
from recspec.prepare.text_files import ROW, JsonFile, TextFile

WATCH_SECONDS = 0.5


@contextmanager
def bounded(path: Path, folder: Path, stop: Callable[[], None]) -> Iterator[None]:
    """Stop staging a gzipped file once `folder` grows beyond the size that such a file may unpack to.

    The engine unpacks the file itself. Measuring its output avoids unpacking the file a second time.

    Raises:
        DataError: if the file is too large.
    """
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


def new_folder(folder: Path) -> Path:
    """Make a folder, which must not exist."""
    folder.mkdir(parents=True, exist_ok=False)
    return folder


def compression(path: Path) -> str:
    """The compression of a file, as engines name it."""
    return "gzip" if is_gzip(path) else "none"


def schema_of(path: Path, row: bool) -> dict[str, Any]:
    """Column names and Ibis types of a Parquet file, as engines read it."""
    plain = [pa.field(column.name, _plain_type(column.type)) for column in pq.read_schema(path)]
    schema = ibis.Schema.from_pyarrow(pa.schema(plain))
    return {ROW: "int64", **schema} if row else dict(schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    return pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else kind


def nanosecond_columns(path: Path) -> list[tuple[str, bool]]:
    """The columns of a Parquet file with times in nanoseconds, and whether they have a zone.

    Engines read them as microseconds, because they have few functions for nanoseconds or none.
    """
    kinds = ((column.name, column.type) for column in pq.read_schema(path))
    return [(name, kind.tz is not None) for name, kind in kinds if pa.types.is_timestamp(kind) and kind.unit == "ns"]


class Names:
    """Unique names for the views and staged files of a session."""

    def __init__(self) -> None:
        self._given = 0

    def next(self) -> str:
        self._given += 1
        return f"staged_{self._given:04d}"


def quoted(name: str, mark: str = "'") -> str:
    """A text in SQL quotes."""
    return f"{mark}{name.replace(mark, mark + mark)}{mark}"
