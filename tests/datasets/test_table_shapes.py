"""Your own table as people have it: any separator, without a header, without users, a sequence a line, in splits."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recspec.base.config import parse_assignments
from recspec.base.errors import DataError, RecspecError, SettingsError
from recspec.data.encoding import ScaleEncoder
from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare.prepared import Prepared
from recspec.data.storage import open_split
from recspec.data.storage.check import check
from recspec.datasets import DATASETS
from recspec.training.defaults import task_of
from tests.dataset_cases import Case, bytes_of, prepare_table, prepare_text, raw_pairs, run, write_table

TIMES = [1_700_000_000 + 60 * row for row in range(12)]
EVENTS = [(f"u{row % 3}", f"i{row % 5}", TIMES[row]) for row in range(12)]


def pairs_of(result: Prepared) -> dict[str, list[tuple[object, object]]]:
    """User and item of the positives of each split."""
    return {split: sorted(raw_pairs(result.spec, split)) for split in result.spec.splits}  # type: ignore[type-var]


def inferred(result: Prepared) -> str:
    return str(result.summary.get("inferred"))


def test_the_files_of_a_folder_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "raw" / "old").mkdir(parents=True)
    for name in ("a.csv", "b.csv", "README.md", "plan.xlsx"):
        (tmp_path / "raw" / name).write_text("user_id,item_id\nu1,i1\nu1,i2\nu1,i3\nu2,i1\n")
    result = prepare_table(tmp_path / "raw", tmp_path / "out", num_negatives=0)
    assert "'README.md', 'old/', 'plan.xlsx': not read, because they are no files of rows" in str(
        result.summary["dropped"]
    ).replace('"', "")
    named = prepare_table(tmp_path / "raw", tmp_path / "b", files=["b.csv"], num_negatives=0)
    assert "'README.md', 'a.csv', 'old/', 'plan.xlsx': not read, because setting 'files' names others" in str(
        named.summary["dropped"]
    ).replace("\\", "")


# --- separators, headers, names --------------------------------------------------------------------------------------

HEADER = ("user_id", "item_id", "timestamp")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The pairs of the events in a file of commas with a header."""
    folder = tmp_path_factory.mktemp("expected")
    text = "".join(",".join(map(str, row)) + "\n" for row in (HEADER, *EVENTS))
    return pairs_of(prepare_table(folder / "e.csv", folder / "e", text))


@pytest.mark.parametrize(
    ("separator", "header"),
    [(mark, False) for mark in (",", "\t", "::", ";", "|", " ", "   ")] + [("\t", True), ("   ", True)],
)
def test_three_columns_are_read_whatever_separates_them_with_or_without_a_header(
    separator: str, header: bool, expected: object, tmp_path: Path
) -> None:
    rows = [separator.join(map(str, row)) + "\n" for row in EVENTS]
    head = separator.join(HEADER) + "\n" if header else ""
    result = prepare_table(tmp_path / "a.dat", tmp_path / "out", head + "".join(rows))
    assert pairs_of(result) == expected
    assert ("the first line is data, not a header" in inferred(result)) == (not header)
    assert result.summary["order"] == "by column 'timestamp'"


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        *((text, "\t") for text in ("\\t", "tab", "\t", "'\\t'", '"\\t"', "'\t'")),
        *(("space", " "), (" ", " "), ("comma", ","), ("::", "::"), ("\\|", "|")),
    ],
)
def test_separators_have_names_and_a_tab_is_one_however_a_shell_gives_it(name: str, mark: str) -> None:
    values = parse_assignments([f"separator={name}"])
    assert DATASETS["table"].Settings.model_validate(values).separator == mark  # type: ignore[attr-defined]


def test_columns_without_a_header_are_named_by_position(tmp_path: Path) -> None:
    text = "x,ann,3\ny,ann,1\nz,ann,2\nw,bob,1\n"
    result = prepare_text(tmp_path, text, columns=["sku", "customer", "when"], item="sku", timestamp="when")
    assert raw_pairs(result.spec, "test") == [("ann", "x")]
    assert "the user is column 'customer', because of its name" in inferred(result)
    named = prepare_table(
        tmp_path / "b.csv",
        tmp_path / "b",
        "SKU,Customer,When\n" + text,
        columns=["sku", "customer", "when"],
        item="sku",
        timestamp="when",
    )
    assert pairs_of(named) == pairs_of(result)  # its first line is the header
    with pytest.raises(SettingsError, match=r"names 2 columns, and the first line of .*a\.csv has 3, separated by ','"):
        prepare_text(tmp_path, out="c", columns=["sku", "customer"])
    pq.write_table(pa.table({"user_id": [1], "item_id": [2]}), tmp_path / "a.parquet")
    with pytest.raises(SettingsError, match=r"setting 'columns': .*has column names of its own"):
        prepare_table(tmp_path / "a.parquet", tmp_path / "c", columns=["user", "item"])


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("1,2", "'user_id', 'item_id'"),
        ("1,2,5", "'user_id', 'item_id', 'rating'"),
        ("1,2,1700000000", "'user_id', 'item_id', 'timestamp'"),
        ("a,b,2024-01-31", "'user_id', 'item_id', 'timestamp'"),
        ("1,2,4.5,1700000000", "'user_id', 'item_id', 'rating', 'timestamp'"),
        ("1,2,2024-01-31 10:00:00,4.5", "'user_id', 'item_id', 'timestamp', 'rating'"),
        ("1,2,5000", "'user_id', 'item_id', 'column_3'"),
    ],
)
def test_columns_by_position_are_told(line: str, names: str, tmp_path: Path) -> None:
    result = prepare_text(tmp_path, f"{line}\n{line}\n")
    assert f"columns are taken as {names} (columns=[" in inferred(result)


