"""iALS: matrix factorisation of all user-item pairs by alternating least squares.

Hu, Koren, Volinsky: Collaborative Filtering for Implicit Feedback Datasets, ICDM 2008. It minimises

    sum over all (u, i) of c_ui (p_ui - x_u' y_i)^2 + l2 (sum of |x_u|^2 + sum of |y_i|^2)

with p_ui = 1 and c_ui = alpha w_ui where u acted on i, p_ui = 0 and c_ui = 1 elsewhere. The library implicit does the
work. w_ui is the weight of the events, 1 by default. When the factors of users are solved for, given those of the
items, it is also multiplied by recency^age.

Shapes: U users; N items; d factors; B rows; R requests.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import MappingProxyType

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from recspec.base.errors import SettingsError, require_extra
from recspec.feature_spec import FeatureSpec
from recspec.models.base import Traits
from recspec.models.interactions import Interactions
from recspec.models.item_model import RECENCIES, FittedItemModel, Grid, Recency, rounded
from recspec.models.layers import RowsHeld

COMBINATIONS = (
    (64, 3.0, 3.0),
    (64, 10.0, 10.0),
    (16, 3.0, 1.0),
    (64, 1.0, 1.0),
    (16, 1.0, 3.0),
    (64, 30.0, 30.0),
    (128, 10.0, 10.0),
    (16, 10.0, 3.0),
    (128, 3.0, 3.0),
    (64, 10.0, 3.0),
    (32, 30.0, 10.0),
    (16, 3.0, 3.0),
)
"""Factors, L2 strength in multiples of `Interactions.scale`, and alpha, compared on valid in this order.

What matters is l2 relative to alpha: equal ones are best or near with 64 factors; l2 of ten times alpha and more
collapses. Very sparse data wants 16 factors and l2 of 3 to 10 times alpha."""

BLOCK = 1 << 21
"""Numbers in the factors and systems of users that are solved for at once: 16 MB in fp64, and as much for each step."""

SMALLEST_SCORE = 1e-6
"""A largest possible score below this is 0 but for rounding. Where l2 is not too strong, positives have about 1."""


class IalsSettings(Recency):
    """Settings of iALS."""

    factors: int = Field(64, ge=1, description="width of the factors of users and items")
    l2: float = Field(
        10.0,
        ge=1e-6,
        le=1e6,
        description="L2 penalty on the factors; by default chosen on valid, or without valid from the number of "
        "interactions",
    )
    alpha: float = Field(
        3.0, ge=1e-3, le=1e6, description="weight of a pair that the user acted on; every other pair has the weight 1"
    )
    iterations: int = Field(15, ge=1, description="rounds of alternating least squares")


class Ials(FittedItemModel):
    """iALS (Hu, Koren, Volinsky, 2008): matrix factorisation of implicit feedback."""

    name = "ials"
    traits = Traits(libraries=("threadpoolctl", "implicit"))  # in this order: implicit imports the first
    reads_order = True
    at_scoring = RECENCIES
    Settings = IalsSettings
    settings: IalsSettings
    space = MappingProxyType(
        {
            "factors": [16, 32, 64, 128, 256],
            "settings.l2": "0.3..300 log",
            "alpha": "0.3..100 log",
            "settings.recency": "0.5..1.0",
        }
    )
    users: Tensor
    items: Tensor

    def __init__(self, spec: FeatureSpec, settings: IalsSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.register_buffer("users", torch.zeros(self.num_users, settings.factors))
        self.register_buffer("items", torch.zeros(self.num_items, settings.factors))

    @classmethod
    def grid(cls, interactions: Interactions) -> Grid:
        return [
            {"factors": factors, "l2": rounded(l2 * interactions.scale), "alpha": alpha}
            for factors, l2, alpha in COMBINATIONS
        ]

    def _fit(self, interactions: Interactions, seed: int) -> None:
        from scipy import sparse

        own = self.settings
        with warnings.catch_warnings():
            # implicit warns about BLAS threads at import and at the fit; the limit below is the one it recommends.
            warnings.simplefilter("ignore")
            als = require_extra("implicit.als", "baselines")
            threads = require_extra("threadpoolctl", "baselines")
            failed = require_extra("implicit.recommender_base", "baselines")
            with threads.threadpool_limits(1, "blas"):
                settings = {"regularization": own.l2, "alpha": own.alpha, "iterations": own.iterations}
                solver = als.AlternatingLeastSquares(
                    factors=own.factors, use_gpu=False, random_state=seed % 2**32, **settings
                )
                try:
                    solver.fit(sparse.csr_matrix(interactions.matrix()), show_progress=False)
                except failed.ModelFitError as error:
                    why = f"l2 {own.l2:g} and alpha {own.alpha:g} are too far apart"
                    raise SettingsError(f"ials: {why}: {error}") from None
        self.users, self.items = torch.from_numpy(solver.user_factors), torch.from_numpy(solver.item_factors)
        if own.recency < 1:
            self.know(interactions)

    def doubt(self) -> str:
        own, largest = self.settings, float(self.users.abs().max() * self.items.abs().max())
        if largest * own.factors >= SMALLEST_SCORE:
            return ""
        return (
            f"l2 {own.l2:g} is too strong for alpha {own.alpha:g} on these interactions: every factor is almost 0, so "
            "the scores say nothing; take a smaller l2 or a larger alpha"
        )

    def know(self, interactions: Interactions) -> None:
        """Solve for the users' factors, given those of the items: half a round."""
        own, known = self.settings, interactions.weighted(self.settings.recency)
        items = self.items.double()
        # Hu et al., equation 4: x_u = (Y'Y + Y'(C_u - I) Y + l2 I)^-1 Y' C_u p_u. The part that is the same for all
        # users.
        everywhere = items.T @ items + own.l2 * torch.eye(own.factors, dtype=torch.float64, device=items.device)
        inverse = torch.linalg.inv(everywhere)
        users = torch.zeros(known.num_users, own.factors, dtype=torch.float64, device=items.device)
        for rows, theirs, weights in _lists_of_a_length(known, own.factors):
            of_items = items[theirs.to(items.device)]  # (B, L, d)
            confidence = (own.alpha * weights.to(items.device)).unsqueeze(2)
            # Y' C_u p_u: p is 1 for the items acted on and 0 elsewhere.
            wanted = (confidence * of_items).sum(1, keepdim=True).mT  # (B, d, 1)
            users[rows] = _solved(everywhere, inverse, of_items, confidence - 1, wanted).squeeze(2)
        self.users = users.float()

    def request_vector(self, users: Tensor) -> Tensor:
        """(R, d) factors of users."""
        return self.users[users]

    def item_vectors(self) -> Tensor:
        """(N, d) factors of all items: a score is the product of both."""
        return self.items

    def score_pairs(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users[users] * self.items[items]).sum(1)

    def score_users(self, users: Tensor) -> Tensor:
        return self.users[users] @ self.items.T


