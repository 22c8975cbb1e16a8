"""DLRM: embeddings and an MLP over the numbers, the dot product of every pair of them, an MLP on top.

Naumov et al.: Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.

Shapes: B rows; F categorical features; D the embeddings' width; R requests; N items to score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch, num_rows
from recspec.errors import SettingsError
from recspec.models.base import Model
from recspec.nn import Embeddings, Mlp, RowsHeld, dot_interaction, ids_and_numbers, linear_of_parts, may_replace
from recspec.spec import FeatureSpec

SCORE_FLOATS = 1 << 22
"""Floats of the top MLP's first layer that `score_items` computes at once: 16 MB."""


class DlrmSettings(config.Settings):
    """Sizes of DLRM; the defaults are those published for Criteo Terabyte."""

    embedding_dim: int = Field(128, ge=1, description="width of every embedding, and of the bottom MLP's last layer")
    bottom: tuple[int, ...] = Field(
        (512, 256, 128),
        min_length=1,
        description="widths of the MLP over the numbers; the last equals embedding_dim",
    )
    top: tuple[int, ...] = Field(
        (1024, 1024, 512, 256), min_length=1, description="widths of the MLP over the interactions, before the logit"
    )
    interaction: Literal["dot", "cat"] = Field(
        "dot", description="dot: dot products of all pairs and the bottom MLP's output; cat: all vectors side by side"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after each hidden ReLU of the top MLP")
    embedding_std: float | None = Field(
        None, ge=0, description="standard deviation of initial embeddings; null: uniform within 1 / sqrt(rows)"
    )
    combiner: Literal["sum", "mean"] = Field("sum", description="pooling of a list's embeddings")
    max_table_size: int | None = Field(
        None, ge=2, description="maximum rows of a table; ids beyond share rows by remainder. null: a row for each id"
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

    def __init__(self, spec: FeatureSpec, settings: DlrmSettings, held: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, held)
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
                held=held,
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

    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request.

        Embeddings, the dot products within a side, and their part of the top MLP's first layer are computed once for
        the request or the item. A pair costs the dot products of one side's vectors with the other's. If one side holds
        all numbers, the bottom MLP runs once for it; otherwise its first layer runs once for each side.
        """
        if not may_replace(self):
            return super().score_items(request, items)
        ours, theirs = self._side(request), self._side(items)
        if torch.compiler.is_compiling():
            return self._pairs(ours, theirs)
        if not (num_rows(request) and num_rows(items)):
            return torch.zeros(num_rows(request), num_rows(items), device=self.out.weight.device)
        step = max(1, SCORE_FLOATS // (num_rows(items) * self.top.first.out_features))
        blocks = [ours.rows(slice(at, at + step)) for at in range(0, num_rows(request), step)]
        return torch.cat([self._pairs(block, theirs) for block in blocks])

    def _side(self, batch: Batch) -> _Side:
        """The part of a request's or an item's features in a pair."""
        order = self.embeddings.order() if self.ids else ()
        names = [name for name in order if name in batch]
        rows, first = num_rows(batch), int(bool(self.numbers))
        width, device = self.settings.embedding_dim, self.out.weight.device
        vectors = self.embeddings(batch, names) if names else torch.zeros(rows, 0, device=device)
        places = [first + order.index(name) for name in names]
        numbers = [place for place, name in enumerate(self.numbers) if name in batch]
        dense = bottom = None
        if numbers:
            stacked = torch.stack([batch[self.numbers[place]] for place in numbers], dim=1)
            if len(numbers) == len(self.numbers):
                dense = self.bottom(stacked)
            else:
                bottom = (stacked, numbers)
        return _Side(vectors.view(vectors.shape[0], len(names), width), places, dense, bottom)

    def _pairs(self, ours: _Side, theirs: _Side) -> Tensor:
        """Logits (R, N)."""
        dense = None if ours.dense is None else ours.dense.unsqueeze(1)
        dense = dense if theirs.dense is None else theirs.dense.unsqueeze(0)
        if self.numbers and dense is None:
            halves = [(side[0].unsqueeze(at), side[1]) for at, side in ((1, ours.bottom), (0, theirs.bottom)) if side]
            dense = self.bottom.after_first(linear_of_parts(self.bottom.first, halves))
        offset = 0 if dense is None else dense.shape[-1]
        parts: list[tuple[Tensor, Sequence[int]]] = [] if dense is None else [(dense, range(offset))]
        left, right = ours.vectors.unsqueeze(1), theirs.vectors.unsqueeze(0)
        groups = [(left, ours.places), (right, theirs.places)]
        if self.settings.interaction == "cat":
            width = self.settings.embedding_dim
            for vectors, places in groups:
                starts = [offset + (place - bool(self.numbers)) * width for place in places]
                parts.append((vectors.flatten(2), [start + at for start in starts for at in range(width)]))
        else:
            if dense is not None:
                groups.insert(0, (dense.unsqueeze(2), [0]))
            parts += _dots(groups, offset)
        used = [(x, columns) for x, columns in parts if len(columns)]
        return cast(Tensor, self.out(self.top.after_first(linear_of_parts(self.top.first, used))).squeeze(-1))

    def _interactions(self, batch: Batch) -> Tensor:
        """The top MLP's input."""
        parts: list[Tensor] = []
        if self.numbers:
            parts.append(self.bottom(torch.stack([batch[name] for name in self.numbers], dim=1)))
        if self.ids:
            parts.append(self.embeddings(batch))
        joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if self.settings.interaction == "cat":
            return joined
        dots = dot_interaction(joined.view(joined.shape[0], -1, self.settings.embedding_dim))
        return torch.cat([parts[0], dots], dim=1) if len(parts) > 1 else dots


@dataclass(frozen=True)
class _Side:
    """The part of requests (R rows) or items (N rows) in a pair."""

    vectors: Tensor
    """(rows, F, D): embeddings."""

    places: Sequence[int]
    """The place of each among all vectors; the bottom MLP's output is the first."""

    dense: Tensor | None
    """(rows, D): the bottom MLP's output, if this side has all numbers."""

    bottom: tuple[Tensor, Sequence[int]] | None
    """Numbers (rows, n) and their places, if the other side has numbers too."""

    def rows(self, chosen: slice) -> _Side:
        """Some of the rows."""
        return _Side(
            self.vectors[chosen],
            self.places,
            None if self.dense is None else self.dense[chosen],
            None if self.bottom is None else (self.bottom[0][chosen], self.bottom[1]),
        )


def _dots(groups: Sequence[tuple[Tensor, Sequence[int]]], offset: int) -> list[tuple[Tensor, Sequence[int]]]:
    """Dot products within groups of vectors (R or 1, N or 1, F, D) and between them, with their columns."""
    found: list[tuple[Tensor, Sequence[int]]] = []
    for number, (vectors, places) in enumerate(groups):
        if len(places) > 1:
            pairs = [(a, b) for a in range(len(places)) for b in range(a)]
            gram = (vectors @ vectors.transpose(2, 3)).flatten(2)
            chosen = torch.tensor([a * len(places) + b for a, b in pairs], device=gram.device)
            found.append((gram[..., chosen], [_column(offset, places[a], places[b]) for a, b in pairs]))
        for others, their_places in groups[:number]:
            columns = [_column(offset, mine, other) for mine in places for other in their_places]
            if columns:
                found.append(((vectors @ others.transpose(2, 3)).flatten(2), columns))
    return found


def _column(offset: int, place: int, other: int) -> int:
    """The column of two vectors' product in the top MLP's input: the lower triangle, row by row."""
    high, low = max(place, other), min(place, other)
    return offset + high * (high - 1) // 2 + low


def start_normal(mlp: Mlp) -> None:
    """Set first values as in DLRM: weights N(0, 2 / (in + out)), biases N(0, 1 / out)."""
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
