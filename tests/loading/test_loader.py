"""No row lost or seen twice, whatever the batch size, the ranks and the memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recspec.base.errors import DataError
from recspec.data.storage import Columns, Ragged, SplitReader, SplitWriter
from recspec.data.storage import check as dataset_check
from recspec.feature_spec import CHUNK_TYPES, ChunkType, FeatureSpec
from recspec.loading.blocks import RankBatch
from recspec.loading.loader import Loader
from recspec.loading.rows import Filling, Layout
from recspec.models.layers.batch import Batch, concatenate

TINY = 2000  # bytes: a few dozen rows at a time
FEATURES: dict[str, dict[str, object]] = {
    "row": {"dtype": "int32", "cardinality": 1000},
    "tags": {"dtype": "int16", "cardinality": 1000, "length": 4, "padding": 0},
    "price": {"dtype": "float16"},
    "label": {"dtype": "bool"},
}


def columns_of(rows: np.ndarray) -> Columns:
    """Row i has the id i, i % 5 tags (i, i, ...) and the price i / 4; every third row is positive."""
    return {
        "row": rows.astype(np.int32),
        "tags": Ragged.of([[i] * (i % 5) for i in rows.tolist()], np.int16),
        "price": (rows / 4).astype(np.float16),
        "label": rows % 3 == 0,
    }


def dataset(folder: Path, counts: dict[str, int], kind: ChunkType = "parquet", rows_per_file: int = 37) -> FeatureSpec:
    """Splits whose rows are numbered on."""
    spec = FeatureSpec.from_dict(
        {"feature_spec": FEATURES, "channel_spec": {"item": ["row"], "context": ["tags", "price"], "label": ["label"]}},
        folder,
    )
    sources, first = {}, 0
    for split, count in counts.items():
        with SplitWriter(folder, split, spec.features, kind, rows_per_file=rows_per_file, label="label") as writer:
            if count:
                writer.write(columns_of(np.arange(first, first + count)))
        sources[split] = writer.chunks
        first += count
    return spec.replace(sources=sources)


def rows_of(shares: Sequence[RankBatch]) -> list[int]:
    """The rows that shares hold, fillers left out."""
    return [row for share in shares for row in share.batch["row"][: share.num_rows].tolist()]


def global_batches(ranks: Sequence[Sequence[RankBatch]]) -> list[list[int]]:
    """The rows of each batch over all ranks, in the order of the ranks."""
    return [rows_of(shares) for shares in zip(*ranks, strict=True)]


# --- the promise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 64, 101, 5000])
@pytest.mark.parametrize("budget", [1 << 30, TINY])
def test_no_row_is_lost_or_seen_twice(budget: int, batch_size: int, world_size: int, tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 101})
    ranks = [
        Loader(spec, "train", batch_size=batch_size, rank=rank, world_size=world_size, memory_budget=budget)
        for rank in range(world_size)
    ]
    assert {rank.mode for rank in ranks} == {"memory" if budget > TINY else "stream"}
    seen = []
    for epoch in (0, 1):
        shares = [list(rank.batches(epoch)) for rank in ranks]
        batches = global_batches(shares)
        assert sorted(row for batch in batches for row in batch) == list(range(101))
        assert [len(batch) for batch in batches] == [share.total_rows for share in shares[0]]
        assert len(batches) == ranks[0].num_batches == -(-101 // batch_size)
        assert all(len(batch) == batch_size for batch in batches[:-1])
        for each in zip(*shares, strict=True):
            assert [share.first_row for share in each] == np.cumsum([0, *(s.num_rows for s in each[:-1])]).tolist()
            assert all(share.batch["row"].shape == (max(share.num_rows, 1),) for share in each)
        seen.append(batches)
    assert seen[0] != seen[1], "every epoch has its own order"


@pytest.mark.parametrize("budget", [1 << 30, TINY])
@pytest.mark.parametrize("batch_size", [1, 64, 5000])
def test_ranks_do_not_change_the_batches(batch_size: int, budget: int, tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 101})

    def batches(world_size: int) -> list[list[int]]:
        given = {"batch_size": batch_size, "world_size": world_size, "memory_budget": budget}
        ranks = [Loader(spec, "train", rank=rank, **given) for rank in range(world_size)]
        return global_batches([[*rank.batches(3, lanes=2)] for rank in ranks])

    assert batches(1) == batches(2) == batches(5)


@pytest.mark.parametrize("budget", [1 << 30, TINY])
@pytest.mark.parametrize("start", [0, 1, 14, 99])
def test_a_run_continues_where_it_stood(start: int, budget: int, tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 101})
    whole = [share.batch["row"].tolist() for share in Loader(spec, "train", batch_size=7).batches(2)]
    again = Loader(spec, "train", batch_size=7, memory_budget=budget)
    if budget == TINY:
        whole = [share.batch["row"].tolist() for share in again.batches(2)]
    assert [share.batch["row"].tolist() for share in again.batches(2, start)] == whole[start:]


def test_the_order_is_a_function_of_seed_and_epoch(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 101})
    for budget in (1 << 30, TINY):
        orders = {
            (seed, epoch): tuple(
                rows_of(list(Loader(spec, "train", batch_size=9, seed=seed, memory_budget=budget).batches(epoch)))
            )
            for seed in (0, 1)
            for epoch in (0, 1)
        }
        assert len(set(orders.values())) == 4
        reader = Loader(spec, "train", batch_size=50, seed=1, memory_budget=budget)
        assert tuple(rows_of(list(reader.batches(1)))) == orders[1, 1], "whatever the batch size"
        assert tuple(rows_of(list(reader.batches(0)))) == orders[1, 0], "and the epochs before"
        unshuffled = Loader(spec, "train", batch_size=10, shuffle=False, memory_budget=budget)
        assert rows_of(list(unshuffled.batches(5))) == list(range(101)), "or that of the files"


@pytest.mark.parametrize("kind", ["parquet", "csv", "split_binary", "torch_tensor", "tfrecord"])
@pytest.mark.parametrize("budget", [1 << 30, TINY])
def test_every_row_keeps_its_values(budget: int, kind: ChunkType, tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 101}, kind)
    batch = concatenate(share.batch for share in Loader(spec, "train", batch_size=8, memory_budget=budget).batches())
    rows = batch["row"]
    assert rows.dtype == torch.int32
    assert {name: tensor.dtype for name, tensor in batch.items() if name != "row"} == {
        "tags": torch.int32,
        "price": torch.float32,
        "label": torch.float32,
    }
    assert torch.equal(batch["price"], rows / 4)
    assert torch.equal(batch["label"], (rows % 3 == 0).float())
    assert torch.equal(batch["tags"], rows[:, None] * (torch.arange(4) < (rows % 5)[:, None]))
    assert batch["tags"].is_contiguous()


@pytest.mark.parametrize("budget", [1 << 30, TINY])
def test_several_splits_are_one(budget: int, tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 60, "valid": 41, "test": 10})
    reader = Loader(spec, ["train", "valid"], batch_size=8, memory_budget=budget)
    assert reader.num_rows == 101
    found = [rows_of([share]) for share in reader.batches()]
    assert sorted(row for batch in found for row in batch) == list(range(101))
    assert any({row < 60 for row in batch} == {True, False} for batch in found), "rows of both are mixed"


@pytest.mark.parametrize("budget", [1 << 30, TINY, 200])
@pytest.mark.parametrize("features", [None, ["row"]])
def test_only_positives(features: list[str] | None, budget: int, tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 60, "valid": 41})
    given = {"batch_size": 8, "features": features, "memory_budget": budget}
    reader = Loader(spec, ["train", "valid"], **given, positives_only=True)
    assert (reader.num_rows, reader.num_batches) == (34, 5)
    shares = list(reader.batches())
    assert sorted(rows_of(shares)) == list(range(0, 101, 3))
    assert set(shares[0].batch) == set(features or FEATURES)
    if features is None:
        batch = concatenate(share.batch for share in shares)
        assert torch.equal(batch["tags"], batch["row"][:, None] * (torch.arange(4) < (batch["row"] % 5)[:, None]))


def test_a_dataset_smaller_than_a_batch_and_than_the_ranks(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 2})
    shares = [
        share for rank in range(4) for share in Loader(spec, "train", batch_size=100, rank=rank, world_size=4).batches()
    ]
    found = [(share.num_rows, share.total_rows, share.first_row) for share in shares]
    assert found == [(1, 2, 0), (1, 2, 1), (0, 2, 2), (0, 2, 2)]
    assert sorted(rows_of(shares)) == [0, 1]
    assert all(share.batch["row"].tolist()[0] in (0, 1) for share in shares)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_lists_that_are_mostly_padding_are_held_ragged(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 101})
    tags = {**FEATURES["tags"], "length": 500}
    spec = FeatureSpec.from_dict({**spec.to_dict(), "feature_spec": {**FEATURES, "tags": tags}}, tmp_path)
    reader = Loader(spec, "train", batch_size=10, memory_budget=101 * 200)
    assert reader.mode == "memory", "which 101 rows of 500 values are not"
    batches = [share.batch for share in reader.batches()]
    held = reader._resident
    assert held is not None
    assert held.nbytes < 101 * (3 + 2 + 4) * 4
    assert max(batch["tags"].shape[1] for batch in batches) == 4, "as wide as the longest list, not 500"
    fixed = reader.resized(10, fixed_length=True)
    streamed = Loader(spec, "train", batch_size=10, memory_budget=TINY)
    assert (fixed.mode, streamed.mode) == ("memory", "stream")
    assert all(share.batch["tags"].shape[1] == 500 for share in fixed.batches())
    assert all(share.batch["tags"].shape[1] <= 4 for share in streamed.batches())
    assert _rows(fixed.batches(), 500) == _rows(iter(reader.batches()), 500), "and the same order"
    assert sorted(_rows(streamed.batches(), 500)) == sorted(_rows(fixed.batches(), 500))
    for budget in (101 * 200, TINY):
        reader = Loader(spec, "train", batch_size=1, shuffle=False, memory_budget=budget)
        widths = [share.batch["tags"].shape[1] for share in reader.batches()]
        assert widths == [max(1, row % 5) for row in range(101)], "torch refuses a bag without a place"


def _rows(shares: Iterator[RankBatch], width: int) -> list[tuple[int, list[int]]]:
    return [
        (int(row), tags.tolist() + [0] * (width - len(tags)))
        for share in shares
        for row, tags in zip(share.batch["row"], share.batch["tags"], strict=True)
    ]


# --- histories -------------------------------------------------------------------------------------------------------

LENGTH = 40
HISTORY = ("history_item", "history_gap", "negative_item", "history_shop")
LENGTHS = (0, 3, 1, 0, 7, 2)  # over and over


def events_of(row: int) -> int:
    """Row 50 alone has a history as long as may be."""
    return LENGTH if row == 50 else LENGTHS[row % len(LENGTHS)]


def histories(folder: Path, rows: int, kind: ChunkType = "parquet") -> FeatureSpec:
    """Event j of row i is the item 1000 i + j + 1 at the gap j / 4, its negative that item and 500,000 more."""
    item: dict[str, object] = {"dtype": "int32", "cardinality": 1_000_000}
    items = {**item, "vocabulary": "item", "length": LENGTH, "padding": 0}
    features: dict[str, dict[str, object]] = {
        "row": {"dtype": "int32", "cardinality": 1000},
        "item": item,
        "history_item": items,
        "history_gap": {"dtype": "float32", "length": LENGTH},
        "negative_item": items,
        "history_shop": {"dtype": "int64", "cardinality": 2**40, "length": LENGTH, "padding": 0},
        "label": {"dtype": "bool"},
    }
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": features,
            "channel_spec": {
                "user": ["row"],
                "item": ["item"],
                "history": ["history_item", "history_gap", "history_shop"],
                "negative_history": ["negative_item"],
                "label": ["label"],
            },
        },
        folder,
    )
    events = [[1000 * row + place + 1 for place in range(events_of(row))] for row in range(rows)]
    # Files whose rows are all of one length hold numbers to that length, for numbers know no padding.
    behind = LENGTH if kind in ("split_binary", "torch_tensor") else 0
    gaps = [[place / 4 for place in range(len(own))] + [0.0] * (behind - len(own)) for own in events]
    with SplitWriter(folder, "train", spec.features, kind, rows_per_file=37, label="label") as writer:
        writer.write(
            {
                "row": np.arange(rows, dtype=np.int32),
                "item": np.arange(rows, dtype=np.int32),
                "history_item": Ragged.of(events, np.int32),
                "history_gap": Ragged.of(gaps, np.float32),
                "negative_item": Ragged.of([[event + 500_000 for event in own] for own in events], np.int32),
                "history_shop": Ragged.of([[event + 2**39 for event in own] for own in events], np.int64),
                "label": np.ones(rows, np.bool_),
            }
        )
    return spec.replace(sources={"train": writer.chunks})


@pytest.mark.parametrize("kind", CHUNK_TYPES)
@pytest.mark.parametrize("budget", [1 << 30, 4_000])
def test_a_batchs_histories_are_as_wide_as_its_longest(budget: int, kind: ChunkType, tmp_path: Path) -> None:
    spec = histories(tmp_path, 101, kind)
    reader = Loader(spec, "train", batch_size=8, memory_budget=budget)
    assert reader.mode == ("memory" if budget == 1 << 30 else "stream")
    seen, widths = [], set()
    for share in reader.batches(1):
        batch = share.batch
        rows = batch["row"].tolist()
        seen += rows
        longest = max(map(events_of, rows))
        widths.add(longest)
        lengths = torch.tensor([events_of(row) for row in rows])
        places = torch.arange(longest)
        inside = places < lengths[:, None]
        events = (1000 * batch["row"][:, None] + places + 1) * inside
        assert torch.equal(batch["history_item"], events.int())
        assert torch.equal(batch["negative_item"], ((events + 500_000) * inside).int())
        assert torch.equal(batch["history_gap"], places / 4 * inside)
        assert torch.equal(batch["history_shop"], (events.long() + 2**39) * inside)
        assert all(batch[name].is_contiguous() for name in HISTORY)
    assert sorted(seen) == list(range(101))
    assert widths >= {7, LENGTH}


@pytest.mark.parametrize("budget", [1 << 30, 4_000])
def test_histories_do_not_depend_on_ranks_nor_on_where_a_run_goes_on(budget: int, tmp_path: Path) -> None:
    spec = histories(tmp_path, 101)

    def rows(rank: int, world_size: int, start: int = 0) -> list[list[list[float]]]:
        reader = Loader(spec, "train", batch_size=9, rank=rank, world_size=world_size, memory_budget=budget)
        found = []
        for share in reader.batches(2, start, lanes=3):
            lists = [F.pad(share.batch[name], (0, LENGTH - share.batch[name].shape[1])) for name in HISTORY]
            found.append(torch.cat(lists, dim=1)[: share.num_rows].tolist())
        return found

    whole = rows(0, 1)
    assert [first + second for first, second in zip(rows(0, 2), rows(1, 2), strict=True)] == whole
    assert rows(0, 1, start=5) == whole[5:]


@pytest.mark.parametrize("budget", [1 << 30, 2_000])
def test_a_batch_without_a_single_event_has_no_width(budget: int, tmp_path: Path) -> None:
    spec = histories(tmp_path, 50)
    reader = Loader(spec, "train", batch_size=1, shuffle=False, memory_budget=budget)
    assert reader.mode == ("memory" if budget == 1 << 30 else "stream")
    shapes = [[tuple(share.batch[name].shape) for name in HISTORY] for share in reader.batches()]
    assert shapes == [[(1, events_of(row))] * 4 for row in range(50)]


def test_histories_of_one_length_are_held_side_by_side(tmp_path: Path) -> None:
    reader = Loader(histories(tmp_path, 101), "train", batch_size=8)
    next(iter(reader.batches()))
    assert reader._resident is not None
    ((held,),) = reader._resident.ragged
    assert set(held.values) == {("history_item", "history_gap", "negative_item"), ("history_shop",)}
    events = sum(map(events_of, range(101)))
    assert held.nbytes == 8 * 102 + events * (3 * 4 + 8)


def test_rows_on_a_device_are_taken_by_lengths_that_the_host_knows(tmp_path: Path) -> None:
    reader = Loader(histories(tmp_path, 101), "train", batch_size=8)
    next(iter(reader.batches()))
    held = reader._resident
    assert held is not None
    moved = held.to(torch.device("cpu"))  # as to a GPU, which would be waited for
    assert all(lists.lengths is not None for together in moved.ragged for lists in together)
    rows = torch.tensor([50, 0, 100, 4, 4])
    for chosen, on_host in ((rows, rows), (slice(3, 9), None), (rows[1:2], rows[1:2])):
        expected = held.take(chosen, torch.device("cpu"))
        found = moved.take(chosen, torch.device("cpu"), on_host=on_host)
        assert all(torch.equal(found[name], rows_of_it) for name, rows_of_it in expected.items())


def test_a_stream_holds_no_more_rows_than_its_budget_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataset(tmp_path, {"train": 1000}, "split_binary")
    reader = Loader(spec, "train", batch_size=10, memory_budget=7 * 4 * 400)
    held = []

    def allocate(layout: Layout, num_rows: int) -> Filling:
        held.append(num_rows)
        return Filling(layout, num_rows)

    monkeypatch.setattr("recspec.loading.loader.Filling", allocate)
    rows = rows_of(list(reader.batches()))
    assert sorted(rows) == list(range(1000))
    assert sum(held) == 1000
    assert max(held) <= 100, "a quarter of the budget at a time"
    assert np.ptp(rows[:100]) > 500, "rows from all over the file stand together"


def test_batches_before_the_start_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataset(tmp_path, {"train": 1000}, "split_binary")
    reader = Loader(spec, "train", batch_size=10, memory_budget=7 * 4 * 400)
    read = []
    original = SplitReader.read

    def counted(self: SplitReader, start: int, stop: int) -> Columns:
        read.append(stop - start)
        return original(self, start, stop)

    monkeypatch.setattr(SplitReader, "read", counted)
    assert len(list(reader.batches(0, 95))) == 5
    assert sum(read) <= 200


def test_ids_that_need_64_bits_keep_them(tmp_path: Path) -> None:
    features = {
        "user": {"dtype": "int64", "cardinality": 2**40},
        "history": {"dtype": "int64", "cardinality": 2**40, "length": 2, "padding": 0},
        "label": {},
    }
    spec = FeatureSpec.from_dict(
        {"feature_spec": features, "channel_spec": {"user": ["user"], "history": ["history"], "label": ["label"]}},
        tmp_path,
    )
    with SplitWriter(tmp_path, "train", spec.features) as writer:
        history = Ragged.of([[2**39 + 1], []])
        writer.write({"user": np.array([2**39, 1]), "history": history, "label": np.array([0, 1])})
    spec = spec.replace(sources={"train": writer.chunks})
    for budget in (1 << 20, 60, 1):
        reader = Loader(spec, "train", batch_size=2, shuffle=False, memory_budget=budget)
        batch = concatenate(share.batch for share in reader.batches())
        assert (batch["user"].dtype, batch["user"].tolist()) == (torch.int64, [2**39, 1])
        assert (batch["history"].dtype, batch["history"].tolist()) == (torch.int64, [[2**39 + 1, 0], [0, 0]])


# --- the thread that reads ahead -------------------------------------------------------------------------------------


def prefetch_threads() -> int:
    return sum(thread.name.startswith("recspec-prefetch") for thread in threading.enumerate())


def test_a_consumer_that_stops_early_leaves_no_thread(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 1000})
    batches = Loader(spec, "train", batch_size=1, memory_budget=TINY).batches()
    next(batches)
    assert prefetch_threads() == 2
    batches.close()  # type: ignore[attr-defined]
    assert prefetch_threads() == 0


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_two_epochs_may_be_read_side_by_side(kind: ChunkType, tmp_path: Path) -> None:
    reader = Loader(dataset(tmp_path, {"train": 300}, kind), "train", batch_size=10, memory_budget=TINY)
    pairs = list(zip(reader.batches(0), reader.batches(1), strict=True))
    for shares in zip(*pairs, strict=True):
        assert sorted(rows_of(shares)) == list(range(300))


@pytest.mark.parametrize("budget", [1 << 30, TINY])
@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_values_no_model_may_see_are_named_with_file_column_and_row(
    kind: ChunkType, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 40, 42, 44, 46 and 48 of one block are wrong in one way each, the ids of row 43 in a list."""
    columns = columns_of(np.arange(101))
    rows, prices, tags = columns["row"], columns["price"], columns["tags"]
    assert not isinstance(rows, Ragged)
    assert not isinstance(prices, Ragged)
    assert isinstance(tags, Ragged)
    rows[[40, 42]] = 1000, -7
    prices[[44, 46, 48]] = np.nan, np.inf, -np.inf
    tags.values[tags.offsets[43] + 1] = 1001
    spec = dataset(tmp_path, {}, kind)
    with monkeypatch.context() as unchecked:
        unchecked.setattr("recspec.data.storage.chunk_file._checked_values", lambda raw, *_: raw)
        writer = SplitWriter(tmp_path, "train", spec.features, kind, rows_per_file=37, label="label")
        with writer:
            writer.write(columns)
    spec = spec.replace(sources={"train": writer.chunks})
    loader = Loader(spec, "train", batch_size=10, memory_budget=budget, shuffle=False)
    assert loader.mode == ("memory" if budget > TINY else "stream")
    with pytest.raises(DataError) as caught:
        list(loader.batches())

    second = {name: chunk.files[1] for chunk in writer.chunks for name in chunk.features}  # rows 37 to 73
    range_of_ids = "the cardinality is 1000, so ids are 0 to 999"
    expected = {
        f"{second['row']}, column 'row', row 4: 1000 is too large for an id: {range_of_ids}",
        f"{second['row']}, column 'row', row 6: -7 is negative; an id lies in [0, cardinality): 0 to 999",
        f"{second['tags']}, column 'tags', row 7: 1001 is too large for an id: {range_of_ids}",
        f"{second['price']}, column 'price', row 8: nan is not a finite number (and 2 more rows like it)",
    }
    if budget > TINY:  # in a stream the first block that holds one raises, and tells of its own rows only
        assert set(caught.value.problems) == expected
        with pytest.raises(DataError) as checked:
            dataset_check.check(spec)
        assert checked.value.problems == caught.value.problems
    else:
        assert {problem.split(" (")[0] for problem in caught.value.problems} <= {
            problem.split(" (")[0] for problem in expected
        }
        assert any("row 4: 1000 is too large" in problem for problem in caught.value.problems)


