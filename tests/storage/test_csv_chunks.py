"""Chunks of CSV text, and the messages about cells that break the specification."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recspec.spec import Feature
from recspec.storage import Ragged, SplitWriter, open_split
from tests.storage.files import BEYOND, problems_of, spec_of, text_spec


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
    monkeypatch.setattr("recspec.storage.csv_chunks.CSV_BLOCK_BYTES", 64)
    rows = "".join(f"{i},{i % 2}\n" + "\n" * (100 if i == 50 else 0) for i in range(200))
    spec = text_spec(tmp_path, rows, {"a": {"cardinality": 200}}, ["a", "label"])
    reader = open_split(spec, "train")
    assert reader.num_rows == 200
    assert len(reader.blocks(1)) > 10
    for start in (150, 0, 45, 60):
        assert reader.read(start, start + 20)["a"].tolist() == list(range(start, start + 20))


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


def test_csv_keeps_every_float32_exactly(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    with SplitWriter(tmp_path, "train", {"a": Feature(), "label": Feature()}, "csv") as writer:
        writer.write({"a": values, "label": np.zeros(len(values))})
    spec = spec_of(tmp_path, {"a": {}}).replace(sources={"train": writer.chunks})
    np.testing.assert_array_equal(open_split(spec, "train", ["a"]).read(0, len(values))["a"], values)
