"""The specification file: what is read, what it means, and what is said about files that are wrong."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from recspec.errors import SpecError
from recspec.feature_spec import CHANNELS, CHUNK_TYPES, DTYPES, ROLES, Chunk, Feature, FeatureSpec, json_schema

EXAMPLE = """\
feature_spec:
  user_gender: {dtype: torch.int8, cardinality: 3}
  user_age:    {dtype: torch.int8}          # no cardinality: numeric
  user_id:     {dtype: torch.int32, cardinality: 2655}
  item_id:     {dtype: torch.int32, cardinality: 856}
  label:       {dtype: torch.float32}
source_spec:
  train:
    - {type: csv, features: [user_gender, user_age], files: [train_data_0_0.csv, train_data_0_1.csv]}
    - {type: csv, features: [user_id, item_id, label], files: [train_data_1.csv]}
  test:
    - {type: csv, features: [user_id, item_id, label, user_gender, user_age], files: [test_data.csv]}
channel_spec:
  numeric_inputs: [user_age]
  categorical_user_inputs: [user_gender, user_id]
  categorical_item_inputs: [item_id]
  label_ch: [label]
"""

# Made up, each in the shape of a family of files that people have.
NCF_CSV = """\
feature_spec:
  user:
    cardinality: auto
  item:
    cardinality: auto
  label:

metadata:
  test_samples_per_series: 3

source_spec:
  train:
    - type: csv
      features:
        - user
        - item
        - label
      files:
        - a.csv # no header
        - b.csv
  test:
    - type: csv
      features: [user, item, label]
      files: [c.csv]

channel_spec:
  user_ch:
    - user
  item_ch:
    - item
  label_ch:
    - label
"""
NCF_TENSORS = """\
feature_spec:
  user: {dtype: torch.int64, cardinality: 7}
  item: {dtype: torch.int64, cardinality: 9}
  label: {dtype: torch.float32}
metadata: {test_samples_per_series: 101}
source_spec:
  train:
    - {type: torch_tensor, features: [user, item], files: [train_data_0.pt]}
    - {type: torch_tensor, features: [label], files: [train_data_1.pt]}
channel_spec: {user_ch: [user], item_ch: [item], label_ch: [label]}
"""
DLRM_BINARY = """\
channel_spec:
  categorical:
  - cat_0.bin
  - cat_1.bin
  label:
  - label
  numerical: &id001
  - num_0
  - num_1
feature_spec:
  cat_0.bin:
    cardinality: 10
    dtype: int8
  cat_1.bin:
    cardinality: 40000
    dtype: int32
  label:
    dtype: bool
  num_0:
    dtype: float16
  num_1:
    dtype: float16
metadata: {}
source_spec:
  train:
  - features: *id001
    files:
    - train/numerical.bin
    type: split_binary
  - features: [label]
    files: [train/label.bin]
    type: split_binary
  - features: [cat_0.bin]
    files: [train/cat_0.bin]
    type: split_binary
  - features: [cat_1.bin]
    files: [train/cat_1.bin]
    type: split_binary
"""
DLRM_SYNTHETIC = """\
channel_spec: {categorical: [cat_0, cat_1], numerical: [num_0], label: [label]}
feature_spec:
  cat_0: {dtype: int32, cardinality: 10, hotness: 1, alpha: 1.45}
  cat_1: {dtype: int32, cardinality: 20, hotness: 8, alpha: 1.45}
  num_0: {dtype: float16}
  label: {dtype: int8}
metadata:
source_spec: null
"""
WIDE_DEEP = """\
channel_spec:
  label: [clicked]
  map: [display_id]
  multihot_categorical: [topics, entities]
  numerical: [ctr]
  onehot_categorical: []
feature_spec:
  clicked: {}
  ctr: {}
  display_id: {}
  topics: {cardinality: 350, max_hotness: 3}
  entities: {cardinality: 10000, max_hotness: 10}
metadata: {}
source_spec:
  train:
  - {features: [clicked, topics, entities, ctr], files: [train/0.parquet, train/1.parquet], type: parquet}
  test:
  - {features: [clicked, topics, entities, ctr, display_id], files: [valid/0.parquet], type: parquet}
"""
SIM_HISTORIES = """\
channel_spec:
  label: [label]
  user_features: [user]
  target_item_features: [item, category]
  positive_history: [items, categories]
  negative_history: [other_items, other_categories]
feature_spec:
  label: {dtype: bool}
  user: {dtype: int64, cardinality: 100}
  item: {dtype: int64, cardinality: 50}
  category: {dtype: int64, cardinality: 5}
  items: {dtype: int64, cardinality: 50, dimensions: [100], vocabulary: item, padding: 0}
  categories: {dtype: int64, cardinality: 5, dimensions: [100], vocabulary: category, padding: 0}
  other_items: {dtype: int64, cardinality: 50, dimensions: [100], vocabulary: item, padding: 0}
  other_categories: {dtype: int64, cardinality: 5, dimensions: [100], vocabulary: category, padding: 0}
source_spec:
  train:
  - features: [label, user, item, category, items, categories, other_items, other_categories]
    files: [train/part_0.tfrecord, train/part_1.tfrecord]
    type: tfrecord
