"""DCNv2: explicit crosses of all features by low-rank cross layers, and an MLP on top or in parallel.

Wang et al.: DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems,
WWW 2021.

Shapes: B rows; X width of the cross layers; R requests; N items to score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch, num_rows
from recspec.errors import SettingsError, unknown
from recspec.models.base import Model
from recspec.nn import (
    CrossNetwork,
    Embeddings,
    Mlp,
    RowsHeld,
    embedding_widths,
    ids_and_numbers,
    linear_of_parts,
    may_replace,
)
from recspec.spec import FeatureSpec

SCORE_FLOATS = 1 << 22
"""Floats of the cross layers' input that `score_items` computes at once: 16 MB."""


class DcnV2Settings(config.Settings):
    """Sizes of DCNv2; the defaults are those published for Criteo Terabyte."""

    embedding_dim: int | Literal["rule"] = Field(
        128, description="width of every embedding; `rule`: 6 times the fourth root of the cardinality"
    )
    embedding_dims: dict[str, int] = Field({}, description="feature -> its own width, instead of embedding_dim")
    embedding_std: float | None = Field(
        None, ge=0, description="standard deviation of initial embeddings; null: uniform within 1 / sqrt(rows)"
    )
    bottom: tuple[int, ...] = Field(
        (512, 256, 128), description="widths of the MLP over the numbers; empty: numbers are unchanged"
    )
    cross_layers: int = Field(3, ge=1, le=1000, description="number of cross layers")
    cross_rank: int = Field(512, ge=0, description="rank of a cross layer's matrix; 0 takes a full matrix")
    top: tuple[int, ...] = Field((1024, 1024, 512, 256), min_length=1, description="widths of the MLP")
    structure: Literal["stacked", "parallel"] = Field(
        "stacked", description="input of the MLP: stacked, the cross layers' output; parallel, their input"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after each hidden ReLU of the MLP")
    combiner: Literal["sum", "mean"] = Field("sum", description="pooling of a list's embeddings")
    max_table_size: int | None = Field(
        None, ge=2, description="maximum rows of a table; ids beyond share rows by remainder. null: a row for each id"
    )

    @field_validator("bottom", "top", "embedding_dims", "embedding_dim")
    @classmethod
    def _positive(cls, value: object) -> object:
        widths = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        if any(isinstance(width, int) and width < 1 for width in widths):
            raise ValueError("every width is at least 1")
        return value


_Part = tuple[Tensor, Sequence[int]]
"""Some columns of a tensor, and their places in it."""


class DcnV2(Model):
    """DCNv2: low-rank cross layers over embeddings and numbers, and an MLP on top of them or in parallel.

    Lists are pooled; without numbers there is no bottom MLP.
    """

    name: ClassVar[str] = "dcnv2"
    needs: ClassVar[tuple[str, ...]] = ("label",)
    Settings: ClassVar[type[config.Settings]] = DcnV2Settings
    settings: DcnV2Settings

    def __init__(self, spec: FeatureSpec, settings: DcnV2Settings, held: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, held)
        self.ids, self.numbers = ids_and_numbers(spec, spec.inputs())
        _check(spec, settings, self.ids, self.numbers)
        widths = embedding_widths(spec, self.ids, settings.embedding_dim, settings.embedding_dims)
        if self.ids:
            self.embeddings = Embeddings(
                spec,
                widths,
                combiner=settings.combiner,
                start="uniform",
                std=settings.embedding_std,
                max_rows=settings.max_table_size,
                held=held,
            )
        dense = len(self.numbers)
        if self.numbers and settings.bottom:
            self.bottom = Mlp((dense, *settings.bottom))
            dense = settings.bottom[-1]
        self.width = dense + sum(widths.values())
        self.cross = CrossNetwork(self.width, num_layers=settings.cross_layers, rank=settings.cross_rank)
        self.top = Mlp((self.width, *settings.top), dropout=settings.dropout)
        beside = self.width if settings.structure == "parallel" else 0
        self.out = nn.Linear(settings.top[-1] + beside, 1)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,)."""
        first = self._inputs(batch)
        crossed = self.cross(first)
        if self.settings.structure == "stacked":
            return cast(Tensor, self.out(self.top(crossed)).squeeze(1))
        return cast(Tensor, self.out(torch.cat([crossed, self.top(first)], dim=1)).squeeze(1))

    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request.

        Embeddings and the first products with them are computed once for the request or the item and added: those of
        the cross layers and, in parallel structure, of the MLP. If one side holds all numbers, the bottom MLP runs once
        for it; otherwise its first layer runs once for each side. Later cross layers mix both sides, so they run for
        every pair.
        """
        if not may_replace(self):
            return super().score_items(request, items)
        ours, theirs = self._columns_of(request), self._columns_of(items)
        if torch.compiler.is_compiling():
            return self._pairs(ours, theirs)
        if not (num_rows(request) and num_rows(items)):
            return torch.zeros(num_rows(request), num_rows(items), device=self.out.weight.device)
        step = max(1, SCORE_FLOATS // (num_rows(items) * self.width))
        blocks = [[(x[at : at + step], columns) for x, columns in ours] for at in range(0, num_rows(request), step)]
        return torch.cat([self._pairs(block, theirs) for block in blocks])

    def _columns_of(self, batch: Batch) -> list[_Part]:
        """The parts of x_0 from a batch's features, (rows, n), with their columns in x_0.

        If a bottom MLP also reads numbers of the other side, these numbers are unchanged, with columns from the end: -1
        is the first number.
        """
        parts: list[_Part] = []
        numbers = [place for place, name in enumerate(self.numbers) if name in batch]
        if numbers:
            stacked = torch.stack([batch[self.numbers[place]] for place in numbers], dim=1)
            if not self.settings.bottom:
                parts.append((stacked, numbers))
            elif len(numbers) == len(self.numbers):
                parts.append((self.bottom(stacked), range(self.settings.bottom[-1])))
            else:
                parts.append((stacked, [-1 - place for place in numbers]))
        names = [name for name in self.embeddings.order() if name in batch] if self.ids else []
        if names:
            start = self.width - self.embeddings.width
            columns: list[int] = []
            for name in self.embeddings.order():
                own = self.embeddings.widths[name]
                columns += range(start, start + own) if name in names else ()
                start += own
            parts.append((self.embeddings(batch, names), columns))
        return parts

    def _pairs(self, ours: Sequence[_Part], theirs: Sequence[_Part]) -> Tensor:
        """Logits (R, N)."""
        laid = [(x.unsqueeze(1), columns) for x, columns in ours] + [(x.unsqueeze(0), columns) for x, columns in theirs]
        parts = [part for part in laid if part[1][0] >= 0]
        if halves := [(x, [-1 - place for place in columns]) for x, columns in laid if columns[0] < 0]:
            dense = self.bottom.after_first(linear_of_parts(self.bottom.first, halves))
            parts.append((dense, range(dense.shape[-1])))
        requests, candidates = (max(x.shape[at] for x, _ in parts) for at in (0, 1))
        columns = [column for _, own in parts for column in own]
        order = torch.tensor(sorted(range(self.width), key=columns.__getitem__), device=self.out.weight.device)
        first = torch.cat([x.expand(requests, candidates, -1) for x, _ in parts], dim=2)[..., order]
        crossed = self.cross(first, linear_of_parts(self.cross.opening, parts))
        if self.settings.structure == "stacked":
            return cast(Tensor, self.out(self.top(crossed)).squeeze(-1))
        top = self.top.after_first(linear_of_parts(self.top.first, parts))
        return cast(Tensor, self.out(torch.cat([crossed, top], dim=-1)).squeeze(-1))

    def _inputs(self, batch: Batch) -> Tensor:
        """x_0 (B, X): the numbers' part, then the embeddings."""
        parts: list[Tensor] = []
        if self.numbers:
            numbers = torch.stack([batch[name] for name in self.numbers], dim=1)
            parts.append(self.bottom(numbers) if self.settings.bottom else numbers)
        if self.ids:
            parts.append(self.embeddings(batch))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _check(spec: FeatureSpec, settings: DcnV2Settings, ids: tuple[str, ...], numbers: tuple[str, ...]) -> None:
    """Refuse settings and specifications that make no model.

    Raises:
        SettingsError: with every problem.
    """
    problems = [
        f"embedding_dims: {unknown('categorical feature', name, ids)}"
        for name in settings.embedding_dims
        if name not in ids
    ]
    problems += [
        f"feature '{name}' is a list of numbers, which dcnv2 does not take; take it out of channel_spec"
        for name in numbers
        if spec.features[name].is_list
    ]
    if not ids and not numbers:
        problems.append("there is no feature to read in the roles user, item and context")
    if problems:
        raise SettingsError.of("dcnv2", problems)
