"""Classic models that fit in seconds: what a top-k or click model has to beat.

    ranker = BASELINES["ease"](interactions)
    ranker.score_users(users)          # (R, num_items) scores, the higher the better
    scorer = ROW_BASELINES["logistic_regression"](spec, ["train"])
    scorer.logits(columns)             # (B,) of labelled rows

Each of `BASELINES` fits positives alone (`Interactions`) and gives a `Ranker`; each of `ROW_BASELINES` fits rows of
both classes and gives a `Scorer`. Popularity and the constant need numpy only; the others need scipy, and iALS the
library implicit: both come with `pip install 'recspec[baselines]'`.

Shapes: U users; N items; R users asked about; P pairs; B rows; D columns of a one-hot matrix. Ids count from 0, the
reserved id 0 included where there is one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recspec import metrics
from recspec.errors import DataError, SettingsError, require_extra
from recspec.feature_spec import FeatureSpec
from recspec.storage import Column, Ragged, open_split

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Ids = NDArray[np.integer[Any]]
Scores = NDArray[np.floating[Any]]

SCORES_PER_BLOCK = 1 << 24
"""Scores formed at once inside this module: 64 MB in fp32."""

ROWS_PER_BLOCK = 1 << 16
"""Labelled rows encoded at once."""

MOST_ENTRIES = 1 << 26
"""Entries of the one-hot matrix that logistic regression is fitted on, 8 bytes each: 2 million rows of 32 features."""

NUM_BINS = 64
"""Most bins of a number, cut evenly among its distinct values. On Adult's valid: AUC .9237; 32 cut by rows .9167; none
.9157."""

TUNING_ROWS = 200_000
"""Rows on which the strengths of logistic regression are compared; the strength does not grow with the rows."""

HELD_OUT = 0.1
"""Share of those rows that judges them."""

STRENGTHS = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3)
"""L2 strengths compared, the inverse of a weight's variance a priori: from strong to weak, each from the one before."""


