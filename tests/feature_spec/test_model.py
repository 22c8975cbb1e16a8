"""What a specification means."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import yaml

from recspec.base.errors import SpecError
from recspec.feature_spec import Feature, FeatureSpec
from tests.feature_spec.files import EXAMPLE, NCF_CSV, NCF_TENSORS, SHAPES, SIM_HISTORIES, WIDE_DEEP, load, spec_of


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_in_use_loads_and_comes_back_the_same(shape: str, tmp_path: Path) -> None:
    spec = load(tmp_path, SHAPES[shape])
    saved = spec.save(tmp_path / "again")
    assert saved == tmp_path / "again" / "feature_spec.yaml"
    again = FeatureSpec.load(saved)
    assert again == spec
    assert again.save(tmp_path / "once more").read_bytes() == saved.read_bytes()
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
    ids = ("user_gender", "user_id", "item_id")
    assert tuple(name for name, feature in spec.features.items() if feature.is_categorical) == ids
    assert spec.role("user") == ("user_gender", "user_id")
    assert spec.role("item") == ("item_id",)
    assert spec.role("context") == ("user_age",)
    assert (spec.label, spec.group, spec.user_id, spec.item_id) == ("label", None, "user_id", "item_id")
    assert spec.splits == ("train", "test")
    assert spec.columns("train") == ("user_gender", "user_age", "user_id", "item_id", "label")
    assert spec.columns("test") == ("user_id", "item_id", "label", "user_gender", "user_age")
    assert spec.sources["train"][0].files == ("train_data_0_0.csv", "train_data_0_1.csv")
    assert spec.path("test_data.csv") == tmp_path / "test_data.csv"
    assert [spec.num_ids(name) for name in ids] == [3, 2655, 856]
    assert not spec.has_series


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
    assert FeatureSpec.from_dict(data | {"channel_spec": {"categorical": None, "label": ["label"]}}).inputs() == ()


def test_one_file_serves_models_that_know_other_channels() -> None:
    """Lists every id as `categorical` for a click model, and as `user_ch` and `item_ch` for a ranking one."""
    data = yaml.safe_load(NCF_TENSORS)
    data["channel_spec"]["categorical"] = ["user", "item"]
    spec = FeatureSpec.from_dict(data)
    assert spec.roles_of("item") == ("item", "context")
    assert spec.inputs() == ("user", "item")


X = {"cardinality": 10}


@pytest.mark.parametrize(
    ("features", "shift", "num_ids", "reserves"),
    [
        ({"x": X}, 0, 10, False),
        ({"x": {**X, "length": 3}}, 1, 11, True),  # a list without declared padding
        ({"x": {**X, "length": 3, "padding": 0}}, 0, 10, True),  # whose files reserve id 0
        ({"x": {**X, "vocabulary": "y"}, "y": {**X, "length": 3}}, 1, 11, True),  # one vocabulary is shifted together
        ({"x": {**X, "vocabulary": "w"}, "y": {"cardinality": 30, "vocabulary": "w"}}, 0, 30, False),  # the largest
    ],
)
def test_ids_are_shifted_where_a_list_of_their_vocabulary_declares_no_padding(
    features: dict[str, dict[str, object]], shift: int, num_ids: int, reserves: bool
) -> None:
    spec = spec_of(**features)
    assert {(spec.shift(name), spec.num_ids(name)) for name in features} == {(shift, num_ids)}
    assert {spec.vocabulary(name) for name in features} == {spec.vocabulary("x")}
    assert spec.reserves_unknown("x") == reserves
    assert spec_of(n={"length": 3}).shift("n") == 0, "numbers never are"


def test_id_0_of_an_item_is_padding_where_a_history_of_items_says_so() -> None:
    spec = FeatureSpec.from_dict(yaml.safe_load(SIM_HISTORIES))
    assert [spec.reserves_unknown(name) for name in ("item", "items", "category", "user")] == [True, True, True, False]
    assert spec.num_ids("item") == spec.num_ids("items") == 50
    data = yaml.safe_load(NCF_TENSORS)
    data["metadata"]["vocabularies"] = "vocabularies"  # as recspec prepares it
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
        (
            {"dataset": "movielens", "test_samples_per_series": 3},
            "history",
            "prepare it with --set history=50 (recspec prepare movielens ...)",
        ),
        (
            {"dataset": "table"},
            "history",
            "rows with a label have no history; prepare rows without a label, or train another model",
        ),
        (
            {"dataset": "table"},
            "user",
            "prepare rows that have the user's id, with --set user=COLUMN, or train another model",
        ),
        ({"dataset": "adult"}, "item", "adult has none; train another model"),
    ],
)
def test_a_prepared_dataset_gets_a_missing_role_by_preparing_it_otherwise(
    metadata: dict[str, object], role: str, remedy: str
) -> None:
    spec = spec_of(x={"cardinality": 3}).replace(metadata=metadata)
    with pytest.raises(SpecError) as caught:
        spec.require((role,), "Model")
    assert caught.value.problems == (f"Model needs a feature in the role '{role}'; {remedy}",)


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
    assert spec == spec.replace(folder=Path("elsewhere")), "where the files lie takes no part in equality"
    with pytest.raises(SpecError, match=r"unknown split 'tset' \(did you mean 'test'\?\); known: 'train', 'test'"):
        spec.columns("tset")
    with pytest.raises(SpecError, match=r"the specification names no files; `recspec synthesize` makes some$"):
        spec.replace(sources={}).columns("train")
    with pytest.raises(SpecError, match="expected a label feature; found none"):
        spec.replace(channels={})


def test_the_hash_is_of_what_a_model_depends_on(tmp_path: Path) -> None:
    spec = load(tmp_path, EXAMPLE)
    assert spec.content_hash() == spec.replace(metadata={"x": 1}, sources={}, folder=Path("other")).content_hash()
    wider = spec.replace(features={**spec.features, "item_id": Feature(dtype="int32", cardinality=857)})
    assert wider.content_hash() != spec.content_hash()
    assert len(spec.content_hash()) == 16
