"""New users and items wait for some events, and those without events for long retire."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.data.encoding import Encoders, Vocabulary, are_blank
from recspec.data.storage import open_split
from recspec.datasets import append_events
from recspec.feature_spec import FeatureSpec
from tests.made_up_events import prepared, written

DAY = 86_400


def events(rows: str) -> pa.Table:
    """Events from texts such as `ann:a:0`: user, item, and day."""
    parts = [each.split(":") for each in rows.split()]
    times = [1_600_000_000 + DAY * int(day) for _, _, day in parts]
    return pa.table({"user_id": [p[0] for p in parts], "item_id": [p[1] for p in parts], "timestamp": times})


def shop(folder: Path, **settings: object) -> FeatureSpec:
    known = "ann:a:0 ann:b:1 ben:a:2 ben:c:3 cat:b:50 cat:d:60 dan:a:61 dan:d:62"
    return prepared(folder, events(known), split="none", item_features=[], num_negatives=0, **settings)


def ids(spec: FeatureSpec) -> dict[str, list[object]]:
    found = Encoders.load(spec.folder).vocabularies
    return {name: found[name].values.to_pylist() for name in ("user_id", "item_id")}


def rows(spec: FeatureSpec) -> set[tuple[int, int]]:
    reader = open_split(spec, "train")
    found = reader.read(0, reader.num_rows)
    return {(int(u), int(i)) for u, i in zip(found["user_id"], found["item_id"], strict=True)}


def test_new_ids_wait_for_their_events_and_bring_the_earlier_ones_along(tmp_path: Path) -> None:
    base = shop(tmp_path / "shop")
    first = written(tmp_path / "one.csv", events("eve:a:63 ann:x:63 ann:c:64"))
    grown = append_events(base, first, tmp_path / "one", admit_after=2)
    assert ids(grown.spec) == ids(base)
    assert grown.counts == {"events": 1, "users": 0, "items": 0, "left_out": 2}
    assert {"1 new user with fewer than 2 events wait", "1 new item with fewer than 2 events wait"} <= {*grown.notes}
    second = append_events(
        grown.spec, written(tmp_path / "two.csv", events("eve:b:65")), tmp_path / "two", admit_after=2
    )
    assert ids(second.spec)["user_id"] == ["ann", "ben", "cat", "dan", "eve"]
    assert ids(second.spec)["item_id"] == ["a", "b", "c", "d"]
    assert rows(second.spec) >= {(5, 1), (5, 2)}, "the event that waited is a row now"
    third = append_events(second.spec, written(tmp_path / "three.csv", events("ben:x:66")), tmp_path / "three")
    assert ids(third.spec)["item_id"] == ["a", "b", "c", "d", "x"]
    assert rows(third.spec) >= {(1, 5), (2, 5)}


def test_a_file_of_events_that_all_wait_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    base = shop(tmp_path / "shop")
    file = written(tmp_path / "one.csv", events("eve:x:63"))
    told = "holds no new event: .* too low; 1 new user with fewer than 3 events wait; 1 new item with"
    with pytest.raises(DataError, match=told):
        append_events(base, file, tmp_path / "one", admit_after=3)


def test_the_long_silent_retire_and_their_ids_stay_blank(tmp_path: Path) -> None:
    base = shop(tmp_path / "shop")
    grown = append_events(base, written(tmp_path / "new.csv", events("dan:b:63")), tmp_path / "new", retire_after="30d")
    assert ids(grown.spec) == {"user_id": ["\0001", "\0002", "cat", "dan"], "item_id": ["a", "b", "\0003", "d"]}
    assert rows(grown.spec) == {(3, 2), (3, 4), (4, 1), (4, 4), (4, 2)}
    assert "2 users without an event for 30d retired" in grown.notes
    assert "1 item without an event for 30d retired" in grown.notes
    assert "4 events of theirs are gone" in grown.notes
    raw = pq.read_table(grown.spec.folder / "raw" / "events.parquet")
    assert {*raw.column("user_id").to_pylist()} == {"cat", "dan"}, "and so is what the dataset kept of them"
    back = append_events(
        grown.spec, written(tmp_path / "b.csv", events("ann:c:64")), tmp_path / "b", retire_after="30d"
    )
    assert ids(back.spec) == {
        "user_id": ["\0001", "\0002", "cat", "dan", "ann"],
        "item_id": ["a", "b", "\0003", "d", "c"],
    }, "who comes back is new"


def test_one_event_of_the_far_future_retires_nobody(tmp_path: Path) -> None:
    base = shop(tmp_path / "shop")
    file = written(tmp_path / "new.csv", events("dan:b:9999"))
    told = (
        r"retire_after=30d would retire 3 of 4 users, more than a share of 0.5: the newest time of an event is 20\d\d-"
    )
    with pytest.raises(DataError, match=told):
        append_events(base, file, tmp_path / "new", retire_after="30d", retire_most=0.5)
    grown = append_events(base, file, tmp_path / "all", retire_after="30d", retire_most=1.0)
    assert "3 users without an event for 30d retired" in grown.notes


def test_without_times_nobody_retires(tmp_path: Path) -> None:
    table = events("ann:a:0 ann:b:1 ben:a:2 ben:b:3").drop_columns(["timestamp"])
    base = prepared(tmp_path / "shop", table, split="none", item_features=[], num_negatives=0, timestamp=None)
    new = written(tmp_path / "new.csv", events("cat:a:4").drop_columns(["timestamp"]))
    grown = append_events(base, new, tmp_path / "new", retire_after="1d")
    assert "nothing was retired: the dataset has no times" in grown.notes
    assert ids(grown.spec)["user_id"] == ["ann", "ben", "cat"]


@pytest.mark.parametrize("values", [pa.array(["a", "b", "c"]), pa.array([7, -5, 2**63 - 1])])
def test_a_blank_id_is_found_by_no_value_and_survives_the_file(values: pa.Array, tmp_path: Path) -> None:
    made = Vocabulary(values).blanked(np.array([1, 3]))
    made.save(tmp_path / "v.parquet")
    read = Vocabulary.load(tmp_path / "v.parquet")
    assert read.encode(values).tolist() == [0, 2, 0]
    assert are_blank(read).tolist() == [False, True, False, True]
    assert not are_blank(Vocabulary(values)).any()
