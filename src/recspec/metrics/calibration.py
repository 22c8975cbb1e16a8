"""Calibration of probabilities: how far they are from the rates that come true, and maps that mend them.

    found = calibration_error(logits, labels)         # found.value; found.by_chance
    calibration = fit(logits, labels, "temperature")  # on rows that the model was not trained on
    calibration(logits)                               # calibrated logits

A calibration is an increasing map of logits, so it changes no ranking.

Shapes: N rows, K knots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recspec.base.errors import DataError
from recspec.metrics.measures import Values, checked

Method = Literal["temperature", "isotonic"]
Lean = Literal["overconfident", "underconfident", "too high", "too low"]

NUM_BINS = 15  # as Guo et al. and most since
MOST_KNOTS = 66
MOST_ROWS = 1 << 22  # rows that are read, an even sample of more: sorting them takes some 300 MB
ROWS_PER_KNOT = 100  # of isotonic regression: fewer rows would follow noise
LEAST_SLOPE, MOST_SLOPE = 1e-12, 1e12  # of any map: scores may be of any scale
FLATTEST, STEEPEST = 1e-3, 1e4  # of a line through standardised logits
FLATTER, STEEPER = 1e-3, 1e3  # of a segment, as a multiple of the line's slope
MOST_LOGIT = 1e9

Number = Annotated[float, Field(ge=-MOST_LOGIT, le=MOST_LOGIT, allow_inf_nan=False)]
Knots = Annotated[tuple[Number, ...], Field(min_length=2, max_length=MOST_KNOTS)]


@dataclass(frozen=True)
class Bin:
    """Rows of neighbouring scores."""

    rows: int
    expected: float
    """Mean probability."""
    true: float
    """Share of positives."""


@dataclass(frozen=True)
class CalibrationError:
    """Expected calibration error of some rows, beside that of perfectly calibrated probabilities on as many rows."""

    value: float
    by_chance: float  # its expectation if every label were drawn with its probability
    chance_std: float  # its standard deviation then
    lean: Lean
    bins: tuple[Bin, ...] = ()
    """The bins from the lowest scores to the highest, for a reliability diagram."""

    @property
    def is_beyond_chance(self) -> bool:
        """Whether it is more than three standard deviations above chance."""
        return self.value > self.by_chance + 3 * self.chance_std


def calibration_error(logits: ArrayLike, labels: ArrayLike, *, num_bins: int = NUM_BINS) -> CalibrationError:
    """Expected calibration error (ECE): sum over bins of (rows of the bin / N) |mean probability - share of positives|.

    Naeini, Cooper and Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning", AAAI 2015. The bins
    hold equally many rows (Nguyen and O'Connor, EMNLP 2015), since bins of equal width leave most of them empty where
    positives are rare. Rows of equal scores share a bin, so the order of the rows changes nothing. NaN for no row.

    Even perfect probabilities have an error: in a bin of n rows, the share of positives is off by about
    sqrt(2 / pi) sqrt(sum p (1 - p)) / n (the mean of a half-normal). `by_chance` is the sum of these.
    """
    scores, positive = _even(*checked(logits, labels))
    nothing = float("nan")
    if not len(scores):
        return CalibrationError(nothing, nothing, nothing, "overconfident")
    bins = _bins(scores, num_bins)
    probability = _sigmoid(scores.astype(np.float64))
    rows = np.bincount(bins)
    expected, true = (np.bincount(bins, weights=each) / rows for each in (probability, positive))
    share = rows / len(scores)
    std = np.sqrt(np.bincount(bins, weights=probability * (1 - probability))) / rows
    value = float(share @ np.abs(expected - true))
    # |error| of a bin is about half-normal: mean std sqrt(2 / pi), variance std^2 (1 - 2 / pi).
    by_chance = float(share @ std) * math.sqrt(2 / math.pi)
    chance_std = math.sqrt(float(share**2 @ std**2) * (1 - 2 / math.pi))
    rate = float(positive.mean())
    shift = float(probability.mean()) - rate
    spread = float(share @ (np.abs(expected - rate) - np.abs(true - rate)))
    lean: Lean = "overconfident" if spread > 0 else "underconfident"
    if abs(shift) > value / 2:
        lean = "too high" if shift > 0 else "too low"
    found = tuple(map(Bin, rows.tolist(), expected.tolist(), true.tolist()))
    return CalibrationError(value, by_chance, chance_std, lean, found)


class Calibration(BaseModel):
    """An increasing map of logits: linear between knots, and beyond the last ones as between the last two."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Method
    logits: Knots
    calibrated: Knots

    @model_validator(mode="after")
    def _increases(self) -> Calibration:
        if len(self.logits) != len(self.calibrated):
            raise ValueError(f"{len(self.logits)} logits and {len(self.calibrated)} calibrated; expected one for each")
        if not (np.diff(self.logits) > 0).all():
            raise ValueError("the logits of the knots do not increase")
        slopes = self.slopes
        if not ((slopes >= LEAST_SLOPE) & (slopes <= MOST_SLOPE)).all():
            raise ValueError(
                f"slopes from {slopes.min():.3g} to {slopes.max():.3g}; expected {LEAST_SLOPE:g} to {MOST_SLOPE:g}: "
                "an increasing map keeps the order of the scores"
            )
        return self

    @property
    def slopes(self) -> Values:
        """(K - 1,) the slope between each two knots."""
        slopes: Values = np.diff(self.calibrated) / np.diff(self.logits)
        return slopes

    def __call__(self, logits: ArrayLike) -> Values:
        """Calibrated logits, of the shape of `logits`."""
        x = np.asarray(logits, dtype=np.float64)
        knots, values, slopes = np.array(self.logits), np.array(self.calibrated), self.slopes
        below, above = np.minimum(x - knots[0], 0), np.maximum(x - knots[-1], 0)
        return np.asarray(np.interp(x, knots, values) + below * slopes[0] + above * slopes[-1])


def fit(logits: ArrayLike, labels: ArrayLike, method: Method) -> Calibration:
    """Fit a calibration to rows that the model was not trained on.

    Raises:
        DataError: if the rows are of one class, a logit is infinite, or logits are too large for any map.
    """
    scores, positive = _even(*checked(logits, labels))
    if not 0 < int(positive.sum()) < len(positive):
        raise DataError(
            f"of {len(positive):,} rows to calibrate on {int(positive.sum()):,} are positive; both classes are needed"
        )
    if not np.isfinite(scores).all():
        raise DataError(f"{int((~np.isfinite(scores)).sum()):,} of {len(scores):,} logits to calibrate are infinite")
    try:
        return METHODS[method](scores.astype(np.float64), positive)
    except ValidationError:
        largest = float(np.abs(scores).max())
        raise DataError(f"no calibration fits logits that reach {largest:.3g}: the model has diverged") from None


def fit_temperature(logits: Values, positive: NDArray[np.bool_]) -> Calibration:
    """Logits divided by a temperature, plus an intercept: a x + b with the least log loss.

    Temperature scaling is Guo et al., "On calibration of modern neural networks", ICML 2017. With the intercept it is
    Platt's scaling (1999), and it uses his targets (P + 1) / (P + 2) and 1 / (N + 2) for P positives and N negatives,
    so that separable rows have a finite fit.
    """
    slope, intercept = _line(logits, positive)
    low, high = float(logits.min()), float(logits.max())
    knots = (low, max(high, low + 1 / slope))
    return Calibration(method="temperature", logits=knots, calibrated=tuple(slope * x + intercept for x in knots))


def fit_isotonic(logits: Values, positive: NDArray[np.bool_]) -> Calibration:
    """The increasing piecewise linear map through the rates of neighbouring rows, by pool adjacent violators.

    Zadrozny and Elkan, "Transforming classifier scores into accurate multiclass probability estimates", KDD 2002. Rows
    are first put into bins of at least `ROWS_PER_KNOT`; a bin's rate counts one more row at the rate of all. A pooled
    block is a knot at its mean logit. Beyond the outer knots the slope is that of `fit_temperature`.
    """
    most = max(1, min(MOST_KNOTS - 2, len(logits) // ROWS_PER_KNOT))
    bins = _bins(logits, most)
    rows = np.bincount(bins).astype(np.float64)
    place, true = (np.bincount(bins, weights=each) / rows for each in (logits, positive))
    rate = (true * rows + positive.mean()) / (rows + 1)
    slope, _ = _line(logits, positive)
    blocks: list[tuple[float, float, float]] = []  # rows, mean logit, rate
    for block in zip(rows.tolist(), place.tolist(), rate.tolist(), strict=True):
        while blocks and not _rises(blocks[-1], block, slope):
            block = _pooled(blocks.pop(), block)
        blocks.append(block)
    inner = [(x, _logit(p)) for _, x, p in blocks]
    (first, low), (last, high) = inner[0], inner[-1]
    knots = [(first - 1 / slope, low - 1.0), *inner, (last + 1 / slope, high + 1.0)]
    places, values = zip(*knots, strict=True)
    return Calibration(method="isotonic", logits=places, calibrated=values)


METHODS: Mapping[Method, Callable[[Values, NDArray[np.bool_]], Calibration]] = MappingProxyType(
    {"temperature": fit_temperature, "isotonic": fit_isotonic}
)


def _even(scores: NDArray[Any], positive: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Every row, or an even sample of `MOST_ROWS` at most."""
    step = max(1, -(-len(scores) // MOST_ROWS))
    return scores[::step], positive[::step]


def _bins(scores: NDArray[np.floating], most: int) -> NDArray[np.int64]:
    """(N,) the bin of each row, from 0 without gaps; bins hold equally many rows, equal scores share one."""
    distinct, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    before = np.cumsum(counts) - counts
    of_score = before * most // len(scores)
    _, bins = np.unique(of_score, return_inverse=True)
    assert len(bins) == len(distinct)
    return np.asarray(bins[place])


def _line(logits: Values, positive: NDArray[np.bool_]) -> tuple[float, float]:
    """Slope and intercept with the least log loss, by Newton's method on standardised logits."""
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    # Platt, 1999: targets smoothed as if each class had one more row.
    target = np.where(positive, (num_positive + 1) / (num_positive + 2), 1 / (num_negative + 2))
    mean, std = float(logits.mean()), float(logits.std())
    if std <= 1e-6 * max(1e-3, abs(mean)):
        return 1.0, _logit(float(target.mean())) - mean
    x = (logits - mean) / std

    def loss(a: float, b: float) -> float:
        z = a * x + b
        return float((np.logaddexp(0.0, z) - target * z).mean())

    a, b = 1.0, _logit(float(target.mean()))
    for _ in range(100):
        p = _sigmoid(a * x + b)
        error, weight = p - target, p * (1 - p)
        gradient = np.array([(error * x).mean(), error.mean()])
        ab = float((weight * x).mean())
        # The log loss is convex in (a, b): gradient E[(p - t) (x, 1)], Hessian E[p (1 - p) (x, 1) (x, 1)^T]. The small
        # term keeps the Hessian invertible if all x are equal.
        hessian = np.array([[float((weight * x * x).mean()) + 1e-9, ab], [ab, float(weight.mean()) + 1e-9]])
        step, now, length = np.linalg.solve(hessian, gradient), loss(a, b), 1.0
        while True:
            new = min(max(a - length * float(step[0]), FLATTEST), STEEPEST), b - length * float(step[1])
            if loss(*new) <= now or length < 1e-6:
                break
            length /= 2
        moved = abs(new[0] - a) + abs(new[1] - b)
        a, b = new
        if moved < 1e-9:
            break
    return a / std, b - a * mean / std


def _rises(before: tuple[float, float, float], after: tuple[float, float, float], slope: float) -> bool:
    """Whether the logit of the rate rises between two blocks, neither far less nor far more steeply than `slope`."""
    across, up = after[1] - before[1], _logit(after[2]) - _logit(before[2])
    return FLATTER * slope * across < up < STEEPER * slope * across


def _pooled(first: tuple[float, float, float], second: tuple[float, float, float]) -> tuple[float, float, float]:
    rows = first[0] + second[0]
    place, rate = ((first[i] * first[0] + second[i] * second[0]) / rows for i in (1, 2))
    return rows, place, rate


def _sigmoid(logits: Values) -> Values:
    """1 / (1 + exp(-x)) without overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)))


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
