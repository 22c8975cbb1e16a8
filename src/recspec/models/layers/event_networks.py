"""Networks over a user's events: attention units, the auxiliary loss of DIEN, recurrences.

For one request and all items at once, whatever a layer computes from events alone becomes a weight or a bias of a
product over items, and no pair of event and item is built before the first layer. Results equal those of
`AttentionUnit` and `Gru` on pairs, up to rounding.

Shapes: B rows; T events; L events of one request; N items; D width of an event's vector; X of a GRU's input; H of a
state, or number of sums; W_i and V of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.models.layers import kernels
from recspec.models.layers.events import Events, at, padded_events
from recspec.models.layers.hand_written import (
    EventWeights,
    FusedRecurrence,
    NextEventLoss,
    Recurrence,
    may_replace,
    own_precision,
)
from recspec.models.layers.losses import at_least_fp32
from recspec.models.layers.mlp import ActivatedMlp, Activation, Dice, start_glorot
from recspec.models.layers.recurrence_kernels import can_recur


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
        target = self.project_target(target)
        if not may_replace(self.mlp, self.out):
            wide = events.spread(target)
            joined = torch.cat([happened, wide, happened - wide, happened * wide], dim=1)
            return self.after_first(self.mlp.first(joined), events.mask)
        if events.in_large_steps and self.mlp.can_replace(happened):
            return self._by_blocks(happened, target, events)
        joined = happened * events.spread(target)
        first = self.of_events(happened) + events.spread(self.of_targets(target)) + self.of_products(joined)
        return self.after_first(first, events.mask)

    def _by_blocks(self, happened: Tensor, target: Tensor, events: Events) -> Tensor:
        event, _, difference, product = self._parts
        with own_precision(happened, events):
            happened, target = happened.to(product.dtype), target.to(product.dtype)
            parts = (happened, target, self.of_targets(target), event + difference, product, *self.mlp.tail)
            return cast(Tensor, EventWeights.apply(events, self.mlp.kind, *parts, *self.out.parameters()))  # type: ignore[no-untyped-call]

    def project_target(self, target: Tensor) -> Tensor:
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
        before, right_and_wrong = at(states, earlier), [at(each, later) for each in (happened, sampled)]
        if plain:
            of_state, of_event = self._parts
            known = F.linear(before, of_state, self.mlp.first.bias)
            firsts = [known + F.linear(each, of_event) for each in right_and_wrong]
        else:
            firsts = [self.mlp.first(torch.cat([before, each], dim=1)) for each in right_and_wrong]
        right, wrong = (at_least_fp32(self.out(self.mlp.after_first(first)).squeeze(1)) for first in firsts)
        # -ln sigmoid(x) = softplus(-x), and -ln(1 - sigmoid(x)) = softplus(x).
        losses = F.softplus(-right) + F.softplus(wrong)
        losses = losses / (events.lengths - 1).clamp(min=1)[at(events.rows, later)]
        follows = events.follows(earlier, later)
        return (losses if follows is None else losses * follows).sum() / max(1, events.num_rows)

    def _by_blocks(self, states: Tensor, happened: Tensor, sampled: Tensor, events: Events) -> Tensor:
        with own_precision(happened, events):
            of_state, of_event = self._parts
            given = (each.to(of_event.dtype) for each in (states, happened, sampled))
            parts = (*given, of_state, of_event, self.mlp.first.bias)
            return cast(Tensor, NextEventLoss.apply(events, *parts, *self.mlp.tail, *self.out.parameters()))  # type: ignore[no-untyped-call]

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """Columns of the first layer for a state and for an event."""
        return torch.split(self.mlp.first.weight, list(self.widths), dim=1)


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
        parameters, padded = (self.weight_x, self.weight_h, self.bias), padded_events(events.present_mask)
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
        # Zhou et al., AAAI 2019, equations 2 to 5; with an attention, 14 to 16.
        update, candidate = torch.sigmoid(x_u + u), torch.tanh(x_c + torch.sigmoid(x_r + r) * c)
        if weights is not None:
            update = update * weights[:, step]
        state = torch.where(present[:, step], state + update * (candidate - state), state)
        states.append(state)
    every = torch.stack(states, dim=1) if states else x.new_zeros(events.num_rows, 0, hidden)
    return every.flatten(0, 1), state


# --- one request and all items ----------------------------------------------------------------------------------------


FLOATS = 1 << 19
"""Floats of a layer that a thread computes at once: 2 MB, mostly in a core's caches. A GPU takes as many as it can."""
FLOATS_OF_GPU = 1 << 26
CACHED_FLOATS = 1 << 18
"""Floats of a layer that stay in a core's second cache from one cheap pass to the next: 1 MB."""

EVENTS = 16
"""Events whose first layers are one product: beyond, blocks of `FLOATS` would hold too few items."""


def floats_at_once(like: Tensor) -> int:
    """Floats of a layer that the device of a tensor computes at once."""
    return FLOATS * torch.get_num_threads() if like.device.type == "cpu" else FLOATS_OF_GPU


def floats_in_cache(like: Tensor) -> int:
    """Floats of a layer that cheap passes take at once; on a GPU as many as products do."""
    return CACHED_FLOATS * torch.get_num_threads() if like.device.type == "cpu" else FLOATS_OF_GPU


