"""Baselines that rank items: closed forms by hand, blocks, refusals."""

import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recspec.errors import DataError, MissingExtraError, SettingsError
from recspec.evaluation import item_baselines
from recspec.evaluation.interactions import Interactions
from recspec.evaluation.item_baselines import BASELINES, ease, ials, item_knn, popularity
from recspec.metrics import hit_rate, ndcg, rank_groups
from tests.closeness import assert_close
from tests.evaluation.tables import (
    acted,
)


def two_tastes() -> Interactions:
    """40 users: even ones act on most of the items 1..10, odd ones on most of 11..20; item 0 on none."""
    rng = np.random.default_rng(0)
    pairs = [(u, 1 + i + 10 * (u % 2)) for u in range(40) for i in range(10) if rng.random() < 0.6]
    return acted(pairs, 41, 21)  # user 40 did nothing


@pytest.mark.parametrize("name", BASELINES)
def test_scores_of_pairs_are_those_of_the_users_in_every_block_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranker = BASELINES[name](two_tastes())
    monkeypatch.setattr(item_baselines, "SCORES_PER_BLOCK", 50)
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
    one = BASELINES[name](acted(pairs, 4, 4)).score_users(np.arange(4))
    other = BASELINES[name](acted(pairs[::-1] * 2, 4, 4)).score_users(np.arange(4))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["item_knn", "ease", "ials"])
def test_a_personal_baseline_finds_the_users_taste(name: str) -> None:
    scores = BASELINES[name](two_tastes()).score_users(np.arange(40))
    assert (scores[0::2, 1:11].mean(1) > scores[0::2, 11:].mean(1)).all()
    assert (scores[1::2, 11:].mean(1) > scores[1::2, 1:11].mean(1)).all()


@pytest.mark.parametrize("name", BASELINES)
def test_no_positive_at_all_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="no positive to fit a baseline on"):
        BASELINES[name](acted([], 3, 3))


@pytest.mark.parametrize("name", BASELINES)
def test_one_user_and_one_item_is_enough(name: str) -> None:
    scores = BASELINES[name](acted([(0, 0)], 1, 1)).score_users(np.array([0]))
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


def test_popularity_counts_users() -> None:
    ranker = popularity(acted([(0, 1), (1, 1), (1, 2)], 3, 4))
    assert ranker.score_users(np.array([2, 0])).tolist() == [[0, 2, 1, 0], [0, 2, 1, 0]]
    assert ranker.score_pairs(np.array([0, 1]), np.array([2, 1])).tolist() == [1, 2]


def test_item_knn_sums_shrunk_cosines_of_the_nearest_items() -> None:
    # users of item 0: {0, 1, 2}; of 1: {0, 1}; of 2: {2, 3}; of 3: {0, 3}
    seen = acted([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 2), (3, 2), (0, 3), (3, 3)], 4, 4)
    near, far = 2 / (6**0.5 + 1), 1 / (6**0.5 + 1)  # items 0 and 1; items 0 and 2, 0 and 3
    pair = 1 / (2 + 1)  # items 1 and 3, 2 and 3
    scores = item_knn(seen, k=100, shrink=1.0).score_users(np.array([2]))  # user 2 acted on items 0 and 2
    np.testing.assert_allclose(scores, [[far, near, far, far + pair]], rtol=1e-6)
    # with k = 1 item 1 keeps item 0 alone, and item 0 keeps item 1, which user 2 does not know
    scores = item_knn(seen, k=1, shrink=1.0).score_users(np.array([2]))
    np.testing.assert_allclose(scores[0, :2], [0.0, near], rtol=1e-6)


def test_item_knn_blocks_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = item_knn(two_tastes(), k=3).score_users(np.arange(41))
    monkeypatch.setattr(item_baselines, "SCORES_PER_BLOCK", 45)  # two items at a time
    assert_close(item_knn(two_tastes(), k=3).score_users(np.arange(41)), whole)


def test_ease_is_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = two_tastes()
    dense = seen.matrix().toarray().astype(np.float64)
    inverse = np.linalg.inv(dense.T @ dense + 50.0 * np.eye(21))
    weights = np.eye(21) - inverse / np.diag(inverse)
    monkeypatch.setattr(item_baselines, "SCORES_PER_BLOCK", 45)
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
    item_baselines._mirror_upper(square)
    np.testing.assert_array_equal(square, expected)


def test_ease_says_why_it_does_not_fit_many_items() -> None:
    with pytest.raises(SettingsError, match=r"59,047 items would take 13\.9 GB; it is fitted up to 20,000 items"):
        ease(acted([(0, 0)], 1, 59_047))


def test_regularisation_grows_with_the_interactions_of_a_user_or_item() -> None:
    assert item_baselines.scale(acted([(0, 1), (0, 2), (1, 1), (1, 2)], 9, 9)) == 1.0  # 4 over 2 users and 2 items
    assert item_baselines.scale(acted([(u, i) for u in range(18) for i in range(18)], 30, 30)) == 3.0


def test_ials_is_the_same_for_the_same_seed() -> None:
    first, second = (ials(two_tastes(), factors=4, seed=3).score_users(np.arange(41)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


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
    scores = BASELINES[name](acted([(0, 0), (0, 1), (1, 0)], 3, 4)).score_users(np.array([2]))
    assert scores.shape == (1, 4)
    assert np.isfinite(scores).all()
    if name != "popularity":
        assert (scores == 0).all()
