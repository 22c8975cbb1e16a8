"""Splits to batches, in memory or streamed.

No row of an epoch is lost or seen twice, its last batch may be smaller, and each rank gets a contiguous share of each
batch. Rows do not depend on each other, but the width of padded lists does: a rank's share may have narrower lists than
another's.

In memory each rank holds all rows, and batch k is rows [k * batch_size, (k + 1) * batch_size) of an order that depends
on seed and epoch alone. So a run on two ranks sees the batches of a run on one, and has its loss curve. Rows that
exceed the budget are streamed in lanes: each rank reads its own part of an epoch's blocks, so a run on two ranks has
other batches than a run on one.

**Weights.** An epoch has as many draws as there are rows. Rows are put in random order and drawn at even distances
along their weights (systematic resampling), so row i with w_i = weight / mean weight is drawn floor(w_i) or ceil(w_i)
times, w_i on average; with equal weights each row is drawn once. Drawing each row independently would add Poisson noise
of variance w_i, and miss 37 % of equal rows in an epoch.

**Lanes.** The blocks of an epoch are put in an order of (seed, epoch), and their rows are dealt to the lanes: the first
stretch of rows to the first lane, and so on. Within a lane as many blocks as may be held are read at a time, and their
rows are shuffled. Each lane has an equal part of every batch, so all lanes have equally many batches and each row is
dealt once. A run on N ranks has N lanes, so a rank reads its lane alone, and of a block at its end the rows of the
lane. A run that continues within an epoch keeps that epoch's lanes, so its batches are the same on any number of ranks:
a rank then reads each lane that its part of a batch overlaps, and holds a group of blocks of each.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import DataError
from recspec.base.prefetch import prefetched
from recspec.data.storage import scalar
from recspec.feature_spec import FeatureSpec
from recspec.loading.blocks import (
    QUEUED_BATCHES,
    Block,
    HeldOutShare,
    NewRowsAndReplay,
    RankBatch,
    RowSource,
    WantedRows,
    copied_to_device,
    grouped,
    mixed_seed,
)
from recspec.loading.ranks import Ranks
from recspec.loading.rows import Filling, Layout, Rows
from recspec.models.layers import Batch, concatenate

BLOCK_ROWS = 16_384  # rows of a streamed block where files can be cut anywhere
MEMORY_BUDGET = 2 << 30  # bytes


class Loader:
    """Batches of one or several splits, of all rows or of a `part`; or of the rows of another source, `rows`.

    Ids come as int32 (int64 if a vocabulary needs it), everything else as float32. Lists are padded with 0 to their
    length, or to the longest of the batch if less than half of that is values; with `fixed_length` always to their
    length, for code that is compiled for one shape. With `weights`, a number of each row, the rows of a shuffled epoch
    are drawn in proportion to it. `mode` is `memory` if the rows fit the budget (bytes), else
    `stream`. A streamed order also depends on the budget, which limits the rows that are shuffled together.
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
        part: HeldOutShare | NewRowsAndReplay | None = None,
        fixed_length: bool = False,
        weights: str | None = None,
        rows: RowSource | None = None,
    ) -> None:
        names = (splits,) if isinstance(splits, str) else tuple(splits)
        self.features = tuple(features if features is not None else spec.columns(names[0]))
        self.batch_size = batch_size
        self.device = device or torch.device("cpu")
        self._seed, self._shuffle = seed, shuffle
        self._ranks = Ranks(rank, world_size, self.device)
        self._reading = partial(WantedRows, spec, names, positives_only=positives_only, part=part)
        self._wanted = rows or self._reading(self.features)
        self._blocks = self._wanted.cut(BLOCK_ROWS)
        self.num_rows = sum(block.num_rows for block in self._blocks)
        self._layout = Layout.of(spec, self.features, fixed_length=fixed_length)
        self.nbytes = self._layout.nbytes(self.num_rows, self._wanted.num_values)
        """Bytes of all rows, if they are held."""
        self.mode: Literal["memory", "stream"] = "memory" if self.nbytes <= memory_budget else "stream"
        self._group_rows = max(1, memory_budget // 4 * self.num_rows // self.nbytes)
        self._resident: Rows | None = None
        self._makes_orders_ahead = self.device.type == "cuda"
        self._next_order: dict[int, Future[Tensor]] = {}
        self._weights: RowWeights | None = None
        self._all_weights: NDArray[np.float32] | None = None  # of rows held in memory
        if self.mode == "stream" and self._group_rows < 16 * BLOCK_ROWS:  # few blocks a group would mix rows badly
            self._blocks = self._wanted.cut(max(1, self._group_rows // 16))
        if weights is not None and shuffle:
            self._weights = RowWeights(weights, self._reading((weights,)), self._blocks)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the last one of which may be smaller."""
        return math.ceil(self.num_rows / self.batch_size)

    def batches(self, epoch: int = 0, start: int = 0, lanes: int | None = None) -> Iterator[RankBatch]:
        """This rank's share of every batch from number `start` on; batches before it are not read.

        A streamed order depends on `lanes`, the number of ranks at the start of the epoch, by default that of now.
        """
        if self.mode == "stream":
            batches = self._streamed(epoch, start, lanes or self._ranks.world_size)
        else:
            self._resident = self._resident or self._load()
            batches = self._from_memory(self._resident, epoch, start)
            if self._resident.device.type == self.device.type:
                return batches
        # A thread makes the batches; on a GPU they are copied while others are used.
        return (
            copied_to_device(batches, self.device)
            if self.device.type == "cuda"
            else prefetched(batches, QUEUED_BATCHES)
        )

    @property
    def held(self) -> str:
        """Where the rows are held, in words; on which device is known after the first batch."""
        if self.mode == "stream":
            return "streamed from files"
        if self._resident is None:
            return "held in memory"
        return f"held on {self._resident.device}, {self._resident.nbytes:,} bytes"

    @property
    def bytes_read(self) -> int:
        """Bytes of the dataset's files that this process has read for batches."""
        return self._wanted.bytes_read

    def resized(self, batch_size: int, *, fixed_length: bool | None = None) -> Loader:
        """The same loader with another number of rows a batch, and with lists of their full length or not, if given."""
        other = copy.copy(self)
        other.batch_size = batch_size
        if fixed_length is not None:
            other._layout, other._resident = replace(self._layout, fixed_length=fixed_length), None
        return other

    def shares_of_positives(self, spec: FeatureSpec) -> NDArray[np.float64]:
        """The shares (items,) of an epoch's rows that are positives of each item.

        They are of the rows that batches hold: those of the `part` alone, and each as often as its weight says.
        """
        columns, found, total = self._reading((spec.item_id, spec.label)), np.zeros(spec.num_ids(spec.item_id)), 0.0
        for block in self._blocks:
            read = columns.read(block)
            weights = np.ones(block.num_rows) if self._weights is None else self._weights.of([block])
            items, positive = scalar(read[spec.item_id]), np.greater(scalar(read[spec.label]), 0)
            found += np.bincount(items[positive], weights[positive], minlength=len(found))
            total += float(weights.sum(dtype=np.float64))
        return found / max(total, np.finfo(np.float64).tiny)

    def _streamed(self, epoch: int, start: int, lanes: int) -> Generator[RankBatch]:
        stream = Stream(
            self._wanted, self._blocks, self._layout, self._weights, self._group_rows, self._seed, self._shuffle
        )
        schedule = LaneSchedule(self.num_rows, self.batch_size, lanes)
        with closing(stream.batches(schedule, self._ranks, epoch, start)) as batches:
            for number, batch in enumerate(batches, start):
                yield self._shared(number, batch)

    # --- in memory -----------------------------------------------------------------------------------------------

    def _from_memory(self, held: Rows, epoch: int, start: int) -> Generator[RankBatch]:
        order = self._order_in_time(epoch) if self._shuffle else None
        there = order.to(held.device) if order is not None else None
        for number in range(start, self.num_batches):
            part = self._part(number)
            if order is None or there is None:
                yield self._shared(number, held.take(part, self.device))
            else:
                yield self._shared(number, held.take(there[part], self.device, on_host=order[part]))

    def _load(self) -> Rows:
        """All rows, on the device if it has room for them and as much again."""
        filling = Filling(self._layout, self.num_rows)
        for block in self._blocks:
            filling.append(self._wanted.read(block))
        held = filling.finish()
        if self.device.type == "cuda" and held.nbytes < torch.cuda.mem_get_info(self.device)[0] // 2:
            return held.to(self.device)
        return held

    def _order_in_time(self, epoch: int) -> Tensor:
        """The order of an epoch. For a GPU the next order is made meanwhile: at 100 million samples/s an epoch of 20
        million interactions takes a second, and their order half a second."""
        if not self._makes_orders_ahead:
            return self._order(epoch)
        made = self._next_order.pop(epoch, None)
        order = self._order(epoch) if made is None else made.result()
        worker = ThreadPoolExecutor(1, "recspec-order")
        self._next_order = {epoch + 1: worker.submit(self._order, epoch + 1)}
        worker.shutdown(wait=False)
        return order

    def _order(self, epoch: int) -> Tensor:
        if self._weights is not None:
            self._all_weights = self._weights.of(self._blocks) if self._all_weights is None else self._all_weights
            return draw_rows(self._all_weights, self.num_rows, mixed_seed(self._seed, epoch))
        dtype = torch.int32 if self.num_rows < 2**31 else torch.int64
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, epoch))
        return torch.randperm(self.num_rows, generator=generator, dtype=dtype)

    def _part(self, number: int) -> slice:
        """This rank's rows of a batch, in the order of the epoch; without any, the batch's last row, as its filler."""
        total = self._total(number)
        share = self._ranks.share(total)
        first = number * self.batch_size + min(share.start, total - 1)
        return slice(first, first + max(share.stop - share.start, 1))

    def _total(self, number: int) -> int:
        """Rows of a batch on all ranks."""
        return min(self.batch_size, self.num_rows - number * self.batch_size)

    def _shared(self, number: int, batch: Batch) -> RankBatch:
        total = self._total(number)
        share = self._ranks.share(total)
        return RankBatch({name: batch[name] for name in self.features}, share.stop - share.start, total, share.start)


# --- weights --------------------------------------------------------------------------------------------------------


class RowWeights:
    """The weights of the rows of some blocks, read when they are needed: 4 bytes a row, one column."""

    def __init__(self, name: str, wanted: WantedRows, blocks: Sequence[Block]) -> None:
        self._name, self._wanted, self._blocks = name, wanted, blocks

    def of(self, blocks: Sequence[Block]) -> NDArray[np.float32]:
        """The weights of all wanted rows of some blocks. Raises DataError unless all are above 0 and finite."""
        return np.concatenate([np.zeros(0, np.float32), *(self._read(block) for block in blocks)])

    def _read(self, block: Block) -> NDArray[np.float32]:
        single: NDArray[np.float32] = scalar(self._wanted.read(block)[self._name]).astype(np.float32)
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


# --- lanes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaneSchedule:
    """An epoch's rows over lanes: rows [start, start + before(all batches)) of the epoch's order are a lane's."""

    num_rows: int
    batch_size: int
    lanes: int

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def total(self, batch: int) -> int:
        """The rows of a batch in all lanes."""
        return min(self.batch_size, self.num_rows - batch * self.batch_size)

    def part(self, lane: int, batch: int) -> slice:
        """The lane's rows of a batch, counted from the batch's first row."""
        return Ranks(lane, self.lanes).share(self.total(batch))

    def before(self, lane: int, batch: int) -> int:
        """The lane's rows in all batches before a batch."""
        whole, rest = divmod(self.num_rows, self.batch_size)
        of_whole, of_rest = (len(range(rows)[Ranks(lane, self.lanes).share(rows)]) for rows in (self.batch_size, rest))
        return min(batch, whole) * of_whole + (batch > whole) * of_rest

    def rows(self, lane: int) -> slice:
        """The lane's rows, in the epoch's order of blocks."""
        start = sum(self.before(other, self.num_batches) for other in range(lane))
        return slice(start, start + self.before(lane, self.num_batches))


@dataclass(frozen=True)
class BlockSlice:
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

    def batches(self, schedule: LaneSchedule, ranks: Ranks, epoch: int, start: int) -> Generator[Batch]:
        """A rank's part of every batch from `start` on; without a row in it, one row of another batch."""
        with ExitStack() as opened:
            lanes: dict[int, _Lane] = {}
            for number in range(start, schedule.num_batches):
                own = ranks.share(schedule.total(number))
                parts: list[Batch] = []
                for lane in range(schedule.lanes):
                    there = schedule.part(lane, number)
                    first, stop = max(own.start, there.start), min(own.stop, there.stop)
                    if first >= stop:
                        continue
                    before = schedule.before(lane, number) - there.start
                    if lane not in lanes:
                        groups = self._groups(schedule, lane, epoch, before + first)
                        lanes[lane] = _Lane(opened.enter_context(closing(prefetched(groups, 1))))
                    parts += lanes[lane].take(before + first, before + stop, ranks.device)
                yield _joined(parts) if parts else self._filler(ranks.device)

    def _filler(self, device: torch.device) -> Batch:
        block = next(block for block in self.blocks if block.num_rows).part(0, 1)
        return self._read([block]).take(slice(0, 1), device)

    def _groups(self, schedule: LaneSchedule, lane: int, epoch: int, start: int) -> Generator[Group]:
        """The groups of a lane in order, without those that end before its row `start`."""
        position = 0
        cuts = self._cuts(schedule.rows(lane), epoch)
        held = grouped([cut.block for cut in cuts], self.group_rows)
        for number, blocks in enumerate(held):
            own, cuts = cuts[: len(blocks)], cuts[len(blocks) :]
            count = sum(cut.stop - cut.first for cut in own)
            if count and position + count > start:
                seed = mixed_seed(self.seed, epoch, number + (lane << 32))
                yield Group(position, self._read(blocks), self._order(own, epoch, seed))
            position += count

    def _cuts(self, rows: slice, epoch: int) -> list[BlockSlice]:
        """The blocks that hold some rows of the epoch's order, or parts of them."""
        places = list(range(len(self.blocks)))
        if self.shuffle:
            places = np.random.default_rng(mixed_seed(self.seed, epoch)).permutation(len(places)).tolist()
        if self.weights is not None:
            first_draw = float(np.random.default_rng(mixed_seed(self.seed, epoch, 0)).random())
            ends = self.weights.ends([self.blocks[place] for place in places], first_draw)
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
            cuts.append(BlockSlice(places[number], part, end - begin, first, stop))
        return cuts

    def _order(self, cuts: Sequence[BlockSlice], epoch: int, seed: int) -> Tensor:
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
