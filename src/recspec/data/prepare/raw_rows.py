"""Staged rows of raw files: their values, labels and weights, and the problems in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ibis
import pyarrow as pa
from ibis.expr.types import BooleanValue, StringValue, Table, Value
from ibis.expr.types import Column as Values

from recspec.base.errors import how_many, listed, nearest, shortened
from recspec.data.encoding import MISSING_NUMBERS
from recspec.data.prepare.backend import Backend, K, count_where, fetch, figures
from recspec.data.prepare.declared import DeclaredColumn, Invalid
from recspec.data.prepare.known_layouts import LineFile
from recspec.data.prepare.names import IS_TARGET, ROW, SEEN, WEIGHT, Notes
from recspec.data.prepare.text_files import JsonFile, TextFile, line_numbers

RawLayout = Literal["rows", "sequences"]
RowsBy = Literal["first", "random"]
Part = TextFile | LineFile | JsonFile | Path
LARGEST = 3.4028234663852886e38  # the largest float32, as which prepared numbers are stored
NUMBER = r"^[+-]?([0-9]{1,40}(\.[0-9]*)?|\.[0-9]+)([eE](\+?[0-9]{1,2}|\+?[12][0-9]{2}|-[0-9]{1,3}))?$"
MOST = str(2**63 - 1)
_BELOW = "|".join(f"{MOST[:at]}[0-{int(digit) - 1}][0-9]{{{18 - at}}}" for at, digit in enumerate(MOST) if int(digit))
WHOLE = rf"^[+-]?([0-9]{{1,18}}|{_BELOW}|{MOST})(\.0*)?$"  # of 64 bits
FRACTION = r"\.0*[1-9]|[1-9]E-"  # of a decimal as engines write it
BEYOND = "whole numbers, some of more than 63 bits, read as text"
BROKEN = "decimals with a fraction"
UNBROKEN = "decimals without a fraction in any row, read as whole numbers"
PLAIN_WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"
SHOWN = 3  # most rows named in a problem


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


class Check(NamedTuple):
    """Rows to refuse; see `RawRows.refuse`."""

    place: int  # the number of problems before it
    wrong: BooleanValue
    name: str
    expected: str
    called: str
    remedy: str
    always: bool
    nullable: bool


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
    checks: list[Check] = field(default_factory=list)  # that `settle` makes
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
        tests: dict[tuple[str, str], BooleanValue] = {}
        for name in wide:
            tests[name, BROKEN] = texts[name].re_search(FRACTION)
            tests[name, BEYOND] = wide[name].notnull() & wide[name].try_cast("int64").isnull()
        found = count_where(self.backend, self.raw, tests)
        held, told = dict[str, Values](), dict[str, list[str]]()
        for name, values in wide.items():
            if found[name, BROKEN]:
                held[name] = values.cast("float64").name(name)
            elif found[name, BEYOND]:
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
            wrong = number.isnan() if not kind.is_integer() else ibis.literal(False)
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
        """Have `settle` add a problem that names the first rows for which `wrong` is true, if there are any.

        If settings say so, it drops these rows instead, or, if `nullable`, leaves their values to be taken as missing;
        not if `always`.
        """
        self.checks.append(Check(len(self.problems), wrong, name, expected, called, remedy, always, nullable))

    def settle(self) -> set[str]:
        """Look for the rows that are to be refused, in one query for all checks; returns the columns that have some."""
        checks, before = [*self.checks], len(self.problems)
        self.checks.clear()
        counts = self.count_where({place: check.wrong for place, check in enumerate(checks)})
        wrong = [(check, counts[place]) for place, check in enumerate(checks) if counts[place]]
        for check, count in wrong:
            self._report(check, count, check.place + len(self.problems) - before)
        return {check.name for check, _ in wrong}

    def _report(self, check: Check, count: int, place: int) -> None:
        """Add the problem or the note of a check that found some rows; a problem goes to its place."""
        name, rows = check.name, self.table.filter(check.wrong)
        found = self.first(rows.select(ROW, _value=rows[name].cast("string")))
        places, values = self.places(found.column(ROW).to_pylist()), found.column("_value").to_pylist()
        cut = [value and (value if len(value) <= 60 else f"{value[:60]}...") for value in values]
        said = ["missing" if value is None else repr(value) for value in cut]
        shown = [f"{place} is {value}" for place, value in zip(places, said, strict=True)]
        more = f" (and {count - SHOWN:,} more)" if count > SHOWN else ""
        what = f"column '{shortened(name)}'{check.called}: {', '.join(shown)}{more}; {check.expected}"
        invalid = "refuse" if check.always else self.invalid(name)
        if invalid == "drop":
            self.dropped.append(check.wrong)
            self.notes.dropped.append(f"{how_many(count, 'row')} of {Path(self.where).name}, by invalid values: {what}")
        elif invalid == "missing" and check.nullable:
            self.notes.changed.append(f"{how_many(count, 'value')} of {Path(self.where).name} taken as missing: {what}")
        else:
            advice = "" if check.always else self.reading.advice("such rows")
            self.problems.insert(place, f"{what}{check.remedy}{advice}")

    def figures(self, asked: Mapping[K, Value]) -> dict[K, Any]:
        return figures(self.backend, self.table, asked)

    def count_where(self, tests: Mapping[K, BooleanValue]) -> dict[K, int]:
        return count_where(self.backend, self.table, tests)


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


MOST_WORDS = 20  # of a label, to name the rarest
LABELS = {
    **dict.fromkeys(("1", "1.0", "true", "t", "yes", "y"), 1),
    **dict.fromkeys(("0", "0.0", "false", "f", "no", "n"), 0),
}
"""Spellings of a label, in any case."""
NO = {*(word for word, value in LABELS.items() if not value), "-1", "-1.0", "off", "nein", "non", "bad", "negative"}


def likely_positive(rows: Mapping[str, int]) -> str:
    """The value that label 1 likely has, of values and their numbers of rows: the rarest that is no word for no."""
    others = [value for value in rows if value.lower() not in NO]
    return shortened(min(others or rows, key=lambda value: (rows[value], value)))


def _label(
    rows: RawRows,
    name: str,
    positive_from: float | None = None,
    positive: Sequence[str] = (),
    *,
    may_be_made: bool = False,
) -> Values:
    """A label column as 0 and 1; 1 from `positive_from` on, or where it holds one of `positive`, if given.

    With `may_be_made`, messages name these settings.
    """
    values = rows.table[name]
    if positive:
        return _label_by_word(rows, name, positive)
    if not (values.type().is_string() or values.type().is_numeric()):
        rows.problems.append(f"column '{name}', the label: holds {values.type()}; expected numbers or text")
        return values
    if positive_from is not None:
        number = number_of(values.strip(), "float64") if values.type().is_string() else values
        wrong = number.isnull() | (number.abs() > LARGEST)
        rows.refuse(wrong, name, "expected a finite number, as positive_from is set", ", the label")
        return (number >= positive_from).cast("int64")
    counted = rows.table.group_by(word=values.cast("string").strip()).aggregate(rows=rows.table.count())
    counted = counted.filter(counted["word"].notnull()).order_by("rows", "word")
    if not values.type().is_string():  # of numbers, only the few are shown
        counted = counted.limit(MOST_WORDS + 1)
    words = {each["word"]: each["rows"] for each in fetch(rows.backend, counted).to_pylist()}
    likely = f"positive={likely_positive(words) if 0 < len(words) <= MOST_WORDS else 'TEXT'}"
    expected = "expected 0 or 1, true or false, yes or no"
    if may_be_made:
        of_text = f"--set {shlex.quote(likely)} of this text"
        expected += f"; --set positive_from=NUMBER makes a 1 of this number and more, {of_text}"
    if not values.type().is_string():
        rows.refuse(values.isnull() | ~values.isin([0, 1]), name, expected, ", the label")
        return values.cast("int64")
    label = values.strip().lower().cases(*LABELS.items(), else_=None)
    rows.refuse(label.isnull(), name, expected, ", the label")
    spelt = sorted({*words} - {"0", "1"})
    each = {value: [word for word in spelt if LABELS.get(word.lower()) == value] for value in (1, 0)}
    if told := [f"{listed(found)} as {value}" for value, found in each.items() if found]:
        rows.notes.changed.append(f"label '{name}': {' and '.join(told)}")
    return label


def _label_by_word(rows: RawRows, name: str, positive: Sequence[str]) -> Values:
    values = rows.table[name]
    rows.refuse(values.isnull(), name, "expected a value in every row", ", the label")
    text = values.cast("string").strip()
    wanted = [word.strip() for word in positive]
    kinds = (
        rows.table.group_by(word=text).aggregate(rows=rows.table.count()).order_by(ibis.desc("rows"), "word").limit(20)
    )
    words = [str(word) for word in fetch(rows.backend, kinds).column("word").to_pylist() if word is not None]
    held = fetch(rows.backend, rows.table.filter(text.isin(wanted)).select(word=text).distinct())
    present = {*held.column("word").to_pylist()}
    rows.problems.extend(
        f"column '{name}', the label: no row holds '{shortened(word)}'{nearest(word, words)}; found {listed(words)}"
        for word in wanted
        if word not in present and rows.reading.settable  # new rows may hold the other label alone
    )
    others = [word for word in words if word not in wanted]
    rows.notes.changed.append(f"label '{name}': {listed(map(shortened, wanted))} as 1 and {listed(others)} as 0")
    return text.isin(wanted).cast("int64")


LARGEST_WEIGHT = 1e9  # the largest weight: as float32 and in sums of many of them, larger ones lose digits
MOST_TYPES = 20  # of events, named in a message


@dataclass(frozen=True)
class Weighting:
    """Where the weights of events come from."""

    column: str | None = None  # of numbers
    event: str | None = None  # column of the event's type
    by_type: Mapping[str, float] = field(default_factory=dict)  # weights of the types of `event`
    seen: tuple[str, ...] | None = None  # types of `event` that count as seen; None: all
    target: tuple[str, ...] | None = None  # types of `event` that are predicted; None: all

    def __bool__(self) -> bool:
        return self.column is not None or bool(self.by_type)


def signals(rows: RawRows, given: Weighting) -> dict[str, Values]:
    """What an event counts, whether it is predicted and whether it is seen: the columns that the settings ask for."""
    found: dict[str, Values] = {WEIGHT: event_weights(rows, given)} if given else {}
    if given.target is not None:
        found[IS_TARGET] = target_events(rows, given, given.target)
    if given.seen is not None:
        same = given.seen == given.target
        found[SEEN] = found[IS_TARGET] if same else of_types(rows, "seen", given.event, given.seen)
    return found


def event_weights(rows: RawRows, given: Weighting) -> Values:
    """The weight of each row, from 0; adds a problem for each column that holds something else.

    A column that the rows lack counts as 1: its name is refused with those of all other settings.
    """
    weight = ibis.literal(1.0, type="float64")
    if given.column is not None and given.column in rows.table.columns:
        weight = _numbers(rows, given.column)
    if given.event is not None and given.event in rows.table.columns and given.by_type:
        weight = weight * _of_types(rows, given.event, given.by_type)
    return weight


def of_types(rows: RawRows, setting: str, event: str | None, types: Collection[str]) -> Values:
    """Whether each row's event is of some types, which a setting names; a problem for each type that no row has."""
    if not types or event is None or event not in rows.table.columns:
        return ibis.literal(bool(types))
    word, counts = _types(rows, event)
    _refuse_absent(rows, setting, event, types, counts)
    return word.isin([*types])


