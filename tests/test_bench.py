"""Made-up data for speed: of the sizes that were published, and of a shape that the model reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from recspec import bench
from recspec.bench import bench_training, clicks_like_outbrain
from recspec.distributed import Ranks
from recspec.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.storage import Ragged, open_split
from recspec.train import TrainSettings

FEW_ROWS = 500


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data in the published shapes, with as many rows as a test needs."""
    monkeypatch.setitem(bench.ML_1M, "rows", FEW_ROWS)
    monkeypatch.setattr(bench, "OUTBRAIN_ROWS", FEW_ROWS)


@pytest.mark.usefixtures("few_rows")
def test_clicks_have_the_features_that_were_published_for_outbrain(tmp_path: Path) -> None:
    spec = FeatureSpec.load(clicks_like_outbrain(tmp_path / "data").folder)
    scalars, lists = spec.inputs(categorical=True, is_list=False), spec.inputs(categorical=True, is_list=True)
    assert (len(scalars), len(lists), len(spec.inputs(categorical=False))) == (13, 3, 13)
    # The wide part was published with 682,768 weights: one an id, one a number, a bias.
    assert sum(spec.num_ids(name) for name in (*scalars, *lists)) + 13 + 1 == 682_768
    columns = open_split(spec, "train", spec.columns("train")).read(0, FEW_ROWS)
    for name in lists:
        column = columns[name]
        assert isinstance(column, Ragged)
        assert set(column.lengths.tolist()) == {1, 2, 3}
        assert column.values.min() >= 1


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_model_is_measured_without_data_of_ones_own(model: str) -> None:
    figures = bench_training(
        model,
        None,
        settings=TrainSettings(batch_size=200, precision="fp32", tensorboard=False),
        model_settings=MODELS[model].Settings(),
        ranks=Ranks(),
        steps=2,
        warmup=0,
    )
    assert figures["rows"] == FEW_ROWS
    # Users and items get drawn negatives beside them; clicks have their own.
    assert figures["negatives"] == (4 if "user" in MODELS[model].needs else 0)


def test_an_unknown_model_is_told_the_nearest_known_one() -> None:
    with pytest.raises(SettingsError, match=r"unknown model 'neumv'.*did you mean 'neumf'"):
        bench_training(
            "neumv",
            None,
            settings=TrainSettings(),
            model_settings=MODELS["neumf"].Settings(),
            ranks=Ranks(),
            steps=1,
            warmup=0,
        )
