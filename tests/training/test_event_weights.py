"""Training by the weights of events, whatever the model's loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recspec.bundle import folder as bundle
from recspec.feature_spec import FeatureSpec
from recspec.loading.ranks import Ranks
from recspec.models import MODELS
from recspec.training.choices import open_rows
from recspec.training.loop import train
from recspec.training.plan import make_plan
from recspec.training.settings import TrainSettings
from tests.dataset_cases import prepare_table


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """Half of the rows of each colour are clicked; the clicks on red weigh 9, all other rows 1."""
    folder = tmp_path_factory.mktemp("weighted")
    rows = [
        f"{colour},{label},{9 if colour == 'red' and label else 1}\n" for colour in ("red", "blue") for label in (0, 1)
    ]
    text = "colour,label,w\n" + "".join(rows * 250)
    given = {"label": "label", "user": None, "item": None, "weight": "w", "context_features": ["colour"]}
    return prepare_table(folder / "a.csv", folder / "out", text, split="share", valid=0, test=0, **given).spec


@pytest.mark.parametrize(("how", "share"), [("auto", 0.9), ("ignore", 0.5)])
def test_a_model_learns_the_weighted_rate(how: str, share: float, weighted: FeatureSpec, tmp_path: Path) -> None:
    own = MODELS["dcnv2"].Settings()
    given = {"event_weights": how, "epochs": 6, "batch_size": 50, "learning_rate": 0.01, "tensorboard": False}
    train("dcnv2", weighted, tmp_path / "run", settings=TrainSettings.model_validate(given), model_settings=own)
    model = bundle.load(tmp_path / "run").model
    with torch.inference_mode():
        blue, red = torch.sigmoid(model({"colour": torch.tensor([1, 2])})).tolist()
    assert red == pytest.approx(share, abs=0.08)
    assert blue == pytest.approx(0.5, abs=0.15)


def test_the_plan_says_whether_rows_are_weighted(weighted: FeatureSpec) -> None:
    def chosen(spec: FeatureSpec, **values: object) -> str | None:
        settings = TrainSettings.model_validate(values)
        plan = make_plan("dcnv2", spec, settings, MODELS["dcnv2"].Settings(), Ranks())
        return str(plan.choices["event_weights"]) if "event_weights" in plan.choices else None

    why = "rows are drawn in proportion to it, with the negatives drawn for them"
    assert chosen(weighted) == f"event_weight: {why}"
    off = "none: train.event_weights is ignore: each row is drawn once an epoch"
    assert chosen(weighted, event_weights="ignore") == off
    metadata = {key: value for key, value in weighted.metadata.items() if key != "event_weight"}
    assert chosen(weighted.replace(metadata=metadata)) is None


@pytest.mark.parametrize("name", ["sasrec", "bert4rec", "mult_vae"])
def test_a_model_that_learns_from_users_says_that_it_does_not_weigh_events(name: str, tmp_path: Path) -> None:
    text = "user,item,w\n" + "".join(f"u{n % 4},i{n % 7},{1 + n % 3}\n" for n in range(40))
    given = {"user": "user", "item": "item", "weight": "w", "timestamp": None, "split": "none"}
    spec = prepare_table(tmp_path / "a.csv", tmp_path / "out", text, **given).spec
    plans = [
        make_plan(name, spec, TrainSettings.model_validate(values), MODELS[name].Settings(), Ranks())
        for values in ({}, {"event_weights": "ignore"})
    ]
    why = f"{name} learns from whole users, and each of their events counts 1"
    assert [str(plan.choices["event_weights"]) for plan in plans] == [f"none: {why}"] * 2
    assert [f"the weights of events are not used: {why}" in plan.notes for plan in plans] == [True, False]


def test_held_out_rows_are_read_once_each(weighted: FeatureSpec) -> None:
    settings = TrainSettings.model_validate({"valid_share": 0.2})
    model = MODELS["dcnv2"](weighted, MODELS["dcnv2"].Settings())
    loader = open_rows(weighted, settings, model, Ranks(), negatives=0, valid="held out", held_out=True)
    labels = torch.cat([share.batch["label"] for share in loader.resized(64).batches()])
    assert len(labels) == loader.num_rows
    assert labels.mean() == pytest.approx(0.5, abs=0.12)
