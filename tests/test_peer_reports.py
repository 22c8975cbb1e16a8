"""What people reported to other libraries, as small cases: each names the repository and the number of the report."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from recspec import api
from recspec.base.errors import DataError, RequestError
from recspec.inference import build_pipeline
from recspec.metrics import measures as metrics
from tests.asking import Asked, asking, sources

Rows = list[dict[str, Any]]
USERS, ITEMS = [1000 + user for user in range(40)], [str(500 + item) for item in range(9)]
HIDDEN = {"502", "505"}


def events() -> pd.DataFrame:
    """Four of nine items a user, an hour apart; ids are whole numbers."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame([(user, 500 + item) for user in USERS for item in rng.permutation(9)[:4]])
    frame.columns = pd.Index(["user", "item"])
    return frame.assign(timestamp=pd.date_range("2024-01-01", periods=len(frame), freq="h"))


def bought(user: int) -> set[str]:
    frame = events()
    return set(frame.item[frame.user == user].astype(str))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shop")


@pytest.fixture(scope="module")
def models(folder: Path) -> Mapping[str, api.Model]:
    items = pd.DataFrame({"item": map(int, ITEMS)}).assign(hidden=lambda frame: frame.item.isin([*map(int, HIDDEN)]))
    data = api.prepare(events(), folder / "data", items=items, progress=False)
    names = ("ease", "item_knn", "popularity")
    return {name: api.train(name, data, folder / name, progress=False) for name in names}


@pytest.fixture(scope="module", params=["ease", "item_knn", "popularity"])
def model(request: pytest.FixtureRequest, models: Mapping[str, api.Model]) -> api.Model:
    return models[request.param]


@pytest.fixture(scope="module")
def rule(folder: Path, models: Mapping[str, api.Model]) -> api.Model:
    """A pipeline in which some items are hidden from everybody."""
    assert models
    build_pipeline(folder / "rule", [str(folder / "item_knn")], folder / "ease", filter="not hidden")
    return api.open(folder / "rule")


@pytest.fixture(scope="module")
def served(folder: Path, rule: api.Model) -> Iterator[Asked]:
    assert rule
    with asking(sources(shop=folder / "rule", ease=folder / "ease")) as asked:
        yield asked


