"""Reads the journal for requests, on threads of its own: what users did since a model learned, and their variants.

An answer does not wait for a journal that fails: it knows what the dataset holds, and says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from recspec.base.errors import RecspecError

if TYPE_CHECKING:
    from recspec.inference import LiveEvents
    from recspec.loop import Histories

THREADS = 4
SECONDS = 1.0
"""Longest wait of a request for the journal, which takes less than a millisecond."""
REST_SECONDS = 1.0
"""Time after a failure in which no request asks again."""
NOT_READ = "the journal can't be read now, so the answer knows only the events that the model was trained with"

T = TypeVar("T")

log = logging.getLogger("recspec.serve")


class JournalReader:
    """Asks the journal. Used on one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="recspec-histories")
        self._studies = ThreadPoolExecutor(1, thread_name_prefix="recspec-studies")
        self._resumes = 0.0

    async def read(self, histories: Histories, users: Sequence[str | int]) -> LiveEvents | None:
        """The users' new events; None while the journal can't be read."""
        return await self.ask(partial(histories.of, users))

    async def ask(self, question: Callable[[], T]) -> T | None:
        """What a function on another thread finds in the journal; None while it can't be read."""
        if time.monotonic() < self._resumes:
            return None
        try:
            async with asyncio.timeout(SECONDS):
                return await asyncio.get_running_loop().run_in_executor(self._threads, question)
        except (RecspecError, TimeoutError) as error:
            self._resumes = time.monotonic() + REST_SECONDS
            log.warning("answers don't know new events: %s", str(error) or f"no answer within {SECONDS:g} s")
            return None

    async def study(self, question: Callable[[], T]) -> T:
        """What a function that takes its time finds in the journal; one after the other, on a thread of their own.

        Raises what the function raises.
        """
        return await asyncio.get_running_loop().run_in_executor(self._studies, question)

    def close(self) -> None:
        """End the threads; what still runs is not waited for."""
        for each in (self._threads, self._studies):
            each.shutdown(wait=False, cancel_futures=True)
