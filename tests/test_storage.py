"""Columns written and read back, and what is said about files that break the specification."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec import storage
from recspec.errors import DataError, SpecError
from recspec.feature_spec import CHUNK_TYPES, ChunkType, Feature, FeatureSpec
from recspec.storage import Columns, Ragged, SplitWriter, check_split, open_split, transcode

FEATURES: dict[str, dict[str, object]] = {
    "user": {"dtype": "int32", "cardinality": 50},
    "item": {"dtype": "int16", "cardinality": 300},
    "genres": {"dtype": "int8", "cardinality": 9, "length": 3, "padding": 0},
    "price": {"dtype": "float32"},
    "weight": {"dtype": "float64"},
    "half": {"dtype": "float16"},
    "age": {"dtype": "int8"},
    "clicked": {"dtype": "bool"},
}
UNEQUAL = "split 'train': its chunks must hold the same number of rows; found"
BEYOND = "is too large for an id: the cardinality is 5, so ids are 0 to 4"
NOT_SCALAR = "holds lists; expected one value a row (a list feature has a `length` in feature_spec)"
NOT_LIST = "holds one value a row; expected lists, for the feature has a `length` in feature_spec"
CHANNELS = {"user": ["user", "age"], "item": ["item", "genres"], "context": ["price", "weight", "half"]}


def spec_of(
    folder: Path,
    features: Mapping[str, Mapping[str, object]],
    sources: Mapping[str, object] | None = None,
    *,
    label: str = "label",
    **sections: object,
) -> FeatureSpec:
    """A specification whose features are all context, but for the label."""
    channels = sections.pop("channels", None) or {"context": [name for name in features if name != label]}
    data = {
        "feature_spec": {label: {}, **features},
        "source_spec": sources or {},
        "channel_spec": {**channels, "label": [label]},  # type: ignore[dict-item]
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
            writer.write(storage.rows_of(columns, start, start + 7))
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


def problems_of(spec: FeatureSpec, split: str = "train") -> list[str]:
    """What reading the whole split says; `check` must say the same."""
    with pytest.raises(DataError) as caught:
        for _ in open_split(spec, split).batches():
            pass
    assert sorted(check_split(spec, split).problems) == sorted(caught.value.problems)
    return list(caught.value.problems)


# --- Ragged ----------------------------------------------------------------------------------------------------------


def test_ragged_pads_and_truncates_each_row_on_its_own() -> None:
    lists = Ragged.of([[1, 2, 3], [], [4]])
    assert lists.pad(2).tolist() == [[1, 2], [0, 0], [4, 0]]
    assert lists.pad(4, -1).tolist() == [[1, 2, 3, -1], [-1] * 4, [4, -1, -1, -1]]
    assert lists.truncate(1).tolist() == [[1], [], [4]]
    assert lists.rows(1, 3).tolist() == [[], [4]]
    assert Ragged.concatenate([lists.rows(2, 3), lists.rows(0, 1)]).tolist() == [[4], [1, 2, 3]]
    assert len(Ragged.of([])) == 0
    assert Ragged.of([]).pad(2).shape == (0, 2)


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHUNK_TYPES)
@pytest.mark.parametrize(("num_rows", "rows_per_file"), [(1, None), (100, None), (100, 30)])
def test_what_is_written_is_read_back(
    kind: ChunkType, num_rows: int, rows_per_file: int | None, tmp_path: Path
) -> None:
    spec, columns = written(tmp_path, num_rows, kind, rows_per_file)
    reader = open_split(spec, "train")
    assert reader.num_rows == num_rows
    assert_equal(reader.read(0, num_rows), {name: columns[name] for name in reader.features})
    assert all(len(chunk.files) == (4 if rows_per_file else 1) for chunk in spec.sources["train"])
    assert check_split(spec, "train").problems == ()
    assert not list(tmp_path.rglob("*.tmp")), "temporary files are gone"


@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_any_rows_of_any_features_can_be_read_in_any_order(kind: ChunkType, tmp_path: Path) -> None:
    spec, columns = written(tmp_path, 100, kind, rows_per_file=30)
    reader = open_split(spec, "train", ["genres", "user"])
    for start, stop in [(90, 100), (0, 1), (29, 31), (5, 95), (50, 50), (95, 200), (0, 0), (100, 101)]:
        expected = storage.rows_of({name: columns[name] for name in reader.features}, start, min(stop, 100))
        found = reader.read(start, stop)
        assert list(found) == ["genres", "user"]
        assert_equal(found, expected)
    joined = storage.concatenate(list(reader.batches(17)))
    assert_equal(joined, {name: columns[name] for name in reader.features})


@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_columns_belong_to_the_caller(kind: ChunkType, tmp_path: Path) -> None:
    spec, columns = written(tmp_path, 10, kind)
    reader = open_split(spec, "train")
    first = reader.read(0, 10)
    for column in first.values():
        values = column.values if isinstance(column, Ragged) else column
        values[...] = 0
    assert_equal(reader.read(0, 10), {name: columns[name] for name in reader.features})


def test_blocks_longer_than_a_row_group_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "BLOCK_ROWS", 16)
    columns = made_up(100)
    spec = spec_of(tmp_path, FEATURES, label="clicked", channels=CHANNELS)
    with SplitWriter(tmp_path, "train", spec.features, rows_per_file=40) as writer:
        writer.write(columns)
    spec = spec.replace(sources={"train": writer.chunks})
    reader = open_split(spec, "train")
    assert_equal(reader.read(0, 100), {name: columns[name] for name in reader.features})
    groups = [pq.read_metadata(path).num_row_groups for path in sorted((tmp_path / "train").iterdir())]
    assert groups == [3, 3, 2]
    assert reader.blocks(1).tolist() == [0, 16, 32, 40, 56, 72, 80, 96, 100]
    assert reader.blocks(30).tolist() == [0, 32, 72, 100]


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


def test_csv_is_plain_text_without_a_header(tmp_path: Path) -> None:
    features = {
        "item": Feature(dtype="int8", cardinality=9),
        "genres": Feature(dtype="int8", cardinality=9, length=3),
        "price": Feature(dtype="float32"),
        "clicked": Feature(dtype="bool"),
    }
    with SplitWriter(tmp_path, "train", features, "csv") as writer:
        writer.write(
            {
                "item": np.array([3, 4]),
                "genres": Ragged.of([[1, 2], []]),
                "price": np.array([0.1, 2], np.float32),
                "clicked": np.array([True, False]),
            }
        )
    assert (tmp_path / "train/part-00000.csv").read_text() == '3,"[1, 2]",0.1,1\n4,"[]",2,0\n'


# --- reading what others wrote ---------------------------------------------------------------------------------------


def test_csv_allows_spaces_blank_lines_and_a_missing_last_newline(tmp_path: Path) -> None:
    spec = text_spec(
        tmp_path, "\n0, 8, 0\n 1 ,1.5,1e0\n\n\r\n2, -1e-3, 1", {"a": {"cardinality": 3}, "b": {}}, ["a", "b", "label"]
    )
    columns = open_split(spec, "train").read(0, 9)
    assert {name: column.tolist() for name, column in columns.items()} == {
        "a": [0, 1, 2],
        "b": [8, 1.5, np.float32(-1e-3)],
        "label": [0, 1, 1],
    }


def test_csv_lists_may_be_written_in_several_ways(tmp_path: Path) -> None:
    rows = '"[1, 2, 3]",0\n, 0\n"[]",0\n[4 5],0\n "[6]", 0\n7,0\n'
    spec = text_spec(tmp_path, rows, {"genres": {"cardinality": 9, "length": 3, "padding": 0}}, ["genres", "label"])
    lists = open_split(spec, "train", ["genres"]).read(0, 9)["genres"]
    assert lists.tolist() == [[1, 2, 3], [], [], [4, 5], [6], [7]]


def test_csv_labels_may_be_words_where_the_dtype_is_bool(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("True\n false\n1\n0 \n")
    sources = {"train": [{"type": "csv", "features": ["label"], "files": ["train.csv"]}]}
    spec = spec_of(tmp_path, {"label": {"dtype": "bool"}}, sources)
    assert open_split(spec, "train").read(0, 4)["label"].tolist() == [True, False, True, False]


def test_a_csv_file_larger_than_a_block_is_read_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CSV_BLOCK_BYTES", 64)
    rows = "".join(f"{i},{i % 2}\n" + "\n" * (100 if i == 50 else 0) for i in range(200))
    spec = text_spec(tmp_path, rows, {"a": {"cardinality": 200}}, ["a", "label"])
    reader = open_split(spec, "train")
    assert reader.num_rows == 200
    assert len(reader.blocks(1)) > 10
    for start in (150, 0, 45, 60):
        assert reader.read(start, start + 20)["a"].tolist() == list(range(start, start + 20))


def test_chunks_of_a_split_need_not_be_cut_at_the_same_rows(tmp_path: Path) -> None:
    values = np.arange(30)
    for number, (a, b) in enumerate([(0, 11), (11, 12), (12, 30)]):
        (tmp_path / f"a{number}.csv").write_text("".join(f"{value}\n" for value in values[a:b]))
    pq.write_table(pa.table({"b": values}), tmp_path / "b.parquet", row_group_size=7)
    np.arange(30, dtype="<f4").tofile(tmp_path / "c.bin")
    (np.arange(30) % 2).astype("<f4").tofile(tmp_path / "label.bin")
    sources = {
        "train": [
            {"type": "csv", "features": ["a"], "files": ["a0.csv", "a1.csv", "a2.csv"]},
            {"type": "parquet", "features": ["b"], "files": ["b.parquet"]},
            {"type": "split_binary", "features": ["c"], "files": ["c.bin"]},
            {"type": "split_binary", "features": ["label"], "files": ["label.bin"]},
        ]
    }
    spec = spec_of(tmp_path, {"a": {"cardinality": 30}, "b": {"cardinality": 30}, "c": {}}, sources)
    reader = open_split(spec, "train", ["a", "b", "c"])
    for start, stop in [(0, 30), (5, 20), (10, 13), (29, 30)]:
        assert {name: column.tolist() for name, column in reader.read(start, stop).items()} == {
            name: list(range(start, stop)) for name in ("a", "b", "c")
        }


def test_the_published_example_reads(real_data) -> None:  # type: ignore[no-untyped-def]
    spec = FeatureSpec.load(real_data("feature-specs") / "ncf-csv-example")
    train, test = open_split(spec, "train"), open_split(spec, "test")
    assert (train.num_rows, test.num_rows) == (100, 30)
    assert [column.tolist()[:3] for column in test.read(0, 3).values()] == [[0, 0, 0], [8, 18, 17], [0, 0, 1]]


def test_parquet_columns_are_found_by_name_even_when_names_hold_dots(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a.b": [1, 2], "extra": ["x", "y"], "a": [3, 4], "label": [0, 1]}), tmp_path / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": ["a", "a.b", "label"], "files": ["t.parquet"]}]}
    spec = spec_of(tmp_path, {"a": {"cardinality": 5}, "a.b": {"cardinality": 5}}, sources)
    columns = open_split(spec, "train").read(0, 2)
    assert (columns["a"].tolist(), columns["a.b"].tolist()) == ([3, 4], [1, 2])


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int8()), pa.list_(pa.int32(), 2)])
def test_parquet_lists_of_every_arrow_kind(kind: pa.DataType, tmp_path: Path) -> None:
    lists = pa.array([[1, 2], None, [3, 4]], kind)
    pq.write_table(pa.table({"genres": lists, "label": [0, 1, 0]}), tmp_path / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": ["genres", "label"], "files": ["t.parquet"]}]}
    spec = spec_of(tmp_path, {"genres": {"cardinality": 5, "length": 2, "padding": 0}}, sources)
    reader = open_split(spec, "train")
    assert reader.read(0, 3)["genres"].tolist() == [[1, 2], [], [3, 4]]
    assert reader.read(2, 3)["genres"].tolist() == [[3, 4]]


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


# --- ids, padding, shift ---------------------------------------------------------------------------------------------


def list_spec(folder: Path, lists: list[list[int]], ids: list[int], **feature: object) -> FeatureSpec:
    table = pa.table({"history": pa.array(lists, pa.list_(pa.int64())), "item": ids, "label": [0] * len(ids)})
    pq.write_table(table, folder / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": ["history", "item", "label"], "files": ["t.parquet"]}]}
    features = {
        "item": {"cardinality": 10, "vocabulary": "items", "dtype": "int8"},
        "history": {"cardinality": 10, "length": 3, "vocabulary": "items", **feature},
    }
    return spec_of(folder, features, sources, channels={"item": ["item"], "history": ["history"]})


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


# --- what is wrong, and where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "feature", "problem"),
    [
        ("0\n5\n7", {"cardinality": 5}, f"row 2: 5 {BEYOND} (and 1 more row like it)"),
        ("0\n-1", {"cardinality": 5}, "row 2: -1 is negative; an id lies in [0, cardinality): 0 to 4"),
        ("0\n-1", {"cardinality": "auto"}, "row 2: -1 is negative; an id lies in [0, cardinality)"),
        ("0\nx", {"cardinality": 5}, "row 2: 'x' is not an integer (int64)"),
        ("0\n1.0", {"cardinality": 5}, "row 2: '1.0' is not an integer (int64)"),
        ("0\n12345678901234567890", {"cardinality": 5}, "row 2: '12345678901234567890' is not an integer (int64)"),
        ("0\n200", {"dtype": "int8"}, "row 2: 200 does not fit int8, which ends at 127"),
        ("0\n-200", {"dtype": "int8"}, "row 2: -200 does not fit int8, which ends at -128"),
        ("0\n1e300", {}, "row 2: 1e+300 does not fit float32, whose largest value is 3.40282e+38"),
        ("0\n70000", {"dtype": "float16"}, "row 2: 70000.0 does not fit float16, whose largest value is 65504"),
        ("0\nnan", {}, "row 2: nan is not a finite number"),
        ("0\ninf", {}, "row 2: inf is not a finite number"),
        ("0\nx", {}, "row 2: 'x' is not a number (float32)"),
        ("0\n2", {"dtype": "bool"}, "row 2: 2 is not 0 or 1, as bool expects"),
        ("0\nyes", {"dtype": "bool"}, "row 2: 'yes' is not an integer (bool)"),
        ('"[1]"\n"[1, x]"', {"cardinality": 5, "length": 3}, "row 2: 'x' is not an integer (int64)"),
        ('"[1]"\n"[2, 5]"', {"cardinality": 5, "length": 3}, f"row 2: 5 {BEYOND}"),
    ],
)  # fmt: skip
def test_a_wrong_cell_is_named(cells: str, feature: dict[str, object], problem: str, tmp_path: Path) -> None:
    rows = "".join(f"{cell},0\n" for cell in cells.split("\n"))
    spec = text_spec(tmp_path, rows, {"a": feature}, ["a", "label"])
    assert problems_of(spec) == [f"train.csv, column 'a', {problem}"]


NO_LABEL = "is no label; a label is 0 or 1: rewrite the column so, or name another one in channel_spec.label"


@pytest.mark.parametrize(
    ("cells", "label", "problem"),
    [
        ("0\n1\n3", {}, f"row 3: 3.0 {NO_LABEL}"),
        ("0\n0.5\n-1\n2\n1", {}, f"row 2: 0.5 {NO_LABEL} (and 2 more rows like it)"),
        ("1\n-1", {"dtype": "int8"}, f"row 2: -1 {NO_LABEL}"),
        ("1\n300", {"dtype": "int8"}, f"row 2: 300 {NO_LABEL}"),
        ("1\n2", {"dtype": "bool"}, f"row 2: 2 {NO_LABEL}"),
        ("1\n3", {"cardinality": 5}, f"row 2: 3 {NO_LABEL}"),
        ("1\n0.25", {"dtype": "float16"}, f"row 2: 0.25 {NO_LABEL}"),
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
        pytest.raises(DataError, match="split 'train' being written, column 'label', row 2: 2 is no label"),
        SplitWriter(tmp_path, "train", {"label": Feature()}, label="label") as writer,
    ):
        writer.write({"label": np.array([1, 2])})


def test_an_empty_cell_is_named(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "0,1\n1,\n,1\n", {"a": {"cardinality": 5}}, ["a", "label"])
    assert problems_of(spec) == [
        "train.csv, column 'a', row 3: is empty; every row needs a value",
        "train.csv, column 'label', row 2: is empty; every row needs a value",
    ]


def test_rows_with_too_many_or_too_few_cells_are_named(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "0,1\n\n1,2,3\n", {"a": {"cardinality": 5}}, ["a", "label"])
    assert problems_of(spec) == ["train.csv, row 2: has 3 cells; expected 2: 'a', 'label'"]


def test_a_header_line_is_recognised(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "a,label\n1,1\n", {"a": {"cardinality": 5}}, ["a", "label"])
    assert problems_of(spec) == [
        "train.csv, row 1: is a header line; a csv chunk has none, its columns are 'a', 'label' in order"
    ]


def test_problems_of_later_files_are_placed_by_their_own_rows(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("0,0\n" * 3)
    (tmp_path / "2.csv").write_text("0,0\n" * 3 + "9,0\n")
    sources = {"train": [{"type": "csv", "features": ["a", "label"], "files": ["1.csv", "2.csv"]}]}
    spec = spec_of(tmp_path, {"a": {"cardinality": 5}}, sources)
    assert problems_of(spec) == [f"2.csv, column 'a', row 4: 9 {BEYOND}"]


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
)  # fmt: skip
def test_a_column_of_a_wrong_type_is_named(
    column: pa.Array, feature: dict[str, object], problem: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"a": column, "label": [0.0]}), tmp_path / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": ["a", "label"], "files": ["t.parquet"]}]}
    assert problems_of(spec_of(tmp_path, {"a": feature}, sources)) == [f"t.parquet, column 'a': {problem}"]


@pytest.mark.parametrize("stored", ["float16", "float32", "float64", "int8", "int64", "bool"])
@pytest.mark.parametrize("declared", ["float16", "float32", "float64"])
def test_numbers_may_be_stored_wider_or_narrower(stored: str, declared: str, tmp_path: Path) -> None:
    values = np.array([0, 1, 1], stored)
    pq.write_table(pa.table({"a": values, "label": [0.0] * 3}), tmp_path / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": ["a", "label"], "files": ["t.parquet"]}]}
    spec = spec_of(tmp_path, {"a": {"dtype": declared}}, sources)
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


def test_missing_values_in_parquet_are_named(tmp_path: Path) -> None:
    table = pa.table({"a": [1, None, None], "b": [[1], [2, None], []], "label": [0.0, 1.0, None]})
    pq.write_table(table, tmp_path / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": ["a", "b", "label"], "files": ["t.parquet"]}]}
    spec = spec_of(tmp_path, {"a": {"cardinality": 5}, "b": {"cardinality": 5, "length": 2}}, sources)
    assert problems_of(spec) == [
        "t.parquet, column 'a', row 2: is empty; every row needs a value (and 1 more row like it)",
        "t.parquet, column 'b', row 2: is empty; every row needs a value",
        "t.parquet, column 'label', row 3: is empty; every row needs a value",
    ]


def test_missing_files_are_named_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "train_data.csv").write_text("0\n")
    (tmp_path / "folder").mkdir()
    files = ["train_dta.csv", "other/x.csv", "folder"]
    spec = spec_of(tmp_path, {}, {"train": [{"type": "csv", "features": ["label"], "files": files}]})
    assert problems_of(spec) == [
        "folder: is a folder; expected a file",
        f"other/x.csv: no such file: the folder {tmp_path / 'other'} does not exist",
        "train_dta.csv: no such file (did you mean 'train_data.csv'?)",
    ]


def test_chunks_of_unequal_length_are_told_with_their_counts(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("0\n" * 3)
    (tmp_path / "2.csv").write_text("0\n" * 2)
    (tmp_path / "3.csv").write_text("0\n" * 4)
    sources = {
        "train": [
            {"type": "csv", "features": ["a"], "files": ["1.csv", "2.csv"]},
            {"type": "csv", "features": ["label"], "files": ["3.csv"]},
        ]
    }
    assert problems_of(spec_of(tmp_path, {"a": {"cardinality": 5}}, sources)) == [
        f"{UNEQUAL} 3 + 2 = 5 rows of 'a' in '1.csv', '2.csv'; 4 rows of 'label' in '3.csv'"
    ]


def test_an_empty_split_is_an_error(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "\n\n", {}, ["label"])
    assert problems_of(spec) == [
        "split 'train' holds no row (files 'train.csv'); fill it, or leave it out of source_spec"
    ]


@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_an_empty_split_of_every_type_is_an_error(kind: ChunkType, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"a": {"cardinality": 5}})
    with SplitWriter(tmp_path, "train", spec.features, kind) as writer:
        pass
    with pytest.raises(DataError, match="split 'train' holds no row"):
        open_split(spec.replace(sources={"train": writer.chunks}), "train")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("parquet", "can't be read as Parquet"),
        ("torch_tensor", "holds no plain tensor"),
        ("tfrecord", "ends within record 1"),
        ("split_binary", "has 13 bytes, not a whole number of rows of 4 bytes (label float32)"),
        ("csv", "row 1: 'not what it' is not a number (float32)"),
    ],
)
def test_a_file_of_another_format_is_named(kind: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not what it \n")
    spec = spec_of(tmp_path, {}, {"train": [{"type": kind, "features": ["label"], "files": ["file"]}]})
    [found] = problems_of(spec)
    assert problem in found


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


def test_a_parquet_file_without_the_column_names_the_nearest(tmp_path: Path) -> None:
    pq.write_table(pa.table({"itemid": [1], "label": [1.0]}), tmp_path / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": ["item_id", "label"], "files": ["t.parquet"]}]}
    assert problems_of(spec_of(tmp_path, {"item_id": {"cardinality": 5}}, sources)) == [
        "t.parquet: has no column 'item_id' (did you mean 'itemid'?); it holds 'itemid', 'label'"
    ]


def test_a_parquet_file_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": np.arange(1000.0)}), tmp_path / "t.parquet")
    data = bytearray((tmp_path / "t.parquet").read_bytes())
    data[4:400] = bytes(396)
    (tmp_path / "t.parquet").write_bytes(bytes(data))
    spec = spec_of(tmp_path, {}, {"train": [{"type": "parquet", "features": ["label"], "files": ["t.parquet"]}]})
    [problem] = problems_of(spec)
    assert problem.startswith("t.parquet: row group 1 is damaged: ")


def test_unknown_splits_and_features_are_named(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "0,0\n", {"item": {"cardinality": 5}}, ["item", "label"])
    with pytest.raises(SpecError, match=r"unknown split 'trian' \(did you mean 'train'\?\)"):
        open_split(spec, "trian")
    with pytest.raises(DataError, match=r"unknown feature 'itm' \(did you mean 'item'\?\)"):
        open_split(spec, "train", ["itm"])


def test_a_check_finds_every_problem_of_every_column(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("9,x\n1,1\n8,2\n")
    (tmp_path / "2.csv").write_text("nan\n")
    sources = {
        "train": [
            {"type": "csv", "features": ["a", "b"], "files": ["1.csv"]},
            {"type": "csv", "features": ["label"], "files": ["2.csv"]},
        ]
    }
    spec = spec_of(tmp_path, {"a": {"cardinality": 5}, "b": {"cardinality": 5}}, sources)
    found = check_split(spec, "train")
    assert found.num_rows is None
    assert sorted(found.problems) == [
        f"1.csv, column 'a', row 1: 9 {BEYOND} (and 1 more row like it)",
        "1.csv, column 'b', row 1: 'x' is not an integer (int64)",
        "2.csv, column 'label', row 1: nan is not a finite number",
        f"{UNEQUAL} 3 rows of 'a', 'b' in '1.csv'; 1 rows of 'label' in '2.csv'",
    ]  # fmt: skip


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class OwnError(Exception):
        pass

    def write_and_fail() -> None:
        with SplitWriter(tmp_path, "train", {"label": Feature()}, rows_per_file=40_000) as writer:
            writer.write({"label": np.zeros(70_000)})
            raise OwnError

    with pytest.raises(OwnError):
        write_and_fail()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_files_get_their_names_only_at_the_end(tmp_path: Path) -> None:
    with SplitWriter(tmp_path, "train", {"label": Feature()}, rows_per_file=2) as writer:
        writer.write({"label": np.zeros(5)})
        assert not list((tmp_path / "train").glob("*.parquet")) if (tmp_path / "train").exists() else True
    assert [chunk.files for chunk in writer.chunks] == [
        ("train/part-00000.parquet", "train/part-00001.parquet", "train/part-00002.parquet")
    ]


def test_a_writer_refuses_what_could_not_be_read_back(tmp_path: Path) -> None:
    features = {"item": Feature(cardinality=5, dtype="int8"), "label": Feature()}
    writer = SplitWriter(tmp_path, "train", features)
    writer.write({"item": np.array([1, 2]), "label": np.array([0, 1])})
    with pytest.raises(DataError) as caught:
        writer.write({"item": np.array([1, 5]), "label": np.array([0, np.nan])})
    assert list(caught.value.problems) == [
        f"split 'train' being written, column 'item', row 4: 5 {BEYOND}",
        "split 'train' being written, column 'label', row 4: nan is not a finite number",
    ]  # fmt: skip
    with pytest.raises(DataError) as caught:
        writer.write({"itm": np.array([1, 2]), "label": np.array([0])})
    assert list(caught.value.problems) == [
        "column 'item' is missing",
        "columns must hold the same number of rows; found {'itm': 2, 'label': 1}",
        "unknown feature 'itm' (did you mean 'item'?); known: 'item', 'label'",
    ]
    with pytest.raises(DataError, match=r"unknown chunk type 'parqet' \(did you mean 'parquet'"):
        SplitWriter(tmp_path, "train", features, "parqet")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["split_binary", "torch_tensor"])
def test_types_of_fixed_length_say_which_lists_they_cannot_hold(kind: ChunkType, tmp_path: Path) -> None:
    features = {"genres": Feature(cardinality=200, dtype="uint8", length=3), "label": Feature()}
    with pytest.raises(DataError, match=f"the list 'genres' needs -1 as padding in {kind}, which uint8 can't hold"):
        SplitWriter(tmp_path, "train", features, kind)
    numbers = {"trend": Feature(length=3), "label": Feature()}
    with (
        pytest.raises(DataError, match="the list 'trend' holds 2 of 3 numbers in some row"),
        SplitWriter(tmp_path, "train", numbers, kind) as writer,
    ):
        writer.write({"trend": Ragged.of([[1, 2, 3], [1, 2]], np.float32), "label": np.zeros(2)})


# --- transcode -------------------------------------------------------------------------------------------------------


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
    features = {
        "item": {"cardinality": "auto"},
        "history": {"cardinality": "auto", "length": 3, "vocabulary": "item"},
    }
    sources = {"train": [{"type": "csv", "features": ["item", "history", "label"], "files": ["t.csv"]}]}
    there = transcode(spec_of(tmp_path, features, sources), tmp_path / "out")
    assert [there.features[name].cardinality for name in ("item", "history")] == [6, 6]
    assert open_split(there, "train").read(0, 1)["history"].tolist() == [[2, 6]]


def test_transcode_keeps_a_declared_cardinality_and_refuses_ids_beyond_it(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "3,0\n", {"a": {"cardinality": 100}}, ["a", "label"])
    assert transcode(spec, tmp_path / "ok").features["a"].cardinality == 100
    spec = text_spec(tmp_path, "3,0\n", {"a": {"cardinality": 3}}, ["a", "label"])
    with pytest.raises(DataError, match=r"train.csv, column 'a', row 1: 3 is too large for an id"):
        transcode(spec, tmp_path / "bad")
    assert not (tmp_path / "bad" / "feature_spec.yaml").exists()


def test_transcode_refuses_to_write_over_a_dataset(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "3,0\n", {"a": {"cardinality": 100}}, ["a", "label"])
    spec.save(tmp_path)
    with pytest.raises(DataError, match="holds a dataset already"):
        transcode(spec, tmp_path)


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


def test_csv_keeps_every_float32_exactly(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    with SplitWriter(tmp_path, "train", {"a": Feature(), "label": Feature()}, "csv") as writer:
        writer.write({"a": values, "label": np.zeros(len(values))})
    spec = spec_of(tmp_path, {"a": {}}).replace(sources={"train": writer.chunks})
    np.testing.assert_array_equal(open_split(spec, "train", ["a"]).read(0, len(values))["a"], values)


def test_the_estimate_of_memory_counts_the_values_that_parquet_tells(tmp_path: Path) -> None:
    spec, columns = written(tmp_path, 100, "parquet")
    genres = columns["genres"]
    assert isinstance(genres, Ragged)
    reader = open_split(spec, "train", ["user", "genres"])
    # Parquet counts an empty list as one value
    empty = int((genres.lengths == 0).sum())
    assert reader.num_values == {"user": 100, "genres": len(genres.values) + empty}
    assert reader.nbytes == 100 * 4 + len(genres.values) + empty + 101 * 8
