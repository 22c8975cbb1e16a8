"""The folder of a run."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from recspec.base.errors import SettingsError, TrainingError, listed
from recspec.base.files import is_own, removed
from recspec.bundle import checkpoint, run_record, versions
from recspec.training import tracking
from recspec.training.tracking import Tracking

BUNDLE = "bundle"
CHECKPOINTS = "checkpoints"
BEST = "best.safetensors"
JOB = ".job"
LOG, CURVES = "log.jsonl", "tensorboard"
WRITTEN = (
    BUNDLE,
    CHECKPOINTS,
    f"{CHECKPOINTS}/{BEST}",
    JOB,
    LOG,
    CURVES,
    run_record.FILE_NAME,
    tracking.STATE,
)
"""Files and folders that a run writes."""
KEPT = ("evaluations", "report.html")
"""What later commands keep beside them, about the model of the run."""

Event = Mapping[str, object]
"""`{"event": "step", "step": 10, "loss": 0.5, ...}`: one JSON line of `log.jsonl`."""


def start_afresh(folder: Path) -> None:
    """Make the folder, unless it holds a run already."""
    refuse_another(
        folder, "continue it with --resume (in Python: resume=True), replace it with --force (force=True), or "
    )
    folder.mkdir(parents=True, exist_ok=True)


def refuse_another(folder: Path, instead: str = "") -> None:
    """Refuse a folder that holds a run already, or is a bundle, whose manifest names each of its files."""
    if (folder / "bundle.json").exists():
        raise SettingsError(f"{folder}: is a bundle, whose files must stay as they are; name another folder")
    if (folder / BUNDLE).exists() or has_checkpoint(folder):
        raise SettingsError(f"{folder}: holds a run already; {instead}name another folder")


def remove_run(folder: Path) -> None:
    """Remove the run that a folder holds, so that another can begin there; files of other origins stay.

    Raises:
        SettingsError: if the folder is a bundle, or what it holds is not a run.
        DataError: if another process is updating the run.
    """
    if (folder / "bundle.json").exists():
        refuse_another(folder)
    found = [name for name in (BUNDLE, CHECKPOINTS) if (folder / name).exists()]
    if not found:
        return
    if not (folder / run_record.FILE_NAME).is_file() and not (folder / LOG).is_file():
        raise SettingsError(
            f"{folder}: --force replaces a run, and this is none: it holds {listed(found)} without "
            f"{run_record.FILE_NAME} and {LOG}; name another folder"
        )
    with versions.updating(folder) if is_own(folder / versions.UPDATES) else nullcontext():
        for name in (*WRITTEN, *KEPT, versions.UPDATES):
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                removed(path)
            else:
                path.unlink(missing_ok=True)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run can continue from here."""
    return checkpoint.newest(folder / CHECKPOINTS) is not None


def settings_of(folder: Path) -> dict[str, dict[str, object]] | None:
    """The sections `train`, `settings` and `chosen` of the run so far; None if no checkpoint holds them."""
    state = checkpoint.newest_state(folder / CHECKPOINTS)
    found = {"train": state.get("train"), "settings": state.get("model_settings")}
    held = {section: values for section, values in found.items() if isinstance(values, dict)}
    chosen = {"precision": state.get("precision"), "event_products": state.get("event_products")}
    return {**held, "chosen": chosen} if len(held) == len(found) else None


def how_to_go_on(folder: Path) -> str:
    """The advice after a run broke off."""
    step = checkpoint.newest(folder / CHECKPOINTS)
    if step is None:
        return "no checkpoint was written yet: start the same command again"
    return f"the same command with --resume continues from the checkpoint of step {step:,}"


def sign(folder: Path) -> None:
    """Write down which job of torchrun trains the run now."""
    if _this_job():
        (folder / JOB).write_text(_this_job(), encoding="utf-8")


def is_of_this_job(folder: Path) -> bool:
    """Whether the job that started this process began or continued the run."""
    file = folder / JOB
    return bool(_this_job()) and file.is_file() and file.read_text(encoding="utf-8") == _this_job()


def _this_job() -> str:
    """The agent of torchrun that started this process; empty without one."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{job} {platform.node()} {os.getppid()}" if job else ""


class RunLog:
    """Writes the events of a run as JSON lines, TensorBoard curves and to MLflow, and passes them on, once open."""

    def __init__(
        self, folder: Path, on_event: Callable[[Event], None], *, tensorboard: bool, track: Tracking | None = None
    ) -> None:
        self.folder, self.on_event, self.wants_curves, self.track = folder, on_event, tensorboard, track
        self.file: TextIO | None = None
        self.curves: Any = None

    def open(self) -> None:
        """Start appending."""
        with self._reporting():
            self.file = (self.folder / LOG).open("a", encoding="utf-8")
        if self.wants_curves and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.curves = SummaryWriter(str(self.folder / CURVES))

    def write(self, event: str, **values: object) -> None:
        """Log one event."""
        if self.file is None:
            return
        line: Event = {"event": event, "time": round(time.time(), 3), **values}
        with self._reporting():
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        self.on_event(line)
        if self.curves is not None and isinstance(values.get("step"), int):
            with self._reporting():
                curves = {name: value for name, value in values.items() if name not in ("step", "steps")}
                for name, value in tracking.numbers(curves):
                    self.curves.add_scalar(f"{event}/{name}", value, values["step"])
        if self.track is not None:
            self.track.send(line)
            self._tell_problem()

    def _tell_problem(self) -> None:
        """Say once that the run is not tracked."""
        if self.track is not None and self.track.problem is not None:
            problem, self.track = self.track.problem, None
            self.write("note", message=f"not tracked: {problem}")

    def close(self) -> None:
        """Flush and close the files, once MLflow has everything or is too slow."""
        if self.file is not None and self.track is not None:
            self.track.close()
            with suppress(TrainingError):
                self._tell_problem()
        with suppress(OSError):  # a full disk; `write` has reported it
            for opened in filter(None, (self.file, self.curves)):
                opened.close()
        self.file = self.curves = None

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"{self.folder}: the log could not be written: {error}; make room, and the same command with --resume "
                "continues from the last checkpoint"
            ) from None
