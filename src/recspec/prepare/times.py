"""The time column of raw rows, as seconds since 1970 in UTC or as the numbers it holds."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import ibis
import pyarrow as pa
from ibis.expr.types import BooleanValue, StringValue, Table
from ibis.expr.types import Column as Values

from recspec.errors import listed
from recspec.prepare.backend import Backend
from recspec.prepare.names import ROW
from recspec.prepare.notes import Notes
from recspec.prepare.raw_files import NUMBER, PLAIN_WHOLE, RawRows, number_of
from recspec.prepare.tables import fetch

DATE = r"^([0-9]{4})[-/]([0-9]{2})[-/]([0-9]{2})"
CLOCK = r"([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.,][0-9]+)?)?)"
ZONE = r" ?(Z|z|UTC|GMT|[+-][0-9]{2}(:?[0-9]{2})?)"
UNZONED = f"{DATE}{CLOCK}?$"
ZONED = f"{DATE}{CLOCK}{ZONE}$"
PER_SECOND = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
"""Units of numbers since 1970."""
DIRECTIVES = {
    "Y": r"(?P<Y>[0-9]{4})", "y": r"(?P<y>[0-9]{2})", "m": r"(?P<m>[0-9]{1,2})", "d": r"(?P<d>[0-9]{1,2})",
    "b": r"(?P<b>[A-Za-z]{3})[A-Za-z]*", "B": r"(?P<b>[A-Za-z]{3})[A-Za-z]*", "H": r"(?P<H>[0-9]{1,2})",
    "I": r"(?P<I>[0-9]{1,2})", "M": r"(?P<M>[0-9]{1,2})", "S": r"(?P<S>[0-9]{1,2})", "f": r"(?P<f>[0-9]{1,9})",
    "p": r"(?P<p>[AaPp])\.?[Mm]\.?", "z": r"(?P<z>Z|z|[+-][0-9]{2}(?::?[0-9]{2})?)", "%": "%",
}  # fmt: skip
"""Python's codes of `time_format` and the text they match."""
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DATES = ("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%m/%d/%y",
         "%d/%m/%y", "%d.%m.%y", "%d-%m-%y", "%m-%d-%y", "%y/%m/%d", "%y.%m.%d", "%y-%m-%d", "%d %b %Y", "%b %d, %Y",
         "%b %d %Y", "%d-%b-%Y", "%d-%b-%y",
         "%d%b%Y")  # fmt: skip
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p", "T%H:%M:%S", ", %H:%M")
GUESSES = tuple(f"{date}{clock}" for date in DATES for clock in CLOCKS)
"""Formats that are tried where no other is given and times are neither numbers nor of ISO 8601."""
BOUNDS = {"m": 12, "d": 31, "H": 23, "I": 12, "M": 59, "S": 59}
GLANCED = 1_000  # rows read to find a time column or a format


def check_time_format(text: str) -> str:
    """Check a time format and return it. Raises ValueError, naming its unknown, missing or repeated codes."""
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


