"""Your own table."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, SettingsError, SpecError
from recspec.base.summaries import shown_counts
from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare.columns import boundaries
from recspec.data.storage import open_split
from recspec.data.storage.check import check, count_rows
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from tests.dataset_cases import (
    CASES,
    TABLE_COLUMNS,
    Case,
    nothing,
    prepare_movielens,
    prepare_table,
    prepare_text,
    raw_pairs,
    run,
    write_latest,
    write_table,
)

# --- your own table ---------------------------------------------------------------------------------------------------


def test_three_columns_are_enough(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp\nann,x,3\nann,y,1\nann,z,2\nbob,y,9\n"
    result = prepare_text(tmp_path, text)
    assert raw_pairs(result.spec, "train") == [("ann", "y"), ("bob", "y")]
    assert result.summary["users_without_possible_negatives"] == 1  # ann met all three by the end of test
    assert result.summary["order"] == "by column 'timestamp'"


def test_without_a_timestamp_the_files_order_counts_and_is_said(tmp_path: Path) -> None:
    text = "user_id,item_id\nann,x\nann,y\nbob,z\nann,w\n"
    result = prepare_text(tmp_path, text)
    assert raw_pairs(result.spec, "test") == [("ann", "w")]
    assert result.summary["order"] == "as in the file: there is no timestamp"
    with pytest.raises(SettingsError, match="setting 'timestamp': no column 'time'; found 'user_id', 'item_id'"):
        prepare_text(tmp_path, out="b", timestamp="time")


def test_users_and_items_files_bring_titles_and_features(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("sku,name,price,tags\nb,Bread,2.5,food|fresh\na,Axe,30,tool\nq,Quill,1,\n")
    (tmp_path / "users.csv").write_text("who,age\n2,40\n1,20\n")
    text = "who,sku\n1,a\n1,b\n1,c\n2,b\n2,c\n3,a\n"
    settings = {
        "user": "who",
        "item": "sku",
        "items": "items.csv",
        "users": "users.csv",
        "title": "name",
        "user_features": ["age"],
        "item_features": ["price", "tags"],
        "lists": ["tags"],
    }
    spec = prepare_text(tmp_path, text, **settings).spec
    items = pq.read_table(tmp_path / "out" / "items.parquet").to_pydict()
    assert items["title"] == ["Axe", "Bread", None]
    assert items["tags"] == [[3], [1, 2], []]
    assert items["tags_text"] == ["tool", "food|fresh", None]
    assert items["price"] == pytest.approx([1.0, -1.0, 0.0])  # of 30 and 2.5; the missing one is the mean
    assert pq.read_table(tmp_path / "out" / "users.parquet").column("age").to_pylist() == [-1.0, 1.0, 0.0]
    assert spec.role("user") == ("user_id", "age")
    assert spec.role("item") == ("item_id", "price", "tags")
    check(spec)


def test_features_in_the_rows_are_the_latest_of_each_item(tmp_path: Path) -> None:
    text = "user_id,item_id,kind,place\n1,a,old,home\n2,a,new,work\n1,b,x,work\n1,c,x,home\n2,b,,home\n3,d,x,home\n"
    spec = prepare_text(tmp_path, text, item_features=["kind"], context_features=["place"]).spec
    items = pq.read_table(tmp_path / "out" / "items.parquet").column("kind").to_pylist()
    assert Encoders.load(tmp_path / "out").vocabulary_of("kind").decode(items).to_pylist() == ["new", None, None, "x"]
    assert spec.role("context") == ("place",)
    told = "'kind' of 2 of 4 items, such as 'b': they have no train row, and values of held-out rows are not used; "
    assert spec.metadata["summary"]["dropped"] == [f"{told}a file of items (items=FILE) can give them"]  # type: ignore[index]
    check(spec)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_byte_order_mark_is_recognised(encoding: str, tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp\nann,zoë,1\nann,b,2\nbob,b,1\n"
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    result = prepare_text(tmp_path)
    assert ("ann", "zoë") in raw_pairs(result.spec, "train")
    assert f"a.csv is read as {encoding}, because every second of its first bytes is 0" in result.summary["inferred"]  # type: ignore[operator]


def test_rows_taken_are_all_rows_also_those_with_invalid_values(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp\nann,a,1\nann,b,soon\nann,,3\nann,d,4\nbob,a,5\n"
    summary = prepare_text(tmp_path, text, invalid_values="drop").summary
    assert (summary["raw_rows"], summary["invalid_dropped"], summary["interactions"]) == (5, 2, 3)
    assert shown_counts(summary, {})["dropped: rows with invalid values"] == 2


def test_split_none_makes_every_row_train(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp\n" + "".join(f"{user},{item},{item}\n" for user in "ab" for item in range(4))
    result = prepare_text(tmp_path, text, split="none")
    assert result.spec.splits == ("train",)
    assert len(raw_pairs(result.spec, "train")) == 8
    assert "dropped" not in result.summary
    with pytest.raises(SpecError, match="there is no split test: split=none put every row into train, so nothing is"):
        result.spec.columns("test")
    with pytest.raises(SpecError, match=r"unknown split 'tran' \(did you mean 'train'\?\)"):
        result.spec.columns("tran")
    labelled = "user_id,item_id,clicked\n" + "".join(f"{n % 3},{n},{n % 2}\n" for n in range(9))
    spec = prepare_table(tmp_path / "b.csv", tmp_path / "clicks", labelled, label="clicked", split="none").spec
    assert (spec.splits, count_rows(spec)) == (("train",), {"train": 9})


@pytest.mark.parametrize("split", ["share", "time", "group"])
def test_labelled_rows_are_split_as_asked_and_kept_as_given(split: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / "raw")
    settings = {
        **TABLE_COLUMNS,
        "label": "clicked",
        "split": split,
        "valid": 0.2,
        "test": 0.2,
        "context_features": ["price"],
    }
    result = prepare_table(path, tmp_path / "out", **settings)
    given = pa.csv.read_csv(path)
    rows = result.summary["rows"]
    assert isinstance(rows, dict)
    assert sum(rows.values()) == 400
    assert result.summary["positives"] == sum(given.column("clicked").to_pylist())
    assert result.spec.group == "group"
    assert not result.spec.has_series
    groups = [
        set(np.asarray(open_split(result.spec, name, ["group"]).read(0, 400)["group"]).tolist())
        for name in result.spec.splits
    ]
    assert (split == "group") == groups[0].isdisjoint(groups[1] | groups[2])
    train = open_split(result.spec, "train", ["price"]).read(0, 400)["price"]
    assert np.mean(np.asarray(train)) == pytest.approx(0, abs=1e-6)  # fitted on train alone
    assert np.ptp(np.asarray(train)) == pytest.approx(4, abs=1e-5)  # a wider range than 4 deviations is taken as 4
    assert np.std(np.asarray(train)) < 1


def test_values_seen_only_after_train_or_too_seldom_are_unknown(tmp_path: Path) -> None:
    rows = [f"{user},{item},{time},1\n" for time, (user, item) in enumerate(["ax", "ax", "ay", "bx", "ax", "az"])]
    settings = {"label": "y", "split": "time", "valid": 0, "test": 0.2, "min_count": 2}
    spec = prepare_text(tmp_path, "user_id,item_id,timestamp,y\n" + "".join(rows), **settings).spec
    test = open_split(spec, "test", ["user_id", "item_id"]).read(0, 9)
    assert (test["user_id"].tolist(), test["item_id"].tolist()) == ([1], [0])  # type: ignore[union-attr]
    assert spec.splits == ("train", "test")
    check(spec)


def test_unknown_items_keep_the_features_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,kind\na,tool\nb,tool\nc,food\n")
    rows = [f"{item},{time},1\n" for time, item in enumerate("acacacab")]
    settings = {
        "user": None,
        "label": "y",
        "split": "time",
        "valid": 0,
        "test": 0.2,
        "items": "items.csv",
        "item_features": ["kind"],
    }
    spec = prepare_text(tmp_path, "item_id,timestamp,y\n" + "".join(rows), **settings).spec
    test = open_split(spec, "test", ["item_id", "kind"]).read(0, 9)
    assert (test["item_id"].tolist(), test["kind"].tolist()) == ([0], [2])  # type: ignore[union-attr]


def test_a_label_may_begin_at_a_number_of_stars(tmp_path: Path) -> None:
    text = "user_id,item_id,stars\n" + "".join(f"1,{item},{item % 5 + 1}\n" for item in range(50))
    with pytest.raises(DataError, match=r"column 'stars', the label: line 3 is '2', .*expected 0 or 1.*--set"):
        prepare_text(tmp_path, text, label="stars")
    assert prepare_text(tmp_path, label="stars", positive_from=4).summary["positives"] == 20


def test_rows_without_users_and_items_have_a_context_alone(tmp_path: Path) -> None:
    text = "age,job,rich\n" + "".join(f"{age},{'ab'[age % 2]},{age % 3 // 2}\n" for age in range(60))
    spec = prepare_text(tmp_path, text, user=None, item=None, label="rich", context_features=["age", "job"]).spec
    assert spec.inputs() == ("age", "job")
    assert not (tmp_path / "out" / "users.parquet").exists()
    check(spec)


def test_parquet_with_every_type_is_read(tmp_path: Path) -> None:
    rows = 40
    table = pa.table(
        {
            "user_id": pa.array([f"u{row % 5}" for row in range(rows)]).dictionary_encode(),
            "item_id": pa.array([row % 7 for row in range(rows)], pa.int16()),
            "timestamp": pa.array(range(rows), pa.timestamp("s")),
            "flag": [row % 2 == 0 for row in range(rows)],
            "amount": pa.array([None if row == 3 else row / 2 for row in range(rows)], pa.float32()),
            "tags": pa.array([["a", "b"][: row % 3] for row in range(rows)], pa.list_(pa.string())),
        }
    )
    for number in range(2):
        (tmp_path / "raw").mkdir(exist_ok=True)
        pq.write_table(table.slice(number * 20, 20), tmp_path / "raw" / f"{number}.parquet")
    spec = prepare_table(
        tmp_path / "raw", tmp_path / "out", context_features=["flag", "amount", "tags"], categorical=["flag"]
    ).spec
    assert spec.features["flag"].cardinality == 3
    assert spec.features["tags"].length == 2
    check(spec)


def test_every_column_that_is_nowhere_is_named(tmp_path: Path) -> None:
    settings = {"user": "uid", "item_features": ["prize", "item_id"], "numeric": ["colour"]}
    with pytest.raises(SettingsError) as caught:
        prepare_text(tmp_path, "user_id,item_id,price\n1,2,3\n", **settings)
    assert "setting 'user': no column 'uid' (did you mean 'user_id'?); found 'user_id', 'item_id', 'price'" in str(
        caught.value
    )
    assert "item feature 'prize' is no column (did you mean 'price'?)" in str(caught.value)
    assert "item feature 'item_id' is the item's id, which is a feature already; leave it out" in str(caught.value)
    assert "'colour' is set as numeric, categorical, list or vector, but is no feature" in str(caught.value)


@pytest.mark.parametrize("name", ["probability", "logit"])
def test_a_feature_with_the_name_of_an_output_is_refused(name: str, tmp_path: Path) -> None:
    text = f"user_id,item_id,label,{name},place\n" + "".join(
        f"u{at % 9},i{at},{at % 2},.{at},{at}\n" for at in range(40)
    )
    with pytest.raises(SettingsError) as caught:
        prepare_text(tmp_path, text)
    assert str(caught.value).endswith(
        f"settings: context feature '{name}': an output of every model has this name; rename the column, or leave it "
        "out by setting 'context_features'"
    )
    assert not (tmp_path / "out").exists()
    found = prepare_text(tmp_path, text, context_features=["place"]).spec
    assert name not in found.features


def test_a_file_that_names_an_item_twice_is_said(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,name\na,1\na,2\n")
    with pytest.raises(DataError, match=r"items\.csv: names 'a' more than once in column 'item_id'; expected one row"):
        prepare_text(tmp_path, "user_id,item_id\n1,a\n", items="items.csv")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "y", "split": "leave_one_out"}, "so goes without a label"),
        ({"split": "share", "label": None}, "split share needs a label"),
        ({"train_negatives": 5, "label": "y"}, "train_negatives: of rows without a label"),
        ({"min_history": 2, "negative_history": True}, "min_history and negative_history say how histories are made"),
        ({"user": None, "label": None}, "needs the columns of user and item"),
        ({"label": "y", "min_rating": 3}, "min_rating: of rows without a label"),
        ({"rating": None, "min_rating": 3}, "min_rating needs the column of the rating"),
        ({"label": "y", "positive": "a", "positive_from": 3}, "positive is for a label of words and positive_from for"),
        ({"splits": "fold", "split": "time"}, "splits are ready-made and split makes some"),
        ({"splits": {"test": "a.csv"}}, "splits 'test' lack train; name its file too"),
        ({"splits": {"train": "a.csv", "tset": "b.csv"}}, r"unknown split 'tset' .did you mean 'test'?"),
        (
            {"splits": {"train": "a.csv", "test": "b.csv"}, "rows": 5},
            "rows takes the first rows of all files, which are",
        ),
        ({"splits": {"train": "a.csv", "test": "b.csv"}, "files": ["a.csv"]}, "files and splits both name files"),
        ({"label": "y", "split": "time", "timestamp": None}, "split time needs the column of the timestamp"),
        ({"label": "y", "split": "group", "user": None}, "split group needs the column of the group"),
        ({"label": "y", "valid": 0.5, "test": 0.5}, "leave some for train"),
        ({"buckets": {"price": [2, 1]}}, r"the boundaries of 'price' must rise, found \[2.0, 1.0\]"),
        ({"crosses": [["a", "b"]], "label": None}, "crosses need a label; name its column, or leave crosses out"),
        ({"label": "y", "crosses": [["a"]]}, r"a cross is of two different features or more and named once, .*\['a'\]"),
    ],
)
def test_settings_that_do_not_go_together_are_said(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DATASETS["table"].Settings.model_validate(settings)


def test_files_of_several_kinds_in_a_folder_are_not_guessed_between(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for name in ("a.csv", "b.jsonl"):
        (tmp_path / "raw" / name).write_text("user_id,item_id\n1,a\n")
    with pytest.raises(DataError, match=r"expected files of one kind.* found 'a\.csv', 'b\.jsonl'; name those you"):
        prepare_table(tmp_path / "raw", tmp_path / "out")
    with pytest.raises(DataError, match="no such file or folder; expected CSV, JSON lines or Parquet"):
        prepare_table(tmp_path / "nowhere", tmp_path / "out")


def test_compressed_and_tab_separated_text_is_read(tmp_path: Path) -> None:
    text = "user_id,item_id\n1,a\n1,b\n2,c\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.tsv").write_text(text.replace(",", "\t"))
    for name in ("a.csv.gz", "a.tsv"):
        assert raw_pairs(prepare_table(tmp_path / name, tmp_path / f"out {name}").spec, "test") == [("1", "b")]


# --- buckets, hashes and crosses of a table ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "counts", "num_buckets", "expected"),
    [
        ([1, 2, 3, 4], [1, 1, 1, 1], 2, (3.0,)),
        ([4, 3, 2, 1], [1, 1, 1, 1], 4, (2.0, 3.0, 4.0)),
        ([0, 5, 6, 7], [90, 2, 2, 2], 4, (5.0, 6.0, 7.0)),  # zeros fill one bucket, three are left
        ([1, 2, 3], [1, 98, 1], 3, (2.0, 3.0)),
        ([7], [5], 10, ()),
        ([], [], 10, ()),
    ],
)
def test_buckets_are_about_equally_full_and_none_is_empty(
    values: list[int], counts: list[int], num_buckets: int, expected: tuple[float, ...]
) -> None:
    assert boundaries(np.array(values, np.int64), np.array(counts, np.int64), num_buckets) == expected


def test_a_table_hashes_cuts_and_crosses_by_setting(tmp_path: Path) -> None:
    case = CASES["table-hashed"]
    raw = case.write(tmp_path / "raw")
    spec = run(case, raw, tmp_path / "out").spec
    encoders = Encoders.load(spec.folder)
    kinds = {name: encoder.kind for name, encoder in encoders.encoders.items()}
    assert kinds == {
        "user_id": "vocabulary",
        "item_id": "vocabulary",
        "tags": "hash",
        "price": "scale",
        "price_bucket": "bucket",
        "device": "hash",
        "device_x_price_bucket": "cross",
        "who_x_what": "cross",
    }
    assert spec.role("context") == ("price", "price_bucket", "device", "device_x_price_bucket", "who_x_what")
    assert spec.features["tags"].length == 2
    rows = pyarrow.csv.read_csv(raw)
    train = open_split(spec, "train").read(0, 10**9)
    bucket = np.bincount(np.asarray(train["price_bucket"]), minlength=5)
    assert bucket[0] == 0
    assert bucket[1:].min() > 0.9 * bucket[1:].max()
    served = encoders.encode(rows, ["device_x_price_bucket", "who_x_what", "user_id", "price_bucket"])
    prepared_rows = {
        (int(user), int(at), int(pair))
        for split in spec.splits
        for columns in [open_split(spec, split).read(0, 10**9)]
        for user, at, pair in zip(*(np.asarray(columns[n]) for n in ("user_id", "device_x_price_bucket", "who_x_what")))  # noqa: B905
    }
    assert prepared_rows == set(
        zip(*(np.asarray(served[name]).tolist() for name in ("user_id", "device_x_price_bucket", "who_x_what")))  # noqa: B905
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hashed": {"devise": 10}}, "setting 'hashed': unknown feature 'devise'"),
        ({"buckets": {"device": 3}}, "feature 'device' is no number, so it can't be cut into buckets; set it as num"),
        ({"buckets": {"cost": 3}}, "setting 'buckets': unknown feature 'cost'"),
        ({"crosses": [["device", "prise"]]}, r"setting 'crosses': unknown feature 'prise'"),
        ({"crosses": [["device", "price"]]}, "'price' is a number, which can't be crossed; cross its bucket"),
        ({"crosses": [["device", "tags"]]}, "'tags' is a list, which can't be crossed; leave it out"),
        ({"hashed": {"what": 9}}, "setting 'hashed': 'what' is the item's id, which has a vocabulary; leave it out"),
        ({"buckets": {"who": 9}}, "setting 'buckets': 'who' is the user's id, which has a vocabulary; leave it out"),
        ({"hashed": {"when": 9}}, "setting 'hashed': 'when' is a column, but no feature; add it to context_features"),
        ({"buckets": {"when": 9}}, "setting 'buckets': 'when' is a column, but no feature; add it to context_features"),
        ({"crosses": [["device", "when"]]}, "'crosses': 'when' is a column, but no feature; add it to context_feat"),
    ],
)
def test_columns_that_can_not_be_hashed_cut_or_crossed_are_named(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    case = CASES["table-clicks"]
    with pytest.raises(SettingsError, match=message):
        run(case, case.write(tmp_path / "raw"), tmp_path / "out", settings=settings)


@pytest.mark.parametrize("name", ["table-interactions", "table-clicks"])
def test_a_table_brings_its_cut_offs(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    raw = case.write(tmp_path / "raw")
    assert "cut_offs" not in run(case, raw, tmp_path / "without").spec.metadata
    asked = run(case, raw, tmp_path / "out", settings={**case.settings, "cut_offs": [5, 12]}).spec
    assert asked.metadata["cut_offs"] == [5, 12]
    assert FeatureSpec.load(tmp_path / "out").metadata["cut_offs"] == [5, 12]
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        DATASETS["table"].Settings.model_validate({"cut_offs": [0]})


def test_the_real_part_of_outbrain_goes_through_prepare_table(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {
        "label": "clicked",
        "user": None,
        "item": "ad_id",
        "timestamp": None,
        "group": "display_id",
        "split": "group",
        "context_features": ["document_id", "platform", "geo_location", "day"],
        "categorical": ["day"],
        "hashed": {"document_id": 1000, "geo_location": 2000},
        "buckets": {"platform": [2, 3]},
        "crosses": [["platform_bucket", "geo_location"], ["ad_id", "platform_bucket"]],
    }
    raw = real_data("outbrain") / "clicks_events_first1959displays.csv"
    result = run(Case("table", nothing, settings), raw, tmp_path / "out")
    assert sum(result.summary["rows"].values()) == 9_999  # type: ignore[attr-defined]
    assert result.summary["positives"] == 1_959
    check(result.spec)
    groups = [
        set(np.asarray(open_split(result.spec, split, ["group"]).read(0, 10**9)["group"]))
        for split in result.spec.splits
    ]
    assert len(set().union(*groups)) == 1_959 == sum(map(len, groups))


# --- columns that are named alike, and what a preparation says of itself ----------------------------------------------
ALIKE = ("label", "group", "timestamp", "split", "series", "title", "channel", "item_id_of_file", "count", "a b", "ü|x")
"""Columns that rows, users and items all have; recspec and its engines use some of these names themselves."""


@pytest.mark.parametrize("labelled", [True, False])
def test_any_column_name_may_stand_in_rows_users_and_items_at_once(labelled: bool, tmp_path: Path) -> None:
    alike, users, items = list(ALIKE), ["u1", "u2", "u3"], ["i1", "i2", "i3", "i4", "i5"]
    rows = [(user, item) for user in users for item in items[:4]]
    header = ",".join(["who", "what", "when", "clicked", "Price", *alike])
    lines = [
        f"{user},{item},{place},{place % 2},1.5,{','.join(f'{n}-r{place % 3}' for n in alike)}"
        for place, (user, item) in enumerate(rows)
    ]
    (tmp_path / "rows.csv").write_text("\n".join([header, *lines]) + "\n")
    for role, key, ids in (("users", "who", users), ("items", "what", items)):
        table = [",".join([key, "price", *alike]), *(f"{i},cheap,{','.join(f'{n}-{i}' for n in alike)}" for i in ids)]
        (tmp_path / f"{role}.csv").write_text("\n".join(table) + "\n")
    features = {f"{role}_features": [*alike, *(["price"] if role == "item" else [])] for role in ("user", "item")}
    settings = {
        "user": "who",
        "item": "what",
        "timestamp": "when",
        "users": "users.csv",
        "items": "items.csv",
        **features,
        "context_features": alike,
        "split": "time" if labelled else None,
        **({"label": "clicked"} if labelled else {}),
    }
    spec = prepare_table(tmp_path / "rows.csv", tmp_path / "out", None, **settings).spec
    check(spec)
    encoders = Encoders.load(spec.folder)
    train = open_split(spec, "train").read(0, 10**9)
    ids = encoders.vocabulary_of("item_id").decode(np.asarray(train["item_id"])).to_pylist()
    owners = encoders.vocabulary_of("user_id").decode(np.asarray(train["user_id"])).to_pylist()
    for name in alike:
        for role, wanted in (("item", ids), ("user", owners)):
            made = f"{name}_{role}"
            values = encoders.vocabulary_of(made).decode(np.asarray(train[made])).to_pylist()
            assert values == [f"{name}-{one}" for one in wanted]
        context = next(n for n in spec.role("context") if n in (name, f"{name}_context"))
        told = encoders.vocabulary_of(context).decode(np.asarray(train[context])).to_pylist()
        assert {str(value)[: len(name) + 2] for value in told} == {f"{name}-r"}
        given = encoders.encode(pa.table({name: ["x", f"{name}-r0"]}), [context])[context]
        assert np.asarray(given).tolist() == [0, 1]  # raw rows keep their columns' plain names
    assert "price_item" in spec.role("item")
    shown = pq.read_table(spec.folder / "items.parquet").column_names
    assert "title_text" in shown
    assert len({name.lower() for name in shown}) == len(shown)
    changed = spec.metadata["summary"]["changed"]  # type: ignore[index]
    assert (
        "item feature 'channel_item' is the column 'channel' of items.csv, because the plain name is another column's"
    ) in changed
    assert any(note.startswith("context feature 'label_context' is the column 'label' of the rows") for note in changed)


def test_settings_of_a_renamed_feature_take_its_plain_name_or_its_own(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,tag,size\n1,a|b,1\n2,b,2\n")
    text = "user_id,item_id,tag,size,clicked\nu,1,x,9,1\nu,2,y,8,0\nv,1,x,7,0\nv,2,x,9,1\n"
    asked = {
        "items": "items.csv",
        "item_features": ["tag", "size_item"],
        "context_features": ["tag"],
        "lists": ["tag_item"],
        "buckets": {"size": [2]},
        "label": "clicked",
        "valid": 0,
        "test": 0.1,
    }
    spec = prepare_text(tmp_path, text, **asked).spec
    assert spec.role("item") == ("item_id", "tag_item", "size_item", "size_item_bucket")
    assert spec.features["tag_item"].is_list
    assert not spec.features["tag"].is_list


def test_a_column_of_the_rows_is_one_feature_alone(tmp_path: Path) -> None:
    asked = {"user_features": ["kind"], "item_features": ["kind", "kind"]}
    with pytest.raises(SettingsError) as caught:
        prepare_text(tmp_path, "user_id,item_id,kind\nu,1,x\n", **asked)
    assert caught.value.problems == (
        "feature 'kind' is named as user feature and as item feature; leave one",
        "item feature 'kind' is named twice",
    )


@pytest.mark.parametrize(
    ("features", "problem"),
    [
        ({"context_features": ["row"]}, "context feature 'row' is no column; found 'user_id', 'item_id', 'kind'"),
        ({"item_features": ["row"]}, "item feature 'row' is no column; found 'user_id', 'item_id', 'kind', 'size'"),
        ({"item_features": ["size_item"]}, "item feature 'size_item' is no column (did you mean 'size'?)"),
        (
            {"item_features": ["kind", "kind_item"]},
            "feature 'kind' is named as item feature and as item feature; leave",
        ),
    ],
)
def test_a_name_stands_for_one_column_of_the_files(
    features: dict[str, list[str]], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "items.csv").write_text("item_id,kind,size\n1,a,2\n")
    with pytest.raises(SettingsError) as caught:
        prepare_text(tmp_path, "user_id,item_id,kind\nu,1,x\n", items="items.csv", **features)
    assert problem in str(caught.value)


def test_a_model_of_columns_named_alike_trains_recommends_and_predicts(tmp_path: Path) -> None:
    from recspec.inference.predictor import Predictor
    from recspec.models import MODELS
    from recspec.training.loop import train
    from recspec.training.settings import TrainSettings

    (tmp_path / "items.csv").write_text("item_id,title,channel\n" + "".join(f"{i},T{i},c{i % 2}\n" for i in range(9)))
    lines = [f"u{u},{i},{10 * u + i},{'web' if i % 2 else 'app'}\n" for u in range(5) for i in range(u, u + 5)]
    text = "user_id,item_id,timestamp,channel\n" + "".join(lines)
    how = TrainSettings(epochs=1, batch_size=20, tensorboard=False)
    asked: Sequence[dict[str, object]] = ({"context_features": ["channel"]}, {"item_features": ["channel"]}, {})
    for number, features in enumerate(asked):
        settings = {"items": "items.csv", **features}
        spec = prepare_table(tmp_path / "a.csv", tmp_path / f"out{number}", text, **settings).spec
        model = "dlrm" if features else "neumf"
        train(model, spec, tmp_path / f"run{number}", settings=how, model_settings=MODELS[model].Settings())
        predictor = Predictor.open(tmp_path / f"run{number}")
        rows = pa.table({"user_id": ["u1"], "item_id": ["3"], "channel": ["web"]})
        assert np.isfinite(predictor.predict(rows)[0][0])
        assert len(predictor.items.titles_of(np.array([1, 2])).drop_null()) == 2
        if "context_features" not in features:  # whose value no request for recommendations gives
            found = predictor.recommend(["u1"], k=2)[0].items
            assert [item.title for item in found] == [f"T{item.item}" for item in found]
            assert len(found) == 2


def test_the_latest_value_is_the_latest_in_time_and_of_train(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp,mood\nu,1,30,late\nu,2,10,early\nu,3,50,test\nu,4,40,valid\nu,5,20,middle\n"
    asked = {"user_features": ["mood"], "num_negatives": 0}
    spec = prepare_text(tmp_path, text, **asked).spec
    moods = Encoders.load(spec.folder).vocabulary_of("mood").values.to_pylist()
    assert moods == ["late"]
    told = "user feature 'mood' varies within 1 of 1 users, such as user 'u' ('late' and 'early'); every row has its "
    told += "user's latest value of train; if the value belongs to the event, name the column in context_features"
    assert spec.metadata["summary"]["changed"] == [told]  # type: ignore[index]
    labelled = text.replace("mood\n", "mood,clicked\n").replace("\nu", ",1\nu").replace(",1\nu,1,30", "\nu,1,30", 1)
    labelled = labelled.rstrip("\n") + ",0\n"
    asked = {"user_features": ["mood"], "label": "clicked", "split": "time", "valid": 0.2, "test": 0.2}
    spec = prepare_table(tmp_path / "b.csv", tmp_path / "b", labelled, **asked).spec
    held = pq.read_table(spec.folder / "users.parquet").column("mood").to_pylist()
    assert Encoders.load(spec.folder).vocabulary_of("mood").decode(held).to_pylist() == ["late"]
    (note,) = [note for note in spec.metadata["summary"]["changed"] if "varies" in note]  # type: ignore[index]
    assert "rows keep their own; what a request leaves out is taken from users.parquet" in note


def test_items_that_only_the_rows_or_only_the_file_name_are_counted(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,title\na,A\nq,Q\nz,Z\n,Nobody\n")
    text = "user_id,item_id\nu,a\nu,b\nv,a\nv,c\n"
    summary = prepare_text(tmp_path, text, items="items.csv").summary
    assert summary["dropped"] == [
        "1 row of items.csv without 'item_id'",
        "2 of 3 items in items.csv occur in no row, such as 'q'; they have no id, so they are never recommended",
        "the split valid: it has no row",
    ]
    told = "2 of 3 items of the rows are not in items.csv, such as 'b'; nothing of the file is known of them: add them "
    assert summary["changed"] == [f"{told}to it"]
    (tmp_path / "items.csv").write_text("item_id,title\nA-1,A\nA-2,Q\n")
    with pytest.raises(DataError) as caught:
        prepare_text(tmp_path, text, out="b", items="items.csv")
    assert str(caught.value) == (
        "items.csv: describes none of the 3 items of the rows; its column 'item_id' holds 'A-1', 'A-2', the rows' ids "
        "are such as 'a', 'b', 'c'; name the file that fits, or leave it out"
    )


def test_items_that_only_the_file_names_are_kept_if_asked(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,title,kind\na,A,x\nq,Q,y\nz,Z,x\n,Nobody,x\n")
    text = "user_id,item_id\nu,a\nu,b\nv,a\nv,c\n"
    asked = {"items": "items.csv", "item_features": ["kind"]}
    made = prepare_text(tmp_path, text, **asked, unseen_items=True)
    told = "2 of 3 items in items.csv have no interaction, such as 'q'; they are kept for models that score items from "
    assert f"{told}their features" in made.summary["changed"]
    assert not [note for note in made.summary["dropped"] if "occur in no row" in note]
    spec = made.spec
    assert spec.features["item_id"].cardinality == 1 + 5
    assert Encoders.load(spec.folder).vocabulary_of("item_id").values.to_pylist() == ["a", "b", "c", "q", "z"]
    assert pq.read_table(spec.folder / "items.parquet").column("title").to_pylist() == ["A", None, None, "Q", "Z"]
    (tmp_path / "items.csv").write_text("item_id,title,kind\nA-1,A,x\nA-2,Q,x\n")
    with pytest.raises(DataError, match="describes none of the 3 items of the rows"):
        prepare_text(tmp_path, text, out="b", **asked, unseen_items=True)
    with pytest.raises(ValueError, match="unseen_items keeps items of the items' file; give it"):
        prepare_text(tmp_path, text, out="c", unseen_items=True)


def test_what_is_dropped_is_told_with_a_count_and_an_example(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    summary = prepare_movielens(raw, tmp_path / "out", min_rating=2, min_interactions=3).summary
    repeat = "1 of 9 rows repeat an earlier one of the same user and item, such as user '9' and item '10'"
    everything = "users who acted on every item, so that no candidate is left beside them"
    assert summary["dropped"] == [
        "2 of 11 rows with 'rating' below 2 or without one, such as that of user '8' and item '50' (min_rating)",
        "2 of 6 items in movies.csv occur in no row, such as '50'; they have no id, so they are never recommended",
        f"{repeat}; the earliest counts",
        "2 rows of users with fewer than 3 items, such as user '7' (min_interactions)",
        f"1 held-out rows of {everything}, such as one of user '9'",  # the fourth item too, with one star
    ]
    assert json.loads((tmp_path / "out" / "prepare.json").read_text())["summary"]["dropped"] == summary["dropped"]


def test_columns_of_users_that_nothing_names_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text(
        "user_id,name,email,country,about\na,Ann Example,ann@example.org,de,tea\n"
        "b,Bob Example,bob@example.org,fr,mugs\n"
    )
    text = "user_id,item_id,timestamp\na,x,1\na,y,2\nb,x,1\nb,z,2\n"
    types = {"email": {"type": "text"}, "name": {"type": "text"}}  # what is declared may be left out
    given: dict[str, object] = {"users": "people.csv", "user_features": ["country"], "types": types}
    made = prepare_text(tmp_path, text, **given)
    assert pq.read_schema(made.spec.folder / "users.parquet").names == ["user_id", "country", "country_text"]
    assert "country" in pq.read_schema(made.spec.folder / "raw" / "users.parquet").names
    told = "columns 'name', 'email', 'about' of people.csv: no setting names them, so they are not copied "
    assert (
        f"{told}(user_features=[...] takes them as features, user_columns=[...] keeps them for display)"
        in (made.summary["dropped"])
    )
    held = b"".join(path.read_bytes() for path in made.spec.folder.rglob("*") if path.is_file())
    assert b"Example" not in held
    assert b"example.org" not in held
    kept = prepare_text(tmp_path, text, out="kept", **given, user_columns=["name"])
    names = pq.read_table(kept.spec.folder / "users.parquet").column("name").to_pylist()
    assert names == ["Ann Example", "Bob Example"]
    assert "columns 'email', 'about' of people.csv" in " ".join(kept.summary["dropped"])  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"setting 'user_columns': unknown column 'nam' \(did you mean 'name'\?\)"):
        prepare_text(tmp_path, text, out="no", **given, user_columns=["nam"])
    with pytest.raises(ValueError, match="user_columns are of the users' file; give it"):
        prepare_text(tmp_path, text, out="no", user_columns=["name"])
