"""The end of a run: what is said of its model, the classic models that stand beside it, and the bundle that it leaves.

Popularity takes one pass over the rows, and the constant nothing, so they are always measured. The models of `CHEAP`
follow, the cheapest first, each with its default settings, while their estimated time fits `SHARE` of the training's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.base.errors import DataError, RecspecError
from recspec.base.stores import shown
from recspec.bundle import Card, Seen, checkpoint
from recspec.bundle import folder as bundle
from recspec.data.storage import label_columns
from recspec.evaluation import (
    Evaluation,
    EvaluationTask,
    ModelWarning,
    Report,
    evaluate_baselines,
    evaluate_rows,
    interactions_of,
    is_lower_better,
    positives,
    seconds_of_an_operation,
    seen_items,
    warnings,
)
from recspec.feature_spec import FOLD_IN, SIGNALS, FeatureSpec
from recspec.metrics import Calibration, Method, fit
from recspec.models import (
    FittedItemModel,
    Interactions,
    ItemModel,
    Model,
    Scores,
    find_model,
    label_views,
    on_meta_device,
)
from recspec.models.layers import CalibrationMap
from recspec.training.run_folder import Progress, RunLog
from recspec.training.step import Built
from recspec.training.validation import Validation


@dataclass(frozen=True)
class Judgement:
    """The warnings about a model, its calibration, and notes on both."""

    warnings: tuple[ModelWarning, ...] = ()
    calibration: Calibration | None = None
    notes: tuple[str, ...] = ()
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Baseline -> the metric that chose the model, on valid."""
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    """The same of the labels besides the first."""
    evaluation: Evaluation | None = None
    """Of the kept weights on valid."""


def judge(
    validation: Validation, progress: Progress, last: Evaluation | None = None, *, baselines: bool = False
) -> Judgement:
    """Judge the weights that a run keeps, and calibrate the model if asked to; every rank takes part.

    `last` is the evaluation of these very weights, if they are those of the last evaluation. With `baselines` it stands
    beside more of them than popularity.

    Valid, which has chosen the epoch, is read again: numbers of it are a little too good, and test alone is unseen.
    """
    plan = validation.plan
    if not validation.split or progress.best is None:
        return Judgement()
    found, calibration, notes = last or validation.evaluate(), None, list[str]()
    if plan.settings.calibration != "none":
        rows = validation.rows()
        calibration, found, notes = calibrate(
            validation.model, *rows, plan.settings.calibration, found, validation.place
        )
    calibrations: dict[str, Calibration] = {}
    for label, model in label_views(validation.model).items():
        calibrated, about = _of_other_label(validation, model)
        calibrations |= {} if calibrated is None else {label: calibrated}
        notes.append(about)
    seconds = progress.seconds if baselines and validation.built.ranks.world_size == 1 else 0.0
    others = _others(validation, seconds)
    told = [
        *of_run(validation, found, progress),
        *warnings.of_label_columns(label_columns(validation.model.spec, validation.model.features())),
        *warnings.of_probabilities(found.probabilities, validation.place),
        *warnings.of_protocols(found.protocols, validation.place),
        *_better_baselines(validation, found, others),
    ]
    values = values_of(others, validation.metric)
    if validation.metric == "rows/log_loss" and found.probabilities is not None:
        values["constant"] = found.probabilities.log_loss_of_constant
    return Judgement(tuple(told), calibration, tuple(notes), values, calibrations, found)


def of_run(validation: Validation, found: Evaluation, progress: Progress) -> Sequence[ModelWarning]:
    """Warnings about the course of the metric, which `found` has of the kept weights."""
    protocol, _, name = validation.metric.partition("/")
    epochs, values = progress.trace.get("epoch", ()), progress.trace.get(validation.metric, ())
    limits: Mapping[str, Literal["epochs", "minutes"]] = {"": "epochs", "minutes": "minutes"}
    return warnings.of_trace(
        [warnings.Evaluated(epoch, value) for epoch, value in zip(epochs, values, strict=False)],
        validation.metric,
        lower_is_better=is_lower_better(validation.metric),
        # An update trains so few epochs that they hardly differ, whatever the size of valid.
        standard_error=None if validation.plan.update_of else found.standard_errors.get(protocol, {}).get(name),
        error_of_rise=validation.error_of_rise,
        used_up=limits.get(progress.stopped),
    )