@dataclass(frozen=True)
class Times:
    """Converts a time column to seconds since 1970 in UTC, or to the numbers it holds."""

    rows: RawRows
    name: str

    def seconds(self) -> Values:
        """The numbers; problems and notes go to `rows`."""
        values, unit = self.rows.table[self.name], self.rows.reading.time_format
        kind = values.type()
        if kind.is_timestamp():
            self._refuse(values.isnull(), "expected a time in every row")
            if not kind.timezone:
                self._note_utc()
            fraction = values.cast("string").re_extract(r"\.([0-9]+)", 1)  # Spark has no function for fractions
            return self._with_fraction(values.truncate("s").epoch_seconds().cast("int64"), fraction)
        if kind.is_numeric():
            self._refuse(values.isnull(), "expected a time in every row")
            return self._scaled(values)
        if not kind.is_string():
            self.rows.problems.append(f"column '{self.name}' holds {kind}; a timestamp must be a number or a date")
            return values
        text = values.strip()
        if unit is not None and unit not in PER_SECOND:
            return self._formatted(text, unit)
        return self._judged(text)

    def _refuse(self, wrong: BooleanValue, expected: str) -> None:
        self.rows.refuse(wrong, self.name, expected)

    def _note_utc(self) -> None:
        self.rows.notes.inferred.append(f"'{self.name}': times without a zone, taken as UTC")

    def _judged(self, text: StringValue) -> Values:
        """Numbers or dates of ISO 8601, by the majority of values."""
        rows = self.rows.table
        tests = {"number": text.re_search(NUMBER), "zoned": text.re_search(ZONED), "unzoned": text.re_search(UNZONED)}
        counted = rows.aggregate(present=rows[self.name].count(), plain=text.re_search(PLAIN_WHOLE).cast("int64").sum(),
                                 **{name: test.cast("int64").sum() for name, test in tests.items()})  # fmt: skip
        found = {name: int(value or 0) for name, value in fetch(self.rows.backend, counted).to_pylist()[0].items()}
        missing = rows[self.name].isnull()
        if found["number"] > found["zoned"] + found["unzoned"]:
            self._refuse(missing | ~tests["number"], f"expected a number, as {found['number']:,} other values are")
            kind = "int64" if found["plain"] == found["number"] else "float64"
            return self._scaled(number_of(text, kind))
        told = found["zoned"] + found["unzoned"]
        if not told or (told < found["present"] and len(self._fitting(text)) == 1):
            return self._guessed(text)
        if found["zoned"] and found["unzoned"]:
            what = {"zoned": "with a time zone", "unzoned": "without one"}
            few, many = sorted(("unzoned", "zoned"), key=found.__getitem__)
            self._refuse(tests[few], f"{found[few]:,} times {what[few]} and {found[many]:,} {what[many]}; "
                         "they can't be compared: give all times a zone, or none")  # fmt: skip
        self._refuse(missing | ~(tests["zoned"] | tests["unzoned"]), f"expected a time of ISO 8601, as "
                     f"{told:,} other values are; or set time_format")  # fmt: skip
        if found["zoned"]:
            self.rows.notes.changed.append(f"'{self.name}': times with zones, made UTC")
        else:
            self._note_utc()
        clock = text.re_extract(f"{DATE}{CLOCK}", 4)
        full = ibis.cases((clock == "", "00:00:00"), (clock.length() == 6, clock.substr(1, 5) + ":00"),
                          else_=clock.substr(1, 8))  # fmt: skip
        date = text.substr(0, 10).replace("/", "-")
        zone = text.re_extract(f"{DATE}{CLOCK}{ZONE}$", 8) if found["zoned"] else None
        return self._instant(date + " " + full, text.re_extract(r"[.,]([0-9]+)", 1), zone)

    def _instant(self, clock: StringValue, fraction: StringValue, zone: StringValue | None) -> Values:
        """Seconds since 1970 of a time such as `2024-01-31 23:59:59`, its fraction and its zone."""
        there = clock.try_cast("timestamp").epoch_seconds().cast("int64")
        if zone is not None:
            digits = zone.re_replace("[^0-9]", "").rpad(4, "0")
            ahead = digits.substr(0, 2).try_cast("int64") * 3600 + digits.substr(2, 2).try_cast("int64") * 60
            sign = ibis.ifelse(zone.startswith("-"), -1, 1)
            there = there - ibis.ifelse(zone.re_search("^[+-]"), sign * ahead, 0)
        if not self.rows.problems:  # otherwise the same rows may be named twice
            self._refuse(there.isnull(), "there is no such day or time of day")
        return self._with_fraction(there, fraction)

    def _with_fraction(self, seconds: Values, fraction: StringValue) -> Values:
        """Seconds, with fractions to a millionth if any row has one."""
        rows = self.rows.table
        micros = (fraction + ibis.literal("000000")).substr(0, 6).try_cast("int64")
        broken = fetch(self.rows.backend, rows.aggregate(most=micros.max())).column("most")[0].as_py()
        return seconds.cast("float64") + micros.cast("float64") / 1e6 if broken else seconds

    def _scaled(self, numbers: Values) -> Values:
        unit = self.rows.reading.time_format
        if unit is not None and unit not in PER_SECOND:
            return self._formatted(numbers.cast("string"), unit)
        if unit is None:
            self._note_unit(numbers)
        per_second = PER_SECOND[unit or "seconds"]
        if per_second == 1:
            return numbers
        if numbers.type().is_integer():
            rest = numbers % per_second
            odd = fetch(self.rows.backend, self.rows.table.aggregate(most=rest.max())).column("most")[0].as_py()
            if not odd:
                return (numbers // per_second).cast("int64")
        return numbers.cast("float64") / per_second

    def _note_unit(self, numbers: Values) -> None:
        found = fetch(self.rows.backend, self.rows.table.aggregate(least=numbers.min(), most=numbers.max()))
        least, most = found.to_pylist()[0].values()
        if least is None:
            return
        looks = [(f"{unit} since 1970", unit) for unit, per_second in PER_SECOND.items()
                 if per_second > 1 and 3e8 * per_second <= least and most <= 4.2e9 * per_second]  # fmt: skip
        if least >= 19_000_101 and most <= 21_001_231:
            looks.append(("days", "%Y%m%d"))
        taken = f"'{self.name}': numbers, taken as they are; they look like"
        self.rows.notes.inferred.extend(f"{taken} {what}, which time_format={form} makes dates" for what, form in looks)

    def _formatted(self, text: StringValue, form: str) -> Values:
        pattern, groups = _pattern(form)

        def part(code: str, otherwise: str = "00") -> StringValue:
            if code not in groups:
                return ibis.literal(otherwise)
            return text.re_extract(pattern, groups[code]).lpad(2, "0")

        self._refuse(self.rows.table[self.name].isnull() | ~text.re_search(pattern),
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
            self._note_utc()
        return self._instant(clock, fraction, zone)

    def _guessed(self, text: StringValue) -> Values:
        """Times in the one usual format that all values fit; a problem if there is none, or several."""
        fitting = self._fitting(text)
        if len(fitting) == 1:
            self.rows.notes.inferred.append(
                f"'{self.name}': times written as {fitting[0]} (time_format says otherwise)"
            )
            return self._formatted(text, fitting[0])
        known = "expected a number, or a time of ISO 8601 such as 2024-02-25 12:30:00"
        how = "say how it is written with time_format, in codes such as --set 'time_format=%d/%m/%Y %H:%M'"
        if fitting:
            how = "it may be written in several ways: " + " or ".join(f"--set 'time_format={form}'" for form in fitting)
        self._refuse(ibis.literal(True), f"{known}; {how}")
        return text.length()  # never read, because the problem is raised first

    def _fitting(self, text: StringValue) -> list[str]:
        """The formats of `GUESSES` that all values fit."""
        rows = self.rows.table
        sample = fetch(self.rows.backend, rows.order_by(ROW).select(_value=text).limit(GLANCED)).column("_value")
        texts = [each for each in sample.to_pylist() if each]
        forms = [form for form in GUESSES if texts and all(_fits(each, form) for each in texts)]
        tests = {}
        for place, form in enumerate(forms):
            pattern, groups = _pattern(form)
            within = text.re_search(pattern)
            for code in {*groups} & {"m", "d"}:
                within &= text.re_extract(pattern, groups[code]).try_cast("int64") <= BOUNDS[code]
            tests[f"_{place}"] = (text.isnull() | (text == "") | within).all()
        found = fetch(self.rows.backend, rows.aggregate(**tests)).to_pylist()[0] if tests else {}
        return [form for place, form in enumerate(forms) if found[f"_{place}"]]


@cache
def _pattern(form: str) -> tuple[str, dict[str, int]]:
    """The regular expression of a time format, and the group number of each code."""
    parts = re.split("(%.)", form)
    named = "^" + "".join(DIRECTIVES[part[1]] if part[:1] == "%" else re.escape(part) for part in parts) + "$"
    groups = dict(re.compile(named).groupindex)
    return re.sub(r"\(\?P<[A-Za-z]>", "(", named).replace(r"\ ", " "), groups


def _fits(text: str, form: str) -> bool:
    """Whether a text may be a time of this format, with numbers in their bounds."""
    pattern, groups = _pattern(form)
    found = re.match(pattern, text)
    if found is None:
        return False
    if "b" in groups and found[groups["b"]].lower() not in MONTHS:
        return False
    return all(int(found[group]) <= BOUNDS[code] for code, group in groups.items() if code in BOUNDS)


def _example(form: str) -> str:
    values = {"Y": "2024", "y": "24", "m": "02", "d": "25", "b": "Feb", "B": "February", "H": "12", "I": "12",
              "M": "30", "S": "00", "f": "250", "p": "PM", "z": "+01:00", "%": "%"}  # fmt: skip
    return re.sub("%(.)", lambda found: values[found[1]], form)


# --- which column is the time ----------------------------------------------------------------------------------------


def note_doubtful_time(backend: Backend, rows: Table, time: str, known: Collection[str], notes: Notes) -> None:
    """Note that the time column, chosen by its name, does not look like times but another column does."""
    alike = columns_like_times(backend, rows, {*known} - {time})
    if alike and time not in alike:
        notes.inferred.append(f"the time is column '{time}', because of its name; its values don't look like times, "
                              f"those of {listed(alike)} do (--set timestamp={alike[0]})")  # fmt: skip


def note_untimed(backend: Backend, rows: Table, asked: str, known: Collection[str], notes: Notes) -> None:
    """Note that there is no time column, and which columns look like times."""
    alike = columns_like_times(backend, rows, known)
    look = f"columns that look like times: {listed(alike)}" if alike else "no column looks like times"
    notes.inferred.append(
        f"no time column was found: there is no column '{asked}', so rows are taken in file order; {look}"
        + (f" (--set timestamp={alike[0]})" if alike else "; --set timestamp=null if that is meant")
    )


def columns_like_times(backend: Backend, rows: Table, known: Collection[str]) -> list[str]:
    """The columns, other than `known`, whose first values look like times."""
    glance = fetch(backend, rows.order_by(ROW).limit(GLANCED).drop(ROW))
    return [name for name in glance.column_names if name not in known and _looks_like_time(glance.column(name))]


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
    return any(all(_fits(text, form) for text in held) for form in GUESSES)
