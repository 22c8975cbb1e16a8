"""Metrics as plain functions: over all rows (AUC, log loss) and over ranked groups (HR@k, NDCG@k, MRR, recall, MAP).

    auc(scores, labels)                                    one number over every row
    ranking = rank_groups(scores, labels, groups)          where each group's positives stand
    hit_rate(ranking, k=10), ndcg(ranking, k=10), ...      one number over the groups

**Ties.** Every metric gives equally scored candidates the value expected if their order is drawn at random. So a
constant model has AUC 1/2 and HR@10 of 10/100 among 100 candidates, and neither the order of the rows nor the sort
changes a number. The expectations are exact; nothing is drawn (McSherry and Najork, "Computing information retrieval
performance measures efficiently in the presence of tied scores", 2008).

**Empty.** An undefined metric is NaN: AUC if one class is absent, log loss of no row, a mean over no group. Groups
without a positive are left out of every ranking metric, and `Ranking.num_left_out` counts them.

A NaN score or a label other than 0 and 1 raises `DataError`: a NaN compares with nothing, so it would rank first.

Shapes: N rows, G groups with a positive, T tie blocks (runs of equally scored candidates of a group, with a positive).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recspec.base.errors import DataError, SettingsError

Values = NDArray[np.float64]
Counts = NDArray[np.int64]

ROWS_PER_BLOCK = 1 << 20
"""Rows that log_loss converts to fp64 at once: 8 MB a temporary."""


FEWEST_USERS = 100
"""Users below which figures tell models apart hardly at all."""


def blur_of(users: int) -> str:
    """What figures of so few users can't tell."""
    within = 2 * math.sqrt(0.2 * 0.8 / max(1, users))
    return f"a hit rate of 20 % is known to within {within:.0%}, so smaller differences between models may be chance"


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve: the chance that a random positive scores higher than a random negative, ties one half.

    Exact: pairs are counted in integers, so neither row order nor the number of ranks changes a digit. NaN without a
    positive or without a negative.
    """
    scores, positive = checked(scores, labels)
    negatives = np.sort(scores[~positive])
    positives = np.sort(scores[positive])  # sorted, so that the searches below walk through memory in order
    if not len(positives) or not len(negatives):
        return float("nan")
    below, not_above = (
        int(np.searchsorted(negatives, positives, side=side).sum(dtype=np.int64)) for side in ("left", "right")
    )
    # Hanley and McNeil, Radiology 1982: the Mann-Whitney statistic. A pair counts 2 if the positive is above and 1 if
    # tied, so that the numerator is a whole number.
    return (below + not_above) / (2 * len(positives) * len(negatives))


def group_auc(scores: ArrayLike, labels: ArrayLike, groups: ArrayLike) -> float:
    """GAUC: the AUC of each group, averaged with the group's number of rows as weight (Zhou et al., DIN, 2018, eq. 7).

    Groups of one class have no AUC and are left out. NaN if none is left.
    """
    return mean_area(rank_groups(scores, labels, groups))


def log_loss(logits: ArrayLike, labels: ArrayLike) -> float:
    """Mean binary cross-entropy of logits, in nats a row: log(1 + exp(x)) - y x. NaN for no row.

    Computed in fp64 as max(x, 0) - y x + log1p(exp(-|x|)), which neither overflows nor loses small losses.
    """
    logits, positive = checked(logits, labels)
    return _mean_loss(logits, positive, _cross_entropy)


def auc_of_rows(scores: ArrayLike, labels: ArrayLike) -> Values:
    """(N,) numbers whose mean is the AUC and whose standard error is that of the AUC; NaN without a class.

    A positive row contributes auc + N / positives (share of negatives below it - auc); a negative one likewise. The
    standard error of these numbers, or of the differences of two models', is DeLong's (DeLong, DeLong and
    Clarke-Pearson, "Comparing the areas under two or more correlated ROC curves", Biometrics 1988).
    """
    scores, positive = checked(scores, labels)
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        return np.full(len(scores), np.nan)
    place, num_places = _codes(scores)
    of_positives, of_negatives = (np.bincount(place[rows], minlength=num_places) for rows in (positive, ~positive))
    # DeLong's structural components: V10 of a positive is the share of negatives below it, V01 of a negative the
    # share of positives above it, ties one half.
    negatives_below = np.cumsum(of_negatives) - of_negatives / 2
    positives_above = num_positive - np.cumsum(of_positives) + of_positives / 2
    won = np.where(positive, negatives_below[place] / num_negative, positives_above[place] / num_positive)
    area = float(won[positive].mean())
    return area + (won - area) * (len(scores) / np.where(positive, num_positive, num_negative))


def log_losses(logits: ArrayLike, labels: ArrayLike) -> Values:
    """(N,) binary cross-entropy of each row, in nats; `log_loss` is its mean."""
    logits, positive = checked(logits, labels)
    return _cross_entropy(logits.astype(np.float64), positive)


def accuracy(logits: ArrayLike, labels: ArrayLike) -> float:
    """Share of rows whose class is predicted: positive above probability 1/2. NaN for no row.

    A logit of exactly 0 predicts neither class and counts one half.
    """
    logits, positive = checked(logits, labels)
    right = np.count_nonzero((logits > 0) & positive) + np.count_nonzero((logits < 0) & ~positive)
    return (right + np.count_nonzero(logits == 0) / 2) / len(logits) if len(logits) else float("nan")


def log_loss_of_probabilities(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Mean binary cross-entropy of probabilities, in nats a row; infinite where a probability of 0 or 1 is wrong.

    Not clipped: a clip's width decides the number. Prefer `log_loss`, whose logits do not saturate.
    """
    probabilities, positive = checked(probabilities, labels)
    outside = (probabilities < 0) | (probabilities > 1)
    if outside.any():
        row = int(np.argmax(outside))
        raise DataError(
            f"{int(outside.sum())} of {len(outside)} probabilities are outside [0, 1], the first is "
            f"{probabilities[row]} in row {row}; for logits use log_loss"
        )
    with np.errstate(divide="ignore"):
        return _mean_loss(probabilities, positive, lambda p, y: -np.where(y, np.log(p), np.log1p(-p)))


