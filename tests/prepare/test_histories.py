"""Histories: what a row tells of its user's earlier events, and items drawn to stand beside what was done."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from recspec.base.errors import DataError, SettingsError
from recspec.data.prepare import PrepareContext, histories
from recspec.data.prepare.histories import Timeline, gap_column
from recspec.data.prepare.negatives import Draws, Seen
from recspec.data.storage import Columns, Ragged, open_split
from recspec.datasets import ncf, table
from recspec.datasets.movielens import Settings as MovieLensSettings
from recspec.feature_spec import FeatureSpec

DAY = 86_400
START = 1_300_000_000

# user, item, days after the start; brands of the items below
OF_USERS = {"ann": "a0 b1 a1 c4 d9 e10", "bob": "b2 e5 f11", "cat": "f3"}
EVENTS = [(user, each[0], int(each[1:])) for user, events in OF_USERS.items() for each in events.split()]
BRANDS = {"a": "x", "b": "y", "c": "", "d": "x", "e": "y", "f": "x"}
IDS = {item: number for number, item in enumerate("abcdef", 1)}


def prepare(folder: Path, events: list[tuple[str, str, int]] = EVENTS, **settings: object) -> FeatureSpec:
    """The events as a table, with the brand of each item in a file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"{user},{item},{START + day * DAY}\n" for user, item, day in events)
    (folder / "rows.csv").write_text("user_id,item_id,timestamp\n" + rows)
    (folder / "items.csv").write_text("item_id,brand\n" + "".join(f"{i},{brand}\n" for i, brand in BRANDS.items()))
    given = {"history": 3, "num_negatives": 2, "items": "items.csv", "item_features": ("brand",)}
    asked = {**given, "repeats": "first", **settings}
    table.prepare(PrepareContext(folder / "rows.csv", folder / "out"), table.Settings.model_validate(asked))
    return FeatureSpec.load(folder / "out")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """The events by the settings above."""
    return prepare(tmp_path_factory.mktemp("histories"))


def summary_of(spec: FeatureSpec) -> dict[str, object]:
    summary = spec.metadata["summary"]
    assert isinstance(summary, dict)
    return summary


def columns_of(spec: FeatureSpec, split: str) -> Columns:
    return open_split(spec, split, spec.columns(split)).read(0, 2**62)


def lists(columns: Columns, name: str) -> list[list[float]]:
    column = columns[name]
    assert isinstance(column, Ragged)
    return column.tolist()


def items(text: str) -> list[int]:
    return [IDS[item] for item in text]


# --- the lists -------------------------------------------------------------------------------------------------------


def test_a_row_holds_the_latest_events_before_it_oldest_first(plain: FeatureSpec) -> None:
    assert plain.channels["history"] == ("history_item_id", "history_brand", "history_gap")
    train, valid, test = (columns_of(plain, split) for split in ("train", "valid", "test"))
    # ann took a, b, c, d, e (her second a is a repeat), bob b, e, f, and cat f alone
    assert train["item_id"].tolist() == items("abcbf")
    assert lists(train, "history_item_id") == [[], items("a"), items("ab"), [], []]
    assert valid["item_id"].tolist()[::3] == items("de")
    assert lists(valid, "history_item_id") == [items("abc")] * 3 + [items("b")] * 3
    assert lists(test, "history_item_id") == [items("bcd")] * 3 + [items("be")] * 3


def test_the_lists_of_a_row_belong_together_and_a_missing_brand_has_an_id(plain: FeatureSpec) -> None:
    brands = {"no_brand": 1, "x": 2, "y": 3}
    assert pq.read_table(plain.path("vocabularies/brand.parquet")).column("value").to_pylist() == list(brands)
    test = columns_of(plain, "test")
    assert lists(test, "history_brand")[0] == [brands["y"], brands["no_brand"], brands["x"]]
    assert lists(test, "history_gap")[0] == pytest.approx(np.log1p([9, 6, 1]))
    feature = plain.features["history_brand"]
    assert (feature.vocabulary, feature.cardinality, feature.length, feature.padding) == ("brand", 4, 3, 0)


def test_the_catalogue_of_users_holds_the_latest_events_of_all_splits(plain: FeatureSpec) -> None:
    users = pq.read_table(plain.path("users.parquet"))
    assert users.column("history_item_id").to_pylist() == [items("cde"), items("bef"), items("f")]
    gaps = users.column("history_gap").to_pylist()
    assert gaps[0] == pytest.approx(np.log1p([6, 1, 0]))
    assert gaps[2] == [0]


