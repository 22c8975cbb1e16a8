"""Values, standard errors and leads, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recspec import metrics
from recspec.auto.judging import Judged, lead, of_rows, sign_of, standard_error


def test_auc_by_hand() -> None:
    labels = np.array([True, True, False, False])
    judged = of_rows("auc", np.array([0.8, 0.3, 0.5, 0.3]), labels)
    # 0.8 is above both negatives, 0.3 below one and level with the other: (1 + 1/4) / 2.
    assert judged.value == 0.625
    assert [each.tolist() for each in judged.parts] == [[1.0, 0.25], [0.5, 0.75]]
    # DeLong: var(1, .25) / 2 + var(.5, .75) / 2 = .28125 / 2 + .03125 / 2
    assert judged.error == pytest.approx(math.sqrt(0.15625))


def test_auc_equals_the_metric_with_ties() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 500).astype(float), rng.random(500) < 0.3
    assert of_rows("auc", scores, labels).value == pytest.approx(metrics.auc(scores, labels))


def test_the_error_of_auc_is_that_of_repeated_draws() -> None:
    rng = np.random.default_rng(1)
    labels = np.arange(400) < 120
    drawn = [of_rows("auc", rng.normal(labels * 0.8, 1.0), labels) for _ in range(300)]
    spread = np.std([each.value for each in drawn])
    assert np.mean([each.error for each in drawn]) == pytest.approx(spread, rel=0.15)


def test_log_loss_by_hand() -> None:
    judged = of_rows("log_loss", np.array([0.0, math.log(3)]), np.array([True, True]))
    assert judged.value == pytest.approx((math.log(2) + math.log(4 / 3)) / 2)
    assert judged.error == pytest.approx(abs(math.log(2) - math.log(4 / 3)) / 2)


def test_a_lead_over_the_same_rows_is_surer_than_two_errors() -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(size=1000)
    ours, theirs = (Judged(float(each.mean()), (each,)) for each in (base + 0.1, base))
    by, error = lead(ours, theirs)
    assert by == pytest.approx(0.1)
    assert error == pytest.approx(0.0, abs=1e-12)
    assert ours.error > 0.03


def test_errors_that_cannot_be_known_are_nan() -> None:
    assert math.isnan(standard_error((np.array([1.0]),)))
    assert math.isnan(lead(Judged(1.0, (np.zeros(3),)), Judged(0.5, (np.zeros(4),)))[1])


def test_signs() -> None:
    assert (sign_of("rows/log_loss"), sign_of("full/ndcg@10")) == (-1.0, 1.0)