def _mean_loss(
    values: NDArray[Any], positive: NDArray[np.bool_], loss: Callable[[Values, NDArray[np.bool_]], Values]
) -> float:
    """The mean of a loss of values and labels, computed in fp64, a block of rows at a time; NaN for no row."""
    blocks = [slice(start, start + ROWS_PER_BLOCK) for start in range(0, len(values), ROWS_PER_BLOCK)]
    total = sum(float(loss(values[rows].astype(np.float64), positive[rows]).sum()) for rows in blocks)
    return total / len(values) if len(values) else float("nan")


def _cross_entropy(x: Values, y: NDArray[np.bool_]) -> Values:
    # max(x, 0) - y x is x where the row is negative and x > 0, and -x where it is positive and x < 0
    return np.asarray(np.maximum(np.where(y, -x, x), 0) + np.log1p(np.exp(-np.abs(x))))


@dataclass(frozen=True, eq=False)
class Ranking:
    """Where the positives of each group stand among the group's candidates.

    One entry a tie block that holds a positive, ascending by group, then best first. `rank_groups` makes it from rows,
    `Ranking.of_positives` from counts.
    """

    group: Counts  # (T,) from 0 to G - 1
    higher: Counts  # (T,) candidates of the group that score higher than the block
    tied: Counts  # (T,) candidates in the block, positives included
    positives: Counts  # (T,) positives in the block
    num_candidates: Counts  # (G,)
    num_left_out: int = 0  # groups without a positive
    num_duplicates: int = 0  # rows that repeated a candidate of their group

    @classmethod
    def of_positives(cls, group: Counts, higher: Counts, tied: Counts, num_candidates: Counts) -> Ranking:
        """From one entry a positive: how many candidates score higher, and how many the same, itself included.

        `group` counts from 0 without gaps, in any order.
        """
        order = np.lexsort((higher, group))
        group, higher, tied = group[order], higher[order], tied[order]
        starts = _run_starts(group, higher)
        positives = np.diff(np.append(starts, len(group)))
        return cls(group[starts], higher[starts], tied[starts], positives, num_candidates)

    @property
    def num_groups(self) -> int:
        """Groups with a positive, over which every mean is taken."""
        return len(self.num_candidates)

    @property
    def longest(self) -> int:
        """Candidates of the longest list."""
        return int(self.num_candidates.max(initial=0))

    @cached_property
    def num_positives(self) -> Counts:
        """(G,) positives of each group."""
        return _sums(self.positives, self._starts)

    @cached_property
    def positives_above(self) -> Counts:
        """(T,) positives of the group that score higher than the block."""
        before = np.cumsum(self.positives) - self.positives
        return before - before[self._starts][self.group]

    @cached_property
    def _starts(self) -> Counts:
        return _run_starts(self.group)


