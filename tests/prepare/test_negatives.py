"""Negatives drawn when a dataset is prepared."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from recspec.data.prepare.negatives import Seen


def drawn_by(seen: Seen, users: Iterable[int], count: int) -> NDArray[np.int64]:
    """So many draws of each user: (users, count)."""
    owners = np.repeat(np.array(list(users)), count)
    return seen.draw(owners, np.tile(np.arange(count), len(owners) // count), (1, 2)).reshape(-1, count)


def test_unseen_items_are_drawn_evenly_and_seen_ones_never() -> None:
    seen = {5: [1, 2, 7], 6: [], 7: [1, 2, 3, 4, 5, 6, 7, 8, 9]}
    users = np.array([user for user, items in seen.items() for _ in items])
    items = np.array([item for own in seen.values() for item in own])
    drawn = drawn_by(Seen.of(users, items, num_items=10), [5, 7], 7000)
    assert set(drawn[1].tolist()) == {10}
    counts = np.bincount(drawn[0], minlength=11)
    assert counts[[0, 1, 2, 7]].tolist() == [0, 0, 0, 0]
    assert counts[[3, 4, 5, 6, 8, 9, 10]] == pytest.approx([1000] * 7, abs=120)  # 4 standard deviations


def test_draws_are_of_the_user_alone() -> None:
    users, items = np.repeat(np.arange(1, 51), 4), np.tile([1, 2, 3, 4], 50)
    together = drawn_by(Seen.of(users, items, 100), range(1, 51), 20)
    alone = drawn_by(Seen.of(users[:8], items[:8], 100), [2], 20)
    assert together[1].tolist() == alone[0].tolist()
    assert len(np.unique(together)) > 90
    assert (together[0] != together[1]).any()
