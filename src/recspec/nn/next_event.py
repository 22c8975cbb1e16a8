"""The auxiliary network of DIEN.

Shapes: T events; H width of a state; D of an event's vector.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.nn.events import Events
from recspec.nn.hand_written import NextEventLoss, may_replace, own_precision
from recspec.nn.losses import at_least_fp32
from recspec.nn.mlp import ActivatedMlp, start_glorot


class NextEvent(nn.Module):
    """The auxiliary network of DIEN: tells the next event from a sampled item by the state before it.

    Zhou et al.: Deep Interest Evolution Network, AAAI 2019, equation 7, with a network instead of the inner product,
    as in the authors' code. The loss of an event is -ln sigmoid(f(h, next)) - ln(1 - sigmoid(f(h, sampled))), in nats.
    It is averaged over each row's events but the first, then over rows; a row of one event adds 0. So every row stands
    alone, and ranks that share a batch get the gradient of the whole batch. Computed from logits, no probability
    rounds to 0.
    """

    def __init__(self, hidden_dim: int, event_dim: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.widths = (hidden_dim, event_dim)
        self.mlp = ActivatedMlp((hidden_dim + event_dim, *hidden), "sigmoid")
        self.out = nn.Linear(hidden[-1], 1)
        start_glorot(self.out)

    def forward(self, states: Tensor, happened: Tensor, sampled: Tensor, events: Events) -> Tensor:
        """The loss: (T, H), (T, D), (T, D) -> ()."""
        plain, given = may_replace(self.mlp, self.out), (states, happened, sampled)
        if plain and events.in_large_steps and all(self.mlp.can_replace(each) for each in given):
            return self._by_blocks(*given, events)
        earlier, later = events.successors()
        if plain:
            of_state, of_event = self._parts
            known = F.linear(states[earlier], of_state, self.mlp.first.bias)
            firsts = [known + F.linear(each[later], of_event) for each in (happened, sampled)]
        else:
            firsts = [self.mlp.first(torch.cat([states[earlier], each[later]], dim=1)) for each in (happened, sampled)]
        right, wrong = (at_least_fp32(self.out(self.mlp.after_first(first)).squeeze(1)) for first in firsts)
        losses = F.softplus(-right) + F.softplus(wrong)
        losses = losses / (events.lengths - 1).clamp(min=1)[events.rows[later]]
        follows = events.follows(earlier, later)
        return (losses if follows is None else losses * follows).sum() / max(1, events.num_rows)

    def _by_blocks(self, states: Tensor, happened: Tensor, sampled: Tensor, events: Events) -> Tensor:
        with own_precision(happened):
            of_state, of_event = self._parts
            given = (each.to(of_event.dtype) for each in (states, happened, sampled))
            parts = (*given, of_state, of_event, self.mlp.first.bias)
            return cast(Tensor, NextEventLoss.apply(events, *parts, *self.mlp.tail, *self.out.parameters()))  # type: ignore[no-untyped-call]

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """Columns of the first layer for a state and for an event."""
        return torch.split(self.mlp.first.weight, list(self.widths), dim=1)
