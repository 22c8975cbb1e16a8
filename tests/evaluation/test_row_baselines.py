"""Baselines of labelled rows: by hand, against scikit-learn, what they leave out, refusals."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sklearn.linear_model

from recspec.base.errors import DataError, MissingExtraError
from recspec.data.encoding import CrossEncoder, Encoders, HashEncoder
from recspec.data.storage import open_split
from recspec.evaluation import boosting, row_baselines
from recspec.evaluation.boosting import boosted_trees
from recspec.evaluation.evaluations import ROW_BASELINES
from recspec.evaluation.row_baselines import Scorer, constant, logistic_regression
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics
from tests import made_up
from tests.evaluation.tables import row_baselines_here


def rows_of(folder: Path, columns: Mapping[str, Sequence[object]], features: Mapping[str, object]) -> FeatureSpec:
    """A dataset of a single split `train`, its inputs in the role context."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({name: pa.array(list(values)) for name, values in columns.items()}), folder / "t.parquet")
    return FeatureSpec.from_dict(
        {
            "feature_spec": {**features, "label": {"dtype": "int64"}},
            "source_spec": {"train": [{"type": "parquet", "features": list(columns), "files": ["t.parquet"]}]},
            "channel_spec": {"context": list(features), "label": ["label"]},
        },
        folder,
    )


def logits(scorer: Scorer, spec: FeatureSpec, split: str = "train") -> np.ndarray:
    return np.asarray(scorer.logits(open_split(spec, split, scorer.features).read(0, 2**62)))


def test_the_constant_is_the_label_rate(tmp_path: Path) -> None:
    spec = rows_of(tmp_path, {"x": [0.0] * 4, "label": [1, 0, 0, 0]}, {"x": {"dtype": "float64"}})
    np.testing.assert_allclose(logits(constant(spec, ["train"]), spec), np.full(4, math.log(1 / 3)))


def test_logistic_regression_by_hand(tmp_path: Path) -> None:
    """Ids with 3 and 1 of 4 rows positive: 4 sigmoid(w) - 3 + l2 w = 0 gives w = ln 2 where l2 is 1 / (3 ln 2)."""
    spec = rows_of(tmp_path, {"x": [1] * 4 + [2] * 4, "label": [1, 1, 1, 0, 1, 0, 0, 0]}, {"x": {"cardinality": 9}})
    fitted = logistic_regression(spec, ["train"], l2=1 / (3 * math.log(2)))
    found = fitted.logits({"x": np.array([1, 2, 5])})  # id 5 was never seen
    np.testing.assert_allclose(found, [math.log(2), -math.log(2), 0.0], atol=1e-4)
    assert fitted.facts == {"l2": 1 / (3 * math.log(2)), "rows": 8, "of_rows": 8}


def mixed_rows(folder: Path, num_rows: int = 400) -> tuple[FeatureSpec, np.ndarray, np.ndarray]:
    """Ids, a number far from 0, and lists; with the matrix that they should become, and the labels."""
    rng = np.random.default_rng(0)
    ids, number = rng.integers(0, 4, num_rows), rng.normal(1000, 5, num_rows)
    lists = [rng.integers(1, 5, int(rng.integers(0, 4))).tolist() for _ in range(num_rows)]
    counts = np.array([np.bincount(of, minlength=5) for of in lists])
    logit = 0.8 * (ids - 1.5) + (number - 1000) / 5 + counts @ [0, 1, -1, 0.5, 0]
    labels = (rng.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(int)
    features = {
        "ids": {"dtype": "int64", "cardinality": 4},
        "number": {"dtype": "float64"},
        "list": {"dtype": "int64", "cardinality": 5, "length": 3, "padding": 0},
    }
    spec = rows_of(folder, {"ids": ids, "number": number, "list": lists, "label": labels}, features)
    scaled = (number - number.mean()) / number.std()
    return spec, np.column_stack((scaled, np.eye(4)[ids], counts)), labels


def test_logistic_regression_is_scikit_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_baselines, "NUM_BINS", 1)  # none
    spec, matrix, labels = mixed_rows(tmp_path)
    fitted = logistic_regression(spec, ["train"], l2=2.0)
    theirs = sklearn.linear_model.LogisticRegression(C=1 / 2.0, tol=1e-10, max_iter=5000).fit(matrix, labels)
    np.testing.assert_allclose(logits(fitted, spec), theirs.decision_function(matrix), atol=2e-3)


