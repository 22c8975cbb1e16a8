"""Events from files, and a journal as Parquet by day."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec import api
from recspec.base.errors import DataError, SettingsError
from recspec.loop import Event, Exposure, Journal, export_days, import_events
from recspec.loop.journal import KEY_OF, deletion, setting

of_others = setting.c.name.startswith(KEY_OF)
DAY = 86_400_000_000
ROWS = """\
customer,item,type,time,price,note
ann,1,view,2026-11-01 10:00:00,3.5,x
bob,007,view,2026-11-01T10:00:00+01:00,,
bob,8,purchase,1764320400.5,9.99,
,8,purchase,1764320400.5,9.99,
bob,8,purchase,yesterday,9.99,
"""


def written(tmp_path: Path, name: str, content: str) -> Path:
    (tmp_path / name).write_text(content)
    return tmp_path / name


def stored(journal: Journal) -> list[dict[str, Any]]:
    return [row for block in journal.events() for row in block.to_pylist()]


def micros(*moment: int) -> int:
    return int(datetime(*moment, tzinfo=UTC).timestamp()) * 1_000_000  # type: ignore[arg-type, misc]


def test_rows_of_a_csv_file(url: str, tmp_path: Path) -> None:
    path = written(tmp_path, "rows.csv", ROWS)
    columns = {"user": "customer", "value": "price"}
    with Journal(url) as journal:
        found = import_events(journal, [path], columns, context=["note"])
        assert found.counts == {"accepted": 3, "duplicate": 0, "refused": 2}
        missing, wrong = found.refusals
        assert missing == f"{path}: row 4: user: missing"
        assert wrong.startswith(f"{path}: row 5: time: found 'yesterday'; expected seconds since 1970")
        first, second, third = stored(journal)
        assert (first["subject"], first["item"], first["value"]) == ("ann", "1", 3.5)
        assert (first["occurred_at"], first["context"]) == (micros(2026, 11, 1, 10), '{"note": "x"}')
        assert (second["item"], second["value"], second["occurred_at"]) == ("007", None, micros(2026, 11, 1, 9))
        assert third["occurred_at"] == 1_764_320_400_500_000
        again = import_events(journal, [path], columns, context=["note"])
        assert again.counts == {"accepted": 0, "duplicate": 3, "refused": 2}
        changed = import_events(journal, [path], {"user": "customer"})
        assert changed.left_out == ["price", "note"]
        assert f"{path}: row 1: id: another event has it, with other content" in changed.refusals


def test_rows_of_json_lines_and_parquet(url: str, tmp_path: Path) -> None:
    lines = [{"user": 1, "item": 2, "position": 3, "time": 1_764_320_400_250}, {"user": 2.0, "item": "x", "time": None}]
    path = written(tmp_path, "rows.jsonl", "\n".join(map(json.dumps, lines)))
    table = pa.table(
        {
            "user": ["ann", "bob"],
            "item": pa.array([5, 6], pa.int32()),
            "time": pa.array([datetime(2026, 1, 2, 3), None], pa.timestamp("us")),
            "value": pa.array([Decimal("1.25"), None]),
            "id": ["p1", "p2"],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    with Journal(url) as journal:
        import_events(journal, [path], {}, kind="view", time_unit="ms")
        import_events(journal, [tmp_path / "rows.parquet"], {}, kind="rate")
        rows = stored(journal)
    assert [each["subject"] for each in rows] == ["1", "2", "ann", "bob"]
    assert (rows[0]["occurred_at"], rows[0]["position"]) == (1_764_320_400_250_000, 3)
    assert rows[1]["occurred_at"] == rows[1]["received_at"]
    assert (rows[2]["occurred_at"], rows[2]["value"], rows[2]["event_id"]) == (micros(2026, 1, 2, 3), 1.25, "p1")
    assert {each["type"] for each in rows} == {"view", "rate"}


def test_whatever_a_parquet_file_holds_is_an_event_or_refused_by_its_row(url: str, tmp_path: Path) -> None:
    far, days = pa.array([2**62, 1], pa.timestamp("us")), pa.array([2**31 - 1, 1], pa.date32())
    ids = {"whole": [Decimal("7"), Decimal("70")], "float": [7.0, 70.0], "text": ["7", "70"], "number": [7, 70]}
    with Journal(url) as journal:
        for name, times in {"far": far, "days": days, "ns": far.cast(pa.int64()).cast(pa.timestamp("ns"))}.items():
            table = {"user": ["a", "b"], "item": [name, name], "type": ["v", "v"], "time": times}
            pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
            found = import_events(journal, [tmp_path / f"{name}.parquet"], {})
            assert found.counts["refused"] == 1, name
            assert found.refusals[0].startswith(f"{tmp_path / name}.parquet: row 1: time: found '")
        for name, users in ids.items():
            table = {"user": users, "item": users, "type": ["v", "v"], "id": [f"{name} 1", f"{name} 2"], "value": users}
            pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
            if name == "text":
                continue
            assert import_events(journal, [tmp_path / f"{name}.parquet"], {}).counts["accepted"] == 2, name
        held = [row for row in stored(journal) if row["type"] == "v" and row["value"]]
        assert [(row["subject"], row["item"], row["value"]) for row in held] == [("7", "7", 7), ("70", "70", 70)] * 3


def test_a_context_in_json_brings_no_number_that_stops_an_import(url: str, tmp_path: Path) -> None:
    rows = [{"user": "a", "item": "x", "type": "v", "id": "1", "context": json.dumps({"time": 10**400, "page": 1})}]
    rows.append({**rows[0], "id": "2", "context": json.dumps({"page": 1})})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with Journal(url) as journal:
        found = import_events(journal, [tmp_path / "rows.parquet"], {}, context=["context"])
        assert found.counts == {"accepted": 1, "duplicate": 0, "refused": 1}
        assert "row 1: time: found '1000" in found.refusals[0]


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_a_quoted_name_may_hold_a_separator(url: str, tmp_path: Path, mark: str) -> None:
    lines = [["user", "type", '"last, first; or | both"', "item", "id"], ["a", "v", '"x, y"', "i", "1"]]
    path = written(tmp_path, "rows.csv", "".join(f"{mark.join(each)}\n" for each in lines))
    with Journal(url) as journal:
        assert import_events(journal, [path], {}).counts["accepted"] == 1


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {}, r"has 'customer', 'item', .*: no column 'user'; name the one .* --column user=NAME"),
        ({"user": "custmer"}, {}, r"no column 'custmer' \(did you mean 'customer'\?\)"),
        ({"usr": "customer"}, {}, r"columns: unknown field 'usr' \(did you mean 'user'\?\)"),
        ({"user": "customer", "type": "item"}, {"context": ["notes"]}, r"no column 'notes' \(did you mean 'note'\?\)"),
    ],
)
def test_columns_that_are_not_there(
    tmp_path: Path, columns: Mapping[str, str], options: Mapping[str, Any], message: str
) -> None:
    path = written(tmp_path, "rows.csv", ROWS)
    with Journal(f"sqlite:///{tmp_path / 'j.db'}") as journal, pytest.raises(SettingsError, match=message):
        import_events(journal, [path], columns, **options)


def test_needed_columns_are_named_all_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.csv", "item,x\n1,2\n")
    with Journal(f"sqlite:///{tmp_path / 'j.db'}") as journal:
        with pytest.raises(SettingsError) as found:
            import_events(journal, [path], {})
        assert len(found.value.problems) == 3
        assert "or give all events one with --type" in str(found.value)
        assert "without it, rows need an id" in str(found.value)


def test_a_file_without_an_event_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.csv", "user,item,type,time\n" + "ann,1,view,soon\n" * 30)
    with Journal(f"sqlite:///{tmp_path / 'j.db'}") as journal:
        with pytest.raises(DataError, match="no event among 30 rows: 20 problems") as found:
            import_events(journal, [path], {})
        assert len(found.value.problems) == 20


def test_a_forgotten_person_does_not_come_back(url: str, tmp_path: Path) -> None:
    path = written(tmp_path, "rows.csv", "user,item,type,time\nann,1,view,5\nbob,1,view,5\n")
    with Journal(url) as journal:
        values = {"digest": journal.digest_of("ann"), "requested_at": 0}
        journal.write(lambda connection: connection.execute(deletion.insert().values(values)))
        found = import_events(journal, [path], {})
        assert found.counts == {"accepted": 1, "duplicate": 0, "refused": 1}
        assert found.refusals == [f"{path}: row 1: user: was forgotten; the journal takes no events of this user"]


def test_the_list_of_forgotten_people_moves_with_the_events(url: str, tmp_path: Path) -> None:
    path = written(tmp_path, "rows.csv", "user,item,type,time\nann,1,view,5\nbob,1,view,5\n")
    first, second = (f"sqlite:///{tmp_path / name}.db" for name in ("first", "second"))
    with Journal(first) as before:
        values = {"digest": before.digest_of("ann"), "requested_at": 0}
        before.write(lambda connection: connection.execute(deletion.insert().values(values)))
    api.journal_import(second, [path], forgotten=first, progress=False)
    for _ in range(2):  # taken twice, it is the same list
        found = api.journal_import(url, [path], forgotten=second, progress=False).found
    assert found.counts == {"accepted": 0, "duplicate": 1, "refused": 1}
    with Journal(url) as journal, Journal(first) as before:
        assert journal.store([Event("e", "ann", "view", "2", None, 9, 9)]) == ["forgotten"]
        assert journal.forgotten_among(["ann", "bob"]) == {"ann"}
        assert journal.id != before.id, "its numbers of events are its own"
        journal.write(lambda connection: connection.execute(setting.update().values(value="x").where(of_others)))
        with pytest.raises(DataError, match="the key by which forgotten people are known is lost or damaged; restore"):
            journal.forgotten_among(["ann"])


# --- out -------------------------------------------------------------------------------------------------------------


def of_days(journal: Journal, days: Sequence[int]) -> None:
    """Events and answers that were received on these days."""
    for number, day in enumerate(days):
        time = day * DAY + 5
        context = '{"app": "web"}' if number == 0 else None
        journal.store([Event(f"e{number}", "ann", "view", "7", 1.5, time - DAY, time, context=context)])
        shown = Exposure(f"r{number}", "ann", time, "m", "0:a", {}, 0, ["7", "8"], 9, [0.5, 0.25] if number else None)
        journal.store((), [shown])


def test_days_of_receipt_are_folders_that_duckdb_reads(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Journal(url) as journal:
        of_days(journal, [20_000, 20_001, 20_000])
        both = {"2024-10-04": 2, "2024-10-05": 1}
        assert export_days(journal, out) == {"events": both, "exposures": both}
        assert export_days(journal, out, since=date(2024, 10, 5))["events"] == {"2024-10-05": 1}
        assert export_days(journal, out, until=date(2024, 10, 4)) == {"events": {}, "exposures": {}}
    assert sorted(each.name for each in (out / "events").iterdir()) == ["day=2024-10-04", "day=2024-10-05"]
    read = f"read_parquet('{out}/%s/**/*.parquet', hive_partitioning = true)"
    events = f"SELECT id, user, item, value, epoch_us(time), day FROM {read % 'events'} ORDER BY seq"
    rows = duckdb.sql(events).fetchall()
    assert [each[0] for each in rows] == ["e0", "e1", "e2"]
    assert rows[1][1:4] == ("ann", "7", 1.5)
    assert rows[1][4:] == (20_000 * DAY + 5, date(2024, 10, 5))
    shown = duckdb.sql(f"SELECT request, items, propensities FROM {read % 'exposures'} ORDER BY request").fetchall()
    assert shown == [("r0", ["7", "8"], None), ("r1", ["7", "8"], [0.5, 0.25]), ("r2", ["7", "8"], [0.5, 0.25])]


def test_an_export_can_be_imported_and_prepared(tmp_path: Path) -> None:
    out, other = tmp_path / "out", f"sqlite:///{tmp_path / 'other.db'}"
    with Journal(f"sqlite:///{tmp_path / 'j.db'}") as journal:
        of_days(journal, [20_000, 20_001, 20_002, 20_003])
        export_days(journal, out)
        before = stored(journal)
    files = sorted((out / "events").rglob("*.parquet"))
    with Journal(other) as journal:
        import_events(journal, files, {}, context=["context"])
        after = stored(journal)
    kept = ("event_id", "subject", "type", "item", "value", "occurred_at", "request_id", "position", "context")
    assert [[each[name] for name in kept] for each in before] == [[each[name] for name in kept] for each in after]
    made = api.prepare(out / "events", tmp_path / "data", settings={"num_negatives": 0}, progress=False)
    told = made.prepared["inferred"]
    assert any("folders day=2024-10-04 to day=2024-10-07, whose names are no columns" in each for each in told)
