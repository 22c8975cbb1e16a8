"""Splits to batches, in memory or streamed.

Batch k of an epoch is rows [k * batch_size, (k + 1) * batch_size) of an order that depends on seed and epoch alone, and
each rank gets its contiguous share of it. So no row is lost or seen twice, the last batch may be smaller, and a run on
two ranks sees the batches of a run on one.

Streamed, the order is that of shuffled blocks: as many as a quarter of the budget holds are read, their rows are
shuffled among each other, and the next are read meanwhile. Every rank reads every block and takes its own rows. What
stands in a row is the same whatever is beside it; a rank's share may have narrower lists than another's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.batch import Batch, concatenate
from recspec.distributed import Ranks
from recspec.loading.ahead import QUEUED_BATCHES, Share, arriving, prefetched
from recspec.loading.blocks import Part, WantedRows, grouped, mixed_seed
from recspec.loading.rows import Layout, Rows
from recspec.spec import FeatureSpec

BLOCK_ROWS = 16_384  # rows of a streamed block where files can be cut anywhere
MEMORY_BUDGET = 2 << 30  # bytes


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
        self._seed, self._shuffle = seed, shuffle
        self._ranks = Ranks(rank, world_size, self.device)
        self._wanted = WantedRows(spec, names, self.features, positives_only=positives_only, part=part)
        self._blocks = self._wanted.cut(BLOCK_ROWS)
        self.num_rows = sum(block.num_rows for block in self._blocks)
        self._layout = Layout.of(spec, self.features, fixed_length=fixed_length)
        nbytes = self._layout.nbytes(self.num_rows, self._wanted.num_values)
        self.mode: Literal["memory", "stream"] = "memory" if nbytes <= memory_budget else "stream"
        self._group_rows = max(1, memory_budget // 4 * self.num_rows // max(nbytes, 1))
        self._resident: Rows | None = None
        self._makes_orders_ahead = self.device.type == "cuda"
        self._next_order: dict[int, Future[Tensor]] = {}
        if self.mode == "stream" and self._group_rows < 16 * BLOCK_ROWS:  # few blocks a group would mix rows badly
            self._blocks = self._wanted.cut(max(1, self._group_rows // 16))

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
            return prefetched(batches, QUEUED_BATCHES)
        return arriving(batches, self.device)

    # --- in memory -----------------------------------------------------------------------------------------------

    def _from_memory(self, held: Rows, epoch: int, start: int) -> Generator[Share]:
        order = self._order_in_time(epoch) if self._shuffle else None
        there = order.to(held.device) if order is not None else None
        for number in range(start, self.num_batches):
            first, rows = self._share(number)
            part = slice(first, first + max(rows, 1))
            if order is None or there is None:
                yield self._shared(number, held.take(part, self.device))
            else:
                yield self._shared(number, held.take(there[part], self.device, on_host=order[part]))

    def _load(self) -> Rows:
        """All rows, on the device if it has room for them and as much again."""
        rows = Rows.allocate(self._layout, self.num_rows)
        for block in self._blocks:
            rows.append(self._wanted.read(block))
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
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, epoch))
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
            order = np.random.default_rng(mixed_seed(self._seed, epoch)).permutation(order)
        position, number = 0, 0
        for blocks in grouped([self._blocks[i] for i in order], self._group_rows):
            count = sum(block.num_rows for block in blocks)
            if position + count > start * self.batch_size:
                rows = Rows.allocate(self._layout, count)
                for block in blocks:
                    rows.append(self._wanted.read(block))
                generator = torch.Generator().manual_seed(mixed_seed(self._seed, epoch, number))
                shuffled = torch.randperm(count, generator=generator) if self._shuffle else torch.arange(count)
                yield _Group(position, rows.finish(), shuffled)
            position, number = position + count, number + 1

    def _from_groups(self, epoch: int, start: int) -> Generator[Share]:
        number, parts = start, list[Batch]()
        with closing(prefetched(self._groups(epoch, start), 1)) as groups:
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
class _Group:
    """Blocks held together: from which place of the epoch's order on, their rows, and the order of those."""

    first: int
    rows: Rows
    order: Tensor

    @property
    def last(self) -> int:
        return self.first + len(self.order)


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
