"""Several processes that answer as one server: the supervisor, the workers, and the channel between them.

Workers accept HTTP connections from one socket, so that those which wait outlive a worker. gRPC can't take a socket;
each worker listens at the same port by SO_REUSEPORT. Workers begin as copies of a process that has loaded torch and the
server, but no model; so another one is there as soon as it has opened the models.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recspec.base import machine
from recspec.base.errors import BundleError, RecspecError, RequestError, SettingsError
from recspec.serving.access import check_certificate, listen, shared_port
from recspec.serving.model_folders import LinkedCopies, SharedCopies
from recspec.serving.repository import open_writer
from recspec.serving.server import (
    FORCE_SECONDS,
    Addresses,
    Server,
    ServerOptions,
    Shared,
    check_access,
    log,
    loop_factory,
    quiet,
)
from recspec.serving.server_metrics import ServerMetrics, summed, without_gauges

if TYPE_CHECKING:
    from recspec.loop import JournalWriter, RemoteWriter

LOADED = ["recspec.serving.workers", "recspec.serving.inference_grpc"]
"""Modules that a worker finds loaded."""
LINE_BYTES = 64 << 20
"""Longest message of a channel. The metrics of a server with a hundred models take under a MiB."""
SCRAPE_SECONDS = 2.0
"""Time for a worker to report its metrics; after that, its last report stands."""
SUPERVISED = """\
# HELP recspec_workers Processes that answer.
# TYPE recspec_workers gauge
recspec_workers {workers}
# HELP recspec_worker_restarts_total Workers that were started because another one ended.
# TYPE recspec_worker_restarts_total counter
recspec_worker_restarts_total {restarts}
"""
"""The supervisor's own metrics."""
LONG_SECONDS = 10.0
"""A worker that answered for less time before it ended is not replaced at once."""
MOST_PAUSE = 30.0
"""Longest pause in seconds before another worker is started."""


@dataclass(eq=False)
class _Worker:
    """A worker's process, and the channel to it."""

    process: ForkServerProcess
    channel: WorkerChannel
    ready: asyncio.Future[None]
    ended: asyncio.Task[None]
    """Ends with the process."""
    metrics: str = ""
    """Its last report."""


