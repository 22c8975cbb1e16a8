"""Chunks of Parquet, of raw little-endian rows, and of tensors, whose pickled objects are never loaded."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from recspec.data.storage import Ragged, SplitWriter, open_split
from recspec.feature_spec import Feature
from tests.storage.files import parquet_spec, problems_of, spec_of, written

ID: dict[str, object] = {"cardinality": 5}


def test_parquet_columns_are_found_by_name_even_when_names_hold_dots(tmp_path: Path) -> None:
    table = {"a.b": [1, 2], "extra": ["x", "y"], "a": [3, 4], "label": [0, 1]}
    columns = open_split(parquet_spec(tmp_path, table, {"a": ID, "a.b": ID}), "train").read(0, 2)
    assert (columns["a"].tolist(), columns["a.b"].tolist()) == ([3, 4], [1, 2])


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int8()), pa.list_(pa.int32(), 2)])
def test_parquet_lists_of_every_arrow_kind(kind: pa.DataType, tmp_path: Path) -> None:
    table = {"genres": pa.array([[1, 2], None, [3, 4]], kind), "label": [0, 1, 0]}
    reader = open_split(parquet_spec(tmp_path, table, {"genres": {**ID, "length": 2, "padding": 0}}), "train")
    assert reader.read(0, 3)["genres"].tolist() == [[1, 2], [], [3, 4]]
    assert reader.read(2, 3)["genres"].tolist() == [[3, 4]]


EMPTY = "is empty; every row needs a value"


@pytest.mark.parametrize(
    ("names", "columns", "problems"),
    [
        (
            ["a", "b", "label"],
            [[1, None, None], [[1], [2, None], []], [0.0, 1.0, None]],
            [
                f", column 'a', row 2: {EMPTY} (and 1 more row like it)",
                f", column 'b', row 2: {EMPTY}",
                f", column 'label', row 3: {EMPTY}",
            ],
        ),
        (
            ["as", "b", "label"],
            [[1], [[1]], [1.0]],
            [": has no column 'a' (did you mean 'as'?); it holds 'as', 'b', 'label'"],
        ),
        (["a", "b", "label", "a"], [[1], [[1]], [1.0], [2]], [": has more than one column 'a'; rename them"]),
    ],
)
def test_missing_values_and_columns_in_parquet_are_named(
    names: list[str], columns: list[object], problems: list[str], tmp_path: Path
) -> None:
    spec = parquet_spec(tmp_path, pa.table(columns, names=names), {"a": ID, "b": {**ID, "length": 2}})
    assert problems_of(spec) == [f"t.parquet{problem}" for problem in problems]


def test_a_parquet_file_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    spec = parquet_spec(tmp_path, {"label": np.arange(1000.0)}, {})
    data = bytearray((tmp_path / "t.parquet").read_bytes())
    data[4:400] = bytes(396)
    (tmp_path / "t.parquet").write_bytes(bytes(data))
    [problem] = problems_of(spec)
    assert problem.startswith("t.parquet: row group 1 is damaged: ")


def test_the_values_of_lists_are_counted_where_parquet_knows_them(tmp_path: Path) -> None:
    spec, columns = written(tmp_path, 100, "parquet")
    genres = columns["genres"]
    assert isinstance(genres, Ragged)
    reader = open_split(spec, "train", ["user", "genres"])
    # Parquet counts an empty list as one value
    empty = int((genres.lengths == 0).sum())
    assert reader.num_values == {"user": 100, "genres": len(genres.values) + empty}


# --- split_binary -----------------------------------------------------------------------------------------------------


def test_memory_mapped_files_are_cut_evenly(tmp_path: Path) -> None:
    spec, _ = written(tmp_path, 100, "split_binary")
    assert open_split(spec, "train").blocks(40).tolist() == [0, 40, 80, 100]


def test_split_binary_is_what_the_published_format_says_byte_for_byte(tmp_path: Path) -> None:
    features = {
        "num_0": Feature(dtype="float16"),
        "num_1": Feature(dtype="float16"),
        "cat_0.bin": Feature(dtype="int8", cardinality=5),
        "cat/1": Feature(dtype="int32", cardinality=70000),
        "label": Feature(dtype="bool"),
    }
    with SplitWriter(tmp_path, "train", features, "split_binary", label="label") as writer:
        writer.write(
            {
                "num_0": np.array([1, 2], np.float16),
                "num_1": np.array([0.5, 0], np.float16),
                "cat_0.bin": np.array([4, 0]),
                "cat/1": np.array([1, 65536]),
                "label": np.array([True, False]),
            }
        )
    assert {(chunk.features, chunk.files) for chunk in writer.chunks} == {
        (("num_0", "num_1"), ("train/numerical.bin",)),
        (("cat_0.bin",), ("train/cat_0.bin",)),
        (("cat/1",), ("train/cat_1.bin",)),
        (("label",), ("train/label.bin",)),
    }
    read = {path.name: path.read_bytes() for path in (tmp_path / "train").iterdir()}
    assert read == {
        "numerical.bin": bytes.fromhex("003c 0038 0040 0000"),
        "cat_0.bin": bytes([4, 0]),
        "cat_1.bin": bytes.fromhex("01000000 00000100"),
        "label.bin": bytes([1, 0]),
    }


def test_a_row_wider_than_numpy_can_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(32))
    sources = {"train": [{"type": "split_binary", "features": ["x", "label"], "files": ["x.bin"]}]}
    spec = spec_of(tmp_path, {"x": {"dtype": "float32", "length": 2**31 - 1}}, sources)
    row = "a row has 8,589,934,592 bytes, 8,589,934,588 of them of 'x'"
    assert problems_of(spec) == [
        f"x.bin: {row}; a row of split_binary has at most 2,147,483,647: give a smaller length"
    ]


# --- torch_tensor -----------------------------------------------------------------------------------------------------


def test_torch_tensors_hold_one_dtype_each_as_published(tmp_path: Path) -> None:
    features = {
        "user": Feature(dtype="int64", cardinality=9),
        "item": Feature(dtype="int64", cardinality=9),
        "label": Feature(dtype="float32"),
    }
    with SplitWriter(tmp_path, "test", features, "torch_tensor", label="label") as writer:
        writer.write({"user": np.array([1, 2]), "item": np.array([3, 4]), "label": np.array([1.0, 0.0])})
    ids = torch.load(tmp_path / "test/data_0.pt", weights_only=True)
    labels = torch.load(tmp_path / "test/data_1.pt", weights_only=True)
    assert (ids.dtype, ids.tolist()) == (torch.int64, [[1, 3], [2, 4]])
    assert (labels.dtype, labels.tolist()) == (torch.float32, [[1.0], [0.0]])


def test_old_and_one_dimensional_tensors_are_read(tmp_path: Path) -> None:
    torch.save(torch.tensor([1, 2, 3]), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.bfloat16), tmp_path / "b.pt")
    sources = {
        "train": [
            {"type": "torch_tensor", "features": ["a"], "files": ["a.pt"]},
            {"type": "torch_tensor", "features": ["label"], "files": ["b.pt"]},
        ]
    }
    columns = open_split(spec_of(tmp_path, {"a": {"cardinality": 5}}, sources), "train").read(0, 3)
    assert (columns["a"].tolist(), columns["label"].tolist()) == ([1, 2, 3], [1, 0, 1])


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "a.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"model": Evil()}, tmp_path / "b.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "c.pt")
    torch.save(torch.zeros(2, 3), tmp_path / "d.pt")
    files = ["a.pt", "b.pt", "c.pt", "d.pt"]
    spec = spec_of(tmp_path, {}, {"train": [{"type": "torch_tensor", "features": ["label"], "files": files}]})
    assert problems_of(spec) == [
        "a.pt: holds no plain tensor, and pickled objects are never loaded; use torch.save(tensor)",
        "b.pt: holds no plain tensor, and pickled objects are never loaded; use torch.save(tensor)",
        "c.pt: holds a dict; expected one tensor (rows, columns)",
        "d.pt: holds a tensor of shape (2, 3); expected (rows, 1): 'label'",
    ]
    assert not (tmp_path / "ran").exists()


# --- lists in memory --------------------------------------------------------------------------------------------------


def test_ragged_pads_and_truncates_each_row_on_its_own() -> None:
    lists = Ragged.of([[1, 2, 3], [], [4]])
    assert lists.pad(2).tolist() == [[1, 2], [0, 0], [4, 0]]
    assert lists.pad(4, -1).tolist() == [[1, 2, 3, -1], [-1] * 4, [4, -1, -1, -1]]
    assert lists.truncate(1).tolist() == [[1], [], [4]]
    assert lists.rows(1, 3).tolist() == [[], [4]]
    assert Ragged.concatenate([lists.rows(2, 3), lists.rows(0, 1)]).tolist() == [[4], [1, 2, 3]]
    assert len(Ragged.of([])) == 0
    assert Ragged.of([]).pad(2).shape == (0, 2)
