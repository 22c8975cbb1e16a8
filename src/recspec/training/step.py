"""The model and the optimizers that a plan describes, and one step of training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recspec.evaluation import disliked_items, positives
from recspec.loading import (
    NegativeSampler,
    Ranks,
    Shards,
    SharedNegatives,
    build,
    ids_present,
    item_features,
    sampler_for,
    shared_negatives_for,
    stores_of,
    torchrec_tables,
)
from recspec.models import Model, SequenceModel, TrainedItemModel, counts_of
from recspec.models.layers import Batch, Gru, RowStatistics, follow_together, num_rows, sparse_rows, take
from recspec.training.optimizers import Optimizers, make_optimizers, without_frozen
from recspec.training.plan import TrainingPlan


@dataclass(frozen=True)
class Built:
    """A plan with its model, the model's divided tables and its optimizers, as this rank holds them."""

    plan: TrainingPlan
    ranks: Ranks
    model: Model
    shards: Shards
    optimizers: Optimizers


def build_model(plan: TrainingPlan, ranks: Ranks) -> Built:
    """The model with its first weights."""
    torch.manual_seed(plan.settings.seed)
    model, shards = build(plan.make, ranks, plan.placement)
    if isinstance(model, TrainedItemModel):
        assert plan.interactions is not None
        model.learn_from(plan.interactions)
        model.describe(item_features(plan.spec, plan.settings.train_splits, model.item_inputs))
    if names := model.needs_seen_ids():
        splits = plan.settings.train_splits
        model.set_seen_ids(ids_present(plan.spec, splits, names, positives_only=model.loss_needs().compares_negatives))
    optimizers = make_optimizers(without_frozen(model, plan.settings.frozen), plan.settings)
    if plan.event_products is not None:
        assert isinstance(model, SequenceModel), "its shapes are few"
        model.histories.through_onednn = plan.event_products.value == "onednn"
    backend = plan.embedding_backend.value
    optimizers.use_backend(backend)
    model.backend = backend
    if isinstance(model, SequenceModel):
        model.histories.backend = backend
    for part in model.modules():
        if isinstance(part, Gru):
            part.backend = backend
    for name, module, key, _ in stores_of(model):
        module.backend = backend
        if name in plan.fused_updates:
            module.updates[key] = optimizers.fused_update(name)
        if name in plan.sparse_gradients.value:
            module.sparse.add(key)
    if ours := plan.placement.by_torchrec:
        trained = {name: model.get_parameter(name).requires_grad for name in ours}
        updates = {name: optimizers.fused_update(name) if trained[name] else None for name in ours}
        shards = torchrec_tables.with_torchrec(shards, model, updates, plan.settings.shard_precision)
    return Built(plan, ranks, model, shards, optimizers)


def make_sampler(built: Built) -> NegativeSampler | SharedNegatives | None:
    """What adds negatives to batches, if the plan draws any or the model compares rows with each other."""
    plan, settings, needs = built.plan, built.plan.settings, built.model.loss_needs()
    number, compares_rows = plan.negatives.value, needs.negatives == "batch and positives"
    both: dict[str, Any] = {
        "features": needs.features,
        "distribution": settings.negative_distribution,
        "power": settings.popularity_power,
        "reject_positives": settings.reject_positives,
        "splits": settings.train_splits,
        "seed": settings.seed,
        "device": built.ranks.device,
    }
    if needs.shares_negatives and (number or compares_rows):
        shares = plan.loader.shares_of_positives(plan.spec) if compares_rows else None
        if needs.dislike_weight:
            both |= {"dislikes": _dislikes(built), "dislike_weight": needs.dislike_weight}
        return shared_negatives_for(plan.spec, number, row_shares=shares, gather=built.ranks.gather, **both)
    return sampler_for(plan.spec, number, beside=needs.compares_negatives, **both) if number else None


