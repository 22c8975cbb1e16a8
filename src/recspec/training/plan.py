"""The plan of a training run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from recspec import __version__
from recspec.base import config, machine
from recspec.base.errors import SettingsError
from recspec.base.stores import shown
from recspec.data.storage import companions
from recspec.evaluation import interactions_of
from recspec.feature_spec import FeatureSpec
from recspec.loading import Loader, NewRowsAndReplay, Placement, Ranks
from recspec.models import FittedModel, Ids, Interactions, Model, TrainedItemModel, find_model
from recspec.models.layers import RowsHeld, kernels
from recspec.training import choices
from recspec.training.choices import Choice, CompileMode
from recspec.training.defaults import MOST_EPOCHS, pick_path, resolve
from recspec.training.outline import Outline
from recspec.training.product_rates import rates_of_all
from recspec.training.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Every choice of a training run and its reason, made once before the first step."""

    model: str
    spec: FeatureSpec
    settings: TrainSettings
    """The settings with the proposed ones and the batch size filled in."""
    model_settings: config.Settings
    make: Callable[[RowsHeld | None], Model] = field(repr=False, compare=False)
    """Builds the model, with the rows of its tables that a rank holds."""
    path: Choice[str]
    """The kind of data, and with it the negatives and the metric."""
    batch_size: Choice[int]
    precision: Choice[str]
    event_products: Choice[choices.EventProducts] | None
    """What multiplies over events in tf32 and bf16 on a CPU; None for other models and arithmetics."""
    threads: Choice[int]
    freed_memory: Choice[str]
    optimizer: Choice[str]
    negatives: Choice[int]
    rows: Choice[str]
    event_weights: Choice[str] | None
    """The feature that weighs rows; None if the dataset has none."""
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
    interactions: Interactions | None = field(default=None, repr=False, compare=False)
    """The users' events, for a model that is trained on users."""
    update_of: tuple[Path, ...] = ()
    """The version that takes new events; empty if this is no update."""
    proposed: Mapping[str, Choice[object]] = field(default_factory=dict)
    """Settings that were not given and suit the data, as `train.epochs` or `settings.dropout`."""

    @property
    def choices(self) -> dict[str, Choice[object]]:
        """The choices by name; a setting of the same name overrides most of them."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        chosen = {name: value for name, value in named if isinstance(value, Choice)}
        others = {name: each for name, each in self.proposed.items() if name.partition(".")[2] not in chosen}
        reasons = {name.partition(".")[2]: each.reason for name, each in self.proposed.items()}
        return {name: replace(each, reason=reasons.get(name, each.reason)) for name, each in chosen.items()} | others

    @property
    def is_open_ended(self) -> bool:
        """Whether the run goes on until valid stops improving, however many epochs that takes."""
        return "train.epochs" in self.proposed and self.settings.epochs >= MOST_EPOCHS

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
            "data": shown(self.spec.folder),
            "dataset": str(self.spec.metadata.get("dataset") or ""),
            "model": self.model,
            "model_settings": self.model_settings.model_dump(mode="json"),
            "train": self.settings.model_dump(mode="json"),
            **self.sizes,
            "rows": self.loader.num_rows,
            "negatives": self.negatives.value,
            "samples_per_epoch": self.loader.num_rows * self.samples_per_row,
            "steps_per_epoch": self.steps_per_epoch,
            "steps": self.steps_per_epoch * self.settings.epochs,
            "open_ended": self.is_open_ended,
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
            "proposed": {name: choice.value for name, choice in self.proposed.items()},
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
    propose: bool = False,
    so_far: Mapping[str, Mapping[str, object]] | None = None,
    newest: NewRowsAndReplay | None = None,
    users: Ids | None = None,
) -> TrainingPlan:
    """Make every choice of a run.

    Args:
        model_name: name of the model; see `find_model`.
        spec: the dataset.
        settings: settings of training.
        model_settings: the model's own settings.
        ranks: the processes that train.
        propose: replace settings that were not given by those that suit the data (`Model.defaults`).
        so_far: sections `train`, `settings` and `chosen` of the run that continues.
        newest: the rows to train on, of a model whose rows are rows; by default all.
        users: the users to train on, of a model whose rows are users; by default all.

    Raises:
        SpecError: if the dataset lacks a role that the model needs, or a split.
        SettingsError: if a setting does not fit the model, the dataset or the device.
        DataError: if a file that the dataset's metadata names is missing.
    """
    kind = find_model(model_name)
    if issubclass(kind, FittedModel):
        raise SettingsError(f"{model_name} is fitted in one go: it has no steps to plan or to measure")
    device = ranks.device
    choices.check_splits(spec, settings.train_splits)
    proposed: Mapping[str, Choice[object]] = {}
    if propose:
        resolved = resolve(kind, spec, settings, model_settings, device, so_far)
        settings, model_settings, proposed = resolved.settings, resolved.model_settings, resolved.proposed
    chosen, shapes = (so_far or {}).get("chosen", {}), kind.shapes(model_settings)
    rates = cache(partial(rates_of_all, ranks))
    precision = choices.pick_precision(settings.precision, device, shapes, rates, so_far=chosen.get("precision"))
    event_products = choices.pick_event_products(
        precision.value, device, shapes, rates, so_far=chosen.get("event_products")
    )
    companions(spec)  # the bundle needs them; a missing one is reported now, not after the last epoch
    valid = choices.pick_valid(spec, settings)
    if "train.calibration" not in proposed:
        choices.check_calibration(spec, settings, valid)
    make = partial(kind, spec, model_settings)
    outline = Outline(make, settings, device)
    placement = choices.place_tables(outline, settings, ranks, precision.value)
    divided = placement.plan.stores
    negatives = choices.pick_negatives(spec, settings, kind)
    interactions = None
    if issubclass(kind, TrainedItemModel):
        choices.check_users(kind, settings)
        interactions = interactions_of(kind, spec, settings.train_splits)
        trained = kind.trained_users(interactions)
        trained = trained if users is None or not np.isin(trained, users).any() else trained[np.isin(trained, users)]
        loader = choices.open_users(spec, settings, trained, ranks)
    else:
        loader = choices.open_rows(
            spec, settings, outline.model, ranks, negatives=negatives.value, valid=valid.value, newest=newest
        )
    samples = 1 + negatives.value
    before = so_far.get("train", {}).get("batch_size") if so_far else None
    batch_size = choices.pick_batch_size(
        settings.batch_size, before if isinstance(before, int) else None, loader.num_rows * samples, device
    )
    backend, fused = choices.pick_embedding_backend(outline, settings, ranks, divided)
    sparse = choices.pick_sparse_gradients(
        outline,
        settings,
        ranks,
        rows_per_step=batch_size.value,
        divided=divided,
        fused={*fused, *placement.by_torchrec},
    )
    compiled = choices.pick_compile(settings, ranks, sparse=sparse.value, fetched=divided)
    sparse, notes = choices.whole_if_compiled(sparse, outline, settings, compiled)
    threads = machine.pick_threads(
        settings.threads, torch.get_num_threads(), os.environ, machine.cores_at_once(), processes=ranks.local_world_size
    )
    form = "as train.optimizer and train.parts say, in the form for this device"
    return TrainingPlan(
        model=model_name,
        spec=spec,
        settings=settings.model_copy(update={"batch_size": batch_size.value}),
        model_settings=model_settings,
        make=make,
        path=pick_path(spec, kind),
        batch_size=batch_size,
        precision=precision,
        event_products=event_products,
        threads=Choice(*threads),
        freed_memory=Choice(*machine.freed_memory()),
        optimizer=Choice(outline.optimizers.described, form),
        negatives=negatives,
        rows=choices.describe_rows(loader, settings, ranks),
        event_weights=choices.pick_event_weights(spec, settings, kind),
        valid=valid,
        metric=choices.pick_metric(spec, settings, kind),
        tables=choices.describe_placement(placement, ranks),
        embedding_backend=backend,
        sparse_gradients=sparse,
        compile=compiled,
        placement=placement,
        fused_updates=fused,
        loader=loader.resized(max(1, batch_size.value // samples), fixed_length=compiled.value != "none"),
        sizes=outline.sizes(settings.frozen),
        not_read=choices.unread(outline.model, spec),
        notes=(*choices.notes_of(outline.model, spec, settings, ranks, placement), *notes),
        device=device,
        world_size=ranks.world_size,
        interactions=interactions,
        proposed=proposed,
    )
