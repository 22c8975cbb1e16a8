"""Values and counts in words for people; `prepare.json` keeps the plain counts of a preparation."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from recspec.base.errors import how_many

NOTES = ("warnings", "inferred", "dropped", "changed")
"""What a preparation tells beside its counts."""
WORDS = {
    "raw_rows": "rows taken",
    "interactions": "rows kept",
    "repeats_dropped": "dropped: repeats",
    "invalid_dropped": "dropped: rows with invalid values",
    "of_users_with_too_few_dropped": "dropped: rows of users with too few",
    "users_without_possible_negatives": "dropped: held-out rows of users who met every item",
    "first": "first (UTC)",
    "last": "last (UTC)",
}


def shown(value: object) -> str:
    """A value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(part) for part in value)
    return str(value)


def as_data(value: object) -> str:
    """A value of the data, such as a year or a code, as it stands there: a number without thousands separators."""
    if isinstance(value, (list, tuple)):
        return ", ".join(as_data(part) for part in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return shown(value)
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.{7 if _is_float32(value) else 15}g}"  # 0.1 of float32 is 0.10000000149 as a float


def _is_float32(value: float) -> bool:
    try:
        return bool(struct.unpack("f", struct.pack("f", value))[0] == value)
    except OverflowError:
        return False


def shown_counts(summary: Mapping[str, object], metadata: Mapping[str, object]) -> dict[str, object]:
    """What a preparation counted, without notes and zeros; held-out events instead of them and their candidates."""
    is_untimed = str(summary.get("order", "")).startswith("as in the file")
    found: dict[str, object] = {}
    for name in sorted(summary, key=lambda name: name != "raw_rows"):
        value = summary[name]
        is_moment = name in ("first", "last")
        if name in NOTES or (value == 0 and name.endswith(("_dropped", "_kept", "_negatives", "_users", "_histories"))):
            continue
        if is_moment and is_untimed:
            continue
        if name == "rows" and isinstance(value, Mapping):
            found |= {str(split): _events(str(split), rows, metadata) for split, rows in value.items()}
            continue
        found[WORDS.get(name, name) if not is_moment or isinstance(value, str) else name] = value
    return found


def _events(split: str, rows: object, metadata: Mapping[str, object]) -> object:
    """The events of a split and the drawn items beside each; the number of rows if none are drawn."""
    if split == "train":
        drawn = metadata.get("train_negatives")
    else:
        series = metadata.get("test_samples_per_series")
        drawn = series - 1 if isinstance(series, int) else 0
    if not isinstance(rows, int) or not isinstance(drawn, int) or drawn < 1 or rows % (drawn + 1):
        return how_many(rows, "row") if isinstance(rows, int) else rows
    events = rows // (drawn + 1)
    return f"{how_many(events, 'event')}, each among {how_many(drawn, 'other')}"
