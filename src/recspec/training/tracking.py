"""Tracking of runs in MLflow: parameters, metrics, curves, warnings, the bundle and the report.

A daemon thread sends the events of a run with MLflow's client, whose time-outs bound every request. The first error
ends the tracking and is a note in the log; training goes on. `mlflow.json` in the folder of a run names its MLflow run,
which `--resume` continues.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from filelock import FileLock

from recspec.base.errors import MissingExtraError, require_extra, shortened
from recspec.base.files import PathError, confined, read_json

STATE = "mlflow.json"
VARIABLE, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"  # MLflow's own
OFF = "none"  # the value of train.mlflow that turns tracking off
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # MLflow's 7 spend four minutes on a dead server
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
}
"""Variables of the environment that are set before MLflow is loaded, unless they are set already."""
STATUS = {"done": "FINISHED", "interrupted": "KILLED"}  # event -> MLflow's status of a run that ends after it
METRICS_AT_ONCE, PARAMS_AT_ONCE = 500, 90  # MLflow takes 1,000 and 100; the last event may add many metrics
END_SECONDS, SECONDS_PER_BYTE = 120.0, 1e-6
"""The longest wait at the end of a run, whatever hangs: a database has no time-outs of MLflow's."""
MOST_TEXT = 5_000  # characters of a parameter or tag; MLflow takes 6,000


def require_mlflow(setting: str | None) -> None:
    """Raise MissingExtraError if the setting names an address and MLflow is not installed."""
    if setting not in (None, OFF) and importlib.util.find_spec("mlflow") is None:
        raise MissingExtraError(
            "train.mlflow needs the library 'mlflow', which is not installed: pip install 'recspec[mlflow]'"
        )


def check_address(text: str) -> str:
    """Check an address of MLflow. Raises ValueError if it holds a password, which would stand in every bundle."""
    if text != shown(text):
        raise ValueError(
            "holds a user name or a password, which the bundle would hold too; give them as the environment variables "
            f"MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole address as {VARIABLE}"
        )
    return text


def shown(uri: str) -> str:
    """An address without its user name and password."""
    return re.sub(r"//[^/]*@", "//", uri)


# --- what an event becomes -------------------------------------------------------------------------------------------


def metric_name(name: str) -> str:
    """A name that MLflow accepts: `full/ndcg@10` is `full/ndcg_at_10`."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name.replace("@", "_at_"))[:250].strip("/") or "_"


def metrics_of(event: Mapping[str, Any]) -> dict[str, float]:
    """The curves of an event: `valid/full/ndcg_at_10`, `step/loss`; the values of the best weights are `best/...`."""
    kind = event["event"]
    if kind not in ("step", "epoch", "done", "tried"):
        return {}
    own = {name: value for name, value in event.items() if name not in ("time", "epoch", "epochs", "step", "steps")}
    found = [*numbers(own.pop("metrics", {}), {"epoch": "valid/", "done": "best/"}.get(kind, f"{kind}/"))]
    found += numbers(own, f"{kind}/")
    return {metric_name(name): value for name, value in found if math.isfinite(value)}


def params_of(start: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a run, from the first event of its log: its settings, and what is neither nested nor null."""
    left_out = ("event", "time", "resumed_at_step")
    found = {name: value for name, value in start.items() if name not in left_out and value is not None}
    found = {name: value for name, value in found.items() if not isinstance(value, Mapping)}
    for section, values in (("settings", start.get("model_settings")), ("train", start.get("train"))):
        found |= {f"{section}.{name}": value for name, value in (values or {}).items()}
    return {metric_name(name): _text(value) for name, value in found.items()}


