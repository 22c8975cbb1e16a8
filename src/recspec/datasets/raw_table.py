"""Raw files of any kind as one table whose columns have types: CSV, JSON lines, Parquet, or a sequence a line.

Text has no types, so a column's type is judged by all of its values, never by the first ones. Ids and categories stay
text, letter for letter. Whatever is guessed or changed leaves a note, and what can't be judged is an error that names
the rows at fault as editors count them: the lines of a text file, the rows of a Parquet file.
"""

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

from recspec.datasets.notes import Notes
from recspec.encoding import MISSING_NUMBERS, TRUTH
from recspec.errors import DataError, SettingsError, listed, nearest
from recspec.tables import (
    ROW,
    Backend,
    JsonFile,
    TextFile,
    check_names,
    count_rows,
    fetch,
    json_keys,
    line_numbers,
    lines_of,
    read_header,
)

Layout = Literal["rows", "sequences"]
Type = Literal["string", "int64", "float64"]

PARQUET_SUFFIXES = (".parquet",)
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz")
TEXT_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".txt", ".txt.gz")

LABELS = {1: ("1", "1.0", "true", "t", "yes", "y"), 0: ("0", "0.0", "false", "f", "no", "n")}
"""What a label may be written as, in any case."""

NUMBER = r"^[+-]?([0-9]{1,40}(\.[0-9]*)?|\.[0-9]+)([eE](\+?[0-9]{1,2}|\+?[12][0-9]{2}|-[0-9]{1,3}))?$"
WHOLE = r"^[+-]?[0-9]{1,18}(\.0*)?$"
PLAIN_WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"
CODE = r"^[+-]?(0[0-9]|[0-9]{19})"
"""Digits that are a code: as a number they would lose a leading zero, or digits at the end."""
WRITTEN = r"^[-+(]?[$€£¥]? ?[0-9]{1,3}([., ']?[0-9]{3})*([.,][0-9]+)?-? ?[%$€£¥]?[)]?$"
"""Numbers as people write them: `1,234.50`, `12,5`, `$3`, `7 %`."""

DATE = r"^([0-9]{4})[-/]([0-9]{2})[-/]([0-9]{2})"
CLOCK = r"([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.,][0-9]+)?)?)"
ZONE = r" ?(Z|z|UTC|GMT|[+-][0-9]{2}(:?[0-9]{2})?)"
UNZONED = f"{DATE}{CLOCK}?$"
ZONED = f"{DATE}{CLOCK}{ZONE}$"

PER_SECOND = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
"""Units of numbers that count from 1970."""
DIRECTIVES = {
    "Y": r"(?P<Y>[0-9]{4})", "y": r"(?P<y>[0-9]{2})", "m": r"(?P<m>[0-9]{1,2})", "d": r"(?P<d>[0-9]{1,2})",
    "b": r"(?P<b>[A-Za-z]{3})[A-Za-z]*", "B": r"(?P<b>[A-Za-z]{3})[A-Za-z]*", "H": r"(?P<H>[0-9]{1,2})",
    "I": r"(?P<I>[0-9]{1,2})", "M": r"(?P<M>[0-9]{1,2})", "S": r"(?P<S>[0-9]{1,2})", "f": r"(?P<f>[0-9]{1,9})",
    "p": r"(?P<p>[AaPp])\.?[Mm]\.?", "z": r"(?P<z>Z|z|[+-][0-9]{2}(?::?[0-9]{2})?)", "%": "%",
}  # fmt: skip
"""Python's codes of `time_format`, as what they match."""
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
GUESSES = ("%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y.%m.%d", "%m/%d/%y", "%d/%m/%y", "%d %b %Y",
           "%b %d, %Y", "%d-%b-%Y", "%Y%m%d")  # fmt: skip
"""Formats that a message suggests where they fit."""

SHOWN = 3
"""Rows named in a problem."""
GLANCED = 1_000
"""Rows that are looked at to suggest a time column."""


@dataclass(frozen=True)
class Reading:
    """How raw files are read, whatever their columns."""

    separator: str | None = None
    encoding: str | None = None
    types: Mapping[str, Type] = field(default_factory=dict)
    missing_values: tuple[str, ...] = ()
    time_format: str | None = None
    rows: int | None = None
    layout: Layout = "rows"


