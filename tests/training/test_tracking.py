"""Tracking in MLflow: names, servers that are down or asleep, and the real thing on SQLite if it is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import socket
import sys
import threading
from collections.abc import Callable
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
        ("a b.c:d-e €", "a b.c:d-e _"),
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
        "splits": ["train"],
        "resumed_at_step": 0,
        "metric": None,
    }
    assert params_of(start) == {
        "model": "neumf",
        "splits": '["train"]',
        "settings.factors": "8",
        "settings.layers": "[64, 32]",
        "train.epochs": "3",
        "train.metric": "null",
    }
    assert len(params_of({"event": "start", "model": "x" * 10_000})["model"]) < 6_000


# --- where to track, and when it fails --------------------------------------------------------------------------------


@pytest.fixture
def without_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlflow", None)


def test_the_address_is_a_setting_or_mlflow_s_own_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def uri(setting: str | None) -> str | None:
        found = Tracking.of(setting, tmp_path)
        return found and found.uri

    monkeypatch.setattr(tracking, "require_mlflow", lambda _: None)
    assert uri(None) is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000")
    assert uri(None) == "http://there:5000"
    assert uri("sqlite:///a.db") == "sqlite:///a.db"
    assert uri("none") is None


@pytest.mark.usefixtures("without_mlflow")
def test_an_address_as_a_setting_needs_mlflow(tmp_path: Path) -> None:
    assert Tracking.of("none", tmp_path) is None
    with pytest.raises(MissingExtraError, match=r"pip install 'recspec\[mlflow\]'"):
        Tracking.of("sqlite:///a.db", tmp_path)


def test_an_address_with_a_password_is_refused_because_bundles_would_hold_it() -> None:
    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_PASSWORD"):
        TrainSettings(mlflow="https://ann:secret@there:5000")
    assert tracking.shown("postgresql://ann:secret@there/runs") == "postgresql://there/runs"


def notes_of(folder: Path, uri: str, before_close: Callable[[], object] = lambda: None) -> list[str]:
    """The notes in the log of a run of 200 steps that is tracked at an address."""
    log = RunLog(folder, lambda _: None, tensorboard=False, track=Tracking(folder, uri))
    log.open()
    log.write("start", model="neumf", data="shop")
    for step in range(200):
        log.write("step", step=step, loss=0.5)
    before_close()
    log.close()
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "step" for line in lines) == 200
    return [line["message"] for line in lines if line["event"] == "note"]


@pytest.mark.usefixtures("without_mlflow")
def test_a_missing_library_is_one_note_if_only_the_environment_asks_for_it(tmp_path: Path) -> None:
    (note,) = notes_of(tmp_path, "http://there:5000")
    assert note == (
        "not tracked: MLflow at http://there:5000: this needs the library 'mlflow', which is not installed: "
        "pip install 'recspec[mlflow]'"
    )


def test_training_goes_on_while_a_server_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def asleep(_: str) -> Any:
        over.wait()  # as a request that waits for its time-out, longer than the whole run
        raise TimeoutError("read timed out")

    monkeypatch.setattr(tracking, "client_of", asleep)
    (note,) = notes_of(tmp_path, "http://there:5000", before_close=over.set)
    assert note == "not tracked: MLflow at http://there:5000: read timed out"


def test_what_hangs_without_a_time_out_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(tracking, "client_of", lambda _: over.wait())
    monkeypatch.setattr(tracking, "END_SECONDS", 0.05)
    (note,) = notes_of(tmp_path, "postgresql://there/runs")
    over.set()
    assert note == "not tracked: MLflow at postgresql://there/runs: the end of the run is not sent yet"


def test_a_search_gives_up_once_and_its_runs_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search, over = TrackedSearch(tmp_path), threading.Event()

    def asleep(_: str) -> Any:
        over.wait()
        raise TimeoutError("read timed out")

    monkeypatch.setattr(tracking, "client_of", asleep)
    monkeypatch.setattr(tracking, "require_mlflow", lambda _: None)
    for name in ("first", "second"):
        part = Tracking.of("http://there:5000", tmp_path / name, search)
        assert part is not None
        part.send({"event": "start", "time": 1.0})
        part.close()  # the server has not answered yet
        assert part.problem is None
    over.set()
    failed = search.finish("http://there:5000", start={}, done={})
    assert failed == "not tracked: MLflow at http://there:5000: read timed out"
    assert Tracking.of("http://there:5000", tmp_path / "third", search) is None


def test_a_file_made_later_goes_to_the_run_that_tracks_the_folder_or_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        """A server that takes one file and then refuses."""

        def log_artifact(self, run: str, file: str) -> None:
            if taken:
                raise ConnectionError("refused")
            taken.append((run, file))

    taken: list[tuple[str, str]] = []
    monkeypatch.setattr(tracking, "client_of", lambda _: Client())
    report = tmp_path / "report.html"
    (tmp_path / "bundle").mkdir()
    for run in (tmp_path, tmp_path / "bundle"):
        assert tracking.send_file(run, report) is None
    (tmp_path / "mlflow.json").write_text(json.dumps({"uri": "http://there", "run_id": "7"}))
    elsewhere = (
        f"not sent to MLflow: {tmp_path / 'mlflow.json'} names a run of another address than MLFLOW_TRACKING_URI"
    )
    assert tracking.send_file(tmp_path, report) == elsewhere
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:secret@there")
    assert tracking.send_file(tmp_path / "bundle", report) is None
    assert taken == [("7", str(report))]
    assert tracking.send_file(tmp_path, report) == "not sent to MLflow at http://there: refused"
    assert tracking.send_file(tmp_path / "other", report) is None
    (tmp_path / "mlflow.json").write_text("[")
    assert tracking.send_file(tmp_path, report) == elsewhere


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
def test_a_server_that_is_down_or_asleep_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name, why in (("down", "refused"), ("asleep", "timed out")):
            (tmp_path / name).mkdir()
            (note,) = notes_of(tmp_path / name, uri)
            assert note.startswith(f"not tracked: MLflow at {uri}: ")
            assert why in note
            server.listen()  # connections are made, and never answered


@real
@loud
def test_two_workers_of_a_search_begin_one_mlflow_run(client: Any, tmp_path: Path) -> None:
    found: set[str] = set()
    ready = threading.Barrier(2)

    def begin() -> None:
        ready.wait()
        found.add(TrackedSearch(tmp_path).run(client, client.tracking_uri))

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {run.info.run_id for run in runs_of(client)} == found
    assert len(found) == 1


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
    assert run.data.params["data"] == str(data.folder)
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
