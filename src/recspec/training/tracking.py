"""Tracking of runs in MLflow, beside the log: parameters, metrics, curves, the report and the bundle.

A thread talks to MLflow, so that a server that is slow or down costs a note and nothing else. `mlflow.json` in the
folder of a run keeps which MLflow run it is, so that a continued run goes on in the same one.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from recspec.base.errors import MissingExtraError, shortened
from recspec.base.files import PathError, confined, read_json, whole_file

STATE = "mlflow.json"
VARIABLE, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
"""MLflow's own variables of the environment."""
DEFAULT_EXPERIMENT = "recspec"
OFF = "none"  # the value of train.mlflow that turns tracking off
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would report to MLflow's makers
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # by default, a request to a dead server takes four minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Variables of the environment that are set before MLflow is loaded, unless they are set already."""
PATIENCE = 15.0  # seconds to wait at the end of a run for MLflow, counted anew with every answer
LOADING = 120.0  # of them, while the library loads, or makes the tables of a new database: work of this machine
SECONDS_PER_BYTE = 1e-6  # more of them for a file that is being sent
MOST_WAITING = 100_000  # events that wait to be sent; a run that logs more while a server sleeps is not tracked
AT_ONCE = 500  # metrics in one request; MLflow takes 1,000
COUNTERS = ("time", "epoch", "epochs", "step", "steps", "metrics")  # of an event, that are no curves of their own
MOST_TEXT = 5_000  # letters of a parameter; MLflow takes 6,000
REPORT = "report.html"


def address(asked: str | None) -> str | None:
    """Where to track: the setting, else the variable of the environment; None: nowhere.

    Raises MissingExtraError if the setting asks for MLflow and it is not installed.
    """
    if asked == OFF:
        return None
    require_mlflow(asked)
    return asked or os.environ.get(VARIABLE) or None


def require_mlflow(asked: str | None) -> None:
    """Raise MissingExtraError if the setting asks for MLflow and it is not installed."""
    if asked not in (None, OFF) and not _is_installed():
        raise MissingExtraError(
            "train.mlflow needs the library 'mlflow', which is not installed: pip install 'recspec[mlflow]'"
        )


def _is_installed() -> bool:
    return importlib.util.find_spec("mlflow") is not None


def check_address(text: str) -> str:
    """Check an address of MLflow. Raises ValueError if it holds a password, which would stand in every bundle."""
    if re.search(r"//[^/]*@", text):
        raise ValueError(
            "holds a user name or a password, which the bundle would hold too; give them as the environment variables "
            f"MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole address as {VARIABLE}"
        )
    return text


# --- names -----------------------------------------------------------------------------------------------------------


