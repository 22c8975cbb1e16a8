"""Activations of a sequence model's layers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from recspec.nn.losses import at_least_fp32

Activation = Literal["prelu", "dice", "sigmoid", "relu"]


class Dice(nn.Module):
    """p x + (1 - p) a x with p = sigmoid of the standardised x and a slope a for each unit: (N, W) -> (N, W).

    Zhou et al.: Deep Interest Network for Click-Through Rate Prediction, KDD 2018, equation 8. Training standardises by
    the mean and variance of the given rows, and prediction by running values. So in training a row's result depends on
    the other rows, and micro-batches and ranks standardise their parts of a batch separately. The running values follow
    the whole batch once a step (`follow_together`). Without rows they stay; a single row has variance 0.
    """

    mean: Tensor
    variance: Tensor
    parts: list[Tensor] | None = None
    """Rows, mean and variance of each part of a step, (2 width + 1,). None if each batch is a step."""

    def __init__(self, width: int, *, momentum: float = 0.1, eps: float = 1e-8) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.slope = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """`present` (N,) marks the rows that count."""
        away, variance = self._of_rows(x, present) if self.training else (x - self.mean, self.variance)
        share = torch.sigmoid(away * (variance + self.eps).rsqrt()).to(x.dtype)
        return x * (share + (1 - share) * self.slope)

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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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


def follow_together(unit: Dice, parts: Tensor) -> None:
    """Update the running values by all P parts of a step: rows, mean and variance of each (P, 2 W + 1)."""
    rows, means, variances = torch.split(parts, [1, len(unit.mean), len(unit.mean)], dim=1)
    count = rows.sum()
    shares = rows / count.clamp(min=1)
    mean = (shares * means).sum(0)
    unit.follow(count, mean, (shares * (variances + (means - mean).square())).sum(0))


def activation(kind: Activation, width: int) -> nn.Module:
    """An activation (N, width) -> (N, width); PReLU starts with a slope of 0.1 for each unit."""
    if kind == "dice":
        return Dice(width)
    if kind == "prelu":
        return nn.PReLU(width, init=0.1)
    return nn.Sigmoid() if kind == "sigmoid" else nn.ReLU()
