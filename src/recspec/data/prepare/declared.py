"""Declared types of raw columns (setting `types`, or a file such as `columns.yaml`); formats and zones of times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from zoneinfo import ZoneInfo, available_timezones

import ibis
import yaml
from ibis.expr.types import BooleanValue, IntegerValue
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from recspec.base.config import yaml_problem
from recspec.base.errors import SettingsError, nearest, shortened, unknown
from recspec.base.files import PathError, read_text

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
    "%Y-%m-%d|%Y/%m/%d|%Y.%m.%d|%m/%d/%Y|%d/%m/%Y|%d.%m.%Y|%d-%m-%Y|%m-%d-%Y|%m/%d/%y|%d/%m/%y|"
    "%d.%m.%y|%d-%m-%y|%m-%d-%y|%y/%m/%d|%y.%m.%d|%y-%m-%d|%d %b %Y|%b %d, %Y|%b %d %Y|%d-%b-%Y|"
    "%d-%b-%y|%d%b%Y"
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
GUESSES = (*(f"{date}{clock}" for date in DATES.split("|") for clock in CLOCKS), *WITH_WEEKDAYS, *OF_LOGS)
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
    form = form.replace("%f", "250").replace("%z", "+01:00").replace("%Z", "UTC")
    return datetime(2024, 2, 25, 12, 30, tzinfo=UTC).strftime(form)


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


Type = Literal["text", "integer", "number", "time", "list", "vector"]
TYPES: tuple[Type, ...] = get_args(Type)
Invalid = Literal["refuse", "drop", "missing"]
OTHER_NAMES: Mapping[str, Type] = {
    **dict.fromkeys(("string", "str", "category"), "text"),
    **dict.fromkeys(("int", "int64"), "integer"),
    **dict.fromkeys(("float", "float64", "double"), "number"),
    **dict.fromkeys(("date", "datetime", "timestamp"), "time"),
}
"""Names of types in other tools."""
ONLY = {"format": "time", "zone": "time", "separator": "list", "length": "vector"}
"""Keys that only one type has."""
EXPECTED = {
    "type": "text",
    "missing": 'texts, in quotes: [n/a, "-1"]',
    "format": "text",
    "zone": "text",
    "separator": "a text of one character or more",
    "length": "a whole number from 1 on",
    "invalid": "text",
}
MOST_BYTES = 1 << 20  # of a file of types
DEEPEST = 4  # lists and tables inside each other


def _type(given: object) -> object:
    return OTHER_NAMES.get(given.lower(), given.lower()) if isinstance(given, str) else given


def _texts(given: object) -> object:
    return [given] if isinstance(given, (str, int, float)) and not isinstance(given, bool) else given


class DeclaredColumn(BaseModel):
    """What a column holds, as a user declares it."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    type: Annotated[Type, BeforeValidator(_type)] = Field(description="what the column holds; ids are text by default")
    missing: Annotated[tuple[str, ...], BeforeValidator(_texts)] | None = Field(
        None, description="exactly the texts that mean a missing value here, in place of those for all columns"
    )
    invalid: Invalid | None = Field(
        None, description="values of another type: refuse them, drop their rows, or take them as missing"
    )
    format: Annotated[str, AfterValidator(check_time_format)] | None = Field(
        None, description="time: how it is written, such as %d.%m.%Y %H:%M, or milliseconds since 1970"
    )
    zone: Annotated[str, AfterValidator(check_zone)] | None = Field(
        None, description="time: zone of times that name none, such as Europe/Berlin or +02:00; UTC by default"
    )
    separator: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="list: separator between its values, where they are one text"
    )
    length: Annotated[int, Field(ge=1)] | None = Field(None, description="vector: how many numbers it has")

    @model_validator(mode="after")
    def _fits_together(self) -> DeclaredColumn:
        for name, kind in ONLY.items():
            if getattr(self, name) is not None and self.type != kind:
                raise ValueError(f"{name} is for type {kind}, not for {self.type}; leave it out")
        if self.type in ("text", "list") and self.invalid is not None:
            raise ValueError(f"any value is a {self.type}, so none is invalid; leave invalid out")
        if (
            self.zone is not None
            and self.format is not None
            and (self.format in PER_SECOND or "%z" in self.format.lower())
        ):
            raise ValueError(f"format {self.format} tells the instant by itself, so leave zone out")
        return self

    @model_serializer
    def _short(self) -> str | dict[str, Any]:
        """The type alone, or with the keys that are set."""
        given = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        return self.type if len(given) == 1 else given


# --- many of them ----------------------------------------------------------------------------------------------------

Problem = tuple[Any, str, str]  # the name of the column, the key or nothing, and a sentence


def declared_columns(given: object) -> object:
    """Columns from plain values; a text is the name of a file. Raises ValueError with all problems."""
    if isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise ValueError("expected {column: type}, or the name of a file such as columns.yaml")
    found, problems = _read(given)
    if problems:
        raise ValueError("; ".join(what for *_, what in problems))
    return found