def target_events(rows: RawRows, given: Weighting, target: Collection[str]) -> Values:
    """Whether each row's event is predicted, by its type; notes what the others are."""
    found = of_types(rows, "target", given.event, target)
    if given.event is None or given.event not in rows.table.columns:
        return found
    word, counts = _types(rows, given.event)
    if not given.by_type:
        rows.refuse(word == "", given.event, "expected a type in every row", ", the type of the event")
    if rows.reading.settable:
        of_target = {kind: count for kind, count in counts.items() if kind in target}
        predicted, others = map(_counted, (of_target, {kind: counts[kind] for kind in counts if kind not in of_target}))
        rows.notes.inferred.append(f"events of '{given.event}' that are predicted: {predicted}; inputs alone: {others}")
    return found


def _numbers(rows: RawRows, name: str) -> Values:
    values = rows.table[name]
    if not (values.type().is_string() or values.type().is_numeric()):
        rows.problems.append(f"column '{name}', the weight: holds {values.type()}; expected numbers")
        return ibis.literal(1.0, type="float64")
    number = number_of(values.strip(), "float64") if values.type().is_string() else values.cast("float64")
    advice = "expected a number from 0 to 1,000,000,000 in every row; 0 leaves the row out"
    rows.refuse(number.isnull() | (number < 0) | (number > LARGEST_WEIGHT), name, advice, ", the weight")
    return number


