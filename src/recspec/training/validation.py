"""Evaluation between epochs, and when training stops by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.base.errors import DataError, SettingsError, listed, unknown
from recspec.evaluation import (
    EvaluateSettings,
    Evaluation,
    EvaluationTask,
    difference,
    evaluate_rows,
    informed,
    is_lower_better,
    run_protocols,
    score_rows,
    scores_of,
)
from recspec.loading import Loader
from recspec.metrics import fit
from recspec.models import Model
from recspec.models.layers import take
from recspec.training.choices import HELD_OUT, open_rows
from recspec.training.run_folder import Progress
from recspec.training.step import Built


def stop_reason(
    values: Sequence[float],
    *,
    count: int,
    lower: bool,
    patience: int | None,
    falling_patience: int | None,
    errors: Sequence[float | None] = (),
) -> str:
    """Why training should stop after these evaluations on valid; empty if it should go on.

    `patience`: no value of the last `patience` evaluations is better than the best one before. A flat metric may
    still climb: AUC of sparse ids can stay near one half for several epochs.

    `falling`: each of the last `falling_patience` values is clearly worse than the best one, and the last one is not
    better than the first of them, so no recovery is under way. Clearly: by `CLEARLY` paired standard errors, or where
    they are unknown, by a bound on the standard error of one value.

    Args:
        values: the metric after each evaluation, oldest first.
        count: number of rows, users or groups behind a value; of the rarer class for AUC.
        lower: whether lower values are better.
        patience: number of evaluations without improvement; None for no limit.
        falling_patience: number of evaluations clearly below the best one; None for no limit.
        errors: of the latest evaluations, the standard error of the difference from the best one, over the same rows.
    """
    if not values:
        return ""
    gains = [-value if lower else value for value in values]
    best = max(gains)
    if patience is not None and len(gains) - 1 - gains.index(best) >= patience:
        return "patience"
    if falling_patience is not None and len(gains) > falling_patience:
        last = gains[-falling_patience:]
        bound = standard_error(abs(best), count, bounded=not lower)
        paired = [*[None] * falling_patience, *errors][-falling_patience:]
        limits = [best - (bound if error is None else CLEARLY * error) for error in paired]
        if all(gain < limit for gain, limit in zip(last, limits, strict=True)) and last[-1] <= last[0]:
            return "falling"
    return ""


def standard_error(value: float, count: int, *, bounded: bool) -> float:
    """A bound on the standard error of a mean over `count`.

    The standard deviation of numbers from 0 to 1 with mean p is at most sqrt(p (1 - p)). That of losses, which have no
    upper bound, is taken to be their mean, as for an exponential distribution.
    """
    spread = math.sqrt(max(0.0, value * (1 - value))) if bounded else value
    return spread / math.sqrt(max(1, count))


CLEARLY = 2
"""Standard errors of a paired difference from which on an epoch is clearly worse than the best."""

Metrics = Mapping[str, Mapping[str, float]]
"""Values by protocol and metric."""

WATCHED = ("rows/log_loss", "rows/auc")
"""Metrics of labelled rows that are followed whichever of them chooses: AUC does not see overconfidence."""

STRONGLY = 2
"""Standard errors between two epochs from which on two metrics disagree strongly about them."""

AFTER_A_CUT = 2
"""Evaluations without improvement that are waited for once the learning rate has fallen."""

MORE = {"minutes": "minutes", "patience": "patience", "falling": "falling_patience", "target": "target"}
"""Why a run stopped -> the setting that lets it go on."""


class Validation:
    """Measures the model on valid, remembers the best epoch and says when to stop.

    One class because the value that chooses an epoch is also what stops the run.
    """

    def __init__(self, built: Built) -> None:
        self.built, self.plan, self.model = built, built.plan, built.model
        self.split, self.metric = self.plan.valid.value, self.plan.metric.value
        self.count = 0
        """Rows, users or groups behind the last value; of the rarer class for AUC."""
        self.error_of_rise: float | None = None
        """Standard error of the metric's difference between the last two evaluations, on the same rows or groups."""
        self.last: Evaluation | None = None
        self.kept: Evaluation | None = None
        """That of the best epoch."""
        self.error_of_fall: float | None = None
        """Standard error of the difference between the last evaluation and the best before it, on the same rows."""

    @property
    def pairs(self) -> bool:
        """Whether epochs are compared row by row with the best one, and not only by their means."""
        return self.metric.partition("/")[0] == "rows"

    def resume(self, progress: Progress) -> list[str]:
        """Take up the metric by which the run that continues has chosen; a note if the run is over."""
        settings = self.plan.settings
        if progress.best_metrics:
            self._value(progress.best_metrics)
        # The settings that stopped it may have changed.
        late = settings.minutes is not None and progress.seconds >= 60 * settings.minutes
        progress.stopped = self._why_stop(progress) or ("minutes" if late else "")
        if not progress.stopped and progress.epoch < settings.epochs:
            return []
        by = MORE.get(progress.stopped, "epochs")
        asked = f"train.{by} is {getattr(settings, by)}"
        return [f"the run is over: it was stopped by {progress.stopped or by}, and {asked}"]

    def measure(self) -> Metrics:
        """The metrics of the model as it is."""
        found, before = self.evaluate(), self.last
        protocol, _, metric = self.metric.partition("/")
        about = {name: value for name, value in found.protocols[protocol].items() if isinstance(value, int)}
        if protocol == "rows":
            self._count_rows(about["rows"], about["positives"])
        else:
            self.count = about["groups"]
        rise = difference(before, found, protocol, metric) if before is not None else None
        fall = difference(self.kept, found, protocol, metric) if self.pairs and self.kept is not None else None
        self.error_of_fall = None if fall is None else fall[1]
        self.last, self.error_of_rise = found, None if rise is None else rise[1]
        return found.metrics

    def evaluate(self) -> Evaluation:
        """The evaluation of the model as it is, under the protocol of the metric."""
        self.model.eval()
        if self.split == HELD_OUT:
            logits, labels = self.rows()
            calibrated = partial(_along_a_line, labels) if self._calibrates else None
            return evaluate_rows(logits, labels, calibrated=calibrated, have_own_labels=self.plan.negatives.value == 0)
        question = self.question
        answers = scores_of(informed(self.model, question), question, self.built.shards.evaluating)
        if self._calibrates:
            answers = replace(answers, calibrated=partial(_along_a_line, question.rows.labels))
        return run_protocols(answers)

    @property
    def _calibrates(self) -> bool:
        """Whether losses are those of calibrated logits, as the bundle's are: the best epoch may be overconfident."""
        return self.plan.settings.calibration != "none" and self.pairs

    def rows(self, model: Model | None = None) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
        """Logits and labels of every row, on every rank; by default of the model, or of its view of another label."""
        model, ranks = model or self.model, self.built.shards.evaluating
        spec = self.plan.spec.of_label(model.spec.label)
        if self.split != HELD_OUT:
            question = (
                self.question
                if model is self.model
                else EvaluationTask(spec, self.split, ("rows",), EvaluateSettings())
            )
            return score_rows(model, spec, self.split, ranks), question.rows.labels
        logits, labels = [torch.zeros(0)], [torch.zeros(0)]
        with torch.inference_mode():
            for share in self._held_out.batches():
                batch = take(share.batch, slice(0, share.num_rows))
                logits.append(model(batch).float().cpu())
                labels.append(batch[spec.label].float().cpu())
        return ranks.gather(torch.cat(logits)).numpy(), ranks.gather(torch.cat(labels)).numpy() > 0

    @cached_property
    def question(self) -> EvaluationTask:
        """What `evaluate` asks of the split, whose rows and events are read once for all epochs."""
        settings, protocol = EvaluateSettings(users=self.plan.settings.valid_users), self.metric.partition("/")[0]
        return EvaluationTask(self.plan.spec, self.split, (protocol,), settings, reads=self.model.features())

    @property
    def place(self) -> str:
        """The rows that are evaluated, for messages."""
        return "valid" if self.split != HELD_OUT else "the rows of train held out"

    def is_best(self, found: Metrics, progress: Progress) -> bool:
        """Note in `progress` what was found and whether to stop; returns whether it is the best so far."""
        value = self._value(found)
        better = progress.best is None or (value < progress.best if self._lower else value > progress.best)
        epoch = progress.epochs(self.plan.steps_per_epoch)
        progress.count = self.count
        if better:
            progress.best, progress.best_epoch = value, epoch
            progress.best_metrics = {of: dict(values) for of, values in found.items()}
            self.kept = self.last
        if progress.batch == 0:  # a run that ended within an epoch may go on as if it had not
            watched = {name: value for name, value in _flat(found).items() if name in (self.metric, *WATCHED)}
            for name, each in {"epoch": float(epoch), **watched}.items():
                progress.trace.setdefault(name, []).append(each)
            progress.errors.append(self.error_of_fall)
            progress.stopped = progress.stopped or self._why_stop(progress)
        return better

    def cuts_rate(self, progress: Progress) -> bool:
        """Whether the learning rate falls where training would stop, as its limit of epochs is not reached."""
        settings = self.plan.settings
        stops = progress.stopped in ("patience", "falling") and progress.epoch < settings.epochs
        return stops and progress.cuts < settings.plateau_cuts

    def disagreements(self, progress: Progress) -> list[str]:
        """A note if the kept epoch is much worse than another by the watched metric that did not choose it."""
        others = [name for name in WATCHED if name != self.metric and name in progress.trace]
        if self.metric not in WATCHED or progress.best_epoch not in progress.trace.get("epoch", []):
            return []
        kept = progress.trace["epoch"].index(progress.best_epoch)
        notes = []
        for name in others:
            values, lower = progress.trace[name], is_lower_better(name)
            at = values.index(min(values) if lower else max(values))
            error = standard_error(values[at], progress.count, bounded=not lower)
            if abs(values[at] - values[kept]) > STRONGLY * error:
                told = (
                    f"{each} {values[place]:.4f} (epoch {progress.trace['epoch'][place]:g})"
                    for each, place in (("the best", at), ("the bundle's", kept))
                )
                notes.append(
                    f"{name} and {self.metric} disagree: {name}: {', '.join(told)}; "
                    f"train.metric={name} would keep the other"
                )
        return notes

    @property
    def _lower(self) -> bool:
        return is_lower_better(self.metric)

    def _why_stop(self, progress: Progress) -> str:
        """The reason to stop after the evaluations so far."""
        settings, values = self.plan.settings, progress.trace.get(self.metric, [])
        target, best = settings.target, progress.best
        if target is not None and best is not None and (best <= target if self._lower else best >= target):
            return "target"
        patience = settings.patience
        if progress.cuts:
            before, since = values[: progress.cut_at], values[progress.cut_at :]
            values = [min(before) if self._lower else max(before), *since]
            patience = min(patience or AFTER_A_CUT, AFTER_A_CUT)
        return stop_reason(
            values,
            count=progress.count,
            lower=self._lower,
            patience=patience,
            falling_patience=settings.falling_patience,
            errors=progress.errors,
        )

    def _count_rows(self, rows: int, positives: int) -> None:
        self.count = rows if self._lower else min(positives, rows - positives)

    def _value(self, found: Metrics) -> float:
        """The metric that picks the best epoch."""
        known = _flat(found)
        asked = self.plan.settings.metric is not None and "train.metric" not in self.plan.proposed
        if self.metric not in known and not asked:  # lists too short for the chosen cut-off
            name = self.metric.rpartition("@")[0] + "@"
            self.metric = next((each for each in known if each.startswith(name)), self.metric)
        if self.metric == "rows/log_loss" and not asked and self.metric not in known and "rows/auc" in known:
            self.metric = "rows/auc"  # the model's logits rank, and give no probabilities
        if self.metric in known:
            return known[self.metric]
        if self.metric == "rows/auc" and known:
            raise SettingsError(
                f"{self.plan.spec.folder}: the rows of '{self.split}' are of one class, so AUC has no value there; "
                f"set train.metric to one of {listed(known)}"
            )
        if not known:
            raise SettingsError(
                f"{self.plan.spec.folder}, split '{self.split}': no positive row holds an item with an id that is new "
                "to the user, so there is nothing to rank; set train.metric=rows/auc"
            )
        raise SettingsError(f"train.metric: {unknown('metric', self.metric, known)}")

    @cached_property
    def _held_out(self) -> Loader:
        plan, negatives = self.plan, self.plan.negatives.value
        return open_rows(
            plan.spec, plan.settings, self.model, self.built.ranks, negatives=negatives, valid=self.split, held_out=True
        )


def _along_a_line(labels: NDArray[np.bool_], logits: NDArray[np.floating]) -> NDArray[np.floating]:
    """Logits calibrated by temperature on these very rows; as they are if the rows are of one class."""
    try:
        return fit(logits, labels, "temperature")(logits)
    except DataError:
        return logits


def _flat(found: Metrics) -> dict[str, float]:
    """Values under `PROTOCOL/METRIC`."""
    return {f"{of}/{name}": value for of, values in found.items() for name, value in values.items()}
