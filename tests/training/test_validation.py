"""Evaluation between epochs: what it notes, and what it says where there is nothing to measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from recspec.base.errors import SettingsError
from recspec.data.storage import SplitReader, open_split
from recspec.evaluation import interactions
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.training.choices import Choice
from recspec.training.loop import train
from recspec.training.run_folder import Progress
from recspec.training.settings import TrainSettings
from recspec.training.validation import Validation, standard_error, stop_reason
from tests import made_up


def validation_by(metric: str, steps_per_epoch: int = 1, **values: object) -> Validation:
    """The validation of a plan that chose this metric."""
    plan = SimpleNamespace(
        valid=Choice("valid", ""),
        metric=Choice(metric, ""),
        settings=TrainSettings.model_validate(values),
        proposed={},
        spec=SimpleNamespace(folder=Path("data")),
        steps_per_epoch=steps_per_epoch,
    )
    return Validation(SimpleNamespace(plan=plan, model=None))  # type: ignore[arg-type]


def test_each_evaluation_is_traced_and_the_best_is_kept() -> None:
    validation, progress = validation_by("rows/log_loss", patience=2), Progress()
    for epoch, loss in enumerate((0.6, 0.5, 0.52, 0.51), start=1):
        progress.epoch = epoch
        better = validation.is_best({"rows": {"log_loss": loss, "auc": loss, "accuracy": 0.9}}, progress)
        assert better == (epoch <= 2)
        assert progress.stopped == ("patience" if epoch == 4 else "")
    losses = [0.6, 0.5, 0.52, 0.51]
    assert progress.trace == {"epoch": [1, 2, 3, 4], "rows/log_loss": losses, "rows/auc": losses}
    assert (progress.best, progress.best_epoch) == (0.5, 2)


def test_an_evaluation_within_an_epoch_may_be_the_best_but_leaves_no_trace() -> None:
    validation = validation_by("rows/auc", steps_per_epoch=4)
    progress = Progress(epoch=2, batch=1, best=0.6, trace={"epoch": [1.0, 2.0], "rows/auc": [0.5, 0.6]})
    assert validation.is_best({"rows": {"auc": 0.7}}, progress)
    assert (progress.best_epoch, progress.trace["rows/auc"]) == (2.25, [0.5, 0.6])


def test_a_run_that_stopped_goes_on_only_with_more_of_what_stopped_it() -> None:
    trace = {"epoch": [1.0, 2.0, 3.0], "rows/auc": [0.7, 0.6, 0.6]}

    def resumed(stopped: str, seconds: float = 90, **values: object) -> tuple[str, list[str]]:
        progress = Progress(epoch=3, seconds=seconds, best=0.7, trace=trace, count=1, stopped=stopped)
        notes = validation_by("rows/auc", **values).resume(progress)  # type: ignore[arg-type]
        return progress.stopped, notes

    over = "the run is over: it was stopped by"
    assert resumed("patience", patience=2) == ("patience", [f"{over} patience, and train.patience is 2"])
    assert resumed("patience", patience=3) == ("", [])
    assert resumed("minutes", minutes=1) == ("minutes", [f"{over} minutes, and train.minutes is 1.0"])
    assert resumed("minutes", minutes=2) == ("", [])
    assert resumed("minutes") == ("", [])
    assert resumed("target", target=0.65) == ("target", [f"{over} target, and train.target is 0.65"])
    assert resumed("target", target=0.75) == ("", [])
    fresh = Progress(seconds=90, batch=5, stopped="minutes")
    assert validation_by("rows/auc", minutes=2).resume(fresh) == []
    assert not fresh.stopped, "no epoch was over yet"
    assert resumed("", epochs=3) == ("", [f"{over} epochs, and train.epochs is 3"])


def test_a_valid_split_without_anything_to_rank_says_why() -> None:
    with pytest.raises(SettingsError, match="data, split 'valid': no positive row holds an item with an id"):
        validation_by("full/ndcg@10").is_best({"full": {}}, Progress())


def test_log_loss_and_auc_that_disagree_are_noted() -> None:
    validation = validation_by("rows/auc")
    trace = {"epoch": [1.0, 2.0], "rows/auc": [0.7, 0.72], "rows/log_loss": [0.5, 1.1]}
    (note,) = validation.disagreements(Progress(best=0.72, best_epoch=2.0, trace=trace, count=100))
    assert note == (
        "rows/log_loss and rows/auc disagree: rows/log_loss: the best 0.5000 (epoch 1), the bundle's 1.1000 (epoch 2); "
        "train.metric=rows/log_loss would keep the other"
    )
    trace["rows/log_loss"] = [0.5, 0.51]
    assert not validation.disagreements(Progress(best=0.72, best_epoch=2.0, trace=trace, count=100)), "within the error"


def test_valid_and_the_users_events_are_read_once_for_all_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, opened = made_up.interactions(tmp_path / "data", num_rows=600), Counter[str]()

    def counted(spec: FeatureSpec, split: str, names: Sequence[str]) -> SplitReader:
        opened[split] += 1
        return open_split(spec, split, names)

    monkeypatch.setattr(interactions, "open_split", counted)
    found = []
    for epochs in (2, 5):
        opened.clear()
        settings = TrainSettings(epochs=epochs, metric="full/ndcg@10", patience=9, tensorboard=False)
        model_settings = MODELS["mult_vae"].Settings(hidden=(4,), latent=2)  # type: ignore[call-arg]
        train("mult_vae", data, tmp_path / str(epochs), settings=settings, model_settings=model_settings)
        found.append(dict(opened))
    assert found[0] == found[1]


SLOW_START = (0.501, 0.499, 0.502, 0.5, 0.501, 0.5)
"""AUC of sparse ids in the first epochs, flat within its error."""


def reason(*values: float, lower: bool = False, count: int = 2500) -> str:
    return stop_reason(values, count=count, lower=lower, patience=10, falling_patience=3)


def test_a_standard_error_by_hand() -> None:
    assert standard_error(0.5, 2500, bounded=True) == pytest.approx(0.01)  # sqrt(0.5 * 0.5 / 2500)
    assert standard_error(0.6, 3600, bounded=False) == pytest.approx(0.01)  # 0.6 / 60
    assert standard_error(1.0, 0, bounded=True) == 0


@pytest.mark.parametrize(
    ("values", "stopped"),
    [
        ((), ""),
        ((0.5,), ""),
        (SLOW_START, ""),
        ((*SLOW_START, 0.6, 0.7), ""),
        ((0.75, 0.73, 0.72), ""),  # two values below 0.75 - 0.0087
        ((0.75, 0.73, 0.72, 0.71), "falling"),
        ((0.75, 0.71, 0.72, 0.73), ""),  # it recovers
        ((0.75, 0.745, 0.746, 0.744), ""),  # within the error
        ((0.75, *(0.745,) * 9), ""),
        ((0.75, *(0.745,) * 10), "patience"),
        ((0.5, *(0.5,) * 10), "patience"),  # equal values are no improvement
    ],
)
def test_flat_values_are_waited_for_and_falling_ones_are_not(values: tuple[float, ...], stopped: str) -> None:
    assert reason(*values) == stopped


def test_of_losses_lower_values_are_better() -> None:
    assert reason(0.6, 0.63, 0.64, 0.65, lower=True, count=3600) == "falling"
    assert not reason(0.65, 0.64, 0.63, 0.6, lower=True, count=3600)


def test_few_rows_hide_a_fall() -> None:
    assert reason(0.75, 0.73, 0.72, 0.71, count=2500) == "falling"
    assert not reason(0.75, 0.73, 0.72, 0.71, count=25)


def test_nothing_stops_without_patience() -> None:
    assert not stop_reason([0.9, *[0.1] * 50], count=100, lower=False, patience=None, falling_patience=None)


def test_a_fall_is_clear_by_the_difference_on_the_same_rows() -> None:
    def paired(*errors: float | None) -> str:
        return stop_reason(
            [0.30, 0.302, 0.303], count=100, lower=True, patience=None, falling_patience=2, errors=[None, *errors]
        )

    assert not paired(None, None), "less than a standard error of 100 losses"
    assert paired(0.0005, 0.0005) == "falling", "four and six standard errors of the difference"
    assert not paired(0.0015, 0.0005), "the first of them lies within two"


def test_flat_epochs_are_no_fall_and_the_fall_of_the_loss_after_them_is_waited_for() -> None:
    plateau = [0.30, *(0.301, 0.302) * 4, 0.28]
    for end in range(1, len(plateau) + 1):
        errors = [0.002] * end
        assert not stop_reason(plateau[:end], count=10_000, lower=True, patience=10, falling_patience=2, errors=errors)