def test_a_problem_found_while_reading_ahead_is_raised_where_batches_are_used(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 1000}, "csv", rows_per_file=100)
    file = tmp_path / "train" / "part-00005.csv"
    file.write_text(file.read_text().replace("\n57", "\nx7", 1))
    with pytest.raises(DataError, match=r"part-00005\.csv, column 'row', row 71: 'x70' is not an integer"):
        list(Loader(spec, "train", batch_size=10, memory_budget=TINY).batches())
    assert prefetch_threads() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("budget", [1 << 30, TINY])
@pytest.mark.parametrize("long", [False, True])
def test_batches_arrive_on_the_gpu(budget: int, long: bool, tmp_path: Path) -> None:
    spec = histories(tmp_path, 101) if long else dataset(tmp_path, {"train": 101})

    def batches(device: str) -> list[Batch]:
        reader = Loader(spec, "train", batch_size=8, memory_budget=budget, device=torch.device(device))
        return [share.batch for share in reader.batches()]

    for here, there in zip(batches("cpu"), batches("cuda"), strict=True):
        for name, tensor in here.items():
            assert there[name].is_cuda
            assert torch.equal(there[name].cpu(), tensor)


def test_orders_that_are_made_ahead_are_the_same(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 50})
    plain, ahead = (Loader(spec, "train", batch_size=20, seed=3) for _ in range(2))
    ahead._makes_orders_ahead = True
    for epoch in (0, 1, 2, 5, 0):
        for one, other in zip(plain.batches(epoch), ahead.batches(epoch), strict=True):
            assert all(torch.equal(one.batch[name], other.batch[name]) for name in one.batch)


def test_a_loader_says_where_its_rows_are_and_takes_another_batch_size(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": 50})
    loader = Loader(spec, "train", batch_size=20)
    assert loader.held == "held in memory"
    other = loader.resized(50)
    assert (loader.num_batches, other.num_batches) == (3, 1)
    next(iter(other.batches()))
    assert other.held.startswith("held on cpu, ")
    assert Loader(spec, "train", batch_size=20, memory_budget=1).held == "streamed from files"
