"""The moments at which ranks agree to stop or to write a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from recspec.distributed import Ranks

AGREEING = 2.0
"""Seconds between these moments; torchrun gives processes that it stops half a minute."""


class Agreement:
    """What all ranks know alike: whether any was asked to stop, and whether a checkpoint is due.

    Args:
        ranks: the processes of the run.
        checkpoint_minutes: between checkpoints; 0: one after every step.
        stop_requested: whether this process was asked to stop.
    """

    def __init__(self, ranks: Ranks, checkpoint_minutes: float, stop_requested: Callable[[], bool]) -> None:
        self.ranks, self.checkpoint_minutes, self.stop_requested = ranks, checkpoint_minutes, stop_requested
        self.saved_at = self.agreed_at = 0.0
        self.agreed_step = self.agree_at = 0

    def start(self, step: int) -> None:
        """Measure time and steps from here."""
        self.saved_at = self.agreed_at = time.monotonic()
        self.agreed_step = self.agree_at = step

    def saved(self) -> None:
        """Note that a checkpoint is being written now."""
        self.saved_at = time.monotonic()

    def after(self, step: int) -> tuple[bool, bool]:
        """Whether to stop after this step, and whether to write a checkpoint; the same on all ranks."""
        stop, due = False, self.checkpoint_minutes == 0
        if self.ranks.world_size == 1 or step >= self.agree_at:  # agreeing costs a message
            stop, is_late = self._agree(step)
            due = due or is_late
        return stop, stop or due

    def _agree(self, step: int) -> tuple[bool, bool]:
        """Ask all ranks. The next question follows in about `AGREEING` seconds, at a step that all ranks know."""
        now = time.monotonic()
        steps = round((step - self.agreed_step) * AGREEING / max(1e-3, now - self.agreed_at))
        late = now - self.saved_at >= 60 * self.checkpoint_minutes
        asked = self.ranks.sum(torch.tensor([self.stop_requested(), late, steps], dtype=torch.int64))
        self.agreed_at, self.agreed_step = time.monotonic(), step
        self.agree_at = step + max(1, int(asked[2]) // self.ranks.world_size)
        return bool(asked[0]), bool(asked[1])
