"""The protocol of a backend, which runs Ibis expressions on raw tables.

A dataset describes its tables once, as Ibis expressions. A backend reads raw files, runs the expressions and returns
the rows: DuckDB on this machine, or Spark. Raw files are staged as Parquet in a temporary folder with the column `ROW`,
the row's place in the file, which settles ties. No step holds a whole table in this process's memory. Backends take
file names literally: patterns and partitions in paths are switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

import pyarrow as pa
from ibis.expr.types import Table

from recspec.prepare.text_files import JsonFile, TextFile

Watch = Callable[[float], None]


class Backend(Protocol):
    """Runs Ibis expressions; a context manager that closes itself."""

    name: str
    memory_limit: int | None
    """For the whole process, in bytes; None if not set."""

    def read_text(self, file: TextFile, into: Path | None = None, watch: Watch | None = None) -> Table:
        """Stage a delimited text file, with the column `ROW`.

        Args:
            into: A file that outlives the engine, for `read_parquet`; it appears once it is complete.
            watch: Receives the share of the file read so far, if the engine knows it; may raise to stop.

        Raises:
            DataError: naming the lines with other columns or types than expected.
        """

    def read_json(self, file: JsonFile, into: Path | None = None) -> Table:
        """Stage a file of JSON lines, with the column `ROW`; DuckDB reads it for Spark.

        Args:
            into: As in `read_text`.

        Raises:
            DataError: naming the lines that are not JSON objects or hold values of another type.
        """

    def read_parquet(self, paths: Sequence[Path], *, row: bool = False) -> Table:
        """Parquet files as one table, with the column `ROW` if `row`."""

    def stage(self, table: Table, into: Path | None = None) -> Table:
        """Run the table once and keep it in the temporary folder, or in `into`, in the expression's order.

        `batches` of the returned table keep that order. An expression built on it, such as a filter or a join, has no
        order until it is sorted again, because Spark reads the parts of a table in any order.
        """

    def batches(self, table: Table, rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a sorted or staged table in order, at most `rows` at a time."""

    def close(self) -> None:
        """End the engine's session and remove its temporary files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