class Ranker(Protocol):
    """What scores users' items; only the order of one user's scores means something."""

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) the score of each pair."""

    def score_users(self, users: Ids) -> Scores:
        """(R, N) the scores of every item for each user, in an array the caller may change; the caller bounds R."""


class Baseline(Ranker, Protocol):
    """A ranker that was fitted to what users did, and may be told of more."""

    def knowing(self, interactions: Interactions) -> Baseline:
        """The same with these items of users instead of those it was fitted to; what it learnt of items stays."""


@dataclass(frozen=True, eq=False)
class Interactions:
    """Which items each user acted on: user u's are `items[offsets[u]:offsets[u + 1]]`, ascending, each once."""

    offsets: NDArray[np.int64]  # (U + 1,)
    items: NDArray[np.int32]
    num_items: int

    @classmethod
    def from_pairs(cls, users: Ids, items: Ids, *, num_users: int, num_items: int) -> Interactions:
        """From pairs in any order; a pair that stands twice counts once."""
        keys = users.astype(np.int64) * num_items + items
        keys.sort()
        new = np.ones(len(keys), dtype=bool)
        np.not_equal(keys[1:], keys[:-1], out=new[1:])
        keys = keys[new]
        offsets = np.searchsorted(keys, np.arange(num_users + 1, dtype=np.int64) * num_items)
        return cls(offsets, (keys % num_items).astype(np.int32), num_items)

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.offsets) - 1

    @property
    def num_pairs(self) -> int:
        """Interactions in all."""
        return len(self.items)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """(N,) how many users acted on each item."""
        return np.bincount(self.items, minlength=self.num_items)

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """`user * num_items + item` of every interaction, ascending."""
        users = np.repeat(np.arange(self.num_users, dtype=np.int64), np.diff(self.offsets))
        return users * self.num_items + self.items

    def contain(self, users: Ids, items: Ids) -> NDArray[np.bool_]:
        """Whether each pair is among the interactions; the arguments broadcast."""
        wanted = users.astype(np.int64) * self.num_items + items
        if not len(self.keys):
            return np.zeros(wanted.shape, dtype=bool)
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        found: NDArray[np.bool_] = self.keys[place] == wanted
        return found

    def of(self, users: Ids) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Every item of some users: the place of its user in `users`, and the item."""
        starts, lengths = self.offsets[users], self.offsets[users + 1] - self.offsets[users]
        rows = np.repeat(np.arange(len(users)), lengths)
        first = np.cumsum(lengths) - lengths
        return rows, self.items[np.arange(len(rows)) + (starts - first)[rows]]

    def matrix(self) -> csr_array:
        """The same as a scipy CSR matrix (U, N) of fp32 ones.

        Raises:
            MissingExtraError: if scipy is not installed.
        """
        sparse = require_extra("scipy.sparse", "baselines")
        ones = np.ones(self.num_pairs, dtype=np.float32)
        return sparse.csr_array((ones, self.items, self.offsets), shape=(self.num_users, self.num_items))


def popularity(interactions: Interactions) -> Baseline:
    """Every user gets the items that most users acted on."""
    return Popularity(_not_empty(interactions).counts.astype(np.float64))


def item_knn(interactions: Interactions, *, k: int = 100, shrink: float = 10.0) -> Baseline:
    """Items like those the user acted on: cosine over users, each item keeping its k most similar ones.

    similarity(i, j) = users of both / (sqrt(users of i * users of j) + shrink). The shrink term keeps items that few
    users know from looking alike by chance (on ml-1m, 99 negatives: NDCG@10 .3901 with 0, .3905 with 10, .3876 with
    100).
    """
    require_extra("scipy.sparse", "baselines")
    num_items = _not_empty(interactions).num_items
    norms = np.sqrt(interactions.counts, dtype=np.float32)
    kept = min(k, num_items - 1)
    items = np.zeros((num_items, kept), dtype=np.int32)
    similarity = np.zeros((num_items, kept), dtype=np.float32)
    for start, together in _gram_blocks(interactions.matrix()):
        stop, rows = start + len(together), np.arange(len(together))
        together[rows, start + rows] = 0.0
        together /= norms[start:stop, None] * norms + np.float32(shrink or 1e-9)
        best = np.argpartition(together, num_items - max(kept, 1), axis=1)[:, num_items - kept :]
        best.sort(axis=1)
        items[start:stop] = best
        similarity[start:stop] = np.take_along_axis(together, best, axis=1)
    return Neighbours(interactions, items, similarity)


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
        gigabytes = num_items**2 * 4 / 1e9
        raise SettingsError(
            f"EASE holds an items x items matrix: {num_items:,} items would take {gigabytes:.1f} GB; "
            f"it is fitted up to {max_items:,} items"
        )
    matrix = interactions.matrix()
    weights = np.empty((num_items, num_items), dtype=np.float32)
    for start, together in _gram_blocks(matrix):
        weights[start : start + len(together)] = together
    weights.flat[:: num_items + 1] += l2
    # Symmetric, so its transpose is the column-major matrix LAPACK wants, and everything happens in this one array.
    factor, failed = linalg.spotrf(weights.T, lower=1, overwrite_a=1, clean=0)
    assert failed == 0, "X'X + l2 I is positive definite for any l2 > 0"
    inverse, failed = linalg.spotri(factor, lower=1, overwrite_c=1)
    assert failed == 0
    weights = inverse.T  # row-major again, its upper triangle filled
    _mirror_upper(weights)
    weights /= -np.diag(weights).copy()
    weights.flat[:: num_items + 1] = 0.0
    return ItemWeights(matrix, weights)


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
        # implicit warns about BLAS threads when imported and when fitted; the limit below is what it asks for.
        warnings.simplefilter("ignore")
        als = require_extra("implicit.als", "baselines")
        threads = require_extra("threadpoolctl", "baselines")
        with threads.threadpool_limits(1, "blas"):
            model = als.AlternatingLeastSquares(
                factors=factors,
                regularization=l2,
                alpha=alpha,
                iterations=iterations,
                random_state=seed,
                use_gpu=False,
            )
            sparse = require_extra("scipy.sparse", "baselines")
            model.fit(sparse.csr_matrix(interactions.matrix()), show_progress=False)

    def fold_in(known: Interactions) -> Scores:
        users: Scores = model.recalculate_user(np.arange(known.num_users), sparse.csr_matrix(known.matrix()))
        return users

    return Factors(model.user_factors, model.item_factors, fold_in)


def scale(interactions: Interactions) -> float:
    """Square root of the mean number of interactions of a user or an item: what regularisation grows with.

    X's singular values grow so; those of ml-1m, ml-100k and ml-latest-small give 10.1, 6.1 and 3.1.
    """
    active = np.count_nonzero(np.diff(interactions.offsets)) + np.count_nonzero(interactions.counts)
    return float(np.sqrt(_not_empty(interactions).num_pairs / active))


class Fit(Protocol):
    """A baseline's fit: positives in, ranker out; settings have defaults."""

    def __call__(self, interactions: Interactions) -> Baseline:
        """Fit."""


