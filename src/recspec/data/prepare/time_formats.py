"""Formats and zones of times: codes as regular expressions, formats that a text may have, offsets from UTC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, reduce
from operator import or_
from zoneinfo import ZoneInfo, available_timezones

import ibis
from ibis.expr.types import BooleanValue, IntegerValue

from recspec.base.errors import nearest, shortened

PER_SECOND = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
"""Units of numbers since 1970."""
OFFSET = r"[+-](?:0[0-9]|1[0-4])(?::?[0-5][0-9])?"
"""An offset from UTC; no zone is further than 14 hours from it."""
DIRECTIVES = {
    "Y": r"(?P<Y>[0-9]{4})",
    "y": r"(?P<y>[0-9]{2})",
    "m": r"(?P<m>[0-9]{1,2})",
    "d": r"(?P<d>[0-9]{1,2})",
    "b": r"(?P<b>[A-Za-z]{3})[A-Za-z]*",
    "B": r"(?P<b>[A-Za-z]{3})[A-Za-z]*",
    "H": r"(?P<H>[0-9]{1,2})",
    "I": r"(?P<I>[0-9]{1,2})",
    "M": r"(?P<M>[0-9]{1,2})",
    "S": r"(?P<S>[0-9]{1,2})",
    "f": r"(?P<f>[0-9]{1,9})",
    "p": r"(?P<p>[AaPp])\.?[Mm]\.?",
    "z": rf"(?P<z>Z|z|UTC|GMT|{OFFSET})",
    "Z": "(?P<z>Z|z|UTC|GMT)",
    "a": "(?:[Mm]on|[Tt]ue|[Ww]ed|[Tt]hu|[Ff]ri|[Ss]at|[Ss]un)[a-z]*",
    "%": "%",
}
"""Python's codes of `time_format` and the text they match; a weekday must be there and is not compared."""
DIRECTIVES["A"] = DIRECTIVES["a"]
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DATES = (
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%Y.%m.%d",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%d.%m.%Y",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%m/%d/%y",
    "%d/%m/%y",
    "%d.%m.%y",
    "%d-%m-%y",
    "%m-%d-%y",
    "%y/%m/%d",
    "%y.%m.%d",
    "%y-%m-%d",
    "%d %b %Y",
    "%b %d, %Y",
    "%b %d %Y",
    "%d-%b-%Y",
    "%d-%b-%y",
    "%d%b%Y",
)
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p", "T%H:%M:%S", ", %H:%M")
WITH_WEEKDAYS = (
    "%a %b %d %H:%M:%S %Y",
    "%a %b %d %H:%M:%S %z %Y",
    "%a, %d %b %Y %H:%M:%S",
    "%a, %d %b %Y %H:%M:%S %z",
    "%a, %d-%b-%y %H:%M:%S %z",
    "%a, %d %b %Y",
    "%a, %b %d, %Y",
)
"""Times of C, Twitter, e-mails (RFC 2822), HTTP (RFC 850), and dates in full."""
OF_LOGS = ("%d/%b/%Y:%H:%M:%S %z", "[%d/%b/%Y:%H:%M:%S %z]", "%d/%b/%Y:%H:%M:%S", "%d %b %Y %H:%M:%S %z")
GUESSES = (*(f"{date}{clock}" for date in DATES for clock in CLOCKS), *WITH_WEEKDAYS, *OF_LOGS)
"""Formats that are tried where no other is given and times are neither numbers nor of ISO 8601."""
BY_HOUR = "%y%m%d%H"
"""Hours as 8 digits, which are a plain number too."""
BOUNDS = {"m": 12, "d": 31, "H": 23, "I": 12, "M": 59, "S": 59}


def check_time_format(text: str) -> str:
    """Check a time format and return it. Raises ValueError, naming its unknown, missing or repeated codes."""
    if text in PER_SECOND:
        return text
    codes = re.findall("%(.?)", text, re.DOTALL)
    known = ", ".join(f"%{code}" for code in DIRECTIVES)
    strange = sorted({f"%{code}" for code in codes if code not in DIRECTIVES})
    if strange or not codes:
        found = f"has {', '.join(strange)}" if strange else "has no code such as %Y"
        raise ValueError(f"time_format '{text}' {found}; known: {known}, or {', '.join(PER_SECOND)} since 1970")
    same = {"Y": "y", "B": "b", "m": "b", "Z": "z", "A": "a"}
    fields = [same.get(code, code) for code in codes if code != "%"]
    lacking = [f"%{code}" for code, needed in (("Y", "y"), ("m", "b"), ("d", "d")) if needed not in fields]
    doubled = sorted({f"%{code}" for code in fields if fields.count(code) > 1})
    if lacking or doubled:
        raise ValueError(f"time_format '{text}' {'lacks' if lacking else 'has twice'} {', '.join(lacking or doubled)}")
    return text


@cache
def pattern_of(form: str) -> tuple[str, dict[str, int]]:
    """The regular expression of a time format, and the group number of each code."""
    parts = re.split("(%.)", form)
    named = "^" + "".join(DIRECTIVES[part[1]] if part[:1] == "%" else re.escape(part) for part in parts) + "$"
    if re.fullmatch("(%[YymdHMS])+", form):  # nothing tells where a number ends
        named = named.replace("{1,2}", "{2}")
    groups = dict(re.compile(named).groupindex)
    return re.sub(r"\(\?P<[A-Za-z]>", "(", named).replace(r"\ ", " +"), groups


