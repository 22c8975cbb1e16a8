"""Tracking in MLflow: names, servers that are down or asleep, and, slowly, the real thing on SQLite."""

from __future__ import annotations

import importlib.util
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from recspec.base.config import build
from recspec.base.errors import Interrupted, MissingExtraError
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.training import TrainSettings, tracking, train
from recspec.training.run_folder import RunLog
from recspec.training.search import Tuning
from recspec.training.tracking import TrackedSearch, Tracking, metric_name, metrics_of, params_of
from tests.dataset_cases import prepare_table

HAS_MLFLOW = importlib.util.find_spec("mlflow") is not None

# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full/ndcg@10", "full/ndcg_at_10"),
        ("rows/log_loss", "rows/log_loss"),
        ("a b.c:d-e", "a b.c:d-e"),
        ("prix €/é", "prix _/_"),
        ("", "_"),
        ("/", "_"),
        ("x" * 400, "x" * 250),
    ],
)
def test_names_are_written_as_mlflow_takes_them(name: str, expected: str) -> None:
    assert metric_name(name) == expected


def test_events_become_curves_and_the_best_values() -> None:
    step = {"event": "step", "time": 1.0, "step": 50, "steps": 100, "loss": 0.5, "learning_rates": {"wide": 0.1}}
    assert metrics_of(step) == {"step/loss": 0.5, "step/learning_rates/wide": 0.1}
    epoch = {
        "event": "epoch",
        "time": 1.0,
        "epoch": 1,
        "step": 50,
        "train_loss": 0.4,
        "open_ended": True,
        "metrics": {"full": {"ndcg@10": 0.25, "mrr": math.nan}},
    }
    assert metrics_of(epoch) == {"epoch/train_loss": 0.4, "valid/full/ndcg_at_10": 0.25}
    done = {"event": "done", "time": 1.0, "bundle": "run/bundle", "best": 0.25, "metrics": {"full": {"ndcg@10": 0.25}}}
    assert metrics_of(done) == {"done/best": 0.25, "best/full/ndcg_at_10": 0.25}
    assert metrics_of({"event": "note", "time": 1.0, "message": "a"}) == {}


def test_settings_become_parameters() -> None:
    start = {
        "event": "start",
        "model": "neumf",
        "model_settings": {"factors": 8, "layers": [64, 32]},
        "train": {"epochs": 3, "metric": None},
        "choices": {"threads": "1"},
        "text": "x",
    }
    assert params_of(start) == {
        "model": "neumf",
        "settings.factors": "8",
        "settings.layers": "[64, 32]",
        "train.epochs": "3",
        "train.metric": "null",
    }
    assert len(params_of({"event": "start", "model": "x" * 10_000})["model"]) < 6_000


# --- where to track, and when it fails --------------------------------------------------------------------------------


def test_the_address_is_a_setting_or_mlflow_s_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_is_installed", lambda: True)
    assert tracking.address(None) is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000")
    assert tracking.address(None) == "http://there:5000"
    assert tracking.address("sqlite:///a.db") == "sqlite:///a.db"
    assert tracking.address("none") is None
    monkeypatch.setattr(tracking, "_is_installed", lambda: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'recspec\[mlflow\]'"):
        tracking.address("sqlite:///a.db")


def test_an_address_with_a_password_is_refused_because_bundles_would_hold_it() -> None:
    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_PASSWORD"):
        TrainSettings(mlflow="https://ann:secret@there:5000")
    assert tracking.shown("postgresql://ann:secret@there/runs") == "postgresql://there/runs"


def logged(folder: Path, uri: str) -> tuple[list[str], float]:
    """The notes of a run's log that is tracked at an address, and the seconds that logging took."""
    log = RunLog(folder, lambda _: None, tensorboard=False, track=Tracking(folder, uri))
    log.open()
    started = time.monotonic()
    log.write("start", model="neumf")
    for step in range(200):
        log.write("step", step=step, loss=0.5)
    seconds = time.monotonic() - started
    log.close()
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "step" for line in lines) == 200
    return [line["message"] for line in lines if line["event"] == "note"], seconds


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a server that is down."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_a_server_that_is_down_is_one_note(tmp_path: Path, nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_is_installed", lambda: True)
    (note,), _ = logged(tmp_path, nobody)
    assert note.startswith(f"not tracked: MLflow at {nobody}: ")
    assert "refused" in note