def _dislikes(built: Built) -> tuple[Tensor, Tensor] | None:
    """Offsets and items of what users disliked in train; None if nothing is known of it."""
    spec, splits = built.plan.spec, built.plan.settings.train_splits
    found = disliked_items(spec, splits, positives(spec, splits))
    if found is None or not found.num_pairs:
        return None
    return torch.from_numpy(found.offsets), torch.from_numpy(found.items.astype(np.int64))


class Objective(nn.Module):
    """The module that DDP wraps: its forward is the model's loss, so that an auxiliary loss needs no special case."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return self.model.loss(batch)


class TrainingStep:
    """Gradients of a batch, averaged over micro-batches and ranks, and a step of the optimizers."""

    def __init__(self, built: Built) -> None:
        plan, ranks, model, shards = built.plan, built.ranks, built.model, built.shards
        self.plan, self.ranks, self.model, self.shards, self.optimizers = plan, ranks, model, shards, built.optimizers
        self.accumulate, self.clip_norm = plan.settings.accumulate, plan.settings.clip_norm
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=plan.precision.value == "fp16")
        self.statistics = UnitStatistics(model, ranks, self.accumulate)
        self.sparse = {name: model.get_parameter(name) for name in plan.sparse_gradients.value if name not in shards}
        """Tables whose gradients the ranks exchange here, not DDP."""
        self.uncompiled = Objective(model)
        self.objective = self._compiled()
        self.rows_each = 1 if model.loss_needs().compares_negatives else plan.samples_per_row
        """Rows of a batch for each row of the loader."""
        is_graph = plan.compile.value == "reduce-overhead"
        self.rows_of_graph = plan.loader.batch_size * self.rows_each if is_graph else None

    def __call__(self, batch: Batch, own_share: int, all_shares: int) -> Tensor:
        """Take the step; returns the mean loss over the rows of all ranks, a scalar on the device.

        `batch` holds this rank's rows and their drawn negatives. `own_share` counts this rank's rows without negatives,
        0 if the batch is one filler row; `all_shares` counts those of all ranks.
        """
        rows = num_rows(batch)
        objective = self._objective_of(rows)
        batch = self._with_counts(batch, rows if own_share else 0)
        # Every rank takes as many micro-batches as the one with most rows: they look up rows of each other's tables.
        most = math.ceil(all_shares / self.ranks.world_size) * self.rows_each
        micro = math.ceil(most / self.accumulate)
        # DDP averages over ranks and the loss over rows: weights make it the mean over the rows of all ranks.
        weight = self.ranks.world_size * own_share / all_shares
        total: Tensor | None = None
        for start in range(0, most, micro):
            part = take(batch, slice(start, start + micro)) if self.accumulate > 1 else batch
            own_rows = num_rows(part)
            if not own_rows:
                part = take(batch, slice(0, 1))
            with self._no_sync(start + micro >= most), self._autocast():
                loss = objective(part)
                if (share := weight * own_rows / rows) != 1.0:
                    loss = loss * share
            if not (own_rows and own_share):
                self.statistics.leave_out_last()
            self.scaler.scale(loss).backward()
            self.shards.collect()
            total = loss.detach() if total is None else total + loss.detach()
        self.statistics.follow()
        self._share_sparse_gradients()
        self.shards.deliver(lambda name: name in self.plan.sparse_gradients.value)
        if self.clip_norm is not None:
            self.optimizers.unscale(self.scaler)
            self._clip(self.clip_norm)
        self.optimizers.step(self.scaler)
        self.scaler.update()
        self.optimizers.zero_grad()
        assert total is not None, "a step has rows"
        # The next step overwrites what a CUDA graph gave.
        return total if self.ranks.world_size == 1 and self.rows_of_graph is None else total / self.ranks.world_size

    def _compiled(self) -> nn.Module:
        """The objective as the plan compiles it, wrapped by DDP where there are several ranks."""
        objective: nn.Module = self.uncompiled
        mode = self.plan.compile.value
        if mode != "none":
            # A CUDA graph has one shape, so other batches run uncompiled (`_objective_of`).
            dynamic = False if mode == "reduce-overhead" else None
            objective = cast(nn.Module, torch.compile(objective, mode=mode, dynamic=dynamic))
        if self.ranks.world_size > 1:
            # Buffers are equal on all ranks (`UnitStatistics`); by default DDP sends the first rank's in every step.
            buffers = [name for name, _ in self.model.named_buffers()]
            ignored = [f"model.{name}" for name in (*self.sparse, *self.shards.stores, *buffers)]
            ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(objective, ignored)  # type: ignore[no-untyped-call]
            devices = [self.ranks.device] if self.ranks.device.type == "cuda" else None
            objective = DistributedDataParallel(objective, device_ids=devices)
        return objective

    def _objective_of(self, rows: int) -> nn.Module:
        """The compiled objective, or the uncompiled one for a batch that has another shape than the CUDA graph."""
        if self.rows_of_graph is None:
            return self.objective
        if rows != self.rows_of_graph:
            return self.uncompiled
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self.objective

    def _with_counts(self, batch: Batch, rows: int) -> Batch:
        """The batch, and how often each id that the loss counts occurs in the first `rows` rows of all ranks together.

        A batch that is not split holds all rows and needs no such columns.
        """
        names = self.model.loss_needs().counted_features
        if not names or (self.ranks.world_size == 1 and self.accumulate == 1):
            return batch
        counts = {}
        for name in names:
            ids, times = torch.unique(self.ranks.gather(batch[name][:rows]), return_counts=True)
            # A filler row may have an id that no row has; its loss has no weight.
            counts[counts_of(name)] = times[torch.searchsorted(ids, batch[name].contiguous()).clamp(max=len(ids) - 1)]
        return {**batch, **counts}

    def _no_sync(self, last: bool) -> AbstractContextManager[None]:
        if isinstance(self.objective, DistributedDataParallel) and not last:
            return cast(AbstractContextManager[None], self.objective.no_sync())
        return nullcontext()

    def _autocast(self) -> AbstractContextManager[None]:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.plan.precision.value)
        if half is None:
            return nullcontext()
        return cast(AbstractContextManager[None], torch.autocast(self.ranks.device.type, dtype=half))

    def _share_sparse_gradients(self) -> None:
        """The mean over ranks of the gradients that DDP ignores: the rows of all ranks, one rank after another."""
        if self.ranks.world_size == 1:
            return
        for parameter in self.sparse.values():
            assert parameter.grad is not None
            ids = self.ranks.gather(parameter.grad._indices()[0])
            values = self.ranks.gather(parameter.grad._values()) / self.ranks.world_size
            parameter.grad = sparse_rows(ids, values, parameter.shape)

    def _clip(self, most: float) -> None:
        """Scale all gradients down to a norm of at most `most`; the norm counts the rows on other ranks too."""
        given = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([gradient for name, gradient in given if name not in self.shards])
        if there := [gradient for name, gradient in given if name in self.shards]:
            squares = torch.stack([gradient.square().sum().to(self.ranks.device) for gradient in there]).sum()
            norm = (norm.square() + self.ranks.sum(squares)).sqrt()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), most, norm)


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


class UnitStatistics:
    """Running statistics of a model's units (Dice, BatchNorm) that take in all rows of a step once.

    If each micro-batch and rank updated them, they would move once a part, and each rank would have its own.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, accumulate: int) -> None:
        divided = ranks.world_size > 1 or accumulate > 1
        self.ranks = ranks
        self.units = [unit for unit in model.modules() if divided and isinstance(unit, RowStatistics)]
        for unit in self.units:
            unit.parts = []

    def leave_out_last(self) -> None:
        """Forget the last part, which was a filler row."""
        for unit in self.units:
            assert unit.parts
            unit.parts.pop()

    def follow(self) -> None:
        """Take in the parts of a step on all ranks."""
        for unit in self.units:
            assert unit.parts is not None
            own = torch.stack(unit.parts) if unit.parts else unit.mean.new_zeros(0, 1 + 2 * len(unit.mean))
            follow_together(unit, self.ranks.gather(own))
            unit.parts.clear()