def test_empty_and_repeated_names_of_columns_are_made_different(tmp_path: Path) -> None:
    text = ",user_id,item_id,Price,price,price,row,__row__,column_1\n" + "".join(
        f"0,u{row % 3},i{row % 4},{row},{row % 2},2,{row % 5},7,c{row % 2}\n" for row in range(20)
    )
    result = prepare_text(tmp_path, text, context_features=["Price", "price_2", "row", "column_1"])
    assert result.spec.role("context") == ("Price", "price_2", "row", "column_1")
    changed = str(result.summary["changed"])
    assert "column 1 of a.csv has no name; it is 'column_1_2' here" in changed
    assert "column 5 of a.csv is named 'price', as another one or as a column of ours; it is 'price_2' here" in changed
    assert "column 6 of a.csv is named 'price', as another one or as a column of ours; it is 'price_3' here" in changed
    assert "'__row___2'" in changed
    check(result.spec)


NAME = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=8)
OURS = ("__row__", "__split__", "_rows", "split", "group", "series", "_first_row", "timestamp")
ODD = (*OURS, "row", "count", "index", "label (count)", "", "a b", "%", "x.y")
HOSTILE = st.one_of(NAME, st.sampled_from(ODD))


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(HOSTILE, min_size=1, max_size=5), st.sampled_from([",", "\t", ";", "|"]), st.booleans())
def test_any_names_of_columns_and_separators_are_read(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], separator: str, labelled: bool
) -> None:

    folder = tmp_path_factory.mktemp("names")
    with (folder / "a.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator, quoting=csv.QUOTE_ALL)
        writer.writerow(["WHO", "WHAT", "y", *names])
        writer.writerows([f"u{row % 3}", f"i{row % 4}", row % 2, *(f"v{row % 3}" for _ in names)] for row in range(24))
    asked: dict[str, object] = {
        "user": "WHO",
        "item": "WHAT",
        "label": "y" if labelled else None,
        "timestamp": None,
        "separator": separator,
        "splits": None,
        "split": None,
    }
    spec = prepare_text(folder, **asked).spec
    check(spec)
    if labelled:
        assert len(spec.inputs()) == 2 + len(names)


def test_a_table_by_position_with_a_header_in_lines_and_in_parquet_is_one_dataset(tmp_path: Path) -> None:
    rows = [(*event, 1 + place % 5) for place, event in enumerate(EVENTS)]
    names = ["user_id", "item_id", "timestamp", "rating"]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    (tmp_path / "position.csv").write_text(text)
    (tmp_path / "header.csv").write_text(",".join(names) + "\n" + text)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    pq.write_table(table, tmp_path / "table.parquet")
    made = {}
    for name in ("position.csv", "header.csv", "lines.jsonl", "table.parquet"):
        result = prepare_table(tmp_path / name, tmp_path / f"out {name}")
        assert "rows are rated: 'rating' holds 1 to 5, and ratings from 4 on" in inferred(result)
        made[name] = {file: held for file, held in bytes_of(result.spec.folder).items() if file != "feature_spec.yaml"}
        assert task_of(result.spec) == "interactions"
    assert all(held == made["header.csv"] for held in made.values())


# --- labelled rows ---------------------------------------------------------------------------------------------------


def labelled_text(rows: int = 200, **columns: object) -> str:
    rng = np.random.default_rng(1)
    names = ["age", "job", "city_id", "paid", "y", *columns]
    held = [
        [
            rng.integers(18, 60),
            "abc"[rng.integers(3)],
            rng.integers(4),
            round(rng.normal(), 2),
            rng.integers(2),
            *(columns[name](row) for name in columns),
        ]
        for row in range(rows)
    ]  # type: ignore[operator]
    return ",".join(names) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in held)


def test_rows_with_a_label_need_neither_user_nor_item(tmp_path: Path) -> None:
    result = prepare_text(tmp_path, labelled_text(2000), label="y")
    spec = result.spec
    assert spec.role("user") == spec.role("item") == ()
    assert spec.role("context") == ("age", "age_bucket", "job", "city_id", "paid", "paid_bucket")
    assert spec.features["city_id"].is_categorical
    assert not spec.features["age"].is_categorical
    assert spec.features["age_bucket"].cardinality == len(range(18, 60)) + 1
    assert (task_of(spec), spec.metadata["split"]) == ("clicks", "share")
    told = inferred(result)
    assert "there is no user: no column is named like one (user=COLUMN names it)" in told
    assert "random rows are valid and test, by seed 1" in told
    check(spec)


def test_columns_that_number_or_name_rows_or_never_change_are_no_features(tmp_path: Path) -> None:
    text = labelled_text(
        60,
        number=lambda row: row + 1,
        name=lambda row: f"x{row}",
        same=lambda _: 7,
        day=lambda row: f"2024-01-{1 + row % 28:02d}",
    )
    result = prepare_text(tmp_path, text, label="y")
    assert result.spec.role("context") == ("age", "job", "city_id", "paid")
    dropped = str(result.summary["dropped"])
    assert "columns 'number', 'name': they number or name each row" in dropped
    assert "columns 'same': they hold one value in all rows" in dropped
    assert "columns 'day': they look like times, of which models make no feature" in dropped
    told = "no column is taken as the time ('day' may be the time, or dates of something else; timestamp=day makes"
    assert told in inferred(result)
    asked = prepare_text(tmp_path, out="b", label="y", context_features=["number", "same"])
    assert asked.spec.role("context") == ("number", "same")