def rank_groups(
    scores: ArrayLike, labels: ArrayLike, groups: ArrayLike, *, candidates: ArrayLike | None = None
) -> Ranking:
    """Rank the rows of each group by score, highest first. Groups come in any row order and any size.

    With `candidates` (item ids), a candidate that a group lists twice counts once, by its positive row if it has one.
    One sort of integer keys, no loop over groups.
    """
    scores, positive = checked(scores, labels)
    codes, num_groups = _codes(_column(groups, len(scores), "groups"))
    num_rows = len(scores)
    if candidates is not None:
        kept = _first_of_each(codes, _column(candidates, len(scores), "candidates"), positive)
        scores, positive, codes = scores[kept], positive[kept], codes[kept]

    # Key = (group, place of the score from the top, negative): equal but for the last bit inside a tie block.
    place, num_places = _codes(scores)
    keys = np.sort(((codes * num_places + (num_places - 1 - place)) << 1) | ~positive)
    blocks, negative = keys >> 1, keys & 1
    starts = _run_starts(blocks)
    tied = np.diff(np.append(starts, len(blocks)))
    positives = tied - _sums(negative, starts)
    group = blocks[starts] // max(num_places, 1)
    candidates_of = np.bincount(codes, minlength=num_groups)
    higher = starts - (np.cumsum(candidates_of) - candidates_of)[group]

    held = positives > 0
    ranked, group = np.unique(group[held], return_inverse=True)
    left_out, duplicates = num_groups - len(ranked), num_rows - len(scores)
    return Ranking(group, higher[held], tied[held], positives[held], candidates_of[ranked], left_out, duplicates)


def hit_rate(ranking: Ranking, k: int) -> float:
    """HR@k: the share of groups with a positive among their k best candidates."""
    return _mean(hits(ranking, k))


def recall(ranking: Ranking, k: int) -> float:
    """Recall@k: the share of a group's positives that are among its k best candidates, averaged over groups."""
    return _mean(recalls(ranking, k))


def precision(ranking: Ranking, k: int) -> float:
    """Precision@k: positives among the k best candidates, divided by k (also where a list is shorter), averaged."""
    return _mean(precisions(ranking, k))


def ndcg(ranking: Ranking, k: int) -> float:
    """NDCG@k: sum of 1 / log2(1 + position) over the positives up to k, divided by the best such sum, averaged.

    The best sum has min(k, number of positives) positives on top (Järvelin and Kekäläinen, 2002, binary gains).
    """
    return _mean(discounted_gains(ranking, k))


def mrr(ranking: Ranking, k: int | None = None) -> float:
    """Mean reciprocal rank: 1 / position of the first positive, 0 where it stands after k."""
    return _mean(reciprocal_ranks(ranking, k))


def mean_average_precision(ranking: Ranking, k: int | None = None) -> float:
    """MAP@k: the precision at each positive up to k, summed and divided by min(k, number of positives), averaged."""
    return _mean(average_precisions(ranking, k))


