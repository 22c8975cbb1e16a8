"""Any rows of a split are read, and broken files are named."""

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
from recspec.feature_spec import CHUNK_TYPES, ChunkType, FeatureSpec
from tests.storage.files import BEYOND, UNEQUAL, assert_equal, problems_of, spec_of, text_spec, written


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
