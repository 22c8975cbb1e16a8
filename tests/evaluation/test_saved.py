"""Evaluations that are kept with a run."""

from pathlib import Path

import numpy as np
import pytest

from recspec import config
from recspec.bundle import folder as bundle
from recspec.bundle import run_record
from recspec.evaluation import EvaluateSettings, evaluate, save, saved
from recspec.files import manifest
from recspec.models import MODELS
from recspec.spec import FeatureSpec
from recspec.training import TrainSettings, train
from tests import made_up


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("saved") / "data")


@pytest.fixture(scope="module")
def run(data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    kind = MODELS["item_knn"]
    own = config.build(kind.Settings, "", {"k": 20, "shrink": 1.0, "recency": 1.0})
    train("item_knn", data, folder, settings=TrainSettings(tensorboard=False), model_settings=own)
    return folder


def test_an_evaluation_is_kept_with_its_run_and_read_again(run: Path, data: FeatureSpec) -> None:
    trained = bundle.load(run)
    report = evaluate(trained, data, "test", settings=EvaluateSettings(ks=(5,)), baselines=True)
    kept = save(report, trained, data)
    assert kept.file is not None
    assert kept.file.parent == run / "evaluations"
    (found,) = saved(run)
    assert saved(run / "bundle") == (found,)
    assert (found.split, found.model.name, found.is_current) == ("test", "item_knn", True)
    assert found.model.digest == manifest.check(run / "bundle"), "and the manifest does not know of evaluations"
    assert found.metrics == report.metrics
    assert found.baseline_metrics == report.baselines
    record = run_record.read(run)
    assert record is not None
    assert found.data == record.data
    for protocol, values in report.model.values.items():
        table = found.table(protocol)
        held = found.groups[protocol]
        assert held.saved == held.of == len(table)
        for metric, of in values.items():
            np.testing.assert_allclose(table.column(metric).to_numpy(), of, rtol=1e-6)
            popular = report.beside["popularity"].values[protocol]
            if metric in popular:
                np.testing.assert_allclose(table.column(f"popularity/{metric}"), popular[metric], rtol=1e-6)
