"""Optimizers taking steps on made-up gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args

import torch
from torch import Tensor, nn

from recspec.training.optimizers import Optimizers
from recspec.training.settings import OptimizerSettings

EVERY = get_args(OptimizerSettings.model_fields["optimizer"].annotation)


def settings(optimizer: str, **values: object) -> OptimizerSettings:
    return OptimizerSettings.model_validate({"optimizer": optimizer, "learning_rate": 0.5, **values})


SPARSE_EXACT = ("sgd", "adagrad", "rowwise_adagrad", "rmsprop", "ftrl")


def step_by_step(given: OptimizerSettings, start: list[float], *gradients: list[float]) -> list[list[float]]:
    """The weights after each of the gradients."""
    weight = nn.Parameter(torch.tensor(start))
    optimizers = Optimizers([("weight", weight)], given)
    seen = []
    for gradient in gradients:
        weight.grad = torch.tensor(gradient).view_as(weight)
        optimizers.step()
        seen.append(weight.detach().tolist())
    return seen


def sparse(rows: int, ids: list[int], values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor(ids, dtype=torch.int64)[None], values, (rows, values.shape[1]), check_invariants=True
    )


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    deep = nn.ModuleDict({"embeddings": nn.Embedding(5, 4, sparse=True), "mlp": nn.Linear(4, 2)})
    return nn.ModuleDict({"wide": nn.Linear(3, 1), "deep": deep})


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "every third row": lambda x: x.repeat_interleave(3, dim=0)[::3],
    "behind others": lambda x: torch.cat([torch.full((1, x.shape[1]), 7.0), x])[1:],
}


"""The same matrix, laid out in memory in several ways."""


WITH_MOMENTUM = [*EVERY, "sgd with momentum", "rmsprop with momentum"]


def steps_of(optimizer: str, weight: nn.Parameter, gradients: Iterable[Tensor], *, save: bool = False) -> Tensor:
    """The weight after a step for each gradient; with `save`, through the tensors of a checkpoint after each."""
    kind, _, momentum = optimizer.partition(" with ")
    given = settings(kind, learning_rate=0.1, **({"momentum": 0.5} if momentum else {}))
    optimizers = Optimizers([("weight", weight)], given)
    for gradient in gradients:
        weight.grad = gradient
        optimizers.step()
        assert weight.grad is gradient, "a gradient set by hand stays where it was"
        if save:
            kept = {name: tensor.contiguous() for name, tensor in optimizers.tensors().items()}
            optimizers = Optimizers([("weight", weight)], given)
            optimizers.restore(kept)
    return weight.detach().contiguous()
