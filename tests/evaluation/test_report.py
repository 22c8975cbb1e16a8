"""The report's verdicts."""

from collections.abc import Mapping

import numpy as np
import pytest

from recspec.evaluation.report import Evaluation, Report
from recspec.evaluation.slices import evaluate_rows


def verdicts(model: Evaluation, baselines: Mapping[str, Evaluation]) -> tuple[str, ...]:
    return Report("test", model, baselines).verdicts


def test_verdicts_know_which_way_is_better_and_keep_silent_when_the_model_wins() -> None:
    model = Evaluation({"rows": {"auc": 0.8, "log_loss": 0.5}})
    better = Evaluation({"rows": {"auc": 0.7, "log_loss": 0.4}})
    (verdict,) = verdicts(model, {"simple": better})
    assert "log_loss 0.4000 against 0.5000" in verdict
    assert verdicts(better, {"simple": Evaluation({"rows": {"auc": 0.6}})}) == ()


def test_a_verdict_without_a_standard_error_claims_no_win() -> None:
    one, other = (Evaluation({"full": {"mrr": mrr}}, values={"full": {"mrr": np.array([mrr])}}) for mrr in (0.2, 0.9))
    assert verdicts(one, {"b": other}) == (
        "full: b is level with the model: mrr 0.9000 against 0.2000 (standard error unknown)",
    )


def test_gauc_is_judged_by_its_standard_error_over_groups() -> None:
    """Of 12 groups of two rows, the baseline orders 7 rightly and the model 6, both in one group."""
    groups, labels = np.repeat(np.arange(12), 2), np.tile([True, False], 12)
    right = np.array([[1] * 6 + [0] * 6, [0] * 5 + [1] * 7], bool)
    model, other = (evaluate_rows(np.where(labels, np.repeat(of, 2), 0.5), labels, groups=groups) for of in right)
    assert model.metrics["rows"]["group_auc"] == pytest.approx(6 / 12)
    assert model.standard_errors["rows"]["group_auc"] == pytest.approx(np.sqrt(0.25 / 11))
    alone = [
        Evaluation({"rows": {"group_auc": of.metrics["rows"]["group_auc"]}}, values=of.values) for of in (model, other)
    ]
    (verdict,) = verdicts(alone[0], {"b": alone[1]})
    errors = 1 / 12 / (np.std(right[1] - right[0].astype(float), ddof=1) / np.sqrt(12))
    told = f"group_auc 0.5833 against 0.5000 ({errors:.1f} standard errors)"
    assert verdict == f"rows: b is level with the model: {told}"


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        # differences .2, .1, .3, .2: mean .2, standard error .0816 / 2
        ([0.3, 0.3, 0.6, 0.6], "full: b beats the model: mrr 0.4500 against 0.2500 (4.9 standard errors)"),
        # differences .3, -.2, .1, 0: mean .05, standard error .208 / 2
        ([0.4, 0.0, 0.4, 0.4], "full: b is level with the model: mrr 0.3000 against 0.2500 (0.5 standard errors)"),
    ],
)
def test_verdicts_weigh_the_difference_by_its_standard_error_over_the_groups(theirs: list[float], told: str) -> None:
    ours, other = (
        Evaluation({"full": {"mrr": float(np.mean(of))}}, values={"full": {"mrr": np.array(of)}})
        for of in ([0.1, 0.2, 0.3, 0.4], theirs)
    )
    assert verdicts(ours, {"b": other}) == (told,)
