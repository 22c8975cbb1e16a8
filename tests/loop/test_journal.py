"""The journal on SQLite and PostgreSQL: what is stored once, in which order, and what is refused."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest
import sqlalchemy as sa

from recspec.base.errors import DataError, SettingsError
from recspec.loop import Event, Exposure, Journal, now_us, read_events
from recspec.loop import journal as tables
from recspec.loop.upkeep import consumers_of

EVENT = Event("e1", "ann", "view", "sku-1", None, 1_000, 2_000)


def of(number: int, **changes: object) -> Event:
    return replace(EVENT, event_id=f"e{number}", **changes)  # type: ignore[arg-type]


def test_an_event_is_stored_once(url: str) -> None:
    with Journal(url) as journal:
        assert journal.store([EVENT, EVENT, of(2)]) == ["accepted", "duplicate", "accepted"]
        assert journal.store([replace(EVENT, received_at=9_000)]) == ["duplicate"]
        assert journal.store([replace(EVENT, item="sku-2"), of(3)]) == ["conflict", "accepted"]
        assert journal.store([of(4), replace(of(4), type="purchase")]) == ["accepted", "conflict"]
        assert journal.store([]) == []
    with Journal(url, read_only=True) as journal:
        (block,) = journal.events()
        assert block["event_id"].to_pylist() == ["e1", "e2", "e3", "e4"]
        assert block["type"].to_pylist() == ["view"] * 4
        assert journal.newest_seq() == block["seq"].to_pylist()[-1]


def test_an_event_is_the_same_again_where_the_time_of_receipt_stood_for_its_own(url: str) -> None:
    with Journal(url) as journal:
        assert journal.store([replace(EVENT, occurred_at=5, received_at=5)]) == ["accepted"]
        assert journal.store([replace(EVENT, occurred_at=9, received_at=9)]) == ["duplicate"]
        assert journal.store([replace(EVENT, occurred_at=7, received_at=9)]) == ["duplicate"]  # says it now
        assert journal.store([of(2, occurred_at=5)]) == ["accepted"]
        assert journal.store([of(2, occurred_at=6)]) == ["conflict"]


def test_the_longest_texts_fit_into_the_indexes(url: str) -> None:
    numbers = random.Random(0)
    long = "".join(chr(numbers.randrange(0x20000, 0x2A000)) for _ in range(500))  # 2,000 bytes that no one compresses
    sent = {"id": long, "user": long, "item": long, "type": "view", "request": long}
    with Journal(url) as journal:
        found = read_events([sent, {**sent, "id": long[:-1] + "'", "value": 0.1 + 0.2}], 5)
        assert journal.store(found.events) == ["accepted", "accepted"]
        assert journal.store(found.events) == ["duplicate", "duplicate"]


def test_histories_are_in_the_order_of_time_then_of_arrival(url: str) -> None:
    with Journal(url) as journal:
        journal.store([of(1, occurred_at=30), of(2, occurred_at=10), of(3, occurred_at=10, subject="bob")])
        journal.store([of(4, occurred_at=10)])
        seqs, _, _, _, times = zip(*journal.history("ann", most=9), strict=True)
        assert times == (10, 10, 30)
        assert seqs[0] < seqs[1]
        assert [times for *_, times in journal.history("bob", most=9)] == [10]
        assert journal.history("nobody", most=9) == []
        assert [each[0] for each in journal.history("ann", most=9, after=seqs[0])] == [seqs[1]]
        assert [each[0] for each in journal.history("ann", most=9, until=seqs[0])] == [seqs[0], seqs[2]]


def test_blocks_hold_every_event_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_ROWS", 3)
    with Journal(url) as journal:
        journal.store([of(number) for number in range(6)])
        blocks = list(journal.events())
        assert [len(each) for each in blocks] == [3, 3]
        ids, seqs = (pa.chunked_array([each[name] for each in blocks]).to_pylist() for name in ("event_id", "seq"))
        assert ids == [f"e{number}" for number in range(6)]
        (middle,) = journal.events(seqs[1], seqs[3])
        assert middle["event_id"].to_pylist() == ["e2", "e3"]


def test_writers_of_several_threads_lose_nothing_and_readers_skip_nothing(url: str) -> None:
    with Journal(url) as journal:
        read: list[int] = []
        done = threading.Event()

        def follow() -> None:
            last = 0
            while True:
                ended = done.is_set()
                for block in journal.events(last):
                    read.extend(block["seq"].to_pylist())
                    last = read[-1]
                if ended:
                    return

        def write(thread: int) -> None:
            for number in range(20):
                assert journal.store([of(1_000 * thread + number)]) == ["accepted"]

        reader = threading.Thread(target=follow)
        writers = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
        for each in (reader, *writers):
            each.start()
        for each in writers:
            each.join()
        done.set()
        reader.join()
        assert len(read) == len({*read}) == 80
        assert read == sorted(read)


def _append(url: str, first: int) -> None:
    with Journal(url) as journal:
        for number in range(first, first + 20):
            assert journal.store([of(number)]) == ["accepted"]


def test_writers_of_several_processes_take_turns(url: str) -> None:
    Journal(url).close()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_append, args=(url, 100 * number)) for number in range(3)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0, 0, 0]
    with Journal(url, read_only=True) as journal:
        assert sum(len(each) for each in journal.events()) == 60


def test_a_clock_that_is_set_back_a_little_stands_still(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(seconds: int) -> int:
        monkeypatch.setattr("time.time_ns", lambda: (4_000_000_000 + seconds) * 1_000_000_000)
        return now_us() - 4_000_000_000_000_000

    at(-10_000)
    assert (at(0), at(60), at(0), at(30), at(61)) == (0, 60_000_000, 60_000_000, 60_000_000, 61_000_000)
    assert at(-3_600) == -3_600_000_000, "an hour ahead was wrong"
    with Journal(url) as journal:
        for number, seconds in enumerate((0, 60, 0, 1)):
            at(seconds)
            journal.store(read_events([{"user": "ann", "item": number, "type": "view"}], now_us()).events)
        assert [row[2] for row in journal.history("ann", most=9)] == ["0", "1", "2", "3"]


def test_consumers_and_exposures(url: str) -> None:
    shown = Exposure("r1", "ann", 5, "shop", "0:abc", {"temperature": 1}, 7, ["a", "b"], 200, [0.5, 0.25])
    with Journal(url) as journal:
        assert consumers_of(journal) == {}
        journal.advance("updates", 3)
        journal.advance("updates", 8)
        assert consumers_of(journal) == {"updates": 8}
        journal.store((), [shown, replace(shown, request_id="r2", propensities=None)])
        journal.store((), [replace(shown, items=["c"])])
        journal.store((), [])
        (block,) = journal.exposures()
        assert block["items"].to_pylist() == ['["a", "b"]', '["a", "b"]']
        assert block["propensities"].to_pylist() == ["[0.5, 0.25]", None]


def test_events_of_a_forgotten_person_are_refused(url: str) -> None:
    with Journal(url) as journal:
        values = {"digest": journal.digest_of("ann"), "requested_at": 0}
        journal.write(lambda connection: connection.execute(sa.insert(tables.deletion).values(values)))
        assert journal.store([EVENT, of(2, subject="bob")]) == ["forgotten", "accepted"]
    with Journal(url) as journal:  # the key of the digests stays
        assert journal.store([EVENT]) == ["forgotten"]
        assert journal.newest_seq() > 0
        assert [name for block in journal.events() for name in block["subject"].to_pylist()] == ["bob"]


def test_a_failed_change_leaves_nothing(url: str) -> None:
    def fail(connection: sa.Connection) -> None:
        connection.execute(sa.insert(tables.consumer).values(name="updates", seq=1))
        raise RuntimeError

    with Journal(url) as journal:
        with pytest.raises(RuntimeError):
            journal.write(fail)
        assert consumers_of(journal) == {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("journal.db", "found no URL of a database; expected sqlite:///FILE"),
        ("sqlite://", "found 'sqlite://'; expected sqlite:///FILE"),
        ("sqlite:///:memory:", "is lost at the end"),
        ("sqlite:///a.db?vfs=x", "expected sqlite:///FILE"),
        ("mysql://u:secret@h/d", r"found 'mysql://u:\*\*\*@h/d'; expected sqlite:///FILE or postgresql"),
    ],
)
def test_other_urls_are_refused(bad: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Journal(bad)


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such journal"):
        Journal(f"sqlite:///{tmp_path / 'none.db'}", read_only=True)
    with pytest.raises(DataError, match="there is no folder"):
        Journal(f"sqlite:///{tmp_path / 'none' / 'journal.db'}")
    (tmp_path / "text.db").write_text("no database" * 100)
    with pytest.raises(DataError, match="not a database"):
        Journal(f"sqlite:///{tmp_path / 'text.db'}")
    (tmp_path / "empty.db").write_bytes(b"")
    with pytest.raises(DataError, match="holds no journal"):
        Journal(f"sqlite:///{tmp_path / 'empty.db'}", read_only=True)


def test_a_path_that_can_be_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.db")
    (tmp_path / "loop.db").symlink_to(tmp_path / "loop.db")
    (tmp_path / "lost.db").symlink_to(tmp_path / "none" / "x.db")
    told = {
        ".": "is a folder",
        "pipe.db": "is a named pipe",
        "a%00b": "can't be opened",
        "x" * 300: "can't be",
        "lost.db": "there is no folder",
        "loop.db": "can't be opened|unable to open",
        "a?b.db": "found 'sqlite:///",
    }
    for name, message in told.items():
        with pytest.raises((DataError, SettingsError), match=message) as found:
            Journal(f"sqlite:///{tmp_path}/{name}")
        assert "\n" not in str(found.value)


def test_every_name_of_a_file_leads_to_one_lock(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to(tmp_path / "here")
    (tmp_path / "link.db").symlink_to(tmp_path / "here" / "j.db")
    for name in ("here/j.db", "there/j.db", "link.db", "here/../here/j.db"):
        with Journal(f"sqlite:///{tmp_path}/{name}") as journal:
            journal.store([EVENT])
            assert journal.newest_seq() == 1
    assert sorted(each.relative_to(tmp_path).as_posix() for each in tmp_path.rglob("*.lock")) == ["here/j.db.lock"]


@pytest.mark.parametrize("name", ["event", "setting", "consumer"])
def test_the_tables_of_another_application_are_left_alone(url: str, name: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE TABLE {name} (a INTEGER)"))
    with pytest.raises(DataError, match=f"called '{name}'; give the journal a database, or a schema, of its own"):
        Journal(url)
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == [name]
    engine.dispose()


@pytest.mark.parametrize("value", [None, "no key", ""])
def test_a_journal_without_its_key_is_refused(url: str, value: str | None) -> None:
    own = tables.setting.c.name == "key"
    change = sa.delete(tables.setting).where(own) if value is None else sa.update(tables.setting).where(own)
    with Journal(url) as journal:
        journal.write(lambda connection: connection.execute(change if value is None else change.values(value=value)))
    with pytest.raises(DataError, match="the key by which forgotten people are known is lost or damaged"):
        Journal(url)


def test_a_journal_of_another_version_is_refused(url: str) -> None:
    with Journal(url) as journal:
        later = sa.update(tables.setting).where(tables.setting.c.name == "schema").values(value="9")
        journal.write(lambda connection: connection.execute(later))
    with pytest.raises(DataError, match="is a journal of version 9; this recspec reads version 1"):
        Journal(url)


def test_a_server_that_does_not_answer_is_told_without_the_password() -> None:
    with pytest.raises(DataError, match="can't be reached") as found:
        Journal("postgresql+psycopg://ann:secret@127.0.0.1:1/none")
    assert "secret" not in str(found.value)


def test_paths_with_marks_of_a_uri(tmp_path: Path) -> None:
    folder = tmp_path / "a?b#c%20d"
    folder.mkdir()
    with Journal(f"sqlite:///{quote(str(folder))}/j.db") as journal:
        assert journal.store([EVENT]) == ["accepted"]