def test_a_missing_library_is_one_note_if_only_the_environment_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_is_installed", lambda: False)
    (note,), _ = logged(tmp_path, "http://there:5000")
    assert note == ("not tracked: MLflow is not installed: pip install 'recspec[mlflow]'")


def test_whatever_breaks_in_the_library_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> Any:
        raise KeyError("inside")

    monkeypatch.setattr(tracking, "_is_installed", lambda: True)
    monkeypatch.setattr(tracking, "client_of", broken)
    (note,), _ = logged(tmp_path, "sqlite:///runs.db")
    assert note == "not tracked: MLflow at sqlite:///runs.db: 'inside'"


def test_a_server_that_never_answers_is_given_up_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep, awake = Tracking(tmp_path, "http://there:5000"), threading.Event()
    monkeypatch.setattr(tracking, "_is_installed", lambda: True)
    monkeypatch.setattr(tracking, "check_reachable", lambda _: awake.wait())
    asleep._allowed = 0.2
    asleep.send({"event": "start", "time": 1.0})
    asleep.close()
    awake.set()
    assert asleep.problem == "MLflow at http://there:5000 does not answer"


@pytest.mark.slow  # it waits as long as a search does
def test_a_search_gives_up_once_and_its_runs_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search, awake = TrackedSearch(tmp_path), threading.Event()
    monkeypatch.setattr(tracking, "_is_installed", lambda: True)
    monkeypatch.setattr(tracking, "check_reachable", lambda _: awake.wait())
    monkeypatch.setattr(tracking, "PATIENCE", 0.0)
    for name in ("first", "second"):
        part = Tracking.of("http://there:5000", tmp_path / name, tmp_path, search)
        assert part is not None
        part._allowed = 0.2
        part.send({"event": "start", "time": 1.0})
        part.close()
        assert part.problem is None
    said = search.finish("http://there:5000", tmp_path, bundle=tmp_path, start={}, done={})
    awake.set()
    assert said == "not tracked: MLflow at http://there:5000 does not answer"
    assert Tracking.of("http://there:5000", tmp_path / "third", tmp_path, search) is None


def test_a_file_made_later_goes_to_the_run_that_tracks_the_folder_or_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: str
) -> None:
    monkeypatch.setattr(tracking, "_is_installed", lambda: True)
    (tmp_path / "bundle").mkdir()
    for run in (tmp_path, tmp_path / "bundle"):
        assert tracking.send_file(run, tmp_path / "report.html") is None
    (tmp_path / "mlflow.json").write_text(json.dumps({"uri": nobody, "run_id": "7"}))
    assert tracking.send_file(tmp_path, tmp_path / "report.html") == (
        f"not sent to MLflow: the run is tracked at '{nobody}'; set MLFLOW_TRACKING_URI to that address"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", nobody)
    for run in (tmp_path, tmp_path / "bundle"):
        said = tracking.send_file(run, tmp_path / "report.html")
        assert said is not None
        assert said.startswith(f"not sent to MLflow: MLflow at {nobody}: ")
    assert tracking.send_file(tmp_path / "other", tmp_path / "report.html") is None
    (tmp_path / "mlflow.json").write_text("[")
    assert tracking.send_file(tmp_path, tmp_path / "report.html") is None


# --- the real thing --------------------------------------------------------------------------------------------------

real = pytest.mark.skipif(not HAS_MLFLOW, reason="MLflow is not installed: pip install 'recspec[mlflow]'")
loud = pytest.mark.filterwarnings("ignore")  # MLflow and what it loads warn of their own future


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    folder = tmp_path_factory.mktemp("data")
    rows = [f"u{user},i{(user * 7 + place * place) % 23},{place}" for user in range(40) for place in range(8)]
    return prepare_table(folder / "a.csv", folder / "shop", "user_id,item_id,timestamp\n" + "\n".join(rows) + "\n").spec


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)  # MLflow keeps artifacts of a database in the current folder
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs.db'}")
    return tracking.client_of(f"sqlite:///{tmp_path / 'runs.db'}")