def calibrate(
    model: Model, logits: Scores, labels: NDArray[np.bool_], method: Method, found: Evaluation, place: str
) -> tuple[Calibration | None, Evaluation, list[str]]:
    """Calibrate a model by its logits of the rows of a place, of which `found` is the evaluation.

    Returns the calibration, the evaluation with it, and a note; without rows of both classes, why there is none.
    """
    try:
        calibration = fit(logits, labels, method)
    except DataError as error:
        return None, found, [f"not calibrated (train.calibration={method}): {error}"]
    before = evaluate_rows(logits, labels)
    model.calibration = CalibrationMap(calibration).to(model.device)
    after = evaluate_rows(logits, labels, calibrated=model.calibrated, have_own_labels=found.probabilities is not None)
    old, new = (each.metrics["rows"] for each in (before, after))
    changes = ", ".join(
        f"{name.replace('_', ' ')} {old[name]:.4f} to {new[name]:.4f}" for name in ("log_loss", "calibration_error")
    )
    twice = "valid is used twice, for the choice and for this, so judge it on test"
    kept = Evaluation(
        {**found.metrics, "rows": after.metrics["rows"]} if "rows" in found.metrics else found.metrics,
        found.protocols,
        found.values,
        probabilities=after.probabilities,
    )
    return calibration, kept, [f"calibrated on {place} by {method}: {changes}; {twice}"]


def _of_other_label(validation: Validation, model: Model) -> tuple[Calibration | None, str]:
    """The calibration of a label that did not choose the epoch, and how well it is predicted, in words."""
    (logits, labels), method = validation.rows(model), validation.plan.settings.calibration
    about = f"label '{model.spec.label}' on {validation.place}"
    try:
        calibration = None if method == "none" else fit(logits, labels, method)
        calibrated = calibration
        found = evaluate_rows(logits, labels, calibrated=calibrated).metrics["rows"]
    except DataError as error:
        return None, f"{about}: {error}"
    values = ", ".join(f"{name.replace('_', ' ')} {found[name]:.4f}" for name in ("log_loss", "auc") if name in found)
    return calibration, f"{about}: {values}"


def _others(validation: Validation, seconds: float) -> dict[str, Evaluation]:
    """Popularity, and with `seconds` of training other cheap baselines, under the metric's protocol."""
    plan, protocol = validation.plan, validation.metric.partition("/")[0]
    if protocol == "rows" or not validation.built.ranks.is_first:
        return {}
    return cheap_baselines(validation.question, plan.settings.train_splits, plan.model, seconds)


def values_of(evaluations: Mapping[str, Evaluation], metric: str) -> dict[str, float]:
    """The metric of each baseline that has it."""
    protocol, _, name = metric.partition("/")
    found = {other: each.metrics.get(protocol, {}).get(name) for other, each in evaluations.items()}
    return {other: value for other, value in found.items() if value is not None}


def _better_baselines(
    validation: Validation, found: Evaluation, others: Mapping[str, Evaluation]
) -> Sequence[ModelWarning]:
    """A warning if a baseline ranks better."""
    if not others:
        return ()
    protocol, _, name = validation.metric.partition("/")
    ours = Evaluation({protocol: {name: found.metrics[protocol][name]}}, values=found.values)
    return Report(validation.split, ours, others, folder=shown(validation.plan.spec.folder)).warnings


# --- baselines --------------------------------------------------------------------------------------------------------

CHEAP = ("markov", "ease", "item_knn")
"""Baselines beside popularity. iALS and GF-CF take many passes, whose number the sizes don't tell."""

