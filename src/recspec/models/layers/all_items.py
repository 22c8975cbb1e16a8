"""The networks over a user's events, for one request and all items at once.

The events of a request are the same for every item. So whatever a layer computes from events alone becomes a weight or
a bias of a product over items, and no pair of event and item is built before the first layer. Results equal those of
`AttentionUnit` and `Gru` on pairs, up to rounding.

Shapes: L events of the request; N items; D width of an event's vector; X of a GRU's input; H of a state, or number of
sums; W_i and V of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.models.layers.event_networks import AttentionUnit, Gru
from recspec.models.layers.hand_written import own_precision
from recspec.models.layers.mlp import ActivatedMlp, Dice

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
