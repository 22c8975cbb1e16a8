"""Raw values of one request to a program's inputs, in microseconds where columns of a table take milliseconds.

Scalar features alone, and values as clean as a program sends them: texts, whole numbers, numbers. Ids are remembered by
raw value, and what is met first is encoded by `recspec.encoding`; so both always agree. Anything else is left to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.encoding import (
    FAR,
    UNKNOWN,
    BucketEncoder,
    Encoder,
    Encoders,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
)
from recspec.hashing import fingerprint64_of_one
from recspec.signature import Port

REMEMBERED = 1 << 16
"""Raw values of a feature whose ids are remembered beside as many as its vocabulary has; then all are forgotten."""

LONGEST = 256
"""Characters of a text that is looked up; a longer one is left to the columns' way."""

FEW = 64
"""New values up to which a hash is computed one by one, and not as a column."""

WHOLE = 1 << 53
"""Whole numbers below this are exact as float64, and in 64 bits."""

Arrays = dict[str, NDArray[Any]]


class Lookup:
    """The features of one side of a request (or of whole rows) that can be encoded quickly."""

    def __init__(self, encoders: Encoders, ports: Sequence[Port]) -> None:
        found = {port.name: encoders.encoders.get(port.name) for port in ports}
        self._ids = [
            (name, _sources(name, encoder), _Ids(encoders, name))
            for name, encoder in found.items()
            if isinstance(encoder, (VocabularyEncoder, HashEncoder)) and encoder.length is None
        ]
        numbers = [(name, encoder) for name, encoder in found.items() if encoder and _is_one_number(encoder)]
        self._plain = _Plain([(name, encoder) for name, encoder in numbers if _is_plain(encoder)])
        self._numbers = [(name, _sources(name, encoder), encoder, _transform(encoder)) for name, encoder in numbers
                         if not _is_plain(encoder)]  # fmt: skip
        self.features = frozenset({name for name, *_ in self._ids} | {name for name, _ in numbers})
        self.sources = tuple(dict.fromkeys(name for port in ports for name in _sources(port.name, found[port.name])))
        """Names that the raw columns may bear."""
        self._types = {port.name: np.dtype(port.dtype) for port in ports}

    def columns(self, columns: Mapping[str, Sequence[Any]], *, gaps: bool = True) -> Arrays | None:
        """Inputs (B, 1) of raw columns of B values each; None where a column is missing or holds something unusual.

        Without `gaps` a value that is missing, unknown or out of range is unusual too.
        """
        made: Arrays = {}
        found: list[list[int]] = []
        for _, sources, lookup in self._ids:
            values = _given(columns, sources)
            ids = None if values is None else lookup.of(values)
            if ids is None or (not gaps and UNKNOWN in ids):
                return None
            found.append(ids)
        if found:
            matrix = np.array(found)
            for (name, *_), row in zip(self._ids, matrix, strict=True):
                made[name] = row.astype(self._types[name], copy=False)[:, None]
        for name, sources, encoder, transform in self._numbers:
            values = _given(columns, sources)
            numbers = None if values is None else _as_numbers(values, gaps=gaps)
            if numbers is None or not (gaps or _is_in_range(encoder, numbers[0])):
                return None
            made[name] = transform(numbers[0])[:, None].astype(self._types[name])
        return made if self._plain.add(columns, made, gaps=gaps) else None


class _Ids:
    """The ids of a feature's raw values, by value."""

    def __init__(self, encoders: Encoders, feature: str) -> None:
        self._encoders, self._feature = encoders, feature
        self._known: dict[type, dict[str | int | None, int]] = {str: {}, int: {}}
        encoder = encoders.encoders[feature]
        vocabulary = encoders.vocabularies[encoder.vocabulary] if isinstance(encoder, VocabularyEncoder) else ()
        self._most = REMEMBERED + len(vocabulary)
        self._hash = encoder if isinstance(encoder, HashEncoder) and not (encoder.strip or encoder.whole) else None
        digits = (text for text in getattr(encoder, "missing_values", ()) if re.fullmatch(r"-?[0-9]+", text))
        as_written = all(text == str(int(text)) for text in digits)
        self._whole_hash = encoder if isinstance(encoder, HashEncoder) and as_written else None

    def of(self, values: Sequence[Any]) -> list[int] | None:
        """An id for each value; None where they are neither all texts nor all whole numbers."""
        if len(values) == 1:  # of a request, most of the time: once met, it takes no set of types
            value = values[0]
            known = self._known.get(type(value))
            if known is not None and (id_ := known.get(value)) is not None:
                return [id_]
        kinds = set(map(type, values))
        kinds.discard(type(None))
        if len(kinds) != 1:
            return None
        known = self._known.get(kinds.pop())
        if known is None:
            return None
        ids = list(map(known.get, values))
        if None not in ids:
            return ids  # type: ignore[return-value]
        learned = self._learn({value for value, id_ in zip(values, ids, strict=True) if id_ is None}, known)
        if learned is None:
            return None
        return [learned[value] if id_ is None else id_ for value, id_ in zip(values, ids, strict=True)]

    def _learn(
        self, values: set[str | int | None], known: dict[str | int | None, int]
    ) -> dict[str | int | None, int] | None:
        """Ids of values met first; None where they are left to the columns' way. What is unknown is not remembered."""
        texts = known is self._known[str]
        if not all(value is None or (len(value) <= LONGEST if isinstance(value, str) else abs(value) < WHOLE)
                   for value in values):  # fmt: skip
            return None
        try:
            if len(values) <= FEW and (encoder := self._hash if texts else self._whole_hash):
                learned = {value: _hashed(encoder, value) for value in values}
            else:
                told = list(values)
                if told == [None]:
                    told.append("" if texts else 0)
                found = self._encoders.encode_column(self._feature, told)
                assert not isinstance(found, tuple), "a scalar feature has one id a value"
                learned = dict(zip(told, found.tolist(), strict=True))
        except UnicodeEncodeError:
            return None
        if len(known) + len(learned) > self._most:
            known.clear()
        known.update({value: id_ for value, id_ in learned.items() if id_ != UNKNOWN})
        return learned


