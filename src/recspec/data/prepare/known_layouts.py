"""Layouts of text files that this field's data have and that are no plain tables, recognised by their first lines.

Each is a function that gives a `TextLayout` for the first lines of a file, or None. `KNOWN` lists all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import Table

from recspec.base.errors import DataError, listed, shortened
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.declared import DeclaredColumn
from recspec.data.prepare.names import NAMES, Notes, plain
from recspec.data.prepare.text_files import ColumnType, TextFile, lines_of

MOST_COLUMNS = 1_000  # that sparse rows may become
Row = tuple[int, Sequence[str | list[str] | None]]
"""The number of a line, from 1, and the values of a row that it holds."""


@dataclass(frozen=True)
class LineLayout:
    """How each line of a text file becomes rows."""

    columns: Callable[[Sequence[TextFile]], dict[str, ColumnType]]  # of all files together
    rows: Callable[[TextFile, Mapping[str, ColumnType]], Iterator[Row]]
    typed: bool = False  # whether `columns` tells categories from numbers


@dataclass(frozen=True)
class TextLayout:
    """How a text file is to be read."""

    separator: str
    header: bool
    names: tuple[str, ...]
    quote: str = '"'
    types: Mapping[str, DeclaredColumn] = field(default_factory=dict)  # that the file itself declares
    lines: LineLayout | None = None  # None: a row a line, with separated columns
    roles: Mapping[str, str] = field(default_factory=dict)  # settings of columns, such as {group: impression_id}
    sequences: bool = False  # whether each line is a user followed by the user's items
    told: str = ""  # what is kept and what is lost, for a note
    lost: str = ""


def _parts(line: str, separator: str) -> list[str]:
    return line.rstrip("\r\n").split(separator)


def _wrong(file: TextFile, line: int, text: str, expected: str) -> DataError:
    return DataError(f"{file.path}: line {line:,}: is {shortened(text.strip())!r}; expected {expected}")


# --- RecBole ---------------------------------------------------------------------------------------------------------

ATOMIC = re.compile(r"([^:]+):(token|token_seq|float|float_seq)")
ATOMIC_TYPES = {
    "token": DeclaredColumn(type="text"),
    "float": DeclaredColumn(type="number"),
    "token_seq": DeclaredColumn(type="list", separator=" "),
    "float_seq": DeclaredColumn(type="vector"),
}


def _atomic(lines: Sequence[str], key: str | None) -> TextLayout | None:  # noqa: ARG001
    """RecBole's atomic files: the header gives the types, and quotes are letters."""
    for separator in ("\t", ",", ";", "|", " "):
        found = [ATOMIC.fullmatch(part.strip()) for part in _parts(lines[0], separator)]
        heads = [match for match in found if match is not None]
        if len(heads) == len(found):
            types = {match[1]: ATOMIC_TYPES[match[2]] for match in heads if plain(match[1]) not in NAMES["timestamp"]}
            told = "columns have the types of the header, without their suffixes, and quotes are letters"
            return TextLayout(separator, True, tuple(m[1] for m in heads), quote="", types=types, told=told)
    return None


# --- MIND ------------------------------------------------------------------------------------------------------------

CLOCKED = re.compile(r"[0-9]{1,2}/[0-9]{1,2}/[0-9]{4} [0-9]{1,2}:[0-9]{2}:[0-9]{2} [AP]M")
NEWS = ("category", "subcategory", "title", "abstract", "url", "title_entities", "abstract_entities")
BEHAVIORS = ("impression_id", "user_id", "timestamp", "item_id", "clicked")


def _behaviors(lines: Sequence[str], key: str | None) -> TextLayout | None:  # noqa: ARG001
    """MIND's behaviors.tsv: an impression a line, each with the news shown and whether they were clicked."""
    parts = _parts(lines[0], "\t")
    if len(parts) != 5 or not CLOCKED.fullmatch(parts[2]) or not parts[4].strip():
        return None
    read = LineLayout(lambda _: dict.fromkeys(BEHAVIORS, "string"), _impressions)
    return TextLayout(
        "\t",
        False,
        BEHAVIORS,
        lines=read,
        roles={"group": "impression_id"},
        told="each news of an impression is a row, labelled by its click, and impressions are the groups",
        lost="the column of the user's earlier clicks (history=50 makes histories of the rows' own clicks)",
    )


