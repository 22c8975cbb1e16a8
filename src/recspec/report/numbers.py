"""Numbers, times and sizes as a page shows them."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TypeGuard

from recspec.report.markup import plain

HUGE = 10**18
"""From here on, a number in a file is a mistake or an attack; some have no text and no place on an axis."""


def number(value: object, digits: int = 4) -> str:
    """A count with thousands, another number with some significant digits, a dash for none; texts as they are."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return plain(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < HUGE else "huge"
    if not math.isfinite(value):
        return "infinite" if value > 0 else "-infinite"
    if value == int(value) and 1_000 <= abs(value) < HUGE:
        return f"{int(value):,}"
    if 0 < abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.{digits - 1}g}"
    return f"{value:,.{max(0, digits - max(0, len(str(int(abs(value)))) - 1))}f}"


def data_number(value: float) -> str:
    """A number of the data, such as a year: as `number` shows it, but without thousands."""
    return number(value).replace(",", "")


def signed(value: float, digits: int = 4) -> str:
    """A difference, with its sign."""
    shown = number(value, digits)
    return shown if value < 0 or math.isnan(value) or float(value) == 0 else f"+{shown}"


def _is_known(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and abs(value) < HUGE  # which is false of NaN


def percent(share: object, digits: int = 1) -> str:
    """A share as a percentage; one that rounds to 0 is written as less than the smallest shown."""
    if not _is_known(share):
        return "–"
    least = 10.0**-digits
    if 0 < 100 * share < least / 2:
        return f"under {least:g} %"
    return f"{100 * share:.{digits}f} %"


def duration(seconds: object) -> str:
    """`12.3 s`, `4 min 10 s`, `2 h 5 min`."""
    if not _is_known(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    return f"{hours:,} h {of_hour} min" if hours else f"{minutes} min {rest} s"


def size(count: object) -> str:
    """Bytes in the largest fitting unit."""
    if not _is_known(count):
        return "–"
    for unit in ("bytes", "KB", "MB", "GB"):
        if abs(count) < 1_000 or unit == "GB":
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1_000
    raise AssertionError


def moment(seconds: object) -> str:
    """A Unix time as a date and time in UTC; a dash where it is none."""
    if not isinstance(seconds, (int, float)):
        return "–"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "–"


def p_value(value: float) -> str:
    """A p-value; small ones as a bound."""
    return "–" if math.isnan(value) else "under 0.001" if value < 0.001 else f"{value:.3f}"
