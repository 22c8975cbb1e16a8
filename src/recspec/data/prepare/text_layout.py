"""The layout of a text file by its first bytes and lines: encoding, separator, header, names, sequences, quotes."""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice
from operator import or_
from pathlib import Path

from ibis.expr.types import Table

from recspec.base.errors import DataError, SettingsError, how_many, listed, shortened
from recspec.base.files import opened
from recspec.data.prepare.backend import Backend, count_where, fetch
from recspec.data.prepare.declared import GUESSES, PER_SECOND, fits
from recspec.data.prepare.known_layouts import KNOWN, OTHERS, SEQUENCES, TextLayout
from recspec.data.prepare.names import FILE_SPLIT, ROW, Notes, is_usual
from recspec.data.prepare.tables import counts_by
from recspec.data.prepare.text_files import TextFile, line_numbers, lines_of, numbered_records, open_text

SEPARATORS = ("\t", "::", ";", "|", " ")
"""Separators to try where the usual one does not occur in the first line."""
NAMED = {"\t": "tabs", " ": "blanks", ",": "commas", "::": "'::'", ";": "semicolons", "|": "'|'"}
GLANCED = 1_000  # lines
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
DATE = re.compile(r"[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}([T ].*)?")
WHOLE = re.compile(r"[0-9]+")
ASIN, REVIEWER = re.compile("[0-9B][0-9A-Z]{9}"), re.compile("A[0-9A-Z]{9,}")  # items and users of Amazon
EPOCH = (3e8, 4.2e9)  # seconds since 1970, of 1979 to 2103
HIGHEST_RATING = 100.0
TRIED = 20  # values whose time is looked for in all formats
FEWEST, FEW_RATINGS = 20, 10  # rows that tell ids from ratings; most different ratings


def glance(
    file: TextFile,
    *,
    separator: str | None,
    columns: Sequence[str],
    layout: str | None,
    mentioned: Collection[str],
    key: str | None = None,
    notes: Notes,
) -> TextLayout:
    """The layout of a file, given what settings say; everything inferred leaves a note.

    `file.separator` is the usual separator of such a file. `mentioned` are the column names in settings; `key` is the
    id's column in a file of users or items. Raises DataError if the file is empty, and SettingsError if `columns` do
    not fit it.
    """
    lines = [line for _, line in islice(lines_of(file), GLANCED) if line.strip()]
    if not lines:
        raise DataError(f"{file.path}: is empty; expected a header line and rows")
    if layout == "sequences":
        return replace(SEQUENCES, separator=separator or " ")
    if not columns and (known := _known(file, lines, key, notes)) is not None:
        return replace(known, names=_unique(known.names, file, notes))
    if layout is None and not columns and (found := _sequences(lines, separator)) is not None:
        mark, shortest, longest = found
        notes.inferred.append(
            f"{file.path.name}: each line is a user followed by the user's items, oldest first, because lines hold "
            f"{shortest:,} to {longest:,} whole numbers, separated by {NAMED[mark]}, and no user comes twice "
            "(layout=rows reads rows)"
        )
        return replace(SEQUENCES, separator=mark)
    chosen = separator or _separator(file, lines)
    if separator is None and chosen != file.separator:
        notes.inferred.append(
            f"{file.path.name}: columns are separated by {NAMED[chosen]}, as in the first line "
            f"(separator='{chosen.replace(chr(9), chr(92) + 't')}')"
        )
    with_separator = replace(file, separator=chosen, quote=file.quote if len(chosen) == 1 and chosen != " " else "")
    with open_text(with_separator) as stream:
        rows = [values for _, values in islice(numbered_records(with_separator, stream), GLANCED)]
    return _named(with_separator, rows, columns, mentioned, key, notes)


def _known(file: TextFile, lines: Sequence[str], key: str | None, notes: Notes) -> TextLayout | None:
    for name, (pattern, remedy) in OTHERS.items():
        if len(lines) > 1 and pattern.match("".join(lines[:2])):
            raise DataError(f"{file.path}: its first lines are those of {name}; {remedy}")
    parts = [line.split() for line in lines]
    if len({len(each) for each in parts}) > 1 and all(each[0] == str(len(each) - 1) for each in parts):
        raise DataError(
            f"{file.path}: each line begins with the number of the values behind it, and names no user; "
            f"write the number of the line there, as awk '{{$1=NR}}1' {file.path.name} does"
        )
    for name, recognise in KNOWN.items():
        if (found := recognise(lines, key)) is not None:
            notes.inferred.append(f"{file.path.name}: read as {name}: {found.told} (columns=[...] reads it otherwise)")
            if found.lost:
                notes.dropped.append(f"{file.path.name}, as {name}: {found.lost}")
            return found
    return None


def _separator(file: TextFile, lines: Sequence[str]) -> str:
    first = lines[0].rstrip("\r\n")
    if file.separator in first:
        return file.separator
    for mark in ("," if file.separator != "," else "\t", *SEPARATORS):
        if mark in first.strip() and _count(first, mark) > 1:
            return mark
    return file.separator


