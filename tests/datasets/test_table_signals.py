"""Signals of your own table: weights of events, by their number, type, repeats and age; what users skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.data.prepare.catalogues import Decay, stored_weights
from recspec.data.prepare.prepared import Prepared
from recspec.data.storage import Columns, Ragged, open_split
from recspec.datasets.table_settings import Settings
from recspec.feature_spec import FeatureSpec
from tests.dataset_cases import prepare_table

DAY = 86_400
HEAD = "user_id,item_id,timestamp,kind,plays\n"
EVENTS = HEAD + "".join(
    f"{user},{item},{1_700_000_000 + day * DAY},{kind},{plays}\n"
    for user, item, day, kind, plays in [
        ("ann", "a", 0, "view", 2),
        ("ann", "b", 10, "cart", 1),
        ("ann", "a", 20, "purchase", 3),
        ("ann", "c", 30, "view", 1),
        ("ann", "d", 40, "view", 4),
        ("bob", "a", 5, "view", 1),
        ("bob", "b", 6, "view", 0),
        ("zoe", "z", 20, "view", 7),
    ]
)


def prepared(folder: Path, text: str = EVENTS, **settings: object) -> Prepared:
    folder.mkdir(exist_ok=True)
    return prepare_table(folder / "rows.csv", folder / "out", text, num_negatives=1, **settings)


def columns_of(spec: FeatureSpec, split: str) -> Columns:
    return open_split(spec, split, spec.columns(split)).read(0, 10**6)


def weights(spec: FeatureSpec, split: str = "train") -> list[float]:
    return np.asarray(columns_of(spec, split)["event_weight"]).tolist()


# --- weights ----------------------------------------------------------------------------------------------------------


def test_a_column_weighs_events_and_those_of_weight_0_are_dropped(tmp_path: Path) -> None:
    made = prepared(tmp_path, weight="plays")
    assert weights(made.spec) == [2, 1, 3, 1, 7]  # ann's first three events, bob's only one, and zoe's
    assert weights(made.spec, "valid") == [1, 1]  # a candidate has the weight of the positive
    assert weights(made.spec, "test") == [4, 4]
    assert made.spec.metadata["event_weight"] == "event_weight"
    assert made.spec.metadata["timestamp"] == "timestamp"
    assert made.spec.features["event_weight"].dtype == "float32"
    assert not any("event_weight" in names for names in made.spec.channels.values())
    assert made.summary["dropped"] == ["1 of 8 rows, whose weight is 0, such as row 7 (weight=plays)"]


def test_without_weights_no_feature_is_made(tmp_path: Path) -> None:
    spec = prepared(tmp_path).spec
    assert "event_weight" not in spec.features
    assert "event_weight" not in spec.metadata
    untimed = prepared(tmp_path / "untimed", timestamp=None).spec
    assert "timestamp" not in untimed.metadata  # the stored numbers are places in the file


def test_types_weigh_events_also_beside_a_column(tmp_path: Path) -> None:
    by_type = {"view": 1, "cart": 3, "purchase": 5}
    made = prepared(tmp_path, event="kind", event_weights=by_type)
    assert weights(made.spec) == [1, 3, 5, 1, 1]
    both = prepared(tmp_path / "both", event="kind", event_weights=by_type, weight="plays")
    assert weights(both.spec) == [2, 3, 15, 1, 7]
    some = prepared(tmp_path / "some", event="kind", event_weights={**by_type, "view": 0})
    assert some.summary["interactions"] == 2
    assert some.summary["dropped"][0] == "6 of 8 rows, whose weight is 0, such as row 1 (event_weights)"


def test_types_without_a_weight_and_weights_without_a_type_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        prepared(tmp_path, EVENTS + "cy,a,1700000000,,1\n", event="kind", event_weights={"veiw": 1, "cart": 3})
    assert [*error.value.problems] == [
        (
            "column 'kind', the type of the event: line 10 is missing; expected a type in every row; "
            "invalid_values=drop leaves such rows out"
        ),
        (
            "setting 'event_weights': no row has the type 'veiw' in column 'kind' (did you mean 'view'?); found "
            "view (6 rows), cart (1 row), purchase (1 row)"
        ),
        (
            "setting 'event_weights': no weight for view (6 rows), purchase (1 row) in column 'kind'; give each type "
            "a weight, or 0 to leave its rows out"
        ),
    ]


@pytest.mark.parametrize("value", ["-1", "", "many", "nan", "1e10", "inf"])
def test_a_weight_that_is_none_is_named_with_its_line(value: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'plays', the weight: line 10 is .*; expected a number from 0 to"):
        prepared(tmp_path, EVENTS + f"cy,a,1700000000,view,{value}\n", weight="plays")


def test_a_parquet_column_of_weights_may_not_be_text_lists_or_lack_values(tmp_path: Path) -> None:
    for values, told in (
        (pa.array([[1.0], [2.0]]), "holds array"),
        (pa.array([float("nan"), -0.5]), "row 1 is missing, row 2 is '-0.5'"),
    ):
        table = pa.table({"user_id": ["a", "b"], "item_id": ["x", "y"], "timestamp": [1, 2], "w": values})
        pq.write_table(table, tmp_path / "rows.parquet")
        with pytest.raises(DataError, match=f"column 'w', the weight: {told}"):
            prepare_table(tmp_path / "rows.parquet", tmp_path / "out", weight="w")


def test_weights_that_are_all_0_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="setting 'weight=plays': all 1 rows have the weight 0"):
        prepared(tmp_path, HEAD + "ann,a,1,view,0\n", weight="plays")
    with pytest.raises(DataError, match="rows of weight 0 are left out, and these are all rows with label 0; give"):
        prepared(tmp_path, "x,plays,label\n1,0,0\n2,3,1\n3,0,0\n", weight="plays", label="label")


def test_columns_that_the_file_lacks_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        prepared(tmp_path, weight="play", event="kinds", event_weights={"view": 1})
    told = "; found 'user_id', 'item_id', 'timestamp', 'kind', 'plays'"
    assert [*error.value.problems] == [
        f"setting 'event': no column 'kinds' (did you mean 'kind'?){told}",
        f"setting 'weight': no column 'play' (did you mean 'plays'?){told}",
    ]


def test_a_column_named_as_the_weight_is_kept_apart(tmp_path: Path) -> None:
    text = EVENTS.replace("plays", "event_weight")
    spec = prepared(tmp_path, text, weight="event_weight", context_features=["event_weight"]).spec
    assert weights(spec) == [2, 1, 3, 1, 7]
    assert spec.role("context") == ("event_weight_context",)


# --- repeats ----------------------------------------------------------------------------------------------------------


def test_repeats_may_add_their_weights_to_the_last_event(tmp_path: Path) -> None:
    made = prepared(tmp_path, weight="plays", repeats="sum")
    columns = columns_of(made.spec, "train")
    assert np.asarray(columns["item_id"]).tolist() == [2, 1, 1, 5]  # ann's b and her second a, bob's a, zoe's z
    assert weights(made.spec) == [1, 5, 1, 7]
    counted = prepared(tmp_path / "counted", EVENTS.replace("ann,d", "ann,c"), repeats="sum")
    assert weights(counted.spec, "test") == [2, 2, 1, 1]  # without weights, the number of events; bob's b
    assert weights(counted.spec, "valid") == [2, 2]
    assert counted.summary["dropped"][0].endswith("'ann' and item 'a'; the latest counts, with the weights of all")


# --- age --------------------------------------------------------------------------------------------------------------


def test_weights_halve_back_from_the_last_event_of_train(tmp_path: Path) -> None:
    spec = prepared(tmp_path, half_life="10d").spec  # the last of train is ann's third event, on day 20
    assert weights(spec) == pytest.approx([0.25, 0.5, 1, 2**-1.5, 1])
    assert weights(spec, "valid") == pytest.approx([2, 2])
    assert weights(spec, "test") == pytest.approx([4, 4, 2**-1.4, 2**-1.4])
    same = prepared(tmp_path / "plain", half_life=10 * DAY).spec
    assert weights(same) == weights(spec)


def test_held_out_rows_do_not_move_the_weights_of_train(tmp_path: Path) -> None:
    before = weights(prepared(tmp_path, half_life="10d").spec)
    later = EVENTS.replace(f",{1_700_000_000 + 40 * DAY},", f",{1_700_000_000 + 4000 * DAY},")
    assert later != EVENTS
    moved = prepared(tmp_path / "later", later, half_life="10d").spec
    assert weights(moved) == before
    assert weights(moved, "test") == pytest.approx([2.0**64] * 2 + [2**-1.4] * 2)  # as far as a weight may go


def test_the_decay_of_a_weight_by_hand() -> None:
    decay = Decay(half_life=2.0, end=10.0)
    times = np.array([10, 8, 6, 12, -1000, 1000])
    assert decay.factors(times).tolist() == [1, 0.5, 0.25, 2, 2.0**-64, 2.0**64]
    tiny = stored_weights(np.full(6, 1e-38), times, decay)
    assert (tiny > 0).all()
    assert tiny.dtype == np.float32


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"half_life": "90 moons"}, "expected a time such as 90d, 12h or 2w"),
        ({"half_life": "0d"}, "expected a time such as 90d"),
        ({"half_life": "9d", "timestamp": None}, "half_life needs the column of the timestamp"),
        ({"half_life": "9d", "repeats": "sum"}, "repeats sum counts old events as if they were the last"),
        ({"event_weights": {"view": 1}}, "event_weights are of the types of events; name their column with event"),
        ({"event": "kind"}, "event names the column 'kind', of which nothing is used"),
        ({"event": "kind", "event_weights": {"view": 0}}, "event_weights are all 0"),
        ({"label": "clicked", "repeats": "sum"}, "repeats: of rows without a label"),
        ({"label": "clicked", "history": 5, "timestamp": None}, "history of rows with a label needs the column of the"),
        ({"label": "clicked", "history": 5, "item": None}, "history needs the columns of user and item"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Settings.model_validate(settings)


def test_a_half_life_in_days_needs_dates(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp\nann,a,1\nann,b,2\nbob,a,1\n"
    with pytest.raises(SettingsError, match="setting 'half_life': is 9d, but the times of the rows are no dates"):
        prepared(tmp_path, text, half_life="9d")
    assert weights(prepared(tmp_path / "units", text, half_life=1).spec) == [1, 1]


# --- types as labels --------------------------------------------------------------------------------------------------


def test_types_may_be_labels(tmp_path: Path) -> None:
    made = prepared(tmp_path, event="kind", positive=["purchase", "cart"], split="share", valid=0, test=0)
    assert np.asarray(columns_of(made.spec, "train")["label"]).tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert "label 'kind': 'purchase', 'cart' as 1 and 'view' as 0" in made.summary["changed"]
    weighed = prepared(
        tmp_path / "both",
        event="kind",
        positive=["purchase"],
        split="share",
        valid=0,
        test=0,
        weight="plays",
        event_weights={"view": 1, "cart": 1, "purchase": 5},
    )
    assert np.asarray(columns_of(weighed.spec, "train")["label"]).tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert weights(weighed.spec) == [2, 1, 15, 1, 4, 1, 7]


def test_words_of_the_label_that_no_row_holds_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        prepared(tmp_path, event="kind", positive=["purchese", "buy"])
    assert [*error.value.problems] == [
        "column 'kind', the label: no row holds 'buy'; found 'view', 'cart', 'purchase'",
        (
            "column 'kind', the label: no row holds 'purchese' (did you mean 'purchase'?); found 'view', 'cart', "
            "'purchase'"
        ),
    ]


# --- histories of labelled rows ---------------------------------------------------------------------------------------

PAGES = """\
user_id,item_id,timestamp,clicked,brand
ann,a,10,0,x
ann,b,10,1,y
ann,c,20,0,x
ann,d,20,0,y
ann,e,20,1,x
ann,a,30,1,x
ann,f,30,1,y
ann,b,40,0,y
ann,c,50,1,x
bob,a,10,1,x
bob,b,60,0,y
"""
"""Pages of items shown at one time; ids of items are a = 1 to f = 6."""


def lists(columns: Columns, name: str) -> list[list[float]]:
    column = columns[name]
    assert isinstance(column, Ragged)
    return column.tolist()


def by_time(folder: Path, text: str = PAGES, **settings: object) -> Prepared:
    given = {"history": 3, "split": "time", "valid": 0, "test": 0.3, "reject_seen": False, **settings}
    return prepared(folder, text, **given)


def test_a_row_holds_the_clicks_before_its_page(tmp_path: Path) -> None:
    spec = by_time(tmp_path, item_features=["brand"]).spec
    assert spec.channels["history"] == ("history_item_id", "history_brand", "history_gap")
    train, test = columns_of(spec, "train"), columns_of(spec, "test")
    # in order of user, time and label: ann's a b, c d e, a f and, as test, b, c; bob's a and, as test, b
    assert np.asarray(train["item_id"]).tolist() == [1, 2, 3, 4, 5, 1, 6, 1]
    assert np.asarray(train["timestamp"]).tolist() == [10, 10, 20, 20, 20, 30, 30, 10]
    page = [[], [], [2], [2], [2], [2, 5], [2, 5], []]
    assert lists(train, "history_item_id") == page
    assert lists(train, "history_brand") == [[2 if item in (2, 6) else 1 for item in row] for row in page]
    assert np.asarray(test["item_id"]).tolist() == [2, 3, 2]
    assert lists(test, "history_item_id") == [[5, 1, 6], [5, 1, 6], [1]]
    assert lists(test, "history_gap")[2] == pytest.approx([np.log1p(50)])


def test_the_catalogue_of_users_holds_their_latest_clicks(tmp_path: Path) -> None:
    spec = by_time(tmp_path).spec
    users = pq.read_table(spec.path("users.parquet"))
    assert users.column("user_id").to_pylist() == [1, 2]
    assert users.column("history_item_id").to_pylist() == [[1, 6, 3], [1]]
    assert users.column("history_gap").to_pylist()[0] == pytest.approx([np.log1p(20), np.log1p(20), 0])


def test_a_negative_is_what_the_user_skipped_since_the_click_before(tmp_path: Path) -> None:
    made = by_time(tmp_path, negative_history=True, history=9)
    test = columns_of(made.spec, "test")
    # before b: a skipped; before e: c, then d; nothing before a and f, which have drawn items
    (*known, _, _), again, _ = lists(test, "negative_history_item_id")
    assert known == [1, 4]
    assert again[:2] == [1, 4]
    assert all(1 <= item <= 6 for row in lists(test, "negative_history_item_id") for item in row)
    told = "negative histories: of 6 positive events, 3 stand beside what the user skipped before them, the others "
    assert told + "beside a drawn item" in made.summary["inferred"]


def test_what_was_skipped_and_then_taken_is_no_negative(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp,clicked\nann,a,1,0\nann,a,2,1\nann,b,3,0\nann,b,4,1\nann,c,5,0\n"
    made = prepared(tmp_path, text, history=2, negative_history=True, split="share", valid=0, test=0)
    assert "of 2 positive events, 0 stand" in " ".join(made.summary["inferred"])
    assert lists(columns_of(made.spec, "train"), "negative_history_item_id")[-1] == [3, 3]  # c is all that is left


def test_train_rows_never_see_a_held_out_label(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [(f"u{rng.integers(4)}", f"i{rng.integers(8)}", time, rng.integers(2)) for time in range(300)]
    head = "user_id,item_id,timestamp,clicked\n"

    def written(labels: list[int]) -> str:
        return head + "".join(f"{u},{i},{t},{y}\n" for (u, i, t, _), y in zip(rows, labels, strict=True))

    given: dict[str, object] = {"history": 5, "negative_history": True, "split": "share", "valid": 0.3, "test": 0.3}
    spec = prepared(tmp_path, written([int(y) for *_, y in rows]), **given).spec
    times = {split: {*np.asarray(columns_of(spec, split)["timestamp"]).tolist()} for split in ("valid", "test")}
    held = times["valid"] | times["test"]
    flipped = prepared(tmp_path / "b", written([1 - y if t in held else y for _, _, t, y in rows]), **given).spec
    one, other = columns_of(spec, "train"), columns_of(flipped, "train")
    for name in ("history_item_id", "history_gap", "negative_history_item_id"):
        assert lists(one, name) == lists(other, name), name
    # valid knows train and itself, test everything before it
    only_test = [1 - y if t in times["test"] else y for _, _, t, y in rows]
    third = prepared(tmp_path / "c", written(only_test), **given).spec
    assert lists(columns_of(third, "valid"), "history_item_id") == lists(columns_of(spec, "valid"), "history_item_id")
    assert lists(columns_of(third, "test"), "history_item_id") != lists(columns_of(spec, "test"), "history_item_id")


def test_train_rows_with_few_clicks_before_them_are_dropped_on_demand(tmp_path: Path) -> None:
    made = by_time(tmp_path, min_history=2)
    assert np.asarray(columns_of(made.spec, "train")["item_id"]).tolist() == [1, 6]
    assert "6 train rows with fewer than 2 events before them (min_history)" in made.summary["dropped"]
    with pytest.raises(DataError, match="no train row has 9 events before it; lower min_history"):
        by_time(tmp_path / "none", min_history=9)


def test_histories_need_a_click_and_a_time(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no train row has the label 1, so histories would be empty"):
        prepared(
            tmp_path,
            "user_id,item_id,timestamp,clicked\na,x,1,0\nb,x,2,0\na,y,9,1\nb,y,9,1\n",
            history=3,
            split="time",
            valid=0,
            test=0.5,
        )
    with pytest.raises(SettingsError, match="split share needs a label; name its column, or use leave_one_out or time"):
        prepared(tmp_path, "user_id,item_id,clicked\na,x,1\nb,x,0\n", history=3, split="share")
