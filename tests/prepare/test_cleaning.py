"""Cleaning of interactions."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recspec.prepare.cleaning import clean
from recspec.prepare.context import connect
from recspec.prepare.tables import fetch
from recspec.prepare.text_files import ROW


def test_repeats_may_be_kept(tmp_path: Path) -> None:
    rows = pa.table({"user_id": ["u", "u", "u"], "item_id": [1, 2, 1], "timestamp": [1, 2, 3]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    with connect("duckdb", folder=tmp_path / "work") as backend:
        table = backend.read_parquet([tmp_path / "rows.parquet"], row=True)
        for repeats, kept in (("first", [1, 2]), ("keep", [1, 2, 3])):
            cleaned = clean(
                backend, table, min_interactions=1, order=["timestamp", ROW], repeats=repeats  # type: ignore[arg-type]
            )  # fmt: skip
            times = fetch(backend, cleaned.rows.order_by("timestamp")).column("timestamp").to_pylist()
            assert times == kept
