"""Rows drawn in proportion to their weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recspec.base.errors import DataError
from recspec.data.storage import SplitWriter
from recspec.feature_spec import FeatureSpec
from recspec.loading import NewRowsAndReplay
from recspec.loading.loader import Loader, draw_rows

TINY = 1000  # bytes


def dataset(folder: Path, weights: np.ndarray) -> FeatureSpec:
    """Row i holds the id i + 1 and the i-th weight; every second row is positive."""
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {
                "row": {"dtype": "int32", "cardinality": 10_000},
                "label": {"dtype": "float32"},
                "event_weight": {"dtype": "float32"},
            },
            "channel_spec": {"item": ["row"], "label": ["label"]},
            "metadata": {"event_weight": "event_weight"},
        },
        folder,
    )
    rows = np.arange(len(weights))
    with SplitWriter(folder, "train", spec.features, "parquet", rows_per_file=37) as writer:
        columns = {"row": rows + 1, "label": rows % 2, "event_weight": weights}
        writer.write({name: values.astype(spec.features[name].dtype) for name, values in columns.items()})
    return spec.replace(sources={"train": writer.chunks})


def drawn(loader: Loader, epoch: int = 0, start: int = 0) -> list[int]:
    shares = loader.batches(epoch, start)
    return [row - 1 for share in shares for row in share.batch["row"][: share.num_rows].tolist()]


@pytest.mark.parametrize("budget", [1 << 30, TINY])
def test_rows_are_drawn_as_often_as_they_weigh(budget: int, tmp_path: Path) -> None:
    weights = np.exp(np.random.default_rng(0).normal(0, 1, 400))
    given = {"features": ["row", "label"], "weights": "event_weight"}
    loader = Loader(dataset(tmp_path, weights), "train", batch_size=32, memory_budget=budget, **given)
    assert loader.mode == ("memory" if budget > TINY else "stream")
    expected = weights / weights.mean()
    total = np.zeros(400)
    for epoch in range(40):
        rows = drawn(loader, epoch)
        assert len(rows) == 400
        total += np.bincount(rows, minlength=400)
    # one epoch's count is off by less than 1, in memory, so a mean of 40 by a few times 0.5 / sqrt(40)
    assert np.abs(total / 40 - expected).max() < 0.45
    assert np.abs(total / 40 - expected).mean() < 0.1
    assert set(next(iter(loader.batches())).batch) == {"row", "label"}  # the weight is no input


def test_a_row_is_drawn_one_time_more_or_less_than_it_weighs() -> None:
    weights = np.array([0.5, 3.25, 1, 0.25] * 25, np.float32)
    expected = weights / weights.mean()
    for seed in range(20):
        rows = draw_rows(weights, 100, seed).numpy()
        times = np.bincount(rows, minlength=100)
        assert (np.abs(times - expected) < 1).all()
        assert rows.tolist() == draw_rows(weights, 100, seed).tolist()
    # rows of a regular pattern are not drawn in a pattern: about half of the 0.5 are drawn, whatever the seed
    assert 3 < times[0::4].sum() < 22


@pytest.mark.parametrize("budget", [1 << 30, TINY])
def test_equal_weights_draw_each_row_once(budget: int, tmp_path: Path) -> None:
    spec = dataset(tmp_path, np.full(300, 7.0))
    loader = Loader(spec, "train", batch_size=32, memory_budget=budget, weights="event_weight")
    rows = drawn(loader)
    assert sorted(rows) == list(range(300))
    assert rows != sorted(rows)
    assert drawn(loader, 1) != rows


@pytest.mark.parametrize("budget", [1 << 30, TINY])
def test_ranks_and_later_starts_see_the_same_draws(budget: int, tmp_path: Path) -> None:
    spec = dataset(tmp_path, np.random.default_rng(1).random(300) + 0.1)
    given = {"batch_size": 32, "memory_budget": budget, "weights": "event_weight", "seed": 3}
    whole = [share.batch["row"].tolist() for share in Loader(spec, "train", **given).batches(2, lanes=2)]  # type: ignore[arg-type]
    later = [share.batch["row"].tolist() for share in Loader(spec, "train", **given).batches(2, 4, 2)]  # type: ignore[arg-type]
    assert later == whole[4:]
    ranks = [[*Loader(spec, "train", rank=rank, world_size=2, **given).batches(2)] for rank in range(2)]  # type: ignore[arg-type]
    joined = [[*a.batch["row"].tolist(), *b.batch["row"].tolist()] for a, b in zip(*ranks, strict=True)]
    assert joined == whole


def test_positives_alone_are_drawn_by_their_weights(tmp_path: Path) -> None:
    weights = np.where(np.arange(100) % 2, 1.0, 50.0)
    loader = Loader(dataset(tmp_path, weights), "train", batch_size=9, positives_only=True, weights="event_weight")
    assert sorted(drawn(loader)) == list(range(1, 100, 2))


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_a_weight_that_is_none_is_refused(wrong: float, tmp_path: Path) -> None:
    spec = dataset(tmp_path, np.array([1.0, wrong, 2.0]))
    loader = Loader(spec, "train", batch_size=2, weights="event_weight")
    with pytest.raises(DataError, match=r"'event_weight', the weight of events: holds .*; expected numbers above 0"):
        drawn(loader)


@pytest.mark.parametrize("budget", [1 << 30, TINY])
@pytest.mark.parametrize(
    "more", [{}, {"weights": "event_weight"}, {"part": NewRowsAndReplay([300], 0.2)}, {"positives_only": True}]
)
def test_shares_of_positives_are_those_of_the_rows_that_an_epoch_holds(
    more: dict[str, Any], budget: int, tmp_path: Path
) -> None:
    """The logQ correction of `two_tower` divides by them: with the shares of all rows, new items would be held down."""
    spec = dataset(tmp_path, np.exp(np.random.default_rng(0).normal(0, 1, 400)))
    loader = Loader(spec, "train", batch_size=32, features=["row", "label"], memory_budget=budget, **more)
    shares, epochs = loader.shares_of_positives(spec), 8 if "weights" in more else 1
    rows = np.concatenate([drawn(loader, epoch) for epoch in range(epochs)])
    held = np.bincount(rows[rows % 2 == 1] + 1, minlength=len(shares)) / len(rows)
    tolerance = 0.9 / loader.num_rows if "weights" in more else 1e-12
    np.testing.assert_allclose(shares, held, rtol=0, atol=tolerance)
    assert shares.sum() == pytest.approx(held.sum(), abs=0.01 if "weights" in more else 1e-12)