def numbers(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested values, each with its path: `learning_rates/wide`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


# --- one run ---------------------------------------------------------------------------------------------------------


@dataclass
class Tracking:
    """Sends the events of one run to MLflow from a thread of its own."""

    folder: Path
    uri: str
    search: TrackedSearch | None = None
    """The search that the run is a part of; its bundle is then neither sent nor registered."""
    problem: str | None = field(default=None, init=False)
    """Why the run is not tracked, or no longer."""
    _events: SimpleQueue[Mapping[str, Any] | None] = field(default_factory=SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _bundle_bytes: int = field(default=0, init=False)

    @classmethod
    def of(cls, setting: str | None, folder: Path, search: TrackedSearch | None = None) -> Self | None:
        """The tracking that the setting or the environment asks for; None in a search whose tracking has failed.

        Raises MissingExtraError if the setting names an address and MLflow is not installed.
        """
        require_mlflow(setting)
        uri = "" if setting == OFF else setting or os.environ.get(VARIABLE)
        return None if not uri or (search and search.problem) else cls(folder, uri, search)

    def send(self, event: Mapping[str, object]) -> None:
        """Take an event; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="recspec-mlflow", daemon=True)
            self._thread.start()
        if self.problem is None:
            self._events.put(event)
        if event["event"] == "done" and self.search is None:
            bundle = Path(str(event["bundle"]))
            self._bundle_bytes = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())

    def close(self) -> None:
        """Wait until everything is sent or a request fails; for a part of a search, the search waits."""
        if self._thread is None:
            return
        self._events.put(None)
        if self.search is None:
            self.wait()
        else:
            self.search.parts.append(self)

    def wait(self) -> None:
        """Wait until the thread ends, or too long."""
        assert self._thread is not None
        self._thread.join(END_SECONDS + self._bundle_bytes * SECONDS_PER_BYTE)
        if self._thread.is_alive():
            self._fail(TimeoutError("the end of the run is not sent yet"))

    def _fail(self, error: Exception) -> None:
        self.problem = _problem(self.uri, error)
        if self.search is not None:
            self.search.problem = self.search.problem or self.problem

    def _work(self) -> None:
        try:
            self._send_all(client_of(self.uri))
        except Exception as error:  # of a library or of the network: training goes on whatever it is
            self._fail(error)

    def _send_all(self, client: Any) -> None:
        from mlflow.entities import Metric

        run, status, metrics = "", "FAILED", []
        for event in iter(self._events.get, None):
            if event["event"] == "start":
                run = self._begin(client, event)
            status = STATUS.get(event["event"], status)
            step, milliseconds = int(event.get("step") or 0), int(event["time"] * 1000)
            metrics += [Metric(name, value, milliseconds, step) for name, value in metrics_of(event).items()]
            if metrics and (self._events.empty() or len(metrics) >= METRICS_AT_ONCE):
                client.log_batch(run, metrics)
                metrics = []
            if event["event"] == "done":
                self._finish(client, run, event)
        client.log_batch(run, metrics)
        client.set_terminated(run, status)

    def _begin(self, client: Any, start: Mapping[str, Any]) -> str:
        """Begin the MLflow run, or continue that of a resumed run, with changed parameters as tags."""
        from mlflow.entities import Param, RunTag

        self._model = re.sub(r"[/:]", "-", f"{Path(start['data']).resolve().name}-{start['model']}")[:200]
        run = run_of(self.folder, self.uri) if start.get("resumed_at_step") else None
        if run is None:
            parent = None if self.search is None else self.search.run(client, self.uri)
            run = new_run(client, self.folder, self.uri, parent)
        client.update_run(run, "RUNNING")
        before, params = client.get_run(run).data.params, params_of(start)
        fresh = [Param(name, value) for name, value in params.items() if name not in before]
        for at in range(0, len(fresh), PARAMS_AT_ONCE):
            client.log_batch(run, params=fresh[at : at + PARAMS_AT_ONCE])
        changed = [name for name, value in params.items() if before.get(name, value) != value]
        client.log_batch(run, tags=[RunTag(f"changed.{name}", params[name]) for name in changed])
        return run

    def _finish(self, client: Any, run: str, done: Mapping[str, Any]) -> None:
        """Send the warnings and the bundle, and register the bundle as a version of the model DATASET-MODEL."""
        from mlflow.exceptions import MlflowException

        for number, warning in enumerate(done.get("warnings") or (), start=1):
            client.set_tag(run, f"recspec.warning.{number}", _text(warning["message"]))
        if self.search is None:
            client.log_artifacts(run, str(done["bundle"]), "bundle")
            with suppress(MlflowException):  # it is there already; if it is not, the next call says why
                client.create_registered_model(self._model)
            client.create_model_version(self._model, f"{client.get_run(run).info.artifact_uri}/bundle", run)


def client_of(uri: str) -> Any:
    """MLflow's client. Raises MissingExtraError if MLflow is not installed."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    mlflow: Any = require_extra("mlflow", "mlflow")
    for name in ("mlflow", "alembic"):  # they log every table that they create
        logging.getLogger(name).setLevel(logging.WARNING)
    return mlflow.MlflowClient(tracking_uri=uri)


def new_run(client: Any, folder: Path, uri: str, parent: str | None = None) -> str:
    """Begin an MLflow run with the name of the folder, and write its id there."""
    from mlflow.exceptions import MlflowException

    name = os.environ.get(EXPERIMENT) or "recspec"
    if client.get_experiment_by_name(name) is None:
        with suppress(MlflowException):  # another process has just made it; if none has, the next call says why
            client.create_experiment(name)
    experiment = client.get_experiment_by_name(name).experiment_id
    tags = {"mlflow.source.name": "recspec", "recspec.run": str(folder.resolve())}
    tags |= {"mlflow.parentRunId": parent} if parent else {}
    run = str(client.create_run(experiment, run_name=folder.resolve().name, tags=tags).info.run_id)
    (folder / STATE).write_text(json.dumps({"uri": shown(uri), "run_id": run}) + "\n", encoding="utf-8")
    return run


def run_of(folder: Path, uri: str) -> str | None:
    """The MLflow run of a folder, if it is one of this server."""
    with suppress(PathError):
        state = read_json(confined(folder, STATE))
        if isinstance(state, dict) and state.get("uri") == shown(uri):
            return str(state.get("run_id"))
    return None


def send_file(run: Path, file: Path) -> str | None:
    """Send a file that was made after a run, such as its report, to the MLflow run that tracks it, if one does.

    `run` is the folder of a run or its bundle. Only the address of the environment gets files: that in `mlflow.json`
    may be a stranger's. Returns what went wrong.
    """
    folder = run.parent if run.name == "bundle" else run
    if not (folder / STATE).is_file():
        return None
    uri = os.environ.get(VARIABLE, "")
    if (tracked := run_of(folder, uri)) is None:
        return f"not sent to MLflow: {folder / STATE} names a run of another address than {VARIABLE}"
    try:
        client_of(uri).log_artifact(tracked, str(file))
    except Exception as error:  # of a library or of the network: the file is written whatever it is
        return f"not sent to {_problem(uri, error)}"
    return None


def _problem(uri: str, error: BaseException) -> str:
    """What failed, in the words of the first error: MLflow wraps `Connection refused` three times."""
    while before := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = before
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"MLflow at {shown(uri)}: {shortened(first_line)}"


# --- searches --------------------------------------------------------------------------------------------------------


@dataclass
class TrackedSearch:
    """The tracking of a search: an MLflow run of its own, to which those of its runs belong."""

    folder: Path
    problem: str | None = None
    """Why its runs are no longer tracked."""
    parts: list[Tracking] = field(default_factory=list)
    """Runs that are over, and may not be sent whole yet."""

    def run(self, client: Any, uri: str) -> str:
        """The MLflow run of the search; the first of its runs in any process begins it."""
        with FileLock(self.folder / f".{STATE}.lock"):
            return run_of(self.folder, uri) or new_run(client, self.folder, uri)

    def wait(self) -> None:
        """Wait until all runs are sent, or a request fails."""
        for part in self.parts:
            if self.problem is None:
                part.wait()
        self.parts.clear()

    def finish(self, setting: str | None, *, start: Mapping[str, object], done: Mapping[str, object]) -> str | None:
        """Track the end of the search as that of a run, by the events of one. Returns what failed."""
        self.wait()
        tracking = Tracking.of(setting, self.folder)
        if self.problem is None and tracking is not None and (self.folder / STATE).is_file():
            tracking.send({"event": "start", "time": time.time(), "resumed_at_step": 1, **start})
            tracking.send({"event": "done", "time": time.time(), **done})
            tracking.close()
            self.problem = tracking.problem
        return self.problem and f"not tracked: {self.problem}"