class Workers:
    """Several processes that answer as one server: `await start()`, then `await stop()`."""

    def __init__(self, options: ServerOptions) -> None:
        self.settings = options.settings
        threads = threads_of_each(options.repository.threads, options.settings.workers)
        self._options = replace(options, repository=options.repository.model_copy(update={"threads": threads}))
        self._held = contextlib.ExitStack()
        self._copies = SharedCopies(verify=options.repository.verify)
        self._shared: Shared | None = None
        self._writer: JournalWriter | None = None
        """Stores events and answers of all workers in a SQLite file, of which only one process may be the writer."""
        self._workers: dict[int, _Worker] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._unloaded: set[str] = set()
        self._restarts, self._metrics_of_ended = 0, ""
        self._own_metrics = ServerMetrics()
        self.num_abandoned = 0
        """Workers that were killed because they did not end in time."""

    async def start(self) -> Addresses:
        """Listen, and start every worker; returns once all of them answer."""
        settings = self.settings
        if "forkserver" not in multiprocessing.get_all_start_methods() or not hasattr(socket, "SO_REUSEPORT"):
            raise SettingsError(
                f"--workers {settings.workers}: this system can't share ports between processes; take 1"
            )
        check_access(settings, token=self._options.token, control=self._options.repository.control)
        check_certificate(settings.tls_cert, settings.tls_key)
        try:
            listening = self._held.enter_context(listen(settings.host, settings.http_port))
            grpc_port = settings.grpc_port
            if grpc_port is not None:
                grpc_port = self._held.enter_context(shared_port(settings.host, grpc_port))
            await self._open_journal(self._options.repository.journal)
            self._shared = Shared(listening, grpc_port, secrets.token_bytes(32))
            numbers = range(1, settings.workers + 1)
            for found in await asyncio.gather(*map(self._start, numbers), return_exceptions=True):
                if isinstance(found, BaseException):
                    raise found
        except BaseException:
            await self.stop()
            raise
        self._keeping = [asyncio.create_task(self._keep(number)) for number in numbers]
        return Addresses.of(settings, listening.getsockname()[1], grpc_port)

    async def _open_journal(self, url: str | None) -> None:
        if url is None:
            return
        from recspec.loop import is_sqlite

        if is_sqlite(url):
            experiments = self._options.showing.experiments
            self._writer = await open_writer(url, self._options.limits, self._own_metrics, experiments)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the workers that answer."""
        return tuple(each.process.pid for each in self._answering() if each.process.pid is not None)

    async def stop(self) -> None:
        """Stop every worker, each after its requests; kill those that do not end in time."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self._held.close()  # before the workers' copies, so that no connection waits for nobody
        await asyncio.gather(*map(self._stop, self._workers.values()))
        if self._writer is not None:
            await self._writer.close()
        self._copies.close()

    # --- one worker ----------------------------------------------------------------------------------------------

    async def _start(self, number: int) -> None:
        """Start a worker, and wait until it answers.

        Raises:
            BundleError: if it can't open the models, or ends before it answers.
        """
        assert self._shared is not None
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        given = (number, self._options, self._shared, theirs)
        process = context.Process(target=run_worker, args=given, name=f"recspec-{number}", daemon=True)
        try:
            await asyncio.to_thread(process.start)  # the first one waits until the modules are loaded
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ready = asyncio.get_running_loop().create_future()

        async def answer(what: str, value: Any) -> Any:
            if what == "ready" and not ready.done():
                ready.set_result(None)
            elif what == "failed" and not ready.done():
                ready.set_exception(BundleError(value[0], value[1:]))
            elif what == "store" and self._writer is not None:
                from recspec.loop import store_rows

                return await store_rows(self._writer, value)
            elif what == "metrics":
                return await self._metrics()
            elif what == "copy":
                return await self._copies.answer(**{**value, "folder": Path(value["folder"])})
            elif what in ("load", "unload"):
                await self._everywhere(what, value)
            return None

        channel = WorkerChannel(answer)
        await channel.open(ours)
        ended = asyncio.create_task(_until_end(process))
        started = self._workers[number] = _Worker(process, channel, ready, ended)
        await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.set_exception(BundleError(f"worker {number} ended before it answered: {_reason(process)}"))
        await ready
        for name in sorted(self._unloaded):
            with contextlib.suppress(Ended, RecspecError):
                await started.channel.ask("unload", name)

    async def _keep(self, number: int) -> None:
        """Wait for a worker's end, and start another one; over and over."""
        pause, began = 0.0, time.monotonic()
        while True:
            old = self._workers[number]
            await asyncio.wait([old.ended])
            old.channel.close()  # it still runs if only the process that copied it was killed; then it stops by itself
            self._metrics_of_ended = without_gauges(summed([self._metrics_of_ended, old.metrics]))
            old.metrics = ""
            lived, noticed = time.monotonic() - began, time.monotonic()
            pause = 0.0 if lived > LONG_SECONDS else min(MOST_PAUSE, 2 * pause + 0.5)
            why = _reason(old.process)
            log.warning("worker %d ended (%s); another is started in %.1f s", number, why, pause)
            await asyncio.sleep(pause)
            self._restarts += 1
            began = time.monotonic()
            try:
                await self._start(number)
            except (RecspecError, OSError) as error:
                log.warning("worker %d does not start: %s", number, error)
                continue
            began = time.monotonic()
            log.warning("worker %d answers again after %.1f s", number, began - noticed)

    async def _stop(self, each: _Worker) -> None:
        asked = asyncio.create_task(each.channel.ask("stop"))
        ended, _ = await asyncio.wait([each.ended], timeout=self.settings.shutdown_seconds + FORCE_SECONDS / 2)
        if not ended:
            self.num_abandoned += 1
            each.process.kill()
            await asyncio.wait([each.ended])
        await asyncio.gather(asked, return_exceptions=True)

    # --- what concerns all of them ------------------------------------------------------------------------------

    async def _everywhere(self, what: str, name: str) -> None:
        """Load or unload a model in every worker that answers; the error names all their problems."""
        answers = await asyncio.gather(
            *(each.channel.ask(what, name) for each in self._answering()), return_exceptions=True
        )
        problems = [text for each in answers if isinstance(each, RecspecError) for text in each.problems]
        BundleError.refuse(f"model '{name}'", problems)
        self._unloaded = self._unloaded | {name} if what == "unload" else self._unloaded - {name}

    async def _metrics(self) -> str:
        answering = self._answering()
        await asyncio.gather(*map(_report, answering))
        own = SUPERVISED.format(workers=len(answering), restarts=self._restarts)
        own_metrics = self._own_metrics.text().decode()
        return summed([own, own_metrics, self._metrics_of_ended, *(each.metrics for each in answering)])

    def _answering(self) -> list[_Worker]:
        return [each for each in self._workers.values() if each.ready.done() and not each.ended.done()]


async def _report(each: _Worker) -> None:
    """Ask a worker for its metrics; its last report stands if it is busy or ends."""
    with contextlib.suppress(TimeoutError, Ended):
        async with asyncio.timeout(SCRAPE_SECONDS):
            each.metrics = await each.channel.ask("metrics")


async def _until_end(process: ForkServerProcess) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


def _reason(process: ForkServerProcess) -> str:
    code = process.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"status {code}"


