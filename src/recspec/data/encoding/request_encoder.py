"""The raw values of one request to the inputs of an exported model, in microseconds instead of milliseconds.

It takes scalar features and clean values only: texts, whole numbers, numbers. It remembers ids by raw value, and asks
`Encoders.encode_values` for new ones. It leaves everything else to `Encoders.encode`, which takes columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.data.encoding.encoder_kinds import (
    BucketEncoder,
    Encoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
    is_far,
)
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.raw_values import UNKNOWN, encode_numbers, is_outside
from recspec.feature_spec import Port

REMEMBERED = 1 << 16  # raw values whose ids a feature remembers, beyond its vocabulary's; then it forgets all
LONGEST = 256  # characters of a text that is encoded here
WHOLE = 1 << 53  # whole numbers below this are exact as float64, and fit 64 bits

Arrays = dict[str, NDArray[Any]]
_Value = str | int | None


class RequestEncoder:
    """Encodes those features of a request's user and context, of its candidates, or of whole rows that it can."""

    def __init__(self, encoders: Encoders, ports: Sequence[Port]) -> None:
        found = {port.name: encoders.encoders.get(port.name) for port in ports}
        self._ids = [
            (name, _sources(name, encoder), _RememberedIds(encoders, name))
            for name, encoder in found.items()
            if isinstance(encoder, (VocabularyEncoder, HashEncoder)) and encoder.length is None
        ]
        numbers = {name: encoder for name, encoder in found.items() if encoder and _is_one_number(encoder)}
        self._types = {port.name: np.dtype(port.dtype) for port in ports}
        self._numbers = [
            _Alike({name: numbers[name] for name in alike}, self._types[alike[0]])
            for alike in _alike(numbers, self._types)
        ]
        self._sources_of_numbers = [_sources(name, numbers[name]) for alike in self._numbers for name in alike.names]
        self._names_of_ids = tuple(name for name, *_ in self._ids)
        self.features = frozenset((*self._names_of_ids, *numbers))
        self.sources = tuple(dict.fromkeys(name for port in ports for name in _sources(port.name, found[port.name])))
        """Possible names of the raw columns."""

    def columns(self, columns: Mapping[str, Sequence[Any]], *, strict: bool = False) -> Arrays | None:
        """Inputs (B, 1) of raw columns; None if one is missing, unusual or, if `strict`, unknown or out of range."""
        made = self.matrices(columns, strict=strict)
        if made is None:
            return None
        rows = {name: row for names, matrix in made for name, row in zip(names, matrix, strict=True)}
        return {name: row.astype(self._types[name], copy=False)[:, None] for name, row in rows.items()}

    def matrices(
        self, columns: Mapping[str, Sequence[Any]], *, strict: bool = False
    ) -> list[tuple[Sequence[str], NDArray[Any]]] | None:
        """`columns` as matrices (F, B), each with its features: ids as int64, numbers by their type."""
        made: list[tuple[Sequence[str], NDArray[Any]]] = []
        found: list[list[int]] = []
        for _, sources, remembered in self._ids:
            values = _given(columns, sources)
            ids = None if values is None else remembered.of(values)
            if ids is None or (strict and UNKNOWN in ids):
                return None
            found.append(ids)
        if found:
            made.append((self._names_of_ids, np.array(found, np.int64)))
        given = [_given(columns, sources) for sources in self._sources_of_numbers]
        numbers = _as_numbers([values for values in given if values is not None], strict=strict) if given else None
        if given and (numbers is None or len(numbers) < len(given)):
            return None
        first = 0
        for alike in self._numbers:
            assert numbers is not None
            own, first = numbers[first : first + len(alike.names)], first + len(alike.names)
            if strict and alike.any_beyond(own):
                return None
            made.append((alike.names, alike.encode(own)))
        return made


