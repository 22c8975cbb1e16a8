"""Splits -> batches: which rows, in which order, in memory or streamed.

Batch k of an epoch is rows [k * batch_size, (k + 1) * batch_size) of an order that depends on seed and epoch alone, and
each rank gets its contiguous share of it. So no row is lost or seen twice, the last batch may be smaller, and a run on
two ranks sees the batches of a run on one.

In memory, all scalars of a row lie side by side, so that choosing rows at random is one `index_select` with one cache
miss a row: 20 million rows/s of 40 columns on one core, against 4 with an array a column. Streamed, the order is that
of shuffled blocks: as many as a quarter of the budget holds are read, their rows are shuffled among each other, and
the next are read meanwhile. Every rank reads every block, and takes its own rows.

Lists that are mostly padding, as histories are, are held without it, and come as wide as the longest of the batch: a
rank's share may be narrower than another's. What stands in a row is the same whatever is beside it. A history's lists
come equally wide, value j of each being event j; those of equal lengths lie side by side too.

Shapes: N rows held; B rows of a batch; W scalar features, or lists of equal lengths; L a list feature's length; T
values of ragged lists in all; P of those in a batch.
"""

from __future__ import annotations

import copy
import math
import queue
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recspec.batch import Batch, concatenate
from recspec.distributed import Ranks
from recspec.feature_spec import FeatureSpec
from recspec.storage import Column, Columns, Ragged, open_split

BLOCK_ROWS = 16_384  # rows of a streamed block where files can be cut anywhere
MEMORY_BUDGET = 2 << 30  # bytes

_QUEUED_BATCHES = 4
_T = TypeVar("_T")


@dataclass(frozen=True)
class Share:
    """One rank's part of a global batch."""

    batch: Batch
    num_rows: int
    """This rank's rows. With 0, where a batch has fewer rows than there are ranks, `batch` is one filler row."""
    total_rows: int
    """Rows of the global batch."""
    first_row: int
    """Where this rank's rows begin in the global batch."""


@dataclass(frozen=True)
class Part:
    """Some rows of a split: a share of them held out, or all others. Which ones depends on the seed alone."""

    share: float
    held_out: bool
    seed: int = 0

    def mask(self, reader: int, first: int, last: int) -> NDArray[np.bool_]:
        """Whether each of the rows [first, last) belongs to the part: a hash of its number, as a fraction of 2^64."""
        bits = np.arange(first, last, dtype=np.uint64) + np.uint64(_mixed(self.seed, reader))
        with np.errstate(over="ignore"):  # splitmix64, which wraps around
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        chosen: NDArray[np.bool_] = (bits ^ (bits >> np.uint64(31))) < np.uint64(int(self.share * 2**64))
        return chosen if self.held_out else ~chosen