BASELINES: Mapping[str, Fit] = MappingProxyType(
    {"popularity": popularity, "item_knn": item_knn, "ease": ease, "ials": ials}
)


@dataclass(frozen=True, eq=False)
class Popularity:
    """Scores every user's items alike, by how many users acted on them."""

    counts: Scores  # (N,)

    def score_pairs(self, users: Ids, items: Ids) -> Scores:  # noqa: ARG002
        """(P,) the items' counts."""
        return self.counts[items]

    def score_users(self, users: Ids) -> Scores:
        """(R, N) the same row for each user."""
        return np.repeat(self.counts[None], len(users), axis=0)

    def knowing(self, interactions: Interactions) -> Baseline:  # noqa: ARG002
        """The same: it looks at no user."""
        return self


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Scores an item by how similar its neighbours among the user's items are, summed."""

    interactions: Interactions
    items: NDArray[np.int32]  # (N, k) the neighbours of each item
    similarity: Scores  # (N, k), 0 where an item has fewer

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) scores: each item's neighbours looked up among the user's items."""
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
        """(R, N) scores, as a product with the transposed users: sparse rows times long dense ones."""
        scores: Scores = np.ascontiguousarray((self._matrix @ np.ascontiguousarray(self._acted(users).T)).T)
        return scores

    def knowing(self, interactions: Interactions) -> Baseline:
        """The same neighbours, looked up among these items of users."""
        return replace(self, interactions=interactions)

    @cached_property
    def _matrix(self) -> csr_array:
        sparse = require_extra("scipy.sparse", "baselines")
        num_items, k = self.items.shape
        offsets = np.arange(num_items + 1, dtype=np.int64) * k
        shape = (num_items, num_items)
        return sparse.csr_array((self.similarity.ravel(), self.items.ravel(), offsets), shape=shape)

    def _acted(self, users: Ids) -> NDArray[np.float32]:
        rows, items = self.interactions.of(users)
        acted = np.zeros((len(users), self.interactions.num_items), dtype=np.float32)
        acted[rows, items] = 1.0
        return acted


@dataclass(frozen=True, eq=False)
class ItemWeights:
    """Scores an item by the sum of its weights from the items the user acted on: X W."""

    interactions: csr_array  # (U, N)
    weights: Scores  # (N, N), W[j, i] from item j to item i

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) scores, from whole rows of some users at a time."""
        scores = np.empty(len(users), dtype=np.float32)
        for distinct, pairs, places in _by_user(users, self.interactions.shape[1]):
            scores[pairs] = self.score_users(distinct)[places, items[pairs]]
        return scores

    def score_users(self, users: Ids) -> Scores:
        """(R, N) scores."""
        scores: Scores = self.interactions[users] @ self.weights
        return scores

    def knowing(self, interactions: Interactions) -> Baseline:
        """The same weights from these items of users."""
        return replace(self, interactions=interactions.matrix())


