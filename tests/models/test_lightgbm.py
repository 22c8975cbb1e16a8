"""LightGBM as a model: trees by hand and against the library, means of the label, leaks, hostile files, refusals."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec.base.errors import BundleError
from recspec.bundle import folder as bundle
from recspec.bundle.checkpoint import write_tensors
from recspec.data.storage import open_split
from recspec.evaluation import boosting
from recspec.evaluation.boosting import BoostedFit, TreeRows
from recspec.evaluation.scoring import as_batch
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics
from recspec.models import LightGbm, LightGbmSettings
from recspec.models.lightgbm import PairMeans
from recspec.models.trees import DEEPEST, Trees
from tests import made_up
from tests.closeness import assert_close

lightgbm: Any = pytest.importorskip("lightgbm")


def node(feature: int, threshold: object, left: object, right: object, *, is_set: bool = False) -> dict[str, object]:
    kind = {"decision_type": "==" if is_set else "<=", "missing_type": "None", "default_left": True}
    return {"split_feature": feature, "threshold": threshold, **kind, "left_child": left, "right_child": right}


def leaf(value: float, rows: int = 1) -> dict[str, object]:
    return {"leaf_value": value, "leaf_count": rows}


def filled(*grown: dict[str, object], columns: int = 2) -> Trees:
    trees = Trees(columns)
    trees.fill(grown)
    return trees


BY_HAND = (
    node(0, 1.5, leaf(1.0, 3), node(1, "0||31||32", leaf(10.0), leaf(100.0), is_set=True)),
    leaf(1000.0),
)
"""x0 <= 1.5: 1; else 10 for the categories 0, 31 and 32, and 100 for others; beside it the constant 1000."""


def test_trees_by_hand() -> None:
    rows = [[1.5, 0], [1.6, 0], [1.6, 31], [1.6, 32], [1.6, 30], [1.6, 33], [1.6, 64], [1.6, 999], [1.6, -1]]
    found = filled(*BY_HAND)(torch.tensor(rows, dtype=torch.float64)).tolist()
    assert found == [1001, 1010, 1010, 1010, 1100, 1100, 1100, 1100, 1100]


def test_contributions_by_hand() -> None:
    """The means of what a column changes, alone and beside the other.

    Without any column: 22.6 (3 rows of 1, one of 10, one of 100). With x0 = 2 alone 55, with x1 = 0 alone 4.6, with
    both 10: x0 gives (55 - 22.6 + 10 - 4.6) / 2 and x1 (4.6 - 22.6 + 10 - 55) / 2.
    """
    trees = filled(*BY_HAND)
    found = trees.contributions(torch.tensor([[1.0, 0], [2.0, 0]], dtype=torch.float64))
    assert_close(found.numpy(), np.array([[-12.6, -9.0], [18.9, -31.5]]))
    assert trees.base() == pytest.approx(1022.6)
    assert_close(trees.gains().numpy(), np.array([3 * 21.6**2 + 2 * 32.4**2, 2 * 45.0**2]))
    assert filled(leaf(3.0)).contributions(torch.zeros(2, 2, dtype=torch.float64)).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("categorical", [[], [0, 3]])
def test_trees_and_their_contributions_are_those_of_the_library(categorical: list[int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, 4)).astype(np.float32)
    x[:, 0], x[:, 3] = rng.integers(0, 70, 1500), rng.integers(0, 5, 1500)
    labels = rng.random(1500) < 1 / (1 + np.exp(-np.sin(7 * x[:, 0]) - x[:, 1]))
    how = {"objective": "binary", "verbosity": -1, "use_missing": False, "num_threads": 1, "seed": 0}
    booster = lightgbm.train(how, lightgbm.Dataset(x, labels, categorical_feature=categorical), 20)
    trees = filled(*(each["tree_structure"] for each in booster.dump_model()["tree_info"]), columns=4)
    x[:5, 0] = [500, 31, 32, 64, 69]  # of which no row had 500
    given = torch.from_numpy(x).double()
    assert_close(trees(given).numpy(), booster.predict(x, raw_score=True))
    theirs, ours = booster.predict(x[:200], pred_contrib=True), trees.contributions(given[:200])
    assert np.abs(ours.numpy() - theirs[:, :-1]).max() < 1e-6
    assert np.abs(trees.base() - theirs[:, -1]).max() < 1e-6
    assert_close((ours.sum(1) + trees.base()).numpy(), trees(given[:200]).numpy())


def test_trees_as_one_node_of_onnx_give_the_same_doubles() -> None:
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    from recspec.export.tree_ensemble import attributes

    trees = filled(*BY_HAND)
    made = onnx.helper.make_node(
        "TreeEnsemble",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        **attributes({name: each.numpy() for name, each in trees.state_dict().items()}),
    )
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, ["rows", width])
        for name, width in (("x", 2), ("y", 1))
    ]
    opsets = [onnx.helper.make_opsetid("ai.onnx.ml", 5), onnx.helper.make_opsetid("", 18)]
    program = onnx.helper.make_model(
        onnx.helper.make_graph([made], "g", ends[:1], ends[1:]), opset_imports=opsets, ir_version=10
    )
    session = runtime.InferenceSession(program.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.array([[1.5, 0], [math.nextafter(1.5, 2), 0], [1.6, 31], [1.6, 33], [1.6, 999]])
    (found,) = session.run(None, {"x": rows})
    assert found[:, 0].tolist() == trees(torch.from_numpy(rows)).tolist() == [1001, 1010, 1010, 1100, 1100]


# --- means of the label ----------------------------------------------------------------------------------------------


def test_means_of_pairs_by_hand() -> None:
    """Pairs (0, 1) and (1, 2) of features with 5, 7 and 3 ids; an unknown pair has the mean of all rows."""
    means = PairMeans([5, 7, 3])
    keys = [np.array([0 * 7 + 2, 4 * 7 + 6]), np.array([2 * 3 + 1])]
    means.fill([(0, 1), (1, 2)], keys, [np.array([0.25, 0.75], np.float32), np.array([0.125], np.float32)], 0.5)
    ids = torch.tensor([[0, 2, 1], [4, 6, 0], [4, 2, 0], [0, 0, 0]])
    assert means(ids).tolist() == [[0.25, 0.125], [0.75, 0.5], [0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("number", [1, 2, 3, 8, 9])
def test_every_known_pair_is_found_whatever_their_number(number: int) -> None:
    keys = 3 * np.arange(number)
    means = PairMeans([30, 1])
    means.fill([(0, 1)], [keys], [(keys / 100).astype(np.float32)], -1.0)
    found = means(torch.stack([torch.arange(30), torch.zeros(30, dtype=torch.int64)], dim=1))[:, 0]
    expected = np.where(np.isin(np.arange(30), keys), np.arange(30) / 100, -1.0).astype(np.float32)
    assert found.tolist() == expected.tolist()


def rows_of(folder: Path, columns: dict[str, Any], valid: dict[str, Any] | None = None) -> FeatureSpec:
    folder.mkdir(exist_ok=True)
    for name, table in (("train", columns), ("valid", valid)):
        if table is not None:
            pq.write_table(pa.table(table), folder / f"{name}.parquet")
    sources = {
        split: [{"type": "parquet", "features": list(columns), "files": [f"{split}.parquet"]}]
        for split in ("train", *(["valid"] if valid else []))
    }
    ids: dict[str, dict[str, object]] = {
        name: {"dtype": "float32"} if isinstance(values[0], float) else {"cardinality": int(max(values)) + 2}
        for name, values in columns.items()
        if name != "label"
    }
    channels = {"context": list(ids), "label": ["label"]}
    features = {**ids, "label": {"dtype": "int64"}}
    return FeatureSpec.from_dict({"feature_spec": features, "source_spec": sources, "channel_spec": channels}, folder)


def test_means_of_training_rows_are_of_other_folds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without smoothing, a mean of an id's two rows would be their labels; out of fold it is the other row's, or .5."""
    monkeypatch.setattr(boosting, "SMOOTHING", 1e-6)
    spec = rows_of(tmp_path, {"x": [1, 1] * 20, "label": [0, 1] * 20})
    rows = TreeRows(BoostedFit(LightGbm, spec, LightGbmSettings()), ["train"], None)
    found = rows._out_of_fold(rows.grown.ids[:, 0], 3)
    for fold in range(boosting.FOLDS):
        others = rows.grown.labels[rows.grown.folds != fold].mean()
        assert_close(found[rows.grown.folds == fold], np.full((rows.grown.folds == fold).sum(), others, np.float32))


