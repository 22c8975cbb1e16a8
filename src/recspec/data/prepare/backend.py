"""The protocol of a backend, which reads raw files and runs Ibis expressions: DuckDB on this machine, or Spark.

Raw files are staged as Parquet in a temporary folder with the column `ROW`, the row's place in the file, which settles
ties. No step holds a whole table in this process's memory. Patterns and partitions in file names are switched off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copyfileobj
from typing import Any, Generic, Protocol, Self, TypeVar

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.operations import DropColumns, Project, Sort, UnboundTable
from ibis.expr.types import BooleanValue, Table, Value

from recspec.base.errors import listed
from recspec.base.files import is_gzip, most_unpacked, too_much, whole_file
from recspec.data.encoding import decoded_type
from recspec.data.prepare.names import NEW, ROW, SPLITS, WRITTEN
from recspec.data.prepare.text_files import JsonFile, TextFile, explained
from recspec.data.storage import SplitWriter
from recspec.feature_spec import SIGNALS, Chunk, Feature

Watch = Callable[[float], None]
T = TypeVar("T")
X = TypeVar("X")
K = TypeVar("K", bound=Hashable)
C = TypeVar("C", bound="Counted")
AGGREGATES_AT_ONCE = 200


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
    files: dict[str, Sequence[Path]]  # the Parquet files of each table that was read or staged, by the table's name

    def read_text(self, file: TextFile, into: Path | None = None, watch: Watch | None = None) -> Table:
        """Stage a delimited text file, with the column `ROW`. Raises DataError, naming malformed lines.

        `into` is a file that outlives the engine, for `read_parquet` with `row`; it appears once it is complete.
        `watch` receives the share of the file read so far, if known, and may raise to stop.
        """

    def read_json(self, file: JsonFile, into: Path | None = None) -> Table:
        """Stage a file of JSON lines, as `read_text` does; DuckDB reads it for Spark."""

    def read_parquet(self, paths: Sequence[Path], *, row: bool = False, foreign: bool = False) -> Table:
        """Parquet files as one table, with the column `ROW` if `row`.

        Files that others may have written, as those with `row` are, are `foreign`: where reading them fails, the error
        names the damaged one.
        """

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

    def row(self, table: Table) -> tuple[Any, ...]:
        """The values of a table of one row."""

    def close(self) -> None:
        """End the engine's session and remove its temporary files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def fetch(backend: Backend, table: Table) -> pa.Table:
    """Load all rows of a small table, in the expression's order."""
    batches = list(backend.batches(table))
    return pa.Table.from_batches(batches) if batches else table.schema().to_pyarrow().empty_table()


def figures(backend: Backend, table: Table, asked: Mapping[K, Value]) -> dict[K, Any]:
    """Aggregates of a table by name, many in a query: planning one of thousands takes minutes."""
    names, found = list(asked), dict[K, Any]()
    for start in range(0, len(names), AGGREGATES_AT_ONCE):
        some = names[start : start + AGGREGATES_AT_ONCE]
        row = backend.row(table.aggregate(**{f"_{place}": asked[name] for place, name in enumerate(some)}))
        found |= zip(some, row, strict=True)
    return found


def figure(backend: Backend, table: Table, asked: Value) -> Any:
    """One aggregate of a table."""
    return figures(backend, table, {"": asked})[""]


def count_where(backend: Backend, table: Table, tests: Mapping[K, BooleanValue]) -> dict[K, int]:
    """The number of rows for which each test is true."""
    found = figures(backend, table, {name: test.cast("int64").sum() for name, test in tests.items()})
    return {name: int(count or 0) for name, count in found.items()}


def count_rows(backend: Backend, table: Table) -> int:
    """The number of rows of a table; of a staged one, its files tell it."""
    plain = table.op()
    while isinstance(plain, (Project, DropColumns, Sort)):
        plain = plain.parent
    files = backend.files.get(plain.name) if isinstance(plain, UnboundTable) else None
    if files is not None:
        return sum(pq.read_metadata(file).num_rows for file in files)
    return int(figure(backend, table, table.count()))


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


USERS_PER_GROUP = 16_384  # in a row group


