"""A search finds the better model, repeats every line, goes on where it was stopped, and distrusts its own file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from recspec import config
from recspec.auto import AutoSearch, cost
from recspec.auto.state import BEST, BOARD, RECIPE, RUNS, STATE
from recspec.bundle import folder as bundle
from recspec.datasets import DATASETS
from recspec.errors import Interrupted, SettingsError
from recspec.inference import Predictor
from recspec.models import MODELS
from recspec.prepare import PrepareContext
from recspec.spec import FeatureSpec
from recspec.training import TrainSettings, train
from tests import made_up

FEW = {"epochs": 2, "batch_size": 512, "precision": "fp32"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("auto") / "data", num_rows=1200)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("auto") / "clicks", num_rows=1200)


def a_search(spec: FeatureSpec, out: Path, models: tuple[str, ...], **more: object) -> AutoSearch:
    values: dict[str, object] = {"minutes": 600.0, "train": FEW, "most_variants": 0, **more}
    return AutoSearch(spec, out, models=models, **values)  # type: ignore[arg-type]


def test_a_search_leaves_a_winner_that_serves_and_lines_that_can_be_repeated(data: FeatureSpec, tmp_path: Path) -> None:
    board = a_search(data, tmp_path / "out", ("popularity", "ease", "neumf"), most_variants=2).run()
    names = [str(line["name"]) for line in board.lines]
    assert {"popularity", "ease", "neumf", "neumf-2", "neumf-3"} == set(names)
    valid = [float(str(line["valid"])) for line in board.lines]
    assert valid == sorted(valid, reverse=True)
    assert board.metric == "full/ndcg@10"
    first = board.lines[0]
    assert all(math.isfinite(float(str(first[each]))) for each in ("valid_error", "test", "test_error", "p50_ms"))
    assert json.loads((tmp_path / "out" / BOARD).read_text()) == board.to_dict()
    assert "standard errors" in board.verdict
    assert board.seconds_of_losers < board.seconds

    user = Predictor.open(tmp_path / "out" / BEST).busiest_user()
    assert len(Predictor.open(tmp_path / "out" / BEST).recommend([user], k=3)[0].items) == 3
    assert first["trained_again_on"] == ["train", "valid"]

    again = config.load_recipe(tmp_path / "out" / RUNS / "neumf" / RECIPE)
    settings = config.build(MODELS["neumf"].Settings, "recipe", again.settings)
    train_settings = config.build(TrainSettings, "recipe", again.train)
    repeated = train("neumf", data, tmp_path / "again", settings=train_settings, model_settings=settings)
    there = bundle.load(tmp_path / "out" / RUNS / "neumf").model.state_dict()
    for name, weight in bundle.load(repeated.bundle).model.state_dict().items():
        assert torch.equal(weight, there[name]), name


def test_labelled_rows_are_judged_by_log_loss(clicks: FeatureSpec, tmp_path: Path) -> None:
    given = {**FEW, "epochs": 1, "calibration": "temperature"}
    board = a_search(clicks, tmp_path / "out", ("wide_deep", "dlrm"), train=given).run()
    assert board.metric == "rows/log_loss"
    values = [float(str(line["valid"])) for line in board.lines]
    assert len(values) == 2
    assert values == sorted(values)
    assert board.lines[0]["trained_again_on"] == ["train", "valid"], "though nothing is left to calibrate on"
    recipe = config.load_recipe(tmp_path / "out" / BEST / RECIPE)
    assert recipe.train["train_splits"] == ["train", "valid"]
    # The calibrated log loss would be that of the rows that the calibration was fitted to.
    assert f"by {values[1] - values[0]:.4f} in rows/log_loss" in board.verdict


def test_a_stopped_search_goes_on(data: FeatureSpec, tmp_path: Path) -> None:
    trained: list[str] = []

    def search() -> AutoSearch:
        found = a_search(data, tmp_path / "out", ("popularity", "ease"))
        found.on_event = lambda name, _: trained.append(name)
        return found

    stopped = search()
    stopped.stop_requested = lambda: "ease" in trained
    with pytest.raises(Interrupted, match="the same command goes on"):
        stopped.run()
    assert set(trained) == {"popularity", "ease"}
    trained.clear()
    board = search().run()
    assert "popularity" not in trained  # it had ended; the fit of ease starts again
    assert {str(line["name"]) for line in board.lines} == {"popularity", "ease"}


def test_one_folder_holds_one_search(data: FeatureSpec, tmp_path: Path) -> None:
    a_search(data, tmp_path / "out", ("popularity",)).run()
    with pytest.raises(SettingsError, match="holds another search; name another folder") as caught:
        a_search(data, tmp_path / "out", ("popularity",), seed=1, metric="full/hit_rate@10").run()
    assert "seed was 0, and is 1" in str(caught.value)
    assert "metric was 'full/ndcg@10', and is 'full/hit_rate@10'" in str(caught.value)


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"lines": 3}', "name", "model", "long", "twice", "none", "users", "each", "nan"]
)
def test_a_damaged_state_is_told(data: FeatureSpec, tmp_path: Path, damage: str) -> None:
    a_search(data, tmp_path / "out", ("popularity",)).run()
    file = tmp_path / "out" / STATE
    state = json.loads(file.read_text())
    if damage == "name":
        state["lines"][0]["name"] = "../../outside"
        damage = json.dumps(state)
    elif damage == "model":
        state["lines"][0]["model"] = "nonesuch"
        damage = json.dumps(state)
    elif damage in ("users", "each"):
        damage = json.dumps({**state, damage: -1 if damage == "users" else {"ease": -1.0}})
    elif damage in ("long", "twice", "none"):
        state["lines"][0]["values"] = [0.5] * (5000 if damage == "long" else 1)
        state["lines"] = state["lines"] * {"long": 1, "twice": 2, "none": 0}[damage]
        damage = json.dumps(state)
    elif damage == "nan":
        damage = json.dumps({**state, "spent": float("nan")})
    file.write_text(damage)
    with pytest.raises(SettingsError, match="damaged"):
        a_search(data, tmp_path / "out", ("popularity",)).run()
    assert not (tmp_path / "outside").exists()


def test_models_that_do_not_fit_are_told(data: FeatureSpec, clicks: FeatureSpec, tmp_path: Path) -> None:
    board = a_search(data, tmp_path / "out", ("popularity", "din")).run()
    assert "history" in board.left_out["din"]
    with pytest.raises(SettingsError, match="did you mean 'neumf'"):
        a_search(data, tmp_path / "other", ("neumv",)).run()
    with pytest.raises(SettingsError, match="no model can train on it"):
        a_search(clicks, tmp_path / "other", ("din",)).run()


def test_users_to_rank_by_hand() -> None:
    # 1 ms a user: 10 s rank all 800 four times over. 100 ms a user: 500 users take 50 s, more than 10 s.
    assert cost.users_to_rank({"a": 0.001, "b": 0.1}, 800, 10.0) == (800, ["b"])
    assert cost.users_to_rank({"a": 0.004}, 100_000, 10.0) == (625, [])
    assert cost.users_to_rank({}, 100_000, 10.0) == (2000, [])
    assert cost.users_to_rank({"a": 0.001}, 20, 10.0) == (20, [])


def test_few_items_are_judged_by_a_shorter_list(tmp_path: Path) -> None:
    rows = [f"u{user},i{(user * (turn + 1)) % 7},{turn}" for user in range(60) for turn in range(5)]
    (tmp_path / "few.csv").write_text("\n".join(["user,item,timestamp", *dict.fromkeys(rows)]) + "\n", encoding="utf-8")
    table = DATASETS["table"]
    context = PrepareContext(tmp_path / "few.csv", tmp_path / "few")
    table.prepare(context, table.Settings(repeats="first", num_negatives=0))
    few = FeatureSpec.load(tmp_path / "few")
    board = a_search(few, tmp_path / "out", ("popularity", "ease", "neumf")).run()
    assert len(board.lines) == 3
    assert board.metric in ("full/ndcg@5", "full/ndcg@1")
    assert a_search(few, tmp_path / "out", ("popularity", "ease", "neumf")).run().metric == board.metric
