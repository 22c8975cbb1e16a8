"""The value of one metric of a model, with its standard error and that of a lead over another model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from recspec.distributed import Ranks
from recspec.errors import SettingsError, unknown
from recspec.evaluation import (
    PROTOCOLS,
    EvaluateSettings,
    Evaluation,
    Progress,
    Question,
    difference,
    informed,
    is_lower_better,
    run_protocols,
    scores_of,
    silent,
)
from recspec.metrics import AT_K
from recspec.models import Model
from recspec.spec import FeatureSpec

OF_ROWS = ("auc", "log_loss", "accuracy", "calibration_error", "group_auc")
"""Metrics of protocol rows."""
OF_PROBABILITIES = tuple(f"rows/{name}" for name in OF_ROWS if name not in ("auc", "group_auc"))
"""Metrics that scores without a probability do not have."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A model's evaluation, seen by one metric, `PROTOCOL/METRIC`."""

    metric: str
    evaluation: Evaluation

    @property
    def value(self) -> float:
        """The value."""
        protocol, _, name = self.metric.partition("/")
        return self.evaluation.metrics[protocol][name]

    @property
    def error(self) -> float:
        """Its standard error; NaN if unknown."""
        protocol, _, name = self.metric.partition("/")
        return self.evaluation.standard_errors.get(protocol, {}).get(name, math.nan)

    def lead(self, other: Judged) -> tuple[float, float]:
        """By how much it is better than another over the same users or rows, and the standard error of that; or NaN."""
        found = difference(other.evaluation, self.evaluation, *self.metric.split("/", 1))
        return (math.nan, math.nan) if found is None else (sign_of(self.metric) * found[0], found[1])


def question_of(spec: FeatureSpec, split: str, metric: str, users: int | None = None) -> Question:
    """What a split asks of every model alike; of so many users, if full ranking is asked of fewer."""
    protocol, _, name = metric.partition("/")
    cut_off = name.rpartition("@")[2]
    ks = (int(cut_off),) if "@" in name and cut_off.isdecimal() and int(cut_off) > 0 else None
    return Question(spec, split, (protocol,), EvaluateSettings(ks=ks, users=users if protocol == "full" else None))


def check_metric(metric: str) -> None:
    """Refuse a metric that no evaluation has.

    Raises:
        SettingsError: with the nearest known name.
    """
    protocol, _, name = metric.partition("/")
    if protocol not in PROTOCOLS:
        raise SettingsError(f"metric {metric!r}: {unknown('protocol', protocol, PROTOCOLS)}; a metric is PROTOCOL/NAME")
    at_k = [*AT_K, *(["mean_average_precision_with_leak"] if protocol == "sampled" else [])]
    known = OF_ROWS if protocol == "rows" else ("mrr", *(f"{each}@10" for each in at_k))
    found = re.fullmatch("(.+)@[1-9][0-9]{0,8}", name)
    name = f"{found[1]}@10" if found else name
    if name not in known:
        raise SettingsError(f"metric {metric!r}: {unknown('metric', name, known)}")


def judge(
    model: Model, question: Question, metric: str, ranks: Ranks | None = None, progress: Progress = silent
) -> Judged:
    """Evaluate a model on a split; an item model knows the users' events before it.

    Raises:
        SettingsError: if the split has no such metric.
    """
    found = run_protocols(scores_of(informed(model, question), question, ranks, progress))
    protocol, _, name = metric.partition("/")
    if name not in (known := found.metrics.get(protocol, {})):
        raise SettingsError(f"metric {metric}: {unknown('metric', name, known)}")
    return Judged(metric, found)


def sign_of(metric: str) -> float:
    """1 if more of the metric is better, otherwise -1."""
    return -1.0 if is_lower_better(metric) else 1.0
