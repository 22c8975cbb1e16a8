"""Optimizers that update a whole parameter, or only the rows that a step has seen.

A gradient is dense, or sparse: a COO tensor of one sparse dimension whose ids may repeat, as an embedding table gets
from the ids of a batch. With a sparse gradient only the rows seen are read and written, so a step costs as much as the
batch, not as much as the table. Whether the result equals that of the dense gradient depends on the optimizer:

- SGD, Adagrad, row-wise Adagrad: equal. The dense formula leaves rows without a gradient as they are, too.
- RMSprop: equal. When a row is next seen, the update applies the decay that its mean square missed.
- FTRL: equal while the learning rate is constant and the weights start at zero. Otherwise the dense formula rewrites
  unseen rows, by the new rate or from their empty history; the sparse one leaves them, as TensorFlow's does.
- Adam: different. Moments of unseen rows wait instead of decaying, and such rows stand still instead of moving on by
  their old moments; the bias correction counts all steps. This is known as lazy Adam.
- Momentum, AdamW and weight decay move every row at every step; they refuse sparse gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn, optim
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam

from recspec.errors import SettingsError, listed
from recspec.nn import kernels
from recspec.training.optimizer_settings import OptimizerSettings

Group: TypeAlias = dict[str, Any]
"""Parameters and the settings they share; torch calls this a group."""


class RowOptimizer(optim.Optimizer):
    """An optimizer that updates rows of sparse gradients one way and whole parameters another.

    torch's own class updates whole parameters where it has a fused form: one pass over weights and state instead of
    one for each operation, 2 to 4 times faster on a CPU. A fused form reads tensors in memory order, whatever their
    strides, so a gradient with other strides than its weight is copied first.
    """

    moves_every_row: str | None = None
    """The setting, if any, that makes this optimizer move rows without a gradient."""

    rule: ClassVar[kernels.Rule | None] = None
    """The kernel rule, if any, that updates rows in one pass."""

    backend: kernels.Backend | None = None
    """What updates rows; by default Triton on a GPU that has it, else torch."""

    # Subclasses of fused optimizers set `_step_supports_amp_scaling = False`. Otherwise a GradScaler leaves unscaling
    # to the fused kernel, which does not see the rows.

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        sparse = [
            (group, parameter, parameter.grad)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter.grad.is_sparse
        ]
        turned = [
            (parameter, parameter.grad)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
            and not parameter.grad.is_sparse
            and parameter.grad.stride() != parameter.stride()
        ]
        if sparse:
            self._check_rows()
        try:
            for parameter, gradient in turned:
                parameter.grad = laid_as(parameter, gradient)
            for _, parameter, _ in sparse:
                parameter.grad = None
            self._step_whole()
            for group, parameter, gradient in sparse:
                if self.rule and kernels.uses_triton(self.backend, parameter.device) and kernels.can_update(parameter):
                    self._update_by_kernel(group, parameter, gradient)
                else:
                    for place, (ids, values) in enumerate(kernels.summed_rows(gradient)):
                        if place and "step" in self.state[parameter]:
                            self.state[parameter]["step"] -= 1  # each block counts one step; together they are one
                        self.update_rows(group, parameter, ids, values.to(parameter.dtype).contiguous())
        finally:
            for parameter, gradient in (*turned, *((each, own) for _, each, own in sparse)):
                parameter.grad = gradient

    def _step_whole(self) -> None:
        super().step()

    @abstractmethod
    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """Update the rows `ids` (m,), all different, by their gradients (m, dim), and count a step."""

    def row_states(self, group: Group, weight: Tensor) -> list[Tensor]:  # noqa: ARG002
        """The state tensors that the kernel rule takes, created if missing."""
        return []

    def count_step(self, weight: Tensor) -> None:
        """Count a step, if the state counts steps."""
        if "step" in self.state[weight]:
            self.state[weight]["step"] += 1

    def _update_by_kernel(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        """Update the rows of a sparse gradient in one pass."""
        assert self.rule is not None
        states = self.row_states(group, weight)
        self.count_step(weight)
        betas, corrections = group.get("betas", (0.0, 0.0)), None
        if self.rule == "adam":
            # In double precision: in single precision 1 - 0.999 has a relative error of 6e-5.
            left = [1 - beta ** self.state[weight]["step"].double() for beta in betas]
            corrections = torch.stack(left).to(weight.device, torch.float32)
        kernels.update_rows(
            self.rule,
            weight,
            gradient._indices()[0],
            gradient._values().contiguous(),
            states,
            lr=group["lr"],
            eps=group.get("eps", 0.0),
            betas=betas,
            corrections=corrections,
        )

    def _check_rows(self) -> None:
        if self.moves_every_row is None:
            return
        names = [
            name
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if parameter.grad is not None and parameter.grad.is_sparse
        ]
        raise SettingsError(
            f"{self.moves_every_row} moves every row of a table at every step, but {listed(names)} "
            f"{'has' if len(names) == 1 else 'have'} sparse gradients, of the rows seen alone; "
            "turn sparse gradients off, or give that part another optimizer (train.parts)"
        )


class Sgd(RowOptimizer, optim.SGD):
    """w <- w - lr g, with momentum m: u <- m u + g, w <- w - lr u."""

    rule: ClassVar[kernels.Rule | None] = "sgd"

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        optim.SGD.__init__(
            self,
            named,
            settings.learning_rate,
            settings.momentum,
            weight_decay=settings.weight_decay,
            fused=_can_fuse(named, "cpu", "cuda"),
        )
        self._step_supports_amp_scaling = False
        self.moves_every_row = moving(settings, "momentum", "weight_decay")

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """w <- w - lr g on the rows."""
        with rows_of(ids, weight) as (rows,):  # index_add_ takes twice as long
            rows.sub_(gradient, alpha=group["lr"])


class Adagrad(RowOptimizer, optim.Adagrad):
    """n <- n + g^2, w <- w - lr g / (sqrt(n) + eps); n starts at `initial_accumulator`. Duchi et al. 2011."""

    rule: ClassVar[kernels.Rule | None] = "adagrad"

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        optim.Adagrad.__init__(
            self,
            named,
            settings.learning_rate,
            weight_decay=settings.weight_decay,
            initial_accumulator_value=settings.initial_accumulator or 0.0,
            eps=settings.eps or 1e-10,
            fused=_can_fuse(named, "cpu"),
        )
        self._step_supports_amp_scaling = False
        self.moves_every_row = moving(settings, "weight_decay")

    def row_states(self, group: Group, weight: Tensor) -> list[Tensor]:  # noqa: ARG002
        """The sums of squares (rows, dim)."""
        return [self.state[weight]["sum"]]

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """The same kernel on the rows."""
        state = self.state[weight]
        with rows_of(ids, weight, state["sum"]) as (rows, total):
            adagrad(
                [rows],
                [gradient],
                [total],
                [state["step"]],
                fused=group["fused"],
                foreach=False,
                lr=group["lr"],
                weight_decay=0.0,
                lr_decay=0.0,
                eps=group["eps"],
                maximize=False,
            )


class Adam(RowOptimizer, optim.Adam):
    """Adam with bias correction, Kingma & Ba 2015; also AdamW, Loshchilov & Hutter 2019, with decoupled decay."""

    rule: ClassVar[kernels.Rule | None] = "adam"

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        decoupled = settings.optimizer == "adamw"
        optim.Adam.__init__(
            self,
            named,
            settings.learning_rate,
            settings.betas,
            settings.eps or 1e-8,
            settings.weight_decay,
            fused=_can_fuse(named, "cpu", "cuda"),
            decoupled_weight_decay=decoupled,
        )
        self._step_supports_amp_scaling = False
        self.moves_every_row = "optimizer 'adamw'" if decoupled else moving(settings, "weight_decay")

    def row_states(self, group: Group, weight: Tensor) -> list[Tensor]:
        """The moments (rows, dim)."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device if group["fused"] else "cpu")
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        return [state["exp_avg"], state["exp_avg_sq"]]

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """Lazy Adam: moments of the rows seen, bias correction by all steps."""
        moments, state = self.row_states(group, weight), self.state[weight]
        with rows_of(ids, weight, *moments) as (rows, mean, square):
            beta1, beta2 = group["betas"]
            adam(
                [rows],
                [gradient],
                [mean],
                [square],
                [],
                [state["step"]],
                fused=group["fused"],
                foreach=False,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=0.0,
                eps=group["eps"],
                maximize=False,
            )


