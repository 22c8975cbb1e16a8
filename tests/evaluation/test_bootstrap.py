"""Bootstrap intervals and paired tests: by hand, and against known distributions."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from recspec.base.errors import SettingsError
from recspec.evaluation import bootstrap
from recspec.evaluation.bootstrap import compare, compare_values, favours, interval, intervals, p_of_flips, p_of_t
from recspec.evaluation.report import Comparison, Evaluation, Report
from recspec.evaluation.slices import evaluate_rows

Draw = Callable[[np.random.Generator], Evaluation]
POSITIONS = 1 / np.log2(np.arange(2, 12))


def hits(rng: np.random.Generator) -> Evaluation:
    """50 users, of whom 10 % have a hit among ten."""
    return evaluation([*(rng.random(50) < 0.1)], "hit_rate@10")


def gains(rng: np.random.Generator) -> Evaluation:
    """The NDCG of such users, each hit at a random position."""
    return evaluation([*(rng.choice(POSITIONS, 50) * (rng.random(50) < 0.1))])


def ten_rows_each(rng: np.random.Generator) -> Evaluation:
    """The rows of 50 users, 10 % positive, scored .8 standard deviations higher."""
    labels = rng.random(500) < 0.1
    return evaluate_rows(rng.normal(size=500) + 0.8 * labels, labels)


def one_row_each(rng: np.random.Generator) -> Evaluation:
    """50 rows, 10 % positive: about five positives."""
    labels = np.append(True, rng.random(49) < 0.1)
    return evaluate_rows(rng.normal(size=50) + 0.8 * labels, labels)


AREA = 0.5 * (1 + math.erf(0.4))


def evaluation(values: list[float], metric: str = "ndcg@10") -> Evaluation:
    found = np.array(values)
    return Evaluation({"full": {metric: float(found.mean())}}, values={"full": {metric: found}})


@pytest.mark.parametrize(
    ("t", "degrees", "wanted"),
    [(2.228, 10, 0.05), (12.706, 1, 0.05), (2.0, 60, 0.0500), (1.96, 10**6, 0.05), (0, 5, 1)],
)
def test_students_t_by_its_tables(t: float, degrees: int, wanted: float) -> None:
    assert p_of_t(t, 1.0, degrees) == pytest.approx(wanted, abs=5e-4)
    assert p_of_t(-t, 1.0, degrees) == p_of_t(t, 1.0, degrees)


def test_tests_without_differences_or_degrees() -> None:
    assert p_of_t(0.0, 0.0, 3) == 1.0
    assert p_of_t(0.5, 0.0, 3) == 0.0
    assert math.isnan(p_of_t(0.5, math.nan, 0))
    assert p_of_flips(np.zeros(5), 100) == 1.0
    one = compare_values(np.array([0.5]), np.array([0.75]), 10)
    assert (one.difference, one.p_permutation) == (0.25, 1.0)
    assert one.low < 0.25 == pytest.approx(one.high, abs=0.01)  # one user proves nothing
    assert math.isnan(one.standard_error)
    assert not one.is_significant


def test_flips_of_three_equal_differences_by_hand() -> None:
    """Of 8 sign patterns two have a sum as far from 0: p is 1/4."""
    assert p_of_flips(np.ones(3), 20_000) == pytest.approx(0.25, abs=0.015)


def test_the_interval_of_a_mean_is_about_two_standard_errors_wide() -> None:
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = interval(values, 2_000, seed=1)
    error = values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    assert interval(values, 50, seed=1) == interval(values, 50, seed=1) != interval(values, 50, seed=2)
    assert interval(np.full(7, 0.5), 20) == (0.5, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "protocol", "metric", "true", "most"),
    [
        (hits, "full", "hit_rate@10", 0.1, 0.97),
        (gains, "full", "ndcg@10", 0.1 * POSITIONS.mean(), 0.97),
        (ten_rows_each, "rows", "auc", AREA, 0.97),
        (one_row_each, "rows", "auc", AREA, 0.985),  # wide rather than narrow
    ],
)
def test_intervals_cover_the_truth_at_50_users(
    draw: Draw, protocol: str, metric: str, true: float, most: float
) -> None:
    """Of 2,000 samples, 95 % should; the percentile interval reaches .965, .891, .941 and .835."""
    rng = np.random.default_rng(0)
    found = [intervals(draw(rng), 1_000)[protocol][metric] for _ in range(2_000)]
    assert 0.93 < np.mean([each.low <= true <= each.high for each in found]) < most


def test_a_difference_of_one_user_is_within_chance() -> None:
    one = np.zeros(50)
    one[7] = 1.0
    found = compare_values(np.zeros(50), one, 1_000)
    assert found.low < 0 < found.high


def test_the_interval_of_a_perfect_auc_is_no_point() -> None:
    labels = np.arange(20) < 4
    found = evaluate_rows(labels.astype(np.float32), labels)
    intervals_ = intervals(found, 1_000)["rows"]
    assert intervals_["auc"].value == 1.0
    assert 0.5 < intervals_["auc"].low < 0.95
    assert intervals_["auc"].high == pytest.approx(1, abs=0.01)
    assert "log_loss" not in intervals_
    assert Report("test", found, intervals={"rows": intervals_}).notes == (
        "log loss has no interval: fewer than 100 rows may lack the rare large losses",
    )


def test_bundles_keep_the_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(0, 1, 20_000)
    whole = interval(values, 400)
    monkeypatch.setattr(bootstrap, "MOST_GROUPS", 500)
    monkeypatch.setattr(bootstrap, "DRAWN", 999)
    bundled = interval(values, 400)
    assert bundled[1] - bundled[0] == pytest.approx(whole[1] - whole[0], rel=0.2)


def test_paired_comparisons_see_what_unpaired_ones_do_not() -> None:
    rng = np.random.default_rng(0)
    ours = rng.random(300)
    theirs = ours + rng.normal(0.01, 0.05, 300)
    found = compare(evaluation([*ours]), evaluation([*theirs]))["full"]["ndcg@10"]
    differences = theirs - ours
    assert found.difference == pytest.approx(differences.mean())
    assert found.standard_error == pytest.approx(differences.std(ddof=1) / math.sqrt(300))
    assert found.low < found.difference < found.high
    assert found.p_value == pytest.approx(found.p_permutation, abs=0.02)
    assert favours("ndcg@10", found) == "theirs"
    assert favours("log_loss", found) == "ours"
    same = compare(evaluation([*ours]), evaluation([*ours]))["full"]["ndcg@10"]
    assert (same.difference, same.p_value, same.p_permutation, favours("ndcg@10", same)) == (0.0, 1.0, 1.0, "neither")


def test_other_groups_are_refused_and_other_metrics_left_out() -> None:
    with pytest.raises(SettingsError, match="full/ndcg@10: 2 groups or rows against 3; a paired test needs"):
        compare(evaluation([0, 1]), evaluation([0, 1, 1]))
    assert compare(evaluation([0, 1]), evaluation([0, 1], "mrr")) == {}


def test_intervals_of_every_mean() -> None:
    found = intervals(evaluation([0.0, 1.0, 1.0, 0.0]), 200)["full"]["ndcg@10"]
    bounded = intervals(evaluation([0.0] * 50), 1_000)["full"]["ndcg@10"]  # Jeffreys: 0 to .0493 without the lower end
    assert bounded.low < 0.001
    assert bounded.high == pytest.approx(0.049, abs=0.008)
    assert found.value == 0.5
    assert 0 <= found.low < 0.5 < found.high <= 1
    assert isinstance(compare_values(np.zeros(2), np.ones(2), 5), Comparison)
