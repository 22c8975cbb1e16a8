"""A model and its optimizers without their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from recspec import config
from recspec.errors import SettingsError, unknown
from recspec.models import MODELS, Model
from recspec.nn import Embeddings, RowsHeld, without_memory
from recspec.spec import FeatureSpec
from recspec.training.optimizers import Optimizers
from recspec.training.settings import TrainSettings


class Outline:
    """What a plan reads of a model: names and shapes of its parameters, and which optimizer updates which.

    Raises:
        SettingsError: if a part of `train.frozen` or `train.parts` is not there, or nothing is left to train.
    """

    def __init__(
        self,
        model_name: str,
        spec: FeatureSpec,
        model_settings: config.Settings,
        settings: TrainSettings,
        device: torch.device,
    ) -> None:
        self.model_name, self.spec, self.model_settings = model_name, spec, model_settings
        self.model = without_memory(self.make)
        named = self._stand_ins(self.model.named_parameters(), device)
        self.all_optimizers = Optimizers(named, settings, settings.part_settings)
        """Those of a run that freezes nothing."""
        trained = without_frozen(self.model, settings.frozen)
        self.optimizers = make_optimizers(self._stand_ins(trained, device), settings)
        """Those of the run."""

    def make(self, held: RowsHeld | None = None) -> Model:
        """The model, with the rows of its tables that are held."""
        return MODELS[self.model_name](self.spec, self.model_settings, held)

    @staticmethod
    def _stand_ins(named: Iterable[tuple[str, Tensor]], device: torch.device) -> list[tuple[str, nn.Parameter]]:
        """A parameter of one number for each; the form of an optimizer depends on the device too."""
        return [(name, nn.Parameter(torch.empty((1,) * each.dim(), device=device))) for name, each in named]

    def tables(self) -> Iterator[tuple[str, Embeddings, str, nn.Parameter]]:
        """Each trained store of embeddings: its name, its module, its key there and its weight."""
        for prefix, module in self.model.named_modules():
            for key, store in module.stores.items() if isinstance(module, Embeddings) else ():
                if store.requires_grad:
                    yield f"{prefix}.stores.{key}", module, key, store

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
    """The parameters that are trained, by name; those of frozen parts get no gradient from here on.

    Raises:
        SettingsError: naming every part that is not there, or if nothing is left to train.
    """
    named = list(model.named_parameters())
    found = {part: [model.get_parameter(name) for name in _in_part(model, part)] for part in frozen}
    missing = [part for part, held in found.items() if not held]
    if missing:
        known = dict.fromkeys(name.split(".")[0] for name, _ in named)
        raise SettingsError.of("train.frozen", [unknown("part", part, known) for part in missing])
    for parameter in (parameter for held in found.values() for parameter in held):
        parameter.requires_grad_(False)
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise SettingsError("train.frozen: every part is frozen; leave one to train")
    return trained


def _in_part(model: nn.Module, part: str) -> list[str]:
    """Names of the parameters of a part: the parameter of that name, and those whose dotted name it begins."""
    return [name for name, _ in model.named_parameters() if name == part or name.startswith(f"{part}.")]
