"""Datasets from frames: what is inferred and shown, what a keyword changes, and what is refused."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from recspec import api
from recspec.base.errors import DataError, SettingsError
from recspec.base.summaries import shown_counts
from recspec.datasets import DATASETS
from tests.api.conftest import USERS, events, films, prepared


def test_a_frame_becomes_a_dataset_that_shows_what_was_inferred(data: api.Data) -> None:
    assert data.splits == ("train", "valid", "test")
    assert data.prepared["users"] == USERS
    assert data.prepared["items"] == 30
    text = repr(data)
    assert "30 events, each among 100 others" in text
    assert "3,030" not in text
    assert "_dropped" not in text  # zeros are not shown
    assert text.startswith("Data: table in ")
    assert "splits train, valid, test" in text
    assert "times without a zone, taken as UTC" in text
    assert "rows.parquet" not in text
    assert data.check() == {"train": 300, "valid": 30 * 101, "test": 30 * 101}


def test_the_same_frame_is_not_prepared_again_and_another_one_needs_force(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    assert first.message.startswith("prepared table in")
    assert prepared(tmp_path).message.startswith("already prepared")
    names = {"user": "customer", "item": "film", "timestamp": "bought_at"}
    fewer = events().iloc[:200]
    with pytest.raises(DataError, match="the raw files are not the same"):
        api.prepare(fewer, tmp_path / "data", progress=False, **names)
    again = api.prepare(fewer, tmp_path / "data", force=True, progress=False, **names)
    assert again.prepared["interactions"] == 200
    assert [each.name for each in tmp_path.iterdir()] == ["data"]


def test_counts_are_shown_in_words_and_without_what_means_nothing() -> None:
    summary = {
        "interactions": 8,
        "users": 2,
        "first": 0,
        "last": 8,
        "raw_rows": 9,
        "repeats_dropped": 1,
        "of_users_with_too_few_dropped": 0,
        "order": "as in the file: there is no timestamp",
        "rows": {"train": 6, "valid": 1, "test": 202},
        "inferred": ["a"],
    }
    metadata = {"test_samples_per_series": 101}
    assert shown_counts(summary, metadata) == {
        "rows taken": 9,
        "rows kept": 8,
        "users": 2,
        "dropped: repeats": 1,
        "order": summary["order"],
        "train": "6 rows",
        "valid": "1 row",
        "test": "2 events, each among 100 others",
    }
    timed = shown_counts({"first": "2024-01-01 00:00:00", "rows": {"train": 10}}, {"train_negatives": 4})
    assert timed == {"first (UTC)": "2024-01-01 00:00:00", "train": "2 events, each among 4 others"}
    assert shown_counts({"first": 3, "rows": {"train": 0}}, {}) == {"first": 3, "train": "0 rows"}


def test_rows_come_back_with_raw_values_in_the_kind_that_came_in(data: api.Data) -> None:
    train = data.to_frame("train")
    assert isinstance(train, pd.DataFrame)
    assert set(train["user_id"]) == {f"u{user}" for user in range(USERS)}
    assert len(data.to_frame("test", rows=3)) == 3
    assert len(data.to_frame("test", rows=0)) == 0
    assert data.to_frame("valid", rows=1, kind="rows")[0]["item_id"].startswith("f")
    again = api.open_data(data.path, kind="dict")
    assert again.to_frame("train") == data.to_frame("train", kind="dict")
    assert again.prepared["users"] == data.prepared["users"]


def test_labels_lists_and_vectors_of_a_frame_are_inferred_and_a_keyword_changes_them(tmp_path: Path) -> None:
    rows = 200
    frame = {
        "user_id": [f"u{row % 20}" for row in range(rows)],
        "item_id": [row % 17 for row in range(rows)],
        "clicked": [row % 3 == 0 for row in range(rows)],
        "tags": [["a"] * (row % 3) for row in range(rows)],
        "embedding": [[0.5, row / rows] for row in range(rows)],
    }
    features = ["tags", "embedding"]
    data = api.prepare(frame, tmp_path / "clicks", context_features=features, progress=False)
    assert data.spec.features["tags"].is_list
    assert data.spec.features["embedding"].is_vector
    assert data.kind == "dict"
    assert 0.3 < sum(data.to_frame("train")["label"]) / len(data.to_frame("train")["label"]) < 0.4
    every_row = api.prepare(frame, tmp_path / "rows", label=None, settings={"item_features": []}, progress=False)
    assert "label" not in str(every_row.prepared.get("inferred", ""))
    assert every_row.prepared["interactions"] == rows


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"usr": "customer"}, r"prepare: unknown setting 'usr' \(did you mean 'user'\?\)"),
        ({"forced": True}, r"unknown setting 'forced' \(did you mean 'force'\?\)"),
        ({"user": "custmer", "item": "film"}, r"custmer.*did you mean 'customer'"),
        ({"dataset": "tabel"}, r"unknown dataset 'tabel' \(did you mean 'table'\?\)"),
        ({"dataset": "movielens"}, "a data frame is for dataset='table'"),
        ({"engine": "duckdbb"}, "did you mean 'duckdb'"),
        ({"user": "customer", "settings": {"user": "film"}}, "'user' is given as a keyword and in settings"),
        ({"valid": 2}, "prepare: setting 'valid' is 2"),
    ],
)
def test_a_wrong_keyword_gets_one_sentence_with_the_nearest_name(
    tmp_path: Path, keywords: dict[str, object], said: str
) -> None:
    with pytest.raises((SettingsError, DataError), match=said) as caught:
        api.prepare(events(), tmp_path / "data", progress=False, **keywords)  # type: ignore[arg-type]
    assert "parquet" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_infinite_time_of_a_frame_is_named_by_its_row(tmp_path: Path) -> None:
    frame = {
        "user_id": ["a", "a", "b", "b"],
        "item_id": ["x", "y", "x", "y"],
        "timestamp": [1.0, float("inf"), 2.0, 3.0],
    }
    with pytest.raises(
        DataError, match="the data frame: column 'timestamp': row 2 is 'inf'; expected a number of secon"
    ):
        api.prepare(frame, tmp_path / "a", progress=False)
    kept = api.prepare(frame, tmp_path / "b", invalid_values="drop", progress=False)
    assert kept.prepared["interactions"] == 3


def test_messages_about_values_call_a_frame_a_frame(tmp_path: Path) -> None:
    frame = events().assign(bought_at="some day")
    with pytest.raises(DataError, match="the data frame") as caught:
        api.prepare(frame, tmp_path / "data", user="customer", item="film", timestamp="bought_at", progress=False)
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(DataError, match="the data frame items: can't be read"):
        api.prepare(events(), tmp_path / "data", items={"film": ["f1", 1]}, progress=False)
    with pytest.raises(SettingsError, match="a frame goes with a frame of rows"):
        api.prepare(tmp_path, tmp_path / "data", items=films(), progress=False)
    with pytest.raises(DataError, match="the data frame: has no columns"):
        api.prepare({}, tmp_path / "data", progress=False)
    with pytest.raises(DataError, match="found int; expected a data frame or the path of raw files"):
        api.prepare(7, tmp_path / "data", progress=False)
    with pytest.raises(DataError, match="the path is empty"):
        api.prepare("", tmp_path / "data", progress=False)
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pytest.raises(DataError, match=r"^the data frame: holds a type that can't be kept: .*union.*leave"):
        api.prepare(pa.table({"user": [1], "odd": union}), tmp_path / "data", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_every_setting_of_every_dataset_can_be_a_keyword() -> None:
    own = {name for name in inspect.signature(api.prepare).parameters if name != "named"}
    for name, settings in api.datasets().items():
        assert not own & set(settings.model_fields), name


def test_random_data_and_other_chunk_types(tmp_path: Path, data: api.Data) -> None:
    made = api.synthesize(data, tmp_path / "random", rows=50, seed=3)
    assert made.check()["train"] == 50
    again = api.transcode(made, tmp_path / "csv", to="csv")
    assert again.to_frame("train", kind="dict") == made.to_frame("train", kind="dict")
    with pytest.raises(SettingsError, match=r"unknown chunk type 'parket' \(did you mean 'parquet'\?\)"):
        api.transcode(made, tmp_path / "no", to="parket")


@pytest.mark.parametrize("dataset", [*DATASETS])
def test_raw_files_that_are_pipes_or_devices_are_named_as_such(dataset: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zeros.csv").symlink_to("/dev/zero")
    for name, kind in (("pipe.csv", "a named pipe"), ("zeros.csv", "a device")):
        with pytest.raises(DataError, match=rf"{name}: is {kind}; expected a regular file or a folder"):
            api.prepare(tmp_path / name, tmp_path / "out", dataset=dataset, progress=False)
