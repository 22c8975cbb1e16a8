"""Optimizers that update a whole parameter, or only the rows that a step has seen.

A gradient is dense, or sparse: a COO tensor of one sparse dimension whose ids may repeat, as an embedding table gets
from the ids of a batch. A sparse gradient reads and writes only the rows seen, so a step costs as much as the batch,
not as much as the table. Whether the result equals that of the dense gradient depends on the optimizer:

- SGD, Adagrad, row-wise Adagrad: equal. The dense formula leaves rows without a gradient as they are, too.
- RMSprop: equal. When a row is next seen, the update applies the decay that its mean square missed.
- FTRL: equal while the learning rate is constant and the weights start at zero. Otherwise the dense formula rewrites
  unseen rows; the sparse one leaves them, as TensorFlow's does.
- Adam: different (lazy Adam). Unseen rows and their moments stand still; the bias correction counts all steps.
- Momentum, AdamW and weight decay move every row at every step; they refuse sparse gradients.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn, optim
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam

from recspec.base.errors import SettingsError, listed
from recspec.models.layers import kernels, uncompiled
from recspec.training.settings import OptimizerSettings, moves_every_row

Group: TypeAlias = dict[str, Any]
"""Parameters and the settings they share; torch calls this a group."""

adam_step = partial(adam, foreach=False, amsgrad=False, weight_decay=0.0, maximize=False)
"""torch's step of Adam on lists: weights, gradients, first moments, second moments, no maxima, step counts."""


class RowOptimizer(optim.Optimizer):
    """An optimizer that updates rows of sparse gradients one way and whole parameters another.

    torch's own class updates whole parameters if it has a fused form: one pass over weights and state, 2 to 4 times
    faster on a CPU than one pass for each operation. A fused form ignores strides, so a gradient with other strides
    than its weight is copied first.

    torch wraps some methods of its optimizers to keep them out of compiled programs. The first call of a wrapper loads
    the compiler, which takes as long as loading torch. So this class calls the wrapped functions.
    """

    add_param_group = uncompiled(inspect.unwrap(optim.Optimizer.add_param_group))
    zero_grad = uncompiled(inspect.unwrap(optim.Optimizer.zero_grad))

    moves_every_row: str | None = None
    """The setting, if any, that makes this optimizer move rows without a gradient."""

    rule: ClassVar[kernels.Rule | None] = None
    """The kernel rule, if any, that updates rows in one pass."""

    backend: kernels.Backend | None = None
    """What updates rows; by default Triton on a GPU that has it, else torch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        given = [(group, each, each.grad) for group in self.param_groups for each in group["params"]]
        sparse = [each for each in given if each[2] is not None and each[2].is_sparse]
        turned = [
            (parameter, gradient)
            for _, parameter, gradient in given
            if gradient is not None and not gradient.is_sparse and gradient.stride() != parameter.stride()
        ]
        if sparse and self.moves_every_row:
            names = [name for group in self.param_groups for name in group["param_names"]]
            told = [
                name
                for name, (_, _, gradient) in zip(names, given, strict=True)
                if gradient is not None and gradient.is_sparse
            ]
            raise SettingsError(
                f"{self.moves_every_row} moves every row of a table at every step, but {listed(told)} "
                f"{'has' if len(told) == 1 else 'have'} sparse gradients, of the rows seen alone; "
                "turn sparse gradients off, or give that part another optimizer (train.parts)"
            )
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
        inspect.unwrap(super().step.__func__)(self)  # type: ignore[attr-defined]

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
        ids, values = gradient._indices()[0], gradient._values().contiguous()
        rates = {"lr": group["lr"], "eps": group.get("eps", 0.0)}
        kernels.update_rows(self.rule, weight, ids, values, states, betas=betas, corrections=corrections, **rates)


class Sgd(RowOptimizer, optim.SGD):
    """w <- w - lr g, with momentum m: u <- m u + g, w <- w - lr u."""

    rule: ClassVar[kernels.Rule | None] = "sgd"

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        rate, decay, fused = settings.learning_rate, settings.weight_decay, _can_fuse(named, "cpu", "cuda")
        optim.SGD.__init__(self, named, rate, settings.momentum, weight_decay=decay, fused=fused)

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        with rows_of(ids, weight) as (rows,):  # index_add_ takes twice as long
            rows.sub_(gradient, alpha=group["lr"])


class Adagrad(RowOptimizer, optim.Adagrad):
    """n <- n + g^2, w <- w - lr g / (sqrt(n) + eps); n starts at `initial_accumulator`. Duchi et al. 2011."""

    rule: ClassVar[kernels.Rule | None] = "adagrad"

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        numbers = (settings.learning_rate, 0.0, settings.weight_decay, settings.initial_accumulator or 0.0)
        optim.Adagrad.__init__(self, named, *numbers, settings.eps or 1e-10, fused=_can_fuse(named, "cpu"))

    def row_states(self, group: Group, weight: Tensor) -> list[Tensor]:  # noqa: ARG002
        """The sums of squares (rows, dim)."""
        return [self.state[weight]["sum"]]

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        how = {"fused": group["fused"], "foreach": False, "maximize": False}
        rates = {"lr": group["lr"], "weight_decay": 0.0, "lr_decay": 0.0, "eps": group["eps"]}
        state = self.state[weight]
        with rows_of(ids, weight, state["sum"]) as (rows, total):
            adagrad([rows], [gradient], [total], [state["step"]], **how, **rates)


class Adam(RowOptimizer, optim.Adam):
    """Adam with bias correction, Kingma & Ba 2015; also AdamW, Loshchilov & Hutter 2019, with decoupled decay."""

    rule: ClassVar[kernels.Rule | None] = "adam"

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        numbers = (settings.learning_rate, settings.betas, settings.eps or 1e-8, settings.weight_decay)
        fused, decoupled = _can_fuse(named, "cpu", "cuda"), settings.optimizer == "adamw"
        optim.Adam.__init__(self, named, *numbers, fused=fused, decoupled_weight_decay=decoupled)

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
        moments, state, (beta1, beta2) = self.row_states(group, weight), self.state[weight], group["betas"]
        how = {"fused": group["fused"], "beta1": beta1, "beta2": beta2, "lr": group["lr"], "eps": group["eps"]}
        with rows_of(ids, weight, *moments) as (rows, mean, square):
            adam_step([rows], [gradient], [mean], [square], [], [state["step"]], **how)


class FormulaOptimizer(RowOptimizer):
    """An optimizer with one formula for blocks of whole parameters and for rows."""

    def __init__(self, settings: OptimizerSettings, named: list[Any], **numbers: float) -> None:
        super().__init__(named, {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, **numbers})

    def _step_whole(self) -> None:
        for group in self.param_groups:
            together: list[tuple[Tensor, Tensor]] = []
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    if group["weight_decay"]:
                        gradient = gradient.add(parameter, alpha=group["weight_decay"])
                    if parameter.device.type == "cpu":
                        self.update_whole(group, parameter, gradient)
                    else:
                        together.append((parameter, gradient))
            if together:
                self.update_together(group, [weight for weight, _ in together], [own for _, own in together])

    @abstractmethod
    def update_whole(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        """Update all of `weight` on a CPU."""

    @abstractmethod
    def update_together(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Update all of the `weights` on a GPU, where a launch for each would take longer than the arithmetic."""


