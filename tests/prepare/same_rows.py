"""Whether two prepared folders hold the same dataset, whatever their number of files."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import yaml

from tests.dataset_cases import bytes_of

RAW = "raw"  # its tables are folders of Spark's files
SPLIT_FOLDERS = ("train", "valid", "test", "fold_in")


def same_dataset(one: Path, two: Path) -> None:
    """The number and layout of files may differ, and the numbers of series."""
    specs = [yaml.safe_load((folder / "feature_spec.yaml").read_text()) for folder in (one, two)]
    for spec in specs:
        for chunks in spec["source_spec"].values():
            for chunk in chunks:
                del chunk["files"]
    assert specs[1] == specs[0]
    by_rows = {"clicks_test.parquet", "users.parquet"}  # Spark writes the first, and may join the second
    parts = (*SPLIT_FOLDERS, RAW)
    others = [
        {
            name: held
            for name, held in bytes_of(folder).items()
            if name not in (*by_rows, "feature_spec.yaml") and not name.startswith(parts)
        }
        for folder in (one, two)
    ]
    assert sorted(others[1]) == sorted(others[0])
    assert [name for name in others[0] if others[0][name] != others[1][name]] == []
    for name in by_rows:
        assert (one / name).exists() == (two / name).exists()
        if (one / name).exists():
            assert pq.read_table(one / name).equals(pq.read_table(two / name))
    for name in (path.name for path in one.glob(f"{RAW}/*")):
        held = [pq.read_table(folder / RAW / name, partitioning=None).to_pylist() for folder in (one, two)]
        assert sorted(held[0], key=str) == sorted(held[1], key=str)
    assert [path.name for path in sorted(one.iterdir())] == [path.name for path in sorted(two.iterdir())]
    for split in SPLIT_FOLDERS:
        if (one / split).exists():
            assert different_rows(one / split, two / split) == 0, split


def different_rows(one: Path, two: Path) -> int:
    """The number of rows that only one of two folders holds, each as often as it is there too many."""
    names = pq.read_schema(next(one.glob("*.parquet"))).names
    rank = " REPLACE (dense_rank() OVER (ORDER BY series) AS series)" if "series" in names else ""
    rows = [f"SELECT *{rank} FROM read_parquet('{folder}/*.parquet')" for folder in (one, two)]
    only = [f"SELECT * FROM ({a} EXCEPT ALL {b})" for a, b in (rows, rows[::-1])]
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT count(*) FROM ({only[0]} UNION ALL {only[1]})").fetchone()
    assert found is not None
    return int(found[0])
