"""Optimizers that update a whole parameter or only the rows a step has seen, and learning-rate schedules.

A gradient is dense, or sparse: a COO tensor of one sparse dimension whose ids may repeat, as an embedding table gets it
from the ids of a batch. With a sparse one only the rows seen are read and written, so that a step costs what the batch
costs, not what the table costs. Whether that gives what the dense gradient would give:

- SGD, Adagrad, row-wise Adagrad: yes; a row without gradient does not move under the dense formula either.
- RMSprop: yes; the decay that a row's mean square missed is made up when the row is next seen.
- FTRL: yes while the learning rate is constant and the weights start at zero. Else the dense formula rewrites the rows
  not seen, by the new rate or from their empty history, and the sparse one leaves them, as TensorFlow's does.
- Adam: no. Moments of rows not seen wait instead of decaying, and such rows stand still instead of moving on by their
  old moments; the bias correction counts all steps. Known as lazy Adam.
- Momentum, AdamW and weight decay move every row at every step; with a sparse gradient they are refused.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn, optim
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam

from recspec import config, kernels
from recspec.errors import CheckpointError, SettingsError, listed, nearest, unknown

Schedule: TypeAlias = Literal["constant", "linear", "polynomial", "step"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "polynomial", "step")

Group: TypeAlias = dict[str, Any]
"""torch's word for some parameters and the settings they share."""


class OptimizerSettings(config.Settings):
    """How some parameters are updated: the optimizer, what it takes, and its learning rate over the run."""

    optimizer: Literal["adam", "adamw", "sgd", "adagrad", "rmsprop", "ftrl", "rowwise_adagrad"] = Field(
        "adam", description="which optimizer"
    )
    learning_rate: float = Field(1e-3, gt=0, description="the peak; the schedule multiplies it")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="Adam's and AdamW's decay rates"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of SGD and RMSprop")
    eps: float | None = Field(
        None,
        gt=0,
        description="added to the optimizer's denominator; when not given 1e-8 for Adam and AdamW, 1e-7 for RMSprop, "
        "1e-10 for Adagrad, row-wise too; FTRL and SGD have none",
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled in AdamW, added to the gradient elsewhere")
    rho: float = Field(0.9, ge=0, lt=1, description="decay of RMSprop's mean square")
    initial_accumulator: float | None = Field(
        None,
        ge=0,
        description="where the sums of squares of Adagrad and FTRL start; when not given 0 for Adagrad, 0.1 for FTRL",
    )
    l1: float = Field(0.0, ge=0, description="FTRL's pull to exactly zero: l1 |w| is added to the loss")
    l2: float = Field(0.0, ge=0, description="FTRL's pull towards zero: l2 w^2 is added to the loss")
    schedule: Schedule = Field(
        "constant", description="learning rate after warm-up: constant, to zero linearly, to zero by a power, by steps"
    )
    decay_power: float = Field(2.0, gt=0, description="exponent of the polynomial schedule")
    decay_start: float = Field(0.0, ge=0, lt=1, description="share of the run after which the decay starts")
    decay_end: float = Field(
        1.0, gt=0, description="share of the run at which the decay reaches zero; beyond 1 the run ends before it does"
    )
    step_epochs: tuple[float, ...] = Field(
        (), description="epochs at which the step schedule multiplies by step_factors"
    )
    step_factors: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (0.1,), description="what the step schedule multiplies by: one for each of step_epochs, or one for all"
    )
    warmup_epochs: float = Field(0.0, ge=0, description="epochs of linear warm-up from zero; fractions are allowed")

    @model_validator(mode="after")
    def _optimizer_agrees(self) -> OptimizerSettings:
        if self.schedule == "step" and not self.step_epochs:
            raise ValueError("schedule 'step' needs step_epochs, as [5, 8]")
        if self.schedule == "step" and len(self.step_factors) not in (1, len(self.step_epochs)):
            raise ValueError(
                f"step_factors holds {len(self.step_factors)} numbers for the {len(self.step_epochs)} of step_epochs; "
                "give one for each, or one for all"
            )
        if self.decay_end <= self.decay_start:
            raise ValueError(f"decay_end {self.decay_end} is not after decay_start {self.decay_start}")
        if self.optimizer == "ftrl" and self.initial_accumulator == 0:
            raise ValueError("initial_accumulator is 0, and FTRL divides by its root; give a number above 0, as 0.1")
        return self


