"""Raw tables as Ibis expressions, run by DuckDB on this machine or by Spark where it is asked for.

A dataset says what it does to its tables once, as Ibis expressions; a backend reads raw files, runs the expressions and
hands the rows back. What a backend reads is staged as Parquet in its own temporary folder, with the column `ROW`: the
rows' order in the raw file, which settles ties. No step holds a whole table in this process's memory. The name of a
file or folder never means anything to an engine: patterns and partitions in it are switched off.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Literal, Protocol, Self

import duckdb
import ibis
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.operations import UnboundTable
from ibis.expr.types import Table

from recspec.archives import LINE_BYTES, LineError, bounded_lines, is_gzip, most_unpacked, opened, too_much
from recspec.errors import DataError, RecspecError, SettingsError, listed, nearest, require_extra, unknown
from recspec.machine import parse_bytes

ENGINES = ("duckdb", "spark")
ColumnType = Literal["int64", "float64", "string", "list"]
"""A list holds texts; only JSON has such values."""

Watch = Callable[[float], None]

ROW = "__row__"
"""Name of the column that holds a row's place in its raw file. A file with a column of this name is refused."""

WATCH_SECONDS = 0.5

ROW_BYTES = 2 << 20
"""Of a line, or of the lines that one row takes, in a delimited file; see `LINE_BYTES`."""

PATTERN = re.compile(r"[*?\[\\]")
"""What makes a path a pattern to DuckDB; it has no way to take all of them as they are."""

ENGINE_ENCODINGS = ("utf-8", "latin-1")
"""Encodings that every engine reads."""

PROBLEMS_SHOWN = 10
"""Malformed lines named in one message; a wrong separator would name millions."""


@dataclass(frozen=True)
class TextFile:
    """How a delimited text file is laid out."""

    path: Path
    columns: Mapping[str, ColumnType]
    """The columns to read and their types; without a header, all of the file's columns in their order."""
    separator: str = ","
    header: bool = True
    encoding: str = "utf-8"
    """Any that Python knows. Other than UTF-8 and Latin-1, the file is copied as UTF-8 first."""
    quoted: bool = True
    """Whether a value may stand in double quotes; a doubled quote inside is one quote."""
    multiline: bool = False
    """Whether a quoted value may hold a line break; DuckDB reads such a file for Spark, which would need one task."""
    required: Sequence[str] = field(default=())
    """Columns in which no value may be missing."""


@dataclass(frozen=True)
class JsonFile:
    """A file of JSON objects, one a line; a line without anything is passed over."""

    path: Path
    columns: Mapping[str, ColumnType]
    """The keys to read and their types; an object may lack them and may have others. A value that is no text is read as
    its JSON text where text is asked for."""
    required: Sequence[str] = field(default=())
    """Keys without which no object may be."""


