"""The model and the optimizers that a plan describes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
from recspec.models import Model, SequenceModel, TrainedItemModel
from recspec.models.layers import Gru
from recspec.training.optimizers import Optimizers
from recspec.training.outline import make_optimizers, without_frozen
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
    compares_rows = needs.negatives == "batch and positives"
    if needs.shares_negatives and (plan.negatives.value or compares_rows):
        shares = plan.loader.shares_of_positives(plan.spec) if compares_rows else None
        return shared_negatives_for(
            plan.spec,
            plan.negatives.value,
            features=needs.features,
            row_shares=shares,
            distribution=settings.negative_distribution,
            power=settings.popularity_power,
            reject_positives=settings.reject_positives,
            splits=settings.train_splits,
            gather=built.ranks.gather,
            seed=settings.seed,
            device=built.ranks.device,
        )
    if not plan.negatives.value:
        return None
    return sampler_for(
        plan.spec,
        plan.negatives.value,
        features=needs.features,
        distribution=settings.negative_distribution,
        power=settings.popularity_power,
        reject_positives=settings.reject_positives,
        beside=needs.compares_negatives,
        splits=settings.train_splits,
        seed=settings.seed,
        device=built.ranks.device,
    )
