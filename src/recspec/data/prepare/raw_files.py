"""Raw files of CSV, JSON lines, Parquet or sequences, staged as one table with the line of each row."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Literal

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import BooleanValue, StringValue, Table
from ibis.expr.types import Column as Values

from recspec.base.errors import DataError, SettingsError, how_many, listed, nearest, shortened
from recspec.base.files import local, unpacked_name
from recspec.data.encoding import MISSING_NUMBERS, decoded_type
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.column_roles import SPLIT_WORDS
from recspec.data.prepare.declared import DeclaredColumn, Invalid, Type
from recspec.data.prepare.duckdb_backend import json_keys
from recspec.data.prepare.known_layouts import TextLayout
from recspec.data.prepare.names import FILE_SPLIT, ROW, SPLITS, Notes
from recspec.data.prepare.raw_checks import begins_with_object, check_quotes, encoding_of
from recspec.data.prepare.sequences import (
    LineFile,
    check_items,
    fields_of,
    flattened,
    inside,
    keys_of,
    read_lines,
    sequence_column,
)
from recspec.data.prepare.tables import count_rows, fetch
from recspec.data.prepare.text_files import (
    ColumnType,
    JsonFile,
    TextFile,
    check_names,
    json_form,
    line_numbers,
    with_announced_separator,
)
from recspec.data.prepare.text_layout import glance

RawLayout = Literal["rows", "sequences"]
RowsBy = Literal["first", "random"]
Part = TextFile | LineFile | JsonFile | Path
Staged = tuple[Table, Sequence[Part], Sequence[int], Collection[str]]
LARGEST = 3.4028234663852886e38  # the largest float32, as which prepared numbers are stored
WIDE = 100  # columns beyond which the files of a table are joined once, not in every query
PARQUET_SUFFIXES = (".parquet",)
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".dat", ".data", ".inter")
NUMBER = r"^[+-]?([0-9]{1,40}(\.[0-9]*)?|\.[0-9]+)([eE](\+?[0-9]{1,2}|\+?[12][0-9]{2}|-[0-9]{1,3}))?$"
MOST = str(2**63 - 1)
_BELOW = "|".join(f"{MOST[:at]}[0-{int(digit) - 1}][0-9]{{{18 - at}}}" for at, digit in enumerate(MOST) if int(digit))
WHOLE = rf"^[+-]?([0-9]{{1,18}}|{_BELOW}|{MOST})(\.0*)?$"  # of 64 bits
FRACTION = r"\.0*[1-9]|[1-9]E-"  # of a decimal as engines write it
BEYOND = "whole numbers, some of more than 63 bits, read as text"
UNBROKEN = "decimals without a fraction in any row, read as whole numbers"
PLAIN_WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"
MOST_DIGITS = 38  # of a decimal: DuckDB makes a float of one with more
SHOWN = 3  # most rows named in a problem
LINE_TYPES: Mapping[ColumnType, Type] = {"string": "text", "float64": "number", "list": "list"}
"""Types of the columns of a layout that tells them."""


@dataclass(frozen=True)
class Reading:
    """Options for reading raw files, whatever their columns."""

    separator: str | None = None
    quote: str | None = '"'  # None: quotes are letters
    quote_given: bool = False  # whether a setting says so, so that no look at the values does
    decimal: str = "."  # the mark before the fraction of a number
    encoding: str | None = None
    key: str | None = None  # of a file of users or items: its column of ids
    types: Mapping[str, DeclaredColumn] = field(default_factory=dict)
    invalid_values: Invalid = "refuse"  # values of another type than their column
    missing_values: tuple[str, ...] = ()
    time_format: str | None = None
    found_time_format: str | None = None  # the format of the dataset's times, where none was set
    rows: int | None = None
    rows_by: RowsBy = "first"
    seed: int = 1
    layout: RawLayout | None = None
    columns: tuple[str, ...] = ()  # names of the columns of text files without a header
    mentioned: frozenset[str] = frozenset()  # column names in settings, which tell a header from data
    item: str | None = None  # column of the items, whose lists make each row a sequence; None: by its name
    splits: tuple[str, ...] = ()  # the split of each file; empty: files are no splits
    settable: bool = True  # whether who reads a message can still choose settings

    def advice(self, what: str) -> str:
        """The end of a message about invalid values: the setting that leaves `what` out, if it can be set."""
        return f"; invalid_values=drop leaves {what} out" if self.settable else ""


def named_files(raw: Path, setting: str, names: Sequence[str]) -> list[Path]:
    """The files that a setting names: beside the raw files, or else from the working directory.

    Raises SettingsError, which names both places for each file that is in neither.
    """
    folder = raw if raw.is_dir() else raw.parent
    found: list[Path] = []
    problems = []
    for name in names:
        path = local(name, f"setting '{setting}'")
        places = [*dict.fromkeys((folder / path, path))]
        present = [place for place in places if place.is_file()]
        found += present[:1]
        if not present:
            looked = f"; looked for {places[0]}, beside the raw files, and for {Path.cwd() / path}, from the working "
            looked = "" if len(places) == 1 else f"{looked}directory"
            problems.append(f"{name}: no such file{nearest_file(*places)}{looked}")
    if problems:
        raise SettingsError.of(f"setting '{setting}'", problems)
    return found


def nearest_file(*paths: Path) -> str:
    """A hint at a file of a similar name beside the first path that has one; else nothing."""
    hints = (
        nearest(path.name, [found.name for found in path.parent.iterdir()]) for path in paths if path.parent.is_dir()
    )
    return next(filter(None, hints), "")


def find_raw_files(folder: Path, others: Collection[Path], files: Sequence[str], notes: Notes) -> list[Path]:
    """The files that hold the rows: those in `files`, or all files of one kind, sorted by name; notes the rest.

    `others` are files for another use, which may lie in the folder.
    """
    used = {path.resolve() for path in others}
    inside = [path for path in sorted(folder.iterdir()) if path.resolve() not in used]
    found = [path for path in inside if path.is_file()]
    if files:
        named = {path.name: path for path in found}
        missing = [f"no file '{name}'{nearest(name, named)}" for name in files if name not in named]
        if missing:
            raise SettingsError.of(f"{folder}: setting 'files'", missing)
        _note_left_out([path for path in inside if path.name not in files], notes, "setting 'files' names others")
        return [named[name] for name in files]
    found = [path for path in found if not _is_about(path)]
    kinds = (PARQUET_SUFFIXES, JSON_SUFFIXES, TEXT_SUFFIXES)
    held = [paths for kind in kinds if (paths := [path for path in found if unpacked_name(path).endswith(kind)])]
    if len(held) == 1:
        _note_left_out([path for path in inside if path not in held[0]], notes, "they are no files of rows")
        return held[0]
    names = listed(path.name for path in found)
    raise DataError(
        f"{folder}: expected files of one kind, Parquet, JSON lines or CSV, found {names}; name those you "
        f"mean, such as --set 'files=[{found[0].name if found else 'rows.csv'}]'"
    )


def _note_left_out(paths: Sequence[Path], notes: Notes, why: str) -> None:
    if paths:
        names = listed(f"{path.name}/" if path.is_dir() else path.name for path in paths)
        notes.dropped.append(f"{names}: not read, because {why}")


def _is_about(path: Path) -> bool:
    """Whether a file tells people about the others."""
    return path.name.partition(".")[0].lower() in ("readme", "license", "licence", "provenance", "citation")


def split_of(path: Path) -> str | None:
    """The split that a file's name tells, such as valid for `clicks_val.csv`."""
    words = {SPLIT_WORDS[word] for word in re.split(r"[^a-z]+", path.name.lower()) if word in SPLIT_WORDS}
    return words.pop() if len(words) == 1 else None


