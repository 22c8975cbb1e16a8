"""Chunks of CSV text, and the messages about cells that break the specification."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import DataError, shortened
from recspec.data.storage import Ragged, SplitWriter, open_split, transcode
from recspec.data.storage.check import check_split
from recspec.feature_spec import Feature
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
        tmp_path, "\n0, 8, 0\r\n 1 ,1.5,1e0\n\n\r\n2, -1e-3, 1", {"a": {"cardinality": 3}, "b": {}}, ["a", "b", "label"]
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
    monkeypatch.setattr("recspec.data.storage.csv_chunks.CSV_BLOCK_BYTES", 64)
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
)
def test_a_wrong_cell_is_named(cells: str, feature: dict[str, object], problem: str, tmp_path: Path) -> None:
    rows = "".join(f"{cell},0\n" for cell in cells.split("\n"))
    spec = text_spec(tmp_path, rows, {"a": feature}, ["a", "label"])
    assert problems_of(spec) == [f"train.csv, column 'a', {problem}"]


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        (
            "0,1\n1,\n,1\n",
            [
                "train.csv, column 'a', row 3: is empty; every row needs a value",
                "train.csv, column 'label', row 2: is empty; every row needs a value",
            ],
        ),
        ("0,1\n\n1,2,3\n", ["train.csv, row 2: has 3 cells; expected 2: 'a', 'label'"]),
        (
            "a,label\n1,1\n",
            ["train.csv, row 1: is a header line; a csv chunk has none, its columns are 'a', 'label' in order"],
        ),
    ],
)
def test_empty_cells_rows_of_other_lengths_and_headers_are_named(
    rows: str, problems: list[str], tmp_path: Path
) -> None:
    assert problems_of(text_spec(tmp_path, rows, {"a": {"cardinality": 5}}, ["a", "label"])) == problems


def test_csv_keeps_every_float32_exactly(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    with SplitWriter(tmp_path, "train", {"a": Feature(), "label": Feature()}, "csv") as writer:
        writer.write({"a": values, "label": np.zeros(len(values))})
    spec = spec_of(tmp_path, {"a": {}}).replace(sources={"train": writer.chunks})
    np.testing.assert_array_equal(open_split(spec, "train", ["a"]).read(0, len(values))["a"], values)


ALONE = r"holds a carriage return (\r) without a line feed (\n) after it; end every row with \n or \r\n"


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (b"".join(b"%d,0\r" % i for i in range(10)), 1),
        (b"".join(b"%d,0\n" % i for i in range(5)) + b"\n5,0\r6,0\n7,0\n", 6),
        (b"0,0\r\n1,0\r\r\n2,0\r\n", 2),
        (b"0,0\n1,0\r", 2),
        (b"0,0\n\r1,0\n", 2),
        (b'0,0\n"1\r",0\n', 2),
    ],
)
@pytest.mark.parametrize("block_bytes", [4, 4 << 20])
def test_a_row_that_ends_with_a_carriage_return_alone_is_named(
    text: bytes, row: int, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recspec.data.storage.csv_chunks.CSV_BLOCK_BYTES", block_bytes)
    spec = text_spec(tmp_path, "", {"a": {"cardinality": 50}}, ["a", "label"])
    (tmp_path / "train.csv").write_bytes(text)
    assert check_split(spec, "train")[0] == [f"train.csv: row {row} {ALONE}"]
    with pytest.raises(DataError, match=r"row .* holds a carriage return"):
        transcode(spec, tmp_path / "out")


QUOTE = "has a double quote that none closes; a cell may not contain a line break"


@pytest.mark.parametrize("rows", ['0,1\n2,"1\n"\n3,1\n', '0,1\n"2,1\n3,1\n', '0,1\n2,"1\n3,1\n', '0,1\n"2\n3",1\n'])
def test_a_line_break_in_a_cell_is_named(rows: str, tmp_path: Path) -> None:
    spec = text_spec(tmp_path, rows, {"a": {"cardinality": 50}}, ["a", "label"])
    assert problems_of(spec) == [f"train.csv, row 2: {QUOTE}"]


NOT_DECIMAL = ["0x1", "-0X1", "0b1", "0o1", "1_0", "_1", "1 2", "1;2", "one", "--1", "- 1", "1\x0b", "\x0c1", "1\0"]
NOT_DECIMAL += ["\u0663", "\uff19", "\u00b2", "\u00a01", "1\u2009", "\u22121"]


@pytest.mark.parametrize(
    "text", [*NOT_DECIMAL, "1.0", "1.", "1e0", "+1", "true", "inf", "nan", "9223372036854775808", "9" * 5000]
)
@pytest.mark.parametrize("other", ["0", "x"])
def test_an_id_is_a_decimal_integer_whatever_stands_beside_it(text: str, other: str, tmp_path: Path) -> None:
    spec = text_spec(tmp_path, f"0,0\n{text},{other}\n", {"a": {"cardinality": 50}}, ["a", "label"])
    told = problems_of(spec)
    assert told[0] == f"train.csv, column 'a', row 2: {shortened(text)!r} is not an integer (int64)"
    assert len(told[0]) < 300


INTEGERS = {"1": 1, "-0": 0, "007": 7, " 1 ": 1, "\t1\t": 1, '"1"': 1, "0" * 30 + "1": 1, "1000000000000000000": 10**18}


@pytest.mark.parametrize("length", [None, 3])
def test_decimal_integers_are_read_up_to_64_bits(length: int | None, tmp_path: Path) -> None:
    feature = {"cardinality": 2**63 - 1} | ({"length": length, "padding": 0} if length else {})
    numbers = INTEGERS | {"9223372036854775806": 2**63 - 2}
    spec = text_spec(tmp_path, "".join(f"{text},0\n" for text in numbers), {"a": feature}, ["a", "label"])
    values = open_split(spec, "train").read(0, len(numbers))["a"]
    found = values.values if isinstance(values, Ragged) else values
    assert found.tolist() == [number for number in numbers.values() if number or not length], "0 is padding"


@pytest.mark.parametrize("text", [*NOT_DECIMAL, "infinity", "inf", "nan", "-nan", "nan(1)", "1e400", "1e", ".", "1d5"])
@pytest.mark.parametrize("other", ["0", "x"])
def test_a_number_is_decimal_and_finite_whatever_stands_beside_it(text: str, other: str, tmp_path: Path) -> None:
    spec = text_spec(tmp_path, f"0,0\n{text},{other}\n", {"a": {}}, ["a", "label"])
    assert problems_of(spec)[0].startswith("train.csv, column 'a', row 2: ")


def test_a_number_is_the_same_whatever_stands_beside_it(tmp_path: Path) -> None:
    texts = ["1.", ".5", "-.5", "+1", "1e-400", "1E+2", " 1 ", "-0"]
    rows = "".join(f"{text},0\n" for text in texts)
    spec = text_spec(tmp_path, rows, {"a": {}}, ["a", "label"])
    assert open_split(spec, "train").read(0, len(texts))["a"].tolist() == [np.float32(float(text)) for text in texts]
    (tmp_path / "train.csv").write_text(rows + "1,x\n")
    assert problems_of(spec) == ["train.csv, column 'label', row 9: 'x' is not a number (float32)"]


@pytest.mark.parametrize(
    "text", ["[1,,2]", "[1,2", "1,2]", "[[1,2]]", "][", "[1,]", "[,1]", "[1][2]", "[]1", "[1\x0b2]"]
)
def test_a_list_without_some_value_is_named(text: str, tmp_path: Path) -> None:
    spec = text_spec(tmp_path, f'"[1]",0\n"{text}",0\n', {"a": {"length": 3}}, ["a", "label"])
    expected = "expected such as [1, 2, 3], [1 2 3] or 1,2,3, with every value given"
    assert problems_of(spec) == [f"train.csv, column 'a', row 2: {text!r} is not a list; {expected}"]


@pytest.mark.parametrize("feature", [{"cardinality": 5}, {"length": 2}])
def test_bytes_that_are_not_utf_8_are_named_with_their_row(feature: dict[str, object], tmp_path: Path) -> None:
    spec = text_spec(tmp_path, "", {"a": feature}, ["a", "label"])
    (tmp_path / "train.csv").write_bytes(b"0,0\n\n1,1\n\xff1,1\n2,1\n")
    found = r"holds bytes that are not UTF-8 text, near b'\xff1,1'; save the file as UTF-8"
    assert problems_of(spec) == [f"train.csv, row 3: {found}"]


def test_a_row_beyond_all_reason_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.data.storage.csv_chunks.CSV_BLOCK_BYTES", 10)
    monkeypatch.setattr("recspec.data.storage.csv_chunks.LINE_BYTES", 1000)
    spec = text_spec(tmp_path, "0,0\n1,0\n2," + "0" * 2000 + "\n3,0\n", {"a": {"cardinality": 5}}, ["a", "label"])
    longer = r"is longer than 1,000 bytes, the most that are read of one row; rows end with \n or \r\n"
    assert problems_of(spec) == [f"train.csv: row 3 {longer}"]


def test_a_row_may_be_longer_than_a_block_of_arrow(tmp_path: Path) -> None:
    many = ", ".join("1" for _ in range(600_000))
    rows = f'0,"[2]",0\n1,"[{many}]",1\n'
    features = {"a": {"cardinality": 5}, "b": {"cardinality": 5, "length": 10**6, "padding": 0}}
    spec = text_spec(tmp_path, rows, features, ["a", "b", "label"])
    columns = open_split(spec, "train").read(0, 2)
    assert columns["a"].tolist() == [0, 1]
    assert isinstance(columns["b"], Ragged)
    assert columns["b"].lengths.tolist() == [1, 600_000]


def test_a_byte_order_mark_within_a_file_is_no_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = text_spec(tmp_path, "\ufeff0,0\n1,0\n\ufeff2,0\n", {"a": {"cardinality": 5}}, ["a", "label"])
    expected = [r"train.csv, column 'a', row 3: '\ufeff2' is not an integer (int64)"]
    assert problems_of(spec) == expected
    monkeypatch.setattr("recspec.data.storage.csv_chunks.CSV_BLOCK_BYTES", 8)
    assert problems_of(spec) == expected