def test_means_of_ids_without_a_meaning_leak_no_label(tmp_path: Path) -> None:
    """Two ids that tell nothing: with the means of the rows' own labels, valid would be worse than the constant."""
    rng = np.random.default_rng(0)

    def made(rows: int) -> dict[str, Any]:
        return {"a": rng.integers(0, 900, rows), "b": rng.integers(0, 900, rows), "label": rng.integers(0, 2, rows)}

    spec = rows_of(tmp_path, made(3000), made(1000))
    found = BoostedFit(LightGbm, spec, GIVEN, valid="valid").run()
    assert found.value is not None
    assert found.value < math.log(2) + 0.005


def test_a_pair_that_decides_is_found_and_its_means_help(tmp_path: Path) -> None:
    """The label is a coin for each pair of two ids of 40: no id tells anything by itself."""
    rng = np.random.default_rng(1)
    coins = rng.integers(0, 2, (40, 40))

    def made(rows: int) -> dict[str, Any]:
        a, b, c = rng.integers(0, 40, (3, rows))
        return {"a": a, "b": b, "c": c, "label": np.where(rng.random(rows) < 0.9, coins[a, b], 1 - coins[a, b])}

    spec = rows_of(tmp_path, made(16_000), made(2000))
    given = LightGbmSettings(
        max_categories=4000, feature_share=1.0, num_leaves=7, max_cat_threshold=32, learning_rate=0.2
    )
    found = BoostedFit(LightGbm, spec, given, valid="valid").run()
    model = found.model
    assert isinstance(model, LightGbm)
    assert model.settings.target_means == "pairs"
    assert found.importance["a"] + found.importance["b"] > 0.9
    assert sum(found.importance.values()) == pytest.approx(1)
    assert found.value is not None
    assert found.value < 0.40  # .325 is the best possible
    values = {str(each.settings["target_means"]): each.value for each in found.tried}
    assert values["pairs"] < min(values["none"], values["columns"]) - 0.03


