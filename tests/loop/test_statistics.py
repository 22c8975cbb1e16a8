"""Statistics of experiments, against published figures, other libraries, and simulated experiments without effect."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from recspec.loop.statistics import (
    Difference,
    UnitValues,
    Values,
    confidence_sequence,
    cuped,
    difference,
    mixture_bound,
    mixture_p,
    mixture_rho,
    sample_ratio_p,
    sequential_sample_ratio_p,
    sign_p,
    welch,
)

# --- figures of others -----------------------------------------------------------------------------------------------


def test_the_mixture_boundary_is_that_of_confseq() -> None:
    """The values in the tests of gostevehoward/confseq."""
    rho = mixture_rho(100, 0.05)
    assert rho == pytest.approx(12.60056, abs=5e-6)
    assert mixture_bound(100, rho, 0.05) == pytest.approx(30.35209, abs=5e-6)


def test_the_confidence_sequence_is_wider_than_one_planned_look() -> None:
    rho, normal = mixture_rho(1_000, 0.05), stats.norm.ppf(0.975)
    for units, ratio in ((1_000, 1.55), (100, 1.97)):
        low, high = confidence_sequence(Difference(0.3, 0.1, units, units), rho, 0.05)
        assert (high - low) / (2 * normal * 0.1) == pytest.approx(ratio, abs=0.005)
        assert (high + low) / 2 == pytest.approx(0.3)


def test_the_sequential_p_value_of_the_mixture_test() -> None:
    found = Difference(0.01, math.sqrt(0.18 / 1e4), 10_000, 1e4)
    assert mixture_p(found, 0.18 / 1e-4) == pytest.approx(0.243195, abs=5e-7)


@pytest.mark.parametrize(("counts", "p"), [((50_000, 51_000), 0.00165), ((821_588, 815_482), 1.82e-6)])
def test_the_sample_ratio_by_chi_square(counts: tuple[int, int], p: float) -> None:
    assert sample_ratio_p(counts, (0.5, 0.5)) == pytest.approx(p, rel=0.002)
    assert sample_ratio_p(counts, (0.5, 0.5)) == pytest.approx(stats.chisquare(counts).pvalue)


@pytest.mark.parametrize(("counts", "p"), [((5_000, 5_500), 0.00322), ((50_000, 52_000), 5.9e-8)])
def test_the_sequential_sample_ratio_is_that_of_gbstats(counts: tuple[int, int], p: float) -> None:
    """The values of one look in growthbook/growthbook, packages/stats."""
    assert sequential_sample_ratio_p(np.array([counts]), (0.5, 0.5))[0] == pytest.approx(p, rel=0.005)


def test_the_binomial_test_of_preferences() -> None:
    assert sign_p(540, 460) == pytest.approx(0.0124, abs=5e-5)
    assert sign_p(540, 460) == pytest.approx(stats.binomtest(540, 1_000).pvalue)
    assert sign_p(2_023, 1_977) == pytest.approx(0.476767, abs=5e-6)  # `SampleRatio` of tea-tasting 1.14, seed 42
    assert (sign_p(0, 0), sign_p(3, 3), sign_p(0, 1)) == (1, 1, 1)


@pytest.fixture(scope="module")
def users() -> dict[str, Values]:
    """Users of `make_users_data(seed=42, covariates=True)` of tea-tasting 1.14; the last column counts equal users."""
    names = ("variant", "sessions", "orders", "sessions_before", "orders_before")
    rows = np.loadtxt(Path(__file__).parent / "tea_tasting_users.txt", dtype=int)
    return dict(zip(names, np.repeat(rows[:, :-1], rows[:, -1], axis=0).T.astype(float), strict=True))


@pytest.mark.parametrize(
    ("ratio", "before", "expected"),
    [
        (False, False, (0.04269014577177832, -0.010800201598205522, 0.09618049314176216, 0.11773177998716207)),
        (True, False, (0.02330500550889003, -0.0024594336679094504, 0.04906944468568951, 0.07623759978168303)),
        (False, True, (0.05830389260866353, 0.015696510168618664, 0.1009112750487084, 0.007330409808687461)),
        (True, True, (0.03173426303678084, 0.01134447701776042, 0.05212404905580126, 0.002292943842523407)),
    ],
)
def test_means_ratios_and_cuped_are_those_of_tea_tasting(
    users: dict[str, Values], ratio: bool, before: bool, expected: tuple[float, float, float, float]
) -> None:
    """`Mean` and `RatioOfMeans` of tea-tasting 1.14: orders, and orders per session."""
    variant = users["variant"].astype(int)
    own = UnitValues(users["orders"], users["sessions"] if ratio else None)
    past = UnitValues(users["orders_before"], users["sessions_before"] if ratio else None)
    arms = cuped(own, past, variant, 2) if before else [own[variant == place].values for place in (0, 1)]
    found = difference(arms[0], arms[1])
    p, low, high = welch(found, 0.05)
    assert (found.value, low, high, p) == pytest.approx(expected, rel=1e-9)


def test_welch_is_that_of_scipy() -> None:
    rng = np.random.default_rng(1)
    control, treatment = rng.normal(0, 1, 30), rng.normal(0.4, 3, 12)
    expected = stats.ttest_ind(treatment, control, equal_var=False)
    p, low, high = welch(difference(control, treatment), 0.1)
    assert p == pytest.approx(expected.pvalue)
    assert (low, high) == pytest.approx(tuple(expected.confidence_interval(0.9)))


# --- cases by hand ---------------------------------------------------------------------------------------------------


def test_a_difference_by_hand() -> None:
    found = difference(np.array([0.0, 2.0]), np.array([3.0, 5.0, 7.0]))
    assert (found.value, found.units) == (4, 5)
    assert found.standard_error == pytest.approx(math.sqrt(2 / 2 + 4 / 3))
    assert found.freedom == pytest.approx((1 + 4 / 3) ** 2 / (1 + (4 / 3) ** 2 / 2))
    with_margin = difference(np.array([0.0, 2.0]), np.array([3.0, 5.0, 7.0]), 0.5)
    assert with_margin.value == 4.5
    assert with_margin.standard_error == pytest.approx(math.sqrt(0.25 + 4 / 3))


def test_a_ratio_by_hand() -> None:
    """R = 6/4; var = (var N - 2 R cov + R² var D) / (n mean(D)²) with N = 1, 2, 3 and D = 1, 2, 1."""
    ratio = UnitValues(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 1.0]))
    assert ratio.values.mean() == pytest.approx(1.5)
    by_formula = (1 - 2 * 1.5 * 0 + 1.5**2 / 3) / (4 / 3) ** 2
    assert ratio.values.var(ddof=1) == pytest.approx(by_formula)


def test_values_without_spread_or_denominator() -> None:
    nothing = np.zeros(3)
    assert np.isnan(UnitValues(nothing, nothing).values).all()
    none = difference(nothing, nothing)
    assert (none.z, mixture_p(none, 10), *welch(none, 0.05)) == (0, 1, 1, 0, 0)
    sure = difference(nothing, nothing + 1)
    assert (sure.z, mixture_p(sure, 10), welch(sure, 0.05)[0]) == (math.inf, 0, 0)


def test_cuped_leaves_values_alone_without_a_past() -> None:
    variant, own = np.array([0, 1, 0, 1]), UnitValues(np.array([1.0, 2.0, 3.0, 4.0]))
    for past in (UnitValues(np.zeros(4)), UnitValues(np.zeros(4), np.zeros(4)), UnitValues(np.full(4, 7.0))):
        control, treatment = cuped(own, past, variant, 2)
        assert (control.tolist(), treatment.tolist()) == ([1, 3], [2, 4])


def test_cuped_leaves_the_share_of_variance_that_the_past_does_not_explain() -> None:
    rng = np.random.default_rng(2)
    past = rng.normal(size=20_000)
    own, variant = 0.8 * past + rng.normal(0, 0.6, 20_000), rng.integers(2, size=20_000)
    adjusted = cuped(UnitValues(own), UnitValues(past), variant, 2)
    left = difference(*adjusted).standard_error / difference(own[variant == 0], own[variant == 1]).standard_error
    assert left**2 == pytest.approx(1 - np.corrcoef(own, past)[0, 1] ** 2, rel=1e-3)


def test_the_sequential_sample_ratio_keeps_its_lowest_value() -> None:
    looks = np.array([[10, 10], [5_000, 5_500], [50_000, 50_000]])
    first, second, third = sequential_sample_ratio_p(looks, (0.5, 0.5))
    assert first > 0.9
    assert third == second < 0.004
    assert sample_ratio_p((0, 0), (0.5, 0.5)) == 1


@given(
    value=st.floats(-5, 5),
    error=st.floats(0.01, 5),
    units=st.integers(2, 10**7),
    planned=st.integers(2, 10**7),
    alpha=st.floats(0.001, 0.2),
)
def test_p_is_below_alpha_exactly_if_the_interval_excludes_0(
    value: float, error: float, units: int, planned: int, alpha: float
) -> None:
    found, rho = Difference(value, error, units, units), mixture_rho(planned, alpha)
    low, high = confidence_sequence(found, rho, alpha)
    p = mixture_p(found, rho)
    if abs(p - alpha) > 1e-9:
        assert (p < alpha) == (low > 0 or high < 0)


# --- simulated experiments -------------------------------------------------------------------------------------------

EXPERIMENTS, LOOKS, UNITS = 1_000, 20, 100  # units that a variant gets between two looks


def rare_purchases(rng: np.random.Generator, *shape: int) -> Values:
    """A skewed value: one user in five buys, at prices of a long tail."""
    return (rng.random(shape) < 0.2) * rng.lognormal(0, 1, shape)


def looks_of(values: Values) -> tuple[Values, Values, Values]:
    """Means, variances (experiments, looks) and counts (looks,) of an arm, at every look."""
    counts = np.arange(1, LOOKS + 1) * UNITS
    sums, squares = (np.cumsum(each, axis=1)[:, counts - 1] for each in (values, values**2))
    return sums / counts, (squares - sums**2 / counts) / (counts - 1), counts


def test_who_peeks_is_right_with_the_sequence_and_wrong_with_a_z_test() -> None:
    """A/A: 1,000 experiments without effect, looked at 20 times; false alarms at 5 %."""
    rng = np.random.default_rng(41)
    alarms_z, alarms_sequence, alarms_p = 0, 0, 0
    rho = mixture_rho(2 * UNITS * LOOKS, 0.05)
    control, treatment = (looks_of(rare_purchases(rng, EXPERIMENTS, UNITS * LOOKS)) for _ in range(2))
    for each in range(EXPERIMENTS):
        looks = []
        for look, count in enumerate(control[2]):
            error = math.sqrt((control[1][each, look] + treatment[1][each, look]) / count)
            value = treatment[0][each, look] - control[0][each, look]
            looks.append(Difference(value, error, int(2 * count), 2 * count - 2))
        intervals = [confidence_sequence(look, rho, 0.05) for look in looks]
        alarms_z += any(abs(look.z) > 1.959964 for look in looks)
        alarms_sequence += any(low > 0 or high < 0 for low, high in intervals)
        alarms_p += min(mixture_p(look, rho) for look in looks) < 0.05
    assert alarms_z > 200
    assert alarms_sequence == alarms_p
    assert alarms_sequence <= 0.05 * EXPERIMENTS
    assert alarms_sequence > 0  # a test that never alarms would pass the line above


def test_the_sample_ratio_may_be_looked_at_any_time() -> None:
    rng = np.random.default_rng(42)
    steps = rng.binomial(500, 0.5, (EXPERIMENTS, LOOKS)).cumsum(axis=1)
    totals = 500 * np.arange(1, LOOKS + 1)
    looks = [sequential_sample_ratio_p(np.stack([each, totals - each], axis=1), (0.5, 0.5))[-1] for each in steps]
    assert np.mean(np.array(looks) < 0.05) <= 0.05
    skewed = rng.binomial(500, 0.54, (100, LOOKS)).cumsum(axis=1)
    found = [sequential_sample_ratio_p(np.stack([each, totals - each], axis=1), (0.5, 0.5))[-1] for each in skewed]
    assert np.mean(np.array(found) < 0.001) > 0.9


@pytest.mark.parametrize("metric", ["mean", "ratio", "cuped", "cuped ratio"])
def test_intervals_hold_the_true_difference(metric: str) -> None:
    """Welch's 95 % interval in 93 to 97 % of experiments with a true effect of 10 %; the sequence in 95 % or more."""
    rng = np.random.default_rng(43)
    held, held_by_sequence, rho = 0, 0, mixture_rho(800, 0.05)
    for _ in range(EXPERIMENTS):
        variant = np.repeat([0, 1], 400)
        love = rng.gamma(2, 0.5, 800)
        answers, answers_before = (1.0 + rng.poisson(3 * love) for _ in range(2))
        rate = 0.2 * love / (1 + love) * (1 + 0.1 * variant)
        clicks = rng.binomial(answers.astype(int), rate).astype(float)
        before = rng.binomial(answers_before.astype(int), 0.2 * love / (1 + love)).astype(float)
        is_ratio = "ratio" in metric
        own, past = UnitValues(clicks, answers if is_ratio else None), UnitValues(before, answers_before)
        arms = cuped(own, past, variant, 2) if "cuped" in metric else [own[variant == place].values for place in (0, 1)]
        found = difference(*arms)
        truth = 0.1 * (RATE if is_ratio else RATE * ANSWERS)
        _, low, high = welch(found, 0.05)
        held += low <= truth <= high
        low, high = confidence_sequence(found, rho, 0.05)
        held_by_sequence += low <= truth <= high
    assert 0.93 <= held / EXPERIMENTS <= 0.97
    assert held_by_sequence / EXPERIMENTS >= 0.95


def _expected() -> tuple[float, float]:
    """Clicks per answer of the control, and answers per user, as integrals over the gamma distribution of love."""
    love = np.linspace(1e-6, 30, 400_001)
    density = stats.gamma.pdf(love, 2, scale=0.5)
    answers = float(np.trapezoid((1 + 3 * love) * density, love))
    return float(np.trapezoid((1 + 3 * love) * 0.2 * love / (1 + love) * density, love)) / answers, answers


RATE, ANSWERS = _expected()


def test_rows_as_units_would_make_the_error_of_a_ratio_too_small() -> None:
    """Users differ in their rate, so that clicks of one user are not independent of each other."""
    rng = np.random.default_rng(44)
    answers = rng.poisson(10, 5_000) + 1.0
    clicks = rng.binomial(answers.astype(int), rng.beta(0.8, 4, 5_000)).astype(float)
    by_user = UnitValues(clicks, answers).values.std(ddof=1) / math.sqrt(5_000)
    rate = clicks.sum() / answers.sum()
    assert by_user / math.sqrt(rate * (1 - rate) / answers.sum()) > 1.3
