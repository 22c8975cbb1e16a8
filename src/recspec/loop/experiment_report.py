"""The report of an experiment: whether its users may be compared, each metric, guardrails, and a verdict.

Everybody may look as often as they like: the verdict rests on tests that allow it. Welch's test stands beside, and
counts only where the experiment says so, at its planned end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import how_many, listed
from recspec.loop.assignment import Experiment, Metric
from recspec.loop.interleaving import preference
from recspec.loop.outcomes import Counted, Outcomes
from recspec.loop.statistics import (
    Difference,
    UnitValues,
    Values,
    confidence_sequence,
    cuped,
    difference,
    mixture_p,
    mixture_rho,
    sample_ratio_p,
    sequential_sample_ratio_p,
    welch,
)

FEWEST = 100
"""Users of a variant from whom on the mean is normal enough to judge."""
MISMATCH_P = 0.001
"""Below it the sample ratio is wrong; the usual level, as this test runs on every look of every experiment."""
LOOKS, RATIO_LOOKS = 30, 1_000
"""Looks along the users for the chart of the first metric, and for the sequential test of the sample ratio."""
RELATIVE = ("latency", "coverage")
"""Guardrails whose margin is a share of the control's value."""

State = Literal["holds", "broken", "open"]


@dataclass(frozen=True)
class Effect:
    """A difference between two variants: with the interval that holds at any look, and with Welch's test."""

    difference: float
    standard_error: float
    low: float
    high: float
    p: float
    """Valid at any look; below alpha exactly if the interval excludes 0."""
    fixed_low: float
    fixed_high: float
    fixed_p: float
    """Valid only if nobody looked before the planned end."""


@dataclass(frozen=True)
class MetricResult:
    """A metric of a variant and of the control; `cuped` is the effect with less variance, which then counts."""

    name: str
    variant: str
    better: Literal["higher", "lower"]
    control: float
    treatment: float
    plain: Effect
    cuped: Effect | None = None

    @property
    def effect(self) -> Effect:
        """The effect that counts."""
        return self.cuped or self.plain

    @property
    def variance_left(self) -> float:
        """Share of the variance that the past did not explain."""
        return (self.effect.standard_error / self.plain.standard_error) ** 2 if self.plain.standard_error else 1.0


@dataclass(frozen=True)
class GuardrailResult:
    """A harm of a variant. `low` and `high` are what is left of the margin at worst and at best."""

    name: str
    variant: str
    control: float
    treatment: float
    margin: float
    is_relative: bool
    low: float
    high: float

    @property
    def state(self) -> State:
        """`holds` if the harm is surely below the margin, `broken` if surely above it."""
        return "holds" if self.low > 0 else "broken" if self.high < 0 else "open"


@dataclass(frozen=True)
class PreferenceResult:
    """What interleaving found: mean share of a user's clicks that the second variant gets more than the first."""

    effect: Effect
    users: int
    first: int
    second: int
    tied: int
    p_sign: float


