"""Statistics of experiments and of drift as plain functions.

Of experiments there are tests that may be looked at any time, and tests for a planned end; of drift the population
stability index, its null quantile, and KS's distance.

Every function is about units (users), which are independent of each other. A metric is the mean of one value a unit, or
a ratio of two sums; `UnitValues.values` turns both into one value a unit, so one difference serves all.

Shapes: N units, V variants, L looks. Of shifts: N values before, M values now, B bins, U clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

CONCENTRATION = 10_000.0
"""Of the Dirichlet prior of `sequential_sample_ratio_p`, as in GrowthBook's gbstats: shares within about 1 %."""


# --- values of units -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitValues:
    """A metric's numerator (N,) of each unit and, for a ratio of sums, its denominator (N,)."""

    numerator: Values
    denominator: Values | None = None

    def __getitem__(self, units: slice | NDArray[np.bool_]) -> UnitValues:
        return UnitValues(self.numerator[units], None if self.denominator is None else self.denominator[units])

    @property
    def values(self) -> Values:
        """One value a unit (N,), whose mean is the metric, and whose variance over N is the metric's variance.

        A ratio R = sum(N_i) / sum(D_i) becomes R + (N_i - R D_i) / mean(D). The variance of their mean is the delta
        method's: (var N - 2 R cov(N, D) + R² var D) / (n mean(D)²). NaN if all denominators are 0.
        """
        if self.denominator is None:
            return self.numerator
        mean = float(self.denominator.mean()) if len(self.denominator) else 0.0
        if mean == 0.0:
            return np.full(len(self.numerator), math.nan)
        ratio = float(self.numerator.mean()) / mean
        return ratio + (self.numerator - ratio * self.denominator) / mean


def cuped(outcome: UnitValues, before: UnitValues, variant: NDArray[np.integer], num_variants: int) -> list[Values]:
    """The values of each variant's units, less what their past explains (Deng et al., 2013).

    Y - θ (X - mean X), with θ = cov(Y, X) / var X over all units, and X from before the first exposure, which no
    variant can have changed. Each mean keeps its expectation; its variance shrinks by the factor 1 - corr(Y, X)².

    Args:
        outcome: The metric; means and ratios alike.
        before: The same before the first exposure.
        variant: Index of each unit's variant (N,).
        num_variants: V.
    """
    past, own = before.values, outcome.values
    variance = float(past.var()) if len(past) else 0.0
    theta = float(np.mean((own - own.mean()) * (past - past.mean()))) / variance if variance > 0 else 0.0
    if not math.isfinite(theta) or theta == 0.0:  # nothing is known of the past
        return [outcome[variant == place].values for place in range(num_variants)]
    parts = [variant == place for place in range(num_variants)]
    return [outcome[part].values - theta * (before[part].values - float(past.mean())) for part in parts]


# --- differences -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The difference of two means, its standard error, the units of both, and Welch's degrees of freedom."""

    value: float
    standard_error: float
    units: int
    freedom: float

    @property
    def z(self) -> float:
        """The difference in standard errors; 0 for none, infinite for one without any spread."""
        if self.standard_error > 0:
            return self.value / self.standard_error
        return 0.0 if self.value == 0 else math.copysign(math.inf, self.value)


def difference(control: Values, treatment: Values, factor: float = 1.0) -> Difference:
    """mean(treatment) - factor * mean(control), of two units or more each; `factor` serves margins of guardrails."""
    of_control = factor**2 * float(control.var(ddof=1)) / len(control)
    of_treatment = float(treatment.var(ddof=1)) / len(treatment)
    both = of_control + of_treatment
    # Welch-Satterthwaite
    below = of_control**2 / (len(control) - 1) + of_treatment**2 / (len(treatment) - 1)
    freedom = both**2 / below if below > 0 else math.inf
    value = float(treatment.mean()) - factor * float(control.mean())
    return Difference(value, math.sqrt(both), len(control) + len(treatment), freedom)


