"""Classic recommenders that fit in seconds, as baselines for a model that ranks items.

    ranker = BASELINES["ease"](interactions)
    ranker.score_users(users)          # (R, num_items) scores; higher is better

Popularity needs numpy only. The others need scipy, and iALS needs the library implicit; both come with
`pip install 'recspec[baselines]'`.

Shapes: U users; N items; R requested users; P pairs. Ids count from 0 and include the reserved id 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from recspec.errors import DataError, SettingsError, require_extra
from recspec.evaluation.interactions import Ids, Interactions, Scores

if TYPE_CHECKING:
    from scipy.sparse import csr_array

SCORES_PER_BLOCK = 1 << 24  # scores computed at once: 64 MB in fp32


class Ranker(Protocol):
    """Scores of users' items. Only the order of one user's scores has a meaning."""

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) score of each pair."""

    def score_users(self, users: Ids) -> Scores:
        """(R, N) scores of every item for each user, in an array that the caller may change; the caller bounds R."""


class Baseline(Ranker, Protocol):
    """A ranker fitted to interactions, which can take later interactions of users."""

    def knowing(self, interactions: Interactions) -> Baseline:
        """The same item model with other interactions of its users."""


def popularity(interactions: Interactions) -> Baseline:
    """Ranks items by the number of users who acted on them."""
    counts = _not_empty(interactions).counts.astype(np.float64)
    return _Factors(np.ones((interactions.num_users, 1)), counts[:, None], lambda known: np.ones((known.num_users, 1)))


def item_knn(interactions: Interactions, *, k: int = 100, shrink: float = 10.0) -> Baseline:
    """Ranks items by their cosine similarity to the user's items; each item keeps its k most similar items.

    similarity(i, j) = users of both / (sqrt(users of i * users of j) + shrink). The shrink term keeps items that few
    users know from looking alike by chance (on ml-1m, 99 negatives: NDCG@10 .3901 with 0, .3905 with 10, .3876 with
    100).
    """
    require_extra("scipy.sparse", "baselines")
    num_items = _not_empty(interactions).num_items
    norms = np.sqrt(interactions.counts, dtype=np.float32)
    kept = min(k, num_items - 1)
    items, similarity = np.zeros((num_items, kept), np.int32), np.zeros((num_items, kept), np.float32)
    for start, together in _gram_blocks(interactions.matrix()):
        stop, rows = start + len(together), np.arange(len(together))
        together[rows, start + rows] = 0.0
        together /= norms[start:stop, None] * norms + np.float32(shrink or 1e-9)
        best = np.argpartition(together, num_items - max(kept, 1), axis=1)[:, num_items - kept :]
        best.sort(axis=1)
        items[start:stop] = best
        similarity[start:stop] = np.take_along_axis(together, best, axis=1)
    return _Neighbours(interactions, items, similarity)


def ease(interactions: Interactions, *, l2: float | None = None, max_items: int = 20_000) -> Baseline:
    """EASE: the linear item-to-item model with a zero diagonal, in closed form (Steck, WWW 2019, eq. 8).

    P = (X'X + l2 I)^-1;  B = I - P diagMat(1 / diag(P));  scores = X B.

    `l2` grows with the data: 100 * `scale`, which is 1010 on ml-1m and was near the best on ml-100k (614) and
    ml-latest-small (311), where 1000 loses up to .01 of HR@10.

    Raises:
        SettingsError: above `max_items`, since memory grows with their square and time with their cube.
    """
    linalg = require_extra("scipy.linalg.lapack", "baselines")
    l2 = 100.0 * scale(interactions) if l2 is None else l2
    num_items = interactions.num_items
    if num_items > max_items:
        raise SettingsError(
            f"EASE holds an items x items matrix: {num_items:,} items would take {num_items**2 * 4 / 1e9:.1f} GB; "
            f"it is fitted up to {max_items:,} items"
        )
    matrix = interactions.matrix()
    weights = np.empty((num_items, num_items), dtype=np.float32)
    for start, together in _gram_blocks(matrix):
        weights[start : start + len(together)] = together
    weights.flat[:: num_items + 1] += l2
    # The matrix is symmetric, so its transpose is the column-major matrix that LAPACK needs; no copy is made.
    factor, failed = linalg.spotrf(weights.T, lower=1, overwrite_a=1, clean=0)
    assert failed == 0, "X'X + l2 I is positive definite for any l2 > 0"
    inverse, failed = linalg.spotri(factor, lower=1, overwrite_c=1)
    assert failed == 0
    weights = inverse.T  # row-major again, its upper triangle filled
    _mirror_upper(weights)
    weights /= -np.diag(weights).copy()
    weights.flat[:: num_items + 1] = 0.0
    return _ItemWeights(matrix, weights)


