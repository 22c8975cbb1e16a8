"""Training of models that are fitted in one go: the plan, the choice of settings on valid, the bundle.

The first rank fits; the others wait. Nothing is left to continue: a stopped fit starts again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch

from recspec import __version__
from recspec.base import config, machine
from recspec.base.errors import Interrupted, SettingsError
from recspec.base.signals import stopping_at_once
from recspec.base.stores import shown
from recspec.bundle import Card, DataRecord, run_record
from recspec.bundle import folder as bundle
from recspec.data.storage import check_sidecar_files, label_columns
from recspec.evaluation import Fitted, ItemFit, RowFit, Tried, warnings
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.models import FittedItemModel, FittedModel, ItemModel, LogisticRegression, find_model, on_meta_device
from recspec.models.layers import RowsHeld
from recspec.training import run_folder
from recspec.training.beside import item_baselines
from recspec.training.choices import Choice, check_splits
from recspec.training.result import Result, inform, seen_of
from recspec.training.run_folder import Event, RunLog
from recspec.training.settings import TrainSettings
from recspec.training.tracking import TrackedSearch, Tracking

STOPPED = "stopped as asked; nothing was written, so start the same command again"


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """Every choice of a fit and its reason, made before the data is read."""

    model: str
    kind: type[FittedModel]
    spec: FeatureSpec
    settings: TrainSettings
    model_settings: config.Settings
    method: Choice[str]
    make: Callable[[RowsHeld | None], FittedModel] = field(repr=False, compare=False)
    """Builds the model; it holds no embedding tables to divide."""
    negatives: Choice[int]
    valid: Choice[str]
    metric: Choice[str]
    chosen: Choice[tuple[str, ...]]
    """Names of the settings that are chosen on valid."""
    threads: Choice[int]
    parameters: int
    notes: tuple[str, ...]
    device: torch.device = field(repr=False)
    world_size: int
    update_of: tuple[Path, ...] = ()
    """The version that takes new events; empty if this is no update."""

    @property
    def choices(self) -> dict[str, Choice[object]]:
        """The choices by name."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in named if isinstance(value, Choice)}

    def read_settings(self) -> dict[str, object]:
        """The settings of training that the fit reads, as JSON values."""
        return self.settings.model_dump(mode="json", include=set(self.kind.reads))

    def described(self) -> dict[str, object]:
        """Everything that decides how the fit goes, as JSON values: the first event of its log."""
        return {
            "recspec": __version__,
            "torch": torch.__version__,
            "data": shown(self.spec.folder),
            "dataset": str(self.spec.metadata.get("dataset") or ""),
            "model": self.model,
            "model_settings": self.model_settings.model_dump(mode="json"),
            "train": self.read_settings(),
            "parameters": self.parameters,
            "fitted": True,
            "chosen": list(self.chosen.value),
            "device": "cpu",
            "world_size": self.world_size,
            "threads": self.threads.value,
            "choices": {name: str(choice) for name, choice in self.choices.items()},
            "splits": list(self.settings.train_splits),
            "metric": self.metric.value if self.valid.value else None,
        }

    def to_dict(self) -> dict[str, object]:
        """The plan as one JSON value, each choice with its value and its reason."""
        choices = {name: {"value": each.value, "reason": each.reason} for name, each in self.choices.items()}
        return {**self.described(), "choices": choices, "notes": list(self.notes)}


def make_fit_plan(
    model_name: str,
    spec: FeatureSpec,
    settings: TrainSettings,
    model_settings: config.Settings,
    ranks: Ranks,
    *,
    resume: bool = False,
) -> FitPlan:
    """Make every choice of a fit.

    Raises:
        SpecError: if the dataset lacks a role that the model needs, or a split.
        SettingsError: for settings of training that the model does not read, or too little memory.
        DataError: if a file that the dataset's metadata names is missing.
    """
    kind = find_model(model_name)
    assert issubclass(kind, FittedModel)
    check_settings(kind, settings)
    check_splits(spec, settings.train_splits)
    check_sidecar_files(spec)  # the bundle needs them
    model = on_meta_device(lambda: kind(spec, model_settings))
    valid = _pick_valid(spec, settings)
    threads = machine.pick_threads(
        settings.threads, torch.get_num_threads(), os.environ, machine.cores_at_once(), processes=ranks.local_world_size
    )
    notes = [f"{model_name} is fitted in one go: there is nothing to continue, so it is fitted again"] if resume else []
    if ranks.world_size > 1:
        notes.append(f"{model_name} is fitted by the first process; the others wait")
    return FitPlan(
        model=model_name,
        kind=kind,
        spec=spec,
        settings=settings,
        model_settings=model_settings,
        method=Choice("fitted in one go", model.how()),
        make=lambda _: kind(spec, model_settings),
        negatives=Choice(0, "it is fitted to the positives"),
        valid=valid,
        metric=_pick_metric(kind, settings),
        chosen=_pick_chosen(kind, model_settings, valid.value),
        threads=Choice(*threads),
        parameters=model.num_parameters(),
        notes=tuple(notes),
        device=ranks.device,
        world_size=ranks.world_size,
    )


