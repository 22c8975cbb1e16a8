"""A Spark session: local, or the cluster that the environment variable SPARK_MASTER names."""

from __future__ import annotations

import operator
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.operations import UnboundTable
from ibis.expr.types import Table

from recspec.base.errors import DataError, RecspecError, require_extra
from recspec.base.files import is_gzip
from recspec.base.spark_session import first_cause, is_of_spark, start_session, without_pandas_warning
from recspec.data.prepare.backend import (
    WATCH_SECONDS,
    Backend,
    Part,
    Share,
    T,
    Watch,
    X,
    bounded,
    fetch,
    nanosecond_columns,
    quoted,
    schema_of,
    without_missing,
)
from recspec.data.prepare.duckdb_backend import DuckDBBackend
from recspec.data.prepare.names import ROW
from recspec.data.prepare.text_files import ColumnType, JsonFile, TextFile, explained, file_columns, readable

SPARK_TYPES: Mapping[ColumnType, str] = {"int64": "BIGINT", "float64": "DOUBLE", "string": "STRING"}
SPARK_LOCAL = (
    "spark.driver.bindAddress",
    "spark.driver.host",
    "spark.driver.memory",
    "spark.local.dir",
    "spark.ui.enabled",
    "spark.sql.shuffle.partitions",
)
"""Settings for a session on this machine only."""
SPARK_ENCODINGS = {"utf-8": "UTF-8", "latin-1": "ISO-8859-1"}
SPARK_READ = {"recursiveFileLookup": "true", "__globPaths__": "false"}
"""Without these options, a folder named `a=1` adds a column `a`, and `*` in a path matches other files."""


