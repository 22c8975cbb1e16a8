"""Notes on raw rows in sentences, and the names of rows in messages."""

from __future__ import annotations

import pytest

from recspec.encoding.missing_values import (
    UNKNOWN_ID,
    MisreadLists,
    MissingValues,
)
from recspec.encoding.row_notes import Predictions, closest, column_notes, row_at


def test_nothing_to_tell_is_no_note() -> None:
    assert Predictions().notes() == []
    assert column_notes((), ("item_id",)) == []


def test_a_row_counts_from_1_and_its_place_in_json_from_0() -> None:
    assert row_at(0) == "row 1"
    assert row_at(65_536) == "row 65,537"
    assert row_at(3, "rows") == "row 4 (rows[3])"
    assert row_at(3, "rows", "age") == "row 4 (rows[3].age)"
    assert row_at(0, "candidates") == "candidate 1 (candidates[0])"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("histroy", " (did you mean 'history_item_id'?)"),
        ("HISTORY", " (did you mean 'history_item_id'?)"),
        ("itemid", " (did you mean 'item_id'?)"),
        ("item_idd", " (did you mean 'item_id'?)"),
        ("why", ""),
        ("its", ""),
        ("price", ""),
    ],
)
def test_a_name_is_told_the_nearest_or_the_one_that_begins_so(name: str, told: str) -> None:
    assert closest(name, ["user_id", "item_id", "history_item_id", "history_category"]) == told


def test_blocks_of_a_file_add_up() -> None:
    total = Predictions()
    for unknown in (1, 2):
        gaps = {"item": MissingValues(0, unknown, UNKNOWN_ID)}
        total += Predictions(10, gaps, {"past": MisreadLists(1, ",", "|")}, ("pasr",), ("past",))
    assert total.notes() == [
        "3 of 20 rows have an unknown item; they are scored with the id of unknown values",
        "2 of 20 rows hold ',' and no known value in past; expected its values between '|', or a list of them",
        "not read: 'pasr' (did you mean 'past'?)",
        "absent: 'past'; the catalogues' values are taken",
    ]
