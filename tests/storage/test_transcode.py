"""Datasets written again in another chunk type, with their catalogues, vocabularies and encoders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import DataError, SpecError
from recspec.data.storage import SplitWriter, open_split, transcode
from recspec.feature_spec import CHUNK_TYPES, ChunkType, Feature, FeatureSpec
from tests.storage.files import assert_equal, list_spec, spec_of, text_spec, written


@pytest.mark.parametrize("to", CHUNK_TYPES)
@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_every_type_becomes_every_other_and_back(kind: ChunkType, to: ChunkType, tmp_path: Path) -> None:
    spec, _ = written(tmp_path / "a", 50, kind, 20, to)
    there = transcode(spec, tmp_path / "b", to)
    back = transcode(there, tmp_path / "c", kind)
    assert FeatureSpec.load(tmp_path / "b") == there
    assert {chunk.type for chunk in there.sources["train"]} == {to}
    expected = open_split(spec, "train").read(0, 50)
    for found in (there, back):
        columns = open_split(found, "train").read(0, 50)
        assert_equal({name: columns[name] for name in expected}, expected)
        assert dict(found.features) == dict(spec.features)


def test_tfrecord_holds_float32_only(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'weight' is float64, but tfrecord holds float32 only"):
        SplitWriter(tmp_path, "train", {"weight": Feature(dtype="float64")}, "tfrecord")
    spec, columns = written(tmp_path / "a", 5, "parquet")
    there = transcode(spec, tmp_path / "b", "tfrecord")
    assert there.features["weight"].dtype == "float32"
    np.testing.assert_array_equal(
        open_split(there, "train").read(0, 5)["weight"], np.asarray(columns["weight"]).astype(np.float32)
    )


@pytest.mark.parametrize("to", CHUNK_TYPES)
def test_lists_without_declared_padding_keep_id_zero(to: ChunkType, tmp_path: Path) -> None:
    spec = list_spec(tmp_path, [[0, 7], [9], [], [1, 2, 3]], [0, 1, 2, 9])
    there = transcode(spec, tmp_path / "out", to)
    columns = open_split(there, "train").read(0, 4)
    assert columns["history"].tolist() == [[1, 8], [10], [], [2, 3, 4]]
    assert columns["item"].tolist() == [1, 2, 3, 10]


def test_transcode_resolves_cardinalities_over_all_splits_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,3,0\n2,0,1\n")
    (tmp_path / "b.csv").write_text("0,299,0\n")
    chunk = {"type": "csv", "features": ["user", "item", "label"]}
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"user": {}, "item": {"cardinality": "auto"}, "label": {}, "big": {"cardinality": 500}},
            "source_spec": {"train": [{**chunk, "files": ["a.csv"]}], "fold_2": [{**chunk, "files": ["b.csv"]}]},
            "channel_spec": {"user_ch": ["user"], "item_ch": ["item"], "label_ch": ["label"]},
            "metadata": {"test_samples_per_series": 1},
        },
        tmp_path,
    )
    told: list[tuple[int, int]] = []
    there = transcode(spec, tmp_path / "out", progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 3), (3, 3)]
    assert {name: (feature.cardinality, feature.dtype) for name, feature in there.features.items()} == {
        "user": (3, "int8"),
        "item": (300, "int16"),
        "label": (None, "float32"),
        "big": (500, "int16"),
    }
    assert (there.splits, dict(there.metadata)) == (("train", "fold_2"), {"test_samples_per_series": 1})
    assert there.channels == spec.channels
    tensors = transcode(spec, tmp_path / "tensors", "torch_tensor")
    assert {feature.dtype for feature in tensors.features.values() if feature.is_categorical} == {"int64"}
    assert [chunk.features for chunk in tensors.sources["train"]] == [("user", "item"), ("label",)]


def test_features_of_one_vocabulary_resolve_to_one_cardinality(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('1,"[1, 5]",0\n')
    features = {"item": {"cardinality": "auto"}, "history": {"cardinality": "auto", "length": 3, "vocabulary": "item"}}
    sources = {"train": [{"type": "csv", "features": ["item", "history", "label"], "files": ["t.csv"]}]}
    there = transcode(spec_of(tmp_path, features, sources), tmp_path / "out")
    assert [there.features[name].cardinality for name in ("item", "history")] == [6, 6]
    assert open_split(there, "train").read(0, 1)["history"].tolist() == [[2, 6]]


def test_transcode_keeps_a_declared_cardinality_and_refuses_ids_beyond_it(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "3,0\n", {"a": {"cardinality": 100}}, ["a", "label"])
    assert transcode(spec, tmp_path / "ok").features["a"].cardinality == 100
    spec.save(tmp_path)
    with pytest.raises(DataError, match="holds a dataset already"):
        transcode(spec, tmp_path)
    spec = text_spec(tmp_path, "3,0\n", {"a": {"cardinality": 3}}, ["a", "label"])
    with pytest.raises(DataError, match=r"train.csv, column 'a', row 1: 3 is too large for an id"):
        transcode(spec, tmp_path / "bad")
    assert not (tmp_path / "bad" / "feature_spec.yaml").exists()


# --- companions -------------------------------------------------------------------------------------------------------


def test_transcode_takes_the_companions_along(tmp_path: Path) -> None:
    source = tmp_path / "a"
    (source / "vocabularies").mkdir(parents=True)
    for name in ("vocabularies/a.parquet", "items.parquet", "encoders.json", "prepare.json"):
        (source / name).write_text(name)
    metadata = {"catalogues": {"item": "items.parquet"}, "encoders": "encoders.json", "vocabularies": "vocabularies"}
    (source / "t.csv").write_text("0,0\n")
    sources = {"train": [{"type": "csv", "features": ["a", "label"], "files": ["t.csv"]}]}
    spec = spec_of(source, {"a": {"cardinality": 1}}, sources, metadata=metadata)
    transcode(spec, tmp_path / "b")
    for name in ("vocabularies/a.parquet", "items.parquet", "encoders.json", "prepare.json"):
        assert (tmp_path / "b" / name).read_text() == name


def test_companions_that_are_missing_or_outside_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("")
    (tmp_path / "in" / "encoders.json").write_text("")
    (tmp_path / "in" / "t.csv").write_text("0\n")
    sources = {"train": [{"type": "csv", "features": ["label"], "files": ["t.csv"]}]}
    metadata = {"catalogues": {"item": "../secret"}}
    with pytest.raises(SpecError, match=r"metadata.catalogues.item: '../secret' leads outside the folder"):
        spec_of(tmp_path / "in", {}, sources, metadata=metadata)
    spec = spec_of(tmp_path / "in", {}, sources, metadata={"encoders": "encoder.json"})
    with pytest.raises(DataError, match=r"names 'encoder.json', which does not exist \(did you mean 'encoders.json'"):
        transcode(spec, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret"], "nothing is left behind"
