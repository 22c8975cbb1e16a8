"""Multi-layer perceptrons.

Shapes: B or N rows; dims the widths of input and layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.models.layers.blocks import in_digits
from recspec.models.layers.hand_written import DenseLayers, ReluDropout, may_replace
from recspec.models.layers.losses import at_least_fp32

Activation = Literal["prelu", "dice", "sigmoid", "relu"]

SMALL = 1 << 16
"""Numbers below which a layer's input is not padded, and below which torch's own dropout is as fast as bit masks, which
take some hundred small operations a call."""


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
            if runs_on_gpu(x):
                return self._at_once([x])
            return self.after_first(aligned_linear(x, self.first))
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), self.dropout, self.training)
        return x

    def of_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """All layers, from parts of the input (B, n) that are put side by side."""
        if may_replace(self):
            if runs_on_gpu(parts[0]):
                return self._at_once(parts)
            return self.after_first(aligned_linear(parts, self.first))
        return cast(Tensor, self(torch.cat([*parts], dim=1)))

    def logits_of_parts(self, parts: Sequence[Tensor], out: nn.Linear) -> Tensor:
        """`of_parts`, then an output layer of one unit: (B,)."""
        if runs_on_gpu(parts[0]) and may_replace(self, out):
            if not torch.is_grad_enabled():
                return exact_in_answers(self._at_once(parts), out.weight[0]) + out.bias
            return self._at_once(parts, out).squeeze(-1)
        return cast(Tensor, out(self.of_parts(parts)).squeeze(1))

    def _at_once(self, parts: Sequence[Tensor], out: nn.Linear | None = None) -> Tensor:
        return self._dense(aligned(parts, self.first.in_features), self.layers, out)

    def _dense(self, x: Tensor, layers: Iterable[nn.Module], out: nn.Linear | None = None, **how: bool) -> Tensor:
        hidden = [cast(nn.Linear, each) for each in layers]
        return dense(x, hidden, self.dropout if self.training else 0.0, out, **how)

    def after_first(self, x: Tensor) -> Tensor:
        """The layers after the first linear one, from its output (..., dims[1]), which they overwrite."""
        x, scale = self._hidden(x)
        return x if scale == 1.0 else x * scale

    def logits(self, first: Tensor, out: nn.Linear) -> Tensor:
        """`after_first`, then an output layer of one unit: (..., dims[1]) -> (...)."""
        x, scale = self._hidden(first)
        weight = out.weight[0] if scale == 1.0 else out.weight[0] * scale
        # A product with a matrix of one row takes several times as long.
        return exact_in_answers(x, weight) + out.bias

    def _hidden(self, x: Tensor) -> tuple[Tensor, float]:
        """The last layer's units, and the factor that they still lack."""
        if runs_on_gpu(x) and torch.is_grad_enabled() and len(self.layers) > 1:
            return self._dense(x, self.layers[1:], is_raw=True), 1.0
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


def runs_on_gpu(x: Tensor) -> bool:
    """Whether `dense` is for this input; compilers merge torch's own operations themselves."""
    return x.device.type in ("cuda", "meta") and not torch.compiler.is_compiling()


def exact_in_answers(x: Tensor, weight: Tensor) -> Tensor:
    """Units (..., W) times an output layer's weight (W,); without gradients on a GPU in float32.

    A logit rounded to bf16 moves its probability by up to .001.
    """
    if not runs_on_gpu(x) or torch.is_grad_enabled():
        return x @ weight
    with torch.autocast(x.device.type, enabled=False):
        return x.float() @ weight.float()