def check_settings(kind: type[FittedModel], settings: TrainSettings) -> None:
    """Refuse settings of training that were given and that the model does not read."""
    given = settings.model_fields_set - set(kind.reads)
    if settings.model_fields_set == set(type(settings).model_fields):  # of a recipe, which holds all of them
        given = {name for name in given if getattr(settings, name) != type(settings).model_fields[name].default}
    unread = sorted(given)
    if unread:
        names = ", ".join(f"train.{name}" for name in unread)
        read = ", ".join(f"train.{name}" for name in kind.reads)
        verb = "is a setting" if len(unread) == 1 else "are settings"
        raise SettingsError(
            f"{names} {verb} of gradient steps, and {kind.name} is fitted in one go; leave "
            f"{'it' if len(unread) == 1 else 'them'} out. It reads {read} and its own settings"
        )


def _pick_metric(kind: type[FittedModel], settings: TrainSettings) -> Choice[str]:
    if settings.metric is not None:
        return Choice(settings.metric, "as asked")
    ranks = issubclass(kind, ItemModel)
    return Choice(kind.metric, "all items ranked for each user" if ranks else "rows have labels of their own")


def _pick_valid(spec: FeatureSpec, settings: TrainSettings) -> Choice[str]:
    """The split on which settings are chosen; valid may be fitted on too, once they are."""
    if "valid" not in spec.splits:
        return Choice("", "no split valid: settings that were not given have their defaults")
    if set(settings.train_splits) == {"valid"}:
        return Choice("", "train.train_splits is valid alone: settings that were not given have their defaults")
    if "valid" in settings.train_splits:
        return Choice("valid", "settings are chosen on it first; then all of train.train_splits is fitted")
    return Choice("valid", "the dataset has this split")


def _pick_chosen(kind: type[FittedModel], settings: config.Settings, valid: str) -> Choice[tuple[str, ...]]:
    names = kind.searched()
    free = tuple(name for name in names if name not in settings.model_fields_set)
    if not names:
        return Choice((), f"{kind.name} has nothing to choose")
    if not valid:
        return Choice((), "there is no split valid to choose on")
    if not free:
        return Choice((), "all were given")
    return Choice(free, "not given; the best of a few values on valid is taken")


def run_fit(
    plan: FitPlan,
    folder: Path,
    ranks: Ranks,
    on_event: Callable[[Event], None] = lambda _: None,
    stop_requested: Callable[[], bool] = lambda: False,
    *,
    resume: bool = False,
    baselines: bool = False,
    part_of: TrackedSearch | None = None,
) -> Result:
    """Fit on the first rank and write the bundle.

    Raises:
        Interrupted: if `stop_requested` says so; nothing is written then but the log.
    """
    result = Result(folder / run_folder.BUNDLE, 0.0, {}, 0.0, 0.0, "fitted", {})
    if ranks.is_first:
        if not resume:
            run_folder.start_afresh(folder)
        folder.mkdir(parents=True, exist_ok=True)
        kind: run_record.Kind = "updated" if plan.update_of else "fitted"
        record = run_record.begin(folder, kind, plan.model, DataRecord.of(plan.spec), made_of=plan.update_of)
        track = Tracking.of(plan.settings.mlflow, folder, part_of)
        log = RunLog(folder, on_event, tensorboard=plan.settings.tensorboard, track=track)
        with closing(log):
            result = _fit(plan, folder, log, stop_requested, baselines)
        record.finish(folder, result.seconds)
    ranks.barrier()
    return result