def metric_name(name: str) -> str:
    """A name that MLflow accepts: `full/ndcg@10` is `full/ndcg_at_10`."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name.replace("@", "_at_"))[:250].strip("/") or "_"


def metrics_of(event: Mapping[str, object]) -> dict[str, float]:
    """The curves of an event: `valid/full/ndcg_at_10`, `step/loss`; the values of the best weights are `best/...`."""
    kind = str(event["event"])
    if kind not in ("step", "epoch", "done", "tried"):
        return {}
    where = {"epoch": "valid", "done": "best"}
    held = {name: value for name, value in event.items() if name not in COUNTERS}
    found = {f"{kind}/{name}": value for name, value in _numbers(held)}
    metrics = event.get("metrics")
    if isinstance(metrics, Mapping):
        found |= {f"{where.get(kind, kind)}/{name}": value for name, value in _numbers(metrics)}
    return {metric_name(name): value for name, value in found.items() if math.isfinite(value)}


def params_of(start: Mapping[str, object]) -> dict[str, str]:
    """The parameters of a run, from the first event of its log."""
    sections = {"settings": start.get("model_settings"), "train": start.get("train")}
    plain = (
        "model",
        "dataset",
        "recspec",
        "torch",
        "parameters",
        "rows",
        "negatives",
        "batch_size",
        "device",
        "precision",
        "world_size",
        "metric",
        "splits",
    )
    found = {name: start[name] for name in plain if start.get(name) is not None}
    for section, values in sections.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            found[f"{section}.{name}"] = value
    return {metric_name(name): _text(value) for name, value in found.items()}


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


def _numbers(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


# --- one run ---------------------------------------------------------------------------------------------------------


@dataclass
class Tracking:
    """Sends the events of one run to MLflow from a thread of its own."""

    folder: Path
    uri: str
    dataset: Path | None = None
    part_of: TrackedSearch | None = None
    """The search that the run is a part of; its bundle is then neither sent nor registered."""
    problem: str | None = field(default=None, init=False)
    """Why the run is not tracked, or no longer."""
    _events: queue.Queue[Mapping[str, object] | None] = field(default_factory=queue.Queue, init=False)
    _answered: float = field(default_factory=time.monotonic, init=False)
    _allowed: float = field(default=LOADING, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @classmethod
    def of(cls, asked: str | None, folder: Path, dataset: Path, part_of: TrackedSearch | None = None) -> Self | None:
        """The tracking that the setting `asked` or the environment asks for; None in a search that has failed before.

        Raises MissingExtraError if the setting asks for MLflow and it is not installed.
        """
        uri = address(asked)
        if uri is None or (part_of is not None and part_of.problem is not None):
            return None
        return cls(folder, uri, dataset, part_of)

    def send(self, event: Mapping[str, object]) -> None:
        """Take an event; returns at once."""
        if self.problem is not None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="recspec-mlflow", daemon=True)
            self._thread.start()
        if self._events.qsize() >= MOST_WAITING:
            self._fail(f"MLflow at {shown(self.uri)} is too slow")
        self._events.put(event)

    def close(self) -> None:
        """Wait until everything is sent, as long as MLflow answers; of a part of a search, the search waits."""
        if self._thread is None:
            return
        self._events.put(None)
        self._answered = time.monotonic()
        if self.part_of is None:
            self.wait()
        else:
            self.part_of.parts.append(self)

    def wait(self) -> None:
        """Wait until everything is sent, as long as MLflow answers."""
        assert self._thread is not None
        while self._thread.is_alive() and self.problem is None:
            self._thread.join(0.05)
            if time.monotonic() - self._answered > self._allowed:
                self._fail(f"MLflow at {shown(self.uri)} does not answer")

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem
        if self.part_of is not None:
            self.part_of.problem = self.part_of.problem or self.problem

    def _work(self) -> None:
        if not _is_installed():
            self._fail("MLflow is not installed: pip install 'recspec[mlflow]'")
            return
        try:
            check_reachable(self.uri)
            with _Sender(self) as sender:
                while (event := self._events.get()) is not None:
                    sender.take([event, *self._waiting()])
                    if self.problem is not None:
                        return
        except Exception as error:  # of a library or of the network: whatever it is, training goes on
            self._fail(f"MLflow at {shown(self.uri)}: {_said(error)}")

    def _waiting(self) -> Iterator[Mapping[str, object]]:
        """The events that wait, up to the end."""
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if event is None:
                    self._events.put(None)
                    return
                yield event

    def answered(self, allowed: float = PATIENCE) -> None:
        """Note that MLflow has answered, and how many seconds the next answer may take."""
        self._answered, self._allowed = time.monotonic(), allowed


class _Sender:
    """The MLflow run of a `Tracking`."""

    def __init__(self, tracking: Tracking) -> None:
        self.tracking, self.client = tracking, client_of(tracking.uri)
        self.run = ""
        self.status = "FAILED"  # unless an event says how the run ended
        self.model = self.dataset = ""
        tracking.answered(PATIENCE if _is_server(tracking.uri) else LOADING)

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, *_: object) -> None:
        if self.run:
            self.client.set_terminated(self.run, self.status)

    def take(self, events: list[Mapping[str, object]]) -> None:
        """Send events: many metrics in one request."""
        from mlflow.entities import Metric

        metrics: list[Any] = []
        for event in events:
            if event["event"] == "start":
                self._start(event)
            elif event["event"] == "file":
                self._send_file(Path(str(event["path"])))
            if event["event"] in ("note", "warning", "file") or not self.run:
                continue
            step, when = int(float(str(event.get("step") or 0))), int(float(str(event["time"])) * 1000)
            metrics += [Metric(name, value, when, step) for name, value in metrics_of(event).items()]
            if event["event"] == "interrupted":
                self.status = "KILLED"
        for start in range(0, len(metrics), AT_ONCE):
            self.client.log_batch(self.run, metrics=metrics[start : start + AT_ONCE])
            self.tracking.answered()
        for event in events:
            if event["event"] == "done" and self.run:
                self._finish(event)

    def _start(self, start: Mapping[str, object]) -> None:
        tracking, folder = self.tracking, self.tracking.folder
        dataset = tracking.dataset
        self.model, self.dataset = str(start.get("model")), dataset.name if dataset is not None else ""
        held = _state(folder, tracking.uri) if start.get("resumed_at_step") else None
        if held is not None and _is_there(self.client, held):
            self.run = held
            self.client.update_run(held, "RUNNING")
        else:
            tags = {"mlflow.source.name": "recspec", "recspec.run": str(folder.resolve())}
            if tracking.part_of is not None:
                tags["mlflow.parentRunId"] = search_run(self.client, tracking.part_of.folder, tracking.uri)
            self.run = new_run(self.client, folder, tracking.uri, tags)
        told = {"dataset": str(dataset.resolve())} if dataset is not None else {}
        log_params(self.client, self.run, {**params_of(start), **told})
        tracking.answered()

    def _send_file(self, file: Path) -> None:
        """Send one file to the run of the folder; its status stays as it is."""
        held = _state(self.tracking.folder, self.tracking.uri)
        if held is not None and _is_there(self.client, held):
            self.tracking.answered(PATIENCE + file.stat().st_size * SECONDS_PER_BYTE)
            self.client.log_artifact(held, str(file))

    def _finish(self, done: Mapping[str, object]) -> None:
        self.status = "FINISHED"
        for number, warning in enumerate(done.get("warnings") or ()):  # type: ignore[var-annotated, arg-type]
            said = warning.get("message") if isinstance(warning, Mapping) else warning
            self.client.set_tag(self.run, f"recspec.warning.{number + 1}", _text(said))
        if self.tracking.part_of is None:
            send_result(self.client, self.run, self.tracking.folder, Path(str(done["bundle"])), self.tracking)
            register(self.client, self.run, f"{self.dataset or 'recspec'}-{self.model}")


# --- what is sent ----------------------------------------------------------------------------------------------------


def client_of(uri: str) -> Any:
    """MLflow's client."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # they tell of every table that they make
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _is_server(uri: str) -> bool:
    return urlsplit(uri).scheme in ("http", "https")


