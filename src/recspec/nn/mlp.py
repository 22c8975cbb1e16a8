"""Multi-layer perceptrons.

Shapes: B or N rows; dims the widths of input and layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.nn.activations import Activation, Dice, activation
from recspec.nn.dropout import in_digits
from recspec.nn.hand_written import ReluDropout, may_replace

SMALL = 1 << 16
"""Units below which torch's own dropout is as fast as bit masks, which take some hundred small operations a call."""


class Mlp(nn.Module):
    """Linear layers, each followed by ReLU and dropout: (B, dims[0]) -> (B, dims[-1]).

    Weights start Glorot-uniform, ±sqrt(6 / (in + out)); biases as torch leaves them, ±1/sqrt(in).
    """

    def __init__(self, dims: Sequence[int], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(x_dim, y_dim) for x_dim, y_dim in pairwise(dims))
        self.dropout = dropout
        for layer in self.layers:
            nn.init.xavier_uniform_(cast(nn.Linear, layer).weight)

    @property
    def first(self) -> nn.Linear:
        """The first linear layer."""
        return cast(nn.Linear, self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        if may_replace(*self.layers):
            return self.after_first(aligned_linear(x, self.first))
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), self.dropout, self.training)
        return x

    def after_first(self, x: Tensor) -> Tensor:
        """The layers after the first linear one, from its output (..., dims[1]), which they overwrite."""
        x, scale = self._hidden(x)
        return x if scale == 1.0 else x * scale

    def logits(self, first: Tensor, out: nn.Linear) -> Tensor:
        """`after_first`, then an output layer of one unit: (..., dims[1]) -> (...)."""
        x, scale = self._hidden(first)
        weight = out.weight[0] if scale == 1.0 else out.weight[0] * scale
        logits = x @ weight  # a product with a matrix of one row takes several times as long
        return logits if out.bias is None else logits + out.bias

    def _hidden(self, x: Tensor) -> tuple[Tensor, float]:
        """The last layer's units, and the factor that they still lack."""
        shape = x.shape[:-1]
        x, scale = relu_dropout_(x, self.dropout, training=self.training)
        # In two dimensions a layer's output is no view, so overwriting it costs nothing in the backward pass.
        x = x.reshape(-1, x.shape[-1])
        for layer in self.layers[1:]:
            weight, bias = cast(nn.Linear, layer).weight, cast(nn.Linear, layer).bias
            # Scaling weights instead of units takes thousands of products a batch instead of millions.
            x = F.linear(x, weight if scale == 1.0 else weight * scale, bias)
            x, scale = relu_dropout_(x, self.dropout, training=self.training)
        return x.view(*shape, x.shape[-1]), scale


def aligned_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer's output, computed on an input padded with zeros to a multiple of 8 columns.

    Products of matrices whose rows start at odd addresses take a CPU up to one and a half times as long: with
    (8192, 479) x (479, 1024) the three of a training step took 368 ms on one thread, against 278 ms at a width of 480.
    """
    more = -layer.in_features % 8
    if torch.compiler.is_compiling() or not more or x.device.type != "cpu" or x.numel() < SMALL:
        return cast(Tensor, layer(x))
    return F.linear(F.pad(x, (0, more)), F.pad(layer.weight, (0, more)), layer.bias)


def relu_dropout_(x: Tensor, p: float, *, training: bool) -> tuple[Tensor, float]:
    """ReLU, then dropout of a share `p` of the units; overwrites `x`, and returns it with the factor that it lacks.

    The factor, 1 / (1 - p) after dropout, keeps the mean. The caller can often multiply something smaller by it.

    On a CPU, drawing one random float for each unit costs more than a layer's matrix product. Here a unit costs one
    random bit for each binary digit of p, a single bit for p = 0.5. The backward pass needs no mask: a unit that
    dropout or ReLU set to 0 passes no gradient.
    """
    if not training or p == 0.0:
        return x.relu_(), 1.0
    plain = x.device.type != "cpu" or x.numel() < SMALL or not x.is_contiguous() or torch.compiler.is_compiling()
    if plain or not may_replace():
        return F.dropout(x.relu_(), p, training=True), 1.0
    keep = in_digits(1 - p)
    return cast(Tensor, ReluDropout.apply(x, keep)), 1 / keep  # type: ignore[no-untyped-call]


class ActivatedMlp(nn.Module):
    """Linear layers, each followed by an activation and dropout: (N, dims[0]) -> (N, dims[-1]).

    Weights start Glorot-uniform, biases at 0.
    """

    def __init__(self, dims: Sequence[int], kind: Activation, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(x_dim, y_dim) for x_dim, y_dim in pairwise(dims))
        self.activations = nn.ModuleList(activation(kind, width) for width in dims[1:])
        self.dropout = nn.Dropout(dropout)
        self.kind = kind
        for layer in self.layers:
            start_glorot(cast(nn.Linear, layer))

    @property
    def first(self) -> nn.Linear:
        """The first linear layer."""
        return cast(nn.Linear, self.layers[0])

    @property
    def tail(self) -> tuple[Tensor, ...]:
        """Weight and bias of every layer but the first."""
        layers = [cast(nn.Linear, layer) for layer in self.layers[1:]]
        return tuple(each for layer in layers for each in (layer.weight, layer.bias))

    def can_replace(self, x: Tensor) -> bool:
        """Whether code written by hand may run in place of this MLP, with input as `x`."""
        plain = may_replace(self) and self.kind in ("sigmoid", "relu") and (self.dropout.p == 0 or not self.training)
        return plain and (x.dtype == self.first.weight.dtype or torch.is_autocast_enabled(x.device.type))

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        return self.after_first(self.first(x))

    def after_first(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """The layers after the first linear one, from its output (N, dims[1])."""
        for place, act in enumerate(self.activations):
            x = x if place == 0 else self.layers[place](x)
            x = self.dropout(act(x, present) if isinstance(act, Dice) else act(x))
        return x


def start_glorot(layer: nn.Linear) -> None:
    """Set the first values: weights Glorot-uniform, ±sqrt(6 / (in + out)), biases 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
