"""Whole numbers of any type are one column: in engines and in Arrow, in frames and in files of every kind."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recspec.api.frames import as_ids, to_table
from recspec.base.errors import DataError
from recspec.base.files import open_parquet
from recspec.data.encoding import Encoders, plain
from recspec.data.prepare.backend import Backend, fetch
from recspec.data.prepare.names import Notes
from recspec.data.prepare.raw_files import stage
from recspec.data.prepare.raw_rows import WHOLE as WHOLE_TEXT
from recspec.data.prepare.raw_rows import Reading
from recspec.inference import read_rows
from tests.dataset_cases import prepare_table
from tests.prepare.small_tables import connect

WHOLE: Mapping[pa.DataType, tuple[int, int]] = {
    **{getattr(pa, f"int{bits}")(): (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{getattr(pa, f"uint{bits}")(): (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    pa.decimal128(5, 0): (-99_999, 99_999),
    pa.decimal128(38, 0): (1 - 10**38, 10**38 - 1),
    pa.decimal128(38, 9): (1 - 10**29, 10**29 - 1),
}
"""Types of whole numbers that engines read, with the least and largest value."""


def expected(values: Sequence[int | None]) -> list[Any]:
    """The values, or their digits if one of them has more than 64 bits."""
    fits = all(-(2**63) <= value < 2**63 for value in values if value is not None)
    return [*values] if fits else [None if value is None else str(value) for value in values]


def array(values: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    is_decimal = pa.types.is_decimal(kind)
    return pa.array([Decimal(value) if is_decimal and value is not None else value for value in values], kind)


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[int | None], pa.ChunkedArray]:
    """Values, and a column of them in several chunks, some of which may be stored as codes."""
    kind = draw(st.sampled_from([*WHOLE]))
    low, high = WHOLE[kind]
    ends = [number for number in (low, high, 0, 2**53 + 1, 2**63 - 1, 2**63, -(2**63)) if low <= number <= high]
    values = draw(st.lists(st.none() | st.sampled_from(ends) | st.integers(low, high), max_size=6))
    cut = draw(st.integers(0, len(values)))
    chunks = [array(part, kind) for part in (values[:cut], values[cut:])]
    if draw(st.booleans()):
        chunks = [chunk.dictionary_encode() for chunk in chunks]
    return values, pa.chunked_array(chunks)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    with connect("duckdb", folder=tmp_path_factory.mktemp("engine") / "work") as engine:
        yield engine


@given(columns())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_column_and_its_file_are_the_same_whole_numbers(
    backend: Backend, tmp_path: Path, drawn: tuple[list[int | None], pa.ChunkedArray]
) -> None:
    values, column = drawn
    assert plain(column).to_pylist() == expected(values)
    lists = pa.chunked_array([pa.ListArray.from_arrays([0, len(chunk)], chunk) for chunk in column.chunks])
    assert [each for held in plain(lists).to_pylist() for each in held] == expected(values)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": column, "y": range(len(column))}), path)
    rows = stage(backend, [path], ("user", "item"), Reading(), Notes(), tmp_path)
    assert fetch(backend, rows.table.order_by("y").select("x")).column("x").to_pylist() == expected(values)


def _duckdb(table: pa.Table) -> Any:
    return duckdb.from_arrow(table)


def _polars(table: pa.Table) -> Any:
    return pytest.importorskip("polars").from_arrow(table)


KINDS: Mapping[str, tuple[pa.DataType, list[int]]] = {
    "int8": (pa.int8(), [-7, 0, 100]),
    "uint64": (pa.uint64(), [1, 2**63, 2**64 - 1]),
    "decimal": (pa.decimal128(38, 0), [2**53 + 1, 2**53 + 2, 2**64 + 1]),
    "decimal with a scale": (pa.decimal128(38, 10), [5, 2**53 + 1, 2**53 + 2]),
}


@pytest.mark.parametrize("case", KINDS)
def test_frames_and_files_of_any_kind_get_the_same_ids(case: str, tmp_path: Path) -> None:
    of, numbers = KINDS[case]
    values = [numbers[row % len(numbers)] for row in range(60)]
    table = pa.table(
        {"user_id": [f"u{row % 8}" for row in range(60)], "item_id": array(values, of), "timestamp": range(60)}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    pa_csv.write_csv(table.set_column(1, "item_id", pa.array(map(str, values))), tmp_path / "rows.csv")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"item_id": value}) + "\n" for value in values))
    prepare_table(tmp_path / "rows.parquet", tmp_path / "out")
    encoders = Encoders.load(tmp_path / "out")
    assert encoders.vocabulary_of("item_id").values.to_pylist() == sorted(map(str, numbers))
    found = {path.name: next(read_rows(path)) for path in tmp_path.glob("rows.*")}
    frames = {
        "pyarrow": table,
        "pandas": table.to_pandas(),
        "duckdb": duckdb.from_arrow(table),
        "rows": [{"item_id": value} for value in values],
    }
    with suppress(ImportError):
        frames["polars"] = importlib.import_module("polars").from_arrow(table)
    found |= {name: to_table(frame) for name, frame in frames.items()}
    expected = [1 + sorted(map(str, numbers)).index(str(value)) for value in values]
    for name, rows in found.items():
        ids = encoders.encode(rows, ["item_id"])["item_id"]
        assert ids.tolist() == expected, name  # type: ignore[union-attr]


def test_more_than_64_bits_come_in_from_every_library() -> None:
    frames: list[object] = [
        {"x": [1, None, 2**100]},
        {"x": [1, float("nan"), 2**100]},
        [{"x": 1}, {"x": None}, {"x": 2**100}],
        pd.DataFrame({"x": [1, None, 2**100]}, dtype=object),
        duckdb.sql(f"FROM (VALUES (1::UHUGEINT), (NULL), ('{2**100}'::UHUGEINT)) AS t(x)"),
    ]
    with suppress(ImportError):
        polars = importlib.import_module("polars")
        wide = polars.Series([1, None, 2**100], dtype=polars.Int128)
        frames += [polars.DataFrame({"x": wide}), polars.DataFrame({"x": wide}).lazy()]
        assert to_table(polars.DataFrame({"x": wide[:2]})).column("x").to_pylist() == [1, None]
    for frame in frames:
        assert to_table(frame).column("x").to_pylist() == ["1", None, str(2**100)]
    with pytest.raises(DataError, match=r"column 'x' holds extension<arrow\.opaque.*bignum.*; cast it to text or"):
        to_table(duckdb.sql("SELECT 5::BIGNUM AS x"))
    assert as_ids([Decimal(3), Decimal(2**70), pa.scalar(7)], "users") == (3, str(2**70), 7)
    assert as_ids(pa.table({"user": pa.array([Decimal(3), Decimal(4)])}), "users") == (3, 4)


def test_decimals_are_numbers_if_one_has_a_fraction(backend: Backend, tmp_path: Path) -> None:
    prices = pa.array([Decimal("1.50"), None, Decimal("2.00")])
    assert plain(prices).to_pylist() == [1.5, None, 2.0]
    pq.write_table(pa.table({"price": prices, "n": array([5, None, 2], pa.decimal128(38, 2))}), tmp_path / "a.parquet")
    notes = Notes()
    rows = stage(backend, [tmp_path / "a.parquet"], ("user", "item"), Reading(), notes, tmp_path)
    assert fetch(backend, rows.table.select("price", "n")).to_pydict() == {"price": [1.5, None, 2.0], "n": [5, None, 2]}
    assert notes.inferred == ["'n': decimals without a fraction in any row, read as whole numbers"]
    pq.write_table(pa.table({"n": array([1], pa.decimal256(60, 0))}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column 'n' is decimal256\(60, 0\); expected decimals of at most 38 digits"):
        stage(backend, [tmp_path / "b.parquet"], ("user", "item"), Reading(), Notes(), tmp_path)


FRACTIONS = (pa.decimal128(9, 2), pa.decimal128(18, 4), pa.decimal128(38, 20))


@pytest.mark.parametrize("kind", FRACTIONS, ids=str)
def test_a_decimal_is_the_number_that_its_digits_are_in_any_source(
    backend: Backend, tmp_path: Path, kind: pa.DataType
) -> None:
    whole = np.random.default_rng(0).integers(10 ** min(kind.precision // 2 + 2, 18), size=2_000)
    values = pa.array([Decimal("0.35"), *(Decimal(int(value)).scaleb(-kind.scale) for value in whole)], kind)
    digits = [format(value, "f") for value in values.to_pylist()]
    expected = [float(text) for text in digits]
    assert plain(values).to_pylist() == expected
    pq.write_table(pa.table({"x": values, "y": range(len(values))}), tmp_path / "rows.parquet")
    pa_csv.write_csv(pa.table({"x": pa.array(digits), "y": range(len(values))}), tmp_path / "rows.csv")
    for path in (tmp_path / "rows.parquet", tmp_path / "rows.csv"):
        rows = stage(backend, [path], ("user", "item"), Reading(), Notes(), tmp_path)
        found = fetch(backend, rows.table.order_by(rows.table.y.cast("int64")).select("x")).column("x").to_pylist()
        assert [float(value) for value in found] == expected, path


def test_a_number_declared_text_is_spelled_as_rows_to_predict_are(tmp_path: Path) -> None:
    codes = pa.array([[1.0, 2.5, 2.0**60, None][row % 4] for row in range(40)])
    columns = {"user_id": [f"u{row % 8}" for row in range(40)], "item_id": [f"i{row % 5}" for row in range(40)]}
    pq.write_table(pa.table({**columns, "code": codes}), tmp_path / "rows.parquet")
    prepare_table(tmp_path / "rows.parquet", tmp_path / "out", context_features=["code"], types={"code": "text"})
    encoders = Encoders.load(tmp_path / "out")
    (rows,) = read_rows(tmp_path / "rows.parquet")
    assert encoders.vocabulary_of("code").values.to_pylist()[:1] == ["1"]
    assert (encoders.encode(rows, ["code"])["code"] > 0).tolist() == [row % 4 != 3 for row in range(40)]  # type: ignore[operator]


@pytest.mark.parametrize("within", ["texts", "lists"])
def test_codes_of_a_merged_file_may_outgrow_their_type(within: str, tmp_path: Path) -> None:
    words = [f"v{number}" for number in range(200)]
    chunks = [
        pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), pa.array(words[start : start + 100]))
        for start in (0, 100)
    ]
    if within == "lists":
        chunks = [pa.ListArray.from_arrays(range(101), chunk) for chunk in chunks]
    columns = {"user_id": [f"u{row % 8}" for row in range(200)], "word": pa.chunked_array(chunks)}
    pq.write_table(pa.table({**columns, "item_id": words}), tmp_path / "rows.parquet")
    with pytest.raises(pa.ArrowInvalid, match="not in range"):
        pq.read_table(tmp_path / "rows.parquet")
    prepare_table(tmp_path / "rows.parquet", tmp_path / "out", context_features=["word"])
    (rows,) = read_rows(tmp_path / "rows.parquet")
    encoders = Encoders.load(tmp_path / "out")
    found = encoders.encode(rows, ["word"])["word"]
    ids = found[0] if isinstance(found, tuple) else found
    known = encoders.vocabulary_of("word")
    assert len(known) > 100
    assert {*known.decode(ids).to_pylist()} - {None} == {*known.values.to_pylist()}
    with open_parquet(tmp_path / "rows.parquet") as file:
        assert file.read().num_rows == 200


def test_files_that_differ_only_in_how_they_store_a_column_are_one_table(backend: Backend, tmp_path: Path) -> None:
    for name, column in (("a", pa.array(["x"])), ("b", pa.array(["y"]).dictionary_encode())):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    rows = stage(backend, paths, ("user", "item"), Reading(), Notes(), tmp_path)
    assert sorted(fetch(backend, rows.table).column("x").to_pylist()) == ["x", "y"]


def test_the_pattern_of_whole_numbers_ends_where_64_bits_do() -> None:
    fits = {
        number: re.search(WHOLE_TEXT, str(number)) is not None
        for number in (0, 10**18, 9 * 10**18, 2**63 - 2, 2**63 - 1, 2**63, 93 * 10**17, 10**19, 1 - 2**63, -(10**19))
    }
    assert fits == {number: abs(number) < 2**63 for number in fits}
