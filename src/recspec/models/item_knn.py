"""Item-kNN: items similar to those of the user.

similarity(i, j) = users of both / (sqrt(users of i * users of j) + shrink), kept for the k most similar items of each;
score(u, i) = sum over the user's items j of recency^age(j) similarity(i, j). With weighted events, the similarity is
x_i . x_j / (|x_i| |x_j| + shrink) of the weights x_i of item i's users.

Shapes: N items; k neighbours; B rows; R requests.
"""

from __future__ import annotations

from itertools import product
from types import MappingProxyType

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from recspec.feature_spec import FeatureSpec
from recspec.models.interactions import Interactions
from recspec.models.item_model import OF_A_PAIR, Grid, KnownItemsModel, Recency
from recspec.models.known_items import Neighbours
from recspec.models.layers import RowsHeld

BLOCK = 1 << 24
"""Similarities computed at once: 64 MB."""


class ItemKnnSettings(Recency):
    """Settings of item-kNN."""

    k: int = Field(50, ge=1, description="neighbours of each item")
    shrink: float = Field(
        50.0,
        ge=0,
        le=1e6,
        description="term in the denominator that keeps items that few users know from looking alike by chance",
    )


class ItemKnn(KnownItemsModel):
    """Item-kNN: ranks items by their cosine similarity to the user's items."""

    name = "item_knn"
    Settings = ItemKnnSettings
    settings: ItemKnnSettings
    space = MappingProxyType({"k": "5..500 log", "shrink": "1.0..300.0 log", "settings.recency": "0.5..1.0"})

    def __init__(self, spec: FeatureSpec, settings: ItemKnnSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.neighbours = Neighbours(self.num_items, settings.k)

    def operations(self) -> float:
        return OF_A_PAIR * self.num_items**2

    @classmethod
    def grid(cls, interactions: Interactions) -> Grid:
        most = max(1, interactions.num_items - 1)
        return [{"k": min(k, most), "shrink": shrink} for k, shrink in product((50, 20, 200), (50.0, 10.0, 100.0))]

    def _fit(self, interactions: Interactions, seed: int) -> None:  # noqa: ARG002
        num_items, kept = self.num_items, self.neighbours.k
        matrix = interactions.matrix()
        by_item = matrix.T.tocsr()
        norms = np.sqrt(matrix.power(2).sum(axis=0), dtype=np.float32)
        items, similarity = np.zeros((num_items, kept), np.int32), np.zeros((num_items, kept), np.float32)
        step = max(1, BLOCK // num_items)
        for start in range(0, num_items, step):
            together = (by_item[start : start + step] @ matrix).toarray()
            stop, rows = start + len(together), np.arange(len(together))
            together[rows, start + rows] = 0.0
            # A cosine whose denominator is enlarged, since few common users are little evidence.
            together /= norms[start:stop, None] * norms + np.float32(self.settings.shrink or 1e-9)
            best = np.argpartition(together, num_items - max(kept, 1), axis=1)[:, num_items - kept :]
            best.sort(axis=1)
            items[start:stop] = best
            similarity[start:stop] = np.take_along_axis(together, best, axis=1)
        self.neighbours.items, self.neighbours.weight = torch.from_numpy(items), torch.from_numpy(similarity)
        self.know(interactions)

    def _pairs(self, users: Tensor, items: Tensor) -> Tensor:
        return self.neighbours.score_pairs(self.known, users, items)

    def score_users(self, users: Tensor) -> Tensor:
        return self.neighbours.score_users(self.known, users)
