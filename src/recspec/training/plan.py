"""The plan of a run, trained by steps or fitted in one go."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from recspec import __version__
from recspec.base import config, machine
from recspec.base.errors import SettingsError
from recspec.base.stores import shown
from recspec.data.storage import check_sidecar_files
from recspec.evaluation import interactions_of
from recspec.feature_spec import FeatureSpec
from recspec.loading import Loader, NewRowsAndReplay, Placement, Ranks
from recspec.models import (
    FittedModel,
    FittedRowModel,
    Ids,
    Interactions,
    Model,
    TrainedItemModel,
    find_model,
    on_meta_device,
)
from recspec.models.layers import RowsHeld, kernels
from recspec.training import choices
from recspec.training.choices import Choice, CompileMode
from recspec.training.defaults import MOST_EPOCHS, pick_path, resolve
from recspec.training.optimizers import MetaModel
from recspec.training.product_rates import rates_of_all
from recspec.training.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every choice of a run and its reason, made once before it begins."""

    model: str
    spec: FeatureSpec
    settings: TrainSettings
    """The settings with the proposed ones and the batch size filled in."""
    model_settings: config.Settings
    make: Callable[[RowsHeld | None], Model] = field(repr=False, compare=False)
    """Builds the model, with the rows of its tables that a rank holds."""
    threads: Choice[int]
    negatives: Choice[int]
    valid: Choice[str]
    metric: Choice[str]
    notes: tuple[str, ...]
    device: torch.device
    world_size: int
    update_of: tuple[Path, ...] = ()
    """The version that takes new events; empty if this is no update."""
    proposed: Mapping[str, Choice[object]] = field(default_factory=dict)
    """Settings that were not given and suit the data, as `train.epochs` or `settings.dropout`."""

    @property
    def choices(self) -> dict[str, Choice[object]]:
        """The choices by name, in the order of the class; a setting of the same name overrides most of them."""
        named = {name: getattr(self, name) for name in type(self).__annotations__}
        chosen: dict[str, Choice[object]] = {name: each for name, each in named.items() if isinstance(each, Choice)}
        others = {name: each for name, each in self.proposed.items() if name.partition(".")[2] not in chosen}
        reasons = {name.partition(".")[2]: each.reason for name, each in self.proposed.items()}
        return {name: replace(each, reason=reasons.get(name, each.reason)) for name, each in chosen.items()} | others

    def described(self) -> dict[str, object]:
        """Everything that decides how the run goes, as JSON values: the first event of its log."""
        return {
            "recspec": __version__,
            "torch": torch.__version__,
            "data": shown(self.spec.folder),
            "dataset": str(self.spec.metadata.get("dataset") or ""),
            "model": self.model,
            "model_settings": self.model_settings.model_dump(mode="json"),
            **self._details(),
            "splits": list(self.settings.train_splits),
            "metric": self.metric.value if self.valid.value else None,
        }

    def _details(self) -> dict[str, object]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, object]:
        """The plan as one JSON value, each choice with its value and its reason."""
        choices = {name: {"value": each.value, "reason": each.reason} for name, each in self.choices.items()}
        return {**self.described(), "choices": choices, "notes": list(self.notes)}


@dataclass(frozen=True, kw_only=True)
class FitPlan(Plan):
    """The plan of a fit, made before the data is read."""

    method: Choice[str]
    negatives: Choice[int]
    valid: Choice[str]
    metric: Choice[str]
    chosen: Choice[tuple[str, ...]]
    """Names of the settings that are chosen on valid."""
    threads: Choice[int]
    parameters: int | None
    """None for a model of rows, whose size the fit decides."""

    @property
    def kind(self) -> type[FittedModel]:
        """The model's class."""
        return _fitted(self.model)

    def read_settings(self) -> dict[str, object]:
        """The settings of training that the fit reads, as JSON values."""
        return self.settings.model_dump(mode="json", include=set(self.kind.reads))

    def _details(self) -> dict[str, object]:
        return {
            "train": self.read_settings(),
            "parameters": self.parameters,
            "fitted": True,
            "chosen": list(self.chosen.value),
            "device": "cpu",
            "world_size": self.world_size,
            "threads": self.threads.value,
            "choices": {name: str(choice) for name, choice in self.choices.items()},
        }


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Plan):
    """The plan of training by steps."""

    path: Choice[str]
    """The kind of data, and with it the negatives and the metric."""
    batch_size: Choice[int]
    precision: Choice[str]
    event_products: Choice[choices.EventProducts] | None
    """What multiplies over events in tf32 and bf16 on a CPU; None for other models and arithmetics."""
    threads: Choice[int]
    measures_threads: bool
    """Whether a step takes one thread where several do not pay; else always `threads`."""
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
    interactions: Interactions | None = field(default=None, repr=False, compare=False)
    """The users' events, for a model that is trained on users."""

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

    def _details(self) -> dict[str, object]:
        sharded = self.placement.plan.stores
        return {
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
        }


