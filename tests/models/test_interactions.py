"""Events of users: some users' lists, and lists that are joined in order of time, by hand and by a slow loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recspec.models import UserEvents

Lists = list[list[tuple[int, int]]]
"""Of each user: items and times."""


def events(lists: Lists, *, timed: bool = True, weights: bool = False) -> UserEvents:
    flat = [each for own in lists for each in own]
    return UserEvents(
        np.cumsum([0, *map(len, lists)]),
        np.array([item for item, _ in flat], np.int32),
        np.array([float(time) for _, time in flat]) if timed else None,
        np.array([item / 2 for item, _ in flat], np.float32) if weights else None,
    )


def listed(found: UserEvents) -> list[list[int]]:
    return [found.items[a:b].tolist() for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


KNOWN = events([[(1, 10), (2, 20)], [], [(3, 5), (4, 15), (3, 25)]], weights=True)


def test_some_users_in_their_order_and_nobody() -> None:
    found = KNOWN.of(np.array([2, -1, 0, 2, 1]))
    assert listed(found) == [[3, 4, 3], [], [1, 2], [3, 4, 3], []]
    assert found.times is not None
    assert found.times.tolist() == [5, 15, 25, 10, 20, 5, 15, 25]
    for user in (2, 1, 0, -1):
        alone = KNOWN.of(np.array([user]))
        assert listed(alone) == listed(KNOWN.of(np.array([user, user])))[:1]
        assert alone.weights is not None
        assert alone.weights.tolist() == [each / 2 for each in alone.items]
    assert listed(KNOWN.of(np.zeros(0, np.int64))) == []


def test_events_are_joined_by_time_and_others_come_later_at_one_time() -> None:
    others = events([[(7, 15), (8, 20)], [(9, 1)], [(7, 4)]])
    found = KNOWN.joined(others)
    assert listed(found) == [[1, 7, 2, 8], [9], [7, 3, 4, 3]]
    assert found.times is not None
    assert found.times.tolist() == [10, 15, 20, 20, 1, 4, 5, 15, 25]
    assert found.weights is not None
    assert found.weights.tolist() == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 2.0, 1.5]


def test_without_times_others_are_later_than_all() -> None:
    others = events([[(7, 0)], [(9, 1)], [(8, 4)]], timed=False)
    found = KNOWN.joined(others)
    assert listed(found) == [[1, 2, 7], [9], [3, 4, 3, 8]]
    assert found.times is not None
    assert found.times.tolist() == [10, 20, 20, 0, 5, 15, 25, 25]
    plain = events([[(1, 10)], [], []], timed=False).joined(events([[(7, -5)], [(9, 1)], []]))
    assert (listed(plain), plain.times, plain.weights) == ([[1, 7], [9], []], None, None)


OF_USERS = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=4), min_size=3, max_size=3)


@given(OF_USERS, OF_USERS)
def test_joining_is_a_stable_sort_by_time(first: Lists, second: Lists) -> None:
    first, second = ([sorted(own, key=lambda each: each[1]) for own in lists] for lists in (first, second))
    wanted = [sorted([*a, *b], key=lambda each: each[1]) for a, b in zip(first, second, strict=True)]
    found = events(first).joined(events(second))
    assert listed(found) == [[item for item, _ in own] for own in wanted]