@dataclass(frozen=True)
class Look:
    """The first metric's effect after so many users."""

    variant: str
    users: int
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class ExperimentReport:
    """What an experiment found so far. Times are microseconds since 1970 in UTC."""

    name: str
    at: int
    end: int
    """The planned end: until then Welch's test decides nothing."""
    alpha: float
    """Share of false alarms; divided among the variants that are compared with the control."""
    variants: tuple[str, ...]
    entered: tuple[int, ...]
    counted: tuple[int, ...]
    """Users whose window is closed."""
    ratio_p: float
    """The chi-square test of the sample ratio."""
    ratio_p_sequential: float
    metrics: tuple[MetricResult, ...] = ()
    guardrails: tuple[GuardrailResult, ...] = ()
    preference: PreferenceResult | None = None
    looks: tuple[Look, ...] = ()
    verdict: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the planned end has come."""
        return self.at >= self.end

    @property
    def has_mismatch(self) -> bool:
        """Whether users did not fall to the variants by their shares, so that nothing else can be trusted."""
        return self.ratio_p_sequential < MISMATCH_P or (self.is_over and self.ratio_p < MISMATCH_P)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = asdict(self) | {"is_over": self.is_over, "has_mismatch": self.has_mismatch}
        for values, each in zip(found["guardrails"], self.guardrails, strict=True):
            values["state"] = each.state
        return found


def analyse(experiment: Experiment, outcomes: Outcomes, at: int) -> ExperimentReport:
    """The report of an experiment from its outcomes at a time, in microseconds since 1970."""
    names = tuple(each.name for each in experiment.variants)
    entered, counted = (
        tuple(np.bincount(each, minlength=len(names)).tolist()) for each in (outcomes.entered, outcomes.variant)
    )
    report = ExperimentReport(
        experiment.name,
        at,
        experiment.end_us,
        experiment.alpha,
        names,
        entered,
        counted,
        1.0,
        1.0,
        notes=outcomes.notes,
    )
    if outcomes.clicks is not None:
        found = _preference(outcomes.clicks, experiment)
        report = replace(report, variants=names, entered=(len(outcomes.entered),), counted=(len(outcomes.variant),))
        return replace(report, preference=found, verdict=_verdict_of_preference(experiment, report, found))
    shares = [each.share for each in experiment.variants]
    report = replace(report, ratio_p=sample_ratio_p(entered, shares), ratio_p_sequential=_ratio(outcomes, shares))
    able = [place for place in range(1, len(names)) if min(counted[0], counted[place]) >= FEWEST]
    comparisons = [_Comparison(experiment, outcomes, place) for place in able]
    report = replace(
        report,
        metrics=tuple(each for one in comparisons for each in one.metrics()),
        guardrails=tuple(each for one in comparisons for each in one.guardrails()),
        looks=tuple(each for one in comparisons for each in one.looks()),
        notes=(*outcomes.notes, *_missing(experiment, outcomes)),
    )
    return replace(report, verdict=_verdict(experiment, report))


def _ratio(outcomes: Outcomes, shares: Sequence[float]) -> float:
    """The sequential test, at looks along the users as they came."""
    ends = np.unique(np.linspace(1, len(outcomes.entered), RATIO_LOOKS).astype(int)) - 1
    counts = np.stack([np.cumsum(outcomes.entered == place)[ends] for place in range(len(shares))], axis=1)
    return float(sequential_sample_ratio_p(counts, shares)[-1])


def _missing(experiment: Experiment, outcomes: Outcomes) -> Iterator[str]:
    """Notes of metrics without any event, once windows are closed in which one could have been."""
    for each in experiment.metrics if len(outcomes.variant) else ():
        if each.name in outcomes.metrics and not outcomes.metrics[each.name].after.numerator.any():
            yield f"{each.name}: no event of type '{each.event}' was counted; is that what the events are called?"
    known = {*outcomes.guardrails, *(("coverage",) if outcomes.different_items else ())}
    wanted = {name for name, margin in experiment.guardrails if margin is not None}
    if missing := sorted(wanted - known):
        yield f"guardrails that the journal can't tell yet: {listed(missing)}"


class _Comparison:
    """One variant against the control."""

    def __init__(self, experiment: Experiment, outcomes: Outcomes, place: int) -> None:
        self.experiment, self.outcomes = experiment, outcomes
        control, variant = experiment.variants[0], experiment.variants[place]
        self.name, self.place = variant.name, place
        self.alpha = experiment.alpha / (len(experiment.variants) - 1)
        self.rho = mixture_rho(experiment.users * (control.share + variant.share), self.alpha)
        self.pair = np.isin(outcomes.variant, (0, place))

    def metrics(self) -> Iterator[MetricResult]:
        for metric in self.experiment.metrics:
            found = self._metric(metric, self.outcomes.metrics[metric.name])
            if found is not None:
                yield found

    def looks(self) -> Iterator[Look]:
        metric = self.experiment.metrics[0]
        counted, variant = self.outcomes.metrics[metric.name], self.outcomes.variant
        for end in np.unique(np.linspace(2 * FEWEST, len(variant), LOOKS).astype(int)):
            seen = variant[:end]
            if min((seen == 0).sum(), (seen == self.place).sum()) < FEWEST:
                continue
            found = self._metric(metric, Counted(counted.after[:end], counted.before[:end]), end)
            if found is not None:
                effect = found.effect
                yield Look(self.name, int(self.pair[:end].sum()), effect.difference, effect.low, effect.high)

    def _metric(self, metric: Metric, counted: Counted, end: int | None = None) -> MetricResult | None:
        """A metric over the first `end` users; None for a ratio without anything to divide by."""
        variant, pair = self.outcomes.variant[:end], self.pair[:end]
        control, treatment = (counted.after[variant == place].values for place in (0, self.place))
        if not np.isfinite(control.sum() + treatment.sum()):
            return None
        adjusted = None
        if self.experiment.cuped and counted.before.numerator.any():
            second = (variant[pair] == self.place).astype(int)
            adjusted = self._effect(*cuped(counted.after[pair], counted.before[pair], second, 2))
        means = float(control.mean()), float(treatment.mean())
        return MetricResult(metric.name, self.name, metric.better, *means, self._effect(control, treatment), adjusted)

    def _effect(self, control: Values, treatment: Values) -> Effect:
        return _effect(difference(control, treatment), self.rho, self.alpha)

    # --- guardrails ---------------------------------------------------------------------------------------------------

    def guardrails(self) -> Iterator[GuardrailResult]:
        for metric in self.experiment.metrics:
            if metric.margin is not None:
                sign = 1 if metric.better == "higher" else -1
                yield from self._relative(metric.name, metric.margin, sign, self.outcomes.metrics[metric.name].after)
        for name, margin in self.experiment.guardrails:
            if name in self.outcomes.guardrails and margin is not None:
                counted = self.outcomes.guardrails[name]
                yield from (
                    self._relative(name, margin, -1, counted) if name in RELATIVE else self._rise(name, margin, counted)
                )
            elif name == "coverage" and margin is not None and self.outcomes.different_items:
                yield self._coverage(margin)

    def _relative(self, name: str, margin: float, sign: int, counted: UnitValues) -> Iterator[GuardrailResult]:
        """A loss of at most a share of the control's value: treatment - (1 -+ margin) control, and its sign."""
        control, treatment = (counted[self.outcomes.variant == place].values for place in (0, self.place))
        if np.isfinite(control.sum() + treatment.sum()):
            left = difference(control, treatment, 1 - sign * margin)
            yield self._result(name, margin, control, treatment, replace(left, value=sign * left.value))

    def _rise(self, name: str, margin: float, counted: UnitValues) -> Iterator[GuardrailResult]:
        """A rise of a share by at most the margin."""
        both = [counted[self.outcomes.variant == place] for place in (0, self.place)]
        control, treatment = (each.values for each in both)
        if np.isfinite(control.sum() + treatment.sum()):
            rise = difference(control, treatment)
            # without any event the spread would be 0: as if there were one more
            one = sum(float(each.denominator.sum()) ** -2 for each in both if each.denominator is not None)
            error = (rise.standard_error**2 + one) ** 0.5
            yield self._result(
                name, margin, control, treatment, replace(rise, value=margin - rise.value, standard_error=error)
            )

    def _coverage(self, margin: float) -> GuardrailResult:
        """A fall of the number of different items; its error is that of groups, its bound that of their users."""
        control, treatment = (self.outcomes.different_items[place] for place in (0, self.place))
        left = difference(control, treatment, 1 - margin)
        return self._result("coverage", margin, control, treatment, replace(left, units=int(self.pair.sum())))

    def _result(
        self, name: str, margin: float, control: Values, treatment: Values, left: Difference
    ) -> GuardrailResult:
        is_relative = name not in ("errors", "empty")
        ends = confidence_sequence(left, self.rho, self.alpha)
        return GuardrailResult(
            name, self.name, float(control.mean()), float(treatment.mean()), margin, is_relative, *ends
        )


