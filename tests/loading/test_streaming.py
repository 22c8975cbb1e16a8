"""Streamed rows are dealt to lanes: each row once an epoch, equally many batches, and each rank reads its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recspec.data.storage import SplitWriter
from recspec.feature_spec import CHUNK_TYPES, ChunkType, FeatureSpec
from recspec.loading.blocks import Block, HeldOutShare, RankBatch
from recspec.loading.loader import LaneSchedule, Loader

ROWS, GROUP = 1000, 20


def dataset(folder: Path, kind: ChunkType = "parquet") -> FeatureSpec:
    """1,000 numbered rows in 50 files, of one row group in Parquet; every third is positive."""
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"row": {"dtype": "int32", "cardinality": 10_000}, "label": {"dtype": "int8"}},
            "channel_spec": {"item": ["row"], "label": ["label"]},
        },
        folder,
    )
    with SplitWriter(folder, "train", spec.features, kind, rows_per_file=GROUP) as writer:
        rows = np.arange(ROWS, dtype=np.int32)
        writer.write({"row": rows, "label": (rows % 3 == 0).astype(np.int8)})
    return spec.replace(sources={"train": writer.chunks})


def loader(spec: FeatureSpec, rank: int = 0, world_size: int = 1, **settings: object) -> Loader:
    given = {"batch_size": 30, "memory_budget": 1600, "seed": 4, **settings}  # 8 bytes a row: groups of 50 rows
    return Loader(spec, "train", rank=rank, world_size=world_size, **given)  # type: ignore[arg-type]


def rows_of(shares: Sequence[RankBatch]) -> list[int]:
    return [row for share in shares for row in share.batch["row"][: share.num_rows].tolist()]


@given(st.integers(1, 500), st.integers(1, 120), st.integers(1, 9))
def test_a_deal_gives_every_lane_its_part_of_every_batch(num_rows: int, batch_size: int, lanes: int) -> None:
    deal, batches = LaneSchedule(num_rows, batch_size, lanes), -(-num_rows // batch_size)
    dealt = []
    for lane in range(lanes):
        parts = [deal.part(lane, batch) for batch in range(batches)]
        sizes = [part.stop - part.start for part in parts]
        assert [deal.before(lane, batch) for batch in range(batches + 1)] == np.cumsum([0, *sizes]).tolist()
        dealt += range(num_rows)[deal.rows(lane)]
    assert dealt == list(range(num_rows))
    for batch in range(batches):
        together = [row for lane in range(lanes) for row in range(batch_size)[deal.part(lane, batch)]]
        assert together == list(range(min(batch_size, num_rows - batch * batch_size)))


def test_a_part_of_a_block_is_read_alone_only_if_all_rows_are_wanted() -> None:
    assert Block(1, 10, 20, 10).part(2, 5) == Block(1, 12, 15, 3)
    assert Block(1, 10, 20, 4).part(2, 3) == Block(1, 10, 20, 1, skipped=2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["parquet", "split_binary", "torch_tensor"])
def test_each_rank_reads_its_share_of_the_bytes(kind: ChunkType, world_size: int, tmp_path: Path) -> None:
    spec = dataset(tmp_path, kind)
    alone = loader(spec)
    list(alone.batches())
    before = alone.bytes_read
    list(alone.batches(1))
    epoch = alone.bytes_read - before
    assert epoch > 4 * ROWS / 2
    assert before == epoch, "each epoch reads every byte once, and nothing of a file is kept"
    ranks = [loader(spec, rank, world_size) for rank in range(world_size)]
    assert {rank.bytes_read for rank in ranks} == {0}
    assert sorted(row for rank in ranks for row in rows_of(list(rank.batches(1)))) == list(range(ROWS))
    block = 2 * epoch * GROUP / ROWS  # row groups have headers, and not all take equally many bytes
    assert all(abs(rank.bytes_read - epoch / world_size) <= block for rank in ranks)
    if kind == "split_binary":
        assert sum(rank.bytes_read for rank in ranks) == epoch, "of a block on the border each reads its rows"


@pytest.mark.parametrize("resumed_on", [1, 3])
@pytest.mark.parametrize("start", [0, 16, 33])
def test_an_epoch_that_goes_on_on_other_ranks_has_the_same_batches(start: int, resumed_on: int, tmp_path: Path) -> None:
    spec = dataset(tmp_path)
    begun = [list(loader(spec, rank, 2).batches(3)) for rank in range(2)]
    expected = [rows_of(pair) for pair in zip(*begun, strict=True)]
    assert len(expected) == 34
    ranks = [list(loader(spec, rank, resumed_on).batches(3, start, lanes=2)) for rank in range(resumed_on)]
    assert [rows_of(each) for each in zip(*ranks, strict=True)] == expected[start:]


@pytest.mark.parametrize(
    ("kind", "batch_size"), [*((kind, 64) for kind in CHUNK_TYPES), *(("parquet", size) for size in (2, 7, 998, 5000))]
)
def test_all_ranks_take_equally_many_steps_and_each_row_comes_once(
    kind: ChunkType, batch_size: int, tmp_path: Path
) -> None:
    spec = dataset(tmp_path, kind)
    ranks = [list(loader(spec, rank, 3, batch_size=batch_size).batches()) for rank in range(3)]
    assert {len(shares) for shares in ranks} == {-(-ROWS // batch_size)}
    assert sorted(row for shares in ranks for row in rows_of(shares)) == list(range(ROWS))
    for shares in ranks:
        assert all(len(share.batch["row"]) == max(1, share.num_rows) for share in shares), "a filler row if none"


def test_rows_that_are_not_all_wanted_are_dealt_once(tmp_path: Path) -> None:
    spec = dataset(tmp_path)
    chosen = {"positives_only": True, "part": HeldOutShare(0.4, held_out=True, seed=2), "memory_budget": 300}
    alone = rows_of(list(loader(spec, **chosen).batches()))  # type: ignore[arg-type]
    assert 80 < len(alone) < 190
    assert all(row % 3 == 0 for row in alone)
    ranks = [loader(spec, rank, 3, **chosen) for rank in range(3)]  # type: ignore[arg-type]
    assert sorted(row for rank in ranks for row in rows_of(list(rank.batches()))) == sorted(alone)


def test_rows_are_mixed_within_and_across_files_anew_each_epoch(tmp_path: Path) -> None:
    spec = dataset(tmp_path)
    lanes = [[rows_of(list(loader(spec, rank, 2).batches(epoch))) for epoch in range(2)] for rank in range(2)]
    for first, second in lanes:
        assert first != second
        assert len({row // GROUP for row in first}) >= 25, "a lane has half of the files"
        shared = len(set(first) & set(second))
        assert 100 < shared < 400, "and others in each epoch"
        steps = np.abs(np.diff(first[:40]))
        assert (steps != 1).mean() > 0.8, "rows of a file do not follow each other"


def test_rows_that_are_not_shuffled_keep_the_order_of_files_in_each_lane(tmp_path: Path) -> None:
    spec = dataset(tmp_path)
    ranks = [rows_of(list(loader(spec, rank, 2, shuffle=False).batches())) for rank in range(2)]
    assert ranks[0] + ranks[1] == list(range(ROWS))
