"""Stored values become what the specification promises, and others are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.data.storage import Ragged, SplitWriter, open_split, transcode
from recspec.feature_spec import CHUNK_TYPES, ChunkType, Feature
from tests.storage.files import NOT_LIST, NOT_SCALAR, list_spec, parquet_spec, problems_of, spec_of, text_spec


def test_declared_padding_is_dropped_wherever_it_stands_and_ids_stay(tmp_path: Path) -> None:
    spec = list_spec(tmp_path, [[0, 0, 7], [1, 0, 2], [0, 0, 0], [1, 2, 3]], [0, 1, 2, 9], padding=0)
    columns = open_split(spec, "train").read(0, 4)
    assert columns["history"].tolist() == [[7], [1, 2], [], [1, 2, 3]]
    assert columns["item"].tolist() == [0, 1, 2, 9]


def test_without_declared_padding_minus_one_is_dropped_and_the_whole_vocabulary_is_shifted(tmp_path: Path) -> None:
    spec = list_spec(tmp_path, [[-1, 0, 7], [9, -1, -1], [], [-1]], [0, 1, 2, 9])
    columns = open_split(spec, "train").read(0, 4)
    assert columns["history"].tolist() == [[1, 8], [10], [], []]
    assert columns["item"].tolist() == [1, 2, 3, 10]
    stored = open_split(spec, "train", shifted=False).read(0, 4)
    assert stored["history"].tolist() == [[0, 7], [9], [], []]
    assert stored["item"].tolist() == [0, 1, 2, 9]


def test_a_shifted_id_that_outgrows_its_dtype_gets_a_wider_one(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('127,"[127]",0\n')
    features = {
        "item": {"cardinality": 128, "vocabulary": "items", "dtype": "int8"},
        "history": {"cardinality": 128, "length": 3, "vocabulary": "items", "dtype": "int8"},
    }
    sources = {"train": [{"type": "csv", "features": ["item", "history", "label"], "files": ["t.csv"]}]}
    columns = open_split(spec_of(tmp_path, features, sources), "train").read(0, 1)
    assert (columns["item"].tolist(), columns["history"].tolist()) == ([128], [[128]])


def test_lists_keep_their_first_values_and_every_value_is_checked(tmp_path: Path) -> None:
    spec = list_spec(tmp_path, [[1, 2, 3, 4, 5]], [0], padding=0)
    assert open_split(spec, "train").read(0, 1)["history"].tolist() == [[1, 2, 3]]
    spec = list_spec(tmp_path, [[1], [1, 2, 3, 4, 50]], [0, 0], padding=0)
    assert problems_of(spec) == [
        "t.parquet, column 'history', row 2: 50 is too large for an id: the cardinality is 10, so ids are 0 to 9"
    ]


def test_lists_of_numbers_are_not_ids(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, '"[0.5, -1]",0\n"[]",1\n', {"trend": {"length": 2}}, ["trend", "label"])
    assert open_split(spec, "train").read(0, 2)["trend"].tolist() == [[0.5, -1], []]


@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_every_row_of_a_vector_holds_exactly_its_length(kind: ChunkType, tmp_path: Path) -> None:
    features = {"title": {"length": 2, "vector": True}}
    spec = spec_of(tmp_path, features)
    with SplitWriter(tmp_path, "train", spec.features, kind, label="label") as writer:
        writer.write({"title": Ragged.of_rectangle(np.eye(2, dtype=np.float32)), "label": np.zeros(2)})
    read = open_split(spec.replace(sources={"train": writer.chunks}), "train").read(0, 2)
    assert read["title"].tolist() == [[1, 0], [0, 1]]
    lists = Ragged.of([[1, 2], [1, 2, 3], [1], []], np.float32)
    with pytest.raises(DataError) as caught, SplitWriter(tmp_path, "test", spec.features, kind) as writer:
        writer.write({"title": lists, "label": np.zeros(4)})
    assert caught.value.problems[-1].endswith(
        "column 'title', row 2: holds 3 numbers; every row of a vector holds 2 (and 2 more rows like it)"
    )


def test_a_file_with_a_vector_of_another_size_is_named_with_its_row(tmp_path: Path) -> None:
    features = {"title": {"length": 2, "vector": True}}
    spec = text_spec(tmp_path, '"[0.5, -1]",0\n"[1]",1\n,1\n', features, ["title", "label"])
    assert problems_of(spec) == [
        "train.csv, column 'title', row 2: holds 1 number; every row of a vector holds 2 (and 1 more row like it)"
    ]
    spec = text_spec(tmp_path, '"[0.5, nan]",0\n', features, ["title", "label"])
    assert "is not a" in problems_of(spec)[0]


NO_LABEL = "is not a label; a label is 0 or 1: convert the column, or name another one in channel_spec.label"


@pytest.mark.parametrize(
    ("cells", "label", "problem"),
    [
        ("0\n1\n3", {}, f"row 3: 3.0 {NO_LABEL}"),
        ("0\n0.5\n-1\n2\n1", {}, f"row 2: 0.5 {NO_LABEL} (and 2 more rows like it)"),
        ("1\n-1", {"dtype": "int8"}, f"row 2: -1 {NO_LABEL}"),
        ("1\n2", {"dtype": "bool"}, f"row 2: 2 {NO_LABEL}"),
        ("1\n3", {"cardinality": 5}, f"row 2: 3 {NO_LABEL}"),
        ("1\ninf", {}, "row 2: inf is not a finite number"),
    ],
)
def test_a_label_that_is_none_is_named(cells: str, label: dict[str, object], problem: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(cells + "\n")
    sources = {"train": [{"type": "csv", "features": ["label"], "files": ["train.csv"]}]}
    spec = spec_of(tmp_path, {"label": label}, sources)
    assert problems_of(spec) == [f"train.csv, column 'label', {problem}"]


@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_labels_are_checked_in_every_chunk_type_and_only_where_they_are_read(kind: ChunkType, tmp_path: Path) -> None:
    features = {"a": Feature(dtype="float32"), "label": Feature(dtype="float32")}
    with SplitWriter(tmp_path, "train", features, kind) as writer:  # which is not told that one of them is a label
        writer.write({"a": np.array([0.5, 7]), "label": np.array([1, 0.5])})
    spec = spec_of(tmp_path, {"a": {}}, None).replace(sources={"train": writer.chunks})
    (file,) = {file for chunk in writer.chunks if "label" in chunk.features for file in chunk.files}
    assert problems_of(spec) == [f"{file}, column 'label', row 2: 0.5 {NO_LABEL}"]
    assert open_split(spec, "train", ["a"]).read(0, 2)["a"].tolist() == [0.5, 7]


def test_a_writer_that_knows_the_label_refuses_others(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="split 'train' being written, column 'label', row 2: 2 is not a label"),
        SplitWriter(tmp_path, "train", {"label": Feature()}, label="label") as writer,
    ):
        writer.write({"label": np.array([1, 2])})


@pytest.mark.parametrize(
    ("column", "feature", "problem"),
    [
        (pa.array(["x"]), {"cardinality": 5}, "holds string; expected ids (int64)"),
        (pa.array([1.0]), {"cardinality": 5}, "holds float64; expected ids of an integer type (int64)"),
        (pa.array([1.0]), {"dtype": "int8"}, "holds float64; expected int8"),
        (pa.array([[1]]), {"cardinality": 5}, NOT_SCALAR),
        (pa.array([1]), {"cardinality": 5, "length": 3}, NOT_LIST),
        (pa.array([["x"]]), {"cardinality": 5, "length": 3}, "holds string; expected ids (int64)"),
    ],
)
def test_a_column_of_a_wrong_type_is_named(
    column: pa.Array, feature: dict[str, object], problem: str, tmp_path: Path
) -> None:
    spec = parquet_spec(tmp_path, {"a": column, "label": [0.0]}, {"a": feature})
    assert problems_of(spec) == [f"t.parquet, column 'a': {problem}"]


@pytest.mark.parametrize("stored", ["float16", "float32", "float64", "int8", "int64", "bool"])
@pytest.mark.parametrize("declared", ["float16", "float32", "float64"])
def test_numbers_may_be_stored_wider_or_narrower(stored: str, declared: str, tmp_path: Path) -> None:
    values = np.array([0, 1, 1], stored)
    spec = parquet_spec(tmp_path, {"a": values, "label": [0.0] * 3}, {"a": {"dtype": declared}})
    found = open_split(spec, "train").read(0, 3)["a"]
    assert isinstance(found, np.ndarray)
    assert (str(found.dtype), found.tolist()) == (declared, [0, 1, 1])
    if stored.startswith("float"):
        not_finite = np.array([np.nan, np.inf, -np.inf], stored)
        pq.write_table(pa.table({"a": not_finite, "label": [0.0] * 3}), tmp_path / "t.parquet")
        assert problems_of(spec) == [
            "t.parquet, column 'a', row 1: nan is not a finite number (and 2 more rows like it)"
        ]


def test_the_largest_halves_are_sound_and_what_lies_above_them_is_not(tmp_path: Path) -> None:
    sources = {"train": [{"type": "split_binary", "features": ["half", "other", "label"], "files": ["h.bin"]}]}
    spec = spec_of(tmp_path, {name: {"dtype": "float16"} for name in ("half", "other", "label")}, sources)
    np.array([[65504, -65504, 1], [-0.0, 6e-8, -0.0]], "<f2").tofile(tmp_path / "h.bin")
    assert open_split(spec, "train").read(0, 2)["half"].tolist() == [65504, 0]
    np.array([[65504, -65504, 0], [-np.inf, np.nan, np.nan]], "<f2").tofile(tmp_path / "h.bin")
    assert problems_of(spec) == [
        "h.bin, column 'half', row 2: -inf is not a finite number",
        "h.bin, column 'label', row 2: nan is not a finite number",
        "h.bin, column 'other', row 2: nan is not a finite number",
    ]


def test_the_largest_id_leaves_room_for_the_number_of_ids(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, f"{2**63 - 2},0\n", {"a": {"cardinality": "auto"}}, ["a", "label"])
    assert transcode(spec, tmp_path / "out").features["a"].cardinality == 2**63 - 1
    (tmp_path / "train.csv").write_text(f"0,0\n{2**63 - 1},0\n")
    assert problems_of(spec) == [
        f"train.csv, column 'a', row 2: {2**63 - 1} is too large for an id, which ends at {2**63 - 2}"
    ]
