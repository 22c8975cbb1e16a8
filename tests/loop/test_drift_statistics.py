"""Shifts of distributions: cases by hand, and what chance alone does."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recspec.loop.statistics import (
    LEAST,
    CalibrationDrift,
    PopularityBins,
    ks_distance,
    null_quantile,
    psi,
    shift_of_categories,
    shift_of_counts,
    shift_of_numbers,
)


def test_psi_by_hand() -> None:
    assert psi(np.array([1, 2, 3, 4]), np.array([15, 25, 25, 35])) == pytest.approx(0.047223, abs=5e-7)


def test_an_empty_bin_counts_as_half_a_value_and_one_that_nobody_has_as_none() -> None:
    # p = (.5, .5), q = (1, .5 / 100): .5 ln 2 taken twice with its sign, by hand
    expected = (0.5 - 1) * math.log(0.5 / 1) + (0.5 - 0.005) * math.log(0.5 / 0.005)
    assert psi(np.array([50, 50, 0]), np.array([100, 0, 0])) == pytest.approx(expected)
    assert math.isnan(psi(np.array([1, 2]), np.array([0, 0])))
    assert not shift_of_counts("a", "number", np.array([1, 2]), np.array([0, 0])).flagged


def test_the_null_quantile_is_that_of_simulated_samples() -> None:
    rng = np.random.default_rng(0)
    draws = rng.multinomial(10_000, np.full(10, 0.1), (2, 4_000))
    values = [psi(*pair) for pair in draws.transpose(1, 0, 2)]
    formula = null_quantile(10_000, 10_000, 10)
    assert formula == pytest.approx(0.00433, abs=5e-6)
    # of 4,000 draws the 99 % quantile has a standard error of about 2.5 %
    assert np.quantile(values, 0.99) == pytest.approx(formula, rel=0.08)


def test_a_shift_is_flagged_above_the_quantile_and_above_a_tenth_alone() -> None:
    before, large = np.array([5_000, 5_000]), np.array([8_000, 2_000])
    assert shift_of_counts("large and certain", "number", before, large).flagged
    certain = shift_of_counts("small and certain", "number", before, np.array([5_500, 4_500]))
    assert certain.limit < certain.psi < LEAST
    assert not certain.flagged
    by_chance = shift_of_counts("large and by chance", "number", before, np.array([8, 2]))
    assert LEAST < by_chance.psi < by_chance.limit
    assert not by_chance.flagged


def test_ks_by_hand() -> None:
    assert ks_distance(np.array([1.0, 2, 3, 4]), np.array([3.0, 4, 5, 6])) == 0.5
    assert ks_distance(np.array([1.0, 1, 1]), np.array([1.0])) == 0.0
    assert math.isnan(ks_distance(np.array([]), np.array([1.0])))


def test_numbers_of_one_distribution_do_not_drift_and_moved_ones_do() -> None:
    rng = np.random.default_rng(0)
    before = rng.normal(size=5_000)
    same = shift_of_numbers("x", "number", before, rng.normal(size=5_000))
    assert same.psi < same.limit
    moved = shift_of_numbers("x", "number", before, rng.normal(0.5, 1, 5_000))
    assert moved.flagged
    assert moved.distance == pytest.approx(2 * 0.5987 - 1, abs=0.03)  # 2 Φ(.25) - 1
    constant = shift_of_numbers("x", "number", np.zeros(500), np.array([0.0, np.nan, np.inf] * 200))
    assert (constant.psi, constant.now, constant.flagged) == (0.0, 200, False)


def test_categories_beyond_the_most_frequent_are_one_bin() -> None:
    before = np.repeat(np.arange(1, 101), np.arange(100, 0, -1))
    found = shift_of_categories("c", "category", before, before, (0.0, 0.25))
    assert (found.psi, found.unknown, found.unknown_before) == (0.0, 0.25, 0.0)
    assert found.limit == pytest.approx(null_quantile(5_050, 5_050, 20))
    assert shift_of_categories("c", "category", before, np.full(500, 100)).flagged


def test_items_that_were_popular_by_chance_do_not_seem_to_fall() -> None:
    rng = np.random.default_rng(0)
    items = 2_000
    first, second, now = (np.bincount(rng.integers(0, items, 2_000), minlength=items) for _ in range(3))
    found = PopularityBins.of(first, second).shift(now)
    assert found.psi < found.limit
    naive = PopularityBins.of(first, first).shift(now)
    assert naive.flagged, "the same events on both sides mistake luck for popularity"


def test_a_tenth_of_the_events_is_in_each_bin_of_popularity() -> None:
    counts = np.arange(1_000)
    bins = PopularityBins.of(counts, counts)
    assert bins.counts / counts.sum() == pytest.approx(np.full(10, 0.1), abs=0.002)
    assert bins.bin_of[-1] == 0
    assert bins.bin_of[0] == 9


def test_calibration_by_hand() -> None:
    chances, labels = np.array([0.2, 0.4, 0.6, 0.8]), np.array([0.0, 1, 0, 1])
    found = CalibrationDrift.of(chances, labels, np.array([0, 0, 1, 1]))
    assert found is not None
    assert (found.predicted, found.observed, found.ratio) == (0.5, 0.5, 1.0)
    # sums of the two answers are (.6, 1) and (1.4, 1): values .6 and 1.4, whose mean has the error .4
    assert found.low == pytest.approx(math.exp(-1.959964 * 0.4))
    assert found.high == pytest.approx(math.exp(1.959964 * 0.4))
    assert not found.flagged
    assert CalibrationDrift.of(chances, np.zeros(4), np.array([0, 0, 1, 1])) is None


def test_the_interval_of_calibration_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    holds = 0
    for _ in range(400):
        chances = np.repeat(rng.uniform(0.05, 0.4, 150), 4)
        found = CalibrationDrift.of(chances, (rng.random(600) < chances).astype(float), np.repeat(np.arange(150), 4))
        assert found is not None
        holds += found.low <= 1 <= found.high
    assert holds / 400 == pytest.approx(0.95, abs=0.035)