def _impressions(file: TextFile, _: Mapping[str, ColumnType]) -> Iterator[Row]:
    for number, line in lines_of(file):
        if not line.strip():
            continue
        parts = _parts(line, "\t")
        if len(parts) != 5:
            raise _wrong(file, number, line, f"5 columns separated by tabs, found {len(parts)}")
        for shown in parts[4].split():
            item, clicked = shown[:-2], shown[-1:]
            if not item or shown[-2:] not in ("-0", "-1"):
                raise _wrong(
                    file,
                    number,
                    shown,
                    "a news and its click, such as N123-1; MIND's test set has no "
                    "clicks, so it can be neither trained on nor measured",
                )
            yield number, (parts[0], parts[1], parts[2], item, clicked)


def _news(lines: Sequence[str], key: str | None) -> TextLayout | None:
    """MIND's news.tsv: no header, eight columns, and entities as JSON, whose quotes are letters."""
    parts = _parts(lines[0], "\t")
    if len(parts) != 8 or not re.fullmatch("N[0-9]+", parts[0]) or any(part[:1] not in ("", "[") for part in parts[6:]):
        return None
    return TextLayout("\t", False, (key or "item_id", *NEWS), quote="", told="quotes are letters")


# --- Netflix ---------------------------------------------------------------------------------------------------------

HEADING = re.compile(r"\s*([^\s,;:]+):\s*")


def _under_headings(lines: Sequence[str], key: str | None) -> TextLayout | None:  # noqa: ARG001
    """Lines such as `123:`, an item, each followed by its users with a rating and a date, as of the Netflix Prize."""
    if len(lines) < 2 or not HEADING.fullmatch(lines[0]) or HEADING.fullmatch(lines[1]):
        return None
    first = [part.strip() for part in _parts(lines[1], ",")]
    kinds = ["timestamp" if re.match("[0-9]{4}-", part) else "rating" for part in first[1:]]
    if len(kinds) > 2 or len({*kinds}) < len(kinds):
        return None
    names = ("item_id", "user_id", *kinds)

    def rows(file: TextFile, _: Mapping[str, ColumnType]) -> Iterator[Row]:
        item = ""
        for number, line in lines_of(file):
            if found := HEADING.fullmatch(line):
                item = found[1]
            elif line.strip():
                values = [part.strip() for part in _parts(line, ",")]
                if len(values) != len(names) - 1 or not item:
                    raise _wrong(
                        file, number, line, f"an item such as 123:, or {' and '.join(names[1:])} separated by commas"
                    )
                yield number, (item, *values)

    read = LineLayout(lambda _: dict.fromkeys(names, "string"), rows)
    return TextLayout(",", False, names, lines=read, told=f"columns are {listed(names)}")


TITLED = re.compile(r"([0-9]+),([0-9]{4}|NULL),(.+)")


def _titles(lines: Sequence[str], key: str | None) -> TextLayout | None:
    """The Netflix Prize's movie_titles: an id, a year and a title that may hold commas."""
    if key is None or not all(TITLED.fullmatch(line.strip()) for line in lines) or '"' in "".join(lines):
        return None  # in a file of rows they may be a user, an item and a rating
    names = (key, "year", "title")

    def rows(file: TextFile, _: Mapping[str, ColumnType]) -> Iterator[Row]:
        for number, line in lines_of(file):
            if found := TITLED.fullmatch(line.strip()):
                yield number, (found[1], None if found[2] == "NULL" else found[2], found[3])
            elif line.strip():
                raise _wrong(file, number, line, "an id, a year and a title")

    read = LineLayout(lambda _: dict.fromkeys(names, "string"), rows)
    return TextLayout(",", False, names, lines=read, told=f"columns are {listed(names)}; a title may hold commas")


# --- libsvm, libffm --------------------------------------------------------------------------------------------------

LABEL = r"\s*[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"
LIBSVM = re.compile(rf"{LABEL}(\s+qid:\S+)?(\s+[0-9]+:[^\s:]+)+\s*(#.*)?")
LIBFFM = re.compile(rf"{LABEL}(\s+[0-9]+:[0-9]+:[^\s:]+)+\s*")


