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
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import RequestError
from recspec.serving.server_metrics import ServerMetrics
from recspec.serving.settings import Limits

Arrays = dict[str, NDArray[Any]]
"""Name -> (B, width): the rows of a request or of a batch."""

T = TypeVar("T")

MAX_ABANDONED = 1
"""Most abandoned computations of a model that may still run; beyond that, its requests are refused."""
JOIN_SECONDS = 1.0
"""Time limit for the end of an idle thread, which takes microseconds."""
MAX_SIZES = 256
"""Most batch sizes with statistics of their own; clients choose the sizes, so their number needs a limit."""

log = logging.getLogger("recspec.serve")


@dataclass
class Duration:
    """A number of events, and their total time in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.ns += int(seconds * 1e9)


PARTS = ("compute_input", "compute_infer", "compute_output")
"""Joining the inputs of a batch, computing it, and dividing its outputs; perf_analyzer stops if their counts differ."""
Spent = tuple[float, float, float]
"""Seconds of each of the `PARTS`."""


def _durations(*names: str) -> dict[str, Duration]:
    return {name: Duration() for name in names}


@dataclass
class Statistics:
    """A model's counts and times since it was loaded, under the names of the protocol's statistics extension."""

    last_inference: int = 0
    """Milliseconds since 1970 of the last answer."""
    inference_count: int = 0
    """Rows."""
    execution_count: int = 0
    """Batches."""
    inference_stats: dict[str, Duration] = field(
        default_factory=lambda: _durations("success", "fail", "queue", *PARTS, "cache_hit", "cache_miss")
    )
    by_rows: dict[int, dict[str, Duration]] = field(default_factory=dict)
    """Rows of a batch -> its `PARTS`."""


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
    overdue: asyncio.TimerHandle


class _Worker(threading.Thread):
    """A daemon thread that calls the functions put into `work`, one after the other, until it gets None."""

    def __init__(self, name: str, initialize: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._initialize = initialize
        self.start()

    def run(self) -> None:
        self._initialize()
        for work in iter(self.work.get, None):
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
        initialize: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits, self.name, self.statistics = limits, name, Statistics()
        self.num_abandoned = 0
        """Abandoned computations that still run."""
        self._run, self._metrics, self._initialize = run, metrics or ServerMetrics(), initialize
        self._worker = _Worker(f"model-{name}", self._initialize)
        self._queue: dict[_Waiting, None] = {}
        self._rows = 0
        self._running: _Running | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    async def infer(self, inputs: Arrays, rows: int, *, timeout: float | None = None) -> Arrays:
        """The outputs of a checked request's rows; 503 if the queue is full, 504 if there is no answer in time."""
        return cast(Arrays, await self._wait(inputs, rows, timeout))

    async def call(self, function: Callable[[], T], *, timeout: float | None = None) -> T:
        """Call a function alone on the model's thread, in its turn and within the same limits."""
        return cast(T, await self._wait(function, 1, timeout))

    async def close(self) -> None:
        """Wait for every answer, and end the thread. No request may follow."""
        await self._idle.wait()
        self._worker.work.put(None)
        self._worker.join(JOIN_SECONDS)  # the interpreter can't shut down cleanly while threads run C++

    def _stuck(self) -> RequestError:
        return self._refusal("stuck", f"computations run for more than {self.limits.timeout:g} s")

    def _refusal(self, reason: str, why: str) -> RequestError:
        self._metrics.rejected.labels(self.name, reason).inc()
        seconds = self.limits.retry_seconds
        message = f"model '{self.name}': {why}; try again in {seconds} s"
        return RequestError(message, status=503, retry_after=seconds)

    async def _wait(self, work: Arrays | Callable[[], object], rows: int, timeout: float | None) -> Any:
        limits = self.limits
        if self.num_abandoned > MAX_ABANDONED:
            raise self._stuck()
        if len(self._queue) >= limits.queue:
            raise self._refusal("queue", f"{limits.queue} requests wait already")
        seconds = limits.timeout if timeout is None else min(timeout, limits.timeout)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(rows, work, loop.create_future(), time.perf_counter())
        end = loop.call_later(seconds, self._end, waiting, seconds)
        self._queue[waiting] = None
        self._rows += rows
        self._idle.clear()
        self._dispatch()
        try:
            answer = await waiting.answer
            if time.perf_counter() - waiting.since > seconds:  # it came in the same turn of the loop as its end
                raise self._late(seconds)
            return answer
        finally:
            end.cancel()
            self._take_out(waiting)
            self._note_idle()

    def _end(self, waiting: _Waiting, seconds: float) -> None:
        """Give up a request whose time is over."""
        if not waiting.answer.done():
            waiting.answer.set_exception(self._late(seconds))

    def _late(self, seconds: float) -> RequestError:
        self._metrics.rejected.labels(self.name, "time").inc()
        message = f"model '{self.name}': no answer within {seconds:g} s; the request was given up"
        return RequestError(message, status=504)

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
        if self._running is not None or not self._queue or self.num_abandoned > MAX_ABANDONED:
            return
        oldest = next(iter(self._queue))
        left = self.limits.max_delay_ms / 1000 - (time.perf_counter() - oldest.since)
        if left > 0 and self._rows < self.limits.max_batch and not callable(oldest.work):
            self._timer = asyncio.get_running_loop().call_later(left, self._dispatch)
            return
        self._start(self._next_batch())

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        rows = 0
        for waiting in self._queue:
            full = rows + waiting.rows > self.limits.max_batch
            if batch and (full or callable(waiting.work) or callable(batch[0].work)):
                break
            batch.append(waiting)
            rows += waiting.rows
        for waiting in batch:
            self._take_out(waiting)
        return batch

    def _start(self, batch: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        overdue = loop.call_later(self.limits.timeout, self._abandon)
        running = self._running = _Running(batch, time.perf_counter(), overdue)

        def work() -> None:
            answers, spent = self._compute(batch)
            with contextlib.suppress(RuntimeError):  # the loop is closed, after the time for a graceful end
                loop.call_soon_threadsafe(self._finish, running, answers, spent)

        self._worker.work.put(work)

    def _abandon(self) -> None:
        """Abandon a computation, for which no request waits any more."""
        log.error("model '%s': a computation runs for more than %g s; it is given up", self.name, self.limits.timeout)
        self._running, self.num_abandoned = None, self.num_abandoned + 1
        self._worker.work.put(None)
        self._worker = _Worker(f"model-{self.name}", self._initialize)
        if self.num_abandoned > MAX_ABANDONED:
            for waiting in list(self._queue):
                self._take_out(waiting)
                waiting.answer.set_exception(self._stuck())
        self._dispatch()
        self._note_idle()

    def _finish(self, running: _Running, answers: Sequence[object], spent: Spent) -> None:
        if self._running is not running:  # an abandoned computation has ended
            self.num_abandoned -= 1
            self._dispatch()
            return
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
        durations, observe = kept.inference_stats, self._metrics.queue_seconds.labels(self.name).observe
        for waiting, answer in zip(batch, answers, strict=True):
            durations["fail" if isinstance(answer, BaseException) else "success"].add(now - waiting.since)
            durations["queue"].add(started - waiting.since)
            observe(started - waiting.since)
        for part, seconds in zip(PARTS, spent, strict=True):
            durations[part].add(seconds, len(batch))
        self._metrics.compute_seconds.labels(self.name).observe(spent[1])
        kept.last_inference = int(time.time() * 1000)
        if callable(batch[0].work):
            return
        kept.inference_count, kept.execution_count = kept.inference_count + rows, kept.execution_count + 1
        if rows in kept.by_rows or len(kept.by_rows) < MAX_SIZES:
            of_size = kept.by_rows.setdefault(rows, _durations(*PARTS))
            for part, seconds in zip(PARTS, spent, strict=True):
                of_size[part].add(seconds)
        self._metrics.rows.labels(self.name).inc(rows)
        self._metrics.batches.labels(self.name).inc()
        self._metrics.batch_rows.labels(self.name).observe(rows)

    # --- the computation, on the model's thread -----------------------------------------------------------------

    def _compute(self, batch: Sequence[_Waiting]) -> tuple[list[object], Spent]:
        """An answer or an exception for each request, and the time of each part."""
        began = time.perf_counter()
        if len(batch) == 1:
            return [self._alone(batch[0])], (0.0, time.perf_counter() - began, 0.0)
        parts = [each.work for each in batch if not callable(each.work)]
        try:
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            ready = time.perf_counter()
            outputs = self._run(joined)
            done = time.perf_counter()
            answers: list[object] = list(_split(outputs, [each.rows for each in batch]))
            return answers, (ready - began, done - ready, time.perf_counter() - done)
        except Exception:  # perhaps of one request; the others are answered
            return [self._alone(each) for each in batch], (0.0, time.perf_counter() - began, 0.0)

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
