"""Warnings about a model, by hand: when they come, when they stay away, what they say."""

import pytest

from recspec.evaluation.evaluations import BASELINES, ROW_BASELINES
from recspec.evaluation.warnings import (
    CONSTANT,
    Difference,
    Evaluated,
    Probabilities,
    is_clear,
    of_baselines,
    of_label_columns,
    of_probabilities,
    of_protocols,
    of_repeats,
    of_trace,
)
from recspec.metrics.calibration import CalibrationError, Lean
from recspec.models import MODELS
from recspec.report.measured import Measured


def probabilities(
    log_loss: float = 0.5,
    constant: float = 0.63,
    *,
    rows: int = 10_000,
    error: float = 0.01,
    calibration: float = 0.01,
    lean: Lean = "overconfident",
    is_calibrated: bool = False,
) -> Probabilities:
    found = CalibrationError(calibration, by_chance=0.012, chance_std=0.002, lean=lean)
    return Probabilities(rows, rows // 3, log_loss, constant, error, found, is_calibrated)


def test_a_healthy_model_gets_no_warning() -> None:
    assert of_probabilities(probabilities(), "valid") == []
    assert of_values(0.6, 0.7, 0.75, 0.74, standard_error=0.001) == []
    assert of_baselines([], "valid") == []
    assert of_baselines([Difference("popularity", "full/ndcg@10", 0.2, 0.1, -0.1, 0.01)], "valid") == []


def test_what_can_not_be_judged_gets_no_warning() -> None:
    assert of_probabilities(None, "valid") == []
    assert of_probabilities(probabilities(2.0, rows=99, calibration=0.4), "valid") == []
    for values in ((), (0.5,), (0.5, float("nan"))):
        assert of_values(*values, standard_error=0.1) == []
    for error, count in ((0.0, 30), (0.01, 29)):  # without a standard error, and of too few groups
        assert of_baselines([Difference("ease", "full/mrr", 0.1, 0.2, 0.1, error, count)], "valid") == []


def test_worse_than_a_constant_names_both_losses_and_the_remedies() -> None:
    (warning,) = of_probabilities(probabilities(1.15), "valid")
    assert warning.to_dict() == {
        "kind": "worse_than_constant",
        "message": "log loss 1.1500 on valid is worse than 0.6300, that of the label rate 0.333 for every row; stop "
        "earlier (train.patience, fewer trees), raise dropout or regularisation, or calibrate the model "
        "(train --resume --set train.calibration=temperature)",
    }
    assert of_probabilities(probabilities(0.649), "valid") == []  # within two standard errors of .01


@pytest.mark.parametrize(
    ("lean", "told"),
    [
        ("overconfident", "the model is overconfident: "),
        ("underconfident", "the model is underconfident: "),
        ("too high", "probabilities are too high: "),
        ("too low", "probabilities are too low: "),
    ],
)
def test_a_calibration_error_beyond_chance_says_which_way(lean: Lean, told: str) -> None:
    (warning,) = of_probabilities(probabilities(calibration=0.1, lean=lean), "test")
    assert warning.kind == "overconfident"
    assert warning.message.startswith(
        f"{told}probabilities are off by 0.100 on average on test (expected calibration error; chance alone gives "
        "0.012); calibrate the model (train --resume --set train.calibration=temperature)"
    )
    assert of_probabilities(probabilities(calibration=0.0179, lean=lean), "test") == []  # within chance
    assert of_probabilities(probabilities(calibration=0.0199, lean=lean), "test") == []  # beyond chance, but small


def test_a_calibrated_model_is_not_told_to_calibrate() -> None:
    for warning in of_probabilities(probabilities(1.15, calibration=0.2, is_calibrated=True), "test"):
        assert "the rows of test differ from those" in warning.message
        assert "train.calibration" not in warning.message


def of_values(*values: float, lower: bool = False, **facts: object) -> list[str]:
    trace = [Evaluated(epoch, value) for epoch, value in enumerate(values, start=1)]
    found = of_trace(trace, "rows/auc", lower_is_better=lower, **{"used_up": "epochs", **facts})  # type: ignore[arg-type]
    return [warning.message for warning in found]


def test_still_rising_at_the_last_epoch() -> None:
    (rising,) = of_values(0.6, 0.7, 0.8, error_of_rise=0.01)
    assert rising == (
        "rows/auc on valid was still rising at the last epoch, 3: 0.7000 to 0.8000; train longer: --resume with a "
        "larger train.epochs, or for an update --set epochs=N"
    )
    (falling,) = of_values(0.8, 0.7, 0.6, lower=True, error_of_rise=0.01, used_up="minutes")
    assert "was still falling at the last epoch, 3: 0.7000 to 0.6000" in falling
    assert falling.endswith("a larger train.minutes")


def test_a_rise_within_noise_an_earlier_best_epoch_and_an_end_by_itself_are_no_reason_to_go_on() -> None:
    assert of_values(0.6, 0.7, 0.719, error_of_rise=0.01) == []
    assert of_values(0.6, 0.9, 0.8, error_of_rise=0.01) == []
    assert of_values(0.6, 0.7, 0.8, error_of_rise=0.01, used_up=None) == []
    assert of_values(0.6, 0.7, 0.8) == []  # the noise is unknown


def test_valid_is_too_small_if_its_noise_hides_every_difference_of_epochs() -> None:
    (told,) = of_values(0.62, 0.63, 0.61, standard_error=0.03)
    assert told == (
        "valid is too small to choose an epoch on: rows/auc has a standard error of 0.0300, and the epochs differ by "
        "0.0200; prepare the data with a larger valid split, or compare several seeds (train.seed)"
    )
    assert of_values(0.5, 0.63, 0.61, standard_error=0.03) == []  # epochs differ by more than noise
    assert of_values(0.6300, 0.6301, 0.6299, standard_error=0.001) == []  # a large valid, and nothing to choose


def test_clearly_better_baselines_share_a_warning_by_protocol_that_ends_with_a_command() -> None:
    found = [
        Difference("item_knn", "full/ndcg@10", 0.022, 0.073, 0.051, 0.003),
        Difference("item_knn", "full/mrr", 0.02, 0.03, 0.01, 0.003),
        Difference("popularity", "full/ndcg@10", 0.022, 0.028, 0.006, 0.003),
        Difference("ease", "full/ndcg@10", 0.022, 0.027, 0.005, 0.003),
        Difference("lightgbm", "rows/log_loss", 0.5, 0.4, 0.1, 0.02),
        Difference("constant", "sampled/mrr", 0.5, 0.6, 0.1, 0.02),
    ]
    ranking, of_rows, sampled = (warning.message for warning in of_baselines(found, "test", data="my data"))
    assert ranking == (
        "by full/ndcg@10, item_knn beats the model on test by 17.0 standard errors: 0.0730 against 0.0220 (also "
        "popularity); to take it instead: `recspec train item_knn 'my data' run-item_knn`"
    )
    assert of_rows == (
        "by rows/log_loss, lightgbm beats the model on test by 5.0 standard errors: 0.4000 against 0.5000; to take it "
        "instead: `recspec train lightgbm 'my data' run-lightgbm`"
    )
    assert sampled.endswith("`recspec auto 'my data' run-auto`"), "a constant is no model to train"


def test_every_baseline_but_the_constant_can_be_trained_by_its_name() -> None:
    assert {*BASELINES, *ROW_BASELINES} - {CONSTANT} <= {*MODELS}


def test_a_lead_below_two_standard_errors_is_no_warning_and_no_verdict() -> None:
    for errors, is_warned in ((1.0, False), (1.7, False), (1.99, False), (2.0, True), (2.1, True)):
        assert is_clear(errors * 0.01, 0.01) == is_clear(-errors * 0.01, 0.01) == is_warned
        found = [Difference("ease", "full/ndcg@10", 0.5, 0.5 + errors * 0.01, errors * 0.01, 0.01)]
        assert bool(of_baselines(found, "test")) == is_warned
        assert Measured(errors * 0.01, 0.01).is_clear == is_warned, "and so say reports"
    assert is_clear(0.1, 0.0)
    assert not is_clear(0.0, 0.0)


def test_another_protocol_than_the_choices_is_named() -> None:
    found = [Difference("ease", "sampled/ndcg@10", 0.5, 0.525, 0.025, 0.01)]
    (warning,) = of_baselines(found, "test", "full/ndcg@10")
    assert "0.5250 against 0.5000; the model was chosen by full/ndcg@10, which may order models" in warning.message
    (same,) = of_baselines(found, "test", "sampled/hit_rate@10")
    assert "chosen by" not in same.message


@pytest.mark.parametrize(("users", "strange", "warns"), [(66, 31, True), (66, 30, False), (100, 99, False)])
def test_few_users_beside_many_that_train_does_not_know_are_told(users: int, strange: int, warns: bool) -> None:
    facts = {"full": {"groups": users, "positives": 30, "of_unknown_users_left_out": strange}}
    told = [each.message for each in of_protocols(facts, "test")]
    assert bool(told) == warns
    if told:
        assert told[0].startswith("full on test judges 66 users, and leaves out 31 positives of users that train does")
        assert "a hit rate of 20 % is known to within 10%, so smaller differences between models may be ch" in told[0]


@pytest.mark.parametrize(("repeats", "warns"), [(49, False), (50, True), (100, True)])
def test_a_ranking_of_few_new_items_is_told(repeats: int, warns: bool) -> None:
    facts = {"full": {"repeats_left_out": repeats, "of_positives": 100}}
    assert bool(of_repeats(facts, "valid")) == warns
    assert of_repeats({"full": {"groups": 3}}, "valid") == []


def test_columns_that_alone_order_the_labels_are_named_with_their_auc() -> None:
    assert of_label_columns({}) == []
    (warning,) = of_label_columns({"play_time": 1.0, "status": 0.9912})
    assert warning.kind == "label_column"
    assert "'play_time' (AUC 1.0000), 'status' (AUC 0.9912)" in warning.message
    assert "prepare the data without them" in warning.message
