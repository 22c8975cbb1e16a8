"""The checkpoints of a run, and the running mean of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from recspec.base.errors import CheckpointError, listed
from recspec.bundle import Checkpoint, checkpoint
from recspec.bundle import folder as bundle
from recspec.loading import PlacementSettings
from recspec.training.build import Built
from recspec.training.plan import TrainingPlan
from recspec.training.run_folder import BEST, CHECKPOINTS


class WeightAverage:
    """A running mean of a model's weights and buffers: a <- d a + (1 - d) w after each step.

    The decay d rises as (1 + t) / (10 + t) with the step t up to its setting, so that the first weights fade quickly.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        # Buffers too: averaged weights do not fit statistics (Dice) of the units of other weights. Ids have no mean.
        all_of_them = dict(model.named_parameters()) | dict(model.named_buffers())
        self.weights: dict[str, Tensor] = {name: each for name, each in all_of_them.items() if each.is_floating_point()}
        self.tensors = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step number `step`, counted from 0."""
        new = 1 - min(self.decay, (1 + step) / (10 + step))
        # On a GPU, one launch for many tensors.
        torch._foreach_lerp_(list(self.tensors.values()), [self.weights[name] for name in self.tensors], new)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint's mean."""
        for name, mean in self.tensors.items():
            tensor = saved[name]
            if tensor.shape != mean.shape:
                raise ValueError(f"the average of '{name}' has shape {tuple(tensor.shape)}")
            mean.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the mean as its weights until the end of the block."""
        own = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._give(self.tensors)
        try:
            yield
        finally:
            self._give(own)

    @torch.no_grad()
    def _give(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(tensors[name])


MAY_CHANGE = frozenset(
    {
        "affinity",
        "checkpoint_minutes",
        "embedding_backend",
        "keep_checkpoints",
        "log_every",
        "mlflow",
        "tensorboard",
        "threads",
        "minutes",
        "calibration",
        "patience",
        "falling_patience",
        "target",
        *PlacementSettings.model_fields,
    }
)
"""Settings that a continued run may change."""


@dataclass
class Progress:
    """The counters and the best evaluation of a run; a checkpoint's header holds them."""

    epoch: int = 0
    batch: int = 0
    lanes: int = 0
    """Ranks at the start of the epoch, on which streamed batches depend; 0: as many as now."""
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_epoch: float = 0.0
    best_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    trace: dict[str, list[float]] = field(default_factory=dict)
    """Values by metric, and `epoch`, of each evaluation at the end of an epoch."""
    count: int = 0
    """Rows, users or groups behind the metric; of the rarer class for AUC."""
    stopped: str = ""
    """`patience`, `falling`, `target` or `minutes`; empty while training goes on, and after the last epoch."""

    def epochs(self, steps_per_epoch: int) -> float:
        """Epochs behind the run, with the share of the one under way."""
        return self.epoch + self.batch / steps_per_epoch if self.batch else self.epoch

    @property
    def samples_per_second(self) -> float:
        """The speed of the whole run so far."""
        return self.samples / max(self.seconds, 1e-9)


PROGRESS = TypeAdapter(Progress)


