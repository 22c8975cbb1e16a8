"""Checkpoints that a run refuses to continue from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from recspec.base.errors import CheckpointError
from recspec.training.choices import Choice
from recspec.training.run_folder import check_same_run, progress_of
from recspec.training.settings import TrainSettings


@pytest.mark.parametrize("key", ["model_settings", "train"])
@pytest.mark.parametrize("value", [1.5, 3, "x", [1], None])
def test_a_checkpoint_whose_settings_are_no_mapping_is_refused(key: str, value: object) -> None:
    plan, saved = SimpleNamespace(settings=TrainSettings()), SimpleNamespace(path="step-1", state={key: value})
    with pytest.raises(CheckpointError, match=f"step-1: damaged: its '{key}' is"):
        check_same_run(plan, saved)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 1, {"step": "x"}, {"epoch": []}])
def test_a_checkpoint_whose_progress_is_damaged_is_refused(value: object) -> None:
    saved = SimpleNamespace(path="step-1", state={"progress": value})
    with pytest.raises(CheckpointError, match="step-1: damaged: "):
        progress_of(saved)  # type: ignore[arg-type]


def plan_of(settings: TrainSettings) -> SimpleNamespace:
    """The part of a plan that a checkpoint is compared with."""
    return SimpleNamespace(
        model="neumf",
        spec=SimpleNamespace(content_hash=lambda: "hash"),
        loader=SimpleNamespace(mode="memory"),
        precision=Choice("fp32", "as asked"),
        event_products=None,
        model_settings=TrainSettings(),
        settings=settings,
    )


@pytest.mark.parametrize(
    ("then", "now", "difference"),
    [
        ({"threads": 3, "log_every": 7}, {}, None),
        ({"epochs": 3}, {}, None),
        ({"epochs": 3}, {"schedule": "linear"}, "train.epochs is 10, but the run was started with 3"),
        ({"seed": 1}, {}, "train.seed is 0, but the run was started with 1"),
    ],
)
def test_a_run_continues_with_the_settings_that_it_began_with(
    then: dict[str, object], now: dict[str, object], difference: str | None
) -> None:
    settings = TrainSettings.model_validate(now)
    state = {
        "model": "neumf",
        "spec": "hash",
        "loader": "memory",
        "precision": "fp32",
        "model_settings": TrainSettings().model_dump(mode="json"),
        "train": {**settings.model_dump(mode="json"), **then},
    }
    saved = SimpleNamespace(path="step-1", state=state)
    if difference is None:
        check_same_run(plan_of(settings), saved)  # type: ignore[arg-type]
        return
    with pytest.raises(CheckpointError) as caught:
        check_same_run(plan_of(settings), saved)  # type: ignore[arg-type]
    assert difference in str(caught.value)
