"""Dynamic batching: requests of one model that wait at the same time are computed together.

One thread computes a model's batches, one after the other. If it is idle, a request starts at once, or waits up to a
set delay for others. Requests that arrive meanwhile wait, and are joined in their order up to a number of rows. Every
request is checked before it gets here; if a joined batch fails nevertheless, each of its requests is computed alone.

A computation that runs longer than any request may wait is abandoned: its thread runs on by itself, and a new thread
answers the next requests. Threads are daemons, so that no computation keeps the process from ending.
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
from recspec.serving.server_metrics import ServerMetrics

Arrays = dict[str, NDArray[Any]]
"""Name -> (B, width): the rows of a request or of a batch."""

T = TypeVar("T")

MAX_GIVEN_UP = 1
"""Most abandoned computations of a model that may still run; beyond that, its requests are refused."""
JOIN_SECONDS = 1.0
"""Time limit for the end of an idle thread, which takes microseconds."""
MAX_SIZES = 256
"""Most batch sizes with statistics of their own; clients choose the sizes, so their number needs a limit."""

log = logging.getLogger("recspec.serve")


class Limits(config.Settings):
    """Limits of a server; a request beyond one is refused with the status given."""

    max_batch_rows: int = Field(4096, ge=1, description="rows computed together")
    max_delay_ms: float = Field(
        0.0,
        ge=0,
        le=10_000,
        description="milliseconds an idle model waits for more requests to batch; 0: it never waits",
    )
    max_queue: int = Field(512, ge=1, description="waiting requests of a model; more are refused with 503")
    max_rows: int = Field(65_536, ge=1, description="rows of a request; more are refused with 413")
    max_body_bytes: int = Field(
        32 << 20, ge=1024, description="bytes of a request's body; a larger one is refused with 413"
    )
    max_requests: int = Field(1024, ge=1, description="requests answered at once by each protocol; more get 503")
    max_held_bytes: int = Field(512 << 20, ge=1024, description="bytes of all requests being answered; more get 503")
    timeout_seconds: float = Field(
        30.0, gt=0, le=3600, description="time from a request's head to its answer; later ones get 504"
    )
    retry_seconds: int = Field(1, ge=0, description="value of Retry-After if a queue is full")


@dataclass
class Duration:
    """A number of events, and their total time in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add one event, or several."""
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
    """The three parts of a computation; perf_analyzer stops if their counts differ."""

    join: Duration = field(default_factory=Duration)
    infer: Duration = field(default_factory=Duration)
    split: Duration = field(default_factory=Duration)

    def add(self, spent: Spent, count: int = 1) -> None:
        """Add one batch, or `count` requests that shared one."""
        self.join.add(spent.join, count)
        self.infer.add(spent.infer, count)
        self.split.add(spent.split, count)


@dataclass
class Statistics:
    """A model's counts and times since it was loaded, as in the protocol's statistics extension."""

    rows: int = 0
    batches: int = 0
    last_ms: int = 0
    """Milliseconds since 1970 of the last answer."""
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute: Compute = field(default_factory=Compute)
    by_rows: dict[int, Compute] = field(default_factory=dict)
    """Rows of a batch -> counts and times."""


@dataclass(eq=False)
class _Waiting:
    rows: int
    work: Arrays | Callable[[], object]
    answer: asyncio.Future[Any]
    since: float


@dataclass(eq=False)
class _Running:
    """A batch under computation."""

    batch: Sequence[_Waiting]
    started: float
    overdue: asyncio.TimerHandle | None = None


class _Worker:
    """A thread that does one thing after the other; a daemon, so that the process can always end."""

    def __init__(self, name: str, initialize: Callable[[], None]) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._initialize = initialize
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Do something after everything submitted before."""
        self._work.put(work)

    def end(self) -> None:
        """End the thread after its last work."""
        self._work.put(None)

    def join(self) -> None:
        """End an idle thread and wait for it; the interpreter can't shut down cleanly while threads run C++."""
        self.end()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        self._initialize()
        while (work := self._work.get()) is not None:
            work()


