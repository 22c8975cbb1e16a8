"""Events as a shop sends them: one user's act on one item, checked before it enters the journal."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from recspec.base.errors import listed, nearest, quoted
from recspec.data.encoding import LONGEST_ID

FIELDS = ("user", "item", "type", "value", "time", "id", "request", "position")
"""Keys of a sent event; others are columns of its context."""
KNOWN = frozenset(FIELDS)
IMPRESSION = "impression"
"""Type of the event that confirms that an answer was shown."""
LONGEST_TYPE, LONGEST_CONTEXT = 64, 4_000  # characters; of the context as JSON
MOST_HINTED, MOST_COMPARED = 20, 32
"""Refused rows of which a missing column is looked for among the others, and how many; a comparison takes 15 µs."""
MOST_BYTES = 2_000
"""Of a text; an index of PostgreSQL holds 2,704 bytes a row."""
AHEAD_US = 5 * 60 * 1_000_000
"""Times further in the future are clamped to the time of receipt."""
LATE_US = 24 * 3_600 * 1_000_000
"""Events older than this at their receipt are counted as late."""
EARLIEST_US, LATEST_US = 0, 4_102_444_800_000_000  # 1970 to 2100
NAMESPACE = uuid.UUID("9b0d2f0e-3a3c-5d7e-8f55-6f1c0a6f2b11")
"""Of the ids made for events that bring none."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the journal; times are microseconds since 1970 in UTC.

    `subject` and `item` are raw ids as text. An impression may name no item; then all of its answer was shown.
    """

    event_id: str
    subject: str
    type: str
    item: str | None
    value: float | None
    occurred_at: int
    received_at: int
    request_id: str | None = None
    position: int | None = None
    context: str | None = None
    """Further columns, as a JSON object."""

    @property
    def content(self) -> tuple[object, ...]:
        """What two events with one id must share; see `is_same` for the time."""
        return self.subject, self.type, self.item, self.value, self.request_id, self.position, self.context

    def is_same(self, other: Event) -> bool:
        """Whether one is the other, sent again. If the time of receipt stands for a time, it differs each time."""
        is_timed = self.occurred_at != self.received_at and other.occurred_at != other.received_at
        return self.content == other.content and (self.occurred_at == other.occurred_at or not is_timed)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that is no event, and why; `index` is its place in the request."""

    index: int
    reason: str


@dataclass
class ReadEvents:
    """Events of a request or a file, with what was refused and changed."""

    received_at: int
    events: list[Event] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """The row of each event."""
    refused: list[Refusal] = field(default_factory=list)
    clamped: set[int] = field(default_factory=set)
    """Indexes in `events` whose time was more than 5 minutes ahead, and is the time of receipt now."""
    late: set[int] = field(default_factory=set)
    """Indexes in `events` that are older than a day."""


def read_events(rows: Sequence[object], received_at: int) -> ReadEvents:
    """Check rows, each a mapping with the keys `FIELDS`; user and type are required."""
    found = ReadEvents(received_at)
    for index, row in enumerate(rows):
        problems: list[str] = []
        event = _read(row, received_at, problems, is_hinted=len(found.refused) < MOST_HINTED)
        if event is None or problems:
            found.refused.append(Refusal(index, "; ".join(problems)))
            continue
        if event.occurred_at > received_at + AHEAD_US:
            event = replace(event, occurred_at=received_at)
            found.clamped.add(len(found.events))
        elif event.occurred_at < received_at - LATE_US:
            found.late.add(len(found.events))
        found.events.append(event)
        found.places.append(index)
    return found


def _read(row: object, received_at: int, problems: list[str], *, is_hinted: bool) -> Event | None:
    if not isinstance(row, Mapping):
        problems.append(f"found {type(row).__name__}; expected an object with {listed(FIELDS)}")
        return None
    others = [each for each in row if isinstance(each, str)] if is_hinted and len(row) <= MOST_COMPARED else []
    subject = _text(row, "user", LONGEST_ID, problems, among=others)
    kind = _text(row, "type", LONGEST_TYPE, problems, among=others)
    needs_item = kind is not None and kind != IMPRESSION
    item = _text(row, "item", LONGEST_ID, problems, among=others if needs_item else None)
    request = _text(row, "request", LONGEST_ID, problems)
    own_id = _text(row, "id", LONGEST_ID, problems)
    time, value, position = _time(row, problems), _value(row, problems), _position(row, problems)
    context = _context(row, problems)
    if problems or subject is None or kind is None:
        return None
    occurred_at = received_at if time is None else time
    if own_id is None:  # the same event sent twice gets one id, if it says when it was
        named = json.dumps([subject, kind, item, time, request])
        own_id = str(uuid.uuid4() if time is None else uuid.uuid5(NAMESPACE, named))
    return Event(own_id, subject, kind, item, value, occurred_at, received_at, request, position, context)