class RunCheckpoints:
    """Writes the checkpoints of a run and continues from them; all ranks take part."""

    def __init__(self, built: Built, folder: Path, scaler: torch.amp.GradScaler, average: WeightAverage | None) -> None:
        self.plan, self.folder, self.ranks = built.plan, folder / CHECKPOINTS, built.ranks
        self.model, self.shards, self.optimizers = built.model, built.shards, built.optimizers
        self.scaler, self.average = scaler, average
        self.best = self.folder / BEST
        """The file of the best evaluation's weights."""

    def save(self, progress: Progress) -> None:
        """Write a checkpoint on the first rank and delete the oldest ones."""
        whole = self.shards.whole
        average = whole(self.average.tensors) if self.average is not None else {}
        state = {**identity(self.plan), "progress": asdict(progress), "scaler": self.scaler.state_dict()}
        run = Checkpoint(whole(self.model.state_dict()), whole(self.optimizers.tensors()), state, average)
        if self.ranks.is_first:
            checkpoint.save(self.folder, run, step=progress.step, keep=self.plan.settings.keep_checkpoints)
        else:
            checkpoint.take_part(run.tensors)

    def save_best(self, epoch: float) -> None:
        """Write the model's weights as those of the best evaluation."""
        whole = self.shards.whole(self.model.state_dict())
        if self.ranks.is_first:
            checkpoint.write_tensors(self.best, whole, {"format": bundle.FORMAT, "epoch": epoch})
        else:
            checkpoint.take_part(whole)

    def load_best(self) -> None:
        """Give the model the weights of the best evaluation; every rank reads the rows that it holds."""
        self.ranks.barrier()  # the first rank writes the file
        weights, _ = checkpoint.read_tensors(self.best, self.shards.held)
        self.model.load_state_dict(self.shards.take(weights))

    def restore(self) -> tuple[Progress, Sequence[str]]:
        """Continue from the newest whole checkpoint, which every rank reads; returns notes for the log too."""
        saved, notes = checkpoint.load_latest(self.folder, self.shards.held)
        progress = progress_of(saved)
        self._check_same_step(progress.step)
        check_same_run(self.plan, saved)
        if progress.epoch > self.plan.settings.epochs:
            raise CheckpointError(
                f"{saved.path}: the run has {progress.epoch} epochs behind it, and train.epochs is "
                f"{self.plan.settings.epochs}; ask for {progress.epoch} or more, or start another run without --resume"
            )
        try:
            bad = [name for name, each in saved.weights.items() if not bool(cast(Tensor, each).isfinite().all())]
            if bad:
                raise ValueError(f"the weights {listed(bad)} hold numbers that are not finite")
            self.model.load_state_dict(self.shards.take(cast(Mapping[str, Tensor], saved.weights)))
            self.optimizers.restore(self.shards.take(cast(Mapping[str, Tensor], saved.optimizer)))
            self.scaler.load_state_dict(cast(dict[str, object], saved.state["scaler"]))
            if self.average is not None:
                self.average.restore(cast(Mapping[str, Tensor], saved.average))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{saved.path}: is not a checkpoint of this run: {error}") from None
        return progress, notes

    def _check_same_step(self, step: int) -> None:
        """Refuse to continue where ranks found different checkpoints: one may read a file that another cannot."""
        steps = self.ranks.gather(torch.tensor([step])).tolist()
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"{self.folder}: the newest whole checkpoints that ranks find are of steps "
                f"{', '.join(f'{found} (rank {rank})' for rank, found in enumerate(steps))}; every host must read the "
                "same files"
            )


def progress_of(saved: Checkpoint) -> Progress:
    """How far the run of a checkpoint was."""
    try:
        return PROGRESS.validate_python(saved.state.get("progress"))
    except ValidationError as error:
        raise CheckpointError(f"{saved.path}: damaged: {error}") from None


def identity(plan: TrainingPlan) -> dict[str, object]:
    """What distinguishes a run from another, as JSON values."""
    return {
        "model": plan.model,
        "model_settings": plan.model_settings.model_dump(mode="json"),
        "train": plan.settings.model_dump(mode="json"),
        "spec": plan.spec.content_hash(),
        "loader": plan.loader.mode,
        "precision": plan.precision.value,
        "event_products": plan.event_products.value if plan.event_products is not None else None,
    }


def check_same_run(plan: TrainingPlan, saved: Checkpoint) -> None:
    """Refuse to continue another run: its weights would train on under settings that it never had."""
    may_change = {f"train.{name}" for name in MAY_CHANGE}
    if all(each.schedule in ("constant", "step") for each in (plan.settings, *plan.settings.part_settings.values())):
        may_change.add("train.epochs")
    for name in ("model_settings", "train"):
        if not isinstance(saved.state.get(name, {}), dict):
            raise CheckpointError(f"{saved.path}: damaged: its '{name}' is {saved.state[name]!r}; expected settings")
    now, then = _described(identity(plan)), _described(saved.state)
    problems = [
        f"{name} is {now.get(name)!r}, but the run was started with {then.get(name)!r}"
        for name in {**now, **then}
        if now.get(name) != then.get(name) and name not in may_change
    ]
    if problems:
        raise CheckpointError.of(
            f"{saved.path}: this is another run; --resume continues the same one, with the same --recipe and --set",
            problems,
        )


def _described(run: Mapping[str, object]) -> dict[str, object]:
    """Each part of a run's identity under the name that a user knows."""
    own, train = (cast(dict[str, object], run.get(name, {})) for name in ("model_settings", "train"))
    return {
        "model": run.get("model"),
        "the dataset's features": run.get("spec"),
        "loader mode (train.memory_budget)": run.get("loader"),
        "precision": run.get("precision"),
        **{f"settings.{name}": value for name, value in own.items()},
        **{f"train.{name}": value for name, value in train.items()},
    }
