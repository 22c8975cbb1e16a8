"""Off-policy estimates: what a target policy would earn, from lists that another policy showed.

A logged list has K slots; b_k and e_k are the chances of its item at slot k, given those above, under the logging and
the target policy. Weights are w_k = e_k / b_k and w_1:k = w_1 ... w_k; rewards r_k are clicks. Each estimate is a mean
over N lists; for single choices (K = 1) RIPS is IPS, SN-RIPS is SNIPS, and cascade-DR is DR.

    IPS         w_1:K sum_k r_k
    SNIPS       sum_i w_1:K sum_k r_k / sum_i w_1:K                 over lists i
    RIPS        sum_k w_1:k r_k                                     McInerney et al., 2020
    SN-RIPS     sum_k (sum_i w_1:k r_k / sum_i w_1:k)
    DM          E_e[q], the reward that a model q predicts for the target's choice
    cascade-DR  sum_k (w_1:k (r_k - q_k) + w_1:k-1 E_e[q_k])        Kiyohara et al., 2022

RIPS and cascade-DR take it that a click depends on the items above alone.

Errors are clustered by user. Each estimate is a sum of ratios R = sum_i N_i / sum_i D_i; a user has the value
R + (N_u - R D_u) / mean D, so that the mean over users is R, and their variance over G users is R's (delta method).
Intervals are those of Hall, 1992, which correct for skewness: where clicks are rare or weights are heavy, Student's t
covers the truth in 90 to 94 % of samples and almost always errs by being too low; these cover it in 93 to 97 %.

Shapes: N lists, K slots, G users, C cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import how_many

Values = NDArray[np.float64]
Ratio = tuple[Values, Values]
"""Numerators and denominators (N,) of a ratio of sums."""

LEVEL = 0.95
MOST_UNSUPPORTED, LEAST_EFFECTIVE, MOST_SHARE, MOST_ERRORS = 0.01, 200.0, 0.05, 3.0
LEAST_P = 0.001
ROUNDING = 0.001
"""Of chances that a model gives again: 1e-7 of its scores, at any temperature."""
LEAST_EXPECTED = 5.0
"""Expected count of a cell of the chi-square test; smaller ones are joined."""


@dataclass(frozen=True, eq=False)
class LoggedLists:
    """Lists that were shown, as both policies see them. Short lists end in slots of chances 1 and rewards 0."""

    chances: Values
    """(N, K) of the shown items under the logging policy, given those above; above 0."""
    target: Values
    """(N, K) the same under the target policy."""
    rewards: Values
    """(N, K)."""
    users: NDArray[np.int64]
    """(N,) number of each list's user, from 0 without gaps."""
    predicted: Values | None = None
    """(N, K) rewards that a model predicts for the shown items, not fitted to the list's user."""
    expected: Values | None = None
    """(N, K) their expectation over the target's choice, given the items above."""

    @cached_property
    def weights(self) -> Values:
        """(N, K) w_1:k."""
        return np.cumprod(self.target / self.chances, axis=1, dtype=np.float64)

    @property
    def ones(self) -> Values:
        """(N,)."""
        return np.ones(len(self.rewards))

    def first(self, k: int) -> LoggedLists:
        """The first k slots of each list."""
        cut = [None if each is None else each[:, :k] for each in (self.predicted, self.expected)]
        return LoggedLists(self.chances[:, :k], self.target[:, :k], self.rewards[:, :k], self.users, *cut)


@dataclass(frozen=True, eq=False)
class Estimate:
    """An estimate with its 95 % interval, and the values of users (G,) whose mean it is."""

    value: float
    standard_error: float
    low: float
    high: float
    values: Values


def ips(lists: LoggedLists) -> Iterator[Ratio]:
    """Unbiased where the target shows nothing that the log could not; its variance grows with the length of lists."""
    yield lists.weights[:, -1] * lists.rewards.sum(1), lists.ones


def snips(lists: LoggedLists) -> Iterator[Ratio]:
    """IPS over the sum of weights: a small bias, far less variance."""
    yield lists.weights[:, -1] * lists.rewards.sum(1), lists.weights[:, -1]


def rips(lists: LoggedLists) -> Iterator[Ratio]:
    """Unbiased if clicks depend on the items above alone."""
    yield (lists.weights * lists.rewards).sum(1), lists.ones


def sn_rips(lists: LoggedLists) -> Iterator[Ratio]:
    """RIPS, each slot over its sum of weights."""
    for slot in range(lists.rewards.shape[1]):
        weights = lists.weights[:, slot]
        yield weights * lists.rewards[:, slot], weights


def cascade_dr(lists: LoggedLists) -> Iterator[Ratio]:
    """RIPS of what the predictions miss, and the predictions for the target: right if either is."""
    assert lists.predicted is not None
    assert lists.expected is not None
    above = np.concatenate([np.ones((len(lists.rewards), 1)), lists.weights[:, :-1]], axis=1)
    terms = lists.weights * (lists.rewards - lists.predicted) + above * lists.expected
    yield terms.sum(1), lists.ones


def direct(lists: LoggedLists) -> Iterator[Ratio]:
    """Of single choices: what the model predicts for the target's. As wrong as the model is."""
    assert lists.expected is not None
    assert lists.expected.shape[1] == 1, "below the first slot, predictions stand on the logging policy's items"
    yield lists.expected[:, 0], lists.ones


Estimator = Callable[[LoggedLists], Iterator[Ratio]]

