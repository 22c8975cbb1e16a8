"""The time column of raw rows, as seconds since 1970 in UTC or as the numbers that stand there."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ibis
import pyarrow as pa
from ibis.expr.types import BooleanValue, IntegerValue, StringValue, Table
from ibis.expr.types import Column as Values

from recspec.base.errors import listed
from recspec.data.encoding import EVENT_SECONDS
from recspec.data.prepare.backend import Backend, count_where, fetch
from recspec.data.prepare.declared import (
    BOUNDS,
    BY_HOUR,
    GUESSES,
    MONTHS,
    OFFSET,
    PER_SECOND,
    DeclaredColumn,
    example,
    fits,
    pattern_of,
    zone_between,
)
from recspec.data.prepare.names import ROW, Notes
from recspec.data.prepare.raw_rows import NUMBER, PLAIN_WHOLE, WHOLE, RawRows, number_of

DATE = r"^([0-9]{4})[-/]([0-9]{2})[-/]([0-9]{2})"
CLOCK = r"([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.,][0-9]+)?)?)"
ZONE = rf" ?(Z|z|UTC|GMT|{OFFSET})"
UNZONED = f"{DATE}{CLOCK}?$"
ZONED = f"{DATE}{CLOCK}{ZONE}$"
GLANCED = 1_000  # rows read to find a time column or a format


@dataclass
class Times:
    """Converts a time column to seconds since 1970 in UTC, or to the numbers it holds."""

    rows: RawRows
    name: str
    needed: bool = True  # in every row
    range: tuple[Any, Any] = (None, None)  # of numbers that are taken as they are

    @property
    def _declared(self) -> DeclaredColumn | None:
        return self.rows.reading.types.get(self.name)

    @property
    def _zone(self) -> str | None:
        """The declared zone of times that name none."""
        return self._declared.zone if self._declared is not None else None

    @property
    def _format(self) -> str | None:
        if self._declared is not None and self._declared.format is not None:
            return self._declared.format
        return self.rows.reading.time_format if self.needed else None

    @property
    def _missing(self) -> BooleanValue:
        return self.rows.table[self.name].isnull() if self.needed else ibis.literal(False)

    def seconds(self) -> Values:
        """The numbers; problems and notes go to `rows`."""
        values, unit = self.rows.table[self.name], self._format
        kind, declared = values.type(), self._declared
        if declared is not None and declared.type not in ("time", "integer", "number"):
            self.rows.problems.append(
                f"column '{self.name}' is the timestamp, and is declared {declared.type}; "
                "declare it time, integer or number"
            )
            return values
        if kind.is_timestamp():
            self._refuse(self._missing, "expected a time in every row")
            fraction = values.cast("string").re_extract(r"\.([0-9]+)", 1)  # Spark has no function for fractions
            seconds = values.truncate("s").epoch_seconds().cast("int64")
            return self._with_fraction(seconds if kind.timezone else self._utc(seconds), fraction)
        if kind.is_numeric():
            self._refuse(self._missing, "expected a time in every row")
            return self._scaled(values)
        if not kind.is_string():
            self.rows.problems.append(f"column '{self.name}' holds {kind}; a timestamp must be a number or a date")
            return values
        text = values.strip()
        if unit is not None and unit not in PER_SECOND:
            return self._formatted(text, unit)
        if declared is not None and declared.type != "time":
            whole = declared.type == "integer"
            pattern, what = (WHOLE, "a whole number") if whole else (NUMBER, "a number")
            self._refuse(self._missing | ~text.re_search(pattern), f"declared {declared.type}; expected {what}")
            return self._scaled(number_of(text, "int64" if whole else "float64"))
        return self._judged(text)

    def _refuse(self, wrong: BooleanValue, expected: str, *, remedy: str = "", always: bool = False) -> None:
        self.rows.refuse(wrong, self.name, expected, remedy=remedy, always=always, nullable=not self.needed)

    def _utc(self, clock: IntegerValue) -> IntegerValue:
        """Seconds since 1970 in UTC, of what clocks show in the declared zone, or in UTC if there is none."""
        name, notes = self._zone, self.rows.notes
        if name is None:
            notes.inferred.append(
                f"'{self.name}': times without a zone, taken as UTC (types={{{self.name}: {{type: "
                "time, zone: Europe/Berlin}} takes another zone)"
            )
            return clock
        least, most = self.rows.figures({"least": clock.min(), "most": clock.max()}).values()
        if least is None:
            return clock
        zone = zone_between(name, int(least), int(most))
        if not zone.changes:
            return zone.instants(clock)
        doubtful = self.rows.count_where({"": zone.doubtful(clock)})[""]
        if doubtful:
            notes.changed.append(
                f"'{self.name}': {doubtful:,} times are in an hour that the clocks of {name} skip or "
                "show twice; each is read as if the clocks had not been changed yet"
            )
        return zone.instants(clock)

    def _judged(self, text: StringValue) -> Values:
        """Numbers or dates of ISO 8601, by the majority of values."""
        rows = self.rows.table
        tests = {"number": text.re_search(NUMBER), "zoned": text.re_search(ZONED), "unzoned": text.re_search(UNZONED)}
        found = self.rows.count_where(
            {"present": rows[self.name].notnull(), "plain": text.re_search(PLAIN_WHOLE), **tests}
        )
        missing = self._missing
        if found["number"] > found["zoned"] + found["unzoned"]:
            self._refuse(missing | ~tests["number"], f"expected a number, as {found['number']:,} other values are")
            kind = "int64" if found["plain"] == found["number"] else "float64"
            return self._scaled(number_of(text, kind))
        told = found["zoned"] + found["unzoned"]
        if not told or told * 2 < found["present"] or (told < found["present"] and len(_fitting(self.rows, text)) == 1):
            return self._guessed(text)
        if found["zoned"] and found["unzoned"] and self._zone is None:
            what = {"zoned": "with a time zone", "unzoned": "without one"}
            few, many = sorted(("unzoned", "zoned"), key=found.__getitem__)
            self._refuse(
                tests[few],
                f"{found[few]:,} times {what[few]} and {found[many]:,} {what[many]}; "
                "they can't be compared: give all times a zone, or none, or declare a zone for those "
                "without one (types)",
                always=True,
            )
        fits = tests["zoned"] | tests["unzoned"]
        other = "; or set time_format" if self.rows.reading.settable else ""
        self._refuse(missing | ~fits, f"expected a time of ISO 8601, as {told:,} other values are{other}")
        if found["zoned"]:
            self.rows.notes.changed.append(f"'{self.name}': times with zones, made UTC")
        clock = text.re_extract(f"{DATE}{CLOCK}", 4)
        full = ibis.cases(
            (clock == "", "00:00:00"), (clock.length() == 6, clock.substr(1, 5) + ":00"), else_=clock.substr(1, 8)
        )
        date = text.substr(0, 10).replace("/", "-")
        zone = text.re_extract(f"{DATE}{CLOCK}{ZONE}$", 8) if found["zoned"] else None
        return self._instant(date + " " + full, text.re_extract(r"[.,]([0-9]+)", 1), zone, fits)

    def _instant(
        self, clock: StringValue, fraction: StringValue, zone: StringValue | None, fits: BooleanValue
    ) -> Values:
        """Seconds since 1970 of a time such as `2024-01-31 23:59:59`, its fraction and its zone, where `fits`."""
        there = clock.try_cast("timestamp").epoch_seconds().cast("int64")
        if zone is None:
            here = self._utc(there)
        else:
            digits = zone.re_replace("[^0-9]", "").rpad(4, "0")
            ahead = digits.substr(0, 2).try_cast("int64") * 3600 + digits.substr(2, 2).try_cast("int64") * 60
            sign = ibis.ifelse(zone.startswith("-"), -1, 1)
            here = there - ibis.ifelse(zone.re_search("^[+-]"), sign * ahead, 0)
            if self._zone is not None:
                here = ibis.ifelse(zone == "", self._utc(there), here)
        self._refuse(fits & there.isnull(), "there is no such day or time of day")
        return self._with_fraction(here, fraction)

    def _with_fraction(self, seconds: Values, fraction: StringValue) -> Values:
        """Seconds, with fractions to a millionth if any row has one."""
        micros = (fraction + ibis.literal("000000")).substr(0, 6).try_cast("int64")
        broken = self.rows.count_where({"": micros > 0})[""]
        return seconds.cast("float64") + micros.cast("float64") / 1e6 if broken else seconds

    def _scaled(self, numbers: Values) -> Values:
        unit = self._format
        if unit is not None and unit not in PER_SECOND:
            return self._formatted(numbers.cast("string"), unit)
        if numbers.type().is_floating():
            endless = numbers.abs() >= 2.0**63
            self._refuse(endless, f"expected a number of {unit or 'seconds'}, below 2^63")
            numbers = ibis.ifelse(endless, ibis.null("float64"), numbers)
        if self._zone is not None:
            self.rows.problems.append(
                f"column '{self.name}' holds numbers, which count from 1970 in UTC; leave its "
                "zone out, or declare the format of its dates"
            )
        if unit is None:
            self._note_unit(numbers)
        per_second = PER_SECOND[unit or "seconds"]
        if per_second == 1:
            return numbers
        if numbers.type().is_integer() and not self.rows.count_where({"": numbers % per_second != 0})[""]:
            return (numbers // per_second).cast("int64")
        return numbers.cast("float64") / per_second

    def _note_unit(self, numbers: Values) -> None:
        self.range = least, most = (*self.rows.figures({"least": numbers.min(), "most": numbers.max()}).values(),)
        if least is None:
            return
        looks = [
            (f"{unit} since 1970", unit)
            for unit, per_second in PER_SECOND.items()
            if per_second > 1 and 3e8 * per_second <= least and most <= 4.2e9 * per_second
        ]
        if least >= 19_000_101 and most <= 21_001_231:
            looks.append(("days", "%Y%m%d"))
        forms = (("hours", BY_HOUR), ("hours", "%Y%m%d%H"), ("minutes", "%Y%m%d%H%M"), ("seconds", "%Y%m%d%H%M%S"))
        looks += [(what, form) for what, form in forms if all(_is_digits(value, form) for value in (least, most))]
        taken = f"'{self.name}': numbers, taken as they are; they look like"
        self.rows.notes.inferred.extend(f"{taken} {what}, which time_format={form} makes dates" for what, form in looks)

    def _formatted(self, text: StringValue, form: str) -> Values:
        pattern, groups = pattern_of(form)
        self._check_format(text, form)

        def part(code: str, otherwise: str = "00") -> StringValue:
            if code not in groups:
                return ibis.literal(otherwise)
            return text.re_extract(pattern, groups[code]).lpad(2, "0")

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
        return self._instant(clock, fraction, zone, text.re_search(pattern))

    def _check_format(self, text: StringValue, form: str) -> None:
        """Refuse the values that do not fit a format; a format that fits none is itself the problem."""
        good = text.re_search(pattern_of(form)[0])
        wrong = self._missing | ~good
        found = self.rows.count_where({"present": text.notnull(), "good": good, "wrong": wrong})
        present, count = found["present"], found["wrong"]
        setting = "format" if self._declared is not None and self._declared.format is not None else "time_format"
        if found["good"] or not present:
            all_but = f"fits all but {count:,} {'value' if count == 1 else 'values'}"
            by = f", by {setting}" if self._format is not None else ""
            self._refuse(
                wrong,
                f"expected a time such as {example(form)!r}{by}; {form} {all_but}",
                remedy=f"; correct {'it' if count == 1 else 'them'}",
            )
            return
        likely, _ = _likely(self.rows, text)
        other = f"{likely[0]} fits them" if len(likely) == 1 else f"give the {setting} that these values have"
        self._refuse(
            text.notnull(), f"{setting} {form}, such as {example(form)!r}, fits no value; {other}", always=True
        )

    def _guessed(self, text: StringValue) -> Values:
        """Times in the one usual format that all or most values fit; a problem if there is none, or several."""
        fitting, most = _likely(self.rows, text)
        known_form = self.rows.reading.found_time_format if self.needed else None
        if known_form in fitting:
            fitting = [known_form]
        if len(fitting) == 1:
            if self.needed:
                self.rows.notes.time_format = fitting[0]
            self.rows.notes.inferred.append(
                f"'{self.name}': times written as {fitting[0]} (time_format says otherwise)"
            )
            return self._formatted(text, fitting[0])
        known = "expected a number, or a time of ISO 8601 such as 2024-02-25 12:30:00"
        how = "say how it is written with time_format, in codes such as --set 'time_format=%d/%m/%Y %H:%M'"
        if not self.rows.reading.settable:
            how = "write it as the dataset's times were written"
            how += f": {known_form}, such as {example(known_form)}" if known_form is not None else ""
        elif fitting:
            how = "it may be written in several ways: " + " or ".join(f"--set 'time_format={form}'" for form in fitting)
            how += f" (each fits {most})" if most else ""
        self._refuse(self.rows.table[self.name].notnull(), f"{known}; {how}", always=True)
        return text.length()  # never read, because the problem is raised first


def _is_digits(value: Any, form: str) -> bool:
    """Whether a number is a time in this format, with all its digits; with a century, from 1900 to 2100."""
    text = str(value)
    century = "%Y" not in form or text[:2] in ("19", "20")
    return len(text) == len(form) + 2 * ("%Y" in form) and century and fits(text, form)


def seconds_of(rows: RawRows, name: str) -> Values:
    """`Times.seconds` for the time of the rows; a few times far from all others are a problem.

    `update` compares new times with those of its dataset instead.
    """
    known, declared, times = len(rows.problems), rows.reading.types.get(name), Times(rows, name)
    found = times.seconds()
    least, most = times.range
    is_near = least is not None and most is not None and EVENT_SECONDS[0] <= least and most <= EVENT_SECONDS[1]
    is_checked = rows.reading.settable and (declared is None or declared.type == "time")
    if is_checked and not is_near and len(rows.problems) == known:
        _refuse_few_far(rows, name, found)
    return found


def _refuse_few_far(rows: RawRows, name: str, seconds: Values) -> None:
    """Refuse the few times that lie far from all others: years such as 1900 and 9999, 0, or another unit."""
    read = rows.table.select(_seconds=seconds)  # once, and not in each of the tests
    units = {
        unit: read._seconds.between(EVENT_SECONDS[0] * per_second, EVENT_SECONDS[1] * per_second)
        for unit, per_second in PER_SECOND.items()
        if per_second > 1
    }
    tests = {"present": read._seconds.notnull(), "far": _is_far(read._seconds), **units}
    found = count_where(rows.backend, read, tests)
    count, near = found["far"], found["present"] - found["far"]
    other = next((unit for unit in units if found[unit] == count), None)  # all far ones are times in another unit
    if count and (count < near or (near and other)) and name not in rows.settle():
        them = "it" if count == 1 else "them"
        do = f"they look like {other}, so write all in one unit" if other else f"correct {them}"
        rows.refuse(
            _is_far(seconds),
            name,
            f"expected a time between 1973 and 2065, as {near:,} other values are",
            remedy=f"; {do}, or set 'types={{{name}: number}}' for numbers that are no times since 1970",
        )


def _is_far(seconds: Values) -> BooleanValue:
    return (seconds < EVENT_SECONDS[0]) | (seconds > EVENT_SECONDS[1])


def _likely(source: RawRows, text: StringValue) -> tuple[list[str], str]:
    """The formats of `GUESSES` that all values fit, or else most; and how many fit, if not all.

    Several formats are returned where no value tells which is meant, or where values of both are mixed.
    """
    if fitting := _fitting(source, text):
        return fitting, ""
    glance = _glance(source, text)
    tests = {form: _within(text, form) for form in GUESSES if any(fits(each, form) for each in glance)}
    if not tests:
        return [], ""
    counts = source.count_where({**tests, "": text.notnull()})
    present = counts.pop("")
    best = max(counts, key=counts.__getitem__)
    if counts[best] * 2 <= present:
        return [], ""
    others = [form for form in tests if form != best]
    both = source.count_where({form: tests[best] & tests[form] for form in others})
    mixed = [form for form in others if both[form] and (counts[form] > both[form] or counts[form] == counts[best])]
    return [best, *mixed], f"{counts[best]:,} of {present:,} values at most"


def _glance(source: RawRows, text: StringValue) -> list[str]:
    """The first values that are not empty."""
    sample = source.table.order_by(ROW).select(_value=text).limit(GLANCED)
    return [each for each in fetch(source.backend, sample).column("_value").to_pylist() if each]


def _within(text: StringValue, form: str) -> BooleanValue:
    """Where a text has a format, with a month and a day that there are; false where it is missing."""
    pattern, groups = pattern_of(form)
    within = text.re_search(pattern)
    for code in {*groups} & {"m", "d"}:
        within &= text.re_extract(pattern, groups[code]).try_cast("int64") <= BOUNDS[code]
    return within.fill_null(False)


def _fitting(source: RawRows, text: StringValue) -> list[str]:
    """The formats of `GUESSES` that all values fit."""
    texts = _glance(source, text)
    forms = [form for form in GUESSES if texts and all(fits(each, form) for each in texts)]
    unfit = source.count_where({form: text.notnull() & (text != "") & ~_within(text, form) for form in forms})
    return [form for form, count in unfit.items() if not count]


# --- which column is the time ----------------------------------------------------------------------------------------


def note_doubtful_time(backend: Backend, rows: Table, time: str, known: Collection[str], notes: Notes) -> None:
    """Note that the time column, chosen by its name, does not look like times but another column does."""
    alike = columns_like_times(backend, rows, {*known} - {time})
    if alike and time not in alike:
        notes.inferred.append(
            f"the time is column '{time}', because of its name; its values don't look like times, "
            f"those of {listed(alike)} do (--set timestamp={alike[0]})"
        )


def note_untimed(backend: Backend, rows: Table, asked: str, known: Collection[str], notes: Notes) -> None:
    """Note that there is no time column, and which columns look like times."""
    alike = columns_like_times(backend, rows, known)
    look = f"columns that look like times: {listed(alike)}" if alike else "no column looks like times"
    notes.inferred.insert(
        0,
        f"no time column was found: there is no column '{asked}', so rows are taken in file order; {look}"
        + (f" (--set timestamp={alike[0]})" if alike else "; --set timestamp=null if that is meant"),
    )


def columns_like_times(backend: Backend, rows: Table, known: Collection[str]) -> list[str]:
    """The columns, other than `known`, whose first values look like times."""
    glance = fetch(backend, rows.order_by(ROW).limit(GLANCED).drop(ROW))
    return [name for name in glance.column_names if name not in known and looks_like_time(glance.column(name))]


def looks_like_time(values: pa.ChunkedArray) -> bool:
    """Whether all values may be times."""
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
    if all(fits(text, BY_HOUR) for text in held):
        return not all(fits(text, "%Y%m%d") for text in held)
    return any(all(fits(text, form) for text in held) for form in GUESSES)
