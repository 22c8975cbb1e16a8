"""Raw files of CSV, JSON lines, Parquet or sequences, staged as one table with the line of each row."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import BooleanValue, StringValue, Table
from ibis.expr.types import Column as Values

from recspec.encoding import MISSING_NUMBERS
from recspec.errors import DataError, SettingsError, listed, nearest
from recspec.prepare.backend import Backend
from recspec.prepare.duckdb_backend import json_keys
from recspec.prepare.names import ROW
from recspec.prepare.notes import Notes
from recspec.prepare.tables import count_rows, fetch
from recspec.prepare.text_files import JsonFile, TextFile, check_names, line_numbers, lines_of, read_header

RawLayout = Literal["rows", "sequences"]
RawType = Literal["string", "int64", "float64"]
Part = TextFile | JsonFile | Path
Staged = tuple[Table, Sequence[Part], Sequence[int], Collection[str]]
PARQUET_SUFFIXES = (".parquet",)
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz")
TEXT_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".txt", ".txt.gz")
NUMBER = r"^[+-]?([0-9]{1,40}(\.[0-9]*)?|\.[0-9]+)([eE](\+?[0-9]{1,2}|\+?[12][0-9]{2}|-[0-9]{1,3}))?$"
WHOLE = r"^[+-]?[0-9]{1,18}(\.0*)?$"
PLAIN_WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"
SHOWN = 3  # most rows named in a problem


@dataclass(frozen=True)
class Reading:
    """Options for reading raw files, whatever their columns."""

    separator: str | None = None
    encoding: str | None = None
    types: Mapping[str, RawType] = field(default_factory=dict)
    missing_values: tuple[str, ...] = ()
    time_format: str | None = None
    rows: int | None = None
    layout: RawLayout = "rows"


def check_encoding(text: str) -> str:
    """The canonical name of a text encoding. Raises ValueError if Python does not know it."""
    try:
        "".encode(text)  # refuses encodings of bytes, such as base64
        name = codecs.lookup(text).name
    except LookupError:
        raise ValueError(f"encoding '{text}' is not known; expected such as utf-8, utf-16, latin-1 or cp1252") from None
    return {"iso8859-1": "latin-1"}.get(name, name)


def find_raw_files(folder: Path, others: Collection[str], files: Sequence[str]) -> list[Path]:
    """The files that hold the rows: those in `files`, or all files of one kind, sorted by name."""
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in others]
    if files:
        named = {path.name: path for path in found}
        missing = [f"no file '{name}'{nearest(name, named)}" for name in files if name not in named]
        if missing:
            raise SettingsError.of(f"{folder}: setting 'files'", missing)
        return [named[name] for name in files]
    kinds = (PARQUET_SUFFIXES, JSON_SUFFIXES, TEXT_SUFFIXES)
    held = [paths for kind in kinds if (paths := [path for path in found if path.name.lower().endswith(kind)])]
    if len(held) == 1:
        return held[0]
    names = listed(path.name for path in found)
    raise DataError(f"{folder}: expected files of one kind, Parquet, JSON lines or CSV, found {names}; name those you "
                    f"mean, such as --set 'files=[{found[0].name if found else 'rows.csv'}]'")  # fmt: skip


@dataclass(frozen=True)
class RawRows:
    """Staged rows of raw files; collects problems and notes."""

    backend: Backend
    raw: Table  # the rows as they are in the files
    parts: Sequence[Part]
    counts: Sequence[int]  # the number of rows of each part
    texts: Collection[str]  # columns that are text by the format of the files
    reading: Reading
    notes: Notes
    problems: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The files, for the start of a message."""
        first = _path_of(self.parts[0])
        return str(first if len(self.parts) == 1 else first.parent)

    def places(self, rows: Sequence[int]) -> list[str]:
        """The places of rows, such as `line 252`, or `march.csv line 252` with several files."""
        found, first = {}, 0
        for part, count in zip(self.parts, self.counts, strict=True):
            own = [row - first for row in rows if first <= row < first + count]
            lines = self._lines(part, own) if own else {}
            named = f"{_path_of(part).name} " if len(self.parts) > 1 else ""
            for row in own:
                found[row + first] = f"{named}line {lines[row]:,}" if row in lines else f"{named}row {row + 1:,}"
            first += count
        return [found[row] for row in rows]

    def _lines(self, part: Part, rows: Sequence[int]) -> dict[int, int]:
        if isinstance(part, TextFile) and self.reading.layout == "sequences":
            events = enumerate(islice(_events(part), max(rows) + 1))
            return {place: line for place, (line, _, _) in events if place in set(rows)}
        return {} if isinstance(part, Path) else line_numbers(part, rows)

    @cached_property
    def table(self) -> Table:
        """The rows with null for declared missing values, and with few types for the many of Parquet."""
        table = self.raw
        return table.mutate(**{name: self._plain(table[name]) for name in table.columns if name != ROW})

    def _plain(self, values: Values) -> Values:
        kind = values.type()
        gone = self.reading.missing_values
        if kind.is_string():
            return values.nullif("") if not gone else ibis.ifelse(values.isin(["", *gone]), None, values)
        if kind.is_boolean():
            return values.cast("int64")
        if kind.is_numeric():
            number = values.cast("int64" if kind.is_integer() else "float64")
            numbers = [float(text) for text in gone if re.fullmatch(r"-?[0-9]{1,18}", text)]
            # As text, because DuckDB 2.0 evaluates isnan() by Parquet's statistics, which leave out NaN.
            wrong = number.cast("string").lower() == "nan" if not kind.is_integer() else ibis.literal(False)
            return ibis.ifelse(wrong | number.isin(numbers) if numbers else wrong, None, number)
        return values.cast("timestamp") if kind.is_date() else values

    def first(self, rows: Table) -> pa.Table:
        """The rows that a message names."""
        return fetch(self.backend, rows.order_by(ROW).limit(SHOWN))

    def refuse(self, wrong: BooleanValue, name: str, expected: str, called: str = "") -> None:
        """Add a problem that names the first rows for which `wrong` is true, if there are any."""
        rows = self.table.filter(wrong)
        found = self.first(rows.select(ROW, _value=rows[name].cast("string")))
        if not found.num_rows:
            return
        places, values = self.places(found.column(ROW).to_pylist()), found.column("_value").to_pylist()
        cut = [value and (value if len(value) <= 60 else f"{value[:60]}...") for value in values]
        said = ["missing" if value is None else repr(value) for value in cut]
        shown = [f"{place} is {value}" for place, value in zip(places, said, strict=True)]
        count = count_rows(self.backend, rows) if len(shown) == SHOWN else len(shown)
        more = f" (and {count - SHOWN:,} more)" if count > SHOWN else ""
        self.problems.append(f"column '{name}'{called}: {', '.join(shown)}{more}; {expected}")


