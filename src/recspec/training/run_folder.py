"""The folder of a run: what it holds, its log and its checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from recspec.base import config
from recspec.base.errors import CheckpointError, SettingsError, TrainingError, listed
from recspec.base.files import is_own, removed
from recspec.bundle import Checkpoint, checkpoint, run_record, versions
from recspec.bundle import folder as bundle
from recspec.loading import PlacementSettings
from recspec.training import tracking
from recspec.training.plan import TrainingPlan
from recspec.training.step import Built, WeightAverage
from recspec.training.tracking import Tracking

BUNDLE = "bundle"
CHECKPOINTS = "checkpoints"
BEST = "best.safetensors"
JOB = ".job"
LOG, CURVES, RECIPE = "log.jsonl", "tensorboard", "recipe.yaml"
WRITTEN = (BUNDLE, CHECKPOINTS, f"{CHECKPOINTS}/{BEST}", JOB, LOG, CURVES, RECIPE, run_record.FILE_NAME, tracking.STATE)
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
    if (folder / RECIPE).exists() and not (folder / LOG).exists():
        raise SettingsError(f"{folder}: a run writes its {RECIPE} there, and yours is there already; move it elsewhere")
    folder.mkdir(parents=True, exist_ok=True)


def write_recipe(folder: Path, dataset: str) -> None:
    """Write the recipe that repeats a run; where it is tracked is no part of that."""
    card = bundle.read_card(folder / BUNDLE)
    about = {"dataset": dataset, "how": "`recspec train`", "recspec": card.recspec}
    train = {name: value for name, value in card.train.items() if name != "mlflow"}
    if train["metric"] is not None:  # a proposed one gives way where lists are too short for it; one of a recipe fails
        train["metric"] = card.trained.get("valid_metric") or train["metric"]
    recipe = {"about": about, "model": card.model, "settings": dict(card.settings), "train": train}
    config.write_recipe(folder / RECIPE, recipe)


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
        for name in (*WRITTEN, *KEPT, versions.UPDATES, versions.CHANGES):
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                removed(path)
            else:
                path.unlink(missing_ok=True)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run can continue from here."""
    return checkpoint.newest(folder / CHECKPOINTS) is not None


def resumed_settings(folder: Path) -> dict[str, dict[str, object]] | None:
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

    def begin(self, notes: Sequence[str], **start: object) -> None:
        """Start appending: how the run begins, and its notes."""
        self.open()
        self.write("start", **start)
        for note in notes:
            self.write("note", message=note)

    def open(self) -> None:
        """Start appending."""
        with self._reporting():
            self.file = (self.folder / LOG).open("a", encoding="utf-8")

    def write(self, event: str, **values: object) -> None:
        """Log one event."""
        if self.file is None:
            return
        line: Event = {"event": event, "time": round(time.time(), 3), **values}
        with self._reporting():
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        self.on_event(line)
        if self.wants_curves and isinstance(values.get("step"), int):
            with self._reporting():
                self._draw(event, values)
        if self.track is not None:
            self.track.send(line)
            self._tell_problem()

    def _draw(self, event: str, values: Mapping[str, object]) -> None:
        """Add a point to each of TensorBoard's curves."""
        if self.curves is None:
            self.wants_curves = importlib.util.find_spec("tensorboard") is not None
            if not self.wants_curves:
                return
            from torch.utils.tensorboard import SummaryWriter  # .3 s, which the first step need not wait for

            self.curves = SummaryWriter(str(self.folder / CURVES))
        curves = {name: value for name, value in values.items() if name not in ("step", "steps")}
        for name, value in tracking.numbers(curves):
            self.curves.add_scalar(f"{event}/{name}", value, values["step"])

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


# --- checkpoints -----------------------------------------------------------------------------------------------------

_OF_THE_MACHINE = {"affinity", "checkpoint_minutes", "embedding_backend", "keep_checkpoints", "log_every", "threads"}
_OF_THE_END = {"minutes", "calibration", "patience", "falling_patience", "target"}
MAY_CHANGE = frozenset({"mlflow", "tensorboard", *_OF_THE_MACHINE, *_OF_THE_END, *PlacementSettings.model_fields})
"""Settings that a continued run may change."""


@dataclass
class Progress:
    """The counters and the best evaluation of a run; a checkpoint's header holds them."""

    epoch: int = 0
    batch: int = 0
    lanes: int = 0
    """Ranks at the start of the epoch, on which streamed batches depend; 0: as many as now."""
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_epoch: float = 0.0
    best_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    trace: dict[str, list[float]] = field(default_factory=dict)
    """Values by metric, and `epoch`, of each evaluation at the end of an epoch."""
    errors: list[float | None] = field(default_factory=list)
    """Of each of them, the standard error of its difference from the best before it, over the same rows, if known."""
    count: int = 0
    """Rows, users or groups behind the metric; of the rarer class for AUC."""
    cuts: int = 0
    """How often the learning rate was cut to a tenth, as valid no longer improved."""
    cut_at: int = 0
    """Evaluations of the trace before the last cut."""
    stopped: str = ""
    """`patience`, `falling`, `target` or `minutes`; empty while training goes on, and after the last epoch."""

    def epochs(self, steps_per_epoch: int) -> float:
        """Epochs behind the run, with the share of the one under way."""
        return self.epoch + self.batch / steps_per_epoch if self.batch else self.epoch

    @property
    def samples_per_second(self) -> float:
        """The speed of the whole run so far."""
        return self.samples / max(self.seconds, 1e-9)


PROGRESS = TypeAdapter(Progress)