# --- the fit ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("lightgbm") / "clicks", num_users=60, num_items=40, num_rows=4000)


GIVEN = LightGbmSettings(
    target_means="pairs", max_categories=4000, feature_share=1.0, num_leaves=7, max_cat_threshold=32, min_rows=20, l2=0
)


def test_a_second_fit_is_the_same_and_valid_stops_it(clicks: FeatureSpec) -> None:
    first, second = (BoostedFit(LightGbm, clicks, GIVEN, valid="valid").run() for _ in range(2))
    weights = second.model.state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in first.model.state_dict().items())
    assert 10 < int(str(vars(first.model.settings)["trees"])) < boosting.MOST_ROUNDS
    labels = np.asarray(open_split(clicks, "valid", ["label"]).read(0, 2**62)["label"])
    batch = as_batch(open_split(clicks, "valid", first.model.features()).read(0, 2**62), clicks)
    assert metrics.log_loss(first.model(batch).numpy(), labels) == pytest.approx(first.value, abs=1e-6)


def test_a_fit_with_valid_among_its_rows_keeps_the_number_of_trees(clicks: FeatureSpec) -> None:
    alone = BoostedFit(LightGbm, clicks, GIVEN, valid="valid").run()
    both = BoostedFit(LightGbm, clicks, GIVEN, ("train", "valid"), valid="valid").run()
    assert both.model.settings == alone.model.settings
    assert both.value == alone.value
    weights = both.model.state_dict()
    assert not torch.equal(alone.model.state_dict()["means"], weights["means"])


