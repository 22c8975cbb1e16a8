"""The interface of every model.

Shapes: B rows; R requests (users); N items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch, num_rows, repeat_rows, tile_rows
from recspec.nn import Embeddings, RowsHeld, cross_entropy
from recspec.spec import FeatureSpec

SCORE_BLOCK = 1 << 18
"""Rows that `score_items` builds at once: 2^18 rows of some hundred floats take a few hundred MB."""


def counts_of(name: str) -> str:
    """The column with the count of each id of a feature in the whole batch; see `Model.counted`."""
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
    """Whether products have the same shapes at every step; products of a batch's events have not."""

    def __init__(self, spec: FeatureSpec, settings: config.Settings, held: RowsHeld | None = None) -> None:  # noqa: ARG002
        """Build the model with its first values.

        Args:
            spec: the features.
            settings: the model's own settings.
            held: rows of embedding tables that this process holds, for every `Embeddings`; by default all.
        """
        super().__init__()
        spec.require(self.needs, type(self).__name__)
        self.spec = spec
        self.settings = settings

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,) of a batch; they ignore the label."""

    def loss(self, batch: Batch) -> Tensor:
        """The scalar to minimise: mean binary cross-entropy, in nats, plus the model's own terms.

        It is a mean over rows: training splits a batch into micro-batches and among ranks, and the losses of the parts,
        weighted by their rows, must sum to the loss of the batch. A term that depends on rows with equal ids reads the
        ids' counts from `counts_of` (see `counted`).
        """
        return cross_entropy(self(batch), batch[self.spec.label])

    def features(self) -> tuple[str, ...]:
        """Names of the features that `forward` reads, without the label."""
        return self.spec.inputs()

    def loss_features(self) -> tuple[str, ...]:
        """Names of the features that `loss` reads besides the label: those of `forward` and its own."""
        return self.features()

    def counted(self) -> tuple[str, ...]:
        """Names of scalar id features whose ids the loss counts over a whole batch.

        Each part of a split batch holds the column `counts_of(name)` (rows of the part,): the count of each row's id in
        the whole batch. A part without the column is the whole batch.
        """
        return ()

    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request, equal to `forward` on the pairs.

        `request` holds R rows of user, context and history features, `items` N rows of item features. Models that can
        compute a request's part once override this.
        """
        requests, candidates = num_rows(request), num_rows(items)
        if torch.compiler.is_compiling():  # a program takes any number of candidates
            pairs = {**repeat_rows(request, candidates), **tile_rows(items, requests)}
            return cast(Tensor, self(pairs)).view(requests, candidates)
        step = max(1, SCORE_BLOCK // max(candidates, 1))
        rows = []
        for start in range(0, requests, step):
            block = {name: tensor[start : start + step] for name, tensor in request.items()}
            pairs = {**repeat_rows(block, candidates), **tile_rows(items, num_rows(block))}
            rows.append(self(pairs).view(num_rows(block), candidates))
        return torch.cat(rows) if rows else torch.zeros(0, candidates)

    def prepare_for_inference(self) -> None:
        """Compute once what depends on the weights alone, as the model is no longer trained."""

    @property
    def device(self) -> torch.device:
        """The device of its batches; tables whose rows are fetched may lie elsewhere."""
        fetched = {
            id(each.stores[key]) for each in self.modules() if isinstance(each, Embeddings) for key in each.fetch
        }
        return next(parameter.device for parameter in self.parameters() if id(parameter) not in fetched)

    def num_parameters(self) -> int:
        """The number of trained weights."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
