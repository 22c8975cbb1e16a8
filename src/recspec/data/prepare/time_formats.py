"""Formats of times: Python's codes as regular expressions, and which of the usual formats a text may have."""

from __future__ import annotations

import re
from functools import cache

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
