"""A worker: one of several processes that answer for one server."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recspec.base.errors import RecspecError
from recspec.serving.batching import Limits
from recspec.serving.line import Ended, Line
from recspec.serving.opened_model import RepositorySettings
from recspec.serving.private_copies import LinkedCopies
from recspec.serving.repository import Repository
from recspec.serving.server import Server, ServeSettings, Shared, log, loop_factory, quiet
from recspec.serving.sources import Source


@dataclass(frozen=True)
class Work:
    """What a worker serves, and how."""

    number: int
    """Place among the workers, from 1."""
    sources: Sequence[Source]
    settings: ServeSettings
    repository: RepositorySettings
    limits: Limits
    token: str | None
    shared: Shared


def run(work: Work, end: socket.socket) -> None:
    """Serve until the supervisor says stop, or ends; `end` is the worker's end of the line to it."""
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s %(name)s worker {work.number}: %(message)s",
    )
    logging.getLogger("recspec").setLevel(logging.INFO)
    quiet()
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal's reach the supervisor too, which then says stop
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(work, end))


async def _serve(work: Work, end: socket.socket) -> None:
    repository = Repository(work.sources, settings=work.repository, limits=work.limits)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def answer(what: str, value: Any) -> Any:
        if what == "stop":
            stop.set()
        elif what == "metrics":
            return repository.metrics.text().decode()
        elif what == "load":
            await repository.load(value)
        elif what == "unload":
            await repository.unload(value)
        return None

    line = Line(answer)
    listening = await line.open(end)
    listening.add_done_callback(lambda _: stop.set())
    repository.everywhere, repository.copies = _Together(line), LinkedCopies(line, work.number)
    server = Server(repository, work.settings, token=work.token, shared=work.shared)
    try:
        try:
            await server.start()
        except RecspecError as error:
            await line.ask("failed", [str(error), *error.problems])
            return
        await line.ask("ready")
        await stop.wait()
        await server.stop()
    except Ended:
        log.warning("the supervisor has ended; so does this worker")


class _Together:
    """A server of several workers; the supervisor asks them all."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def load(self, name: str) -> None:
        """Open a model's versions again in every worker."""
        await self._line.ask("load", name)

    async def unload(self, name: str) -> None:
        """Unload a model in every worker."""
        await self._line.ask("unload", name)

    async def metrics(self) -> bytes:
        """The sums of all workers' metrics."""
        text: str = await self._line.ask("metrics")
        return text.encode()