def welch(found: Difference, alpha: float) -> tuple[float, float, float]:
    """p-value and interval of Welch's t-test; valid at one look, planned before the experiment began."""
    from scipy.special import stdtr, stdtrit

    half = found.standard_error * float(stdtrit(found.freedom, 1 - alpha / 2))
    return 2 * float(stdtr(found.freedom, -abs(found.z))), found.value - half, found.value + half


# --- tests that may be looked at any time ----------------------------------------------------------------------------


def mixture_rho(units: float, alpha: float) -> float:
    """The ρ with which the confidence sequence is about narrowest after `units` (Howard et al., 2021, eq. 14 and 3.6).

    ρ = t* / (2 ln(1/α) + ln(1 + 2 ln(1/α))). It must not depend on what the experiment finds.
    """
    log = 2 * math.log(1 / alpha)
    return units / (log + math.log1p(log))


def mixture_bound(units: float, rho: float, alpha: float) -> float:
    """What a sum of t uncorrelated values of variance 1 stays within at all t, with probability 1 - α.

    |S_t| <= sqrt((t + ρ) ln((t + ρ) / (ρ α²))): Robbins' normal mixture.
    """
    return math.sqrt((units + rho) * math.log((units + rho) / (rho * alpha**2)))


def confidence_sequence(found: Difference, rho: float, alpha: float) -> tuple[float, float]:
    """The interval that holds the true difference at every look at once, with probability 1 - α.

    Asymptotic (Waudby-Smith et al., 2021): the standard error is estimated, so let each variant have 100 units first.
    Units must come one after the other, each with its whole value.
    """
    half = found.standard_error * mixture_bound(found.units, rho, alpha) / math.sqrt(found.units)
    return found.value - half, found.value + half


def mixture_p(found: Difference, rho: float) -> float:
    """The p-value of the mixture sequential probability ratio test (Johari et al., 2017), valid at any look.

    Λ = sqrt(V / (V + n τ²)) exp(n² τ² δ² / (2 V (V + n τ²))) and p = min(1, 1/Λ), where τ² = V / ρ, so that p < α
    exactly if the confidence sequence with the same ρ excludes 0. The minimum over looks is valid too.
    """
    kept = rho / (found.units + rho)
    return min(1.0, math.exp(-0.5 * (math.log(kept) + (1 - kept) * found.z**2)))


# --- sample ratio ----------------------------------------------------------------------------------------------------


def sample_ratio_p(counts: Sequence[int], shares: Sequence[float]) -> float:
    """The p-value of the chi-square test that units (V,) fall to variants by their shares (V,), which sum to 1."""
    from scipy.special import chdtrc

    expected = sum(counts) * np.asarray(shares, float)
    statistic = float(np.sum((np.asarray(counts, float) - expected) ** 2 / expected)) if sum(counts) else 0.0
    return float(chdtrc(len(counts) - 1, statistic))


def sequential_sample_ratio_p(counts: NDArray[np.integer], shares: Sequence[float]) -> Values:
    """The same test for counts (L, V) at successive looks; p-values (L,), valid at all looks at once.

    p = min over looks of 1 / Bayes factor, of a Dirichlet-multinomial against the planned shares (Lindon and Malek,
    2020): BF = [B(κθ + x) / B(κθ)] / Π θ_i^x_i, with κ = `CONCENTRATION`.
    """
    from scipy.special import gammaln

    theta, seen = np.asarray(shares, float), np.asarray(counts, float)
    prior, total = CONCENTRATION * theta, seen.sum(axis=1)
    factor = (gammaln(prior + seen) - gammaln(prior) - seen * np.log(theta)).sum(axis=1)
    factor -= gammaln(CONCENTRATION + total) - gammaln(CONCENTRATION)
    return np.minimum.accumulate(np.exp(-np.maximum(factor, 0.0)))


def sign_p(wins: int, losses: int) -> float:
    """The two-sided exact binomial p-value that wins and losses are equally likely; 1 without any."""
    from scipy.special import bdtr

    # P(X <= the smaller) twice; both tails are alike at one half
    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5))) if wins + losses else 1.0


# --- shifts of a distribution -----------------------------------------------------------------------------------------

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
