"""One metric of an evaluation, its standard error and a lead, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recspec.evaluation import Evaluation
from recspec.training.search.state import Judged, sign_of


def of_values(metric: str, *values: float) -> Judged:
    protocol, name = metric.split("/")
    each = np.array(values)
    return Judged(metric, Evaluation({protocol: {name: float(each.mean())}}, values={protocol: {name: each}}))


def test_value_and_error_by_hand() -> None:
    judged = of_values("full/ndcg@10", 0.0, 1.0, 0.0, 1.0)
    assert judged.value == 0.5
    assert judged.error == pytest.approx(math.sqrt((4 * 0.25 / 3) / 4))


def test_a_lead_over_the_same_users_is_surer_than_two_errors() -> None:
    ours, theirs = of_values("full/ndcg@10", 0.1, 0.9, 0.5), of_values("full/ndcg@10", 0.0, 0.8, 0.4)
    by, error = ours.lead(theirs)
    assert by == pytest.approx(0.1)
    assert error == pytest.approx(0.0, abs=1e-12)
    assert ours.error > 0.2


def test_less_log_loss_leads() -> None:
    by, error = of_values("rows/log_loss", 0.2, 0.3).lead(of_values("rows/log_loss", 0.4, 0.7))
    assert by == pytest.approx(0.3)
    assert error == pytest.approx(0.1)


def test_errors_that_cannot_be_known_are_nan() -> None:
    assert math.isnan(of_values("full/ndcg@10", 0.5).error)
    assert math.isnan(of_values("full/mrr", 0.5, 0.5).lead(of_values("full/mrr", 0.5, 0.5, 0.5))[1])


def test_signs() -> None:
    assert (sign_of("rows/log_loss"), sign_of("full/ndcg@10")) == (-1.0, 1.0)
