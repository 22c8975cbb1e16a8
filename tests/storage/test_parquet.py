"""Chunks of Parquet files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.data.storage import Ragged, open_split
from tests.storage.files import problems_of, spec_of, written


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


def test_a_parquet_file_without_the_column_names_the_nearest(tmp_path: Path) -> None:
    pq.write_table(pa.table({"itemid": [1], "label": [1.0]}), tmp_path / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": ["item_id", "label"], "files": ["t.parquet"]}]}
    assert problems_of(spec_of(tmp_path, {"item_id": {"cardinality": 5}}, sources)) == [
        "t.parquet: has no column 'item_id' (did you mean 'itemid'?); it holds 'itemid', 'label'"
    ]


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([[1], [1.0], [2]], names=["item_id", "label", "item_id"]), tmp_path / "t.parquet")
    sources = {"train": [{"type": "parquet", "features": ["item_id", "label"], "files": ["t.parquet"]}]}
    assert problems_of(spec_of(tmp_path, {"item_id": {"cardinality": 5}}, sources)) == [
        "t.parquet: has more than one column 'item_id'; rename them"
    ]


def test_a_parquet_file_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": np.arange(1000.0)}), tmp_path / "t.parquet")
    data = bytearray((tmp_path / "t.parquet").read_bytes())
    data[4:400] = bytes(396)
    (tmp_path / "t.parquet").write_bytes(bytes(data))
    spec = spec_of(tmp_path, {}, {"train": [{"type": "parquet", "features": ["label"], "files": ["t.parquet"]}]})
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