def dense(
    x: Tensor, layers: Sequence[nn.Linear], dropout: float, out: nn.Linear | None = None, *, is_raw: bool = False
) -> Tensor:
    """Layers on a GPU, each followed by ReLU and dropout, then `out`, if given: (..., dims[0]) -> (..., dims[-1]).

    If the input `is_raw`, ReLU and dropout come first. It may have more columns than the first layer, of zeros.
    """
    if out is not None and not torch.is_grad_enabled():
        return (exact_in_answers(dense(x, layers, dropout, is_raw=is_raw), out.weight[0]) + out.bias).unsqueeze(-1)
    every = [*layers] if out is None else [*layers, out]
    narrow = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if narrow else every[0].weight.dtype
    parameters = [each for layer in every for each in (layer.weight, layer.bias)]
    rows = x.reshape(-1, x.shape[-1])
    found = cast(Tensor, DenseLayers.apply(rows, is_raw, dtype, dropout, len(layers), *parameters))  # type: ignore[no-untyped-call]
    return found.view(*x.shape[:-1], found.shape[1])


def aligned_linear(x: Tensor | Sequence[Tensor], layer: nn.Linear) -> Tensor:
    """The layer's output, computed on an input padded with zeros to a multiple of 8 columns.

    Products of matrices whose rows start at odd addresses take a CPU up to one and a half times as long: with
    (8192, 479) x (479, 1024) the three of a training step took 368 ms on one thread, against 278 ms at a width of 480.
    A GPU reads 16 bytes at a time, 8 numbers of 2 bytes. Parts of the input are put side by side and padded in one
    copy.
    """
    parts = [x] if isinstance(x, Tensor) else x
    more, last = -layer.in_features % 8, parts[-1]
    if torch.compiler.is_compiling() or not more or last.shape[:-1].numel() * layer.in_features < SMALL:
        return cast(Tensor, layer(torch.cat([*parts], dim=-1) if len(parts) > 1 else last))
    return F.linear(aligned(parts, layer.in_features), F.pad(layer.weight, (0, more)), layer.bias)


def aligned(parts: Sequence[Tensor], width: int) -> Tensor:
    """Parts side by side, (..., width) together; many rows are padded with zeros to a multiple of 8 columns."""
    *rows, _ = parts[-1].shape
    more = [parts[-1].new_zeros(*rows, -width % 8)] if width % 8 and math.prod(rows) * width >= SMALL else []
    return torch.cat([*parts, *more], dim=-1) if len(parts) + len(more) > 1 else parts[0]


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
        return tuple(self.layers[1:].parameters())

    def can_replace(self, x: Tensor) -> bool:
        """Whether code written by hand may run in place of this MLP, with input as `x`."""
        plain = may_replace(self) and self.kind in ("sigmoid", "relu") and (self.dropout.p == 0 or not self.training)
        return plain and (x.dtype == self.first.weight.dtype or torch.is_autocast_enabled(x.device.type))

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        return self.after_first(self.first(x))

    def after_first(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """The layers after the first linear one, from its output (N, dims[1]), which they may overwrite."""
        in_place = self.kind == "relu" and may_replace(self)
        for place, act in enumerate(self.activations):
            x = x if place == 0 else self.layers[place](x)
            x = x.relu_() if in_place else act(x, present) if isinstance(act, Dice) else act(x)
            x = self.dropout(x)
        return x


def start_glorot(layer: nn.Linear) -> None:
    """Set the first values: weights Glorot-uniform, ±sqrt(6 / (in + out)), biases 0."""
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)


def activation(kind: Activation, width: int) -> nn.Module:
    """An activation (N, width) -> (N, width); PReLU starts with a slope of 0.1 for each unit."""
    if kind == "dice":
        return Dice(width)
    if kind == "prelu":
        return nn.PReLU(width, init=0.1)
    return nn.Sigmoid() if kind == "sigmoid" else nn.ReLU()


Given = ParamSpec("Given")
T = TypeVar("T")


