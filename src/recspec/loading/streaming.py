"""Rows streamed from files in lanes, of which each rank reads its own; and rows drawn by their weights.

An epoch has as many draws as there are rows. Rows are put in random order and drawn at even distances along their
weights (systematic resampling), so row i with w_i = weight / mean weight is drawn floor(w_i) or ceil(w_i) times, w_i on
average; with equal weights each row is drawn once. Drawing each row independently would add Poisson noise of variance
w_i, and miss 37 % of equal rows in an epoch.

The blocks of an epoch are put in an order of (seed, epoch), and their rows are dealt to the lanes: the first stretch of
rows to the first lane, and so on. Within a lane as many blocks as may be held are read at a time, and their rows are
shuffled. Each lane has an equal part of every batch, so all lanes have equally many batches and each row is dealt once.

A run on N ranks has N lanes, so a rank reads its lane alone, and of a block at its end the rows of the lane. A run that
continues within an epoch keeps that epoch's lanes, so its batches are the same on any number of ranks: a rank then
reads each lane that its part of a batch overlaps, and holds a group of blocks of each.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import DataError
from recspec.base.prefetch import prefetched
from recspec.data.storage import Ragged
from recspec.loading.blocks import Block, RowSource, WantedRows, grouped, mixed_seed
from recspec.loading.ranks import Ranks
from recspec.loading.rows import Filling, Layout, Rows
from recspec.models.layers import Batch, concatenate


class RowWeights:
    """The weights of the rows of some blocks, read when they are needed: 4 bytes a row, one column."""

    def __init__(self, name: str, wanted: WantedRows, blocks: Sequence[Block]) -> None:
        self._name, self._wanted, self._blocks = name, wanted, blocks

    def of(self, blocks: Sequence[Block]) -> NDArray[np.float32]:
        """The weights of all wanted rows of some blocks. Raises DataError unless all are above 0 and finite."""
        return np.concatenate([np.zeros(0, np.float32), *(self._read(block) for block in blocks)])

    def _read(self, block: Block) -> NDArray[np.float32]:
        weights = self._wanted.read(block)[self._name]
        assert not isinstance(weights, Ragged)
        single: NDArray[np.float32] = weights.astype(np.float32)
        wrong = ~(np.isfinite(single) & (single > 0))
        if wrong.any():
            raise DataError(
                f"feature '{self._name}', the weight of events: holds {single[wrong][0]:g}; expected "
                "numbers above 0 in every row (train.event_weights=ignore trains without)"
            )
        return single

    @cached_property
    def _sums(self) -> dict[Block, float]:
        return {block: float(self._read(block).sum(dtype=np.float64)) for block in self._blocks}

    def ends(self, blocks: Sequence[Block], start: float) -> NDArray[np.int64]:
        """The number of draws before each of all blocks in some order, and in all; `start` in [0, 1) is the first."""
        sums = np.array([0.0, *(self._sums[block] for block in blocks)]).cumsum()
        rows = sum(block.num_rows for block in blocks)
        ends: NDArray[np.int64] = np.ceil(sums * (rows / sums[-1]) - start).astype(np.int64)
        ends[-1] = rows
        return ends


def draw_rows(weights: NDArray[np.float32], count: int, seed: int) -> Tensor:
    """The rows (count,) of an epoch or a part of it, in random order; equal seeds give equal rows."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.int32 if len(weights) < 2**31 else torch.int64
    mixed = torch.randperm(len(weights), generator=generator, dtype=dtype)
    along = torch.from_numpy(weights).double()[mixed.long()].cumsum(0)
    along *= count / along[-1]
    start = torch.rand((), generator=generator, dtype=torch.float64)
    ends = (along - start).ceil_().long()
    ends[-1] = count
    times = ends.diff(prepend=ends.new_zeros(1))
    drawn = torch.repeat_interleave(mixed, times, output_size=count)
    return drawn[torch.randperm(count, generator=generator)]


def first_draw(seed: int, epoch: int) -> float:
    """Where the draws of a streamed epoch start, in [0, 1)."""
    return float(np.random.default_rng(mixed_seed(seed, epoch, 0)).random())