def attention_to_items(unit: AttentionUnit, happened: Tensor, target: Tensor) -> Tensor:
    """The weights of a request's events (L, D) for every item: targets (N, D), projected to that width, -> (L, N).

    The first layer of the unit, A h + B t + C (h - t) + P (h * t) + b, is linear in t, with the matrix
    B - C + P diag(h) and the bias (A + C) h + b.
    """
    if not len(happened):
        return target.new_zeros(0, len(target))
    of_event, of_target, of_difference, of_product = unit._parts
    matrices = (of_target - of_difference) + of_product * happened.unsqueeze(1)  # (L, W_0, D)
    biases = F.linear(happened, of_event + of_difference, unit.mlp.first.bias)
    matrices = torch.cat([matrices, biases.unsqueeze(2)], dim=2)  # a column of ones is cheaper than a bias
    target, width = F.pad(target, (0, 1), value=1.0), matrices.shape[1]
    weights, after_first = target.new_empty(len(target), len(happened)), AfterFirst(unit.mlp, unit.out)
    for events in (slice(first, first + EVENTS) for first in range(0, len(happened), EVENTS)):
        matrix = matrices[events].flatten(0, 1).t()
        step = max(1, floats_in_cache(target) // matrix.shape[1])
        for some in (slice(start, start + step) for start in range(0, len(target), step)):
            first = torch.mm(target[some], matrix)
            weights[some, events] = after_first(first.view(-1, width)).view(len(first), -1)
    return weights.t().contiguous()


def weighted_sums(weights: Iterable[Tensor], vectors: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sums of a request's events as inputs of a layer: a matrix (N, K) and the columns (V, K) that it meets.

    The layer's product is (weights^T vectors) columns^T. Of few events, vectors columns^T costs less than the sums.

    Args:
        weights: (L, N) of each of H sums, for every item; taken one after another, because they may be large.
        vectors: (L, D) the events.
        columns: (V, H D) the layer's columns for the sums side by side.
    """
    if len(vectors) <= vectors.shape[1]:
        of_sums = torch.unflatten(columns, 1, (-1, vectors.shape[1]))  # (V, H, D)
        return torch.cat([*weights]).t(), (of_sums @ vectors.t()).flatten(1)
    return torch.cat([each.t() @ vectors for each in weights], dim=1), columns


def last_states_of_items(gru: Gru, happened: Tensor, weights: Tensor) -> Tensor:
    """The last states of AUGRU over a request's events (L, X) for every item, by its attentions (L, N): (N, H).

    The events' products are the same for all items, and the state before the first event is 0, so the first step needs
    no product. Items are columns here, so the three gates are rows that lie together. tanh x is 2 sigmoid(2x) - 1,
    eight times as fast on a CPU.
    """
    hidden, count = gru.hidden_dim, weights.shape[1]
    if not len(happened):
        return happened.new_zeros(count, hidden)
    with own_precision(happened):
        happened, weights = happened.to(gru.bias.dtype), weights.to(gru.bias.dtype)
        inputs = F.linear(happened, gru.weight_x, gru.bias)
        gates, candidates = inputs[:, : 2 * hidden], 2 * inputs[:, 2 * hidden :].unsqueeze(2)
        update = gates[0, :hidden].sigmoid()
        state = happened.new_ones(hidden + 1, count)  # the last row stays 1: its product is a bias
        state[:hidden] = torch.outer(update * torch.tanh(inputs[0, 2 * hidden :]), weights[0])
        of_gates, of_candidates = torch.split(gru.weight_h, [2 * hidden, hidden])
        products = torch.cat([of_gates, 2 * of_candidates]).expand(len(happened), -1, -1)
        matrices = torch.cat([products, F.pad(gates, (0, hidden)).unsqueeze(2)], dim=2)
        for step in range(1, len(happened)):
            found = torch.mm(matrices[step], state)
            # u and r; the candidate below is tanh x = 2 sigmoid(2 x) - 1 of a doubled product.
            found[: 2 * hidden].sigmoid_()
            candidate = found[2 * hidden :].mul_(found[hidden : 2 * hidden]).add_(candidates[step])
            candidate.sigmoid_().mul_(2).sub_(1)
            state[:hidden].lerp_(candidate, found[:hidden] * weights[step])
        return state[:hidden].t()


class AfterFirst:
    """An MLP after its first linear layer, and an output layer of one unit, for many small blocks of rows.

    It holds the weights as they are now: looking a module's parts up for each block takes longer than some passes.
    """

    def __init__(self, mlp: ActivatedMlp, out: nn.Linear) -> None:
        layers = cast(list[nn.Linear], [*mlp.layers])[1:]
        self._layers = [(layer, layer.weight.t(), layer.bias) for layer in layers]
        self._first, *self._activations = map(_overwriting, mlp.activations)
        self._dropout = mlp.dropout if mlp.training and mlp.dropout.p else None
        self._out, self._bias = out.weight[0], out.bias

    def __call__(self, first: Tensor) -> Tensor:
        """The output (N,) from the first linear layer's (N, W_0), which it overwrites."""
        x, on_cpu = self._dropped(self._first(first)), first.device.type == "cpu"
        for (layer, weight, bias), activate in zip(self._layers, self._activations, strict=True):
            # On a CPU, `addmm` first copies the bias to every row.
            x = self._dropped(activate(torch.mm(x, weight).add_(bias) if on_cpu else layer(x)))
        # A product with a matrix of one row takes several times as long.
        return torch.addmv(self._bias, x.to(self._out.dtype), self._out)

    def _dropped(self, x: Tensor) -> Tensor:
        return x if self._dropout is None else self._dropout(x)


def _overwriting(act: nn.Module) -> Callable[[Tensor], Tensor]:
    """An activation that may overwrite its input."""
    if isinstance(act, nn.Sigmoid):
        return torch.sigmoid_
    if isinstance(act, nn.ReLU):
        return torch.relu_
    return partial(act, present=None) if isinstance(act, Dice) else act
