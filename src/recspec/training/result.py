"""The end of a run, and the bundle that it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from recspec.base.errors import DataError
from recspec.bundle import Card, Seen, checkpoint
from recspec.bundle import folder as bundle
from recspec.evaluation import ModelWarning, id_feature, interactions_of, positives, seen_items
from recspec.feature_spec import FeatureSpec
from recspec.metrics import Calibration
from recspec.models import Interactions, ItemModel, Model
from recspec.training.build import Built
from recspec.training.checkpoints import Progress
from recspec.training.judgement import Judgement


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

    @property
    def value(self) -> float | None:
        """The metric on valid."""
        protocol, _, name = self.metric.partition("/")
        return self.metrics.get(protocol, {}).get(name)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        calibration = None if self.calibration is None else self.calibration.model_dump(mode="json")
        told = {"bundle": str(self.bundle), "warnings": [each.to_dict() for each in self.warnings]}
        return {**vars(self), **told, "calibration": calibration}


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
        warnings=tuple(each.to_dict() for each in judgement.warnings),
    )
    if ranks.is_first:
        bundle.save(folder, model, card, seen=seen_of(plan.spec, known), weights=best if from_file else weights)
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
    )


def keeps_best(built: Built, progress: Progress) -> bool:
    """Whether the bundle gets the weights of the best evaluation instead of the last ones."""
    return built.plan.settings.keep_best and progress.best is not None


KNOWN = ("train", "valid")
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
    if id_feature(spec, "user") is None or id_feature(spec, "item") is None:
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