def make_plan(
    model_name: str,
    spec: FeatureSpec,
    settings: TrainSettings,
    model_settings: config.Settings,
    ranks: Ranks,
    *,
    propose: bool = False,
    resumed_settings: Mapping[str, Mapping[str, object]] | None = None,
    newest: NewRowsAndReplay | None = None,
    users: Ids | None = None,
) -> TrainingPlan:
    """Make every choice of a run that trains by steps.

    Args:
        model_name: name of the model; see `find_model`.
        spec: the dataset.
        settings: settings of training.
        model_settings: the model's own settings.
        ranks: the processes that train.
        propose: replace settings that were not given by those that suit the data (`Model.defaults`).
        resumed_settings: sections `train`, `settings` and `chosen` of the run that continues.
        newest: the rows to train on, of a model whose rows are rows; by default all.
        users: the users to train on, of a model whose rows are users; by default all.

    Raises:
        SpecError: if the dataset lacks a role that the model needs, or a split.
        SettingsError: if a setting does not fit the model, the dataset or the device.
        DataError: if a file that the dataset's metadata names is missing.
    """
    spec = choices.of_label(spec, settings)
    device, kind = ranks.device, find_model(model_name)
    if issubclass(kind, FittedModel):
        raise SettingsError(f"{model_name} is fitted in one go: it has no steps to plan or to measure")
    choices.check_splits(spec, settings.train_splits)
    proposed: Mapping[str, Choice[object]] = {}
    if propose:
        resolved = resolve(kind, spec, settings, model_settings, device, resumed_settings)
        settings, model_settings, proposed = resolved.settings, resolved.model_settings, resolved.proposed
    resumed = resumed_settings or {}
    chosen, shapes, rates = resumed.get("chosen", {}), kind.shapes(model_settings), cache(partial(rates_of_all, ranks))
    precision = choices.pick_precision(settings.precision, device, shapes, rates, resumed=chosen.get("precision"))
    event_products = choices.pick_event_products(
        precision.value, device, shapes, rates, resumed=chosen.get("event_products")
    )
    choices.check_funnel(spec, model_settings, settings.train_splits)
    check_sidecar_files(spec)  # the bundle needs them; a missing one is reported now, not after the last epoch
    valid = choices.pick_valid(spec.splits, settings)
    if "train.calibration" not in proposed:
        choices.check_calibration(spec, settings, valid)
    make = partial(kind, spec, model_settings)
    meta = MetaModel(make, settings, device)
    choices.check_held_out(meta.model, spec)
    placement = choices.place_tables(meta, settings, ranks, precision.value)
    divided = placement.plan.stores
    negatives = choices.pick_negatives(spec, settings, kind)
    event_weights = choices.pick_event_weights(spec, settings, kind)
    interactions = None
    if issubclass(kind, TrainedItemModel):
        choices.check_users(kind, settings)
        interactions = interactions_of(kind, spec, settings.train_splits)
        trained = kind.trained_users(interactions)
        trained = trained if users is None or not np.isin(trained, users).any() else trained[np.isin(trained, users)]
        loader = choices.open_users(spec, settings, trained, ranks)
    else:
        loader = choices.open_rows(
            spec, settings, meta.model, ranks, negatives=negatives.value, valid=valid.value, newest=newest
        )
    samples, before = 1 + negatives.value, resumed.get("train", {}).get("batch_size")
    batch_size = choices.pick_batch_size(
        settings.batch_size, before if isinstance(before, int) else None, loader.num_rows * samples, device
    )
    backend, fused = choices.pick_embedding_backend(meta, settings, ranks, divided)
    sparse = choices.pick_sparse_gradients(
        meta, settings, ranks, rows_per_step=batch_size.value, divided=divided, fused={*fused, *placement.by_torchrec}
    )
    compiled = choices.pick_compile(settings, ranks, sparse=sparse.value, fetched=divided)
    sparse, notes = choices.whole_if_compiled(sparse, meta, settings, compiled)
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
        threads=_pick_threads(settings, ranks),
        measures_threads=_measures_threads(settings, ranks),
        freed_memory=Choice(*machine.freed_memory()),
        optimizer=Choice(
            meta.optimizers.described, "as train.optimizer and train.parts say, in the form for this device"
        ),
        negatives=negatives,
        rows=choices.describe_rows(loader, settings, ranks),
        event_weights=event_weights,
        valid=valid,
        metric=choices.pick_metric(spec, settings, kind),
        tables=choices.describe_placement(placement, ranks),
        embedding_backend=backend,
        sparse_gradients=sparse,
        compile=compiled,
        placement=placement,
        fused_updates=fused,
        loader=loader.resized(max(1, batch_size.value // samples), fixed_length=compiled.value != "none"),
        sizes=meta.sizes(settings.frozen),
        not_read=choices.unused_features(meta.model, spec),
        notes=(*choices.notes_of(meta.model, spec, settings, ranks, placement, event_weights), *notes),
        device=device,
        world_size=ranks.world_size,
        interactions=interactions,
        proposed=proposed,
    )


def make_fit_plan(
    model_name: str,
    spec: FeatureSpec,
    settings: TrainSettings,
    model_settings: config.Settings,
    ranks: Ranks,
    *,
    resume: bool = False,
) -> FitPlan:
    """Make every choice of a fit.

    Raises:
        SpecError: if the dataset lacks a role that the model needs, or a split.
        SettingsError: for settings of training that the model does not read, or too little memory.
        DataError: if a file that the dataset's metadata names is missing.
    """
    spec = choices.of_label(spec, settings)
    kind = _fitted(model_name)
    choices.check_fit_settings(kind, settings)
    choices.check_splits(spec, settings.train_splits)
    check_sidecar_files(spec)  # the bundle needs them
    make = partial(kind, spec, model_settings)
    model = on_meta_device(make)
    notes = [f"{model_name} is fitted in one go: there is nothing to continue, so it is fitted again"] if resume else []
    if ranks.world_size > 1:
        notes.append(f"{model_name} is fitted by the first process; the others wait")
    valid = choices.pick_valid(spec.splits, settings, kind)
    choices.check_calibration(spec, settings, valid)
    return FitPlan(
        model=model_name,
        spec=spec,
        settings=settings,
        model_settings=model_settings,
        method=Choice("fitted in one go", model.how()),
        make=lambda _: make(),  # it holds no embedding tables to divide
        negatives=Choice(0, "it is fitted to the positives"),
        valid=valid,
        metric=choices.pick_metric(spec, settings, kind),
        chosen=choices.pick_chosen(kind, model_settings, valid.value),
        threads=_pick_threads(settings, ranks),
        parameters=None if isinstance(model, FittedRowModel) else model.num_parameters(),
        notes=tuple(notes),
        device=ranks.device,
        world_size=ranks.world_size,
    )


def _fitted(model_name: str) -> type[FittedModel]:
    kind = find_model(model_name)
    assert issubclass(kind, FittedModel)
    return kind


def _pick_threads(settings: TrainSettings, ranks: Ranks) -> Choice[int]:
    now, cores = torch.get_num_threads(), machine.cores_at_once()
    return Choice(*machine.pick_threads(settings.threads, now, os.environ, cores, processes=ranks.local_world_size))


def _measures_threads(settings: TrainSettings, ranks: Ranks) -> bool:
    """Whether nobody gave the number of threads of the only process, which computes on a CPU.

    Sums on one thread and on several differ in their last digits, so `deterministic` runs keep to a number.
    """
    given = settings.threads is not None or "OMP_NUM_THREADS" in os.environ or settings.deterministic
    return not given and ranks.world_size == 1 and ranks.device.type == "cpu"
