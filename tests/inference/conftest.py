"""Models and raw rows that the tests of inference share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.inference.predictor import Predictor
from recspec.models import MODELS
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests import made_up

SETTINGS = {"factors": 4, "layers": (8, 4), "dropout": 0.0}
ADULT = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Canada, <=50K
52, Private, 209642, HS-grad, 9, Married-civ-spouse, Exec-managerial, Husband, White, Male, 0, 0, 45, Canada, >50K
31, ?, 45781, Masters, 14, Never-married, ?, Not-in-family, White, Female, 14084, 0, 50, ?, >50K
?, Private, 338409, 11th, 7, Never-married, Sales, Own-child, Black, Female, 0, 1902, 20, Cuba, <=50K
"""


def trained_neumf(spec: FeatureSpec, run: Path) -> Predictor:
    settings = TrainSettings(epochs=3, batch_size=500, learning_rate=0.01, tensorboard=False)
    train("neumf", spec, run, settings=settings, model_settings=MODELS["neumf"].Settings.model_validate(SETTINGS))
    return Predictor.open(run, device="cpu")


def trained(model: str, spec: FeatureSpec, run: Path, settings: dict[str, Any], **others: Any) -> Predictor:
    how = TrainSettings(epochs=1, batch_size=500, learning_rate=0.01, tensorboard=False, **others)
    train(model, spec, run, settings=how, model_settings=MODELS[model].Settings.model_validate(settings))
    return Predictor.open(run, device="cpu")


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interactions of 40 users, named by text, with 30 items, numbered from 100, that have titles."""
    folder = tmp_path_factory.mktemp("predict") / "raw"
    folder.mkdir()
    made_up.write_films(folder, 40, "Item, number", kinds=True)
    return folder


@pytest.fixture(scope="session")
def predictor(raw: Path) -> Predictor:
    table = DATASETS["table"]
    settings = table.Settings(items="items.csv", item_features=("kind",), num_negatives=10)  # type: ignore[call-arg]
    table.prepare(PrepareContext(raw / "rows.csv", raw.parent / "data"), settings)
    return trained_neumf(FeatureSpec.load(raw.parent / "data"), raw.parent / "run")


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Trained on files that recspec did not prepare: ids are themselves, 0 is a real user and a real item."""
    folder = tmp_path_factory.mktemp("bare")
    rows = [(user, (user + step) % 6) for user in range(8) for step in range(3)]
    (folder / "train.csv").write_text("".join(f"{user},{item},1\n" for user, item in rows))
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"u": {"cardinality": 8}, "i": {"cardinality": 6}, "y": {}},
            "source_spec": {"train": [{"type": "csv", "features": ["u", "i", "y"], "files": ["train.csv"]}]},
            "channel_spec": {"user_ch": ["u"], "item_ch": ["i"], "label_ch": ["y"]},
        },
        folder,
    )
    return trained_neumf(spec, folder / "run")


@pytest.fixture(scope="session")
def adult(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A census whose publisher marks missing values by ? and puts a blank after every comma."""
    folder = tmp_path_factory.mktemp("adult")
    (folder / "raw").mkdir()
    (folder / "raw" / "adult.data").write_text(ADULT * 20)
    (folder / "raw" / "adult.test").write_text("|1x3 Cross validator\n" + ADULT.replace("K\n", "K.\n"))
    DATASETS["adult"].prepare(PrepareContext(folder / "raw", folder / "data"), DATASETS["adult"].Settings())
    wide_deep = MODELS["wide_deep"].Settings.model_validate({"hidden": (8,), "dropout": 0.0})
    settings = TrainSettings(epochs=2, batch_size=16, learning_rate=0.05, metric="rows/auc", tensorboard=False)
    train("wide_deep", FeatureSpec.load(folder / "data"), folder / "run", settings=settings, model_settings=wide_deep)
    return Predictor.open(folder / "run", device="cpu")


@pytest.fixture(scope="session")
def sequential(raw: Path) -> Predictor:
    """DIN on the same interactions, each row with the last five events before it."""
    table = DATASETS["table"]
    asked = {
        "items": "items.csv",
        "item_features": ("kind",),
        "num_negatives": 10,
        "history": 5,
        "negative_history": True,
    }
    table.prepare(PrepareContext(raw / "rows.csv", raw.parent / "past"), table.Settings.model_validate(asked))
    settings = TrainSettings(epochs=1, batch_size=500, tensorboard=False)
    din = MODELS["din"].Settings.model_validate({"embedding_dim": 4, "hidden": (8,)})
    spec = FeatureSpec.load(raw.parent / "past")
    train("din", spec, raw.parent / "din", settings=settings, model_settings=din)
    return Predictor.open(raw.parent / "din", device="cpu")


@pytest.fixture(scope="session")
def films(predictor: Predictor) -> Predictor:
    """40 users, named by text, and 30 items, numbered from 100, with titles and a kind."""
    return predictor


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A model of labelled rows with user, item and context features, numbers and lists."""
    folder = tmp_path_factory.mktemp("clicks")
    spec = made_up.clicks(folder / "data", num_rows=1500)
    return trained("wide_deep", spec, folder / "run", {"hidden": (16, 8)})


@pytest.fixture(scope="session")
def past(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """DIN, which reads each user's history from the catalogue of users."""
    folder = tmp_path_factory.mktemp("past")
    spec = made_up.sequences(folder / "data", num_rows=200)
    spec = spec.replace(channels={**spec.channels, "context": ()})  # the hour is neither the user's nor the item's
    return trained("din", spec, folder / "run", {"embedding_dim": 4, "hidden": (8,)})


@pytest.fixture(scope="session")
def ease(films: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """EASE on the same films; its scores are sums of weights."""
    return fitted("ease", films, tmp_path_factory.mktemp("ease"), {"l2": 10.0})


@pytest.fixture(scope="session")
def knn(films: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Item-kNN on the same films."""
    return fitted("item_knn", films, tmp_path_factory.mktemp("knn"), {"k": 10, "shrink": 5.0})


@pytest.fixture(scope="session")
def ials(films: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """iALS on the same films: vectors of items, and no weights between items."""
    return fitted("ials", films, tmp_path_factory.mktemp("ials"), {"factors": 4, "l2": 0.01})


def fitted(model: str, like: Predictor, run: Path, settings: dict[str, Any]) -> Predictor:
    """An item model on the data that another model was trained on."""
    spec = FeatureSpec.load(like.bundle.folder.parent.parent / "data")
    train(model, spec, run, settings=TrainSettings(), model_settings=MODELS[model].Settings.model_validate(settings))
    return Predictor.open(run, device="cpu")


@pytest.fixture(scope="session")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A model of labelled rows that reads a cross of a column of items with one of the request, and a list of it."""
    folder = tmp_path_factory.mktemp("crossed")
    rows = [f"u{row % 7},i{row % 5},d{row % 3},t{row % 4}|t{row % 2},{int(row % 6 < 2)}" for row in range(300)]
    (folder / "rows.csv").write_text("\n".join(["user_id,item_id,device,tags,label", *rows]) + "\n")
    table = DATASETS["table"]
    asked = {
        "label": "label",
        "context_features": ("device", "tags"),
        "lists": ("tags",),
        "crosses": (("device", "item_id"),),
        "cross_cardinality": 50,
    }
    table.prepare(PrepareContext(folder / "rows.csv", folder / "data"), table.Settings.model_validate(asked))
    return trained("wide_deep", FeatureSpec.load(folder / "data"), folder / "run", {"hidden": (8,), "dropout": 0.0})