def mean_area(ranking: Ranking) -> float:
    """GAUC of a ranking: the mean AUC of groups of both classes, ties one half, weighted by their candidates."""
    areas, weights = _areas(ranking)
    return float(np.average(areas, weights=weights)) if len(areas) else float("nan")


def areas_of_groups(ranking: Ranking) -> Values:
    """One number a group of both classes, whose mean is the GAUC and whose standard error is that of the GAUC.

    A group contributes gauc + weight / mean weight (its AUC - gauc), the linear part of a ratio of two means (Cochran,
    "Sampling Techniques", 1977, section 6.4). The differences of two models' numbers are those of a paired comparison.
    """
    areas, weights = _areas(ranking)
    if not len(areas):
        return areas
    mean = np.average(areas, weights=weights)
    return np.asarray(mean + weights / weights.mean() * (areas - mean))


def _areas(ranking: Ranking) -> tuple[Values, Counts]:
    """The AUC of each group of both classes, and its candidates."""
    negatives = ranking.num_candidates - ranking.num_positives
    tied_negatives = ranking.tied - ranking.positives
    above = ranking.higher - ranking.positives_above
    below = negatives[ranking.group] - above - tied_negatives
    # Twice the won pairs: a positive of a block wins against the negatives below it, and half against those tied.
    twice = _sums(ranking.positives * (2 * below + tied_negatives), ranking._starts)
    pairs = 2.0 * ranking.num_positives * negatives
    defined = pairs > 0
    return twice[defined] / pairs[defined], ranking.num_candidates[defined]


def hits(ranking: Ranking, k: int) -> Values:
    """(G,) 1 where a positive is among the k best candidates, 0 where none is, between them where a tie decides.

    All positive: 1. A list of k or fewer candidates: 1.
    """
    k = _cut_off(k)
    slots = np.clip(k - ranking.higher, 0, ranking.tied)
    # P(no positive of a block in its slots): choose(tied - positives, slots) / choose(tied, slots), as a product over
    # the positives. Blocks wholly inside have no room left (0), blocks wholly outside have no slot (1).
    missed = np.ones(len(slots))
    open_blocks = np.flatnonzero(slots > 0)
    tied, positives = ranking.tied[open_blocks], ranking.positives[open_blocks]
    left = tied - slots[open_blocks]
    chance = np.ones(len(open_blocks))
    for taken in range(int(positives.max(initial=0))):
        step = np.clip(left - taken, 0, None) / np.maximum(tied - taken, 1)
        chance *= np.where(taken < positives, step, 1.0)
    missed[open_blocks] = chance
    return 1.0 - np.multiply.reduceat(missed, ranking._starts)


def recalls(ranking: Ranking, k: int) -> Values:
    """(G,) share of the positives that are among the k best candidates. All positive: min(1, k / candidates)."""
    return _found(ranking, k) / ranking.num_positives


def capped_recalls(ranking: Ranking, k: int) -> Values:
    """(G,) positives among the k best candidates, divided by min(k, positives): the recall of Liang et al., 2018."""
    return _found(ranking, k) / np.minimum(ranking.num_positives, k)


def precisions(ranking: Ranking, k: int) -> Values:
    """(G,) positives among the k best candidates, divided by k. All positive: min(1, candidates / k)."""
    return _found(ranking, k) / k


def discounted_gains(ranking: Ranking, k: int) -> Values:
    """(G,) NDCG of each group. All positive: 1."""
    k = _cut_off(k)
    longest = min(k, ranking.longest)
    # Burges et al., ICML 2005: 1 / log2(1 + position) at every place; Järvelin and Kekäläinen's begins later.
    discounts = 1.0 / np.log2(np.arange(2, longest + 2))
    gain = _block_means(ranking, discounts, k) * ranking.positives
    best = np.concatenate(([0.0], np.cumsum(discounts)))
    return _sums(gain, ranking._starts) / best[np.minimum(ranking.num_positives, longest)]


