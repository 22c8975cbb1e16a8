"""What a journal is said to hold, what is found to be wrong in it, and what is removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from recspec.base.errors import DataError
from recspec.loop import Event, Exposure, Journal, forget, now_us, prune_journal, summarize, verify_journal
from recspec.loop import journal as tables

DAY = 86_400_000_000
EVENT = Event("e1", "ann", "view", "sku-1", 2.0, 1_000, 2_000)
SHOWN = Exposure("r1", "ann", 5, "shop", "0:abc", {"temperature": 1}, 0, ["a", "b"], 200, [0.5, 0.25])


def of(number: int, **changes: object) -> Event:
    return replace(EVENT, event_id=f"e{number}", **changes)  # type: ignore[arg-type]


def change(journal: Journal, statement: sa.Update | sa.Insert) -> None:
    journal.write(lambda connection: connection.execute(statement))


def test_what_a_journal_holds(url: str) -> None:
    with Journal(url) as journal:
        found = summarize(journal)
        assert (found.newest_seq, found.newest_received_at, found.days, found.consumers) == (0, None, [], {})
        journal.store([EVENT, of(2, type="buy"), of(3, received_at=DAY + 7)])
        journal.store((), [SHOWN])
        journal.advance("updates", 2)
        found = summarize(journal)
        assert found.days == [("1970-01-02", "view", 1), ("1970-01-01", "buy", 1), ("1970-01-01", "view", 1)]
        assert (found.newest_received_at, found.consumers) == (DAY + 7, {"updates": 2})
        assert (found.rows["event"], found.rows["exposure"], found.pruned) == (3, 1, 0)
        assert found.size_bytes > 10_000


def test_a_whole_journal(url: str) -> None:
    with Journal(url) as journal:
        journal.store([EVENT, of(2, type="impression", item=None, request_id="r1"), of(3, request_id="gone")])
        journal.store((), [SHOWN, replace(SHOWN, request_id="r2", propensities=None)])
        found = verify_journal(journal)
        assert (found.events, found.exposures, found.unknown_requests) == (3, 2, 1)


def test_a_journal_is_whole_after_somebody_was_forgotten(url: str, tmp_path: Path) -> None:
    with Journal(url) as journal:
        journal.store([EVENT, of(2, subject="ben"), of(3, subject="eve")])
        forget("ann", tmp_path, journal)
        assert journal.store([of(4), of(5, subject="ben")]) == ["forgotten", "accepted"]
        assert verify_journal(journal).events == 3


def test_every_problem_is_named(url: str) -> None:
    exposed, held = tables.exposure, tables.event
    with Journal(url) as journal:
        journal.store([of(number) for number in range(1, 31)])
        journal.store((), [replace(SHOWN, request_id=f"r{number}") for number in range(5)])
        journal.advance("updates", 99)
        change(journal, sa.insert(tables.deletion).values(digest=journal.digest_of("ann"), requested_at=0))
        change(journal, sa.update(held).where(held.c.event_id == "e1").values(occurred_at=-1, context="[1]", item=None))
        for name, value in (("items", "[1]"), ("propensities", "[0.5]"), ("policy", "none"), ("history_seq", 31)):
            at = ["items", "propensities", "policy", "history_seq"].index(name)
            change(journal, sa.update(exposed).where(exposed.c.request_id == f"r{at}").values({name: value}))
        with pytest.raises(DataError) as found:
            verify_journal(journal)
    problems = "\n".join(found.value.problems)
    for expected in (
        "a consumer is ahead of the events (30): updates (99)",
        "the time is out of range: event 1",
        "the context is no JSON object: event 1",
        "the user, type or item is missing: event 1",
        "the user was forgotten: event 1, event 2, ",
        "event 20 and 10 more",
        "items are no list of texts: exposure 1",
        "propensities are no chance for each item: exposure 2",
        "the policy is no JSON object: exposure 3",
        "history_seq is ahead of the events (30): exposure 4",
    ):
        assert expected in problems, problems


def test_a_damaged_file_is_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged") / "j.db"
    with Journal(f"sqlite:///{path}") as journal:
        journal.store([of(number) for number in range(2_000)])
    content = bytearray(path.read_bytes())
    content[-3_000:-1_000] = b"\xff" * 2_000
    path.write_bytes(content)
    with Journal(f"sqlite:///{path}", read_only=True) as journal, pytest.raises(DataError, match=r"damaged|malformed"):
        verify_journal(journal)


def test_old_days_go_and_their_numbers_stay(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.loop.upkeep.PRUNED_AT_ONCE", 2)
    today = now_us() // DAY
    with Journal(url) as journal:
        old = [of(number, received_at=(today - 9) * DAY + number) for number in range(5)]
        journal.store(
            [*old, of(5, received_at=(today - 9) * DAY, type="buy", value=None), of(6, received_at=today * DAY)]
        )
        journal.store((), [SHOWN, replace(SHOWN, request_id="r2", served_at=today * DAY)])
        assert prune_journal(journal) == prune_journal(journal, events_days=9, exposures_days=30_000)
        assert prune_journal(journal) == prune_journal(journal, events_days=10**30, exposures_days=10**12)
        done = prune_journal(journal, exposures_days=90)
        assert (done.events, done.exposures, done.unread) == (0, 1, 0)
        journal.advance("updates", 3)
        journal.advance("drift", 7)
        done = prune_journal(journal, events_days=8)
        assert (done.events, done.unread) == (3, 3)
        journal.advance("updates", 7)
        done = prune_journal(journal, events_days=8)
        assert (done.events, done.unread) == (3, 0)
        (block,) = journal.events()
        assert block["event_id"].to_pylist() == ["e6"]
        kept = journal.rows(sa.select(tables.daily.c.type, tables.daily.c.events, tables.daily.c.value))
        assert sorted(map(tuple, kept)) == [("buy", 1, 0.0), ("view", 5, 10.0)]
        assert summarize(journal).pruned == 6
        verify_journal(journal)


def test_a_journal_whose_events_are_all_pruned_is_whole(url: str) -> None:
    with Journal(url) as journal:
        journal.store([EVENT, of(2)])
        journal.store((), [replace(SHOWN, history_seq=2, served_at=now_us())])
        journal.advance("updates", 2)
        assert prune_journal(journal, events_days=1).events == 2
        assert verify_journal(journal).events == 0
        journal.store([of(3)])
        assert journal.newest_seq() == 3
