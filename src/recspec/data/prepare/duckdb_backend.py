"""DuckDB inside this process; it works out of core where the memory limit is reached."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock
from typing import Any, TypeVar

import duckdb
import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.operations import Relation
from ibis.expr.types import Table

from recspec.base.errors import DataError, RecspecError, SettingsError
from recspec.base.files import LINE_BYTES, is_gzip, open_parquet, opened
from recspec.base.machine import total_memory
from recspec.data.prepare.backend import (
    Backend,
    Part,
    Share,
    T,
    Watch,
    X,
    bounded,
    nanosecond_columns,
    quoted,
    schema_of,
    without_missing,
)
from recspec.data.prepare.names import ROW
from recspec.data.prepare.text_files import (
    ROW_BYTES,
    JsonFile,
    TextFile,
    check_names,
    explained,
    file_columns,
    problems_of,
    readable,
    readable_json,
    rewritten,
    rewritten_json,
)

PATTERN = re.compile(r"[*?\[\\]")  # makes a path a pattern; DuckDB has no option to take it literally
PROCESS_BYTES = 600_000_000  # outside DuckDB's limit (measured: 250 to 400 MB for ratings, 550 MB for Outbrain)
BYTES_PER_THREAD = 125_000_000  # to sort out of core, by its documentation; two threads with this together fail
FILE_ROW = "file_row_number"  # of DuckDB's reader of Parquet: the number of a row in its file
FRACTION_MARKS = (".", "e-", "E-")  # 1.5, 15e-1
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 122_880, 64 << 20  # of raw text as Parquet, at most (plus a batch of the engine)
STREAM_BYTES = 128 << 20  # of rows that the engine makes while the last ones are used
MARKS_BYTES = 512 << 10  # read at a time where marks are looked for; they stay in the cache
MOST_MILLIS = 2**63 // 1000  # since 1970, which fit as microseconds into 64 bits
_ENGINE_ERRORS = {
    "Conversion Error": duckdb.ConversionException,
    "Invalid Input Error": duckdb.InvalidInputException,
    "IO Error": duckdb.IOException,
    "Out of Memory Error": duckdb.OutOfMemoryException,
}
INTERRUPTED = "Query interrupted"  # the engine's message for Ctrl-C
DUCKDB_TYPES = {"int64": "BIGINT", "float64": "DOUBLE", "string": "VARCHAR", "list": "VARCHAR[]"}
F = TypeVar("F", TextFile, JsonFile)


class DuckDBBackend(Backend):
    """A DuckDB connection with its temporary folder.

    One class because every method needs the connection, and names of its own for tables and files.
    """

    name = "duckdb"
    distributed = False

    def __init__(self, folder: Path, memory_limit: int | None, threads: int | None) -> None:
        self._folder = folder
        spill = folder / "spill"
        folder.mkdir(parents=True)
        spill.mkdir()
        settings: dict[str, Any] = {"threads": threads or os.cpu_count() or 1, "temp_directory": str(spill)}
        stream = STREAM_BYTES
        self.memory_limit = memory_limit
        if memory_limit is not None:
            share = max(memory_limit - PROCESS_BYTES, memory_limit // 4)
            settings["memory_limit"] = f"{share // 1_000_000}MB"
            settings["threads"] = max(1, min(settings["threads"], share // BYTES_PER_THREAD))
            stream = min(stream, share // 16)
        self._threads: int = settings["threads"]
        self._connection = duckdb.connect(config=settings)
        self._connection.execute(f"SET streaming_buffer_size = '{stream}B'")
        self._connection.execute("SET TimeZone = 'UTC'")  # else times with zones become times of this machine's zone
        self._names = map("staged_{:04d}".format, count(1))
        self._aliases = TemporaryDirectory(prefix="recspec-")
        self._raw: list[Path] = []  # Parquet files of the user
        self.files = {}

    def read_text(self, file: TextFile, into: Path | None = None, watch: Watch | None = None) -> Table:
        copy = self._folder / f"{next(self._names)}.txt"
        try:
            source = readable(file, copy)
            _check_end(source)
            staged = self._reread(file, source, lambda found: self._stage_text(found, into, watch), copy, rewritten)
        finally:
            copy.unlink(missing_ok=True)
        return without_missing(self, file, self._parquet([staged], row=True))

    def read_json(self, file: JsonFile, into: Path | None = None) -> Table:
        check_names(file.path, list(file.columns))
        copy = self._folder / f"{next(self._names)}.json"
        try:
            source = readable_json(file, copy)
            staged = self._reread(file, source, lambda found: self._stage_json(found, into), copy, rewritten_json)
        finally:
            copy.unlink(missing_ok=True)
        return without_missing(self, file, self._parquet([staged], row=True))

    def _reread(
        self, file: F, source: F, stage: Callable[[F], Path], copy: Path, rewrite: Callable[[F, Path], F]
    ) -> Path:
        try:
            with bounded(file.path, self._folder, self._connection.interrupt):
                return _read_plainly(file, source, stage, copy, rewrite)
        except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
            raise _resource_error(error, self.memory_limit) from None
        except duckdb.Error as error:
            raise explained(file, str(error)) from None

    def _stage_text(self, file: TextFile, into: Path | None, watch: Watch | None) -> Path:
        columns = file_columns(file)
        whole = _holds_whole_numbers(file.path)
        read_as = {
            name: DUCKDB_TYPES["string" if kind == "int64" and not whole else kind] for name, kind in columns.items()
        }
        types = ", ".join(f"{quoted(name)}: '{kind}'" for name, kind in read_as.items())
        mark, escape = quoted(file.quote), quoted(file.escape if file.quote else "")
        options = (
            f"delim={quoted(file.separator)}, header={file.header}, quote={mark}, escape={escape}, nullstr='', "
            f"encoding={quoted(file.encoding)}, compression={_compression(file.path)}, columns={{{types}}}, "
            f"max_line_size={ROW_BYTES}, auto_detect=false, hive_partitioning=false"
        )
        selected = ", ".join(_selected(name, kind, whole=whole) for name, kind in file.columns.items())
        return self._write_text(f"SELECT {selected} FROM read_csv({self._plain(file.path)}, {options})", into, watch)

    def _stage_json(self, file: JsonFile, into: Path | None) -> Path:
        read_as = {
            name: "VARCHAR[]" if kind == "list" else "VARCHAR"
            for name, kind in file.columns.items()
            if name not in file.inside
        }
        read_as |= {of: "JSON[]" if file.columns[name] == "list" else "JSON" for name, (of, _) in file.inside.items()}
        types = ", ".join(f"{quoted(name)}: '{kind}'" for name, kind in read_as.items())
        options = f"{_json_options(file.path)}, records='true', columns={{{types}}}, hive_partitioning=false"
        selected = ", ".join(
            _of_object(name, kind, *file.inside[name]) if name in file.inside else _selected(name, kind, whole=False)
            for name, kind in file.columns.items()
        )
        return self._write_text(f"SELECT {selected} FROM read_json({self._plain(file.path)}, {options})", into, None)

    def read_parquet(self, paths: Sequence[Path], *, row: bool = False, foreign: bool = False) -> Table:
        if row or foreign:
            self._raw += paths
        try:
            return self._parquet(paths, row=row)
        except duckdb.Error as error:
            if not row:
                raise
            where = ", ".join(map(str, paths))
            raise DataError(f"{where}: damaged, or not a Parquet file: {str(error).splitlines()[0]}") from None

    def _parquet(self, paths: Sequence[Path], *, row: bool) -> Table:
        """Parquet files as one table. A file's own numbers of rows, unlike a window over them, leave threads free."""
        name = next(self._names)
        files, schema = ", ".join(map(self._plain, paths)), schema_of(paths[0], row)
        own = row and len(paths) == 1 and FILE_ROW not in map(str.lower, schema)
        number = f"{FILE_ROW} AS {ROW}, " if own else f"row_number() OVER () - 1 AS {ROW}, " if row else ""
        scan = f"read_parquet([{files}], hive_partitioning=false, file_row_number={own})"
        casts = [_in_micros(quoted(column, '"'), zoned) for column, zoned in nanosecond_columns(paths[0])]
        if row:
            # DuckDB 2.0 answers comparisons by a file's statistics, which leave out NaN; it has none of what TRY gives.
            with_nan = (name for name, kind in ibis.schema(schema).items() if kind.is_floating() or kind.is_struct())
            casts += [f"TRY({column}) AS {column}" for column in (quoted(name, '"') for name in with_nan)]
        replaced = f" REPLACE ({', '.join(casts)})" if casts else ""
        columns = f"*{f' EXCLUDE ({FILE_ROW})' if own else ''}{replaced}"
        self._connection.execute(f"CREATE TEMP VIEW {name} AS SELECT {number}{columns} FROM {scan}")
        self.files[name] = paths
        return ibis.table(schema, name=name)

    def stage(self, table: Table, into: Path | None = None) -> Table:
        with _explained_errors(self.memory_limit, self._raw):
            return self.read_parquet([self._copy(_sql(table.op()), into)])

    def stage_by(self, table: Table, key: str, order: Sequence[str]) -> Table:
        return self.stage(table.order_by([key, *order]))

    def each_part(self, table: Table, make: Callable[[Part], T], done: Callable[[int], None]) -> Iterator[T]:
        folder = self._new_folder()
        yield make(Part(partial(self.batches, table), len(table.columns), 0, folder, self.memory_limit, done))

    def each_share(
        self, items: Sequence[X], make: Callable[[Share[X]], T], done: Callable[[int], None], *, at_once: int = 1
    ) -> list[T]:
        threads = min(self._threads, at_once, len(items))
        if threads <= 1:
            return [make(Share(item, self._new_folder(), done)) for item in items]
        alone, stopped = Lock(), Event()

        def told(rows: int) -> None:
            with alone:
                if stopped.is_set():
                    raise CancelledError
                done(rows)

        with ThreadPoolExecutor(threads, "recspec-share") as pool:
            try:
                found = [pool.submit(make, Share(item, self._new_folder(), told)) for item in items]
                ended = wait(found, return_when=FIRST_EXCEPTION).done
                for each in found:
                    if each in ended and (error := each.exception()) is not None:
                        raise error
                return [each.result() for each in found]
            except BaseException:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def call(self, make: Callable[[], T]) -> T:
        return make()

    def _new_folder(self) -> Path:
        folder = self._folder / next(self._names)
        folder.mkdir()
        return folder

    def batches(self, table: Table, rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        with _explained_errors(self.memory_limit, self._raw), self._reader(_sql(table.op())) as reader:
            for batch in _batches(reader):
                for start in range(0, batch.num_rows, rows):
                    yield batch.slice(start, rows)

    def row(self, table: Table) -> tuple[Any, ...]:
        with _explained_errors(self.memory_limit, self._raw), _interruptible():
            # To Arrow, the engine would plan the query twice, which takes longer than to run it on a small file.
            (row,) = self._connection.execute(_sql(table.op())).fetchall()
            return tuple(row)

    def _reader(self, query: str) -> pa.RecordBatchReader:
        with _interruptible():
            return pa.RecordBatchReader.from_stream(self._connection.sql(query))

    def close(self) -> None:
        self._connection.close()
        self._aliases.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _plain(self, path: Path) -> str:
        """A file's path in SQL, or that of a link to it if DuckDB would take the path for a pattern."""
        path = path.absolute()
        if PATTERN.search(str(path)):
            link = Path(self._aliases.name) / next(self._names)
            link.symlink_to(path)
            path = link
        return quoted(str(path))

    def _copy(self, query: str, into: Path | None) -> Path:
        target = self._folder / f"{next(self._names)}.parquet"
        with _interruptible():
            self._connection.execute(f"COPY ({query}) TO {quoted(str(target))} (FORMAT parquet, COMPRESSION lz4)")
        return target.replace(into) if into is not None else target

    def _write_text(self, query: str, into: Path | None, watch: Watch | None) -> Path:
        """Rows of text in a staged file. Arrow writes it in half the engine's time."""
        target = self._folder / f"{next(self._names)}.parquet"
        if watch is not None:
            self._connection.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
        options = {"compression": "lz4", "write_statistics": False, "store_schema": False}
        with self._reader(query) as reader, pq.ParquetWriter(target, reader.schema, **options) as writer:
            for group in _row_groups(_batches(reader)):
                writer.write_table(group, group.num_rows)
                if watch is not None:
                    watch(max(self._connection.query_progress(), 0) / 100)
        return target.replace(into) if into is not None else target


@lru_cache(2048)
def _sql(table: Relation) -> str:
    """A table's query; Ibis takes 10 to 20 ms to write one, a third of the CPU time of preparing a small file."""
    return str(ibis.to_sql(table.to_expr(), dialect="duckdb", pretty=False))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C during a call of the engine is Ctrl-C; the engine makes it an error of its own."""
    try:
        yield
    except RuntimeError as error:
        if INTERRUPTED in str(error):
            raise KeyboardInterrupt from None
        raise


def _read_plainly(file: F, source: F, read: Callable[[F], T], copy: Path, rewrite: Callable[[F, Path], F]) -> T:
    """What `read` gives of a file, from a copy with plain lines if the engine refuses it although no line is malformed.

    Such a file may mix line ends, or have bytes behind the end of its gzip stream.
    """
    try:
        return read(source)
    except duckdb.OutOfMemoryException:
        raise
    except duckdb.Error as error:
        if isinstance(error, duckdb.IOException) and not is_gzip(file.path):  # of the disk
            raise
        if problems := problems_of(file):
            raise DataError.of(str(file.path), problems) from None
    return read(rewrite(file, copy))


def _batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """The batches of a query's result. Raises the engine's errors, which Arrow gives as texts."""
    while True:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        except (OSError, pa.ArrowException) as error:
            if INTERRUPTED in str(error):
                raise KeyboardInterrupt from None
            raise _ENGINE_ERRORS.get(str(error).split(":")[0], duckdb.Error)(str(error)) from None
        yield batch


def _row_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches of text together, as many as a row group may hold."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(len(b) for b in waiting) >= ROW_GROUP_ROWS or sum(b.nbytes for b in waiting) >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting.clear()
    if waiting:
        yield pa.Table.from_batches(waiting)


def _in_micros(column: str, zoned: bool) -> str:
    """SQL that cuts a time in nanoseconds to microseconds; a cast would round it."""
    nanos = f"epoch_ns({column})"
    micros = f"make_timestamp(({nanos} - ({nanos} % 1000 + 1000) % 1000) // 1000)"
    return f"CAST({micros} AS {'TIMESTAMPTZ' if zoned else 'TIMESTAMP'}) AS {column}"


def _check_end(file: TextFile) -> None:
    """Refuse what the engine drops without a word: a last line without an end that exceeds its buffer, damaged gzip.

    A gzipped file is read to its end for this, because the engine ignores its check sum.
    """
    gzipped = is_gzip(file.path)
    with opened(file.path) as stream:
        if not gzipped:
            stream.seek(max(0, file.path.stat().st_size - ROW_BYTES - 1))
        length = 0
        while block := stream.read(1 << 20):
            end = max(block.rfind(b"\n"), block.rfind(b"\r"))
            length = length + len(block) if end < 0 else len(block) - end - 1
    if length > ROW_BYTES:
        raise explained(file, f"the last line is longer than {ROW_BYTES:,} bytes")


def _compression(path: Path) -> str:
    return quoted("gzip" if is_gzip(path) else "none")


def _json_options(path: Path) -> str:
    return f"format='newline_delimited', compression={_compression(path)}, maximum_object_size={LINE_BYTES}"


def _selected(name: str, kind: str, *, whole: bool) -> str:
    column = quoted(name, '"')
    cast = f"CAST({column} AS {DUCKDB_TYPES[kind]})"
    if kind == "int64" and not whole:
        held = " OR ".join(f"contains({column}, {quoted(mark)})" for mark in FRACTION_MARKS)
        cast = f"CASE WHEN {held} THEN error('a fraction') ELSE {cast} END"
    return f"{cast} AS {column}"


def _of_object(name: str, kind: str, of: str, key: str) -> str:
    """SQL of the values under a key of an object, or of each object of a list."""
    column, alias, path = quoted(of, '"'), quoted(name, '"'), quoted("/" + key.replace("~", "~0").replace("/", "~1"))
    value = f"json_extract_string({column}, {path})"
    if kind == "list":
        value = f"list_transform({column}, lambda each: json_extract_string(each, {path}))"
    return f"{value} AS {alias}"


def _holds_whole_numbers(path: Path) -> bool:
    """Whether no number of a file can have a fraction, which DuckDB would round without a word (1.5 and 15e-1 to 2).

    To look for its marks takes a tenth of the time that a check of each value would. Compressed files and those that
    memory can't hold, so that they would be read from the disk twice, count as holding one.
    """
    if is_gzip(path) or path.stat().st_size > total_memory() // 4:
        return False
    block = bytearray(1 + MARKS_BYTES)  # after the last byte of the block before
    held, free = np.frombuffer(block, np.uint8), memoryview(block)[1:]
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(free):
            exponents = (held[:size] | 0x20) == ord("e")  # a small letter or a capital
            if block.find(b".", 1, 1 + size) >= 0 or (exponents & (held[1 : 1 + size] == ord("-"))).any():
                return False
            block[0] = block[size]
    return True


@contextmanager
def _explained_errors(memory_limit: int | None, raw: Sequence[Path]) -> Iterator[None]:
    """Turn a lack of memory or disk, or a damaged Parquet file, into an error that says what to do."""
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise _resource_error(error, memory_limit) from None
    except duckdb.Error as error:
        for path in raw:
            check_parquet(path)
        if isinstance(error, duckdb.IOException):
            raise _resource_error(error, memory_limit) from None
        if isinstance(error, duckdb.ConversionException):
            for path in raw:
                _check_times(path)
        # DuckDB's reader of Parquet raises its bare Error; mistakes of ours in a query have classes of their own.
        if raw and (isinstance(error, duckdb.InvalidInputException) or type(error) is duckdb.Error):
            raise DataError(f"{', '.join(map(str, raw))}: damaged: {str(error).splitlines()[0]}") from None
        raise


def check_parquet(path: Path) -> None:
    """Read a Parquet file to its end, which is slow. Raises DataError if it is damaged."""
    try:
        with open_parquet(path) as file:
            for _ in file.iter_batches():
                pass
    except (pa.ArrowException, OSError, ValueError) as error:
        said = " ".join(str(error).split())  # Arrow's takes several lines
        raise DataError(f"{path}: damaged, or not a Parquet file: {said}") from None


def _check_times(path: Path) -> None:
    """Raise an error that names the first time in milliseconds that engines, which count microseconds, can't hold."""
    with open_parquet(path) as file:
        times = [column for column in file.schema_arrow if pa.types.is_timestamp(column.type)]
        names = [column.name for column in times if column.type.unit == "ms"]
        row = 0
        for batch in file.iter_batches(columns=names) if names else ():
            for name, values in zip(names, batch.columns, strict=True):
                millis = np.asarray(values.cast(pa.int64()).fill_null(0))
                far = np.flatnonzero((millis > MOST_MILLIS) | (millis < -MOST_MILLIS))
                if len(far):
                    raise DataError(
                        f"{path}: column '{name}': row {row + int(far[0]) + 1:,} is a time of "
                        f"{millis[far[0]]:,} milliseconds since 1970; expected one up to the year 294,246, "
                        "so correct it or leave the row out"
                    )
            row += batch.num_rows


def _resource_error(error: Exception, memory_limit: int | None) -> RecspecError:
    said = str(error).split("\n")[0]
    if isinstance(error, duckdb.OutOfMemoryException):
        given = f" of {memory_limit / 1e6:,.0f} MB" if memory_limit else ""
        if "bad allocation" in said:
            return SettingsError(f"the system gives this process less than --memory-limit{given} ({said}); give less")
        return SettingsError(f"--memory-limit{given} is too little for these tables ({said}); give more")
    return DataError(f"reading or writing files failed: {said}")


def json_keys(file: JsonFile, work: Path) -> dict[str, object]:
    """Every key of a file of JSON objects, with its structure: a type's name, a table of keys, or a list of either."""
    copy = work / "keys.json"
    try:
        with _interruptible():
            found = _read_plainly(file, readable_json(file, copy), _json_structure, copy, rewritten_json)
    except duckdb.Error as error:
        raise explained(file, str(error)) from None
    finally:
        copy.unlink(missing_ok=True)
    kinds = json.loads(found) if found else {}
    if not isinstance(kinds, dict):  # lists, or a mix of types
        raise explained(file, "expected a JSON object in every line")
    return kinds


def _json_structure(file: JsonFile) -> str | None:
    with TemporaryDirectory(prefix="recspec-") as folder, duckdb.connect(config={"threads": 1}) as connection:
        link = Path(folder) / "objects"
        link.symlink_to(file.path.absolute())
        scan = f"read_json_objects({quoted(str(link))}, {_json_options(file.path)})"
        found = connection.execute(f"SELECT json_group_structure(json) FROM {scan}").fetchone()
        return found[0] if found else None
