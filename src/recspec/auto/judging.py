"""The value of one metric of a model, with its standard error and that of a lead over another model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recspec.distributed import Ranks
from recspec.errors import SettingsError, unknown
from recspec.evaluation import EvaluateSettings, Evaluation, difference, evaluate_model, is_lower_better
from recspec.models import Model
from recspec.spec import FeatureSpec


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


def judge(
    model: Model, spec: FeatureSpec, split: str, metric: str, ranks: Ranks | None = None, *, users: int | None = None
) -> Judged:
    """Evaluate a model on a split; on so many users, if full ranking is asked of fewer.

    Raises:
        SettingsError: if the split has no such metric.
    """
    protocol, _, name = metric.partition("/")
    cut_off = name.rpartition("@")[2]
    ks = (int(cut_off),) if "@" in name and cut_off.isdecimal() and int(cut_off) > 0 else None
    settings = EvaluateSettings(ks=ks, users=users if protocol == "full" else None)
    found = evaluate_model(model, spec, split, protocols=(protocol,), settings=settings, ranks=ranks)
    if name not in (known := found.metrics.get(protocol, {})):
        raise SettingsError(f"metric {metric}: {unknown('metric', name, known)}")
    return Judged(metric, found)


def sign_of(metric: str) -> float:
    """1 if more of the metric is better, otherwise -1."""
    return -1.0 if is_lower_better(metric) else 1.0