@dataclass(frozen=True, eq=False)
class Factors:
    """Scores a pair by the product of the user's and the item's factors."""

    users: Scores  # (U, d)
    items: Scores  # (N, d)
    fold_in: Callable[[Interactions], Scores]  # the factors of users given their items

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) scores, some pairs at a time."""
        scores = np.empty(len(users), dtype=self.users.dtype)
        step = max(1, SCORES_PER_BLOCK // max(self.users.shape[1], 1))
        for start in range(0, len(users), step):
            pairs = slice(start, start + step)
            scores[pairs] = np.einsum("pd,pd->p", self.users[users[pairs]], self.items[items[pairs]])
        return scores

    def score_users(self, users: Ids) -> Scores:
        """(R, N) scores."""
        return self.users[users] @ self.items.T

    def knowing(self, interactions: Interactions) -> Baseline:
        """The same factors of items; those of users are fitted to these items of theirs."""
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
    """X'X, how many users acted on both items: some of its rows at a time (b, N), with the number of the first."""
    num_items = matrix.shape[1]
    by_item = matrix.T.tocsr()
    step = max(1, SCORES_PER_BLOCK // max(num_items, 1))
    for start in range(0, num_items, step):
        yield start, (by_item[start : start + step] @ matrix).toarray()


def _mirror_upper(square: NDArray[np.float32]) -> None:
    """Copies the upper triangle onto the lower one, in blocks, in place."""
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


# --- labelled rows ---------------------------------------------------------------------------------------------------


class Scorer(Protocol):
    """What gives labelled rows their logits."""

    @property
    def features(self) -> tuple[str, ...]:
        """The columns it reads."""

    @property
    def facts(self) -> Mapping[str, object]:
        """How it was fitted, for a report."""

    def logits(self, columns: Mapping[str, Column]) -> Scores:
        """(B,) logits of rows."""


class FitRows(Protocol):
    """A fit on all rows of some splits of a prepared dataset."""

    def __call__(self, spec: FeatureSpec, splits: Sequence[str]) -> Scorer:
        """Fit."""


def count_labels(spec: FeatureSpec, splits: Sequence[str]) -> tuple[int, int]:
    """Rows of some splits, and how many of them are positive."""
    rows = positives = 0
    for _, block in _row_blocks(spec, splits, (spec.label,)):
        labels = _labels(block, spec)
        rows, positives = rows + len(labels), positives + int(labels.sum())
    return rows, positives


def constant(spec: FeatureSpec, splits: Sequence[str]) -> Scorer:
    """Every row gets the rate of the label: the log loss that knowing nothing else reaches."""
    rows, positives = _both_classes(*count_labels(spec, splits))
    return Constant(spec.label, float(np.log(positives / (rows - positives))))


def logistic_regression(
    spec: FeatureSpec, splits: Sequence[str], *, l2: float | None = None, most_entries: int = MOST_ENTRIES
) -> Scorer:
    """Logistic regression over the prepared ids one-hot, lists as counts, numbers standardised and in bins one-hot.

    Minimises sum log(1 + exp(x)) - y x + l2 / 2 |w|^2 over the weights w (the intercept is free) by L-BFGS with the
    analytic gradient. `l2` is chosen among `STRENGTHS` by the log loss on a tenth of the rows, which a hash of the
    row's number picks; then all rows are fitted. Rows beyond `most_entries` are left out evenly. Nothing is drawn, so
    the same rows give the same weights.
    """
    require_extra("scipy.sparse", "baselines")
    num_rows, _ = _both_classes(*count_labels(spec, splits))
    share = min(1.0, most_entries / (num_rows * _most_entries_per_row(spec)))
    layout = _OneHot.fit(spec, splits, share)
    rows = _read_sample(spec, splits, layout, share)
    seen = rows.drop_unseen(layout.width)
    facts: dict[str, object] = {"rows": rows.num_rows, "of_rows": num_rows}
    weights = np.zeros(len(seen) + 1)
    if l2 is None:
        l2, weights, tried = _choose_strength(rows, weights)
        facts["log_loss_by_l2"] = tried
    weights = _fit_logistic(rows.kept + rows.held_out, l2, weights)
    everywhere = np.zeros(layout.width)
    everywhere[seen] = weights[:-1]
    return Logistic(layout, everywhere, float(weights[-1]), {"l2": l2, **facts})


ROW_BASELINES: Mapping[str, FitRows] = MappingProxyType(
    {"constant": constant, "logistic_regression": logistic_regression}
)


@dataclass(frozen=True)
class Constant:
    """Gives every row the same logit."""

    feature: str
    logit: float
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """Any column: rows are counted by it."""
        return (self.feature,)

    def logits(self, columns: Mapping[str, Column]) -> Scores:
        """(B,) the logit."""
        return np.full(len(columns[self.feature]), self.logit)


@dataclass(frozen=True, eq=False)
class Logistic:
    """Gives a row the sum of its columns' weights."""

    layout: _OneHot
    weights: NDArray[np.float64]  # (D,), 0 for ids that training never saw
    intercept: float
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """Every input of the dataset."""
        return self.layout.features

    def logits(self, columns: Mapping[str, Column]) -> Scores:
        """(B,) logits."""
        scores: Scores = self.layout.encode(columns) @ self.weights + self.intercept
        return scores


@dataclass(frozen=True, eq=False)
class _OneHot:
    """Where each feature's columns begin in the matrix: numbers (one each, or one a place of a list), bins, ids."""

    spec: FeatureSpec
    numbers: tuple[str, ...]
    ids: tuple[str, ...]
    first: Mapping[str, int]  # of ids
    first_bin: NDArray[np.int64]  # of each number
    edges: tuple[NDArray[np.float64], ...]  # between the bins of each number
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    width: int

    @classmethod
    def fit(cls, spec: FeatureSpec, splits: Sequence[str], share: float) -> _OneHot:
        """Means, deviations and bins of the numbers from an even share of the rows."""
        numbers, ids = spec.inputs(categorical=False), spec.inputs(categorical=True)
        parts = []
        for start, block in _row_blocks(spec, splits, numbers) if numbers else ():
            values = _numbers(spec, block, numbers)
            parts.append(values[_uniform(np.arange(start, start + len(values), dtype=np.uint64), 1) < share])
        held = np.concatenate([np.zeros((0, _num_numbers(spec))), *parts])
        mean, std = (held.mean(axis=0), held.std(axis=0)) if len(held) else (np.zeros(0), np.ones(0))
        edges = tuple(_edges(column) for column in held.T)
        sizes = [len(of) + 1 if len(of) else 0 for of in edges]
        starts = len(mean) + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        first: dict[str, int] = {}
        width = int(starts[-1])
        for name in ids:
            first[name] = width
            width += spec.num_ids(name)
        return cls(spec, numbers, ids, first, starts[:-1], edges, mean, np.where(std > 0, std, 1.0), width)

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.numbers, *self.ids)

    def encode(self, columns: Mapping[str, Column]) -> csr_array:
        """(B, D): 1 for a scalar's id, each id of a list but padding, and a number's bin; numbers standardised."""
        sparse = require_extra("scipy.sparse", "baselines")
        num_rows = len(next(iter(columns.values())))
        numbers = _numbers(self.spec, columns, self.numbers)
        binned = [number for number, edges in enumerate(self.edges) if len(edges)]
        bins = [self.first_bin[j] + np.searchsorted(self.edges[j], numbers[:, j], side="right") for j in binned]
        lists = {name: self._without_padding(name, columns[name]) for name in self.ids}
        num_fixed = len(self.mean) + len(binned)
        sizes = [np.full(num_rows, num_fixed), *(lengths for _, lengths in lists.values())]
        offsets = np.concatenate([[0], np.cumsum(np.sum(sizes, axis=0))]).astype(np.int64)
        indices = np.empty(offsets[-1], dtype=np.int64 if self.width > 2**31 - 1 else np.int32)
        data = np.ones(offsets[-1], dtype=np.float32)
        if num_fixed:
            fixed = offsets[:-1, None] + np.arange(num_fixed)
            linear = np.broadcast_to(np.arange(len(self.mean)), numbers.shape)
            indices[fixed] = np.concatenate([linear, *(of[:, None] for of in bins)], axis=1)
            data[fixed[:, : len(self.mean)]] = (numbers - self.mean) / self.std
        filled = offsets[:-1] + num_fixed
        for name, (values, lengths) in lists.items():
            within = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            indices[np.repeat(filled, lengths) + within] = values + self.first[name]
            filled = filled + lengths
        return sparse.csr_array((data, indices, offsets), shape=(num_rows, self.width))

    def _without_padding(self, name: str, column: Column) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A feature's ids, row after row, and how many each row has; of lists at most `length`."""
        if not isinstance(column, Ragged):
            return column.astype(np.int64), np.ones(len(column), dtype=np.int64)
        kept = column.truncate(self.spec.features[name].length or 0)
        kept = kept.where(kept.values != 0)
        return kept.values.astype(np.int64), kept.lengths


