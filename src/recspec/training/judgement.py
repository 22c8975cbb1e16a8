"""What is said of a model at the end of its training: calibration and warnings, by valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from recspec.base.errors import DataError
from recspec.data.storage import label_columns
from recspec.evaluation import Evaluation, ModelWarning, Report, evaluate_rows, is_lower_better, warnings
from recspec.metrics import Calibration, Method, fit
from recspec.models.layers import CalibrationMap
from recspec.training.beside import item_baselines
from recspec.training.checkpoints import Progress
from recspec.training.validation import Validation


@dataclass(frozen=True)
class Judgement:
    """The warnings about a model, its calibration, and notes on both."""

    warnings: tuple[ModelWarning, ...] = ()
    calibration: Calibration | None = None
    notes: tuple[str, ...] = ()
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Baseline -> the metric that chose the model, on valid."""


def judge(
    validation: Validation, progress: Progress, last: Evaluation | None = None, *, baselines: bool = False
) -> Judgement:
    """Judge the weights that a run keeps, and calibrate the model if asked to; every rank takes part.

    `last` is the evaluation of these very weights, if they are those of the last evaluation. With `baselines` it stands
    beside more of them than popularity (see `beside`).

    Valid, which has chosen the epoch, is read again: numbers of it are a little too good, and test alone is unseen.
    """
    plan = validation.plan
    if not validation.split or progress.best is None:
        return Judgement()
    found, calibration, notes = last or validation.evaluate(), None, list[str]()
    if plan.settings.calibration != "none":
        calibration, found, notes = _calibrated(validation, found, plan.settings.calibration)
    seconds = progress.seconds if baselines and validation.built.ranks.world_size == 1 else 0.0
    others = _others(validation, seconds)
    protocol, _, name = validation.metric.partition("/")
    told = [
        *of_run(validation, found, progress),
        *warnings.of_label_columns(label_columns(validation.model.spec, validation.model.features())),
        *warnings.of_probabilities(found.probabilities, validation.place),
        *warnings.of_repeats(found.protocols, validation.place),
        *_beside(validation, found, others),
    ]
    values = {other: of.metrics[protocol][name] for other, of in others.items() if name in of.metrics.get(protocol, {})}
    if validation.metric == "rows/log_loss" and found.probabilities is not None:
        values["constant"] = found.probabilities.log_loss_of_constant
    return Judgement(tuple(told), calibration, tuple(notes), values)


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


def _calibrated(
    validation: Validation, found: Evaluation, method: Method
) -> tuple[Calibration | None, Evaluation, list[str]]:
    """The calibration, the evaluation with it, and a note; without rows of both classes, why there is none."""
    model, (logits, labels) = validation.model, validation.rows()
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
    twice = "valid is used twice, for the epoch and for this, so judge it on test"
    kept = Evaluation(
        {**found.metrics, "rows": after.metrics["rows"]} if "rows" in found.metrics else found.metrics,
        found.protocols,
        found.values,
        probabilities=after.probabilities,
    )
    return calibration, kept, [f"calibrated on {validation.place} by {method}: {changes}; {twice}"]


def _others(validation: Validation, seconds: float) -> dict[str, Evaluation]:
    """Popularity, and with `seconds` of training other cheap baselines, under the metric's protocol."""
    plan, protocol = validation.plan, validation.metric.partition("/")[0]
    if protocol == "rows" or not validation.built.ranks.is_first:
        return {}
    return item_baselines(validation.question, plan.settings.train_splits, plan.model, seconds)


def _beside(validation: Validation, found: Evaluation, others: Mapping[str, Evaluation]) -> Sequence[ModelWarning]:
    """A warning if a baseline ranks better."""
    if not others:
        return ()
    protocol, _, name = validation.metric.partition("/")
    ours = Evaluation({protocol: {name: found.metrics[protocol][name]}}, values=found.values)
    return Report(validation.split, ours, others).warnings
