"""Columns that alone order the labels: on columns whose AUC is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from recspec.data.storage import Ragged, sample_rows, telling

LABELS = np.arange(400) % 4 == 0
NOISE = np.random.default_rng(0).permutation(400).astype(np.float64)


@pytest.mark.parametrize(
    ("column", "is_told"),
    [
        (np.where(LABELS, 900 + NOISE, NOISE), True),
        (np.where(LABELS, -1 - NOISE, NOISE), True),  # the other way round
        (np.where(LABELS, 5, NOISE % 5), True),  # a category that only positives have
        (np.where(LABELS, 500, np.where(NOISE < 200, NOISE, 600 + NOISE)), True),  # a range in the middle
        (np.where(LABELS, np.nan, NOISE), True),  # missing where positive
        (NOISE, False),
        (NOISE % 7, False),
        (np.arange(400), False),  # each row its own value
        (np.where(LABELS & (NOISE < 200), 1, 0), False),  # AUC .75
    ],
)
def test_a_column_that_orders_the_labels_is_told(column: NDArray[np.float64], is_told: bool) -> None:
    found = telling({"a": column, "noise": NOISE}, LABELS)
    assert [*found] == ["a"] * is_told
    assert all(auc >= 0.99 for auc in found.values())


def test_the_length_of_a_list_counts() -> None:
    lengths = np.where(LABELS, 3, 0)
    lists = Ragged(np.zeros(lengths.sum(), np.int32), np.append(0, np.cumsum(lengths)))
    assert telling({"events": lists}, LABELS) == {"events": 1.0}


@pytest.mark.parametrize("labels", [np.zeros(400, bool), np.arange(400) < 29, np.arange(400) >= 29])
def test_few_rows_of_a_class_tell_nothing(labels: NDArray[np.bool_]) -> None:
    assert telling({"a": labels.astype(np.float64)}, labels) == {}


def test_many_columns_are_judged_by_fewer_rows() -> None:
    assert (sample_rows(1), sample_rows(3_000), sample_rows(10**9)) == (32_768, 698, 1)