def _sparse(lines: Sequence[str], key: str | None) -> TextLayout | None:  # noqa: ARG001
    """libsvm, with LETOR's `qid:`, and libffm: a label, then `index:value` or `field:index:value`."""
    for kind, pattern in (("libsvm", LIBSVM), ("libffm", LIBFFM)):
        if all(pattern.fullmatch(line.strip()) for line in lines):
            grouped = re.match(rf"{LABEL}\s+qid:", lines[0]) is not None
            told = "an index of value 1 is a category of its field or place, another value is a number; what libsvm "
            told += "leaves out of numbers is 0"
            return TextLayout(
                " ",
                False,
                (),
                lines=LineLayout(_sparse_columns, _sparse_rows, typed=True),
                roles={"group": "qid"} if grouped else {},
                told=f"{kind}: {told}",
            )
    return None


def _entries(file: TextFile) -> Iterator[tuple[int, str, str | None, list[tuple[str, str, str]]]]:
    """Line, label, qid, and (field or nothing, index, value) of every entry."""
    for number, line in lines_of(file):
        label, *rest = line.partition("#")[0].split() or [""]
        if not label:
            continue
        qid = rest.pop(0)[4:] if rest and rest[0].startswith("qid:") else None
        held = [
            tuple(each.rsplit(":", 2)) if each.count(":") == 2 else ("", *each.partition(":")[::2]) for each in rest
        ]
        if not all(index.isdecimal() and re.fullmatch(r"[-+.0-9eE]+", value) for _, index, value in held):
            raise _wrong(file, number, line, "a label, then entries such as 7:1, or 2:7:1")
        yield number, label.removeprefix("+"), qid, held  # type: ignore[misc]


def _sparse_columns(files: Sequence[TextFile]) -> dict[str, ColumnType]:
    """The columns of sparse rows, and whether each holds categories, a list of them, or numbers.

    libffm has `field_F`. libsvm has `feature_I` of numbers; if all values are 1, it has `field_1`, ... where every row
    has as many indices, and else one list, `indices`.
    """
    indices: dict[str, set[str]] = {}  # of each field, or of each index if there are no fields; two at most
    numbers: set[str] = set()
    several: set[str] = set()
    counts: set[int] = set()
    grouped = with_fields = False
    for file in files:
        for number, _, qid, held in _entries(file):
            grouped |= qid is not None
            counts.add(len(held))
            fields = [name for name, *_ in held]
            for name, index, value in held:
                with_fields |= bool(name)
                own = name or index
                known = indices.setdefault(own, set())
                known |= {index} if len(known) < 2 else set()
                numbers |= {own} if float(value) != 1 else set()
                several |= {own} if name and fields.count(name) > 1 else set()
                if own in numbers and (len(known) > 1 or own in several):
                    raise _wrong(
                        file,
                        number,
                        f"{name}:{index}:{value}",
                        f"the value 1, because field {name} has several indices; a field of numbers has one index",
                    )
    kinds: dict[str, ColumnType] = {"label": "string"}
    if grouped:
        kinds["qid"] = "string"
    if with_fields or numbers:
        called = "field" if with_fields else "feature"
        for own in sorted(indices, key=int):
            is_number = not with_fields or own in numbers
            kinds[f"{called}_{own}"] = "float64" if is_number else "list" if own in several else "string"
    elif len(counts) == 1:
        kinds |= {f"field_{place}": "string" for place in range(1, counts.pop() + 1)}
    else:
        kinds["indices"] = "list"
    if len(kinds) > MOST_COLUMNS:
        raise DataError(
            f"{files[0].path}: has {len(kinds):,} columns of sparse numbers; expected {MOST_COLUMNS:,} at "
            "most; read it with scikit-learn's load_svmlight_file, keep fewer of them, and save these as "
            "Parquet"
        )
    return kinds