def _text(
    row: Mapping[str, Any], name: str, longest: int, problems: list[str], *, among: Sequence[str] | None = None
) -> str | None:
    """A text of a row; with `among`, in which its name may be misspelled, it is required."""
    value = row.get(name)
    if type(value) is str and value.isascii() and value.isprintable() and value.strip() and len(value) <= longest:
        return value  # most values are plain, and each event has five
    if isinstance(value, float) and value.is_integer() and abs(value) < 2.0**53:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64:
        value = str(value)
    if value is None and among is None:
        return None
    if value is None and name not in row:
        problems.append(f"{name}: missing{nearest(name, among or ())}")
    elif not isinstance(value, str) or not value.strip():
        problems.append(f"{name}: found {quoted(value)}; expected a text or a whole number")
    elif len(value) > longest:
        problems.append(f"{name}: {len(value):,} characters; expected at most {longest:,}")
    elif not is_text(value):
        problems.append(f"{name}: holds a character that is no text")
    elif len(value.encode()) > MOST_BYTES:
        problems.append(f"{name}: {len(value.encode()):,} bytes as UTF-8; expected at most {MOST_BYTES:,}")
    else:
        return value
    return None


def is_text(value: str) -> bool:
    """Whether every database can store it: it holds neither NUL nor half of a character."""
    return "\0" not in value and not any("\ud800" <= each <= "\udfff" for each in value)


def _time(row: Mapping[str, Any], problems: list[str]) -> int | None:
    """Microseconds since 1970, from seconds since 1970 or a text of ISO 8601 with a zone."""
    value = row.get("time")
    if value is None:
        return None
    micros: int | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        micros = round(value * 1_000_000) if abs(value) < 1e15 else None
    elif isinstance(value, str) and len(value) <= 64:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is not None and moment.tzinfo is not None:
            micros = round(moment.timestamp() * 1_000_000)
    if micros is None or not EARLIEST_US <= micros <= LATEST_US:
        expected = "seconds since 1970, or ISO 8601 with a zone such as 2026-11-28T09:00:00Z"
        is_long = isinstance(value, (int, float)) and EARLIEST_US < value <= LATEST_US
        hint = "; divide milliseconds by 1,000" if is_long else ""
        problems.append(f"time: found {quoted(value)}; expected {expected}{hint}")
        return None
    return micros


def _value(row: Mapping[str, Any], problems: list[str]) -> float | None:
    value = row.get("value")
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= 1e15:
        problems.append(f"value: found {quoted(value)}; expected a number")
        return None
    return float(value)


def _position(row: Mapping[str, Any], problems: list[str]) -> int | None:
    value = row.get("position")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10_000:
        problems.append(f"position: found {quoted(value)}; expected a whole number from 1 to 10,000")
        return None
    return value


def _context(row: Mapping[str, Any], problems: list[str]) -> str | None:
    """Columns beside `FIELDS`, as JSON with sorted keys."""
    if row.keys() <= KNOWN:
        return None
    others = {str(name): value for name, value in row.items() if name not in FIELDS and value is not None}
    if not others:
        return None
    try:
        text = json.dumps(others, sort_keys=True, allow_nan=False, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        problems.append(f"{listed(others)}: expected texts, finite numbers, booleans, or lists of them")
        return None
    if "\\ud" in text and not is_text(json.dumps(others, ensure_ascii=False).replace("\0", "")):
        problems.append(f"{listed(map(ascii, others))}: holds a character that is no text")
        return None
    if len(text) > LONGEST_CONTEXT:
        problems.append(f"{listed(others)}: {len(text):,} characters; expected at most {LONGEST_CONTEXT:,} together")
        return None
    return text