def is_missing_marker(text: StringValue) -> BooleanValue:
    """Whether a text among numbers means a missing value."""
    return text.lower().isin([*MISSING_NUMBERS])


def number_of(text: StringValue, kind: str) -> Values:
    """The number that a text denotes, or null."""
    if kind == "int64":
        return ibis.ifelse(text.re_search(WHOLE), text.re_replace(r"\.0*$", ""), None).try_cast("int64")
    return ibis.ifelse(text.re_search(NUMBER), text, None).try_cast("float64")


# --- staging --------------------------------------------------------------------------------------------------------


def _path_of(part: Part) -> Path:
    return part if isinstance(part, Path) else part.path


def stage(
    backend: Backend, paths: Sequence[Path], ids: Sequence[str], reading: Reading, notes: Notes, folder: Path
) -> RawRows:
    """Stage the rows of all files; `ids` are the columns of layout sequences, `folder` is for intermediate files."""
    name = paths[0].name.lower()
    if reading.layout == "sequences":
        staged = _sequences(backend, paths, ids, reading, notes, folder)
    elif name.endswith(PARQUET_SUFFIXES):
        staged = _parquet(backend, paths)
    elif name.endswith(JSON_SUFFIXES):
        staged = _json(backend, paths)
    else:
        staged = _text(backend, paths, reading, notes)
    table, parts, counts, texts = staged
    if reading.rows is not None:
        table = table.filter(table[ROW] < reading.rows)
    return RawRows(backend, table, parts, counts, texts, reading, notes)


def _text(backend: Backend, paths: Sequence[Path], reading: Reading, notes: Notes) -> Staged:
    files = [_text_file(path, reading, notes) for path in paths]
    for file in files:
        if set(file.columns) != set(files[0].columns):
            differ = f"{listed(file.columns)} and {listed(files[0].columns)}"
            raise DataError(f"{file.path}: columns differ from those of {files[0].path.name}: {differ}; name the files "
                            "you mean with the setting 'files'")  # fmt: skip
    return _joined_up(backend, files, [backend.read_text(file) for file in files], ())