def test_the_choice_begins_with_plain_settings_and_takes_the_best(clicks: FeatureSpec) -> None:
    found = BoostedFit(LightGbm, clicks, LightGbmSettings(), valid="valid").run()
    defaults = vars(LightGbmSettings())
    names = {*LightGbm.searched()} - {"trees"}
    assert found.tried[0].settings == {name: defaults[name] for name in names}
    assert found.value == min(each.value for each in found.tried)
    given = LightGbmSettings(target_means="none", num_leaves=7)
    tried = [each.settings for each in BoostedFit(LightGbm, clicks, given, valid="valid").run().tried]
    assert all({*each} == names - {"target_means", "num_leaves"} for each in tried)
    assert len(tried) == len({tuple(each.items()) for each in tried})


def test_smaller_steps_wait_for_more_rounds(clicks: FeatureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    usual = lightgbm.early_stopping
    monkeypatch.setattr(lightgbm, "early_stopping", lambda rounds, **how: asked.append(rounds) or usual(rounds, **how))
    for rate in (0.05, 0.1, 1.0):
        BoostedFit(LightGbm, clicks, GIVEN.model_copy(update={"learning_rate": rate}), valid="valid").run()
    assert asked == [50, 25, 10]


def test_no_time_left_ends_the_choice_after_one_fit(clicks: FeatureSpec) -> None:
    given = LightGbmSettings(trees=5)
    found = BoostedFit(LightGbm, clicks, given, valid="valid", enough=lambda: True).run()
    assert len(found.tried) == 1
    assert vars(found.model.settings)["trees"] == 5


def test_rare_ids_share_a_category(tmp_path: Path) -> None:
    spec = rows_of(tmp_path, {"x": [1, 1, 2, 2, 3, 4] * 20, "label": [1, 0, 1, 1, 0, 0] * 20})
    given = GIVEN.model_copy(update={"target_means": "none", "max_categories": 2, "min_rows": 1})
    model = BoostedFit(LightGbm, spec, given).run().model
    found = model({"x": torch.tensor([1, 2, 3, 4, 5])}).tolist()
    assert found[1] > found[0] > found[2] == found[3] == found[4]


def test_the_buckets_of_a_number_are_read_in_their_order(tmp_path: Path) -> None:
    """Labels of no order in 40 buckets, each of 3 rows: as sets of categories they would be learnt by heart."""
    rng = np.random.default_rng(0)
    values = np.repeat(np.arange(1, 41), 3)
    rows = {"x_bucket": values, "y_bucket": values % 5 + 1, "label": rng.integers(0, 2, len(values))}
    alone = LightGbm(rows_of(tmp_path / "alone", {name: each.tolist() for name, each in rows.items()}), GIVEN)
    assert (alone.numbers, alone.ids) == ((), ("x_bucket", "y_bucket")), "no number is beside them"
    with_number = {"x": values.astype(float).tolist(), **{name: each.tolist() for name, each in rows.items()}}
    spec = rows_of(tmp_path / "beside", with_number)
    model = BoostedFit(LightGbm, spec, GIVEN.model_copy(update={"target_means": "none", "min_rows": 1})).run().model
    assert isinstance(model, LightGbm)
    assert (model.numbers, model.ids) == (("x", "x_bucket"), ("y_bucket",))
    assert set(model.features()) == {"x", "x_bucket", "y_bucket"}
    of_sets = model.trees.feature[model.trees.set_words > 0].tolist()
    assert {model.column_features()[each] for each in of_sets} <= {("y_bucket",)}


def test_numbers_that_are_none_count_as_0() -> None:
    features = {"n": {"dtype": "float32"}, "label": {}}
    spec = FeatureSpec.from_dict({"feature_spec": features, "channel_spec": {"context": ["n"], "label": ["label"]}})
    model = LightGbm(spec, LightGbmSettings())
    model.fill([node(0, 0.0, leaf(1.0), leaf(2.0))])
    assert model({"n": torch.tensor([math.nan, 0.0, 1.0, math.inf, -math.inf])}).tolist() == [1, 1, 2, 2, 1]


# --- hostile files ----------------------------------------------------------------------------------------------------


def broken(name: str, change: Any) -> list[str]:
    """The problems of the trees by hand with one tensor changed."""
    held = {key: each.clone() for key, each in filled(*BY_HAND).state_dict().items()}
    held[name] = change(held[name])
    return Trees(2).allocate_buffers(held)


def set_at(place: int, value: float) -> Any:
    return lambda each: each.index_fill(0, torch.tensor([place]), value)


TREE = "a node is no child of exactly one node before it"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("branches", set_at(0, 0), TREE),  # a loop
        ("branches", set_at(1, 1), TREE),  # two parents
        ("branches", set_at(5, 99), TREE),
        ("branches", set_at(5, -1), TREE),
        ("roots", set_at(1, 0), TREE),
        ("roots", lambda each: each.flip(0), "a deeper tree comes after one of fewer levels"),
        ("feature", set_at(0, 2), "a node reads a column outside 0 to 1"),
        ("feature", set_at(0, -1), "a node reads a column outside 0 to 1"),
        ("rows", set_at(1, 0.0), "a node has no training rows"),
        ("rows", set_at(1, math.nan), "a node has no training rows"),
        ("set_start", set_at(2, 1), "a set of categories lies outside the 2 words"),
        ("set_words", set_at(2, 2**31 - 1), "a set of categories lies outside the 2 words"),
        ("set_words", set_at(2, -1), "a set of categories lies outside the 2 words"),
        ("value", lambda each: each[:-1], "6 nodes have "),
    ],
)
def test_trees_of_a_damaged_file_are_refused(name: str, change: Any, message: str) -> None:
    assert message in "".join(broken(name, change))