def _num_numbers(spec: FeatureSpec) -> int:
    return sum(spec.features[name].length or 1 for name in spec.inputs(categorical=False))


def _most_entries_per_row(spec: FeatureSpec) -> int:
    ids = sum(spec.features[name].length or 1 for name in spec.inputs(categorical=True))
    return max(1, ids + 2 * _num_numbers(spec))


def _numbers(spec: FeatureSpec, columns: Mapping[str, Column], names: Sequence[str]) -> NDArray[np.float64]:
    """(B, number columns); lists padded to their length."""
    num_rows = len(next(iter(columns.values())))
    parts = [np.zeros((num_rows, 0))]
    for name in names:
        column, length = columns[name], spec.features[name].length
        values = column.pad(length or 0) if isinstance(column, Ragged) else column
        parts.append(values.reshape(num_rows, -1).astype(np.float64))
    return np.concatenate(parts, axis=1)


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the bins of a number meet: each distinct value its own bin, or `NUM_BINS` of about equally many of them."""
    distinct = np.unique(values)
    if len(distinct) <= NUM_BINS:
        return distinct[1:]
    return distinct[np.linspace(0, len(distinct), NUM_BINS + 1).astype(np.int64)[1:-1]]


_Block = tuple["csr_array", NDArray[np.bool_]]
"""Rows of the one-hot matrix, and their labels."""


@dataclass(eq=False)
class _Sample:
    kept: list[_Block]
    held_out: list[_Block]  # a fixed share, which compares strengths

    @property
    def num_rows(self) -> int:
        return sum(len(labels) for _, labels in self.kept + self.held_out)

    def drop_unseen(self, width: int) -> NDArray[np.int64]:
        """Leaves only the columns that some row has; gives which of the D these are."""
        seen = np.zeros(width, dtype=bool)
        for matrix, _ in self.kept + self.held_out:
            seen[matrix.indices] = True
        place = np.cumsum(seen, dtype=np.int32) - 1
        self.kept, self.held_out = (
            [(_with_columns(matrix, place, int(seen.sum())), labels) for matrix, labels in part]
            for part in (self.kept, self.held_out)
        )
        return np.flatnonzero(seen)


def _with_columns(matrix: csr_array, place: NDArray[np.int32], width: int) -> csr_array:
    sparse = require_extra("scipy.sparse", "baselines")
    return sparse.csr_array((matrix.data, place[matrix.indices], matrix.indptr), shape=(matrix.shape[0], width))


def _read_sample(spec: FeatureSpec, splits: Sequence[str], layout: _OneHot, share: float) -> _Sample:
    """An even share of the rows; a hash of a row's number says whether it is in, and whether it is held out."""
    kept: list[_Block] = []
    held_out: list[_Block] = []
    for first, block in _row_blocks(spec, splits, (*layout.features, spec.label)):
        labels = _labels(block, spec)
        numbers = np.arange(first, first + len(labels), dtype=np.uint64)
        matrix = layout.encode({name: block[name] for name in layout.features})
        chosen, judging = _uniform(numbers, 1) < share, _uniform(numbers, 2) < HELD_OUT
        for part, rows in ((kept, chosen & ~judging), (held_out, chosen & judging)):
            if rows.any():
                part.append((matrix[np.flatnonzero(rows)], labels[rows]))
    return _Sample(kept, held_out)