class Batcher:
    """The queue of one model, and the thread that computes its batches. Made and used on an event loop.

    One class because the queue, the running batch and their time limits change together.
    """

    def __init__(
        self,
        run: Callable[[Arrays], Arrays],
        limits: Limits,
        *,
        name: str = "model",
        metrics: ServerMetrics | None = None,
        initialize: Callable[[], None] | None = None,
    ) -> None:
        self.limits, self.name, self.statistics = limits, name, Statistics()
        self._run, self._metrics = run, metrics or ServerMetrics()
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
        """Number of waiting requests."""
        return len(self._queue)

    @property
    def given_up(self) -> int:
        """Abandoned computations that still run."""
        return self._given_up

    async def infer(self, inputs: Arrays, rows: int, *, timeout: float | None = None) -> Arrays:
        """The outputs of a checked request's rows, computed together with other waiting requests.

        Raises:
            RequestError: 503 if the queue is full, 504 if there is no answer in time.
        """
        answer: Arrays = await self._wait(inputs, rows, timeout)
        return answer

    async def call(self, function: Callable[[], T], *, timeout: float | None = None) -> T:
        """Call a function alone on the model's thread, in its turn and within the same limits.

        Raises:
            RequestError: as `infer`; and whatever the function raises.
        """
        answer: T = await self._wait(function, 1, timeout)
        return answer

    async def close(self) -> None:
        """Wait for every answer, and end the thread. No request may follow."""
        await self._idle.wait()
        self._worker.join()

    def _refuse_if_full(self) -> None:
        """Refuse a request behind a full queue, or behind computations that do not end."""
        if self._given_up > MAX_GIVEN_UP:
            raise self._stuck()
        if len(self._queue) >= self.limits.max_queue:
            raise self._refusal("queue", f"{self.limits.max_queue} requests wait already")

    def _stuck(self) -> RequestError:
        return self._refusal("stuck", f"computations run for more than {self.limits.timeout_seconds:g} s")

    def _refusal(self, reason: str, why: str) -> RequestError:
        self._metrics.rejected.labels(self.name, reason).inc()
        seconds = self.limits.retry_seconds
        message = f"model '{self.name}': {why}; try again in {seconds} s"
        return RequestError(message, status=503, retry_after=seconds)

    def _late(self, seconds: float) -> RequestError:
        self._metrics.rejected.labels(self.name, "time").inc()
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
        """Start a batch if the thread is free and the oldest request has waited long enough."""
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
            with contextlib.suppress(RuntimeError):  # the loop is closed, after the time for a graceful end
                loop.call_soon_threadsafe(self._finish, running, answers, spent)

        self._worker.submit(work)

    def _give_up(self) -> None:
        """Abandon a computation, for which no request waits any more."""
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
        if self._running is not running:  # an abandoned computation has ended
            self._given_up -= 1
            self._dispatch()
            return
        assert running.overdue is not None
        running.overdue.cancel()
        self._running = None
        for waiting, answer in zip(running.batch, answers, strict=True):
            if waiting.answer.done():  # the client went away, or its time is over
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
            self._metrics.queue_seconds.labels(self.name).observe(started - waiting.since)
        kept.compute.add(spent, len(batch))
        self._metrics.compute_seconds.labels(self.name).observe(spent.infer)
        kept.last_ms = int(time.time() * 1000)
        if callable(batch[0].work):
            return
        kept.rows, kept.batches = kept.rows + rows, kept.batches + 1
        if rows in kept.by_rows or len(kept.by_rows) < MAX_SIZES:
            kept.by_rows.setdefault(rows, Compute()).add(spent)
        self._metrics.rows.labels(self.name).inc(rows)
        self._metrics.batches.labels(self.name).inc()
        self._metrics.batch_rows.labels(self.name).observe(rows)

    # --- the computation, on the model's thread -----------------------------------------------------------------

    def _compute(self, batch: Sequence[_Waiting]) -> tuple[list[object], Spent]:
        """An answer or an exception for each request, and the time of each part."""
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
        except Exception:  # perhaps of one request; the others are answered
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
    """No preparation of a thread."""
