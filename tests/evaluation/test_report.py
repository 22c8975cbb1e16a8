"""The report's verdicts."""

from collections.abc import Mapping, Sequence

import numpy as np

from recspec.evaluation.report import Evaluation, Report


def verdicts(model: Evaluation, baselines: Mapping[str, Evaluation]) -> tuple[str, ...]:
    return Report("test", model, baselines).verdicts


def test_verdicts_know_which_way_is_better_and_keep_silent_when_the_model_wins() -> None:
    model = Evaluation({"rows": {"auc": 0.8, "log_loss": 0.5}})
    better = Evaluation({"rows": {"auc": 0.7, "log_loss": 0.4}})
    assert verdicts(model, {"simple": better}) == ("rows: simple beats the model: log_loss 0.4000 against 0.5000",)
    assert verdicts(better, {"simple": Evaluation({"rows": {"auc": 0.6}})}) == ()


def test_verdicts_weigh_the_difference_by_its_standard_error_over_the_groups() -> None:
    def of(values: Sequence[float]) -> Evaluation:
        array = np.array(values)
        return Evaluation({"full": {"mrr": float(array.mean())}}, values={"full": {"mrr": array}})

    # differences .2, .1, .3, .2: mean .2, standard error .0816 / 2
    (verdict,) = verdicts(of([0.1, 0.2, 0.3, 0.4]), {"b": of([0.3, 0.3, 0.6, 0.6])})
    assert verdict == "full: b beats the model: mrr 0.4500 against 0.2500 (4.9 standard errors)"
    # differences .3, -.2, .1, 0: mean .05, standard error .208 / 2
    (verdict,) = verdicts(of([0.1, 0.2, 0.3, 0.4]), {"b": of([0.4, 0.0, 0.4, 0.4])})
    assert verdict == "full: b is level with the model: mrr 0.3000 against 0.2500 (0.5 standard errors)"
