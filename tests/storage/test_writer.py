"""Splits are written whole, and only what can be read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.data.storage import Ragged, SplitWriter, open_split
from recspec.feature_spec import ChunkType, Feature
from tests.storage.files import BEYOND, CHANNELS, FEATURES, assert_equal, made_up, spec_of


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
