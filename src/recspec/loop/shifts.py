"""Shifts of a distribution as plain functions: the population stability index, its null quantile, and KS's distance.

Shapes: N values before, M values now, B bins, U clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recspec.loop.statistics import UnitValues, Values

BINS = 10
"""Of numbers and of popularity."""
MOST_VALUES = 20
"""Bins of categories: the most frequent ones, and one for all others."""
LEAST = 0.1
"""PSI below which a shift is not flagged, however certain it is; the usual threshold of credit scoring."""
QUANTILE = 0.99
"""Of PSI without a shift."""
Z_95 = 1.959964


@dataclass(frozen=True)
class Shift:
    """How far one distribution has moved."""

    name: str
    kind: str
    """`category`, `number`, `type`, `popularity` or `score`."""
    before: int
    """Values of the training data that were compared."""
    now: int
    psi: float
    limit: float
    """99 % quantile of PSI if nothing has moved."""
    distance: float | None = None
    """KS's D of numbers: the largest difference of the two distribution functions."""
    unknown: float | None = None
    """Share of new values that the training data does not hold; None where values can't be unknown."""
    unknown_before: float | None = None

    @property
    def flagged(self) -> bool:
        """Whether PSI is above its null quantile and large enough to matter."""
        return self.psi > max(self.limit, LEAST)


def psi(before: NDArray[np.integer], now: NDArray[np.integer]) -> float:
    """Population stability index Σ (p - q) ln(p / q) of counts (B,) in the same bins.

    An empty bin counts as half a value, because ln 0 has no value; one that is empty on both sides is left out. NaN if
    a side is empty.
    """
    held = (before > 0) | (now > 0)
    p, q = (np.where(each[held] > 0, each[held], 0.5) for each in (before, now))
    if not before.sum() or not now.sum():
        return math.nan
    p, q = p / before.sum(), q / now.sum()
    return float(((p - q) * np.log(p / q)).sum())


def null_quantile(before: int, now: int, bins: int, share: float = QUANTILE) -> float:
    """Quantile of PSI of two samples from one distribution: (1/n + 1/m) χ²_{B-1} (Yurdakul and Naranjo, 2020).

    It is of independent values. Events of one user are not, so a real quantile is higher; `LEAST` guards against that.
    """
    from scipy.special import chdtri

    if bins < 2 or not before or not now:
        return 0.0
    return float((1 / before + 1 / now) * chdtri(bins - 1, 1 - share))


def ks_distance(before: Values, now: Values) -> float:
    """Largest difference of the empirical distribution functions of values (N,) and (M,); NaN if a side is empty.

    Without a p-value: at a million rows a shift of .005 standard deviations has p = .003, and means nothing.
    """
    if not len(before) or not len(now):
        return math.nan
    before, now = np.sort(before), np.sort(now)
    every = np.concatenate([before, now])
    below = (np.searchsorted(each, every, side="right") / len(each) for each in (before, now))
    return float(np.abs(np.subtract(*below)).max())


def shift_of_counts(name: str, kind: str, before: NDArray[np.integer], now: NDArray[np.integer]) -> Shift:
    """The shift of counts (B,) in the same bins."""
    counts = int(before.sum()), int(now.sum())
    bins = int(((before > 0) | (now > 0)).sum())
    return Shift(name, kind, *counts, psi(before, now), null_quantile(*counts, bins))


def shift_of_numbers(name: str, kind: str, before: Values, now: Values) -> Shift:
    """The shift of numbers (N,) and (M,), in bins that hold a tenth of the values before each."""
    before, now = before[np.isfinite(before)], now[np.isfinite(now)]
    edges = np.unique(np.quantile(before, np.arange(1, BINS) / BINS)) if len(before) else np.zeros(0)
    counts = [
        np.bincount(np.searchsorted(edges, each, side="right"), minlength=len(edges) + 1) for each in (before, now)
    ]
    found = shift_of_counts(name, kind, *counts)
    return Shift(name, kind, found.before, found.now, found.psi, found.limit, ks_distance(before, now))


def shift_of_categories(
    name: str, kind: str, before: NDArray[np.int64], now: NDArray[np.int64], unknown: tuple[float, float] | None = None
) -> Shift:
    """The shift of ids (N,) and (M,): of the most frequent ones before, and of all others together."""
    ids, counts = np.unique(before, return_counts=True)
    order = np.lexsort((ids, -counts))
    top = ids[order] if len(ids) <= MOST_VALUES else ids[order[: MOST_VALUES - 1]]
    made = [
        np.array([*((each == value).sum() for value in top), (~np.isin(each, top)).sum()]) for each in (before, now)
    ]
    found = shift_of_counts(name, kind, *made)
    shares = (None, None) if unknown is None else unknown
    return Shift(name, kind, found.before, found.now, found.psi, found.limit, None, shares[1], shares[0])


@dataclass(frozen=True)
class PopularityBins:
    """Items in ten bins of equal popularity, and the share of each bin.

    Half of the events say which items are popular, the other half how often those are chosen. With one half for both,
    items that were popular by chance would seem to fall.
    """

    bin_of: NDArray[np.int64]
    """(I,) bin of each item, the most popular ones in bin 0."""
    counts: NDArray[np.int64]
    """(B,) events of the other half."""

    @classmethod
    def of(cls, ordering: NDArray[np.integer], counted: NDArray[np.integer]) -> PopularityBins:
        """Of the events (I,) of each item in either half."""
        order = np.argsort(-ordering, kind="stable")
        total = max(1, int(ordering.sum()))
        before = np.concatenate([[0], np.cumsum(ordering[order])[:-1]])
        bins = np.minimum(BINS * before // total, BINS - 1).astype(np.int64)
        bin_of = np.empty(len(order), np.int64)
        bin_of[order] = bins
        return cls(bin_of, np.bincount(bin_of, counted, BINS).astype(np.int64))

    def shift(self, now: NDArray[np.integer]) -> Shift:
        """The shift to new events (I,) of each item."""
        counts = np.bincount(self.bin_of, now, BINS).astype(np.int64)
        return shift_of_counts("items by popularity", "popularity", self.counts, counts)


@dataclass(frozen=True)
class CalibrationDrift:
    """Predicted chances against what happened."""

    rows: int
    predicted: float
    """Mean chance."""
    observed: float
    """Share of labels that are 1."""
    ratio: float
    """Predicted over observed; 1 is calibrated."""
    low: float
    """Of the 95 % interval of the ratio."""
    high: float

    @classmethod
    def of(cls, chances: Values, labels: Values, clusters: NDArray[np.int64]) -> CalibrationDrift | None:
        """Of chances and labels (N,) of rows in clusters 0 to U - 1, such as answers; None without a label of 1.

        The interval is the delta method's for a ratio of sums over clusters, on a log scale: R exp(±1.96 se / R).
        """
        sums = UnitValues(*(np.bincount(clusters, each).astype(np.float64) for each in (chances, labels)))
        assert sums.denominator is not None
        if len(sums.numerator) < 2 or not labels.sum():
            return None
        ratio = float(chances.sum() / labels.sum())
        error = float(np.std(sums.values, ddof=1)) / math.sqrt(len(sums.values))
        half = math.exp(Z_95 * error / ratio)
        return cls(len(labels), float(chances.mean()), float(labels.mean()), ratio, ratio / half, ratio * half)

    @property
    def flagged(self) -> bool:
        """Whether the interval leaves out 1 and the chances are off by more than a tenth."""
        return (self.low > 1 or self.high < 1) and abs(self.ratio - 1) > LEAST
