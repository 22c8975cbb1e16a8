"""Pipelines over HTTP: what is recommended, what brought it, and a folder that changes while it is served."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from recspec.base import config
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor, RecommendRequest, build_pipeline
from recspec.inference import requests as answers
from recspec.models import MODELS
from recspec.training import TrainSettings, train
from tests import made_up
from tests.asking import Asked, asking, fits, sources

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """iALS and EASE bring 6 candidates, of kind a or b, and NeuMF ranks them."""
    folder = tmp_path_factory.mktemp("pipeline")
    made_up.write_films(folder, 40, "Item, number", kinds=True)
    table = DATASETS["table"]
    prepared = table.Settings(items="items.csv", item_features=("kind",), num_negatives=10)  # type: ignore[call-arg]
    table.prepare(PrepareContext(folder / "rows.csv", folder / "data"), prepared)
    spec = FeatureSpec.load(folder / "data")
    own: dict[str, dict[str, object]] = {
        "ease": {"l2": 5.0},
        "ials": {"factors": 4, "l2": 0.01},
        "neumf": {"factors": 4, "layers": (8, 4)},
    }
    for name, settings in own.items():
        steps = {"epochs": 1, "batch_size": 500} if name == "neumf" else {}
        given = TrainSettings.model_validate({"tensorboard": False, **steps})
        of_model = config.build(MODELS[name].Settings, "", settings)
        train(name, spec, folder / name, settings=given, model_settings=of_model)
    runs = [str(folder / "ials"), str(folder / "ease")]
    build_pipeline(folder / "both", runs, folder / "neumf", candidates=6, filter="kind != 'c'")
    return folder / "both"


@pytest.fixture(scope="module")
def served(pipeline: Path) -> Iterator[Asked]:
    with asking(sources(films=pipeline)) as asked:
        yield asked


def test_a_served_pipeline_answers_as_the_predictor_does(served: Asked, pipeline: Path) -> None:
    answer = served("POST", "/recommend", {"user": "u3", "k": 4})
    assert answer.status == 200
    fits(answer.data, "Recommendation")
    by_hand = answers.recommend(Predictor.open(pipeline), RecommendRequest(users=("u3",), k=4))
    assert answer.data["items"] == by_hand["items"]
    assert all({*item["retrieved_by"]} <= {"ials", "ease", "popularity"} for item in answer.data["items"])
    assert all(item["retrieved_by"] for item in answer.data["items"])


def test_models_describes_the_stages(served: Asked) -> None:
    answer = served("GET", "/models")
    fits(answer.data, "Models")
    (model,) = answer.data["models"]
    assert model["kind"] == "neumf"
    assert model["pipeline"] == {"candidates": 6, "filter": "kind != 'c'", "retrievers": ["ials", "ease"]}


def test_a_served_pipeline_reads_its_folder_no_more(pipeline: Path, tmp_path: Path) -> None:
    shutil.copytree(pipeline, tmp_path / "both")
    with asking(sources(films=tmp_path / "both")) as served:
        before = served("POST", "/recommend", {"user": "u5"}).data["items"]
        for file in (tmp_path / "both" / "bundle").rglob("*.safetensors"):
            with file.open("r+b") as opened:
                opened.truncate(0)
        assert served("POST", "/recommend", {"user": "u5"}).data["items"] == before
