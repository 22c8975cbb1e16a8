"""iALS: matrix factorisation of all user-item pairs by alternating least squares.

Hu, Koren, Volinsky: Collaborative Filtering for Implicit Feedback Datasets, ICDM 2008, with the loss of Rendle et al.:
Revisiting the Performance of iALS on Item Recommendation Benchmarks, RecSys 2022. It minimises

    sum over pairs (u, i) acted on of c_ui (1 - x_u' y_i)^2 + a0 sum over all (u, i) of (x_u' y_i)^2
        + l2 (sum of (n_u + a0 N)^nu |x_u|^2 + sum of (n_i + a0 U)^nu |y_i|^2)

with a0 = unobserved_weight, nu = l2_exponent and c_ui the weight of the events, 1 by default; n_u and n_i are the sums
of c over a user's items and an item's users. When the factors of users are solved for, given those of the items, c_ui
is also multiplied by recency^age, and pairs that the user disliked are added: dislike_weight (x_u' y_i)^2.

Shapes: U users; N items; d factors; B rows; T their interactions; R requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from recspec.feature_spec import FeatureSpec
from recspec.models.interactions import Interactions
from recspec.models.item_model import RECENCIES, FittedItemModel, Grid, Recency
from recspec.models.layers import RowsHeld, products_of_rows

COMBINATIONS = ((0.01, 0.01), (0.005, 0.5), (0.03, 0.1))
"""L2 strength and weight of unobserved pairs, compared on valid in this order.

On each of seven sets, one of them has at least .96 of the best NDCG@10 among 18 combinations. Sparse sets want the
first and dense ones the second."""

DENSE, FACTORS_OF_DENSE, FACTORS = 40, 128, 256
"""Users per item from which 128 factors are taken; with fewer, 256: they gain up to 8 % on sparse sets."""

STEPS = 2
"""Steps of conjugate gradients in half a round of the fit, which begins at the solution of the round before."""

MOST_STEPS = 100
"""Most steps until users' factors converge; data of 200 to 10^6 interactions took up to 27."""

CLOSE = 1e-10
"""Squared norm of a residual, as a share of the first one, at which a user is solved for."""

TINY = 1e-30
"""In place of a division by 0, of rows whose solution is reached."""

BLOCK = 1 << 18
"""Numbers in the factors of rows that are solved for at once: 1 MB, so that they stay in a core's cache."""

SMALLEST_SCORE = 1e-6
"""A largest possible score below this is 0 but for rounding. Where l2 is not too strong, positives have about 1."""


class IalsSettings(Recency):
    """Settings of iALS."""

    factors: int = Field(128, ge=1, description="width of the factors of users and items")
    l2: float = Field(0.01, ge=1e-6, le=1e6, description="L2 penalty on the factors; by default chosen on valid")
    unobserved_weight: float = Field(
        0.01,
        ge=1e-6,
        le=1e6,
        description="weight of every pair of a user and an item; acting on it adds 1",
    )
    l2_exponent: float = Field(
        1.0, ge=0, le=1, description="power of the number of pairs of a user or item that multiplies its penalty"
    )
    iterations: int = Field(8, ge=1, description="rounds of alternating least squares")