def splits_by_name(paths: Sequence[Path], notes: Notes) -> dict[str, list[Path]]:
    """The files of each split, if their names tell train and another split; else empty."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        if (split := split_of(path)) is not None:
            found.setdefault(split, []).append(path)
    if "train" not in found or len(found) < 2:
        return {}
    told = "; ".join(f"{split}: {listed(path.name for path in found[split])}" for split in SPLITS if split in found)
    notes.inferred.append(f"files are splits, by their names: {told}")
    others = [path.name for path in paths if split_of(path) is None]
    if others:
        notes.dropped.append(f"{listed(others)}: not read, because the names of the other files tell splits")
    return {split: found[split] for split in SPLITS if split in found}


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
    roles: Mapping[str, str] = field(default_factory=dict)  # settings that the layout of the files gives
    problems: list[str] = field(default_factory=list)
    dropped: list[BooleanValue] = field(default_factory=list)  # where rows hold an invalid value and are left out
    flattened: bool = False  # whether the rows of the files held lists of items

    @property
    def layout(self) -> RawLayout:
        """The layout that the files have."""
        return "sequences" if self.is_sequences or self.flattened else "rows"

    @property
    def is_sequences(self) -> bool:
        """Whether the files are text with one sequence a line."""
        return isinstance(self.parts[0], LineFile) and self.parts[0].layout.sequences

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
        if isinstance(part, LineFile):
            held = enumerate(islice(part.rows(), max(rows) + 1))
            return {place: line for place, (line, _) in held if place in set(rows)}
        return {} if isinstance(part, Path) else line_numbers(part, rows)

    @cached_property
    def table(self) -> Table:
        """The rows with null for declared missing values, and with few types for the many of Parquet."""
        table, wide = self.raw, self._wide()
        return table.mutate(**{name: self._plain(wide.get(name, table[name])) for name in table.columns if name != ROW})

    def _wide(self) -> dict[str, Values]:
        """Decimals and unsigned numbers of 64 bits by the rule of `recspec.data.encoding.plain`, with notes."""
        kinds = {name: self.raw[name].type() for name in self.raw.columns}
        wide = {name: self.raw[name] for name, kind in kinds.items() if kind.is_uint64() or kind.is_decimal()}
        if not wide:
            return {}
        texts = {name: values.cast("string") for name, values in wide.items()}
        tests = {}
        for place, name in enumerate(wide):
            tests[f"broken_{place}"] = texts[name].re_search(FRACTION).cast("int64").max()
            beyond = wide[name].notnull() & wide[name].try_cast("int64").isnull()
            tests[f"beyond_{place}"] = beyond.cast("int64").max()
        found = fetch(self.backend, self.raw.aggregate(**tests)).to_pylist()[0]
        held, told = dict[str, Values](), dict[str, list[str]]()
        for place, (name, values) in enumerate(wide.items()):
            if found[f"broken_{place}"]:
                held[name] = values.cast("float64").name(name)
            elif found[f"beyond_{place}"]:
                held[name] = texts[name].re_replace(r"\.0*$", "").name(name)
                told.setdefault(BEYOND, []).append(name)
            else:
                held[name] = values.cast("int64").name(name)
                if kinds[name].is_decimal() and kinds[name].scale:
                    told.setdefault(UNBROKEN, []).append(name)
        self.notes.inferred.extend(f"{listed(names)}: {what}" for what, names in told.items())
        return held

    def _plain(self, values: Values) -> Values:
        declared = self.reading.types.get(values.get_name())
        if declared is not None and declared.type == "text" and not values.type().is_string():
            values = _spelled(values)  # before truth values become 1 and 0
        kind = values.type()
        gone = self.reading.missing_values
        if declared is not None and declared.missing is not None:
            gone = declared.missing
        if kind.is_string():
            return values.nullif("") if not gone else ibis.ifelse(values.isin(["", *gone]), None, values)
        if kind.is_boolean():
            return values.cast("int64")
        if kind.is_numeric():
            number = values.cast("int64" if kind.is_integer() else "float64")
            numbers = [float(text) for text in gone if re.fullmatch(r"-?[0-9]{1,19}", text)]
            # As text, because DuckDB 2.0 evaluates isnan() by Parquet's statistics, which leave out NaN.
            wrong = number.cast("string").lower() == "nan" if not kind.is_integer() else ibis.literal(False)
            return ibis.ifelse(wrong | number.isin(numbers) if numbers else wrong, None, number)
        return values.cast("timestamp") if kind.is_date() else values

    def first(self, rows: Table) -> pa.Table:
        """The rows that a message names."""
        return fetch(self.backend, rows.order_by(ROW).limit(SHOWN))

    def invalid(self, name: str) -> Invalid:
        """What is done with values of another type than their column."""
        declared = self.reading.types.get(name)
        return (declared and declared.invalid) or self.reading.invalid_values

    def refuse(
        self,
        wrong: BooleanValue,
        name: str,
        expected: str,
        called: str = "",
        *,
        remedy: str = "",
        always: bool = False,
        nullable: bool = False,
    ) -> None:
        """Add a problem that names the first rows for which `wrong` is true, if there are any.

        If settings say so, drop these rows instead, or, if `nullable`, leave their values to be taken as missing; not
        if `always`.
        """
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
        what = f"column '{shortened(name)}'{called}: {', '.join(shown)}{more}; {expected}"
        invalid = "refuse" if always else self.invalid(name)
        if invalid == "drop":
            self.dropped.append(wrong)
            self.notes.dropped.append(f"{how_many(count, 'row')} of {Path(self.where).name}, by invalid values: {what}")
        elif invalid == "missing" and nullable:
            self.notes.changed.append(f"{how_many(count, 'value')} of {Path(self.where).name} taken as missing: {what}")
        else:
            self.problems.append(f"{what}{remedy}{'' if always else self.reading.advice('such rows')}")


def finite(rows: RawRows, name: str, numbers: Values) -> Values:
    """Numbers as float32 can hold them; infinite and larger ones are refused, dropped or missing."""
    if not numbers.type().is_floating():
        return numbers
    wrong = numbers.abs() > LARGEST
    rows.refuse(wrong, name, "expected a finite number of at most 3.4e38", nullable=True)
    return ibis.ifelse(wrong, None, numbers)


def _spelled(values: Values) -> StringValue:
    """Values of any type as the text by which encoders find them: 42 for 42.0."""
    if not values.type().is_floating():
        return values.cast("string")
    whole = ibis.ifelse((values % 1 == 0) & (values.abs() < 2.0**53), values, None)
    text = values.cast("string")
    return whole.cast("int64").cast("string").coalesce(ibis.ifelse(text.lower() == "nan", None, text))


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
    name = unpacked_name(paths[0])
    is_parquet = name.endswith(PARQUET_SUFFIXES)
    is_json = not is_parquet and (name.endswith(JSON_SUFFIXES) or begins_with_object(paths[0]))
    roles: Mapping[str, str] = {}
    if reading.columns and (is_parquet or is_json):
        raise SettingsError(f"setting 'columns': {paths[0]} has column names of its own; leave columns out")
    if is_parquet:
        staged = _parquet(backend, paths, reading)
    elif is_json:
        staged = _json(backend, paths, reading, notes, folder)
    else:
        staged, layout = _text(backend, paths, ids, reading, notes, folder)
        reading, roles = replace(reading, types={**layout.types, **reading.types}), layout.roles
    as_staged = staged
    if (is_parquet or is_json) and reading.layout != "rows":
        staged = _flattened(backend, staged, reading, notes, folder)
    table, parts, counts, texts = staged
    if reading.splits:
        table = _with_split(table, counts, reading.splits)
    if reading.rows is not None:
        table = _some_rows(table, sum(counts), reading, notes)
    if len(table.columns) > WIDE and len(paths) > 1:  # or each query names every column of every file
        table = backend.stage(table)
    own = staged is not as_staged
    return RawRows(backend, table, parts, counts, texts, reading, notes, roles=roles, flattened=own)


def _with_split(table: Table, counts: Sequence[int], splits: Sequence[str]) -> Table:
    ends = [(table[ROW] < end, split) for end, split in zip(accumulate(counts), splits, strict=True)]
    return table.mutate(**{FILE_SPLIT: ibis.cases(*ends, else_=splits[-1])})


def _some_rows(table: Table, count: int, reading: Reading, notes: Notes) -> Table:
    assert reading.rows is not None
    if reading.rows >= count:
        notes.inferred.append(f"rows={reading.rows:,}, and there are {count:,}: all are read")
        return table
    if reading.rows_by == "first":
        notes.dropped.append(f"{count - reading.rows:,} of {count:,} rows: the first {reading.rows:,} are read (rows)")
        return table.filter(table[ROW] < reading.rows)
    notes.dropped.append(
        f"{count - reading.rows:,} of {count:,} rows: {reading.rows:,} random ones are read (rows, "
        f"rows_by, seed {reading.seed})"
    )
    digest = (ibis.literal(f"rows:{reading.seed}:") + table[ROW].cast("string")).hexdigest("md5")
    chosen = table.select(ROW, _digest=digest).order_by(["_digest", ROW]).limit(reading.rows)
    return table.semi_join(chosen.select(ROW), ROW)


def _text(
    backend: Backend, paths: Sequence[Path], ids: Sequence[str], reading: Reading, notes: Notes, folder: Path
) -> tuple[Staged, TextLayout]:
    """Stage text files; the first one's layout is that of all."""
    first = _raw_text(paths[0], reading, notes)
    layout = glance(
        first,
        separator=reading.separator,
        columns=reading.columns,
        layout=reading.layout,
        mentioned=reading.mentioned,
        key=reading.key,
        notes=notes,
    )
    encodings = [first.encoding, *(encoding_of(path, reading.encoding, notes) for path in paths[1:])]
    plain = [
        with_announced_separator(replace(first, path=path, encoding=each, announced=False))
        for path, each in zip(paths, encodings, strict=True)
    ]
    if layout.lines is not None:
        return _by_line(backend, plain, layout, ids, notes, folder)
    files = [_with_layout(file, layout, reading) for file in plain]
    for file in files:
        if set(file.columns) != set(files[0].columns):
            raise _differing(file.path, file.columns, paths[0], files[0].columns)
    found = [_read_text(backend, file, reading, notes) for file in files]
    return _joined_up(backend, [file for file, _ in found], [table for _, table in found], ()), layout