def _sparse_rows(file: TextFile, columns: Mapping[str, ColumnType]) -> Iterator[Row]:
    absent = {name: "0" if name.startswith("feature_") else None for name in columns}
    for number, label, qid, held in _entries(file):
        values: dict[str, str | list[str] | None] = {**absent, "label": label}
        if "qid" in columns:
            values["qid"] = qid
        if "indices" in columns:
            values["indices"] = [index for _, index, _ in held]
            yield number, [*values.values()]
            continue
        for place, (name, index, value) in enumerate(held, 1):
            column = f"field_{name or place}" if f"feature_{index}" not in columns else f"feature_{index}"
            kind, earlier = columns[column], values[column]
            if kind == "list":
                values[column] = [*(earlier if isinstance(earlier, list) else []), index]
            else:
                values[column] = value if kind == "float64" else index
        yield number, [*values.values()]


KNOWN: Mapping[str, Callable[[Sequence[str], str | None], TextLayout | None]] = {
    "RecBole's atomic file": _atomic,
    "MIND's impressions": _behaviors,
    "MIND's news": _news,
    "items over their users, as of Netflix": _under_headings,
    "Netflix's titles": _titles,
    "sparse rows": _sparse,
}
"""Name of a layout -> the function that recognises it by its first lines; a file of users or items has a `key`."""

_WOWPAL, _LOGGED = (
    r"-?[0-9]\S*( [0-9.]+)?( '\S+)? ?\|([A-Za-z]\S* \S| \S+:-?[0-9.]+\s).*\n",
    r'\S+ \S+ \S+ \[[^\]\n]+\] "[A-Z]+ .*\n',
)
OTHERS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "Vowpal Wabbit's format": (re.compile(_WOWPAL * 2), "write its features as columns of a CSV file"),
    "a web server's log": (re.compile(_LOGGED * 2), "write user, item and time as columns of a CSV file"),
    "a table that a database's shell drew": (
        re.compile(r".*\n *-+(\+-+)+ *\n|\+(-+\+)+\n|┌[─┬]+┐\n|.*\n\|?( *:?-+:? *\|)+.*\n"),
        "export it as CSV, as psql does by `\\copy`",
    ),
    "records over several lines, as of SNAP": (
        re.compile(r"([A-Za-z][\w/]*: .*\n){2}"),
        "write user, item, rating and time of each as a row of a CSV file",
    ),
}
"""Name of a layout that is not read -> the pattern of its first two lines, and what to do."""


BLOCK_EVENTS = 100_000


@dataclass(frozen=True)
class LineFile:
    """A text file whose lines become rows by a layout of their own."""

    file: TextFile
    layout: TextLayout
    columns: Mapping[str, ColumnType]

    @property
    def path(self) -> Path:
        return self.file.path

    def rows(self) -> Iterator[Row]:
        assert self.layout.lines is not None
        return self.layout.lines.rows(self.file, self.columns)


def _events(file: TextFile, columns: Mapping[str, ColumnType]) -> Iterator[Row]:  # noqa: ARG001
    """User and item of every event of a file of sequences."""
    for number, line in lines_of(file):
        if line.strip():
            user, *items = line.split() if file.separator == " " else map(str.strip, line.split(file.separator))
            yield from ((number, (user, item)) for item in items)


def read_lines(backend: Backend, part: LineFile, notes: Notes, target: Path) -> Table:
    """Stage the rows of a file that is read line by line."""
    kinds = {name: pa.list_(pa.string()) if kind == "list" else pa.string() for name, kind in part.columns.items()}
    schema = pa.schema([*kinds.items()])
    rows = part.rows()
    with pq.ParquetWriter(target, schema) as writer:
        while block := [values for _, values in islice(rows, BLOCK_EVENTS)]:
            arrays = [
                pa.array(values, kind) for values, kind in zip(zip(*block, strict=True), kinds.values(), strict=True)
            ]
            writer.write_table(pa.table(arrays, schema=schema))
    if part.layout.sequences:
        mark = None if part.file.separator == " " else part.file.separator
        if alone := sum(bool(line.strip()) and len(line.split(mark)) < 2 for _, line in lines_of(part.file)):
            notes.dropped.append(f"{alone:,} users of {part.path.name}: their line holds no item")
    return backend.read_parquet([target], row=True)


SEQUENCES = TextLayout(" ", False, (), quote="", lines=LineLayout(lambda _: {}, _events), sequences=True)
"""A user, then the user's items."""