class Ials(FittedItemModel):
    """iALS (Hu, Koren, Volinsky, 2008; Rendle et al., 2022): matrix factorisation of implicit feedback."""

    name = "ials"
    reads_order = reads_dislikes = True
    at_scoring = RECENCIES
    Settings = IalsSettings
    settings: IalsSettings
    space = MappingProxyType(
        {
            "factors": [16, 32, 64, 128, 256],
            "settings.l2": "0.0003..0.3 log",
            "unobserved_weight": "0.001..3 log",
            "settings.recency": "0.5..1.0",
        }
    )
    users: Tensor
    items: Tensor

    def __init__(self, spec: FeatureSpec, settings: IalsSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.register_buffer("users", torch.zeros(self.num_users, settings.factors))
        self.register_buffer("items", torch.zeros(self.num_items, settings.factors))
        # The items, and in the basis of their spectrum, once `know` has asked for it; `knowing` shares the list.
        self._rotated: list[tuple[Tensor, ...]] = []

    @classmethod
    def grid(cls, interactions: Interactions) -> Grid:
        is_dense = interactions.num_pairs >= DENSE * interactions.num_items
        factors = FACTORS_OF_DENSE if is_dense else FACTORS
        return [{"factors": factors, "l2": l2, "unobserved_weight": weight} for l2, weight in COMBINATIONS]

    def _fit(self, interactions: Interactions, seed: int) -> None:
        by_user, by_item = _Lists(interactions), _Lists(interactions.by_item())
        width = self.settings.factors
        # N(0, .1 / sqrt(d)), as in the authors' code. Items without users stay at 0, the solution for them.
        items = torch.randn(self.num_items, width, generator=torch.Generator().manual_seed(seed % 2**63))
        items *= 0.1 / width**0.5 * (by_item.weight > 0).unsqueeze(1)
        users = torch.zeros(self.num_users, width)
        for _ in range(self.settings.iterations):
            items, users = self._half_a_round(by_user, items, users)
            users, items = self._half_a_round(by_item, users, items)
        self.items = items
        self.know(interactions)

    def _half_a_round(self, lists: _Lists, given: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Both sides' factors in the basis of the given ones, the wanted ones improved."""
        spectrum, basis = _spectrum(given)
        given, wanted = given @ basis, wanted @ basis
        self._solve(lists, given, spectrum, wanted, STEPS)
        return given, wanted

    def doubt(self) -> str:
        own, largest = self.settings, float(self.users.abs().max() * self.items.abs().max())
        if largest * own.factors >= SMALLEST_SCORE:
            return ""
        return (
            f"l2 {own.l2:g} is too strong on these interactions: every factor is almost 0, so the scores say nothing; "
            "take a smaller l2"
        )

    def know(self, interactions: Interactions) -> None:
        """Solve for the users' factors, given those of the items: half a round."""
        if not self._rotated or self._rotated[0][0] is not self.items:
            spectrum, basis = _spectrum(self.items)
            self._rotated[:] = [(self.items, self.items @ basis, spectrum, basis)]
        _, items, spectrum, basis = self._rotated[0]
        users = items.new_zeros(interactions.num_users, self.settings.factors)
        lists = _Lists(self.settings.weigh(interactions), items.device)
        self._solve(lists, items, spectrum, users, MOST_STEPS)
        self.users = users @ basis.T

    def _solve(self, lists: _Lists, given: Tensor, spectrum: Tensor, wanted: Tensor, steps: int) -> None:
        """Bring the wanted factors, in place, closer to the solutions of Hu et al., equation 4.

        They solve (a0 Y'Y + penalty I + sum of c y y') x = sum of c y. The given factors y are in the basis in which
        Y'Y is diagonal, so that nothing of size d x d is made for a user.
        """
        own = self.settings
        unobserved = own.unobserved_weight * len(given)
        penalty = own.l2 * (lists.weight + unobserved) ** own.l2_exponent
        for rows, part in lists.blocks(max(1, BLOCK // own.factors)):
            system = own.unobserved_weight * spectrum + penalty[rows].unsqueeze(1)
            # The mean of y y' over all items stands for that over a list: a nearby system, which is diagonal.
            nearby = system + lists.weight[rows].unsqueeze(1) * (spectrum / len(given))
            wanted[rows] = _improved(wanted[rows], given, part, system, nearby, steps)

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


class _Lists:
    """Interactions as tensors: those of row r are at offsets[r] to offsets[r + 1]."""

    def __init__(self, interactions: Interactions, device: torch.device | None = None) -> None:
        counts = np.diff(interactions.offsets)
        owners = np.repeat(np.arange(len(counts)), counts)
        signed = interactions.matrix().data
        weights = np.abs(signed)  # a disliked pair has one below 0, and the preference 0 instead of 1
        self.offsets, self.given, self.weights, self.owners, self.wanted, self.weight = (
            torch.from_numpy(each).to(device)
            for each in (
                interactions.offsets,
                interactions.items.astype(np.int64),
                weights,
                owners,
                (signed > 0).astype(np.float32),
                np.bincount(owners, weights, len(counts)).astype(np.float32),
            )
        )

    def blocks(self, step: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """Rows, `step` at once, and their given ids, owners, offsets, weights and preferences."""
        for start in range(0, len(self.weight), step):
            rows = slice(start, start + step)
            offsets = self.offsets[start : start + step + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            held = slice(first, last)
            yield (
                rows,
                (self.given[held], self.owners[held] - start, offsets - first, self.weights[held], self.wanted[held]),
            )


def _spectrum(factors: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues (d,) and eigenvectors (d, d) of Y'Y, from Y."""
    values, vectors = torch.linalg.eigh((factors.T @ factors).double())
    return values.clamp_min(0).to(factors.dtype), vectors.to(factors.dtype)


def _improved(
    x: Tensor, given: Tensor, lists: tuple[Tensor, ...], system: Tensor, nearby: Tensor, steps: int
) -> Tensor:
    """(B, d) solutions of (diag(system) + sum of c y y') x = sum of c p y, from guesses x, by conjugate gradients.

    The preference p is 1, or 0 of a disliked pair.

    Each row has steps of its own sizes, preconditioned by diag(nearby). In exact arithmetic, rows of L given factors
    need no more than L + 1 steps.
    """
    ids, owners, offsets, weights, wanted = lists

    def products(vectors: Tensor) -> Tensor:
        return products_of_rows(given, ids, owners, offsets, vectors)

    def sums(numbers: Tensor) -> Tensor:
        return F.embedding_bag(ids, given, offsets[:-1], mode="sum", per_sample_weights=weights * numbers)

    residual = sums(wanted - products(x)) - system * x
    step = residual / nearby
    size = (residual * step).sum(1, keepdim=True)
    enough = CLOSE * size
    for _ in range(steps):
        turned = system * step + sums(products(step))
        by = size / (step * turned).sum(1, keepdim=True).clamp_min(TINY)
        x = x + by * step
        residual = residual - by * turned
        towards, before = residual / nearby, size
        size = (residual * towards).sum(1, keepdim=True)
        if bool((size <= enough).all()):
            break
        step = towards + size / before.clamp_min(TINY) * step
    return x