def _of_types(rows: RawRows, name: str, by_type: Mapping[str, float]) -> Values:
    """The weight of each row's type; a problem for types of the settings or of the data that the other lacks."""
    word, counts = _types(rows, name)
    _refuse_absent(rows, "event_weights", name, by_type, counts)
    without = {kind: count for kind, count in counts.items() if kind and kind not in by_type}
    if without:
        rows.problems.append(
            f"setting 'event_weights': no weight for {_counted(without)} in column '{name}'; give "
            "each type a weight, or 0 to leave its rows out"
        )
    rows.refuse(word == "", name, "expected a type in every row", ", the type of the event")
    # As texts: Ibis takes the literal 1.5 for a float64 and drops its cast, and DuckDB makes a decimal of it.
    return word.cases(*((kind, repr(float(weight))) for kind, weight in by_type.items()), else_=None).cast("float64")


def _types(rows: RawRows, name: str) -> tuple[Values, dict[str, int]]:
    """The type of each row, empty if it is missing, and the rows of each type, the most frequent first."""
    word = rows.table[name].cast("string").strip().fill_null("")
    counted = rows.table.group_by(word=word).aggregate(rows=rows.table.count())
    found = fetch(rows.backend, counted.order_by(ibis.desc("rows"), "word").limit(10_000)).to_pylist()
    return word, {entry["word"]: entry["rows"] for entry in found}


def _refuse_absent(rows: RawRows, setting: str, name: str, named: Collection[str], counts: Mapping[str, int]) -> None:
    if not rows.reading.settable:  # new events may lack a type that the known ones have
        return
    known = {kind: count for kind, count in counts.items() if kind}
    rows.problems.extend(
        f"setting '{setting}': no row has the type '{shortened(kind)}' in column '{name}'{nearest(kind, [*known])}; "
        f"found {_counted(known)}"
        for kind in named
        if kind not in known
    )


def _counted(counts: Mapping[str, int]) -> str:
    shown = [f"{shortened(kind)} ({how_many(count, 'row')})" for kind, count in [*counts.items()][:MOST_TYPES]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more:,} other types" if more > 0 else "") if counts else listed([])