def _solved(everywhere: Tensor, inverse: Tensor, of_items: Tensor, extra: Tensor, wanted: Tensor) -> Tensor:
    """(B, d, 1) solutions of (A + V' diag(extra) V) x = wanted, where A (d, d) has this inverse and V is (B, L, d).

    Fewer items than factors make a smaller system (L, L), by Woodbury's identity.
    """
    if of_items.shape[1] >= of_items.shape[2]:
        found: Tensor = torch.linalg.solve(everywhere + of_items.mT @ (extra * of_items), wanted)
        return found
    # (A + V' D V)^-1 b = A^-1 b - A^-1 V' (I + D V A^-1 V')^-1 D V A^-1 b.
    turned = of_items @ inverse  # (B, L, d)
    small = extra * (turned @ of_items.mT)
    small.diagonal(dim1=1, dim2=2).add_(1)
    part: Tensor = torch.linalg.solve(small, extra * (turned @ wanted))
    return inverse @ wanted - turned.mT @ part


def _lists_of_a_length(known: Interactions, factors: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Users (B,) with equally many items, these items (B, L) and their weights (B, L) in fp64, in bounded blocks."""
    lengths = np.diff(known.offsets)
    order = np.argsort(lengths, kind="stable")
    for length in np.unique(lengths[lengths > 0]):
        first, last = np.searchsorted(lengths[order], [length, length + 1])
        step = max(1, BLOCK // int(length * factors + min(length, factors) ** 2))
        for start in range(first, last, step):
            users = order[start : min(last, start + step)]
            places = known.offsets[users][:, None] + np.arange(length)
            weights = np.ones(places.shape) if known.weights is None else known.weights[places].astype(np.float64)
            yield torch.from_numpy(users), torch.from_numpy(known.items[places]).long(), torch.from_numpy(weights)
