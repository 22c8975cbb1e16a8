"""Evaluation between epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch

from recspec import metrics
from recspec.batch import take
from recspec.errors import SettingsError, listed, unknown
from recspec.evaluation import LOWER_IS_BETTER, evaluate_model
from recspec.loading import Loader
from recspec.training.build import Built
from recspec.training.checkpoints import Progress
from recspec.training.choices import HELD_OUT, open_rows

Metrics = Mapping[str, Mapping[str, float]]
"""Values by protocol and metric."""


class Validation:
    """Measures the model on valid, remembers the best epoch and says when to stop."""

    def __init__(self, built: Built) -> None:
        self.built, self.plan, self.model = built, built.plan, built.model
        self.split, self.metric = self.plan.valid.value, self.plan.metric.value

    def resume(self, progress: Progress) -> None:
        """Take up the metric by which the run that continues has chosen."""
        if progress.best_metrics:
            self._value(progress.best_metrics)

    def measure(self) -> Metrics:
        """The metrics of the model as it is."""
        self.model.eval()
        if self.split == HELD_OUT:
            return {"rows": self._of_held_out()}
        protocols, ranks = (self.metric.partition("/")[0],), self.built.shards.evaluating
        return evaluate_model(self.model, self.plan.spec, self.split, protocols=protocols, ranks=ranks).metrics

    def is_best(self, found: Metrics, progress: Progress) -> bool:
        """Note in `progress` what was found and whether to stop; returns whether it is the best so far."""
        settings = self.plan.settings
        value, lower = self._value(found), self.metric.partition("/")[2] in LOWER_IS_BETTER
        better = progress.best is None or (value < progress.best if lower else value > progress.best)
        if better:
            progress.best, progress.best_epoch, progress.stale = value, progress.epoch, 0
            progress.best_metrics = {of: dict(values) for of, values in found.items()}
        else:
            progress.stale += 1
        if settings.target is not None and (value <= settings.target if lower else value >= settings.target):
            progress.stopped = "target"
        elif settings.patience is not None and progress.stale >= settings.patience:
            progress.stopped = "patience"
        return better

    def _value(self, found: Metrics) -> float:
        """The metric that picks the best epoch."""
        known = {f"{of}/{name}": value for of, values in found.items() for name, value in values.items()}
        if self.metric not in known and self.plan.settings.metric is None:  # lists too short for the chosen cut-off
            name = self.metric.rpartition("@")[0] + "@"
            self.metric = next((each for each in known if each.startswith(name)), self.metric)
        if self.metric in known:
            return known[self.metric]
        if self.metric == "rows/auc" and known:
            raise SettingsError(
                f"{self.plan.spec.folder}: the rows of '{self.split}' are of one class, so AUC has no value there; "
                f"set train.metric to one of {listed(known)}"
            )
        raise SettingsError(f"train.metric: {unknown('metric', self.metric, known)}")

    @cached_property
    def _held_out(self) -> Loader:
        plan, negatives = self.plan, self.plan.negatives.value
        return open_rows(
            plan.spec, plan.settings, self.model, self.built.ranks, negatives=negatives, valid=self.split, held_out=True
        )

    def _of_held_out(self) -> dict[str, float]:
        """AUC and log loss of the rows of train that `valid_share` keeps from training."""
        logits, labels = [torch.zeros(0)], [torch.zeros(0)]
        with torch.inference_mode():
            for share in self._held_out.batches():
                batch = take(share.batch, slice(0, share.num_rows))
                logits.append(self.model(batch).float().cpu())
                labels.append(batch[self.plan.spec.label].float().cpu())
        ranks = self.built.shards.evaluating
        scores, truth = ranks.gather(torch.cat(logits)).numpy(), ranks.gather(torch.cat(labels)).numpy()
        found = {"auc": metrics.auc(scores, truth), "log_loss": metrics.log_loss(scores, truth)}
        return {name: value for name, value in found.items() if not math.isnan(value)}