def labelled_at(tmp_path: Path, values: Sequence[str], *columns: str, **settings: object) -> Prepared:
    """A dataset of labelled rows with dates in the column `at`, of ten users and seven items if these are columns."""
    row = {"user_id": lambda place: f"u{place % 10}", "item_id": lambda place: f"i{place % 7}"}
    lines = [
        ",".join([*(row[name](place) for name in columns), str(place % 2), str(place % 3), at])
        for place, at in enumerate(values)
    ]
    text = "\n".join([",".join([*columns, "label", "kind", "at"]), *lines]) + "\n"
    tmp_path.mkdir(exist_ok=True)
    return prepare_text(tmp_path, text, **settings)


DATES = [f"2024-{1 + place // 28:02d}-{1 + place % 28:02d}" for place in range(140)]
CLOCKS = [f"2024-03-{1 + place // 24:02d}T{place % 24:02d}:30:00" for place in range(140)]


@pytest.mark.parametrize(("values", "columns"), [(DATES, ("user_id",)), (DATES, ("item_id",)), (CLOCKS, ())])
def test_the_only_column_of_dates_splits_labelled_rows_too(
    values: list[str], columns: tuple[str, ...], tmp_path: Path
) -> None:
    result = labelled_at(tmp_path, values, *columns)
    assert result.summary["split"] == "time"
    assert "the time is column 'at', because no other one holds times of the rows (timestamp=null" in inferred(result)
    assert "dropped" not in result.summary
    held = {split: open_split(result.spec, split).num_rows for split in ("train", "valid", "test")}
    assert held == {"train": 112, "valid": 14, "test": 14}
    times = np.asarray(open_split(result.spec, "test").read(0, 14)["timestamp"])
    assert times.min() > np.asarray(open_split(result.spec, "train").read(0, 112)["timestamp"]).max()


BIRTHDAYS = [f"19{60 + place % 10}-05-01 00:00:00" for place in range(140)]


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        (BIRTHDAYS, ("user_id", "item_id")),  # the same in all rows of a user
        (BIRTHDAYS, ()),  # no clock but midnight, and no user or item within which they differ
        (["", *CLOCKS[1:]], ("user_id",)),  # a row has none
        (["2024-03-01T10:30:00", "2024-03-02T10:30:00"] * 70, ()),  # too few to cut at
    ],
)
def test_dates_that_may_be_of_something_else_split_no_labelled_rows(
    values: list[str], columns: tuple[str, ...], tmp_path: Path
) -> None:
    result = labelled_at(tmp_path, values, *columns)
    assert result.summary["split"] == "share"
    assert (
        "random rows are valid and test, by seed 1: no column is taken as the time ('at' may be the time, or dates of "
        "something else; timestamp=at makes the latest rows valid and test), and no group is set (group=COLUMN keeps"
    ) in inferred(result)
    assert "columns 'at': they look like times, of which models make no feature" in str(result.summary["dropped"])


def test_a_random_split_names_the_reason_why_it_is_not_by_time(tmp_path: Path) -> None:
    without = labelled_at(tmp_path, [f"x{place % 4}" for place in range(140)])
    assert "by seed 1: no column looks like times, and no group is set" in inferred(without)
    ignored = labelled_at(tmp_path / "b", CLOCKS, timestamp=None)
    assert "by seed 1: no column is the time (timestamp=null), and no group is set" in inferred(ignored)
    named = [f"{place}" for place in range(140)]
    text = "label,kind,timestamp\n" + "".join(f"{place % 2},{place % 3},{at}\n" for place, at in enumerate(named))
    ordered = prepare_table(tmp_path / "c.csv", tmp_path / "c", text)
    told = "the values of 'timestamp' don't look like times (split=time sorts by them), and no group"
    assert told in inferred(ordered)


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ([f"202404{1 + place // 5:02d}" for place in range(140)], {"timestamp": "at", "time_format": "%Y%m%d"}),
        (
            [f"202404{1 + place // 5:02d}" for place in range(140)],
            {"types": {"at": {"type": "time", "format": "%Y%m%d"}}},
        ),
        ([f"{place}" for place in range(140)], {"timestamp": "at"}),
    ],
)
def test_a_declared_time_splits_rows_whatever_it_looks_like(
    values: list[str], settings: dict[str, object], tmp_path: Path
) -> None:
    assert labelled_at(tmp_path, values, **settings).summary["split"] == "time"
    values[7] = "soon"
    with pytest.raises(DataError, match=r"column 'at': line 9 is 'soon'"):
        prepare_table(
            tmp_path / "b.csv",
            tmp_path / "b",
            "label,at\n" + "".join(f"{place % 2},{at}\n" for place, at in enumerate(values)),
            **settings,
        )


def test_a_date_that_a_setting_names_as_a_category_is_one(tmp_path: Path) -> None:
    dates = [f"2024-01-{1 + place % 28:02d}" for place in range(140)]
    assert labelled_at(tmp_path, dates, categorical=["at"]).spec.role("context") == ("kind", "kind_bucket", "at")


