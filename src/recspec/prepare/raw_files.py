"""Raw files of CSV, JSON lines, Parquet or sequences, staged as one table with the line of each row."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import Table

from recspec.errors import DataError, SettingsError, listed, nearest
from recspec.prepare.backend import Backend
from recspec.prepare.duckdb_backend import json_keys
from recspec.prepare.notes import Notes
from recspec.prepare.tables import count_rows
from recspec.prepare.text_files import ROW, JsonFile, TextFile, check_names, line_numbers, lines_of, read_header

RawLayout = Literal["rows", "sequences"]
RawType = Literal["string", "int64", "float64"]
PARQUET_SUFFIXES = (".parquet",)
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz")
TEXT_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".txt", ".txt.gz")


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
    """The canonical name of a text encoding.

    Raises:
        ValueError: if Python does not know it.
    """
    try:
        "".encode(text)  # refuses encodings of bytes, such as base64
        name = codecs.lookup(text).name
    except LookupError:
        raise ValueError(f"encoding '{text}' is not known; expected such as utf-8, utf-16, latin-1 or cp1252") from None
    return {"iso8859-1": "latin-1"}.get(name, name)


def find_raw_files(folder: Path, others: Collection[str], files: Sequence[str]) -> list[Path]:
    """The files of a folder that hold the rows: those in `files`, or all files of one kind, sorted by name.

    Raises:
        SettingsError: if a file in `files` is missing.
        DataError: if there is no file, or files of several kinds.
    """
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in others]
    if files:
        named = {path.name: path for path in found}
        missing = [f"no file '{name}'{nearest(name, named)}" for name in files if name not in named]
        if missing:
            raise SettingsError.of(f"{folder}: setting 'files'", missing)
        return [named[name] for name in files]
    kinds = {kind: [path for path in found if path.name.lower().endswith(kind)]
             for kind in (PARQUET_SUFFIXES, JSON_SUFFIXES, TEXT_SUFFIXES)}  # fmt: skip
    held = [paths for paths in kinds.values() if paths]
    if len(held) == 1:
        return held[0]
    names = listed(path.name for path in found)
    raise DataError(f"{folder}: expected files of one kind, Parquet, JSON lines or CSV, found {names}; name those you "
                    f"mean, such as --set 'files=[{found[0].name if found else 'rows.csv'}]'")  # fmt: skip


Part = TextFile | JsonFile | Path


@dataclass(frozen=True)
class RawFiles:
    """Staged rows as they are in the files."""

    table: Table
    parts: Sequence[Part]
    counts: Sequence[int]
    """The number of rows of each part."""
    texts: Collection[str]
    """Columns that are text by the format of the files."""
    sequences: bool = False

    @property
    def where(self) -> str:
        """The files, for the start of a message."""
        first = path_of(self.parts[0])
        return str(first) if len(self.parts) == 1 else str(first.parent)

    def places(self, rows: Sequence[int]) -> list[str]:
        """The places of rows, such as `line 252`, or `march.csv line 252` with several files."""
        found, first = {}, 0
        for part, count in zip(self.parts, self.counts, strict=True):
            own = [row - first for row in rows if first <= row < first + count]
            lines = {} if isinstance(part, Path) and not self.sequences else self._lines(part, own)
            named = f"{path_of(part).name} " if len(self.parts) > 1 else ""
            for row in own:
                found[row + first] = f"{named}line {lines[row]:,}" if row in lines else f"{named}row {row + 1:,}"
            first += count
        return [found[row] for row in rows]

    def _lines(self, part: Part, rows: Sequence[int]) -> dict[int, int]:
        if not rows:
            return {}
        if not self.sequences:
            assert not isinstance(part, Path)
            return line_numbers(part, rows)
        assert isinstance(part, TextFile)
        events = enumerate(islice(_events(part), max(rows) + 1))
        return {place: line for place, (line, _, _) in events if place in set(rows)}


def path_of(part: Part) -> Path:
    """The file of a part."""
    return part if isinstance(part, Path) else part.path


def stage(
    backend: Backend, paths: Sequence[Path], ids: Sequence[str], reading: Reading, notes: Notes, folder: Path
) -> RawFiles:
    """Stage the rows of all files.

    Args:
        ids: Columns of the user and the item, for layout sequences.
        folder: For intermediate files.
    """
    if reading.layout == "sequences":
        return _sequences(backend, paths, ids, reading, notes, folder)
    name = paths[0].name.lower()
    if name.endswith(PARQUET_SUFFIXES):
        return _parquet(backend, paths)
    if name.endswith(JSON_SUFFIXES):
        return _json(backend, paths)
    files = [_text_file(path, reading, notes) for path in paths]
    for file in files:
        _check_alike(file.path, list(file.columns), files[0].path, list(files[0].columns))
    return _joined_up(backend, files, [backend.read_text(file) for file in files], ())


def _text_file(path: Path, reading: Reading, notes: Notes) -> TextFile:
    tabs = re.fullmatch(r"\.tsv(\.gz)?", "".join(path.suffixes[-2:]).lower()) or path.suffix.lower() == ".tsv"
    separator = reading.separator or ("\t" if tabs else ",")
    file = TextFile(path, {}, separator=separator, encoding=_encoding(path, reading, notes), multiline=True)
    names = read_header(file)
    if reading.separator is None and len(names) == 1 and (other := [mark for mark in ";\t|," if mark in names[0]]):
        shown = {"\t": "\\t"}.get(other[0], other[0])
        raise DataError(
            f"{path}: no {separator!r} in the header, but {other[0]!r}, which seems to stand between the columns; "
            f"--set 'separator={shown}' reads them so"
        )
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


def _joined_up(backend: Backend, parts: Sequence[Part], tables: Sequence[Table], texts: Collection[str]) -> RawFiles:
    counts = [count_rows(backend, table) for table in tables]
    names = [name for name in tables[0].columns if name != ROW]
    moved, first = [], 0
    for table, count in zip(tables, counts, strict=True):
        moved.append(table.select((table[ROW] + first).name(ROW), *names) if first else table.select(ROW, *names))
        first += count
    return RawFiles(ibis.union(*moved) if len(moved) > 1 else moved[0], parts, counts, texts)


def _check_alike(path: Path, names: Sequence[str], first: Path, expected: Sequence[str]) -> None:
    if set(names) != set(expected):
        raise DataError(f"{path}: columns differ from those of {first.name}: {listed(names)} and {listed(expected)}; "
                        "name the files you mean with the setting 'files'")  # fmt: skip


def _json(backend: Backend, paths: Sequence[Path]) -> RawFiles:
    found = [json_keys(path) for path in paths]
    kinds = {name: kind for keys in found for name, kind in keys.items()}
    if not kinds:
        raise DataError(f"{paths[0]}: holds no object with a key; expected a JSON object a line")
    lists = {name for name in kinds if all(keys.get(name, "list") == "list" for keys in found)}
    texts = {name for name in kinds if all(keys.get(name, "string") == "string" for keys in found)}
    columns = {name: "list" if name in lists else "string" for name in kinds}
    files = [JsonFile(path, columns) for path in paths]  # type: ignore[arg-type]
    return _joined_up(backend, files, [backend.read_json(file) for file in files], texts | lists)


def _parquet(backend: Backend, paths: Sequence[Path]) -> RawFiles:
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
            raise DataError(f"{path}: columns differ from those of {paths[0].name}: {schema.names} and "
                            f"{expected.names}")  # fmt: skip
    return RawFiles(backend.read_parquet(paths, row=True), paths, counts, expected.names)


def _sequences(
    backend: Backend, paths: Sequence[Path], ids: Sequence[str], reading: Reading, notes: Notes, folder: Path
) -> RawFiles:
    """Stage lines of a user and then their items, the earliest first.

    Raises:
        DataError: if a file is not plain text.
    """
    if strange := [path for path in paths if path.name.lower().endswith((*PARQUET_SUFFIXES, *JSON_SUFFIXES))]:
        raise DataError(
            f"{strange[0]}: layout sequences reads plain text, a user and their items a line; "
            "write it so, or as one row an interaction and leave out layout"
        )
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
    return replace(_joined_up(backend, files, tables, (user, item)), sequences=True)


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
