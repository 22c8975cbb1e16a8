"""Boosted trees as a baseline: what they read, when they stop, what they leave out."""

import sys
from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import MissingExtraError
from recspec.data.encoding import CrossEncoder, Encoders, HashEncoder
from recspec.data.storage import Ragged, open_split
from recspec.evaluation import row_baselines as trees
from recspec.evaluation.row_baselines import boosted_trees, constant
from recspec.metrics import measures as metrics
from tests import made_up
from tests.evaluation.test_row_baselines import logits, mixed_rows, rows_of


def test_without_the_library_one_message_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    spec = rows_of(tmp_path, {"x": [1, 2], "label": [1, 0]}, {"x": {"cardinality": 3}})
    with pytest.raises(MissingExtraError, match=r"'lightgbm', which is not installed: pip install 'recspec\[baseline"):
        boosted_trees(spec, ["train"])


def test_the_most_frequent_ids_get_codes_and_the_others_share_one() -> None:
    counts = np.array([0, 5, 2, 9, 2, 1])
    assert trees._codes(counts, 9).tolist() == [0, 2, 3, 1, 4, 5]  # equal counts in the order of their ids
    assert trees._codes(counts, 2).tolist() == [0, 2, 0, 1, 0, 0]
    assert trees._num_codes(trees._codes(np.zeros(3, dtype=np.int64), 2)) == 1  # no row has any


def test_a_list_becomes_its_length_and_the_counts_of_its_ids() -> None:
    lists = Ragged(np.array([3, 3, 1, 0, 2]), np.array([0, 3, 3, 5]))  # [3, 3, 1], [], [padding, 2]
    codes = np.array([0, 1, 0, 2])  # id 2 is rare
    lists = lists.where(lists.values != 0)
    assert trees._counts_of_lists(lists, codes).tolist() == [[3, 1, 2], [0, 0, 0], [1, 0, 0]]


def test_a_cross_of_columns_that_other_features_hold_is_left_out(tmp_path: Path) -> None:
    columns = {name: [1, 2] for name in ("a", "b", "a_x_b", "a_x_c", "label")}
    spec = rows_of(tmp_path, columns, {name: {"cardinality": 3} for name in ("a", "b", "a_x_b", "a_x_c")})
    assert trees._crosses(spec) == ()
    encoders = {name: HashEncoder(cardinality=3) for name in ("a", "b")}
    crosses = {f"a_x_{name}": CrossEncoder(columns=("a", name), cardinality=3) for name in ("b", "c")}
    Encoders({**encoders, **crosses}, {}).save(tmp_path)
    spec = spec.replace(metadata={"encoders": "encoders.json"})
    assert trees._crosses(spec) == ("a_x_b",)


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

    def test_two_rows_are_enough_to_fit(self, tmp_path: Path) -> None:
        spec = rows_of(tmp_path, {"x": [1, 2], "label": [1, 0]}, {"x": {"cardinality": 3}})
        np.testing.assert_allclose(logits(boosted_trees(spec, ["train"]), spec), [0.0, 0.0], atol=1e-6)

    def test_ids_without_any_other_row_share_a_category_and_the_report_names_the_feature(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trees, "MOST_CATEGORIES", 2)
        spec = rows_of(tmp_path, {"x": [1, 1, 2, 2, 3, 4], "label": [1, 0] * 3}, {"x": {"cardinality": 9}})
        fitted = boosted_trees(spec, ["train"])
        assert fitted.facts["rare_ids_together"] == ["x"]
        found = fitted.logits({"x": np.array([3, 4, 8])})
        assert found.tolist() == [found[0]] * 3

    def test_made_up_clicks_are_learnt_beside_torch_in_one_process(self, tmp_path: Path) -> None:
        spec = made_up.clicks(tmp_path / "data", num_users=60, num_items=40, num_rows=6000)
        columns = open_split(spec, "valid", ["label", "probability"]).read(0, 2**62)
        labels, best = np.asarray(columns["label"]), metrics.auc(np.asarray(columns["probability"]), columns["label"])
        found = logits(boosted_trees(spec, ["train"]), spec, "valid")
        assert best - 0.12 < metrics.auc(found, labels) <= best + 0.02
