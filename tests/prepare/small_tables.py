"""Small files and tables, and their rows as Python objects."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recspec.data.prepare import PrepareContext
from recspec.data.prepare.backend import Backend, fetch
from recspec.data.prepare.names import Notes
from recspec.data.prepare.raw_files import stage
from recspec.data.prepare.raw_rows import Reading
from recspec.data.prepare.raw_table import Roles, typed
from recspec.data.prepare.text_files import ROW, TextFile

COLUMNS = {"user": "int64", "item": "string", "stars": "float64"}


def connect(
    engine: str = "duckdb", *, folder: Path, memory_limit: str | None = None, threads: int | None = None
) -> Backend:
    return PrepareContext(folder, folder, engine, memory_limit, threads).connect(folder)


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def rows(backend: Backend, file: TextFile) -> list[dict[str, object]]:
    return fetch(backend, backend.read_text(file).order_by(ROW)).to_pylist()


def table(backend: Backend, tmp_path: Path, **columns: list[object]) -> object:
    path = tmp_path / f"table{len(list(tmp_path.iterdir()))}.parquet"
    pq.write_table(pa.table(columns), path)
    return backend.read_parquet([path], row=True)


def read(
    path: Path, roles: Roles | None = None, engine: Backend | None = None, **reading: object
) -> tuple[list[dict[str, object]], Notes]:
    """The rows of a raw file, typed if `roles` are given, and the notes."""
    notes, work = Notes(), path.parent / "work"
    work.mkdir(exist_ok=True)
    with nullcontext(engine) if engine is not None else connect(folder=work / "tables", threads=1) as backend:
        rows = stage(backend, [path], ("user_id", "item_id"), Reading(**reading), notes, work)  # type: ignore[arg-type]
        found = typed(rows, roles) if roles is not None else rows.table
        return fetch(backend, found.order_by(ROW).drop(ROW)).to_pylist(), notes