def uncompiled(function: Callable[Given, T]) -> Callable[Given, T]:
    """`torch.compiler.disable`, without loading the compiler before a program is compiled.

    Loading it takes as long as loading torch itself; most processes never compile.
    """

    @wraps(function)
    def called(*given: Given.args, **named: Given.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return disabled(*given, **named)  # type: ignore[no-any-return]
        return function(*given, **named)

    return called


class RowStatistics(nn.Module):
    """The mean and variance of each unit: over the given rows in training, running values in prediction.

    So in training a row's result depends on the other rows, and micro-batches and ranks standardise their parts of a
    batch separately. The running values follow the whole batch once a step (`follow_together`). Without rows they stay;
    a single row has variance 0.
    """

    mean: Tensor
    variance: Tensor
    parts: list[Tensor] | None = None
    """Rows, mean and variance of each part of a step, (2 width + 1,). None if each batch is a step."""

    def __init__(self, width: int, *, momentum: float, eps: float) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def standardised(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """The units (N, W), in fp32 or wider; `present` (N,) marks the rows that count."""
        away, variance = self._of_rows(x, present) if self.training else (x - self.mean, self.variance)
        return away * (variance + self.eps).rsqrt()

    def _of_rows(self, x: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
        """Distances from the mean (N, W) and the variance (W,) of the rows that count; updates the running values.

        If numbers hardly differ, their rounded mean is further from them than they are from each other. So the mean of
        the distances is subtracted too. With units of 100 ± 1e-4 that takes the relative error of the gradient, in
        float32, from 1e-2 to 4e-7.
        """
        x = at_least_fp32(x)
        own = x.new_ones(len(x), 1) if present is None else present.unsqueeze(1).to(x.dtype)
        count = own.sum()
        rows = count.clamp(min=1)
        first = (x.detach() * own).sum(0) / rows
        away = x - first
        rest = (away * own).sum(0) / rows
        away = away - rest
        variance = (away.square() * own).sum(0) / rows
        with torch.no_grad():
            if self.parts is None:
                self.follow(count, first + rest, variance)
            else:
                self._keep(torch.cat([count.view(1), first + rest, variance]))
        return away, variance

    @uncompiled
    def _keep(self, part: Tensor) -> None:
        """Keep a part of a step, outside compiled programs, which would recompile for each length of the list."""
        assert self.parts is not None
        self.parts.append(part)

    @torch.no_grad()
    def follow(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Move the running values towards those of a step: count (), mean (W,) and variance (W,)."""
        rate = self.momentum * (count > 0)
        self.mean.lerp_(mean, rate)
        self.variance.lerp_(variance, rate)


class Dice(RowStatistics):
    """p x + (1 - p) a x with p = sigmoid of the standardised x and a slope a for each unit: (N, W) -> (N, W).

    Zhou et al.: Deep Interest Network for Click-Through Rate Prediction, KDD 2018, equation 8.
    """

    def __init__(self, width: int, *, momentum: float = 0.1, eps: float = 1e-8) -> None:
        super().__init__(width, momentum=momentum, eps=eps)
        self.slope = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """`present` (N,) marks the rows that count."""
        share = torch.sigmoid(self.standardised(x, present)).to(x.dtype)
        # Equation 8: f(s) = p(s) s + (1 - p(s)) a s.
        return x * (share + (1 - share) * self.slope)


class BatchNorm(RowStatistics):
    """g z + b for the standardised z of each unit, with g = 1 and b = 0 at first: (N, W) -> (N, W).

    Ioffe and Szegedy: Batch Normalization, ICML 2015, algorithms 1 and 2. Predictions take (..., W).
    """

    def __init__(self, width: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__(width, momentum=momentum, eps=eps)
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """All rows count."""
        return torch.addcmul(self.shift, self.standardised(x), self.scale).to(x.dtype)


def follow_together(unit: RowStatistics, parts: Tensor) -> None:
    """Update the running values by all P parts of a step: rows, mean and variance of each (P, 2 W + 1)."""
    rows, means, variances = torch.split(parts, [1, len(unit.mean), len(unit.mean)], dim=1)
    count = rows.sum()
    shares = rows / count.clamp(min=1)
    mean = (shares * means).sum(0)
    # Variance of all rows = mean of the parts' variances + variance of their means (Chan et al., 1979).
    unit.follow(count, mean, (shares * (variances + (means - mean).square())).sum(0))
