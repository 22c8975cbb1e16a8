"""Rows drawn in proportion to their weight, so that any model's loss weighs them, whatever its formula.

An epoch has as many draws as there are rows. Rows are put in random order and drawn at even distances along their
weights (systematic resampling), so row i with w_i = weight / mean weight is drawn floor(w_i) or ceil(w_i) times, w_i on
average; with equal weights each row is drawn once. Drawing each row independently would add Poisson noise of variance
w_i, and miss 37 % of equal rows in an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.errors import DataError
from recspec.loading.blocks import Block, WantedRows, mixed_seed
from recspec.storage import Ragged


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
            raise DataError(f"feature '{self._name}', the weight of events: holds {single[wrong][0]:g}; expected "
                            "numbers above 0 in every row (train.event_weights=ignore trains without)")  # fmt: skip
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
