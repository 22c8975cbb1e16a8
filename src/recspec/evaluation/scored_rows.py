"""Metrics of rows by their scores: protocol `rows`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from recspec import metrics
from recspec.calibration import calibration_error
from recspec.evaluation.report import Evaluation
from recspec.evaluation.warnings import Probabilities
from recspec.metrics import Values
from recspec.models import Ids, Scores

MOST_ROWS_OF_ERRORS = 1 << 22  # rows of which values are kept for standard errors: 16 MB for each metric


def evaluate_rows(
    scores: Scores,
    labels: NDArray[np.bool_],
    *,
    groups: Ids | None = None,
    are_logits: bool = True,
    calibrated: Callable[[Scores], Scores] | None = None,
    have_own_labels: bool = True,
) -> Evaluation:
    """The evaluation of rows by their scores.

    Args:
        scores: (rows,) the model's scores.
        labels: (rows,) whether each row is positive.
        groups: (rows,) the group of each row, for GAUC.
        are_logits: Whether the scores are logits, so that their sigmoid is a probability.
        calibrated: Gives the calibrated logits, by which losses are then measured.
        have_own_labels: Whether the rate of positives is that of the data, by which probabilities are judged.
    """
    facts: dict[str, int] = {"rows": len(labels), "positives": int(labels.sum())}
    probabilities = None
    sample = sampled(len(labels))
    reached = {"auc": metrics.auc(scores, labels)}
    values = {"auc": metrics.auc_of_rows(scores[sample], labels[sample])}
    if are_logits:
        logits = scores if calibrated is None else calibrated(scores)
        found = calibration_error(logits, labels)
        reached["log_loss"] = metrics.log_loss(logits, labels)
        reached["accuracy"] = metrics.accuracy(logits, labels)
        reached["calibration_error"] = found.value
        values["log_loss"] = metrics.log_losses(logits[sample], labels[sample])
        values["accuracy"] = np.where(logits[sample] == 0, 0.5, (logits[sample] > 0) == labels[sample])
        if calibrated is not None:
            reached["log_loss_uncalibrated"] = metrics.log_loss(scores, labels)
            reached["calibration_error_uncalibrated"] = calibration_error(scores, labels).value
        if have_own_labels and 0 < facts["positives"] < facts["rows"]:
            constant, error = _against_the_rate(values["log_loss"], labels, labels[sample])
            probabilities = Probabilities(**facts, log_loss=reached["log_loss"], log_loss_of_constant=constant,
                                          standard_error=error, calibration=found,
                                          is_calibrated=calibrated is not None)  # fmt: skip
    if groups is not None:
        ranking = metrics.rank_groups(scores, labels, groups)
        reached["group_auc"] = metrics.mean_area(ranking)
        values["group_auc"] = metrics.areas_of_groups(ranking)
        without = {"positive": ranking.num_left_out, "negative": ranking.num_groups - len(values["group_auc"])}
        facts |= {f"groups_without_{name}": count for name, count in without.items() if count}
    defined = {name: value for name, value in reached.items() if not np.isnan(value)}
    kept = {name: of.astype(np.float32) for name, of in values.items() if name in defined}
    return Evaluation(
        {"rows": defined},
        protocols={"rows": {**facts}},
        values={"rows": kept},
        positive=labels[sample],
        probabilities=probabilities,
    )


def sampled(num_rows: int) -> slice:
    """The rows of which values are kept."""
    return slice(None, None, max(1, -(-num_rows // MOST_ROWS_OF_ERRORS)))


def _against_the_rate(losses: Values, labels: NDArray[np.bool_], sampled: NDArray[np.bool_]) -> tuple[float, float]:
    """Log loss of the best constant, the rate of these very labels, and the standard error of the difference to it."""
    rate = float(labels.mean())
    of_constant = np.where(sampled, -np.log(rate), -np.log1p(-rate))
    constant = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    differences = losses - of_constant
    error = float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else 0.0
    return float(constant), error