def _fit(plan: FitPlan, folder: Path, log: RunLog, stop_requested: Callable[[], bool], baselines: bool) -> Result:
    log.open()
    log.write("start", **plan.described())
    for note in plan.notes:
        log.write("note", message=note)
    started = time.monotonic()
    ends = [started]

    def late() -> bool:
        """Whether one more combination, as long as the last one, would end after the minutes."""
        minutes = plan.settings.minutes
        return minutes is not None and 2 * ends[-1] - ends[-2] - started > 60 * minutes

    def tell(tried: Tried) -> None:
        ends.append(time.monotonic())
        log.write("tried", settings=dict(tried.settings), metric=plan.metric.value, value=tried.value, best=tried.best)
        if stop_requested():
            raise Interrupted(STOPPED)

    fit = _fit_of(plan, tell, late)
    try:
        with stopping_at_once(STOPPED):
            found = fit.run()
            seconds = time.monotonic() - started
            seen = seen_of(plan.spec, inform(found.model, plan.spec))
            beside = _beside(plan, fit, found, seconds) if baselines else {}
    except Interrupted:
        log.write("interrupted")
        raise
    told = warnings.of_label_columns(label_columns(plan.spec, found.model.features()))
    found = replace(found, warnings=(*told, *found.warnings))
    if plan.chosen.value and plan.valid.value and found.value is None:
        what = f"{plan.valid.value} has no positive of an item that is new to its user, or none of a user of train"
        then = "so settings could not be chosen; those that were not given have their defaults"
        log.write("note", message=f"{what}, {then}")
    if doubt := found.model.doubt():
        log.write("note", message=doubt)
    where = bundle.save(folder / run_folder.BUNDLE, found.model, _card(plan, found, seconds), seen=seen)
    speed = found.num_pairs / max(seconds, 1e-9)
    result = Result(
        where, 0.0, found.metrics, speed, seconds, "fitted", {}, found.warnings, metric=found.metric, baselines=beside
    )
    for warning in result.warnings:
        log.write("warning", **warning.to_dict())
    log.write(
        "done",
        bundle=str(where),
        stopped=result.stopped,
        epochs=0,
        best_epoch=0,
        best=found.value,
        metric=found.metric or plan.metric.value,
        metrics=found.metrics,
        baselines=dict(beside),
        settings=found.model.settings.model_dump(mode="json"),
        samples_per_second=result.samples_per_second,
        seconds=seconds,
        warnings=[each.to_dict() for each in result.warnings],
    )
    return result


def _fit_of(plan: FitPlan, tell: Callable[[Tried], None], late: Callable[[], bool]) -> ItemFit | RowFit:
    kind, spec, own, train = plan.kind, plan.spec, plan.model_settings, plan.settings
    valid, metric = plan.valid.value, plan.metric.value
    if issubclass(kind, FittedItemModel):
        return ItemFit(kind, spec, own, train.train_splits, valid, metric, train.seed, train.valid_users, tell, late)
    assert issubclass(kind, LogisticRegression)
    return RowFit(kind, spec, own, train.train_splits, valid, metric, tell, late)


def _beside(plan: FitPlan, fit: ItemFit | RowFit, found: Fitted, seconds: float) -> dict[str, float]:
    """The metric that chose the settings, of cheap baselines on the same users of valid."""
    protocol, _, name = found.metric.partition("/")
    if not isinstance(fit, ItemFit) or found.value is None or (question := fit.task()) is None:
        return {}
    before = [split for split in plan.settings.train_splits if split != plan.valid.value]
    others = item_baselines(question, before, plan.model, seconds)
    return {other: of.metrics[protocol][name] for other, of in others.items() if name in of.metrics.get(protocol, {})}


def _card(plan: FitPlan, found: Fitted, seconds: float) -> Card:
    trained = {
        "epoch": 0,
        "seconds": round(seconds, 3),
        "splits": list(plan.settings.train_splits),
        "stopped": "fitted",
        "device": "cpu",
        "world_size": plan.world_size,
        "torch": torch.__version__,
        "valid_metric": found.metric or None,
        "tried": [{"settings": dict(each.settings), "value": each.value} for each in found.tried],
        "logits_from": found.logits_from,
    }
    return Card(
        model=plan.model,
        settings=found.model.settings.model_dump(mode="json"),
        train=plan.read_settings(),
        trained=trained,
        metrics=found.metrics,
        warnings=tuple(each.to_dict() for each in found.warnings),
    )
