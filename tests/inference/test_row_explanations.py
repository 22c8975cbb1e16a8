"""What each raw column contributes to the probability of a row: sums, calibrations, files, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, RequestError
from recspec.feature_spec import FeatureSpec
from recspec.inference import predict_split, requests
from recspec.inference.answer_files import predict_file
from recspec.inference.batch_jobs import How, predict_shards
from recspec.inference.predictor import Predictor
from recspec.inference.row_explanations import BECAUSE
from recspec.metrics.calibration import Calibration
from recspec.models.layers import CalibrationMap
from tests.closeness import assert_close
from tests.inference.conftest import fitted

ROWS = {"user_id": ["u1", "u2", "no one"], "item_id": ["i1", "i2", "i3"], "device": ["d1", "d0", "d2"]}
TABLE = pa.table({**ROWS, "tags": ["t1|t0", "t2", None]})
COLUMNS = {"user_id", "item_id", "device", "tags"}
SMALL: dict[str, dict[str, Any]] = {
    "lightgbm": {"target_means": "pairs", "trees": 12, "num_leaves": 6, "min_rows": 5, "max_categories": 4000},
    "logistic_regression": {"l2": 1.0},
}


@pytest.fixture(scope="module", params=[*SMALL])
def model(request: pytest.FixtureRequest, crossed: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    if request.param == "lightgbm":
        pytest.importorskip("lightgbm")
    return fitted(request.param, crossed, tmp_path_factory.mktemp("why") / "run", SMALL[request.param])


def data_of(model: Predictor) -> FeatureSpec:
    return FeatureSpec.load(model.bundle.folder.parent.parent / "data")


def log_odds(values: dict[str, Any]) -> Any:
    probability = values["probability"].astype(np.float64)
    return np.log(probability / (1 - probability))


def contributions(values: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("contribution_"): each for name, each in values.items() if name.startswith("contrib")}


def test_base_and_contributions_of_raw_columns_add_up_to_the_log_odds(model: Predictor) -> None:
    """The cross of device and item counts for both of them, as pairs of ids do."""
    values, _ = model.predict_labels(TABLE, explain=True)
    found = contributions(values)
    assert set(found) == COLUMNS
    assert tuple(values) == model.columns_added(explain=True)
    assert_close(values["log_odds"], log_odds(values).astype(np.float32))
    assert_close(values["base"] + sum(found.values()), values["log_odds"])
    assert len({*values["base"].tolist()}) == 1
    for row, text in enumerate(values[BECAUSE]):
        largest = max(found, key=lambda name: abs(found[name][row]))
        assert text.startswith(f"{largest} {found[largest][row]:+.3f}; ")


def test_the_base_of_logistic_regression_is_the_mean_of_the_training_rows(crossed: Predictor, tmp_path: Path) -> None:
    model = fitted("logistic_regression", crossed, tmp_path / "run", SMALL["logistic_regression"])
    predict_split(model, data_of(crossed), "train", tmp_path / "train.parquet", explain=True)
    found = pq.read_table(tmp_path / "train.parquet")
    for name in COLUMNS:
        assert abs(found.column(f"contribution_{name}").to_numpy().mean()) < 1e-6
    assert found.column("base")[0].as_py() == pytest.approx(found.column("log_odds").to_numpy().mean(), abs=1e-5)


CALIBRATIONS = [
    Calibration(method="temperature", logits=(0.0, 1.0), calibrated=(-0.5, 0.25)),
    Calibration(method="isotonic", logits=(-2.0, -0.5, 0.5), calibrated=(-1.0, -0.3, 1.5)),
]


@pytest.mark.parametrize("calibration", CALIBRATIONS, ids=["temperature", "isotonic"])
def test_with_a_calibration_they_add_up_to_its_log_odds(model: Predictor, calibration: Calibration) -> None:
    plain, _ = model.predict_labels(TABLE, explain=True)
    model.model.calibration = CalibrationMap(calibration)
    try:
        values, _ = model.predict_labels(TABLE, explain=True)
    finally:
        model.model.calibration = None
    assert_close(values["log_odds"], calibration(plain["log_odds"]).astype(np.float32))
    assert_close(values["base"] + sum(contributions(values).values()), values["log_odds"])
    for name, before in contributions(plain).items():
        after = contributions(values)[name]
        assert (np.sign(after) == np.sign(before)).all(), "a calibration is increasing"
        if calibration.method == "temperature":
            assert_close(after, 0.75 * before)


def test_files_splits_and_shards_get_the_same_columns(model: Predictor, tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    pa_csv.write_csv(TABLE, tmp_path / "rows.csv")
    predict_file(model, tmp_path / "rows.csv", tmp_path / "out.parquet", explain=True, columns=["user_id"])
    ours = pq.read_table(tmp_path / "out.parquet")
    assert ours.column_names == ["user_id", *model.columns_added(explain=True)]
    how = How("local", 1, 2)
    for explain in (True, False):
        out = tmp_path / f"shards {explain}"
        predict_shards(model, tmp_path / "rows.parquet", out, how, columns=["user_id"], explain=explain)
        assert pq.read_table(out).column_names == ["user_id", *model.columns_added(explain=explain)]
    assert pq.read_table(tmp_path / "shards True").column(BECAUSE).to_pylist() == ours.column(BECAUSE).to_pylist()
    none = model.predict_labels(TABLE.slice(0, 0), explain=True)[0]
    assert {name: len(each) for name, each in none.items()} == dict.fromkeys(model.columns_added(explain=True), 0)
    held = TABLE.append_column("base", pa.array([1, 2, 3]))
    pq.write_table(held, tmp_path / "held.parquet")
    with pytest.raises(DataError, match="has a column 'base' already; rename it"):
        predict_file(model, tmp_path / "held.parquet", tmp_path / "out.csv", explain=True)


def test_json_has_the_contributions_of_each_row_the_largest_first(model: Predictor) -> None:
    rows = TABLE.to_pylist()
    found = requests.predict(model, rows, explain=True).to_dict()
    values, _ = model.predict_labels(TABLE, explain=True)
    for row, each in enumerate(found["explanations"]):
        sizes = [abs(value) for value in each["contributions"].values()]
        assert sizes == sorted(sizes, reverse=True)
        assert each["base"] + sum(each["contributions"].values()) == pytest.approx(each["log_odds"])
        assert each["log_odds"] == pytest.approx(float(values["log_odds"][row]), abs=1e-6)
    assert "explanations" not in requests.predict(model, rows).to_dict()
    with pytest.raises(RequestError, match="rows: 101 rows; expected at most 100 with explanations") as refused:
        requests.predict(model, rows[:1] * 101, explain=True)
    assert refused.value.status == 413


def test_a_neural_model_says_which_models_explain(crossed: Predictor, tmp_path: Path) -> None:
    says = r"explain: wide_deep does not tell what each column contributes .* lightgbm and logistic_regression do"
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    with pytest.raises(RequestError, match=says):
        predict_file(crossed, tmp_path / "rows.parquet", tmp_path / "out.csv", explain=True)
    with pytest.raises(RequestError, match=says):
        requests.predict(crossed, [], explain=True)
    with pytest.raises(RequestError, match=says):
        predict_shards(crossed, tmp_path / "rows.parquet", tmp_path / "out", How("local", 1, 2), explain=True)
    with pytest.raises(RequestError, match=says):
        predict_split(crossed, data_of(crossed), "train", tmp_path / "out.csv", explain=True)
    assert not (tmp_path / "out").exists()