def test_numbers_are_also_cut_into_buckets_fitted_on_train(tmp_path: Path) -> None:
    text = "price,label\n" + "".join(f"{'' if row % 10 == 0 else row / 8},{row % 2}\n" for row in range(640))
    result = prepare_text(tmp_path, text)
    assert result.spec.role("context") == ("price", "price_bucket")
    assert result.spec.features["price_bucket"].cardinality == 32 + 1  # 640 rows, 20 a bucket; id 0 is missing
    read = open_split(result.spec, "train", ["price", "price_bucket"]).read(0, 640)
    price, bucket = (np.asarray(read[name]) for name in ("price", "price_bucket"))
    assert set(price[bucket == 0]) == {0.0}  # the mean
    counts = np.bincount(bucket)[1:]
    assert counts.max() - counts.min() <= 1
    assert "'price': taken as numbers and, cut into at most 32 buckets" in inferred(result)
    few = prepare_text(tmp_path, out="few", rows=79)
    alone = prepare_text(tmp_path, out="alone", numeric=["price"])
    assert few.spec.role("context") == alone.spec.role("context") == ("price",)


@pytest.mark.parametrize("name", ["zip", "deviceId"])
def test_codes_that_are_mostly_digits_are_categories(tmp_path: Path, name: str) -> None:
    text = f"{name},label\n" + "".join(
        f"{'98117-5258' if row % 40 == 3 else 98100 + row % 7},{row % 2}\n" for row in range(80)
    )
    result = prepare_text(tmp_path, text)
    assert result.spec.features[name].cardinality == 8 + 1  # seven codes, a longer one, and unknown ones
    with pytest.raises(DataError, match=r"'price': line 5 is '98117-5258'.*categorical=\[price\]"):
        prepare_table(tmp_path / "b.csv", tmp_path / "price", text.replace(name, "price"))


@pytest.mark.slow
def test_a_wide_table_of_several_files_is_the_same_as_in_one(tmp_path: Path) -> None:
    names = [f"c{place}" for place in range(130)]
    lines = [",".join([*(str((row * 7 + place) % 5 / 2) for place in range(130)), str(row % 2)]) for row in range(60)]
    header = ",".join([*names, "label"])
    (tmp_path / "raw").mkdir()
    for part in range(2):
        text = "\n".join([header, *lines[part * 30 : part * 30 + 30]])
        (tmp_path / "raw" / f"{part}.csv").write_text(text + "\n")
    several = prepare_table(tmp_path / "raw", tmp_path / "several")
    one = prepare_text(tmp_path, "\n".join([header, *lines]) + "\n", out="one")
    assert bytes_of(several.spec.folder) == bytes_of(one.spec.folder)


@pytest.mark.parametrize("value", [2**53 + 1, 123_456_789_012_345_678])
def test_whole_numbers_that_no_float_holds_are_text_or_as_asked(tmp_path: Path, value: int) -> None:
    text = "tweet,label\n" + "".join(f"{value + row % 3 if row % 4 else 7},{row % 2}\n" for row in range(80))
    free = prepare_text(tmp_path, text, out="free")
    assert free.spec.features["tweet"].cardinality == 4 + 1
    asked = prepare_text(tmp_path, out="asked", numeric=["tweet"])
    assert asked.spec.role("context") == ("tweet",)
    pq.write_table(
        pa.table({"tweet": [value + row for row in range(80)], "label": [0, 1] * 40}), tmp_path / "a.parquet"
    )
    whole = prepare_table(tmp_path / "a.parquet", tmp_path / "whole", numeric=["tweet"])
    assert whole.spec.role("context") == ("tweet",)


def test_a_column_that_names_each_row_is_a_feature_if_asked(tmp_path: Path) -> None:
    text = "name,one,price,label\n" + "".join(f"n{row},1,{row % 5},{row % 2}\n" for row in range(80))
    free = prepare_text(tmp_path, text, out="free")
    assert "name" not in free.spec.role("context") and "one" not in free.spec.role("context")  # noqa: PT018
    asked = prepare_text(tmp_path, out="asked", categorical=["name", "one"])
    assert {"name", "one"} <= {*asked.spec.role("context")}


def test_a_number_beyond_train_is_train_s_nearest_and_told(tmp_path: Path) -> None:
    rows = [*((row % 8, "train") for row in range(80)), (-5, "valid"), (100, "test"), (3, "test")]
    text = "price,label,fold\n" + "".join(f"{price},{row % 2},{fold}\n" for row, (price, fold) in enumerate(rows))
    result = prepare_text(tmp_path, text, splits="fold")
    read = {split: open_split(result.spec, split, ["price"]).read(0, 80)["price"] for split in result.spec.splits}
    assert float(read["valid"][0]) == float(np.min(read["train"]))  # type: ignore[arg-type]
    assert float(read["test"][0]) == float(np.max(read["train"]))  # type: ignore[arg-type]
    assert "'price': 2 of 3 held-out rows are beyond the range of train" in str(result.summary["changed"])
    plain = prepare_text(tmp_path, out="plain", splits="fold", numeric=["price"])
    assert float(open_split(plain.spec, "test", ["price"]).read(0, 2)["price"][0]) > 10  # type: ignore[arg-type]


def test_a_column_of_the_file_keeps_the_name_of_a_bucket(tmp_path: Path) -> None:
    text = "price,Price_Bucket,label\n" + "".join(f"{row / 8},{'ab'[row % 2]},{row % 3 % 2}\n" for row in range(640))
    result = prepare_text(tmp_path, text)
    assert result.spec.role("context") == ("price", "Price_Bucket")


