"""The rows of raw files before their columns have types."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

import ibis
from ibis.expr.types import BooleanValue, StringValue, Table
from ibis.expr.types import Column as Values

from recspec.encoding import MISSING_NUMBERS
from recspec.prepare.backend import Backend
from recspec.prepare.notes import Notes
from recspec.prepare.raw_files import RawFiles, RawType, Reading
from recspec.prepare.tables import count_rows, fetch
from recspec.prepare.text_files import ROW

NUMBER = r"^[+-]?([0-9]{1,40}(\.[0-9]*)?|\.[0-9]+)([eE](\+?[0-9]{1,2}|\+?[12][0-9]{2}|-[0-9]{1,3}))?$"
WHOLE = r"^[+-]?[0-9]{1,18}(\.0*)?$"
PLAIN_WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"
SHOWN = 3
"""Most rows named in a problem."""


@dataclass(frozen=True)
class RawRows:
    """Rows of raw files with few types and without declared missing values; collects problems and notes."""

    backend: Backend
    raw: RawFiles
    reading: Reading
    notes: Notes
    problems: list[str] = field(default_factory=list)

    @cached_property
    def table(self) -> Table:
        """The rows with null for declared missing values, and with few types for the many of Parquet."""
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
            # As text, because DuckDB 2.0 evaluates isnan() by Parquet's statistics, which leave out NaN.
            wrong = number.cast("string").lower() == "nan" if not kind.is_integer() else ibis.literal(False)
            return ibis.ifelse(wrong | number.isin(numbers) if numbers else wrong, None, number)
        return values.cast("timestamp") if kind.is_date() else values

    def refuse(self, wrong: BooleanValue, name: str, expected: str, called: str = "") -> None:
        """Add a problem that names the first rows for which `wrong` is true, if there are any."""
        rows = self.table.filter(wrong)
        found = fetch(self.backend, rows.select(ROW, _value=rows[name].cast("string")).order_by(ROW).limit(SHOWN))
        if not found.num_rows:
            return
        places, values = self.raw.places(found.column(ROW).to_pylist()), found.column("_value").to_pylist()
        shown = [f"{place} is {_quoted(value)}" for place, value in zip(places, values, strict=True)]
        count = count_rows(self.backend, rows) if len(shown) == SHOWN else len(shown)
        more = f" (and {count - SHOWN:,} more)" if count > SHOWN else ""
        self.problems.append(f"column '{name}'{called}: {', '.join(shown)}{more}; {expected}")


def is_missing_marker(text: StringValue) -> BooleanValue:
    """Whether a text among numbers means a missing value."""
    return text.lower().isin([*MISSING_NUMBERS])


def number_of(text: StringValue, kind: RawType) -> Values:
    """The number that a text denotes, or null."""
    if kind == "int64":
        return ibis.ifelse(text.re_search(WHOLE), text.re_replace(r"\.0*$", ""), None).try_cast("int64")
    return ibis.ifelse(text.re_search(NUMBER), text, None).try_cast("float64")


def _quoted(value: str | None) -> str:
    return "missing" if value is None else repr(value if len(value) <= 60 else f"{value[:60]}...")
