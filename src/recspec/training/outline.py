"""A model and its optimizers without their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from recspec.base.errors import SettingsError, unknown
from recspec.loading import stores_of
from recspec.models import Model, on_meta_device
from recspec.models.layers import Embeddings, RowsHeld
from recspec.training.optimizers import Optimizers
from recspec.training.settings import TrainSettings


class Outline:
    """What a plan reads of a model: names and shapes of its parameters, and which optimizer updates which."""

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
