"""GF-CF: graph filters of the users' items, a linear one and an ideal low-pass one, without training.

Shen et al.: How Powerful is Graph Convolution for Recommendation?, CIKM 2021, section 5. With R the interactions, Du
and Di the diagonal matrices of the sums of its rows and columns, R~ = Du^-1/2 R Di^-1/2, and V the leading right
singular vectors of R~:

    scores = Y (R~' R~ + alpha Di^-1/2 V V' Di^1/2)

Y is R, with the items of each user weighted by recency^age. Of each row of R~' R~, the k largest entries are kept.

Shapes: U users; N items; d vectors; B rows; R requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from recspec.base import machine
from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.interactions import Interactions
from recspec.models.item_model import RECENCIES, Grid, KnownItemsModel, Recency
from recspec.models.known_items import ENTRIES, Successors, blocks_of_gram, largest_entries
from recspec.models.layers import RowsHeld

if TYPE_CHECKING:
    from scipy.sparse import csr_array


BLOCK = 4096
"""Users whose images under R~ are held at once in fp64."""

SPARE, ROUNDS = 32, 2
"""Vectors that the iteration carries beside those wanted, and its rounds."""


class GfCfSettings(Recency):
    """Settings of GF-CF."""

    alpha: float = Field(0.1, ge=0, le=1e3, description="weight of the low-pass filter beside the linear one")
    vectors: int = Field(512, ge=0, le=10_000, description="singular vectors of the low-pass filter")
    k: int = Field(1000, ge=1, description="items that an item leads to in the linear filter, those of most weight")


class GfCf(KnownItemsModel):
    """GF-CF (Shen et al., 2021): graph filters of the users' items in closed form."""

    name = "gf_cf"
    Settings = GfCfSettings
    settings: GfCfSettings
    at_scoring = MappingProxyType({"vectors": (256, 128, 64), "alpha": (0.3, 0.0, 1.0), **RECENCIES})
    pair_cost = 10  # a binary search for each of the user's items
    space = MappingProxyType(
        {"settings.alpha": "0.03..3.0 log", "vectors": [32, 64, 128, 256, 512], "settings.recency": "0.5..1.0"}
    )
    vectors: Tensor
    degrees: Tensor

    def __init__(self, spec: FeatureSpec, settings: GfCfSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.linear = Successors(self.num_items, settings.k)
        most = max(0, min(self.num_users, self.num_items) - 1)
        self.register_buffer("vectors", torch.zeros(self.num_items, min(settings.vectors, most)))  # V
        self.register_buffer("degrees", torch.ones(self.num_items))  # Di^1/2

    @classmethod
    def grid(cls, interactions: Interactions) -> Grid:
        most = max(1, min(interactions.num_users, interactions.num_items) - 1)
        return [{"vectors": min(cls.Settings().vectors, most)}]

    def varied(self, settings: Mapping[str, object], interactions: Interactions) -> GfCf:
        other, held = super().varied(settings, interactions), self.vectors.shape[1]
        if other.settings.vectors > held:
            raise SettingsError(f"settings.vectors is {other.settings.vectors}, and {held} were computed; fit again")
        if other.settings.vectors < held:
            other.vectors = self.vectors[:, : other.settings.vectors].clone()
        return other

    def operations(self) -> float:
        return 4.0 * ROUNDS * self.vectors.shape[1] ** 2 * self.num_items

    def most_bytes(self) -> int:
        return super().most_bytes() + self.linear.most_bytes

    def _fit(self, interactions: Interactions, seed: int) -> None:
        matrix = interactions.matrix().astype(np.float64)
        of_users, of_items = (np.sqrt(np.maximum(matrix.sum(axis), 1e-12)) for axis in (1, 0))
        # R~ = Du^-1/2 R Di^-1/2, entry by entry.
        matrix.data /= np.repeat(of_users, np.diff(matrix.indptr)) * of_items[matrix.indices]
        self.degrees = torch.from_numpy(of_items).float()
        self.vectors = torch.from_numpy(leading_vectors(matrix, self.vectors.shape[1], seed))
        machine.return_freed_memory()
        gram = blocks_of_gram(matrix.astype(np.float32))  # R~' R~
        self.linear.set(largest_entries(block, self.settings.k) for _, block in gram)
        self.know(interactions)

    def _pairs(self, users: Tensor, items: Tensor) -> Tensor:
        scores = self.linear.score_pairs(self.known, users, items)
        if torch.compiler.is_compiling():
            return scores + self._low_pass_of(users, torch.arange(len(users), device=users.device), items)
        step = max(1, ENTRIES // max(1, self.vectors.shape[1]))
        for rows in torch.split(torch.arange(len(users), device=users.device), step):
            distinct, places = torch.unique(users[rows], return_inverse=True)
            scores[rows] += self._low_pass_of(distinct, places, items[rows])
        return scores

    def _low_pass_of(self, users: Tensor, places: Tensor, items: Tensor) -> Tensor:
        """(B,) the weighted low-pass part of pairs of a place in `users` and an item."""
        low = (self._inward(users)[places] * self.vectors[items]).sum(1)
        return self.settings.alpha * low * self.degrees[items]

    def score_users(self, users: Tensor) -> Tensor:
        # Y (R~' R~ + alpha Di^-1/2 V V' Di^1/2), from the left to the right, so that no matrix of N x N is made for the
        # second part.
        scores = self.linear.score_users(self.known, users)
        return scores.addcmul_(self._inward(users) @ self.vectors.T, self.degrees, value=self.settings.alpha)

    def _inward(self, users: Tensor) -> Tensor:
        """(R, d) the users' weights Y Di^-1/2 V."""
        if torch.compiler.is_compiling():
            return (self.known.acted(users) / self.degrees) @ self.vectors
        items, first, weights = self.known.bags(users)
        over = 1 / self.degrees[items] if weights is None else weights / self.degrees[items]
        return F.embedding_bag(items, self.vectors, first, mode="sum", per_sample_weights=over)


def leading_vectors(matrix: csr_array, wanted: int, seed: int) -> NDArray[np.float32]:
    """The leading right singular vectors (N, d) of a sparse matrix (U, N).

    Halko, Martinsson, Tropp: Finding Structure with Randomness, SIAM Review 2011, algorithm 4.4. 512 vectors of
    31,668 x 38,048 take 12 CPU s; on 29,858 x 40,981, two rounds rank no worse than five.
    """
    size = min(wanted + SPARE, *matrix.shape)
    along, across = matrix.astype(np.float32), matrix.T.tocsr().astype(np.float32)
    found = across @ np.random.default_rng(seed).standard_normal((matrix.shape[0], size)).astype(np.float32)
    for _ in range(ROUNDS):
        found = across @ (along @ _orthonormal(found))
    found = _orthonormal(found)
    squares = torch.zeros(size, size, dtype=torch.float64)
    for start in range(0, matrix.shape[0], BLOCK):
        mapped = torch.from_numpy(along[start : start + BLOCK] @ found).double()
        squares += mapped.T @ mapped
    _, turned = torch.linalg.eigh(squares)  # eigenvalues ascending
    leading = turned.flip(1)[:, :wanted].float()
    vectors: NDArray[np.float32] = (torch.from_numpy(found) @ leading).numpy()
    return vectors


def _orthonormal(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    columns: NDArray[np.float32] = torch.linalg.qr(torch.from_numpy(matrix))[0].numpy()
    return columns