def _count(line: str, mark: str) -> int:
    text = line.rstrip("\r\n")
    if len(mark) > 1:
        return len(text.split(mark))
    return len(text.split()) if mark == " " else len(next(csv.reader([text], delimiter=mark), []))


def _sequences(lines: Sequence[str], separator: str | None) -> tuple[str, int, int] | None:
    """The separator and the bounds of the length, if lines clearly are sequences."""
    for mark in (" ", "\t", ",") if separator is None else (separator,):
        parts = [line.split() if mark == " " else [part.strip() for part in line.strip().split(mark)] for line in lines]
        if mark == " " and any("\t" in line.strip() for line in lines):
            continue
        lengths = {len(part) for part in parts}
        if len(lengths) < 2 or max(lengths) < 3 or len({part[0] for part in parts}) < len(parts):
            continue
        if mark in NAMED and all(WHOLE.fullmatch(value) for part in parts for value in part):
            return mark, min(lengths), max(lengths)
    return None


# --- names of columns ------------------------------------------------------------------------------------------------


def _named(
    file: TextFile,
    rows: Sequence[Sequence[str]],
    columns: Sequence[str],
    mentioned: Collection[str],
    key: str | None,
    notes: Notes,
) -> TextLayout:
    first, name = list(rows[0]), file.path.name
    if columns:
        if len(columns) != len(first):
            raise SettingsError(
                f"setting 'columns': names {len(columns)} columns, and the first line of {file.path} has {len(first)}, "
                f"separated by {file.separator!r}: {shortened(file.separator.join(first))!r}; name them all, in order"
            )
        header = [value.strip().lower() for value in first] == [value.lower() for value in columns]
        return TextLayout(file.separator, header, _unique(columns, file, notes), file.quote)
    generated = [f"column_{place}" for place in range(1, len(first) + 1)]
    asked = {*mentioned} & {*generated}
    has_name = any(value.strip() in mentioned or is_usual(value) for value in first)
    if has_name or not (asked or _is_data(first)):
        return TextLayout(file.separator, True, _unique(first, file, notes), file.quote)
    names = tuple(generated)
    if not asked:
        names = _by_position(rows, generated, str(file.path)) if key is None else (key, *generated[1:])
    notes.inferred.append(
        f"{name}: the first line is data, not a header; its {len(first)} columns are taken as {listed(names)} "
        f"(columns=[{', '.join(shortened(each) for each in names[:6])}{', ...' if len(names) > 6 else ''}] names "
        "them otherwise)"
    )
    return TextLayout(file.separator, False, names, file.quote)


def _is_data(first: Sequence[str]) -> bool:
    """Whether a first line without a usual name is no header: it holds a number or a time."""
    values = [value.strip() for value in first]
    return any(NUMBER.fullmatch(value) or _is_written_time(value) for value in values)


def _is_written_time(text: str) -> bool:
    return DATE.fullmatch(text) is not None or any(fits(text, form) for form in GUESSES)


def _by_position(rows: Sequence[Sequence[str]], generated: Sequence[str], where: str) -> tuple[str, ...]:
    """A user, then an item, beside a time at any place and a rating behind them; other columns as `column_5`.

    Raises SettingsError if the values leave it open which column is which.
    """
    names = [*generated]
    if not 2 <= len(names) <= 4:
        return tuple(names)
    held = [
        [row[place].strip() for row in rows if len(row) > place and row[place].strip()] for place in range(len(names))
    ]
    written = [place for place, values in enumerate(held) if values and all(map(_is_written_time, values[:TRIED]))]
    counted = [place for place, values in enumerate(held) if _are_times(values)]
    others = [place for place in range(len(names)) if place not in written]
    late = [place for place in counted if place > 1]
    early = [place for place in counted if place <= 1 and not written and not late and len(names) > 2]
    time = next(iter([*written, *late, *early]), None)
    others = [place for place in others if place != time]
    if len(others) < 2:
        return tuple(names)
    ratings = [place for place in others if _are_ratings(held[place])]
    if (early and any(_are_small(held[place]) for place in others[1:])) or _is_rating_first(others, ratings, len(rows)):
        raise SettingsError(
            f"{where}: has no header, and its values leave open which column is the user, the item, "
            f"the rating and the time: {shortened(', '.join(rows[0]))!r}; name them in order, such as "
            "--set 'columns=[user_id, item_id, rating]'"
        )
    user, item = others[:2]
    if all(map(ASIN.fullmatch, held[user])) and all(map(REVIEWER.fullmatch, held[item])):
        user, item = item, user
    names[user], names[item] = "user_id", "item_id"
    if time is not None:
        names[time] = "timestamp"
    rating = next((place for place in others[2:] if _are_small(held[place])), None)
    if rating is not None:
        names[rating] = "rating"
    return tuple(names)