def reciprocal_ranks(ranking: Ranking, k: int | None = None) -> Values:
    """(G,) 1 / position of the first positive, 0 where it stands after k. All positive: 1."""
    first = ranking._starts
    higher, tied, positives = ranking.higher[first], ranking.tied[first], ranking.positives[first]
    end = ranking.longest if k is None else _cut_off(k)
    values = _block_means(ranking, 1.0 / np.arange(1, min(end, ranking.longest) + 1), end)[first]
    several = np.flatnonzero((positives > 1) & (tied > 1))
    if len(several):
        shapes = np.stack((higher[several], tied[several], positives[several]), axis=1)
        distinct, which = np.unique(shapes, axis=0, return_inverse=True)
        values[several] = _first_of_several(distinct[:, 0], distinct[:, 1], distinct[:, 2], end)[which.reshape(-1)]
    return values


def average_precisions(ranking: Ranking, k: int | None = None) -> Values:
    """(G,) average precision of each group, up to k. All positive: 1."""
    longest = ranking.longest
    k = max(longest, 1) if k is None else _cut_off(k)
    higher, tied, positives = ranking.higher, ranking.tied, ranking.positives
    slots = np.clip(k - higher, 0, tied)
    reciprocal = _block_means(ranking, 1.0 / np.arange(1, min(k, longest) + 1), k) * tied  # sum of 1/p over the slots
    # At position p of a block: a positive with chance positives / tied; then the positives up to p are those above,
    # itself, and (p - higher - 1) others of the block, positive with chance (positives - 1) / (tied - 1).
    others = (positives - 1) / np.maximum(tied - 1, 1) * (slots - (higher + 1) * reciprocal)
    gain = (positives / tied) * ((ranking.positives_above + 1) * reciprocal + others)
    return _sums(gain, ranking._starts) / np.minimum(ranking.num_positives, k)


AT_K: Mapping[str, Callable[[Ranking, int], Values]] = MappingProxyType(
    {
        "hit_rate": hits,
        "ndcg": discounted_gains,
        "recall": recalls,
        "capped_recall": capped_recalls,
        "mean_average_precision": average_precisions,
    }
)
"""What `evaluate` reports at each cut-off: name in the output -> the groups' values."""


def check_cut_offs(ranking: Ranking, ks: Sequence[int]) -> None:
    """Refuse a cut-off longer than every list, where HR@k is 1 for any model.

    Raises:
        SettingsError: naming the cut-offs and the longest list.
    """
    longest = ranking.longest
    too_long = sorted({k for k in ks if k > longest})
    if ranking.num_groups and too_long:
        raise SettingsError(
            f"k = {', '.join(map(str, too_long))}: longer than every list of candidates (the longest has {longest}, "
            f"duplicates counted once); choose k from 1 to {longest}, as --k {longest}"
        )


def certain(ranking: Ranking, ks: Sequence[int]) -> tuple[str, ...]:
    """Names in the output that are 1 for any model: HR@k and recall@k where no list is longer than k."""
    return tuple(f"{name}@{k}" for k in ks if k >= ranking.longest > 0 for name in ("hit_rate", "recall"))


def _block_means(ranking: Ranking, weights: Values, k: int) -> Values:
    """(T,) mean over a block's places of `weights[position - 1]`, places after k counting 0."""
    if not len(weights):
        return np.zeros(len(ranking.higher))
    end = min(k, len(weights))
    totals = np.concatenate(([0.0], np.cumsum(weights)))
    low, high = np.minimum(ranking.higher, end), np.minimum(ranking.higher + ranking.tied, end)
    # A candidate without ties has its own weight, not a difference of two sums, which would round.
    alone = np.where(ranking.higher < end, weights[np.minimum(ranking.higher, end - 1)], 0.0)
    return np.where(ranking.tied == 1, alone, (totals[high] - totals[low]) / ranking.tied)