@pytest.mark.parametrize(
    ("numbers", "numeric", "is_log"),
    [
        ([0, 1, 10, 100, 1000], [], True),
        ([0, 1, 10, 100, 1000], ["size"], False),
        ([-1, 1, 10, 100, 1000], [], False),  # the logarithm spreads what lies around 0
        ([1, 2, 3, 4, 5], [], False),
        ([1e-6, 2e-6, 4e-6, 9e-6, 1e-3], [], False),  # ln(1 + x) is x
        (["", "", "", "", 5], [], False),
    ],
)
def test_the_logarithm_of_a_skewed_number_is_scaled(
    numbers: list[float], numeric: list[str], is_log: bool, tmp_path: Path
) -> None:
    values = [numbers[min(row % 11, 4)] if row % 11 < 5 else numbers[row % 3] for row in range(220)]
    text = "size,kind,label\n" + "".join(f"{value},{'ab'[row % 2]},{row % 2}\n" for row, value in enumerate(values))
    result = prepare_text(tmp_path, text, numeric=numeric, context_features=["size", "kind"])
    encoder = Encoders.load(result.spec.folder).encoders["size"]
    assert isinstance(encoder, ScaleEncoder)
    assert encoder.log1p == is_log
    assert ("'size': skewed in train" in inferred(result)) == is_log
    sizes = np.asarray(open_split(result.spec, "train", ["size"]).read(0, 220)["size"])
    if len({*numbers} - {""}) == 1:  # what says where it is missing
        assert {*sizes.tolist()} == {0.0, 1.0}
    else:
        assert abs(sizes.mean()) < 1e-5
    check(result.spec)


def test_a_label_is_found_by_its_name_and_values(tmp_path: Path) -> None:
    text = "user_id,item_id,click\n" + "".join(f"u{row % 5},i{row % 7},{row % 2}\n" for row in range(70))
    found = prepare_text(tmp_path, text)
    assert "rows are labelled: column 'click' holds '0', '1'" in inferred(found)
    assert task_of(found.spec) == "clicks"
    for name, asked in (("told", {"label": None}), ("history", {"history": 3}), ("split", {"split": "leave_one_out"})):
        assert task_of(prepare_table(tmp_path / "a.csv", tmp_path / name, **asked).spec) == "interactions"
    timed = text.replace("\n", ",1700000000\n").replace("click,1700000000", "click,time")
    asked = {"history": 3, "valid": 0, "test": 0}
    assert task_of(prepare_table(tmp_path / "c.csv", tmp_path / "c", timed, **asked).spec) == "clicks"
    ones = "column 'click' is named like a label, and holds '1' in 70 rows; .* --set label=null takes every row"
    with pytest.raises(SettingsError, match=ones):
        prepare_table(tmp_path / "b.csv", tmp_path / "b", text.replace(",0\n", ",1\n"))


def test_features_are_the_user_s_or_the_item_s_where_all_their_rows_agree(tmp_path: Path) -> None:
    text = "user,item,clicked,city,brand,hour\n" + "".join(
        f"u{row % 5},i{row % 7},{row % 2},c{row % 5 % 3},b{row % 7 % 2},{row % 11}\n" for row in range(140)
    )
    spec = prepare_text(tmp_path, text).spec
    assert spec.role("user") == ("user_id", "city")
    assert spec.role("item") == ("item_id", "brand")
    assert spec.role("context") == ("hour", "hour_bucket")


def test_labelled_rows_with_times_are_split_by_time_and_with_a_group_by_group(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp,label\n" + "".join(
        f"u{row % 5},i{row % 7},{1_700_000_000 + row},{row % 2}\n" for row in range(100)
    )
    result = prepare_text(tmp_path, text)
    assert result.spec.metadata["split"] == "time"
    assert "the latest rows by 'timestamp' are valid and test" in inferred(result)
    grouped = prepare_text(tmp_path, out="b", group="user_id", label="label")
    assert grouped.spec.metadata["split"] == "group"
    assert prepare_text(tmp_path, out="c", split="share").spec.metadata["split"] == "share"


def test_copies_of_a_row_fall_into_one_split(tmp_path: Path) -> None:
    rows = [f"{row},{row % 3},{row % 2}\n" for row in range(150)]
    result = prepare_text(tmp_path, "size,kind,label\n" + "".join(rows * 2))
    held = [
        set(np.round(np.asarray(open_split(result.spec, split, ["size"]).read(0, 999)["size"]), 5).tolist())
        for split in result.spec.splits
    ]
    assert len(held) == 3
    assert sum(map(len, held)) == 150
    assert "150 of 300 rows are copies of an earlier one in all columns" in inferred(result)


def test_a_label_may_be_a_word(tmp_path: Path) -> None:
    text = "size,rich\n" + "".join(f"{row}, {'>50K' if row % 3 == 0 else '<=50K'}\n" for row in range(90))
    result = prepare_text(tmp_path, text, label="rich", positive=">50K")
    assert result.summary["positives"] == 30
    assert result.summary["changed"][0] == "label 'rich': '>50K' as 1 and '<=50K' as 0"  # type: ignore[index]
    with pytest.raises(DataError, match=r"no row holds '>50k' .did you mean '>50K'\?.; found '<=50K', '>50K'"):
        prepare_text(tmp_path, out="b", label="rich", positive=">50k")
    with pytest.raises(DataError, match="--set 'positive=>50K' of this text"):
        prepare_text(tmp_path, out="b", label="rich")


