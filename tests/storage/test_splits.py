"""Any rows of a split are read, splits are written whole, and broken files are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, SpecError
from recspec.data.storage import Columns, Ragged, SplitWriter, open_split
from recspec.data.storage.check import check_split
from recspec.data.storage.chunk_file import GroupReader
from recspec.data.storage.formats import FORMATS
from recspec.data.storage.ragged import concatenate, rows_of
from recspec.feature_spec import CHUNK_TYPES, ChunkType, Feature, FeatureSpec
from tests.storage.files import (
    BEYOND,
    CHANNELS,
    FEATURES,
    UNEQUAL,
    assert_equal,
    made_up,
    problems_of,
    spec_of,
    text_spec,
    written,
)


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
    assert check_split(spec, "train")[0] == []
    assert not list(tmp_path.rglob("*.tmp")), "temporary files are gone"


@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_any_rows_of_any_features_can_be_read_in_any_order(kind: ChunkType, tmp_path: Path) -> None:
    spec, columns = written(tmp_path, 100, kind, rows_per_file=30)
    reader = open_split(spec, "train", ["genres", "user"])
    for start, stop in [(90, 100), (0, 1), (29, 31), (5, 95), (50, 50), (95, 200), (0, 0), (100, 101)]:
        expected = rows_of({name: columns[name] for name in reader.features}, start, min(stop, 100))
        found = reader.read(start, stop)
        assert list(found) == ["genres", "user"]
        assert_equal(found, expected)
    joined = concatenate(list(reader.batches(17)))
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


def test_problems_of_later_files_are_placed_by_their_own_rows(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("0,0\n" * 3)
    (tmp_path / "2.csv").write_text("0,0\n" * 3 + "9,0\n")
    sources = {"train": [{"type": "csv", "features": ["a", "label"], "files": ["1.csv", "2.csv"]}]}
    spec = spec_of(tmp_path, {"a": {"cardinality": 5}}, sources)
    assert problems_of(spec) == [f"2.csv, column 'a', row 4: 9 {BEYOND}"]


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


@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_an_empty_split_of_every_type_is_an_error(kind: ChunkType, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"a": {"cardinality": 5}})
    with SplitWriter(tmp_path, "train", spec.features, kind) as writer:
        pass
    holds = r"split 'train' holds no row \(files '.*'\); fill it, or leave it out of source_spec"
    with pytest.raises(DataError, match=holds):
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


def test_unknown_splits_and_features_are_named(tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "0,0\n", {"item": {"cardinality": 5}}, ["item", "label"])
    with pytest.raises(SpecError, match=r"unknown split 'trian' \(did you mean 'train'\?\)"):
        open_split(spec, "trian")
    with pytest.raises(DataError, match=r"unknown feature 'itm' \(did you mean 'item'\?\)"):
        open_split(spec, "train", ["itm"])


@pytest.mark.parametrize("kind", CHUNK_TYPES)
@pytest.mark.parametrize("too_many", [True, False])
def test_rows_that_were_not_counted_are_an_error_in_every_chunk_type(
    kind: ChunkType, too_many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = written(tmp_path, 10, kind)
    reader = FORMATS[kind].reader
    name = "decode" if issubclass(reader, GroupReader) else "read"
    sound = getattr(reader, name)

    def other(self: object, *arguments: object) -> Columns:
        columns = sound(self, *arguments)
        return {
            name: concatenate([{name: column}] * 2)[name] if too_many else rows_of({name: column}, 0, 9)[name]
            for name, column in columns.items()
        }

    monkeypatch.setattr(reader, name, other)
    told = problems_of(spec)
    held = 20 if too_many else 9
    counted = "where 10 were counted: the file is damaged, or was changed while it was read"
    assert told
    assert all(f"holds {held} rows of '" in each and each.endswith(counted) for each in told), told


def test_a_parquet_file_whose_footer_counts_other_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = written(tmp_path, 10, "parquet")
    true = pq.read_metadata(tmp_path / "train/part-00000.parquet")

    class Footer:
        num_rows, num_row_groups, schema = 9, true.num_row_groups, true.schema
        row_group = staticmethod(true.row_group)

    monkeypatch.setattr("recspec.data.storage.formats.pq.read_metadata", lambda _: Footer)
    states = "can't be read as Parquet: states 9 rows, but its row groups hold 10; write the file again"
    assert problems_of(spec) == [f"train/part-00000.parquet: {states}"]


# --- writing ----------------------------------------------------------------------------------------------------------


def test_blocks_longer_than_a_row_group_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.data.storage.splits.BLOCK_ROWS", 16)
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
    ]
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


# --- checking ---------------------------------------------------------------------------------------------------------


def test_a_check_finds_every_problem_of_every_column(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("9,x\n1,1\n8,2\n")
    (tmp_path / "2.csv").write_text("nan\n")
    (tmp_path / "3.csv").write_text("1,1\n1,1\n")
    sources = {
        "train": [
            {"type": "csv", "features": ["a", "b"], "files": ["1.csv", "3.csv"]},
            {"type": "csv", "features": ["label"], "files": ["2.csv"]},
        ]
    }
    spec = spec_of(tmp_path, {"a": {"cardinality": 5}, "b": {"cardinality": 5}}, sources)
    problems, num_rows = check_split(spec, "train")
    assert num_rows is None
    assert sorted(problems) == [
        f"1.csv, column 'a', row 1: 9 {BEYOND} (and 1 more row like it)",
        "1.csv, column 'b', row 1: 'x' is not an integer (int64)",
        "2.csv, column 'label', row 1: nan is not a finite number",
        f"{UNEQUAL} 3 + 2 = 5 rows of 'a', 'b' in '1.csv', '3.csv'; 1 rows of 'label' in '2.csv'",
    ]
