"""The model and the optimizers that a plan describes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recspec.distributed import Ranks, Shards, build, stores_of
from recspec.loading import NegativeSampler, item_features, sampler_for
from recspec.models import Model, TrainedItemModel
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
    optimizers = make_optimizers(without_frozen(model, plan.settings.frozen), plan.settings)
    backend = plan.embedding_backend.value
    optimizers.use_backend(backend)
    for name, module, key, _ in stores_of(model):
        module.backend = backend
        if name in plan.fused_updates:
            module.updates[key] = optimizers.fused_update(name)
        if name in plan.sparse_gradients.value:
            module.sparse.add(key)
    return Built(plan, ranks, model, shards, optimizers)


def make_sampler(built: Built) -> NegativeSampler | None:
    """The sampler that draws negatives, if the plan has any."""
    plan, settings = built.plan, built.plan.settings
    if not plan.negatives.value:
        return None
    return sampler_for(
        plan.spec,
        plan.negatives.value,
        features=built.model.loss_features(),
        distribution=settings.negative_distribution,
        power=settings.popularity_power,
        reject_positives=settings.reject_positives,
        beside=built.model.compares_negatives(),
        splits=settings.train_splits,
        seed=settings.seed,
        device=built.ranks.device,
    )
