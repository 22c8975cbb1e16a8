"""What every model promises.

Shapes: B rows; R requests (users); N items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch, num_rows, repeat_rows, tile_rows
from recspec.feature_spec import FeatureSpec
from recspec.layers import Embeddings
from recspec.mlp import cross_entropy

SCORE_BLOCK = 1 << 18
"""Rows that `score_items` forms at once: 2^18 rows of some hundred floats stay within a few hundred MB."""


def counts_of(name: str) -> str:
    """The column that holds how often each id of a feature occurs in the whole batch: see `Model.counted`."""
    return f"{name} (count)"


class Model(nn.Module, ABC):
    """A recommender: built from a specification and its own frozen settings, batch -> logits.

    It opens no file, prints nothing, and knows no device, rank or optimizer.
    """

    needs: ClassVar[tuple[str, ...]]
    """Roles that the specification must fill."""

    Settings: ClassVar[type[config.Settings]]
    """The model's own settings."""

    steady_shapes: ClassVar[bool] = True
    """Whether products have the same shapes at every step; those of a batch's events have new ones each time."""

    def __init__(self, spec: FeatureSpec, settings: config.Settings) -> None:
        super().__init__()
        spec.require(self.needs, type(self).__name__)
        self.spec = spec
        self.settings = settings

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,) of a batch; the label, if the batch holds it, takes no part."""

    def loss(self, batch: Batch) -> Tensor:
        """The scalar to minimise: mean binary cross-entropy, in nats, plus whatever the model adds.

        It is a mean over rows, so that losses of parts of a batch, weighted by their rows, sum to the loss of the
        batch: training splits a batch into micro-batches and among ranks. A term that depends on which rows share an
        id reads how often the id occurs from `counts_of` (see `counted`).
        """
        return cross_entropy(self(batch), batch[self.spec.label])

    def features(self) -> tuple[str, ...]:
        """Names of the features that `forward` reads; the label is not among them."""
        return self.spec.inputs()

    def loss_features(self) -> tuple[str, ...]:
        """Names of the features that `loss` reads beside the label: those of `forward`, and any of its own."""
        return self.features()

    def counted(self) -> tuple[str, ...]:
        """Names of scalar id features whose ids the loss counts over a whole batch.

        When a batch is split, each part holds the column `counts_of(name)` (rows of the part,): how often the id of
        each row occurs in the whole batch. Without the column the part is the whole batch.
        """
        return ()

    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request, equal to `forward` on the pairs.

        `request` holds R rows of user, context and history features; `items` holds N rows of item features. A model
        that can compute the request's part once overrides this.
        """
        requests, candidates = num_rows(request), num_rows(items)
        if torch.compiler.is_compiling():  # a program takes any number of candidates, so nothing may depend on it
            pairs = {**repeat_rows(request, candidates), **tile_rows(items, requests)}
            return cast(Tensor, self(pairs)).view(requests, candidates)
        step = max(1, SCORE_BLOCK // max(candidates, 1))
        rows = []
        for start in range(0, requests, step):
            block = {name: tensor[start : start + step] for name, tensor in request.items()}
            pairs = {**repeat_rows(block, candidates), **tile_rows(items, num_rows(block))}
            rows.append(self(pairs).view(num_rows(block), candidates))
        return torch.cat(rows) if rows else torch.zeros(0, candidates)

    def settle(self) -> None:
        """Called where a model only answers from now on: what depends on its weights alone may be computed once."""

    @property
    def device(self) -> torch.device:
        """Where its batches must lie; tables whose rows are fetched may lie elsewhere."""
        fetched = {
            id(each.stores[key]) for each in self.modules() if isinstance(each, Embeddings) for key in each.fetch
        }
        return next(parameter.device for parameter in self.parameters() if id(parameter) not in fetched)

    def num_parameters(self) -> int:
        """How many numbers training fits."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