@dataclass(frozen=True)
class Roles:
    """What is asked of the columns of a table."""

    ids: tuple[str, ...] = ()
    """Text, and none may be missing, except in a file of users or items: see `shown`."""
    texts: Collection[str] = ()
    """Text as it is written."""
    categories: Collection[str] = ()
    """Likewise, but true and false are 1 and 0 in whatever way they are written."""
    numbers: Collection[str] = ()
    features: Collection[str] = ()
    """The type is judged by the values."""
    shown: bool = False
    """Whether it is a file of users or items: all further columns are judged too, and nothing is said of these."""
    time: str | None = None
    label: str | None = None
    positive_from: float | None = None


def check_time_format(text: str) -> str:
    """A time format that can be read.

    Raises:
        ValueError: naming the codes that can't, or that lack.
    """
    if text in PER_SECOND:
        return text
    codes = re.findall("%(.)", text)
    known = ", ".join(f"%{code}" for code in DIRECTIVES)
    strange = sorted({f"%{code}" for code in codes if code not in DIRECTIVES})
    if strange or not codes:
        found = f"has {', '.join(strange)}" if strange else "has no code such as %Y"
        raise ValueError(f"time_format '{text}' {found}; known: {known}, or {', '.join(PER_SECOND)} since 1970")
    fields = ["y" if code == "Y" else "b" if code in "Bm" else code for code in codes if code != "%"]
    lacking = [f"%{code}" for code, needed in (("Y", "y"), ("m", "b"), ("d", "d")) if needed not in fields]
    doubled = sorted({f"%{code}" for code in fields if fields.count(code) > 1})
    if lacking or doubled:
        raise ValueError(f"time_format '{text}' {'lacks' if lacking else 'has twice'} {', '.join(lacking or doubled)}")
    return text


def check_encoding(text: str) -> str:
    """The plain name of an encoding of text.

    Raises:
        ValueError: if Python knows none of that name.
    """
    try:
        "".encode(text)  # an encoding of bytes, such as base64, is refused here
        name = codecs.lookup(text).name
    except LookupError:
        raise ValueError(f"encoding '{text}' is not known; expected such as utf-8, utf-16, latin-1 or cp1252") from None
    return {"iso8859-1": "latin-1"}.get(name, name)