def ials(
    interactions: Interactions,
    *,
    factors: int = 64,
    l2: float | None = None,
    alpha: float = 3.0,
    iterations: int = 15,
    seed: int = 0,
) -> Baseline:
    """iALS: matrix factorisation of all user-item pairs, seen ones with weight alpha (Hu, Koren, Volinsky, 2008).

    `l2` grows with the data: 3 * `scale`, which is 30 on ml-1m, 18 on ml-100k and 9 on ml-latest-small. Best of 20
    settings on ml-1m with 99 negatives: HR@10 .723 where implicit's own (l2 .01, alpha 1) give .690. One number for all
    sizes would not do: 60 on ml-100k loses .09 of HR@10.
    """
    l2 = 3.0 * scale(interactions) if l2 is None else l2
    with warnings.catch_warnings():
        # implicit warns about BLAS threads at import and at the fit; the limit below is the one it recommends.
        warnings.simplefilter("ignore")
        als = require_extra("implicit.als", "baselines")
        threads = require_extra("threadpoolctl", "baselines")
        with threads.threadpool_limits(1, "blas"):
            settings = {"regularization": l2, "alpha": alpha, "iterations": iterations, "random_state": seed}
            model = als.AlternatingLeastSquares(factors=factors, use_gpu=False, **settings)
            sparse = require_extra("scipy.sparse", "baselines")
            model.fit(sparse.csr_matrix(interactions.matrix()), show_progress=False)

    def fold_in(known: Interactions) -> Scores:
        return np.asarray(model.recalculate_user(np.arange(known.num_users), sparse.csr_matrix(known.matrix())))

    return _Factors(model.user_factors, model.item_factors, fold_in)


def scale(interactions: Interactions) -> float:
    """Square root of the mean number of interactions of a user or an item, to which regularisation is proportional.

    X's singular values grow so; those of ml-1m, ml-100k and ml-latest-small give 10.1, 6.1 and 3.1.
    """
    active = np.count_nonzero(np.diff(interactions.offsets)) + np.count_nonzero(interactions.counts)
    return float(np.sqrt(_not_empty(interactions).num_pairs / active))


BASELINES: Mapping[str, Callable[[Interactions], Baseline]] = MappingProxyType(
    {"popularity": popularity, "item_knn": item_knn, "ease": ease, "ials": ials}
)