READ_BY: Mapping[str, frozenset[str]] = {
    "betas": frozenset({"adam", "adamw"}),
    "momentum": frozenset({"sgd", "rmsprop"}),
    "eps": frozenset({"adam", "adamw", "adagrad", "rowwise_adagrad", "rmsprop"}),
    "rho": frozenset({"rmsprop"}),
    "initial_accumulator": frozenset({"adagrad", "rowwise_adagrad", "ftrl"}),
    "l1": frozenset({"ftrl"}),
    "l2": frozenset({"ftrl"}),
}
"""Settings that are not of every optimizer, and the optimizers that read them."""


class Optimizers:
    """Several optimizers over disjoint parts of a model, stepped as one.

    A part is the dotted beginning of parameter names: `deep` has `deep.mlp.0.weight`, and so has `deep.mlp`. Of several
    the longest has it. Parameters of no part follow `settings`, under the empty name.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSettings,
        parts: Mapping[str, OptimizerSettings] | None = None,
    ) -> None:
        """Sort the parameters into parts and make an optimizer for each part that has any.

        Raises:
            SettingsError: naming every part that no parameter belongs to.
        """
        named = list(named_parameters)
        self.settings: dict[str, OptimizerSettings] = {"": settings, **(parts or {})}
        members = _sorted_into(self.settings, named)
        self.parts: Mapping[str, optim.Optimizer] = {
            part: _make(self.settings[part], held) for part, held in members.items() if held
        }
        self._rates = {part: self.settings[part].learning_rate for part in self.parts}
        self._places: Mapping[str, tuple[optim.Optimizer, nn.Parameter]] = {
            f"{part}/{name}": (self.parts[part], parameter)
            for part, held in members.items()
            for name, parameter in held
        }

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """Each part's rate as it stands."""
        return dict(self._rates)

    @property
    def described(self) -> str:
        """Which optimizer updates what, and how, in a line."""
        return ", ".join(
            f"{part + ': ' if part else ''}{self.settings[part].optimizer} ({_way(optimizer)})"
            for part, optimizer in self.parts.items()
        )

    def keep_rates_on_device(self) -> None:
        """From here on a rate is a number in the parameters' memory, which a recorded step reads when it is played.

        It is float32 there, and a Python number before: rates differ by their last digit, 6e-8 of themselves.
        """
        for part, optimizer in self.parts.items():
            for group in optimizer.param_groups:
                beside = group["params"][0].device
                group["lr"] = torch.full((), self._rates[part], dtype=torch.float32, device=beside)

    @contextmanager
    def being_recorded(self) -> Iterator[None]:
        """Optimizers that ask whether they may be recorded as a CUDA graph are told so until the end of the block."""
        asking = [group for each in self.parts.values() for group in each.param_groups if "capturable" in group]
        before = [group["capturable"] for group in asking]
        for group in asking:
            group["capturable"] = True
        try:
            yield
        finally:
            for group, was in zip(asking, before, strict=True):
                group["capturable"] = was

    def counters_on_host(self) -> list[Tensor]:
        """Counts of steps that lie in the host's memory, where a step that is played as a CUDA graph can't count."""
        states = [state for optimizer in self.parts.values() for state in optimizer.state.values()]
        return [count for state in states if (count := state.get("step")) is not None and count.device.type == "cpu"]

    def why_not_recorded(self, name: str) -> str | None:
        """What keeps the update of a table's rows from having the same shapes at every step; nothing where it can."""
        optimizer, weight = next(
            self._places[f"{part}/{name}"] for part in self.parts if f"{part}/{name}" in self._places
        )
        assert isinstance(optimizer, _Rows)
        if optimizer.rule is None:
            return f"optimizer '{self.settings_of(name).optimizer}' has no kernel for the rows seen"
        if not kernels.uses_triton(optimizer.backend, weight.device):
            return "without Triton equal ids are counted before their rows are updated"
        return None if kernels.can_update(weight) else "its rows are wider than the kernels take"

    def settings_of(self, name: str) -> OptimizerSettings:
        """What holds for a parameter."""
        return self.settings[next(part for part in self.parts if f"{part}/{name}" in self._places)]

    def use_backend(self, backend: kernels.Backend) -> None:
        """What updates the rows of sparse gradients from here on."""
        for optimizer in self.parts.values():
            optimizer.backend = backend  # type: ignore[attr-defined]

    def fused_update(self, name: str) -> kernels.FusedUpdate:
        """A parameter's update as FBGEMM's backward pass does it in the place of `step`.

        Raises:
            SettingsError: if FBGEMM has no such update.
        """
        optimizer, weight = next(
            self._places[f"{part}/{name}"] for part in self.parts if f"{part}/{name}" in self._places
        )
        assert isinstance(optimizer, _Rows)
        if optimizer.moves_every_row or optimizer.rule not in kernels.FBGEMM_RULES:
            asked = optimizer.moves_every_row or f"optimizer '{self.settings_of(name).optimizer}'"
            raise SettingsError(
                f"{name}: {asked} is none that fbgemm updates tables by; it has {listed(kernels.FBGEMM_RULES)}"
            )
        (group,) = optimizer.param_groups
        rule, held = optimizer.rule, optimizer
        return kernels.FusedUpdate(rule, group, lambda: held.row_states(group, weight), lambda: held.count_step(weight))

    def set_learning_rates(self, step: int, *, steps_per_epoch: int, epochs: int) -> None:
        """The rates of step number `step` (0 is the first), each part's by its own schedule."""
        for part, optimizer in self.parts.items():
            settings = self.settings[part]
            factor = learning_rate_factor(
                settings.schedule,
                step,
                total_steps=max(1, epochs * steps_per_epoch),
                warmup_steps=round(settings.warmup_epochs * steps_per_epoch),
                decay_start=settings.decay_start,
                decay_end=settings.decay_end,
                power=settings.decay_power,
                step_at=[round(epoch * steps_per_epoch) for epoch in settings.step_epochs],
                step_factor=settings.step_factors,
            )
            rate = settings.learning_rate * factor
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], Tensor):
                    group["lr"] = rate
                elif rate != self._rates[part]:  # a constant rate costs no launch
                    group["lr"].fill_(rate)
            self._rates[part] = rate

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Update every parameter that has a gradient.

        With a scaler, a part whose gradients overflowed stands still; the others step.

        Raises:
            SettingsError: if a sparse gradient meets an optimizer that moves every row.
        """
        for optimizer in self.parts.values():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.parts.values():
            optimizer.zero_grad(set_to_none=True)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divide the gradients by the scaler's factor, before they are clipped."""
        for optimizer in self.parts.values():
            scaler.unscale_(optimizer)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs, as `PART/parameter name/state name` -> tensor."""
        return {
            f"{place}/{name}": value
            for place, (optimizer, parameter) in self._places.items()
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` gave; settings and learning rates stay as they are.

        Raises:
            CheckpointError: naming every tensor of a part or parameter that is not here, or of another shape or type
                than the part's optimizer keeps: its kernels would write beyond it.
        """
        strangers = [key for key in tensors if key.rpartition("/")[0] not in self._places]
        if strangers:
            raise CheckpointError.of(
                "optimizer tensors in the checkpoint",
                [f"'{key}' is of no part and parameter of this run" for key in strangers],
            )
        if problems := [*self._misfits(tensors)]:
            raise CheckpointError.of("optimizer tensors in the checkpoint", problems)
        for optimizer in self.parts.values():
            optimizer.state.clear()
        for key, value in tensors.items():
            place, _, name = key.rpartition("/")
            optimizer, parameter = self._places[place]
            # torch's fused optimizers count steps beside the weights, all else counts them on the CPU.
            beside = name != "step" or optimizer.param_groups[0].get("fused")
            device = parameter.device if beside else torch.device("cpu")
            own = value.detach().to(device, copy=True)
            optimizer.state[parameter][name] = _laid_as(parameter, own) if own.shape == parameter.shape else own

    def _misfits(self, tensors: Mapping[str, Tensor]) -> Iterator[str]:
        """What the optimizers do not keep, or keep in another shape or type."""
        for place, (_, parameter) in self._places.items():
            known = _KEPT[self.settings[place.partition("/")[0]].optimizer]
            found = {key.rpartition("/")[2]: each for key, each in tensors.items() if key.rpartition("/")[0] == place}
            if found:
                lacking = known.keys() - found.keys() - _KEPT_AT_TIMES
                yield from (f"'{place}/{name}' is missing" for name in lacking)
            rows = len(parameter) if parameter.dim() else 1
            shapes = {"weight": tuple(parameter.shape), "number": (), "count": (), "row": (rows,), "column": (rows, 1)}
            types = {"number": torch.float32, "count": torch.int64, "row": torch.int32}
            for name, value in found.items():
                if name not in known:
                    yield f"'{place}/{name}' is nothing that the optimizer keeps"
                    continue
                expected, kind = shapes[known[name]], types.get(known[name], parameter.dtype)
                if (tuple(value.shape), value.dtype) != (expected, kind):
                    yield f"'{place}/{name}' is {value.dtype} {tuple(value.shape)}; expected {kind} {expected}"


