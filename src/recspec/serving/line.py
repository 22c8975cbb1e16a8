"""Questions and answers between two processes, as lines of JSON over a pair of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from recspec.base.errors import BundleError, RecspecError

log = logging.getLogger("recspec.serve")

LINE_BYTES = 64 << 20
"""Longest line. The metrics of a server with a hundred models take under a MiB."""


class Ended(Exception):
    """The other process ended before it answered."""


class Line:
    """One end of the line; either end may ask. Used on one event loop."""

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
            BundleError: with its message, if it can't do what was asked.
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
        if "problem" in message:
            future.set_exception(BundleError(message["problem"], message["problems"]))
        else:
            future.set_result(message["value"])

    async def _do(self, message: dict[str, Any]) -> None:
        answer = {"number": message["number"]}
        try:
            self._say({**answer, "value": await self._answer(message["ask"], message["value"])})
        except RecspecError as error:
            self._say({**answer, "problem": str(error), "problems": error.problems})
        except Exception as error:  # whoever asked would wait for ever
            log.exception("can't answer %s", message["ask"])
            problem = f"{type(error).__name__}: {error}"
            self._say({**answer, "problem": problem, "problems": [problem]})
