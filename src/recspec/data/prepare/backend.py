"""The protocol of a backend, which reads raw files and runs Ibis expressions: DuckDB on this machine, or Spark.

Raw files are staged as Parquet in a temporary folder with the column `ROW`, the row's place in the file, which settles
ties. No step holds a whole table in this process's memory. Patterns and partitions in file names are switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import pyarrow as pa
from ibis.expr.types import Table

from recspec.data.prepare.text_files import JsonFile, TextFile

Watch = Callable[[float], None]
T = TypeVar("T")
X = TypeVar("X")


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a staged table, which one process reads in order."""

    batches: Callable[[int], Iterator[pa.RecordBatch]]  # its rows, at most so many at a time
    num_columns: int
    first_row: int  # the number of rows in earlier parts
    folder: Path  # an empty folder for results, on the file system of the prepared folder; the engine removes it
    memory_limit: int | None  # of the process, in bytes
    done: Callable[[int], None]  # receives numbers of rows that were dealt with


@dataclass(frozen=True)
class Share(Generic[X]):
    """An item that one process or thread deals with."""

    item: X
    folder: Path  # as of a part
    done: Callable[[int], None]


class Backend(Protocol):
    """Runs Ibis expressions; a context manager that closes itself."""

    name: str
    memory_limit: int | None  # of the whole process, in bytes
    distributed: bool  # whether executors do the work, in processes that may be of other machines

    def read_text(self, file: TextFile, into: Path | None = None, watch: Watch | None = None) -> Table:
        """Stage a delimited text file, with the column `ROW`. Raises DataError, naming malformed lines.

        `into` is a file that outlives the engine, for `read_parquet` with `row`; it appears once it is complete.
        `watch` receives the share of the file read so far, if known, and may raise to stop.
        """

    def read_json(self, file: JsonFile, into: Path | None = None) -> Table:
        """Stage a file of JSON lines, as `read_text` does; DuckDB reads it for Spark."""

    def read_parquet(self, paths: Sequence[Path], *, row: bool = False) -> Table:
        """Parquet files as one table, with the column `ROW` if `row`."""

    def stage(self, table: Table, into: Path | None = None) -> Table:
        """Run the table once and keep it in the temporary folder, or in `into`, in the expression's order.

        `batches` of the returned table keep that order; an expression built on it has none until it is sorted again.
        """

    def stage_by(self, table: Table, key: str, order: Sequence[str]) -> Table:
        """Stage a table, sorted by `key` and `order`; one part holds all rows of a key."""

    def each_part(self, table: Table, make: Callable[[Part], T], done: Callable[[int], None]) -> Iterator[T]:
        """Call `make` with each part of a table, and yield what it returns, in the order of the parts.

        On DuckDB, the table is one part, and this process makes the call. On Spark, the executors make the calls, so
        `make` and its results are sent between processes, and a lost call is made again with another folder. A table
        that is not staged has no order there. `done` receives the numbers of rows that were dealt with.
        """

    def each_share(
        self, items: Sequence[X], make: Callable[[Share[X]], T], done: Callable[[int], None], *, at_once: int = 1
    ) -> list[T]:
        """Call `make` with each item, on Spark's executors or in threads, and return the results in the same order.

        `done` receives the numbers of rows that were dealt with. In this process, at most `at_once` calls run together.
        """

    def call(self, make: Callable[[], T]) -> T:
        """Call `make` where `each_part` makes its calls."""

    def batches(self, table: Table, rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a sorted or staged table in order, at most `rows` at a time."""

    def close(self) -> None:
        """End the engine's session and remove its temporary files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