class UserFile:
    """Writes the catalogue of users in row groups of equal size, so that blocks do not show in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._waiting: pa.Table | None = None

    def write(self, table: pa.Table) -> None:
        self._waiting = table if self._waiting is None else pa.concat_tables([self._waiting, table])
        self._flush(USERS_PER_GROUP)

    def close(self) -> None:
        self._flush(1)
        if self._writer is not None:
            self._writer.close()

    def _flush(self, least: int) -> None:
        """Write row groups while at least `least` users wait."""
        while self._waiting is not None and self._waiting.num_rows >= least:
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, self._waiting.schema)
            self._writer.write_table(self._waiting.slice(0, USERS_PER_GROUP).combine_chunks())
            self._waiting = self._waiting.slice(USERS_PER_GROUP)


USERS_FILE = "users.parquet"


@dataclass(frozen=True)
class PartFiles:
    """The files of a part: a chunk for each split with rows, and a catalogue of users if rows have histories."""

    folder: Path
    chunks: Mapping[str, tuple[Chunk, ...]]

    @classmethod
    def of(cls, folder: Path, writers: Mapping[str, SplitWriter]) -> PartFiles:
        """From writers that are closed."""
        return cls(folder, {name: writer.chunks for name, writer in writers.items() if writer.num_rows})


@contextmanager
def part_writers(
    folder: Path, features: Mapping[str, Mapping[str, Feature]]
) -> Iterator[tuple[Mapping[str, SplitWriter], UserFile]]:
    """Writers of a part's splits, whose features are given, and of its users."""
    with ExitStack() as stack:
        splits = {name: stack.enter_context(SplitWriter(folder, name, own)) for name, own in features.items()}
        yield splits, stack.enter_context(closing(UserFile(folder / USERS_FILE)))


def gather(backend: Backend, folder: Path, parts: Sequence[PartFiles]) -> dict[str, tuple[Chunk, ...]]:
    """Move the files of all parts into a folder; the chunks of a split are those of a part, its new rows last.

    Parquet files stay apart. Files of other formats, of which a chunk has one, are joined in the order of the parts.
    """
    chunks: dict[str, tuple[Chunk, ...]] = {}
    joins: list[tuple[Sequence[Path], Path]] = []
    for split in (*WRITTEN, *SIGNALS, *(f"{split}{NEW}" for split in SPLITS)):
        own = [part for part in parts if part.chunks.get(split)]
        if not own:
            continue
        (folder / split).mkdir()
        found = []
        for number, chunk in enumerate(own[0].chunks[split]):
            paths = [part.folder / name for part in own for name in part.chunks[split][number].files]
            names = chunk.files
            if chunk.type == "parquet":
                names = tuple(f"{split}/part-{place:05d}.parquet" for place in range(len(paths)))
            if len(names) == len(paths):
                for path, name in zip(paths, names, strict=True):
                    path.replace(folder / name)
            else:
                joins.append((paths, folder / names[0]))
            found.append(chunk.model_copy(update={"files": names}))
        chunks[split] = tuple(found)
    if joins:
        backend.each_share(joins, _joined, lambda _: None)
    users = [path for part in parts if (path := part.folder / USERS_FILE).exists()]
    if len(users) == 1:
        users[0].replace(folder / USERS_FILE)
    elif users:
        backend.call(partial(_join, users, folder / USERS_FILE))
    return {
        split: _with_new(chunks.get(split, ()), chunks.get(f"{split}{NEW}", ()))
        for split in (*WRITTEN, *SIGNALS)
        if split in chunks or f"{split}{NEW}" in chunks
    }


class Counted(Protocol):
    """What is counted while parts are written."""

    @property
    def rows(self) -> Mapping[str, int]: ...  # by split

    @property
    def new(self) -> Mapping[str, int]: ...  # those that a dataset before did not hold in their split

    def add(self, other: Self) -> None: ...


def write_parts(
    backend: Backend,
    folder: Path,
    rows: Table,
    num_rows: int,
    write: Callable[[Part], tuple[PartFiles, C]],
    counts: C,
    first_new: dict[str, int] | None,
    progress: Callable[[str, int, int | None], None],
) -> dict[str, tuple[Chunk, ...]]:
    """Have each part of the rows written, and gather the files; `counts` receives what is counted in all parts.

    `first_new` receives the number of the first row of each split that a dataset before did not hold there.
    """
    parts: list[PartFiles] = []
    done = 0

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        progress("writing splits", done, num_rows)

    for files, own in backend.each_part(rows, write, report):
        parts.append(files)
        counts.add(own)
    if first_new is not None:
        first_new.update({split: counts.rows[split] - counts.new[split] for split in SPLITS})
    return gather(backend, folder, parts)


def _with_new(held: tuple[Chunk, ...], new: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """The chunks of a split with the files of its new rows after the others."""
    if not held or not new:
        return held or new
    return tuple(one.model_copy(update={"files": (*one.files, *two.files)}) for one, two in zip(held, new, strict=True))


def _joined(share: Share[tuple[Sequence[Path], Path]]) -> None:
    """Write the bytes of files, one after the other, as one."""
    paths, target = share.item
    with whole_file(target) as temporary, temporary.open("wb") as file:
        for path in paths:
            with path.open("rb") as source:
                copyfileobj(source, file, 1 << 20)


def _join(paths: Sequence[Path], target: Path) -> None:
    with whole_file(target) as temporary, closing(UserFile(temporary)) as users:
        for path in paths:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    users.write(file.read_row_group(group))
