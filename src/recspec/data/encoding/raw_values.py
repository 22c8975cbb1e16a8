"""The rules that turn raw values into ids and numbers, for every kind of encoder, with numpy alone.

Columns of a table and the values of one request (`encoders`), and the Python model of a Triton repository follow these
rules. An export copies this file and `hashing.py` into the repository.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recspec.data.encoding.hashing import FEW, Prints, cross, fingerprint64_of_bytes, fingerprint64_of_one

Settings: TypeAlias = Any  # an encoder of `encoders.json`: any object with its settings as attributes
Raw: TypeAlias = Any  # a text, a number, or None for a missing value
Ids = NDArray[np.int64]
Offsets = NDArray[np.int64]
Lists = tuple[NDArray[np.generic], Offsets]  # row i holds values[offsets[i]:offsets[i + 1]]
Encoded = NDArray[np.generic] | Lists
Keep = Literal["first", "last"]

UNKNOWN = 0  # the id of a value that the vocabulary does not hold; in a list, of padding

# Texts, in any case, that mean a missing value, or are a number like JSON's true, where a number is expected:
MISSING_NUMBERS = ("n/a", "na", "#n/a", "null", "none", "nan", "-", "?", "\\n")
COMMA = r"^[+-]?([0-9]{1,3}(\.[0-9]{3})+|[0-9]+)?,[0-9]+([eE][+-]?[0-9]{1,3})?$"
"""A number with a decimal comma."""
GROUPED = r"^[+-]?[0-9]{1,3}(\.[0-9]{3})+$"
"""Thousands with points; without a comma in the column they may also be fractions."""
POINT = r"^-?([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"
"""A number with a point."""
TRUTH = {"true": 1, "false": 0}

EVENT_SECONDS = (1e8, 3e9)
"""Seconds since 1970 between which events happen: March 1973 to January 2065."""
THURSDAY = 3
"""Days from Monday to the weekday of the first of January 1970."""

_TIME = re.compile(
    r"([0-9]{4})[-/]([0-9]{2})[-/]([0-9]{2})(?:[T ]([0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?))?"
    r" ?(Z|z|UTC|GMT|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)
_WHOLE = re.compile(r"(-?[0-9]{1,19})(\.0+)?")
# Python's float accepts more, such as `1_000` and digits of other scripts. No part matches in two ways: linear time.
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


class KnownValues:
    """The ids of a vocabulary's values, which are all texts or all whole numbers; the first has id 1."""

    def __init__(self, values: Sequence[str | int]) -> None:
        self._ids = {value: id_ for id_, value in enumerate(values, 1)}
        self.is_numeric = any(isinstance(value, int) for value in values)

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, keys: Sequence[Raw]) -> Ids:
        """The id of each value, 0 where it is unknown or None."""
        return np.fromiter(map(self._ids.get, keys, [UNKNOWN] * len(keys)), np.int64, len(keys))


def present(encoder: Settings, values: Sequence[Raw]) -> Sequence[Raw]:
    """Values as `prepare` reads them: stripped where blanks don't count, and None where a value means missing."""
    if encoder.strip:
        values = [value.strip() if isinstance(value, str) else value for value in values]
    if encoder.missing_values:
        missing = {*encoder.missing_values, *missing_numbers(encoder)}
        values = [None if value in missing else value for value in values]
    return values


def missing_numbers(encoder: Settings) -> list[int]:
    """The whole numbers among the texts that mean missing: `-1` also means missing where it is a number."""
    texts = [text for text in encoder.missing_values if re.fullmatch(r"-?[0-9]{1,19}", text)]
    return [number for text in texts if (number := whole(text)) is not None]


def encode_ids(encoder: Settings, values: Sequence[Raw], known: Any = None, *, are_texts: bool = True) -> Ids:
    """Ids of texts, or of whole numbers (`missing` replaces none); `known` is a vocabulary or `KnownValues`."""
    values = present(encoder, values)
    if encoder.kind == "hash":
        keys = [*map(whole, values)] if encoder.whole else values
        return _hashed(["" if key is None else str(key) for key in keys], encoder.cardinality)
    if encoder.missing is not None and are_texts:
        values = [encoder.missing if value is None else value for value in values]
    keys = [*map(whole if known.is_numeric else _text, values)]
    ids: Ids = known.find(keys)
    return others(encoder, ids, keys, len(known))


def others(encoder: Settings, ids: Ids, keys: Sequence[Raw], num_known: int) -> Ids:
    """Ids with those of the values beyond the vocabulary, where the encoder has such."""
    if not (encoder.buckets or encoder.otherwise):
        return ids
    rows = [row for row in np.flatnonzero(ids == UNKNOWN).tolist() if keys[row] not in (None, "")]
    ids[rows] = encoder.otherwise
    if encoder.buckets and rows:
        ids[rows] = num_known + _hashed([str(keys[row]) for row in rows], encoder.buckets + 1)
    return ids


