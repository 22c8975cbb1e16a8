"""Raw text, JSON lines and Parquet read by DuckDB, on small files worked out by hand."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.data.prepare import duckdb_backend
from recspec.data.prepare.backend import Backend, count_rows, fetch
from recspec.data.prepare.duckdb_backend import DuckDBBackend
from recspec.data.prepare.text_files import ROW, JsonFile, TextFile, problems_of
from tests.prepare.small_tables import COLUMNS, connect, rows, table, written


@pytest.fixture(autouse=True)
def own_engine(shared_engine: Callable[..., duckdb.DuckDBPyConnection], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine for each backend, as outside the tests."""
    monkeypatch.setattr(duckdb, "connect", shared_engine)


# --- reading text -----------------------------------------------------------------------------------------------------


def test_a_csv_file_is_read_by_its_header_and_its_rows_are_numbered(backend: Backend, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "stars,extra,user,item\n4.5,x,1,a\n3,,2,\n")
    assert rows(backend, TextFile(path, COLUMNS)) == [
        {ROW: 0, "user": 1, "item": "a", "stars": 4.5},
        {ROW: 1, "user": 2, "item": None, "stars": 3.0},
    ]


@pytest.mark.parametrize(("ending", "last"), [("\n", False), ("\r\n", True)])
def test_line_endings_and_a_missing_last_one_do_not_matter(
    backend: Backend, tmp_path: Path, ending: str, last: bool
) -> None:
    text = ending.join(["user,item,stars", "1,a,4", "2,b,5"]) + (ending if last else "")
    found = rows(backend, TextFile(written(tmp_path / "a.csv", text), COLUMNS))
    assert [(row["user"], row["item"], row["stars"]) for row in found] == [(1, "a", 4.0), (2, "b", 5.0)]


def test_quotes_hold_separators_line_breaks_and_quotes(backend: Backend, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'user,item,stars\n1,"a, ""b""\nc",4\n2,d,5\n')
    found = rows(backend, TextFile(path, COLUMNS, multiline=True))
    assert [row["item"] for row in found] == ['a, "b"\nc', "d"]


def test_a_separator_of_two_characters_and_latin_1_are_read(backend: Backend, tmp_path: Path) -> None:
    path = written(tmp_path / "a.dat", '1::Léon "x"::4\n2::b::5\n', "latin-1")
    file = TextFile(path, COLUMNS, separator="::", header=False, encoding="latin-1", quote="")
    assert [row["item"] for row in rows(backend, file)] == ['Léon "x"', "b"]


def test_a_byte_order_mark_and_compression_are_taken_off(backend: Backend, tmp_path: Path) -> None:
    plain = "\ufeffuser,item,stars\n1,a,4\n"
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(plain.encode()))
    for file in (path, written(tmp_path / "a.csv", plain)):
        assert rows(backend, TextFile(file, COLUMNS)) == [{ROW: 0, "user": 1, "item": "a", "stars": 4.0}]


def test_a_header_alone_is_a_table_without_rows_and_an_empty_file_is_an_error(backend: Backend, tmp_path: Path) -> None:
    assert rows(backend, TextFile(written(tmp_path / "a.csv", "user,item,stars\n"), COLUMNS)) == []
    with pytest.raises(DataError, match=r"a\.csv: is empty; expected a header line"):
        rows(backend, TextFile(written(tmp_path / "a.csv", ""), COLUMNS))


def test_every_missing_column_is_named_with_the_nearest_one(backend: Backend, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "users,item,x,x\n1,a,2,3\n")
    with pytest.raises(DataError) as caught:
        rows(backend, TextFile(path, COLUMNS))
    assert len(caught.value.problems) == 3
    assert "no column 'user' (did you mean 'users'?); found 'users', 'item', 'x', 'x'" in str(caught.value)
    assert "no column 'stars'" in str(caught.value)
    assert "column 'x' stands more than once" in str(caught.value)


