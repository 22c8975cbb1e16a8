"""The running statistics of a model's units (Dice) when a step has several parts."""

from __future__ import annotations

import torch
from torch import nn

from recspec.distributed import Ranks
from recspec.nn import Dice, follow_together


class UnitStatistics:
    """Running statistics that take in all rows of a step once, whatever its micro-batches and ranks.

    If each part updated them, they would move once a part, and each rank would have its own.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, accumulate: int) -> None:
        divided = ranks.world_size > 1 or accumulate > 1
        self.ranks, self.units = ranks, [unit for unit in model.modules() if divided and isinstance(unit, Dice)]
        for unit in self.units:
            unit.parts = []

    def leave_out_last(self) -> None:
        """Forget the last part, which was a filler row."""
        for unit in self.units:
            assert unit.parts
            unit.parts.pop()

    def follow(self) -> None:
        """Take in the parts of a step on all ranks."""
        for unit in self.units:
            assert unit.parts is not None
            own = torch.stack(unit.parts) if unit.parts else unit.mean.new_zeros(0, 1 + 2 * len(unit.mean))
            follow_together(unit, self.ranks.gather(own))
            unit.parts.clear()
