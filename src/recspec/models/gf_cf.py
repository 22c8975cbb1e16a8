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

from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.interactions import Interactions
from recspec.models.item_model import RECENCIES, Grid, KnownItemsModel, Recency
from recspec.models.known_items import Successors, blocks_of_gram, largest_entries
from recspec.models.layers import RowsHeld

if TYPE_CHECKING:
    from scipy.sparse import csr_array


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
        self.linear.set(_linear_filter(matrix, self.settings.k))
        self.vectors = torch.from_numpy(leading_vectors(matrix, self.vectors.shape[1], seed))
        self.know(interactions)

    def _pairs(self, users: Tensor, items: Tensor) -> Tensor:
        low = (self._low_pass(users) * self.vectors[items]).sum(1) * self.degrees[items]
        return self.linear.score_pairs(self.known, users, items) + self.settings.alpha * low

    def score_users(self, users: Tensor) -> Tensor:
        # Y (R~' R~ + alpha Di^-1/2 V V' Di^1/2), from the left to the right, so that no matrix of N x N is made for the
        # second part.
        low = (self._low_pass(users) @ self.vectors.T) * self.degrees
        return self.linear.score_users(self.known, users) + self.settings.alpha * low

    def _low_pass(self, users: Tensor) -> Tensor:
        """(R, d) the users' weights Y Di^-1/2 V."""
        inward = self.vectors / self.degrees.unsqueeze(1)
        if torch.compiler.is_compiling():
            return self.known.acted(users) @ inward
        items, first, weights = self.known.bags(users)
        return F.embedding_bag(items, inward, first, mode="sum", per_sample_weights=weights)


def leading_vectors(matrix: csr_array, wanted: int, seed: int) -> NDArray[np.float32]:
    """The leading right singular vectors (N, d) of a sparse matrix (U, N).

    Halko, Martinsson, Tropp: Finding Structure with Randomness, SIAM Review 2011, algorithm 4.4. 512 vectors of
    31,668 x 38,048 take 12 CPU s; on 29,858 x 40,981, two rounds rank no worse than five.
    """
    size = min(wanted + SPARE, *matrix.shape)
    along, across = matrix.astype(np.float32), matrix.T.tocsr().astype(np.float32)
    start = np.random.default_rng(seed).standard_normal((matrix.shape[0], size)).astype(np.float32)
    found = _orthonormal(across @ start)
    for _ in range(ROUNDS):
        found = _orthonormal(across @ (along @ found))
    mapped = torch.from_numpy(along @ found).double()
    _, turned = torch.linalg.eigh(mapped.T @ mapped)  # eigenvalues ascending
    leading = turned.flip(1)[:, :wanted].float()
    vectors: NDArray[np.float32] = (torch.from_numpy(found) @ leading).numpy()
    return vectors


def _orthonormal(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    columns: NDArray[np.float32] = torch.linalg.qr(torch.from_numpy(matrix))[0].numpy()
    return columns


def _linear_filter(matrix: csr_array, k: int) -> csr_array:
    """The k largest entries of each row of R~' R~ (N, N), from R~ (U, N)."""
    from scipy import sparse

    rows = [largest_entries(block, k) for _, block in blocks_of_gram(matrix.astype(np.float32))]
    return sparse.vstack(rows, format="csr")
