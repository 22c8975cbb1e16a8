"""Rows of prepared data held in memory, from which any can be taken as a batch.

All scalars of a row lie side by side, so that choosing rows at random is one `index_select` with one cache miss a row:
20 million rows/s of 40 columns on one core, against 4 with an array for each column. Lists that are mostly padding, as
histories are, are held without it and padded to the longest of the batch. A history's lists come equally wide: value j
of each belongs to event j. Lists of equal lengths lie side by side too.

Shapes: N rows held; B rows of a batch; W scalar features, or lists of equal lengths; L a list feature's length; T
values of ragged lists in all; P of those in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.data.storage import Column, Columns, Ragged
from recspec.feature_spec import FeatureSpec
from recspec.models.layers import Batch


@dataclass(frozen=True)
class Layout:
    """Where the features of a row are held: scalars in one matrix for each width, lists apart."""

    words: tuple[str, ...]  # int32 ids, and float32 numbers as their bits
    wide: tuple[str, ...]  # int64 ids
    lists: Mapping[str, int]  # name -> length
    floats: frozenset[str]
    wide_lists: frozenset[str]
    history: tuple[str, ...]  # lists of events
    fixed_length: bool

    @classmethod
    def of(cls, spec: FeatureSpec, features: Sequence[str], *, fixed_length: bool = False) -> Layout:
        """The layout of some features."""
        scalars = [name for name in features if not spec.features[name].is_list]
        large = {name for name in features if spec.features[name].is_categorical and not _fits_int32(spec, name)}
        lists = {name: length for name in features if (length := spec.features[name].length) is not None}
        events = {*spec.role("history"), *spec.role("negative_history")}
        return cls(
            words=tuple(name for name in scalars if name not in large),
            wide=tuple(name for name in scalars if name in large),
            lists=lists,
            floats=frozenset(name for name in features if not spec.features[name].is_categorical),
            wide_lists=frozenset(large - set(scalars)),
            history=tuple(name for name in lists if name in events),
            fixed_length=fixed_length,
        )

    @property
    def together(self) -> Iterator[tuple[str, ...]]:
        """The lists; those of one tuple are held alike and equally wide in a batch."""
        if self.history:
            yield self.history
        yield from ((name,) for name in self.lists if name not in self.history)

    def nbytes(self, num_rows: int, num_values: Mapping[str, int]) -> int:
        """Bytes of so many rows, lists held the smaller way; `num_values` counts the values of each list feature."""
        lists = sum(min(self.bytes_of(names, num_rows, num_values)) for names in self.together)
        return max(1, (4 * len(self.words) + 8 * len(self.wide)) * num_rows + lists)

    def bytes_of(self, names: Sequence[str], num_rows: int, num_values: Mapping[str, int]) -> tuple[int, int]:
        """Bytes of some lists, padded to their length and ragged."""
        sizes = {name: self.dtype(name).itemsize for name in names}
        padded = sum(size * self.lists[name] * num_rows for name, size in sizes.items())
        return padded, sum(8 * num_rows + size * num_values[name] for name, size in sizes.items())

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """The type of a list's values."""
        return np.dtype("float32" if name in self.floats else "int64" if name in self.wide_lists else "int32")


def _fits_int32(spec: FeatureSpec, name: str) -> bool:
    unresolved = spec.features[name].cardinality == "auto"
    return spec.storage_dtype(name).itemsize < 4 if unresolved else spec.num_ids(name) <= 2**31