class Loader:
    """Batches of one or several splits, of all rows or of a `part`.

    Ids come as int32 (int64 where a vocabulary needs it), everything else as float32; lists are padded with 0 to
    their length, or to the longest of the batch where less than half of that is values. With `fixed_length` all come
    as long as the specification says, for what is compiled for one shape. `mode` is `memory` when the rows fit the
    budget (bytes), else `stream`; a streamed order also depends on the budget, which says how many rows are shuffled
    together.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        splits: str | Sequence[str],
        *,
        batch_size: int,
        features: Sequence[str] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        memory_budget: int = MEMORY_BUDGET,
        device: torch.device | None = None,
        positives_only: bool = False,
        part: Part | None = None,
        fixed_length: bool = False,
    ) -> None:
        names = (splits,) if isinstance(splits, str) else tuple(splits)
        self.features = tuple(features if features is not None else spec.columns(names[0]))
        self.batch_size = batch_size
        self.device = device or torch.device("cpu")
        self._spec, self._seed, self._shuffle = spec, seed, shuffle
        self._ranks = Ranks(rank, world_size, self.device)
        self._label = spec.label if positives_only else None
        self._part = part
        self._fixed_length = fixed_length
        read = dict.fromkeys((*self.features, *([spec.label] if positives_only else [])))
        self._readers = [open_split(spec, name, tuple(read)) for name in names]
        self._blocks = self._cut(BLOCK_ROWS)
        self.num_rows = sum(block.num_rows for block in self._blocks)
        self._layout, self.mode, nbytes = self._choose(memory_budget)
        self._group_rows = max(1, memory_budget // 4 * self.num_rows // max(nbytes, 1))
        self._resident: _Rows | None = None
        self._makes_orders_ahead = self.device.type == "cuda"
        self._next_order: dict[int, Future[Tensor]] = {}
        if self.mode == "stream" and self._group_rows < 16 * BLOCK_ROWS:  # few blocks a group would mix rows badly
            self._blocks = self._cut(max(1, self._group_rows // 16))

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the last one of which may be smaller."""
        return math.ceil(self.num_rows / self.batch_size)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Share]:
        """This rank's share of every batch from number `start` on; batches before it are not read."""
        if self.mode == "stream":
            return self._ahead(self._from_groups(epoch, start))
        if self._resident is None:
            self._resident = self._load()
        batches = self._from_memory(self._resident, epoch, start)
        return batches if self._resident.device.type == self.device.type else self._ahead(batches)

    @property
    def held(self) -> str:
        """Where the rows are held, for people; known once the first batch has been asked for."""
        if self.mode == "stream":
            return "streamed from files"
        if self._resident is None:
            return "held in memory"
        return f"held on {self._resident.device}, {self._resident.nbytes:,} bytes"

    def resized(self, batch_size: int) -> Loader:
        """The same loader with another number of rows a batch."""
        other = copy.copy(self)
        other.batch_size = batch_size
        return other

    def _ahead(self, batches: Generator[Share]) -> Iterator[Share]:
        """The batches, made by a thread; on a GPU copied beside what is being computed."""
        if self.device.type != "cuda":
            return _prefetched(batches, _QUEUED_BATCHES)
        return _arriving(batches, self.device)

    # --- what is read, and how it is held ------------------------------------------------------------------------

    def _cut(self, rows: int) -> list[_Block]:
        """The blocks of all splits, each with how many of its rows are wanted."""
        blocks = []
        for number, reader in enumerate(self._readers):
            cuts = reader.blocks(rows).tolist()
            kept = self._count_kept(number, cuts) if self._chooses else np.diff(cuts)
            blocks += [
                _Block(number, first, last, int(count))
                for (first, last), count in zip(pairwise(cuts), kept, strict=True)
            ]
        return blocks

    @property
    def _chooses(self) -> bool:
        return self._label is not None or self._part is not None

    def _count_kept(self, reader: int, cuts: list[int]) -> NDArray[np.int64]:
        """Wanted rows of each block: one pass over the label where it decides."""
        labels = open_split(self._spec, self._readers[reader].split, [self._label]) if self._label else None
        return np.array(
            [self._kept(reader, a, b, labels.read(a, b) if labels else {}).sum() for a, b in pairwise(cuts)]
        )

    def _kept(self, reader: int, first: int, last: int, columns: Columns) -> NDArray[np.bool_]:
        """Which rows [first, last) of a split are wanted."""
        keep = np.ones(last - first, dtype=bool)
        if self._label is not None:
            keep &= _positive(columns, self._label)
        if self._part is not None:
            keep &= self._part.mask(reader, first, last)
        return keep

    def _choose(self, budget: int) -> tuple[_Layout, Literal["memory", "stream"], int]:
        """How rows are held, whether all of them are, and the bytes that all take."""
        layout = _Layout.of(self._spec, self.features, fixed_length=self._fixed_length)
        counts = [reader.num_values for reader in self._readers]
        nbytes = layout.nbytes(self.num_rows, {name: sum(count[name] for count in counts) for name in layout.lists})
        return layout, "memory" if nbytes <= budget else "stream", nbytes

    def _read(self, block: _Block) -> Columns:
        columns = self._readers[block.reader].read(block.first, block.last)
        if not self._chooses:
            return columns
        keep = self._kept(block.reader, block.first, block.last, columns)
        return {name: _where(columns[name], keep) for name in self.features}

    # --- in memory -----------------------------------------------------------------------------------------------

    def _from_memory(self, held: _Rows, epoch: int, start: int) -> Generator[Share]:
        order = self._order_in_time(epoch) if self._shuffle else None
        there = order.to(held.device) if order is not None else None
        for number in range(start, self.num_batches):
            first, rows = self._share(number)
            part = slice(first, first + max(rows, 1))
            if order is None or there is None:
                yield self._shared(number, held.take(part, self.device))
            else:
                yield self._shared(number, held.take(there[part], self.device, on_host=order[part]))

    def _load(self) -> _Rows:
        """All rows, on the device if it has room for them and as much again."""
        rows = _Rows.allocate(self._layout, self.num_rows)
        for block in self._blocks:
            rows.append(self._read(block))
        held = rows.finish()
        if self.device.type == "cuda" and held.nbytes < torch.cuda.mem_get_info(self.device)[0] // 2:
            return held.to(self.device)
        return held

    def _order_in_time(self, epoch: int) -> Tensor:
        """The order of an epoch. For a GPU the next one's is made meanwhile: at 100 million samples/s an epoch of 20
        million interactions takes a second, and their order half of one."""
        if not self._makes_orders_ahead:
            return self._order(epoch)
        made = self._next_order.pop(epoch, None)
        order = self._order(epoch) if made is None else made.result()
        self._next_order.clear()
        worker = ThreadPoolExecutor(1, "recspec-order")
        self._next_order[epoch + 1] = worker.submit(self._order, epoch + 1)
        worker.shutdown(wait=False)
        return order

    def _order(self, epoch: int) -> Tensor:
        dtype = torch.int32 if self.num_rows < 2**31 else torch.int64
        generator = torch.Generator().manual_seed(_mixed(self._seed, epoch))
        return torch.randperm(self.num_rows, generator=generator, dtype=dtype)

    def _share(self, number: int) -> tuple[int, int]:
        """This rank's first row of a batch in the order of the epoch, and how many rows it has.

        A rank without rows points at the last row of the batch, its filler.
        """
        total = self._total(number)
        share = self._ranks.share(total)
        return number * self.batch_size + min(share.start, total - 1), share.stop - share.start

    def _total(self, number: int) -> int:
        return min(self.batch_size, self.num_rows - number * self.batch_size)

    def _shared(self, number: int, batch: Batch) -> Share:
        total = self._total(number)
        share = self._ranks.share(total)
        batch = {name: batch[name] for name in self.features}
        return Share(batch, share.stop - share.start, total, share.start)

    # --- streamed ------------------------------------------------------------------------------------------------

    def _groups(self, epoch: int, start: int) -> Generator[_Group]:
        """Blocks in the order of the epoch, as many at a time as may be held; before batch `start` none is read."""
        order = np.arange(len(self._blocks))
        if self._shuffle:
            order = np.random.default_rng(_mixed(self._seed, epoch)).permutation(order)
        position, number = 0, 0
        for blocks in _filled([self._blocks[i] for i in order], self._group_rows):
            count = sum(block.num_rows for block in blocks)
            if position + count > start * self.batch_size:
                rows = _Rows.allocate(self._layout, count)
                for block in blocks:
                    rows.append(self._read(block))
                generator = torch.Generator().manual_seed(_mixed(self._seed, epoch, number))
                shuffled = torch.randperm(count, generator=generator) if self._shuffle else torch.arange(count)
                yield _Group(position, rows.finish(), shuffled)
            position, number = position + count, number + 1

    def _from_groups(self, epoch: int, start: int) -> Generator[Share]:
        number, parts = start, list[Batch]()
        with closing(_prefetched(self._groups(epoch, start), 1)) as groups:
            for group in groups:
                while number < self.num_batches:
                    first, rows = self._share(number)
                    part = group.order[max(first - group.first, 0) : max(first + max(rows, 1) - group.first, 0)]
                    if len(part):
                        parts.append(group.rows.take(part, self.device))
                    if number * self.batch_size + self._total(number) > group.last:
                        break  # the rest of this batch is in the next group
                    yield self._shared(number, _joined(parts))
                    number, parts = number + 1, []