class RunCheckpoints:
    """Writes the checkpoints of a run and continues from them; all ranks take part."""

    def __init__(self, built: Built, folder: Path, scaler: torch.amp.GradScaler, average: WeightAverage | None) -> None:
        self.plan, self.folder, self.ranks = built.plan, folder / CHECKPOINTS, built.ranks
        self.model, self.shards, self.optimizers = built.model, built.shards, built.optimizers
        self.scaler, self.average = scaler, average
        self.best = self.folder / BEST
        """The file of the best evaluation's weights."""

    def save(self, progress: Progress) -> None:
        """Write a checkpoint on the first rank and delete the oldest ones."""
        whole = self.shards.whole
        average = whole(self.average.tensors) if self.average is not None else {}
        state = {**identity(self.plan), "progress": asdict(progress), "scaler": self.scaler.state_dict()}
        run = Checkpoint(whole(self.model.state_dict()), whole(self.optimizers.tensors()), state, average)
        if self.ranks.is_first:
            checkpoint.save(self.folder, run, step=progress.step, keep=self.plan.settings.keep_checkpoints)
        else:
            checkpoint.take_part(run.tensors)

    def save_best(self, epoch: float) -> None:
        """Write the model's weights as those of the best evaluation."""
        whole = self.shards.whole(self.model.state_dict())
        if self.ranks.is_first:
            checkpoint.write_tensors(self.best, whole, {"format": bundle.FORMAT, "epoch": epoch})
        else:
            checkpoint.take_part(whole)

    def load_best(self) -> None:
        """Give the model the weights of the best evaluation; every rank reads the rows that it holds."""
        self.ranks.barrier()  # the first rank writes the file
        weights, _ = checkpoint.read_tensors(self.best, self.shards.held)
        self.model.load_state_dict(self.shards.take(weights))

    def restore(self) -> tuple[Progress, Sequence[str]]:
        """Continue from the newest whole checkpoint, which every rank reads; returns notes for the log too."""
        saved, notes = checkpoint.load_latest(self.folder, self.shards.held)
        progress = progress_of(saved)
        self._check_same_step(progress.step)
        check_same_run(self.plan, saved)
        if progress.epoch > self.plan.settings.epochs:
            raise CheckpointError(
                f"{saved.path}: the run has {progress.epoch} epochs behind it, and train.epochs is "
                f"{self.plan.settings.epochs}; ask for {progress.epoch} or more, or start another run without --resume"
            )
        try:
            bad = [name for name, each in saved.weights.items() if not bool(cast(Tensor, each).isfinite().all())]
            if bad:
                raise ValueError(f"the weights {listed(bad)} hold numbers that are not finite")
            self.model.load_state_dict(self.shards.take(cast(Mapping[str, Tensor], saved.weights)))
            self.optimizers.restore(self.shards.take(cast(Mapping[str, Tensor], saved.optimizer)))
            self.scaler.load_state_dict(cast(dict[str, object], saved.state["scaler"]))
            if self.average is not None:
                self.average.restore(cast(Mapping[str, Tensor], saved.average))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{saved.path}: is not a checkpoint of this run: {error}") from None
        return progress, notes

    def _check_same_step(self, step: int) -> None:
        """Refuse to continue where ranks found different checkpoints: one may read a file that another cannot."""
        steps = self.ranks.gather(torch.tensor([step])).tolist()
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"{self.folder}: the newest whole checkpoints that ranks find are of steps "
                f"{', '.join(f'{found} (rank {rank})' for rank, found in enumerate(steps))}; every host must read the "
                "same files"
            )


def progress_of(saved: Checkpoint) -> Progress:
    """How far the run of a checkpoint was."""
    try:
        return PROGRESS.validate_python(saved.state.get("progress"))
    except ValidationError as error:
        raise CheckpointError(f"{saved.path}: damaged: {error}") from None


def identity(plan: TrainingPlan) -> dict[str, object]:
    """What distinguishes a run from another, as JSON values."""
    return {
        "model": plan.model,
        "model_settings": plan.model_settings.model_dump(mode="json"),
        "train": plan.settings.model_dump(mode="json"),
        "spec": plan.spec.content_hash(),
        "loader": plan.loader.mode,
        "precision": plan.precision.value,
        "event_products": plan.event_products.value if plan.event_products is not None else None,
    }


def check_same_run(plan: TrainingPlan, saved: Checkpoint) -> None:
    """Refuse to continue another run: its weights would train on under settings that it never had."""
    may_change = {f"train.{name}" for name in MAY_CHANGE}
    if all(each.schedule in ("constant", "step") for each in (plan.settings, *plan.settings.part_settings.values())):
        may_change.add("train.epochs")
    for name in ("model_settings", "train"):
        if not isinstance(saved.state.get(name, {}), dict):
            raise CheckpointError(f"{saved.path}: damaged: its '{name}' is {saved.state[name]!r}; expected settings")
    now, then = _described(identity(plan)), _described(saved.state)
    problems = [
        f"{name} is {now.get(name)!r}, but the run was started with {then.get(name)!r}"
        for name in {**now, **then}
        if now.get(name) != then.get(name) and name not in may_change
    ]
    if problems:
        raise CheckpointError.of(
            f"{saved.path}: this is another run; --resume continues the same one, with the same --recipe and --set",
            problems,
        )


def _described(run: Mapping[str, object]) -> dict[str, object]:
    """Each part of a run's identity under the name that a user knows."""
    own, train = (cast(dict[str, object], run.get(name, {})) for name in ("model_settings", "train"))
    return {
        "model": run.get("model"),
        "the dataset's features": run.get("spec"),
        "loader mode (train.memory_budget)": run.get("loader"),
        "precision": run.get("precision"),
        **{f"settings.{name}": value for name, value in own.items()},
        **{f"train.{name}": value for name, value in train.items()},
    }