def _text_file(path: Path, reading: Reading, notes: Notes) -> TextFile:
    tabs = path.name.lower().endswith((".tsv", ".tsv.gz"))
    separator = reading.separator or ("\t" if tabs else ",")
    file = TextFile(path, {}, separator=separator, encoding=_encoding(path, reading, notes), multiline=True)
    names = read_header(file)
    if reading.separator is None and len(names) == 1 and (other := [mark for mark in ";\t|," if mark in names[0]]):
        shown = other[0].replace("\t", "\\t")
        raise DataError(f"{path}: no {separator!r} in the header, but {other[0]!r}, which seems to stand between the "
                        f"columns; --set 'separator={shown}' reads them so")  # fmt: skip
    return replace(file, columns=dict.fromkeys(names, "string"))


def _encoding(path: Path, reading: Reading, notes: Notes) -> str:
    if reading.encoding is not None:
        return reading.encoding
    with path.open("rb") as file:
        mark = file.read(2)
    if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        notes.inferred.append(f"{path.name} is read as utf-16, because it starts with that encoding's byte order mark")
        return "utf-16"
    return "utf-8"


def _joined_up(backend: Backend, parts: Sequence[Part], tables: Sequence[Table], texts: Collection[str]) -> Staged:
    counts = [count_rows(backend, table) for table in tables]
    names = [name for name in tables[0].columns if name != ROW]
    moved, first = [], 0
    for table, count in zip(tables, counts, strict=True):
        moved.append(table.select((table[ROW] + first).name(ROW), *names) if first else table.select(ROW, *names))
        first += count
    return ibis.union(*moved) if len(moved) > 1 else moved[0], parts, counts, texts


def _json(backend: Backend, paths: Sequence[Path]) -> Staged:
    found = [json_keys(path) for path in paths]
    kinds = {name: kind for keys in found for name, kind in keys.items()}
    if not kinds:
        raise DataError(f"{paths[0]}: holds no object with a key; expected a JSON object a line")
    lists = {name for name in kinds if all(keys.get(name, "list") == "list" for keys in found)}
    texts = {name for name in kinds if all(keys.get(name, "string") == "string" for keys in found)}
    columns = {name: "list" if name in lists else "string" for name in kinds}
    files = [JsonFile(path, columns) for path in paths]  # type: ignore[arg-type]
    return _joined_up(backend, files, [backend.read_json(file) for file in files], texts | lists)


def _parquet(backend: Backend, paths: Sequence[Path]) -> Staged:
    counts = []
    for path in paths:
        try:
            schema, expected = pq.read_schema(path), pq.read_schema(paths[0])
            counts.append(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: not a Parquet file: {error}") from None
        if "" in schema.names:
            raise DataError(f"{path}: column {schema.names.index('') + 1} has an empty name; name it")
        check_names(path, schema.names)
        if not schema.equals(expected):
            differ = f"{schema.names} and {expected.names}"
            raise DataError(f"{path}: columns differ from those of {paths[0].name}: {differ}")
    return backend.read_parquet(paths, row=True), paths, counts, expected.names


def _sequences(
    backend: Backend, paths: Sequence[Path], ids: Sequence[str], reading: Reading, notes: Notes, folder: Path
) -> Staged:
    """Stage lines of a user and then their items, the earliest first."""
    if strange := [path for path in paths if path.name.lower().endswith((*PARQUET_SUFFIXES, *JSON_SUFFIXES))]:
        raise DataError(f"{strange[0]}: layout sequences reads plain text, a user and their items a line; write it so, "
                        "or as one row an interaction and leave out layout")  # fmt: skip
    user, item = ids
    files = [TextFile(path, {}, separator=reading.separator or " ", header=False, quoted=False,
                      encoding=_encoding(path, reading, notes)) for path in paths]  # fmt: skip
    schema = pa.schema({user: pa.string(), item: pa.string()}.items())
    tables = []
    for number, file in enumerate(files):
        target = folder / f"sequences-{number}.parquet"
        events = _events(file, notes)
        with pq.ParquetWriter(target, schema) as writer:
            while block := list(islice(events, 100_000)):
                _, users, items = zip(*block, strict=True)
                writer.write_table(pa.table([pa.array(users), pa.array(items)], schema=schema))
        tables.append(backend.read_parquet([target], row=True))
    return _joined_up(backend, files, tables, (user, item))


def _events(file: TextFile, notes: Notes | None = None) -> Iterator[tuple[int, str, str]]:
    alone = 0
    for number, line in lines_of(file):
        if not line.strip():
            continue
        user, *items = line.split() if file.separator == " " else [part.strip() for part in line.split(file.separator)]
        alone += not items
        for item in items:
            yield number, user, item
    if alone and notes is not None:
        notes.dropped.append(f"{alone:,} users of {file.path.name}: their line holds no item")
