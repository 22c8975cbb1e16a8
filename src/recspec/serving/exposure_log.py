"""Logs what was shown: answers go to the journal's writer in groups, and no request waits for them.

A crash loses the lists of the last tenth of a second. They were shown, and are as if they had not been logged: clicks
on them count as events, but for no answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recspec.base.errors import RecspecError
from recspec.serving.server_metrics import NO_MODEL, ShownMetrics

if TYPE_CHECKING:
    from recspec.loop import Exposure, Writer

SECONDS = 0.1
"""Longest time in which lists are collected; one transaction takes as long for a hundred as for one."""
MOST_SHOWN = 50_000
"""Items of lists that are collected; beyond, they are sent to the writer at once."""

log = logging.getLogger("recspec.serve")


class ExposureLog:
    """Collects lists and has them stored. Used on one event loop."""

    def __init__(self, writer: Writer, metrics: ShownMetrics) -> None:
        self._writer, self._metrics = writer, metrics
        self._collected: list[Exposure] = []
        self._shown = 0
        self._timer: asyncio.TimerHandle | None = None
        self._storing: set[asyncio.Task[None]] = set()
        self._fails = False

    def add(self, exposure: Exposure) -> None:
        """Log a list soon."""
        from recspec.loop import is_text

        if exposure.subject is not None and not is_text(exposure.subject):
            self._count([exposure], "lost")  # no database takes such an id, and events refuse it
            return
        self._collected.append(exposure)
        self._shown += 1 + len(exposure.items)
        if self._shown > MOST_SHOWN:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self._send)

    async def flush(self) -> None:
        """Store everything collected."""
        self._send()
        while self._storing:
            await asyncio.gather(*self._storing)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._collected:
            task = asyncio.get_running_loop().create_task(self._store(self._collected))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)
            self._collected, self._shown = [], 0

    async def _store(self, exposures: Sequence[Exposure]) -> None:
        try:
            await self._writer.store((), exposures)
        except Exception as error:  # the other process may have ended; a list was answered all the same
            self._count(exposures, "lost")
            if not self._fails:
                expected = isinstance(error, RecspecError)
                log.warning("lists are not logged now: %s", error or type(error).__name__, exc_info=not expected)
            self._fails = True
            return
        self._fails = False
        self._count(exposures, "logged")

    def _count(self, exposures: Sequence[Exposure], outcome: str) -> None:
        for each in exposures:
            self._metrics.exposures.labels(each.model, variant_label(each.experiment, each.variant), outcome).inc()


def variant_label(experiment: str | None, variant: str | None) -> str:
    """A variant as the metrics name it."""
    return NO_MODEL if experiment is None else f"{experiment}/{variant}"
