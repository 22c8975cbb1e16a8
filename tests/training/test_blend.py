"""Blends: the sum of several models' scores, chosen on valid, and the bundle that holds it."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recspec.base import config
from recspec.base.errors import BundleError, RecspecError, SettingsError
from recspec.bundle import Blend, DataRecord, as_part, run_record
from recspec.bundle import folder as bundle
from recspec.cli.app import app
from recspec.evaluation import evaluate, evaluate_model, interactions_of
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor
from recspec.models import MODELS
from recspec.training import TrainSettings, blend_runs, train
from tests import made_up

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "ease": {"l2": 20.0},
    "item_knn": {"k": 20, "shrink": 1.0},
    "popularity": {},
    "mult_vae": {"hidden": (16,), "latent": 4},
    "neumf": {"factors": 4, "layers": (8, 4)},
}


def a_run(name: str, spec: FeatureSpec, folder: Path, **settings: object) -> Path:
    steps = {"epochs": 1} if name in ("mult_vae", "neumf") else {}
    own = config.build(MODELS[name].Settings, "", SETTINGS[name])
    given = TrainSettings.model_validate({"tensorboard": False, **steps, **settings})
    train(name, spec, folder, settings=given, model_settings=own)
    return folder


@pytest.fixture(scope="module")
def data(datasets: Mapping[str, FeatureSpec]) -> FeatureSpec:
    return datasets["interactions"]


@pytest.fixture(scope="module")
def runs(data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("blend")
    return {name: a_run(name, data, folder / name) for name in SETTINGS}


@pytest.fixture(scope="module")
def blended(data: FeatureSpec, runs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blend") / "blend"
    blend_runs(folder, [runs["ease"], runs["item_knn"], runs["mult_vae"]], spec=data)
    return folder


def test_the_logarithm_of_shares_by_hand() -> None:
    """Scores 3, 1, 0 and -2 have the shares .75, .25, 0 and 0; a floor of .05 is added to each."""
    found = as_part(torch.tensor([[3.0, 1.0, 0.0, -2.0]]), "log", 0.05)
    torch.testing.assert_close(found, torch.tensor([[math.log(0.8), math.log(0.3), math.log(0.05), math.log(0.05)]]))
    torch.testing.assert_close(as_part(torch.zeros(1, 2), "log", 0.5), torch.full((1, 2), math.log(0.5)))
    assert as_part(torch.tensor([[3.0, -2.0]]), "score", 0.05).tolist() == [[3.0, -2.0]]


def test_a_blend_knows_its_data_and_its_parts(
    blended: Path, data: FeatureSpec, runs: Mapping[str, Path], tmp_path: Path
) -> None:
    record = run_record.read(blended)
    assert record is not None
    assert (record.kind, record.data) == ("blend", DataRecord.of(data))
    parts = [each.model for each in bundle.load(blended).model.settings.members]  # type: ignore[union-attr]
    assert record.made_of == tuple(str(runs[name].resolve()) for name in parts), "without those that were left out"
    blend_runs(tmp_path / "like", [runs[name] for name in parts], like=blended)
    alike = run_record.read(tmp_path / "like")
    assert alike is not None
    assert alike.data == record.data, "that of its parts"


def test_scores_are_the_weighted_sum_of_the_members(blended: Path, runs: Mapping[str, Path]) -> None:
    found = bundle.load(blended)
    assert isinstance(found.model, Blend)
    users, total = torch.arange(1, 9), torch.zeros(8, found.model.num_items)
    for part in found.model.settings.members:
        alone = bundle.load(runs[part.model]).model
        total += part.weight * as_part(alone.score_users(users), part.form, part.floor)  # type: ignore[operator]
    with torch.inference_mode():
        torch.testing.assert_close(found.model.score_users(users), total)
        items = torch.arange(2, 10)
        torch.testing.assert_close(found.model.score_pairs(users, items), total.gather(1, items[:, None])[:, 0])


def test_a_blend_is_no_worse_on_valid_than_its_best_member(
    data: FeatureSpec, runs: Mapping[str, Path], tmp_path: Path
) -> None:
    names = ["popularity", "ease", "item_knn"]
    made = blend_runs(tmp_path / "blend", [runs[name] for name in names], spec=data)
    alone = [
        evaluate_model(bundle.load(runs[name]).model, data, "valid", protocols=("full",)).metrics["full"]["ndcg@10"]
        for name in names
    ]
    np.testing.assert_allclose(made.alone, alone, rtol=1e-6)
    assert made.value is not None
    assert made.value >= max(alone)
    again = evaluate_model(bundle.load(tmp_path / "blend").model, data, "valid", protocols=("full",))
    assert again.metrics["full"]["ndcg@10"] == pytest.approx(made.value, rel=1e-3)
    assert bundle.load(tmp_path / "blend").card.metrics["full"]["ndcg@10"] == pytest.approx(made.value)


def test_it_evaluates_recommends_and_knows_baskets_like_any_model(blended: Path, data: FeatureSpec) -> None:
    trained = bundle.load(blended)
    report = evaluate(trained, data, "test", baselines=True, protocols=["full"])
    assert {"popularity", "item_knn"} <= {*report.baselines}
    answer = Predictor.open(blended).recommend(["1", "nobody"], k=3)
    assert [each.known for each in answer] == [True, False]
    model = trained.model
    assert isinstance(model, Blend)
    basket = interactions_of(model, data, ["train"])
    torch.testing.assert_close(
        model.score_events(basket)[:5], model.knowing(basket).score_users(torch.arange(5)), atol=1e-6, rtol=1e-5
    )


def test_weights_of_another_blend_are_taken(
    blended: Path, data: FeatureSpec, runs: Mapping[str, Path], tmp_path: Path
) -> None:
    """Runs that were trained on valid too take the weights of the blend of runs that were not."""
    parts = bundle.load(blended).card.settings["members"]
    names = [str(each["model"]) for each in parts]  # type: ignore[attr-defined]
    again = [a_run(name, data, tmp_path / name, train_splits=["train", "valid"]) for name in names]
    blend_runs(tmp_path / "both", again, like=blended)
    members = bundle.load(tmp_path / "both").card.settings["members"]
    assert [each["weight"] for each in members] == [each["weight"] for each in parts]  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match=r"was trained on valid too, so weights can't be chosen on it"):
        blend_runs(tmp_path / "none", [*again, *again], spec=data)
    with pytest.raises(SettingsError, match=r"--like .*: blends .* and the runs hold popularity, ease"):
        blend_runs(tmp_path / "none", [runs["popularity"], runs["ease"]], like=blended)
    with pytest.raises(BundleError, match="holds ease, not a blend"):
        blend_runs(tmp_path / "none", [runs["popularity"], runs["ease"]], like=runs["ease"])
    assert not (tmp_path / "none").exists()


def test_all_that_is_wrong_with_the_runs_is_said_at_once(
    blended: Path, data: FeatureSpec, runs: Mapping[str, Path], tmp_path: Path
) -> None:
    other = made_up.interactions(tmp_path / "other", num_items=61)
    strange = a_run("ease", other, tmp_path / "strange")
    with pytest.raises(SettingsError) as caught:
        blend_runs(tmp_path / "out", [runs["ease"], runs["neumf"], blended], spec=data)
    assert re.search(r"neumf: neumf scores rows by their features; a blend holds models that rank", str(caught.value))
    assert re.search(r"is a blend; name the runs that it was made of", str(caught.value))
    with pytest.raises(SettingsError, match=r"strange: was trained on other data than "):
        blend_runs(tmp_path / "out", [runs["ease"], strange], spec=data)
    with pytest.raises(SettingsError, match="1 run is given; a blend takes two or more"):
        blend_runs(tmp_path / "out", [runs["ease"]], spec=data)
    with pytest.raises(SettingsError, match="17 runs are given; a blend takes 16 at most"):
        blend_runs(tmp_path / "out", [runs["ease"]] * 17, spec=data)
    with pytest.raises(SettingsError, match=r"unknown metric 'ndgc@10' \(did you mean 'ndcg@10'\?\)"):
        blend_runs(tmp_path / "out", [runs["ease"], runs["item_knn"]], spec=data, metric="full/ndgc@10")
    with pytest.raises(SettingsError, match="rows/auc is no metric of protocol full"):
        blend_runs(tmp_path / "out", [runs["ease"], runs["item_knn"]], spec=data, metric="rows/auc")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SettingsError, match="is a bundle, whose files must stay as they are"):
        blend_runs(blended / "bundle", [runs["ease"], runs["item_knn"]], spec=data)
    with pytest.raises(SettingsError, match="holds a run already"):
        blend_runs(blended, [runs["ease"], runs["item_knn"]], spec=data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"members": []}, "members"),
        ({"members": [{"model": "blend", "weight": 1.0}] * 2}, "unknown model 'blend'"),
        ({"members": [{"model": "eese", "weight": 1.0}]}, r"unknown model 'eese' \(did you mean 'ease'\?\)"),
        ({"members": [{"model": "ease", "weight": -1.0}]}, "weight"),
        ({"members": [{"model": "ease", "weight": 1.0, "settings": {"factors": 3}}]}, "factors"),
        ({"members": [{"model": "popularity", "weight": 1.0}] * 17}, "members"),
    ],
)
def test_a_hostile_card_is_one_clear_error(blended: Path, tmp_path: Path, change: dict[str, object], said: str) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (blended / "bundle").rglob("*"):
        if file.is_file():
            (copy / file.relative_to(blended / "bundle")).parent.mkdir(parents=True, exist_ok=True)
            (copy / file.relative_to(blended / "bundle")).write_bytes(file.read_bytes())
    card = json.loads((copy / "bundle.json").read_text())
    (copy / "bundle.json").write_text(json.dumps({**card, "settings": change}))
    with pytest.raises(RecspecError, match=said):
        bundle.load(copy, verify=False)


def test_the_command_prints_each_run_and_the_gain(data: FeatureSpec, runs: Mapping[str, Path], tmp_path: Path) -> None:
    given = ["pipeline", "blend", str(tmp_path / "out"), str(runs["ease"]), str(runs["item_knn"])]
    found = CliRunner().invoke(app, [*given, "--data", str(data.folder)])
    assert found.exit_code == 0, found.output
    assert "against the best model alone" in found.output
    refused = CliRunner().invoke(app, given)
    assert refused.exit_code != 0
