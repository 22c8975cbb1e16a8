"""FinalNet: two branches of layers that multiply their own halves, one of them over gated embeddings.

Zhu et al.: FINAL: Factorized Interaction Layer for CTR Prediction, SIGIR 2023.

Shapes: B rows; F embedded features; D width of an embedding; X width of x_0; R requests; N items to score.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from recspec.base import config
from recspec.feature_spec import FeatureSpec
from recspec.models import click_defaults as rules
from recspec.models.base import DECAY_SPACE, TRAINING_SPACE, WIDTHS_SPACE, UniformStd, Widths
from recspec.models.facts import DataFacts, Proposals
from recspec.models.layers import Batch, BatchNorm, RowsHeld, at_least_fp32, cross_entropy
from recspec.models.tabular import Part, Tabular, linear_of_parts


class FinalNetSettings(config.Settings):
    """Sizes of FinalNet; the defaults are those published for MovieLens, with a narrower second branch."""

    embedding_dim: int = Field(10, ge=1, description="width of every embedding")
    embedding_std: UniformStd = None
    gated: Widths = Field((400, 400), description="even widths of the branch over gated embeddings")
    plain: Widths = Field((400,), description="even widths of the branch over the embeddings as they are")
    batch_norm: bool = Field(True, description="standardise each layer's units over the rows of a batch")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after each hidden ReLU")

    @field_validator("gated", "plain")
    @classmethod
    def _are_even(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if odd := [width for width in widths if width % 2]:
            raise ValueError(f"{odd[0]} is odd, and a layer multiplies its two halves; take even widths")
        return widths


class FinalNet(Tabular):
    """FinalNet: the mean logit of two branches, each of which also learns from their mean.

    A layer of width H takes h = W x + b, (B, H), splits it into halves h2 and h1, and puts h2 and h1 * h2 side by side;
    then batch normalisation, ReLU and dropout. Each layer so doubles the degree of the crosses. One branch reads x_0,
    the other x_0 and the embeddings times their gates, a linear map over the features that starts as 1. Lists are
    summed; numbers enter unchanged, without gates.
    """

    name = "finalnet"
    Settings = FinalNetSettings
    space = MappingProxyType(
        {
            **TRAINING_SPACE,
            "embedding_dim": [8, 16, 32, 64],
            "gated": WIDTHS_SPACE,
            "plain": WIDTHS_SPACE,
            "dropout": "0.0..0.6",
            "train.parts.embeddings.weight_decay": DECAY_SPACE,
        }
    )
    settings: FinalNetSettings

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        """See `Model.defaults`: the widths and the decay of the other click models."""
        found = dict(rules.training(facts, {"embeddings": 1.0}))
        if rules.is_published_size(facts):
            return found
        size, hidden = f"{facts.samples:,} samples", rules.hidden(facts)
        return found | {
            "embedding_dim": (rules.embedding_dim(facts), size),
            "gated": (hidden, size),
            "plain": (hidden[:1], size),
            "dropout": (0.1, size),
        }

    def __init__(self, spec: FeatureSpec, settings: FinalNetSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        dim, num_ids = settings.embedding_dim, len(self.ids)
        self.make_inputs(
            dict.fromkeys(self.ids, dim),
            (),
            combiner="sum",
            std=settings.embedding_std,
            max_rows=None,
            table_rows=table_rows,
        )
        if self.ids:
            self.gate = nn.Linear(num_ids, num_ids)
            nn.init.zeros_(self.gate.weight)
            nn.init.ones_(self.gate.bias)
        wide = self.width + num_ids * dim
        self.gated = Branch((wide, *settings.gated), dropout=settings.dropout, batch_norm=settings.batch_norm)
        self.plain = Branch((self.width, *settings.plain), dropout=settings.dropout, batch_norm=settings.batch_norm)
        self.pair_floats = max(wide, *settings.gated, *settings.plain)

    def forward(self, batch: Batch) -> Tensor:
        gated, plain = self._branches(batch)
        return (gated + plain) / 2

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats of the mean logit, plus that of each branch to the mean's probability."""
        branches = self._branches(batch)
        logits = (branches[0] + branches[1]) / 2
        taught = torch.sigmoid(at_least_fp32(logits.detach()))
        loss = cross_entropy(logits, batch[self.spec.label])
        return loss + cross_entropy(branches[0], taught) + cross_entropy(branches[1], taught)

    def _branches(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (B,) of the gated and of the plain branch."""
        x = torch.cat(self.inputs(batch), dim=1)
        return self.gated(self._with_gates(x)), self.plain(x)

    def _with_gates(self, x: Tensor) -> Tensor:
        """x_0 (..., X) and behind it the embeddings times their gates."""
        if not self.ids:
            return x
        embedded = x[..., self.dense_dim :].reshape(*x.shape[:-1], len(self.ids), -1)
        gates = cast(Tensor, self.gate(embedded.transpose(-1, -2))).transpose(-1, -2)
        return torch.cat([x, (embedded * gates).flatten(-2)], dim=-1)

    def logits_of(self, parts: Sequence[Part]) -> Tensor:
        """Logits (R, N), with the first product of the plain branch summed over the parts; gates are of both sides."""
        requests, candidates = (max(x.shape[at] for x, _ in parts) for at in (0, 1))
        columns = [column for _, own in parts for column in own]
        order = torch.tensor(sorted(range(self.width), key=columns.__getitem__), device=self.plain.out.weight.device)
        x = torch.cat([x.expand(requests, candidates, -1) for x, _ in parts], dim=2)[..., order]
        plain = self.plain.after_first(linear_of_parts(self.plain.first, parts))
        return cast(Tensor, (self.gated(self._with_gates(x)) + plain) / 2)


class Branch(nn.Module):
    """Layers that multiply their own halves, and an output layer: (..., dims[0]) -> (...).

    A layer is h = W x + b, then h2 beside h1 * h2 for the halves of h. Weights start Glorot-uniform.
    """

    def __init__(self, dims: Sequence[int], *, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(x_dim, y_dim) for x_dim, y_dim in pairwise(dims))
        self.norms = nn.ModuleList(BatchNorm(width) for width in dims[1:] if batch_norm)
        self.out = nn.Linear(dims[-1], 1)
        self.dropout = dropout
        for layer in (*self.layers, self.out):
            nn.init.xavier_uniform_(cast(nn.Linear, layer).weight)

    @property
    def first(self) -> nn.Linear:
        """The first linear layer."""
        return cast(nn.Linear, self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the input."""
        return self.after_first(self.first(x))

    def after_first(self, x: Tensor) -> Tensor:
        """Logits, from the first linear layer's output."""
        for place, layer in enumerate(self.layers):
            second, first = (x if place == 0 else layer(x)).chunk(2, dim=-1)
            x = torch.cat([second, first * second], dim=-1)
            x = F.relu(self.norms[place](x) if len(self.norms) else x)
            x = F.dropout(x, self.dropout, self.training)
        return cast(Tensor, self.out(x).squeeze(-1))