def test_every_malformed_line_is_named_with_its_number(backend: Backend, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "user,item,stars\n1,a,4\nx,b,5\n3,c\n\n4,d,high\n5,e,1,2\n,f,1\n")
    with pytest.raises(DataError) as caught:
        rows(backend, TextFile(path, COLUMNS, required=("user",)))
    assert str(caught.value).startswith(f"{path}: 5 problems")
    assert caught.value.problems == (
        "line 3: column 'user' is 'x'; expected a whole number",
        "line 4: has 2 columns, expected 3 separated by ','",
        "line 6: column 'stars' is 'high'; expected a number",
        "line 7: has 4 columns, expected 3 separated by ','",
        "line 8: column 'user' has no value; expected one in every row",
    )


def test_a_missing_value_that_is_required_is_found_though_the_engine_reads_it(backend: Backend, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "user,item,stars\n1,a,4\n,b,5\n")
    assert len(rows(backend, TextFile(path, COLUMNS))) == 2
    with pytest.raises(DataError, match=r"a\.csv: line 3: column 'user' has no value"):
        rows(backend, TextFile(path, COLUMNS, required=("user",)))


@pytest.mark.parametrize("value", ["1.5", "-3.0", "15e-1", "5E-1"])
def test_a_fraction_is_not_rounded_to_a_whole_number(backend: Backend, tmp_path: Path, value: str) -> None:
    path = written(tmp_path / "a.csv", f"user,item,stars\n7,a,1\n{value},b,2\n")
    with pytest.raises(DataError, match=f"line 3: column 'user' is '{value}'; expected a whole number"):
        backend.read_text(TextFile(path, COLUMNS))


@pytest.mark.parametrize("beyond", [0, 2, 4])
def test_a_fraction_across_two_blocks_of_the_file_is_not_rounded(backend: Backend, tmp_path: Path, beyond: int) -> None:
    item = "-" * ((1 << 20) - len("user,item,stars\n7,,1\n15e-1") + beyond)  # the file is looked through by blocks
    path = written(tmp_path / "a.csv", f"user,item,stars\n7,{item},1\n15e-1,b,2\n")
    with pytest.raises(DataError, match="line 3: column 'user' is '15e-1'; expected a whole number"):
        backend.read_text(TextFile(path, COLUMNS))


def test_whole_numbers_are_the_same_beside_marks_of_fractions(backend: Backend, tmp_path: Path) -> None:
    numbers = [0, -1, 2**63 - 1, -(2**63), 9_007_199_254_740_993]
    for item in ("a", "a.b", "e-b", "E-"):
        text = "".join(f"{number},{item},1\n" for number in numbers)
        found = rows(backend, TextFile(written(tmp_path / "a.csv", f"user,item,stars\n{text}"), COLUMNS))
        assert [(row["user"], row["item"]) for row in found] == [(number, item) for number in numbers]


@pytest.mark.parametrize("value", [str(2**63), str(-(2**63) - 1), "9" * 30])
def test_a_number_beyond_64_bits_is_named_with_its_line(backend: Backend, tmp_path: Path, value: str) -> None:
    path = written(tmp_path / "a.csv", f"user,item,stars\n{2**63 - 1},a,1\n{value},b,2\n")
    with pytest.raises(DataError, match=f"line 3: column 'user' is '{value}'; expected a whole number of at most 64"):
        backend.read_text(TextFile(path, COLUMNS))


# --- reading JSON lines -----------------------------------------------------------------------------------------------
OBJECTS = """\
{"user": 7, "item": "a, \\"b\\"", "stars": 4.0, "extra": [1, {"x": null}]}

{"item": "\\u00e9", "user": "8"}
  \r
{"stars": 3, "user": 9, "item": null}"""
READ_OBJECTS = [
    {ROW: 0, "user": 7, "item": 'a, "b"', "stars": 4.0},
    {ROW: 1, "user": 8, "item": "é", "stars": None},
    {ROW: 2, "user": 9, "item": None, "stars": 3.0},
]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_json_lines_are_read_by_key_and_numbered_without_blank_lines(
    backend: Backend, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(OBJECTS.encode()) if name.endswith(".gz") else OBJECTS.encode())
    assert fetch(backend, backend.read_json(JsonFile(path, COLUMNS)).order_by(ROW)).to_pylist() == READ_OBJECTS


def test_json_lines_may_be_none(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"")
    assert count_rows(backend, backend.read_json(JsonFile(tmp_path / "a.json", COLUMNS))) == 0