SHARE = 0.1
"""Most time of the baselines, as a share of the training."""
LEAST, MOST = 1.0, 60.0
"""Seconds below which only popularity is measured, since estimates take half a second; and the most of any training."""
AS_POPULARITY = 5.0
"""Time to rank with such a model, in terms of popularity's."""


def cheap_baselines(
    question: EvaluationTask, splits: Sequence[str], model: str, seconds: float
) -> dict[str, Evaluation]:
    """The evaluations of popularity and of the other cheap baselines, fitted to some splits.

    Args:
        question: what valid asks under one protocol.
        splits: the splits that the model was trained on.
        model: the model's name, which is no baseline of itself.
        seconds: how long the model was trained; 0 measures popularity alone.
    """
    if question.lacks:
        return {}
    started = time.monotonic()
    found = _measured("popularity", question, splits) if model != "popularity" else {}
    once = time.monotonic() - started
    budget = min(MOST, SHARE * seconds)
    if budget < LEAST:
        return found
    one = seconds_of_an_operation()
    fits = {name: one * _operations(name, question) for name in CHEAP if name != model}
    for name, seconds_to_fit in sorted(fits.items(), key=lambda fit: fit[1]):
        if AS_POPULARITY * once + seconds_to_fit < budget - (time.monotonic() - started):
            found |= _measured(name, question, splits)
    return found


def _operations(name: str, question: EvaluationTask) -> float:
    kind = find_model(name)
    assert issubclass(kind, FittedItemModel)
    return on_meta_device(lambda: kind(question.spec, kind.Settings())).operations()


def _measured(name: str, question: EvaluationTask, splits: Sequence[str]) -> dict[str, Evaluation]:
    try:
        return evaluate_baselines(question, splits, names=(name,))[0]
    except RecspecError:  # data without users or items has no popularity
        return {}


# --- the bundle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The bundle, the best evaluation and the speed of a run."""

    bundle: Path
    best_epoch: float
    metrics: Mapping[str, Mapping[str, float]]
    samples_per_second: float
    seconds: float
    stopped: str
    """`epochs`, `patience`, `falling`, `target` or `minutes`; `fitted` for a model that is fitted in one go."""
    trace: Mapping[str, Sequence[float]]
    """Values by metric, and `epoch`, of each evaluation at the end of an epoch."""
    warnings: Sequence[ModelWarning] = ()
    """What is wrong with the model, by valid."""
    calibration: Calibration | None = None
    """The map that calibrates its probabilities."""
    metric: str = ""
    """PROTOCOL/METRIC on valid that chose it; empty if nothing was measured."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """The same metric of baselines with their default settings, on valid."""
    evaluation: Evaluation | None = field(default=None, repr=False)
    """Of the kept weights on valid, with the values of users or rows."""
    cut: bool = False
    """Whether `train.minutes` ended the choice of a fitted model's settings."""
    size: str = ""
    """How large a fitted model of rows is, in words."""
    importance: Mapping[str, float] = field(default_factory=dict)
    """Raw column -> its share of what such a model explains, largest first."""

    @property
    def value(self) -> float | None:
        """The metric on valid."""
        protocol, _, name = self.metric.partition("/")
        return self.metrics.get(protocol, {}).get(name)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        calibration = None if self.calibration is None else self.calibration.model_dump(mode="json")
        told = {"bundle": str(self.bundle), "warnings": [each.to_dict() for each in self.warnings]}
        figures = {name: value for name, value in vars(self).items() if name != "evaluation"}
        return {**figures, **told, "calibration": calibration}


def log_end(log: RunLog, result: Result, **values: object) -> None:
    """Log the warnings about a model, and the end of its run."""
    warnings = [each.to_dict() for each in result.warnings]
    for warning in warnings:
        log.write("warning", **warning)
    both = {"bundle": str(result.bundle), "stopped": result.stopped, "baselines": dict(result.baselines)}
    speed = {"samples_per_second": result.samples_per_second, "seconds": result.seconds}
    log.write("done", **both, **values, **speed, warnings=warnings)


