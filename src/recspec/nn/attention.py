"""The attention unit of DIN.

Shapes: B rows; T events; D width of an event's vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.nn.activations import Activation
from recspec.nn.events import Events
from recspec.nn.hand_written import EventWeights, may_replace, own_precision
from recspec.nn.mlp import ActivatedMlp, start_glorot


class AttentionUnit(nn.Module):
    """The weight of each event for the target: (T, D) events, (B, D) targets -> (T,).

    An MLP over [h, t, h - t, h * t]: Zhou et al.: Deep Interest Network, KDD 2018, section 4.3, without a softmax.
    The first layer multiplies an event's part once an event and a target's part once a row; h - t belongs to both.
    A layer with PReLU brings targets of another width to the events' width.
    """

    def __init__(self, event_dim: int, target_dim: int, hidden: Sequence[int], kind: Activation) -> None:
        super().__init__()
        self.dim = event_dim
        if target_dim != event_dim:
            self.bring = ActivatedMlp((target_dim, event_dim), "prelu")
        self.mlp = ActivatedMlp((4 * event_dim, *hidden), kind)
        self.out = nn.Linear(hidden[-1], 1)
        start_glorot(self.out)

    def forward(self, happened: Tensor, target: Tensor, events: Events) -> Tensor:
        """Weights of the events (T,)."""
        target = self.brought(target)
        if not may_replace(self.mlp, self.out):
            wide = events.spread(target)
            joined = torch.cat([happened, wide, happened - wide, happened * wide], dim=1)
            return self.after_first(self.mlp.first(joined), events.present)
        if events.in_large_steps and self.mlp.can_replace(happened):
            return self._by_blocks(happened, target, events)
        joined = happened * events.spread(target)
        first = self.of_events(happened) + events.spread(self.of_targets(target)) + self.of_products(joined)
        return self.after_first(first, events.present)

    def _by_blocks(self, happened: Tensor, target: Tensor, events: Events) -> Tensor:
        event, _, difference, product = self._parts
        with own_precision(happened):
            happened, target = happened.to(product.dtype), target.to(product.dtype)
            parts = (happened, target, self.of_targets(target), event + difference, product, *self.mlp.tail)
            return cast(Tensor, EventWeights.apply(events, self.mlp.kind, *parts, *self.out.parameters()))  # type: ignore[no-untyped-call]

    def brought(self, target: Tensor) -> Tensor:
        """Targets (B, target_dim) at the events' width."""
        return cast(Tensor, self.bring(target)) if hasattr(self, "bring") else target

    def of_events(self, happened: Tensor) -> Tensor:
        """The events' part of the first layer: (T, D) -> (T, hidden[0])."""
        event, _, difference, _ = self._parts
        return F.linear(happened, event + difference)

    def of_targets(self, target: Tensor) -> Tensor:
        """The targets' part of the first layer: (B, D) -> (B, hidden[0])."""
        _, own, difference, _ = self._parts
        return F.linear(target, own - difference, self.mlp.first.bias)

    def of_products(self, joined: Tensor) -> Tensor:
        """The part of the products h * t in the first layer: (..., D) -> (..., hidden[0])."""
        return F.linear(joined, self._parts[3])

    def after_first(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """Weights (N,) from the first layer's output (N, hidden[0])."""
        return cast(Tensor, self.out(self.mlp.after_first(x, present))).squeeze(1)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """Columns of the first layer for h, t, h - t and h * t."""
        return torch.split(self.mlp.first.weight, self.dim, dim=1)
