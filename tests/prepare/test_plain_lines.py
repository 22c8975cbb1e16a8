"""Files whose lines an engine does not read as they are: either every row is read, or the message names the line."""

from __future__ import annotations

import gzip
import json
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest

from recspec.base.errors import DataError
from recspec.data.prepare import duckdb_backend
from recspec.data.prepare.backend import Backend, fetch
from recspec.data.prepare.duckdb_backend import json_keys
from recspec.data.prepare.text_files import JsonFile, TextFile, line_numbers
from tests.prepare.small_tables import COLUMNS, rows, written

LINE_ENDS = ("\n", "\r\n", "\r", "\r\r\n")
HEADER = "user,item,stars"


def read(backend: Backend, file: TextFile) -> list[tuple[object, object]]:
    return [(row["user"], row["item"]) for row in rows(backend, file)]


@pytest.mark.parametrize("ends", [ends for ends in product(LINE_ENDS, repeat=3) if len({*ends}) == 2][::3])
def test_lines_may_end_differently(backend: Backend, tmp_path: Path, ends: tuple[str, ...]) -> None:
    path = written(tmp_path / "a.csv", "".join(map("".join, zip([HEADER, '1,"a",4', '2,"c, d",5'], ends, strict=True))))
    assert read(backend, TextFile(path, COLUMNS)) == [(1, "a"), (2, "c, d")]


@pytest.mark.parametrize("separator", ["\t", "::", " "])
@pytest.mark.parametrize("mixed", ["\n", "\r"])
def test_lines_of_unquoted_files_may_end_differently(
    backend: Backend, tmp_path: Path, separator: str, mixed: str
) -> None:
    lines = [separator.join(values) for values in (("1", "a", "4"), ("2", "b", "5"), ("3", "c", "5"))]
    path = written(tmp_path / "a.dat", f"{lines[0]}\r\n{lines[1]}{mixed}{lines[2]}\r\n")
    file = TextFile(path, COLUMNS, separator=separator, header=False, quote="")
    assert read(backend, file) == [(1, "a"), (2, "b"), (3, "c")]


@pytest.mark.parametrize(
    ("blank", "mark", "encoding"),
    [("\n", "", "utf-8"), ("\r\n", "\ufeff", "utf-8"), ("\n\n", "", "utf-16"), ("\r\n\r\n\r\n", "", "utf-8")],
)
def test_blank_lines_before_the_header_are_skipped(
    backend: Backend, tmp_path: Path, blank: str, mark: str, encoding: str
) -> None:
    path = written(tmp_path / "a.csv", f"{mark}{blank}{HEADER}\n1,a,4\n\n2,b,5\n", encoding)
    file = TextFile(path, COLUMNS, encoding=encoding)
    assert read(backend, file) == [(1, "a"), (2, "b")]
    header = 1 + blank.count("\n")
    assert line_numbers(file, [0, 1]) == {0: header + 1, 1: header + 3}


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_bytes_that_one_reader_takes_and_another_refuses_are_read(backend: Backend, tmp_path: Path, name: str) -> None:
    """0x85 is a control character of Latin-1; NULs may follow a gzip stream, by its specification's tools."""
    content = f"{HEADER}\n1,a\x85,4\n2,b,5\n".encode("latin-1")
    (tmp_path / name).write_bytes(gzip.compress(content) + b"\0" * 512 if name.endswith("gz") else content)
    assert read(backend, TextFile(tmp_path / name, COLUMNS, encoding="latin-1")) == [(1, "a\x85"), (2, "b")]


def test_a_gzipped_file_with_any_damaged_byte_is_refused(backend: Backend, tmp_path: Path) -> None:
    """The engine ignores check sums, so that changed values would pass."""
    lines = "".join(f"{n},item {n * 7919 % 1000},{n % 5}\n" for n in range(1000))
    whole = gzip.compress(lines.encode(), mtime=0)
    file = TextFile(tmp_path / "a.csv.gz", COLUMNS, header=False)
    (tmp_path / "a.csv.gz").write_bytes(whole)
    expected = read(backend, file)
    assert len(expected) == 1000
    for place in (*range(20, len(whole) - 8, 211), *range(len(whole) - 8, len(whole))):
        (tmp_path / "a.csv.gz").write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DataError, match=r"a\.csv\.gz: "):
            read(backend, file)


