"""Made-up data for speed: of the sizes that were published, and of a shape that the model reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from recspec.base import config
from recspec.base.errors import BundleError, SettingsError
from recspec.bench import speed as bench
from recspec.bench.speed import bench_inference, bench_training, clicks_like_outbrain, made_up_inputs
from recspec.bundle import folder as bundle
from recspec.bundle.folder import Card
from recspec.data.storage import Ragged, open_split
from recspec.export.exporter import ExportSettings, export
from recspec.feature_spec import FeatureSpec
from recspec.feature_spec.signature import Port, Signature
from recspec.loading.ranks import Ranks
from recspec.models import MODELS, TrainedItemModel
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.model_cases import MODEL_CASES, TRAINED_BY_STEPS
from tests.models.test_models import build

FEW_ROWS = 500


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data in the published shapes, with as many rows as a test needs."""
    monkeypatch.setitem(bench.ML_1M, "rows", FEW_ROWS)
    monkeypatch.setattr(bench, "OUTBRAIN_ROWS", FEW_ROWS)
    monkeypatch.setattr(bench, "BOOKS_ROWS", FEW_ROWS)
    _no_time_for_limits(monkeypatch)


def _no_time_for_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MATRIX_SIZE", 16), ("TRIAD_BYTES", 4096), ("LIMIT_SECONDS", 0.0)):
        monkeypatch.setattr(bench, name, value)


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


@pytest.mark.slow
@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("model", TRAINED_BY_STEPS)
def test_every_model_is_measured_without_data_of_ones_own(model: str) -> None:
    small = MODEL_CASES[model].tiny if model in ("dlrm", "dcnv2") else {}  # tables of 350 MB by default
    figures = bench_training(
        model,
        None,
        settings=TrainSettings(batch_size=200, precision="fp32", tensorboard=False),
        model_settings=config.build(MODELS[model].Settings, "settings", small),
        ranks=Ranks(),
        steps=2,
        warmup=0,
    )
    of_users = issubclass(MODELS[model], TrainedItemModel)
    assert 0 < figures["rows"] < FEW_ROWS if of_users else figures["rows"] == FEW_ROWS
    # Users and items get drawn negatives beside them; clicks have their own, and a user's items are compared with all.
    assert figures["negatives"] == (4 if "user" in MODELS[model].needs and not of_users else 0)
    for figure in ("share_of_memory_bandwidth", "peak_memory_bytes"):
        assert cast(float, figures[figure]) > 0
    for figure in ("gflop_per_step", "share_of_matrix_rate"):  # 0 for a model without a matrix product
        assert cast(float, figures[figure]) >= 0
    assert "profile" not in figures


@pytest.mark.usefixtures("few_rows")
def test_a_profile_is_measured_where_it_is_asked_for() -> None:
    figures = bench_training(
        "dlrm",
        None,
        settings=TrainSettings(batch_size=100, precision="fp32", tensorboard=False),
        model_settings=MODELS["dlrm"].Settings.model_validate({"embedding_dim": 4, "bottom": [4], "top": [4]}),
        ranks=Ranks(),
        steps=1,
        warmup=1,
        profiled=1,
    )
    assert cast(float, figures["gflop_per_step"]) > 0
    assert cast(float, figures["share_of_matrix_rate"]) > 0
    profile = cast(dict[str, Any], figures["profile"])
    assert {"parts", "operations", "largest", "ms_per_step"} <= profile.keys()
    assert profile["steps"] == 1
    json.dumps(figures)  # all of it can be written down


def test_limits_of_the_machine_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_time_for_limits(monkeypatch)
    cpu = torch.device("cpu")
    assert bench.matrix_rate("fp32", cpu) > 0
    assert bench.memory_bandwidth(cpu) > 0


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


# --- answering -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_and_its_export_are_measured_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    data = made_up.interactions(tmp_path / "data")
    model = build("neumf", data)
    bundle.save(tmp_path / "run", model, Card(model="neumf", settings=model.settings.model_dump(mode="json")))
    quick = ExportSettings(batch_sizes=(1,), seconds=0.0, threads=1)
    export(bundle.load(tmp_path / "run"), tmp_path / "onnx", quick)
    found = bench_inference([tmp_path / "run", tmp_path / "onnx"], batch_sizes=(1, 5), threads=(1,), seconds=0.0)
    lines = found["measured"]
    assert isinstance(lines, list)
    assert [(line["format"], line["batch_size"], line["threads"]) for line in lines] == [
        ("torch", 1, 1),
        ("torch", 5, 1),
        ("onnx", 1, 1),
        ("onnx", 5, 1),
    ]
    assert all(0 < line["p50_ms"] <= line["p99_ms"] and line["calls"] >= 3 for line in lines)


def test_made_up_inputs_are_ids_in_range_and_one_row_a_request() -> None:
    ports = (
        Port("user", "int32", 1, "request", 3),
        Port("tags", "int64", 4, "item", 9),
        Port("x", "float32", 1, "item"),
    )
    made = made_up_inputs(Signature("ranker", ports), 50)
    assert {name: (values.shape, values.dtype.name) for name, values in made.items()} == {
        "user": ((1, 1), "int32"),
        "tags": ((50, 4), "int64"),
        "x": ((50, 1), "float32"),
    }
    assert set(np.unique(made["tags"])) == set(range(9))


def test_sizes_below_one_are_refused_together() -> None:
    with pytest.raises(SettingsError) as caught:
        bench_inference([Path("run")], batch_sizes=(0, 4), threads=(-1,))
    assert "batch size 0: expected 1 or more" in str(caught.value)
    assert "-1 threads: expected 1 or more" in str(caught.value)
    with pytest.raises(BundleError, match="no such folder"):
        bench_inference([Path("no-such-run")], batch_sizes=(1,))


def test_one_slow_product_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without a kernel for a type takes minutes for each product."""
    import time

    import torch

    from recspec.bench import speed as bench

    clock, done = iter([0.0, 120.0]), list[int]()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert bench._times_a_second(lambda: done.append(1), torch.device("cpu")) == pytest.approx(1 / 120)
    assert done == [1]
