"""What a run says of its model at the end: calibration, warnings, refusals."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import SettingsError
from recspec.bundle import folder as bundle
from recspec.cli import app as cli
from recspec.evaluation import EvaluateSettings, EvaluationTask, evaluate, evaluate_baselines
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.models import MODELS
from recspec.training import result
from recspec.training.loop import train
from recspec.training.plan import make_plan
from recspec.training.result import Result
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.dataset_cases import prepare_table

SMALL = {"embedding_dim": 8, "bottom": (16, 8), "top": (32, 16), "dropout": 0.0, "interaction": "dot"}
GREEDY: dict[str, object] = {
    "epochs": 8,
    "batch_size": 200,
    "learning_rate": 0.05,
    "metric": "rows/auc",
    "keep_best": False,
    "calibration": "none",
    "weight_decay": 0.0,
}
"""Settings that learn the training rows by heart."""


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("judgement") / "clicks", num_rows=2000)


@pytest.fixture(scope="module")
def greedy(clicks: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that learnt its rows by heart."""
    return run(clicks, tmp_path_factory.mktemp("judgement") / "run", **GREEDY)


@pytest.fixture(scope="module")
def interactions(datasets: Mapping[str, FeatureSpec]) -> FeatureSpec:
    return datasets["interactions"]


def run(spec: FeatureSpec, folder: Path, *, model: str = "dlrm", **values: object) -> Result:
    given = {"tensorboard": False, "precision": "fp32", **values}
    own = MODELS[model].Settings.model_validate(SMALL if model == "dlrm" else {"factors": 4, "layers": (8, 4)})
    return train(model, spec, folder, settings=TrainSettings.model_validate(given), model_settings=own)


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_a_model_that_learnt_its_rows_by_heart_is_warned_about_everywhere(clicks: FeatureSpec, greedy: Result) -> None:
    folder = greedy.bundle.parent
    kinds = [warning.kind for warning in greedy.warnings]
    assert kinds == ["worse_than_constant", "overconfident"]
    plain = [warning.to_dict() for warning in greedy.warnings]
    assert json.loads(json.dumps(greedy.to_dict()))["warnings"] == plain
    logged = [{name: event[name] for name in ("kind", "message")} for event in events(folder, "warning")]
    assert logged == events(folder, "done")[0]["warnings"] == plain
    trained = bundle.load(folder)
    assert [*trained.card.warnings] == plain
    found = evaluate(trained, clicks, "test")
    assert {"worse_than_constant", "overconfident"} <= {warning.kind for warning in found.warnings}
    assert found.to_dict()["warnings"] == [warning.to_dict() for warning in found.warnings]


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_a_calibration_mends_it_and_ranks_as_before(
    clicks: FeatureSpec, greedy: Result, tmp_path: Path, method: str
) -> None:
    result = run(clicks, tmp_path / "run", **{**GREEDY, "calibration": method})
    assert result.calibration is not None
    assert result.calibration.method == method
    assert "worse_than_constant" not in {warning.kind for warning in result.warnings}
    assert json.loads(json.dumps(result.to_dict()))["calibration"]["method"] == method
    (note,) = (event for event in events(tmp_path / "run", "note") if "calibrated" in str(event["message"]))
    assert str(note["message"]).startswith(f"calibrated on valid by {method}: log loss ")
    assert str(note["message"]).endswith("valid is used twice, for the choice and for this, so judge it on test")
    before, after = (
        evaluate(bundle.load(each.bundle), clicks, "test", protocols=["rows"]).metrics["rows"]
        for each in (greedy, result)
    )
    assert after["auc"] == before["auc"]
    assert after["log_loss_uncalibrated"] == before["log_loss"]
    assert after["log_loss"] < before["log_loss"] - 0.05
    assert after["calibration_error"] < before["calibration_error"] - 0.05


def test_a_column_that_orders_the_labels_is_named_where_metrics_are(tmp_path: Path) -> None:
    rows = [f"{900 + row if row % 3 == 0 else row},{'abcd'[row % 4]},{int(row % 3 == 0)}\n" for row in range(300)]
    asked = {"context_features": ["seconds", "kind"]}
    data = prepare_table(tmp_path / "a.csv", tmp_path / "data", "seconds,kind,label\n" + "".join(rows), **asked)
    named = "order the labels of train almost perfectly, each alone: 'seconds' (AUC 1.0000)"
    found = run(data.spec, tmp_path / "run", epochs=1)
    assert any(named in each.message for each in found.warnings)
    report = evaluate(bundle.load(found.bundle), data.spec)
    assert any(named in each.message for each in report.warnings)
    assert f"warning: columns that the model reads {named}" in " ".join(report.sentences)