def _by_line(
    backend: Backend, plain: Sequence[TextFile], layout: TextLayout, ids: Sequence[str], notes: Notes, folder: Path
) -> tuple[Staged, TextLayout]:
    """Stage text files whose lines become rows by a layout of their own."""
    assert layout.lines is not None
    files = [replace(file, separator=layout.separator, header=False, quote="") for file in plain]
    columns: Mapping[str, ColumnType] = layout.lines.columns(files)
    if layout.sequences:
        columns = dict.fromkeys(ids, "string")
    parts = [LineFile(file, layout, columns) for file in files]
    tables = [
        read_lines(backend, part, notes, folder / f"lines-{number}-{part.path.name}.parquet")
        for number, part in enumerate(parts)
    ]
    if layout.lines.typed:
        types = {name: DeclaredColumn(type=LINE_TYPES[kind]) for name, kind in columns.items() if name != "label"}
        layout = replace(layout, types=types)
    return _joined_up(backend, parts, tables, ids if layout.sequences else ()), layout


def _read_text(backend: Backend, file: TextFile, reading: Reading, notes: Notes) -> tuple[TextFile, Table]:
    """A staged file, with quotes and escapes as its values have them. Raises DataError if these are in doubt."""
    try:
        table = backend.read_text(file)
    except DataError as error:
        if reading.quote_given or not file.quote:
            raise
        escaped = replace(file, escape="\\")
        try:
            table = backend.read_text(escaped)
        except DataError:
            raise error from None
        notes.changed.append(
            f"{file.path.name}: a backslash stands before quotes inside of values, and is left out "
            "with any letter behind it kept, because quotes are not doubled there"
        )
        file = escaped
    if file.quote:
        check_quotes(backend, file, table, notes, given=reading.quote_given)
    return file, table