def test_a_last_line_that_is_too_long_is_refused_in_gzip_too(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"1,a,4\n" * 10 + b"2," + b"a" * (5 << 20)))
    with pytest.raises(DataError, match=r"line 11: is longer than 2,097,152"):
        read(backend, TextFile(tmp_path / "a.csv.gz", COLUMNS, header=False))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"2"3,b,5', "line 3: a value goes on behind its closing quote; double the quotes inside a value"),
        ('2,"b,5', "line 3: a quote is never closed"),
        ("٣,b,5", "line 3: column 'user' is '٣'; expected a whole number"),
        ("2,b,٣", "line 3: column 'stars' is '٣'; expected a number"),
    ],
)
def test_what_is_malformed_names_its_line_and_no_option_of_the_engine(
    backend: Backend, tmp_path: Path, line: str, said: str
) -> None:
    path = written(tmp_path / "a.csv", f"{HEADER}\n1,a,4\n{line}\n")
    with pytest.raises(DataError) as caught:
        read(backend, TextFile(path, COLUMNS, multiline=True))
    assert said in str(caught.value)
    options = ("strict_mode", "ignore_errors", "auto_detect", str(tmp_path / "w"))
    assert not any(word in str(caught.value) for word in options)


OBJECTS = {"user": "int64", "item": "string"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\n\n", " \r\n"])
def test_objects_may_end_in_any_line_end(backend: Backend, tmp_path: Path, end: str) -> None:
    path = written(tmp_path / "a.json", end.join(json.dumps({"user": n, "item": f"i{n}"}) for n in range(3)))
    found = fetch(backend, backend.read_json(JsonFile(path, OBJECTS)))
    assert found.column("item").to_pylist() == ["i0", "i1", "i2"]
    assert json_keys(JsonFile(path, {}), tmp_path) == {"user": "UBIGINT", "item": "VARCHAR"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (r'{"user": 1, "item": "\ud800"}', "line 2: holds half of a surrogate pair"),
        ('{"user": 1, "user": 2, "item": "a"}', "line 2: is no JSON object (key 'user' stands more than once)"),
        ('{"user": 1, "item": "a"', "line 2: is no JSON object"),
    ],
)
def test_a_malformed_object_names_its_line_and_no_file_of_ours(
    backend: Backend, tmp_path: Path, line: str, said: str
) -> None:
    path = written(tmp_path / "a.json", f'{{"user": 0, "item": "a"}}\n{line}\n{{"user": 3, "item": "b"}}\n')
    with pytest.raises(DataError) as caught:
        backend.read_json(JsonFile(path, OBJECTS))
    assert said in str(caught.value)
    assert "objects" not in str(caught.value)
    if "more than once" not in said:  # the engine finds keys without looking at their values
        with pytest.raises(DataError) as caught:
            json_keys(JsonFile(path, {}), tmp_path)
        assert said in str(caught.value)


def test_a_key_without_a_name_is_refused(backend: Backend, tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", '{"": 1, "item": "a"}\n')
    with pytest.raises(DataError, match="a column has an empty name; name it"):
        backend.read_json(JsonFile(path, {"": "string", "item": "string"}))


def test_ctrl_c_during_a_call_of_the_engine_is_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt), duckdb_backend._interruptible():
        raise RuntimeError("Query interrupted")
    with pytest.raises(RuntimeError, match="other"), duckdb_backend._interruptible():
        raise RuntimeError("other")

    class Interrupted:
        def read_next_batch(self) -> pa.RecordBatch:
            raise OSError("INTERRUPT Error: Query interrupted")

    with pytest.raises(KeyboardInterrupt):
        list(duckdb_backend._batches(Interrupted()))
