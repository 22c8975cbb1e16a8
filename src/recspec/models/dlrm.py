"""DLRM: embeddings and an MLP over the numbers, the dot product of every pair of them, an MLP on top.

Naumov et al.: Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.

Shapes: B rows; F categorical features; D the embeddings' width.
"""

from __future__ import annotations

from typing import ClassVar, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch
from recspec.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.layers import Embeddings, Mlp, beside_dots, dot_interaction, ids_and_numbers
from recspec.models.base import Model


class DlrmSettings(config.Settings):
    """Sizes of DLRM; the defaults are those published for Criteo Terabyte."""

    embedding_dim: int = Field(128, ge=1, description="width of every embedding, and of the bottom MLP's last layer")
    bottom: tuple[int, ...] = Field(
        (512, 256, 128), min_length=1, description="widths of the MLP over the numbers; the last is embedding_dim"
    )
    top: tuple[int, ...] = Field(
        (1024, 1024, 512, 256), min_length=1, description="widths of the MLP over the interactions, before the logit"
    )
    interaction: Literal["dot", "cat"] = Field(
        "dot", description="dot: products of all pairs beside the bottom MLP's output; cat: all vectors side by side"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after every hidden ReLU of the top MLP")
    embedding_std: float | None = Field(
        None, ge=0, description="deviation of an embedding's first values; null starts uniform within 1 / sqrt(rows)"
    )
    combiner: Literal["sum", "mean"] = Field("sum", description="how a list's embeddings are pooled")
    max_table_size: int | None = Field(
        None, ge=2, description="most rows of a table; ids beyond share rows by remainder. null: a row for every id"
    )

    @field_validator("bottom", "top")
    @classmethod
    def _positive(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if any(width < 1 for width in widths):
            raise ValueError("every width is at least 1")
        return widths


class Dlrm(Model):
    """DLRM: dot products of all pairs of embeddings and of the numbers' MLP, then an MLP.

    Without numbers there is no bottom MLP. Embeddings start uniform within 1 / sqrt(rows); weights of the MLPs
    N(0, 2 / (in + out)), their biases N(0, 1 / out), and the layer of the logit as torch leaves it.
    """

    name: ClassVar[str] = "dlrm"
    needs: ClassVar[tuple[str, ...]] = ("label",)
    Settings: ClassVar[type[config.Settings]] = DlrmSettings
    settings: DlrmSettings

    def __init__(self, spec: FeatureSpec, settings: DlrmSettings) -> None:
        super().__init__(spec, settings)
        self.ids, self.numbers = ids_and_numbers(spec, spec.inputs())
        _check(spec, settings, self.ids, self.numbers)
        if self.ids:
            self.embeddings = Embeddings(
                spec,
                dict.fromkeys(self.ids, settings.embedding_dim),
                combiner=settings.combiner,
                start="uniform",
                std=settings.embedding_std,
                max_rows=settings.max_table_size,
            )
        if self.numbers:
            self.bottom = Mlp((len(self.numbers), *settings.bottom))
            start_normal(self.bottom)
        dense = settings.bottom[-1] if self.numbers else 0
        vectors = len(self.ids) + bool(self.numbers)
        if settings.interaction == "dot":
            width = dense + vectors * (vectors - 1) // 2
        else:
            width = dense + len(self.ids) * settings.embedding_dim
        self.top = Mlp((width, *settings.top), dropout=settings.dropout)
        start_normal(self.top)
        self.out = nn.Linear(settings.top[-1], 1)

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,)."""
        return cast(Tensor, self.out(self.top(self._interactions(batch))).squeeze(1))

    def _interactions(self, batch: Batch) -> Tensor:
        """The top MLP's input."""
        parts: list[Tensor] = []
        if self.numbers:
            parts.append(self.bottom(torch.stack([batch[name] for name in self.numbers], dim=1)))
        if self.ids:
            parts.append(self.embeddings(batch))
        if self.settings.interaction == "cat":
            return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if len(parts) > 1:
            return beside_dots(*parts)
        return dot_interaction(parts[0].view(parts[0].shape[0], -1, self.settings.embedding_dim))


def start_normal(mlp: Mlp) -> None:
    """First values as DLRM's: weights N(0, 2 / (in + out)), biases N(0, 1 / out)."""
    for layer in mlp.layers:
        linear = cast(nn.Linear, layer)
        nn.init.normal_(linear.weight, std=(2 / (linear.in_features + linear.out_features)) ** 0.5)
        nn.init.normal_(linear.bias, std=linear.out_features**-0.5)


def _check(spec: FeatureSpec, settings: DlrmSettings, ids: tuple[str, ...], numbers: tuple[str, ...]) -> None:
    """Refuse settings and specifications that leave nothing to multiply.

    Raises:
        SettingsError: with every problem.
    """
    problems = [
        f"feature '{name}' is a list of numbers, which dlrm does not take; take it out of channel_spec"
        for name in numbers
        if spec.features[name].is_list
    ]
    if not ids and not numbers:
        problems.append("there is no feature to read in the roles user, item and context")
    elif len(ids) + bool(numbers) < 2 and settings.interaction == "dot":
        problems.append(
            "there is one vector only, and dot products take two; add a feature, or take interaction 'cat', or dcnv2"
        )
    if numbers and settings.interaction == "dot" and settings.bottom[-1] != settings.embedding_dim:
        problems.append(
            f"the last width of bottom is {settings.bottom[-1]}, and embedding_dim is {settings.embedding_dim}; "
            "they are multiplied with each other, so make them equal"
        )
    if problems:
        raise SettingsError.of("dlrm", problems)
