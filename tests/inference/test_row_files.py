"""Files of rows: csv, jsonl and parquet, read and written."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.inference import row_files
from recspec.inference.row_files import read_rows, row_writer


def test_values_of_a_csv_file_are_text_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("n,x,flag,time,day,land\n007,.5,true,12:30,2020-01-02,NA\n8,1,false,13:00,,NA\n")
    (rows,) = read_rows(tmp_path / "rows.csv")
    assert rows.to_pylist() == [
        {"n": "007", "x": ".5", "flag": "true", "time": "12:30", "day": "2020-01-02", "land": "NA"},
        {"n": "8", "x": "1", "flag": "false", "time": "13:00", "day": None, "land": "NA"},
    ]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_name_of_two_columns_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    if ending == "csv":
        path.write_text("user,item,user\na,b,c\n")
    else:
        pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["user", "item", "user"]), path)
    with pytest.raises(DataError) as error:
        list(read_rows(path))
    assert str(error.value) == f"{path}: has more than one column 'user'; rename them"


def test_a_parquet_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": pa.array([b"\xff"]).view(pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: can't be read as parquet: .*Invalid UTF8"):
        list(read_rows(tmp_path / "rows.parquet"))


def test_values_of_json_lines_keep_their_types_and_dates_stay_text(tmp_path: Path) -> None:
    text = '{"id": "007", "day": "2020-01-02", "x": 1}\n\n{"id": 7, "x": 0.5, "late": [1]}\n'
    (tmp_path / "rows.jsonl").write_text(text)
    (rows,) = read_rows(tmp_path / "rows.jsonl")
    assert rows.to_pylist() == [
        {"id": "007", "day": "2020-01-02", "x": 1.0, "late": None},
        {"id": "7", "day": None, "x": 0.5, "late": [1]},
    ]


VALUES = [
    1,
    2**53 + 1,
    2**63,
    0.5,
    "7",
    "x",
    None,
    True,
    [1],
    ["a", 2],
    [0.5],
    [],
    {"a": 1},
    {"b": "t"},
    [[1]],
    [["t"]],
    "absent",
]


@pytest.mark.parametrize("first", VALUES)
def test_json_lines_have_the_columns_and_types_of_the_whole_file(
    first: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for second in VALUES:
        rows = [{"n": 0, **({} if value == "absent" else {"x": value})} for value in (first, first, second)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (whole,) = read_rows(tmp_path / "rows.jsonl")
        with monkeypatch.context() as patch:
            patch.setattr(row_files, "ROWS", 1)
            blocks = list(read_rows(tmp_path / "rows.jsonl"))
        assert len(blocks) == 3
        assert pa.concat_tables(blocks).equals(whole), (first, second)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", b'{"a": 1}\n[1]\n', "line 2: is no JSON object"),
        ("rows.jsonl", b'{"a": 1}\n{"a": \n', "line 2: is no JSON object"),
        ("rows.jsonl", b'{"a": "' + b"z" * (17 << 20), "line 1: is longer than 16,777,216 bytes"),
        ("rows.csv", b"a,b\n1,2\n3,4,5\n", "can't be read as csv"),
        ("rows.csv", b"a,b\n1," + b"z" * (4 << 20) + b"\n", "can't be read as csv"),
    ],
)
def test_rows_that_can_not_be_read_are_said(name: str, text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_columns_stand_between_the_marks_that_prepare_reads(mark: str, tmp_path: Path) -> None:
    rows = [["käufer", "preis"], ["1", "07" if mark == "," else "3.175,81"], ["2", "a b"]]
    (tmp_path / "rows.csv").write_text("".join(f"{mark.join(row)}\n" for row in rows), encoding="utf-8")
    (table,) = read_rows(tmp_path / "rows.csv")
    assert [table.column_names, *map(list, zip(*table.to_pydict().values(), strict=True))] == rows


def test_bytes_that_are_not_utf_8_are_said_with_what_to_do(tmp_path: Path) -> None:
    for text in ("käufer;n\na;1\n", "name;n\nkäufer;1\n"):
        (tmp_path / "rows.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=r"rows\.csv: can't be read as csv: .*; expected utf-8: convert the file"):
            list(read_rows(tmp_path / "rows.csv"))


def test_lists_are_one_text_in_csv(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2], "history": [["a", "b"], []], "number": [[1, 2], None]})
    with row_writer(tmp_path / "out.csv") as write:
        write(table)
    assert (tmp_path / "out.csv").read_text() == '"id","history","number"\n1,"a|b","1|2"\n2,"",\n'


def test_objects_are_json_in_csv(tmp_path: Path) -> None:
    values = {"id": [1, 2], "where": [{"land": "é", "at": [1, 2]}, None], "seen": [[{"a": 1}], []]}
    with row_writer(tmp_path / "out.csv") as write:
        write(pa.table(values))
    (held,) = read_rows(tmp_path / "out.csv")
    assert [text and json.loads(text) for text in held.column("where").to_pylist()] == values["where"]
    assert [json.loads(text) for text in held.column("seen").to_pylist()] == values["seen"]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_without_a_row_are_a_table(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{ending}"
    if ending == "csv":
        path.write_text("user_id,item_id\n")
    else:
        pq.write_table(pa.table({"user_id": pa.array([], pa.string()), "item_id": pa.array([], pa.string())}), path)
    (table,) = read_rows(path)
    assert (table.num_rows, table.schema.names, table.schema.types) == (0, ["user_id", "item_id"], [pa.string()] * 2)


def test_a_header_that_is_not_utf_8_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"us\x9d,item_id\nu,1\n")
    with pytest.raises(DataError, match=r"rows\.csv: can't be read as csv: 'utf-8' codec can't decode byte 0x9d"):
        list(read_rows(path))


def test_a_column_of_ever_new_kinds_of_values_is_refused(tmp_path: Path) -> None:
    """Each kind is a column of its own in the joined type, so their number needs a limit."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"a": {f"k{n}": 1}}) for n in range(200)))
    with pytest.raises(DataError, match=r"rows.jsonl: 'a' holds more than 100 kinds of values; give it one type"):
        list(read_rows(tmp_path / "rows.jsonl"))