def write_bundle(
    folder: Path, built: Built, progress: Progress, best: Path, metric: str, judgement: Judgement
) -> Result:
    """Write the bundle on the first rank, with the weights of the file `best`, chosen by `metric`, if it keeps them."""
    plan, ranks, model = built.plan, built.ranks, built.model
    model.eval()
    known = inform(model, plan.spec)
    weights = built.shards.whole(model.state_dict())
    use_best = keeps_best(built, progress)
    from_file = use_best and not isinstance(model, ItemModel)  # the file knows less of the users
    behind = progress.epochs(plan.steps_per_epoch)
    epoch = progress.best_epoch if use_best else behind
    stopped = progress.stopped or "epochs"
    trained = {
        "epoch": epoch,
        "epochs": behind,
        "steps": progress.step,
        "samples": progress.samples,
        "seconds": round(progress.seconds, 3),
        "samples_per_second": round(progress.samples_per_second),
        "splits": list(plan.settings.train_splits),
        "stopped": stopped,
        "precision": plan.precision.value,
        "device": str(ranks.device),
        "world_size": ranks.world_size,
        "torch": torch.__version__,
        "valid_metric": metric if progress.best is not None else None,
    }
    card = Card(
        model=plan.model,
        settings=plan.model_settings.model_dump(mode="json"),
        train=plan.settings.model_dump(mode="json"),
        trained=trained,
        metrics=progress.best_metrics if use_best else {},
        calibration=judgement.calibration,
        calibrations=dict(judgement.calibrations),
        warnings=tuple(each.to_dict() for each in judgement.warnings),
    )
    if ranks.is_first:
        kept = best if from_file else weights
        events = None if known is None else known.order
        bundle.save(folder, model, card, seen=seen_of(plan.spec, known), events=events, weights=kept)
    elif not from_file:
        checkpoint.take_part(weights)
    ranks.barrier()
    return Result(
        folder,
        epoch,
        progress.best_metrics,
        progress.samples_per_second,
        progress.seconds,
        stopped,
        progress.trace,
        judgement.warnings,
        judgement.calibration,
        metric if progress.best is not None else "",
        judgement.baselines,
        judgement.evaluation,
    )


def keeps_best(built: Built, progress: Progress) -> bool:
    """Whether the bundle gets the weights of the best evaluation instead of the last ones."""
    return built.plan.settings.keep_best and progress.best is not None


KNOWN = ("train", FOLD_IN, "valid", *SIGNALS)
"""Splits whose events a bundle knows; test is opened by `evaluate` alone."""


def inform(model: Model, spec: FeatureSpec) -> Interactions | None:
    """Let an item model know the users' events in all splits of `KNOWN`, for requests; returns them."""
    if not isinstance(model, ItemModel):
        return None
    known = interactions_of(model, spec, _known(spec))
    model.know(known)
    return known


def seen_of(spec: FeatureSpec, known: Interactions | None) -> Seen | None:
    """The items that each user acted on, which recommendations leave out, and those of which the model knows.

    These are read unless they are `known` to the model already.
    """
    if spec.id_of("user") is None or spec.id_of("item") is None:
        return None
    known = positives(spec, _known(spec)) if known is None else known
    return Seen.from_interactions(_seen(spec, known), known)


def _seen(spec: FeatureSpec, known: Interactions) -> Interactions:
    """Items with an event in any split. A dataset without the file of them is read to its last split."""
    if "seen" in spec.companions:
        return seen_items(spec, spec.splits)
    for split in spec.splits:
        held = spec.columns(split)
        if split not in KNOWN and {spec.user_id, spec.item_id, spec.label}.issubset(held):
            with suppress(DataError):  # a split that can't be read has no events to know of; `evaluate` says why
                known = known.with_others(positives(spec, [split]))
    return known


def _known(spec: FeatureSpec) -> list[str]:
    return [split for split in KNOWN if split in spec.splits]
