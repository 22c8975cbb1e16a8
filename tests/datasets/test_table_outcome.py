"""Nothing implausible passes in silence: tables with one defect each, and tables without any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.random import Generator

from recspec.base.errors import RecspecError
from recspec.data.prepare.prepared import Prepared
from recspec.data.storage import open_split
from tests.dataset_cases import Case, prepare_table, prepare_text, raw_pairs, run, write_table

Columns = dict[str, list[str]]
NUM_ROWS = 240


def texts(values: object) -> list[str]:
    return [str(value) for value in np.asarray(values)]


def events(rng: Generator) -> Columns:
    """Users and items at times, in no order; a pair may come again at another time."""
    times = 1_700_000_000 + 3_600 * rng.permutation(NUM_ROWS)
    return {
        "user_id": texts(rng.integers(12, size=NUM_ROWS)),
        "item_id": texts(rng.integers(30, size=NUM_ROWS)),
        "timestamp": texts(times),
    }


def rated(rng: Generator) -> Columns:
    """Ratings from 1 to 5, most of them high."""
    stars = rng.choice([1, 2, 3, 4, 5], NUM_ROWS, p=[0.05, 0.05, 0.1, 0.4, 0.4])
    return {**events(rng), "rating": texts(stars)}


def clicks(rng: Generator) -> Columns:
    """A label that a number and a category order a little."""
    size, kind = rng.normal(size=NUM_ROWS), rng.integers(4, size=NUM_ROWS)
    label = rng.random(NUM_ROWS) < 1 / (1 + np.exp(-(size + kind - 2)))
    return {
        "size": [f"{each:.3f}" for each in size],
        "kind": [f"k{each}" for each in kind],
        "label": texts(label.astype(int)),
    }


def csv_of(columns: Mapping[str, list[str]]) -> str:
    return "\n".join([",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]) + "\n"


@dataclass(frozen=True)
class Defect:
    """A table with something wrong, and words that a refusal or a warning about it holds."""

    table: Callable[[Generator], Columns]
    told: tuple[str, ...]
    asked: Mapping[str, object] = field(default_factory=dict)


def changed(
    base: Callable[[Generator], Columns], **new: Callable[[Generator], object]
) -> Callable[[Generator], Columns]:
    return lambda rng: {**base(rng), **{name: texts(make(rng)) for name, make in new.items()}}


def without(base: Callable[[Generator], Columns], *names: str) -> Callable[[Generator], Columns]:
    return lambda rng: {name: column for name, column in base(rng).items() if name not in names}


def drawn(*values: object) -> Callable[[Generator], object]:
    return lambda rng: rng.choice(np.array(values), NUM_ROWS)


def sorted_by_item(rng: Generator) -> Columns:
    columns = without(events, "timestamp")(rng)
    order = np.argsort(np.array(columns["item_id"], dtype=int), kind="stable")
    return {name: [column[place] for place in order] for name, column in columns.items()}


def outcome(rng: Generator) -> Columns:
    columns = clicks(rng)
    seconds = np.where(np.array(columns["label"]) == "1", rng.integers(5, 900, NUM_ROWS), 0)
    return {**columns, "watched_s": texts(seconds)}


def spanning(rng: Generator) -> Columns:
    columns = {**events(rng), "title": [f"t{row}" for row in range(NUM_ROWS)]}
    columns["title"][7] = '"a\nb"'
    return columns


def with_nobody(rng: Generator) -> Columns:
    """Every third row is of visitors without an id."""
    columns = {**events(rng), "user_id": texts(rng.integers(40, size=NUM_ROWS))}
    return columns | {"user_id": ["-1" if row % 3 else user for row, user in enumerate(columns["user_id"])]}


def header_again(rng: Generator) -> Columns:
    return {name: [*column[:90], name, *column[90:]] for name, column in without(events, "timestamp")(rng).items()}


def ids(form: str, other: str) -> Callable[[Generator], Columns]:
    """Items, every other row of which has its id in another form."""
    return changed(events, item_id=lambda _: [(form, other)[n % 2].format(n // 2 % 20) for n in range(NUM_ROWS)])


def baskets(mark: str) -> Callable[[Generator], Columns]:
    """Two to four items a row."""
    return changed(
        events,
        item_id=lambda rng: [
            '"' + mark.join(f"i{each}" for each in rng.choice(30, rng.integers(2, 5), replace=False)) + '"'
            for _ in range(NUM_ROWS)
        ],
    )


DEFECTS = {
    "a user who is nobody": Defect(with_nobody, ("user '-1'", "no other one over", '{type: text, missing: ["-1"]}')),
    "a header among the rows": Defect(header_again, ("the header stands among the rows again", "line 92")),
    "ids in two cases": Defect(ids("sku{}", "SKU{}"), ("20 of 40 items", "'sku0' and 'SKU0'", "write them alike")),
    "ids with blanks": Defect(ids("{}", "{} "), ("20 of 40 items", "blanks around them")),
    "ids with zeros": Defect(ids("{}", "000{}"), ("20 of 40 items differ", "leading zeros")),
    "ids with a fraction": Defect(ids("{}.0", "1{}.0"), ("'item_id'", "with a fraction", "types={item_id: integer}")),
    "ids in two codings": Defect(ids("caf\u00e9{}", "cafe\u0301{}"), ("20 of 40 items differ", "accents' coding")),
    "ids with letters that nobody sees": Defect(ids("{}", "{}\u200b"), ("20 of 40 items differ", "invisible letters")),
    "baskets in a text": Defect(baskets(";"), ("items hold ';' between parts", "write a row for each item")),
    "baskets in quotes": Defect(baskets(", "), ("items hold ','", "write a row for each item")),
    "points between thousands": Defect(
        changed(clicks, price=drawn("950", "1.250", "2.500")), ("'price'", "as '1.250'", "write numbers without them")
    ),
    "ids of a spreadsheet": Defect(ids("1.{}E+12", "7{}"), ("20 items", "E+12', as spreadsheets shorten")),
    "a day beside an hour": Defect(
        changed(
            without(events, "timestamp"),
            date=lambda rng: [f"2024-01-{day:02d}" for day in rng.integers(1, 29, NUM_ROWS)],
            hour=lambda rng: rng.integers(24, size=NUM_ROWS),
        ),
        ("the time 'date' holds days, and 'hour' is not used", "write day and time of day into one column"),
    ),
    "a split as a flag": Defect(changed(events, is_test=drawn(0, 1)), ("'is_test' is named like a", "splits=is_test")),
    "a split as a feature": Defect(
        changed(clicks, usage=drawn("Training", "PrivateTest")), ("'usage' is named like a",)
    ),
    "returned goods": Defect(changed(events, quantity=drawn(1, 2, -1)), ("'quantity' below 0", "min_rating=1")),
    "cancelled orders": Defect(changed(events, status=drawn("done", "cancelled")), ('{"cancelled": 1, "done": 1}',)),
    "a number for no number": Defect(
        changed(clicks, age=drawn(20, 30, 41, 52, -999)), ("holds -999 in", "20 to 52", 'missing: ["-999"]')
    ),
    "lists between semicolons": Defect(
        changed(clicks, tags=drawn("red;blue", "red", "tea;red;blue")), ("may be lists", "list_separator=;")
    ),
    "times in two units": Defect(
        changed(
            events, timestamp=lambda rng: 1_700_000_000 * 1_000 ** (np.arange(NUM_ROWS) % 5 > 0) + rng.integers(99)
        ),
        ("as 48 other values are", "they look like milliseconds, so write all in one unit"),
    ),
    "times as digits": Defect(
        changed(events, timestamp=lambda rng: 20_240_101_120_000 + rng.permutation(NUM_ROWS) % 60),
        ("they look like seconds, which time_format=%Y%m%d%H%M%S makes dates",),
    ),
    "a low rating for no rating": Defect(
        changed(rated, rating=drawn(*[4, 5] * 5, 1, 2, 3, -999)), ("holds -999", "and else 1 to 5")
    ),
    "an item for each event": Defect(changed(events, item_id=lambda rng: rng.permutation(NUM_ROWS)), ("item", "240")),
    "a user for each event": Defect(changed(events, user_id=lambda rng: rng.permutation(NUM_ROWS)), ("user", "240")),
    "nobody positive": Defect(changed(clicks, label=lambda _: np.zeros(NUM_ROWS, int)), ("'label'", "240 rows")),
    "everybody positive": Defect(changed(clicks, label=lambda _: np.ones(NUM_ROWS, int)), ("'label'", "240 rows")),
    "a given label of one class": Defect(
        changed(clicks, label=lambda _: np.zeros(NUM_ROWS, int)),
        ("every row of train", "label 0", "positive="),
        {"label": "label"},
    ),
    "a label of 1 and 2": Defect(changed(events, click=drawn(1, 2)), ("'click'", "label=click", "positive=")),
    "a label of -1 and 1": Defect(changed(events, click=drawn(-1, 1, 1)), ("label=click --set positive=1;",)),
    "stars under label": Defect(changed(events, label=drawn(1, 2, 3, 4, 5)), ("rating=label", "positive_from=4")),
    "a label of words": Defect(changed(events, label=drawn("good", "bad", "bad")), ("'good'", "positive=good")),
    "a label of German words": Defect(changed(events, clicked=drawn("ja", "ja", "nein")), ("positive=ja;",)),
    "a label of ones and nothing": Defect(changed(events, clicked=drawn("1", "", "")), ("'clicked'", "holds none")),
    "a third of the rows gone": Defect(changed(rated, rating=drawn(1, 2, 3, 4, 5)), ("of 240 rows", "are left out")),
    "a value that spans lines": Defect(spanning, ("'title'", "1 value", "quote=null")),
    "an unused label": Defect(changed(events, purchased=drawn(0, 1)), ("'purchased'", "2 values", "label=purchased")),
    "an unused rating": Defect(changed(events, review_score=drawn(1, 2, 3)), ("'review_score'", "rating=review_score")),
    "an unused time": Defect(
        changed(without(events, "timestamp"), watch_date=drawn("mon", "tue", "wed")),
        ("'watch_date'", "3 values", "timestamp=watch_date"),
    ),
    "a setting without effect": Defect(
        without(events, "timestamp"), ("'min_rating' (4.0) has no effect", "rating="), {"min_rating": 4}
    ),
    "a setting of interactions": Defect(clicks, ("'min_interactions' (5)", "label"), {"min_interactions": 5}),
    "a setting of labels": Defect(events, ("'min_count' (3)", "label"), {"min_count": 3}),
    "items ascend and no time": Defect(sorted_by_item, ("ascend", "steps", "timestamp=COLUMN")),
    "a second label": Defect(changed(clicks, bought=drawn(0, 1, 0)), ("'bought' is named like", "other_labels=bought")),
    "a column named like a path": Defect(changed(clicks, **{"../kind": drawn("a", "b")}), ("'../kind': its name",)),
    "a column with a very long name": Defect(changed(clicks, **{"x" * 201: drawn(1, 2)}), ("of at most 200 bytes",)),
    "an outcome beside the label": Defect(outcome, ("'watched_s' (AUC 1.0000)", "context_features")),
    "a named outcome": Defect(outcome, ("'watched_s'", "AUC 1.0000"), {"context_features": ["watched_s", "size"]}),
    "quantities as times": Defect(
        changed(events, timestamp=drawn(1, 2, 3)), ("'timestamp'", "3 numbers from 1 to 3"), {"timestamp": "timestamp"}
    ),
    "a rating for no rating": Defect(changed(rated, rating=drawn(*[4, 5] * 5, 1, 2, 3, 99)), ("'rating'", "99")),
}


def told(columns: Columns, **asked: object) -> str:
    """What is said of a table: its refusal, or its warnings and the notes on what was inferred and left out."""
    with TemporaryDirectory() as place:
        (raw := Path(place, "a.csv")).write_text(csv_of(columns))
        try:
            made = run(Case("table", write_table, asked), raw, Path(place, "out"))
        except RecspecError as error:
            return str(error)
    return str([made.summary.get(name) for name in ("warnings", "inferred", "dropped")])


def ask(name: str, seed: int) -> None:
    defect = DEFECTS[name]
    said = told(defect.table(np.random.default_rng(seed)), **defect.asked)
    assert not [words for words in defect.told if words not in said], said


@pytest.mark.parametrize("name", DEFECTS)
def test_no_defect_passes_in_silence(name: str) -> None:
    ask(name, seed=0)


@pytest.mark.slow
@given(name=st.sampled_from([*DEFECTS]), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None, database=None, phases=[Phase.generate])
def test_no_defect_passes_in_silence_whatever_else_the_table_holds(name: str, seed: int) -> None:
    ask(name, seed)


@given(table=st.sampled_from([events, rated, clicks]), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6, deadline=None, database=None, phases=[Phase.generate])
def test_a_clean_table_has_no_warning(table: Callable[[Generator], Columns], seed: int) -> None:
    assert told(table(np.random.default_rng(seed))).startswith("[None, ")


def test_a_second_spelling_of_the_day_is_no_time_of_day() -> None:
    """As in the files of Amazon's reviews."""
    rng = np.random.default_rng(0)
    days = rng.integers(1, 29, NUM_ROWS)
    columns = without(events, "timestamp")(rng)
    columns["date"] = [f"2014-02-{day:02d}" for day in days]
    columns["reviewTime"] = [f"02 {day} 2014" for day in days]
    assert "time of day" not in told(columns)


