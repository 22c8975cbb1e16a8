"""Columns of lists in memory."""

from __future__ import annotations

from recspec.data.storage import Ragged


def test_ragged_pads_and_truncates_each_row_on_its_own() -> None:
    lists = Ragged.of([[1, 2, 3], [], [4]])
    assert lists.pad(2).tolist() == [[1, 2], [0, 0], [4, 0]]
    assert lists.pad(4, -1).tolist() == [[1, 2, 3, -1], [-1] * 4, [4, -1, -1, -1]]
    assert lists.truncate(1).tolist() == [[1], [], [4]]
    assert lists.rows(1, 3).tolist() == [[], [4]]
    assert Ragged.concatenate([lists.rows(2, 3), lists.rows(0, 1)]).tolist() == [[4], [1, 2, 3]]
    assert len(Ragged.of([])) == 0
    assert Ragged.of([]).pad(2).shape == (0, 2)