def test_blocks_do_not_change_logistic_regression_and_nothing_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, *_ = mixed_rows(tmp_path)
    whole, again = (logits(logistic_regression(spec, ["train"]), spec) for _ in range(2))
    np.testing.assert_array_equal(whole, again)
    monkeypatch.setattr("recspec.evaluation.interactions.ROWS_PER_BLOCK", 7)
    np.testing.assert_allclose(logits(logistic_regression(spec, ["train"]), spec), whole, atol=1e-3)


def test_rows_beyond_what_fits_are_left_out_evenly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 4000)
    columns = {"x": 2 * label + (np.arange(4000) >= 2000), "label": label}
    spec = rows_of(tmp_path, columns, {"x": {"cardinality": 4}})
    fitted = logistic_regression(spec, ["train"], l2=1.0, most_entries=1000)
    facts = fitted.facts
    assert facts["of_rows"] == 4000
    assert 900 < int(str(facts["rows"])) < 1100
    found = fitted.logits({"x": np.arange(4)})
    np.testing.assert_allclose(found[:2], found[:2].mean(), atol=0.2)  # early and late rows weigh the same
    np.testing.assert_allclose(found[2:], found[2:].mean(), atol=0.2)


def test_a_number_whose_effect_is_no_line_is_learnt_by_its_bins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.tile(np.arange(10.0), 20)
    columns = {"x": x, "label": ((x >= 4) & (x < 6)).astype(int)}
    spec = rows_of(tmp_path, columns, {"x": {"dtype": "float64"}})
    fitted = logistic_regression(spec, ["train"], l2=0.1)
    assert metrics.auc(logits(fitted, spec), columns["label"]) == 1.0
    monkeypatch.setattr(row_baselines, "NUM_BINS", 4)  # of 2, 3, 2 and 3 values: 5 shares one with 6
    coarse = logistic_regression(spec, ["train"], l2=0.1).logits({"x": np.array([0.0, 1.0, 4.0, 5.0, 6.0, 99.0])})
    assert coarse[2] > max(coarse[0], coarse[1]) + 1
    assert coarse[3] == pytest.approx(coarse[4], abs=1.0)
    assert np.isfinite(coarse).all()


@pytest.mark.parametrize("labels", [[1, 1], [0, 0]])
@pytest.mark.parametrize("name", ROW_BASELINES)
def test_rows_of_one_class_are_refused(tmp_path: Path, labels: list[int], name: str) -> None:
    spec = rows_of(tmp_path, {"x": [1, 2], "label": labels}, {"x": {"cardinality": 3}})
    message = f"of 2 rows to fit {sum(labels)} are positive; labelled rows of both classes are needed"
    with pytest.raises(DataError, match=message):
        ROW_BASELINES[name](spec, ["train"])


@pytest.mark.parametrize("name", ["logistic_regression", "lightgbm"])
def test_two_rows_are_enough_to_fit(tmp_path: Path, name: str) -> None:
    if name not in row_baselines_here():
        pytest.skip(f"{name} is not installed")
    spec = rows_of(tmp_path, {"x": [1, 2], "label": [1, 0]}, {"x": {"cardinality": 3}})
    found = logits(ROW_BASELINES[name](spec, ["train"]), spec)
    assert found[0] > 0 > found[1] if name != "lightgbm" else np.abs(found).max() < 1e-6


def test_logistic_regression_finds_what_clicks_owe_to_each_feature_alone(tmp_path: Path) -> None:
    """Made-up clicks whose logit is a sum of features, but for taste times trait, which no sum holds."""
    spec = made_up.clicks(tmp_path / "data", num_users=60, num_items=40, num_rows=12_000)
    labels = np.asarray(open_split(spec, "valid", ["label"]).read(0, 2**62)["label"])
    probability = np.asarray(open_split(spec, "valid", ["probability"]).read(0, 2**62)["probability"])
    fitted = logistic_regression(spec, ["train"])
    found, floor = logits(fitted, spec, "valid"), logits(constant(spec, ["train"]), spec, "valid")
    best = metrics.auc(probability, labels)
    assert best - 0.1 < metrics.auc(found, labels) < best
    assert metrics.log_loss(found, labels) < metrics.log_loss(floor, labels) - 0.08
    losses = fitted.facts["log_loss_by_l2"]
    assert isinstance(losses, dict)
    assert min(losses, key=losses.__getitem__) == f"{fitted.facts['l2']:g}"


