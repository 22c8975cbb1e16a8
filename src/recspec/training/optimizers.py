"""The optimizers of a model's parts, stepped as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from recspec.errors import CheckpointError, SettingsError, listed, nearest
from recspec.nn import kernels
from recspec.training.formula_optimizers import FormulaOptimizer, Ftrl, RmsProp, RowwiseAdagrad
from recspec.training.optimizer_settings import OptimizerSettings
from recspec.training.row_optimizers import Adagrad, Adam, RowOptimizer, Sgd, laid_as
from recspec.training.schedules import learning_rate_factor


class Optimizers:
    """Several optimizers over disjoint parts of a model, stepped as one.

    A part is a dotted prefix of parameter names: `deep` and `deep.mlp` both match `deep.mlp.0.weight`. The longest
    matching part has the parameter. Parameters of no part follow `settings`, under the empty name.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSettings,
        parts: Mapping[str, OptimizerSettings] | None = None,
    ) -> None:
        """Sort the parameters into parts and make an optimizer for each part that has any.

        Raises:
            SettingsError: naming every part without a parameter.
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
        self._part_of = {name: part for part, held in members.items() for name, _ in held}

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """Each part's current rate."""
        return dict(self._rates)

    @property
    def described(self) -> str:
        """Each part's optimizer and its form, in one line."""
        return ", ".join(
            f"{part + ': ' if part else ''}{self.settings[part].optimizer} ({_way(optimizer)})"
            for part, optimizer in self.parts.items()
        )

    def settings_of(self, name: str) -> OptimizerSettings:
        """The settings of a parameter."""
        return self.settings[self._part_of[name]]

    def use_backend(self, backend: kernels.Backend) -> None:
        """Choose what updates the rows of sparse gradients."""
        for optimizer in self.parts.values():
            optimizer.backend = backend  # type: ignore[attr-defined]

    def fused_update(self, name: str) -> kernels.FusedUpdate:
        """A parameter's update as FBGEMM's backward pass does it instead of `step`.

        Raises:
            SettingsError: if FBGEMM has no such update.
        """
        optimizer, weight = self._places[f"{self._part_of[name]}/{name}"]
        assert isinstance(optimizer, RowOptimizer)
        if optimizer.moves_every_row or optimizer.rule not in kernels.FBGEMM_RULES:
            asked = optimizer.moves_every_row or f"optimizer '{self.settings_of(name).optimizer}'"
            raise SettingsError(
                f"{name}: fbgemm cannot update tables by {asked}; it has {listed(kernels.FBGEMM_RULES)}"
            )
        (group,) = optimizer.param_groups
        rule, held = optimizer.rule, optimizer
        return kernels.FusedUpdate(rule, group, lambda: held.row_states(group, weight), lambda: held.count_step(weight))

    def set_learning_rates(self, step: int, *, steps_per_epoch: int, epochs: int) -> None:
        """Set each part's rate for step number `step` by its own schedule; 0 is the first."""
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
                group["lr"] = rate
            self._rates[part] = rate

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Update every parameter that has a gradient.

        With a scaler, a part whose gradients overflowed skips the step; the others take it.

        Raises:
            SettingsError: if a sparse gradient meets an optimizer that moves every row.
        """
        for optimizer in self.parts.values():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)

    def zero_grad(self) -> None:
        """Delete the gradients."""
        for optimizer in self.parts.values():
            optimizer.zero_grad(set_to_none=True)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divide the gradients by the scaler's factor, before they are clipped."""
        for optimizer in self.parts.values():
            scaler.unscale_(optimizer)

    def tensors(self) -> dict[str, Tensor]:
        """All state for a checkpoint, as `PART/parameter name/state name` -> tensor."""
        return {
            f"{place}/{name}": value
            for place, (optimizer, parameter) in self._places.items()
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` gave; settings and learning rates stay as they are.

        Raises:
            CheckpointError: naming every tensor of an unknown part or parameter, and every one whose shape or type is
                not what the part's optimizer keeps, since its kernels would write beyond the tensor.
        """
        strangers = [key for key in tensors if key.rpartition("/")[0] not in self._places]
        if strangers:
            raise CheckpointError.of(
                "optimizer tensors in the checkpoint",
                [f"'{key}' belongs to no part and parameter of this run" for key in strangers],
            )
        if problems := [*_misfits(self._places, self.settings, tensors)]:
            raise CheckpointError.of("optimizer tensors in the checkpoint", problems)
        for optimizer in self.parts.values():
            optimizer.state.clear()
        for key, value in tensors.items():
            place, _, name = key.rpartition("/")
            optimizer, parameter = self._places[place]
            # torch's fused optimizers count steps on the weights' device, all others on the CPU.
            beside = name != "step" or optimizer.param_groups[0].get("fused")
            device = parameter.device if beside else torch.device("cpu")
            own = value.detach().to(device, copy=True)
            optimizer.state[parameter][name] = laid_as(parameter, own) if own.shape == parameter.shape else own


def _misfits(
    places: Mapping[str, tuple[optim.Optimizer, nn.Parameter]],
    settings: Mapping[str, OptimizerSettings],
    tensors: Mapping[str, Tensor],
) -> Iterator[str]:
    """Tensors that the optimizers do not keep, or keep in another shape or type."""
    for place, (_, parameter) in places.items():
        known = _KEPT[settings[place.partition("/")[0]].optimizer]
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
"""Each optimizer's state of a parameter: shaped as the weight, its rows or a column of them, or a number or a count."""
_KEPT_AT_TIMES = frozenset({"velocity", "row_step"})


def _sorted_into(
    parts: Iterable[str], named: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Each part's parameters; the longest part that matches a name has it."""
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


def _way(optimizer: optim.Optimizer) -> str:
    """The form of the update of whole parameters."""
    (group,) = optimizer.param_groups
    if isinstance(optimizer, FormulaOptimizer):
        return "own formula, block by block on a CPU"
    return "fused: one pass over weights and state" if group.get("fused") else "torch's, many parameters at once"