def answer(method: Callable[..., Any], *given: Any, **named: Any) -> Rows:
    """The rows of an answer, without its remarks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", api.Note)
        return list(method(*given, kind="rows", **named))


def ids(rows: Rows) -> list[str]:
    return [str(row["item"]) for row in rows]


# --- lists -----------------------------------------------------------------------------------------------------------


def test_excluded_items_neither_lengthen_nor_shorten_a_list(model: api.Model) -> None:
    """benfred/implicit 736, 345."""
    whole = ids(answer(model.recommend, 1003, k=9, include_seen=True))
    without = ids(answer(model.recommend, 1003, k=3, include_seen=True, exclude=[whole[0], whole[2]]))
    assert without == [whole[1], *whole[3:5]]


def test_more_items_than_there_are_is_answered_by_real_ones_once(model: api.Model) -> None:
    """benfred/implicit 507, 557, 316: ids of -1, liked items, and a first item that was missing."""
    assert sorted(ids(answer(model.recommend, 1003, k=100, include_seen=True))) == ITEMS
    assert set(ids(answer(model.recommend, 1003, k=100))) == {*ITEMS} - bought(1003)
    assert {item for user in USERS for item in ids(answer(model.recommend, user, k=100))} == {*ITEMS}
    shown = set(ids(answer(model.recommend, 1003, k=100, filter="not hidden")))
    assert shown == {*ITEMS} - bought(1003) - HIDDEN


def test_a_score_is_the_same_in_a_list_of_any_length_and_alone(model: api.Model) -> None:
    """benfred/implicit 172, 620."""
    whole = answer(model.recommend, 1003, k=9, include_seen=True)
    for k in range(1, 9):
        assert answer(model.recommend, 1003, k=k, include_seen=True) == whole[:k]
    alone = answer(model.predict, {"user": [1003] * 9, "item": ids(whole)})
    np.testing.assert_allclose([row["score"] for row in alone], [row["score"] for row in whole], atol=1e-5)


def test_reasons_add_up_to_the_score(models: Mapping[str, api.Model]) -> None:
    """benfred/implicit 175."""
    (best,) = answer(models["ease"].recommend, 1003, k=1)
    reasons = answer(models["ease"].explain, 1003, best["item"])
    assert sum(row["value"] for row in reasons) == pytest.approx(best["score"], abs=1e-5)


def test_all_users_at_once_get_what_each_gets_alone(model: api.Model) -> None:
    """lyst/lightfm 662: scores of many users were all 0."""
    together = pd.DataFrame(answer(model.recommend, all=True, k=3))
    alone = pd.concat(pd.DataFrame(answer(model.recommend, user, k=3)) for user in USERS)
    pd.testing.assert_frame_equal(together, alone.reset_index(drop=True), atol=1e-5, check_dtype=False)


def test_pages_repeat_no_item(model: api.Model) -> None:
    """gorse-io/gorse 802."""
    shown: list[str] = []
    while page := ids(answer(model.recommend, 1003, k=2, exclude=shown)):
        shown += page
    assert shown == ids(answer(model.recommend, 1003, k=9))


def test_hidden_items_are_in_no_answer(rule: api.Model, served: Asked, tmp_path: Path) -> None:
    """gorse-io/gorse 392, 764: in the fallback for new users, and among similar items."""
    rule.recommend(all=True, k=9, include_seen=True, out=tmp_path / "all.parquet", progress=False)
    lists = [
        ids(answer(rule.recommend, 1003, k=9, include_seen=True)),
        ids(answer(rule.recommend, "nobody", k=9)),
        ids(answer(rule.recommend, items=["501"], k=9, include_seen=True)),
        ids(answer(rule.similar, "501", k=9)),
        pd.read_parquet(tmp_path / "all.parquet").item.astype(str).unique().tolist(),
        ids(served("POST", "/recommend", {"model": "shop", "user": "nobody", "k": 9}).data["items"]),
        ids(served("POST", "/similar", {"model": "shop", "item": "501", "k": 9}).data["items"]),
    ]
    assert [len(found) for found in lists] == [7, 7, 7, 6, 7, 7, 6]
    assert not HIDDEN & {item for found in lists for item in found}


# --- ids -------------------------------------------------------------------------------------------------------------


def test_a_served_new_user_is_answered_by_a_basket(served: Asked) -> None:
    """massquantity/LibRecommender 276."""
    data = served("POST", "/recommend", {"model": "ease", "user": "new", "items": [503, 504], "k": 7}).data
    assert sorted(ids(data["items"])) == sorted({*ITEMS} - {"503", "504"})
    alone = served("POST", "/recommend", {"model": "ease", "user": "new", "k": 7}).data
    assert ids(alone["items"]) != ids(data["items"])
    assert alone["unknown_user"]


@pytest.mark.parametrize("user", [0, 3, "3", 1040])
def test_a_number_of_a_row_is_not_taken_for_an_id(user: object, model: api.Model) -> None:
    """massquantity/LibRecommender 169, NicolasHug/Surprise 140: inner and raw ids were mixed up."""
    with pytest.warns(api.Note, match="unknown user"):
        rows = model.recommend(user, k=9, kind="rows")
    assert sorted(ids(rows)) == ITEMS
    assert not any(row["known"] for row in rows)


@pytest.mark.parametrize("kind", [str, np.int64, np.uint16, np.str_])
def test_an_id_is_known_in_every_type_that_frames_hold(kind: Callable[[Any], Any], model: api.Model) -> None:
    """NicolasHug/Surprise 259, lyst/lightfm 648."""
    expected = answer(model.recommend, 1003, k=3, exclude=501)
    assert answer(model.recommend, kind(1003), k=np.int64(3), exclude=kind(501)) == expected
    assert answer(model.recommend, items=kind(501), k=3) == answer(model.recommend, items=[501], k=3)
    assert answer(model.similar, kind(501), k=np.int64(3)) == answer(model.similar, 501, k=3)
    assert answer(model.history, kind(1003)) == answer(model.history, 1003)


def test_other_numbers_are_no_length_of_a_list(models: Mapping[str, api.Model]) -> None:
    for k in (True, 2.0, np.float64(2), np.int64(0)):
        with pytest.raises(RequestError, match=re.escape(f"k is {k!r}; expected a whole number from 1 to 10,000")):
            models["ease"].recommend(1003, k=k)  # type: ignore[arg-type]


def test_an_item_that_a_catalogue_names_twice_is_refused(tmp_path: Path) -> None:
    """tensorflow/recommenders 404, 500."""
    items = {"item": [*map(int, ITEMS), 501], "title": ["a"] * 10}
    with pytest.raises(DataError, match=r"names '?501'? more than once in column 'item'; expected one row each"):
        api.prepare(events(), tmp_path / "data", items=items, progress=False)


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clicks(folder: Path) -> tuple[pd.DataFrame, api.Data, api.Model]:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"color": rng.choice(["blue", "green", "red"], 150), "size": rng.normal(size=150).round(2)})
    frame["clicked"] = (rng.random(150) < np.where(frame.color == "red", 0.8, 0.3)).astype(int)
    data = api.prepare(frame, folder / "clicks", label="clicked", progress=False)
    return frame, data, api.train("logistic_regression", data, folder / "click", progress=False)


def test_a_new_value_is_unknown_and_not_its_neighbour(clicks: tuple[pd.DataFrame, api.Data, api.Model]) -> None:
    """NVIDIA-Merlin/NVTabular 312, 1840: also, rows to score had to have a label."""
    rows = {"color": ["aqua", "grey", "white", "red"], "size": [0.5] * 4}
    with pytest.warns(api.Note, match="3 of 4 rows have an unknown color"):
        scored = clicks[2].predict(rows, kind="rows")
    assert [row["probability"] for row in scored[:3]] == [scored[0]["probability"]] * 3
    known = clicks[2].predict({"color": ["blue", "green", "red"], "size": [0.5] * 3}, kind="rows")
    assert scored[0]["probability"] not in [row["probability"] for row in known]


def test_ids_go_back_to_the_values_that_they_were(clicks: tuple[pd.DataFrame, api.Data, api.Model]) -> None:
    """NVIDIA-Merlin/NVTabular 1515."""
    frame, data, _ = clicks
    back = pd.concat([data.to_frame(split, kind="pandas") for split in data.splits])
    pairs = [sorted(zip(each.color, each[label], strict=True)) for each, label in ((frame, "clicked"), (back, "label"))]
    assert pairs[0] == pairs[1]


def test_columns_are_read_by_name_and_categories_by_value(clicks: tuple[pd.DataFrame, api.Data, api.Model]) -> None:
    """lightgbm-org/LightGBM 4102, 2761, 6195: also, the caller's frame was changed."""
    model = clicks[2]
    frame = pd.DataFrame({"color": ["red", "blue", "green"], "size": [1.0, -1.0, 0.25]}, index=[7, 3, 5])
    kept = frame.copy()
    expected = model.predict(frame).probability
    pd.testing.assert_frame_equal(frame, kept)
    levels = pd.Categorical(frame.color, categories=["zinc", "green", "blue", "red"])
    for other in (frame[["size", "color"]], frame.assign(color=levels), frame.iloc[[2, 0, 1]]):
        pd.testing.assert_series_equal(model.predict(other).probability.loc[expected.index], expected)