@dataclass(frozen=True)
class Deal:
    """An epoch's rows over lanes: rows [start, start + before(all batches)) of the epoch's order are a lane's."""

    num_rows: int
    batch_size: int
    lanes: int

    def part(self, lane: int, batch: int) -> slice:
        """The lane's rows of a batch, counted from the batch's first row."""
        return self._share(lane, min(self.batch_size, self.num_rows - batch * self.batch_size))

    def before(self, lane: int, batch: int) -> int:
        """The lane's rows in all batches before a batch."""
        whole, rest = divmod(self.num_rows, self.batch_size)
        return min(batch, whole) * self._count(lane, self.batch_size) + (batch > whole) * self._count(lane, rest)

    def rows(self, lane: int) -> slice:
        """The lane's rows, in the epoch's order of blocks."""
        batches = -(-self.num_rows // self.batch_size)
        start = sum(self.before(other, batches) for other in range(lane))
        return slice(start, start + self.before(lane, batches))

    def _share(self, lane: int, rows: int) -> slice:
        return Ranks(lane, self.lanes).share(rows)

    def _count(self, lane: int, rows: int) -> int:
        return len(range(rows)[self._share(lane, rows)])


@dataclass(frozen=True)
class Cut:
    """Rows [first, stop) of a block in the epoch's order, or of its `draws` if rows are drawn by weight."""

    place: int
    block: Block
    draws: int
    first: int
    stop: int


@dataclass(frozen=True)
class Stream:
    """Blocks of rows that are read in groups, each of at most `group_rows` rows."""

    source: RowSource
    blocks: Sequence[Block]
    layout: Layout
    weights: RowWeights | None
    group_rows: int
    seed: int
    shuffle: bool

    def batches(self, deal: Deal, ranks: Ranks, epoch: int, start: int) -> Generator[Batch]:
        """A rank's part of every batch from `start` on; without a row in it, one row of another batch."""
        with ExitStack() as opened:
            lanes: dict[int, _Lane] = {}
            for number in range(start, -(-deal.num_rows // deal.batch_size)):
                total = min(deal.batch_size, deal.num_rows - number * deal.batch_size)
                own = ranks.share(total)
                parts: list[Batch] = []
                for lane in range(deal.lanes):
                    there = deal.part(lane, number)
                    first, stop = max(own.start, there.start), min(own.stop, there.stop)
                    if first >= stop:
                        continue
                    before = deal.before(lane, number) - there.start
                    if lane not in lanes:
                        groups = self._groups(deal, lane, epoch, before + first)
                        lanes[lane] = _Lane(opened.enter_context(closing(prefetched(groups, 1))))
                    parts += lanes[lane].take(before + first, before + stop, ranks.device)
                yield _joined(parts) if parts else self._filler(ranks.device)

    def _filler(self, device: torch.device) -> Batch:
        block = next(block for block in self.blocks if block.num_rows).part(0, 1)
        return self._read([block]).take(slice(0, 1), device)

    def _groups(self, deal: Deal, lane: int, epoch: int, start: int) -> Generator[Group]:
        """The groups of a lane in order, without those that end before its row `start`."""
        position = 0
        cuts = self._cuts(deal.rows(lane), epoch)
        held = grouped([cut.block for cut in cuts], self.group_rows)
        for number, blocks in enumerate(held):
            own, cuts = cuts[: len(blocks)], cuts[len(blocks) :]
            count = sum(cut.stop - cut.first for cut in own)
            if count and position + count > start:
                seed = mixed_seed(self.seed, epoch, number + (lane << 32))
                yield Group(position, self._read(blocks), self._order(own, epoch, seed))
            position += count

    def _cuts(self, rows: slice, epoch: int) -> list[Cut]:
        """The blocks that hold some rows of the epoch's order, or parts of them."""
        places = list(range(len(self.blocks)))
        if self.shuffle:
            places = np.random.default_rng(mixed_seed(self.seed, epoch)).permutation(len(places)).tolist()
        if self.weights is not None:
            ends = self.weights.ends([self.blocks[place] for place in places], first_draw(self.seed, epoch))
        else:
            ends = np.array([0, *(self.blocks[place].num_rows for place in places)]).cumsum()
        cuts = []
        for number in range(int(np.searchsorted(ends[1:], rows.start, side="right")), len(places)):
            begin, end = int(ends[number]), int(ends[number + 1])
            if begin >= rows.stop:
                break
            first, stop = max(rows.start, begin) - begin, min(rows.stop, end) - begin
            block = self.blocks[places[number]]
            # A row may be drawn at any place of its block's draws, so the block is read whole.
            part = block if self.weights is not None else block.part(first, stop)
            cuts.append(Cut(places[number], part, end - begin, first, stop))
        return cuts

    def _order(self, cuts: Sequence[Cut], epoch: int, seed: int) -> Tensor:
        """The order of the rows of a group that was read."""
        if self.weights is None:
            count = sum(cut.stop - cut.first for cut in cuts)
            return _permuted(count, seed) if self.shuffle else torch.arange(count)
        drawn, first = [], 0
        for cut in cuts:
            if cut.draws:
                own = mixed_seed(self.seed, epoch, 0, cut.place)
                drawn.append(draw_rows(self.weights.of([cut.block]), cut.draws, own)[cut.first : cut.stop] + first)
            first += cut.block.num_rows
        rows = torch.cat(drawn)
        return rows[_permuted(len(rows), seed)]

    def _read(self, blocks: Sequence[Block]) -> Rows:
        rows = Filling(self.layout, sum(block.num_rows for block in blocks))
        for block in blocks:
            rows.append(self.source.read(block))
        return rows.finish()


@dataclass(frozen=True)
class Group:
    """Rows of a lane from its row `first` on, and the order in which they follow."""

    first: int
    rows: Rows
    order: Tensor


class _Lane:
    """A lane that is read from front to back."""

    def __init__(self, groups: Generator[Group]) -> None:
        self._groups, self._group = groups, next(groups)

    def take(self, first: int, stop: int, device: torch.device) -> list[Batch]:
        """Rows [first, stop) of the lane, in as many parts as groups hold them."""
        parts = []
        while first < stop:
            group = self._group
            end = group.first + len(group.order)
            if first >= end:
                self._group = next(self._groups)
                continue
            upto = min(stop, end)
            parts.append(group.rows.take(group.order[first - group.first : upto - group.first], device))
            first = upto
        return parts


def _permuted(num_rows: int, seed: int) -> Tensor:
    """Rows in random order, as int64."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))


def _joined(parts: Sequence[Batch]) -> Batch:
    """The rows of all parts, lists as wide as the widest part's."""
    if len(parts) == 1:
        return parts[0]
    widths = {name: max(part[name].shape[1] for part in parts) for name, rows in parts[0].items() if rows.dim() > 1}
    return concatenate(
        {
            name: F.pad(rows, (0, widths[name] - rows.shape[1])) if name in widths else rows
            for name, rows in part.items()
        }
        for part in parts
    )
