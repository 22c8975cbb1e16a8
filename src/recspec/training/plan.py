"""The plan of a training run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

import torch

from recspec import __version__, config, machine
from recspec.distributed import Placement, Ranks
from recspec.errors import SettingsError, unknown
from recspec.loading import Loader
from recspec.models import MODELS
from recspec.nn import kernels
from recspec.spec import FeatureSpec
from recspec.storage import companions
from recspec.training.choice import Choice
from recspec.training.data_choices import (
    check_splits,
    open_rows,
    pick_batch_size,
    pick_metric,
    pick_negatives,
    pick_valid,
    unread,
)
from recspec.training.notes import notes_of
from recspec.training.outline import Outline
from recspec.training.precision import pick_precision
from recspec.training.settings import TrainSettings
from recspec.training.table_choices import (
    describe_placement,
    pick_embedding_backend,
    pick_sparse_gradients,
    place_tables,
)

CompileMode = Literal["none", "default", "reduce-overhead"]
"""A mode of `torch.compile`, or none; `reduce-overhead` replays CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Every choice of a training run and its reason, made once before the first step."""

    model: str
    spec: FeatureSpec
    settings: TrainSettings
    """The settings with the batch size filled in."""
    model_settings: config.Settings
    batch_size: Choice[int]
    precision: Choice[str]
    threads: Choice[int]
    freed_memory: Choice[str]
    optimizer: Choice[str]
    negatives: Choice[int]
    rows: Choice[str]
    valid: Choice[str]
    metric: Choice[str]
    tables: Choice[str]
    embedding_backend: Choice[kernels.Backend]
    sparse_gradients: Choice[tuple[str, ...]]
    """Names of stores of embeddings."""
    compile: Choice[CompileMode]
    placement: Placement = field(repr=False)
    fused_updates: tuple[str, ...]
    """Stores of embeddings that FBGEMM updates in the backward pass."""
    loader: Loader = field(repr=False, compare=False)
    """The training rows, opened to count them."""
    sizes: Mapping[str, object]
    """Numbers of parameters: all, trained, and of each frozen part."""
    not_read: Mapping[str, list[str]]
    """Features that the model does not use, by role."""
    notes: tuple[str, ...]
    device: torch.device
    world_size: int

    @property
    def choices(self) -> dict[str, Choice[object]]:
        """The choices by name; a setting of the same name overrides most of them."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in named if isinstance(value, Choice)}

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; the last one may be smaller."""
        return self.loader.num_batches

    @property
    def samples_per_row(self) -> int:
        """A row and the negatives drawn for it."""
        return 1 + self.negatives.value

    def described(self) -> dict[str, object]:
        """Everything that decides how the run goes, as JSON values: the first event of its log."""
        sharded = self.placement.plan.stores
        return {
            "recspec": __version__,
            "torch": torch.__version__,
            "model": self.model,
            "model_settings": self.model_settings.model_dump(mode="json"),
            "train": self.settings.model_dump(mode="json"),
            **self.sizes,
            "rows": self.loader.num_rows,
            "negatives": self.negatives.value,
            "samples_per_epoch": self.loader.num_rows * self.samples_per_row,
            "steps_per_epoch": self.steps_per_epoch,
            "steps": self.steps_per_epoch * self.settings.epochs,
            "loader": self.loader.mode,
            "device": str(self.device),
            "world_size": self.world_size,
            "threads": self.threads.value,
            "precision": self.precision.value,
            "precision_reason": self.precision.reason,
            "embedding_backend": self.embedding_backend.value,
            "sparse_gradients": list(self.sparse_gradients.value),
            "sharding": str(self.placement.plan).splitlines() if sharded else None,
            "offloaded": sorted(self.placement.offloaded),
            "placement_reason": self.placement.why,
            "batch_size": self.batch_size.value,
            "choices": {name: str(choice) for name, choice in self.choices.items()},
            "not_read": self.not_read,
            "splits": list(self.settings.train_splits),
            "metric": self.metric.value if self.valid.value else None,
        }

    def to_dict(self) -> dict[str, object]:
        """The plan as one JSON value, each choice with its value and its reason."""
        choices = {name: {"value": each.value, "reason": each.reason} for name, each in self.choices.items()}
        return {**self.described(), "choices": choices, "notes": list(self.notes)}


def make_plan(
    model_name: str,
    spec: FeatureSpec,
    settings: TrainSettings,
    model_settings: config.Settings,
    ranks: Ranks,
    *,
    batch_size_so_far: int | None = None,
) -> TrainingPlan:
    """Make every choice of a run.

    Args:
        model_name: a name in `MODELS`.
        spec: the prepared dataset.
        settings: of training.
        model_settings: of the model.
        ranks: the processes and their device.
        batch_size_so_far: of the run that continues, if the settings give none.

    Raises:
        SpecError: if the dataset lacks a role that the model needs, or a split.
        SettingsError: if a setting does not fit the model, the dataset or the device.
        DataError: if a file that the dataset's metadata names is missing.
    """
    if model_name not in MODELS:
        raise SettingsError(unknown("model", model_name, MODELS))
    precision = Choice(*pick_precision(settings.precision, ranks.device, steady=MODELS[model_name].steady_shapes))
    check_splits(spec, settings.train_splits)
    companions(spec)  # the bundle needs them; a missing one is reported now, not after the last epoch
    valid = pick_valid(spec, settings)
    outline = Outline(model_name, spec, model_settings, settings, ranks.device)
    placement = place_tables(outline, settings, ranks, precision.value)
    divided = placement.plan.stores
    negatives = pick_negatives(spec, settings)
    compiles = pick_compile(settings, ranks, whole_gradients=True).value != "none"
    loader = open_rows(
        spec, settings, outline.model, ranks, negatives=negatives.value, valid=valid.value, fixed_length=compiles
    )
    samples = 1 + negatives.value
    batch_size = Choice(*pick_batch_size(settings.batch_size, loader.num_rows * samples, ranks.device))
    if batch_size_so_far is not None and settings.batch_size is None:
        batch_size = Choice(batch_size_so_far, "as when the run began")
    backend, fused = pick_embedding_backend(outline, settings, ranks, divided, compiles)
    sparse = pick_sparse_gradients(
        outline, settings, ranks, rows_per_step=batch_size.value, divided=divided, fused=fused, compiles=compiles
    )
    threads = machine.pick_threads(
        settings.threads,
        torch.get_num_threads(),
        os.environ,
        machine.cores_at_once(),
        processes=ranks.local_world_size,
    )
    return TrainingPlan(
        model=model_name,
        spec=spec,
        settings=settings.model_copy(update={"batch_size": batch_size.value}),
        model_settings=model_settings,
        batch_size=batch_size,
        precision=precision,
        threads=Choice(*threads),
        freed_memory=Choice(*machine.freed_memory()),
        optimizer=Choice(
            outline.optimizers.described, "as train.optimizer and train.parts say, in the form for this device"
        ),
        negatives=negatives,
        rows=Choice(loader.held, f"train.memory_budget is {settings.memory_budget}"),
        valid=valid,
        metric=pick_metric(spec, settings),
        tables=describe_placement(placement, ranks),
        embedding_backend=backend,
        sparse_gradients=sparse,
        compile=pick_compile(settings, ranks, whole_gradients=not (divided or sparse.value)),
        placement=placement,
        fused_updates=fused,
        loader=loader.resized(max(1, batch_size.value // samples)),
        sizes=outline.sizes(settings.frozen),
        not_read=unread(outline.model, spec),
        notes=tuple(notes_of(outline.model, spec, settings, ranks)),
        device=ranks.device,
        world_size=ranks.world_size,
    )


def pick_compile(settings: TrainSettings, ranks: Ranks, *, whole_gradients: bool) -> Choice[CompileMode]:
    """How the step is compiled; CUDA graphs need one GPU and steps that are alike.

    Args:
        settings: of training.
        ranks: the processes and their device.
        whole_gradients: whether no table has sparse gradients or fetched rows.
    """
    on_gpu = ranks.device.type == "cuda"
    if settings.compile is False or (settings.compile == "auto" and not on_gpu):
        return Choice("none", "pays on a GPU, and costs a minute at the start" if on_gpu else "does not pay on a CPU")
    obstacles = {
        f"the run is on {ranks.device.type}": not on_gpu,
        f"{ranks.world_size} processes exchange gradients in every step": ranks.world_size > 1,
        f"train.accumulate is {settings.accumulate}": settings.accumulate > 1,
        "some tables have sparse gradients, or their rows are fetched": not whole_gradients,
    }
    why_not = next((why for why, is_so in obstacles.items() if is_so), None)
    if why_not is not None:
        return Choice("default", f"as asked; no CUDA graphs: {why_not}")
    return Choice("reduce-overhead", "as asked; full batches have one shape and run as CUDA graphs")
