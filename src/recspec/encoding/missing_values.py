"""Counts of the raw values that an encoder could not take as they are: missing, unknown, misread or out of range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.encoding.encoder_kinds import (
    BucketEncoder,
    CrossEncoder,
    Encoder,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
    is_far,
)
from recspec.encoding.encoders import Encoders
from recspec.encoding.raw_columns import RawValues, as_array, as_numbers, is_text, split_lists
from recspec.encoding.raw_values import UNKNOWN, Lists, is_outside

UNKNOWN_ID, MISSING_ID = "the id of unknown values", "the id of missing values"
"""What replaces them."""

SEPARATORS = ("|", ",", ";", "\t", " ")
"""Common signs between the values of a list that is one text."""


@dataclass(frozen=True)
class MissingValues:
    """How many rows lack a value, and how many hold one that was unknown when the data was prepared."""

    missing: int
    unknown: int
    taken: str
    """What replaces them."""

    def __add__(self, other: MissingValues) -> MissingValues:
        return MissingValues(self.missing + other.missing, self.unknown + other.unknown, self.taken)


@dataclass(frozen=True)
class MisreadLists:
    """How many rows hold a list without a known value, as one text with another separator than expected."""

    rows: int
    found: str
    expected: str

    def __add__(self, other: MisreadLists) -> MisreadLists:
        return MisreadLists(self.rows + other.rows, self.found, self.expected)


@dataclass(frozen=True)
class OutOfRange:
    """How many rows hold a number outside the limits of a feature, or far from the numbers it was fitted on."""

    outside: int
    far: int
    limits: str
    taken: float

    def __add__(self, other: OutOfRange) -> OutOfRange:
        return OutOfRange(self.outside + other.outside, self.far + other.far, self.limits, self.taken)


def count_missing(
    rows: pa.Table, encoders: Encoders, encoded: Mapping[str, NDArray[np.generic] | Lists]
) -> dict[str, MissingValues]:
    """Missing and unknown values of the raw columns that were encoded, each counted once.

    Lists and crosses are skipped.
    """
    found: dict[str, MissingValues] = {}
    counted: set[str | None] = set()
    for name in sorted(encoded, key=lambda name: isinstance(encoders.encoder(name), BucketEncoder)):
        encoder, column = encoders.encoder(name), encoded[name]
        if isinstance(encoder, CrossEncoder) or isinstance(column, tuple):
            continue
        (source,) = encoders.sources(name, rows.column_names)
        if source in counted:
            continue
        counted.add(source)
        values = _missing_values(encoder, rows.column(source), column)
        if values.missing or values.unknown:
            found[str(source) if isinstance(encoder, BucketEncoder) else name] = values
    return found


def _missing_values(encoder: Encoder, values: RawValues, encoded: NDArray[np.generic]) -> MissingValues:
    if isinstance(encoder, (NumberEncoder, ScaleEncoder)):
        nothing = "the mean" if isinstance(encoder, ScaleEncoder) else "0"
        taken = nothing if encoder.missing is None else f"{encoder.missing:g}"
        return MissingValues(int(np.isnan(_numbers(encoder, values)).sum()), 0, taken)
    zeros = encoded == UNKNOWN
    if not isinstance(encoder, VocabularyEncoder):
        return MissingValues(int(zeros.sum()), 0, MISSING_ID)
    array = encoder.present(values).filter(pa.array(zeros))
    missing = array.is_null(nan_is_null=True)
    if is_text(array.type):
        missing = pc.or_(missing, pc.fill_null(pc.equal(array, ""), False))
    count = pc.sum(missing).as_py() or 0
    return MissingValues(count, len(array) - count, UNKNOWN_ID)


def _numbers(encoder: NumberEncoder | ScaleEncoder, values: RawValues) -> NDArray[np.float64]:
    return as_numbers(as_array(encoder.present(values)))


def misread_lists(rows: pa.Table, encoders: Encoders, features: Iterable[str]) -> dict[str, MisreadLists]:
    """Columns of lists as texts where rows hold another usual separator than the column's, and no known value.

    A sign that occurs in values of the vocabulary separates nothing, so it is skipped.
    """
    found: dict[str, MisreadLists] = {}
    for feature in features:
        encoder = encoders.encoders.get(feature)
        if not isinstance(encoder, VocabularyEncoder) or encoder.separator is None:
            continue
        (column,) = encoders.sources(feature, rows.column_names)
        if column is None or column in found:
            continue
        values = encoder.present(rows.column(column))
        misread = _misread(values, encoder, encoders) if is_text(values.type) else None
        if misread is not None:
            found[column] = misread
    return found


def _misread(values: pa.Array, encoder: VocabularyEncoder, encoders: Encoders) -> MisreadLists | None:
    assert encoder.separator is not None, "asked of lists that are one text"
    vocabulary = encoders.vocabularies[encoder.vocabulary]
    trimmed = pc.utf8_trim_whitespace(values)
    for sign in SEPARATORS:
        if sign == encoder.separator:
            continue
        chosen = trimmed.filter(pc.fill_null(pc.match_substring(trimmed, sign), False))
        if not len(chosen):
            continue
        flat, _ = split_lists(chosen, encoder.separator)
        if np.any(vocabulary.encode(flat)):
            continue
        if not vocabulary.is_numeric and pc.any(pc.match_substring(vocabulary.values, sign)).as_py():
            continue
        return MisreadLists(len(chosen), sign, encoder.separator)
    return None


def out_of_range(rows: pa.Table, encoders: Encoders, features: Iterable[str]) -> dict[str, OutOfRange]:
    """Features whose raw numbers lie outside their limits, or far from those that they were fitted on."""
    found: dict[str, OutOfRange] = {}
    for feature in features:
        encoder = encoders.encoders.get(feature)
        if not isinstance(encoder, (NumberEncoder, ScaleEncoder)) or getattr(encoder, "length", None) is not None:
            continue
        (column,) = encoders.sources(feature, rows.column_names)
        if column is None:
            continue
        numbers = _numbers(encoder, rows.column(column))
        counts = int(is_outside(encoder, numbers).sum()), int(is_far(encoder, numbers).sum())
        if any(counts):
            low, high = (f"{limit:g}" if limit is not None else "" for limit in (encoder.low, encoder.high))
            found[feature] = OutOfRange(*counts, f"[{low}, {high}]", encoder.outside)
    return found
