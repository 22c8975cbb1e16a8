"""Dynamic batching: requests of one model that wait at the same time are computed together, each gets its own rows.

One thread computes a model's batches, one after the other. A request that finds it idle goes at once (or waits up to a
delay for others, where one is set); those that come meanwhile wait, and are joined up to a number of rows, first come
first. Every request is checked before it gets here; should a joined batch fail nevertheless, each is computed alone.

A computation that runs longer than any request may wait is given up: its thread is left to itself, and a fresh one
answers the requests behind it. Threads are daemons, so that no computation keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from recspec import config
from recspec.errors import RequestError
from recspec.telemetry import Telemetry

Arrays = dict[str, NDArray[Any]]
"""Name -> (B, width): the rows of a request or of a batch."""

T = TypeVar("T")

MAX_GIVEN_UP = 1
"""Computations of a model that were given up and still run; while there are as many, its requests are refused."""
JOIN_SECONDS = 1.0
"""For an idle thread to end, which takes microseconds."""
MAX_SIZES = 256
"""Batch sizes that statistics tell apart; clients choose the sizes, so their number has to be bounded."""

log = logging.getLogger("recspec.serve")


class Limits(config.Settings):
    """What a server takes on; a request beyond a limit is refused with the status that says so."""

    max_batch_rows: int = Field(4096, ge=1, description="rows that are computed together")
    max_delay_ms: float = Field(
        0.0, ge=0, le=10_000, description="longest that an idle model waits for others to join; 0: it never waits"
    )
    max_queue: int = Field(512, ge=1, description="requests of a model that wait; more are refused with 503")
    max_rows: int = Field(65_536, ge=1, description="rows of a request; more are refused with 413")
    max_body_bytes: int = Field(32 << 20, ge=1024, description="of a request; a larger one is refused with 413")
    max_requests: int = Field(1024, ge=1, description="requests answered at once, by protocol; more get 503")
    max_held_bytes: int = Field(512 << 20, ge=1024, description="of all requests being answered; more get 503")
    timeout_seconds: float = Field(30.0, gt=0, le=3600, description="from a request's head to its answer, else 504")
    retry_seconds: int = Field(1, ge=0, description="what Retry-After says where a queue is full")


@dataclass
class Duration:
    """How often something happened, and nanoseconds in all."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """One more time, or several."""
        self.count += count
        self.ns += int(seconds * 1e9)


@dataclass(frozen=True)
class Spent:
    """Seconds of joining the inputs of a batch, computing it, and dividing its outputs."""

    join: float
    infer: float
    split: float


@dataclass
class Compute:
    """The three parts of a computation; perf_analyzer ends where their counts differ."""

    join: Duration = field(default_factory=Duration)
    infer: Duration = field(default_factory=Duration)
    split: Duration = field(default_factory=Duration)

    def add(self, spent: Spent, count: int = 1) -> None:
        """One more batch; or as many requests, that shared one."""
        self.join.add(spent.join, count)
        self.infer.add(spent.infer, count)
        self.split.add(spent.split, count)


@dataclass
class Statistics:
    """What a model has done since it was loaded; the fields of the protocol's statistics extension."""

    rows: int = 0
    batches: int = 0
    last_ms: int = 0
    """Milliseconds since 1970 of the last answer."""
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute: Compute = field(default_factory=Compute)
    by_rows: dict[int, Compute] = field(default_factory=dict)
    """Rows of a batch -> how often, how long."""


@dataclass(eq=False)
class _Waiting:
    rows: int
    work: Arrays | Callable[[], object]
    answer: asyncio.Future[Any]
    since: float


@dataclass(eq=False)
class _Running:
    """A batch that is being computed."""

    batch: Sequence[_Waiting]
    started: float
    overdue: asyncio.TimerHandle | None = None


class _Worker:
    """A thread that does one thing after the other. A daemon: whatever it does, the process can end."""

    def __init__(self, name: str, initialize: Callable[[], None]) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._initialize = initialize
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Do something after all that was submitted before."""
        self._work.put(work)

    def end(self) -> None:
        """End the thread once it has done what it was given."""
        self._work.put(None)

    def join(self) -> None:
        """End an idle thread, and wait until it has ended: the interpreter can't end well while threads run C++."""
        self.end()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        self._initialize()
        while (work := self._work.get()) is not None:
            work()