@dataclass(frozen=True, eq=False)
class _Neighbours:
    """Scores an item by the summed similarity of its neighbours among the user's items."""

    interactions: Interactions
    items: NDArray[np.int32]  # (N, k) the neighbours of each item
    similarity: Scores  # (N, k), 0 where an item has fewer

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """Looks up each item's neighbours among the user's items."""
        scores = np.empty(len(users), dtype=np.float32)
        chunk = max(1, SCORES_PER_BLOCK // (16 * max(self.items.shape[1], 1)))
        for distinct, pairs, places in _by_user(users, self.interactions.num_items):
            acted = self._acted(distinct)
            for start in range(0, len(pairs), chunk):
                part = pairs[start : start + chunk]
                known = acted[places[start : start + chunk, None], self.items[items[part]]]
                scores[part] = np.einsum("pk,pk->p", known, self.similarity[items[part]])
        return scores

    def score_users(self, users: Ids) -> Scores:
        """Multiplies sparse rows by long dense rows of users."""
        return np.ascontiguousarray((self._matrix @ np.ascontiguousarray(self._acted(users).T)).T)

    def knowing(self, interactions: Interactions) -> Baseline:
        return replace(self, interactions=interactions)

    @cached_property
    def _matrix(self) -> csr_array:
        sparse = require_extra("scipy.sparse", "baselines")
        num_items, k = self.items.shape
        offsets = np.arange(num_items + 1, dtype=np.int64) * k
        return sparse.csr_array((self.similarity.ravel(), self.items.ravel(), offsets), shape=(num_items, num_items))

    def _acted(self, users: Ids) -> NDArray[np.float32]:
        acted = np.zeros((len(users), self.interactions.num_items), dtype=np.float32)
        acted[self.interactions.of(users)] = 1.0
        return acted


@dataclass(frozen=True, eq=False)
class _ItemWeights:
    """Scores an item by the sum of its weights from the user's items: X W."""

    interactions: csr_array  # (U, N)
    weights: Scores  # (N, N), W[j, i] from item j to item i

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """Picks pairs from whole rows of some users at a time."""
        scores = np.empty(len(users), dtype=np.float32)
        for distinct, pairs, places in _by_user(users, self.interactions.shape[1]):
            scores[pairs] = self.score_users(distinct)[places, items[pairs]]
        return scores

    def score_users(self, users: Ids) -> Scores:
        return np.asarray(self.interactions[users] @ self.weights)

    def knowing(self, interactions: Interactions) -> Baseline:
        return replace(self, interactions=interactions.matrix())


@dataclass(frozen=True, eq=False)
class _Factors:
    """Scores a pair by the product of the user's and the item's factors."""

    users: Scores  # (U, d)
    items: Scores  # (N, d)
    fold_in: Callable[[Interactions], Scores]  # the factors of users given their items

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        scores = np.empty(len(users), dtype=self.users.dtype)
        step = max(1, SCORES_PER_BLOCK // max(self.users.shape[1], 1))
        for start in range(0, len(users), step):
            pairs = slice(start, start + step)
            scores[pairs] = np.einsum("pd,pd->p", self.users[users[pairs]], self.items[items[pairs]])
        return scores

    def score_users(self, users: Ids) -> Scores:
        return self.users[users] @ self.items.T

    def knowing(self, interactions: Interactions) -> Baseline:
        """Fits the users' factors to other items, with the same item factors."""
        return replace(self, users=self.fold_in(interactions))


def _by_user(users: Ids, num_items: int) -> Iterator[tuple[Ids, NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs sorted into blocks of users whose rows of scores fit in memory, each user in one block.

    Gives a block's distinct users, the numbers of its pairs, and the place of each pair's user among them.
    """
    distinct, which = np.unique(users, return_inverse=True)
    order = np.argsort(which, kind="stable")
    step = max(1, SCORES_PER_BLOCK // max(num_items, 1))
    first = np.arange(0, len(distinct) + step, step)
    for block, (start, stop) in zip(first, pairwise(np.searchsorted(which[order], first)), strict=False):
        yield distinct[block : block + step], order[start:stop], which[order[start:stop]] - block


def _gram_blocks(matrix: csr_array) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Blocks of rows (b, N) of X'X, the number of users who acted on both items, with the number of the first row."""
    num_items = matrix.shape[1]
    by_item = matrix.T.tocsr()
    step = max(1, SCORES_PER_BLOCK // max(num_items, 1))
    for start in range(0, num_items, step):
        yield start, (by_item[start : start + step] @ matrix).toarray()


def _mirror_upper(square: NDArray[np.float32]) -> None:
    """Copy the upper triangle onto the lower one in place, block by block."""
    size, step = len(square), 1024
    for start in range(0, size, step):
        rows = slice(start, min(start + step, size))
        square[rows.stop :, rows] = square[rows, rows.stop :].T
        corner = square[rows, rows]
        square[rows, rows] = np.triu(corner) + np.triu(corner, 1).T


def _not_empty(interactions: Interactions) -> Interactions:
    if not interactions.num_pairs:
        raise DataError("there is no positive to fit a baseline on; is the label 1 anywhere in the training split?")
    return interactions
