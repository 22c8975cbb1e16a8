"""Recurrences over a user's events.

Shapes: B rows; T events; X width of an event's vector; H of a state.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.nn import kernels
from recspec.nn.events import Events, padded_events
from recspec.nn.hand_written import FusedRecurrence, Recurrence, may_replace, own_precision
from recspec.nn.recurrence_kernels import can_recur


class Gru(nn.Module):
    """A recurrence over each row's events: (T, X) -> states (T, H) and the last state of each row (B, H).

        u = sigmoid(W_u x + U_u h + b_u)      r = sigmoid(W_r x + U_r h + b_r)
        c = tanh(W_c x + r * (U_c h) + b_c)   h' = (1 - u) h + u c

    Zhou et al.: Deep Interest Evolution Network, AAAI 2019, equations 2 to 5. With an attention a for each event it is
    AUGRU, equations 14 to 16: a u replaces u, so an event without attention does not change the state. An empty
    history ends in zeros. Weights start uniform within 1 / sqrt(H), biases at 0.
    """

    def __init__(self, input_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.backend: kernels.Backend | None = None
        """What computes the recurrence; by default Triton on a GPU that has it, else torch."""
        self.weight_x = nn.Parameter(torch.empty(3 * hidden_dim, input_dim))
        self.weight_h = nn.Parameter(torch.empty(3 * hidden_dim, hidden_dim))
        self.bias = nn.Parameter(torch.zeros(3 * hidden_dim))
        for weight in (self.weight_x, self.weight_h):
            nn.init.uniform_(weight, -(hidden_dim**-0.5), hidden_dim**-0.5)

    def forward(self, x: Tensor, events: Events, attention: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States (T, H) after each event, and last states (B, H)."""
        with own_precision(x, events):  # errors of a narrow type would add up over the steps
            parameters = self.weight_x, self.weight_h, self.bias
            if may_replace() and kernels.uses_triton(self.backend, x.device) and can_recur(self.weight_h, events):
                return cast(
                    tuple[Tensor, Tensor],
                    FusedRecurrence.apply(x, attention, *parameters, events),  # type: ignore[no-untyped-call]
                )
            dtype = self.weight_h.dtype
            x, attention = x.to(dtype), None if attention is None else attention.to(dtype)
            if events.present is not None:
                return _padded_recurrence(x, attention, *parameters, events)
            if not may_replace():
                return self._plain(x, attention, events)
            return cast(
                tuple[Tensor, Tensor],
                Recurrence.apply(x, attention, *parameters, events),  # type: ignore[no-untyped-call]
            )

    def _plain(self, x: Tensor, attention: Tensor | None, events: Events) -> tuple[Tensor, Tensor]:
        """Events in the jagged form, by way of the padded one."""
        weights = None if attention is None else events.padded(attention).flatten()
        parameters, padded = (self.weight_x, self.weight_h, self.bias), padded_events(events.there)
        states, last = _padded_recurrence(events.padded(x).flatten(0, 1), weights, *parameters, padded)
        return states.index_select(0, events.places), last


def _padded_recurrence(
    x: Tensor, attention: Tensor | None, weight_x: Tensor, weight_h: Tensor, bias: Tensor, events: Events
) -> tuple[Tensor, Tensor]:
    """`Gru` over events in the padded form; a place without an event passes the state on."""
    hidden = weight_h.shape[1]
    inputs = F.linear(x, weight_x, bias).view(events.num_rows, events.length, 3 * hidden)
    shape = (events.num_rows, events.length, 1)
    present = cast(Tensor, events.present).view(shape)
    weights = None if attention is None else attention.view(shape)
    state = x.new_zeros(events.num_rows, hidden)
    states = []
    for step in range(events.length):
        u, r, c = F.linear(state, weight_h).chunk(3, dim=1)
        x_u, x_r, x_c = inputs[:, step].chunk(3, dim=1)
        update, candidate = torch.sigmoid(x_u + u), torch.tanh(x_c + torch.sigmoid(x_r + r) * c)
        if weights is not None:
            update = update * weights[:, step]
        state = torch.where(present[:, step], state + update * (candidate - state), state)
        states.append(state)
    every = torch.stack(states, dim=1) if states else x.new_zeros(events.num_rows, 0, hidden)
    return every.flatten(0, 1), state
