"""Files of parts: they become the files of one chunk a split, in the order of the parts, and one file of users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recspec.prepare.backend import Backend
from recspec.prepare.part_files import PartFiles, gather, part_writers
from recspec.spec import Feature

FEATURES = {"label": Feature(dtype="int32")}


def written(folder: Path, users: list[list[int]], **splits: list[int]) -> PartFiles:
    folder.mkdir()
    with part_writers(folder, dict.fromkeys(("train", "valid"), FEATURES)) as (writers, catalogue):
        for split, labels in splits.items():
            writers[split].write({"label": np.array(labels, np.int32)})
        if users:
            catalogue.write(pa.table({"history": users}))
    return PartFiles.of(folder, writers)


def test_parts_become_one_dataset(backend: Backend, tmp_path: Path) -> None:
    parts = [
        written(tmp_path / "b", [[1, 2], [3, 4]], train=[1, 2]),
        written(tmp_path / "c", []),
        written(tmp_path / "a", [[5, 6]], train=[3], valid=[4]),
    ]
    out = tmp_path / "out"
    out.mkdir()
    chunks = gather(backend, out, parts)
    files = {split: [file for chunk in of for file in chunk.files] for split, of in chunks.items()}
    assert files == {"train": ["train/part-00000.parquet", "train/part-00001.parquet"],
                     "valid": ["valid/part-00000.parquet"]}  # fmt: skip
    assert [pq.read_table(out / name).column("label").to_pylist() for name in files["train"]] == [[1, 2], [3]]
    assert pq.read_table(out / "users.parquet").column("history").to_pylist() == [[1, 2], [3, 4], [5, 6]]
    assert sorted(path.name for path in out.iterdir()) == ["train", "users.parquet", "valid"]


def test_no_users_give_no_file(backend: Backend, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    gather(backend, out, [written(tmp_path / "a", [], train=[1])])
    assert [path.name for path in out.iterdir()] == ["train"]
