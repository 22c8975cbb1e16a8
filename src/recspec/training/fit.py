"""Training of models that are fitted in one go: the choice of settings on valid, and the bundle.

The first rank fits; the others wait. Nothing is left to continue: a stopped fit starts again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from recspec.base.errors import Interrupted
from recspec.base.signals import stopping_at_once
from recspec.bundle import Card, DataRecord, run_record
from recspec.bundle import folder as bundle
from recspec.data.storage import label_columns
from recspec.evaluation import Fitted, ItemFit, RowFit, Tried, warnings
from recspec.loading import Ranks
from recspec.models import FittedItemModel, LogisticRegression
from recspec.training import run_folder
from recspec.training.plan import FitPlan
from recspec.training.result import Result, cheap_baselines, inform, log_end, seen_of, values_of
from recspec.training.run_folder import Event, RunLog
from recspec.training.tracking import TrackedSearch, Tracking

STOPPED = "stopped as asked; nothing was written, so start the same command again"


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
    log.begin(plan.notes, **plan.described())
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
            others = _baselines(plan, fit, found, seconds) if baselines else {}
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
        where, 0.0, found.metrics, speed, seconds, "fitted", {}, found.warnings, metric=found.metric, baselines=others
    )
    log_end(
        log,
        result,
        epochs=0,
        best_epoch=0,
        best=found.value,
        metric=found.metric or plan.metric.value,
        metrics=found.metrics,
        settings=found.model.settings.model_dump(mode="json"),
    )
    return result


def _fit_of(plan: FitPlan, tell: Callable[[Tried], None], late: Callable[[], bool]) -> ItemFit | RowFit:
    kind, spec, own, train = plan.kind, plan.spec, plan.model_settings, plan.settings
    valid, metric = plan.valid.value, plan.metric.value
    if issubclass(kind, FittedItemModel):
        return ItemFit(kind, spec, own, train.train_splits, valid, metric, train.seed, train.valid_users, tell, late)
    assert issubclass(kind, LogisticRegression)
    return RowFit(kind, spec, own, train.train_splits, valid, metric, tell, late)


def _baselines(plan: FitPlan, fit: ItemFit | RowFit, found: Fitted, seconds: float) -> dict[str, float]:
    """The metric that chose the settings, of cheap baselines on the same users of valid."""
    if not isinstance(fit, ItemFit) or found.value is None or (question := fit.question()) is None:
        return {}
    before = [split for split in plan.settings.train_splits if split != plan.valid.value]
    return values_of(cheap_baselines(question, before, plan.model, seconds), found.metric)


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