class RmsProp(FormulaOptimizer):
    """v <- rho v + (1 - rho) g^2, w <- w - lr g / (sqrt(v) + eps); v starts at 0. Tieleman & Hinton 2012, Keras's form.

    With momentum m: u <- m u + g / (sqrt(v) + eps), w <- w - lr u.
    """

    def __init__(self, settings: OptimizerSettings, named: list[Any]) -> None:
        super().__init__(settings, named, rho=settings.rho, eps=settings.eps or 1e-7, momentum=settings.momentum)

    def _count(self, group: Group, weight: Tensor) -> int:
        """Count a step of this parameter; returns its number, from 1."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["square"] = torch.zeros_like(weight)
            if group["momentum"]:
                state["velocity"] = torch.zeros_like(weight)
        state["step"] += 1
        return int(state["step"])

    def _begin(self, group: Group, weight: Tensor) -> Group:
        """Count a step of all of a parameter; returns its state."""
        step, state = self._count(group, weight), self.state[weight]
        if "row_step" in state:
            state["square"].mul_(_missed(group["rho"], step - 1, state.pop("row_step")))
        return cast(Group, state)

    def update_whole(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        state = self._begin(group, weight)
        if not group["momentum"]:
            self._update(group, weight, state["square"], gradient)
            return
        for root, rows, square, slope, speed in _blocks(1, weight, state["square"], gradient, state["velocity"]):
            square.mul_(group["rho"]).addcmul_(slope, slope, value=1 - group["rho"])
            speed.mul_(group["momentum"]).addcdiv_(slope, torch.sqrt(square, out=root).add_(group["eps"]))
            rows.sub_(speed, alpha=group["lr"])

    def update_together(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        states = [self._begin(group, weight) for weight in weights]
        squares = [state["square"] for state in states]
        if not group["momentum"] and all(map(is_packed, weights)):
            late = [torch.full((), LATE, device=weights[0].device)] * len(weights)
            # Adam's first moment becomes the gradient, so it may lie where the gradient does.
            adam_step(weights, gradients, gradients, squares, [], late, fused=True, **_as_adam(group))
            return
        torch._foreach_mul_(squares, group["rho"])
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - group["rho"])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        if group["momentum"]:
            speeds = [state["velocity"] for state in states]
            torch._foreach_mul_(speeds, group["momentum"])
            torch._foreach_addcdiv_(speeds, gradients, roots)
            torch._foreach_add_(weights, speeds, alpha=-group["lr"])
        else:
            torch._foreach_addcdiv_(weights, gradients, roots, value=-group["lr"])

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
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
            late = [torch.tensor(LATE) for _ in rows]
            adam_step(rows, slopes, room, squares, [], late, fused=True, **_as_adam(group))
        else:
            square.mul_(group["rho"]).addcmul_(gradient, gradient, value=1 - group["rho"])
            root = square.sqrt().add_(group["eps"])
            weight.addcdiv_(gradient, root, value=-group["lr"])


LATE = 1e12
"""A step so late that Adam corrects no bias."""


def _as_adam(group: Group) -> dict[str, Any]:
    """The rates of Adam that make it RMSprop."""
    return {"beta1": 0.0, "beta2": group["rho"], "lr": group["lr"], "eps": group["eps"]}


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
        start = 0.1 if settings.initial_accumulator is None else settings.initial_accumulator
        super().__init__(settings, named, l1=settings.l1, l2=settings.l2, start=start)

    def _state(self, group: Group, weight: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[weight]
        if not state:
            state["accumulator"] = torch.full_like(weight, group["start"])
            state["linear"] = torch.zeros_like(weight)
        return state["accumulator"], state["linear"]

    def update_whole(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        for block in _blocks(2, weight, *self._state(group, weight), gradient):
            self._update(group, block)

    def update_together(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        rate, l1, l2 = group["lr"], group["l1"], group["l2"]
        states = [self._state(group, weight) for weight in weights]
        if rate == 0:
            return
        accumulators, linears = [own for own, _ in states], [own for _, own in states]
        before = torch._foreach_sqrt(accumulators)
        torch._foreach_addcmul_(accumulators, gradients, gradients)
        roots = torch._foreach_sqrt(accumulators)
        torch._foreach_add_(linears, gradients)
        torch._foreach_sub_(before, roots)
        torch._foreach_addcmul_(linears, before, weights, value=1 / rate)
        if l2:
            torch._foreach_add_(roots, 2 * l2 * rate)
        pulled = linears
        if l1:
            within = torch._foreach_clamp_min(linears, -l1)
            torch._foreach_clamp_max_(within, l1)
            pulled = [*torch._foreach_sub(linears, within)]
        torch._foreach_zero_(weights)
        torch._foreach_addcdiv_(weights, pulled, roots, value=-rate)

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
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
        super().__init__(settings, named, start=settings.initial_accumulator or 0.0, eps=settings.eps or 1e-10)

    def _sums(self, group: Group, weight: Tensor) -> Tensor:
        """The rows' accumulators (rows, 1)."""
        state = self.state[weight]
        if not state:
            rows = len(weight) if weight.dim() else 1
            state["sum"] = torch.full((rows, 1), group["start"], dtype=weight.dtype, device=weight.device)
        return state["sum"]  # type: ignore[no-any-return]

    def row_states(self, group: Group, weight: Tensor) -> list[Tensor]:
        return [self._sums(group, weight)]

    def update_whole(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        total = self._sums(group, weight)
        alike = (len(total), math.prod(weight.shape[1:]))  # -1 fails for a table without rows
        self._update(group, weight.view(alike), total, gradient.reshape(alike))

    def update_together(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        totals = [self._sums(group, weight) for weight in weights]
        shapes = [(len(total), math.prod(weight.shape[1:])) for total, weight in zip(totals, weights, strict=True)]
        slopes = [gradient.reshape(shape) for gradient, shape in zip(gradients, shapes, strict=True)]
        squares = torch._foreach_mul(slopes, slopes)
        torch._foreach_add_(totals, [each.mean(1, keepdim=True) for each in squares])
        roots = torch._foreach_sqrt(totals)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_reciprocal_(roots)
        for weight, shape, slope, inverse in zip(weights, shapes, slopes, roots, strict=True):
            weight.view(shape).addcmul_(slope, inverse, value=-group["lr"])

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
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


OPTIMIZERS: Mapping[str, Callable[[OptimizerSettings, list[Any]], RowOptimizer]] = {
    "adam": Adam,
    "adamw": Adam,
    "sgd": Sgd,
    "adagrad": Adagrad,
    "rmsprop": RmsProp,
    "ftrl": Ftrl,
    "rowwise_adagrad": RowwiseAdagrad,
}


def make_optimizer(settings: OptimizerSettings, named: list[tuple[str, nn.Parameter]]) -> RowOptimizer:
    """The optimizer that the settings describe."""
    optimizer = OPTIMIZERS[settings.optimizer](settings, named)
    optimizer.moves_every_row = moves_every_row(settings)
    # By default a GradScaler leaves unscaling to torch's fused kernels, which do not see rows.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer


def form_of(optimizer: RowOptimizer) -> str:
    """The form of the update of whole parameters."""
    if isinstance(optimizer, FormulaOptimizer):
        return "own formula, block by block on a CPU"
    fused = optimizer.param_groups[0].get("fused")
    return "fused: one pass over weights and state" if fused else "torch's, many parameters at once"


def sparse_pays(rows: int, width: int, ids: int) -> bool:
    """Whether a sparse gradient of `ids` rows is cheaper than a dense gradient of the whole table.

    In whole training steps an id of a row of 16 numbers costs about as much as 47 numbers of a densely updated table.
    A dense gradient is filled with zeros, summed over the lists that look it up, read and written again.
    """
    return rows * width > ids * (SORTING + TOUCHING * width)


SORTING, TOUCHING = 15, 2
"""Cost of an id and of each number of its row, in numbers of a dense step."""


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
