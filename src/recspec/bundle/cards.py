"""The JSON files of a bundle, and what makes one a pipeline or a blend.

    score(u, i) = sum over members m of w_m t_m(s_m(u, i))

with t either the score itself, or log(share + floor) with share = max(s, 0) / sum over items of max(s, 0): the form for
counts and similarities, which are 0 for most items. For a model of logits, the score itself is the logarithm of its
softmax but for a number that all items of a user share. So the sum is a product of experts (Hinton, 2002).

Shapes: R users; N items; B rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import BundleError, SettingsError, problems_in
from recspec.base.files import PathError, confined, read_json
from recspec.feature_spec import FeatureSpec
from recspec.models import Interactions, ItemModel, find_model
from recspec.models.layers import RowsHeld

CardType = TypeVar("CardType", bound=BaseModel)
MOST_BYTES = 64 << 20  # of a file


def read(
    folder: Path, name: str, kind: type[CardType], *, what: str, version: int, most: int = MOST_BYTES
) -> CardType | None:
    """The content of a file of a bundle or a run, which is a `what` of a known version; None if there is no such file.

    Raises:
        BundleError: if the file is damaged, or of another version.
    """
    file = folder / name
    if not os.path.lexists(file):  # a link that leads nowhere is refused
        return None
    try:
        confined(folder, name)
        data = read_json(file, most=most)
        if isinstance(data, dict) and data.get("format") != version:
            raise BundleError(f"{file}: {what} format {data.get('format')!r}; this recspec reads {version}")
        return kind.model_validate(data)
    except PathError as error:
        raise BundleError(str(error) if str(file) in str(error) else f"{file}: {error}") from None
    except ValidationError as error:
        raise BundleError.of(f"{file}: damaged", problems_in(error)) from None


FILE_NAME = "pipeline.json"
FORMAT = 1
RETRIEVERS = "retrievers"
"""Folder of a pipeline that holds the bundle of each retriever."""
MOST_RETRIEVERS = 15
MOST_CANDIDATES = 100_000
POPULARITY = "popularity"
"""What brings the items that fill up a list of candidates."""

NAME = "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""Names of retrievers, which are names of folders too."""


class RetrieverCard(BaseModel):
    """One retriever of a pipeline; its bundle is the folder `retrievers/NAME`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME)
    has_index: bool
    """Whether it searches an index of item vectors; otherwise it scores all items."""


class PipelineCard(BaseModel):
    """The content of `pipeline.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    candidates: int = Field(ge=1, le=MOST_CANDIDATES)
    """Items that the ranker scores for each request."""
    filter: str | None = Field(None, max_length=10_000)
    """Expression over the columns of the item catalogue; other items are never candidates."""
    retrievers: tuple[RetrieverCard, ...] = Field(min_length=1, max_length=MOST_RETRIEVERS)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [each.name for each in self.retrievers]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two retrievers are called '{min(twice)}'")
        return self

    @property
    def described(self) -> str:
        """The candidates in words."""
        names = " and ".join(each.name for each in self.retrievers)
        kept = "" if self.filter is None else f", of items with {self.filter}"
        return f"{self.candidates:,} candidates of {names}{kept}"


def read_pipeline(folder: Path) -> PipelineCard | None:
    """The pipeline of a bundle; None if the bundle is a model alone.

    Raises:
        BundleError: if the file is damaged, or of another format.
    """
    return read(folder, FILE_NAME, PipelineCard, what="pipeline", version=FORMAT)


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

    def __init__(self, spec: FeatureSpec, settings: BlendSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.members = nn.ModuleList(_built(spec, each, table_rows) for each in settings.members)
        self.reads_order = any(each.reads_order for each in self.models)

    @property
    def models(self) -> Sequence[ItemModel]:
        """The members."""
        return [each for each in self.members if isinstance(each, ItemModel)]

    def allocate_buffers(self, weights: Mapping[str, Tensor]) -> list[str]:
        problems = super().allocate_buffers({name: each for name, each in weights.items() if name == "line"})
        for number, member in enumerate(self.models):
            prefix = f"members.{number}."
            own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
            problems += [f"{prefix}: {problem}" for problem in member.allocate_buffers(own)]
        return problems

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


def _built(spec: FeatureSpec, member: Member, table_rows: RowsHeld | None) -> ItemModel:
    """A member without its weights."""
    kind = find_model(member.model)
    if not issubclass(kind, ItemModel):
        raise SettingsError(f"a blend: {member.model} does not rank items by the users' events")
    return kind(spec, config.build(kind.Settings, f"member {member.model} of the blend", member.settings), table_rows)


BlendType = TypeVar("BlendType", bound=Blend)


def blend_of(spec: FeatureSpec, members: Sequence[tuple[Member, ItemModel]], kind: type[BlendType]) -> BlendType:
    """A blend of trained models."""
    blend = kind.__new__(kind)
    ItemModel.__init__(blend, spec, BlendSettings(members=tuple(each for each, _ in members)))
    blend.members = nn.ModuleList(model for _, model in members)
    blend.line = blend.line.to(blend.models[0].device)
    blend.reads_order = any(each.reads_order for each in blend.models)
    return blend