def test_whole_trees_are_taken() -> None:
    assert broken("value", lambda each: each) == []


def test_a_tree_of_too_many_levels_is_refused() -> None:
    tree = leaf(0.0)
    for _ in range(DEEPEST + 1):
        tree = node(0, 0.0, leaf(1.0), tree)
    held = filled(tree).state_dict()
    assert Trees(2).allocate_buffers(held) == [f"a tree has more than {DEEPEST} levels"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("columns", lambda each: each + 2, "'columns' names a feature outside 0 to 2"),
        ("offsets", lambda each: each + 1, "'offsets' does not rise from 0 to 3, the number of keys"),
        ("keys", lambda each: each[[1, 0, 2]], "'keys' does not rise within each pair of features"),
        ("means", lambda each: each[:-1], "have sizes that do not fit each other"),
    ],
)
def test_means_of_a_damaged_file_are_refused(name: str, change: Any, message: str) -> None:
    means = PairMeans([5, 7, 3])
    keys = [np.array([2, 34]), np.array([1])]
    means.fill([(0, 1), (1, 2)], keys, [np.array([0.25, 0.75], np.float32), np.array([0.125], np.float32)], 0.5)
    held = {key: each.clone() for key, each in means.state_dict().items()}
    assert PairMeans([5, 7, 3]).allocate_buffers(held) == []
    held[name] = change(held[name])
    assert message in "".join(PairMeans([5, 7, 3]).allocate_buffers(held))


def test_a_bundle_loads_without_the_library_and_names_what_is_damaged(
    clicks: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BoostedFit(LightGbm, clicks, GIVEN.model_copy(update={"trees": 3})).run().model
    card = bundle.Card(
        model="lightgbm", settings=model.settings.model_dump(mode="json"), train={}, trained={}, metrics={}
    )
    where = bundle.save(tmp_path / "bundle", model, card)
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    batch = as_batch(open_split(clicks, "valid", model.features()).read(0, 50), clicks)
    assert_close(bundle.load(where).model(batch), model(batch))
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    weights["trees.feature"][0] = 10**6
    write_tensors(where / "weights.safetensors", weights, {"format": bundle.FORMAT})
    with pytest.raises(BundleError, match=r"weight 'trees': a node reads a column outside 0 to \d+"):
        bundle.load(where, verify=False)
    weights["trees.feature"][0] = 0
    weights["pairs.columns"] = torch.zeros(0, 2**40, dtype=torch.int64)  # of no bytes: nothing is sized by it
    write_tensors(where / "weights.safetensors", weights, {"format": bundle.FORMAT})
    with pytest.raises(BundleError, match="sizes that do not fit each other"):
        bundle.load(where, verify=False)
