"""The report of an experiment: figures against plain NumPy, guardrails, verdicts, and experiments without effect."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from recspec.loop import Experiment, ExperimentReport, Journal, analyse, experiment_report, read_outcomes
from recspec.loop.experiment_report import FEWEST, LOOKS
from recspec.loop.outcomes import GROUPS, Counted, Outcomes
from recspec.loop.statistics import UnitValues, Values, mixture_bound, mixture_rho
from tests.loop.shop_of_experiments import experiment, simulated

NOTHING = {"errors": None, "empty": None, "latency": None, "coverage": None}


def plain(values: Values, before: Values | None = None) -> Counted:
    return Counted(UnitValues(values), UnitValues(np.zeros(len(values)) if before is None else before))


def of(control: Values, treatment: Values, **more: object) -> Outcomes:
    """Outcomes of one metric, the users of both variants in turn."""
    variant = np.arange(len(control) + len(treatment)) % 2
    values = np.empty(len(variant))
    values[variant == 0], values[variant == 1] = control, treatment
    return Outcomes(variant, variant, {"clicks": plain(values)}, **more)  # type: ignore[arg-type]


def one(**changes: object) -> Experiment:
    metrics = {"metrics": [{"name": "clicks", "event": "click"}], "guardrails": NOTHING}
    return experiment(**(metrics | changes))


def normal(mean: float, seed: int, count: int = 400) -> Values:
    drawn = np.random.default_rng(seed).normal(size=count)
    return mean + (drawn - drawn.mean()) / drawn.std(ddof=1)


BEFORE, AFTER = one().end_us - 1, one().end_us


def test_a_metric_has_its_difference_its_interval_and_the_fixed_test() -> None:
    """Two means of 400 users with a standard deviation of 1 each: the standard error is sqrt(2 / 400)."""
    report = analyse(one(), of(normal(1, 1), normal(1.5, 2)), BEFORE)
    (found,) = report.metrics
    assert (found.name, found.variant) == ("clicks", "new")
    assert (found.control, found.treatment) == pytest.approx((1, 1.5))
    error, rho = math.sqrt(2 / 400), mixture_rho(1_000, 0.05)
    assert found.effect == found.plain
    assert found.effect.standard_error == pytest.approx(error)
    half = error * mixture_bound(800, rho, 0.05) / math.sqrt(800)
    assert (found.effect.low, found.effect.high) == pytest.approx((0.5 - half, 0.5 + half))
    assert found.effect.fixed_high - found.effect.fixed_low == pytest.approx(2 * 1.963 * error, rel=1e-3)
    assert found.effect.p < 1e-6
    assert report.counted == report.entered == (400, 400)
    assert (report.ratio_p, report.has_mismatch) == (1, False)


def test_several_variants_share_the_false_alarms() -> None:
    variants = [{"name": name, "share": 1 / 3} for name in "abc"]
    variant = np.arange(900) % 3
    values = np.random.default_rng(3).normal(size=900)
    outcomes = Outcomes(variant, variant, {"clicks": plain(values)})
    report = analyse(one(variants=variants), outcomes, AFTER)
    assert [each.variant for each in report.metrics] == ["b", "c"]
    first, rho = report.metrics[0].effect, mixture_rho(1_000 * 2 / 3, 0.025)
    half = first.standard_error * mixture_bound(600, rho, 0.025) / math.sqrt(600)
    assert first.high - first.difference == pytest.approx(half)
    assert report.verdict.count("No clear difference") == 2


def test_the_past_reduces_the_variance_of_the_effect_that_counts() -> None:
    rng = np.random.default_rng(4)
    variant, past = np.arange(2_000) % 2, rng.normal(size=2_000)
    values = past + 0.1 * rng.normal(size=2_000) + 0.05 * variant
    outcomes = Outcomes(variant, variant, {"clicks": plain(values, past)})
    (found,) = analyse(one(), outcomes, AFTER).metrics
    assert found.cuped is not None
    assert found.effect is found.cuped
    assert found.variance_left == pytest.approx(0.01, abs=0.002)
    assert found.effect.low > 0 > found.plain.low
    (without,) = analyse(one(cuped=False), outcomes, AFTER).metrics
    assert (without.cuped, without.variance_left) == (None, 1)


def test_looks_along_the_users_end_with_the_effect_itself() -> None:
    report = analyse(one(), of(normal(1, 1, 600), normal(1.1, 2, 600)), AFTER)
    users = [each.users for each in report.looks]
    assert users == sorted(users)
    assert (users[0], users[-1], len(users)) == (2 * FEWEST, 1_200, LOOKS)
    last, effect = report.looks[-1], report.metrics[0].effect
    assert (last.difference, last.low, last.high) == (effect.difference, effect.low, effect.high)


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("means", "changes", "at", "expected"),
    [
        ((1, 1.5), {}, BEFORE, "new is better: clicks +0.5 (+0.28"),
        ((1.5, 1), {}, BEFORE, "new is worse: clicks -0.5 (-0.7"),
        ((1, 1.01), {}, BEFORE, " of new in clicks. Planned end: 2026-12-06 00:00 UTC."),
        ((1, 1.01), {}, AFTER, " of new in clicks."),
        ((1, 1.5), {"decide": "end"}, BEFORE, "Nothing is decided before the planned end, and so no difference of"),
        ((1, 1.15), {"decide": "end"}, AFTER, "new is better: clicks +0.15 (+0.01"),
        ((1, 1.15), {}, AFTER, "No clear difference (-0."),
    ],
)
def test_the_verdict_says_what_is_sure(
    means: tuple[float, float], changes: dict[str, object], at: int, expected: str
) -> None:
    """A difference of .15 is significant at one planned look, p .034, and not at any look."""
    verdict = analyse(one(**changes), of(normal(means[0], 1), normal(means[1], 2)), at).verdict
    assert expected in verdict
    if expected.startswith(" of"):
        assert verdict.endswith(expected)


def test_where_less_is_better_a_fall_is_a_gain() -> None:
    metrics = [{"name": "clicks", "event": "return", "better": "lower"}]
    verdict = analyse(one(metrics=metrics), of(normal(1.5, 1), normal(1, 2)), AFTER).verdict
    assert verdict.startswith("new is better: clicks -0.5")


def test_nothing_is_said_of_few_users() -> None:
    report = analyse(one(), of(normal(1, 1, 99), normal(9, 2, 99)), AFTER)
    assert report.verdict == "Too early for new: control has 99 users with a closed window; 100 are needed."
    assert (report.metrics, report.looks, report.guardrails) == ((), (), ())
    empty = Outcomes(np.array([1]), np.zeros(0, int), {"clicks": plain(np.zeros(0))})
    early = analyse(one(), empty, BEFORE)
    assert early.verdict.startswith("Too early for new: control has 0 users")
    assert early.notes == (), "no window is closed in which an event could be missed"


def test_a_wrong_sample_ratio_forbids_any_verdict() -> None:
    entered = np.r_[np.zeros(5_000, int), np.ones(5_700, int)]
    entered = np.random.default_rng(5).permutation(entered)
    report = analyse(one(), replace(of(normal(1, 1), normal(9, 2)), entered=entered), BEFORE)
    assert report.has_mismatch
    told = "Don't trust these figures: users fell to control 5,000, new 5,700, planned were 50 %, 50 % (p "
    assert report.verdict.startswith(told)
    slight = np.random.default_rng(5).permutation(np.r_[np.zeros(2_000, int), np.ones(2_225, int)])
    at_a_peek, at_the_end = (
        analyse(one(), replace(of(normal(1, 1), normal(1, 2)), entered=slight), at) for at in (BEFORE, AFTER)
    )
    assert at_a_peek.ratio_p < 0.001 < at_a_peek.ratio_p_sequential
    assert (at_a_peek.has_mismatch, at_the_end.has_mismatch) == (False, True)


def test_a_ratio_without_answers_and_a_wrong_event_are_told() -> None:
    outcomes = of(normal(1, 1), normal(1, 2))
    zeros = np.zeros(800)
    empty = {"clicks": Counted(UnitValues(zeros, zeros), UnitValues(zeros, zeros))}
    report = analyse(one(guardrails={}), replace(outcomes, metrics=empty), AFTER)
    assert report.verdict == "new can't be judged: there is nothing that clicks could be divided by."
    assert report.notes == (
        "clicks: no event of type 'click' was counted; is that what the events are called?",
        "guardrails that the journal can't tell yet: 'coverage', 'empty', 'errors', 'latency'",
    )


# --- guardrails ------------------------------------------------------------------------------------------------------


def share(control: float, treatment: float, answers: float = 5.0) -> UnitValues:
    """A share of answers, the same for every user of a variant."""
    return UnitValues(np.where(np.arange(800) % 2, treatment, control) * answers, np.full(800, answers))


@pytest.mark.parametrize(
    ("name", "control", "treatment", "state"),
    [
        ("errors", 0.0, 0.0, "holds"),
        ("errors", 0.0, 0.02, "broken"),
        ("empty", 0.5, 0.505, "holds"),
        ("empty", 0.2, 0.25, "broken"),
        ("latency", 10.0, 10.9, "holds"),
        ("latency", 10.0, 11.1, "broken"),
    ],
)
def test_a_guardrail_holds_within_its_margin(name: str, control: float, treatment: float, state: str) -> None:
    outcomes = of(normal(1, 1), normal(2, 2), guardrails={name: share(control, treatment)})
    report = analyse(one(guardrails=NOTHING | {name: 0.01 if name != "latency" else 0.1}), outcomes, AFTER)
    (found,) = report.guardrails
    assert (found.name, found.state, found.is_relative) == (name, state, name == "latency")
    assert (found.control, found.treatment) == pytest.approx((control, treatment))
    assert report.verdict.endswith("; no guardrail is broken." if state == "holds" else f"; it breaks {name}.")


def test_no_error_among_few_answers_proves_nothing() -> None:
    """As if each variant had one error more: the standard error is sqrt(2) / answers."""
    outcomes = of(normal(1, 1), normal(2, 2), guardrails={"errors": share(0, 0, 0.5)})
    report = analyse(one(guardrails=NOTHING | {"errors": 0.01}), outcomes, AFTER)
    (found,) = report.guardrails
    assert found.state == "open"
    multiplier = mixture_bound(800, mixture_rho(1_000, 0.05), 0.05) / math.sqrt(800)
    assert found.high - found.low == pytest.approx(2 * multiplier * math.sqrt(2) / 200)
    assert report.verdict.endswith("; not yet sure: errors.")


def test_coverage_may_not_fall_by_more_than_its_margin() -> None:
    rng = np.random.default_rng(6)
    wide, narrow = (mean + rng.normal(size=GROUPS) for mean in (100, 50))
    for treatment, state in ((wide + 1, "holds"), (narrow, "broken")):
        outcomes = of(normal(1, 1), normal(2, 2), different_items=(wide, treatment), answers=200)
        (found,) = analyse(one(guardrails=NOTHING | {"coverage": 0.1}), outcomes, AFTER).guardrails
        assert (found.name, found.state, found.is_relative) == ("coverage", state, True)


@pytest.mark.parametrize(("better", "lost"), [("higher", 0.9), ("lower", 1.1)])
def test_a_metric_with_a_margin_is_a_guardrail(better: str, lost: float) -> None:
    metrics = [{"name": "clicks", "event": "click"}, {"name": "other", "event": "x", "margin": 0.05, "better": better}]
    for factor, state in ((1.0, "holds"), (lost, "broken")):
        outcomes = of(normal(1, 1), normal(2, 2))
        values = np.where(np.arange(800) % 2, factor, 1) + 0.01 * np.random.default_rng(7).normal(size=800)
        outcomes = replace(outcomes, metrics={**outcomes.metrics, "other": plain(values)})
        (found,) = analyse(one(metrics=metrics), outcomes, AFTER).guardrails
        assert (found.name, found.state) == ("other", state)


# --- interleaving ----------------------------------------------------------------------------------------------------


def test_interleaving_says_which_model_is_preferred() -> None:
    clicks = np.tile([[1, 3], [0, 1], [2, 1], [0, 0]], (200, 1))
    nobody = np.zeros(len(clicks), int)
    report = analyse(one(interleave=True), Outcomes(nobody, nobody, {}, clicks=clicks), AFTER)
    found = report.preference
    assert found is not None
    assert (found.users, found.first, found.second, found.tied) == (600, 200, 400, 0)
    assert found.effect.difference == pytest.approx((0.5 + 1 - 1 / 3) / 3)
    assert found.p_sign < 1e-6
    assert report.verdict.startswith("Users prefer new: share of clicks +0.3889 (+0.")
    other = analyse(one(interleave=True), Outcomes(nobody, nobody, {}, clicks=clicks[:, ::-1]), AFTER)
    assert other.verdict.startswith("Users prefer control: share of clicks -0.3889")
    none = analyse(one(interleave=True), Outcomes(nobody, nobody, {}, clicks=clicks % 2 * 0 + [[1, 1]]), BEFORE)
    assert "No clear difference (+0 to +0) between control and new. Planned end" in none.verdict
    few = analyse(one(interleave=True), Outcomes(nobody, nobody, {}, clicks=np.zeros((5, 2), int)), BEFORE)
    assert few.preference is None
    assert few.verdict.startswith("Too early: fewer than 100 users clicked on an interleaved list")


# --- from the journal ------------------------------------------------------------------------------------------------


def reported(url: str, found: Experiment, lift: float, users: int = 2_000) -> ExperimentReport:
    with Journal(url) as journal:
        simulated(journal, found, users, lift)
        return analyse(found, read_outcomes(journal, found, found.end_us), found.end_us)


def test_a_shop_with_a_better_variant_is_told_so(url: str) -> None:
    report = reported(url, experiment(users=2_000), 1.5)
    assert report.verdict.startswith("new is better: clicks +0.")
    assert [each.name for each in report.metrics] == ["clicks", "ctr"]
    assert report.metrics[0].variance_left < 0.9
    assert {each.name: each.state for each in report.guardrails}["coverage"] == "holds"
    again = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert again["guardrails"][0]["state"] == report.guardrails[0].state
    assert (again["is_over"], again["has_mismatch"]) == (True, False)


def test_a_shop_with_interleaved_lists_prefers_the_better_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    url = f"sqlite:///{tmp_path_factory.mktemp('interleaved') / 'journal.db'}"
    report = reported(url, experiment(interleave=True, users=1_000), 1.5, users=1_000)
    assert report.verdict.startswith("Users prefer new: share of clicks +0.")
    assert report.entered == (1_000,)


def test_who_peeks_at_reports_of_equal_variants_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A/A: 100 experiments, 10 looks at each whole report. `benchmarks/stress/ab_tests.py` has 1,000 with 20."""
    monkeypatch.setattr(experiment_report, "LOOKS", 1)
    monkeypatch.setattr(experiment_report, "RATIO_LOOKS", 2)
    rng, alarms = np.random.default_rng(9), 0
    for _ in range(100):
        variant, liking = np.arange(2_000) % 2, rng.gamma(2, 0.5, 2_000)
        values, before = (rng.poisson(liking).astype(float) for _ in range(2))
        for end in range(200, 2_001, 200):
            outcomes = Outcomes(variant[:end], variant[:end], {"clicks": plain(values[:end], before[:end])})
            report = analyse(one(users=2_000), outcomes, BEFORE)
            if "better" in report.verdict or "worse" in report.verdict:
                alarms += 1
                break
    assert alarms <= 0.05 * 100