@dataclass(frozen=True)
class Rows:
    """N rows, from which any can be taken as a batch."""

    layout: Layout
    words: Tensor  # (N, W) int32
    wide: Tensor  # (N, wide) int64
    padded: Mapping[str, Tensor]  # (N, L) each
    ragged: Sequence[Sequence[RaggedLists]]  # those of one sequence come equally wide

    @property
    def device(self) -> torch.device:
        """Where the rows are held."""
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = sum(held.nbytes for held in (self.words, self.wide, *self.padded.values()))
        return tensors + sum(lists.nbytes for together in self.ragged for lists in together)

    def to(self, device: torch.device) -> Rows:
        """The same rows on another device."""
        padded = {name: held.to(device) for name, held in self.padded.items()}
        ragged = [[held.to(device) for held in together] for together in self.ragged]
        return Rows(self.layout, self.words.to(device), self.wide.to(device), padded, ragged)

    def take(self, rows: Tensor | slice, device: torch.device, *, on_host: Tensor | None = None) -> Batch:
        """Some rows, by index or as views of a slice, on `device`; `on_host`: the index without a wait."""
        batch: Batch = {}
        for matrix, names in ((self.words, self.layout.words), (self.wide, self.layout.wide)):
            if names:
                picked = _moved(_picked(matrix, rows), device).t()
                # On a GPU one transposition costs less than a launch for each column that a model makes contiguous; on
                # a CPU a strided view costs nothing until it is used.
                columns = picked.contiguous() if picked.is_cuda else picked
                batch |= zip(names, columns, strict=True)
        for name, held in self.padded.items():
            batch[name] = _moved(_picked(held, rows), device)
        for together in self.ragged:
            sizes = [lists.sizes(rows if on_host is None else on_host) for lists in together]
            longest = max(*(most for _, most in sizes), together[0].least_width)
            width = self.layout.lists if self.layout.fixed_length else longest
            for lists, (total, _) in zip(together, sizes, strict=True):
                batch |= {name: _moved(values, device) for name, values in lists.take(rows, total, width)}
        return {name: x.view(torch.float32) if name in self.layout.floats else x for name, x in batch.items()}


