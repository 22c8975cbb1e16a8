"""Interactions by hand, and those in a dataset's rows and histories."""

from pathlib import Path

import numpy as np
import pytest

from recspec.evaluation.interactions import positives, read_events
from recspec.models import UserEvents
from tests.evaluation.tables import acted, dataset, with_histories


@pytest.mark.parametrize("keys_held", [0, 1 << 25])
@pytest.mark.parametrize("shared", [True, False])
def test_positives_hold_what_stands_in_histories_alone(
    tmp_path: Path, shared: bool, keys_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recspec.evaluation.interactions.KEYS_HELD", keys_held)
    train = [(1, 2, 1, [7, 3]), (1, 5, 0, [7, 3]), (2, 4, 0, [6]), (3, 1, 1, [])]
    known = positives(with_histories(tmp_path, {"train": train}, shared=shared), ["train"])
    assert [known.items[known.offsets[user] : known.offsets[user + 1]].tolist() for user in range(4)] == [
        [],
        [2, 3, 7],
        [6],  # of a row of label 0 the history counts, and the item does not
        [1],
    ]


def test_positives_are_the_distinct_pairs_with_a_positive_label(tmp_path: Path) -> None:
    splits = {"train": [(0, 0, 1), (0, 5, 0), (2, 1, 1), (2, 1, 1)], "valid": [(2, 0, 1), (2, 4, 0)]}
    spec = dataset(tmp_path, splits)
    both = positives(spec, ["train", "valid"])
    assert both.offsets.tolist() == [0, 1, 1, 3, 3]
    assert both.items.tolist() == [0, 0, 1]
    assert (both.num_users, both.num_items) == (4, 6)
    assert positives(spec, []).num_pairs == 0


def test_interactions_are_sorted_and_each_counted_once() -> None:
    seen = acted([(2, 3), (0, 4), (2, 1), (0, 4), (2, 3)], 4, 5)
    assert seen.offsets.tolist() == [0, 1, 1, 3, 3]
    assert seen.items.tolist() == [4, 1, 3]
    assert seen.counts.tolist() == [0, 1, 0, 1, 1]
    assert seen.keys.tolist() == [4, 11, 13]
    matrix = [[0, 0, 0, 0, 1], [0] * 5, [0, 1, 0, 1, 0], [0] * 5]
    assert seen.matrix().toarray().tolist() == matrix
    assert seen.contain(np.arange(4)[:, None], np.arange(5)).tolist() == np.array(matrix, bool).tolist()
    assert acted([], 2, 2).contain(np.array([1]), np.array([1])).tolist() == [False]
    rows, items = seen.of(np.array([3, 2, 0, 2]))
    assert (rows.tolist(), items.tolist()) == ([1, 1, 2, 3, 3], [1, 3, 4, 1, 3]), "with the user's place"


def events_by_user(events: UserEvents) -> list[list[int]]:
    return [part.tolist() for part in np.split(events.items, events.offsets[1:-1])]


def test_events_are_positives_in_the_order_of_splits_and_rows_with_repeats(tmp_path: Path) -> None:
    splits = {"train": [(2, 5, 1), (0, 3, 1), (2, 1, 0), (2, 4, 1), (2, 5, 1)], "valid": [(0, 1, 1), (2, 2, 1)]}
    spec = dataset(tmp_path, splits)
    assert events_by_user(read_events(spec, ["train", "valid"])) == [[3, 1], [], [5, 4, 5, 2], []]
    assert events_by_user(read_events(spec, ["valid"])) == [[1], [], [2], []]
    none = read_events(spec, [])
    assert (none.num_users, len(none.items)) == (4, 0)


def test_events_begin_with_the_history_of_a_users_first_row(tmp_path: Path) -> None:
    train = [(1, 2, 1, [7, 3]), (1, 5, 0, [7, 3, 2]), (1, 4, 1, [3, 2, 5]), (2, 4, 0, [6]), (3, 1, 1, [])]
    found = events_by_user(read_events(with_histories(tmp_path, {"train": train}), ["train"]))
    assert found[:4] == [[], [7, 3, 2, 4], [6], [1]]


def test_of_repeated_events_the_latest_is_kept() -> None:
    events = UserEvents.from_rows(np.array([1, 1, 0, 1, 1]), np.array([4, 2, 4, 4, 3]), 3, times=np.arange(5.0))
    assert events_by_user(events) == [[4], [4, 2, 4, 3], []]
    once = events.without_repeats(5)
    assert events_by_user(once) == [[4], [2, 4, 3], []]
    assert once.times is not None
    assert once.times.tolist() == [2, 1, 3, 4]
    assert events.interactions(5).items.tolist() == [4, 2, 3, 4]


def test_unknown_users_and_items_have_no_events(tmp_path: Path) -> None:
    splits = {"train": [(1, 2, 1), (0, 3, 1), (1, 0, 1), (2, 4, 1)], "valid": [(0, 5, 1), (2, 1, 1)]}
    ids = dataset(tmp_path, splits, metadata={"vocabularies": "vocabularies"})
    assert ids.reserves_unknown("user")
    assert ids.reserves_unknown("item")
    found = positives(ids, ["train", "valid"])
    assert [found.of(np.array([user]))[1].tolist() for user in range(4)] == [[], [2], [1, 4], []]
    assert events_by_user(read_events(ids, ["train", "valid"])) == [[], [2], [4, 1], []]