def test_settings_of_interactions_say_what_to_do_for_labelled_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(labelled_text())
    with pytest.raises(ValueError, match="train_negatives and repeats: of rows without a label; leave out the label"):
        prepare_text(tmp_path, out="b", label="y", train_negatives=5, repeats="last")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("a,y\n1,0\n2,1\n3,1\n", "'1, 0'. If rows are interactions: --set user=COLUMN --set item=COLUMN; if a"),
        ("y,a\n<=50K,1\n>50K,2\n<=50K,3\n", "predicted: --set label=y --set 'positive=>50K'"),
        ("a b,y\n1,yes\n2,no\n3,\n", "predicted: --set label=y"),
        ("user,y\na,ja\nb,nein\nc,ja\n", "predicted: --set label=y --set positive=ja"),
        ("user,y\na,it\nb,it's\nc,it\n", "predicted: --set label=y --set 'positive=it'\"'\"'s'"),
        ("user,y\na,1\n", "there is no label; found 'user', 'y'; the first row is 'a, 1'. If rows are inter"),
        ("a\n1\n2\n3\n", "predicted: --set label=COLUMN, with --set positive=WORD or --set positive_from=NUMBER"),
    ],
)
def test_rows_of_unknown_purpose_are_refused_with_settings_of_their_own_columns(
    text: str, advice: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        prepare_text(tmp_path, text)
    assert advice in str(caught.value)


# --- ratings ---------------------------------------------------------------------------------------------------------


SCALES = [([1, 2, 3, 4, 5], 4), ([0.5, 3.5, 4, 5], 4), ([1, 7, 8, 10], 8), ([0, 1], 1), ([-10, 4, 5, 10], 5), ([3], 3)]


def rated(ratings: list[float]) -> str:
    return "user,item,stars\n" + "".join(f"u{row % 4},i{row},{ratings[row % len(ratings)]}\n" for row in range(60))


@pytest.mark.parametrize(("ratings", "least"), SCALES)
def test_a_rating_three_quarters_up_the_scale_is_an_interaction(
    ratings: list[float], least: float, tmp_path: Path
) -> None:
    result = prepare_text(tmp_path, rated(ratings))
    kept = sum(ratings[row % len(ratings)] >= least for row in range(60))
    assert result.summary["interactions"] == kept
    assert task_of(result.spec) == "interactions"
    if kept < 60:
        assert f"{60 - kept} of 60 rows with 'stars' below {least:g}" in str(result.summary["dropped"])


@pytest.mark.parametrize(
    "ratings", [pytest.param(ratings, marks=[] if -10 in ratings else [pytest.mark.slow]) for ratings, _ in SCALES]
)
def test_ratings_of_any_scale_may_all_count(ratings: list[float], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(rated(ratings))
    assert prepare_text(tmp_path, out="b", rating=None).summary["interactions"] == 60
    assert prepare_text(tmp_path, out="c", min_rating=-10).summary["interactions"] == 60


def test_numbers_beyond_a_scale_are_no_ratings(tmp_path: Path) -> None:
    text = "user,item,score\n" + "".join(f"u{row % 4},i{row},{row * 3}\n" for row in range(60))
    result = prepare_text(tmp_path, text)
    assert result.summary["interactions"] == 60
    assert "'score' is no scale of ratings: it holds 60 values from 0 to 177" in inferred(result)


# --- sequences -------------------------------------------------------------------------------------------------------


def test_lines_of_whole_numbers_of_many_lengths_are_sequences(tmp_path: Path) -> None:
    result = prepare_table(tmp_path / "a.txt", tmp_path / "out", "1 12 99 7\n2 5 12\n3 99 5 7 12 1\n4 8 6\n")
    assert raw_pairs(result.spec, "test") == [("1", "7"), ("2", "12"), ("3", "1"), ("4", "6")]
    assert "each line is a user followed by the user's items, oldest first, because lines hold 3 to 6" in inferred(
        result
    )
    with pytest.raises(DataError, match="line 2: has 3 columns, expected 4 separated by blanks"):
        prepare_table(
            tmp_path / "a.txt", tmp_path / "b", layout="rows", columns=["user", "item", "a", "b"], separator=" "
        )


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_lists_of_items_are_sequences(ending: str, tmp_path: Path) -> None:
    table = pa.table(
        {
            "user": ["a", "b", "c"],
            "items": [["x", "y", "z"], ["w"], []],
            "times": [[30, 10, 20], [5], []],
            "tags": [["p"], ["p", "q"], ["q"]],
        }
    )
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    result = prepare_table(path, tmp_path / "out", timestamp="times", num_negatives=0, user_features=["tags"])
    assert raw_pairs(result.spec, "test") == [("a", "x")]
    assert raw_pairs(result.spec, "valid") == [("a", "z")]
    assert "'items' holds lists, so each of 3 rows is a sequence of items, oldest first: 4 events; 'times' hold" in (
        inferred(result)
    )
    assert result.spec.features["tags"].is_list
    with pytest.raises(DataError, match="layout sequences needs a column with lists of items; found 'user', 'items'"):
        prepare_table(path, tmp_path / "b", layout="sequences", item="user")


# --- ready-made splits -----------------------------------------------------------------------------------------------


def split_rows(words: Mapping[int, str]) -> list[tuple[str, str, int, str]]:
    return [(f"u{row % 4}", f"i{row % 6}", TIMES[0] + row, words[row % 5]) for row in range(40)]


WORDS = {0: "Train", 1: "train", 2: "training", 3: "val", 4: "TEST"}


def test_a_column_may_tell_the_splits(tmp_path: Path) -> None:
    rows = split_rows(WORDS)
    text = "user,item,timestamp,split\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    found = prepare_text(tmp_path, text)
    expected = {"train": 24, "valid": 8, "test": 8}
    assert {split: len(pairs) for split, pairs in pairs_of(found).items()} == expected
    assert "the splits are ready-made: column 'split' holds" in inferred(found)
    asked = prepare_table(
        tmp_path / "b.csv", tmp_path / "b", text.replace("split\n", "fold_name\n"), splits="fold_name"
    )
    assert pairs_of(asked) == pairs_of(found)
    (tmp_path / "c.csv").write_text(text.replace("TEST", "oops"))
    with pytest.raises(DataError, match="column 'split', the splits: holds 'oops'; expected train, valid or test in"):
        prepare_table(tmp_path / "c.csv", tmp_path / "c", splits="split")
    with pytest.raises(SettingsError, match=r"setting 'splits': no column 'spilt' .did you mean 'split'\?"):
        prepare_text(tmp_path, out="c", splits="spilt")
    by_time = prepare_text(tmp_path, out="d", split="time", num_negatives=0)
    assert by_time.spec.metadata["split"] == "time"


@pytest.mark.parametrize(("ending", "labelled"), [("csv", False), ("csv", True), ("parquet", True), ("jsonl", False)])
def test_files_may_be_the_splits(ending: str, labelled: bool, tmp_path: Path) -> None:
    names = {"train": "clicks_train", "valid": "clicks_val", "test": "clicks_test"}
    (tmp_path / "raw").mkdir()
    for place, (split, name) in enumerate(names.items()):
        label = {"label": lambda row: row % 2} if labelled else {}
        rows = [
            {
                "user_id": f"u{row % 4}",
                "item_id": f"i{row % 6}",
                "size": row,
                **{name: made(row) for name, made in label.items()},
            }
            for row in range(place, 40 + place)
        ]
        if split != "train":
            rows = rows[:9]
        path = tmp_path / "raw" / f"{name}.{ending}"
        table = pa.Table.from_pylist(rows)
        if ending == "parquet":
            pq.write_table(table, path)
        elif ending == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            path.write_text(
                ",".join(table.column_names) + "\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows)
            )
    (tmp_path / "raw" / "README.txt").write_text("made up\n")
    found = prepare_table(tmp_path / "raw", tmp_path / "out")
    files = {split: f"{name}.{ending}" for split, name in names.items()}
    asked = prepare_table(tmp_path / "raw", tmp_path / "b", splits=files)
    assert bytes_of(tmp_path / "out").keys() == bytes_of(tmp_path / "b").keys()
    sizes = {"train": 40, "valid": 9, "test": 9}
    for result in (found, asked):
        counts = {split: open_split(result.spec, split).num_rows for split in sizes}
        assert counts == sizes if labelled else counts == {"train": 40, "valid": 18, "test": 18}
        assert result.spec.metadata["split"] == "given"
    assert f"files are splits, by their names: train: 'clicks_train.{ending}'" in inferred(found)
    with pytest.raises(SettingsError, match=r"setting 'splits': .*clicks_trian.*: no such file .did you mean"):
        prepare_table(tmp_path / "raw", tmp_path / "c", splits={**files, "train": f"clicks_trian.{ending}"})


@pytest.mark.parametrize("labelled", [False, True])
def test_ready_made_splits_without_valid_get_one_out_of_train(labelled: bool, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    if labelled:
        for split, rows in (("train", 300), ("test", 30)):
            (raw / f"{split}.csv").write_text("size,label\n" + "".join(f"{row},{row % 2}\n" for row in range(rows)))
    else:
        (raw / "train.txt").write_text("1 10 11 12 13\n2 10 11\n3 12 13 14\n5 10 11\n6 12 13\n7 14 15\n")
        (raw / "test.txt").write_text("1 14\n2 12 13\n4 10\n")
    result = prepare_table(raw, tmp_path / "out")
    assert result.spec.splits == ("train", "valid", "test")
    assert "the splits have no valid" in inferred(result)
    if labelled:
        assert open_split(result.spec, "test").num_rows == 30
    else:
        test, valid = (raw_pairs(result.spec, split) for split in ("test", "valid"))
        assert test == [("1", "14"), ("2", "12"), ("2", "13"), (None, "10")]  # users as they are
        assert [user for user, _ in valid] == ["1", "3"]
    whole = prepare_table(raw, tmp_path / "b", valid=0)
    assert whole.spec.splits == ("train", "test")


# --- some rows -------------------------------------------------------------------------------------------------------


def test_some_rows_are_the_first_or_random_ones(tmp_path: Path) -> None:
    text = ",".join(HEADER) + "\n" + "".join(f"u{row},i{row % 9},{row}\n" for row in range(300))
    first = prepare_text(tmp_path, text, out="a", rows=50)
    assert {user for user, _ in pairs_of(first)["train"]} == {f"u{row}" for row in range(50)}
    assert "250 of 300 rows: the first 50 are read (rows)" in str(first.summary["dropped"])
    users = []
    for seed in (1, 2):
        made = prepare_table(tmp_path / "a.csv", tmp_path / f"r{seed}", rows=50, rows_by="random", seed=seed)
        assert "250 of 300 rows: 50 random ones are read" in str(made.summary["dropped"])
        users.append({user for user, _ in pairs_of(made)["train"]})
    assert len(users[0]) == len(users[1]) == 50
    assert users[0] != users[1]
    assert "rows=900, and there are 300: all are read" in inferred(prepare_text(tmp_path, out="b", rows=900))


# --- messages --------------------------------------------------------------------------------------------------------

LONG = "x" * 50_000
MANY = ",".join(f"column number {number} of a wide table" for number in range(1_500))
BAD: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "a long name": (f"{LONG},item_id\n1,2\n", {}),
    "many names": (f"{MANY}\n1,2\n", {}),
    "a long label": (f"label,a\n{LONG},1\n0,2\n", {"label": "label"}),
    "many labels": ("label,a\n" + "".join(f"word{row},1\n" for row in range(3000)), {"label": "label"}),
    "a word that is no label": (f"label,a\n{LONG},1\n0,2\n", {"label": "label", "positive": LONG[1:]}),
    "a long split": (f"user,item,s\n1,2,{LONG}\n1,3,train\n", {"splits": "s"}),
    "a long time": (f"user,item,timestamp\n1,2,{LONG}\n1,3,2\n", {}),
    "a long number": (f"user,item,n\n1,2,{LONG}\n1,3,2\n1,4,5\n", {"context_features": ["n"], "numeric": ["n"]}),
    "a long setting": ("user,item\n1,2\n", {"user": LONG, "context_features": [LONG], "columns": [LONG]}),
    "columns": (f"1,2,{LONG}\n", {"columns": ["a", "b"]}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_message_quotes_a_bounded_text(name: str, tmp_path: Path) -> None:
    text, asked = BAD[name]
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(RecspecError) as caught:
        prepare_text(tmp_path, **asked)
    assert len(str(caught.value)) < 6_000, name


STRAY = ("reviews_X_5.json", "X.json", "X.csv", "X.jsonl")
OF = ("amazon", "amazon", "table", "table", "movielens", "criteo", "outbrain", "adult", "ncf")


@pytest.mark.parametrize(("dataset", "name"), [(each, STRAY[place % 4]) for place, each in enumerate(OF)])
def test_a_stray_file_is_refused_in_a_few_words(dataset: str, name: str, tmp_path: Path) -> None:
    stray = {f"key number {number} {'k' * 300}": number for number in range(300)}
    folder = tmp_path / "raw"
    folder.mkdir()
    lines = json.dumps(stray) + "\n"
    if name.endswith(".csv"):
        lines = ",".join(stray) + "\n" + ",".join("1" for _ in stray) + "\n"
    (folder / name).write_text(lines)
    for raw in (folder, folder / name):
        with pytest.raises(RecspecError) as caught:
            run(Case(dataset, write_table), raw, tmp_path / "out")
        assert len(str(caught.value)) < 5_000, (dataset, name, len(str(caught.value)))


def test_wide_files_that_differ_say_what_differs(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    wide = ",".join(f"c{number}" for number in range(2_000))
    (tmp_path / "raw" / "a.csv").write_text(f"user_id,item_id,{wide}\n")
    (tmp_path / "raw" / "b.csv").write_text(f"user_id,item_id,{wide.replace('c7,', 'd7,')}\n")
    with pytest.raises(DataError, match=r"columns differ from those of a\.csv: only b\.csv has 'd7'; only a\.csv has"):
        prepare_table(tmp_path / "raw", tmp_path / "out")


# --- Spark -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["position", "sequences", "labelled", "lists", "splits"])
def test_spark_reads_every_shape_as_duckdb_does(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    raw, asked = tmp_path / "raw", {"rows": 10, "rows_by": "random"} if shape == "position" else {}
    raw.mkdir()
    if shape == "position":
        (raw / "a.dat").write_text("".join(f"{user}::{item}::{1 + time % 5}::{time}\n" for user, item, time in EVENTS))
    elif shape == "sequences":
        (raw / "a.txt").write_text("1 12 99 7\n2 5 12\n3 99 5 7 12 1\n")
    elif shape == "labelled":
        (raw / "a.csv").write_text(labelled_text(150))
        asked = {"label": "y"}
    elif shape == "lists":
        pq.write_table(pa.table({"user": ["a", "b"], "items": [["x", "y", "z"], ["y", "x"]]}), raw / "a.parquet")
    else:
        (raw / "train.csv").write_text("user,item\n" + "".join(f"u{row % 4},i{row % 7}\n" for row in range(28)))
        (raw / "test.csv").write_text("user,item\nu1,i3\nu2,i9\n")
    for engine in ("duckdb", "spark"):
        run(Case("table", write_table, {"num_negatives": 1, **asked}), raw, tmp_path / engine, engine=engine)
    assert bytes_of(tmp_path / "duckdb") == bytes_of(tmp_path / "spark")


def test_vocabularies_of_given_splits_are_train_s_alone(tmp_path: Path) -> None:
    text = "user,item,split\nu1,i1,train\nu1,i2,train\nu2,i1,train\nu2,i3,test\nu3,i2,test\n"
    result = prepare_text(tmp_path, text, valid=0)
    assert Encoders.load(tmp_path / "out").vocabulary_of("item_id").values.to_pylist() == ["i1", "i2"]
    assert result.summary["unknown_targets_dropped"] == 1


def test_a_split_whose_labels_are_spelt_differently_is_refused(tmp_path: Path) -> None:
    rows = [f"{row % 7},{'yes!' if row % 3 else 'no'},{'train' if row < 40 else 'test'}" for row in range(60)]
    text = "number,answer,split\n" + "\n".join(rows) + "\n"
    asked = {"label": "answer", "splits": "split"}
    found = prepare_text(tmp_path, text, out="a", **asked, positive="yes!")
    assert found.summary["positives"] == 40
    other = "\n".join(line.replace("yes!", "yes!.") if line.endswith("test") else line for line in text.splitlines())
    with pytest.raises(DataError, match="no row of 'test' has the label 'yes!', and rows of 'train', 'valid' have it"):
        prepare_table(tmp_path / "b.csv", tmp_path / "b", other + "\n", **asked, positive="yes!")
