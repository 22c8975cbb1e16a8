"""Serving in the foreground until a signal asks for the end, or in a thread beside other work such as a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from recspec.base.machine import freeze_heap, stop_signals
from recspec.serving.server import FORCE_SECONDS, Addresses, Server, ServerOptions, log, loop_factory, quiet
from recspec.serving.workers import Workers


def server_of(options: ServerOptions) -> Server | Workers:
    """A server in this process, or the supervisor of its workers."""
    return Server(options) if options.settings.workers == 1 else Workers(options)


class BackgroundServer:
    """A server that answers until `stop`; its thread does not keep the process alive."""

    def __init__(self, options: ServerOptions) -> None:
        self._options, self._started = options, Future[Addresses]()
        self._ask_to_stop: Callable[[], object] = bool
        self._thread = threading.Thread(target=self._run, name="recspec-serve", daemon=True)

    def start(self) -> Addresses:
        """Open the models and listen; returns once the server answers.

        Raises:
            BundleError, SettingsError: as `serve`.
        """
        quiet()
        self._thread.start()
        try:
            return self._started.result()
        except BaseException:
            self._thread.join()
            raise

    def stop(self) -> None:
        """Answer the requests under way, then close the models; a second call does nothing."""
        if self._thread.ident is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._ask_to_stop()
        self._thread.join()

    @property
    def runs(self) -> bool:
        """Whether the server answers."""
        return self._started.done() and self._started.exception() is None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        server, asked = server_of(self._options), asyncio.Event()
        self._ask_to_stop = partial(asyncio.get_running_loop().call_soon_threadsafe, asked.set)
        self._started.set_result(await server.start())
        await asked.wait()
        await server.stop()


def serve(
    options: ServerOptions,
    *,
    ready: Callable[[Addresses], None] = lambda _: None,
    force: Callable[[str], object] = log.error,
) -> None:
    """Serve models until SIGTERM or SIGINT, then end within `shutdown_seconds`.

    Args:
        ready: Called with the addresses as soon as the server answers.
        force: Called with a reason `FORCE_SECONDS` after the time for a graceful end; must end the process whatever its
            threads do. If it can't run, the process ends with a traceback of its threads.

    Raises:
        BundleError, SettingsError: as `Server.start`.
    """

    async def run(ending: _Ending) -> None:
        asked = ending.on(asyncio.get_running_loop())
        addresses = await server.start()
        freeze_heap()
        ready(addresses)
        await asked.wait()
        await server.stop()

    quiet()
    with _Ending(options.settings.shutdown_seconds + FORCE_SECONDS, force) as ending:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            server = server_of(options)
            runner.run(run(ending))
        if server.num_abandoned:
            force("abandoned computations still run")


class _Ending:
    """SIGTERM, SIGINT and SIGHUP: the first starts a graceful end with a time limit, a second ends the process at once.

    The handlers need no event loop, so they also end a busy or stuck loop.
    """

    def __init__(self, seconds: float, force: Callable[[str], object]) -> None:
        self._seconds, self._force = seconds, force
        self._timer: threading.Timer | None = None
        self._wake: Callable[[], object] = bool
        self._before: dict[signal.Signals, Any] = {}

    def on(self, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """An event of a loop, set at the first signal."""
        asked = asyncio.Event()
        self._wake = partial(loop.call_soon_threadsafe, asked.set)
        if self._timer is not None:
            asked.set()
        return asked

    def __enter__(self) -> _Ending:
        self._watch = signal.set_wakeup_fd(-1)  # the command's own time limit is too short for a graceful end
        self._before = {each: signal.signal(each, self._ask) for each in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._watch)
        if self._timer is not None:
            self._timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _ask(self, *_: object) -> None:
        if self._timer is not None:
            self._force("a second signal to end")
            return
        self._timer = threading.Timer(self._seconds, self._force, ["requests or models did not end in time"])
        self._timer.daemon = True
        self._timer.start()
        if sys.__stderr__ is not None:  # in case the interpreter's lock is held and the timer can't run
            faulthandler.dump_traceback_later(self._seconds + 2, exit=True, file=sys.__stderr__)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._wake()