def threads_of_each(asked: int | None, workers: int) -> int:
    """Threads of each worker's computations: by default the cores that this process may use, divided among them."""
    cores = [machine.cores_at_once(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None]
    quota = min((each for each in cores if each is not None), default=os.cpu_count())
    return machine.pick_threads(asked, torch.get_num_threads(), os.environ, quota, processes=workers)[0]


# --- a worker --------------------------------------------------------------------------------------------------------


def run_worker(number: int, options: ServerOptions, shared: Shared, end: socket.socket) -> None:
    """Serve until the supervisor says stop, or ends; `end` is the worker's end of the channel to it."""
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s %(name)s worker {number}: %(message)s",
    )
    logging.getLogger("recspec").setLevel(logging.INFO)
    quiet()
    for ignored in (signal.SIGINT, signal.SIGHUP):  # the terminal's reach the supervisor too, which then says stop
        signal.signal(ignored, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(number, options, shared, end))


async def _serve(number: int, options: ServerOptions, shared: Shared, end: socket.socket) -> None:
    server, stop = Server(options, shared), asyncio.Event()
    repository = server.repository
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def answer(what: str, value: Any) -> Any:
        return stop.set() if what == "stop" else await repository.perform(what, value)

    channel = WorkerChannel(answer)
    listening = await channel.open(end)
    listening.add_done_callback(lambda _: stop.set())
    repository.broadcast, repository.copies = channel.ask, LinkedCopies(channel.ask, number)
    repository.writer = _remote_writer(options, channel)
    repository.measures_drift = number == 1
    try:
        try:
            await server.start()
            machine.freeze_heap()
        except RecspecError as error:
            await channel.ask("failed", [str(error), *error.problems])
            return
        await channel.ask("ready")
        await stop.wait()
        await server.stop()
    except Ended:
        log.warning("the supervisor has ended; so does this worker")


def _remote_writer(options: ServerOptions, channel: WorkerChannel) -> RemoteWriter | None:
    """Sends events to the supervisor, if that writes."""
    if options.repository.journal is None:
        return None
    from recspec.loop import RemoteWriter, is_sqlite

    async def ask(what: str, value: object) -> Any:
        try:
            return await channel.ask(what, value)
        except Ended:  # killed, perhaps before it has stored anything
            raise RequestError("the server ends; send the events again", status=503, retry_after=1) from None

    max_waiting = options.limits.journal_queue
    return RemoteWriter(ask, max_waiting=max_waiting) if is_sqlite(options.repository.journal) else None


# --- the channel between two processes -------------------------------------------------------------------------------


class Ended(Exception):
    """The other process ended before it answered."""


class WorkerChannel:
    """Questions and answers between two processes, as lines of JSON over a pair of sockets. Used on one event loop."""

    def __init__(self, answer: Callable[[str, Any], Awaitable[Any]]) -> None:
        self._answer = answer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, end: socket.socket) -> asyncio.Task[None]:
        """Begin to listen; the task ends with the other process."""
        reader, self._writer = await asyncio.open_connection(sock=end, limit=LINE_BYTES)
        return asyncio.create_task(self._listen(reader))

    def close(self) -> None:
        """Hang up."""
        if self._writer is not None:
            self._writer.close()

    async def ask(self, what: str, value: object = None) -> Any:
        """The other process's answer.

        Raises:
            Ended: if it ends before it answers.
            RequestError, BundleError: with its message, if it can't do what was asked.
        """
        if self._writer is None or self._writer.is_closing():
            raise Ended
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            self._say({"ask": what, "number": number, "value": value})
            return await future
        finally:
            del self._asked[number]

    def _say(self, message: dict[str, Any]) -> None:
        assert self._writer is not None
        with contextlib.suppress(RuntimeError):  # the other process has ended
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        assert self._writer is not None
        try:
            with contextlib.suppress(OSError):
                while line := await reader.readline():
                    self._take(json.loads(line))
        finally:
            self._writer.close()
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(Ended())

    def _take(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            task = asyncio.create_task(self._do(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        future = self._asked.get(message["number"])
        if future is None or future.done():  # nobody waits any more
            return
        if "status" in message:
            problem, retry_after = message["problem"], message["retry_after"]
            future.set_exception(RequestError(problem, status=message["status"], retry_after=retry_after))
        elif "problem" in message:
            future.set_exception(BundleError(message["problem"], message["problems"]))
        else:
            future.set_result(message["value"])

    async def _do(self, message: dict[str, Any]) -> None:
        answer = {"number": message["number"]}
        try:
            self._say({**answer, "value": await self._answer(message["ask"], message["value"])})
        except RequestError as error:
            self._say({**answer, "problem": str(error), "status": error.status, "retry_after": error.retry_after})
        except RecspecError as error:
            self._say({**answer, "problem": str(error), "problems": error.problems})
        except Exception as error:  # whoever asked would wait for ever
            log.exception("can't answer %s", message["ask"])
            problem = f"{type(error).__name__}: {error}"
            self._say({**answer, "problem": problem, "problems": [problem]})
