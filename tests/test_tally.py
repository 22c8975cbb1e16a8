"""Metrics of rows in blocks: by hand, equal to those of all rows at once, and no more rows held than allowed."""

from __future__ import annotations

import math
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recspec import metrics, tally
from recspec.errors import DataError
from recspec.tally import Tally, Totals, in_order

Rows = tuple[NDArray[Any], NDArray[np.bool_]]


def tallied(scores: NDArray[Any], labels: NDArray[np.bool_], memory_rows: int, block: int = 7) -> Totals:
    with Tally(memory_rows) as found:
        for start in range(0, len(scores), block):
            found.add(scores[start : start + block], labels[start : start + block])
        return found.finish()


def made_up(kind: str, num_rows: int, dtype: str = "float32") -> Rows:
    """Scores of some distribution, and labels that follow them loosely."""
    random = np.random.default_rng(len(kind) + num_rows)
    scores = {
        "normal": random.normal(0, 3, num_rows),
        "few values": random.integers(-3, 4, num_rows) / 8,
        "constant": np.full(num_rows, -0.25),
        "near": 1 + random.integers(0, 5, num_rows) * 2.0**-22,  # alike but for the last bits
        "huge": random.choice([-np.inf, -1e30, -1e-40, -0.0, 0.0, 1e-40, 1e30, np.inf], num_rows),
    }[kind].astype(dtype)
    labels = random.random(num_rows) < 1 / (1 + np.exp(-np.clip(scores.astype(np.float64), -2, 2)))
    return scores, labels


@pytest.mark.parametrize("memory_rows", [1, 3])
def test_four_rows_by_hand(memory_rows: int) -> None:
    """Positives 0.5 and 2 against negatives 0.5 and -1: pairs 1/2, 1, 1, 1 of 4."""
    found = tallied(np.array([0.5, 0.5, -1.0, 2.0], np.float32), np.array([True, False, False, True]), memory_rows)
    losses = [math.log1p(math.exp(-0.5)), math.log1p(math.exp(0.5)), math.log1p(math.exp(-1)), math.log1p(math.exp(-2))]
    assert (found.rows, found.positives, found.auc, found.accuracy) == (4, 2, 3.5 / 4, 0.75)
    assert found.log_loss == pytest.approx(sum(losses) / 4, rel=1e-15)


@pytest.mark.parametrize(("num_rows", "labels"), [(0, []), (1, [True]), (3, [False] * 3)])
def test_what_is_not_defined_is_nan(num_rows: int, labels: list[bool]) -> None:
    found = tallied(np.zeros(num_rows, np.float32), np.array(labels, bool), 2)
    assert math.isnan(found.auc)
    assert (found.rows, found.positives) == (num_rows, sum(labels))
    assert math.isnan(found.log_loss) == math.isnan(found.accuracy) == (num_rows == 0)
    if num_rows:
        assert found.log_loss == pytest.approx(math.log(2))
        assert found.accuracy == 0.5


def test_a_constant_score_is_chance() -> None:
    assert tallied(*made_up("constant", 500), memory_rows=20).auc == 0.5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("memory_rows", [13, 100, 1000])
@pytest.mark.parametrize("kind", ["normal", "few values", "constant", "near", "huge"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_equal_to_the_metrics_of_all_rows_at_once(kind: str, memory_rows: int, dtype: str) -> None:
    scores, labels = made_up(kind, 300, dtype)
    found = tallied(scores, labels, memory_rows, block=41)
    assert found.auc == metrics.auc(scores, labels)
    assert found.accuracy == metrics.accuracy(scores, labels)
    if np.isfinite(scores).all():
        assert found.log_loss == pytest.approx(metrics.log_loss(scores, labels), rel=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_integers_are_in_the_order_of_the_scores(dtype: str) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    scores = np.array([-np.inf, -2, -1, -tiny, -0.0, 0.0, tiny, 1, 1 + np.finfo(dtype).eps, np.inf], dtype)
    keys = in_order(scores).tolist()
    assert keys[4] == keys[5]
    assert keys[:5] + keys[6:] == sorted(set(keys))


def test_nan_is_an_error_that_counts_them() -> None:
    with pytest.raises(DataError, match="2 of 5 scores are NaN: the model has diverged"):
        tallied(np.array([1, np.nan, 2, np.nan, 0], np.float32), np.zeros(5, bool), 2, block=2)


def test_no_more_rows_are_held_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 250,000 rows (1 MB of scores) 5,000 at a time: runs, pieces and the peak of memory."""
    pieces: list[int] = []
    count = metrics.twice_in_order

    def noted(negatives: NDArray[Any], positives: NDArray[Any]) -> int:
        pieces.append(len(negatives) + len(positives))
        return count(negatives, positives)

    monkeypatch.setattr(metrics, "twice_in_order", noted)
    monkeypatch.setattr(tally, "DIGIT", 8)  # whose counts are small beside the rows
    random, num_rows, limit = np.random.default_rng(0), 250_000, 5_000
    scores, labels = np.empty(0, np.float32), np.empty(0, bool)
    with Tally(limit, folder=tmp_path) as found:
        tracemalloc.start()
        for _ in range(num_rows // 1000):
            found.add(random.normal(size=1000).astype(np.float32), random.random(1000) < 0.3)
        totals = found.finish()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        runs = [path.stat().st_size // 4 for path in tmp_path.rglob("*-*") if path.is_file()]
        assert sum(runs) == num_rows
        assert max(runs) <= limit
    assert 0 < max(pieces) <= limit
    assert peak < num_rows * 4 / 2, "half of the scores alone"
    assert not list(tmp_path.iterdir()), "the temporary folder is gone"
    random = np.random.default_rng(0)
    drawn = [(random.normal(size=1000).astype(np.float32), random.random(1000) < 0.3) for _ in range(num_rows // 1000)]
    scores, labels = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    assert totals.auc == metrics.auc(scores, labels)


def on_ranks(world_size: int, work: Callable[[int, tally.Gather], Totals]) -> list[Totals]:
    """What each of some ranks gets, one thread a rank, gathering in the order of the ranks."""
    meeting, board = threading.Barrier(world_size, timeout=600), dict[int, NDArray[Any]]()
    results: dict[int, Totals] = {}

    def run(rank: int) -> None:
        def gather(rows: NDArray[Any]) -> NDArray[Any]:
            board[rank] = rows
            meeting.wait()
            joined = np.concatenate([board[each] for each in range(world_size)])
            meeting.wait()
            return joined

        results[rank] = work(rank, gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["normal", "few values", "near"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ranks_add_up_to_the_numbers_of_one_and_one_of_them_may_have_no_row(
    kind: str, world_size: int, dtype: str
) -> None:
    scores, labels = made_up(kind, 200, dtype)

    def work(rank: int, gather: tally.Gather) -> Totals:
        with Tally(30, gather=gather) as found:
            for start in range(0, 200, 25):
                if start // 25 % (world_size - 1) == rank:  # the last rank has none
                    found.add(scores[start : start + 25], labels[start : start + 25])
            return found.finish()

    assert on_ranks(world_size, work) == [tallied(scores, labels, 30, block=25)] * world_size
