"""Optimizers that torch lacks: RMSprop in Keras's form, FTRL and row-wise Adagrad."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from recspec.nn import kernels
from recspec.training.optimizer_settings import OptimizerSettings
from recspec.training.row_optimizers import Group, RowOptimizer, is_packed, moving, rows_of


class FormulaOptimizer(RowOptimizer):
    """An optimizer with one formula for blocks of whole parameters and for rows."""

    def _step_whole(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    if group["weight_decay"]:
                        gradient = gradient.add(parameter, alpha=group["weight_decay"])
                    self.update_whole(group, parameter, gradient)

    @abstractmethod
    def update_whole(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        """Update all of `weight`."""


class RmsProp(FormulaOptimizer):
    """v <- rho v + (1 - rho) g^2, w <- w - lr g / (sqrt(v) + eps); v starts at 0. Tieleman & Hinton 2012, Keras's form.

    With momentum m: u <- m u + g / (sqrt(v) + eps), w <- w - lr u.
    """

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        defaults = {
            "lr": settings.learning_rate,
            "rho": settings.rho,
            "eps": settings.eps or 1e-7,
            "momentum": settings.momentum,
            "weight_decay": settings.weight_decay,
        }
        super().__init__(named, defaults)
        self.moves_every_row = moving(settings, "momentum", "weight_decay")

    def _count(self, group: Group, weight: Tensor) -> int:
        """Count a step of this parameter; returns its number, starting at 1."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["square"] = torch.zeros_like(weight)
            if group["momentum"]:
                state["velocity"] = torch.zeros_like(weight)
        state["step"] += 1
        return int(state["step"])

    def update_whole(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        """The formula on blocks, after the decay that unseen rows missed."""
        step, state = self._count(group, weight), self.state[weight]
        if "row_step" in state:
            state["square"].mul_(_missed(group["rho"], step - 1, state.pop("row_step")))
        if not group["momentum"]:
            self._update(group, weight, state["square"], gradient)
            return
        for root, rows, square, slope, speed in _blocks(1, weight, state["square"], gradient, state["velocity"]):
            square.mul_(group["rho"]).addcmul_(slope, slope, value=1 - group["rho"])
            speed.mul_(group["momentum"]).addcdiv_(slope, torch.sqrt(square, out=root).add_(group["eps"]))
            rows.sub_(speed, alpha=group["lr"])

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """The formula on the rows, after the decay of the steps that did not see them."""
        step, state = self._count(group, weight), self.state[weight]
        if "row_step" not in state:
            state["row_step"] = torch.full((len(weight),), step - 1, dtype=torch.int32, device=weight.device)
        with rows_of(ids, state["square"], weight) as (square, rows):
            square.mul_(_missed(group["rho"], step - 1, state["row_step"].index_select(0, ids)))
            self._update(group, rows, square, gradient)
        state["row_step"].index_fill_(0, ids, step)

    @staticmethod
    def _update(group: Group, weight: Tensor, square: Tensor, gradient: Tensor) -> None:
        """The formula without momentum; on a CPU, one pass of Adam with a first decay rate of 0.

        Adam's first moment is then the gradient, in scratch memory, and at so late a step its bias correction is 1.
        Separate operations take three times as long, mostly in the root: MKL's takes six times as long where some
        numbers are zero, as the state of unseen rows is.
        """
        if weight.device.type == "cpu" and is_packed(weight):
            blocks = zip(*_blocks(1, weight, square, gradient), strict=True)
            room, rows, squares, slopes = (list(each) for each in blocks)
            room[0].zero_()
            adam(
                rows,
                slopes,
                room,
                squares,
                [],
                [torch.tensor(1e12) for _ in rows],
                fused=True,
                foreach=False,
                amsgrad=False,
                beta1=0.0,
                beta2=group["rho"],
                lr=group["lr"],
                weight_decay=0.0,
                eps=group["eps"],
                maximize=False,
            )
        else:
            square.mul_(group["rho"]).addcmul_(gradient, gradient, value=1 - group["rho"])
            root = square.sqrt().add_(group["eps"])
            weight.addcdiv_(gradient, root, value=-group["lr"])


def _missed(rho: float, step: int, row_step: Tensor) -> Tensor:
    """rho to the power of the steps since `row_step` (m,), as (m, 1)."""
    return torch.pow(rho, (step - row_step).float()).unsqueeze(1)


class Ftrl(FormulaOptimizer):
    """Follow the regularised leader, per coordinate: McMahan et al. 2013 with beta 0, in TensorFlow's form.

    s <- (sqrt(n + g^2) - sqrt(n)) / lr, z <- z + g - s w, n <- n + g^2,
    w <- 0 where |z| <= l1, else -(z - sign(z) l1) / (sqrt(n) / lr + 2 l2).

    n starts at `initial_accumulator`, z at 0. The first step all but erases a weight's initial value, so weights should
    start at 0. A step at learning rate 0 changes nothing.
    """

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        defaults = {
            "lr": settings.learning_rate,
            "l1": settings.l1,
            "l2": settings.l2,
            "start": 0.1 if settings.initial_accumulator is None else settings.initial_accumulator,
            "weight_decay": settings.weight_decay,
        }
        super().__init__(named, defaults)
        self.moves_every_row = moving(settings, "weight_decay")

    def _state(self, group: Group, weight: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[weight]
        if not state:
            state["accumulator"] = torch.full_like(weight, group["start"])
            state["linear"] = torch.zeros_like(weight)
        return state["accumulator"], state["linear"]

    def update_whole(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        """The formula on blocks."""
        for block in _blocks(2, weight, *self._state(group, weight), gradient):
            self._update(group, block)

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """The formula on the rows."""
        with rows_of(ids, weight, *self._state(group, weight)) as rows:
            self._update(group, (torch.empty_like(gradient), torch.empty_like(gradient), *rows, gradient))

    @staticmethod
    def _update(group: Group, block: tuple[Tensor, ...]) -> None:
        before, root, weight, accumulator, linear, gradient = block
        rate, l1, l2 = group["lr"], group["l1"], group["l2"]
        if rate == 0:
            return
        torch.sqrt(accumulator, out=before)
        torch.sqrt(accumulator.addcmul_(gradient, gradient), out=root)
        linear.add_(gradient).addcmul_(before.sub_(root), weight, value=1 / rate)
        if l2:
            root.add_(2 * l2 * rate)
        pulled = nn.functional.softshrink(linear, l1) if l1 else linear
        torch.addcdiv(before.zero_(), pulled, root, value=-rate, out=weight)


class RowwiseAdagrad(FormulaOptimizer):
    """Adagrad with one accumulator a row: n <- n + mean of g^2 over the row, w <- w - lr g / (sqrt(n) + eps).

    The state has one number for each row of a table. Every element of a vector is a row.
    """

    rule: ClassVar[kernels.Rule | None] = "rowwise_adagrad"

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        defaults = {
            "lr": settings.learning_rate,
            "start": settings.initial_accumulator or 0.0,
            "eps": settings.eps or 1e-10,
            "weight_decay": settings.weight_decay,
        }
        super().__init__(named, defaults)
        self.moves_every_row = moving(settings, "weight_decay")

    def _sums(self, group: Group, weight: Tensor) -> Tensor:
        """The rows' accumulators (rows, 1)."""
        state = self.state[weight]
        if not state:
            rows = len(weight) if weight.dim() else 1
            state["sum"] = torch.full((rows, 1), group["start"], dtype=weight.dtype, device=weight.device)
        return state["sum"]  # type: ignore[no-any-return]

    def row_states(self, group: Group, weight: Tensor) -> list[Tensor]:
        """The rows' accumulators (rows, 1)."""
        return [self._sums(group, weight)]

    def update_whole(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        """The formula on all rows."""
        total = self._sums(group, weight)
        alike = (len(total), math.prod(weight.shape[1:]))  # -1 fails for a table without rows
        self._update(group, weight.view(alike), total, gradient.reshape(alike))

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """The formula on the rows seen."""
        with rows_of(ids, weight, self._sums(group, weight)) as (rows, total):
            self._update(group, rows, total, gradient)

    @staticmethod
    def _update(group: Group, weight: Tensor, total: Tensor, gradient: Tensor) -> None:
        total.add_(gradient.square().mean(1, keepdim=True))
        inverse = total.sqrt().add_(group["eps"]).reciprocal_()
        weight.addcmul_(gradient, inverse, value=-group["lr"])


BLOCK = 1 << 15
"""Numbers of a parameter that a CPU thread updates together. Weights, state and gradient of a block stay in the cache
between operations, and torch gives a thread at least this many."""


def _blocks(spare: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`spare` scratch tensors, then the tensors, all of one shape; on a CPU in flat blocks.

    Scratch memory is allocated once, because fresh pages cost more than the arithmetic.
    """
    first, size = tensors[0], BLOCK * torch.get_num_threads()
    if first.device.type != "cpu" or first.numel() <= size or not all(tensor.is_contiguous() for tensor in tensors):
        yield (*(torch.empty_like(first) for _ in range(spare)), *tensors)
        return
    room = [first.new_empty(size) for _ in range(spare)]
    for blocks in zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True):
        yield (*(each[: len(blocks[0])] for each in room), *blocks)
