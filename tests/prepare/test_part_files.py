"""Tables in several parts: each part is written alone, and their files become one dataset.

DuckDB stands in for Spark here: it has no part but the whole table, so a test cuts it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Barrier, Event, get_ident

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ibis.expr.types import Table

from recspec.base.errors import DataError
from recspec.data.prepare.backend import Backend, Part, PartFiles, Share, T, gather, part_writers
from recspec.data.prepare.duckdb_backend import DuckDBBackend
from recspec.data.storage import SplitWriter
from recspec.feature_spec import Feature
from tests.dataset_cases import CASES, Case, run, write_latest
from tests.prepare.same_rows import same_dataset
from tests.prepare.small_tables import connect

EACH_PART = DuckDBBackend.each_part
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
    assert files == {
        "train": ["train/part-00000.parquet", "train/part-00001.parquet"],
        "valid": ["valid/part-00000.parquet"],
    }
    assert [pq.read_table(out / name).column("label").to_pylist() for name in files["train"]] == [[1, 2], [3]]
    assert pq.read_table(out / "users.parquet").column("history").to_pylist() == [[1, 2], [3, 4], [5, 6]]
    assert sorted(path.name for path in out.iterdir()) == ["train", "users.parquet", "valid"]


def test_files_of_one_column_are_joined_in_the_order_of_parts(backend: Backend, tmp_path: Path) -> None:
    features = {"label": Feature(dtype="int32"), "id": Feature(dtype="int16", cardinality=9)}
    parts = []
    for number, labels in enumerate([[1, 0], [], [1]]):
        with SplitWriter(tmp_path / f"{number}", "train", features, "split_binary", label="label") as writer:
            writer.write({"label": np.array(labels, np.int32), "id": np.array(labels, np.int16)})
        parts.append(PartFiles.of(tmp_path / f"{number}", {"train": writer}))
    out = tmp_path / "out"
    out.mkdir()
    chunks = gather(backend, out, parts)
    assert chunks["train"] == writer.chunks
    assert np.fromfile(out / "train" / "label.bin", np.int32).tolist() == [1, 0, 1]
    assert np.fromfile(out / "train" / "id.bin", np.int16).tolist() == [1, 0, 1]


@pytest.fixture
def threaded(tmp_path: Path) -> Iterator[Backend]:
    with connect(folder=tmp_path / "engine", threads=4) as opened:
        yield opened


def test_shares_are_dealt_with_in_threads_and_their_results_keep_the_order(threaded: Backend) -> None:
    told: list[int] = []
    together = Barrier(4, timeout=60)  # passed by four calls at once alone

    def double(share: Share[int]) -> int:
        assert not any(share.folder.iterdir())
        together.wait()
        share.done(share.item)
        return 2 * share.item

    assert threaded.each_share(range(1, 9), double, told.append, at_once=9) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert sorted(told) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert threaded.each_share([], double, told.append, at_once=9) == []


@pytest.mark.parametrize("at_once", [0, 1])
def test_shares_that_need_the_memory_alone_follow_each_other(threaded: Backend, at_once: int) -> None:
    def thread(share: Share[int]) -> int:
        del share
        return get_ident()

    assert {*threaded.each_share(range(9), thread, lambda _: None, at_once=at_once)} == {get_ident()}


def test_the_first_share_that_fails_is_told_and_ends_the_others(threaded: Backend) -> None:
    begun, failed = list[int](), Event()

    def fail(share: Share[int]) -> None:
        begun.append(share.item)
        if share.item == 1:
            failed.set()
            raise DataError("share 1")
        assert failed.wait(60)
        while True:  # until a share is told to stop
            share.done(1)

    with pytest.raises(DataError, match="share 1"):
        threaded.each_share(range(1000), fail, lambda _: None, at_once=4)
    assert len(begun) < 1000


def test_a_progress_that_raises_ends_all_shares(threaded: Backend) -> None:
    def go_on(share: Share[int]) -> None:
        while True:
            share.done(1)

    def stop(rows: int) -> None:
        raise DataError(f"stopped after {rows}")

    with pytest.raises(DataError, match="stopped after 1"):
        threaded.each_share(range(1000), go_on, stop, at_once=4)


def test_no_users_give_no_file(backend: Backend, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    gather(backend, out, [written(tmp_path / "a", [], train=[1])])
    assert [path.name for path in out.iterdir()] == ["train"]


def as_sent(value: T) -> T:
    copied: T = pickle.loads(pickle.dumps(value))  # noqa: S301 (Spark sends it so)
    return copied


def batches_of(rows: pa.Table, most: int) -> Iterator[pa.RecordBatch]:
    yield from rows.to_batches(most)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cuts DuckDB's tables into parts that only get what can be sent; holds the number of parts of each table."""
    keys: dict[str, str] = {}
    found: list[int] = []
    stage_by = DuckDBBackend.stage_by

    def staged(self: DuckDBBackend, table: Table, key: str, order: Sequence[str]) -> Table:
        result = stage_by(self, table, key, order)
        keys[result.get_name()] = key
        return result

    def each_part(
        self: DuckDBBackend, table: Table, make: Callable[[Part], T], done: Callable[[int], None]
    ) -> Iterator[T]:
        rows = pa.Table.from_batches(self.batches(table))
        values = rows.column(keys[table.get_name()]).to_pylist()
        firsts = [place for place, (one, two) in enumerate(pairwise(values), 1) if one != two]
        ends = [0, *firsts[:: max(1, len(firsts) // 3)], len(values)]
        found.append(len(ends) - 1)
        for number, (start, stop) in enumerate(pairwise(ends)):
            folder = self._folder / f"part-{len(found)}-{number}"
            folder.mkdir()
            batches = partial(batches_of, rows.slice(start, stop - start))
            part = Part(batches, rows.num_columns, start, folder, self.memory_limit, done)
            yield as_sent(as_sent(make)(part))

    monkeypatch.setattr(DuckDBBackend, "stage_by", staged)
    monkeypatch.setattr(DuckDBBackend, "each_part", each_part)
    return found


BY_TIME = {"split": "time", "valid_share": 0.2, "test_share": 0.2, "unknown_targets": "keep"}
IN_PARTS = {
    **{
        name: case for name, case in CASES.items() if case.dataset not in ("criteo", "movielens")
    },  # criteo has no parts
    "movielens-histories": CASES["movielens-histories"],
    "movielens-time": Case("movielens", write_latest, {"num_negatives": 2, "history": 3, "min_history": 1, **BY_TIME}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_give_the_rows_of_the_whole(name: str, tmp_path: Path, cut: list[int]) -> None:
    case = IN_PARTS[name]
    raw = case.write(tmp_path / "raw")
    with pytest.MonkeyPatch.context() as whole:
        whole.setattr(DuckDBBackend, "each_part", EACH_PART)
        run(case, raw, tmp_path / "whole")
    run(case, raw, tmp_path / "parts")
    assert max(cut) > 1
    same_dataset(tmp_path / "whole", tmp_path / "parts")
