"""The checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from pydantic import ValidationError
from torch import Tensor

from recspec.bundle import Checkpoint, checkpoint
from recspec.bundle import folder as bundle
from recspec.distributed import PlacementSettings
from recspec.errors import CheckpointError, listed
from recspec.training.build import Built
from recspec.training.plan import TrainingPlan
from recspec.training.progress import PROGRESS, Progress
from recspec.training.run_folder import BEST, CHECKPOINTS
from recspec.training.settings import TrainSettings
from recspec.training.weight_average import WeightAverage

MAY_CHANGE = frozenset(
    {
        "affinity", "checkpoint_minutes", "embedding_backend", "keep_checkpoints", "log_every", "tensorboard",
        "threads", *PlacementSettings.model_fields,
    }
)  # fmt: skip
"""Settings that a continued run may have otherwise."""


class RunCheckpoints:
    """Writes the checkpoints of a run and continues from them; all ranks take part."""

    def __init__(self, built: Built, folder: Path, scaler: torch.amp.GradScaler, average: WeightAverage | None) -> None:
        self.plan, self.folder, self.ranks = built.plan, folder / CHECKPOINTS, built.ranks
        self.model, self.shards, self.optimizers = built.model, built.shards, built.optimizers
        self.scaler, self.average = scaler, average

    @property
    def best(self) -> Path:
        """The file of the best evaluation's weights."""
        return self.folder / BEST

    def save(self, progress: Progress) -> None:
        """Write a checkpoint on the first rank and delete the oldest ones."""
        whole, settings = self.shards.whole, self.plan.settings
        average = whole(self.average.tensors) if self.average is not None else {}
        tensors = whole(self.model.state_dict()), whole(self.optimizers.tensors())
        if not self.ranks.is_first:
            checkpoint.take_part(Checkpoint(*tensors, {}, average).tensors)
            return
        state = {
            "progress": asdict(progress),
            "model": self.plan.model,
            "model_settings": self.plan.model_settings.model_dump(mode="json"),
            "train": settings.model_dump(mode="json"),
            "spec": self.plan.spec.content_hash(),
            "loader": self.plan.loader.mode,
            "precision": self.plan.precision.value,
            "scaler": self.scaler.state_dict(),
        }
        whole_run = Checkpoint(*tensors, state, average)
        checkpoint.save(self.folder, whole_run, step=progress.step, keep=settings.keep_checkpoints)

    def save_best(self, epoch: int) -> None:
        """Write the model's weights as those of the best evaluation."""
        whole = self.shards.whole(self.model.state_dict())
        if self.ranks.is_first:
            checkpoint.write_tensors(self.best, whole, {"format": bundle.FORMAT, "epoch": epoch})
        else:
            checkpoint.take_part(whole)

    def restore(self) -> tuple[Progress, Sequence[str]]:
        """Continue from the newest whole checkpoint, which every rank reads; returns notes for the log too.

        Raises:
            CheckpointError: if there is none, it is damaged, or it belongs to another run.
        """
        saved, notes = checkpoint.load_latest(self.folder, self.shards.held)
        progress = progress_of(saved)
        self._check_same_step(progress.step)
        check_same_run(self.plan, saved)
        self._check_not_done(saved, progress.epoch)
        try:
            bad = [name for name, each in saved.weights.items() if not bool(cast(Tensor, each).isfinite().all())]
            if bad:
                raise ValueError(f"the weights {listed(bad)} hold numbers that are not finite")
            self.model.load_state_dict(dict(saved.weights))
            self.optimizers.restore(cast(Mapping[str, Tensor], saved.optimizer))
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

    def _check_not_done(self, saved: Checkpoint, done: int) -> None:
        """Refuse fewer epochs than the run has completed."""
        asked = self.plan.settings.epochs
        if done > asked:
            raise CheckpointError(
                f"{saved.path}: the run has {done} epochs behind it, and train.epochs is {asked}; "
                f"ask for {done} or more, or start another run without --resume"
            )


def progress_of(saved: Checkpoint) -> Progress:
    """How far the run of a checkpoint was.

    Raises:
        CheckpointError: if that part of the checkpoint is damaged.
    """
    try:
        return PROGRESS.validate_python(saved.state.get("progress"))
    except ValidationError as error:
        raise CheckpointError(f"{saved.path}: damaged: {error}") from None


def check_same_run(plan: TrainingPlan, saved: Checkpoint) -> None:
    """Refuse to continue another run: its weights would train on under settings that it never had.

    Raises:
        CheckpointError: naming every difference.
    """
    settings, state = plan.settings, saved.state
    may_change = set(MAY_CHANGE)
    if all(each.schedule in ("constant", "step") for each in (settings, *settings.part_settings.values())):
        may_change.add("epochs")
    for name in ("model_settings", "train"):
        if not isinstance(state.get(name, {}), dict):
            raise CheckpointError(f"{saved.path}: damaged: its '{name}' is {state[name]!r}; expected settings")

    def described(
        run: Mapping[str, object], own: Mapping[str, object], train: Mapping[str, object]
    ) -> dict[str, object]:
        return {
            "model": run.get("model"),
            "the dataset's features": run.get("spec"),
            "loader mode (train.memory_budget)": run.get("loader"),
            "precision": run.get("precision"),
            **{f"settings.{name}": value for name, value in own.items()},
            **{f"train.{name}": value for name, value in train.items()},
        }

    now = described(
        {
            "model": plan.model,
            "spec": plan.spec.content_hash(),
            "loader": plan.loader.mode,
            "precision": plan.precision.value,
        },
        plan.model_settings.model_dump(mode="json"),
        settings.model_dump(mode="json"),
    )
    then = described(
        state,
        cast(dict[str, object], state.get("model_settings", {})),
        TrainSettings.renamed(cast(dict[str, object], state.get("train", {}))),
    )
    problems = [
        f"{name} is {now.get(name)!r}, but the run was started with {then.get(name)!r}"
        for name in {**now, **then}
        if now.get(name) != then.get(name) and name.removeprefix("train.") not in may_change
    ]
    if problems:
        raise CheckpointError.of(
            f"{saved.path}: this is another run; --resume continues the same one, with the same --recipe and --set",
            problems,
        )