class Backend(Protocol):
    """Where Ibis expressions run."""

    name: str
    memory_limit: int | None
    """Bytes that the whole process is given, if it was said."""

    def read_text(self, file: TextFile, into: Path | None = None, watch: Watch | None = None) -> Table:
        """A delimited text file as a staged table, with the column `row`.

        Args:
            into: Where the table stays when the engine is closed, for `read_parquet`; there only once it is whole.
            watch: Told now and then what share of the file is read, by an engine that knows; may raise to end it.

        Raises:
            DataError: naming the lines that don't have the columns or types expected.
        """

    def read_json(self, file: JsonFile, into: Path | None = None) -> Table:
        """A file of JSON lines as a staged table, with the column `row`; DuckDB reads it for Spark.

        Args:
            into: As in `read_text`.

        Raises:
            DataError: naming the lines that are no JSON object, or whose values have another type.
        """

    def read_parquet(self, paths: Sequence[Path], *, row: bool = False) -> Table:
        """Parquet files as a table, with the column `row` if asked."""

    def stage(self, table: Table, into: Path | None = None) -> Table:
        """The table run once and kept in the temporary folder, or at a place of its own, in the expression's order.

        `batches` of the returned table itself have that order. An expression made from it, such as a filter or a join,
        has no order until it is sorted again: Spark reads the parts of a table in any order.
        """

    def batches(self, table: Table, rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        """The rows of a table in the order of its `order_by`, or of a staged one; at most `rows` at a time."""

    def close(self) -> None:
        """Ends the engine's session and removes its temporary files."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def connect(
    engine: str = "duckdb", *, folder: Path, memory_limit: str | None = None, threads: int | None = None
) -> Backend:
    """Start an engine that stages and spills inside `folder`, which it removes on `close`.

    Args:
        memory_limit: Such as `2GB`, for the whole process; 80 % of the machine's memory when not given.
        threads: All cores when not given.
    """
    limit = memory_limit and limit_bytes(memory_limit)
    if engine == "duckdb":
        return _DuckDB(folder, limit or None, threads)
    if engine == "spark":
        return _Spark(folder, limit or None, threads)
    raise SettingsError(f"--engine: {unknown('engine', engine, ENGINES)}")


def fetch(backend: Backend, table: Table) -> pa.Table:
    """All rows of a small table, in the expression's order."""
    batches = list(backend.batches(table))
    return pa.Table.from_batches(batches) if batches else table.schema().to_pyarrow().empty_table()


BYTES_PER_VALUE = 1_500
"""Share of a memory limit for each value of a block: a limit of 500 MB gives 55,555 rows of six columns."""


def blocks(backend: Backend, table: Table, rows: int) -> Iterator[pa.Table]:
    """The rows of a table in the expression's order, about `rows` at a time; the last block is smaller.

    Under a memory limit, a block has a value for every `BYTES_PER_VALUE` of the limit. Encoding builds a hash table for
    every block, so blocks should be larger than an engine's batches.
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
    """How many rows a table has."""
    return int(fetch(backend, table.aggregate(rows=table.count())).column("rows")[0].as_py())


def keep_earliest(table: Table, keys: Sequence[str], order: Sequence[str]) -> Table:
    """The first row of every combination of `keys`, in `order`, which must leave no tie."""
    place = ibis.row_number().over(ibis.window(group_by=list(keys), order_by=list(order)))
    return table.mutate(_place=place).filter(ibis._["_place"] == 0).drop("_place")


def at_least(table: Table, key: str, rows: int) -> Table:
    """Only rows whose `key` occurs in so many rows or more."""
    counts = table.group_by(key).aggregate(_rows=table.count()).filter(ibis._["_rows"] >= rows)
    return table.semi_join(counts, key)


def left_join(table: Table, other: Table, *keys: str) -> Table:
    """All rows of a table with the further columns of another, joined by columns of the same names."""
    renamed = other.rename({f"_{key}": key for key in keys})
    joined = table.left_join(renamed, [table[key] == renamed[f"_{key}"] for key in keys])
    return joined.drop(*(f"_{key}" for key in keys))


def counts_by(table: Table, key: str) -> Table:
    """Each value of a column once, sorted, with the `rows` that hold it; missing values are left out."""
    present = table.filter(table[key].notnull())
    return present.group_by(key).aggregate(rows=present.count()).order_by(key)


def limit_bytes(text: str) -> int:
    """A memory limit in bytes.

    Raises:
        SettingsError: if it is no size, or zero.
    """
    try:
        size = parse_bytes(text)
    except ValueError:
        size = 0
    if size <= 0:
        raise SettingsError(f"--memory-limit: '{text}' is not an amount of memory; expected such as '2GB' or '512MB'")
    return size


# --- DuckDB ----------------------------------------------------------------------------------------------------------

PROCESS_BYTES = 600_000_000
"""What Python, the libraries, the rows in flight and what DuckDB doesn't count take beside its own limit (measured: 250
to 400 MB for ratings, 550 MB for Outbrain's 31 columns)."""
BYTES_PER_THREAD = 125_000_000
"""Memory that one thread of DuckDB needs to sort out of core (its documentation's figure; two threads with 125 MB
between them fail on 10 million rows, one thread sorts them)."""

DUCKDB_TYPES: Mapping[ColumnType, str] = {
    "int64": "BIGINT", "float64": "DOUBLE", "string": "VARCHAR", "list": "VARCHAR[]"
}  # fmt: skip


class _DuckDB:
    """DuckDB inside this process, out of core when the memory limit is reached."""

    name = "duckdb"

    def __init__(self, folder: Path, memory_limit: int | None, threads: int | None) -> None:
        self._folder = _new_folder(folder)
        spill = self._folder / "spill"
        spill.mkdir()
        settings: dict[str, Any] = {"threads": threads or os.cpu_count() or 1, "temp_directory": str(spill)}
        self.memory_limit = memory_limit
        if memory_limit is not None:
            share = max(memory_limit - PROCESS_BYTES, memory_limit // 4)
            settings["memory_limit"] = f"{share // 1_000_000}MB"
            settings["threads"] = max(1, min(settings["threads"], share // BYTES_PER_THREAD))
        self._connection = duckdb.connect(config=settings)
        self._connection.execute("SET TimeZone = 'UTC'")  # else times with zones become times of this machine's zone
        self._names = _Names()
        self._aliases = TemporaryDirectory(prefix="recspec-")
        self._raw: list[Path] = []
        """Parquet files that are not ours."""

    def read_text(self, file: TextFile, into: Path | None = None, watch: Watch | None = None) -> Table:
        columns = file_columns(file)
        # Whole numbers come as text, for DuckDB would round 1.5 to 2 without a word.
        read_as = {name: "VARCHAR" if kind == "int64" else DUCKDB_TYPES[kind] for name, kind in columns.items()}
        types = ", ".join(f"{_quoted(name)}: '{kind}'" for name, kind in read_as.items())
        source = readable(file, self._folder / f"{self._names.next()}.txt")
        options = {
            "delim": _quoted(file.separator),
            "header": str(file.header).lower(),
            "quote": "'\"'" if file.quoted else "''",
            "escape": "'\"'" if file.quoted else "''",
            "encoding": _quoted(source.encoding),
            "compression": _quoted(_compression(source.path)),
            "max_line_size": str(ROW_BYTES),
            "columns": f"{{{types}}}",
            "auto_detect": "false",
            "nullstr": "''",
            "hive_partitioning": "false",
        }
        listing = ", ".join(f"{name}={value}" for name, value in options.items())
        selected = ", ".join(_selected(name, kind) for name, kind in file.columns.items())
        scan = f"read_csv({self._plain(source.path)}, {listing})"
        try:
            _check_last_line(source)
            return self._read(file, f"SELECT row_number() OVER () - 1 AS {ROW}, {selected} FROM {scan}", into, watch)
        finally:
            if source is not file:
                source.path.unlink(missing_ok=True)

    def read_json(self, file: JsonFile, into: Path | None = None) -> Table:
        check_names(file.path, list(file.columns))
        types = ", ".join(
            f"{_quoted(name)}: '{'VARCHAR[]' if kind == 'list' else 'VARCHAR'}'" for name, kind in file.columns.items()
        )
        options = f"{_json_options(file.path)}, records='true', columns={{{types}}}, hive_partitioning=false"
        scan = f"read_json({self._plain(file.path)}, {options})"
        selected = ", ".join(_selected(name, kind) for name, kind in file.columns.items())
        return self._read(file, f"SELECT row_number() OVER () - 1 AS {ROW}, {selected} FROM {scan}", into)

    def _read(
        self, file: TextFile | JsonFile, query: str, into: Path | None = None, watch: Watch | None = None
    ) -> Table:
        try:
            with _bounded(file.path, self._folder, self._connection.interrupt):
                target = self._copy(query, into, watch)
        except duckdb.OutOfMemoryException as error:
            raise _resource_error(error, self.memory_limit) from None
        except duckdb.IOException as error:  # of the disk, or of a compressed file that was cut short
            problems = problems_of(file) if is_gzip(file.path) else []
            raise (
                DataError.of(str(file.path), problems) if problems else _resource_error(error, self.memory_limit)
            ) from None
        except duckdb.Error as error:
            raise explained(file, str(error)) from None
        return _checked(self, file, self.read_parquet([target]))

    def read_parquet(self, paths: Sequence[Path], *, row: bool = False) -> Table:
        if row:
            self._raw += paths
        name = self._names.next()
        files = ", ".join(map(self._plain, paths))
        number = f"row_number() OVER () - 1 AS {ROW}, " if row else ""
        scan = f"read_parquet([{files}], hive_partitioning=false)"
        casts = ", ".join(_in_micros(_quoted(column, '"'), zoned) for column, zoned in _nanos(paths[0]))
        columns = f"* REPLACE ({casts})" if casts else "*"
        self._connection.execute(f"CREATE VIEW {name} AS SELECT {number}{columns} FROM {scan}")
        return ibis.table(_schema(paths[0], row), name=name)

    def stage(self, table: Table, into: Path | None = None) -> Table:
        with _told(self.memory_limit, self._raw):
            return self.read_parquet([self._copy(ibis.to_sql(table, dialect="duckdb"), into)])

    def batches(self, table: Table, rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        with _told(self.memory_limit, self._raw):
            relation = self._connection.sql(ibis.to_sql(table, dialect="duckdb"))
            for batch in pa.RecordBatchReader.from_stream(relation):
                for start in range(0, batch.num_rows, rows):
                    yield batch.slice(start, rows)

    def close(self) -> None:
        self._connection.close()
        self._aliases.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _plain(self, path: Path) -> str:
        """A file's name in SQL, or where characters in it have a meaning to DuckDB that of a link to it."""
        path = path.absolute()
        if PATTERN.search(str(path)):
            link = Path(self._aliases.name) / self._names.next()
            link.symlink_to(path)
            path = link
        return _quoted(str(path))

    def _copy(self, query: str, into: Path | None = None, watch: Watch | None = None) -> Path:
        target = self._folder / f"{self._names.next()}.parquet"
        self._run(f"COPY ({query}) TO {_quoted(str(target))} (FORMAT parquet, COMPRESSION lz4)", watch)
        return target.replace(into) if into is not None else target

    def _run(self, query: str, watch: Watch | None) -> None:
        if watch is None:
            self._connection.execute(query)
            return
        self._connection.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._connection.execute, query)
            try:
                while not wait([running], WATCH_SECONDS).done:
                    watch(max(self._connection.query_progress(), 0) / 100)
            except BaseException:
                self._connection.interrupt()
                raise
        running.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _in_micros(column: str, zoned: bool) -> str:
    """A time in nanoseconds as the microsecond that it falls in, as SQL; casts would round it."""
    nanos = f"epoch_ns({column})"
    micros = f"make_timestamp(({nanos} - ({nanos} % 1000 + 1000) % 1000) // 1000)"
    return f"CAST({micros} AS {'TIMESTAMPTZ' if zoned else 'TIMESTAMP'}) AS {column}"


def _compression(path: Path) -> str:
    return "gzip" if is_gzip(path) else "none"


def _check_last_line(file: TextFile) -> None:
    """Refuse a last line that is too long: DuckDB leaves one out that has no end and is larger than its buffer.

    Raises:
        DataError: if it is.
    """
    gzipped = is_gzip(file.path)
    if gzipped and not file.multiline:
        return  # of large published files, whose decompression takes as long as all else
    with opened(file.path) as stream:
        if not gzipped:
            stream.seek(max(0, file.path.stat().st_size - ROW_BYTES - 1))
        length = 0
        while block := stream.read(1 << 20):
            end = max(block.rfind(b"\n"), block.rfind(b"\r"))
            length = length + len(block) if end < 0 else len(block) - end - 1
    if length > ROW_BYTES:
        raise explained(file, f"the last line is longer than {ROW_BYTES:,} bytes")


def _json_options(path: Path) -> str:
    return f"format='newline_delimited', compression='{_compression(path)}', maximum_object_size={LINE_BYTES}"


def _selected(name: str, kind: ColumnType) -> str:
    column = _quoted(name, '"')
    if kind != "int64":
        return f"CAST({column} AS {DUCKDB_TYPES[kind]}) AS {column}"
    return f"CASE WHEN contains({column}, '.') THEN error('a fraction') ELSE CAST({column} AS BIGINT) END AS {column}"


@contextmanager
def _told(memory_limit: int | None, raw: Sequence[Path]) -> Iterator[None]:
    """Turns memory or disk that ran out, and damaged raw Parquet files, into an error that says what to do."""
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise _resource_error(error, memory_limit) from None
    except duckdb.Error as error:
        for path in raw:
            check_parquet(path)
        if isinstance(error, duckdb.IOException):
            raise _resource_error(error, memory_limit) from None
        if isinstance(error, duckdb.InvalidInputException) and raw:
            raise DataError(f"{', '.join(map(str, raw))}: damaged: {str(error).splitlines()[0]}") from None
        raise


def check_parquet(path: Path) -> None:
    """Read a Parquet file to its end; slow, so only asked once something failed.

    Raises:
        DataError: if it can't be read.
    """
    try:
        with pq.ParquetFile(path) as file:
            for _ in file.iter_batches():
                pass
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: damaged, or not a Parquet file: {error}") from None


@contextmanager
def _bounded(path: Path, folder: Path, stop: Callable[[], None]) -> Iterator[None]:
    """Ends the staging of a gzipped file that takes more disk in `folder` than such a file may unpack to.

    The engine unpacks the file itself, so what it writes is measured: counting what it reads would unpack it twice.

    Raises:
        DataError: if it takes more.
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
    """Bytes that the files below a folder take."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                found += (Path(parent) / name).lstat().st_size
    return found


def _resource_error(error: Exception, memory_limit: int | None) -> RecspecError:
    said = str(error).split("\n")[0]
    if isinstance(error, duckdb.OutOfMemoryException):
        given = f" of {memory_limit / 1e6:,.0f} MB" if memory_limit else ""
        return SettingsError(f"--memory-limit{given} is too little for these tables ({said}); give more")
    return DataError(f"reading or writing files failed: {said}")


# --- Spark -----------------------------------------------------------------------------------------------------------

SPARK_TYPES: Mapping[ColumnType, str] = {"int64": "BIGINT", "float64": "DOUBLE", "string": "STRING"}
SPARK_LOCAL = (
    "spark.driver.bindAddress", "spark.driver.host", "spark.driver.memory", "spark.local.dir", "spark.ui.enabled",
    "spark.sql.shuffle.partitions",
)  # fmt: skip
"""Settings of a session on this machine alone."""
SPARK_ENCODINGS = {"utf-8": "UTF-8", "latin-1": "ISO-8859-1"}
"""Names of `ENGINE_ENCODINGS`."""


SPARK_READ = {"recursiveFileLookup": "true", "__globPaths__": "false"}
"""Without these options a folder named `a=1` adds a column `a`, and `*` in a path stands for other files."""


class _Spark:
    """A Spark session: local, or the cluster that the environment variable SPARK_MASTER names.

    Spark reads the parts of a table in any order, so a row's place is always computed from what Spark says about where
    it read the row. Spark reads and writes files by URI alone, because it would look for a plain path in the default
    file system of its configuration. Raw files are read through links with plain names, because Spark skips files such
    as `_a.csv` and cannot read `a:b.csv`.
    """

    name = "spark"

    def __init__(self, folder: Path, memory_limit: int | None, threads: int | None) -> None:
        sql = require_extra("pyspark.sql", "spark")
        if "SPARK_MASTER" not in os.environ and not _has_java():
            raise SettingsError(
                "--engine spark: needs Java, and neither JAVA_HOME nor a command `java` was found; "
                "install a JDK (17 or newer), or use --engine duckdb"
            )
        self.memory_limit = memory_limit
        self._folder = _new_folder(folder).absolute()
        self._threads = threads
        self._links = TemporaryDirectory(prefix="recspec-")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers start the system's python3
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
            "spark.sql.legacy.parquet.nanosAsLong": "true",  # else a file with such times can't be read at all
            "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # as DuckDB writes them
            "spark.sql.csv.parser.columnPruning.enabled": "false",  # else a bad value in an unread column passes
            "spark.sql.warehouse.dir": _uri(self._folder / "warehouse"),  # else in the default file system
        }
        if memory_limit is not None:
            settings["spark.driver.memory"] = f"{max(memory_limit // 2**20, 512)}m"
        if "SPARK_MASTER" in os.environ:  # a cluster, or spark-submit, has its own
            settings = {name: value for name, value in settings.items() if name not in SPARK_LOCAL}
        builder = sql.SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        with warnings.catch_warnings():
            # Ibis's Spark dialect needs its options, and loading them pandas, whose version Spark comments on. No row
            # passes through pandas here.
            warnings.simplefilter("ignore", FutureWarning)
            _ = ibis.pyspark
        self._session = builder.getOrCreate()
        self._session.sparkContext.setLogLevel("ERROR")
        self._names = _Names()
        self._staged: dict[str, Path] = {}
        """The folder of each view that holds what `stage` wrote, and nothing else."""

    def read_text(self, file: TextFile, into: Path | None = None, watch: Watch | None = None) -> Table:  # noqa: ARG002
        if file.multiline:
            return self._by_duckdb(lambda engine, target: engine.read_text(file, target), into)
        columns = file_columns(file)
        source = readable(file, self._folder / f"{self._names.next()}.txt")
        # Columns have names of our own until a table is whole: Spark adds some, which a file's may be called like.
        plain = {name: f"column_{number}" for number, name in enumerate(columns)}
        frame = self._reader().csv(
            _uri(self._linked([source.path])),
            schema=", ".join(f"{plain[name]} {SPARK_TYPES[kind]}" for name, kind in columns.items()),
            sep=file.separator,
            header=file.header,
            encoding=SPARK_ENCODINGS[source.encoding],
            quote='"' if file.quoted else "",
            escape='"' if file.quoted else "",
            mode="FAILFAST",
            nullValue="",
            emptyValue="",
        )
        target = self._folder / self._names.next()
        table = self._read(file, frame, [plain[name] for name in file.columns], target)
        if into is None:
            return table
        numbered = self.stage(table, into)
        shutil.rmtree(target)
        return numbered

    def read_json(self, file: JsonFile, into: Path | None = None) -> Table:
        return self._by_duckdb(lambda engine, target: engine.read_json(file, target), into)

    def _by_duckdb(self, read: Callable[[_DuckDB, Path], Table], into: Path | None) -> Table:
        """A file as DuckDB reads it, by which no value is understood otherwise than with that engine."""
        target = into or self._folder / f"{self._names.next()}.parquet"
        with _DuckDB(self._folder / self._names.next(), self.memory_limit, self._threads) as engine:
            read(engine, target)
        return self.read_parquet([target])

    def _read(self, file: TextFile, frame: Any, values: Sequence[str], target: Path) -> Table:
        """Stage a file's rows with their numbers.

        A task reads a block of the file from its beginning to its end, so Spark's own numbers count a block's rows by
        ones, and leap from block to block: each leap is replaced by the number of rows in the blocks before.
        """
        staged = frame.selectExpr("_metadata.file_block_start", "monotonically_increasing_id()", *values)
        try:
            with _bounded(file.path, self._folder, self._session.sparkContext.cancelAllJobs):
                staged.toDF("block", "number", *_plain_names(values)).write.parquet(_uri(target))
        except Exception as error:
            if not _is_sparks(error):
                raise
            raise explained(file, str(error).split("\n")[0]) from None
        staged = self._reader().parquet(_uri(target))
        found = staged.groupBy("block").agg({"number": "min", "*": "count"}).orderBy("block").collect()
        before, starts = 0, []
        for block, first, size in ((row["block"], row["min(number)"], row["count(1)"]) for row in found):
            starts.append(f"({block}L, {before - first}L)")
            before += size
        numbered = _numbered(self._session, staged, starts or ["(0L, 0L)"], list(file.columns))
        return _checked(self, file, self._view(numbered, {ROW: "int64", **file.columns}))

    def read_parquet(self, paths: Sequence[Path], *, row: bool = False) -> Table:
        if paths[0].is_dir():  # staged by Spark
            (folder,) = paths
            assert not row, folder
            return self._view(self._reader().parquet(_uri(folder)), _schema(_parts(folder)[0], row))
        try:
            frame = self._reader().parquet(_uri(self._linked(paths)))
        except Exception as error:
            if not _is_sparks(error):
                raise
            said = " ".join(str(error).split())[:300]
            raise DataError(f"{paths[0]}: Spark can't read it ({said}); use --engine duckdb") from None
        schema = _schema(paths[0], row)
        nanos = dict(_nanos(paths[0]))
        if not row:
            return self._view(_frame_in_micros(frame, nanos), schema)
        counts = [pq.read_metadata(path).num_rows for path in paths]
        before = [stop - count for stop, count in zip(accumulate(counts), counts, strict=True)]
        starts = [f"('{_link_name(number, path)}', {before[number]}L)" for number, path in enumerate(paths)]
        where = frame.metadataColumn("_metadata")  # by name it would be the file's own column, if it has one
        placed = frame.select(where["file_name"], where["row_index"], "*")
        placed = placed.toDF("file", "number", *_plain_names(frame.columns))
        return self._view(_frame_in_micros(_numbered(self._session, placed, starts, frame.columns), nanos), schema)

    def _view(self, frame: Any, schema: Mapping[str, Any]) -> Table:
        name = self._names.next()
        frame.createOrReplaceTempView(name)
        return ibis.table(schema, name=name)

    def stage(self, table: Table, into: Path | None = None) -> Table:
        target = self._write(table)
        folder = target.replace(into) if into is not None else target
        staged = self.read_parquet([folder])
        self._staged[staged.get_name()] = folder
        return staged

    def batches(self, table: Table, rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        held = self._staged.get(table.op().name) if isinstance(table.op(), UnboundTable) else None
        target = self._write(table) if held is None else held
        for path in _parts(target):
            yield from pq.ParquetFile(path).iter_batches(rows)
        if held is None:
            shutil.rmtree(target)

    def close(self) -> None:
        self._session.stop()
        self._links.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, table: Table) -> Path:
        target = self._folder / self._names.next()
        try:
            self._session.sql(ibis.to_sql(table, dialect="pyspark")).write.parquet(_uri(target))
        except Exception as error:
            if not _is_sparks(error):
                raise
            raise DataError(f"Spark could not finish a step: {' '.join(str(error).split())[:300]}") from error
        return target

    def _reader(self) -> Any:
        return self._session.read.options(**SPARK_READ)

    def _linked(self, paths: Sequence[Path]) -> Path:
        """A folder of links to files, whose names mean nothing to Spark and sort in the order given."""
        folder = self._folder / self._names.next()
        folder.mkdir()
        for number, path in enumerate(paths):
            (folder / _link_name(number, path)).symlink_to(path.absolute())
        return folder

    def _spill(self) -> Path:
        """The folder for what does not fit the memory, by a path without a comma: Spark takes a list of folders."""
        spill = self._folder / "spill"
        spill.mkdir()
        link = Path(self._links.name) / "spill"
        link.symlink_to(spill)
        return link

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _numbered(session: Any, placed: Any, starts: Sequence[str], names: Sequence[str]) -> Any:
    """A frame with the column `row` and columns of these names.

    Args:
        placed: Where each row was read, its number there, then the columns under their plain names.
        starts: For each place, as SQL, what to add to the numbers.
    """
    place, number, *columns = placed.columns
    table = session.sql(f"SELECT * FROM VALUES {', '.join(starts)} AS starts(start, before)")
    joined = placed.join(table.hint("broadcast"), placed[place] == table["start"])
    named = [f"{column} AS {_quoted(name, '`')}" for column, name in zip(columns, names, strict=True)]
    return joined.selectExpr(f"{number} + before AS {ROW}", *named)


def _frame_in_micros(frame: Any, nanos: Mapping[str, bool]) -> Any:
    """A frame with these columns of nanoseconds, and whether each has a zone, as the times that Spark knows."""
    if not nanos:
        return frame
    columns = []
    for name in frame.columns:
        value = _quoted(name, "`")
        if name in nanos:
            micros = f"timestamp_micros(({value} - pmod({value}, 1000)) div 1000)"
            value = f"{micros if nanos[name] else f'CAST({micros} AS TIMESTAMP_NTZ)'} AS {value}"
        columns.append(value)
    return frame.selectExpr(*columns)


def _plain_names(columns: Sequence[str]) -> list[str]:
    return [f"column_{number}" for number in range(len(columns))]


def _uri(path: Path) -> str:
    """A path as Spark reads it: letter for letter, `%20` too, in the local file system."""
    return f"file://{path}"


def _link_name(number: int, path: Path) -> str:
    """The ending tells Spark whether a file is compressed."""
    return f"{number:06d}{'.gz' if _compression(path) == 'gzip' else '.file'}"


def _parts(folder: Path) -> list[Path]:
    """The files of a table that Spark wrote, in the order of its rows: one a partition, numbered in their names."""
    return sorted(folder.glob("part-*.parquet"), key=lambda path: (len(path.name.split("-")[1]), path.name))


def _is_sparks(error: Exception) -> bool:
    return type(error).__module__.startswith(("pyspark", "py4j"))


def _has_java() -> bool:
    return "JAVA_HOME" in os.environ or shutil.which("java") is not None


# --- text files ------------------------------------------------------------------------------------------------------


def file_columns(file: TextFile) -> dict[str, ColumnType]:
    """All columns of the file in their order; those that aren't asked for are read as strings.

    Raises:
        DataError: if the header lacks a column, or stands for two.
    """
    if not file.header:
        return dict(file.columns)
    names = read_header(file)
    problems = [
        f"no column '{name}'{nearest(name, names)}; found {listed(names)}" for name in file.columns if name not in names
    ]
    if problems:
        raise DataError.of(f"{file.path}: header", [*problems, *_name_problems(names)])
    check_names(file.path, names, "header")
    return {name: file.columns.get(name, "string") for name in names}


def check_names(path: Path, names: Sequence[str], where: str = "columns") -> None:
    """Refuse names that an engine can't keep apart, which differ in case alone, and the name of `ROW`.

    Raises:
        DataError: naming them all.
    """
    problems = _name_problems(names)
    if problems:
        raise DataError.of(f"{path}: {where}", problems)


def _name_problems(names: Sequence[str]) -> list[str]:
    by_plain: dict[str, list[str]] = {}
    for name in names:
        by_plain.setdefault(name.lower(), []).append(name)
    problems = [f"column '{ROW}' has a name that recspec needs for itself; rename it"] if ROW in by_plain else []
    for same in by_plain.values():
        problems += [f"column '{name}' stands more than once" for name in dict.fromkeys(same) if same.count(name) > 1]
        if len(set(same)) > 1:
            problems.append(f"columns {listed(dict.fromkeys(same))} differ in case alone; rename all but one")
    return problems


def read_header(file: TextFile) -> list[str]:
    """Names of the columns in the first line; the third one is `column_3` if the line leaves its name empty."""
    try:
        with _open_text(file) as stream:
            _, first = next(_numbered_records(file, stream), (0, None))
    except LineError as error:
        raise DataError(f"{file.path}: {error}") from None
    except UnicodeError as error:
        raise DataError(f"{file.path}: {_not_text(file, error)}") from None
    if first is None:
        raise DataError(f"{file.path}: is empty; expected a header line and rows")
    return [name or f"column_{place}" for place, name in enumerate(first, 1)]


def json_keys(path: Path) -> dict[str, Literal["list", "string"] | None]:
    """Every key that a file of JSON lines has, and whether all of its values are lists, or all are strings.

    Raises:
        DataError: naming the lines that are no JSON objects.
    """
    try:
        with TemporaryDirectory(prefix="recspec-") as folder, duckdb.connect(config={"threads": 1}) as connection:
            link = Path(folder) / "objects"
            link.symlink_to(path.absolute())
            scan = f"read_json_objects({_quoted(str(link))}, {_json_options(path)})"
            found = connection.execute(f"SELECT json_group_structure(json) FROM {scan}").fetchone()
    except duckdb.Error as error:
        raise explained(JsonFile(path, {}), str(error)) from None
    kinds = json.loads(found[0]) if found and found[0] else {}
    if not isinstance(kinds, dict):  # lists, or objects and other things
        raise explained(JsonFile(path, {}), "expected a JSON object in every line")
    return {
        name: "list" if isinstance(kind, list) else "string" if kind == "VARCHAR" else None
        for name, kind in kinds.items()
    }


def readable(file: TextFile, copy: Path) -> TextFile:
    """The file in an encoding that every engine reads: itself, or a copy as UTF-8.

    Raises:
        DataError: if it is not text of its encoding.
    """
    if file.encoding in ENGINE_ENCODINGS:
        return file
    try:
        with _open_text(file) as stream, copy.open("w", encoding="utf-8", newline="") as written:
            shutil.copyfileobj(stream, written, 1 << 20)
    except UnicodeError as error:
        copy.unlink(missing_ok=True)
        raise DataError(f"{file.path}: {_not_text(file, error)}") from None
    return replace(file, path=copy, encoding="utf-8")


def explained(file: TextFile | JsonFile, engine_message: str) -> DataError:
    """The error for a file that an engine could not read: its malformed lines, else what the engine said."""
    return DataError.of(str(file.path), problems_of(file) or [" ".join(engine_message.split())[:300]])


def problems_of(file: TextFile | JsonFile) -> list[str]:
    """The first malformed lines of a file, each with its number; slow, so only asked once something failed."""
    problems: list[str] = []
    try:
        with _open_text(file) as stream:
            found = _object_problems(file, stream) if isinstance(file, JsonFile) else _line_problems(file, stream)
            for problem in islice(found, PROBLEMS_SHOWN):
                problems.append(problem)
    except LineError as error:
        problems.append(str(error))
    except UnicodeError as error:
        problems.append(_not_text(file, error))
    return problems


def _not_text(file: TextFile | JsonFile, error: UnicodeError) -> str:
    held = (
        f"byte 0x{error.object[error.start]:02x} ({error.reason})" if isinstance(error, UnicodeDecodeError) else error
    )
    return (
        f"is not {_encoding(file)} text: {held}; convert it to utf-8, or name its encoding where the dataset has "
        "that setting, as in --set encoding=cp1252"
    )


def _line_problems(file: TextFile, stream: IO[str]) -> Iterator[str]:
    columns = file_columns(file)
    records = _numbered_records(file, stream)
    if file.header:
        next(records, None)
    for line, values in records:
        if len(values) != len(columns):
            yield f"line {line:,}: has {len(values)} columns, expected {len(columns)} separated by {file.separator!r}"
            continue
        for value, (name, kind) in zip(values, columns.items(), strict=True):
            problem = _value_problem(value, kind, required=name in file.required)
            if problem:
                yield f"line {line:,}: column '{name}' {problem}"


def _object_problems(file: JsonFile, stream: IO[str]) -> Iterator[str]:
    for number, line in enumerate(bounded_lines(stream, LINE_BYTES), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield f"line {number:,}: is no JSON object ({_said(error)}): {_head(line)}"
            continue
        if not isinstance(found, dict):
            yield f"line {number:,}: is no JSON object: {_head(line)}"
            continue
        for name, kind in file.columns.items():
            value = found.get(name)
            text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
            problem = _value_problem(text, kind, required=name in file.required and value is None)
            if problem:
                known = nearest(name, list(found)) if value is None else ""
                yield f"line {number:,}: '{name}' {problem}{known}"


def _said(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _head(line: str) -> str:
    """The beginning of a line, as a message shows it."""
    return repr(line.strip()[:60])


def _value_problem(value: str, kind: ColumnType, *, required: bool) -> str | None:
    if not value:
        return "has no value; expected one in every row" if required else None
    if kind in ("string", "list"):
        return None
    try:
        int(value) if kind == "int64" else float(value)
    except ValueError:
        return f"is '{value[:60]}'; expected {'a whole number' if kind == 'int64' else 'a number'}"
    return None


def _checked(backend: Backend, file: TextFile | JsonFile, table: Table) -> Table:
    """The table, once no required value is missing."""
    if file.required:
        missing = table.filter(ibis.or_(*(table[name].isnull() for name in file.required)))
        if count_rows(backend, missing):
            raise explained(file, f"a value is missing in {listed(file.required)}")
    return table


def line_numbers(file: TextFile | JsonFile, rows: Sequence[int]) -> dict[int, int]:
    """The number of the line in which each of some rows begins, counted from 1 as editors do; both counted in order.

    It reads the file up to the last of them, so it is only for messages.
    """
    found: dict[int, int] = {}
    with suppress(LineError), _open_text(file) as stream:
        if isinstance(file, JsonFile):
            lines = (number for number, line in enumerate(bounded_lines(stream, LINE_BYTES), 1) if line.strip())
        else:
            lines = (number for number, _ in _numbered_records(file, stream))
            if file.header:
                next(lines, None)
        wanted = set(rows)
        for row, line in enumerate(islice(lines, max(rows, default=-1) + 1)):
            if row in wanted:
                found[row] = line
    return found


def lines_of(file: TextFile) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers from 1.

    Raises:
        DataError: if one is too long, or the file is not what its encoding or its ending says.
    """
    try:
        with _open_text(file) as stream:
            yield from enumerate(bounded_lines(stream, ROW_BYTES), 1)
    except LineError as error:
        raise DataError(f"{file.path}: {error}") from None
    except UnicodeError as error:
        raise DataError(f"{file.path}: {_not_text(file, error)}") from None


def _numbered_records(file: TextFile, stream: IO[str]) -> Iterator[tuple[int, list[str]]]:
    """The number of the first line, and the values, of every record that is not blank."""
    lines = bounded_lines(stream, ROW_BYTES)
    if not (file.quoted and len(file.separator) == 1):
        for number, line in enumerate(lines, 1):
            text = line.rstrip("\r\n")
            if text:
                yield number, text.split(file.separator)
        return
    csv.field_size_limit(ROW_BYTES)  # of the whole process; nothing else in it reads CSV by this module
    reader = csv.reader(lines, delimiter=file.separator, strict=False)
    while True:
        first = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            why = f"a value is longer than {ROW_BYTES:,} characters; is a closing quote missing?"
            raise LineError(f"line {first:,}: {why if 'field larger' in str(error) else error}") from None
        if values:
            yield first, values


def _encoding(file: TextFile | JsonFile) -> str:
    return file.encoding if isinstance(file, TextFile) else "utf-8"


@contextmanager
def _open_text(file: TextFile | JsonFile) -> Iterator[IO[str]]:
    encoding = "utf-8-sig" if _encoding(file) == "utf-8" else _encoding(file)
    with opened(file.path) as stream:
        yield io.TextIOWrapper(stream, encoding=encoding, newline="")


# --- small parts -----------------------------------------------------------------------------------------------------


def _new_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=False)
    return folder


def _schema(path: Path, row: bool) -> dict[str, Any]:
    """Column names and Ibis types of a Parquet file as engines read it."""
    plain = [pa.field(column.name, _plain_type(column.type)) for column in pq.read_schema(path)]
    schema = ibis.Schema.from_pyarrow(pa.schema(plain))
    return {ROW: "int64", **schema} if row else dict(schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    return pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else kind


def _nanos(path: Path) -> list[tuple[str, bool]]:
    """The columns of a Parquet file whose times count nanoseconds, and whether they have a zone.

    Engines have few functions for them, or can't read them; they are read as microseconds.
    """
    kinds = ((column.name, column.type) for column in pq.read_schema(path))
    return [(name, kind.tz is not None) for name, kind in kinds if pa.types.is_timestamp(kind) and kind.unit == "ns"]


class _Names:
    """Names for views and staged files of one session."""

    def __init__(self) -> None:
        self._given = 0

    def next(self) -> str:
        self._given += 1
        return f"staged_{self._given:04d}"


def _quoted(name: str, mark: str = "'") -> str:
    """A column name in SQL quotes."""
    return f"{mark}{name.replace(mark, mark + mark)}{mark}"
