"""Raw text files: how a delimited or JSON file is laid out, its columns and its lines."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Literal

from recspec.errors import DataError, listed, nearest
from recspec.files import LINE_BYTES, LineError, bounded_lines, opened

ROW = "__row__"
"""Column that holds a row's place in its raw file. A file with a column of this name is refused."""
ColumnType = Literal["int64", "float64", "string", "list"]
"""A list holds text and occurs in JSON alone."""
ROW_BYTES = 2 << 20
"""Most bytes of a row of a delimited file, which may span lines; see `LINE_BYTES` for JSON."""
ENGINE_ENCODINGS = ("utf-8", "latin-1")
"""Encodings that every backend reads."""


@dataclass(frozen=True)
class TextFile:
    """The layout of a delimited text file."""

    path: Path
    columns: Mapping[str, ColumnType]
    """Columns to read and their types; without a header, all columns of the file in order."""
    separator: str = ","
    header: bool = True
    encoding: str = "utf-8"
    """Any that Python knows. Files in other encodings than UTF-8 and Latin-1 are first copied as UTF-8."""
    quoted: bool = True
    """Whether values may be in double quotes; a doubled quote inside is one quote."""
    multiline: bool = False
    """Whether a quoted value may contain a line break. DuckDB reads such a file for Spark, as one task."""
    required: Sequence[str] = field(default=())
    """Columns without missing values."""


@dataclass(frozen=True)
class JsonFile:
    """A file of one JSON object per line; blank lines are skipped."""

    path: Path
    columns: Mapping[str, ColumnType]
    """Keys to read and their types; an object may lack them and may have others. A value that is not text is read as
    its JSON text if its type is `string`."""
    required: Sequence[str] = field(default=())
    """Keys that every object has."""


def file_columns(file: TextFile) -> dict[str, ColumnType]:
    """All columns of the file in order; columns not in `file.columns` are read as strings.

    Raises:
        DataError: if the header lacks a column or repeats one.
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
    """Refuse names that an engine confuses because they differ in case alone, and the name `ROW`.

    Raises:
        DataError: naming all of them.
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
    """The column names in the first line; the third is `column_3` if the line leaves its name empty."""
    try:
        with open_text(file) as stream:
            _, first = next(numbered_records(file, stream), (0, None))
    except LineError as error:
        raise DataError(f"{file.path}: {error}") from None
    except UnicodeError as error:
        raise DataError(f"{file.path}: {not_text(file, error)}") from None
    if first is None:
        raise DataError(f"{file.path}: is empty; expected a header line and rows")
    return [name or f"column_{place}" for place, name in enumerate(first, 1)]


def readable(file: TextFile, copy: Path) -> TextFile:
    """The file, or a copy of it as UTF-8 if a backend does not read its encoding.

    Raises:
        DataError: if it is not text in its encoding.
    """
    if file.encoding in ENGINE_ENCODINGS:
        return file
    try:
        with open_text(file) as stream, copy.open("w", encoding="utf-8", newline="") as written:
            shutil.copyfileobj(stream, written, 1 << 20)
    except UnicodeError as error:
        copy.unlink(missing_ok=True)
        raise DataError(f"{file.path}: {not_text(file, error)}") from None
    return replace(file, path=copy, encoding="utf-8")


def line_numbers(file: TextFile | JsonFile, rows: Sequence[int]) -> dict[int, int]:
    """The line in which each of the given rows begins, counted from 1 as in editors.

    Reads the file up to the last row, so it is for messages only.
    """
    found: dict[int, int] = {}
    with suppress(LineError), open_text(file) as stream:
        if isinstance(file, JsonFile):
            lines = (number for number, line in enumerate(bounded_lines(stream, LINE_BYTES), 1) if line.strip())
        else:
            lines = (number for number, _ in numbered_records(file, stream))
            if file.header:
                next(lines, None)
        wanted = set(rows)
        for row, line in enumerate(islice(lines, max(rows, default=-1) + 1)):
            if row in wanted:
                found[row] = line
    return found


def lines_of(file: TextFile) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers from 1.

    Raises:
        DataError: if a line is too long, or the file contradicts its encoding or its suffix.
    """
    try:
        with open_text(file) as stream:
            yield from enumerate(bounded_lines(stream, ROW_BYTES), 1)
    except LineError as error:
        raise DataError(f"{file.path}: {error}") from None
    except UnicodeError as error:
        raise DataError(f"{file.path}: {not_text(file, error)}") from None


def numbered_records(file: TextFile, stream: IO[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and the values of every record that is not blank."""
    lines = bounded_lines(stream, ROW_BYTES)
    if not (file.quoted and len(file.separator) == 1):
        for number, line in enumerate(lines, 1):
            text = line.rstrip("\r\n")
            if text:
                yield number, text.split(file.separator)
        return
    csv.field_size_limit(ROW_BYTES)  # for the whole process, which uses the csv module here alone
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


def not_text(file: TextFile | JsonFile, error: UnicodeError) -> str:
    """The problem of a file that is not text in its encoding."""
    held = (
        f"byte 0x{error.object[error.start]:02x} ({error.reason})" if isinstance(error, UnicodeDecodeError) else error
    )
    return (
        f"is not {_encoding(file)} text: {held}; convert it to utf-8, or name its encoding where the dataset has "
        "that setting, as in --set encoding=cp1252"
    )


def _encoding(file: TextFile | JsonFile) -> str:
    return file.encoding if isinstance(file, TextFile) else "utf-8"


@contextmanager
def open_text(file: TextFile | JsonFile) -> Iterator[IO[str]]:
    """Open a text file, unpacked and without a byte order mark."""
    encoding = "utf-8-sig" if _encoding(file) == "utf-8" else _encoding(file)
    with opened(file.path) as stream:
        yield io.TextIOWrapper(stream, encoding=encoding, newline="")
