"""A blend: the weighted sum of the scores of several item models.

    score(u, i) = sum over members m of w_m t_m(s_m(u, i))

with t either the score itself, or log(share + floor) with share = max(s, 0) / sum over items of max(s, 0): the form for
counts and similarities, which are 0 for most items. For a model of logits, the score itself is the logarithm of its
softmax but for a number that all items of a user share. So the sum is a product of experts (Hinton, 2002).

Shapes: R users; N items; B rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from recspec import config
from recspec.errors import SettingsError, listed, unknown
from recspec.models import MODELS, Interactions, ItemModel
from recspec.nn import RowsHeld
from recspec.spec import FeatureSpec

MOST_MEMBERS = 16

Form = Literal["score", "log"]


class Member(config.Settings):
    """A model of a blend."""

    model: str = Field(description="name of the model")
    settings: dict[str, object] = Field(default={}, description="its own settings")
    weight: float = Field(ge=0, le=1e9, description="weight of its part")
    form: Form = Field("score", description="score: its scores; log: the logarithm of an item's share of the scores")
    floor: float = Field(3e-4, gt=0, le=1, description="form log: what is added to every share")


class BlendSettings(config.Settings):
    """Settings of a blend."""

    members: tuple[Member, ...] = Field(min_length=1, max_length=MOST_MEMBERS, description="the models and weights")


class Blend(ItemModel):
    """The weighted sum of the scores of several item models."""

    name: ClassVar[str] = "blend"
    Settings = BlendSettings
    settings: BlendSettings

    def __init__(self, spec: FeatureSpec, settings: BlendSettings, held: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, held)
        self.members = nn.ModuleList(_built(spec, each, held) for each in settings.members)
        self.reads_order = any(each.reads_order for each in self.models)

    @property
    def models(self) -> Sequence[ItemModel]:
        """The members."""
        return [each for each in self.members if isinstance(each, ItemModel)]

    @property
    def device(self) -> torch.device:
        """The device of its first member."""
        return self.models[0].device

    def make_room(self, weights: Mapping[str, Tensor]) -> list[str]:
        problems = super().make_room({name: each for name, each in weights.items() if name == "line"})
        for number, member in enumerate(self.models):
            prefix = f"members.{number}."
            own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
            problems += [f"{prefix}: {problem}" for problem in member.make_room(own)]
        return problems

    def prepare_for_inference(self) -> None:
        for member in self.models:
            member.prepare_for_inference()

    def know(self, interactions: Interactions) -> None:
        for member in self.models:
            member.know(interactions)

    def score_users(self, users: Tensor) -> Tensor:
        parts = zip(self.settings.members, self.models, strict=True)
        scores = [own.weight * as_part(model.score_users(users), own.form, own.floor) for own, model in parts]
        return torch.stack(scores).sum(0)


def as_part(scores: Tensor, form: Form, floor: float) -> Tensor:
    """Scores (R, N) in the form in which they are summed."""
    scores = scores.float()
    if form == "score":
        return scores
    positive = scores.clamp(min=0)
    total = positive.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (positive / total + floor).log()


def _built(spec: FeatureSpec, member: Member, held: RowsHeld | None) -> ItemModel:
    """A member without its weights."""
    known = blendable()
    if member.model not in known:
        raise SettingsError(f"a blend: {unknown('model', member.model, known)}")
    kind = known[member.model]
    return kind(spec, config.build(kind.Settings, f"member {member.model} of the blend", member.settings), held)


def blendable() -> dict[str, type[ItemModel]]:
    """The models that a blend may hold: those that rank items by the users' events."""
    return {name: kind for name, kind in MODELS.items() if issubclass(kind, ItemModel)}


def blend_of(spec: FeatureSpec, members: Sequence[tuple[Member, ItemModel]]) -> Blend:
    """A blend of trained models."""
    strange = [each.model for each, _ in members if each.model not in blendable()]
    if strange:
        raise SettingsError(
            f"{listed(strange)} can't be blended: a blend holds models that rank items by the users' events "
            f"({', '.join(blendable())})"
        )
    blend = Blend.__new__(Blend)
    ItemModel.__init__(blend, spec, BlendSettings(members=tuple(each for each, _ in members)))
    blend.members = nn.ModuleList(model for _, model in members)
    blend.reads_order = any(each.reads_order for each in blend.models)
    return blend
