"""The optimizers of a model's parts, stepped as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from recspec.base.errors import CheckpointError, SettingsError, listed, nearest, unknown
from recspec.loading import stores_of
from recspec.models import Model, on_meta_device
from recspec.models.layers import Embeddings, RowsHeld, kernels
from recspec.training.row_optimizers import form_of, laid_as, make_optimizer
from recspec.training.settings import KEPT, OptimizerSettings, TrainSettings, learning_rate_factor


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
        self.settings: dict[str, OptimizerSettings] = {"": settings, **(parts or {})}
        members = _sorted_into(self.settings, named_parameters)
        self.parts = {part: make_optimizer(self.settings[part], held) for part, held in members.items() if held}
        self._part_of = {name: part for part, held in members.items() for name, _ in held}
        self._places = {
            f"{part}/{name}": (self.parts[part], parameter)
            for part, held in members.items()
            for name, parameter in held
        }

    @property
    def learning_rates(self) -> dict[str, float]:
        """Each part's current rate."""
        return {part: optimizer.param_groups[0]["lr"] for part, optimizer in self.parts.items()}

    @property
    def described(self) -> str:
        """Each part's optimizer and its form, in one line."""
        return ", ".join(
            f"{part + ': ' if part else ''}{self.settings[part].optimizer} ({form_of(optimizer)})"
            for part, optimizer in self.parts.items()
        )

    def settings_of(self, name: str) -> OptimizerSettings:
        """The settings of a parameter."""
        return self.settings[self._part_of[name]]

    def use_backend(self, backend: kernels.Backend) -> None:
        """Choose what updates the rows of sparse gradients."""
        for optimizer in self.parts.values():
            optimizer.backend = backend

    def fused_update(self, name: str) -> kernels.FusedUpdate:
        """A parameter's update as FBGEMM's backward pass does it instead of `step`."""
        optimizer, weight = self._places[f"{self._part_of[name]}/{name}"]
        rule, (group,) = optimizer.rule, optimizer.param_groups
        if rule is None or optimizer.moves_every_row or rule not in kernels.FBGEMM_RULES:
            asked = optimizer.moves_every_row or f"optimizer '{self.settings_of(name).optimizer}'"
            known = listed(kernels.FBGEMM_RULES)
            raise SettingsError(f"{name}: fbgemm cannot update tables by {asked}; it has {known}")
        states, count = partial(optimizer.row_states, group, weight), partial(optimizer.count_step, weight)
        return kernels.FusedUpdate(rule, group, states, count)

    def set_learning_rates(self, step: int, *, steps_per_epoch: int, epochs: int, scale: float = 1.0) -> None:
        """Set each part's rate for step number `step` by its own schedule, times `scale`; 0 is the first."""
        for part, optimizer in self.parts.items():
            settings = self.settings[part]
            factor = learning_rate_factor(settings, step, steps_per_epoch=steps_per_epoch, epochs=epochs)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * factor * scale

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Update every parameter that has a gradient.

        With a scaler, a part whose gradients overflowed skips the step; the others take it.
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
        kept: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in tensors.items():
            place, _, name = key.rpartition("/")
            kept[place][name] = value
        problems = [
            f"'{place}/{name}' belongs to no part and parameter of this run"
            for place in kept
            if place not in self._places
            for name in kept[place]
        ] or [problem for place, found in kept.items() for problem in self._misfits(place, found)]
        CheckpointError.refuse("optimizer tensors in the checkpoint", problems)
        for optimizer in self.parts.values():
            optimizer.state.clear()
        for place, found in kept.items():
            optimizer, parameter = self._places[place]
            for name, value in found.items():
                # torch's fused optimizers count steps on the weights' device, all others on the CPU.
                beside = name != "step" or optimizer.param_groups[0].get("fused")
                own = value.detach().to(parameter.device if beside else "cpu", copy=True)
                optimizer.state[parameter][name] = laid_as(parameter, own) if own.shape == parameter.shape else own

    def _misfits(self, place: str, found: Mapping[str, Tensor]) -> Iterator[str]:
        """Tensors of a parameter that its optimizer does not keep, or keeps in another shape or type."""
        parameter, known = self._places[place][1], KEPT[self.settings[place.partition("/")[0]].optimizer]
        yield from (f"'{place}/{name}' is missing" for name in known.keys() - found.keys() - {"velocity", "row_step"})
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