@dataclass(frozen=True)
class _Block:
    """Rows [first, last) of a split, of which `num_rows` are wanted."""

    reader: int
    first: int
    last: int
    num_rows: int


@dataclass(frozen=True)
class _Group:
    """Blocks held together: from which place of the epoch's order on, their rows, and the order of those."""

    first: int
    rows: _Rows
    order: Tensor

    @property
    def last(self) -> int:
        return self.first + len(self.order)


def _filled(blocks: Sequence[_Block], rows: int) -> Iterator[list[_Block]]:
    """Consecutive blocks, at least one and else no more than hold `rows` rows."""
    group: list[_Block] = []
    held = 0
    for block in blocks:
        if group and held + block.num_rows > rows:
            yield group
            group, held = [], 0
        group.append(block)
        held += block.num_rows
    if group:
        yield group


def _mixed(*numbers: int) -> int:
    """A seed that differs wherever one of the numbers does."""
    return int(np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(1, np.uint64)[0] >> 1)


def _positive(columns: Columns, label: str) -> NDArray[np.bool_]:
    values = columns[label]
    assert not isinstance(values, Ragged)
    positive: NDArray[np.bool_] = np.greater(values, 0)
    return positive


def _where(column: NDArray[np.generic] | Ragged, keep: NDArray[np.bool_]) -> NDArray[np.generic] | Ragged:
    """The marked rows."""
    if not isinstance(column, Ragged):
        return column[keep]
    lengths = column.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths[keep])]).astype(np.int64)
    return Ragged(column.values[np.repeat(keep, lengths)], offsets)