def find(folder: Path, others: Collection[str], files: Sequence[str]) -> list[Path]:
    """The files of a folder that together are the rows: those named in `files`, or all of one kind, by name.

    Raises:
        SettingsError: if one that is named is not there.
        DataError: if there is none, or files of several kinds.
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


def read(backend: Backend, paths: Sequence[Path], roles: Roles, reading: Reading, notes: Notes, folder: Path) -> Table:
    """The rows of all files, one file after another, with typed columns and the column `ROW`.

    The time column holds numbers: seconds since 1970, or those of the file. The label holds 0 and 1.

    Args:
        folder: Where intermediate files may lie.

    Raises:
        DataError: naming the rows whose values are not what their column is.
        SettingsError: if a setting names a type that a column can't have.
    """
    raw = _stage(backend, paths, roles, reading, notes, folder)
    if reading.rows is not None:
        raw = replace(raw, table=raw.table.filter(raw.table[ROW] < reading.rows))
    return _Typing(backend, raw, roles, reading, notes).table()


# --- files -----------------------------------------------------------------------------------------------------------

Part = TextFile | JsonFile | Path


@dataclass(frozen=True)
class _Raw:
    """The rows as they are in the files."""

    table: Table
    parts: Sequence[Part]
    counts: Sequence[int]
    """Rows of each part."""
    texts: Collection[str]
    """Columns that the files themselves call text."""
    sequences: bool = False

    @property
    def where(self) -> str:
        """The files, as the head of a message."""
        first = _path(self.parts[0])
        return str(first) if len(self.parts) == 1 else str(first.parent)

    def places(self, rows: Sequence[int]) -> list[str]:
        """Where rows stand, as in `line 252`, or `march.csv line 252` where there are several files."""
        found, first = {}, 0
        for part, count in zip(self.parts, self.counts, strict=True):
            own = [row - first for row in rows if first <= row < first + count]
            lines = {} if isinstance(part, Path) and not self.sequences else self._lines(part, own)
            named = f"{_path(part).name} " if len(self.parts) > 1 else ""
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


def _path(part: Part) -> Path:
    return part if isinstance(part, Path) else part.path


def _stage(backend: Backend, paths: Sequence[Path], roles: Roles, reading: Reading, notes: Notes, folder: Path) -> _Raw:
    if reading.layout == "sequences":
        return _sequences(backend, paths, roles, reading, notes, folder)
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
        notes.inferred.append(f"{path.name} is read as utf-16, for it begins with that encoding's mark")
        return "utf-16"
    return "utf-8"


def _joined_up(backend: Backend, parts: Sequence[Part], tables: Sequence[Table], texts: Collection[str]) -> _Raw:
    counts = [count_rows(backend, table) for table in tables]
    names = [name for name in tables[0].columns if name != ROW]
    moved, first = [], 0
    for table, count in zip(tables, counts, strict=True):
        moved.append(table.select((table[ROW] + first).name(ROW), *names) if first else table.select(ROW, *names))
        first += count
    return _Raw(ibis.union(*moved) if len(moved) > 1 else moved[0], parts, counts, texts)


def _check_alike(path: Path, names: Sequence[str], first: Path, expected: Sequence[str]) -> None:
    if set(names) != set(expected):
        raise DataError(f"{path}: columns differ from those of {first.name}: {listed(names)} and {listed(expected)}; "
                        "name the files you mean with the setting 'files'")  # fmt: skip


def _json(backend: Backend, paths: Sequence[Path]) -> _Raw:
    found = [json_keys(path) for path in paths]
    kinds = {name: kind for keys in found for name, kind in keys.items()}
    if not kinds:
        raise DataError(f"{paths[0]}: holds no object with a key; expected a JSON object a line")
    lists = {name for name in kinds if all(keys.get(name, "list") == "list" for keys in found)}
    texts = {name for name in kinds if all(keys.get(name, "string") == "string" for keys in found)}
    columns = {name: "list" if name in lists else "string" for name in kinds}
    files = [JsonFile(path, columns) for path in paths]  # type: ignore[arg-type]
    return _joined_up(backend, files, [backend.read_json(file) for file in files], texts | lists)


def _parquet(backend: Backend, paths: Sequence[Path]) -> _Raw:
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
    return _Raw(backend.read_parquet(paths, row=True), paths, counts, expected.names)


def _sequences(
    backend: Backend, paths: Sequence[Path], roles: Roles, reading: Reading, notes: Notes, folder: Path
) -> _Raw:
    """A line is a user, then what they acted on, the earliest first.

    Raises:
        DataError: if a file is not plain text, whose words would become ids.
    """
    if strange := [path for path in paths if path.name.lower().endswith((*PARQUET_SUFFIXES, *JSON_SUFFIXES))]:
        raise DataError(
            f"{strange[0]}: layout sequences reads plain text, a user and their items a line; "
            "write it so, or as one row an interaction and leave out layout"
        )
    user, item = roles.ids
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
    """The line, the user and the item of each event."""
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


# --- types -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """How many values of a column of text are written in which way."""

    present: int
    numbers: int
    plain: int
    codes: int
    written: int
    truths: int
    markers: int

    @property
    def rest(self) -> int:
        """Values that are no numbers, though not missing."""
        return self.present - self.markers - self.numbers


@dataclass(frozen=True)
class _Typing:
    """The types of the columns of one table."""

    backend: Backend
    raw: _Raw
    roles: Roles
    reading: Reading
    notes: Notes
    problems: list[str] = field(default_factory=list)
    said: dict[str, list[str]] = field(default_factory=dict)

    def table(self) -> Table:
        typed = {name: self._column(name) for name in self._rows.columns if name != ROW}
        if self.problems:
            raise DataError.of(self.raw.where, self.problems)
        of = f" of {_path(self.raw.parts[0]).name}" if self.roles.shown else ""
        self.notes.inferred.extend(f"{listed(names)}{of}: {what}" for what, names in self.said.items())
        table = self._rows.mutate(**{name: values for name, values in typed.items() if values is not None})
        self._check_present(table)
        return table

    @cached_property
    def _rows(self) -> Table:
        """The rows with what is declared missing taken out, and Parquet's many types made few."""
        table = self.raw.table
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
            # As text, for DuckDB 2.0 takes isnan() to be false where Parquet's statistics, which leave NaN out, say so.
            wrong = number.cast("string").lower() == "nan" if not kind.is_integer() else ibis.literal(False)
            return ibis.ifelse(wrong | number.isin(numbers) if numbers else wrong, None, number)
        return values.cast("timestamp") if kind.is_date() else values

    def _column(self, name: str) -> Values | None:
        """A column in its type; None where it stays as it is."""
        roles, values = self.roles, self._rows[name]
        if name == roles.time:
            return _Times(self, name).seconds()
        if name == roles.label:
            return self._label(name)
        declared = self.reading.types.get(name)
        if declared is not None:
            return self._declared(name, declared)
        if name in roles.ids or name in roles.texts or name in roles.categories:
            if values.type().is_integer() and not self.raw.table[name].type().is_boolean():
                self._say("whole numbers, kept as text; `types` can declare them int64", name)
                return values.cast("string")
            return self._truth(name) if name in roles.categories and values.type().is_string() else None
        if name in roles.numbers and values.type().is_string():
            return self._number(name)
        if name in roles.features or roles.shown:
            return self._judged(name) if values.type().is_string() else None
        return None

    def _say(self, what: str, name: str) -> None:
        self.said.setdefault(what, []).append(name)

    def _declared(self, name: str, kind: Type) -> Values:
        values = self._rows[name]
        if kind == "string":
            return values.cast("string")
        if values.type().is_string():
            text = values.strip()
            pattern, what = (WHOLE, "a whole number") if kind == "int64" else (NUMBER, "a number")
            self._refuse(values.notnull() & (text != "") & ~_is_marker(text) & ~text.re_search(pattern), name,
                         f"declared {kind}; expected {what}")  # fmt: skip
            return _number_of(text, kind)
        if not values.type().is_numeric():
            self.problems.append(f"column '{name}' holds {values.type()}, which `types` can't make {kind}")
            return values
        if kind == "int64":
            self._refuse(values.notnull() & (values != values.floor()), name, "declared int64; expected a whole number")
        return values.cast(kind)

    @cached_property
    def _seen(self) -> dict[str, _Seen]:
        """Of every column of text that is judged, in one pass over the rows."""
        rows, roles = self._rows, self.roles
        judged = [*roles.categories, *roles.numbers, *roles.features] if not roles.shown else rows.columns
        names = [name for name in dict.fromkeys(judged) if name in rows.columns and name != ROW
                 and rows[name].type().is_string()]  # fmt: skip
        counts: dict[str, Values] = {}
        for place, name in enumerate(names):
            text = rows[name].strip()
            tests = {
                "present": text != "", "numbers": text.re_search(NUMBER), "plain": text.re_search(PLAIN_WHOLE),
                "codes": text.re_search(CODE), "written": text.re_search(WRITTEN) & ~text.re_search(NUMBER),
                "truths": text.lower().isin([*TRUTH]), "markers": _is_marker(text),
            }  # fmt: skip
            counts |= {f"_{place}_{test}": found.cast("int64").sum() for test, found in tests.items()}
        if not counts:
            return {}
        found = fetch(self.backend, rows.aggregate(**counts)).to_pylist()[0]
        return {
            name: _Seen(**{test: int(found[f"_{place}_{test}"] or 0) for test in _Seen.__annotations__})
            for place, name in enumerate(names)
        }

    def _truth(self, name: str) -> Values | None:
        """The numbers 1 and 0 in place of true and false, where a column holds nothing else."""
        seen = self._seen[name]
        if not seen.truths or seen.truths < seen.present:
            return None
        self._say("true and false, taken as 1 and 0", name)
        return self._rows[name].strip().lower().cases(*((text, value) for text, value in TRUTH.items()), else_=None)

    def _judged(self, name: str) -> Values | None:
        """A number, a truth value or text, whichever all values are."""
        seen, asked = self._seen[name], name in self.roles.features
        if name in self.raw.texts:
            if asked and seen.numbers * 2 > seen.present:
                self.notes.inferred.append(
                    f"'{name}' is taken as a category, for the file calls it text, though {seen.numbers:,} of its "
                    f"{seen.present:,} values are numbers; set numeric=[{name}] to take it as a number"
                )
            return None
        if (truth := self._truth(name)) is not None:
            return truth
        if seen.codes and seen.numbers + seen.markers == seen.present:
            if asked:
                self._say("digits that are no plain numbers (leading zeros, or too many digits), kept as text; "
                          "`numeric` takes them as numbers", name)  # fmt: skip
            return None
        if seen.numbers and not seen.rest and (asked or not seen.markers):
            return self._number(name)
        if asked and (seen.numbers + seen.written) * 2 > seen.present and not seen.codes:
            self._refuse_text(name, seen)
        elif asked:
            self._say("text, taken as categories", name)
        return None

    def _number(self, name: str) -> Values:
        seen, text = self._seen[name], self._rows[name].strip()
        if seen.rest:
            self._refuse_text(name, seen)
        if seen.markers:
            self._note_markers(name, seen.markers)
        whole = seen.plain == seen.numbers
        self._say("whole numbers" if whole else "numbers", name)
        return _number_of(text, "int64" if whole else "float64")

    def _refuse_text(self, name: str, seen: _Seen) -> None:
        text = self._rows[name].strip()
        advice = (f"correct them, name what stands for a missing value in missing_values, or keep the column as text "
                  f"with categorical=[{name}]")  # fmt: skip
        if seen.written * 2 > seen.rest:
            advice = (f"write numbers with a point and nothing else, such as 1234.5, or keep the column as text with "
                      f"categorical=[{name}]")  # fmt: skip
        self._refuse((text != "") & ~_is_marker(text) & ~text.re_search(NUMBER), name,
                     f"{seen.numbers:,} of its {seen.present:,} values are numbers; {advice}")  # fmt: skip

    def _note_markers(self, name: str, count: int) -> None:
        text = self._rows[name].strip()
        marked = self._rows.filter(_is_marker(text))
        kinds = fetch(self.backend, marked.group_by(text=text).aggregate(first=marked[ROW].min()).order_by("first"))
        first = self.raw.places([kinds.column("first")[0].as_py()])[0]
        self.notes.changed.append(
            f"'{name}': {count:,} values are taken as missing: {listed(kinds.column('text').to_pylist()[:10])} "
            f"(the first in {first})"
        )

    def _refuse(self, wrong: BooleanValue, name: str, expected: str, called: str = "") -> None:
        """A problem that names the first rows for which `wrong` is true."""
        rows = self._rows.filter(wrong)
        found = fetch(self.backend, rows.select(ROW, _value=rows[name].cast("string")).order_by(ROW).limit(SHOWN))
        if not found.num_rows:
            return
        places, values = self.raw.places(found.column(ROW).to_pylist()), found.column("_value").to_pylist()
        shown = [f"{place} is {_quoted(value)}" for place, value in zip(places, values, strict=True)]
        count = count_rows(self.backend, rows) if len(shown) == SHOWN else len(shown)
        more = f" (and {count - SHOWN:,} more)" if count > SHOWN else ""
        self.problems.append(f"column '{name}'{called}: {', '.join(shown)}{more}; {expected}")

    def _check_present(self, table: Table) -> None:
        problems = []
        for name in self.roles.ids:
            if name not in table.columns:
                continue
            kind = table[name].type()
            if not (kind.is_string() or kind.is_integer()):
                problems.append(f"column '{name}' holds {kind}; ids must be text or whole numbers; write them so")
                continue
            if self.roles.shown:  # the catalogue leaves such rows out, and counts them
                continue
            missing = table.filter(table[name].isnull())
            first = fetch(self.backend, missing.select(ROW).order_by(ROW).limit(SHOWN)).column(ROW).to_pylist()
            if first:
                count, shown = count_rows(self.backend, missing), ", ".join(self.raw.places(first))
                problems.append(
                    f"column '{name}' has no value in {count:,} rows, such as {shown}; "
                    "leave these rows out, or give them an id"
                )
        if problems:
            raise DataError.of(self.raw.where, problems)
        if not self.roles.shown:
            for name in self.roles.ids:
                if name in table.columns and table[name].type().is_string():
                    self._note_odd_ids(table, name)

    def _note_odd_ids(self, table: Table, name: str) -> None:
        """Say which ids are kept letter for letter though they may be meant otherwise."""
        text = table[name]
        odd = {
            "have blanks around them, which are part of the id": text != text.strip(),
            "look like missing values, and are kept as ids; name them in missing_values if they are none": _is_marker(
                text
            ),
        }
        for what, is_so in odd.items():
            kinds = table.filter(is_so).group_by(text=text).aggregate(rows=ibis._.count()).order_by("text")
            found = fetch(self.backend, kinds)
            if found.num_rows:
                ids, rows = found.column("text").to_pylist(), sum(found.column("rows").to_pylist())
                self.notes.inferred.append(f"'{name}': {len(ids):,} ids, in {rows:,} rows, {what}: {listed(ids[:5])}")

    def _label(self, name: str) -> Values:
        """The label as 0 and 1."""
        values, least = self._rows[name], self.roles.positive_from
        if least is not None:
            number = values
            if values.type().is_string():
                text = values.strip()
                number = ibis.ifelse(text.re_search(NUMBER), text, None).try_cast("float64")
            self._refuse(number.isnull(), name, "expected a number, as positive_from is set", ", the label")
            return (number >= least).cast("int64")
        expected = "expected 0 or 1, true or false, yes or no (or set positive_from to where a 1 begins)"
        if not values.type().is_string():
            self._refuse(values.isnull() | ~values.isin([0, 1]), name, expected, ", the label")
            return values.cast("int64")
        text = values.strip().lower()
        pairs = [(word, label) for label, words in LABELS.items() for word in words]
        label = text.cases(*pairs, else_=None)
        self._refuse(label.isnull(), name, expected, ", the label")
        held = fetch(self.backend, self._rows.group_by(word=values.strip()).aggregate(rows=self._rows.count()))
        words = sorted({str(word) for word in held.column("word").to_pylist()} - {"0", "1"})
        if words and not self.problems:
            ones = [word for word in words if word.lower() in LABELS[1]]
            zeros = [word for word in words if word.lower() in LABELS[0]]
            told = [f"{listed(each)} as {value}" for value, each in ((1, ones), (0, zeros)) if each]
            self.notes.changed.append(f"label '{name}': {' and '.join(told)}")
        return label


