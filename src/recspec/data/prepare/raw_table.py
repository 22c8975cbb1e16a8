"""Raw files of any kind as one table whose columns have types.

All values of a text column decide its type. Ids and categories stay text, letter for letter. Every guess and every
change leaves a note. Values of an unclear type are an error that names their lines or rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import and_, or_
from pathlib import Path
from typing import NamedTuple

import ibis
from ibis.expr.types import BooleanValue, StringValue, Table
from ibis.expr.types import Column as Values

from recspec.base.errors import DataError, how_many, listed, shortened
from recspec.data.encoding import BETWEEN, COMMA, GROUPED, LONGEST_ID, TRUTH
from recspec.data.prepare.backend import count_rows, count_where, fetch
from recspec.data.prepare.declared import DeclaredColumn
from recspec.data.prepare.names import FILE_SPLIT, ROW
from recspec.data.prepare.raw_rows import (
    LARGEST,
    NUMBER,
    PLAIN_WHOLE,
    WHOLE,
    RawRows,
    Weighting,
    _label,
    finite,
    is_missing_marker,
    number_of,
    signals,
)
from recspec.data.prepare.text_files import JsonFile
from recspec.data.prepare.times import Times, seconds_of


def with_points(rows: RawRows, as_written: Collection[str]) -> RawRows:
    """The rows with a point in the numbers of text columns that hold nothing else, but for columns `as_written`.

    Problems of `rows` name numbers with a point, which may be a fraction or thousands.
    """
    table, declared = rows.table, rows.reading.types
    names = [
        name
        for name in table.columns
        if name not in (ROW, *as_written)
        and table[name].type().is_string()
        and (name not in declared or declared[name].type in ("integer", "number"))
    ]
    tests: dict[tuple[str, str], BooleanValue] = {}
    for name in names:
        text = table[name].strip()
        number = text.re_search(COMMA) | text.re_search(GROUPED) | text.re_search(NUMBER)
        tests[name, "commas"] = text.re_search(COMMA)
        tests[name, "points"] = text.re_search(NUMBER) & text.contains(".")
        tests[name, "rest"] = (text != "") & ~number & ~is_missing_marker(text)
    found = rows.count_where(tests)
    changed: dict[str, Values] = {}
    told: list[str] = []
    for name in names:
        commas, points, rest = (found[name, what] for what in ("commas", "points", "rest"))
        if rest and name not in declared:
            continue
        text = table[name].strip()
        if points:
            with_point = text.re_search(NUMBER) & text.contains(".")
            rows.refuse(
                with_point & ~text.re_search(GROUPED) if commas else with_point,
                name,
                "expected a decimal comma, as the setting decimal says",
                nullable=True,
                remedy="; write it with a comma, or declare the column text in types",
            )
        if commas:
            is_number = text.re_search(COMMA) | text.re_search(GROUPED)
            changed[name] = ibis.ifelse(is_number, text.replace(".", "").replace(",", "."), table[name])
            told.append(f"'{name}' ({commas:,})")
    if told:
        where = Path(rows.where).name
        rows.notes.changed.append(f"{where}: numbers with a decimal comma, read with a point: {', '.join(told)}")
    rows.settle()
    return replace(rows, raw=table.mutate(**changed)) if changed else rows


NUMBERS = r"^[\s\[(]*[-+.0-9][-+.0-9eE]*([\s,;|]+[-+.0-9][-+.0-9eE]*)*[\s\])]*$"
"""One number or more, separated as vectors are, with or without brackets."""


def typed_as(rows: RawRows, name: str, declared: DeclaredColumn, *, is_feature: bool) -> Values | None:
    """A column with its declared type; None if it stays unchanged. Problems and notes go to `rows`."""
    values = rows.table[name]
    is_list = values.type().is_array()
    if is_list and declared.type in ("text", "integer", "number", "time"):
        rows.problems.append(f"column '{name}' holds lists, and is declared {declared.type}; declare it list or vector")
        return None
    match declared.type:
        case "text":
            return None  # as it is read
        case "list":
            return None if is_list else values.cast("string")
        case "vector":
            return _vectors(rows, name, declared.length)
        case "integer" | "number":
            return _numbers(rows, name, declared)
    if is_feature:
        rows.problems.append(
            f"feature '{name}' is declared time, and models take no times as features; leave it out "
            "of the features, or declare it text or number"
        )
        return None
    seconds = Times(rows, name, needed=False).seconds()  # a check: the column stays as it is
    return ibis.ifelse(seconds.isnull(), None, values) if rows.invalid(name) == "missing" else None


def _numbers(rows: RawRows, name: str, declared: DeclaredColumn) -> Values | None:
    values, kind = rows.table[name], "int64" if declared.type == "integer" else "float64"
    if values.type().is_string():
        text = values.strip()
        pattern, what = (WHOLE, "a whole number of 64 bits") if kind == "int64" else (NUMBER, "a number")
        wrong = values.notnull() & (text != "") & ~text.re_search(pattern)
        if declared.missing is None:
            markers = is_missing_marker(text)
            wrong &= ~markers
            if count := count_rows(rows.backend, rows.table.filter(markers)):
                note_markers(rows, name, count)
        rows.refuse(wrong, name, f"declared {declared.type}; expected {what}", nullable=True)
        return finite(rows, name, number_of(text, kind))
    if not values.type().is_numeric():
        rows.problems.append(
            f"column '{name}' holds {values.type()}, and is declared {declared.type}; declare it time or text"
        )
        return None
    if kind == "int64" and not values.type().is_integer():
        beyond = values.abs() >= 2.0**63
        held = ibis.ifelse(beyond, 0.0, values)  # engines take the floor as a whole number of 64 bits
        wrong = values.notnull() & ((held != held.floor()) | beyond)
        rows.refuse(wrong, name, "declared integer; expected a whole number of at most 64 bits", nullable=True)
        return ibis.ifelse(wrong, None, values).cast(kind)
    return values.cast(kind)


def _vectors(rows: RawRows, name: str, length: int | None) -> Values | None:
    values = rows.table[name]
    if not (values.type().is_array() or values.type().is_string()):
        rows.problems.append(
            f"column '{name}' holds {values.type()}, and is declared vector; expected lists of numbers"
        )
        return None
    split, wrong = values, ibis.literal(False)
    if values.type().is_string():
        split = split_vectors(values)
        wrong = split.notnull() & ~values.strip().re_search(NUMBERS)
    if length is not None:
        wrong = wrong | (split.length() != length)
    elif values.type().is_array():
        return None
    what = "a vector" if length is None else f"a vector of {length:,} numbers"
    rows.refuse(values.notnull() & wrong, name, f"expected {what}", nullable=True)
    return ibis.ifelse(wrong, None, split)


def split_vectors(values: StringValue) -> Values:
    """The texts of a column cut into their numbers, which stay text."""
    text = values.re_replace(r"^[\s\[\]()]+|[\s\[\]()]+$", "")
    return ibis.ifelse((text == "") | is_missing_marker(text), None, text.re_split(BETWEEN))


def note_markers(rows: RawRows, name: str, count: int) -> None:
    """Note the texts among numbers that mean a missing value."""
    text = rows.table[name].strip()
    marked = rows.table.filter(is_missing_marker(text))
    kinds = fetch(rows.backend, marked.group_by(text=text).aggregate(first=marked[ROW].min()).order_by("first"))
    first = rows.places([kinds.column("first")[0].as_py()])[0]
    texts = listed(kinds.column("text").to_pylist()[:10])
    rows.notes.changed.append(f"'{name}': {how_many(count, 'value')} taken as missing: {texts} (the first in {first})")


CODE = r"^[+-]?(0[0-9]|[0-9]{16})"  # as a number, these digits lose a leading zero or their last digits
DECIMAL_ID = r"^-?[0-9]{1,18}\.0+$"
CODED = "digits that are no plain numbers (leading zeros, or too many digits), kept as text"
AS_NUMBERS = "`numeric` takes them as numbers"
WRITTEN = r"^[-+(]?[$€£¥]? ?[0-9]{1,3}([., ']?[0-9]{3})*([.,][0-9]+)?-? ?[%$€£¥]?[)]?$"
"""Numbers with separators and units: `1,234.50`, `12,5`, `$3`, `7 %`."""
CODE_NAME = re.compile(
    r"(^|[^A-Za-z])([Ii][Dd]|[Cc]ode|[Zz]ip|[Tt]ype|[Cc]ategory)$|[a-z](Id|ID|Code|Zip|Type|Category)$"
)
"""Names of columns whose digits tell things apart: `city_id`, `countryCode`."""
VECTOR = r"^\[\s*[-+.0-9][-+.0-9eE]*([\s,;]+[-+.0-9][-+.0-9eE]*)+\s*\]$"
"""Lists of two or more numbers in brackets, such as `[0.5, -1.25]`."""
MAYBE_GROUPED = r"^[+-]?([0-9]{1,3}|[1-9][0-9]{0,2}\.[0-9]{3})$"
JOINED = r"^[^|^;]+([|^][^|^;]+|;[^|^; ][^|^;]*)+$"
"""Several values in one text, as FuxiCTR, MovieLens and others write lists: `12^7^99`, `Drama|War`, `red;blue`."""
INVALID = "__invalid__"  # where a row holds an invalid value, for the moment of a query


@dataclass(frozen=True)
class Roles:
    """What each column of a table is for."""

    ids: tuple[str, ...] = ()  # text without missing values; in a file of users or items (`shown`), some may be missing
    texts: Collection[str] = ()  # text, as written
    categories: Collection[str] = ()  # text, as written; but true and false become 1 and 0 in any spelling
    numbers: Collection[str] = ()
    cut: Collection[str] = ()  # whole numbers that are cut into buckets, so they are numbers however long
    vectors: Collection[str] = ()  # lists of numbers; texts are cut into them
    features: Collection[str] = ()  # their values decide their type
    shown: bool = False  # a file of users or items: the values of all other columns decide their types, without notes
    time: str | None = None
    label: str | None = None
    other_labels: tuple[str, ...] = ()
    positive_from: float | None = None
    positive: tuple[str, ...] = ()
    weights: Weighting = field(default_factory=Weighting)


def typed(rows: RawRows, roles: Roles) -> Table:
    """Staged rows with typed columns.

    Times are seconds since 1970, or the file's own numbers; labels are 0 and 1. Raises DataError, naming the rows with
    values of another type than their column.
    """
    if rows.reading.decimal == ",":
        times = () if roles.time is None else (roles.time,)
        rows = with_points(rows, {*roles.ids, *roles.texts, *roles.categories, *roles.vectors, *times})
    return _Typing(rows, roles).table()


class _Seen(NamedTuple):
    """Numbers of values of a text column, by spelling."""

    present: int
    numbers: int
    plain: int
    codes: int
    written: int
    truths: int
    markers: int
    vectors: int
    joined: int
    large: int  # that may be too large for float32, if they are numbers

    @property
    def rest(self) -> int:
        """Values that are neither numbers nor missing."""
        return self.present - self.markers - self.numbers


def _tests(text: StringValue) -> Iterator[Values]:
    """Where the values of a text column, without blanks around them, are what `_Seen` counts, in its order."""
    yield from (text != "", text.re_search(NUMBER), text.re_search(PLAIN_WHOLE), text.re_search(CODE))
    yield from (text.re_search(WRITTEN) & ~text.re_search(NUMBER), text.lower().isin([*TRUTH]), is_missing_marker(text))
    yield text.re_search(VECTOR) & text.re_search("[.eE]")
    yield text.re_search(JOINED)
    yield text.re_search("[0-9.][eE]|[0-9]{39}")


@dataclass(frozen=True)
class _Typing:
    rows: RawRows
    roles: Roles
    inferred: dict[str, list[str]] = field(default_factory=dict)

    def table(self) -> Table:
        typed = {name: self._column(name) for name in self.rows.table.columns if name not in (ROW, FILE_SPLIT)}
        typed |= signals(self.rows, self.roles.weights)
        typed |= self._finite(typed)
        self.rows.settle()
        DataError.refuse(self.rows.where, self.rows.problems)
        of = f" of {Path(self.rows.where).name}" if self.roles.shown else ""
        self.rows.notes.inferred.extend(f"{listed(names)}{of}: {what}" for what, names in self.inferred.items())
        return self._with_ids(self._valid({name: values for name, values in typed.items() if values is not None}))

    def _valid(self, typed: Mapping[str, Values]) -> Table:
        """The rows with typed columns, without those that hold an invalid value."""
        wrong = self.rows.dropped
        if not wrong:
            return self.rows.table.mutate(**typed)
        held = self.rows.table.mutate(**typed, **{INVALID: reduce(or_, (each.fill_null(False) for each in wrong))})
        table = held.filter(~held[INVALID]).drop(INVALID)
        before, left = (count_rows(self.rows.backend, each) for each in (held, table))
        if not self.roles.shown:
            self.rows.notes.num_invalid += before - left
        if before and not left:
            raise DataError.of(self.rows.where, [f"no row is left: {what}" for what in self.rows.notes.dropped])
        return table

    def _finite(self, typed: Mapping[str, Values | None]) -> dict[str, Values]:
        """The columns of numbers, of files with types, that hold one too large for float32, without it."""
        rows, roles = self.rows.table, self.roles
        names = [
            name
            for name in dict.fromkeys([*roles.numbers, *roles.features])
            if name in typed and name not in (*roles.texts, *roles.categories) and not rows[name].type().is_string()
        ]
        held = {name: rows[name] if (values := typed[name]) is None else values for name in names}
        held = {name: values for name, values in held.items() if values.type().is_floating()}
        found = self.rows.count_where({name: values.abs() > LARGEST for name, values in held.items()})
        return {name: finite(self.rows, name, held[name]) for name, count in found.items() if count}

    def _column(self, name: str) -> Values | None:
        """A column with its type; None if it stays unchanged."""
        roles, values = self.roles, self.rows.table[name]
        if name == roles.time:
            return seconds_of(self.rows, name)
        declared = self.rows.reading.types.get(name)
        if name == roles.label or name in roles.other_labels:
            if declared is not None and declared.type in ("time", "list", "vector"):
                self.rows.problems.append(
                    f"column '{name}' is a label, and is declared {declared.type}; declare it text, integer or number"
                )
                return None
            if name != roles.label:
                return _label(self.rows, name)
            return _label(self.rows, name, roles.positive_from, roles.positive, may_be_made=True)
        if declared is not None and name in roles.ids and declared.type in ("list", "vector"):
            self.rows.problems.append(
                f"column '{name}' holds ids, and is declared {declared.type}; declare it text or integer"
            )
            return None
        if declared is not None:
            return typed_as(self.rows, name, declared, is_feature=name in roles.features)
        if name in roles.vectors:
            return split_vectors(values) if values.type().is_string() else None
        if name in roles.ids and values.type().is_string() and not roles.shown:
            self.rows.refuse(
                values.length() > LONGEST_ID,
                name,
                f"expected ids of at most {LONGEST_ID:,} characters, as requests may name",
            )
        if name in roles.ids or name in roles.texts or name in roles.categories:
            if values.type().is_integer() and not self.rows.raw[name].type().is_boolean():
                self._infer("whole numbers, kept as text; `types` can declare them integer", name)
                return values.cast("string")
            return self._truth(name) if name in roles.categories and values.type().is_string() else None
        if name in roles.numbers and values.type().is_string():
            return self._number(name)
        if name in roles.numbers and name not in roles.features and not values.type().is_numeric():
            self.rows.problems.append(f"column '{name}' holds {values.type()}; expected numbers")
            return None
        if name in self._long:
            self._infer(f"{CODED}; {AS_NUMBERS}", name)
            return values.cast("string")
        if name in roles.features or roles.shown:
            return self._judged(name) if values.type().is_string() else None
        return None

    def _infer(self, what: str, name: str) -> None:
        self.inferred.setdefault(what, []).append(name)

    @cached_property
    def _seen(self) -> dict[str, _Seen]:
        """Counts of every text column to judge."""
        rows, roles = self.rows.table, self.roles
        judged = [*roles.categories, *roles.numbers, *roles.features] if not roles.shown else rows.columns
        names = [
            name
            for name in dict.fromkeys(judged)
            if name in rows.columns and name != ROW and rows[name].type().is_string()
        ]
        bare = rows.select(ROW, **{name: rows[name].strip() for name in names})  # once, and not in each of the tests
        tests = {
            (name, kind): test for name in names for kind, test in zip(_Seen._fields, _tests(bare[name]), strict=True)
        }
        counts = count_where(self.rows.backend, bare, tests)
        return {name: _Seen(*(counts[name, kind] for kind in _Seen._fields)) for name in names}

    @cached_property
    def _long(self) -> set[str]:
        """Features of whole numbers, in files with types, that hold one of as many digits as `CODE` has."""
        rows, roles = self.rows.table, self.roles
        names = [
            name
            for name in dict.fromkeys(roles.features)
            if name in rows.columns and name not in (*roles.numbers, *roles.cut) and rows[name].type().is_integer()
        ]
        found = self.rows.count_where({name: rows[name].cast("float64").abs() >= 1e15 for name in names})
        return {name for name, count in found.items() if count}

    def _truth(self, name: str) -> Values | None:
        """1 and 0 for true and false, if a column holds nothing else."""
        seen = self._seen[name]
        if not seen.truths or seen.truths < seen.present:
            return None
        self._infer("true and false, taken as 1 and 0", name)
        return self.rows.table[name].strip().lower().cases(*TRUTH.items(), else_=None)

    def _judged(self, name: str) -> Values | None:
        """A number, a truth value or text, by all values."""
        seen, asked = self._seen[name], name in self.roles.features
        if asked and seen.vectors * 2 > seen.present:
            return split_vectors(self.rows.table[name])
        if name in self.rows.texts:
            if asked and seen.numbers * 2 > seen.present:
                though = f"though {seen.numbers:,} of its {seen.present:,} values are numbers"
                note = f"'{name}' is taken as a category, for the file calls it text, {though}; set numeric=[{name}] "
                self.rows.notes.inferred.append(note + "to take it as a number")
            return None
        if (truth := self._truth(name)) is not None:
            return truth
        if seen.codes and seen.numbers + seen.markers == seen.present:
            self._infer(f"{CODED}; {AS_NUMBERS}" if asked else CODED, name)
            return None
        if seen.numbers and not seen.rest and (asked or not seen.markers):
            return self._number(name)
        if (seen.numbers + seen.written) * 2 <= seen.present or seen.codes or CODE_NAME.search(name) or seen.joined:
            self._infer("text, taken as categories" if asked else "text", name)
            if asked and seen.joined and name not in self.roles.categories:
                text = self.rows.table.filter(self.rows.table[name].strip().re_search(JOINED))
                value = str(self.rows.first(text.select(ROW, _value=text[name])).column("_value")[0])
                mark = next(each for each in value if each in "|^;")
                self.rows.notes.inferred.append(
                    f"'{name}': {how_many(seen.joined, 'value')} such as "
                    f"'{shortened(value)}' may be lists; --set 'lists=[{name}]' --set "
                    f"'list_separator={mark}' reads them so"
                )
        elif asked:
            self._refuse_text(name, seen)
        elif seen.written * 2 > seen.rest:
            self._infer(
                "text, though most values are numbers with separators or units; write them with a point and "
                "nothing else, such as 1234.5, to have numbers, or set decimal=comma if a comma is the decimal mark",
                name,
            )
        else:
            self._infer(
                "text, though most values are numbers; types={COLUMN: {type: number, invalid: missing}} takes "
                "the others as missing",
                name,
            )
        return None

    def _number(self, name: str) -> Values:
        seen, text = self._seen[name], self.rows.table[name].strip()
        if seen.rest:
            self._refuse_text(name, seen)
        if seen.markers:
            note_markers(self.rows, name, seen.markers)
        whole = seen.plain == seen.numbers
        self._infer("whole numbers" if whole else "numbers", name)
        if seen.plain and not whole and self.rows.reading.decimal == ".":
            _warn_of_thousands(self.rows, name, text)
        number = number_of(text, "int64" if whole else "float64")
        return finite(self.rows, name, number) if seen.large else number

    def _refuse_text(self, name: str, seen: _Seen) -> None:
        text = self.rows.table[name].strip()
        advice = "correct them, name what stands for a missing value in missing_values,"
        if seen.written * 2 > seen.rest:
            advice = "write numbers with a point and nothing else, such as 1234.5,"
            commas = self.rows.table.filter(text.re_search(COMMA) & ~text.re_search("^[+-]?[0-9]{1,3}(,[0-9]{3})+$"))
            if self.rows.reading.settable and count_rows(self.rows.backend, commas):
                advice = f"take commas as decimal marks with --set decimal=comma, {advice}"
        self.rows.refuse(
            (text != "") & ~is_missing_marker(text) & ~text.re_search(NUMBER),
            name,
            f"{seen.numbers:,} of its {seen.present:,} values are numbers",
            nullable=True,
            remedy=f"; {advice} or keep the column as text with categorical=[{name}]",
        )

    def _with_ids(self, table: Table) -> Table:
        """The rows, all of which have ids. Raises DataError if some have none, unless settings drop these."""
        problems = []
        ids = [name for name in self.roles.ids if name in table.columns]
        counts = self._count_ids(table, ids)
        for name in ids:
            kind = table[name].type()
            if not (kind.is_string() or kind.is_integer()):
                so = "write them so"
                if kind.is_floating():
                    so += "; pandas keeps whole numbers beside missing ones as Int64"
                problems.append(f"column '{name}' holds {kind}; ids must be text or whole numbers; {so}")
                continue
            if counts.get((name, "objects")):  # which are read as texts
                held = self.rows.first(table.filter(table[name].cast("string").startswith("{")).select(ROW))
                places = ", ".join(self.rows.places(held.column(ROW).to_pylist()))
                problems.append(
                    f"column '{name}' holds objects, such as {places}; ids must be text or whole numbers; write the "
                    "value that tells them apart"
                )
                continue
            if counts.get((name, "decimals")) and name not in self.rows.reading.types:
                problems += self._equal_ids(table, name)
            count = counts.get((name, "missing"))
            if not count:
                continue
            first = self.rows.first(table.filter(table[name].isnull()).select(ROW))
            rows = f"{how_many(count, 'row')}, such as {', '.join(self.rows.places(first.column(ROW).to_pylist()))}"
            if self.rows.invalid(name) == "drop":
                self.rows.notes.dropped.append(f"column '{name}' has no value in {rows} (invalid values)")
                self.rows.notes.num_invalid += count
                table = table.filter(table[name].notnull())
            else:
                problems.append(
                    f"column '{name}' has no value in {rows}; leave these rows out, or give them an id"
                    f"{self.rows.reading.advice('them')}"
                )
        if counts.get((ids[0], "header") if ids else ("", "")):
            again = self.rows.first(table.filter(_repeats_header(table, ids)).select(ROW))
            places = ", ".join(self.rows.places(again.column(ROW).to_pylist()))
            problems.append(f"the header stands among the rows again, such as {places}; leave it out there")
        DataError.refuse(self.rows.where, problems)
        for name in ids:
            self._note_odd_ids(table, name, counts)
        return table

    def _count_ids(self, table: Table, ids: Sequence[str]) -> dict[tuple[str, str], int]:
        """The rows whose ids are looked at more closely: (column, reason) -> count.

        The catalogue of a file of users or items leaves out rows without an id, and counts them.
        """
        tests: dict[tuple[str, str], BooleanValue] = {}
        for name in ids:
            kind, text = table[name].type(), table[name]
            if isinstance(self.rows.parts[0], JsonFile) and name not in self.rows.texts:
                tests[name, "objects"] = text.cast("string").startswith("{")
            if not self.roles.shown:
                tests[name, "missing"] = text.isnull()
                if kind.is_string():
                    tests[name, "decimals"] = text.re_search(DECIMAL_ID)
                    tests[name, "blanks"] = text != text.strip()
                    tests[name, "markers"] = is_missing_marker(text)
        if len(ids) > 1 and all(table[name].type().is_string() for name in ids) and not self.roles.shown:
            tests[ids[0], "header"] = _repeats_header(table, ids)
        return count_where(self.rows.backend, table, tests)

    def _equal_ids(self, table: Table, name: str) -> list[str]:
        """A problem if ids such as 3 and 3.0, which are one number, would be two."""
        text = table[name]
        whole = table.filter(text.re_search(DECIMAL_ID)).select(_id=text, _whole=text.re_replace(r"\.0+$", ""))
        twice = whole.distinct().semi_join(table.select(_whole=text).distinct(), "_whole").order_by("_id")
        found = fetch(self.rows.backend, twice.limit(1)).to_pylist()
        if not found:
            return []
        one, other = found[0].values()
        both = f"'types={{{name}: integer}}' makes them one, --set 'types={{{name}: text}}' keeps both"
        return [f"column '{name}' holds '{one}' and '{other}', equal as numbers and two ids; --set {both}"]

    def _note_odd_ids(self, table: Table, name: str, counts: Mapping[tuple[str, str], int]) -> None:
        """Tell of ids that are kept letter for letter but may be a mistake."""
        notes = self.rows.notes
        for why, what, told in (
            ("blanks", "have blanks around them, which are part of the id", notes.inferred),
            ("markers", "look like missing values, and are kept as ids", notes.warnings),
            ("decimals", "are whole numbers with a fraction, which is part of the id", notes.warnings),
        ):
            if (rows := counts.get((name, why))) and not (why == "decimals" and name in self.rows.reading.types):
                text = table[name]
                tests = {"blanks": text != text.strip(), "markers": is_missing_marker(text)}
                odd = table.filter(tests.get(why, text.re_search(DECIMAL_ID)))
                ids = fetch(self.rows.backend, odd.select(text=text).distinct().order_by("text")).column(0).to_pylist()
                note = f"'{name}': {how_many(len(ids), 'id')}, in {how_many(rows, 'row')}, {what}: {listed(ids[:5])}"
                leave_out = f"; --set 'missing_values={json.dumps(ids)}' --set invalid_values=drop leaves them out"
                if why == "decimals":
                    leave_out = f"; --set 'types={{{name}: integer}}' reads them without it"
                told.append(note + (leave_out if told is notes.warnings and self.rows.reading.settable else ""))


def _warn_of_thousands(rows: RawRows, name: str, text: StringValue) -> None:
    """Warn of numbers such as 950 and 1.250, whose points may group thousands."""
    numbers = rows.table.filter(text.re_search(NUMBER))
    if count_rows(rows.backend, numbers.filter(~text.re_search(MAYBE_GROUPED)).limit(1)):
        return
    one = fetch(rows.backend, numbers.filter(text.contains(".")).select(_one=text).order_by("_one").limit(1))
    rows.notes.warnings.append(
        f"'{shortened(name)}': every number is below 1,000 or has three digits behind a point, such as "
        f"'{one[0][0].as_py()}': if points group thousands, write numbers without them"
    )


def _repeats_header(table: Table, names: Sequence[str]) -> BooleanValue:
    """Where each of these columns holds its own name, as where files with headers were put together."""
    return reduce(and_, (table[name].strip() == name for name in names))