class Batcher:
    """The queue before one model, and the thread that computes it. Made and used on an event loop."""

    def __init__(
        self,
        run: Callable[[Arrays], Arrays],
        limits: Limits,
        *,
        name: str = "model",
        telemetry: Telemetry | None = None,
        initialize: Callable[[], None] | None = None,
    ) -> None:
        self.limits, self.name, self.statistics = limits, name, Statistics()
        self._run, self._telemetry = run, telemetry or Telemetry()
        self._initialize = initialize or _nothing
        self._worker = _Worker(f"model-{name}", self._initialize)
        self._queue: dict[_Waiting, None] = {}
        self._rows = 0
        self._running: _Running | None = None
        self._given_up = 0
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def given_up(self) -> int:
        """Computations that were given up and still run."""
        return self._given_up

    async def infer(self, inputs: Arrays, rows: int, *, timeout: float | None = None) -> Arrays:
        """The outputs of a checked request's rows, computed with whatever else waits.

        Raises:
            RequestError: 503 where the queue is full, 504 where time runs out; the request is then taken back.
        """
        answer: Arrays = await self._wait(inputs, rows, timeout)
        return answer

    async def call(self, function: Callable[[], T], *, timeout: float | None = None) -> T:
        """Call a function on the model's thread, in its turn, within the same limits; it is joined with nothing.

        Raises:
            RequestError: as `infer`; and whatever the function raises.
        """
        answer: T = await self._wait(function, 1, timeout)
        return answer

    async def close(self) -> None:
        """Wait until everything is answered, and end the thread. Nothing may be asked afterwards."""
        await self._idle.wait()
        self._worker.join()

    def _refuse_if_full(self) -> None:
        """Refuse what would wait behind a full queue, or behind computations that do not end."""
        if self._given_up > MAX_GIVEN_UP:
            raise self._stuck()
        if len(self._queue) >= self.limits.max_queue:
            raise self._refusal("queue", f"{self.limits.max_queue} requests wait already")

    def _stuck(self) -> RequestError:
        return self._refusal("stuck", f"computations run for more than {self.limits.timeout_seconds:g} s")

    def _refusal(self, reason: str, why: str) -> RequestError:
        self._telemetry.count("recspec_rejected_total", model=self.name, reason=reason)
        seconds = self.limits.retry_seconds
        message = f"model '{self.name}': {why}; try again in {seconds} s"
        return RequestError(message, status=503, retry_after=seconds)

    def _late(self, seconds: float) -> RequestError:
        self._telemetry.count("recspec_rejected_total", model=self.name, reason="time")
        return RequestError(
            f"model '{self.name}': no answer within {seconds:g} s; the request was given up", status=504
        )

    async def _wait(self, work: Arrays | Callable[[], object], rows: int, timeout: float | None) -> Any:
        self._refuse_if_full()
        limits = self.limits
        seconds = limits.timeout_seconds if timeout is None else min(timeout, limits.timeout_seconds)
        waiting = _Waiting(rows, work, asyncio.get_running_loop().create_future(), time.perf_counter())
        self._queue[waiting] = None
        self._rows += rows
        self._idle.clear()
        self._dispatch()
        try:
            async with asyncio.timeout(seconds):
                return await waiting.answer
        except TimeoutError:
            raise self._late(seconds) from None
        finally:
            self._take_out(waiting)
            self._note_idle()

    # --- the queue, on the loop's thread ------------------------------------------------------------------------

    def _take_out(self, waiting: _Waiting) -> None:
        if waiting in self._queue:
            del self._queue[waiting]
            self._rows -= waiting.rows

    def _note_idle(self) -> None:
        if not self._queue and self._running is None:
            self._idle.set()

    def _dispatch(self) -> None:
        """Send off a batch, if the thread is free and the oldest request has waited long enough."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running is not None or not self._queue or self._given_up > MAX_GIVEN_UP:
            return
        oldest = next(iter(self._queue))
        left = self.limits.max_delay_ms / 1000 - (time.perf_counter() - oldest.since)
        if left > 0 and self._rows < self.limits.max_batch_rows and not callable(oldest.work):
            self._timer = asyncio.get_running_loop().call_later(left, self._dispatch)
            return
        self._start(self._next_batch())

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        rows = 0
        for waiting in self._queue:
            full = rows + waiting.rows > self.limits.max_batch_rows
            if batch and (full or callable(waiting.work) or callable(batch[0].work)):
                break
            batch.append(waiting)
            rows += waiting.rows
        for waiting in batch:
            self._take_out(waiting)
        return batch

    def _start(self, batch: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        running = self._running = _Running(batch, time.perf_counter())
        running.overdue = loop.call_later(self.limits.timeout_seconds, self._give_up)

        def work() -> None:
            answers, spent = self._compute(batch)
            with contextlib.suppress(RuntimeError):  # the loop was closed: the time for a graceful end was over
                loop.call_soon_threadsafe(self._finish, running, answers, spent)

        self._worker.submit(work)

    def _give_up(self) -> None:
        """Leave a thread to itself: no request can still wait for what it computes."""
        log.error("model '%s': a computation runs for more than %g s; it is given up", self.name,
                  self.limits.timeout_seconds)  # fmt: skip
        self._running, self._given_up = None, self._given_up + 1
        self._worker.end()
        self._worker = _Worker(f"model-{self.name}", self._initialize)
        if self._given_up > MAX_GIVEN_UP:
            for waiting in list(self._queue):
                self._take_out(waiting)
                waiting.answer.set_exception(self._stuck())
        self._dispatch()
        self._note_idle()

    def _finish(self, running: _Running, answers: Sequence[object], spent: Spent) -> None:
        if self._running is not running:  # it was given up, and has ended nevertheless
            self._given_up -= 1
            self._dispatch()
            return
        assert running.overdue is not None
        running.overdue.cancel()
        self._running = None
        for waiting, answer in zip(running.batch, answers, strict=True):
            if waiting.answer.done():  # its client went away, or its time is over
                continue
            if isinstance(answer, BaseException):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)
        self._count(running.batch, answers, running.started, spent)
        self._dispatch()
        self._note_idle()

    def _count(self, batch: Sequence[_Waiting], answers: Sequence[object], started: float, spent: Spent) -> None:
        now, kept, rows = time.perf_counter(), self.statistics, sum(each.rows for each in batch)
        for waiting, answer in zip(batch, answers, strict=True):
            outcome = kept.fail if isinstance(answer, BaseException) else kept.success
            outcome.add(now - waiting.since)
            kept.queue.add(started - waiting.since)
            self._telemetry.observe("recspec_queue_seconds", started - waiting.since, model=self.name)
        kept.compute.add(spent, len(batch))
        self._telemetry.observe("recspec_compute_seconds", spent.infer, model=self.name)
        kept.last_ms = int(time.time() * 1000)
        if callable(batch[0].work):
            return
        kept.rows, kept.batches = kept.rows + rows, kept.batches + 1
        if rows in kept.by_rows or len(kept.by_rows) < MAX_SIZES:
            kept.by_rows.setdefault(rows, Compute()).add(spent)
        self._telemetry.count("recspec_rows_total", rows, model=self.name)
        self._telemetry.count("recspec_batches_total", model=self.name)
        self._telemetry.observe("recspec_batch_rows", rows, model=self.name)

    # --- the computation, on the model's thread -----------------------------------------------------------------

    def _compute(self, batch: Sequence[_Waiting]) -> tuple[list[object], Spent]:
        """An answer, or what was raised, for each request; and where the time went."""
        began = time.perf_counter()
        if len(batch) == 1:
            return [self._alone(batch[0])], Spent(0.0, time.perf_counter() - began, 0.0)
        parts = [each.work for each in batch if not callable(each.work)]
        try:
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            ready = time.perf_counter()
            outputs = self._run(joined)
            done = time.perf_counter()
            answers: list[object] = list(_split(outputs, [each.rows for each in batch]))
            return answers, Spent(ready - began, done - ready, time.perf_counter() - done)
        except Exception:  # of one of them, maybe: the others are answered
            return [self._alone(each) for each in batch], Spent(0.0, time.perf_counter() - began, 0.0)

    def _alone(self, waiting: _Waiting) -> object:
        try:
            return waiting.work() if callable(waiting.work) else self._run(waiting.work)
        except Exception as error:
            return error


def _split(outputs: Mapping[str, NDArray[Any]], rows: Sequence[int]) -> list[Arrays]:
    ends = np.cumsum(rows)
    return [
        {name: array[end - count : end] for name, array in outputs.items()}
        for end, count in zip(ends.tolist(), rows, strict=True)
    ]


def _nothing() -> None:
    """A thread that needs no preparing."""