_ADAM = {"step": "number", "exp_avg": "weight", "exp_avg_sq": "weight"}
_KEPT: Mapping[str, Mapping[str, str]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "sgd": {"momentum_buffer": "weight"},
    "adagrad": {"step": "number", "sum": "weight"},
    "rmsprop": {"step": "count", "square": "weight", "velocity": "weight", "row_step": "row"},
    "ftrl": {"accumulator": "weight", "linear": "weight"},
    "rowwise_adagrad": {"sum": "column"},
}
"""What each optimizer keeps of a parameter: shaped as the weight, its rows, a column of them; a number or a count."""
_KEPT_AT_TIMES = frozenset({"velocity", "row_step"})


def updates_rows_exactly(settings: OptimizerSettings) -> bool:
    """Whether the rows of a sparse gradient alone are updated just as a whole gradient would update the table."""
    if settings.momentum or settings.weight_decay:
        return False
    if settings.optimizer == "ftrl":
        return settings.schedule == "constant" and not settings.warmup_epochs
    return settings.optimizer in ("sgd", "adagrad", "rowwise_adagrad", "rmsprop")


def numbers_beside(settings: OptimizerSettings, width: int) -> float:
    """Numbers that the optimizer keeps beside each weight of a table of that width."""
    kept = {
        "adam": 2.0,
        "adamw": 2.0,
        "sgd": float(settings.momentum > 0),
        "adagrad": 1.0,
        "rmsprop": 1.0 + (settings.momentum > 0) + 1 / width,
        "ftrl": 2.0,
        "rowwise_adagrad": 1 / width,
    }
    return kept[settings.optimizer]