def cross_ids(encoder: Settings, parts: Sequence[Any]) -> Ids:
    """The id of each row of a `cross` encoder, from the values of its columns in their order."""
    prints, lacks = list[Prints](), list[NDArray[np.bool_]]()
    for name, values in zip(encoder.columns, parts, strict=True):
        if name in encoder.boundaries:
            numbers = numbers_of(encoder, values)
            prints.append(bucket(encoder.boundaries[name], numbers).astype(np.uint64))
            lacks.append(np.isnan(numbers))
            continue
        keys = [*map(whole if name in encoder.whole else _text, present(encoder, values))]
        lacks.append(np.array([key is None for key in keys], bool))
        if name in encoder.whole:
            prints.append(np.array([-1 if key is None else key for key in keys], np.int64).astype(np.uint64))
        else:
            prints.append(fingerprint64_of_bytes([str(key or "").encode() for key in keys]))
    return crossed(encoder, prints, lacks)


def crossed(encoder: Settings, prints: Sequence[Prints], lacks: Sequence[NDArray[np.bool_]]) -> Ids:
    """The ids of a cross, from a fingerprint for each column and row, and where each column lacks a value."""
    ids = within(cross(prints), encoder.cardinality)
    return np.where(reduce(np.logical_or, lacks), UNKNOWN, ids) if encoder.needs_all else ids


def within(prints: Prints, cardinality: int) -> Ids:
    """Ids from 1 on, of fingerprints."""
    return 1 + (prints % np.uint64(cardinality - 1)).astype(np.int64)


def whole(value: Raw) -> int | None:
    """A text or number as a whole number of 64 bits; None where it is not one."""
    if isinstance(value, str):
        text = value.strip()
        if (found := _WHOLE.fullmatch(text)) is None:
            return TRUTH.get(text.lower())
        value = found[1]
    number = None if value is None else int(value)
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _text(value: Raw) -> str | None:
    return None if value is None else str(value)


def _hashed(texts: Sequence[str], cardinality: int) -> Ids:
    """An id for each text, 0 for an empty one."""
    if len(texts) <= FEW:
        ids = [1 + fingerprint64_of_one(text.encode()) % (cardinality - 1) if text else UNKNOWN for text in texts]
        return np.array(ids, np.int64)
    ids_of_all = within(fingerprint64_of_bytes([text.encode() for text in texts]), cardinality)
    return np.where(np.array(texts, object) == "", UNKNOWN, ids_of_all)


def number(text: str) -> float:
    """The number that a text spells, NaN where it means missing. Raises `ValueError` if it spells none."""
    text = text.strip()
    word = text.lower()
    if not text or word in MISSING_NUMBERS:
        return np.nan
    if word in TRUTH:
        return TRUTH[word]
    if _NUMBER.fullmatch(text):
        return float(text)
    raise ValueError(f"{text[:60]!r} is no number; expected such as 1.5")


def numbers_of(encoder: Settings, values: Any) -> NDArray[np.float64]:
    """Texts or floats as numbers, NaN where one is missing. Raises `ValueError` for another text and for infinity."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        numbers = np.where(np.isin(values, missing_numbers(encoder)), np.nan, values.astype(np.float64))
    else:
        numbers = np.array([number(text or "") for text in present(encoder, values)], np.float64)
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise ValueError(f"row {infinite[0] + 1} is infinite; expected a finite number")
    return numbers


def clock_ids(encoder: Settings, values: Sequence[Raw]) -> Ids:
    """The ids of a `clock` encoder for times: numbers of `seconds_by_size`, and texts; 0 where a time is missing.

    Raises:
        ValueError: naming a row whose text is no time.
    """
    seconds = np.full(len(values), np.nan)
    for row, value in enumerate(present(encoder, values)):
        if value is not None and value != "":
            seconds[row] = _time_of(value, encoder.format, row) if isinstance(value, str) else value
    return clock_of(encoder, seconds)


def clock_of(encoder: Settings, numbers: NDArray[np.float64]) -> Ids:
    """Likewise, of numbers (B,), NaN where one is missing."""
    seconds = seconds_by_size(numbers)
    known = np.isfinite(seconds)
    whole = np.where(known, np.floor(seconds), 0).astype(np.int64)
    found = whole // 3_600 % 24 if encoder.part == "hour" else (whole // 86_400 + THURSDAY) % 7
    return np.where(known, 1 + found, UNKNOWN)


def seconds_by_size(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds since 1970, of such numbers of seconds, milliseconds, microseconds or nanoseconds: their size tells.

    NaN outside 1973 to 2065, where it does not.
    """
    seconds = np.full(numbers.shape, np.nan)
    for unit in (1.0, 1e3, 1e6, 1e9):
        least, most = (bound * unit for bound in EVENT_SECONDS)
        seconds = np.where((numbers >= least) & (numbers <= most), numbers / unit, seconds)
    return seconds


