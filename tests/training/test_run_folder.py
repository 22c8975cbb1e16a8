"""The folder of a run and the job that owns it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from recspec.base.errors import CheckpointError, TrainingError
from recspec.training import run_folder
from recspec.training.choices import Choice
from recspec.training.run_folder import Event, RunLog, check_same_run, progress_of
from recspec.training.settings import TrainSettings


def test_a_job_knows_the_runs_that_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    run_folder.sign(tmp_path)
    assert not (tmp_path / ".job").exists()
    assert not run_folder.is_of_this_job(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not run_folder.is_of_this_job(tmp_path)
    run_folder.sign(tmp_path)
    assert run_folder.is_of_this_job(tmp_path)
    monkeypatch.setattr(run_folder.os, "getppid", lambda: -1)
    assert not run_folder.is_of_this_job(tmp_path), "another torchrun's"


def test_the_first_rank_writes_and_tells_each_event_and_the_others_nothing(tmp_path: Path) -> None:
    told: list[Event] = []
    for is_first in (False, True):
        log = RunLog(tmp_path, told.append, tensorboard=False)
        if is_first:
            log.open()
        log.write("note", message="something to know")
        log.write("step", step=3, loss=0.5)
        log.close()
        log.write("step", step=4, loss=0.4)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == told
    assert [(line["event"], line.get("message"), line.get("step")) for line in lines] == [
        ("note", "something to know", None),
        ("step", None, 3),
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file on a disk that is always full is Linux's")
def test_a_full_disk_is_told_with_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path, lambda _: None, tensorboard=False)
    log.open()
    with pytest.raises(TrainingError) as caught:
        log.write("step", step=1)
    assert str(caught.value) == (
        f"{tmp_path}: the log could not be written: [Errno 28] No space left on device; make room, and the same "
        "command with --resume continues from the last checkpoint"
    )
    log.close()


def test_a_folder_that_is_not_there_is_told_too(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "gone", lambda _: None, tensorboard=False)
    with pytest.raises(TrainingError, match=r"the log could not be written: .*No such file or directory"):
        log.open()
    log.close()


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