def _sorted_into(
    parts: Iterable[str], named: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Each part's parameters; the longest part that matches a name has it."""
    members: dict[str, list[tuple[str, nn.Parameter]]] = {part: [] for part in parts}
    begun: set[str] = set()
    for name, parameter in named:
        begins = [*accumulate(name.split("."), "{}.{}".format)]  # `a.b.c` -> `a`, `a.b`, `a.b.c`
        begun.update(begins)
        members[max((part for part in members if part in ("", *begins)), key=len)].append((name, parameter))
    known, problems = sorted(begun), []
    short = [beginning for beginning in known if beginning.count(".") < 2]
    for part, held in members.items():
        if part and part not in begun:
            some = f"some do with {listed(short)}"
            problems.append(f"no parameter's name begins with '{part}'{nearest(part, known)}; {some}")
        elif part and not held:
            problems.append(f"all parameters of '{part}' belong to longer parts; remove it")
    SettingsError.refuse("train.parts", problems)
    return members


class MetaModel:
    """A model and its optimizers without their memory: what a plan reads of them."""

    def __init__(self, make: Callable[[RowsHeld | None], Model], settings: TrainSettings, device: torch.device) -> None:
        self.make = make
        self.model = on_meta_device(lambda: make(None))
        named = _stand_ins(self.model.named_parameters(), device)
        self.all_optimizers = Optimizers(named, settings, settings.part_settings)
        """Those of a run that freezes nothing."""
        self.optimizers = make_optimizers(_stand_ins(without_frozen(self.model, settings.frozen), device), settings)
        """Those of the run."""

    def tables(self) -> Iterator[tuple[str, Embeddings, str, nn.Parameter]]:
        """Each trained store of embeddings: its name, its module, its key there and its weight."""
        for each in stores_of(self.model):
            if each[-1].requires_grad:
                yield each

    def sizes(self, frozen: Sequence[str]) -> dict[str, object]:
        """Numbers of all parameters, of the trained ones and of each frozen part."""
        count = {name: each.numel() for name, each in self.model.named_parameters()}
        return {
            "parameters": sum(count.values()),
            "trained_parameters": self.model.num_parameters(),
            "frozen": {part: sum(count[name] for name in _in_part(self.model, part)) for part in frozen},
        }


def make_optimizers(trained: Sequence[tuple[str, nn.Parameter]], settings: TrainSettings) -> Optimizers:
    """The optimizers of the parameters that are trained."""
    parts = {part: own for part, own in settings.part_settings.items() if part not in settings.frozen}
    return Optimizers(trained, settings, parts)


def without_frozen(model: nn.Module, frozen: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are trained, by name; those of frozen parts get no gradient from here on."""
    held = {part: _in_part(model, part) for part in frozen}
    if missing := [part for part, names in held.items() if not names]:
        known = dict.fromkeys(name.split(".")[0] for name, _ in model.named_parameters())
        raise SettingsError.of("train.frozen", [unknown("part", part, known) for part in missing])
    for name in (name for names in held.values() for name in names):
        model.get_parameter(name).requires_grad_(False)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise SettingsError("train.frozen: every part is frozen; leave one to train")
    return trained


def _stand_ins(named: Iterable[tuple[str, Tensor]], device: torch.device) -> list[tuple[str, nn.Parameter]]:
    """A parameter of one number for each; the form of an optimizer depends on the device too."""
    return [(name, nn.Parameter(torch.empty((1,) * each.dim(), device=device))) for name, each in named]


def _in_part(model: nn.Module, part: str) -> list[str]:
    """Names of the parameters of a part: the parameter of that name, and those whose dotted name it begins."""
    return [name for name, _ in model.named_parameters() if name == part or name.startswith(f"{part}.")]