class SparkBackend(Backend):
    """A Spark session with its temporary folder.

    Spark reads parts of a table in any order, so a row's place comes from the metadata of its part. A URI names each
    file, because plain paths are of Spark's default file system, through a link, because Spark skips `_a.csv`.
    One class because every method needs the session and its staged tables.
    """

    name = "spark"
    distributed = True

    def __init__(self, folder: Path, memory_limit: int | None, threads: int | None) -> None:
        require_extra("pyspark.sql", "spark")
        self.memory_limit = memory_limit
        folder.mkdir(parents=True)
        self._folder = folder.absolute()
        self._threads = threads
        self._links = TemporaryDirectory(prefix="recspec-")
        settings = {
            "spark.master": os.environ.get("SPARK_MASTER", f"local[{threads or '*'}]"),
            "spark.app.name": "recspec prepare",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.local.dir": str(self._spill()),
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.caseSensitive": "true",
            "spark.sql.shuffle.partitions": str(2 * (threads or os.cpu_count() or 1)),
            "spark.sql.legacy.parquet.nanosAsLong": "true",  # otherwise a file with such times is unreadable
            "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # as DuckDB writes them
            "spark.sql.csv.parser.columnPruning.enabled": "false",  # otherwise a bad value in an unread column passes
            "spark.sql.warehouse.dir": _uri(self._folder / "warehouse"),  # otherwise in the default file system
        }
        if memory_limit is not None:
            settings["spark.driver.memory"] = f"{max(memory_limit // 2**20, 512)}m"
        if "SPARK_MASTER" in os.environ:  # a cluster or spark-submit sets its own
            settings = {name: value for name, value in settings.items() if name not in SPARK_LOCAL}
        with without_pandas_warning():
            _ = ibis.pyspark  # the options of its dialect load pandas
        try:
            self._session = start_session(settings, "duckdb")
        except BaseException:
            self._links.cleanup()
            raise
        self._session.sparkContext.setLogLevel("ERROR")
        self._names = map("staged_{:04d}".format, count(1))
        self._staged: dict[str, Path] = {}  # the folder of each view that `stage` wrote
        self.files = {}

    def read_text(self, file: TextFile, into: Path | None = None, watch: Watch | None = None) -> Table:  # noqa: ARG002
        if file.multiline:
            return self._by_duckdb(lambda engine, target: engine.read_text(file, target), into)
        columns = file_columns(file)
        source = readable(file, self._folder / f"{next(self._names)}.txt")
        # Columns have generated names until the table is complete, because Spark adds columns of its own.
        plain = {name: f"column_{number}" for number, name in enumerate(columns)}
        frame = self._reader().csv(
            _uri(self._linked([source.path])),
            schema=", ".join(f"{plain[name]} {SPARK_TYPES[kind]}" for name, kind in columns.items()),
            sep=source.separator,
            header=file.header,
            encoding=SPARK_ENCODINGS[source.encoding],
            mode="FAILFAST",
            quote=file.quote,
            escape=file.escape if file.quote else "",
            nullValue="",
            emptyValue="",
        )
        target = self._folder / next(self._names)
        table = self._read(file, frame, [plain[name] for name in file.columns], target)
        if into is None:
            return table
        numbered = self.stage(table, into)
        shutil.rmtree(target)
        return numbered

    def read_json(self, file: JsonFile, into: Path | None = None) -> Table:
        return self._by_duckdb(lambda engine, target: engine.read_json(file, target), into)

    def _by_duckdb(self, read: Callable[[DuckDBBackend, Path], Table], into: Path | None) -> Table:
        """Stage a file with DuckDB, so that both engines understand its values alike."""
        target = into or self._folder / f"{next(self._names)}.parquet"
        with DuckDBBackend(self._folder / next(self._names), self.memory_limit, self._threads) as engine:
            read(engine, target)
        return self.read_parquet([target], row=True)

    def _read(self, file: TextFile, frame: Any, values: Sequence[str], target: Path) -> Table:
        """Stage a file's rows with their numbers.

        A task reads a block of the file from beginning to end, so Spark's own numbers are consecutive within a block
        and jump between blocks. Each jump is replaced by the number of rows in the blocks before.
        """
        staged = frame.selectExpr("_metadata.file_block_start", "monotonically_increasing_id()", *values)
        with (
            _errors_of_spark(lambda said: explained(file, said.split("\n")[0])),
            bounded(file.path, self._folder, self._session.sparkContext.cancelAllJobs),
        ):
            staged.toDF("block", "number", *_plain_names(values)).write.parquet(_uri(target))
        staged = self._reader().parquet(_uri(target))
        with _errors_of_spark(_step_failed):
            found = staged.groupBy("block").agg({"number": "min", "*": "count"}).orderBy("block").collect()
        before, starts = 0, []
        for block, first, size in ((row["block"], row["min(number)"], row["count(1)"]) for row in found):
            starts.append(f"({block}L, {before - first}L)")
            before += size
        numbered = _numbered(self._session, staged, starts or ["(0L, 0L)"], list(file.columns))
        return without_missing(self, file, self._view(numbered, {ROW: "int64", **file.columns}))

    def read_parquet(self, paths: Sequence[Path], *, row: bool = False, foreign: bool = False) -> Table:  # noqa: ARG002
        if paths[0].is_dir():  # staged by Spark, with `ROW` if it was read from text
            (folder,) = paths
            files = _parts(folder)
            staged = self._view(self._reader().parquet(_uri(folder)), schema_of(files[0], row=False))
            self.files[staged.get_name()] = files
            return staged
        where, advice = f"{paths[0]}: Spark can't read it", "use --engine duckdb"
        with _errors_of_spark(lambda said: DataError(f"{where} ({first_cause(said)}); {advice}")):
            frame = self._reader().parquet(_uri(self._linked(paths)))
        schema = schema_of(paths[0], row)
        nanos = dict(nanosecond_columns(paths[0]))
        if not row:
            return self._view(_frame_in_micros(frame, nanos), schema)
        counts = [pq.read_metadata(path).num_rows for path in paths]
        before = [stop - count for stop, count in zip(accumulate(counts), counts, strict=True)]
        starts = [f"('{_link_name(number, path)}', {before[number]}L)" for number, path in enumerate(paths)]
        where = frame.metadataColumn("_metadata")  # its name may also be a column of the file
        placed = frame.select(where["file_name"], where["row_index"], "*")
        placed = placed.toDF("file", "number", *_plain_names(frame.columns))
        return self._view(_frame_in_micros(_numbered(self._session, placed, starts, frame.columns), nanos), schema)

    def _view(self, frame: Any, schema: Mapping[str, Any]) -> Table:
        name = next(self._names)
        frame.createOrReplaceTempView(name)
        return ibis.table(schema, name=name)

    def stage(self, table: Table, into: Path | None = None) -> Table:
        target = self._write(table)
        return self._kept(target.replace(into) if into is not None else target)

    def _kept(self, folder: Path) -> Table:
        staged = self.read_parquet([folder])
        self._staged[staged.get_name()] = folder
        return staged

    def stage_by(self, table: Table, key: str, order: Sequence[str]) -> Table:
        return self._kept(self._write(table, [key, *order]))

    def each_part(self, table: Table, make: Callable[[Part], T], done: Callable[[int], None]) -> Iterator[T]:
        folder = self._folder / next(self._names)
        with self._written(table) as paths, _errors_of_spark(_step_failed):
            found = call_with_parts(self._session.sparkContext, make, paths, folder, self.memory_limit, done)
        yield from found

    def each_share(
        self,
        items: Sequence[X],
        make: Callable[[Share[X]], T],
        done: Callable[[int], None],
        *,
        at_once: int = 1,  # noqa: ARG002
    ) -> list[T]:
        with _errors_of_spark(_step_failed):
            return call_with_shares(self._session.sparkContext, make, items, self._folder / next(self._names), done)

    def call(self, make: Callable[[], T]) -> T:
        with _errors_of_spark(_step_failed):
            found: list[T] = call(self._session.sparkContext, operator.call, [make], lambda _: None)
        return found[0]

    def batches(self, table: Table, rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        with self._written(table) as paths:
            for path in paths:
                yield from pq.ParquetFile(path).iter_batches(rows)

    def row(self, table: Table) -> tuple[Any, ...]:
        return tuple(fetch(self, table).to_pylist()[0].values())

    def close(self) -> None:
        self._session.stop()
        self._links.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _written(self, table: Table) -> Iterator[list[Path]]:
        """The files of a table in the order of its rows; unless it is staged, they are there until the block ends."""
        held = self._staged.get(table.op().name) if isinstance(table.op(), UnboundTable) else None
        folder = self._write(table) if held is None else held
        try:
            yield _parts(folder)
        finally:
            if held is None:
                shutil.rmtree(folder)

    def _write(self, table: Table, by: Sequence[str] = ()) -> Path:
        """Write a table in its order, or sorted by columns, with all rows of the first one's values in one file."""
        target = self._folder / next(self._names)
        with _errors_of_spark(_step_failed):
            frame = self._session.sql(ibis.to_sql(table, dialect="pyspark"))
            if by:
                names = [quoted(name, "`") for name in by]
                frame = frame.repartitionByRange(names[0]).sortWithinPartitions(*names)
            frame.write.parquet(_uri(target))
        return target

    def _reader(self) -> Any:
        return self._session.read.options(**SPARK_READ)

    def _linked(self, paths: Sequence[Path]) -> Path:
        """A folder of links to files, with plain names that sort in the given order."""
        folder = self._folder / next(self._names)
        folder.mkdir()
        for number, path in enumerate(paths):
            (folder / _link_name(number, path)).symlink_to(path.absolute())
        return folder

    def _spill(self) -> Path:
        """The folder that Spark spills to, through a link without a comma: Spark splits the path at commas."""
        spill = self._folder / "spill"
        spill.mkdir()
        link = Path(self._links.name) / "spill"
        link.symlink_to(spill)
        return link


def _numbered(session: Any, placed: Any, starts: Sequence[str], names: Sequence[str]) -> Any:
    """A frame with `ROW` and the columns `names`, from rows with their place, number there and plain columns.

    `starts` are SQL pairs of a place and the number to add there.
    """
    place, number, *columns = placed.columns
    table = session.sql(f"SELECT * FROM VALUES {', '.join(starts)} AS starts(start, before)")
    joined = placed.join(table.hint("broadcast"), placed[place] == table["start"])
    named = [f"{column} AS {quoted(name, '`')}" for column, name in zip(columns, names, strict=True)]
    return joined.selectExpr(f"{number} + before AS {ROW}", *named)


def _frame_in_micros(frame: Any, nanos: Mapping[str, bool]) -> Any:
    """A frame whose columns of nanoseconds (True: with a zone) become Spark's times in microseconds."""
    if not nanos:
        return frame
    columns = []
    for name in frame.columns:
        value = quoted(name, "`")
        if name in nanos:
            micros = f"timestamp_micros(({value} - pmod({value}, 1000)) div 1000)"
            value = f"{micros if nanos[name] else f'CAST({micros} AS TIMESTAMP_NTZ)'} AS {value}"
        columns.append(value)
    return frame.selectExpr(*columns)


def _plain_names(columns: Sequence[str]) -> list[str]:
    return [f"column_{number}" for number in range(len(columns))]


def _uri(path: Path) -> str:
    """A URI that Spark takes literally, `%20` included, in the local file system; it takes no relative one."""
    return f"file://{path.absolute()}"


def _link_name(number: int, path: Path) -> str:
    """The suffix tells Spark whether a file is compressed."""
    return f"{number:06d}{'.gz' if is_gzip(path) else '.file'}"


def _parts(folder: Path) -> list[Path]:
    """The files of a table that Spark wrote, in the order of its rows: one per partition, numbered by name."""
    return sorted(folder.glob("part-*.parquet"), key=lambda path: (len(path.name.split("-")[1]), path.name))


@contextmanager
def _errors_of_spark(ours: Callable[[str], DataError]) -> Iterator[None]:
    """Turn an error of Spark into the one that `ours` makes of its message."""
    try:
        yield
    except Exception as error:
        if is_of_spark(error):
            raise ours(str(error)) from error
        raise


def _step_failed(said: str) -> DataError:
    return DataError(f"Spark could not finish a step: {first_cause(said)}")


@dataclass(frozen=True)
class _File:
    """A file of a staged table, which is a part of it."""

    path: Path
    first_row: int
    num_columns: int


def call_with_parts(
    context: Any,
    make: Callable[[Part], T],
    paths: Sequence[Path],
    folder: Path,
    memory_limit: int | None,
    done: Callable[[int], None],
) -> list[T]:
    """Call `make` with each file of a staged table that has rows; see `Backend.each_part`."""
    held = [pq.read_metadata(path) for path in paths]
    ends = [0, *accumulate(each.num_rows for each in held)]
    files = [
        _File(path, start, each.num_columns)
        for path, each, (start, stop) in zip(paths, held, pairwise(ends), strict=True)
        if stop > start
    ]
    told = 0

    def tell(share: float) -> None:
        nonlocal told
        done(round(share * ends[-1]) - told)
        told = round(share * ends[-1])

    shared = context.broadcast(make)  # once to each machine; it may hold large vocabularies
    found: list[T] = call(context, partial(_made, shared, folder, memory_limit), files, tell)
    shared.destroy()
    return found


def call_with_shares(
    context: Any, make: Callable[[Share[X]], T], items: Sequence[X], folder: Path, done: Callable[[int], None]
) -> list[T]:
    """Call `make` with each item; see `Backend.each_share`."""
    results = call(context, partial(_counted, make, folder), items, lambda _: done(0))
    for _, rows in results:
        done(rows)
    return [found for found, _ in results]


def call(context: Any, make: Callable[[Any], T], items: Sequence[Any], told: Callable[[float], None]) -> list[T]:
    """Call `make` with each item; `told` receives the share of the calls that have ended.

    Raises:
        RecspecError: what a call found wrong.
        Exception: of Spark, if it gives up.
    """
    job = context.parallelize(items, max(1, len(items))).map(partial(_result, make))
    tracker = context.statusTracker()
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(job.collect)
        try:
            while not wait([collected], WATCH_SECONDS).done:
                for stage in filter(None, map(tracker.getStageInfo, tracker.getActiveStageIds())):
                    told(stage.numCompletedTasks / stage.numTasks)
        except BaseException:
            context.cancelAllJobs()
            raise
        found: list[T] = []
        for result in collected.result():
            if isinstance(result, RecspecError):
                raise result
            found.append(result)
    told(1)
    return found


def _result(make: Callable[[Any], T], item: object) -> T | RecspecError:
    """What a call returns, or its error if another attempt would raise it too."""
    try:
        return make(item)
    except RecspecError as error:
        return error


def _made(shared: Any, folder: Path, memory_limit: int | None, file: _File) -> Any:
    with pq.ParquetFile(file.path) as rows:
        own = _own(folder)
        return shared.value(Part(rows.iter_batches, file.num_columns, file.first_row, own, memory_limit, _ignore))


def _counted(make: Callable[[Share[X]], T], folder: Path, item: X) -> tuple[T, int]:
    """What a call returns, and the rows that it dealt with."""
    rows = list[int]()
    return make(Share(item, _own(folder), rows.append)), sum(rows)


def _own(folder: Path) -> Path:
    """A folder for one attempt, so that one that Spark took for lost disturbs no other."""
    own = folder / uuid4().hex
    own.mkdir(parents=True)
    return own


def _ignore(rows: int) -> None:
    """The driver tells how many rows are done."""