# --- time ------------------------------------------------------------------------------------------------------------

STAMPS: Mapping[str, Callable[[int], object]] = {
    "seconds": lambda step: 1_700_000_000 + step,
    "milliseconds": lambda step: 1_700_000_000_000 + step,
    "nanoseconds": lambda step: 1_700_000_000_000_000_000 + step,
    "text": lambda step: f"2023-11-14T22:13:20.{step:06}Z",
}


@pytest.mark.parametrize("unit", STAMPS)
def test_events_a_tick_apart_stay_in_order(unit: str, tmp_path: Path) -> None:
    """RUCAIBox/RecBole 2204, 1653: times were rounded to float32, 128 seconds; NVIDIA/recsys-examples 140."""
    rows = [
        (f"u{user}", f"i{(user * 3 + step) % 11}", STAMPS[unit](user + step)) for user in range(8) for step in range(6)
    ]
    user, item, stamp = zip(*(rows[place] for place in np.random.default_rng(0).permutation(len(rows))), strict=True)
    data = api.prepare({"user": user, "item": item, "timestamp": stamp}, tmp_path / "data", progress=False)
    for split, step in (("valid", 4), ("test", 5)):
        last = {(row["user_id"], row["item_id"]) for row in data.to_frame(split, kind="rows") if row["label"]}
        assert last == {(f"u{user}", f"i{(user * 3 + step) % 11}") for user in range(8)}
    markov = api.train("markov", data, tmp_path / "run", progress=False)
    basket = [f"i{(6 + step) % 11}" for step in range(5)]
    asked = [{"users": "u2"}, {"items": basket}, {"items": sorted(basket)}]
    of_user, of_basket, of_sorted = (ids(answer(markov.recommend, **each, k=3, include_seen=True)) for each in asked)
    assert of_user == of_basket != of_sorted