def _time_of(text: str, form: str | None, row: int) -> float:
    """The seconds since 1970 of a time as text, in UTC where it names no zone."""
    text = text.strip()
    try:
        if form is not None:
            return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
        if _NUMBER.fullmatch(text):
            return float(text)
        if (found := _TIME.fullmatch(text)) is not None:
            year, month, day, clock, zone = found.groups()
            zone = "+00:00" if zone in (None, "Z", "z", "UTC", "GMT") else zone
            clock = (clock or "00:00").replace(",", ".")
            return datetime.fromisoformat(f"{year}-{month}-{day}T{clock[:15]}{zone}").timestamp()
    except ValueError:
        pass
    expected = f"a time written as {form}" if form else "a time such as 2026-11-28 09:30:00, or seconds since 1970"
    raise ValueError(f"row {row + 1} is {text[:60]!r}; expected {expected}")


def encode_numbers(encoder: Settings, numbers: NDArray[np.float64]) -> NDArray[Any]:
    """What a `number`, `scale` or `bucket` encoder makes of numbers, where NaN marks a missing one."""
    if encoder.kind == "bucket":
        return bucket(encoder.boundaries, numbers) + 1
    numbers = transformed(encoder, numbers)
    if encoder.kind == "scale":
        numbers = (numbers - encoder.mean) / encoder.std
    return np.where(np.isnan(numbers), 0.0, numbers)


def transformed(encoder: Settings, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers after `low` and `high`, then `missing`, then the logarithm; NaN where one stays missing."""
    if encoder.low is not None or encoder.high is not None:
        if encoder.outside is None:
            numbers = np.clip(numbers, encoder.low, encoder.high)
        else:
            numbers = np.where(is_outside(encoder, numbers), encoder.outside, numbers)
    if encoder.missing is not None:
        numbers = np.where(np.isnan(numbers), encoder.missing, numbers)
    if encoder.log_plus is not None:
        moved = numbers + encoder.log_plus
        return np.log(np.where(moved > 0, moved, np.nan))
    return np.sign(numbers) * np.log1p(np.abs(numbers)) if encoder.log1p else numbers


def is_outside(encoder: Settings, numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which numbers lie below `low` or above `high`, so that `outside` replaces them."""
    beyond = np.zeros(numbers.shape, bool)
    if encoder.low is not None:
        beyond |= numbers < encoder.low
    if encoder.high is not None:
        beyond |= numbers > encoder.high
    return beyond


def encode_vectors(encoder: Settings, vectors: NDArray[np.float64], first: int = 0) -> NDArray[np.float32]:
    """What a `vector` encoder makes of vectors (B, L): their multiples, and zeros for a row of NaN.

    Errors count rows from `first`.

    Raises:
        ValueError: naming the first row with another number of values, or with a number that is not finite.
    """
    missing = np.asarray(np.isnan(vectors).all(axis=1))
    if vectors.shape[1] != encoder.length and not missing.all():
        row = first + int(np.argmin(missing))
        raise ValueError(f"row {row + 1} holds {vectors.shape[1]} numbers; expected a vector of {encoder.length}")
    if missing.all():
        return np.zeros((len(vectors), encoder.length), np.float32)
    with np.errstate(over="ignore"):
        made = np.where(missing[:, None], 0.0, vectors * encoder.scale).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(made).all(axis=1))
    if len(wrong):
        what = "a missing or too large value in its vector"
        raise ValueError(f"row {first + wrong[0] + 1} holds {what}; expected {encoder.length} finite numbers")
    return made


def bucket(boundaries: Sequence[float], numbers: NDArray[np.float64]) -> Ids:
    """The number of boundaries that are at most as large as each number; -1 where it is missing."""
    return np.where(np.isnan(numbers), -1, np.searchsorted(np.array(boundaries, np.float64), numbers, side="right"))


def of_known(values: NDArray[np.generic], ids: Ids, offsets: Offsets, length: int, keep: Keep) -> Lists:
    """Lists of the values that belong to known ids, each cut to its first or last `length`."""
    known = ids != UNKNOWN
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(known)])
    return cut(values[known], before[offsets], length, keep)


def cut(values: NDArray[np.generic], offsets: Offsets, length: int, keep: Keep) -> Lists:
    """Lists, each cut to its first or last `length` values."""
    counts = np.diff(offsets)
    if not len(counts) or counts.max() <= length:
        return values, offsets
    ends = offsets[:-1] if keep == "first" else offsets[1:] - 1
    kept = np.abs(np.arange(len(values)) - np.repeat(ends, counts)) < length
    return values[kept], np.concatenate([np.zeros(1, np.int64), np.cumsum(np.minimum(counts, length))])
