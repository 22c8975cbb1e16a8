"""Events and answers of a journal as raw rows of a dataset, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.datasets import DATASETS, RawEvents
from recspec.loop.journal import EVENT_FIELDS, exposure, fields_of
from recspec.loop.raw_rows import Acts, check_exposures, check_times, rows_of_events, rows_of_exposures

SECOND = 1_000_000
MINUTE = 60 * SECOND
TEXT = pa.string()


def raw(kinds: dict[str, pa.DataType], *, dated: bool = True, **settings: object) -> RawEvents:
    """The rules of a dataset whose raw events have some columns."""
    columns = {"user": "user", "item": "item", "timestamp": "time", **settings}
    made = DATASETS["table"].Settings(**columns)  # type: ignore[arg-type]
    return RawEvents(made, dated, {"user": TEXT, "item": TEXT, "time": pa.int64(), **kinds}, Path("nowhere"))


def events(*rows: dict[str, object]) -> list[pa.RecordBatch]:
    """Blocks of the journal; the second of an event, `at`, is 10 by default."""
    usual = {"subject": "ann", "type": "view", "item": "a", "at": 10, "value": None, "request_id": None}
    full = []
    for number, row in enumerate(rows, 1):
        each = {**usual, **row}
        micros = round(float(str(each.pop("at"))) * SECOND)
        of_journal = {"seq": number, "event_id": f"e{number}", "occurred_at": micros, "received_at": micros}
        full.append({"position": None, "context": None, **of_journal, **each})
    return [pa.RecordBatch.from_pylist(full, schema=EVENT_FIELDS)]


def exposures(*rows: dict[str, object]) -> list[pa.RecordBatch]:
    usual = {"subject": "ann", "items": ["a", "b"], "at": 100, "surface": None}
    full = []
    for number, row in enumerate(rows, 1):
        each = {**usual, **row}
        lists, at = each.pop("items"), int(str(each.pop("at")))
        of_journal = {"seq": number, "request_id": f"r{number}", "served_at": at * SECOND, "items": json.dumps(lists)}
        others = dict.fromkeys(("experiment", "variant", "seed", "propensities"))
        named = {"model": "shop", "version": "0:a", "policy": "{}", "history_seq": 0, "pool_size": 2}
        full.append({**others, **named, **of_journal, **each})
    return [pa.RecordBatch.from_pylist(full, schema=fields_of(exposure))]


def test_events_are_rows_in_the_order_of_arrival_and_impressions_are_none() -> None:
    blocks = events({}, {"type": "impression"}, {"type": "impression", "item": None}, {"item": "b", "at": 9.75})
    found = rows_of_events(blocks, raw({}), None)
    assert found.table.column_names == ["_seq", "user", "item", "time"]
    assert found.table.column("_seq").to_pylist() == [1, 4]
    assert [each.timestamp() for each in found.table.column("time").to_pylist()] == [10, 9], "whole, as known times are"
    assert found.notes() == []
    fractions = rows_of_events(blocks, raw({"time": pa.float64()}), None)
    assert [each.timestamp() for each in fractions.table.column("time").to_pylist()] == [10, 9.75]
    untimed = rows_of_events(blocks, raw({}, timestamp=None), None)
    assert untimed.table.column_names == ["_seq", "user", "item"]


def test_events_that_the_dataset_has_no_place_for_are_counted() -> None:
    blocks = events(
        {"subject": "7", "item": "1"},
        {"subject": "x", "item": "2"},
        {"subject": "8", "item": "1.5"},
        {"subject": "9", "item": "3", "type": "search"},
        {"subject": "9", "item": "3", "type": "hide"},
    )
    weighted = {"event": "kind", "event_weights": {"view": 1, "search": 2}}
    kinds = {"user": pa.int64(), "item": pa.int32(), "kind": TEXT}
    found = rows_of_events(blocks, raw(kinds, **weighted), None)
    assert found.table.drop_columns(["time"]).to_pylist() == [
        {"_seq": 1, "user": 7, "item": 1, "kind": "view"},
        {"_seq": 4, "user": 9, "item": 3, "kind": "search"},
    ]
    assert sorted(found.notes()) == [
        "events of types that event_weights do not name: 1 left out",
        "events whose item is no whole number: 1 left out",
        "events whose user is no whole number: 1 left out",
    ]
    views = rows_of_events(blocks, raw(kinds, **weighted), ["view"])
    assert views.table.column("_seq").to_pylist() == [1]
    assert "events of other types: 2 left out" in views.notes()


def test_values_are_weights_or_ratings_and_context_has_the_types_of_its_columns() -> None:
    blocks = events({"value": 3.0}, {}, {"value": -1.0})
    weights = rows_of_events(blocks, raw({"n": pa.float64()}, weight="n"), None)
    assert weights.table.column("n").to_pylist() == [3.0, 1.0]
    assert weights.notes() == ["events whose value is no weight: 1 left out"]
    ratings = rows_of_events(blocks, raw({"stars": pa.float64()}, rating="stars"), None)
    assert ratings.table.column("stars").to_pylist() == [3.0, None, -1.0]
    told = {"shop": "x", "age": 7.0, "n": 2.5, "tags": ["a", "b"], "other": 1}
    strange = {"shop": True, "age": 7.5, "n": "two", "tags": "a"}
    kinds = {"shop": TEXT, "age": pa.int64(), "n": pa.float64(), "tags": pa.list_(TEXT)}
    asked = raw(kinds, context_features=[*kinds], lists=["tags"])
    blocks = events(*({"context": json.dumps(each)} for each in (told, strange)), {})
    found = rows_of_events(blocks, asked, None).table.drop_columns(["_seq", "user", "item", "time"])
    assert found.to_pylist() == [
        {"shop": "x", "age": 7, "n": 2.5, "tags": ["a", "b"]},
        {"shop": "true", "age": None, "n": None, "tags": None},
        {"shop": None, "age": None, "n": None, "tags": None},
    ]


NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
EXTREMES = [10**400, -(10**400), 2**64, 2**63, 2**31, 300, -1, 1e300, 0]


@pytest.mark.parametrize("kind", [*NUMBERS, pa.float32(), pa.float64(), pa.list_(pa.int8()), TEXT, pa.bool_()], ids=str)
def test_no_value_of_a_context_stops_an_update(kind: pa.DataType) -> None:
    values = [*EXTREMES, [1, 10**400], [300], {"a": 1}, True, "\udcff".encode("utf-8", "replace").decode()]
    blocks = events(*({"context": json.dumps({"x": each})} for each in values))
    found = rows_of_events(blocks, raw({"x": kind}, context_features=["x"]), None).table
    assert len(found) == len(values)
    told = found.column("x").to_pylist()
    if kind in NUMBERS:
        assert told[EXTREMES.index(0)] == 0
        assert told[:2] == [None, None]
    if pa.types.is_floating(kind):
        assert told[:2] == [None, None]
        assert told[EXTREMES.index(300)] == 300.0
        assert told[EXTREMES.index(1e300)] is None, "it would be infinite in 32 bits"


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_ids_beyond_the_type_of_a_dataset_are_counted_and_stop_no_update(kind: pa.DataType) -> None:
    ids = ["1", str(2**31), "-1", "9" * 18, "9" * 19, "1\n", "300"]
    blocks = events(*({"subject": each, "item": each} for each in ids))
    kinds = {"user": kind, "item": kind}
    found = rows_of_events(blocks, raw(kinds), None)
    fitting = [
        each
        for each in (1, 2**31, -1, 10**18 - 1, 300)
        if pa.scalar(each, pa.int64()).cast(kind, safe=False).as_py() == each
    ]
    assert found.table.column("user").to_pylist() == found.table.column("item").to_pylist() == fitting
    assert sum(found.left_out.values()) == len(ids) - len(fitting)
    answers = exposures({"subject": ids[0], "items": ids}, {"subject": ids[4], "items": ["1"]})
    labelled = rows_of_exposures(
        answers, Acts.of(events()), raw({**kinds, "clicked": pa.int64()}, **LABELLED), MINUTE, None
    )
    assert labelled.table.column("item").to_pylist() == fitting


def labels(found: pa.Table) -> list[tuple[object, ...]]:
    return [(row["_seq"], row["item"], row["_label"]) for row in found.to_pylist()]


LABELLED = {"label": "clicked", "item_features": []}


def test_an_item_of_an_answer_is_a_positive_if_it_was_acted_on_within_the_window() -> None:
    answers = exposures({}, {"subject": "ben"}, {"subject": None})
    acts = Acts.of(
        events(
            {"item": "a", "request_id": "r1", "type": "click", "at": 130},
            {"item": "b", "request_id": "r1", "type": "click", "at": 161},  # after the window of a minute
            {"subject": "ben", "item": "b", "type": "buy", "at": 160},  # names no answer
            {"subject": "ben", "item": "a", "type": "buy", "at": 99},  # before it
            {"subject": "ann", "item": "b", "request_id": "r9", "type": "click", "at": 130},  # of another answer
            {"subject": "dan", "item": "a", "request_id": "r3", "type": "click", "at": 130},
        )
    )
    found = rows_of_exposures(answers, acts, raw({"clicked": pa.int64()}, **LABELLED), MINUTE, None)
    assert labels(found.table) == [(1, "a", 1), (1, "b", 0), (2, "a", 0), (2, "b", 1)]
    assert found.table.column("clicked").to_pylist() == [1, 0, 0, 1]
    assert {each.timestamp() for each in found.table.column("time").to_pylist()} == {100}
    assert found.notes() == ["items of answers whose user or item is missing, or no whole number: 2 left out"]
    buys = rows_of_exposures(answers, acts, raw({}, **LABELLED), MINUTE, ["buy"])
    assert labels(buys.table) == [(1, "a", 0), (1, "b", 0), (2, "a", 0), (2, "b", 1)]


def test_items_that_no_impression_confirms_are_no_rows_once_there_are_impressions() -> None:
    answers = exposures({}, {"items": ["c", "d"]}, {"items": ["e"]})
    acts = Acts.of(
        events(
            {"type": "impression", "item": "b", "request_id": "r1"},
            {"type": "impression", "item": None, "request_id": "r2"},
        )
    )
    found = rows_of_exposures(answers, acts, raw({}, **LABELLED), MINUTE, None)
    assert labels(found.table) == [(1, "b", 0), (2, "c", 0), (2, "d", 0)]
    assert found.notes() == ["items that were not shown: 2 left out"]


def test_labels_are_written_as_the_dataset_was_prepared() -> None:
    acts = Acts.of(events({"item": "a", "request_id": "r1", "type": "buy", "at": 101}))

    def column(name: str, kinds: dict[str, pa.DataType], **settings: object) -> list[object]:
        found = rows_of_exposures(exposures({}), acts, raw(kinds, **settings), MINUTE, None)
        return list(found.table.column(name).to_pylist())

    by_type = {"event": "kind", "positive": ["buy", "gift"]}
    assert column("kind", {"kind": pa.int64()}, **by_type) == ["buy", "impression"]
    assert column("stars", {"stars": pa.float64()}, label="stars", positive_from=4) == [4, 3]
    others = {"label": "clicked", "other_labels": ["buy", "click"]}
    assert column("buy", {}, **others) == [1, 0]
    assert column("click", {}, **others) == [0, 0]
    grouped = {"label": "clicked", "group": "session"}
    assert column("session", {"session": TEXT}, **grouped) == ["r1", "r1"]
    numbers = column("session", {"session": pa.int64()}, **grouped)
    assert len({*numbers}) == 1
    assert isinstance(numbers[0], int)
    weighted = {"label": "clicked", "event": "kind", "event_weights": {"impression": 1, "buy": 3}}
    assert column("kind", {"kind": TEXT}, **weighted) == ["buy", "impression"]
    places = {"label": "clicked", "context_features": ["position", "surface"]}
    assert column("position", {"position": pa.int64(), "surface": TEXT}, **places) == [1, 2]
    weighed = {"label": "clicked", "event": "kind", "event_weights": {"buy": 3}}
    with pytest.raises(
        DataError, match="event_weights weigh no 'impression', the type of items that were shown and no"
    ):
        column("kind", {"kind": TEXT}, **weighed)


def test_features_of_users_and_items_are_those_that_events_had_last(tmp_path: Path) -> None:
    known = {
        "user": ["ann", "ann", "ben"],
        "item": ["a", "a", "b"],
        "time": [2, 1, 1],
        "__row__": [0, 1, 2],
        "price": [None, 5.0, 7.0],
        "tags": [["x"], ["y"], None],
        "age": [30, 31, 40],
    }
    pq.write_table(pa.table(known), tmp_path / "events.parquet")
    schema = pq.read_schema(tmp_path / "events.parquet")
    settings = {"label": "clicked", "item_features": ["price", "tags"], "user_features": ["age"], "lists": ["tags"]}
    asked = raw({name: schema.field(name).type for name in ("price", "tags", "age")}, **settings)
    held = RawEvents(asked.settings, True, asked.kinds, tmp_path / "events.parquet")
    answers = exposures({"items": ["a", "c"]}, {"subject": "cat", "items": ["b"]})
    found = rows_of_exposures(answers, Acts(), held, MINUTE, None).table
    assert found.select(["price", "tags", "age"]).to_pylist() == [
        {"price": 5.0, "tags": ["x"], "age": 30},
        {"price": None, "tags": None, "age": 30},
        {"price": 7.0, "tags": None, "age": None},
    ]


def test_what_a_journal_can_not_tell_is_said() -> None:
    check_times(raw({}, dated=False, timestamp=None), "data")
    told = "data: its times, in column 'time', are no dates, so events of a journal have no place there; prepare it"
    with pytest.raises(DataError, match=told):
        check_times(raw({}, dated=False), "data")
    kinds = {"position": pa.int64(), "weather": TEXT}
    lacking = raw(kinds, label="clicked", context_features=[*kinds])
    assert check_exposures(lacking) == ["answers do not tell 'weather', which new rows lack"]
    assert check_exposures(raw({}, label="clicked")) == []