def _first_of_several(higher: Counts, tied: Counts, positives: Counts, k: int) -> Values:
    """Expected 1 / (higher + X), X the place of the first of `positives` among `tied` in random order, up to k.

    P(X = x + 1) = P(X = x) (tied - x - positives + 1) / (tied - x), from P(X = 1) = positives / tied. Stops where
    what is left cannot change an fp64 sum.
    """
    value = np.zeros(len(higher))
    # X has a negative hypergeometric distribution; its first term, and each next one from the one before.
    chance = positives / tied
    for place in range(1, int(tied.max()) + 1):
        value += np.where(higher + place <= k, chance / (higher + place), 0.0)
        chance = chance * np.clip(tied - place - positives + 1, 0, None) / np.maximum(tied - place, 1)
        if not (chance > 1e-20).any():
            break
    return value


def _found(ranking: Ranking, k: int) -> Values:
    """(G,) expected positives among the k best candidates."""
    slots = np.clip(_cut_off(k) - ranking.higher, 0, ranking.tied)
    return _sums(ranking.positives * slots / ranking.tied, ranking._starts)


def _cut_off(k: int) -> int:
    if k < 1:
        raise SettingsError(f"k = {k}: a cut-off is 1 or more")
    return k


def _mean(values: Values) -> float:
    return float(values.mean()) if len(values) else float("nan")


def checked(scores: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Scores as a float array and labels as booleans; raises `DataError` for values that would falsify a metric."""
    scores = np.asarray(scores)
    if scores.dtype.kind != "f":
        scores = scores.astype(np.float64)
    if scores.ndim != 1:
        raise DataError(f"scores have shape {scores.shape}, expected one number a row")
    labels = _column(labels, len(scores), "labels")
    wrong = (labels != 0) & (labels != 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{int(wrong.sum())} of {len(labels)} labels are neither 0 nor 1, the first is {labels[row]} in row {row}"
        )
    not_a_number = np.isnan(scores)
    if not_a_number.any():
        row = int(np.argmax(not_a_number))
        raise DataError(
            f"{int(not_a_number.sum())} of {len(scores)} scores are NaN, the first in row {row}: the model has "
            "diverged, or its weights or inputs hold NaN"
        )
    return scores, labels.astype(bool)


def _column(values: ArrayLike, num_rows: int, what: str) -> NDArray[Any]:
    column = np.asarray(values)
    if column.shape != (num_rows,):
        raise DataError(f"{what} have shape {column.shape}, expected ({num_rows},): one for each score")
    return column


def _codes(values: NDArray[Any]) -> tuple[Counts, int]:
    """The place of each value among the distinct ones, ascending, and the number of distinct ones.

    Integers in a range of a few times their number take a table of those present instead of a sort.
    """
    if values.dtype.kind in "iu" and len(values):
        low, high = int(values.min()), int(values.max())
        if high - low <= 4 * len(values):
            shifted = values.astype(np.int64) - low
            codes = np.cumsum(np.bincount(shifted) > 0) - 1
            return codes[shifted], int(codes[-1]) + 1
    distinct, codes = np.unique(values, return_inverse=True)
    return codes, len(distinct)


def _first_of_each(groups: Counts, candidates: NDArray[Any], positive: NDArray[np.bool_]) -> Counts:
    """Rows left when each (group, candidate) is kept once: its first positive row, or its first row."""
    codes, num_candidates = _codes(candidates)
    keys = groups * max(num_candidates, 1) + codes
    # Sorting values is several times as fast as sorting rows by them, and most data repeats nothing or little.
    ordered = np.sort(keys)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return np.arange(len(keys))
    found = np.minimum(np.searchsorted(repeated, keys), len(repeated) - 1)
    rows = np.flatnonzero(repeated[found] == keys)
    rows = rows[np.lexsort((~positive[rows], keys[rows]))]
    kept = np.ones(len(keys), dtype=bool)
    kept[rows] = False
    kept[rows[_run_starts(keys[rows])]] = True
    return np.flatnonzero(kept)


def _run_starts(*columns: Counts) -> Counts:
    """Where a new combination of values begins, in columns whose equal combinations lie together."""
    if not len(columns[0]):
        return np.zeros(0, dtype=np.int64)
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(new)


def _sums(values: NDArray[Any], starts: Counts) -> NDArray[Any]:
    """Sums of the runs that begin at `starts`."""
    return np.add.reduceat(values, starts)
