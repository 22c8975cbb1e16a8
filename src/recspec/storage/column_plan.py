"""How one column is stored and read: its types, its shift, and the values it may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from recspec.errors import DataError
from recspec.spec import Feature, FeatureSpec
from recspec.storage.ragged import Array, Column, Ragged

TOO_LARGE = "too large for an id"


@dataclass(frozen=True)
class Limits:
    """The values a column may hold, and the sentences for those outside."""

    low: float
    high: float
    too_low: str
    too_high: str
    only_ends: bool = False
    """Whether `low` and `high` are the only values allowed, as for a label."""


@dataclass(frozen=True)
class ColumnPlan:
    """How one column is read and written, worked out once for all blocks."""

    name: str
    feature: Feature
    dtype: np.dtype[np.generic]
    shift: int
    result: np.dtype[np.generic]  # wide enough for a shifted id
    kinds: str  # numpy's letters for the types it may be stored in
    limits: Limits

    @classmethod
    def of(cls, name: str, feature: Feature, shift: int = 0, *, is_label: bool = False) -> Self:
        """The plan of a feature whose ids are raised by `shift`."""
        dtype, cardinality = feature.storage_dtype, feature.cardinality
        fits = shift == 0 or (
            isinstance(cardinality, int) and dtype.kind in "iu" and cardinality <= np.iinfo(dtype.name).max
        )
        wide = np.dtype("int32" if isinstance(cardinality, int) and cardinality < 2**31 else "int64")
        kinds = "iubf" if dtype.kind == "f" else "iu" if feature.is_categorical and dtype.kind != "b" else "iub"
        limits = _LABEL_LIMITS if is_label else _limits(feature, dtype)
        return cls(name, feature, dtype, shift, dtype if fits else wide, kinds, limits)

    @classmethod
    def of_spec(cls, spec: FeatureSpec, name: str, *, shifted: bool) -> Self:
        """The plan of a feature of a dataset."""
        return cls.of(name, spec.features[name], spec.shift(name) if shifted else 0, is_label=name == spec.label)

    @property
    def expected(self) -> str:
        """The values that the column should hold, as a message says it."""
        if self.feature.is_categorical:
            return f"ids of an integer type ({self.dtype})"
        return f"numbers ({self.dtype})" if self.dtype.kind == "f" else str(self.dtype)

    def zeros(self, num_rows: int) -> Column:
        """Rows of zeros, or of empty lists."""
        if self.feature.is_list:
            return Ragged(np.zeros(0, self.result), np.zeros(num_rows + 1, np.int64))
        return np.zeros(num_rows, self.result)

    def rectangle(self, column: Column) -> Array:
        """A list as (rows, length), filled with its padding; a scalar as it is.

        Raises:
            DataError: a list of numbers that is too short, for numbers have no padding.
        """
        if not isinstance(column, Ragged):
            return column
        length = self.feature.length or 1
        if not self.feature.is_categorical and len(column) and column.lengths.min() < length:
            held = int(column.lengths[np.argmax(column.lengths < length)])
            raise DataError(
                f"the list '{self.name}' holds {held} of {length} numbers in some row; a list of numbers has no "
                "padding, so this chunk type can't hold it: write parquet, csv or tfrecord"
            )
        return column.pad(length, -1 if self.feature.padding is None else 0)


_NO_LABEL = "is not a label; a label is 0 or 1: convert the column, or name another one in channel_spec.label"
_LABEL_LIMITS = Limits(0, 1, _NO_LABEL, _NO_LABEL, only_ends=True)


def _limits(feature: Feature, dtype: np.dtype[np.generic]) -> Limits:
    if dtype.kind == "f":
        read_as = min(dtype, np.dtype("float32"), key=lambda each: each.itemsize)  # float64 beyond it would be infinite
        largest = float(np.finfo(read_as.name).max)
        too_large = f"does not fit {read_as}, whose largest value is {largest:.6g}"
        return Limits(-largest, largest, too_large, too_large)
    if dtype.kind == "b":
        return Limits(0, 1, "is not 0 or 1, as bool expects", "is not 0 or 1, as bool expects")
    least, last = int(np.iinfo(dtype.name).min), int(np.iinfo(dtype.name).max)
    fits = f"does not fit {dtype}, which ends at"
    if not feature.is_categorical:
        return Limits(least, last, f"{fits} {least}", f"{fits} {last}")
    negative = "is negative; an id lies in [0, cardinality)"
    if not isinstance(feature.cardinality, int):
        return Limits(0, last, negative, f"{fits} {last}")
    last = feature.cardinality - 1
    too_high = f"is {TOO_LARGE}: the cardinality is {last + 1}, so ids are 0 to {last}"
    return Limits(0, last, f"{negative}: 0 to {last}", too_high)