def check_reachable(uri: str) -> None:
    """Raise OSError if nobody listens at an address, which MLflow would try for minutes."""
    parts = urlsplit(uri)
    if _is_server(uri) and parts.hostname:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=5).close()


def new_run(client: Any, folder: Path, uri: str, tags: Mapping[str, str]) -> str:
    """Begin an MLflow run of the name of the folder, and write it down there."""
    run = client.create_run(_experiment(client), run_name=folder.resolve().name, tags=dict(tags)).info.run_id
    with suppress(OSError), whole_file(folder / STATE) as temporary:
        temporary.write_text(json.dumps({"uri": shown(uri), "run_id": run}) + "\n", encoding="utf-8")
    return str(run)


def _experiment(client: Any) -> str:
    from mlflow.exceptions import MlflowException

    name = os.environ.get(EXPERIMENT) or DEFAULT_EXPERIMENT
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another process has made it
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _state(folder: Path, uri: str) -> str | None:
    """The MLflow run of a folder, if it is one of this server."""
    with suppress(PathError):
        held = read_json(confined(folder, STATE))
        if isinstance(held, dict) and held.get("uri") == shown(uri):
            return str(held.get("run_id"))
    return None


def _is_there(client: Any, run: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run).info.lifecycle_stage == "active")
    except MlflowException:
        return False


def log_params(client: Any, run: str, params: Mapping[str, str]) -> None:
    """Log parameters; those that a continued run has changed become tags, because MLflow keeps the first value."""
    from mlflow.entities import Param, RunTag

    held = client.get_run(run).data.params
    fresh = [Param(name, value) for name, value in params.items() if name not in held]
    changed = [RunTag(f"changed.{name}", value) for name, value in params.items() if held.get(name, value) != value]
    for start in range(0, len(fresh), 90):  # MLflow takes 100
        client.log_batch(run, params=fresh[start : start + 90])
    if changed:
        client.log_batch(run, tags=changed)