def _raw_text(path: Path, reading: Reading, notes: Notes) -> TextFile:
    tabs = unpacked_name(path).endswith((".tsv", ".inter"))
    encoding = encoding_of(path, reading.encoding, notes)
    return with_announced_separator(
        TextFile(
            path,
            {},
            separator="\t" if tabs else ",",
            encoding=encoding,
            quote=reading.quote or "",
            escape=reading.quote or '"',
            multiline=True,
        )
    )


def _with_layout(file: TextFile, layout: TextLayout, reading: Reading) -> TextFile:
    """A file with the columns of the layout of the first, or, with headers, of its own."""
    separator = layout.separator
    names = layout.names
    if layout.header and not reading.columns:
        names = glance(
            file, separator=separator, columns=(), layout="rows", mentioned=frozenset(names), notes=Notes()
        ).names
    quote = layout.quote if len(separator) == 1 and separator != " " else ""
    return replace(
        file,
        separator=separator,
        header=layout.header,
        names=names,
        columns=dict.fromkeys(names, "string"),
        quote=quote,
    )


def _differing(path: Path, names: Collection[str], first: Path, expected: Collection[str]) -> DataError:
    ours, others = [name for name in names if name not in expected], [name for name in expected if name not in names]
    only = [f"only {path.name} has {listed(ours)}"] if ours else []
    only += [f"only {first.name} has {listed(others)}"] if others else []
    return DataError(
        f"{path}: columns differ from those of {first.name}: {'; '.join(only) or 'another order'}; name "
        f"the files you mean, such as --set 'files=[{shortened(first.name)}]'"
    )


