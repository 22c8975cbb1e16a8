"""A running mean of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """A running mean of a model's weights and buffers: a <- d a + (1 - d) w after each step.

    The decay d rises as (1 + t) / (10 + t) with the step t up to its setting, so that the first weights fade quickly.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        # Buffers too: averaged weights do not fit statistics (Dice) of the units of other weights. Ids have no mean.
        all_of_them = dict(model.named_parameters()) | dict(model.named_buffers())
        self.weights: dict[str, Tensor] = {name: each for name, each in all_of_them.items() if each.is_floating_point()}
        self.tensors = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step number `step`, counted from 0."""
        new = 1 - min(self.decay, (1 + step) / (10 + step))
        # On a GPU, one launch for many tensors.
        torch._foreach_lerp_(list(self.tensors.values()), [self.weights[name] for name in self.tensors], new)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint's mean; tensors that an older checkpoint lacks (buffers) come from the model."""
        for name, mean in self.tensors.items():
            tensor = saved.get(name, self.weights[name].detach())
            if tensor.shape != mean.shape:
                raise ValueError(f"the average of '{name}' has shape {tuple(tensor.shape)}")
            mean.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the mean as its weights until the end of the block."""
        own = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._give(self.tensors)
        try:
            yield
        finally:
            self._give(own)

    @torch.no_grad()
    def _give(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(tensors[name])
