"""`check` tells every problem of a dataset's files, `describe` its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.data.storage.check import check, count_rows
from recspec.feature_spec import FeatureSpec
from recspec.report import dataset_summary as card
from recspec.report.dataset_summary import describe
from tests.evaluation.tables import csv_spec

FEATURES: dict[str, dict[str, object]] = {
    "user": {"cardinality": 4},
    "item": {"cardinality": 6},
    "tags": {"cardinality": 4, "length": 3, "padding": 0},
    "price": {},
    "label": {},
}
CHANNELS = {"user": ["user"], "item": ["item", "tags"], "context": ["price"], "label": ["label"]}
NAMES = list(FEATURES)


def dataset(folder: Path, splits: Mapping[str, str], metadata: Mapping[str, object] | None = None) -> FeatureSpec:
    """CSV splits with columns user, item, tags, price, label."""
    return csv_spec(folder, splits, FEATURES, CHANNELS, metadata)


def problems_of(spec: FeatureSpec) -> list[str]:
    with pytest.raises(DataError) as caught:
        check(spec)
    assert str(caught.value).startswith(f"{spec.folder}: ")
    return list(caught.value.problems)


GOOD = '1,2,"[1, 3]",0.5,1\n3,5,"[]",1.5,0\n1,0,"[2]",1,0\n'


def test_a_sound_dataset_passes(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": GOOD, "test": GOOD})
    check(spec)
    assert count_rows(spec) == {"train": 3, "test": 3}


def test_a_dataset_without_files_passes_and_its_card_says_what_the_specification_does(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {})
    check(spec)
    found = describe(spec)
    assert (found.splits, list(found.features)) == ({}, NAMES)
    assert found.notes == ("the specification names no files; `recspec synthesize` makes some",)
    tags, price = found.features["tags"], found.features["price"]
    assert (tags.roles, tags.dtype, tags.cardinality, tags.length) == (("item",), "int64", 4, 3)
    read = (tags.minimum, tags.maximum, tags.distinct, tags.zero_share, tags.list_lengths, price.mean)
    assert read == (None,) * 6


def test_problems_of_all_splits_are_told_at_once(tmp_path: Path) -> None:
    train = '1,6,"[1, 4]",nan,1\n4,5,"[]",1.5,x\n'
    spec = dataset(tmp_path, {"train": train, "valid": "", "test": GOOD})
    (tmp_path / "test.csv").rename(tmp_path / "tests.csv")
    assert problems_of(spec) == [
        "split 'valid' holds no row (files 'valid.csv'); fill it, or leave it out of source_spec",
        "test.csv: no such file (did you mean 'tests.csv'?)",
        "train.csv, column 'item', row 1: 6 is too large for an id: the cardinality is 6, so ids are 0 to 5",
        "train.csv, column 'label', row 2: 'x' is not a number (float32)",
        "train.csv, column 'price', row 1: nan is not a finite number",
        "train.csv, column 'tags', row 1: 4 is too large for an id: the cardinality is 4, so ids are 0 to 3",
        "train.csv, column 'user', row 2: 4 is too large for an id: the cardinality is 4, so ids are 0 to 3",
    ]


def test_problems_far_into_a_file_are_counted(tmp_path: Path) -> None:
    beyond = "9 is too large for an id: the cardinality is 5, so ids are 0 to 4"
    rows = np.zeros(200_000, np.int64)
    rows[[70_000, 150_000]] = 9
    pq.write_table(pa.table({"a": rows, "label": rows * 0.0}), tmp_path / "t.parquet")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"a": {"cardinality": 5}, "label": {}},
            "source_spec": {"train": [{"type": "parquet", "features": ["a", "label"], "files": ["t.parquet"]}]},
            "channel_spec": {"item": ["a"], "label": ["label"]},
        },
        tmp_path,
    )
    assert problems_of(spec) == [f"t.parquet, column 'a', row 70001: {beyond} (and 1 more row like it)"]


def test_series_must_divide_the_splits_that_are_ranked(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": GOOD[:19], "test": GOOD}, {"test_samples_per_series": 2})
    assert problems_of(spec) == [
        "split 'test' has 3 rows, not a multiple of metadata.test_samples_per_series = 2: 1 row left over"
    ]
    check(dataset(tmp_path, {"train": GOOD[:19], "test": GOOD}, {"test_samples_per_series": 3}))


def prepared(folder: Path, num_items: int, num_tags: int, **metadata: object) -> FeatureSpec:
    """With a catalogue of items and the vocabulary of tags."""
    (folder / "vocabularies").mkdir(parents=True)
    pq.write_table(pa.table({"item": list(range(1, num_items + 1))}), folder / "items.parquet")
    pq.write_table(pa.table({"value": [f"tag {i}" for i in range(num_tags)]}), folder / "vocabularies" / "tags.parquet")
    named = {"catalogues": {"item": "items.parquet"}, "vocabularies": "vocabularies", "item_id": "item"}
    return dataset(folder, {"train": GOOD}, {**named, **metadata})


def test_catalogues_and_vocabularies_of_another_length_are_told(tmp_path: Path) -> None:
    check(prepared(tmp_path / "right", 5, 3))
    assert problems_of(prepared(tmp_path, 6, 2)) == [
        "items.parquet: has 6 rows; expected 5, one for each id of 'item' but 0",
        "vocabularies/tags.parquet: has 2 rows; expected 3, one for each id of 'tags' but 0",
    ]


def test_companions_that_are_missing_or_broken_are_told(tmp_path: Path) -> None:
    spec = prepared(tmp_path, 5, 3, encoders="encoders.json", catalogues={"item": "items.parquet", "user": "x"})
    (tmp_path / "items.parquet").write_text("no parquet")
    problems = problems_of(spec)
    assert problems[0].startswith("items.parquet: can't be read as Parquet: ")
    assert problems[1:] == [
        "metadata names 'encoders.json', which does not exist",
        "metadata names 'x', which does not exist",
    ]


# --- the card --------------------------------------------------------------------------------------------------------


def test_the_card_by_hand(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": GOOD, "test": '2,2,"[1, 1, 1]",-2,0\n'})
    found = describe(spec)
    assert found.notes == ()
    assert {name: (split.rows, split.files, split.label_mean) for name, split in found.splits.items()} == {
        "train": (3, 1, 1 / 3),
        "test": (1, 1, 0),
    }
    assert found.splits["train"].bytes == len(GOOD)
    item, tags, price = (found.features[name] for name in ("item", "tags", "price"))
    assert (item.roles, item.dtype, item.cardinality, item.vocabulary) == (("item",), "int64", 6, "item")
    assert (item.minimum, item.maximum, item.mean, item.distinct, item.zero_share) == (0, 5, None, 3, 0.25)
    assert (price.minimum, price.maximum, price.mean, price.distinct) == (-2, 1.5, 0.25, None)
    assert (price.cardinality, price.vocabulary, price.length) == (None, None, None)
    # lengths 2, 0, 1, 3; values 1 3 | 2 | 1 1 1
    assert tags.list_lengths == {"0%": 0, "25%": 0, "50%": 1, "75%": 2, "95%": 3, "100%": 3, "mean": 1.5}
    assert (tags.minimum, tags.maximum, tags.distinct, tags.length) == (1, 3, 3, 3)
    assert json.loads(json.dumps(found.to_dict()))["features"]["price"]["mean"] == 0.25


def test_the_card_shows_stored_ids_not_shifted_ones(tmp_path: Path) -> None:
    features = {**FEATURES, "tags": {"cardinality": 4, "length": 3}}
    spec = FeatureSpec.from_dict({**dataset(tmp_path, {"train": GOOD}).to_dict(), "feature_spec": features}, tmp_path)
    assert (spec.shift("tags"), describe(spec).features["tags"].minimum) == (1, 1)


def test_a_list_without_a_value_has_no_range(tmp_path: Path) -> None:
    tags = describe(dataset(tmp_path, {"train": '1,2,"[]",0.5,1\n'})).features["tags"]
    assert (tags.minimum, tags.maximum, tags.zero_share, tags.distinct) == (None, None, None, 0)


def test_labels_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": '1,2,"[1]",0.5,1\n3,5,"[]",1.5,3.5\n'})
    problem = "train.csv, column 'label', row 2: 3.5 is not a label; a label is 0 or 1: convert the column, or"
    assert problems_of(spec)[0].startswith(problem)
    with pytest.raises(DataError, match=r"column 'label', row 2: 3\.5 is not a label; a label is 0 or 1"):
        describe(spec)


def test_open_cardinalities_are_noted(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": '1,2,"[1]",0.5,1\n3,5,"[]",1.5,0\n'})
    spec = FeatureSpec.from_dict(
        {**spec.to_dict(), "feature_spec": {**FEATURES, "user": {"cardinality": "auto"}}}, tmp_path
    )
    found = describe(spec)
    assert found.notes == ("cardinality of 'user' is auto: models need a number, which `recspec transcode` finds",)
    assert found.features["user"].distinct == 2


def test_ids_beyond_what_is_counted_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "COUNTED_IDS", 4)
    found = describe(dataset(tmp_path, {"train": GOOD})).features
    assert (found["item"].distinct, found["user"].distinct) == (None, 2)


def test_a_vector_is_told_with_its_size_and_no_lengths(tmp_path: Path) -> None:
    features = {"image": {"length": 2, "vector": True}, "label": {}}
    channels = {"context": ["image"], "label": ["label"]}
    spec = csv_spec(tmp_path, {"train": '"[1, 2]",1\n"[3, 4]",0\n'}, features, channels)
    found = describe(spec).features["image"]
    assert (found.length, found.vector, found.list_lengths, found.mean) == (2, True, None, 2.5)
