"""Columns of raw rows with the type that settings declare; values of another type are refused, dropped or missing."""

from __future__ import annotations

import ibis
from ibis.expr.types import Column as Values
from ibis.expr.types import StringValue

from recspec.encoding import BETWEEN
from recspec.errors import how_many, listed
from recspec.prepare.declared import DeclaredColumn
from recspec.prepare.names import ROW
from recspec.prepare.raw_files import NUMBER, WHOLE, RawRows, finite, is_missing_marker, number_of
from recspec.prepare.tables import count_rows, fetch
from recspec.prepare.times import Times

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
        rows.problems.append(f"feature '{name}' is declared time, and models take no times as features; leave it out "
                             "of the features, or declare it text or number")  # fmt: skip
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
        rows.problems.append(f"column '{name}' holds {values.type()}, and is declared {declared.type}; declare it time "
                             "or text")  # fmt: skip
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