@dataclass(frozen=True)
class RaggedLists:
    """Lists of N rows without padding, several features that have equally many values in each row."""

    values: Mapping[tuple[str, ...], Tensor]  # features of one width -> (T, W) int32 or int64, side by side
    offsets: Tensor  # (N + 1,)
    least_width: int = 0  # of a batch: 1 for torch's bags of ids, which need a place
    lengths: Tensor | None = None  # (N,) on the host if the rest is on a GPU, to avoid waiting for it

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.offsets.nbytes + sum(tensor.nbytes for tensor in self.values.values())

    def to(self, device: torch.device) -> RaggedLists:
        """The same lists on another device."""
        values = {names: tensor.to(device) for names, tensor in self.values.items()}
        return RaggedLists(values, self.offsets.to(device), self.least_width, self.offsets.diff().to(torch.int32))

    def sizes(self, rows: Tensor | slice) -> tuple[int, int]:
        """The number of values of some rows together, and the largest number of one row."""
        if self.lengths is not None:
            lengths = _picked(self.lengths, rows)
        else:
            lengths = _picked(self.offsets[1:], rows) - _picked(self.offsets[:-1], rows)
        return int(lengths.sum()), int(lengths.max())

    def take(self, rows: Tensor | slice, total: int, width: int | Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Each feature's lists of some rows with `total` values, (B, width), padded with 0.

        Places are computed once for all features. Only zeros and the rows' own values are moved.
        """
        starts, stops = _picked(self.offsets[:-1], rows), _picked(self.offsets[1:], rows)
        lengths = stops - starts
        firsts = lengths.cumsum(0) - lengths  # in a batch without padding
        numbers = torch.arange(total, device=lengths.device)
        from_ = numbers + torch.repeat_interleave(starts - firsts, lengths, output_size=total)  # (P,)
        numbers -= torch.repeat_interleave(firsts, lengths, output_size=total)  # (P,) places in a row
        rows_of = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=total)
        for names, values in self.values.items():
            picked = values.index_select(0, from_)
            for column, name in enumerate(names):
                wide = width if isinstance(width, int) else width[name]
                lists = values.new_zeros(len(lengths) * wide)
                yield name, lists.scatter_(0, rows_of * wide + numbers, picked[:, column]).view(len(lengths), wide)


def _picked(matrix: Tensor, rows: Tensor | slice) -> Tensor:
    return matrix[rows] if isinstance(rows, slice) else matrix.index_select(0, rows)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On `device`; copied from pinned memory, so that the CPU does not wait."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


class Filling:
    """Rows that are being read, block by block."""

    def __init__(self, layout: Layout, num_rows: int) -> None:
        self._layout = layout
        self._filled = 0
        self._words = np.empty((num_rows, len(layout.words)), np.int32)
        self._wide = np.empty((num_rows, len(layout.wide)), np.int64)
        self._lists: dict[str, list[Ragged]] = {name: [] for name in layout.lists}

    def append(self, columns: Columns) -> None:
        """The next rows."""
        num_rows = len(next(iter(columns.values())))
        part = slice(self._filled, self._filled + num_rows)
        for matrix, names in ((self._words, self._layout.words), (self._wide, self._layout.wide)):
            for place, name in enumerate(names):
                column = columns[name]
                assert not isinstance(column, Ragged)
                if name in self._layout.floats:
                    matrix.view(np.float32)[part, place] = column
                else:
                    matrix[part, place] = column
        for together in self._layout.together:
            for name, lists in self._ended_by_ids({name: _lists(columns[name]) for name in together}).items():
                values = lists.values.astype(self._layout.dtype(name), copy=False)
                self._lists[name].append(Ragged(values, lists.offsets))
        self._filled += num_rows

    def _ended_by_ids(self, lists: Mapping[str, Ragged]) -> dict[str, Ragged]:
        """The lists, a history's numbers cut to its ids: files with rows of one length hold zeros behind them."""
        of_ids = [held.lengths for name, held in lists.items() if name not in self._layout.floats]
        if not of_ids or len(of_ids) == len(lists):
            return dict(lists)
        ends = np.maximum.reduce(of_ids)
        return {
            name: held if name not in self._layout.floats or (held.lengths <= ends).all() else _cut(held, ends)
            for name, held in lists.items()
        }

    def finish(self) -> Rows:
        """The rows, after the last block."""
        assert self._filled == len(self._words), "the blocks hold as many rows as their readers said"
        padded: dict[str, Tensor] = {}
        ragged: list[list[RaggedLists]] = []
        for together in self._layout.together:
            if self._is_ragged(together):
                ragged.append(list(self._side_by_side(together)))
            else:
                padded |= {name: torch.from_numpy(self._rectangle(name)) for name in together}
        return Rows(self._layout, torch.from_numpy(self._words), torch.from_numpy(self._wide), padded, ragged)

    def _is_ragged(self, names: Sequence[str]) -> bool:
        """Whether some lists take at most half the bytes without padding."""
        counts = {name: sum(len(part.values) for part in self._lists[name]) for name in names}
        padded, ragged = self._layout.bytes_of(names, self._filled, counts)
        return 2 * ragged <= padded

    def _rectangle(self, name: str) -> NDArray[np.generic]:
        """(N, L)."""
        length, first = self._layout.lists[name], 0
        rows = np.zeros((self._filled, length), self._layout.dtype(name))
        for part in self._lists.pop(name):
            rows[first : first + len(part)][np.arange(length) < part.lengths[:, None]] = part.values
            first += len(part)
        return rows

    def _side_by_side(self, names: Sequence[str]) -> Iterator[RaggedLists]:
        """Ragged lists, grouped if they have equally many values in each row."""
        alike: list[tuple[NDArray[np.int64], list[str]]] = []
        for name in names:
            ends = np.concatenate([np.zeros(1, np.int64), *(part.lengths for part in self._lists[name])]).cumsum()
            found = next((held for offsets, held in alike if np.array_equal(offsets, ends)), None)
            if found is None:
                alike.append((ends, [name]))
            else:
                found.append(name)
        for offsets, held in alike:
            wide = [name for name in held if name in self._layout.wide_lists]
            words = [name for name in held if name not in self._layout.wide_lists]
            values = {
                tuple(part): torch.from_numpy(self._matrix(part, int(offsets[-1]), dtype))
                for part, dtype in ((words, np.int32), (wide, np.int64))
                if part
            }
            yield RaggedLists(values, torch.from_numpy(offsets), least_width=int(held[0] not in self._layout.history))

    def _matrix(self, names: Sequence[str], total: int, dtype: type[np.int32 | np.int64]) -> NDArray[np.integer]:
        """(T, W): a column for each feature, numbers as their bits."""
        matrix = np.empty((total, len(names)), dtype)
        for column, name in enumerate(names):
            first = 0
            for part in self._lists.pop(name):
                matrix[first : first + len(part.values), column] = part.values.view(dtype)
                first += len(part.values)
        return matrix


def _lists(column: Column) -> Ragged:
    assert isinstance(column, Ragged)
    return column


def _cut(lists: Ragged, lengths: NDArray[np.int64]) -> Ragged:
    """At most so many first values of each row."""
    within = np.arange(len(lists.values)) - np.repeat(lists.offsets[:-1], lists.lengths)
    return lists.where(within < np.repeat(lengths, lists.lengths))