def _hashed(encoder: HashEncoder, value: str | int | None) -> int:
    text = "" if value is None else str(value)
    if not text or text in encoder.missing_values:
        return UNKNOWN
    return 1 + fingerprint64_of_one(text.encode()) % (encoder.cardinality - 1)


class _Plain:
    """Numbers that are scaled, or taken as they are: all in one matrix."""

    def __init__(self, encoders: Sequence[tuple[str, Encoder]]) -> None:
        self._sources = [(name, _sources(name, encoder)) for name, encoder in encoders]
        scales = [encoder if isinstance(encoder, ScaleEncoder) else None for _, encoder in encoders]
        self._scales = any(each is not None for each in scales)
        self._mean = np.array([each.mean if each else 0.0 for each in scales])[:, None]
        self._std = np.array([each.std if each else 1.0 for each in scales])[:, None]
        self._far = np.array([FAR if each else np.inf for each in scales])[:, None]

    def add(self, columns: Mapping[str, Sequence[Any]], made: Arrays, *, gaps: bool) -> bool:
        """Put the inputs (B, 1) beside the others; False where a column is missing or holds something unusual."""
        if not self._sources:
            return True
        found = [_given(columns, sources) for _, sources in self._sources]
        given = [values for values in found if values is not None]
        if len(given) < len(found):
            return False
        numbers = _as_numbers(*given, gaps=gaps)
        if numbers is None:
            return False
        scaled = (numbers - self._mean) / self._std if self._scales else numbers
        if not gaps and self._scales and (np.abs(scaled) >= self._far).any():
            return False
        scaled = scaled.astype(np.float32)
        if (gap := np.isnan(scaled)).any():
            scaled[gap] = 0.0
        for (name, _), row in zip(self._sources, scaled, strict=True):
            made[name] = row[:, None]
        return True


def _as_numbers(*columns: Sequence[Any], gaps: bool) -> NDArray[np.float64] | None:
    """Numbers (C, B) of C columns as float64, NaN where one is missing; None where something else is among them."""
    kinds = set[type]().union(*(map(type, values) for values in columns))
    if not kinds <= {float, int, type(None)}:
        return None
    try:
        numbers = np.array(columns, np.float64)
    except OverflowError:
        return None
    if np.isinf(numbers).any() or (int in kinds and (np.abs(numbers) >= WHOLE).any()):
        return None
    return None if not gaps and np.isnan(numbers).any() else numbers


def _transform(encoder: Encoder) -> Callable[[NDArray[np.float64]], NDArray[Any]]:
    if isinstance(encoder, BucketEncoder):
        boundaries = np.array(encoder.boundaries)
        return lambda numbers: np.where(np.isnan(numbers), 0, np.searchsorted(boundaries, numbers, side="right") + 1)
    if isinstance(encoder, ScaleEncoder):
        mean, std = encoder.mean, encoder.std
        return lambda numbers: np.nan_to_num((encoder.of_numbers(numbers) - mean) / std, nan=0.0)
    assert isinstance(encoder, NumberEncoder), encoder
    return lambda numbers: np.nan_to_num(encoder.of_numbers(numbers), nan=0.0)


def _is_in_range(encoder: Encoder, numbers: NDArray[np.float64]) -> bool:
    if not isinstance(encoder, (NumberEncoder, ScaleEncoder)):
        return True
    return not (encoder.is_outside(numbers).any() or np.any(encoder.is_far(numbers)))


def _is_one_number(encoder: Encoder) -> bool:
    if isinstance(encoder, NumberEncoder) and encoder.length is not None:
        return False
    return isinstance(encoder, (NumberEncoder, ScaleEncoder, BucketEncoder)) and not encoder.missing_values


def _is_plain(encoder: Encoder) -> bool:
    if not isinstance(encoder, (NumberEncoder, ScaleEncoder)):
        return False
    unset = (encoder.low, encoder.high, encoder.missing, encoder.log_plus)
    return unset == (None,) * 4 and not encoder.log1p


def _sources(feature: str, encoder: Encoder | None) -> tuple[str, ...]:
    """Names that the feature's raw column may bear."""
    column = getattr(encoder, "column", None)
    return (feature,) if column is None else (feature, column)


def _given(columns: Mapping[str, Sequence[Any]], sources: Sequence[str]) -> Sequence[Any] | None:
    for name in sources:
        if name in columns:
            return columns[name]
    return None