"""
SHAPES = {
    "example": EXAMPLE,
    "ncf csv": NCF_CSV,
    "ncf tensors": NCF_TENSORS,
    "dlrm": DLRM_BINARY,
    "dlrm synthetic": DLRM_SYNTHETIC,
    "wide and deep": WIDE_DEEP,
    "sim": SIM_HISTORIES,
}


def load(folder: Path, text: str, **options: bool) -> FeatureSpec:
    (folder / "feature_spec.yaml").write_text(text, encoding="utf-8")
    return FeatureSpec.load(folder, **options)


def refused(folder: Path, text: str) -> list[str]:
    """What is said about a file, problem by problem."""
    with pytest.raises(SpecError) as caught:
        load(folder, text)
    assert str(caught.value).startswith(f"{folder / 'feature_spec.yaml'}: ")
    return list(caught.value.problems)


def spec_of(**features: dict[str, object]) -> FeatureSpec:
    """A specification with these features in the role context, and a label."""
    data = {
        "feature_spec": {**features, "label": {}},
        "channel_spec": {"context": list(features), "label": ["label"]},
    }
    return FeatureSpec.from_dict(data)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_in_use_loads_and_comes_back_the_same(shape: str, tmp_path: Path) -> None:
    spec = load(tmp_path, SHAPES[shape])
    saved = spec.save(tmp_path / "again")
    assert saved == tmp_path / "again" / "feature_spec.yaml"
    again = FeatureSpec.load(saved)
    assert again == spec
    assert again.to_yaml() == spec.to_yaml()
    assert FeatureSpec.from_dict(spec.to_dict()) == spec


def test_every_published_file_loads_and_comes_back_the_same(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    files = sorted(real_data("feature-specs").rglob("*.yaml"))
    assert len(files) == 36
    for number, file in enumerate(files):
        spec = FeatureSpec.load(file)
        assert FeatureSpec.load(spec.save(tmp_path / f"{number}.yaml")) == spec, file
        assert spec.label
        assert sorted(spec.splits) == ["test", "train"]


def test_the_worked_example_means_what_it_says(tmp_path: Path) -> None:
    spec = load(tmp_path, EXAMPLE)
    assert spec.features["user_gender"] == Feature(dtype="int8", cardinality=3)
    assert spec.features["user_age"] == Feature(dtype="int8")
    assert [name for name, feature in spec.features.items() if feature.is_categorical] == [
        "user_gender",
        "user_id",
        "item_id",
    ]
    assert spec.role("user") == ("user_gender", "user_id")
    assert spec.role("item") == ("item_id",)
    assert spec.role("context") == ("user_age",)
    assert (spec.label, spec.group, spec.user_id, spec.item_id) == ("label", None, "user_id", "item_id")
    assert spec.splits == ("train", "test")
    assert spec.columns("train") == ("user_gender", "user_age", "user_id", "item_id", "label")
    assert spec.columns("test") == ("user_id", "item_id", "label", "user_gender", "user_age")
    assert spec.sources["train"][0].files == ("train_data_0_0.csv", "train_data_0_1.csv")
    assert spec.path("test_data.csv") == tmp_path / "test_data.csv"
    assert [spec.num_ids(name) for name in ("user_gender", "user_id", "item_id")] == [3, 2655, 856]
    assert not spec.has_series


def test_the_file_that_save_writes_is_pinned_byte_for_byte(tmp_path: Path) -> None:
    spec = load(tmp_path, WIDE_DEEP.replace("metadata: {}", "metadata: {dataset: Größe, summary: {rows: 3}}"))
    assert (
        spec.save(tmp_path / "out").read_bytes().decode()
        == """\
feature_spec:
  clicked: {}
  ctr: {}
  display_id:
    dtype: int64
  topics:
    cardinality: 350
    length: 3
  entities:
    cardinality: 10000
    length: 10
source_spec:
  train:
  - type: parquet
    features: [clicked, topics, entities, ctr]
    files: [train/0.parquet, train/1.parquet]
  test:
  - type: parquet
    features: [clicked, topics, entities, ctr, display_id]
    files: [valid/0.parquet]
channel_spec:
  label: [clicked]
  map: [display_id]
  multihot_categorical: [topics, entities]
  numerical: [ctr]
  onehot_categorical: []
metadata:
  dataset: Größe
  summary:
    rows: 3