def _is_marker(text: StringValue) -> BooleanValue:
    return text.lower().isin([*MISSING_NUMBERS])


def _number_of(text: StringValue, kind: Type) -> Values:
    """The number that a text is, where it is one."""
    if kind == "int64":
        return ibis.ifelse(text.re_search(WHOLE), text.re_replace(r"\.0*$", ""), None).try_cast("int64")
    return ibis.ifelse(text.re_search(NUMBER), text, None).try_cast("float64")


def _quoted(value: str | None) -> str:
    return "missing" if value is None else repr(value if len(value) <= 60 else f"{value[:60]}...")


# --- times -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Times:
    """A time column as seconds since 1970, UTC, or as the numbers it holds."""

    typing: _Typing
    name: str

    def seconds(self) -> Values:
        values, unit = self.typing._rows[self.name], self.typing.reading.time_format
        kind = values.type()
        if kind.is_timestamp():
            self._refuse(values.isnull(), "expected a time in every row")
            if not kind.timezone:
                self._say_utc()
            fraction = values.cast("string").re_extract(r"\.([0-9]+)", 1)  # Spark has no function for it
            return self._with_fraction(values.truncate("s").epoch_seconds().cast("int64"), fraction)
        if kind.is_numeric():
            self._refuse(values.isnull(), "expected a time in every row")
            return self._scaled(values)
        if not kind.is_string():
            self.typing.problems.append(f"column '{self.name}' holds {kind}; a timestamp must be a number or a date")
            return values
        text = values.strip()
        if unit is not None and unit not in PER_SECOND:
            return self._formatted(text, unit)
        return self._judged(text)

    def _refuse(self, wrong: BooleanValue, expected: str) -> None:
        self.typing._refuse(wrong, self.name, expected)

    def _say_utc(self) -> None:
        self.typing.notes.inferred.append(f"'{self.name}': times without a zone, taken as UTC")

    def _judged(self, text: StringValue) -> Values:
        """Numbers or dates of ISO 8601, whichever most values are."""
        rows = self.typing._rows
        tests = {"number": text.re_search(NUMBER), "zoned": text.re_search(ZONED), "unzoned": text.re_search(UNZONED)}
        counted = rows.aggregate(present=rows[self.name].count(), plain=text.re_search(PLAIN_WHOLE).cast("int64").sum(),
                                 **{name: test.cast("int64").sum() for name, test in tests.items()})  # fmt: skip
        found = {name: int(value or 0) for name, value in fetch(self.typing.backend, counted).to_pylist()[0].items()}
        missing = rows[self.name].isnull()
        if found["number"] > found["zoned"] + found["unzoned"]:
            self._refuse(missing | ~tests["number"], f"expected a number, as {found['number']:,} other values are")
            kind: Type = "int64" if found["plain"] == found["number"] else "float64"
            return self._scaled(_number_of(text, kind))
        if not found["zoned"] + found["unzoned"]:
            self._refuse(missing | ibis.literal(True), self._advice())
            return text.length()  # the problem is raised before anyone reads it
        if found["zoned"] and found["unzoned"]:
            few = "zoned" if found["zoned"] < found["unzoned"] else "unzoned"
            what = {"zoned": "with a time zone", "unzoned": "without one"}
            many = "unzoned" if few == "zoned" else "zoned"
            self._refuse(tests[few], f"{found[few]:,} times {what[few]} and {found[many]:,} {what[many]}; "
                         "they can't be compared: give all times a zone, or none")  # fmt: skip
        self._refuse(missing | ~(tests["zoned"] | tests["unzoned"]), f"expected a time of ISO 8601, as "
                     f"{found['zoned'] + found['unzoned']:,} other values are; or set time_format")  # fmt: skip
        if found["zoned"]:
            self.typing.notes.changed.append(f"'{self.name}': times with zones, made UTC")
        else:
            self._say_utc()
        clock = text.re_extract(f"{DATE}{CLOCK}", 4)
        full = ibis.cases((clock == "", "00:00:00"), (clock.length() == 6, clock.substr(1, 5) + ":00"),
                          else_=clock.substr(1, 8))  # fmt: skip
        date = text.substr(0, 10).replace("/", "-")
        zone = text.re_extract(f"{DATE}{CLOCK}{ZONE}$", 8) if found["zoned"] else None
        return self._instant(date + " " + full, text.re_extract(r"[.,]([0-9]+)", 1), zone)

    def _instant(self, clock: StringValue, fraction: StringValue, zone: StringValue | None) -> Values:
        """Seconds of a clock's time `2024-01-31 23:59:59`, digits behind it, and a zone's distance from UTC."""
        there = clock.try_cast("timestamp").epoch_seconds().cast("int64")
        if zone is not None:
            digits = zone.re_replace("[^0-9]", "").rpad(4, "0")
            ahead = digits.substr(0, 2).try_cast("int64") * 3600 + digits.substr(2, 2).try_cast("int64") * 60
            sign = ibis.ifelse(zone.startswith("-"), -1, 1)
            there = there - ibis.ifelse(zone.re_search("^[+-]"), sign * ahead, 0)
        if not self.typing.problems:  # else the same rows may be named again
            self._refuse(there.isnull(), "there is no such day or time of day")
        return self._with_fraction(there, fraction)

    def _with_fraction(self, seconds: Values, fraction: StringValue) -> Values:
        """Seconds, and the digits behind them down to a millionth where some row has any."""
        rows = self.typing._rows
        micros = (fraction + ibis.literal("000000")).substr(0, 6).try_cast("int64")
        broken = fetch(self.typing.backend, rows.aggregate(most=micros.max())).column("most")[0].as_py()
        return seconds.cast("float64") + micros.cast("float64") / 1e6 if broken else seconds

    def _scaled(self, numbers: Values) -> Values:
        unit = self.typing.reading.time_format
        if unit is not None and unit not in PER_SECOND:
            return self._formatted(numbers.cast("string"), unit)
        if unit is None:
            self._note_unit(numbers)
        per_second = PER_SECOND[unit or "seconds"]
        if per_second == 1:
            return numbers
        if numbers.type().is_integer():
            rest = numbers % per_second
            odd = fetch(self.typing.backend, self.typing._rows.aggregate(most=rest.max())).column("most")[0].as_py()
            if not odd:
                return (numbers // per_second).cast("int64")
        return numbers.cast("float64") / per_second

    def _note_unit(self, numbers: Values) -> None:
        """Say where numbers look like another unit than seconds."""
        found = fetch(self.typing.backend, self.typing._rows.aggregate(least=numbers.min(), most=numbers.max()))
        least, most = (found.column(name)[0].as_py() for name in ("least", "most"))
        if least is None:
            return
        for unit, per_second in PER_SECOND.items():
            if per_second > 1 and 3e8 * per_second <= least and most <= 4.2e9 * per_second:
                self.typing.notes.inferred.append(f"'{self.name}': numbers, taken as they are; they look like {unit} "
                                                  f"since 1970, which time_format={unit} makes dates")  # fmt: skip
        if least >= 19_000_101 and most <= 21_001_231:
            self.typing.notes.inferred.append(f"'{self.name}': numbers, taken as they are; they look like days, which "
                                              "time_format=%Y%m%d makes dates")  # fmt: skip

    def _formatted(self, text: StringValue, form: str) -> Values:
        """Times of a declared format, by the parts that it names."""
        pattern, groups = _pattern(form)

        def part(code: str, otherwise: str = "00") -> StringValue:
            if code not in groups:
                return ibis.literal(otherwise)
            return text.re_extract(pattern, groups[code]).lpad(2, "0")

        self._refuse(self.typing._rows[self.name].isnull() | ~text.re_search(pattern),
                     f"expected a time such as {_example(form)!r}, by time_format")  # fmt: skip
        month = part("m")
        if "b" in groups:
            named = text.re_extract(pattern, groups["b"]).lower()
            month = named.cases(*((name, f"{number:02d}") for number, name in enumerate(MONTHS, 1)), else_="00")
        year = part("Y") if "Y" in groups else ibis.ifelse(part("y") < "69", "20", "19") + part("y")
        hour = part("H")
        if "I" in groups:
            twelve = part("I").try_cast("int64")
            after = ibis.ifelse(part("p", "am").lower().contains("p"), 12, 0)
            hour = ibis.ifelse((twelve >= 1) & (twelve <= 12), (twelve % 12 + after).cast("string"), "99").lpad(2, "0")
        clock = year + "-" + month + "-" + part("d") + " " + hour + ":" + part("M") + ":" + part("S")
        fraction = text.re_extract(pattern, groups["f"]) if "f" in groups else text.substr(0, 0)
        zone = text.re_extract(pattern, groups["z"]) if "z" in groups else None
        if zone is None:
            self._say_utc()
        return self._instant(clock, fraction, zone)

    def _advice(self) -> str:
        """What to do about texts that are no times of ISO 8601."""
        rows = self.typing._rows
        sample = fetch(self.typing.backend, rows.select(_value=rows[self.name]).limit(GLANCED)).column("_value")
        texts = [text.strip() for text in sample.to_pylist() if text]
        fitting = [form for form in GUESSES if texts and all(_fits(text, form) for text in texts)]
        told = " or ".join(f"--set 'time_format={form}'" for form in fitting) or "--set 'time_format=%d/%m/%Y %H:%M'"
        return (
            f"expected a number, or a time of ISO 8601 such as 2024-02-25 12:30:00; else say how it is written: {told}"
        )


def _pattern(form: str) -> tuple[str, dict[str, int]]:
    """A regular expression of a time format, and the number of the group that holds each code."""
    parts = re.split("(%.)", form)
    named = "^" + "".join(DIRECTIVES[part[1]] if part[:1] == "%" else re.escape(part) for part in parts) + "$"
    groups = dict(re.compile(named).groupindex)
    return re.sub(r"\(\?P<[A-Za-z]>", "(", named).replace(r"\ ", " "), groups


def _fits(text: str, form: str) -> bool:
    """Whether a text may be a time of this format, its numbers in their bounds."""
    pattern, groups = _pattern(form)
    found = re.match(pattern, text)
    if found is None:
        return False
    bounds = {"m": 12, "d": 31, "H": 23, "I": 12, "M": 59, "S": 59}
    return all(int(found[group]) <= bounds[code] for code, group in groups.items() if code in bounds)


def _example(form: str) -> str:
    values = {"Y": "2024", "y": "24", "m": "02", "d": "25", "b": "Feb", "B": "February", "H": "12", "I": "12",
              "M": "30", "S": "00", "f": "250", "p": "PM", "z": "+01:00", "%": "%"}  # fmt: skip
    return re.sub("%(.)", lambda found: values[found[1]], form)


def note_doubtful_time(backend: Backend, rows: Table, time: str, known: Collection[str], notes: Notes) -> None:
    """Say that the time column, taken for its name, does not look like one where another column does."""
    glance = fetch(backend, rows.order_by(ROW).limit(GLANCED).drop(ROW))
    if _looks_like_time(glance.column(time)):
        return
    if alike := [name for name in glance.column_names
                 if name not in {*known, time} and _looks_like_time(glance.column(name))]:  # fmt: skip
        notes.inferred.append(
            f"the time is column '{time}', because of its name; its values don't look like times, those of "
            f"{listed(alike)} do (--set timestamp={alike[0]})"
        )


def note_untimed(backend: Backend, rows: Table, asked: str, known: Collection[str], notes: Notes) -> None:
    """Say that no time column was found, and which columns look like one."""
    glance = fetch(backend, rows.order_by(ROW).limit(GLANCED).drop(ROW))
    alike = [name for name in glance.column_names if name not in known and _looks_like_time(glance.column(name))]
    look = f"columns that look like times: {listed(alike)}" if alike else "no column looks like times"
    notes.inferred.append(
        f"no time column was found: there is no column '{asked}', so rows are taken in file order; {look}"
        + (f" (--set timestamp={alike[0]})" if alike else "; --set timestamp=null if that is meant")
    )


def _looks_like_time(values: pa.ChunkedArray) -> bool:
    kind = values.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return True
    held = [str(value).strip() for value in values.to_pylist() if value is not None]
    if not held or pa.types.is_nested(kind):
        return False
    if all(re.match(ZONED, text) or re.match(UNZONED, text) for text in held):
        return True
    if all(re.fullmatch(r"[0-9]{9,19}(\.[0-9]+)?", text) for text in held):
        numbers = [float(text) for text in held]
        return any(3e8 * per <= min(numbers) and max(numbers) <= 4.2e9 * per for per in PER_SECOND.values())
    return any(all(_fits(text, form) for text in held) for form in GUESSES if form != "%Y%m%d")