def test_without_timestamps_there_are_no_gaps_and_without_gaps_none_either(tmp_path: Path, plain: FeatureSpec) -> None:
    assert "history_gap" in plain.features
    assert "history_gap" not in prepare(tmp_path / "undated", timestamp=None).features
    assert "history_gap" not in prepare(tmp_path / "asked", gaps=False).features


def test_gaps_are_in_days_or_in_what_the_timestamps_count() -> None:
    now, times = np.array([10 * DAY, 0]), np.array([9 * DAY, 10 * DAY, 5])
    events = Ragged(np.array([0, 1, 2]), np.array([0, 2, 3]))
    assert gap_column(times, now, events, DAY).tolist() == pytest.approx([np.log(2), 0, 0])
    assert gap_column(times, np.array([0, 25]), events, 1)[2] == pytest.approx(np.log(21))


def test_min_history_and_prefixes_choose_train_rows(tmp_path: Path) -> None:
    spec = prepare(tmp_path / "1", min_history=1)
    assert columns_of(spec, "train")["item_id"].tolist() == items("bc")
    assert summary_of(spec)["train_rows_dropped_by_histories"] == 3
    assert columns_of(prepare(tmp_path / "2", prefixes="last"), "train")["item_id"].tolist() == items("cbf")
    assert columns_of(prepare(tmp_path / "3", prefixes=2), "train")["item_id"].tolist() == items("bcbf")


def test_events_of_unknown_items_are_passed_over() -> None:
    users, ids = np.array([1, 1, 1, 1, 2, 2]), np.array([4, 0, 5, 6, 0, 7])
    timeline = Timeline.of(users, ids)
    found = [ids[timeline.histories(np.array([row]), 2).values].tolist() for row in range(6)]
    assert found == [[], [4], [4], [4, 5], [], []]
    whole = timeline.histories(np.array([3, 5]), 2, with_own=True)
    assert ids[whole.values].tolist() == [5, 6, 7]
    assert whole.lengths.tolist() == [2, 1]
    assert (timeline.before[[3, 5]] - timeline.first[[3, 5]]).tolist() == [2, 0]


def test_histories_are_the_same_however_few_rows_are_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"negative_history": True, "train_negatives": 2, "split": "time", "valid": 0.2, "test": 0.3}
    whole = prepare(tmp_path / "whole", **asked)
    monkeypatch.setattr(histories, "VALUES", 1)
    monkeypatch.setattr("recspec.data.prepare.interaction_rows.BLOCK_ROWS", 2)
    pieces = prepare(tmp_path / "pieces", **asked)
    for split in whole.splits:
        for chunk in whole.sources[split]:
            for file in chunk.files:
                assert pieces.path(file).read_bytes() == whole.path(file).read_bytes()
    one, other = (pq.read_table(spec.path("users.parquet")) for spec in (whole, pieces))
    assert one.equals(other)


def test_a_memory_limit_too_small_for_the_lists_is_refused_before_a_row_is_written(tmp_path: Path) -> None:
    spec = prepare(tmp_path / "small", history=20)
    raw = tmp_path / "small"
    settings = table.Settings(files=("rows.csv",), items="items.csv", history=200, item_features=("brand",))
    said = (
        r"^--memory-limit of 300 MB is too little for rows with 600 values in lists \('history_brand', 'history_gap', "
        r"'history_item_id'\); give 400 MB or more, or make the lists shorter"
    )
    with pytest.raises(SettingsError, match=said):
        table.prepare(PrepareContext(raw, tmp_path / "long", memory_limit="300MB"), settings)
    assert not (tmp_path / "long").exists()
    made = table.prepare(PrepareContext(raw, tmp_path / "long", memory_limit="400MB"), settings)
    assert made.spec.splits == spec.splits


