"""The learning rate falls where valid no longer improves, and epochs are judged as the bundle will answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from recspec.base.errors import Interrupted
from recspec.bundle.checkpoint import newest_state
from recspec.feature_spec import FeatureSpec
from recspec.metrics.measures import log_loss
from recspec.models import MODELS
from recspec.training import TrainSettings, train
from recspec.training.run_folder import Progress
from recspec.training.validation import AFTER_A_CUT, Validation, _along_a_line
from tests import made_up

GIVEN = {
    "patience": 1,
    "plateau_cuts": 2,
    "epochs": 30,
    "learning_rate": 0.05,
    "metric": "rows/log_loss",
    "tensorboard": False,
}
SIZES = {"embedding_dim": 4, "bottom": [8, 4], "top": [8]}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("plateau") / "data", num_rows=1500)


def run(spec: FeatureSpec, folder: Path, **how: object) -> list[dict[str, object]]:
    settings = TrainSettings.model_validate(GIVEN)
    train("dlrm", spec, folder, settings=settings, model_settings=MODELS["dlrm"].Settings.model_validate(SIZES), **how)  # type: ignore[arg-type]
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_rate_falls_twice_and_then_training_stops(clicks: FeatureSpec, tmp_path: Path) -> None:
    log = run(clicks, tmp_path / "run")
    told = [
        str(line["message"]) for line in log if line["event"] == "note" and "no longer improves" in str(line["message"])
    ]
    assert [line.rpartition(" ")[2] for line in told] == ["0.005", "0.0005"]
    done = next(line for line in log if line["event"] == "done")
    assert done["stopped"] == "patience"
    losses = [line["metrics"]["rows"]["log_loss"] for line in log if line["event"] == "epoch"]  # type: ignore[index]
    assert min(losses) == done["best"]
    assert losses[0] > min(losses)


def test_a_run_stopped_after_a_cut_goes_on_as_if_it_had_not_been(clicks: FeatureSpec, tmp_path: Path) -> None:
    run(clicks, tmp_path / "whole")
    cuts: list[str] = []

    def see(event: dict[str, object]) -> None:
        if event["event"] == "note" and "no longer improves" in str(event["message"]):
            cuts.append(str(event["message"]))

    with pytest.raises(Interrupted):
        run(clicks, tmp_path / "parts", on_event=see, stop_requested=lambda: bool(cuts))
    assert len(cuts) == 1
    run(clicks, tmp_path / "parts", resume=True)
    whole, parts = (torch_weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    errors = [newest_state(tmp_path / name / "checkpoints")["progress"]["errors"] for name in ("whole", "parts")]  # type: ignore[index]
    assert errors[0][0] is None, "there was no best epoch before the first"
    assert errors[0][1:] == pytest.approx(errors[1][1:], rel=1e-2), "that of the best epoch is measured anew"


def torch_weights(folder: Path) -> dict[str, torch.Tensor]:
    from recspec.bundle import folder as bundle

    return dict(bundle.load(folder).model.state_dict())


@pytest.mark.parametrize(
    ("since", "stops"),
    [
        ([0.50], ""),
        ([0.50, 0.51], "patience"),
        ([0.50, 0.39], ""),
        ([0.39, 0.40], ""),
        ([0.39, 0.40, 0.41], "patience"),
    ],
)
def test_after_a_cut_two_evaluations_are_waited_for(since: list[float], stops: str) -> None:
    """The best before the cut is .40."""
    assert AFTER_A_CUT == 2

    class Plan:
        settings = TrainSettings.model_validate({**GIVEN, "patience": 10})

    validation = object.__new__(Validation)
    validation.plan, validation.metric = Plan(), "rows/log_loss"  # type: ignore[assignment]
    progress = Progress(trace={"rows/log_loss": [0.6, 0.4, 0.5, *since]}, cuts=1, cut_at=3, best=0.39)
    assert validation._why_stop(progress) == stops


def test_overconfident_logits_are_judged_along_a_line() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=4000)
    labels = rng.random(4000) < 1 / (1 + np.exp(-logits))
    mended = _along_a_line(labels, 3 * logits)
    assert log_loss(mended, labels) == pytest.approx(log_loss(logits, labels), abs=2e-3)
    assert log_loss(3 * logits, labels) > log_loss(logits, labels) + 0.1
    assert _along_a_line(np.ones(5, bool), logits[:5]) is not None