def _joined(parts: Sequence[Batch]) -> Batch:
    """The rows of all parts, lists as wide as the widest part's."""
    if len(parts) == 1:
        return parts[0]
    widths = {name: max(part[name].shape[1] for part in parts) for name, rows in parts[0].items() if rows.dim() > 1}
    return concatenate(
        {
            name: F.pad(rows, (0, widths.get(name, 0) - rows.shape[1])) if rows.dim() > 1 else rows
            for name, rows in p.items()
        }
        for p in parts
    )


# --- rows held in memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """Where the features of a row are held: scalars side by side in one matrix a width, lists apart."""

    words: tuple[str, ...]  # int32 ids, and float32 numbers as their bits
    wide: tuple[str, ...]  # int64 ids
    lists: Mapping[str, int]  # name -> length
    floats: frozenset[str]
    wide_lists: frozenset[str]
    history: tuple[str, ...]  # lists of events
    fixed_length: bool

    @classmethod
    def of(cls, spec: FeatureSpec, features: Sequence[str], *, fixed_length: bool = False) -> _Layout:
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
        """The lists, those of one tuple held alike and equally wide in a batch."""
        if self.history:
            yield self.history
        yield from ((name,) for name in self.lists if name not in self.history)

    def nbytes(self, num_rows: int, num_values: Mapping[str, int]) -> int:
        """Of so many rows, lists held the smaller way; `num_values` counts what each list feature holds."""
        lists = sum(min(self.bytes_of(names, num_rows, num_values)) for names in self.together)
        return max(1, (4 * len(self.words) + 8 * len(self.wide)) * num_rows + lists)

    def bytes_of(self, names: Sequence[str], num_rows: int, num_values: Mapping[str, int]) -> tuple[int, int]:
        """Of some lists, padded to their length and ragged."""
        sizes = {name: self.dtype(name).itemsize for name in names}
        padded = sum(size * self.lists[name] * num_rows for name, size in sizes.items())
        return padded, sum(8 * num_rows + size * num_values[name] for name, size in sizes.items())

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """Of a list's values."""
        return np.dtype("float32" if name in self.floats else "int64" if name in self.wide_lists else "int32")


def _fits_int32(spec: FeatureSpec, name: str) -> bool:
    unresolved = spec.features[name].cardinality == "auto"
    return spec.storage_dtype(name).itemsize < 4 if unresolved else spec.num_ids(name) <= 2**31


