"""Encoders fitted in memory and by queries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.data.encoding import ScaleEncoder
from recspec.data.prepare import columns, tables
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.columns import Column

RAW = pa.table(
    {
        "price": pa.array([0.0, 1.0, None, 10.0, 100.0, 1000.0, 10.0, 3.0]),
        "delta": pa.array([-1.0, 0.5, 2.0, -30.0, None, 0.0, 0.0, 90.0]),
        "shop": pa.array(["a", "b", None, "a", "b", "c", "a", "é"]),
        "tags": pa.array(["x|y", "y", None, "", "x|y|z", "z", "y", "y"]),
        "none": pa.nulls(8, pa.float64()),
    }
)
COLUMNS = (
    Column("plain", "number", raw="price"),
    Column("chosen", "number", raw="price", log1p=None),
    Column("both", "number", raw="delta", log1p=None),
    Column("none", "number", log1p=None, limited=True),
    Column("limited", "number", raw="delta", log1p=None, limited=True),
    Column("logged", "number", raw="delta", log1p=True),
    Column("price_bucket", "bucket", raw="price", size=3),
    Column("shop", "category"),
    Column("hashed", "hash", raw="shop", size=10),
    Column("tags", "list", separator="|"),
)


@pytest.mark.parametrize("at_once", [0, 8, 24, 1 << 20])
def test_columns_of_a_small_table_are_fitted_in_memory_as_by_a_query_each(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(columns, "VALUES_AT_ONCE", at_once)
    pq.write_table(RAW, tmp_path / "rows.parquet")
    rows = backend.read_parquet([tmp_path / "rows.parquet"], row=True)
    expected = [columns.fit_in_table(backend, rows, column, 2) for column in COLUMNS]
    found = list(columns.fit_columns(backend, rows, RAW.num_rows, COLUMNS, 2))
    assert list(map(told, found)) == list(map(told, expected))
    logs = {column.name: getattr(encoder, "log1p", None) for column, (encoder, _) in zip(COLUMNS, found, strict=True)}
    assert logs == {
        "plain": False,
        "chosen": True,
        "both": False,
        "none": False,
        "limited": False,
        "logged": True,
        **dict.fromkeys(("price_bucket", "shop", "hashed", "tags")),
    }
    limits = {
        column.name: (getattr(each, "low", None), getattr(each, "high", None))
        for column, (each, _) in zip(COLUMNS, found, strict=True)
    }
    assert limits == {**dict.fromkeys(limits, (None, None)), "limited": (-30.0, 90.0)}


def test_a_seldom_number_is_not_huge_where_it_occurs() -> None:
    seldom = pa.array([0.0] * 99 + [1.0])
    (limited, _), (plain, _) = (
        columns.fit(Column("x", "number", log1p=None, limited=each), seldom) for each in (True, False)
    )
    assert isinstance(limited, ScaleEncoder)
    assert isinstance(plain, ScaleEncoder)
    assert (limited.mean, limited.std) == (0.01, 0.25)  # the range 0 to 1 takes 4 deviations
    assert plain.std == pytest.approx(0.0995, abs=1e-4)


def test_a_number_beyond_its_limits_is_the_nearer_one() -> None:
    encoder = ScaleEncoder(mean=1, std=2, low=-3, high=9, outside=None)
    assert encoder.transformed([-100.0, -3.0, 0.0, 9.0, 1e9]).tolist() == [-3, -3, 0, 9, 9]
    assert np.isnan(encoder.transformed([None])).all()


def told(fitted: columns.FittedColumn) -> tuple[object, object]:
    encoder, vocabulary = fitted
    return encoder, None if vocabulary is None else vocabulary.values.to_pylist()


@pytest.mark.parametrize("at_once", [1, 2, 200])
def test_aggregates_are_the_same_in_any_number_of_queries(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("recspec.data.prepare.backend.AGGREGATES_AT_ONCE", at_once)
    pq.write_table(RAW, tmp_path / "rows.parquet")
    rows = backend.read_parquet([tmp_path / "rows.parquet"], row=True)
    asked = {"most": rows["price"].max(), "kinds": rows["shop"].nunique(), "least": rows["delta"].min()}
    assert tables.figures(backend, rows, asked) == {"most": 1000.0, "kinds": 4, "least": -30.0}
    assert tables.figures(backend, rows, {}) == {}