def _joined_up(backend: Backend, parts: Sequence[Part], tables: Sequence[Table], texts: Collection[str]) -> Staged:
    counts = [count_rows(backend, table) for table in tables]
    names = [name for name in tables[0].columns if name != ROW]
    moved, first = [], 0
    for table, count in zip(tables, counts, strict=True):
        moved.append(table.select((table[ROW] + first).name(ROW), *names) if first else table.select(ROW, *names))
        first += count
    return ibis.union(*moved) if len(moved) > 1 else moved[0], parts, counts, texts


def _json(backend: Backend, paths: Sequence[Path], reading: Reading, notes: Notes, folder: Path) -> Staged:
    files = [JsonFile(path, {}, encoding=encoding_of(path, reading.encoding, notes)) for path in paths]
    files = [replace(file, form=json_form(file)) for file in files]
    told = {"literals": "lines of Python dictionaries", "values": "JSON objects over several lines, or a list of them"}
    notes.inferred.extend(f"{file.path.name}: read as {told[file.form]}" for file in files if file.form in told)
    found = [json_keys(file, folder) for file in files]
    kinds = {name: kind for keys in found for name, kind in keys.items()}
    if not kinds:
        raise DataError(f"{paths[0]}: holds no object with a key; expected a JSON object a line")
    if all(isinstance(kind, dict) for kind in kinds.values()) and len(kinds) > 1:
        raise DataError(
            f"{paths[0]}: holds objects under each of {listed(kinds)}, as tables by columns or ids have; "
            "expected an object a row, as pandas' to_json(..., orient='records', lines=True) writes "
            "them"
        )
    lists = {name for name in kinds if all(isinstance(keys.get(name, []), list) for keys in found)}
    texts = {name for name in kinds if all(keys.get(name, "VARCHAR") == "VARCHAR" for keys in found)}
    inside = _inside({name: keys_of(kinds[name]) for name in kinds}, reading, paths[0])
    columns: dict[str, ColumnType] = {name: "list" if name in lists else "string" for name in kinds}
    columns |= {name: columns[of] for name, (of, _) in inside.items()}
    columns = {name: kind for name, kind in columns.items() if name not in {of for of, _ in inside.values()}}
    files = [replace(file, columns=columns, inside=inside) for file in files]
    lists |= {name for name, (of, _) in inside.items() if of in lists}
    staged = _joined_up(backend, files, [backend.read_json(file) for file in files], texts | lists)
    _check_rows(staged, kinds, {of for of, _ in inside.values()}, paths[0])
    return staged


