"""Notes on raw rows: counts of missing, unknown, misread and extreme values, in sentences; the names of rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from recspec.data.encoding.encoder_kinds import (
    BucketEncoder,
    CrossEncoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
)
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.row_notes import (
    UNKNOWN_ID,
    MisreadLists,
    MissingValues,
    OutOfRange,
    Predictions,
    closest,
    count_missing,
    misread_lists,
    out_of_range,
    row_at,
)
from recspec.data.encoding.vocabulary import Vocabulary


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


def encoders(values: list[object], **settings: object) -> Encoders:
    told = {"vocabulary": "item", "separator": "|", "length": 5, "column": "past", **settings}
    return Encoders({"history": VocabularyEncoder.model_validate(told)}, {"item": Vocabulary.of(values)})


@pytest.mark.parametrize(
    ("past", "found"),
    [
        (["12,15,88", None, ""], MisreadLists(1, ",", "|")),
        (["12 15", "12; 15", "15;12"], MisreadLists(2, ";", "|")),
        (["12\t15"], MisreadLists(1, "\t", "|")),
        (["12|15", "12,15"], MisreadLists(1, ",", "|")),
        (["12,15|88", "88"], None),  # something of each row is known
        ([None], None),
        ([], None),
    ],
)
def test_a_list_of_which_nothing_is_known_and_another_sign_stands_in_is_misread(
    past: list[str | None], found: MisreadLists | None
) -> None:
    table = pa.table({"past": pa.array(past, pa.string())})
    assert misread_lists(table, encoders([12, 15, 88]), ["history"]) == ({} if found is None else {"past": found})


def test_a_sign_that_stands_in_known_values_separates_nothing() -> None:
    table = pa.table({"past": ["Ann Lee", "Bob,Eve"]})
    assert misread_lists(table, encoders(["New York", "a"]), ["history"]) == {"past": MisreadLists(1, ",", "|")}
    assert misread_lists(table, encoders(["New York", "a,b"]), ["history"]) == {}


def test_numbers_that_are_cut_or_far_from_all_that_was_fitted_are_told_and_add_up() -> None:
    kinds = {
        "gain": ScaleEncoder(mean=1000.0, std=7000.0),
        "wealth": ScaleEncoder(mean=5.0, std=1.0, log1p=True, column="money"),
        "age": NumberEncoder(low=0, high=120, outside=40),
        "share": NumberEncoder(high=1),
        "free": NumberEncoder(),
        "list": NumberEncoder(length=3, separator="|", high=1),
    }
    rows = {
        "gain": [1e308, -1e9, 99_999.0, None],
        "money": [1e308, 1.0, None, 2.0],
        "age": [-1, 0, 120, 500],
        "share": [0.5, 2.0, None, 1.0],
        "free": [1e308, 0.0, 0.0, 0.0],
        "list": ["5|6", "1", "", None],
        "other": [1e308] * 4,
    }
    found = out_of_range(pa.table(rows), Encoders(kinds, {}), [*kinds, "other"])
    assert found == {
        "gain": OutOfRange(0, 2, "[, ]", 0.0),
        "wealth": OutOfRange(0, 1, "[, ]", 0.0),
        "age": OutOfRange(2, 0, "[0, 120]", 40.0),
        "share": OutOfRange(1, 0, "[, 1]", 0.0),
    }
    total = Predictions(4, out_of_range={"gain": found["gain"], "age": found["age"]})
    total += Predictions(1, out_of_range={"gain": OutOfRange(0, 1, "[, ]", 0.0)})
    far, cut = total.notes()
    assert far.startswith("3 of 5 rows have gain 100 or more standard deviations from the mean of the training data")
    assert cut == "2 of 5 rows have age outside [0, 120]; 40 is taken"


def test_missing_values_are_told_from_unknown_ones_once_a_column() -> None:
    encoders = Encoders(
        {
            "age_bucket": BucketEncoder(column="age", boundaries=(18,)),
            "age": ScaleEncoder(mean=1, std=1, missing_values=("?",)),
            "pay_bucket": BucketEncoder(column="pay", boundaries=(18,)),
            "days": NumberEncoder(missing=2.5),
            "speed": NumberEncoder(),
            "job": VocabularyEncoder(vocabulary="job", missing_values=("?",)),
            "user_id": VocabularyEncoder(vocabulary="user_id", column="userId"),
            "city": HashEncoder(cardinality=9),
            "full": HashEncoder(cardinality=9),
            "job_x_city": CrossEncoder(columns=("job", "city"), cardinality=9),
        },
        {"job": Vocabulary.of(["b", "é", "a"]), "user_id": Vocabulary.of([30, 10, 20])},
    )
    raw = pa.table(
        {
            "age": [1.0, None, 3.0],
            "pay": ["", "7", " "],
            "days": [None, 1, 2],
            "speed": [None, None, 2.0],
            "job": ["?", "astronaut", None],
            "userId": [20.0, 99.0, float("nan")],
            "city": ["Rome", "", None],
            "full": ["a", "b", "c"],
        }
    )
    assert count_missing(raw, encoders, encoders.encode(raw)) == {
        "age": MissingValues(1, 0, "the mean"),
        "pay": MissingValues(2, 0, "the id of missing values"),
        "days": MissingValues(1, 0, "2.5"),
        "speed": MissingValues(2, 0, "0"),
        "job": MissingValues(2, 1, "the id of unknown values"),
        "user_id": MissingValues(1, 1, "the id of unknown values"),
        "city": MissingValues(2, 0, "the id of missing values"),
    }