"""
    )


def test_save_leaves_no_temporary_file_and_replaces_an_older_one(tmp_path: Path) -> None:
    spec = load(tmp_path, EXAMPLE)
    (tmp_path / "named.yml").write_text("old")
    assert spec.save(tmp_path / "named.yml") == tmp_path / "named.yml"
    assert FeatureSpec.load(tmp_path / "named.yml") == spec
    assert spec.save(tmp_path / "v2.0") == tmp_path / "v2.0" / "feature_spec.yaml"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["feature_spec.yaml", "named.yml", "v2.0"]


def test_a_file_of_any_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(EXAMPLE)
    assert FeatureSpec.load(tmp_path / "mine.yaml").folder == tmp_path


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + EXAMPLE) == FeatureSpec.from_dict(yaml.safe_load(EXAMPLE))


names = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(names, min_size=2, max_size=5, unique=True), st.dictionaries(names, values, max_size=3))
def test_any_names_and_metadata_survive_the_file(features: list[str], metadata: dict[str, object]) -> None:
    reserved = {"test_samples_per_series", "user_id", "item_id", "encoders", "vocabularies", "catalogues"}
    spec = FeatureSpec(
        features={name: Feature(cardinality=number + 1) for number, name in enumerate(features)},
        channels={"label": features[:1], "user": features[1:]},  # type: ignore[dict-item]
        metadata={key: value for key, value in metadata.items() if key not in reserved},
    )
    assert FeatureSpec.from_dict(yaml.safe_load(spec.to_yaml())) == spec


def test_metadata_is_kept_as_yaml_gives_it_back(tmp_path: Path) -> None:
    features = {"label": Feature()}
    metadata = {"rows": np.int64(3), "share": np.float64(0.5), "shape": (1, (2, 3)), "day": date(2020, 1, 31)}
    spec = FeatureSpec(features, channels={"label": ("label",)}, metadata=metadata)
    assert spec.metadata == {"rows": 3, "share": 0.5, "shape": [1, [2, 3]], "day": date(2020, 1, 31)}
    assert FeatureSpec.load(spec.save(tmp_path)) == spec
    with pytest.raises(SpecError, match=r"metadata.where: holds a PosixPath; expected text, numbers, dates, lists and"):
        FeatureSpec(features, channels={"label": ("label",)}, metadata={"where": Path("x")})
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(SpecError, match=r"metadata.deep: is nested deeper than 50 levels"):
        FeatureSpec(features, channels={"label": ("label",)}, metadata={"deep": endless})


# --- one meaning, many spellings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "meant"),
    [
        *((name, name) for name in DTYPES),
        *((f"torch.{name}", name) for name in DTYPES),
        *((f"numpy.{name}", name) for name in DTYPES),
        ("np.int32", "int32"),
        (" INT8 ", "int8"),
        ("torch.long", "int64"),
        ("torch.half", "float16"),
        ("torch.float", "float32"),
        ("double", "float64"),
        ("torch.short", "int16"),
        ("torch.int", "int32"),
        ("byte", "uint8"),
        ("torch.char", "int8"),
        ("np.bool_", "bool"),
        ("f2", "float16"),
        ("<i4", "int32"),
        ("?", "bool"),
    ],
)
def test_spellings_of_a_dtype(spelling: str, meant: str) -> None:
    assert spec_of(x={"dtype": spelling}).features["x"].dtype == meant


@pytest.mark.parametrize("spelling", ["int46", ">i4", "complex64", "string", "object", "", 5, ["int8"]])
def test_what_is_no_dtype(spelling: object) -> None:
    with pytest.raises(SpecError, match=r"feature_spec.x.dtype: is .*; expected one of bool, int8, int16, "):
        spec_of(x={"dtype": spelling})


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({"length": 3}, 3),
        ({"dimensions": [100]}, 100),
        ({"dimensions": 100}, 100),
        ({"max_hotness": 10}, 10),
        ({"hotness": 2}, 2),
        ({"max_len": 5}, 5),
        ({"max_hotness": 1}, 1),  # a list that holds one value at most is still stored as a list
        ({"dimensions": [1]}, 1),
        ({"hotness": 1}, None),  # files that give every feature a hotness say so of those that are no lists
        ({"hotness": None}, None),
        ({}, None),
        ({"length": np.int64(4)}, 4),
    ],
)
def test_spellings_of_a_length(given: dict[str, object], length: int | None) -> None:
    feature = spec_of(x={"cardinality": 9, **given}).features["x"]
    assert feature.length == length
    assert feature.is_list == (length is not None)


@pytest.mark.parametrize("channel", CHANNELS)
def test_every_channel_name_is_read(channel: str) -> None:
    rule = CHANNELS[channel]
    feature: dict[str, object] = {}
    if rule.categorical:
        feature["cardinality"] = 9
    if rule.is_list:
        feature["length"] = 4
    data = {"feature_spec": {"x": feature, "y": {}}, "channel_spec": {channel: ["x"]}}
    if rule.role != "label":
        data["channel_spec"]["label"] = ["y"]  # type: ignore[index]
    spec = FeatureSpec.from_dict(data)
    assert spec.role(rule.role) == ("x",)
    assert spec.roles_of("x") == (rule.role,)
    assert FeatureSpec.from_dict(yaml.safe_load(spec.to_yaml())) == spec


def test_the_roles_of_published_channel_names() -> None:
    roles = {name: channel.role for name, channel in CHANNELS.items()}
    assert set(ROLES) <= set(roles)
    assert roles["user_ch"] == roles["user_features"] == roles["categorical_user_inputs"] == "user"
    assert roles["item_ch"] == roles["target_item_features"] == roles["categorical_item_inputs"] == "item"
    assert roles["categorical"] == roles["numerical"] == roles["onehot_categorical"] == "context"
    assert roles["multihot_categorical"] == roles["numeric_inputs"] == "context"
    assert roles["positive_history"] == "history"
    assert roles["map"] == "group"
    assert roles["label_ch"] == "label"


def test_a_role_gathers_its_channels_in_order_and_names_each_feature_once() -> None:
    data = {
        "feature_spec": {"b": {"cardinality": 2}, "a": {"cardinality": 2}, "n": {}, "label": {}},
        "channel_spec": {"categorical": ["b", "a"], "context": ["n", "a"], "label": ["label"]},
    }
    spec = FeatureSpec.from_dict(data)
    assert spec.role("context") == ("b", "a", "n")
    assert spec.inputs() == ("b", "a", "n")
    assert spec.inputs(categorical=True) == ("b", "a")
    assert spec.inputs(categorical=False, is_list=False) == ("n",)


def test_one_file_serves_models_that_know_other_channels() -> None:
    """Lists every id as `categorical` for a click model, and as `user_ch` and `item_ch` for a ranking one."""
    data = yaml.safe_load(NCF_TENSORS)
    data["channel_spec"]["categorical"] = ["user", "item"]
    spec = FeatureSpec.from_dict(data)
    assert spec.roles_of("item") == ("item", "context")
    assert spec.inputs() == ("user", "item")


def test_channels_may_be_empty() -> None:
    data = yaml.safe_load(WIDE_DEEP)
    for channel in ("multihot_categorical", "numerical", "map"):
        data["channel_spec"][channel] = None
    spec = FeatureSpec.from_dict(data)
    assert spec.inputs() == ()
    assert spec.group is None


# --- ids, cardinality, padding ---------------------------------------------------------------------------------------


def test_a_scalar_keeps_its_ids() -> None:
    spec = spec_of(x={"cardinality": 10})
    assert (spec.shift("x"), spec.num_ids("x"), spec.vocabulary("x")) == (0, 10, "x")
    assert not spec.reserves_unknown("x")


def test_a_list_without_declared_padding_is_shifted_by_one() -> None:
    spec = spec_of(x={"cardinality": 10, "length": 3})
    assert (spec.shift("x"), spec.num_ids("x")) == (1, 11)
    assert spec.reserves_unknown("x")


def test_a_list_whose_files_reserve_id_0_is_not_shifted() -> None:
    spec = spec_of(x={"cardinality": 10, "length": 3, "padding": 0})
    assert (spec.shift("x"), spec.num_ids("x")) == (0, 10)
    assert spec.reserves_unknown("x")


def test_features_of_one_vocabulary_are_shifted_together() -> None:
    spec = spec_of(item={"cardinality": 10}, seen={"cardinality": 10, "length": 3, "vocabulary": "item"})
    assert [spec.vocabulary(name) for name in ("item", "seen")] == ["item", "item"]
    assert [spec.shift(name) for name in ("item", "seen")] == [1, 1]
    assert [spec.num_ids(name) for name in ("item", "seen")] == [11, 11]


def test_a_vocabulary_that_is_no_feature_has_the_largest_cardinality_of_those_that_name_it() -> None:
    spec = spec_of(a={"cardinality": 10, "vocabulary": "word"}, b={"cardinality": 30, "vocabulary": "word"})
    assert spec.vocabulary("a") == spec.vocabulary("b") == "word"
    assert spec.num_ids("a") == spec.num_ids("b") == 30


def test_id_0_of_an_item_is_padding_where_a_history_of_items_says_so() -> None:
    spec = FeatureSpec.from_dict(yaml.safe_load(SIM_HISTORIES))
    assert [spec.reserves_unknown(name) for name in ("item", "items", "category", "user")] == [True, True, True, False]
    assert spec.num_ids("item") == spec.num_ids("items") == 50


def test_numbers_are_never_shifted() -> None:
    spec = spec_of(x={"length": 3}, y={})
    assert (spec.shift("x"), spec.shift("y")) == (0, 0)


def test_what_recspec_prepared_reserves_id_0_everywhere() -> None:
    data = yaml.safe_load(NCF_TENSORS)
    data["metadata"]["vocabularies"] = "vocabularies"
    assert FeatureSpec.from_dict(data).reserves_unknown("user")


def test_a_cardinality_that_is_auto_says_what_resolves_it(tmp_path: Path) -> None:
    spec = load(tmp_path, NCF_CSV)
    assert spec.features["user"].cardinality == "auto"
    with pytest.raises(SpecError) as caught:
        spec.num_ids("user")
    assert str(caught.value) == (
        "feature_spec.user.cardinality is 'auto', which only `recspec transcode DATA OUT` resolves"
    )


def test_a_feature_in_a_channel_of_ids_is_one_even_without_a_cardinality() -> None:
    data = yaml.safe_load(NCF_CSV)
    data["feature_spec"]["item"] = None
    spec = FeatureSpec.from_dict(data)
    assert spec.features["item"].cardinality == "auto"
    assert spec.features["item"].is_categorical


def test_dtypes_that_are_not_given() -> None:
    data = yaml.safe_load(WIDE_DEEP)
    spec = FeatureSpec.from_dict(data)
    assert spec.storage_dtype("topics") == np.int64
    assert spec.storage_dtype("ctr") == spec.storage_dtype("clicked") == np.float32
    # an impression's id, of which no table is made: float32 would merge those beyond 2^24
    assert spec.features["display_id"] == Feature(dtype="int64")
    data["feature_spec"]["display_id"] = {"dtype": "int32"}
    assert FeatureSpec.from_dict(data).storage_dtype("display_id") == np.int32
    data["feature_spec"]["display_id"] = {}
    data["channel_spec"]["numerical"].append("display_id")  # a number that also groups stays one
    assert FeatureSpec.from_dict(data | {"source_spec": {}}).storage_dtype("display_id") == np.float32


# --- who the user and the item are -----------------------------------------------------------------------------------


def test_the_id_is_the_roles_scalar_of_largest_cardinality() -> None:
    data = {
        "feature_spec": {
            "gender": {"cardinality": 3},
            "user": {"cardinality": 50},
            "clubs": {"cardinality": 900, "length": 4},
            "age": {},
            "item": {"cardinality": 7},
            "label": {},
        },
        "channel_spec": {"user": ["gender", "user", "clubs", "age"], "item": ["item"], "label": ["label"]},
    }
    spec = FeatureSpec.from_dict(data)
    assert (spec.user_id, spec.item_id) == ("user", "item")
    assert FeatureSpec.from_dict({**data, "metadata": {"user_id": "gender"}}).user_id == "gender"


def test_no_id_feature_is_said_where_one_is_needed() -> None:
    spec = spec_of(x={"cardinality": 3})
    with pytest.raises(SpecError, match=r"no scalar categorical feature plays the role 'user'; add the user's id to"):
        spec.user_id  # noqa: B018


def test_a_model_is_told_every_role_that_it_lacks() -> None:
    spec = spec_of(x={"cardinality": 3})
    spec.require(("context", "label"), "Model")
    with pytest.raises(SpecError) as caught:
        spec.require(("user", "item", "label"), "NeuMF")
    assert caught.value.problems == (
        "NeuMF needs a feature in the role 'item'; add one to channel_spec under 'item'",
        "NeuMF needs a feature in the role 'user'; add one to channel_spec under 'user'",
    )


@pytest.mark.parametrize(
    ("metadata", "role", "remedy"),
    [
        ({"dataset": "movielens", "test_samples_per_series": 3}, "history",
         "prepare it with --set history=50 (recspec prepare movielens ...)"),
        ({"dataset": "table"}, "history",
         "rows with a label have no history; prepare rows without a label, or train another model"),
        ({"dataset": "table"}, "user",
         "prepare rows that have the user's id, with --set user=COLUMN, or train another model"),
        ({"dataset": "adult"}, "item", "adult has none; train another model"),
    ],
)  # fmt: skip
def test_a_prepared_dataset_gets_a_missing_role_by_preparing_it_otherwise(
    metadata: dict[str, object], role: str, remedy: str
) -> None:
    spec = spec_of(x={"cardinality": 3}).replace(metadata=metadata)
    with pytest.raises(SpecError) as caught:
        spec.require((role,), "Model")
    assert caught.value.problems == (f"Model needs a feature in the role '{role}'; {remedy}",)


@pytest.mark.parametrize("name", ["ok.csv", "OK.Parquet", "ok.jsonl", "ok.csv.gz"])
def test_rows_in_place_of_a_specification_are_told_from_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"user_id,item_id\n1,2\n")
    with pytest.raises(SpecError, match=r"holds rows, and is not a specification; prepare it \(recspec prepare table"):
        FeatureSpec.load(tmp_path / name)


def test_an_unknown_split_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"unknown split 'tset' \(did you mean 'test'\?\); known: 'train', 'test'"):
        load(tmp_path, EXAMPLE).columns("tset")


def test_a_split_of_a_specification_without_files_says_how_to_make_some() -> None:
    with pytest.raises(SpecError, match=r"the specification names no files; `recspec synthesize` makes some$"):
        spec_of(x={"cardinality": 3}).columns("train")


# --- the object ------------------------------------------------------------------------------------------------------


def test_a_specification_can_not_be_changed(tmp_path: Path) -> None:
    spec = load(tmp_path, EXAMPLE)
    with pytest.raises(FrozenInstanceError):
        spec.features = {}  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.features["new"] = Feature()  # type: ignore[index]
    assert spec.sources["train"] is spec.sources["train"]
    assert isinstance(spec.sources["train"], tuple)


def test_copies_of_a_specification_are_equal_to_it(tmp_path: Path) -> None:
    spec = load(tmp_path, SIM_HISTORIES)
    assert copy.deepcopy(spec) is spec  # a model holds one, and must be copyable
    again = pickle.loads(pickle.dumps(spec))  # noqa: S301  # between processes
    assert again == spec
    assert again.folder == spec.folder


def test_replace_checks_again(tmp_path: Path) -> None:
    spec = load(tmp_path, EXAMPLE)
    assert spec.replace(metadata={"dataset": "mine"}).metadata == {"dataset": "mine"}
    with pytest.raises(SpecError, match="expected exactly one label feature; found none"):
        spec.replace(channels={})


def test_the_hash_is_of_what_a_model_depends_on(tmp_path: Path) -> None:
    spec = load(tmp_path, EXAMPLE)
    assert spec.content_hash() == spec.replace(metadata={"x": 1}, sources={}, folder=Path("other")).content_hash()
    wider = spec.replace(features={**spec.features, "item_id": Feature(dtype="int32", cardinality=857)})
    assert wider.content_hash() != spec.content_hash()
    assert len(spec.content_hash()) == 16


def test_where_the_files_lie_takes_no_part_in_equality(tmp_path: Path) -> None:
    spec = load(tmp_path, EXAMPLE)
    assert spec == spec.replace(folder=Path("elsewhere"))


# --- what is wrong ---------------------------------------------------------------------------------------------------

BASE = """\
feature_spec:
  user: {dtype: int32, cardinality: 5}
  item: {cardinality: 4}
  price: {}
  label: {}
