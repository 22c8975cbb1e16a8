"""DCNv2: explicit crosses of all features by low-rank cross layers, and an MLP on top or in parallel.

Wang et al.: DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems,
WWW 2021.

Shapes: B rows; X width of the cross layers; R requests; N items to score.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import unknown
from recspec.feature_spec import FeatureSpec
from recspec.models import click_defaults as rules
from recspec.models.base import DECAY_SPACE, POSITIVE, TRAINING_SPACE, WIDTHS_SPACE, TableSize, UniformStd, Widths
from recspec.models.facts import DataFacts, Proposals
from recspec.models.layers import Batch, Mlp, RowsHeld, embedding_widths
from recspec.models.tabular import Part, Tabular, linear_of_parts

FULL_CROSS = 1024
"""Most columns of x_0 for which cross layers have full matrices by default; beyond, their rank is a quarter of it."""


class DcnV2Settings(config.Settings):
    """Sizes of DCNv2; the defaults are those published for Criteo Terabyte."""

    embedding_dim: Annotated[int | Literal["rule"], POSITIVE] = Field(
        128, description="width of every embedding; `rule`: 6 times the fourth root of the cardinality"
    )
    embedding_dims: Annotated[dict[str, int], POSITIVE] = Field(
        {}, description="widths of single features, as {feature: width}; embedding_dim for the others"
    )
    embedding_std: UniformStd = None
    bottom: Annotated[tuple[int, ...], POSITIVE] = Field(
        (512, 256, 128), description="widths of the MLP over the numbers; empty: numbers are unchanged"
    )
    cross_layers: int = Field(3, ge=1, le=1000, description="number of cross layers")
    cross_rank: int = Field(512, ge=0, description="rank of a cross layer's matrix; 0: full matrix")
    top: Widths = Field((1024, 1024, 512, 256), description="widths of the MLP")
    structure: Literal["stacked", "parallel"] = Field(
        "stacked", description="input of the MLP: stacked, the cross layers' output; parallel, their input"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after each hidden ReLU of the MLP")
    combiner: Literal["sum", "mean"] = Field("sum", description="pooling of a list's embeddings")
    max_table_size: TableSize = None


class DcnV2(Tabular):
    """DCNv2: low-rank cross layers over embeddings and numbers, and an MLP on top of them or in parallel.

    Lists are pooled; without numbers there is no bottom MLP.
    """

    name = "dcnv2"
    Settings = DcnV2Settings
    space = MappingProxyType(
        {
            **TRAINING_SPACE,
            "embedding_dim": [8, 16, 32, 64],
            "cross_layers": "1..4",
            "cross_rank": [0, 32, 128],
            "top": WIDTHS_SPACE,
            "structure": ["stacked", "parallel"],
            "dropout": "0.0..0.6",
            "train.parts.embeddings.weight_decay": DECAY_SPACE,
        }
    )
    settings: DcnV2Settings

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        """See `Model.defaults`: a parallel MLP, and cross layers with full matrices up to `FULL_CROSS` columns."""
        found = dict(rules.training(facts, {"embeddings": 1.0}))
        if rules.is_published_size(facts):
            return found
        size, width = f"{facts.samples:,} samples", rules.embedding_dim(facts)
        columns = width * len(facts.ids) + facts.numbers
        full = columns <= FULL_CROSS
        return found | {
            "embedding_dim": (width, size),
            "bottom": ((), "numbers enter the cross layers as they are"),
            "cross_rank": (0 if full else FULL_CROSS // 4, f"x_0 has {columns:,} columns"),
            "top": (rules.hidden(facts), size),
            "structure": ("parallel", size),
            "dropout": (0.1, size),
        }

    def __init__(self, spec: FeatureSpec, settings: DcnV2Settings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.make_inputs(
            embedding_widths(spec, self.ids, settings.embedding_dim, settings.embedding_dims),
            settings.bottom,
            combiner=settings.combiner,
            std=settings.embedding_std,
            max_rows=settings.max_table_size,
            table_rows=table_rows,
        )
        self.pair_floats = self.width
        self.cross = CrossNetwork(self.width, num_layers=settings.cross_layers, rank=settings.cross_rank)
        self.top = Mlp((self.width, *settings.top), dropout=settings.dropout)
        beside = self.width if settings.structure == "parallel" else 0
        self.out = nn.Linear(settings.top[-1] + beside, 1)
        nn.init.xavier_uniform_(self.out.weight)

    def problems(self) -> list[str]:
        wrong = [name for name in self.settings.embedding_dims if name not in self.ids]
        return [
            f"embedding_dims: {unknown('categorical feature', name, self.ids)}" for name in wrong
        ] + super().problems()

    def forward(self, batch: Batch) -> Tensor:
        parts = self.inputs(batch)
        first = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        crossed = self.cross(first)
        # Figure 1 of the paper: (a) stacked, the MLP reads the crosses; (b) parallel, the logit reads both.
        if self.settings.structure == "stacked":
            return cast(Tensor, self.out(self.top(crossed)).squeeze(1))
        return cast(Tensor, self.out(torch.cat([crossed, self.top(first)], dim=1)).squeeze(1))

    def logits_of(self, parts: Sequence[Part]) -> Tensor:
        """Logits (R, N), with the first product of the cross layers and of a parallel MLP summed over the parts.

        Later cross layers mix both sides, so they run for every pair.
        """
        requests, candidates = (max(x.shape[at] for x, _ in parts) for at in (0, 1))
        columns = [column for _, own in parts for column in own]
        order = torch.tensor(sorted(range(self.width), key=columns.__getitem__), device=self.out.weight.device)
        first = torch.cat([x.expand(requests, candidates, -1) for x, _ in parts], dim=2)[..., order]
        crossed = self.cross(first, linear_of_parts(self.cross.opening, parts))
        if self.settings.structure == "stacked":
            return cast(Tensor, self.out(self.top(crossed)).squeeze(-1))
        top = self.top.after_first(linear_of_parts(self.top.first, parts))
        return cast(Tensor, self.out(torch.cat([crossed, top], dim=-1)).squeeze(-1))


class CrossNetwork(nn.Module):
    """Low-rank cross layers: x_{l+1} = x_0 * (V (U x_l) + b) + x_l, (B, X) -> (B, X).

    Wang et al.: DCN V2: Improved Deep & Cross Network, WWW 2021, equation 2 with W = V U of the given rank; a rank of 0
    takes a full W. Weights start normal, N(0, 2 / (in + out)) cut off at two deviations, biases at 0.
    """

    def __init__(self, width: int, *, num_layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers if rank else 0))
        self.up = nn.ModuleList(nn.Linear(rank or width, width) for _ in range(num_layers))
        for layer in (*self.down, *self.up):
            linear = cast(nn.Linear, layer)
            std = (2 / (linear.in_features + linear.out_features)) ** 0.5
            nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
        for layer in self.up:
            nn.init.zeros_(cast(nn.Linear, layer).bias)

    def forward(self, first: Tensor, product: Tensor | None = None) -> Tensor:
        """All layers, from x_0 (..., X) and, if already known, the product of `opening` with it."""
        x = first
        for place, up in enumerate(self.up):
            if place == 0 and product is not None:
                crossed = up(product) if len(self.down) else product
            else:
                crossed = up(self.down[place](x) if len(self.down) else x)
            # Equation 1: x_{l+1} = x_0 * (W x_l + b) + x_l, element-wise, in one pass over memory.
            x = torch.addcmul(x, first, crossed)
        return x

    @property
    def opening(self) -> nn.Linear:
        """The layer that multiplies x_0 first: a sum over its columns, and so over features."""
        return cast(nn.Linear, self.down[0] if len(self.down) else self.up[0])
