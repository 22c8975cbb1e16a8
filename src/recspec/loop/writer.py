"""The writer of a server's journal: what waits is stored in one transaction, because each one waits for the disk.

Where several processes serve from one SQLite file, one of them writes, and the others send it their events.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from recspec.base.errors import RecspecError, RequestError
from recspec.loop.events import Event
from recspec.loop.journal import Exposure, Journal, Outcome

GROUP_ROWS = 1_000
"""Most events and answers of a transaction; a request with more is one transaction."""

log = logging.getLogger("recspec.serve")

Observed = Callable[[int, float], object]
"""Called on the event loop with the rows and the seconds of each transaction."""


class Writer(Protocol):
    """What stores events and answers for a server."""

    waiting: int
    """Events and answers that wait to be stored."""

    async def store(self, events: Sequence[Event], exposures: Sequence[Exposure] = ()) -> list[Outcome]:
        """The outcome of each event; what was given is durable then.

        Raises:
            RequestError: 503 if too much waits, or if the database refuses. In the second case the events are stored
                if the connection broke after the commit; sent again, they are duplicates.
        """

    async def close(self) -> None:
        """Store what waits, and take nothing more."""


@dataclass(eq=False)
class _Waiting:
    """A call that waits; `size` is its number of rows."""

    events: Sequence[Event]
    exposures: Sequence[Exposure]
    stored: asyncio.Future[list[Outcome]]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.events) + len(self.exposures)


class JournalWriter:
    """A thread that stores what waits. Used on one event loop; it closes the journal at its end."""

    def __init__(self, journal: Journal, *, max_waiting: int, observed: Observed | None = None) -> None:
        """Start the thread.

        Args:
            max_waiting: Most events and answers that wait; further ones are refused. A call alone is always taken.
        """
        self._journal, self._max_waiting, self._observed = journal, max_waiting, observed
        self._loop = asyncio.get_running_loop()
        self._calls: list[_Waiting] = []
        self._changed = threading.Condition()
        self._closing = False
        self.waiting = 0
        self._thread = threading.Thread(target=self._run, name="recspec-journal", daemon=True)
        self._thread.start()

    async def store(self, events: Sequence[Event], exposures: Sequence[Exposure] = ()) -> list[Outcome]:
        """As `Writer.store`."""
        call = _Waiting(events, exposures, self._loop.create_future())
        refuse_when_full(self.waiting, call.size, self._max_waiting)
        with self._changed:
            if self._closing:
                raise RequestError("the server stops; send the events again", status=503)
            self._calls.append(call)
            self._changed.notify()
        self.waiting += call.size
        return await call.stored

    async def close(self) -> None:
        """As `Writer.close`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while group := self._next():
            began = time.perf_counter()
            try:
                found: list[Outcome] | Exception = self._journal.store(
                    [event for call in group for event in call.events],
                    [exposure for call in group for exposure in call.exposures],
                )
            except Exception as error:
                log.warning("events are refused: %s", error, exc_info=not isinstance(error, RecspecError))
                found = error
            self._loop.call_soon_threadsafe(self._resolve, group, found, time.perf_counter() - began)
        self._journal.close()

    def _next(self) -> list[_Waiting]:
        """Calls to store together; none at the end."""
        with self._changed:
            while not self._calls and not self._closing:
                self._changed.wait()
            taken, rows = 0, 0
            while taken < len(self._calls) and (not taken or rows + self._calls[taken].size <= GROUP_ROWS):
                rows += self._calls[taken].size
                taken += 1
            group, self._calls = self._calls[:taken], self._calls[taken:]
            return group

    # --- on the event loop --------------------------------------------------------------------------------------------

    def _resolve(self, group: list[_Waiting], found: list[Outcome] | Exception, seconds: float) -> None:
        rows = sum(call.size for call in group)
        self.waiting -= rows
        if self._observed is not None:
            self._observed(rows, seconds)
        start = 0
        for call in group:
            if call.stored.done():  # its client has gone; the events are stored all the same
                pass
            elif isinstance(found, Exception):
                message = "the journal can't store events now, and the server's log says why; send them again"
                call.stored.set_exception(RequestError(message, status=503, retry_after=1))
            else:
                call.stored.set_result(found[start : start + len(call.events)])
            start += len(call.events)


class RemoteWriter:
    """Sends events and answers to the process that writes, through `ask("store", ...)`; used on one event loop."""

    def __init__(self, ask: Callable[[str, Any], Awaitable[Any]], *, max_waiting: int) -> None:
        self._ask, self._max_waiting = ask, max_waiting
        self.waiting = 0

    async def store(self, events: Sequence[Event], exposures: Sequence[Exposure] = ()) -> list[Outcome]:
        """As `Writer.store`."""
        size = len(events) + len(exposures)
        refuse_when_full(self.waiting, size, self._max_waiting)
        self.waiting += size
        try:
            found: list[Outcome] = await self._ask("store", [[*map(_row, events)], [*map(_row, exposures)]])
            return found
        finally:
            self.waiting -= size

    async def close(self) -> None:
        """Nothing waits once every request is answered."""


async def store_rows(writer: Writer, sent: Sequence[Sequence[Sequence[Any]]]) -> list[Outcome]:
    """The answer to `ask("store", sent)`."""
    events, exposures = sent
    return await writer.store([Event(*each) for each in events], [Exposure(*each) for each in exposures])


def _row(given: Event | Exposure) -> list[Any]:
    return [getattr(given, each.name) for each in fields(given)]


def refuse_when_full(waiting: int, size: int, most: int) -> None:
    """503 if `size` more rows would be too many; into an empty queue any number goes."""
    if waiting and waiting + size > most:
        message = f"{waiting:,} events and answers wait for the journal; try again"
        raise RequestError(message, status=503, retry_after=1)
