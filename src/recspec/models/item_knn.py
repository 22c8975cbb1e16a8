"""Item-kNN: items similar to those of the user.

similarity(i, j) = users of both / (sqrt(users of i * users of j) + shrink), kept for the k most similar items of each;
score(u, i) = sum over the user's items j of recency^age(j) similarity(i, j). With weighted events, the similarity is
x_i . x_j / (|x_i| |x_j| + shrink) of the weights x_i of item i's users.

Shapes: N items; k neighbours; B rows; R requests.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from recspec.feature_spec import FeatureSpec
from recspec.models.interactions import Interactions
from recspec.models.item_model import Grid, KnownItemsModel, Recency
from recspec.models.known_items import Neighbours
from recspec.models.layers import RowsHeld

if TYPE_CHECKING:
    from scipy.sparse import csr_array

COMBINATIONS = ((50, 50.0), (50, 10.0), (50, 100.0), (20, 50.0), (200, 50.0))
"""k and shrink, compared on valid in this order."""

ITEMS = 256
"""Items whose neighbours are found at once."""

BLOCK = 1 << 24
"""Most numbers of these items' products with all users or items: 64 MB."""

SPARSE, FULL = 64, 100
"""Costs of a product in a sparse sum, and of a dense row's number, in those of a product in a dense sum: .035 ns."""


class ItemKnnSettings(Recency):
    """Settings of item-kNN."""

    k: int = Field(50, ge=1, description="neighbours of each item")
    shrink: float = Field(
        50.0,
        ge=0,
        le=1e6,
        description="term in the denominator, against chance likeness of items that few users know",
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

    @classmethod
    def grid(cls, interactions: Interactions) -> Grid:
        most = max(1, interactions.num_items - 1)
        return [{"k": min(k, most), "shrink": shrink} for k, shrink in COMBINATIONS]

    def _fit(self, interactions: Interactions, seed: int) -> None:  # noqa: ARG002
        matrix, kept = interactions.matrix(), self.neighbours.k
        by_item, num_items = matrix.T.tocsr(), self.num_items
        norms = np.sqrt(matrix.power(2).sum(axis=0), dtype=np.float32)
        shrink = np.float32(self.settings.shrink or 1e-9)
        of_items = torch.from_numpy(norms)
        work = by_item @ np.diff(matrix.indptr).astype(np.float64)  # products that a sparse row sums
        items, similarity = np.zeros((num_items, kept), np.int32), np.zeros((num_items, kept), np.float32)
        step = max(1, min(ITEMS, BLOCK // max(matrix.shape)))
        for start in range(0, num_items, step) if kept else ():
            rows = np.arange(start, min(start + step, num_items))
            # A cosine whose denominator is enlarged, since few common users are little evidence.
            if work[rows].sum() * SPARSE > len(rows) * (matrix.nnz + FULL * num_items):
                together = _dense_products(by_item, rows)
                together /= torch.addcmul(torch.tensor(shrink), of_items.unsqueeze(1), of_items[rows])
                together[rows, np.arange(len(rows))] = 0.0
                values, best = together.T.contiguous().topk(kept, dim=1)
                similarity[rows], items[rows] = values.numpy(), best.numpy()
                continue
            found = by_item[start : start + step] @ matrix
            owners = np.repeat(rows, np.diff(found.indptr))
            found.data /= norms[owners] * norms[found.indices] + shrink
            found.data[found.indices == owners] = 0.0
            ends = found.indptr.tolist()
            for row, first, last in zip(rows.tolist(), ends, ends[1:], strict=False):
                values, others, count = found.data[first:last], found.indices[first:last], last - first
                if count > kept:
                    best, count = values.argpartition(-kept)[-kept:], kept
                    values, others = values[best], others[best]
                similarity[row, :count], items[row, :count] = values, others
        self.neighbours.items, self.neighbours.weight = torch.from_numpy(items), torch.from_numpy(similarity)
        self.know(interactions)

    def _pairs(self, users: Tensor, items: Tensor) -> Tensor:
        return self.neighbours.score_pairs(self.known, users, items)

    def score_users(self, users: Tensor) -> Tensor:
        return self.neighbours.score_users(self.known, users)


def _dense_products(by_item: csr_array, rows: NDArray[np.integer[Any]]) -> Tensor:
    """The products (N, B) of every item's users with those of some items, from X' (N, U)."""
    acted = torch.from_numpy(by_item[rows].toarray().T.copy())  # (U, B), of which each item sums its users' rows
    users, offsets, weights = (torch.from_numpy(each) for each in (by_item.indices, by_item.indptr, by_item.data))
    return F.embedding_bag(users, acted, offsets[:-1], mode="sum", per_sample_weights=weights)
