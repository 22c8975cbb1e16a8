"""Models that are fitted in one go, at the command line."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from recspec import api
from recspec.evaluation.evaluations import BASELINES
from recspec.feature_spec import FeatureSpec
from tests import made_up
from tests.cli.conftest import Cli


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("fitted") / "data", num_users=60, num_rows=1000)


def test_a_model_is_fitted_evaluated_and_recommends(run: Cli, data: FeatureSpec, tmp_path: Path) -> None:
    status, _, told = run("train", "ease", data.folder, tmp_path / "run")
    assert status == 0
    lines = told.splitlines()
    assert lines[0] == f"data:       {data.folder} (synthetic)"
    assert lines[1] == "model:      ease, fitted in one go"
    assert lines[3] == "steps:      none; l2, dropout, recency chosen on valid"
    assert [line.split()[0] for line in lines[5:9]] == ["l2"] * 4
    assert "  valid full/ndcg@10 0." in lines[5]
    assert lines[5].endswith(" (taken)")
    assert all(", recency " in line for line in lines[9:11])
    chosen = [line for line in lines[5:11] if line.endswith(" (taken)")][-1]
    best = float(chosen.split("full/ndcg@10 ")[1].split()[0])
    assert re.fullmatch(rf"full/ndcg@10 on valid: {best:.4f}; .*popularity.*: 0\.[0-9]{{4}}", lines[11])
    assert next(line for line in lines if "bundle" in line).startswith(
        f"{tmp_path / 'run' / 'bundle'}: bundle, fitted in "
    )
    status, printed, _ = run("evaluate", tmp_path / "run", data.folder, "--protocol", "full", "--baselines", "--json")
    assert status == 0
    assert set(json.loads(printed)["baselines"]) == set(BASELINES) - {"ease"}
    status, printed, _ = run("recommend", tmp_path / "run", "--user", "3", "-k", "2", "--json")
    assert status == 0
    assert len(json.loads(printed)[0]["items"]) == 2


def test_a_model_of_rows_says_which_columns_matter_and_why_a_row_has_its_probability(run: Cli, tmp_path: Path) -> None:
    spec = made_up.clicks(tmp_path / "data", num_rows=1500)
    status, _, told = run(
        "train", "logistic_regression", spec.folder, tmp_path / "run", "--set", "calibration=isotonic"
    )
    assert status == 0
    lines = told.splitlines()
    assert lines[2] == "parameters: known once it is fitted"
    assert any(re.search(r"bundle, fitted in [\d.]+ s; [\d,]+ weights$", line) for line in lines)
    (important,) = (line for line in lines if line.startswith("importance: "))
    first, share = important.removeprefix("importance: ").partition(", ")[0].split()
    status, printed, _ = run("predict", tmp_path / "run", spec.folder, "--split", "test", "--explain")
    assert status == 0
    rows = list(csv.DictReader(printed.splitlines()))
    for row in rows[:20]:
        contributions = [float(value) for name, value in row.items() if name.startswith("contribution_")]
        assert len(contributions) == len(spec.inputs())
        assert float(row["base"]) + sum(contributions) == pytest.approx(float(row["log_odds"]), abs=1e-5)
        assert 1 / (1 + math.exp(-float(row["log_odds"]))) == pytest.approx(float(row["probability"]), abs=1e-5)
    model = api.open(tmp_path / "run")
    shown = re.search(rf"importance\n\W*{first}\W+([\d.]+)%", str(model))
    assert shown is not None
    assert f"{round(float(shown[1]))}%" == share
    assert "Importance of columns" in model.report(data=spec.folder).path.read_text()


def test_the_plan_is_shown_without_fitting(run: Cli, data: FeatureSpec, tmp_path: Path) -> None:
    status, printed, _ = run("train", "ials", data.folder, tmp_path / "run", "--plan")
    assert status == 0
    assert "metric: full/ndcg@10: all items ranked for each user" in printed
    assert "chosen: factors, l2, unobserved_weight, recency: not given; the best of a few values on" in printed
    status, printed, _ = run("train", "ials", data.folder, tmp_path / "run", "--plan", "--json")
    assert json.loads(printed)["choices"]["method"]["value"] == "fitted in one go"
    assert not (tmp_path / "run").exists()


def test_scores_that_are_no_probabilities_are_said_to_be_none(run: Cli, data: FeatureSpec, tmp_path: Path) -> None:
    shutil.copytree(data.folder, tmp_path / "data")
    data.replace(sources={"train": data.sources["train"]}, folder=tmp_path / "data").save(tmp_path / "data")
    assert run("train", "popularity", tmp_path / "data", tmp_path / "run")[0] == 0
    (tmp_path / "rows.csv").write_text("user_id,item_id\n3,5\n")
    _, printed, told = run("predict", tmp_path / "run", tmp_path / "rows.csv")
    assert printed.startswith('"user_id","item_id","score"\n')
    assert "note: popularity gives scores, which are no probabilities; only the order of a user's scores counts" in told


def test_a_model_without_steps_has_none_to_measure(run: Cli) -> None:
    status, _, told = run("bench", "train", "ease")
    assert status == 2
    assert "ease is fitted in one go: it has no steps to plan or to measure" in told