def _is_rating_first(others: Sequence[int], ratings: Sequence[int], num_rows: int) -> bool:
    """Whether a column in place of the user or the item, and none behind them, looks like ratings or a label."""
    early = [place for place in others[:2] if place in ratings]
    return len(others) > 2 and num_rows >= FEWEST and bool(early) and not {*others[2:]} & {*ratings}


def _are_times(values: Sequence[str]) -> bool:
    """Whether all are numbers of times since 1970 in one unit, or days such as 20240131."""
    if not values or not all(map(NUMBER.fullmatch, values)):
        return False
    if all(fits(value, "%Y%m%d") and "1980" < value < "2066" for value in values):
        return len(values) >= FEWEST
    numbers = [float(value) for value in values]
    return any(EPOCH[0] * unit <= min(numbers) and max(numbers) <= EPOCH[1] * unit for unit in PER_SECOND.values())


def _are_small(values: Sequence[str]) -> bool:
    return bool(values) and all(map(NUMBER.fullmatch, values)) and max(abs(float(v)) for v in values) <= HIGHEST_RATING


def _are_ratings(values: Sequence[str]) -> bool:
    """Whether all are small numbers, of which there are few, or fractions."""
    if not _are_small(values):
        return False
    few = len({*values}) <= FEW_RATINGS and max(float(value) for value in values) <= FEW_RATINGS
    return few or any("." in value for value in values)


def _unique(names: Sequence[str], file: TextFile, notes: Notes) -> tuple[str, ...]:
    """Names without empty ones and without two that differ in case at most, which engines can't keep apart."""
    wanted = {name.lower() for name in names}
    found: list[str] = []
    taken: set[str] = {ROW, FILE_SPLIT}
    for place, name in enumerate(names, 1):
        new, number = name or f"column_{place}", 2
        while new.lower() in taken or (new != name and new.lower() in wanted):
            new, number = f"{name or f'column_{place}'}_{number}", number + 1
        if new != name:
            why = "has no name" if not name else f"is named '{shortened(name)}', as another one or as a column of ours"
            notes.changed.append(f"column {place} of {file.path.name} {why}; it is '{shortened(new)}' here")
        taken.add(new.lower())
        found.append(new)
    return tuple(found)


OTHER_KINDS: Mapping[tuple[str, str], tuple[bytes, ...]] = {
    ("a zip file, or a spreadsheet", "unpack it, or save it as CSV"): (b"PK\x03\x04",),
    ("an old spreadsheet (.xls)", "save it as CSV"): (b"\xd0\xcf\x11\xe0",),
    ("a Parquet file", "name it .parquet"): (b"PAR1",),
    ("a gzipped file", "name it .gz"): (b"\x1f\x8b",),
    ("a file compressed by zstd", "name it .zst"): (b"\x28\xb5\x2f\xfd",),
    ("a file compressed by bzip2", "name it .bz2"): (b"BZh",),
    ("a file compressed by xz", "unpack it"): (b"\xfd7zXZ",),
    ("an SQLite database", "export its table as CSV or Parquet"): (b"SQLite format 3",),
    ("a PDF file", "export its table as CSV"): (b"%PDF-",),
    ("an HDF5 file", "save its table as Parquet, as with pandas.read_hdf(FILE).to_parquet(...)"): (b"\x89HDF",),
    ("an Arrow or Feather file", "save it as Parquet, as with pyarrow.feather.read_table"): (b"ARROW1",),
    ("an ORC file", "save it as Parquet, as with pyarrow.orc.read_table"): (b"ORC",),
    ("an Avro file", "save it as Parquet, as DuckDB's avro extension does"): (b"Obj\x01",),
    ("a NumPy file", "save its columns as Parquet"): (b"\x93NUMPY",),
    ("a MATLAB file", "save its table as Parquet, as with scipy.io.loadmat"): (b"MATLAB ",),
    ("a pickle, which may run any code", "load it where you trust it, and save it as Parquet"): (
        b"\x80\x04\x95",
        b"\x80\x03",
    ),
    ("a pointer of Git LFS", "fetch the file itself with `git lfs pull`"): (b"version https://",),
    ("a web page", "download the file itself"): (b"<!DOCTYPE", b"<!doctype", b"<html"),
    ("XML", "save its rows as CSV or JSON lines"): (b"<?xml",),
    ("an ARFF file of Weka", "save it as CSV, as with scipy.io.arff.loadarff"): (b"@relation", b"@RELATION"),
    ("an SQL dump", "load it into a database, and export its table as CSV"): (
        b"-- MySQL dump",
        b"CREATE TABLE",
        b"INSERT INTO",
    ),
    ("a MatrixMarket file", "save its rows, columns and values as CSV"): (b"%%MatrixMarket",),
}
"""What a file is where text is expected, and what to do: the first bytes of such a file."""


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
    for (kind, remedy), marks in OTHER_KINDS.items():
        if start.startswith(marks):
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


MOST_MARKED = 1_000  # different quoted values to compare
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
    found = {name: count for name, count in count_where(backend, table, spans).items() if count}
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
        if (place, value) in marked or len(marked) < MOST_MARKED:
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
