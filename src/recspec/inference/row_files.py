"""Files of rows, read and written in blocks: csv, jsonl and parquet."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from recspec.base.errors import DataError, SettingsError, nearest
from recspec.base.files import lines, local, open_parquet, special, whole_file
from recspec.data.encoding import as_column, repeated
from recspec.inference.catalogue import is_list

ROWS = 65_536
"""Rows read, scored and written at once."""

HEADER = 1 << 20
"""Bytes of a first line that are searched for the separator of a CSV file."""

ROW_FORMATS = (".csv", ".jsonl", ".parquet")


def read_rows(path: Path) -> Iterator[pa.Table]:
    """Read tables of at most `ROWS` rows from a csv, jsonl or parquet file; one of no row if only columns are named."""
    if not local(path, "rows").is_file():
        known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        wrong = special(path) or f"no such file{nearest(path.name, known)}"
        raise DataError(f"{path}: {wrong}")
    if path.suffix not in ROW_FORMATS:
        raise DataError(f"{path}: rows are read from {', '.join(ROW_FORMATS)}; found '{path.suffix}'")
    try:
        if path.suffix == ".parquet":
            with open_parquet(path) as file:
                _check_names(path, file.schema_arrow.names)
                for batch in file.iter_batches(ROWS):
                    batch.validate(full=True)  # refuses texts that are not UTF-8
                    yield pa.Table.from_batches([batch])
                if not file.metadata.num_rows:
                    yield file.schema_arrow.empty_table()
        elif path.suffix == ".csv":
            marks = pa_csv.ParseOptions(newlines_in_values=True, delimiter=_separator(path))
            with path.open("rb") as names, path.open("rb") as values:
                with pa_csv.open_csv(names, parse_options=marks) as reader:
                    _check_names(path, reader.schema.names)
                    texts = dict.fromkeys(reader.schema.names, pa.string())
                # Text as it is written: `007` is not 7, and the encoders know where numbers are meant.
                convert = pa_csv.ConvertOptions(column_types=texts, null_values=[""], strings_can_be_null=True)
                with pa_csv.open_csv(values, convert_options=convert, parse_options=marks) as reader:
                    is_empty = True
                    for batch in reader:
                        is_empty = is_empty and not batch.num_rows
                        starts = range(0, batch.num_rows, ROWS)
                        yield from (pa.Table.from_batches([batch.slice(start, ROWS)]) for start in starts)
                    if is_empty:
                        yield reader.schema.empty_table()
        else:
            yield from _read_objects(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        is_text = path.suffix != ".parquet" and (isinstance(error, UnicodeDecodeError) or "invalid UTF8" in str(error))
        remedy = "; expected utf-8: convert the file, such as by `iconv -t utf-8`" if is_text else ""
        raise DataError(f"{path}: can't be read as {path.suffix[1:]}: {error}{remedy}") from None


def _separator(path: Path) -> str:
    """The mark between the columns of a CSV file: as `prepare` finds it, if the first line has no comma."""
    with path.open("rb") as file:
        first = file.readline(HEADER)
    return next((mark for mark in ",\t;|" if mark.encode() in first), ",")


def _check_names(path: Path, names: Sequence[str]) -> None:
    if problems := repeated(names):
        raise DataError.of(str(path), problems)


MOST_KINDS = 100
"""Most kinds of values of a column of JSON lines; every block is read beside an example of each kind."""


def _read_objects(path: Path) -> Iterator[pa.Table]:
    """Tables of JSON lines: numbers are numbers, and texts stay as they are, dates among them.

    Every table has the columns and types of the whole file, which a first pass over it finds.
    """
    kinds: dict[str, dict[object, object]] = {}
    for each in _objects(path):
        for name, value in each.items():
            found = kinds.setdefault(name, {})
            if (kind := _kind(value)) not in found:
                found[kind] = value
                if len(found) > MOST_KINDS:
                    raise DataError(f"{path}: '{name}' holds more than {MOST_KINDS} kinds of values; give it one type")
    objects = _objects(path)
    while block := list(islice(objects, ROWS)):
        columns = {name: [*kinds[name].values(), *(each.get(name) for each in block)] for name in kinds}
        yield pa.table({name: as_column(values)[-len(block) :] for name, values in columns.items()})


def _kind(value: object) -> object:
    """What of a value decides a column's type; float64 holds whole numbers of 53 bits, int64 those of 63."""
    if isinstance(value, int):
        bits = value.bit_length()
        return type(value), bits > 53, bits > 63
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value)):
        return str(as_column([value]).type)
    return frozenset(map(_kind, value)) if isinstance(value, list) else type(value)


def _objects(path: Path) -> Iterator[dict[str, object]]:
    return (_object(path, number, line) for number, line in lines(path) if line.strip())


def _object(path: Path, number: int, line: bytes) -> dict[str, object]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: line {number:,}: is no JSON object: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: line {number:,}: is no JSON object: {line[:60]!r}")
    return found


@contextmanager
def row_writer(out: Path | Callable[[pa.Table], None] | None) -> Iterator[Callable[[pa.Table], None]]:
    """Write tables in the format of the ending of `out`; without `out`, CSV to standard output; or call `out`."""
    if callable(out):
        yield out
        return
    if out is None:
        yield _csv_to(sys.stdout.buffer)
        return
    if out.suffix not in ROW_FORMATS:
        raise SettingsError(f"--out {out}: expected a name that ends in {', '.join(ROW_FORMATS)}")
    if out.suffix == ".parquet":
        with parquet_writer(out, None) as write:
            yield write
        return
    with whole_file(local(out, "out")) as temporary, temporary.open("wb") as file:
        yield _csv_to(file) if out.suffix == ".csv" else _jsonl_to(file)


def _csv_to(file: BinaryIO) -> Callable[[pa.Table], None]:
    is_first = True

    def write(table: pa.Table) -> None:
        nonlocal is_first
        table = _with_nested_as_texts(table)
        pa_csv.write_csv(table, file, pa_csv.WriteOptions(include_header=is_first, quoting_style="needed"))
        is_first = False

    return write


def _with_nested_as_texts(table: pa.Table) -> pa.Table:
    """The same table for CSV, which has single values alone: lists with `|` between their values, the rest as JSON."""
    for place, column in enumerate(table.columns):
        if is_list(column) and not pa.types.is_nested(column.type.value_type):
            texts = pc.binary_join(column.cast(pa.list_(pa.string())), "|")
        elif pa.types.is_nested(column.type):
            texts = pa.array([None if value is None else _json(value) for value in column.to_pylist()], pa.string())
        else:
            continue
        table = table.set_column(place, table.field(place).name, texts)
    return table


def _json(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _jsonl_to(file: BinaryIO) -> Callable[[pa.Table], None]:
    def write(table: pa.Table) -> None:
        file.writelines((_json(row) + "\n").encode() for row in table.to_pylist())

    return write


@contextmanager
def parquet_writer(out: Path, schema: pa.Schema | None) -> Iterator[Callable[[pa.Table], None]]:
    """Write tables to a Parquet file under a temporary name, renamed at the end; without rows it has the schema."""
    with whole_file(local(out, "out")) as temporary, ExitStack() as open_file:
        writer: pq.ParquetWriter | None = None

        def write(table: pa.Table) -> None:
            nonlocal writer
            if writer is None:
                writer = open_file.enter_context(pq.ParquetWriter(temporary, table.schema, compression="zstd"))
            writer.write_table(table)

        yield write
        if writer is None:
            pq.write_table((schema or pa.schema([])).empty_table(), temporary)