def _check_rows(staged: Staged, kinds: Mapping[str, object], read: Collection[str], path: Path) -> None:
    """Refuse one object around the list of objects that are the rows."""
    rows = next((name for name in kinds if name not in read and all(keys_of(kinds[name]))), None)
    if rows is not None and sum(staged[2]) == 1:
        raise DataError(
            f"{path}: is one object, whose '{shortened(rows)}' holds a list of objects with "
            f"{listed(keys_of(kinds[rows])[1])}; expected an object a row, as jq -c "
            f"'.{json.dumps(rows)}[]' {path.name} writes them"
        )


def _inside(keys: Mapping[str, tuple[bool, Sequence[str]]], reading: Reading, path: Path) -> dict[str, tuple[str, str]]:
    if reading.layout != "rows":
        check_items(keys, reading.item, str(path))
    return inside(keys, {*reading.mentioned, *([reading.item] if reading.item else [])})


def _parquet(backend: Backend, paths: Sequence[Path], reading: Reading) -> Staged:
    counts = []
    for path in paths:
        try:
            schema, expected = _schema(path), _schema(paths[0])
            counts.append(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: not a Parquet file: {error}") from None
        wide = [
            f"column '{shortened(each.name)}' is {each.type}"
            for each in schema
            if pa.types.is_decimal256(each.type) and each.type.precision > MOST_DIGITS
        ]
        if wide:
            raise DataError(
                f"{path}: {'; '.join(wide)}; expected decimals of at most {MOST_DIGITS} digits; cast them, "
                "or write text"
            )
        if "" in schema.names:
            raise DataError(f"{path}: column {schema.names.index('') + 1} has an empty name; name it")
        check_names(path, schema.names)
        if not schema.equals(expected):
            if {*schema.names} != {*expected.names}:
                raise _differing(path, schema.names, paths[0], expected.names)
            kinds = [
                f"'{shortened(a.name)}' is {shortened(str(a.type))}, not {shortened(str(b.type))}"
                for a, b in zip(schema, expected, strict=True)
                if not a.equals(b)
            ]
            raise DataError(f"{path}: columns differ from those of {paths[0].name}: {'; '.join(kinds[:SHOWN])}")
    table = backend.read_parquet(paths, row=True)
    structs = {name: fields_of(table[name].type()) for name in _columns(table)}
    inside = _inside(structs, reading, paths[0])
    for name, (of, key) in inside.items():
        values = table[of]
        inner = values.map(lambda each, key=key: each[key]) if structs[of][0] else values[key]
        table = table.mutate(**{name: inner})
    table = table.drop(*{of for of, _ in inside.values()}) if inside else table
    return table, paths, counts, [*expected.names, *(set(_columns(table)) - {*expected.names})]


def _schema(path: Path) -> pa.Schema:
    """The columns of a Parquet file; those that one file stores as codes, and another does not, are the same."""
    return pa.schema([(each.name, decoded_type(each.type)) for each in pq.read_schema(path)])


def _flattened(backend: Backend, staged: Staged, reading: Reading, notes: Notes, folder: Path) -> Staged:
    """One row an event, if rows hold lists of items; with counts of events for each file."""
    table, parts, counts, texts = staged
    items = sequence_column(table, reading.item)
    if items is None:
        if reading.layout == "sequences":
            where = _path_of(parts[0])
            raise DataError(
                f"{where}: layout sequences needs a column with lists of items; found "
                f"{listed(_columns(table))}; "
                "name it with item=COLUMN, or leave layout out"
            )
        return staged
    ends = [0, *accumulate(counts)]
    tables = []
    for number in range(len(parts)):
        own = table.filter((table[ROW] >= ends[number]) & (table[ROW] < ends[number + 1]))
        tables.append(flattened(backend, own, items, notes, folder / f"events-{number}.parquet"))
    paths = [_path_of(part) for part in parts]
    lists = [name for name in _columns(table) if table[name].type().is_array()]
    return _joined_up(backend, paths, tables, {*texts, *lists})


def _columns(table: Table) -> list[str]:
    return [name for name in table.columns if name != ROW]