def sparse_pays(rows: int, width: int, ids: int) -> bool:
    """Whether a sparse gradient of `ids` rows is cheaper than a dense one of a whole table.

    In whole training steps an id of a row of 16 numbers costs about as much as 47 numbers of a table that is updated
    densely: its gradient is filled with zeros, added up over the lists that look it up, read and written again.
    """
    return rows * width > ids * (SORTING + TOUCHING * width)


SORTING, TOUCHING = 15, 2
"""Cost of an id, and of each number of its row, in numbers of a dense step."""


def _sorted_into(
    parts: Iterable[str], named: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Each part's parameters, by the longest part that a parameter's name begins with."""
    members: dict[str, list[tuple[str, nn.Parameter]]] = {part: [] for part in parts}
    begun: set[str] = set()
    for name, parameter in named:
        begins = ["", *_beginnings(name)]
        begun.update(begins)
        members[max((part for part in members if part in begins), key=len)].append((name, parameter))
    known = sorted(begun - {""})
    problems = []
    for part, held in members.items():
        if part and part not in begun:
            short = [beginning for beginning in known if beginning.count(".") < 2]
            problems.append(
                f"no parameter's name begins with '{part}'{nearest(part, known)}; some do with {listed(short)}"
            )
        elif part and not held:
            problems.append(f"all parameters of '{part}' belong to longer parts; remove it")
    if problems:
        raise SettingsError.of("train.parts", problems)
    return members


def _beginnings(name: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`, `a.b.c`."""
    pieces = name.split(".")
    return [".".join(pieces[: count + 1]) for count in range(len(pieces))]


def _make(settings: OptimizerSettings, named: Sequence[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    """The optimizer that the settings describe."""
    makers: Mapping[str, Callable[[OptimizerSettings, list[Any]], optim.Optimizer]] = {
        "adam": Adam,
        "adamw": Adam,
        "sgd": Sgd,
        "adagrad": Adagrad,
        "rmsprop": RmsProp,
        "ftrl": Ftrl,
        "rowwise_adagrad": RowwiseAdagrad,
    }
    return makers[settings.optimizer](settings, list(named))


# --- the optimizers --------------------------------------------------------------------------------------------------


class _Rows(optim.Optimizer):
    """A step in two halves: rows of sparse gradients one way, whole parameters another.

    The whole parameters are the base class's business where torch has a fast one: fused, one pass over weights and
    state instead of one an operation, is 2 to 4 times faster on a CPU. A fused one reads all of them in the order of
    memory, whatever their strides; so a gradient laid out in another way is copied first.
    """

    moves_every_row: str | None = None
    """The setting by which this optimizer would move rows that have no gradient, if any."""

    rule: ClassVar[kernels.Rule | None] = None
    """The formula among the kernels' that updates rows in one pass, if there is one."""

    backend: kernels.Backend | None = None
    """What updates rows; when not said Triton on a GPU that has it, else torch."""

    # Subclasses of fused optimizers say `_step_supports_amp_scaling = False`: else a GradScaler leaves the gradients to
    # the fused kernel to unscale, and the rows would be forgotten.

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
                parameter.grad = _laid_as(parameter, gradient)
            for _, parameter, _ in sparse:
                parameter.grad = None
            self._step_whole()
            for group, parameter, gradient in sparse:
                if self.rule and kernels.uses_triton(self.backend, parameter.device) and kernels.can_update(parameter):
                    self._update_by_kernel(group, parameter, gradient)
                else:
                    for place, (ids, values) in enumerate(kernels.summed_rows(gradient)):
                        if place and "step" in self.state[parameter]:
                            self.state[parameter]["step"] -= 1  # every block counts one, and all are one
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
        """The tensors beside a table that the kernels' formula takes, made where they are not there yet."""
        return []

    def count_step(self, weight: Tensor) -> None:
        """One step more, where the state counts them."""
        if "step" in self.state[weight]:
            self.state[weight]["step"] += 1

    def _update_by_kernel(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        """Update the rows of a sparse gradient in one pass."""
        assert self.rule is not None
        states = self.row_states(group, weight)
        self.count_step(weight)
        betas, corrections = group.get("betas", (0.0, 0.0)), None
        if self.rule == "adam":
            # In double precision: 1 - 0.999 in single is off by 6e-5 of itself.
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


class Sgd(_Rows, optim.SGD):
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
        self.moves_every_row = _moving(settings, "momentum", "weight_decay")

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """w <- w - lr g of the rows."""
        with _rows_of(ids, weight) as (rows,):  # index_add_ takes twice as long
            _subtract(rows, gradient, group["lr"])


class Adagrad(_Rows, optim.Adagrad):
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
        self.moves_every_row = _moving(settings, "weight_decay")

    def _step_whole(self) -> None:
        groups = [group for group in self.param_groups if isinstance(group["lr"], Tensor) and not group["fused"]]
        if not groups:
            super()._step_whole()
        for group in groups:  # torch's own asks the device for the rate
            seen = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not seen:
                continue
            gradients, sums = [each.grad for each in seen], [self.state[each]["sum"] for each in seen]
            if group["weight_decay"]:
                gradients = list(torch._foreach_add(gradients, seen, alpha=group["weight_decay"]))
            for each in seen:
                self.state[each]["step"] += 1
            torch._foreach_addcmul_(sums, gradients, gradients)
            roots = torch._foreach_sqrt(sums)
            torch._foreach_add_(roots, group["eps"])
            moves = torch._foreach_div(gradients, roots)
            torch._foreach_mul_(moves, group["lr"])
            torch._foreach_sub_(seen, moves)

    def row_states(self, group: Group, weight: Tensor) -> list[Tensor]:  # noqa: ARG002
        """The sums of squares (rows, dim)."""
        return [self.state[weight]["sum"]]

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """The same kernel on the rows."""
        state = self.state[weight]
        with _rows_of(ids, weight, state["sum"]) as (rows, total):
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


class Adam(_Rows, optim.Adam):
    """Kingma & Ba 2015, rates corrected for the moments' start at zero.

    AdamW (Loshchilov & Hutter 2019) decays the weights apart from the gradient.
    """

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
        self.moves_every_row = "optimizer 'adamw'" if decoupled else _moving(settings, "weight_decay")

    def row_states(self, group: Group, weight: Tensor) -> list[Tensor]:
        """The moments (rows, dim)."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device if group["fused"] else "cpu")
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        return [state["exp_avg"], state["exp_avg_sq"]]

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """Lazily: moments of the rows seen, bias correction by all steps."""
        moments, state = self.row_states(group, weight), self.state[weight]
        with _rows_of(ids, weight, *moments) as (rows, mean, square):
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


class _Own(_Rows):
    """An optimizer that torch lacks: one formula, on blocks of whole parameters and on rows alike."""

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


class RmsProp(_Own):
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
        self.moves_every_row = _moving(settings, "momentum", "weight_decay")

    def _count(self, group: Group, weight: Tensor) -> int:
        """Counts a step of this parameter; its number, the first being 1."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["square"] = torch.zeros_like(weight)
            if group["momentum"]:
                state["velocity"] = torch.zeros_like(weight)
        state["step"] += 1
        return int(state["step"])

    def update_whole(self, group: Group, weight: Tensor, gradient: Tensor) -> None:
        """The formula on blocks; rows that sparse gradients left behind catch up first."""
        step, state = self._count(group, weight), self.state[weight]
        if "row_step" in state:
            state["square"].mul_(_missed(group["rho"], step - 1, state.pop("row_step")))
        if not group["momentum"]:
            self._update(group, weight, state["square"], gradient)
            return
        for root, rows, square, slope, speed in _blocks(1, weight, state["square"], gradient, state["velocity"]):
            square.mul_(group["rho"]).addcmul_(slope, slope, value=1 - group["rho"])
            speed.mul_(group["momentum"]).addcdiv_(slope, torch.sqrt(square, out=root).add_(group["eps"]))
            _subtract(rows, speed, group["lr"])

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """The formula on the rows; the decay of the steps that a row was not seen in is made up."""
        step, state = self._count(group, weight), self.state[weight]
        if "row_step" not in state:
            state["row_step"] = torch.full((len(weight),), step - 1, dtype=torch.int32, device=weight.device)
        with _rows_of(ids, state["square"], weight) as (square, rows):
            square.mul_(_missed(group["rho"], step - 1, state["row_step"].index_select(0, ids)))
            self._update(group, rows, square, gradient)
        state["row_step"].index_fill_(0, ids, step)

    @staticmethod
    def _update(group: Group, weight: Tensor, square: Tensor, gradient: Tensor) -> None:
        """The formula without momentum. On a CPU in one pass: it is Adam's whose first moment forgets at once.

        That moment is then the gradient, and only passes through memory to compute in; at so late a step, nothing is
        corrected for the moments' start at zero. Operation by operation it takes three times as long, most of it in the
        root: MKL's takes six times as long where some numbers are zero, as the state of rows never seen is.
        """
        if weight.device.type == "cpu" and _is_packed(weight):
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
            if isinstance(group["lr"], Tensor):
                _subtract(weight, gradient / root, group["lr"])
            else:
                weight.addcdiv_(gradient, root, value=-group["lr"])


def _missed(rho: float, step: int, row_step: Tensor) -> Tensor:
    """rho to the number of steps since `row_step` (m,), as (m, 1)."""
    return torch.pow(rho, (step - row_step).float()).unsqueeze(1)


class Ftrl(_Own):
    """Follow the regularised leader, per coordinate; McMahan et al. 2013 with beta 0, TensorFlow's form.

    s <- (sqrt(n + g^2) - sqrt(n)) / lr, z <- z + g - s w, n <- n + g^2,
    w <- 0 where |z| <= l1, else -(z - sign(z) l1) / (sqrt(n) / lr + 2 l2).

    n starts at `initial_accumulator`, z at 0: what a weight was before its first step is all but forgotten, so weights
    should start at 0. A step at learning rate 0 changes nothing.
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
        self.moves_every_row = _moving(settings, "weight_decay")

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
        with _rows_of(ids, weight, *self._state(group, weight)) as rows:
            self._update(group, (torch.empty_like(gradient), torch.empty_like(gradient), *rows, gradient))

    @staticmethod
    def _update(group: Group, block: tuple[Tensor, ...]) -> None:
        before, root, weight, accumulator, linear, gradient = block
        rate, l1, l2 = group["lr"], group["l1"], group["l2"]
        if isinstance(rate, Tensor) and rate.device.type != "cpu":
            _follow_the_leader(weight, accumulator, linear, gradient, rate, l1, l2)
            return
        rate = float(rate)
        if rate == 0:
            return
        torch.sqrt(accumulator, out=before)
        torch.sqrt(accumulator.addcmul_(gradient, gradient), out=root)
        linear.add_(gradient).addcmul_(before.sub_(root), weight, value=1 / rate)
        if l2:
            root.add_(2 * l2 * rate)
        pulled = nn.functional.softshrink(linear, l1) if l1 else linear
        torch.addcdiv(before.zero_(), pulled, root, value=-rate, out=weight)


def _follow_the_leader(
    weight: Tensor, accumulator: Tensor, linear: Tensor, gradient: Tensor, rate: Tensor, l1: float, l2: float
) -> None:
    """`Ftrl`'s formula with a rate that only the device knows: a step at rate 0 is computed and left out."""
    moves = rate > 0
    known = torch.where(moves, rate, 1.0)
    total = torch.addcmul(accumulator, gradient, gradient)
    root = total.sqrt()
    sums = linear + gradient - (root - accumulator.sqrt()) / known * weight
    pulled = nn.functional.softshrink(sums, l1) if l1 else sums
    found = -pulled / (root / known + 2 * l2)
    for kept, new in ((weight, found), (linear, sums), (accumulator, total)):
        kept.copy_(torch.where(moves, new, kept))


class RowwiseAdagrad(_Own):
    """Adagrad with one accumulator a row: n <- n + mean of g^2 over the row, w <- w - lr g / (sqrt(n) + eps).

    A table's state is as long as the table instead of as large. A vector's every element is a row.
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
        self.moves_every_row = _moving(settings, "weight_decay")

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
        alike = (len(total), math.prod(weight.shape[1:]))  # said in full: there may be no row
        self._update(group, weight.view(alike), total, gradient.reshape(alike))

    def update_rows(self, group: Group, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """The formula on the rows seen."""
        with _rows_of(ids, weight, self._sums(group, weight)) as (rows, total):
            self._update(group, rows, total, gradient)

    @staticmethod
    def _update(group: Group, weight: Tensor, total: Tensor, gradient: Tensor) -> None:
        total.add_(gradient.square().mean(1, keepdim=True))
        inverse = total.sqrt().add_(group["eps"]).reciprocal_()
        if isinstance(group["lr"], Tensor):
            _subtract(weight, gradient * inverse, group["lr"])
        else:
            weight.addcmul_(gradient, inverse, value=-group["lr"])


def _way(optimizer: optim.Optimizer) -> str:
    """How whole parameters are updated."""
    (group,) = optimizer.param_groups
    if isinstance(optimizer, _Own):
        return "own formula, block by block on a CPU"
    return "fused: one pass over weights and state" if group.get("fused") else "torch's, many parameters at once"


def _subtract(weight: Tensor, update: Tensor, rate: float | Tensor) -> None:
    """weight - rate * update, in place; nobody waits for a rate that lies on a device."""
    if isinstance(rate, Tensor):
        weight.sub_(update * rate)
    else:
        weight.sub_(update, alpha=rate)


def _moving(settings: OptimizerSettings, *names: str) -> str | None:
    """Which of the settings makes the optimizer move rows without a gradient."""
    return next((f"{name} {getattr(settings, name):g}" for name in names if getattr(settings, name)), None)


def _can_fuse(named: Sequence[tuple[str, nn.Parameter]], *devices: str) -> bool:
    return all(parameter.device.type in devices and _is_packed(parameter) for _, parameter in named)


def _laid_as(weight: Tensor, x: Tensor) -> Tensor:
    """`x` with the strides of a weight of its shape; a copy where it has others."""
    return x if x.stride() == weight.stride() else torch.empty_like(weight).copy_(x)


def _is_packed(weight: Tensor) -> bool:
    """Whether a weight's numbers lie in memory without gaps, so that others can be laid out alike."""
    return torch.empty_like(weight, device="meta").stride() == weight.stride()


# --- rows and blocks -------------------------------------------------------------------------------------------------

BLOCK = 1 << 15
"""Numbers of a parameter that a CPU's thread updates together: few enough that a block of weights, state and gradient
stays in the cache from one operation to the next, and as many as torch gives a thread at least."""


@contextmanager
def _rows_of(ids: Tensor, *tables: Tensor) -> Iterator[list[Tensor]]:
    """Copies of the rows `ids` of each table, written back at the end of the block."""
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
    # Bags of one row: they fetch ahead, index_select does not, and a table's rows are never in the cache.
    return nn.functional.embedding_bag(ids, table, torch.arange(len(ids)), mode="sum")


def _bytes_of(table: Tensor) -> npt.NDArray[np.void]:
    """The rows as so many bytes each (rows,): NumPy writes them whole, twice as fast as torch number by number."""
    rows = table.detach().view(torch.uint8).numpy()
    return rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]


def _blocks(spare: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`spare` tensors to compute in, then the tensors, all alike in shape: on a CPU a block at a time, flat.

    Memory to compute in is taken once: what the kernel has to hand out anew costs more than the arithmetic.
    """
    first, size = tensors[0], BLOCK * torch.get_num_threads()
    if first.device.type != "cpu" or first.numel() <= size or not all(tensor.is_contiguous() for tensor in tensors):
        yield (*(torch.empty_like(first) for _ in range(spare)), *tensors)
        return
    room = [first.new_empty(size) for _ in range(spare)]
    for blocks in zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True):
        yield (*(each[: len(blocks[0])] for each in room), *blocks)


# --- schedules -------------------------------------------------------------------------------------------------------


def learning_rate_factor(
    schedule: str,
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    decay_start: float = 0.0,
    decay_end: float = 1.0,
    power: float = 2.0,
    step_at: Sequence[int] = (),
    step_factor: float | Sequence[float] = 0.1,
) -> float:
    """What step number `step` (0 is the first) multiplies the learning rate by.

    Warm-up and decay multiply each other, so a schedule may decay while it still warms up.

    Args:
        schedule: one of `SCHEDULES`.
        step: steps already done.
        total_steps: steps of the whole run.
        warmup_steps: steps over which the rate climbs linearly; the first one already learns.
        decay_start: share of the run after which linear and polynomial decay start; never before the warm-up ends.
        decay_end: share of the run, or more than all of it, at which they reach 0.
        power: exponent of polynomial decay.
        step_at: steps at which the step schedule multiplies by `step_factor`.
        step_factor: see `step_at`; one for all, or one for each.

    Raises:
        SettingsError: if there is no such schedule.
    """
    start = max(warmup_steps, round(decay_start * total_steps))
    if schedule == "constant":
        factor = 1.0
    elif schedule == "linear":
        factor = polynomial_decay(step, start=start, stop=round(decay_end * total_steps), power=1.0)
    elif schedule == "polynomial":
        factor = polynomial_decay(step, start=start, stop=round(decay_end * total_steps), power=power)
    elif schedule == "step":
        factor = step_decay(step, at=step_at, factor=step_factor)
    else:
        raise SettingsError(unknown("schedule", schedule, SCHEDULES))
    return warm_up(step, steps=warmup_steps) * factor


def warm_up(step: int, *, steps: int) -> float:
    """Linear climb: 1/steps at the first step, 1 from step `steps - 1` on; 1 throughout without a warm-up."""
    return min(1.0, (step + 1) / steps) if steps > 0 else 1.0


def polynomial_decay(step: int, *, start: int, stop: int, power: float) -> float:
    """1 up to step `start`, then ((stop - step) / (stop - start)) ** power, and 0 from `stop` on."""
    if step <= start:
        return 1.0
    return float((max(0, stop - step) / (stop - start)) ** power) if stop > start else 0.0


def step_decay(step: int, *, at: Sequence[int], factor: float | Sequence[float]) -> float:
    """The product of the factors of those entries of `at` that the run has reached; one factor serves all."""
    factors = [factor] if isinstance(factor, (int, float)) else list(factor)
    if len(factors) == 1:
        factors = factors * len(at)
    return math.prod(each for reached, each in zip(at, factors, strict=True) if step >= reached)