MALFORMED = """\
{"user": 7, "item": "a"}
{"user": "x", "item": "b"}
{"user": 1.5, "stars": "high"}
{'user': 7}
[1]
{"users": 7}
{"user": 1
"""


def test_every_malformed_json_line_is_named_with_its_number(backend: Backend, tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", MALFORMED)
    with pytest.raises(DataError) as caught:
        backend.read_json(JsonFile(path, COLUMNS, required=("user",)))
    assert str(caught.value).startswith(f"{path}: 7 problems")
    assert caught.value.problems == (
        "line 2: 'user' is 'x'; expected a whole number",
        "line 3: 'stars' is 'high'; expected a number",
        "line 3: 'user' is '1.5'; expected a whole number",
        "line 4: is no JSON object (Expecting property name enclosed in double quotes): \"{'user': 7}\"",
        "line 5: is no JSON object: '[1]'",
        "line 6: 'user' has no value; expected one in every row (did you mean 'users'?)",
        "line 7: is no JSON object (Expecting ',' delimiter): '{\"user\": 1'",
    )


@pytest.mark.parametrize("value", ["1.5", "-3.0", "15e-1", "true"])
def test_what_is_no_whole_number_in_json_is_not_made_one(backend: Backend, tmp_path: Path, value: str) -> None:
    path = written(tmp_path / "a.json", f'{{"user": 7}}\n{{"user": {value}}}\n')
    with pytest.raises(DataError, match=r"line 2: 'user' is '(1\.5|-3\.0|true)'; expected a whole number"):
        backend.read_json(JsonFile(path, COLUMNS))


def test_json_that_is_cut_short_or_no_text_is_said(backend: Backend, tmp_path: Path) -> None:
    packed = gzip.compress("".join(f'{{"user": {number * 7919 % 10007}}}\n' for number in range(5000)).encode())
    for name, content, said in (
        ("short.json.gz", packed[: len(packed) // 2], "the compressed file was cut short; download it again"),
        ("none.json.gz", b"{}", "the compressed file is no gzip file, or damaged"),
        ("latin.json", b'{"user": 1, "item": "\xe9"}\n', "is not utf-8 text: byte 0xe9"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=said) as caught:
            backend.read_json(JsonFile(tmp_path / name, COLUMNS))
        assert str(tmp_path / name) in str(caught.value)


def test_a_table_may_stay_when_the_engine_is_closed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "user,item,stars\n7,a,1\n")
    with connect(folder=tmp_path / "work", threads=1) as opened:
        read = opened.read_text(TextFile(path, COLUMNS), tmp_path / "read.parquet")
        opened.stage(read.mutate(user=read["user"] + 1), tmp_path / "staged.parquet")
    for name, user in (("read", 7), ("staged", 8)):
        with connect(folder=tmp_path / "work", threads=1) as opened:
            found = fetch(opened, opened.read_parquet([tmp_path / f"{name}.parquet"], row=name == "read")).to_pylist()
        assert found == [{ROW: 0, "user": user, "item": "a", "stars": 1.0}]


def test_reading_tells_how_far_it_is_and_can_be_ended(tmp_path: Path) -> None:
    class Ended(Exception):
        pass

    def end(share: float) -> None:
        raise Ended(share)

    path = written(tmp_path / "a.csv", "user,item,stars\n" + "7,a,1\n" * 100_000)
    told: list[float] = []
    with connect(folder=tmp_path / "work", threads=1) as opened:
        read = opened.read_text(TextFile(path, COLUMNS), watch=told.append)
        assert count_rows(opened, read) == 100_000
        assert told
        assert all(0 <= share <= 1 for share in told)
        with pytest.raises(Ended):
            opened.read_text(TextFile(path, COLUMNS), tmp_path / "read.parquet", watch=end)
        assert not (tmp_path / "read.parquet").exists()
        assert count_rows(opened, read) == 100_000


def test_at_most_ten_malformed_lines_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "user,item,stars\n" + "x,a,4\n" * 50)
    assert len(problems_of(TextFile(path, COLUMNS))) == 10


def test_a_missing_file_and_text_in_another_encoding_are_said(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be opened: No such file"):
        rows(backend, TextFile(tmp_path / "a.csv", COLUMNS))
    path = written(tmp_path / "a.csv", "user,item,stars\n1,Léon,4\n", "latin-1")
    with pytest.raises(DataError, match=r"a\.csv: line 2, character 4: is not utf-8 text: byte 0xe9"):
        rows(backend, TextFile(path, COLUMNS))


# --- what is done to tables -------------------------------------------------------------------------------------------


def test_staging_keeps_the_order_and_batches_are_no_larger_than_asked(backend: Backend, tmp_path: Path) -> None:
    numbers = table(backend, tmp_path, value=list(range(1000)))
    staged = backend.stage(numbers.order_by([numbers["value"] % 7, "value"]))
    batches = list(backend.batches(staged, rows=300))
    assert max(batch.num_rows for batch in batches) <= 300
    found = pa.Table.from_batches(batches).column("value").to_pylist()
    assert found == sorted(range(1000), key=lambda value: (value % 7, value))


@pytest.mark.parametrize("name", ["value", "file_row_number", "File_Row_Number"])
def test_rows_of_one_file_are_numbered_whatever_its_columns_are_called(
    name: str, tmp_path: Path, backend: Backend
) -> None:
    pq.write_table(pa.table({name: [7, 5, 6]}), tmp_path / "a.parquet", row_group_size=1)
    table = backend.read_parquet([tmp_path / "a.parquet"], row=True)
    assert fetch(backend, table.order_by(ROW)).to_pydict() == {ROW: [0, 1, 2], name: [7, 5, 6]}


def test_several_parquet_files_are_numbered_one_after_another(backend: Backend, tmp_path: Path) -> None:
    for name, values in (("b", [1, 2]), ("a", [3])):
        pq.write_table(pa.table({"value": values}), tmp_path / f"{name}.parquet")
    both = backend.read_parquet([tmp_path / "b.parquet", tmp_path / "a.parquet"], row=True)
    assert fetch(backend, both.order_by(ROW)).to_pydict() == {ROW: [0, 1, 2], "value": [1, 2, 3]}


def test_closing_removes_what_was_staged(tmp_path: Path) -> None:
    with connect(folder=tmp_path / "work", threads=1) as backend:
        backend.stage(table(backend, tmp_path, value=[1]))
        assert any((tmp_path / "work").iterdir())
    assert not (tmp_path / "work").exists()


def test_a_query_larger_than_the_memory_limit_spills(tmp_path: Path) -> None:
    pq.write_table(pa.table({"value": range(1_000_000)}), tmp_path / "a.parquet")
    with connect(folder=tmp_path / "work", threads=1, memory_limit="100MB") as backend:  # DuckDB's own: 25 MB
        numbers = backend.read_parquet([tmp_path / "a.parquet"])
        assert count_rows(backend, backend.stage(numbers.order_by([numbers["value"] % 1013, "value"]))) == 1_000_000


@pytest.mark.parametrize(("limit", "threads"), [("500MB", 1), ("1GB", 3), ("2GB", 8)])
def test_no_more_threads_than_the_memory_limit_feeds(limit: str, threads: int, tmp_path: Path) -> None:
    with connect(folder=tmp_path / "work", threads=8, memory_limit=limit) as backend:
        assert isinstance(backend, DuckDBBackend)
        assert backend._connection.execute("SELECT current_setting('threads')").fetchall() == [(threads,)]


def test_memory_that_runs_out_is_said(tmp_path: Path) -> None:
    pq.write_table(pa.table({"value": range(1_000_000)}), tmp_path / "a.parquet")
    with connect(folder=tmp_path / "work", threads=1, memory_limit="20MB") as backend:
        numbers = backend.read_parquet([tmp_path / "a.parquet"])
        with pytest.raises(SettingsError, match=r"^--memory-limit of 20 MB is too little for these tables .*; give"):
            backend.stage(numbers.order_by([numbers["value"] % 1013, "value"]))
    of_the_system = duckdb.OutOfMemoryException("Out of Memory Error: Failed to allocate block (bad allocation)")
    told = r"^the system gives this process less than --memory-limit of 20 MB .*; give less$"
    assert re.search(told, str(duckdb_backend._resource_error(of_the_system, 20_000_000)))


def test_an_error_in_the_middle_of_a_result_is_said_as_one_at_its_start(tmp_path: Path) -> None:
    """Arrow gives errors of a query that has begun as texts, which name the kind of the error."""
    path = tmp_path / "raw.parquet"
    pq.write_table(pa.table({"value": range(1_000_000)}), path, compression="none", row_group_size=100_000)
    with connect(folder=tmp_path / "work", threads=1, memory_limit="14MB") as backend:
        numbers = backend.read_parquet([path])
        taken = backend.batches(numbers.order_by([numbers["value"] % 1013, "value"]))
        with pytest.raises(SettingsError, match=r"^--memory-limit of 14 MB is too little for these tables"):
            list(taken)
    page = pq.ParquetFile(path).metadata.row_group(9).column(0).dictionary_page_offset
    assert page is not None
    path.write_bytes(path.read_bytes()[:page] + b"\xff" * 40 + path.read_bytes()[page + 40 :])
    with connect(folder=tmp_path / "work", threads=1) as backend, pytest.raises(DataError, match=r"parquet: damaged"):
        list(backend.batches(backend.read_parquet([path], row=True)))


def test_a_result_that_is_not_read_to_its_end_leaves_the_engine_free(backend: Backend, tmp_path: Path) -> None:
    pq.write_table(pa.table({"value": range(1_000_000)}), tmp_path / "a.parquet")
    numbers = backend.read_parquet([tmp_path / "a.parquet"])
    for _ in backend.batches(numbers):
        break
    assert count_rows(backend, numbers) == 1_000_000


def test_rows_of_text_are_staged_in_groups_of_bounded_size(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.csv", "user,item,stars\n" + "".join(f"{n},{'ab' * 10},4\n" for n in range(400_000)))

    def groups() -> list[int]:
        backend.read_text(TextFile(path, COLUMNS), tmp_path / "read.parquet")
        found = pq.ParquetFile(tmp_path / "read.parquet").metadata
        users = pq.read_table(tmp_path / "read.parquet", columns=["user"]).column("user")
        assert users.to_pylist() == [*range(400_000)]
        return [found.row_group(n).num_rows for n in range(found.num_row_groups)]

    batch = 131_072  # of DuckDB's results
    monkeypatch.setattr(duckdb_backend, "ROW_GROUP_ROWS", 250_000)
    assert max(groups()) <= 250_000 + batch
    monkeypatch.setattr(duckdb_backend, "ROW_GROUP_BYTES", 1)
    assert max(groups()) <= batch


def test_a_parquet_file_that_only_duckdb_refuses_is_named(backend: Backend, tmp_path: Path) -> None:
    """Every byte of the footer is exchanged; what pyarrow lets pass, DuckDB opens or the message names the file."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"user": ["anna", "bert"], "item": ["kilo", "lima"]}), path, compression="none")
    content = path.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little")
    refused = 0
    for place in range(len(content) - 8 - footer, len(content) - 8):
        for value in (0x00, 0x15, 0xFF):
            path.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            try:
                pq.read_schema(path), pq.read_metadata(path)
            except (pa.ArrowException, OSError, ValueError):
                continue  # the check of raw files refuses these
            try:
                backend.read_parquet([path], row=True)
            except DataError as error:
                refused += str(error).startswith(f"{path}: damaged, or not a Parquet file: ")
    assert refused


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3))
def test_a_parquet_file_of_any_bytes_is_read_or_named(first: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"user": ["anna", "bert"], "when": [1, 2]}), path, compression="none")
    content = path.read_bytes()
    for place in range(4 + first, len(content) - 8, 6):
        path.write_bytes(content[:place] + b"\x15" + content[place + 1 :])
        try:
            pq.read_schema(path), pq.read_metadata(path)
        except (pa.ArrowException, OSError, ValueError):
            continue
        with connect(folder=tmp_path / "work", threads=1) as opened:
            try:
                fetch(opened, opened.read_parquet([path], row=True))
            except DataError as error:
                assert str(path) in str(error)  # noqa: PT017