source_spec:
  train:
  - {type: csv, features: [user, item], files: [a.csv]}
  - {type: csv, features: [price, label], files: [b.csv]}
channel_spec:
  user: [user]
  item: [item]
  context: [price]
  label: [label]
"""

# What stands in BASE, what stands there instead, and what is said about it: line, place, sentence. Sentences are also
# looked for in docs/feature_spec.md.
BROKEN: dict[str, tuple[str, str, str]] = {
    # sections
    "unknown section": (
        "feature_spec:\n  user",
        "features: {}\nfeature_spec:\n  user",
        (
            "line 1: features: unknown section 'features' (did you mean 'feature_spec'?); "
            "known: 'feature_spec', 'source_spec', 'channel_spec', 'metadata'"
        ),
    ),
    "section of another kind": (
        "channel_spec:\n  user: [user]\n  item: [item]\n  context: [price]\n  label: [label]\n",
        "channel_spec: [user, item]\n",
        "line 10: channel_spec: is ['user', 'item']; expected a mapping, one `name: ...` a line",
    ),
    "name that is no text": (
        "  price: {}",
        "  price: {}\n  no: {}",
        "line 1: feature_spec.False: the name False is no text; put it in quotes (no, on, 1 are not text in YAML)",
    ),
    "duplicate section": (
        "channel_spec:\n",
        "source_spec: {}\nchannel_spec:\n",
        "line 10: source_spec: stands twice, first in line 6; remove one",
    ),
    "duplicate feature": (
        "  price: {}",
        "  price: {}\n  item: {}",
        "line 5: feature_spec.item: stands twice, first in line 3; remove one",
    ),
    "duplicate key": (
        "{cardinality: 4}",
        "{cardinality: 4, cardinality: 5}",
        "line 3: feature_spec.item.cardinality: stands twice, first in line 3; remove one",
    ),
    # features
    "feature of another kind": (
        "price: {}",
        "price: float32",
        (
            "line 4: feature_spec.price: is 'float32'; expected what the column is, "
            "such as {dtype: int32, cardinality: 100}, or nothing"
        ),
    ),
    "unknown key": (
        "{cardinality: 4}",
        "{cardinalty: 4}",
        (
            "line 3: feature_spec.item.cardinalty: unknown key 'cardinalty' (did you mean 'cardinality'?); known: "
            "'dtype', "
            "'cardinality', 'length', 'vocabulary', 'padding', 'alpha', 'dimensions', "
            "'max_hotness', 'hotness', 'max_len'"
        ),
    ),
    "unknown dtype": (
        "price: {}",
        "price: {dtype: flaot32}",
        (
            "line 4: feature_spec.price.dtype: is 'flaot32' (did you mean 'float32'?); expected one "
            "of bool, int8, int16, "
            "int32, int64, uint8, uint16, uint32, float16, float32, float64"
        ),
    ),
    "ids in floating point": (
        "{cardinality: 4}",
        "{cardinality: 4, dtype: float32}",
        (
            "line 3: feature_spec.item.dtype: is float32, but a feature with a cardinality holds ids; "
            "expected an integer dtype"
        ),
    ),
    "cardinality that is no number of ids": (
        "{cardinality: 4}",
        "{cardinality: 0}",
        "line 3: feature_spec.item.cardinality: is 0; expected a number of ids, 1 or more, or 'auto'",
    ),
    "cardinality beyond the dtype": (
        "{cardinality: 4}",
        "{cardinality: 129, dtype: int8}",
        (
            "line 3: feature_spec.item.cardinality: is 129, but ids up to 128 do not fit int8, "
            "whose largest value is 127; "
            "use a wider dtype"
        ),
    ),
    "length that is no number of values": (
        "price: {}",
        "price: {dimensions: [3, 4]}",
        "line 4: feature_spec.price.length: is [3, 4]; expected the most values a row holds, 1 or more",
    ),
    "length given twice": (
        "price: {}",
        "price: {length: 3, hotness: 4}",
        "line 4: feature_spec.price: its length is given as 'length', 'hotness'; expected one of them",
    ),
    "padding other than 0": (
        "{cardinality: 4}",
        "{cardinality: 4, padding: -1}",
        (
            "line 3: feature_spec.item.padding: is -1; expected 0, the one id that can be padding; "
            "leave it out where the files pad with -1 or not at all"
        ),
    ),
    "padding of numbers": (
        "price: {}",
        "price: {length: 2, padding: 0}",
        "line 4: feature_spec.price.padding: is given, but the feature has no cardinality; only ids have one",
    ),
    "vocabulary that is no name": (
        "{cardinality: 4}",
        "{cardinality: 4, vocabulary: 3}",
        "line 3: feature_spec.item.vocabulary: is 3; expected the name of an id space",
    ),
    "vocabulary of numbers": (
        "price: {}",
        "price: {vocabulary: item}",
        "line 4: feature_spec.price.vocabulary: is given, but the feature has no cardinality; only ids have one",
    ),
    "vocabulary of another cardinality": (
        "{dtype: int32, cardinality: 5}",
        "{cardinality: 5, vocabulary: item}",
        "line 2: feature_spec.user.cardinality: is 5, but it shares the vocabulary 'item' whose cardinality is 4",
    ),
    "vocabulary that names another": (
        "  user: {dtype: int32, cardinality: 5}\n  item: {cardinality: 4}",
        "  user: {cardinality: 4, vocabulary: item}\n  item: {cardinality: 4, vocabulary: thing}",
        (
            "line 2: feature_spec.user.vocabulary: is 'item', a feature that itself names the vocabulary 'thing'; "
            "name 'thing' here too"
        ),
    ),
    "alpha that is no exponent": (
        "{cardinality: 4}",
        "{cardinality: 4, alpha: 0}",
        "line 3: feature_spec.item.alpha: is 0; expected a number above 0",
    ),
    # sources
    "split without a chunk": (
        "  train:\n",
        "  test: []\n  train:\n",
        (
            "line 7: source_spec.test: has no chunk; expected at least one with type, features and files, "
            "or leave the split out"
        ),
    ),
    "split that is no list": (
        "  train:\n",
        "  test: {type: csv}\n  train:\n",
        "line 7: source_spec.test: is {'type': 'csv'}; expected a list of chunks, each with type, features and files",
    ),
    "chunk that is no mapping": (
        "{type: csv, features: [user, item], files: [a.csv]}",
        "a.csv",
        "line 8: source_spec.train[0]: is 'a.csv'; expected a chunk: a mapping with type, features and files",
    ),
    "unknown chunk type": (
        "{type: csv, features: [user",
        "{type: cvs, features: [user",
        (
            "line 8: source_spec.train[0].type: unknown chunk type 'cvs' (did you mean 'csv'?); "
            "known: 'csv', 'parquet', 'split_binary', 'torch_tensor', 'tfrecord'"
        ),
    ),
    "unknown key of a chunk": (
        "files: [b.csv]",
        "files: [b.csv], header: true",
        "line 9: source_spec.train[1].header: unknown key 'header'; known: 'type', 'features', 'files'",
    ),
    "chunk without files": (
        ", files: [b.csv]",
        "",
        "line 9: source_spec.train[1].files: is missing",
    ),
    "chunk with an empty list": (
        "files: [b.csv]",
        "files: []",
        "line 9: source_spec.train[1].files: is empty; expected at least one name",
    ),
    "files that are no list": (
        "files: [b.csv]",
        "files: b.csv",
        "line 9: source_spec.train[1].files: is 'b.csv'; expected a list of names, such as [a, b]",
    ),
    "file that is no name": (
        "files: [b.csv]",
        "files: [7]",
        (
            "line 9: source_spec.train[1].files[0]: is 7; expected a name; "
            "put it in quotes (no, on, 1 are not text in YAML)"
        ),
    ),
    "chunk with an unknown feature": (
        "features: [user, item]",
        "features: [user, item, itme]",
        (
            "line 8: source_spec.train[0].features[2]: unknown feature 'itme' (did you mean 'item'?); "
            "known: 'user', 'item', 'price', 'label'"
        ),
    ),
    "feature in two chunks": (
        "features: [price, label]",
        "features: [price, label, user]",
        (
            "line 9: source_spec.train[1].features[2]: feature 'user' stands more than once in the split 'train'; "
            "expected once"
        ),
    ),
    "split that lacks a feature of a channel": (
        "features: [price, label]",
        "features: [label]",
        (
            "line 7: source_spec.train: no chunk holds the feature 'price' of the channel 'context'; "
            "every split holds every feature that a channel names"
        ),
    ),
    "file name that can't be one": (
        "files: [b.csv]",
        'files: ["b\\0.csv"]',
        "line 9: source_spec.train[1].files[0]: 'b\\x00.csv' is not the name of a file",
    ),
    # channels
    "unknown channel": (
        "  context: [price]",
        "  contxt: [price]",
        "line 13: channel_spec.contxt: unknown channel 'contxt' (did you mean 'context'?); known: "
        + ", ".join(f"'{name}'" for name in CHANNELS),
    ),
    "channel that is no list": (
        "  context: [price]",
        "  context: price",
        "line 13: channel_spec.context: is 'price'; expected a list of names, such as [a, b]",
    ),
    "channel with an unknown feature": (
        "  context: [price]",
        "  context: [price, prices]",
        (
            "line 13: channel_spec.context[1]: unknown feature 'prices' (did you mean 'price'?); "
            "known: 'user', 'item', 'price', 'label'"
        ),
    ),
    "feature twice in a channel": (
        "  context: [price]",
        "  context: [price, price]",
        (
            "line 13: channel_spec.context[1]: feature 'price' stands more than once in the channel 'context'; "
            "expected once"
        ),
    ),
    "ids in a channel of numbers": (
        "  context: [price]",
        "  numerical: [item]",
        "line 13: channel_spec.numerical[0]: 'item' has a cardinality, but the channel 'numerical' holds numbers",
    ),
    "scalar in a channel of lists": (
        "  context: [price]",
        "  history: [price]",
        (
            "line 13: channel_spec.history[0]: 'price' has no length, but the channel 'history' holds lists; "
            "give feature_spec.price.length"
        ),
    ),
    "list in a channel of scalars": (
        "  label: {}",
        "  label: {length: 2}",
        "line 14: channel_spec.label[0]: 'label' is a list, but the channel 'label' holds one value a row",
    ),
    "no label": (
        "  label: [label]\n",
        "",
        "line 10: channel_spec.label: expected exactly one label feature; found none",
    ),
    "two labels": (
        "  context: [price]\n",
        "  label_ch: [price]\n",
        "line 14: channel_spec.label: expected exactly one label feature; found 'price', 'label'",
    ),
    "label as an input": (
        "  context: [price]",
        "  context: [label]",
        "line 13: channel_spec.context[0]: 'label' is the label; it can't be an input too",
    ),
    "two groups": (
        "  context: [price]",
        "  context: [price]\n  group: [user]\n  map: [item]",
        "line 14: channel_spec.group: expected at most one group feature; found 'user', 'item'",
    ),
    "feature of user and item": (
        "  item: [item]",
        "  item: [item, user]",
        "line 12: channel_spec.item[1]: 'user' is in the role 'user' too; a feature describes the user or the item",
    ),
    # metadata
    "rows of a series": (
        "channel_spec:\n",
        "metadata: {test_samples_per_series: many}\nchannel_spec:\n",
        "line 10: metadata.test_samples_per_series: is 'many'; expected a number of rows, 1 or more",
    ),
    "user_id that is no feature": (
        "channel_spec:\n",
        "metadata: {user_id: usr}\nchannel_spec:\n",
        (
            "line 10: metadata.user_id: unknown feature 'usr' (did you mean 'user'?); known: 'user', 'item', 'price', "
            "'label'"
        ),
    ),
    "item_id of another role": (
        "channel_spec:\n",
        "metadata: {item_id: user}\nchannel_spec:\n",
        (
            "line 10: metadata.item_id: is 'user'; expected a feature in the role 'item' that has a cardinality "
            "and is no list"
        ),
    ),
    "cut-offs of another kind": (
        "channel_spec:\n",
        "metadata: {cut_offs: 12}\nchannel_spec:\n",
        "line 10: metadata.cut_offs: is 12; expected a list of whole numbers from 1, such as [12]",
    ),
    "leak that is no feature": (
        "channel_spec:\n",
        "metadata: {leak: prize}\nchannel_spec:\n",
        (
            "line 10: metadata.leak: unknown feature 'prize' (did you mean 'price'?); known: 'user', 'item', 'price', "
            "'label'"
        ),
    ),
    "leak that is an input": (
        "channel_spec:\n",
        "metadata: {leak: price}\nchannel_spec:\n",
        "line 10: metadata.leak: is 'price', which plays a role; a model must not read what gives the label away",
    ),
    "companion that is no path": (
        "channel_spec:\n",
        "metadata: {encoders: [encoders.json]}\nchannel_spec:\n",
        "line 10: metadata.encoders: is ['encoders.json']; expected a path beside the specification",
    ),
    "catalogues of another kind": (
        "channel_spec:\n",
        "metadata: {catalogues: items.parquet}\nchannel_spec:\n",
        (
            "line 10: metadata.catalogues: is 'items.parquet'; expected a mapping from 'user' or 'item' to a file, "
            "such as {item: items.parquet}"
        ),
    ),
}


def test_the_base_that_is_broken_below_is_sound(tmp_path: Path) -> None:
    assert load(tmp_path, BASE).splits == ("train",)


@pytest.mark.parametrize("case", BROKEN)
def test_each_violation_has_its_message(case: str, tmp_path: Path) -> None:
    old, new, message = BROKEN[case]
    assert old in BASE
    assert refused(tmp_path, BASE.replace(old, new, 1)) == [message]


def test_several_violations_are_reported_together_by_line(tmp_path: Path) -> None:
    text = BASE
    for case in ("unknown dtype", "unknown channel", "chunk with an unknown feature", "unknown section"):
        old, new, _ = BROKEN[case]
        text = text.replace(old, new, 1)
    (tmp_path / "feature_spec.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        FeatureSpec.load(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{tmp_path / 'feature_spec.yaml'}: 4 problems"
    assert [line[:39] for line in lines[1:]] == [
        "  - line 1: features: unknown section '",
        "  - line 5: feature_spec.price.dtype: i",
        "  - line 9: source_spec.train[0].featur",
        "  - line 14: channel_spec.contxt: unkno",
    ]


def test_a_broken_part_causes_no_further_complaints(tmp_path: Path) -> None:
    """Each is reported once, where it is, and not again where something else relies on it."""
    text = BASE.replace("item: {cardinality: 4}", "item: {cardinality: many}").replace(
        "item: [item]", "history: [item]"
    )
    text += "metadata: {item_id: item}\n"
    assert [problem[:44] for problem in refused(tmp_path, text)] == ["line 3: feature_spec.item.cardinality: is 'm"]
    text = BASE.replace("label: [label]", "label: label")
    assert [problem[:40] for problem in refused(tmp_path, text)] == ["line 14: channel_spec.label: is 'label';"]
    text = BASE.replace("files: [a.csv]", "files: a.csv")
    assert [problem[:46] for problem in refused(tmp_path, text)] == ["line 8: source_spec.train[0].files: is 'a.csv'"]


def test_from_dict_says_the_same_without_lines() -> None:
    with pytest.raises(SpecError) as caught:
        FeatureSpec.from_dict({"feature_spec": {"a": {"dtype": "int46"}, 1: {}}, "sources": {}})
    assert str(caught.value).splitlines()[0] == "feature specification: 4 problems"
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "channel_spec.label",
        "feature_spec.1",
        "feature_spec.a.dtype",
        "sources",
    ]


def test_no_section_at_all_is_said() -> None:
    with pytest.raises(SpecError, match="feature specification: feature_spec: this section is missing"):
        FeatureSpec.from_dict({})
    with pytest.raises(SpecError, match="feature_spec: holds no feature; expected at least a label"):
        FeatureSpec.from_dict({"feature_spec": {}})


def test_an_error_can_go_from_one_process_to_another() -> None:
    with pytest.raises(SpecError) as caught:
        FeatureSpec.from_dict({})
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (type(again), str(again), again.problems) == (SpecError, str(caught.value), caught.value.problems)


# --- files that lie elsewhere ----------------------------------------------------------------------------------------


def outside(file: str) -> str:
    return BASE.replace("files: [b.csv]", f"files: [{file}]")


@pytest.mark.parametrize("file", ["../b.csv", "sub/../../b.csv", "/etc/hosts"])
def test_files_may_not_lie_outside_the_folder(file: str, tmp_path: Path) -> None:
    assert refused(tmp_path, outside(file)) == [
        (
            f"line 9: source_spec.train[1].files[0]: '{file}' leads outside the folder {tmp_path}; "
            "move it there, or pass --allow-outside"
        )
    ]
    spec = load(tmp_path, outside(file), allow_outside=True)
    assert spec.path(file) == tmp_path / file
    assert spec.replace(metadata={"kept": True}).allow_outside


@pytest.mark.parametrize("file", ["sub/b.csv", "./b.csv", "sub/../b.csv"])
def test_files_may_lie_anywhere_inside_it(file: str, tmp_path: Path) -> None:
    assert load(tmp_path, outside(file)).path(file) == tmp_path / file


def test_a_link_that_leads_outside_is_outside(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.csv").write_text("1,0\n")
    inside = tmp_path / "data"
    inside.mkdir()
    (inside / "b.csv").symlink_to(tmp_path / "elsewhere" / "b.csv")
    (inside / "folder").symlink_to(tmp_path / "elsewhere")
    for file in ("b.csv", "folder/b.csv"):
        (problem,) = refused(inside, outside(file))
        assert f"'{file}' leads outside the folder {inside}" in problem
    (inside / "b.csv").unlink()
    (inside / "c.csv").write_text("1,0\n")
    (inside / "b.csv").symlink_to("c.csv")
    load(inside, outside("b.csv"))  # a link within the folder stays inside


def test_a_folder_that_is_a_link_itself_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert load(tmp_path / "link", BASE).folder == tmp_path / "link"


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.csv").symlink_to(tmp_path / "c.csv")
    (tmp_path / "c.csv").symlink_to(tmp_path / "b.csv")
    (problem,) = refused(tmp_path, BASE)
    assert "source_spec.train[1].files[0]: 'b.csv' leads into a circle of links" in problem


# --- files that are no specification ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected sections feature_spec, source_spec, channel_spec; found nothing"),
        ("hello", "expected sections feature_spec, source_spec, channel_spec; found 'hello'"),
        ("- a\n- b\n", "expected sections feature_spec, source_spec, channel_spec; found ['a', 'b']"),
        ("a: [1, 2\nb: 3\n", "line 2, column 2: not valid YAML: expected ',' or ']', but got ':'"),
        ("a:\n\tb: 1\n", "line 2, column 1: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: not valid YAML: but found another document"),
        ("a: !!python/name:os.system\n", ("line 1, column 4: not valid YAML: could not determine a constructor for the "
         "tag 'tag:yaml.org,2002:python/name:os.system'")),
        ("a: 2020-13-45\n", "not valid YAML: month must be in 1..12"),
        ("a: &loop\n  b: *loop\n", "line 1, column 4: not valid YAML: a value that holds itself"),
        ("a: " + "[" * 1500, "not valid YAML: lists and mappings are nested too deeply"),
        ("a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
         "line 19, column 6: not valid YAML: its aliases make more than 1,000,000 values of it"),
    ],
    ids=["empty", "a word", "a list", "a bracket", "a tab", "two documents", "an object", "a date", "a loop", "deep",
         "a bomb"],
)  # fmt: skip
def test_what_is_no_specification(text: str, message: str, tmp_path: Path) -> None:
    assert refused(tmp_path, text) == [f"{tmp_path / 'feature_spec.yaml'}: {message}"]


def test_bytes_that_are_no_text_are_said(tmp_path: Path) -> None:
    (tmp_path / "feature_spec.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match=r"feature_spec.yaml: can't be read as text: "):
        FeatureSpec.load(tmp_path)
    (tmp_path / "feature_spec.yaml").write_text("a: \x01\n")
    with pytest.raises(SpecError, match=r"feature_spec.yaml: not valid YAML: unacceptable character #x0001"):
        FeatureSpec.load(tmp_path)


def test_a_path_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(EXAMPLE)
    with pytest.raises(SpecError) as caught:
        FeatureSpec.load(tmp_path / "mien.yaml")
    assert str(caught.value) == f"{tmp_path / 'mien.yaml'}: no such file or folder (did you mean 'mine.yaml'?)"
    with pytest.raises(SpecError) as caught:
        FeatureSpec.load(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: no feature_spec.yaml in this folder, so it is not a prepared dataset; "
        "found 'mine.yaml': name the one you mean"
    )
    with pytest.raises(SpecError, match=r"no such file or folder$"):
        FeatureSpec.load(tmp_path / "nowhere" / "at all")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "feature_spec.yaml").write_text(EXAMPLE)
    (tmp_path / "feature_spec.yaml").chmod(0)
    with pytest.raises(SpecError, match=r"can't be read as text: .*Permission denied"):
        FeatureSpec.load(tmp_path)


# --- JSON Schema -----------------------------------------------------------------------------------------------------


def schema_errors(text: str) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_json_schema_accepts_every_shape_in_use(shape: str) -> None:
    assert schema_errors(SHAPES[shape]) == []


def test_the_json_schema_accepts_every_published_file(real_data: Callable[[str], Path]) -> None:
    for file in sorted(real_data("feature-specs").rglob("*.yaml")):
        assert schema_errors(file.read_text()) == [], file


@pytest.mark.parametrize(
    "case",
    ["unknown section", "unknown key", "unknown channel", "unknown chunk type", "chunk without files", "no label"],
)
def test_the_json_schema_refuses_what_it_can_see(case: str) -> None:
    old, new, _ = BROKEN[case]
    assert bool(schema_errors(BASE.replace(old, new, 1))) == (case != "no label")  # that takes the whole file


def test_the_json_schema_describes_every_key() -> None:
    schema = json_schema()
    definitions = schema["$defs"]
    for model in (Feature, Chunk):
        properties = definitions[model.__name__]["properties"]  # type: ignore[index]
        assert set(model.model_fields) <= set(properties)
        assert all("description" in found for found in properties.values())
    assert definitions["Chunk"]["properties"]["type"]["enum"] == list(CHUNK_TYPES)  # type: ignore[index]
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