def runs_of(client: Any) -> list[Any]:
    experiment = client.get_experiment_by_name("recspec")
    return sorted(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.start_time)


def go(
    name: str,
    data: FeatureSpec,
    run: Path,
    *,
    stop: Callable[[], bool] = lambda: False,
    resume: bool = False,
    own: dict[str, object] | None = None,
    **values: object,
) -> None:
    settings = build(TrainSettings, "train", {"tensorboard": False, **values})
    train(
        name,
        data,
        run,
        settings=settings,
        model_settings=build(MODELS[name].Settings, "settings", own or {}),
        resume=resume,
        stop_requested=stop,
    )


SMALL = {"batch_size": 200, "precision": "fp32", "log_every": 1, "checkpoint_minutes": 0, "negatives": 1}


@real
@loud
@pytest.mark.slow
def test_a_run_is_tracked_and_its_bundle_is_a_model_that_opens(data: FeatureSpec, client: Any, tmp_path: Path) -> None:
    from mlflow.artifacts import download_artifacts

    from recspec.inference import Predictor

    go("neumf", data, tmp_path / "run", epochs=2, **SMALL)
    (run,) = runs_of(client)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    epochs = [line for line in log if line["event"] == "epoch"]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert (run.data.params["model"], run.data.params["train.epochs"]) == ("neumf", "2")
    assert run.data.params["dataset"] == str(data.folder.resolve())
    curve = client.get_metric_history(run.info.run_id, "valid/full/ndcg_at_10")
    assert [(each.step, each.value) for each in curve] == [
        (each["step"], each["metrics"]["full"]["ndcg@10"]) for each in epochs
    ]
    assert len(client.get_metric_history(run.info.run_id, "step/loss")) == sum(line["event"] == "step" for line in log)
    (version,) = client.search_model_versions("name='shop-neumf'")
    assert (str(version.version), version.run_id) == ("1", run.info.run_id)
    held = download_artifacts(run_id=run.info.run_id, artifact_path="bundle", tracking_uri=client.tracking_uri)
    assert Predictor.open(Path(held), device="cpu").bundle.card.model == "neumf"
    (tmp_path / "run" / "report.html").write_text("<p>good</p>")
    assert tracking.send_file(tmp_path / "run", tmp_path / "run" / "report.html") is None
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"bundle", "report.html"}
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


@real
@loud
@pytest.mark.slow
def test_a_continued_run_goes_on_in_the_same_mlflow_run(data: FeatureSpec, client: Any, tmp_path: Path) -> None:
    asked = iter([False, False, True])
    with pytest.raises(Interrupted):
        go("neumf", data, tmp_path / "run", epochs=2, stop=lambda: next(asked, True), **SMALL)
    (run,) = runs_of(client)
    assert run.info.status == "KILLED"
    go("neumf", data, tmp_path / "run", epochs=2, resume=True, **{**SMALL, "log_every": 2})
    (same,) = runs_of(client)
    assert (same.info.run_id, same.info.status) == (run.info.run_id, "FINISHED")
    assert same.data.tags["changed.train.log_every"] == "2"


@real
@loud
@pytest.mark.slow
def test_a_fit_and_a_search_with_its_trials_are_tracked(data: FeatureSpec, client: Any, tmp_path: Path) -> None:
    go("ease", data, tmp_path / "fitted", own={"l2": 10.0})
    (fitted,) = runs_of(client)
    assert (fitted.info.status, fitted.data.params["settings.l2"]) == ("FINISHED", "10.0")
    Tuning("ease", data, tmp_path / "search", {"settings": {}, "train": {"tensorboard": False}}, {}, trials=2).run()
    runs = {run.info.run_name: run for run in runs_of(client)[1:]}
    parent = runs.pop("search")
    assert parent.info.status == "FINISHED"
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert [each.path for each in client.list_artifacts(parent.info.run_id)] == ["bundle"]
    assert not client.list_artifacts(next(iter(runs.values())).info.run_id)
    assert {each.run_id for each in client.search_model_versions("name='shop-ease'")} == {
        fitted.info.run_id,
        parent.info.run_id,
    }
