"""The networks over a user's events, for one request and all items at once.

The events of a request are the same for every item. So whatever a layer computes from events alone becomes a weight or
a bias of a product over items, and no pair of event and item is built before the first layer. Results equal those of
`AttentionUnit` and `Gru` on pairs, up to rounding.

Shapes: L events of the request; N items; D width of an event's vector; X of a GRU's input; H of a state; W_i of a
layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.nn.event_networks import AttentionUnit
from recspec.nn.hand_written import own_precision
from recspec.nn.mlp import ActivatedMlp, Dice
from recspec.nn.recurrent import Gru

FLOATS = 1 << 19
"""Floats of a layer computed at once: 2 MB, of which most stays in a core's caches. A GPU takes as many as it can."""
FLOATS_OF_GPU = 1 << 26

EVENTS = 16
"""Events whose first layers are one product: beyond, blocks of `FLOATS` would hold too few items."""


def floats_at_once(like: Tensor) -> int:
    """Floats of a layer that the device of a tensor computes at once."""
    return FLOATS if like.device.type == "cpu" else FLOATS_OF_GPU


def attention_to_items(unit: AttentionUnit, happened: Tensor, target: Tensor) -> Tensor:
    """The weights of a request's events (L, D) for every item: targets (N, D), brought to that width, -> (L, N).

    The first layer of the unit, A h + B t + C (h - t) + P (h * t) + b, is linear in t, with the matrix
    B - C + P diag(h) and the bias (A + C) h + b.
    """
    if not len(happened):
        return target.new_zeros(0, len(target))
    of_event, of_target, of_difference, of_product = unit._parts
    matrices = (of_target - of_difference) + of_product * happened.unsqueeze(1)  # (L, W_0, D)
    biases = F.linear(happened, of_event + of_difference, unit.mlp.first.bias)
    width, floats, found = biases.shape[1], floats_at_once(target), []
    for matrix, bias in zip(torch.split(matrices, EVENTS), torch.split(biases, EVENTS), strict=True):
        step = max(1, floats // (len(bias) * width))
        parts = [
            logits_of_first(unit.mlp, unit.out, F.linear(some, matrix.flatten(0, 1), bias.flatten()).view(-1, width))
            for some in torch.split(target, step)
        ]
        found.append(torch.cat(parts).view(-1, len(bias)).t())
    return torch.cat(found)


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
        products = torch.cat([of_gates, 2 * of_candidates])
        biases = F.pad(gates, (0, hidden)).unsqueeze(2)
        for step in range(1, len(happened)):
            found = torch.mm(torch.cat([products, biases[step]], dim=1), state)
            found[: 2 * hidden].sigmoid_()
            candidate = found[2 * hidden :].mul_(found[hidden : 2 * hidden]).add_(candidates[step])
            candidate.sigmoid_().mul_(2).sub_(1)
            state[:hidden].lerp_(candidate, found[:hidden] * weights[step])
        return state[:hidden].t()


def logits_of_first(mlp: ActivatedMlp, out: nn.Linear, first: Tensor) -> Tensor:
    """The output (N,) of a layer of one unit after an MLP, from the MLP's first linear layer (N, W_0): overwritten."""
    x = first
    for place, act in enumerate(mlp.activations):
        x = x if place == 0 else mlp.layers[place](x)
        if isinstance(act, nn.Sigmoid):
            x = x.sigmoid_()
        elif isinstance(act, nn.ReLU):
            x = x.relu_()
        else:
            x = act(x, None) if isinstance(act, Dice) else act(x)
        x = mlp.dropout(x)
    # A product with a matrix of one row takes several times as long.
    return torch.addmv(out.bias, x.to(out.weight.dtype), out.weight[0])