# --- boosted trees ----------------------------------------------------------------------------------------------------


def test_without_the_library_one_message_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    spec = rows_of(tmp_path, {"x": [1, 2], "label": [1, 0]}, {"x": {"cardinality": 3}})
    with pytest.raises(MissingExtraError, match=r"'lightgbm', which is not installed: pip install 'recspec\[baseline"):
        boosted_trees(spec, ["train"])


def test_a_cross_of_columns_that_other_features_hold_is_left_out(tmp_path: Path) -> None:
    columns = {name: [1, 2] for name in ("a", "b", "a_x_b", "a_x_c", "label")}
    spec = rows_of(tmp_path, columns, {name: {"cardinality": 3} for name in ("a", "b", "a_x_b", "a_x_c")})
    assert boosting.crosses_of(spec) == ()
    encoders = {name: HashEncoder(cardinality=3) for name in ("a", "b")}
    crosses = {f"a_x_{name}": CrossEncoder(columns=("a", name), cardinality=3) for name in ("b", "c")}
    Encoders({**encoders, **crosses}, {}).save(tmp_path)
    spec = spec.replace(metadata={"encoders": "encoders.json"})
    assert boosting.crosses_of(spec) == ("a_x_b",)


@pytest.fixture
def _library() -> None:
    pytest.importorskip("lightgbm", reason="LightGBM is not installed: pip install 'recspec[baselines]'")


@pytest.mark.usefixtures("_library")
class TestFits:
    def test_trees_find_what_no_sum_of_the_features_holds(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        a, b = rng.integers(0, 2, (2, 3000))
        columns = {"a": a, "b": b.astype(float), "label": np.where(rng.random(3000) < 0.9, a ^ b, 1 - (a ^ b))}
        spec = rows_of(tmp_path, columns, {"a": {"cardinality": 2}, "b": {"dtype": "float64"}})
        fitted = boosted_trees(spec, ["train"])
        probability = 1 / (1 + np.exp(-fitted.logits({"a": np.array([0, 0, 1, 1]), "b": np.array([0.0, 1, 0, 1])})))
        np.testing.assert_allclose(probability, [0.1, 0.9, 0.9, 0.1], atol=0.05)
        assert fitted.facts["rows"] == fitted.facts["of_rows"] == 3000

    def test_noise_stops_the_boosting_at_the_constant(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(1)
        columns = {"x": rng.integers(0, 200, 2000), "label": (rng.random(2000) < 0.3).astype(int)}
        spec = rows_of(tmp_path, columns, {"x": {"cardinality": 200}})
        fitted = boosted_trees(spec, ["train"])
        assert int(str(fitted.facts["trees"])) < 10
        np.testing.assert_allclose(logits(fitted, spec), logits(constant(spec, ["train"]), spec), atol=0.4)

    def test_lists_numbers_and_ids_are_read_and_a_second_fit_is_the_same(self, tmp_path: Path) -> None:
        spec, _, labels = mixed_rows(tmp_path, 2000)
        first, second = (logits(boosted_trees(spec, ["train"]), spec) for _ in range(2))
        np.testing.assert_array_equal(first, second)
        assert metrics.auc(first, labels) > 0.75

    def test_rows_beyond_what_fits_are_left_out_evenly(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        columns = {"x": rng.integers(0, 4, 4000), "label": rng.integers(0, 2, 4000)}
        spec = rows_of(tmp_path, columns, {"x": {"cardinality": 4}})
        facts = boosted_trees(spec, ["train"], most_values=1000).facts
        assert facts["of_rows"] == 4000
        assert 900 < int(str(facts["rows"])) < 1100

    def test_made_up_clicks_are_learnt_beside_torch_in_one_process(self, tmp_path: Path) -> None:
        spec = made_up.clicks(tmp_path / "data", num_users=60, num_items=40, num_rows=6000)
        columns = open_split(spec, "valid", ["label", "probability"]).read(0, 2**62)
        labels, best = np.asarray(columns["label"]), metrics.auc(np.asarray(columns["probability"]), columns["label"])
        found = logits(boosted_trees(spec, ["train"]), spec, "valid")
        assert best - 0.12 < metrics.auc(found, labels) <= best + 0.02
