"""Vectors of users, items and rows, asked of every registered model: trained, resumed, scored, exported and served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec.base.errors import BundleError, DataError
from recspec.bundle import folder as bundle
from recspec.data.storage.check import check
from recspec.export.exporter import ExportSettings, export
from recspec.feature_spec import FeatureSpec
from recspec.inference.predictor import Predictor
from recspec.inference.request_features import table_of
from recspec.loading.loader import Loader
from recspec.models import MODELS
from recspec.models.layers.batch import Batch
from recspec.serving.model_folders import copy_version
from recspec.serving.opened_model import open_version
from recspec.serving.settings import RepositorySettings
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.closeness import assert_close
from tests.model_cases import MODEL_CASES, OF_LABELLED_ROWS, TRAINED_BY_STEPS, reads_numbers

NAMES = sorted(MODELS)
VECTORS = ("user_vector", "item_vector", "mood")
ALL = (*VECTORS, "title_vector")
READ = [name for name in NAMES if reads_numbers(name)]
"""Models that read vectors; the others rank by ids alone."""
QUICK = ExportSettings(batch_sizes=(1,), seconds=0.0, threads=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FeatureSpec]:
    """What a model is trained on: interactions with histories, or labelled rows."""
    made: dict[bool, FeatureSpec] = {}

    def of(name: str) -> FeatureSpec:
        labelled = name in OF_LABELLED_ROWS
        if labelled not in made:
            made[labelled] = made_up.vectors(tmp_path_factory.mktemp("vectors") / "v", labelled=labelled)
        return made[labelled]

    return of


@pytest.fixture(scope="module")
def trained(data: Callable[[str], FeatureSpec], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of a model: an epoch, and another one after a resume."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("runs") / name
            own = MODELS[name].Settings.model_validate(MODEL_CASES[name].tiny)
            for epochs in (1, 2) if name in TRAINED_BY_STEPS else (1,):
                how = {"epochs": epochs, "batch_size": 64, "learning_rate": 0.01} if name in TRAINED_BY_STEPS else {}
                settings = TrainSettings.model_validate({**how, "tensorboard": False})
                train(name, data(name), made[name], settings=settings, model_settings=own, resume=epochs > 1)
        return made[name]

    return of


def raw_rows(spec: FeatureSpec, num_rows: int = 6) -> dict[str, list[object]]:
    """Raw values of rows to predict: known users and items, and vectors of any size."""
    rng = np.random.default_rng(1)
    columns: dict[str, list[object]] = {
        "user_id": [f"u{at}" for at in range(num_rows)],
        "item_id": [f"i{at}" for at in range(num_rows)],
    }
    for name in VECTORS:
        columns[name] = rng.normal(size=(num_rows, spec.features[name].length or 0)).tolist()
    columns["title"] = ["a red chair", "a new one", "the blue table", "blue", "", "red tables"][:num_rows]
    if spec.role("history"):
        columns["history_item_id"] = ["i1|i2"] * num_rows
        columns["history_gap"] = ["1|2"] * num_rows
    return columns


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_model_trains_on_data_with_vectors_and_says_whether_it_reads_them(
    name: str, data: Callable[[str], FeatureSpec], trained: Callable[[str], Path]
) -> None:
    spec, model = data(name), bundle.load(trained(name)).model
    assert {feature for feature in ALL if feature in model.features()} == ({*ALL} if name in READ else set())
    batch = next(iter(Loader(spec, "valid", batch_size=30, seed=3).batches())).batch
    with torch.no_grad():
        before = model(batch)
        assert torch.isfinite(before).all()
        for feature in ALL:
            assert batch[feature].shape == (before.shape[0], spec.features[feature].length)
            changed = {**batch, feature: batch[feature] + 3.0}
            moved = (model(changed) - before).abs().max()
            assert (moved > 1e-6) == (name in READ), feature


@pytest.mark.parametrize("name", READ)
def test_a_request_scores_items_as_the_pairs_do(
    name: str, data: Callable[[str], FeatureSpec], trained: Callable[[str], Path]
) -> None:
    spec, model = data(name), bundle.load(trained(name)).model
    batch = next(iter(Loader(spec, "valid", batch_size=12, seed=3).batches())).batch
    items: Batch = {feature: batch[feature][:5] for feature in spec.role("item")}
    request = {feature: batch[feature][5:8] for feature in model.features() if feature not in items}
    with torch.no_grad():
        assert_close(model.score_items(request, items).numpy(), model.pair_scores(request, items).numpy(), name)


@pytest.mark.parametrize("name", READ)
def test_raw_vectors_are_read_alike_as_columns_json_and_tensors(
    name: str, data: Callable[[str], FeatureSpec], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    run, columns = trained(name), raw_rows(data(name))
    predictor = Predictor.open(run)
    expected, notes = predictor.predict(pa.table(columns))
    assert notes.notes()[0] == "1 of 6 rows has no title_vector; a vector of zeros is taken"
    texts = {**columns, **{each: [json.dumps(vector) for vector in columns[each]] for each in VECTORS}}
    assert_close(predictor.predict(pa.table(texts))[0], expected, "texts, as of CSV")
    copy = copy_version(bundle.find(run), tmp_path / "copy", verify=True)
    opened = open_version(copy, (), RepositorySettings(threads=1))
    ports = {port.name: port for port in opened.raw}
    for vector in VECTORS:
        assert (ports[vector].dtype, ports[vector].width) == ("float64", -1)
    assert (ports["title"].dtype, ports["title"].width) == ("string", 1)
    tensors = {port: np.array(columns[port], float if port in VECTORS else object).reshape(6, -1) for port in ports}
    encoded = opened.encode(tensors, 6)
    output = "probability" if predictor.column == "probability" else "logit"
    assert_close(opened.run(encoded)[output].ravel(), expected, "the Open Inference Protocol")


@pytest.mark.parametrize("name", ["wide_deep", "din"])
def test_what_rows_leave_out_comes_from_the_catalogues_and_is_told(
    name: str, data: Callable[[str], FeatureSpec], trained: Callable[[str], Path]
) -> None:
    columns = raw_rows(data(name))
    predictor = Predictor.open(trained(name))
    for vector in ("user_vector", "item_vector", "title"):
        del columns[vector]
    first, _ = predictor.predict(pa.table(columns))
    again, notes = predictor.predict(pa.table({**columns, "mood": [None, *columns["mood"][1:]]}))
    assert_close(again[1:], first[1:], "the other rows")
    assert "1 of 6 rows has no mood; a vector of zeros is taken" in notes.notes()


@pytest.mark.parametrize(
    "name", ["dlrm", *(pytest.param(name, marks=pytest.mark.slow) for name in READ if name not in ("dlrm", "dien"))]
)
def test_programs_take_vectors_as_inputs(
    name: str, data: Callable[[str], FeatureSpec], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    made = export(bundle.load(trained(name)), tmp_path / "onnx", QUICK, data(name))  # which compares the answers
    described = json.loads((made.folder / "export.json").read_text())["signature"]
    widths = {each["name"]: each["width"] for each in described["inputs"]}
    assert [widths[vector] for vector in ALL] == [3, 3, 2, 4]


# --- files that were changed by hand ---------------------------------------------------------------------------------


def test_a_catalogue_with_vectors_of_another_size_is_refused(
    data: Callable[[str], FeatureSpec], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    columns = raw_rows(data("wide_deep"))
    del columns["item_vector"]
    shutil.copytree(bundle.load(trained("wide_deep")).folder, tmp_path / "run")
    file = tmp_path / "run" / "items.parquet"
    table = pq.read_table(file)
    short = pa.array([row[:2] for row in table.column("item_vector").to_pylist()])
    pq.write_table(table.set_column(table.column_names.index("item_vector"), "item_vector", short), file)
    with pytest.raises(BundleError, match="column 'item_vector' holds lists of other lengths; expected 3 numbers"):
        Predictor.open(tmp_path / "run", verify=False).predict(pa.table(columns))


@pytest.mark.parametrize(
    ("encoder", "problem"),
    [
        ({"kind": "vector", "length": 4}, "as a vector of 4; in the specification it is a vector of 2"),
        ({"kind": "number"}, "as no vector; in the specification it is a vector of 2"),
    ],
)
def test_encoders_of_another_size_are_refused(
    encoder: dict[str, object], problem: str, data: Callable[[str], FeatureSpec], tmp_path: Path
) -> None:
    shutil.copytree(data("wide_deep").folder, tmp_path / "data")
    file = tmp_path / "data" / "encoders.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "mood": encoder}))
    with pytest.raises(DataError, match=f"'mood' is encoded {problem}"):
        check(FeatureSpec.load(tmp_path / "data"))


def test_json_rows_hold_vectors_as_lists(trained: Callable[[str], Path], data: Callable[[str], FeatureSpec]) -> None:
    predictor, columns = Predictor.open(trained("dlrm")), raw_rows(data("dlrm"))
    rows = [{name: values[at] for name, values in columns.items()} for at in range(6)]
    expected, _ = predictor.predict(pa.table(columns))
    assert_close(predictor.predict(table_of(rows, "rows"))[0], expected, "JSON")
    rows[2]["mood"] = [1, 2, 3]
    with pytest.raises(DataError, match="column 'mood': row 3 holds 3 numbers; expected a vector of 2"):
        predictor.predict(table_of(rows, "rows"))
