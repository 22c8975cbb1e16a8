"""Users' events for models that are trained on users, as training gives them."""

from __future__ import annotations

from recspec.evaluation import interactions_of
from recspec.feature_spec import FeatureSpec
from recspec.loading import item_features
from recspec.models import Model, TrainedItemModel


def informed(model: Model, spec: FeatureSpec) -> Model:
    """The model; one that is trained on users knows those of train, and its items."""
    if isinstance(model, TrainedItemModel):
        model.learn_from(interactions_of(model, spec, ["train"]))
        model.describe(item_features(spec, ["train"], model.item_inputs))
    return model
