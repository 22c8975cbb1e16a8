"""The writer of a server: what waits is stored together, refused when too much waits, and stored at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest

from recspec.base.errors import RequestError
from recspec.loop import Event, Exposure, Journal, JournalWriter, Outcome, RemoteWriter, store_rows

EVENT = Event("e1", "ann", "view", "sku-1", None, 1_000, 2_000)
SHOWN = Exposure("r1", "ann", 5, "shop", "0:abc", {"temperature": 1}, 7, ["a", "b"], 200, [0.5, 0.25])


def of(number: int, **changes: object) -> Event:
    return replace(EVENT, event_id=f"e{number}", **changes)  # type: ignore[arg-type]


class Gated(Journal):
    """A journal whose writes wait for the test."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate, self.begun, self.groups = threading.Event(), threading.Event(), list[int]()

    def store(self, events: Sequence[Event], exposures: Sequence[Exposure] = ()) -> list[Outcome]:
        self.begun.set()
        self.gate.wait()
        self.groups.append(len(events) + len(exposures))
        return super().store(events, exposures)


def test_what_waits_is_stored_together(url: str) -> None:
    seen: list[int] = []

    async def run() -> None:
        journal = Gated(url)
        writer = JournalWriter(journal, max_waiting=100, observed=lambda rows, _: seen.append(rows))
        calls = [asyncio.create_task(writer.store([of(0)]))]
        await asyncio.to_thread(journal.begun.wait)
        calls += [asyncio.create_task(writer.store([of(number), of(0)], [SHOWN])) for number in (1, 2)]
        await asyncio.sleep(0)
        assert writer.waiting == 7
        journal.gate.set()
        assert await asyncio.gather(*calls) == [["accepted"], ["accepted", "duplicate"], ["accepted", "duplicate"]]
        assert writer.waiting == 0
        assert journal.groups == seen == [1, 6]
        await writer.close()

    asyncio.run(run())
    with Journal(url, read_only=True) as journal:
        assert [each for block in journal.events() for each in block["event_id"].to_pylist()] == ["e0", "e1", "e2"]
        assert [each for block in journal.exposures() for each in block["request_id"].to_pylist()] == ["r1"]


def test_too_much_is_refused_and_the_end_stores_what_waits(url: str) -> None:
    async def run() -> None:
        journal = Gated(url)
        writer = JournalWriter(journal, max_waiting=2)
        first = asyncio.create_task(writer.store([of(number) for number in range(3)]))  # alone, any number
        await asyncio.to_thread(journal.begun.wait)
        with pytest.raises(RequestError, match="3 events and answers wait for the journal; try again") as refused:
            await writer.store([of(9)])
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        closing = asyncio.create_task(writer.close())
        await asyncio.sleep(0)
        first.cancel()  # its client has gone
        journal.gate.set()
        await closing
        with pytest.raises(RequestError, match="the server stops; send the events again"):
            await writer.store([of(9)])

    asyncio.run(run())
    with Journal(url, read_only=True) as journal:
        assert sum(map(len, journal.events())) == 3


def test_a_database_that_refuses_is_a_503_and_the_next_group_is_stored(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        with Gated(url) as journal:
            journal.gate.set()
            writer = JournalWriter(journal, max_waiting=9)
            broken: Any = replace(EVENT, type=None)
            with pytest.raises(RequestError, match="the server's log says why; send them again") as refused:
                await writer.store([broken])
            assert refused.value.status == 503
            assert await writer.store([EVENT]) == ["accepted"]
            await writer.close()

    asyncio.run(run())
    assert "events are refused: " in caplog.text


def test_events_cross_processes_as_json(url: str) -> None:
    async def run() -> None:
        writer = JournalWriter(Journal(url), max_waiting=9)

        async def ask(what: str, value: Any) -> Any:
            assert what == "store"
            return orjson.loads(orjson.dumps(await store_rows(writer, orjson.loads(orjson.dumps(value)))))

        remote = RemoteWriter(ask, max_waiting=1)
        whole = of(2, value=2.5, request_id="r1", position=3, context="{}")
        assert await remote.store([EVENT, whole, EVENT], [SHOWN]) == ["accepted", "accepted", "duplicate"]
        assert await writer.store([whole]) == ["duplicate"]
        remote.waiting = 1
        with pytest.raises(RequestError, match="1 events and answers wait"):
            await remote.store([EVENT])
        await remote.close()
        await writer.close()

    asyncio.run(run())
    with Journal(url, read_only=True) as journal:
        (block,) = journal.exposures()
        assert block["items"].to_pylist() == ['["a", "b"]']
