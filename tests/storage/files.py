"""Small datasets for the tests of storage, and what is said about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.data.storage import Columns, Ragged, SplitWriter, open_split
from recspec.data.storage.check import check_split
from recspec.data.storage.ragged import rows_of
from recspec.feature_spec import ChunkType, FeatureSpec

FEATURES: dict[str, dict[str, object]] = {
    "user": {"dtype": "int32", "cardinality": 50},
    "item": {"dtype": "int16", "cardinality": 300},
    "genres": {"dtype": "int8", "cardinality": 9, "length": 3, "padding": 0},
    "price": {"dtype": "float32"},
    "weight": {"dtype": "float64"},
    "half": {"dtype": "float16"},
    "age": {"dtype": "int8"},
    "title": {"dtype": "float32", "length": 3, "vector": True},
    "clicked": {"dtype": "bool"},
}
UNEQUAL = "split 'train': its chunks must hold the same number of rows; found"
BEYOND = "is too large for an id: the cardinality is 5, so ids are 0 to 4"
NOT_SCALAR = "holds lists; expected one value a row (a list feature has a `length` in feature_spec)"
NOT_LIST = "holds one value a row; expected lists, because the feature has a `length` in feature_spec"
CHANNELS = {"user": ["user", "age"], "item": ["item", "genres", "title"], "context": ["price", "weight", "half"]}


def spec_of(
    folder: Path,
    features: Mapping[str, Mapping[str, object]],
    sources: Mapping[str, object] | None = None,
    *,
    label: str = "label",
    **sections: Any,
) -> FeatureSpec:
    """A specification whose features are all context, but for the label."""
    channels = sections.pop("channels", None) or {"context": [name for name in features if name != label]}
    data = {
        "feature_spec": {label: {}, **features},
        "source_spec": sources or {},
        "channel_spec": {**channels, "label": [label]},
        **sections,
    }
    return FeatureSpec.from_dict(data, folder)


def made_up(num_rows: int, seed: int = 0) -> Columns:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, num_rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return {
        "user": random.integers(0, 50, num_rows).astype(np.int32),
        "item": random.integers(0, 300, num_rows).astype(np.int16),
        "genres": Ragged(random.integers(1, 9, offsets[-1]).astype(np.int8), offsets),
        "price": random.normal(size=num_rows).astype(np.float32),
        "weight": random.normal(size=num_rows),
        "half": random.normal(size=num_rows).astype(np.float16),
        "age": random.integers(-128, 128, num_rows).astype(np.int8),
        "title": Ragged.of_rectangle(random.normal(size=(num_rows, 3)).astype(np.float32)),
        "clicked": random.integers(0, 2, num_rows).astype(np.bool_),
    }


def written(
    folder: Path, num_rows: int, kind: ChunkType, rows_per_file: int | None = None, to: ChunkType = "parquet"
) -> tuple[FeatureSpec, Columns]:
    """Made-up rows in a split `train`; tfrecord, here or to come, has no float64."""
    weight = "float32" if "tfrecord" in (kind, to) else "float64"
    columns = made_up(num_rows)
    columns["weight"] = np.asarray(columns["weight"]).astype(weight)
    spec = spec_of(folder, {**FEATURES, "weight": {"dtype": weight}}, label="clicked", channels=CHANNELS)
    with SplitWriter(folder, "train", spec.features, kind, rows_per_file=rows_per_file, label="clicked") as writer:
        for start in range(0, num_rows, 7):
            writer.write(rows_of(columns, start, start + 7))
    return spec.replace(sources={"train": writer.chunks}), columns


def assert_equal(found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    assert set(found) == set(expected)
    for name, column in expected.items():
        other = found[name]
        if isinstance(column, Ragged):
            assert isinstance(other, Ragged)
            assert other.tolist() == column.tolist(), name
            assert other.values.dtype == column.values.dtype
        else:
            assert isinstance(column, np.ndarray)
            assert isinstance(other, np.ndarray)
            assert other.dtype == column.dtype, name
            np.testing.assert_array_equal(other, column, err_msg=name)


def text_spec(folder: Path, rows: str, features: Mapping[str, Mapping[str, object]], names: list[str]) -> FeatureSpec:
    """A one-file CSV split `train`."""
    (folder / "train.csv").write_text(rows)
    sources = {"train": [{"type": "csv", "features": names, "files": ["train.csv"]}]}
    return spec_of(folder, features, sources)


def parquet_spec(
    folder: Path, columns: pa.Table | Mapping[str, object], features: Mapping[str, Mapping[str, object]], **more: Any
) -> FeatureSpec:
    """A one-file Parquet split `train` of the features and the label."""
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), folder / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": [*features, "label"], "files": ["t.parquet"]}]}
    return spec_of(folder, features, sources, **more)


def problems_of(spec: FeatureSpec, split: str = "train") -> list[str]:
    """What reading the whole split says; `check` must say the same."""
    with pytest.raises(DataError) as caught:
        for _ in open_split(spec, split).batches():
            pass
    assert sorted(check_split(spec, split)[0]) == sorted(caught.value.problems)
    return list(caught.value.problems)


def list_spec(folder: Path, lists: list[list[int]], ids: list[int], **feature: object) -> FeatureSpec:
    columns = {"history": pa.array(lists, pa.list_(pa.int64())), "item": ids, "label": [0] * len(ids)}
    features = {
        "item": {"cardinality": 10, "vocabulary": "items", "dtype": "int8"},
        "history": {"cardinality": 10, "length": 3, "vocabulary": "items", **feature},
    }
    return parquet_spec(folder, columns, features, channels={"item": ["item"], "history": ["history"]})