def sparse_pays(rows: int, width: int, ids: int) -> bool:
    """Whether a sparse gradient of `ids` rows is cheaper than a dense gradient of the whole table.

    In whole training steps an id of a row of 16 numbers costs about as much as 47 numbers of a densely updated table.
    A dense gradient is filled with zeros, summed over the lists that look it up, read and written again.
    """
    return rows * width > ids * (SORTING + TOUCHING * width)


SORTING, TOUCHING = 15, 2
"""Cost of an id and of each number of its row, in numbers of a dense step."""


def moving(settings: OptimizerSettings, *names: str) -> str | None:
    """The first setting that makes the optimizer move rows without a gradient."""
    return next((f"{name} {getattr(settings, name):g}" for name in names if getattr(settings, name)), None)


def _can_fuse(named: Sequence[tuple[str, nn.Parameter]], *devices: str) -> bool:
    return all(parameter.device.type in devices and is_packed(parameter) for _, parameter in named)


def laid_as(weight: Tensor, x: Tensor) -> Tensor:
    """`x` with the strides of a weight of its shape; copied only if they differ."""
    return x if x.stride() == weight.stride() else torch.empty_like(weight).copy_(x)


def is_packed(weight: Tensor) -> bool:
    """Whether a weight fills its memory without gaps, so that other tensors can have the same layout."""
    return torch.empty_like(weight, device="meta").stride() == weight.stride()


@contextmanager
def rows_of(ids: Tensor, *tables: Tensor) -> Iterator[list[Tensor]]:
    """Copies of the rows `ids` of each table; the end of the block writes them back."""
    rows = [_gather(table, ids) for table in tables]
    yield rows
    for table, changed in zip(tables, rows, strict=True):
        if table.device.type == "cpu" and table.is_contiguous():
            _bytes_of(table)[ids.numpy()] = _bytes_of(changed)
        else:
            table.index_copy_(0, ids, changed)


def _gather(table: Tensor, ids: Tensor) -> Tensor:
    """The rows `ids` (m, dim)."""
    if table.device.type != "cpu":
        return table.index_select(0, ids)
    # Bags of one row: they prefetch, and index_select does not. A table's rows are never in the cache.
    return nn.functional.embedding_bag(ids, table, torch.arange(len(ids)), mode="sum")


def _bytes_of(table: Tensor) -> npt.NDArray[np.void]:
    """Rows as byte strings (rows,): NumPy copies whole rows, twice as fast as torch, which copies numbers."""
    rows = table.detach().view(torch.uint8).numpy()
    return rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