def _uniform(numbers: NDArray[np.uint64], salt: int) -> NDArray[np.float64]:
    """A fixed number in [0, 1) for each row number: splitmix64, which wraps around."""
    with np.errstate(over="ignore"):
        bits = (numbers + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits >> np.uint64(11)) / 2.0**53


def _choose_strength(
    rows: _Sample, weights: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64], dict[str, float]]:
    """The strength of least log loss on the held-out rows, the weights it gave, and the losses of all tried."""
    step = -(-rows.num_rows // TUNING_ROWS)
    kept, held_out = rows.kept[::step], rows.held_out[::step]
    labels = np.concatenate([np.zeros(0, dtype=bool), *(labels for _, labels in held_out)])
    if not kept or not (labels.any() and not labels.all()):
        return STRENGTHS[len(STRENGTHS) // 2], weights, {}  # too few rows to choose by
    tried: dict[str, float] = {}
    best = (float("inf"), STRENGTHS[0], weights)
    for l2 in STRENGTHS:
        weights = _fit_logistic(kept, l2, weights, tolerance=1e-7)
        logits = np.concatenate([matrix @ weights[:-1] + weights[-1] for matrix, _ in held_out])
        tried[f"{l2:g}"] = reached = metrics.log_loss(logits, labels)
        if reached >= best[0]:
            break  # weaker ones only fit more noise
        best = (reached, l2, weights)
    return best[1], best[2], tried


def _fit_logistic(
    blocks: Sequence[_Block], l2: float, start: NDArray[np.float64], *, tolerance: float = 1e-8
) -> NDArray[np.float64]:
    """Weights (D,) and intercept of least loss. fp32 matrix, fp64 sums."""
    optimize, special = require_extra("scipy.optimize", "baselines"), require_extra("scipy.special", "baselines")
    num_rows = sum(len(labels) for _, labels in blocks)

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        total = 0.5 * l2 * float(weights[:-1] @ weights[:-1])
        gradient = np.append(l2 * weights[:-1], 0.0)
        for matrix, labels in blocks:
            logits = matrix @ weights[:-1] + weights[-1]
            total += float(np.logaddexp(0.0, np.where(labels, -logits, logits)).sum())
            error = special.expit(logits) - labels
            gradient[:-1] += matrix.T @ error
            gradient[-1] += error.sum()
        return total / num_rows, gradient / num_rows

    options = {"maxiter": 300, "ftol": tolerance, "gtol": 1e-7}
    found: NDArray[np.float64] = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x
    return found


def _row_blocks(
    spec: FeatureSpec, splits: Sequence[str], features: Sequence[str]
) -> Iterator[tuple[int, Mapping[str, Column]]]:
    """Blocks of the rows of some splits, with the number of the first: numbers go on from split to split."""
    before = 0
    for split in splits:
        reader = open_split(spec, split, features)
        for start, stop in pairwise(reader.blocks(ROWS_PER_BLOCK).tolist()):
            yield before + start, reader.read(start, stop)
        before += reader.num_rows


def _labels(block: Mapping[str, Column], spec: FeatureSpec) -> NDArray[np.bool_]:
    labels = block[spec.label]
    assert not isinstance(labels, Ragged), "a label is a scalar"
    positive: NDArray[np.bool_] = labels.astype(np.float32) > 0
    return positive


def _both_classes(rows: int, positives: int) -> tuple[int, int]:
    if not 0 < positives < rows:
        raise DataError(f"of {rows:,} rows to fit {positives:,} are positive; labelled rows of both classes are needed")
    return rows, positives
