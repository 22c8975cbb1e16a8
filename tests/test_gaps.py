"""What raw rows lack, told in sentences; lists that the wrong sign separates; how messages name rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from recspec.encoding import (
    UNKNOWN_ID,
    CrossEncoder,
    Encoders,
    Gap,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    Vocabulary,
    VocabularyEncoder,
)
from recspec.gaps import (
    Beyond,
    Misread,
    Predictions,
    closest,
    column_notes,
    misread_lists,
    out_of_range,
    raw_names,
    row_at,
)


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
        gaps = {"item": Gap(0, unknown, UNKNOWN_ID)}
        total += Predictions(10, gaps, {"past": Misread(1, ",", "|")}, ("pasr",), ("past",))
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
        (["12,15,88", None, ""], Misread(1, ",", "|")),
        (["12 15", "12; 15", "15;12"], Misread(2, ";", "|")),
        (["12\t15"], Misread(1, "\t", "|")),
        (["12|15", "12,15"], Misread(1, ",", "|")),
        (["12,15|88", "88"], None),  # something of each row is known
        (["7"], None),
        ([None], None),
        ([], None),
    ],
)
def test_a_list_of_which_nothing_is_known_and_another_sign_stands_in_is_misread(
    past: list[str | None], found: Misread | None
) -> None:
    table = pa.table({"past": pa.array(past, pa.string())})
    assert misread_lists(table, encoders([12, 15, 88]), ["history"]) == ({} if found is None else {"past": found})


def test_a_sign_that_stands_in_known_values_separates_nothing() -> None:
    table = pa.table({"past": ["Ann Lee", "Bob,Eve"]})
    assert misread_lists(table, encoders(["New York", "a"]), ["history"]) == {"past": Misread(1, ",", "|")}
    assert misread_lists(table, encoders(["New York", "a,b"]), ["history"]) == {}


def test_lists_and_numbers_and_columns_that_are_not_there_are_not_misread() -> None:
    for column in (pa.array([["12,15"]]), pa.array([12])):
        assert misread_lists(pa.table({"past": column}), encoders([12, 15]), ["history"]) == {}
    assert misread_lists(pa.table({"other": ["12,15"]}), encoders([12, 15]), ["history"]) == {}
    assert misread_lists(pa.table({"past": ["12,15"]}), encoders([12, 15], separator=None), ["history"]) == {}


def test_a_cross_is_made_of_raw_columns_or_the_features_that_are_them() -> None:
    made = Encoders(
        {
            "hour": HashEncoder(cardinality=9, column="h"),
            "cross": CrossEncoder(columns=("h", "place"), cardinality=9),
        }
    )
    assert [*raw_names(made, ["hour"])] == ["hour", "h"]
    assert [*raw_names(made, ["cross"])] == ["h", "place", "hour"]
    assert [*raw_names(made, ["elsewhere"])] == ["elsewhere"]
    assert [*raw_names(None, ["hour"])] == ["hour"]


def test_numbers_that_are_cut_or_far_from_all_that_was_fitted_are_told_and_add_up() -> None:
    kinds = {
        "gain": ScaleEncoder(mean=1000.0, std=7000.0),
        "wealth": ScaleEncoder(mean=5.0, std=1.0, log1p=True, column="money"),
        "age": NumberEncoder(low=0, high=120, outside=40),
        "share": NumberEncoder(high=1),
        "free": NumberEncoder(),
        "list": NumberEncoder(length=3, separator="|", high=1),
    }
    rows = {"gain": [1e308, -1e9, 99_999.0, None], "money": [1e308, 1.0, None, 2.0], "age": [-1, 0, 120, 500],
            "share": [0.5, 2.0, None, 1.0], "free": [1e308, 0.0, 0.0, 0.0], "list": ["5|6", "1", "", None],
            "other": [1e308] * 4}  # fmt: skip
    found = out_of_range(pa.table(rows), Encoders(kinds, {}), [*kinds, "other"])
    assert found == {
        "gain": Beyond(0, 2, "[, ]", 0.0),
        "wealth": Beyond(0, 1, "[, ]", 0.0),
        "age": Beyond(2, 0, "[0, 120]", 40.0),
        "share": Beyond(1, 0, "[, 1]", 0.0),
    }
    total = Predictions(4, beyond={"gain": found["gain"], "age": found["age"]})
    total += Predictions(1, beyond={"gain": Beyond(0, 1, "[, ]", 0.0)})
    far, cut = total.notes()
    assert far.startswith("3 of 5 rows have gain 100 or more standard deviations from the mean of the training data")
    assert cut == "2 of 5 rows have age outside [0, 120]; 40 is taken"