def test_a_healthy_run_has_no_warning(tmp_path: Path) -> None:
    spec = made_up.clicks(tmp_path / "data", num_rows=8000)
    result = run(spec, tmp_path / "run", learning_rate=0.01, batch_size=512)
    assert result.warnings == ()
    assert events(tmp_path / "run", "warning") == []


def test_a_run_that_is_cut_short_is_still_rising_and_a_share_of_train_may_calibrate_it(tmp_path: Path) -> None:
    data = made_up.clicks(tmp_path / "data", num_rows=6000)
    spec = data.replace(sources={split: of for split, of in data.sources.items() if split != "valid"})
    result = run(spec, tmp_path / "run", epochs=2, valid_share=0.3, learning_rate=0.003, calibration="temperature")
    (warning,) = (each for each in result.warnings if each.kind == "still_rising")
    assert "was still falling at the last epoch, 2" in warning.message
    assert result.calibration is not None
    assert "calibrated on the rows of train held out" in str(events(tmp_path / "run", "note"))


def test_the_kept_epoch_is_the_one_that_is_judged(clicks: FeatureSpec, tmp_path: Path) -> None:
    result = run(clicks, tmp_path / "run", **{**GREEDY, "keep_best": True, "calibration": "temperature"})
    trained = bundle.load(tmp_path / "run")
    assert result.best_epoch < 8
    assert evaluate(trained, clicks, "valid").metrics["rows"]["auc"] == pytest.approx(
        result.metrics["rows"]["auc"], abs=1e-9
    )
    found = evaluate(trained, clicks, "valid").metrics["rows"]
    assert found["log_loss"] <= found["log_loss_uncalibrated"] + 1e-3  # fitted on these very rows


def test_a_finished_run_may_be_calibrated_later(clicks: FeatureSpec, greedy: Result, tmp_path: Path) -> None:
    shutil.copytree(greedy.bundle.parent, tmp_path / "run")
    how = TrainSettings.model_validate({"tensorboard": False, "precision": "fp32", **GREEDY, "calibration": "isotonic"})
    own = MODELS["dlrm"].Settings.model_validate(SMALL)
    later = train("dlrm", clicks, tmp_path / "run", settings=how, model_settings=own, resume=True)
    at_once = run(clicks, tmp_path / "other", **{**GREEDY, "calibration": "isotonic"})
    assert later.calibration == at_once.calibration
    assert [each.kind for each in later.warnings] == [each.kind for each in at_once.warnings]


def test_labelled_rows_are_calibrated_by_default_if_there_are_enough_to_fit(
    clicks: FeatureSpec, interactions: FeatureSpec, tmp_path: Path
) -> None:
    many = made_up.clicks(tmp_path / "many", num_rows=10_500)
    own = MODELS["dlrm"].Settings.model_validate(SMALL)

    def chosen(spec: FeatureSpec, model: str = "dlrm", **values: object) -> str:
        settings = TrainSettings.model_validate(values)
        model_settings = own if model == "dlrm" else MODELS[model].Settings()
        return make_plan(model, spec, settings, model_settings, Ranks(), propose=True).settings.calibration

    assert chosen(many) == "temperature"
    assert chosen(many, calibration="none") == "none"
    assert chosen(many, train_splits=("train", "valid")) == "none"
    assert chosen(many, negatives=2) == "none"
    assert chosen(clicks) == "none"  # some 200 rows of valid
    assert chosen(interactions, "neumf") == "none"


def test_a_ranking_model_stands_beside_popularity(interactions: FeatureSpec, tmp_path: Path) -> None:
    still = {"epochs": 1, "learning_rate": 1e-9, "metric": "full/ndcg@10"}
    result = run(interactions, tmp_path / "run", model="neumf", **still)
    (warning,) = (each for each in result.warnings if each.kind == "worse_than_baseline")
    assert re.match(r"by full/\S+, popularity beats the model on valid by ", warning.message)
    assert warning.message.endswith(
        f"`{shlex.join(['recspec', 'train', 'popularity', str(interactions.folder), 'run-popularity'])}`"
    )
    assert "overconfident" not in {each.kind for each in result.warnings}  # its candidates are drawn