def load_columns(path: Path) -> dict[str, DeclaredColumn]:
    """Read a file of types: YAML with a line `column: type`, or `column: {type: ..., ...}`, for each column.

    Every name and value is read letter for letter. Raises SettingsError, which names each problem with its line.
    """
    given, lines, problems = _parsed(path)
    found, wrong = _read(given)
    problems += [(lines.get((name, key), lines[name, ""]), what) for name, key, what in wrong]
    if problems:
        raise SettingsError.of(str(path), [f"line {line}: {what}" for line, what in sorted(problems)])
    return found


def _parsed(path: Path) -> tuple[dict[str, object], dict[tuple[str, str], int], list[tuple[int, str]]]:
    """The columns of a file, the lines of their names and keys, and names that stand twice."""
    try:
        text = read_text(path, most=MOST_BYTES)
        _check_events(path, text)
        loader = yaml.BaseLoader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            found = "is empty" if root is None else "holds no columns"
            raise SettingsError(f"{path}: {found}; expected a line such as `price: number` for each column")
        given: dict[str, object] = {}
        lines: dict[tuple[str, str], int] = {}
        problems: list[tuple[int, str]] = []
        for column, node in root.value:
            if not isinstance(column, yaml.ScalarNode):
                problems.append((column.start_mark.line + 1, "the name of a column must be text"))
                continue
            name, inner = str(column.value), node.value if isinstance(node, yaml.MappingNode) else []
            keys = [(str(key.value), key.start_mark.line + 1) for key, _ in inner]
            for key, line in [("", column.start_mark.line + 1), *keys]:
                if (first := lines.setdefault((name, key), line)) != line or keys.count((key, line)) > 1:
                    what = (
                        f"column '{shortened(name)}'{key and f': {shortened(key)}'} stands twice, first in line {first}"
                    )
                    problems.append((line, f"{what}; remove one"))
            given.setdefault(name, loader.construct_object(node, deep=True))
    except PathError as error:
        raise SettingsError(f"setting 'types': {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: {yaml_problem(error)}") from None
    return given, lines, problems


def _check_events(path: Path, text: str) -> None:
    """Refuse aliases and deep nesting, of which a short text can make much work."""
    depth = 0
    for event in yaml.parse(text):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        assert event.start_mark is not None
        line = f"{path}: line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise SettingsError(f"{line}: write out what *{event.anchor} stands for")
        if depth > DEEPEST:
            raise SettingsError(f"{line}: nested too deeply; expected `column: {{key: [value, ...]}}` at most")


def _read(given: Mapping[Any, object]) -> tuple[dict[str, DeclaredColumn], list[Problem]]:
    """The columns, and every problem."""
    found: dict[str, DeclaredColumn] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        called = f"column '{shortened(str(name))}'"
        if not isinstance(name, str):
            problems.append((name, "", f"{called}: a column's name must be text; put it in quotes"))
        elif isinstance(value, DeclaredColumn):
            found[name] = value
        elif not isinstance(value, (str, Mapping)):
            expected = f"expected a type ({', '.join(TYPES)}), or {{type: ..., ...}}"
            problems.append((name, "", f"{called} holds {_shown(value)}; {expected}"))
        else:
            try:
                found[name] = DeclaredColumn.model_validate({"type": value} if isinstance(value, str) else value)
            except ValidationError as error:
                problems += [(name, key, f"{called}: {what}") for key, what in _problems(error)]
    return found, problems


def _problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    """What pydantic found, in our words, with its key."""
    for detail in error.errors():
        key = str(detail["loc"][0]) if detail["loc"] else ""
        held, kind = _shown(detail["input"]), detail["type"]
        if kind == "extra_forbidden":
            yield key, unknown("key", key, DeclaredColumn.model_fields)
        elif kind == "missing":
            yield "", f"has no type; add one: {', '.join(TYPES)}"
        elif kind == "literal_error":
            known = (*TYPES, *OTHER_NAMES) if key == "type" else get_args(Invalid)
            hint = nearest(str(detail["input"]), known)
            yield key, f"{key} is {held}{hint}; expected {', '.join(TYPES if key == 'type' else known)}"
        elif kind == "value_error":
            yield key, detail["msg"].removeprefix("Value error, ")
        else:
            yield key, f"{key} is {held}; expected {EXPECTED[key]}"


def _shown(value: object) -> str:
    return (
        repr(value) if isinstance(value, (str, int, float, type(None))) and len(str(value)) < 60 else "a list or table"
    )


def columns_schema() -> dict[str, object]:
    """The JSON Schema of a file of types, for editors."""
    column = DeclaredColumn.model_json_schema(mode="validation")
    text = {"type": ["string", "number"]}
    column["properties"]["missing"] |= {"anyOf": [text, {"type": "array", "items": text}, {"type": "null"}]}
    short = {"enum": [*TYPES, *OTHER_NAMES]}
    column["properties"]["type"] = {"description": column["properties"]["type"]["description"], **short}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Types of the columns of raw files",
        "type": "object",
        "additionalProperties": {"anyOf": [short, column]},
    }
