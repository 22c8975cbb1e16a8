"""Rows streamed from files in lanes, of which each rank reads its own.

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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.batch import Batch, concatenate
from recspec.distributed import Ranks
from recspec.loading.blocks import Block, RowSource, grouped, mixed_seed
from recspec.loading.rows import Filling, Layout, Rows
from recspec.loading.weighted import RowWeights, draw_rows, first_draw
from recspec.prefetch import prefetched


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
