"""Columns in memory: numpy arrays, and `Ragged` for lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.generic]


def offsets_of(lengths: ArrayLike) -> NDArray[np.int64]:
    """Where each list starts, and where the last one ends, in values that stand one list after another."""
    lengths = np.asarray(lengths)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_range(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ...`."""
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)


@dataclass(frozen=True, eq=False)
class Ragged:
    """A column of lists: row i holds `values[offsets[i]:offsets[i + 1]]`."""

    values: Array
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], dtype: np.typing.DTypeLike = np.int64) -> Ragged:
        """From Python lists."""
        return cls(np.array([value for row in rows for value in row], dtype), offsets_of([len(row) for row in rows]))

    @classmethod
    def of_rectangle(cls, rows: Array) -> Ragged:
        """From an array (rows, length): every list has the same length."""
        return cls(rows.reshape(-1), np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1])

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, one after another."""
        values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
        return cls(np.concatenate(values), offsets_of(np.concatenate([part.lengths for part in parts])))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many values each row holds."""
        return np.diff(self.offsets)

    def rows(self, start: int, stop: int) -> Ragged:
        """Rows [start, stop)."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def where(self, keep: NDArray[np.bool_]) -> Ragged:
        """Only the values whose place in `values` is marked."""
        return Ragged(self.values[keep], offsets_of(keep)[self.offsets])

    def truncate(self, length: int) -> Ragged:
        """At most the first `length` values of each row."""
        lengths = self.lengths
        if not len(lengths) or lengths.max() <= length:
            return self
        return self.where(np.arange(len(self.values)) - np.repeat(self.offsets[:-1], lengths) < length)

    def pad(self, length: int, fill: float = 0) -> Array:
        """An array (rows, length): each row's values first, then `fill`."""
        padded = np.full((len(self), length), fill, self.values.dtype)
        cut = self.truncate(length)
        padded[np.arange(length) < cut.lengths[:, None]] = cut.values
        return padded

    def tolist(self) -> list[list[float]]:
        """As Python lists."""
        return [self.values[a:b].tolist() for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


Column = Array | Ragged
Columns = dict[str, Column]


def rows_of(columns: Mapping[str, Column], start: int, stop: int) -> Columns:
    """Rows [start, stop) of every column, as views."""
    return {
        name: column.rows(start, stop) if isinstance(column, Ragged) else column[start:stop]
        for name, column in columns.items()
    }


def concatenate(parts: Sequence[Mapping[str, Column]]) -> Columns:
    """The rows of all parts, one after another, column by column."""
    return {name: concatenate_column([part[name] for part in parts]) for name in parts[0]}


def concatenate_column(parts: Sequence[Column]) -> Column:
    """The rows of all parts of one column."""
    if len(parts) == 1:
        return parts[0]
    lists = [part for part in parts if isinstance(part, Ragged)]
    return Ragged.concatenate(lists) if lists else np.concatenate([p for p in parts if not isinstance(p, Ragged)])


def scalar(column: Column) -> NDArray[Any]:
    """A column of ids, labels or numbers, which is never a list."""
    assert not isinstance(column, Ragged), "an id, a time or a label is a scalar"
    return column
