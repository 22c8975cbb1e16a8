"""DLRM: embeddings and an MLP over the numbers, the dot product of every pair of them, an MLP on top.

Naumov et al.: Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.

Shapes: B rows; F vectors; D their width; R requests; N items to score.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from recspec.base import config
from recspec.feature_spec import FeatureSpec
from recspec.models import click_defaults as rules
from recspec.models.base import DECAY_SPACE, TRAINING_SPACE, WIDTHS_SPACE, TableSize, UniformStd, Widths
from recspec.models.facts import DataFacts, Proposals
from recspec.models.layers import Batch, Dots, Mlp, RowsHeld, kernels
from recspec.models.tabular import Part, Tabular, linear_of_parts


class DlrmSettings(config.Settings):
    """Sizes of DLRM; the defaults are those published for Criteo Terabyte."""

    embedding_dim: int = Field(128, ge=1, description="width of every embedding, and of the bottom MLP's last layer")
    bottom: Widths = Field(
        (512, 256, 128), description="widths of the MLP over the numbers; the last equals embedding_dim"
    )
    top: Widths = Field((1024, 1024, 512, 256), description="widths of the MLP over the interactions, before the logit")
    interaction: Literal["dot", "cat"] = Field(
        "dot", description="dot: dot products of all pairs and the bottom MLP's output; cat: all vectors concatenated"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after each hidden ReLU of the top MLP")
    embedding_std: UniformStd = None
    combiner: Literal["sum", "mean"] = Field("sum", description="pooling of a list's embeddings")
    max_table_size: TableSize = None


class Dlrm(Tabular):
    """DLRM: dot products of all pairs of embeddings and of the numbers' MLP, then an MLP.

    Without numbers there is no bottom MLP. Embeddings start uniform within 1 / sqrt(rows); weights of the MLPs
    N(0, 2 / (in + out)), their biases N(0, 1 / out), and the layer of the logit as torch leaves it.
    """

    name = "dlrm"
    Settings = DlrmSettings
    space = MappingProxyType(
        {
            **TRAINING_SPACE,
            "embedding_dim,bottom": [(8, (64, 8)), (16, (64, 16)), (32, (128, 32)), (64, (256, 64))],
            "top": WIDTHS_SPACE,
            "dropout": "0.0..0.6",
            "train.parts.embeddings.weight_decay": DECAY_SPACE,
        }
    )
    settings: DlrmSettings

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        """See `Model.defaults`: dot products for ids with many rows, else all vectors concatenated.

        Dot products of rare ids hold no effect of a single feature, and stay at zero once decay has shrunk them.
        """
        found = dict(rules.training(facts, {"embeddings": 1.0}))
        vectors, per_id = len(facts.ids) + bool(facts.numbers), rules.rows_per_id(facts)
        if vectors == 1:
            found["interaction"] = ("cat", "there is one vector only, and dot products take two")
        if rules.is_published_size(facts):
            return found
        size = f"{facts.samples:,} samples"
        width = rules.embedding_dim(facts)
        found |= {
            "embedding_dim": (width, size),
            "bottom": ((4 * width, width), size),
            "top": (rules.hidden(facts), size),
            "dropout": (0.1, size),
        }
        if vectors == 1 or facts.task == "interactions":
            return found
        if per_id < rules.DENSE_IDS:
            found["interaction"] = ("cat", f"{per_id:.3g} training rows per id are too few for dot products")
        else:
            found["embedding_std"] = (0.1, "dot products of vectors near zero learn slowly")
        return found

    def __init__(self, spec: FeatureSpec, settings: DlrmSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.make_inputs(
            dict.fromkeys(self.ids, settings.embedding_dim),
            settings.bottom,
            combiner=settings.combiner,
            std=settings.embedding_std,
            max_rows=settings.max_table_size,
            table_rows=table_rows,
        )
        if self.has_bottom:
            start_normal(self.bottom)
        width = self.width
        if settings.interaction == "dot":
            vectors = len(self.ids) + bool(self.numbers)
            width = self.dense_dim + vectors * (vectors - 1) // 2
        self.pair_floats = settings.top[0]
        self.top = Mlp((width, *settings.top), dropout=settings.dropout)
        start_normal(self.top)
        self.out = nn.Linear(settings.top[-1], 1)

    def problems(self) -> list[str]:
        found, settings = super().problems(), self.settings
        if settings.interaction == "dot" and len(self.ids) + bool(self.numbers) == 1:
            found.append(
                "there is one vector only, and dot products take two; add a feature, or take interaction 'cat' or dcnv2"
            )
        if settings.interaction == "dot" and self.numbers and settings.bottom[-1] != settings.embedding_dim:
            found.append(
                f"the last width of bottom is {settings.bottom[-1]}, and embedding_dim is {settings.embedding_dim}; "
                "they are multiplied with each other, so make them equal"
            )
        return found

    def forward(self, batch: Batch) -> Tensor:
        return self.top.logits_of_parts(self._interactions(batch), self.out)

    def _interactions(self, batch: Batch) -> list[Tensor]:
        """The top MLP's input, in parts."""
        parts = self.inputs(batch)
        if self.settings.interaction == "cat":
            return parts
        joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        vectors = joined.view(joined.shape[0], -1, self.settings.embedding_dim)
        return [*parts[:-1], dot_interaction(vectors, self.embeddings.backend)]

    def logits_of(self, parts: Sequence[Part]) -> Tensor:
        """Logits (R, N); a pair costs the dot products of one side's vectors with the other's."""
        dense = [(x, columns) for x, columns in parts if columns[0] < self.dense_dim]
        used = [*dense, *((x, columns) for x, columns in parts if columns[0] >= self.dense_dim)]
        if self.settings.interaction == "dot":
            width = self.settings.embedding_dim
            places = [[column // width for column in columns[::width]] for _, columns in used]
            groups = [(x.view(*x.shape[:2], -1, width), own) for (x, _), own in zip(used, places, strict=True)]
            used = dense + _dots(groups, self.dense_dim)
        return cast(Tensor, self.out(self.top.after_first(linear_of_parts(self.top.first, used))).squeeze(-1))


def _dots(groups: Sequence[Part], offset: int) -> list[Part]:
    """Dot products within groups of vectors (R or 1, N or 1, F, D) and between them, with their columns."""
    found: list[Part] = []
    for number, (vectors, places) in enumerate(groups):
        if len(places) > 1:
            pairs = [(a, b) for a in range(len(places)) for b in range(a)]
            gram = (vectors @ vectors.transpose(2, 3)).flatten(2)
            chosen = torch.tensor([a * len(places) + b for a, b in pairs], device=gram.device)
            found.append((gram[..., chosen], [_column(offset, places[a], places[b]) for a, b in pairs]))
        for others, their_places in groups[:number]:
            columns = [_column(offset, mine, other) for mine in places for other in their_places]
            found.append(((vectors @ others.transpose(2, 3)).flatten(2), columns))
    return found


def _column(offset: int, place: int, other: int) -> int:
    """The column of two vectors' product in the top MLP's input: the lower triangle, row by row."""
    high, low = max(place, other), min(place, other)
    # Row h of the strict lower triangle begins behind 0 + 1 + ... + (h - 1) = h (h - 1) / 2 products.
    return offset + high * (high - 1) // 2 + low


def start_normal(mlp: Mlp) -> None:
    """Set first values as in DLRM: weights N(0, 2 / (in + out)), biases N(0, 1 / out)."""
    for layer in mlp.layers:
        linear = cast(nn.Linear, layer)
        nn.init.normal_(linear.weight, std=(2 / (linear.in_features + linear.out_features)) ** 0.5)
        nn.init.normal_(linear.bias, std=linear.out_features**-0.5)


def dot_interaction(vectors: Tensor, backend: kernels.Backend | None = None) -> Tensor:
    """The dot product of every pair of a row's vectors: (B, F, D) -> (B, F (F - 1) / 2).

    The strictly lower triangle of the Gram matrix, row by row: 10, 20, 21, 30, ... Naumov et al.: Deep Learning
    Recommendation Model for Personalization and Recommendation Systems, 2019, section 2.1.
    """
    device = vectors.device.type
    if kernels.uses_triton(backend, vectors.device) and kernels.can_dot(vectors):
        if torch.is_autocast_enabled(device):
            vectors = vectors.to(torch.get_autocast_dtype(device))
        return cast(Tensor, Dots.apply(vectors))  # type: ignore[no-untyped-call]
    # G = X X^T holds each product twice and the squares, which the lower triangle leaves out.
    gram = torch.bmm(vectors, vectors.transpose(1, 2))
    # Tensors made in a trace must not outlive it.
    triangle = _lower_triangle if torch.compiler.is_compiling() else _kept_lower_triangle
    return gram.flatten(1).index_select(1, triangle(vectors.shape[1], vectors.device))


@cache
def _kept_lower_triangle(features: int, device: torch.device) -> Tensor:
    """Kept on the device; a copy at every step would wait for it. Autograd may need what an inference made."""
    with torch.inference_mode(False):
        return _lower_triangle(features, torch.device("cpu")).to(device)


def _lower_triangle(features: int, device: torch.device) -> Tensor:
    """The places below the diagonal of a flattened square matrix, row by row."""
    if device.type == "cuda":  # a mask would wait for the device to count its places
        row, column = torch.tril_indices(features, features, offset=-1, device=device).unbind()
        return row * features + column
    square = torch.arange(features * features, device=device).view(features, features)
    return square[torch.ones_like(square, dtype=torch.bool).tril(-1)]