OF_CHOICES: Mapping[str, Estimator] = MappingProxyType({"dm": direct, "ips": ips, "snips": snips, "dr": cascade_dr})
OF_LISTS: Mapping[str, Estimator] = MappingProxyType({"rips": rips, "sn_rips": sn_rips, "cascade_dr": cascade_dr})


def estimate(ratios: Iterator[Ratio], users: NDArray[np.int64]) -> Estimate:
    """The sum of ratios of sums, with its error clustered by user (N,)."""
    num_users = int(users.max(initial=-1)) + 1
    values = np.zeros(num_users)
    for numerators, denominators in ratios:
        above, below = (np.bincount(users, each, num_users) for each in (numerators, denominators))
        mean = float(below.mean())
        ratio = float(above.mean()) / mean if mean else math.nan
        values += ratio + (above - ratio * below) / (mean or math.nan)
    value = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(num_users) if num_users > 1 else math.nan
    return Estimate(value, error, *interval(values, value, error), values)


def interval(values: Values, mean: float, error: float) -> tuple[float, float]:
    """The 95 % interval of the mean of skewed values (G,).

    With l the skewness over sqrt(G), t + l (t^2 / 3 + 1 / 6) + l^2 t^3 / 27 is about normal (Hall, "On the removal of
    skewness by transformation", JRSS B, 1992). Its inverse is 3 / l ((1 + l (y - l / 6))^(1/3) - 1).
    """
    from scipy.special import stdtrit

    if not error > 0:
        return mean + 0 * error, mean + 0 * error  # NaN of a single user
    quantile = float(stdtrit(len(values) - 1, (1 + LEVEL) / 2))
    skew = float(((values - mean) ** 3).mean()) / (error**3 * len(values) ** 2)
    if abs(skew) < 1e-6:
        return mean - quantile * error, mean + quantile * error
    low, high = (3 / skew * (math.cbrt(1 + skew * (y - skew / 6)) - 1) for y in (quantile, -quantile))
    return mean - error * low, mean - error * high


def effective_size(weights: Values) -> float:
    """Kish's effective sample size of weights (N,): (sum w)^2 / sum w^2."""
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / squares if squares else 0.0


# --- refusals --------------------------------------------------------------------------------------------------------


def refusals(lists: LoggedLists) -> list[str]:
    """Why the lists tell nothing of the target policy; empty if they do."""
    weights, problems = lists.weights[:, -1], list[str]()
    problems += _unsupported(lists)
    if (size := effective_size(weights)) < LEAST_EFFECTIVE:
        hint = _shorter(lists)
        problems.append(
            f"the weights leave {size:.1f} of {how_many(len(weights), 'list')} in effect; at least "
            f"{LEAST_EFFECTIVE:.0f} are needed{hint}"
        )
    total = float(weights.sum())
    if total and (share := float(weights.max()) / total) > MOST_SHARE:
        problems.append(f"one list has {share:.1%} of all weight; at most {MOST_SHARE:.0%} may have")
    mean = estimate(iter([(weights, lists.ones)]), lists.users)
    if abs(mean.value - 1) > max(MOST_ERRORS * mean.standard_error, ROUNDING):
        away = abs(mean.value - 1) / mean.standard_error if mean.standard_error else math.inf
        problems.append(
            f"weights have the mean {mean.value:.4f}, {away:.1f} standard errors from 1; the logged chances are not "
            "those of the shown lists, or the target policy shows others"
        )
    return problems


def _unsupported(lists: LoggedLists) -> Iterator[str]:
    """A problem for the first slot at which the target's choices could often not have been logged.

    The mean of w_k is the share of the target's chance that falls on what the logging policy may show.
    """
    for slot, ratio in enumerate((lists.target / lists.chances).T):
        found = estimate(iter([(ratio, lists.ones)]), lists.users)
        missing = 1 - found.value
        if missing > MOST_UNSUPPORTED and not missing - MOST_ERRORS * found.standard_error <= 0:
            yield (
                f"slot {slot + 1}: {missing:.1%} of the target policy's chance falls on items that the log could not "
                f"show; at most {MOST_UNSUPPORTED:.0%} may"
            )
            return


def _shorter(lists: LoggedLists) -> str:
    """The first slots that leave enough lists in effect, as a hint."""
    sizes = [effective_size(each) for each in lists.weights.T]
    k = next((slot for slot, size in enumerate(sizes) if size < LEAST_EFFECTIVE), 0)
    return f"; the first {how_many(k, 'slot')} would have {sizes[k - 1]:.0f} (--k {k})" if k else ""


def counts_p(observed: Values, expected: Values) -> float:
    """p-value of Pearson's chi-square test of counts (C, K) of cells at slots against the sums of their chances.

    Cells of a slot that are expected fewer than `LEAST_EXPECTED` times count as one. Chances that differ from list to
    list make counts vary less than the test takes them to, so it errs on the side of no alarm. 1 without two cells.
    """
    from scipy.special import chdtrc

    if (observed[expected == 0] > 0).any():
        return 0.0
    total, freedom = 0.0, 0
    for seen, due in zip(observed.T, expected.T, strict=True):
        few = due < LEAST_EXPECTED
        cells = [*zip(seen[~few], due[~few], strict=True), (seen[few].sum(), due[few].sum())]
        parts = [(one - of) ** 2 / of for one, of in cells if of >= LEAST_EXPECTED]
        total, freedom = total + float(sum(parts)), freedom + max(0, len(parts) - 1)
    return float(chdtrc(freedom, total)) if freedom else 1.0
