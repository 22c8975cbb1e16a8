"""Clock times of a zone as instants, as Ibis expressions of seconds that every engine evaluates alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import or_
from zoneinfo import ZoneInfo

import ibis
from ibis.expr.types import BooleanValue, IntegerValue

from recspec.prepare.declared import offset_of

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