def _effect(found: Difference, rho: float, alpha: float) -> Effect:
    low, high = confidence_sequence(found, rho, alpha)
    fixed_p, fixed_low, fixed_high = welch(found, alpha)
    p = mixture_p(found, rho)
    return Effect(found.value, found.standard_error, low, high, p, fixed_low, fixed_high, fixed_p)


def _preference(clicks: NDArray[np.int64], experiment: Experiment) -> PreferenceResult | None:
    """The mean preference of users with a click; None with too few of them."""
    found = preference(clicks)
    users = len(found.shares)
    if users < FEWEST:
        return None
    error = float(found.shares.std(ddof=1)) / users**0.5
    mean = Difference(float(found.shares.mean()), error, users, users - 1)
    effect = _effect(mean, mixture_rho(experiment.users, experiment.alpha), experiment.alpha)
    return PreferenceResult(effect, users, found.first, found.second, found.tied, found.p_sign)


# --- the verdict -----------------------------------------------------------------------------------------------------


def _verdict(experiment: Experiment, report: ExperimentReport) -> str:
    """One sentence for each variant; only one if nothing can be compared."""
    if report.has_mismatch:
        seen = ", ".join(f"{name} {count:,}" for name, count in zip(report.variants, report.entered, strict=True))
        planned = ", ".join(f"{100 * each.share:.3g} %" for each in experiment.variants)
        p = f"p {min(report.ratio_p, report.ratio_p_sequential):.2g}"
        return f"Don't trust these figures: users fell to {seen}, planned were {planned} ({p}). Find the cause first."
    told = []
    for name, count in zip(report.variants[1:], report.counted[1:], strict=True):
        fewest = min(count, report.counted[0])
        if fewest < FEWEST:
            which = report.variants[0] if report.counted[0] == fewest else name
            closed = f"{how_many(fewest, 'user')} with a closed window"
            told.append(f"Too early for {name}: {which} has {closed}; {FEWEST} are needed.")
        else:
            told.append(_sentence(experiment, report, name))
    return " ".join(told)