class _Alike:
    """Features whose encoders differ in their numbers only, so that one call encodes them all."""

    def __init__(self, encoders: Mapping[str, Encoder], dtype: np.dtype[Any]) -> None:
        self.names, self._dtype = (*encoders,), dtype
        first = next(iter(encoders.values()))
        self._encoder = _stacked([*encoders.values()])
        bounded = (getattr(first, "low", None), getattr(first, "high", None)) != (None, None)
        self._limits = [*([is_outside] if bounded else []), *([is_far] if isinstance(first, ScaleEncoder) else [])]

    def any_beyond(self, numbers: NDArray[np.float64]) -> bool:
        """Whether one of the numbers (C, B) is out of its encoder's range."""
        return any(is_beyond(self._encoder, numbers).any() for is_beyond in self._limits)

    def encode(self, numbers: NDArray[np.float64]) -> NDArray[Any]:
        """The features' inputs (C, B)."""
        return encode_numbers(self._encoder, numbers).astype(self._dtype, copy=False)


def _alike(encoders: Mapping[str, Encoder], types: Mapping[str, np.dtype[Any]]) -> list[list[str]]:
    """Features by what their encoders do: by all settings but the raw column's name and the values of numbers."""
    groups: dict[Any, list[str]] = {}
    for name, encoder in encoders.items():
        settings = (float if isinstance(value, float) else value for own, value in encoder if own != "column")
        groups.setdefault((types[name], *settings), []).append(name)
    return [*groups.values()]


def _stacked(encoders: Sequence[Encoder]) -> Any:
    """The settings of encoders that do the same: each number becomes a column (C, 1) of theirs."""
    return SimpleNamespace(
        **{
            name: np.array([[getattr(each, name)] for each in encoders]) if isinstance(value, float) else value
            for name, value in encoders[0]
        }
    )


class _RememberedIds:
    """The ids of a feature's raw values, by value."""

    def __init__(self, encoders: Encoders, feature: str) -> None:
        self._encoders, self._feature = encoders, feature
        self._known: dict[type, dict[_Value, int]] = {str: {}, int: {}}
        encoder = encoders.encoders[feature]
        vocabulary = encoders.vocabularies[encoder.vocabulary] if isinstance(encoder, VocabularyEncoder) else ()
        self._most = REMEMBERED + len(vocabulary)

    def of(self, values: Sequence[Any]) -> list[int] | None:
        """An id for each value; None unless they are all texts or all whole numbers, missing ones aside."""
        if len(values) == 1:  # the common case in a request: a known value skips the set of types
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

    def _learn(self, values: set[_Value], known: dict[_Value, int]) -> dict[_Value, int] | None:
        """Ids of new values; None if one is too long or too large. Unknown values are not remembered."""
        new = list(values)
        if not all(map(_is_usual, new)):
            return None
        found = self._encoders.encode_values(self._feature, new, are_texts=known is self._known[str])
        learned = dict(zip(new, found.tolist(), strict=True))
        if len(known) + len(learned) > self._most:
            known.clear()
        known.update({value: id_ for value, id_ in learned.items() if id_ != UNKNOWN})
        return learned


def _is_usual(value: _Value) -> bool:
    """Whether a text is short enough, and Unicode, and a whole number is not too large."""
    if not isinstance(value, str):
        return value is None or abs(value) < WHOLE
    try:
        return len(value) <= LONGEST and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def _as_numbers(columns: Sequence[Sequence[Any]], *, strict: bool) -> NDArray[np.float64] | None:
    """Numbers (C, B) of C columns as float64, NaN where one is missing; None if anything else is among them."""
    kinds = set[type]().union(*(map(type, values) for values in columns))
    if not kinds <= {float, int, type(None)}:
        return None
    try:
        numbers = np.array(columns, np.float64)
    except OverflowError:
        return None
    if np.isinf(numbers).any() or (int in kinds and (np.abs(numbers) >= WHOLE).any()):
        return None
    return None if strict and np.isnan(numbers).any() else numbers


def _is_one_number(encoder: Encoder | None) -> bool:
    is_number = isinstance(encoder, (NumberEncoder, ScaleEncoder, BucketEncoder)) and not encoder.missing_values
    return is_number and getattr(encoder, "length", None) is None


def _sources(feature: str, encoder: Encoder | None) -> tuple[str, ...]:
    """Possible names of the feature's raw column."""
    column = getattr(encoder, "column", None)
    return (feature,) if column is None else (feature, column)


def _given(columns: Mapping[str, Sequence[Any]], sources: Sequence[str]) -> Sequence[Any] | None:
    for name in sources:
        if name in columns:
            return columns[name]
    return None
