"""Whole numbers that are ids, by label rates that are drawn for each value or rise with it."""

from __future__ import annotations

import numpy as np
import pytest

from recspec.datasets.table_checks import lack_order


@pytest.mark.parametrize("seed", range(5))
def test_values_with_their_own_rates_are_ids_and_rising_rates_are_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(4, 30, 500).astype(np.float64)
    rates = rng.beta(1, 3, 500)
    assert lack_order(counts, rng.binomial(counts.astype(int), rates).astype(np.float64))
    assert not lack_order(counts, rng.binomial(counts.astype(int), np.sort(rates)).astype(np.float64))
    assert not lack_order(counts, rng.binomial(counts.astype(int), 0.2).astype(np.float64))  # rates differ by chance
    assert not lack_order(counts, np.zeros(500))