def test_a_split_by_time_trains_on_nothing_later_and_counts_new_users(tmp_path: Path) -> None:
    """massquantity/LibRecommender 166: rows were shuffled; lenskit/lkpy 99: users without a list were not missed."""
    old = [(f"u{user}", f"i{(user * 3 + step) % 11}", step * 600) for user in range(20) for step in range(8)]
    new = [(f"new{user}", f"i{user}", 100_000 + user) for user in range(10)]
    user, item, stamp = zip(*(old + new), strict=True)
    frame = {"user": user, "item": item, "timestamp": [1_700_000_000 + each for each in stamp]}
    data = api.prepare(frame, tmp_path / "data", split="time", progress=False)
    times = [[row["timestamp"] for row in data.to_frame(split, kind="rows")] for split in ("train", "valid", "test")]
    assert max(times[0]) <= min(times[1])
    assert max(times[1]) <= min(times[2])
    found = api.train("popularity", data, tmp_path / "run", progress=False).evaluate(data)
    assert found.left_out["full"] == "no positive of test can be ranked: 10 of unknown users"


def test_what_was_bought_again_is_no_target_that_train_gives_away(tmp_path: Path) -> None:
    """lyst/lightfm 311, 421: pairs of test were in train; lenskit/lkpy 46: item-kNN failed on repeated pairs."""
    rows = [(f"u{user}", f"i{(user * 3 + step) % 11}") for user in range(20) for step in (0, 1, 2, 3, 4, 0)]
    user, item = zip(*rows, strict=True)
    frame = {"user": user, "item": item, "timestamp": [1_700_000_000 + row for row in range(len(rows))]}
    data = api.prepare(frame, tmp_path / "data", progress=False)
    model = api.train("item_knn", data, tmp_path / "run", progress=False)
    assert "20" in model.evaluate(data).left_out["full"]
    first = api.prepare(frame, tmp_path / "first", repeats="first", progress=False)
    pairs = [
        (row["user_id"], row["item_id"])
        for split in first.splits
        for row in first.to_frame(split, kind="rows")
        if row["label"]
    ]
    assert len(pairs) == len({*pairs}) == 100


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_lists_are_cut_before_the_best_list_is_made() -> None:
    """lenskit/lkpy 309: NDCG of 1.21, and of .73 for a short list; gimpong/MM23-MISSRec 15."""
    perfect = metrics.rank_groups([3, 2, 1], [1, 1, 1], [0] * 3)
    assert [metrics.ndcg(perfect, k) for k in (1, 2, 3, 9)] == [1, 1, 1, 1]
    second = metrics.rank_groups([4, 3, 2, 1], [0, 1, 0, 1], [0] * 4)
    assert metrics.ndcg(second, 2) == pytest.approx((1 / np.log2(3)) / (1 + 1 / np.log2(3)))
    assert [metrics.ndcg(second, 1), metrics.hit_rate(second, 1), metrics.hit_rate(second, 2)] == [0, 0, 1]


def test_grades_are_refused_and_not_taken_for_hits() -> None:
    """recommenders-team/recommenders 1749: NDCG was 1 for the grades 3, 2, 3, 0, 1, 2."""
    with pytest.raises(DataError, match="4 of 6 labels are neither 0 nor 1, the first is 3 in row 0"):
        metrics.rank_groups([6, 5, 4, 3, 2, 1], [3, 2, 3, 0, 1, 2], [0] * 6)


def test_one_score_for_all_is_worth_a_draw() -> None:
    """NVIDIA-Merlin/models 617, RUCAIBox/RecBole 622: a constant was perfect, because positives stood first."""
    labels = [[1, 1, 0, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 0]]
    constant = metrics.rank_groups(np.repeat([10, 5, 6], 5), np.ravel(labels), np.repeat([0, 1, 2], 5))
    expected = np.mean([2 / 5, 2 / 5, 1 / 5])
    assert metrics.hit_rate(constant, 1) == pytest.approx(expected)
    assert metrics.ndcg(constant, 1) == pytest.approx(expected)
    assert metrics.group_auc(np.repeat(6, 15), np.ravel(labels), np.repeat([0, 1, 2], 5)) == 0.5


def test_an_item_listed_twice_counts_once() -> None:
    """lyst/lightfm 186: precision above 1; Coder-Yu/SELFRec 18."""
    twice = metrics.rank_groups([5, 5, 4, 3], [1, 1, 0, 1], [0] * 4, candidates=[7, 7, 8, 9])
    once = metrics.rank_groups([5, 4, 3], [1, 0, 1], [0] * 3)
    for name in ("precision", "recall", "ndcg", "mean_average_precision"):
        assert getattr(metrics, name)(twice, 2) == getattr(metrics, name)(once, 2) <= 1
