"""Warnings about a trained model: what is wrong, by which numbers, and what to do.

Every function turns facts into warnings and reads nothing. What can't be judged gets no warning.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from recspec.metrics import FEWEST_USERS, CalibrationError, blur_of

Kind = Literal[
    "worse_than_constant",
    "overconfident",
    "still_rising",
    "worse_than_baseline",
    "valid_too_small",
    "mostly_repeats",
    "few_users",
    "label_column",
]

SIGNIFICANT = 2.0  # standard errors from which on a difference is not noise
SMALLEST_ERROR = 0.02
"""Least calibration error to warn about. Prepared splits drift by about .01 between valid and test."""
COARSE = 0.02  # standard error of a metric, as a share of its value, from which valid counts as small
FEWEST_ROWS = 100  # to judge probabilities by
MANY_REPEATS = 0.5  # share of the positives from which left out repeats are worth a warning
CONSTANT = "constant"  # the baseline that is no model
FEWEST_COMPARED = 30  # rows or groups: the standard error of fewer is itself too uncertain


@dataclass(frozen=True)
class ModelWarning:
    """One sentence on what is wrong and what to do, and its kind for programs."""

    kind: Kind
    message: str

    def to_dict(self) -> dict[str, str]:
        """Plain values, as a log, a bundle and `--json` hold them."""
        return {"kind": self.kind, "message": self.message}


@dataclass(frozen=True)
class Probabilities:
    """How good a model's probabilities are on the rows of a split of both classes."""

    rows: int
    positives: int
    log_loss: float
    log_loss_of_constant: float  # of the split's own label rate for every row: no constant is better
    standard_error: float  # of the difference of both losses
    calibration: CalibrationError
    is_calibrated: bool = False


@dataclass(frozen=True)
class Evaluated:
    """The metric of one epoch on valid."""

    epoch: float
    value: float


@dataclass(frozen=True)
class Difference:
    """By how much a baseline is better than the model."""

    baseline: str
    metric: str  # PROTOCOL/METRIC
    model: float
    theirs: float
    better_by: float  # in the metric's good direction
    standard_error: float
    count: int = FEWEST_COMPARED  # rows or groups behind it

    @property
    def is_clear(self) -> bool:
        """Whether it is more than noise."""
        return is_clear(self.better_by, self.standard_error)


def is_clear(difference: float, standard_error: float) -> bool:
    """Whether a difference is more than noise; one that is the same everywhere, without any error, is."""
    return difference != 0 and abs(difference) >= SIGNIFICANT * standard_error


CALIBRATE = "calibrate the model (train --resume --set train.calibration=temperature)"
CALIBRATE_FITTED = "calibrate it (train --recipe RUN/recipe.yaml --set train.calibration=temperature, to a new folder)"
"""Of a model that is fitted in one go, which `--resume` fits again."""


def of_probabilities(found: Probabilities | None, split: str, calibrate: str = CALIBRATE) -> list[ModelWarning]:
    """Warnings about probabilities: worse than a constant in log loss, or not what comes true."""
    if found is None or found.rows < FEWEST_ROWS:
        return []
    warnings = []
    worse_by = found.log_loss - found.log_loss_of_constant
    if worse_by > SIGNIFICANT * found.standard_error:
        rate = found.positives / found.rows
        told = f"log loss {found.log_loss:.4f} on {split} is worse than {found.log_loss_of_constant:.4f}, that of the "
        told += f"label rate {rate:.3g} for every row"
        remedy = "stop earlier (train.patience, fewer trees), raise dropout or regularisation, or " + calibrate
        if found.is_calibrated:
            remedy = f"the rows of {split} differ from those that the calibration was fitted on: check the split"
        warnings.append(ModelWarning("worse_than_constant", f"{told}; {remedy}"))
    error = found.calibration
    if error.is_beyond_chance and error.value >= SMALLEST_ERROR:
        what = {"overconfident": "the model is overconfident", "underconfident": "the model is underconfident"}.get(
            error.lean, f"probabilities are {error.lean}"
        )
        told = f"{what}: probabilities are off by {error.value:.3f} on average on {split} (expected calibration error; "
        told += f"chance alone gives {error.by_chance:.3f})"
        remedy = f"{calibrate}, or raise dropout or regularisation" if error.lean == "overconfident" else calibrate
        if found.is_calibrated:
            remedy = f"the rows of {split} differ from those that it was calibrated on: train again with newer rows"
        warnings.append(ModelWarning("overconfident", f"{told}; {remedy}"))
    return warnings


