"""What every model promises.

Shapes: B rows; R requests (users); N items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch, num_rows, repeat_rows, tile_rows
from recspec.feature_spec import FeatureSpec
from recspec.layers import Embeddings

SCORE_BLOCK = 1 << 18
"""Rows that `score_items` forms at once: 2^18 rows of some hundred floats stay within a few hundred MB."""


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
        """The scalar to minimise: mean binary cross-entropy, in nats, plus whatever the model adds."""
        return F.binary_cross_entropy_with_logits(self(batch).float(), batch[self.spec.label].float())

    def features(self) -> tuple[str, ...]:
        """Names of the features that `forward` reads; the label is not among them."""
        return self.spec.inputs()

    def loss_features(self) -> tuple[str, ...]:
        """Names of the features that `loss` reads beside the label: those of `forward`, and any of its own."""
        return self.features()

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