def _sentence(experiment: Experiment, report: ExperimentReport, variant: str) -> str:
    metric = experiment.metrics[0]
    first = next((each for each in report.metrics if (each.variant, each.name) == (variant, metric.name)), None)
    if first is None:
        return f"{variant} can't be judged: there is nothing that {metric.name} could be divided by."
    states = {
        state: [each.name for each in report.guardrails if (each.variant, each.state) == (variant, state)]
        for state in ("broken", "open")
    }
    broken = f"; it breaks {', '.join(states['broken'])}" if states["broken"] else ""
    still = f"; not yet sure: {', '.join(states['open'])}" if states["open"] else ""
    direction, told = _told(experiment, report, first.effect)
    if not direction:
        return f"{told} of {variant} in {metric.name}{broken}.{_until(report)}"
    word = "better" if (direction > 0) == (metric.better == "higher") else "worse"
    safe = "; no guardrail is broken" if not broken and not still and report.guardrails else ""
    return f"{variant} is {word}: {metric.name} {told} on {first.control:.4g}{broken}{still}{safe}."


def _verdict_of_preference(experiment: Experiment, report: ExperimentReport, found: PreferenceResult | None) -> str:
    first, second = report.variants
    if found is None:
        return f"Too early: fewer than {FEWEST} users clicked on an interleaved list and have a closed window."
    direction, told = _told(experiment, report, found.effect)
    if not direction:
        return f"{told} between {first} and {second}.{_until(report)}"
    return f"Users prefer {second if direction > 0 else first}: share of clicks {told}."


def _told(experiment: Experiment, report: ExperimentReport, effect: Effect) -> tuple[int, str]:
    """The sign of a clear effect with its figures; 0 if it is not clear."""
    is_fixed = experiment.decide == "end"
    low, high = (effect.fixed_low, effect.fixed_high) if is_fixed else (effect.low, effect.high)
    if is_fixed and not report.is_over:
        return 0, "Nothing is decided before the planned end, and so no difference"
    if low <= 0 <= high:
        return 0, f"No clear difference ({low:+.4g} to {high:+.4g})"
    return (1 if low > 0 else -1), f"{effect.difference:+.4g} ({low:+.4g} to {high:+.4g})"


def _until(report: ExperimentReport) -> str:
    end = f"{datetime.fromtimestamp(report.end / 1e6, UTC):%Y-%m-%d %H:%M} UTC"
    return "" if report.is_over else f" Planned end: {end}."