def of_trace(
    trace: Sequence[Evaluated],
    metric: str,
    *,
    lower_is_better: bool,
    standard_error: float | None = None,
    error_of_rise: float | None = None,
    used_up: Literal["epochs", "minutes"] | None = None,
) -> list[ModelWarning]:
    """Warnings about the values of the metric on valid, one an evaluated epoch.

    Args:
        standard_error: Of the best value.
        error_of_rise: Standard error of the difference of the last two values, over the same rows or groups.
        used_up: The setting at whose limit training ended; None if it ended by itself.
    """
    if len(trace) < 2 or any(not np.isfinite(each.value) for each in trace):
        return []
    sign = -1.0 if lower_is_better else 1.0
    values = [sign * each.value for each in trace]
    best, last = int(np.argmax(values)), len(trace) - 1
    warnings = []
    rise = values[-1] - values[-2]
    if used_up and best == last and error_of_rise is not None and rise > SIGNIFICANT * error_of_rise:
        message = (
            f"{metric} on valid was still {'falling' if lower_is_better else 'rising'} at the last epoch, "
            f"{trace[-1].epoch:g}: {trace[-2].value:.4f} to {trace[-1].value:.4f}; train longer: --resume with a "
            f"larger train.{used_up}" + (", or for an update --set epochs=N" if used_up == "epochs" else "")
        )
        warnings.append(ModelWarning("still_rising", message))
    error, spread = standard_error, max(values) - min(values)
    if error is not None and spread < SIGNIFICANT * error and error > COARSE * abs(trace[best].value):
        message = (
            f"valid is too small to choose an epoch on: {metric} has a standard error of {error:.4f}, and the epochs "
            f"differ by {spread:.4f}; prepare the data with a larger valid split, or compare several seeds "
            "(train.seed)"
        )
        warnings.append(ModelWarning("valid_too_small", message))
    return warnings


def of_protocols(protocols: Mapping[str, Mapping[str, object]], split: str) -> list[ModelWarning]:
    """Warnings about what rankings leave out: repeats, and the users that train does not know."""
    return [*of_few_users(protocols, split), *of_repeats(protocols, split)]


def of_few_users(protocols: Mapping[str, Mapping[str, object]], split: str) -> list[ModelWarning]:
    """A warning if few users are judged, as most positives are of users that train does not know."""
    for protocol, facts in protocols.items():
        users, strange, kept = (
            int(str(facts.get(each, 0))) for each in ("groups", "of_unknown_users_left_out", "positives")
        )
        if strange > kept and users < FEWEST_USERS:
            message = (
                f"{protocol} on {split} judges {users:,} users, and leaves out {strange:,} positives of users that "
                f"train does not know: {blur_of(users)}; prepare the data with split=leave_one_out, or with larger "
                "shares for valid and test"
            )
            return [ModelWarning("few_users", message)]
    return []


def of_repeats(protocols: Mapping[str, Mapping[str, object]], split: str) -> list[ModelWarning]:
    """A warning if most positives are items that their users acted on before, so that few are left to rank."""
    for protocol, facts in protocols.items():
        repeats, positives = (int(str(facts.get(each, 0))) for each in ("repeats_left_out", "of_positives"))
        if repeats and repeats >= MANY_REPEATS * positives:
            message = (
                f"{protocol} ranks only new items and skipped {repeats:,} of {positives:,} positives of {split}; for "
                "repeat purchases judge by labelled rows (protocol rows), or evaluate with --repeats keep"
            )
            return [ModelWarning("mostly_repeats", message)]
    return []


def of_label_columns(found: Mapping[str, float]) -> list[ModelWarning]:
    """A warning about the columns that the model reads and that alone order the labels, by their AUC."""
    if not found:
        return []
    each = ", ".join(f"'{name}' (AUC {auc:.4f})" for name, auc in found.items())
    message = (
        f"columns that the model reads order the labels of train almost perfectly, each alone: {each}; if they are "
        "known only after the label, the metrics say nothing: prepare the data without them"
    )
    return [ModelWarning("label_column", message)]


def of_baselines(
    differences: Sequence[Difference], split: str, chosen_by: str = "", data: str = "DATA"
) -> list[ModelWarning]:
    """A warning for each protocol under which baselines are clearly better; see `is_clear`.

    It names the clearest difference and the other baselines, and the metric that chose the model if its protocol is
    another one. It ends with the command that trains the baseline on the dataset, whose folder is `data`.
    """
    ahead: dict[str, list[Difference]] = {}
    for each in differences:
        if each.count >= FEWEST_COMPARED and each.better_by > 0 < each.standard_error and each.is_clear:
            ahead.setdefault(each.metric.partition("/")[0], []).append(each)
    warnings = []
    for protocol, found in ahead.items():
        first = max(found, key=_errors)
        others = ", ".join(sorted({each.baseline for each in found} - {first.baseline}))
        message = (
            f"by {first.metric}, {first.baseline} beats the model on {split} by {_errors(first):.1f} standard errors: "
            f"{first.theirs:.4f} against {first.model:.4f}{f' (also {others})' if others else ''}"
        )
        if chosen_by and chosen_by.partition("/")[0] != protocol:
            message += f"; the model was chosen by {chosen_by}, which may order models otherwise"
        message += f"; to take it instead: `{_command(first.baseline, data)}`"
        warnings.append(ModelWarning("worse_than_baseline", message))
    return warnings


def _command(baseline: str, data: str) -> str:
    """What trains a baseline; what searches all models where it is none to serve."""
    if baseline == CONSTANT:
        return shlex.join(["recspec", "auto", data, "run-auto"])
    return shlex.join(["recspec", "train", baseline, data, f"run-{baseline}"])


def _errors(difference: Difference) -> float:
    return difference.better_by / difference.standard_error