def send_result(client: Any, run: str, folder: Path, bundle: Path, tracking: Tracking | None = None) -> None:
    """Send the bundle, file by file, and the report if there is one."""
    files = [
        (file, f"bundle/{file.parent.relative_to(bundle).as_posix()}".removesuffix("/."))
        for file in sorted(bundle.rglob("*"))
        if file.is_file()
    ]
    if (report := folder / REPORT).is_file():
        files.append((report, ""))
    for file, place in files:
        if tracking is not None:
            tracking.answered(PATIENCE + file.stat().st_size * SECONDS_PER_BYTE)
        client.log_artifact(run, str(file), place or None)
    if tracking is not None:
        tracking.answered()


def register(client: Any, run: str, name: str) -> None:
    """Register the bundle of a run as a new version of the model `name`."""
    from mlflow.exceptions import MlflowException

    name = re.sub(r"[/:]", "-", name)[:200]
    with suppress(MlflowException):  # it is there already; if it is not, the next call says why
        client.create_registered_model(name)
    client.create_model_version(name, f"{client.get_run(run).info.artifact_uri}/bundle", run)


# --- searches --------------------------------------------------------------------------------------------------------

_SEARCHES = threading.Lock()


def search_run(client: Any, folder: Path, uri: str) -> str:
    """The MLflow run of a search, to which those of its parts belong."""
    with _SEARCHES:
        held = _state(folder, uri)
        if held is not None and _is_there(client, held):
            return held
        return new_run(client, folder, uri, {"mlflow.source.name": "recspec", "recspec.run": str(folder.resolve())})


@dataclass
class TrackedSearch:
    """The tracking of a search, whose runs belong to one of its own."""

    folder: Path
    problem: str | None = None
    """Why its runs are no longer tracked."""
    parts: list[Tracking] = field(default_factory=list)
    """Runs that are over, and may not be sent whole yet."""

    def wait(self) -> None:
        """Wait until all runs are sent, as long as MLflow answers."""
        for part in self.parts:
            if self.problem is None:
                part.answered()
                part.wait()
        self.parts.clear()

    def finish(
        self, asked: str | None, dataset: Path, *, bundle: Path, start: Mapping[str, object], done: Mapping[str, object]
    ) -> str | None:
        """Track the end of the search as that of a run: the best settings, values and bundle. Returns what failed."""
        self.wait()
        tracking = Tracking.of(asked, self.folder, dataset)
        if self.problem is None and tracking is not None and (self.folder / STATE).is_file():
            tracking.send({"event": "start", "time": time.time(), "resumed_at_step": 1, **start})
            tracking.send({"event": "done", "time": time.time(), "bundle": str(bundle), **done})
            tracking.close()
            self.problem = tracking.problem
        return self.problem and f"not tracked: {self.problem}"


def send_file(run: Path, file: Path) -> str | None:
    """Send a file that was made after a run, such as its report, to the MLflow run that tracks it, if one does.

    `run` is the folder of a run or its bundle. Only the address of the environment gets files: that in `mlflow.json`
    may be a stranger's. Returns what went wrong.
    """
    folder = next((each for each in (run, run.parent) if (each / STATE).is_file()), None)
    if folder is None or (folder != run and run.name != "bundle"):
        return None
    try:
        held = read_json(confined(folder, STATE))
    except PathError:
        return None
    uri = str(held.get("uri")) if isinstance(held, dict) else ""
    ours = os.environ.get(VARIABLE, "")
    if not ours or shown(ours) != uri:
        return f"not sent to MLflow: the run is tracked at {shortened(uri)!r}; set {VARIABLE} to that address"
    tracking = Tracking(folder, ours)
    tracking.send({"event": "file", "path": str(file)})
    tracking.close()
    return tracking.problem and f"not sent to MLflow: {tracking.problem}"


def shown(uri: str) -> str:
    """An address without its user name and password."""
    return re.sub(r"//[^/@]*@", "//", uri)


def _said(error: Exception) -> str:
    return shortened((str(error).strip().splitlines() or [type(error).__name__])[0])
