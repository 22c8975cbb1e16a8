"""Splits to batches, in memory or streamed.

No row of an epoch is lost or seen twice, its last batch may be smaller, and each rank gets a contiguous share of each
batch. Rows do not depend on each other, but the width of padded lists does: a rank's share may have narrower lists than
another's.

In memory each rank holds all rows, and batch k is rows [k * batch_size, (k + 1) * batch_size) of an order that depends
on seed and epoch alone. So a run on two ranks sees the batches of a run on one, and has its loss curve. Rows that
exceed the budget are streamed in lanes (`streaming.py`): each rank reads its own part of an epoch's blocks, so a run on
two ranks has other batches than a run on one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.prefetch import prefetched
from recspec.data.storage import Column, Ragged
from recspec.feature_spec import FeatureSpec
from recspec.loading.blocks import QUEUED_BATCHES, Newest, Part, RowSource, Share, WantedRows, arriving, mixed_seed
from recspec.loading.ranks import Ranks
from recspec.loading.rows import Filling, Layout, Rows
from recspec.loading.streaming import Deal, RowWeights, Stream, draw_rows
from recspec.models.layers import Batch

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
        part: Part | Newest | None = None,
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

    def batches(self, epoch: int = 0, start: int = 0, lanes: int | None = None) -> Iterator[Share]:
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
        return arriving(batches, self.device) if self.device.type == "cuda" else prefetched(batches, QUEUED_BATCHES)

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
            items, positive = _scalar(read[spec.item_id]), np.greater(_scalar(read[spec.label]), 0)
            found += np.bincount(items[positive], weights[positive], minlength=len(found))
            total += float(weights.sum(dtype=np.float64))
        return found / max(total, np.finfo(np.float64).tiny)

    def _streamed(self, epoch: int, start: int, lanes: int) -> Generator[Share]:
        stream = Stream(
            self._wanted, self._blocks, self._layout, self._weights, self._group_rows, self._seed, self._shuffle
        )
        with closing(stream.batches(Deal(self.num_rows, self.batch_size, lanes), self._ranks, epoch, start)) as batches:
            for number, batch in enumerate(batches, start):
                yield self._shared(number, batch)

    # --- in memory -----------------------------------------------------------------------------------------------

    def _from_memory(self, held: Rows, epoch: int, start: int) -> Generator[Share]:
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

    def _shared(self, number: int, batch: Batch) -> Share:
        total = self._total(number)
        share = self._ranks.share(total)
        return Share({name: batch[name] for name in self.features}, share.stop - share.start, total, share.start)


def _scalar(column: Column) -> NDArray[Any]:
    assert not isinstance(column, Ragged), "an id or a label is a scalar"
    return column