def fits(text: str, form: str) -> bool:
    """Whether a text may be a time of this format, with numbers in their bounds."""
    pattern, groups = pattern_of(form)
    found = re.match(pattern, text)
    if found is None:
        return False
    if "b" in groups and found[groups["b"]].lower() not in MONTHS:
        return False
    return all(int(found[group]) <= BOUNDS[code] for code, group in groups.items() if code in BOUNDS)


def example(form: str) -> str:
    """A time in this format."""
    values = {
        "Y": "2024",
        "y": "24",
        "m": "02",
        "d": "25",
        "b": "Feb",
        "B": "February",
        "H": "12",
        "I": "12",
        "M": "30",
        "S": "00",
        "f": "250",
        "p": "PM",
        "z": "+01:00",
        "Z": "UTC",
        "a": "Sun",
        "A": "Sunday",
        "%": "%",
    }
    return re.sub("%(.)", lambda found: values[found[1]], form)


UTC_OFFSET = re.compile(r"([+-])(0[0-9]|1[0-4]):?([0-5][0-9])")


def check_zone(name: str) -> str:
    """Check a time zone and return it. Raises ValueError if it is neither an offset nor a known name."""
    if name.upper() in ("UTC", "Z"):
        return "UTC"
    if found := UTC_OFFSET.fullmatch(name):
        if int(found[2]) > 14 or int(found[3]) > 59:
            raise ValueError(f"zone '{name}' is no offset from UTC; expected such as +02:00")
        return name
    known = available_timezones()
    if name not in known:
        raise ValueError(
            f"zone '{shortened(name)}' is not known on this machine{nearest(name, known)}; expected such "
            "as Europe/Berlin, UTC or +02:00"
        )
    return name


def offset_of(zone: str) -> timedelta | None:
    """The offset of a zone such as +02:00 or UTC; None for one by name."""
    if zone == "UTC":
        return timedelta()
    found = UTC_OFFSET.fullmatch(zone)
    ahead = timedelta(hours=int(found[2]), minutes=int(found[3])) if found else None
    return -ahead if found and ahead is not None and found[1] == "-" else ahead


STEP = 7 * 86_400  # seconds between two looks at a zone's offset; no zone changes it twice within a week
EARLIEST, LATEST = -2_208_988_800, 7_258_118_400  # 1900 and 2200; outside, the offset of that year counts


@dataclass(frozen=True)
class Change:
    """A moment from which a zone's clocks show another offset from UTC; all in seconds."""

    instant: int
    before: int
    after: int

    @property
    def counts_from(self) -> int:
        """The clock time from which the later offset counts, if a time that comes twice is the first one."""
        return self.instant + max(self.before, self.after)

    @property
    def doubtful(self) -> tuple[int, int]:
        """The clock times that don't exist, or come twice: from, and up to."""
        return self.instant + min(self.before, self.after), self.counts_from


@dataclass(frozen=True)
class Zone:
    """A zone's offsets from UTC between two clock times."""

    first: int  # the offset before all changes, in seconds
    changes: tuple[Change, ...]

    def instants(self, clock: IntegerValue) -> IntegerValue:
        """Seconds since 1970 in UTC, from what clocks of the zone show.

        A time that comes twice is the first; one that clocks skip is read with the offset before the change.
        """
        offsets = [self.first, *(change.after for change in self.changes)]
        if not self.changes:
            return clock - self.first
        cases = [(clock < change.counts_from, offset) for change, offset in zip(self.changes, offsets, strict=False)]
        return clock - ibis.cases(*cases, else_=offsets[-1])

    def doubtful(self, clock: IntegerValue) -> BooleanValue:
        """Where clocks never show the time, or show it twice."""
        windows = (change.doubtful for change in self.changes)
        return reduce(or_, [(clock >= start) & (clock < stop) for start, stop in windows], clock != clock)


def zone_between(name: str, first: int, last: int) -> Zone:
    """The offsets of a zone for clock times from `first` to `last`, in seconds since 1970."""
    fixed = offset_of(name)
    if fixed is not None:
        return Zone(int(fixed.total_seconds()), ())
    start = min(max(first - 2 * STEP, EARLIEST), LATEST)
    stop = min(max(last + 2 * STEP, EARLIEST), LATEST)
    return Zone(_offset(name, start), tuple(_changes(name, start, stop)))


def _changes(name: str, start: int, stop: int) -> Iterator[Change]:
    held = _offset(name, start)
    for late in range(start + STEP, stop + STEP, STEP):
        if (now := _offset(name, late)) == held:
            continue
        low, high = late - STEP, late
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _offset(name, middle) == held else (low, middle)
        yield Change(high, held, now)
        held = now


def _offset(name: str, instant: int) -> int:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=instant)
    offset = moment.astimezone(ZoneInfo(name)).utcoffset()
    assert offset is not None, name
    return int(offset.total_seconds())
