"""Data whose every text is hostile, and runs on it."""

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from recspec.base import config
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.training import TrainSettings, train
from tests.report.pages import HOSTILE

NUM_USERS, NUM_ITEMS = 40, 24


def hostile(place: int) -> str:
    """A hostile text for each number."""
    return f"{HOSTILE[place % len(HOSTILE)]} {place}".replace("\x00", "")


def write(file: Path, rows: list[tuple[object, ...]]) -> None:
    """A CSV file."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """Purchases: hostile ids of users and items, titles and categories."""
    folder = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    rows: list[tuple[object, ...]] = [("user_id", "item_id", "timestamp")]
    for user in range(NUM_USERS):
        for time, item in enumerate(rng.permutation(NUM_ITEMS)[: 4 + user % 9]):
            rows.append((f"u {hostile(user)}", f"i {hostile(int(item))}", 1_000_000 + 100 * user + time))
    write(folder / "rows.csv", rows)
    items: list[tuple[object, ...]] = [("item_id", "title", "kind")]
    items += [(f"i {hostile(item)}", hostile(item), hostile(item % 3)) for item in range(NUM_ITEMS)]
    write(folder / "items.csv", items)
    table = DATASETS["table"]
    settings = table.Settings(items="items.csv", item_features=["kind"], num_negatives=5)  # type: ignore[call-arg]
    table.prepare(PrepareContext(folder / "rows.csv", folder / "<b>data", threads=1), settings)
    return FeatureSpec.load(folder / "<b>data")


def fit(name: str, data: FeatureSpec, folder: Path, settings: Mapping[str, object]) -> Path:
    """A run of a model that is fitted in one go."""
    own = config.build(MODELS[name].Settings, "", settings)
    train(name, data, folder, settings=TrainSettings(tensorboard=False), model_settings=own)
    return folder


@pytest.fixture(scope="session")
def runs(data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs in folders with hostile names, without evaluations."""
    folder = tmp_path_factory.mktemp("runs")
    popularity = fit("popularity", data, folder / "<i>popularity", {})
    return popularity, fit("item_knn", data, folder / "knn & co", {"k": 20, "shrink": 1.0, "recency": 1.0})