def test_a_calibration_without_rows_to_fit_is_refused_before_training(
    clicks: FeatureSpec, interactions: FeatureSpec, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"calibration is isotonic, and there are no rows to fit it on: train"):
        run(clicks, tmp_path / "a", train_splits=("train", "valid"), calibration="isotonic")
    with pytest.raises(SettingsError, match="no labelled rows to fit it on: negatives are drawn"):
        run(interactions, tmp_path / "b", model="neumf", calibration="temperature")
    only = made_up.clicks(tmp_path / "c", num_rows=400)
    for chunk in only.sources["valid"]:
        for name in chunk.files if "label" in chunk.features else ():
            rewrite_labels(only.folder / name)
    with pytest.raises(SettingsError, match=r"rows of one class: 0 of \d+ rows of 'valid' are positive; set train.cal"):
        run(only, tmp_path / "d", calibration="temperature")
    assert not [each for each in "abd" if (tmp_path / each / "log.jsonl").exists()]


def rewrite_labels(file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file, partitioning=None)
    zeros = pa.array(np.zeros(len(table)), table.schema.field("label").type, safe=False)
    pq.write_table(table.set_column(table.column_names.index("label"), "label", zeros), file)


def test_the_last_lines_of_train_are_the_warnings_and_the_next_command(
    clicks: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str | Path) -> tuple[list[str], str]:
        monkeypatch.setattr(sys, "argv", ["recspec", *map(str, arguments)])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        both = capsys.readouterr()
        return both.err.strip().splitlines(), both.out

    small = {
        "embedding_dim": 8,
        "bottom": "[16,8]",
        "top": "[32,16]",
        "dropout": "0",
        "interaction": "dot",
        "train.tensorboard": "false",
    }
    train_settings = {f"train.{name}": str(value).lower() for name, value in GREEDY.items()}
    assigned = [f"--set={name}={value}" for name, value in {**small, **train_settings}.items()]
    (*_, before, last, following), _ = printed("train", "dlrm", clicks.folder, tmp_path / "run", *assigned)
    assert before.startswith("warning: log loss ")
    assert last.startswith("warning: the model is overconfident: ")
    command = ["recspec", "evaluate", str(tmp_path / "run"), str(clicks.folder), "--baselines"]
    assert following == f"next: {shlex.join(command)}"
    _, table = printed("evaluate", tmp_path / "run", clicks.folder)
    assert "\nwarning: the model is overconfident: " in table


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> EvaluationTask:
    data = made_up.interactions(tmp_path_factory.mktemp("beside") / "data", num_users=40, num_items=30, num_rows=500)
    return EvaluationTask(data, "valid", ("full",), EvaluateSettings())


def test_a_short_training_stands_beside_popularity_alone(question: EvaluationTask) -> None:
    found = result.cheap_baselines(question, ("train",), "neumf", 0.0)
    expected, _ = evaluate_baselines(question, ("train",), names=("popularity",))
    assert {name: of.metrics for name, of in found.items()} == {name: of.metrics for name, of in expected.items()}
    assert set(result.cheap_baselines(question, ("train",), "neumf", 9.9)) == {"popularity"}
    assert result.cheap_baselines(question, ("train",), "popularity", 0.0) == {}, "no baseline of itself"


def test_a_longer_one_stands_beside_those_that_fit_a_tenth_of_its_time(
    question: EvaluationTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 items and an operation of a second: EASE takes 31 cubed; item-kNN and Markov take what the pairs take."""
    monkeypatch.setattr(result, "seconds_of_an_operation", lambda: 0.0)
    everything = {"popularity", "item_knn", "markov", "ease"}
    assert set(result.cheap_baselines(question, ("train",), "neumf", 600.0)) == everything
    assert set(result.cheap_baselines(question, ("train",), "ease", 600.0)) == everything - {"ease"}
    monkeypatch.setattr(result, "seconds_of_an_operation", lambda: 1.0)
    assert set(result.cheap_baselines(question, ("train",), "neumf", 600.0)) == everything - {"ease"}


def test_data_without_users_has_no_such_baseline(tmp_path: Path) -> None:
    clicks = made_up.clicks(tmp_path / "clicks", num_rows=300)
    channels = {name: of for name, of in clicks.channels.items() if "user" not in name}
    metadata = {name: of for name, of in clicks.metadata.items() if name not in ("user_id", "catalogues")}
    bare = clicks.replace(channels=channels, metadata=metadata)
    assert (
        result.cheap_baselines(EvaluationTask(bare, "valid", ("rows",), EvaluateSettings()), ("train",), "dlrm", 99)
        == {}
    )
