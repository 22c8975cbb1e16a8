"""Runs of small models on made-up films, of which tests build pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recspec.base import config
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS, FittedModel
from recspec.training import TrainSettings, train
from tests import made_up


def film_runs(folder: Path, models: Mapping[str, Mapping[str, object]]) -> Mapping[str, Path]:
    """Runs of models with these settings on 40 users and 30 items, numbered from 100, of three kinds; and `data`."""
    made_up.write_films(folder, 40, "Item, number", kinds=True)
    table = DATASETS["table"]
    settings = table.Settings(items="items.csv", item_features=("kind",), num_negatives=10)  # type: ignore[call-arg]
    table.prepare(PrepareContext(folder / "rows.csv", folder / "data"), settings)
    spec = FeatureSpec.load(folder / "data")
    for name, own in models.items():
        fitted = issubclass(MODELS[name], FittedModel)
        steps = {} if fitted else {"epochs": 2, "batch_size": 500, "learning_rate": 0.01}
        given = TrainSettings.model_validate({"tensorboard": False, **steps})
        train(name, spec, folder / name, settings=given, model_settings=config.build(MODELS[name].Settings, "", own))
    return {name: folder / name for name in (*models, "data")}