def test_a_feature_may_not_bear_the_name_of_a_history(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id,timestamp,history_gap\n1,a,1,2\n1,b,2,3\n")
    settings = table.Settings(history=2, context_features=("history_gap",))
    with pytest.raises(DataError, match="feature 'history_gap' has a name that histories need"):
        table.prepare(PrepareContext(tmp_path / "rows.csv", tmp_path / "out"), settings)


def test_a_feature_that_some_item_lacks_a_number_of_has_no_history(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id,timestamp,maker\n1,a,1,2\n1,b,2,\n1,c,3,4\n")
    settings = table.Settings(history=2, item_features=("maker",), categorical=("maker",), types={"maker": "int64"})
    table.prepare(PrepareContext(tmp_path / "rows.csv", tmp_path / "out"), settings)
    spec = FeatureSpec.load(tmp_path / "out")
    assert spec.channels["history"] == ("history_item_id", "history_gap")
    assert summary_of(spec)["without_history"] == ["maker"]


# --- the latest rows of all held out ---------------------------------------------------------------------------------


def test_by_time_nothing_from_the_future_has_an_id(tmp_path: Path) -> None:
    spec = prepare(tmp_path, split="time", valid=0.2, test=0.2)  # 9 rows, of which the last are of days 9, 10 and 11
    train, valid, test = (columns_of(spec, split) for split in ("train", "valid", "test"))
    known = pq.read_table(spec.path("vocabularies/item_id.parquet")).column("value").to_pylist()
    assert known == ["a", "b", "c", "e", "f"]
    assert pq.read_table(spec.path("vocabularies/brand.parquet")).column("value").to_pylist() == ["no_brand", "x", "y"]
    assert sorted(set(train["timestamp"].tolist())) == [START + day * DAY for day in (0, 1, 2, 3, 4, 5)]
    # ann's d (day 9) is nobody's item in train: no target, and no event of the history of her e
    assert valid["item_id"][::3].tolist() == [4]
    assert lists(valid, "history_item_id")[0] == [1, 2, 3]
    assert lists(test, "history_item_id")[0] == [2, 4]
    assert test["series"].tolist() == [0, 0, 0]
    assert spec.group == "series"
    assert summary_of(spec)["unknown_targets_dropped"] == 1


def test_by_time_unknown_targets_may_be_kept_and_unknown_users_are(tmp_path: Path) -> None:
    events = [*EVENTS, ("dan", "a", 12), ("dan", "b", 13)]
    spec = prepare(tmp_path, events, split="time", valid=0, test=0.5, unknown_targets="keep")
    test = columns_of(spec, "test")
    positive = np.flatnonzero(test["label"])
    assert test["user_id"][positive].tolist() == [1, 1, 2, 0, 0]
    assert test["item_id"][positive].tolist() == [0, 4, 5, 1, 2]
    assert test["brand"][positive[0]] == 0
    assert lists(test, "history_item_id")[positive[-1]] == [1]
    assert (summary_of(spec)["unknown_targets_kept"], summary_of(spec)["targets_of_unknown_users"]) == (1, 2)
    assert pq.read_table(spec.path("users.parquet")).num_rows == 3


def test_with_nothing_left_for_train_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no train row has 9 events before it; lower min_history"):
        prepare(tmp_path, min_history=9)


# --- negatives -------------------------------------------------------------------------------------------------------


def test_train_negatives_stand_behind_their_row_and_share_its_history(tmp_path: Path) -> None:
    spec = prepare(tmp_path, train_negatives=2, negative_history=True)
    train = columns_of(spec, "train")
    assert train["label"].tolist() == [1, 0, 0] * 5
    assert train["user_id"].tolist() == [1] * 9 + [2] * 3 + [3] * 3
    for name in ("history_item_id", "negative_history_item_id"):
        of_rows = lists(train, name)
        assert of_rows[::3] == of_rows[1::3] == of_rows[2::3]
    assert [len(row) for row in lists(train, "negative_history_brand")] == [0] * 3 + [1] * 3 + [2] * 3 + [0] * 6
    assert spec.metadata["train_negatives"] == 2
    seen_by_ann = set(items("abc"))
    assert not seen_by_ann & set(train["item_id"][:9][train["label"][:9] == 0].tolist())
    assert not seen_by_ann & {item for row in lists(train, "negative_history_item_id")[:9] for item in row}


def test_train_negatives_may_be_what_is_held_out(tmp_path: Path) -> None:
    """Were the items of valid and test spared, whoever never stands among the negatives would be the answer."""
    train = columns_of(prepare(tmp_path, train_negatives=200), "train")
    of_ann = (train["user_id"] == 1) & (train["label"] == 0)
    assert set(train["item_id"][of_ann].tolist()) == set(items("def"))


def drawn(draws: Draws, seen: Seen, user: int, count: int) -> NDArray[np.int64]:
    return draws.draw(seen, np.full(count, user), np.arange(count), (1, 2))


def test_popular_items_are_drawn_as_often_as_they_stand_in_the_interactions(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.array([10, 0, 30, 60])
    seen = Seen.of(np.array([1, 2]), np.array([4, 1]), 4)
    any_item = drawn(Draws("popularity", counts, reject_seen=False), seen, 1, 20_000)
    assert np.bincount(any_item, minlength=5)[1:] / 20_000 == pytest.approx([0.1, 0, 0.3, 0.6], abs=0.015)
    unseen = drawn(Draws("popularity", counts), seen, 1, 20_000)
    share = np.bincount(unseen, minlength=5)[1:] / 20_000
    assert share[3] == 0
    assert share[[0, 2]] == pytest.approx([0.25, 0.75], abs=0.015)
    monkeypatch.setattr("recspec.data.prepare.negatives.POOL", 1)  # searched, not looked up
    assert np.array_equal(drawn(Draws("popularity", counts, reject_seen=False), seen, 1, 20_000), any_item)


def test_who_has_seen_all_that_is_popular_gets_the_rest_and_who_has_seen_all_gets_any() -> None:
    counts = np.array([5, 5, 0])
    seen = Seen.of(np.array([1, 1, 2, 2, 2]), np.array([1, 2, 1, 2, 3]), 3)
    draws = Draws("popularity", counts)
    assert set(drawn(draws, seen, 1, 50).tolist()) == {3}
    assert set(drawn(draws, seen, 2, 200).tolist()) == {1, 2, 3}
    assert set(drawn(Draws("uniform", counts), seen, 2, 200).tolist()) == {1, 2, 3}
    assert set(drawn(Draws("uniform", counts, reject_seen=False), seen, 1, 200).tolist()) == {1, 2, 3}


def test_what_users_have_seen_is_known() -> None:
    users, ids = np.array([3, 3, 5]), np.array([2, 4, 1])
    seen = Seen.of(users, ids, 4)
    grid_users, grid_items = np.repeat([3, 4, 5], 4), np.tile([1, 2, 3, 4], 3)
    has = seen.has(grid_users, grid_items)
    assert Counter(zip(grid_users[has].tolist(), grid_items[has].tolist(), strict=True)) == Counter(
        {(3, 2): 1, (3, 4): 1, (5, 1): 1}
    )
    assert not Seen.of(users, np.zeros(3, np.int64), 4).has(users, ids).any()


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"negative_history": True}, "negative_history say how histories are made; set history to their length too"),
        ({"prefixes": "last", "gaps": False}, "prefixes and gaps say how"),
        ({"unknown_targets": "keep"}, "unknown_targets are for split time"),
        ({"split": "users", "unknown_targets": "keep"}, "unknown_targets are for split time"),
        ({"split": "time", "heldout_users": 3}, "heldout_users is for split users; set split=users too"),
        ({"split": "users", "num_negatives": 5}, "split users ranks all items, so no candidates are drawn; leave out"),
        ({"split": "time", "valid_share": 0.5, "test_share": 0.5}, "take 1 of the rows; leave some for train"),
        ({"history": 1}, "greater than or equal to 2"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MovieLensSettings.model_validate(settings)


def test_settings_say_which_train_rows_stay() -> None:
    users, rows = np.array([1, 1, 1, 2, 2]), np.arange(5)
    timeline = Timeline.of(users, np.array([4, 5, 6, 4, 5]))
    assert MovieLensSettings(history=9).train_rows(timeline, users, rows).tolist() == [0, 1, 2, 3, 4]
    assert MovieLensSettings(history=9, prefixes=1).train_rows(timeline, users, rows).tolist() == [2, 4]
    both = MovieLensSettings(history=9, min_history=1, prefixes=2)
    assert both.train_rows(timeline, users, rows).tolist() == [1, 2, 4]
    assert both.leaves_out == ["with fewer than 1 events before them (min_history)", "beyond prefixes=2"]


def test_the_encoders_say_how_raw_histories_are_read(plain: FeatureSpec) -> None:
    kept = json.loads(plain.path("encoders.json").read_text())
    list_of = {"separator": "|", "length": 3, "keep": "last"}
    assert kept["history_item_id"] == {"kind": "vocabulary", "vocabulary": "item_id", **list_of}
    assert kept["brand"] == {"kind": "vocabulary", "vocabulary": "brand", "missing": "no_brand"}
    assert kept["history_gap"] == {"log1p": True, "kind": "number", **list_of}


def test_what_the_ncf_paper_tests_stands_in_no_history_though_the_seconds_are_equal(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "x.train.rating").write_text("".join(f"1\t{item}\t5\t100\n" for item in (11, 12, 13)))
    (raw / "x.test.rating").write_text("1\t14\t5\t100\n")
    (raw / "x.test.negative").write_text("(1,14)\t15\t16\n")
    ncf.prepare(PrepareContext(raw, tmp_path / "out"), ncf.Settings(history=5))
    spec = FeatureSpec.load(tmp_path / "out")
    assert lists(columns_of(spec, "train"), "history_item_id") == [[], [1]]
    assert lists(columns_of(spec, "valid"), "history_item_id")[0] == [1, 2]
    assert lists(columns_of(spec, "test"), "history_item_id") == [[1, 2, 3]] * 3
