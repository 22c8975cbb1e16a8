"""A dataset and two runs, whose evaluations are kept."""

from pathlib import Path

import pytest

from recspec.bundle import folder as bundle
from recspec.evaluation import EvaluateSettings, Kept, Report, evaluate, save
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.training import TrainSettings, train
from tests import made_up


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("kept") / "data", num_users=40, num_items=30, num_rows=500)


@pytest.fixture(scope="session")
def small_runs(small_data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `knn` and `popular`."""
    folder = tmp_path_factory.mktemp("kept") / "runs"
    for name, model, given in (("knn", "item_knn", {"k": 10, "shrink": 1.0}), ("popular", "popularity", {})):
        own = MODELS[model].Settings.model_validate(given)
        train(model, small_data, folder / name, settings=TrainSettings(tensorboard=False), model_settings=own)
    return folder


def kept(
    run: Path, data: FeatureSpec, split: str = "test", *, baselines: bool = False, **settings: object
) -> tuple[Report, Kept]:
    """An evaluation of a run, which is kept."""
    trained, asked = bundle.load(run), EvaluateSettings.model_validate({"ks": (5,), **settings})
    report = evaluate(trained, data, split, settings=asked, baselines=baselines)
    return report, save(report, trained, data)
