"""Baselines: each on data whose answer is known, closed forms by hand, blocks, and what they refuse."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sklearn.linear_model

from recspec import baselines, metrics
from recspec.baselines import (
    BASELINES,
    ROW_BASELINES,
    Interactions,
    Scorer,
    constant,
    ease,
    ials,
    item_knn,
    logistic_regression,
    popularity,
)
from recspec.errors import DataError, MissingExtraError, SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.metrics import hit_rate, ndcg, rank_groups
from recspec.storage import open_split
from tests import made_up
from tests.closeness import assert_close


def interactions(pairs: list[tuple[int, int]], num_users: int, num_items: int) -> Interactions:
    users, items = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
    return Interactions.from_pairs(users, items, num_users=num_users, num_items=num_items)


def two_tastes() -> Interactions:
    """40 users: even ones act on most of the items 1..10, odd ones on most of 11..20; item 0 on none."""
    rng = np.random.default_rng(0)
    pairs = [(u, 1 + i + 10 * (u % 2)) for u in range(40) for i in range(10) if rng.random() < 0.6]
    return interactions(pairs, 41, 21)  # user 40 did nothing


# --- Interactions ---


def test_interactions_are_sorted_and_each_counted_once() -> None:
    seen = interactions([(2, 3), (0, 4), (2, 1), (0, 4), (2, 3)], 4, 5)
    assert seen.offsets.tolist() == [0, 1, 1, 3, 3]
    assert seen.items.tolist() == [4, 1, 3]
    assert (seen.num_users, seen.num_items, seen.num_pairs) == (4, 5, 3)
    assert seen.counts.tolist() == [0, 1, 0, 1, 1]
    assert seen.keys.tolist() == [4, 11, 13]
    assert seen.matrix().toarray().tolist() == [[0, 0, 0, 0, 1], [0] * 5, [0, 1, 0, 1, 0], [0] * 5]


def test_interactions_of_some_users_come_with_the_users_place() -> None:
    seen = interactions([(2, 3), (0, 4), (2, 1)], 4, 5)
    rows, items = seen.of(np.array([3, 2, 0, 2]))
    assert rows.tolist() == [1, 1, 2, 3, 3]
    assert items.tolist() == [1, 3, 4, 1, 3]
    rows, items = seen.of(np.array([], dtype=np.int64))
    assert len(rows) == len(items) == 0


def test_interactions_know_what_they_contain() -> None:
    seen = interactions([(2, 3), (0, 4), (2, 1)], 4, 5)
    assert seen.contain(np.arange(4)[:, None], np.arange(5)).tolist() == seen.matrix().toarray().astype(bool).tolist()
    assert interactions([], 2, 2).contain(np.array([1]), np.array([1])).tolist() == [False]


# --- every baseline ---


@pytest.mark.parametrize("name", BASELINES)
def test_scores_of_pairs_are_those_of_the_users_in_every_block_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranker = BASELINES[name](two_tastes())
    monkeypatch.setattr(baselines, "SCORES_PER_BLOCK", 50)
    rng = np.random.default_rng(1)
    users, items = rng.integers(0, 41, 300), rng.integers(0, 21, 300)
    rows = ranker.score_users(np.arange(41))
    assert rows.shape == (41, 21)
    np.testing.assert_allclose(ranker.score_pairs(users, items), rows[users, items], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ranker.score_users(np.array([5, 3])), rows[[5, 3]], rtol=1e-4, atol=1e-5)
    assert ranker.score_pairs(users[:0], items[:0]).shape == (0,)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_ignores_the_order_of_the_pairs_and_their_repetition(name: str) -> None:
    pairs = [(0, 1), (0, 2), (1, 2), (1, 3), (2, 1), (2, 3), (3, 0)]
    one = BASELINES[name](interactions(pairs, 4, 4)).score_users(np.arange(4))
    other = BASELINES[name](interactions(pairs[::-1] * 2, 4, 4)).score_users(np.arange(4))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["item_knn", "ease", "ials"])
def test_a_personal_baseline_finds_the_users_taste(name: str) -> None:
    scores = BASELINES[name](two_tastes()).score_users(np.arange(40))
    assert (scores[0::2, 1:11].mean(1) > scores[0::2, 11:].mean(1)).all()
    assert (scores[1::2, 11:].mean(1) > scores[1::2, 1:11].mean(1)).all()


@pytest.mark.parametrize("name", BASELINES)
def test_no_positive_at_all_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="no positive to fit a baseline on"):
        BASELINES[name](interactions([], 3, 3))


@pytest.mark.parametrize("name", BASELINES)
def test_one_user_and_one_item_is_enough(name: str) -> None:
    scores = BASELINES[name](interactions([(0, 0)], 1, 1)).score_users(np.array([0]))
    assert scores.shape == (1, 1)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize(("name", "library"), [("item_knn", "scipy"), ("ease", "scipy"), ("ials", "implicit")])
def test_a_missing_library_is_named_with_its_extra(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.import_module

    def without(module: str, package: str | None = None) -> object:
        if module.split(".")[0] == library:
            raise ModuleNotFoundError(f"No module named '{library}'", name=library)
        return original(module, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(MissingExtraError, match=rf"'{library}'.*pip install 'recspec\[baselines\]'"):
        BASELINES[name](two_tastes())


# --- each by hand ---


def test_popularity_counts_users() -> None:
    ranker = popularity(interactions([(0, 1), (1, 1), (1, 2)], 3, 4))
    assert ranker.score_users(np.array([2, 0])).tolist() == [[0, 2, 1, 0], [0, 2, 1, 0]]
    assert ranker.score_pairs(np.array([0, 1]), np.array([2, 1])).tolist() == [1, 2]


def test_item_knn_sums_shrunk_cosines_of_the_nearest_items() -> None:
    # users of item 0: {0, 1, 2}; of 1: {0, 1}; of 2: {2, 3}; of 3: {0, 3}
    seen = interactions([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 2), (3, 2), (0, 3), (3, 3)], 4, 4)
    near, far = 2 / (6**0.5 + 1), 1 / (6**0.5 + 1)  # items 0 and 1; items 0 and 2, 0 and 3
    pair = 1 / (2 + 1)  # items 1 and 3, 2 and 3
    scores = item_knn(seen, k=100, shrink=1.0).score_users(np.array([2]))  # user 2 acted on items 0 and 2
    np.testing.assert_allclose(scores, [[far, near, far, far + pair]], rtol=1e-6)
    # with k = 1 item 1 keeps item 0 alone, and item 0 keeps item 1, which user 2 does not know
    scores = item_knn(seen, k=1, shrink=1.0).score_users(np.array([2]))
    np.testing.assert_allclose(scores[0, :2], [0.0, near], rtol=1e-6)


def test_item_knn_blocks_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = item_knn(two_tastes(), k=3).score_users(np.arange(41))
    monkeypatch.setattr(baselines, "SCORES_PER_BLOCK", 45)  # two items at a time
    assert_close(item_knn(two_tastes(), k=3).score_users(np.arange(41)), whole)


def test_ease_is_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = two_tastes()
    dense = seen.matrix().toarray().astype(np.float64)
    inverse = np.linalg.inv(dense.T @ dense + 50.0 * np.eye(21))
    weights = np.eye(21) - inverse / np.diag(inverse)
    monkeypatch.setattr(baselines, "SCORES_PER_BLOCK", 45)
    np.testing.assert_allclose(ease(seen, l2=50.0).score_users(np.arange(41)), dense @ weights, atol=1e-5)


def test_ease_minimises_its_loss_with_a_zero_diagonal() -> None:
    # Steck (2019), eq. 2: no weight off the diagonal can lower |X - X B|^2 + l2 |B|^2
    seen = two_tastes()
    dense = seen.matrix().toarray().astype(np.float64)
    weights = ease(seen, l2=5.0).weights.astype(np.float64)  # type: ignore[attr-defined]
    assert not np.diag(weights).any()
    gradient = -2 * dense.T @ (dense - dense @ weights) + 2 * 5.0 * weights
    assert np.abs(gradient[~np.eye(21, dtype=bool)]).max() < 1e-3


def test_ease_mirrors_triangles_larger_than_a_block() -> None:
    rng = np.random.default_rng(2)
    square = rng.normal(size=(2500, 2500)).astype(np.float32)
    expected = np.triu(square) + np.triu(square, 1).T
    baselines._mirror_upper(square)
    np.testing.assert_array_equal(square, expected)


def test_ease_says_why_it_does_not_fit_many_items() -> None:
    with pytest.raises(SettingsError, match=r"59,047 items would take 13\.9 GB; it is fitted up to 20,000 items"):
        ease(interactions([(0, 0)], 1, 59_047))


def test_regularisation_grows_with_the_interactions_of_a_user_or_item() -> None:
    assert baselines.scale(interactions([(0, 1), (0, 2), (1, 1), (1, 2)], 9, 9)) == 1.0  # 4 over 2 users and 2 items
    assert baselines.scale(interactions([(u, i) for u in range(18) for i in range(18)], 30, 30)) == 3.0


def test_ials_is_the_same_for_the_same_seed() -> None:
    first, second = (ials(two_tastes(), factors=4, seed=3).score_users(np.arange(41)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# --- the figures of the papers' own split ---


@pytest.fixture(scope="module")
def ncf_ml_1m() -> Callable[[Path], tuple[Interactions, np.ndarray, np.ndarray]]:
    def read(folder: Path) -> tuple[Interactions, np.ndarray, np.ndarray]:
        train = np.loadtxt(folder / "ml-1m.train.rating", dtype=np.int64, delimiter="\t", usecols=(0, 1))
        test = np.loadtxt(folder / "ml-1m.test.rating", dtype=np.int64, delimiter="\t", usecols=(0, 1))
        negatives = np.loadtxt(folder / "ml-1m.test.negative", dtype=np.int64, delimiter="\t", usecols=range(1, 100))
        seen = Interactions.from_pairs(train[:, 0], train[:, 1], num_users=6040, num_items=3706)
        return seen, test[:, 0], np.concatenate((test[:, 1:], negatives), axis=1)

    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hr", "gain"),
    [("popularity", 0.4531, 0.2541), ("item_knn", 0.6621, 0.3904), ("ease", 0.7182, 0.4511), ("ials", 0.7232, 0.4458)],
)
def test_the_known_figures_on_ml_1m(name: str, hr: float, gain: float, ncf_ml_1m, real_data) -> None:
    seen, users, candidates = ncf_ml_1m(real_data("ncf-ml-1m"))
    groups = np.repeat(users, 100)
    scores = BASELINES[name](seen).score_pairs(groups, candidates.ravel())
    labels = np.tile(np.arange(100) == 0, len(users))
    ranking = rank_groups(scores, labels, groups, candidates=candidates.ravel())
    assert ranking.num_duplicates == 156
    # .001 covers how others broke ties, and implicit's threads
    assert hit_rate(ranking, 10) == pytest.approx(hr, abs=0.001)
    assert ndcg(ranking, 10) == pytest.approx(gain, abs=0.001)


@pytest.mark.parametrize("name", BASELINES)
def test_a_user_told_of_after_fitting_is_scored_by_that(name: str) -> None:
    """User 0 is said to have done what user 1 did, whose taste is the other one."""
    fitted = two_tastes()
    users = np.repeat(np.arange(fitted.num_users), np.diff(fitted.offsets))
    _, others = fitted.of(np.array([1]))
    known = Interactions.from_pairs(
        np.concatenate([users[users > 0], np.zeros(len(others), np.int64)]),
        np.concatenate([fitted.items[users > 0], others]),
        num_users=fitted.num_users,
        num_items=fitted.num_items,
    )
    baseline = BASELINES[name](fitted)
    told = baseline.knowing(known)
    everyone = np.arange(fitted.num_users)
    scores = told.score_users(everyone)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scores[2:], baseline.score_users(everyone)[2:], rtol=0.01, atol=0.01)
    if name != "popularity":
        assert scores[0, 11:].mean() > scores[0, 1:11].mean() + 0.1
        assert baseline.score_users(everyone)[0, 1:11].mean() > scores[0, 1:11].mean() + 0.1
    pairs = np.repeat(everyone, fitted.num_items), np.tile(np.arange(fitted.num_items), fitted.num_users)
    np.testing.assert_allclose(told.score_pairs(*pairs), scores.ravel(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BASELINES)
def test_a_user_who_did_nothing_has_a_score_for_every_item(name: str) -> None:
    scores = BASELINES[name](interactions([(0, 0), (0, 1), (1, 0)], 3, 4)).score_users(np.array([2]))
    assert scores.shape == (1, 4)
    assert np.isfinite(scores).all()
    if name != "popularity":
        assert (scores == 0).all()


# --- labelled rows ---------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(baselines, "NUM_BINS", 1)  # none
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
    monkeypatch.setattr(baselines, "ROWS_PER_BLOCK", 7)
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
    monkeypatch.setattr(baselines, "NUM_BINS", 4)  # of 2, 3, 2 and 3 values: 5 shares one with 6
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


def test_two_rows_are_enough_to_fit(tmp_path: Path) -> None:
    spec = rows_of(tmp_path, {"x": [1, 2], "label": [1, 0]}, {"x": {"cardinality": 3}})
    found = logits(logistic_regression(spec, ["train"]), spec)
    assert found[0] > 0 > found[1]


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
