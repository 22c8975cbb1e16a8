"""Values of a metric with standard errors, and of differences between two models on the same rows.

A metric that is a mean over groups or rows has the standard error of a mean. AUC has that of DeLong et al. (Biometrics
44, 1988): its value is the mean over positives of the share of negatives below, and over negatives of the share of
positives above, and both means vary.

Shapes: M positives; N negatives; G groups or rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recspec.distributed import Ranks
from recspec.errors import SettingsError, unknown
from recspec.evaluation import LOWER_IS_BETTER, EvaluateSettings, Question, evaluate_model, score_rows
from recspec.models import Model
from recspec.spec import FeatureSpec

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Judged:
    """A model's value of a metric."""

    value: float
    parts: tuple[Values, ...]
    """Samples whose means vary independently: (G,), or for AUC (M,) and (N,)."""

    @property
    def error(self) -> float:
        """The standard error; NaN if a part holds fewer than two numbers."""
        return standard_error(self.parts)


def standard_error(parts: Sequence[Values]) -> float:
    """Of a value that is the mean of one part, or of two that vary independently."""
    if any(len(each) < 2 for each in parts):
        return math.nan
    return math.sqrt(sum(float(each.var(ddof=1)) / len(each) for each in parts))


def lead(first: Judged, second: Judged) -> tuple[float, float]:
    """By how much the first value is above the second, and the standard error of that difference over the same rows."""
    parts = [a - b for a, b in zip(first.parts, second.parts, strict=True) if len(a) == len(b)]
    return first.value - second.value, standard_error(parts) if len(parts) == len(first.parts) else math.nan


def judge(
    model: Model, spec: FeatureSpec, split: str, metric: str, ranks: Ranks | None = None, *, users: int | None = None
) -> Judged:
    """The value of `PROTOCOL/METRIC` of a model on a split; of so many users, if full ranking is asked of fewer.

    Raises:
        SettingsError: if the split has no such metric.
    """
    protocol, _, name = metric.partition("/")
    if protocol == "rows" and name in ("auc", "log_loss"):
        question = Question(spec, split, (protocol,), EvaluateSettings())
        return of_rows(name, score_rows(model, spec, split, ranks).astype(np.float64), question.rows.labels)
    _, _, k = name.partition("@")
    ks = (int(k),) if k.isdecimal() and int(k) > 0 else None
    settings = EvaluateSettings(ks=ks, users=users if protocol == "full" else None)
    found = evaluate_model(model, spec, split, protocols=(protocol,), settings=settings, ranks=ranks)
    if name not in (known := found.metrics.get(protocol, {})):
        raise SettingsError(f"metric {metric}: {unknown('metric', name, known)}")
    values = found.values.get(protocol, {}).get(name)
    return Judged(known[name], () if values is None else (np.asarray(values, np.float64),))


def of_rows(name: str, logits: Values, labels: NDArray[np.bool_]) -> Judged:
    """AUC or log loss of rows."""
    if name == "log_loss":
        losses = np.logaddexp(0.0, np.where(labels, -logits, logits))
        return Judged(float(losses.mean()), (losses,))
    above, below = _shares(logits[labels], logits[~labels])
    return Judged(float(above.mean()), (above, below))


def _shares(positive: Values, negative: Values) -> tuple[Values, Values]:
    """Of each positive the share of negatives below (M,), of each negative that of positives above (N,); ties half."""
    ordered, other = np.sort(negative), np.sort(positive)
    under = (np.searchsorted(ordered, positive, "left") + np.searchsorted(ordered, positive, "right")) / 2
    over = (np.searchsorted(other, negative, "left") + np.searchsorted(other, negative, "right")) / 2
    return under / len(negative), 1 - over / len(positive)


def sign_of(metric: str) -> float:
    """1 if more of the metric is better, otherwise -1."""
    return -1.0 if metric.rpartition("/")[2] in LOWER_IS_BETTER else 1.0
