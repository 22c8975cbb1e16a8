"""What a raw file is by its first bytes, and whether its quotes stand around values."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from itertools import islice
from operator import or_
from pathlib import Path

from ibis.expr.types import Table

from recspec.base.errors import DataError, how_many, shortened
from recspec.base.files import opened
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.names import ROW, Notes
from recspec.data.prepare.tables import counts_by, fetch, figures
from recspec.data.prepare.text_files import TextFile, line_numbers, lines_of

OTHER_KINDS = {
    b"PK\x03\x04": ("a zip file, or a spreadsheet", "unpack it, or save it as CSV"),
    b"\xd0\xcf\x11\xe0": ("an old spreadsheet (.xls)", "save it as CSV"),
    b"PAR1": ("a Parquet file", "name it .parquet"),
    b"\x1f\x8b": ("a gzipped file", "name it .gz"),
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", "name it .zst"),
    b"BZh": ("a file compressed by bzip2", "name it .bz2"),
    b"\xfd7zXZ": ("a file compressed by xz", "unpack it"),
    b"SQLite format 3": ("an SQLite database", "export its table as CSV or Parquet"),
    b"%PDF-": ("a PDF file", "export its table as CSV"),
    b"\x89HDF": ("an HDF5 file", "save its table as Parquet, as with pandas.read_hdf(FILE).to_parquet(...)"),
    b"ARROW1": ("an Arrow or Feather file", "save it as Parquet, as with pyarrow.feather.read_table"),
    b"ORC": ("an ORC file", "save it as Parquet, as with pyarrow.orc.read_table"),
    b"Obj\x01": ("an Avro file", "save it as Parquet, as DuckDB's avro extension does"),
    b"\x93NUMPY": ("a NumPy file", "save its columns as Parquet"),
    b"MATLAB ": ("a MATLAB file", "save its table as Parquet, as with scipy.io.loadmat"),
    b"\x80\x04\x95": ("a pickle, which may run any code", "load it where you trust it, and save it as Parquet"),
    b"\x80\x03": ("a pickle, which may run any code", "load it where you trust it, and save it as Parquet"),
    b"version https://": ("a pointer of Git LFS", "fetch the file itself with `git lfs pull`"),
    b"<!DOCTYPE": ("a web page", "download the file itself"),
    b"<!doctype": ("a web page", "download the file itself"),
    b"<html": ("a web page", "download the file itself"),
    b"<?xml": ("XML", "save its rows as CSV or JSON lines"),
    b"@relation": ("an ARFF file of Weka", "save it as CSV, as with scipy.io.arff.loadarff"),
    b"@RELATION": ("an ARFF file of Weka", "save it as CSV, as with scipy.io.arff.loadarff"),
    b"-- MySQL dump": ("an SQL dump", "load it into a database, and export its table as CSV"),
    b"CREATE TABLE": ("an SQL dump", "load it into a database, and export its table as CSV"),
    b"INSERT INTO": ("an SQL dump", "load it into a database, and export its table as CSV"),
    b"%%MatrixMarket": ("a MatrixMarket file", "save its rows, columns and values as CSV"),
}
"""What a file is by its first bytes, where text is expected, and what to do."""


def check_encoding(text: str) -> str:
    """The canonical name of a text encoding. Raises ValueError if Python does not know it."""
    try:
        "".encode(text)  # refuses encodings of bytes, such as base64
        name = codecs.lookup(text).name
    except LookupError:
        raise ValueError(f"encoding '{text}' is not known; expected such as utf-8, utf-16, latin-1 or cp1252") from None
    return {"iso8859-1": "latin-1"}.get(name, name)


def encoding_of(path: Path, given: str | None, notes: Notes) -> str:
    """The encoding of a text file. Raises DataError if its first bytes are those of another kind of file."""
    with opened(path) as file:
        start = file.read(24)
    for mark, (kind, remedy) in OTHER_KINDS.items():
        if start.startswith(mark):
            raise DataError(f"{path}: expected text, and its first bytes are those of {kind}; {remedy}")
    if given is not None:
        return given
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        notes.inferred.append(f"{path.name} is read as utf-16, because it starts with that encoding's byte order mark")
        return "utf-16"
    for kind, zeros, others in (("utf-16-le", start[1:16:2], start[:16:2]), ("utf-16-be", start[:16:2], start[1:16:2])):
        if len(start) >= 4 and not any(zeros) and all(others):  # letters of Latin, without a byte order mark
            notes.inferred.append(f"{path.name} is read as {kind}, because every second of its first bytes is 0")
            return kind
    return "utf-8"


def begins_with_object(path: Path) -> bool:
    """Whether a file begins as JSON objects or Python dictionaries do, whatever its suffix."""
    with opened(path) as file:
        start = file.read(1 << 12).removeprefix(codecs.BOM_UTF8)
    return re.match(rb"[\s\[]*\{\s*(\"[^\"\n]*\"|[uU]?'[^'\n]*')\s*:", start) is not None


GLANCED = 1_000  # rows that tell which columns are quoted throughout, and values over several lines to look at
MOST = 1_000  # different quoted values to compare
NUMERIC = re.compile(r"[-+.0-9eE]*")
KEEP = "--set quote=null takes quotes as letters, --set quote=double as marks around values"


def check_quotes(backend: Backend, file: TextFile, table: Table, notes: Notes, *, given: bool) -> None:
    """Note values over several lines, and those that are quoted though others of their column are not.

    Raises DataError, unless the quote is `given` by a setting, if quotes swallow rows or make two values one.
    """
    with opened(file.path) as stream:
        mark = file.quote.encode()
        if not any(mark in block for block in iter(lambda: stream.read(1 << 20), b"")):
            return
    _check_lines(backend, file, table, notes, given=given)
    if not given:
        _check_marks(backend, file, table, notes)


def _check_lines(backend: Backend, file: TextFile, table: Table, notes: Notes, *, given: bool) -> None:
    names = [name for name in table.columns if name != ROW]
    spans = {name: table[name].contains("\n") | table[name].contains("\r") for name in names}
    counts = figures(backend, table, {f"_{place}": spans[name].cast("int64").sum() for place, name in enumerate(names)})
    found = {name: int(count or 0) for name, count in zip(names, counts.values(), strict=True) if count}
    if not found:
        return
    rows = table.filter(reduce(or_, (spans[name] for name in found))).order_by(ROW).limit(GLANCED)
    held = fetch(backend, rows.select(ROW, *found)).to_pylist()
    values = [
        (row[ROW], name, row[name]) for row in held for name in found if row[name] and re.search("[\r\n]", row[name])
    ]
    row, name, value = values[0]
    line = line_numbers(file, [row]).get(row, row + 1)
    what = f"{file.path}: line {line:,}: the value of column '{shortened(name)}' that begins there, {value[:40]!r},"
    if not given and all(
        _holds_rows(value, names.index(name), len(names), file.separator) for _, name, value in values
    ):
        raise DataError(
            f"{what} spans lines, each of which has {len(names)} columns if quotes are letters, so rows "
            f"may be lost in it; {KEEP}"
        )
    for name, count in found.items():
        notes.inferred.append(
            f"'{name}': {how_many(count, 'value')} of {file.path.name} span lines, the first from "
            f"line {line:,} on (quote=null takes quotes as letters)"
        )


def _holds_rows(value: str, place: int, num_columns: int, separator: str) -> bool:
    """Whether every line of a value, with the columns before and behind it, has as many columns as a row."""
    first, *middle, last = (line.count(separator) for line in re.split("\r\n|\r|\n", value))
    whole = num_columns - 1
    return num_columns > 1 and first == whole - place and last == place and all(count == whole for count in middle)


def _check_marks(backend: Backend, file: TextFile, table: Table, notes: Notes) -> None:
    names = [name for name in table.columns if name != ROW]
    mixed = _mixed_columns(file, len(names))
    if not mixed:
        return
    marked: Counter[tuple[int, str]] = Counter()
    first = 0
    for line, place, value in _marked(file, mixed, len(names)):
        if (place, value) in marked or len(marked) < MOST:
            marked[place, value] += 1
        first = first or line
    if not marked:
        return
    for place in sorted({place for place, _ in marked}):
        own = {value: count for (at, value), count in marked.items() if at == place}
        column = table.filter(table[names[place]].isin([*own]))
        counted = {
            row[names[place]]: row["rows"] for row in fetch(backend, counts_by(column, names[place])).to_pylist()
        }
        twice = next((value for value, count in own.items() if counted.get(value, 0) > count), None)
        called = f"column '{shortened(names[place])}'"
        if twice is not None and file.separator == "\t":
            raise DataError(
                f"{file.path}: {called} holds '{shortened(twice)}' with and without quotes, which would be "
                f"one value; {KEEP}"
            )
        example = f"'{shortened(twice)}' also without" if twice is not None else f"'{shortened(next(iter(own)))}'"
        notes.changed.append(
            f"{called} of {file.path.name}: {how_many(sum(own.values()), 'value')} in quotes though "
            f"others have none, such as {example}; quote=null keeps them"
        )


def _mixed_columns(file: TextFile, num_columns: int) -> set[int]:
    """The columns of texts that are not in quotes throughout the first rows."""
    bare: set[int] = set()
    for _, parts in islice(_plain_lines(file, num_columns), GLANCED):
        bare |= {
            place for place, part in enumerate(parts) if part and part[0] != file.quote and not NUMERIC.fullmatch(part)
        }
    return bare


def _marked(file: TextFile, places: set[int], num_columns: int) -> Iterator[tuple[int, int, str]]:
    """Line, column and text of the values that need no quotes and have some."""
    mark = file.quote
    for line, parts in _plain_lines(file, num_columns, mark):
        for place in places:
            inner = parts[place][1:-1]
            if len(parts[place]) > 2 and parts[place][0] == parts[place][-1] == mark and mark not in inner:
                yield line, place, inner


def _plain_lines(file: TextFile, num_columns: int, mark: str = "") -> Iterator[tuple[int, list[str]]]:
    """The lines with a mark that are rows whatever quotes mean."""
    lines = lines_of(file)
    if file.header:
        next(lines, None)
    for number, line in lines:
        if mark not in line:
            continue
        parts = line.rstrip("\r\n").split(file.separator)
        if len(parts) == num_columns:
            yield number, parts