# --- what is done instead --------------------------------------------------------------------------------------------


def labels_by_features(made: Prepared, split: str) -> dict[tuple[int, int], set[float]]:
    names = ["kind", "size", "label"]
    block = open_split(made.spec, split, names).read(0, NUM_ROWS * 4)
    found: dict[tuple[int, int], set[float]] = {}
    for kind, size, label in zip(*(np.asarray(block[name]).tolist() for name in names), strict=True):
        found.setdefault((kind, size), set()).add(label)
    return found


def test_rows_of_few_distinct_features_are_in_train_with_both_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {name: [f"{name}{each}" for each in rng.integers(3, size=960)] for name in ("kind", "size")}
    columns["label"] = texts(rng.integers(2, size=960))
    made = prepare_text(tmp_path, csv_of(columns))
    train = labels_by_features(made, "train")
    assert all(train[features] == {0.0, 1.0} for features in labels_by_features(made, "test"))
    assert "951 of 960 rows equal an earlier one in all columns but the label" in str(made.summary["inferred"])


def test_rows_written_twice_stay_in_one_split_whatever_their_label_is_called(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{each:.6f},{rng.choice(['no', 'yes'])}\n" for each in rng.normal(size=200)]
    made = prepare_text(tmp_path, "size,bought\n" + "".join(rows * 2), label="bought")
    held = [
        set(np.asarray(open_split(made.spec, split, ["size"]).read(0, 999)["size"]).tolist())
        for split in ("train", "valid", "test")
    ]
    assert sum(map(len, held)) == len(set.union(*held)) == 200
    assert "200 of 400 rows are copies of an earlier one" in str(made.summary["inferred"])


def test_an_event_that_is_written_twice_is_one_unless_repeats_are_kept(tmp_path: Path) -> None:
    rows = [f"u{user},i{(user + place) % 7},{1_700_000_000 + place}\n" for user in range(6) for place in (0, 1, 2, 2)]
    made = prepare_text(tmp_path, "user_id,item_id,timestamp\n" + "".join(rows))
    assert made.summary["interactions"] == 18
    assert "6 of 24 rows equal an earlier one in all that is used, 'timestamp' included" in str(made.summary["dropped"])
    assert not {*raw_pairs(made.spec, "valid")} & {*raw_pairs(made.spec, "test")}
    kept = prepare_text(tmp_path, out="b", repeats="keep")
    assert kept.summary["interactions"] == 24


def test_a_file_sorted_by_item_holds_out_any_item(tmp_path: Path) -> None:
    columns = sorted_by_item(np.random.default_rng(0))
    made = prepare_text(tmp_path, csv_of(columns))
    pairs = list(zip(columns["user_id"], columns["item_id"], strict=True))
    largest = {user: max(int(item) for other, item in pairs if other == user) for user, _ in pairs}
    held = raw_pairs(made.spec, "test")
    assert sum(int(str(item)) == largest[str(user)] for user, item in held) < len(held) / 2
    assert made.summary["order"] == "random by seed 1: the file is sorted by item"
    again = prepare_text(tmp_path, csv_of(columns), out="b")
    assert raw_pairs(again.spec, "test") == held


def test_scores_below_zero_are_no_interactions(tmp_path: Path) -> None:
    scores = np.random.default_rng(0).permutation(np.arange(-120, 120) + 0.5)
    columns = {**events(np.random.default_rng(1)), "rating": texts(scores)}
    made = prepare_text(tmp_path, csv_of(columns))
    assert made.summary["interactions"] == 120
    assert "240 values from -119.5 to 119.5, so those above 0 are interactions" in str(made.summary["inferred"])
    negative = csv_of({**columns, "rating": texts(-np.arange(1, 241))})
    with pytest.raises(RecspecError, match="240 values from -240 to -1, none above 0; set min_rating"):
        prepare_table(tmp_path / "b.csv", tmp_path / "b", negative)


def test_a_setting_that_needs_a_label_is_refused_without_one(tmp_path: Path) -> None:
    with pytest.raises(RecspecError, match="setting 'positive_from': no column is named like a label"):
        prepare_text(tmp_path, csv_of(rated(np.random.default_rng(0))), positive_from=4)


def test_ids_that_no_request_may_name_are_refused(tmp_path: Path) -> None:
    columns = events(np.random.default_rng(0))
    columns["item_id"][3] = "x" * 1_001
    with pytest.raises(RecspecError, match=r"line 5 is 'xx.*expected ids of at most 1,000 characters"):
        prepare_text(tmp_path, csv_of(columns))


def test_a_value_that_a_click_alone_has_is_told(tmp_path: Path) -> None:
    columns = clicks(np.random.default_rng(0))
    liked = [str(int(label == "1" and row % 2)) for row, label in enumerate(columns["label"])]
    made = prepare_text(tmp_path, csv_of({**columns, "is_like": liked}))
    assert f"'is_like': all {liked.count('1')} sampled rows with '1' have label 1" in str(made.summary["warnings"])


def test_one_value_or_none_of_users_is_kept(tmp_path: Path) -> None:
    users = "user_id,news\n" + "".join(f"{user},{'1.0' if user % 3 else ''}\n" for user in range(12))
    (tmp_path / "users.csv").write_text(users)
    text = csv_of(events(np.random.default_rng(0)))
    made = prepare_text(tmp_path, text, users="users.csv", user_features=["news"])
    held = pq.read_table(tmp_path / "out" / "users.parquet", columns=["news"]).column("news").to_pylist()
    assert sorted(held) == [0.0] * 4 + [1.0] * 8
    assert made.spec.role("user") == ("user_id", "news")


@pytest.mark.parametrize("asked", [{"group": "label"}, {"user": "label"}, {"context_features": ["size", "label"]}])
def test_the_label_is_nothing_else(asked: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(csv_of(clicks(np.random.default_rng(0))))
    with pytest.raises(ValueError, match="'label': a label; as a feature, an id or the group it would give itself"):
        prepare_text(tmp_path, label="label", **asked)


def test_thumbs_are_no_rating_beside_a_missing_one() -> None:
    said = told(changed(events, rating=drawn(-1, 1, 1))(np.random.default_rng(0)))
    assert "rows are rated" in said
    assert "means no rating" not in said


def test_few_active_users_and_few_respelled_ids_are_no_defect() -> None:
    rng = np.random.default_rng(0)
    users = np.concatenate([np.repeat(np.arange(5), 30), rng.integers(5, 30, NUM_ROWS - 150)])
    said = told({**events(rng), "user_id": texts(users), "item_id": [f"i{n}" for n in rng.integers(99, size=NUM_ROWS)]})
    assert said.startswith("[None, ")


def test_a_split_by_time_that_judges_few_users_is_told(tmp_path: Path) -> None:
    first = [f"old{user},{item},{day}" for day, user in enumerate(range(12)) for item in "abc"]
    late = [f"new{user},{item},{20 + user // 4}" for user in range(12) for item in "ab"]
    rows = "user_id,item_id,timestamp\n" + "\n".join([*first, *late, "old0,b,22", "new4,c,22"]) + "\n"
    told = str(prepare_text(tmp_path, rows, "time", split="time", valid=0.1, test=0.2).summary["warnings"])
    assert (
        "of 24 users, valid judges 0, and not the 4 without a row in train; test judges 1, and not the 5 without"
        in told
    )
    assert "(1 of them first seen in valid), whom models don't know: a hit rate of 20 % is known to within 80%" in told
    assert "--set split=leave_one_out judges nearly all" in told
    assert "warnings" not in prepare_text(tmp_path, rows, "last", split="leave_one_out").summary