class _Rows:
    """N rows, from which any can be taken as a batch."""

    def __init__(
        self,
        layout: _Layout,
        words: Tensor,
        wide: Tensor,
        padded: Mapping[str, Tensor],
        ragged: Sequence[Sequence[_RaggedLists]],
    ) -> None:
        self._layout = layout
        self._words = words  # (N, W) int32
        self._wide = wide  # (N, wide) int64
        self._padded = padded  # (N, L) each
        self._ragged = ragged  # those of one sequence come equally wide

    @staticmethod
    def allocate(layout: _Layout, num_rows: int) -> _Filling:
        """Room for rows that come block by block."""
        return _Filling(layout, num_rows)

    @property
    def device(self) -> torch.device:
        """Where the rows are held."""
        return self._words.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        scalars = self._words.nbytes + self._wide.nbytes
        lists = sum(tensor.nbytes for tensor in self._padded.values())
        return scalars + lists + sum(held.nbytes for together in self._ragged for held in together)

    def to(self, device: torch.device) -> _Rows:
        """The same rows on another device."""
        padded = {name: held.to(device) for name, held in self._padded.items()}
        ragged = [[held.to(device) for held in together] for together in self._ragged]
        return _Rows(self._layout, self._words.to(device), self._wide.to(device), padded, ragged)

    def take(self, rows: Tensor | slice, device: torch.device, *, on_host: Tensor | None = None) -> Batch:
        """Some rows, by index or as views of a slice, on `device`; `on_host`: the index without a wait."""
        batch: Batch = {}
        for matrix, names in ((self._words, self._layout.words), (self._wide, self._layout.wide)):
            if names:
                batch |= self._columns(_moved(_picked(matrix, rows), device), names)
        for name, held in self._padded.items():
            batch[name] = _moved(_picked(held, rows), device)
        for together in self._ragged:
            sizes = [lists.sizes(rows if on_host is None else on_host) for lists in together]
            longest = max(*(most for _, most in sizes), together[0].least_width)
            width = self._layout.lists if self._layout.fixed_length else longest
            for lists, (total, _) in zip(together, sizes, strict=True):
                for name, values in lists.take(rows, total, width):
                    moved = _moved(values, device)
                    batch[name] = moved.view(torch.float32) if name in self._layout.floats else moved
        return batch

    def _columns(self, picked: Tensor, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        # On a GPU one transposition costs less than a launch for each column that a model makes contiguous; on a CPU
        # a strided view costs nothing until it is used.
        columns = picked.t().contiguous() if picked.is_cuda else picked.t()
        for name, column in zip(names, columns, strict=True):
            yield name, column.view(torch.float32) if name in self._layout.floats else column


@dataclass(frozen=True)
class _RaggedLists:
    """Lists of N rows without padding, several features that have equally many values in each row."""

    values: Mapping[tuple[str, ...], Tensor]  # features of one width -> (T, W) int32 or int64, side by side
    offsets: Tensor  # (N + 1,)
    least_width: int = 0  # of a batch: 1 where torch's bags of ids take the lists, which know no bag without a place
    lengths: Tensor | None = None  # (N,) on the host where the rest is not, so that a GPU is not waited for

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.offsets.nbytes + sum(tensor.nbytes for tensor in self.values.values())

    def to(self, device: torch.device) -> _RaggedLists:
        """The same lists on another device."""
        values = {names: tensor.to(device) for names, tensor in self.values.items()}
        return _RaggedLists(values, self.offsets.to(device), self.least_width, self.offsets.diff().to(torch.int32))

    def sizes(self, rows: Tensor | slice) -> tuple[int, int]:
        """Of some rows the values in all, and the most of a row."""
        if self.lengths is not None:
            lengths = _picked(self.lengths, rows)
        else:
            lengths = _picked(self.offsets[1:], rows) - _picked(self.offsets[:-1], rows)
        return int(lengths.sum()), int(lengths.max())

    def take(self, rows: Tensor | slice, total: int, width: int | Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Each feature's lists of some rows, (B, width), 0 behind each row's values, of which there are `total`.

        Places are computed once for all features, and what is read and written besides zeros is the rows' own values.
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
    """On `device`; from pinned memory, so that the copy does not keep the CPU waiting."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


class _Filling:
    """Rows that are being read, block by block."""

    def __init__(self, layout: _Layout, num_rows: int) -> None:
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
        """A history's numbers end where its ids do: files whose rows are all of one length hold zeros behind them."""
        of_ids = [held.lengths for name, held in lists.items() if name not in self._layout.floats]
        if not of_ids or len(of_ids) == len(lists):
            return dict(lists)
        ends = np.maximum.reduce(of_ids)
        return {
            name: held if name not in self._layout.floats or (held.lengths <= ends).all() else _cut(held, ends)
            for name, held in lists.items()
        }

    def finish(self) -> _Rows:
        """The rows, once all have come."""
        assert self._filled == len(self._words), "the blocks hold as many rows as their readers said"
        padded: dict[str, Tensor] = {}
        ragged: list[list[_RaggedLists]] = []
        for together in self._layout.together:
            if self._is_ragged(together):
                ragged.append(list(self._side_by_side(together)))
            else:
                padded |= {name: torch.from_numpy(self._rectangle(name)) for name in together}
        return _Rows(self._layout, torch.from_numpy(self._words), torch.from_numpy(self._wide), padded, ragged)

    def _is_ragged(self, names: Sequence[str]) -> bool:
        """Whether some lists take at most half the bytes without their padding."""
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

    def _side_by_side(self, names: Sequence[str]) -> Iterator[_RaggedLists]:
        """Ragged lists, those together that have equally many values in each row."""
        alike: list[tuple[NDArray[np.int64], list[str]]] = []
        for name in names:
            ends = _offsets(self._lists[name])
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
            yield _RaggedLists(values, torch.from_numpy(offsets), least_width=int(held[0] not in self._layout.history))

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


def _offsets(parts: Sequence[Ragged]) -> NDArray[np.int64]:
    """Where each row begins in the values of all parts, and the end of the last."""
    lengths = [part.lengths for part in parts]
    return np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()


def _cut(lists: Ragged, lengths: NDArray[np.int64]) -> Ragged:
    """At most so many first values of each row."""
    within = np.arange(len(lists.values)) - np.repeat(lists.offsets[:-1], lists.lengths)
    return lists.where(within < np.repeat(lengths, lists.lengths))


# --- reading ahead ---------------------------------------------------------------------------------------------------


def _prefetched(source: Generator[_T], depth: int) -> Generator[_T]:
    """The same items, made by a thread that runs at most `depth` items ahead.

    What the source raises is raised here; when the consumer stops early, the thread ends and is waited for.
    """
    items: queue.Queue[_T | _End] = queue.Queue(depth)
    stopped = threading.Event()
    thread = threading.Thread(target=_produce, args=(source, items, stopped), name="recspec-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        thread.join()


def _arriving(batches: Generator[Share], device: torch.device) -> Generator[Share]:
    """The same batches, made by a thread that copies to a GPU on a stream of its own."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def sent() -> Generator[tuple[Share, torch.cuda.Event]]:
        with closing(batches):
            while True:
                with torch.cuda.stream(stream):
                    share = next(batches, None)
                if share is None:
                    return
                yield share, stream.record_event()

    with closing(_prefetched(sent(), _QUEUED_BATCHES)) as arrived:
        for share, copied in arrived:
            here = torch.cuda.current_stream(device)
            here.wait_event(copied)
            for tensor in share.batch.values():
                tensor.record_stream(here)  # its memory belongs to the other stream
            yield share


@dataclass(frozen=True)
class _End:
    """After the last item: what ended the source, if not its own end."""

    error: BaseException | None


def _produce(source: Generator[_T], items: queue.Queue[_T | _End], stopped: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for item in source:
            _put(item, items, stopped)
            if stopped.is_set():
                break
    except BaseException as raised:  # told to the consumer, whatever it is
        error = raised
    finally:
        source.close()
    _put(_End(error), items, stopped)


def _put(item: _T, items: queue.Queue[_T], stopped: threading.Event) -> None:
    """Wait for room, but not for a consumer that has gone."""
    while not stopped.is_set():
        try:
            items.put(item, timeout=0.05)
        except queue.Full:
            continue
        return
