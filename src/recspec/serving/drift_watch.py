"""Measures from time to time how far the journal's newest events have moved from what each model was trained on.

It runs on one thread of its own, beside the requests, and reads samples of a bounded size; a scrape of the metrics
reads what the last measurement found. Of a server with several workers the first one measures.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from recspec.base.errors import RecspecError
from recspec.serving.opened_model import Opened
from recspec.serving.server_metrics import DriftMetrics

if TYPE_CHECKING:
    from recspec.loop import DriftReport, Journal

FIRST_SECONDS = 30.0
"""Longest wait for the first measurement, so that a server that has just started answers first."""
REFERENCE = "drift"
"""Key of the training data among what a predictor keeps."""

log = logging.getLogger("recspec.serve")


class UsedModels(Protocol):
    """The models of a server, each open for as long as it is used."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of loaded models, including raw forms."""

    def use(self, name: str, version: str = "") -> AbstractContextManager[Any]:
        """A model that stays open until the block ends."""


class DriftWatch:
    """A task that measures. Used on one event loop."""

    def __init__(self, models: UsedModels, journal: Journal, metrics: DriftMetrics, *, seconds: float) -> None:
        """Start the task; `seconds` lie between two measurements."""
        self._models, self._journal, self._metrics, self._seconds = models, journal, metrics, seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recspec-drift")
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the task, after the measurement under way."""
        self._task.cancel()
        await asyncio.to_thread(partial(self._thread.shutdown, cancel_futures=True))

    async def _run(self) -> None:
        await asyncio.sleep(min(FIRST_SECONDS, self._seconds))
        while True:
            await self.measure()
            await asyncio.sleep(self._seconds)

    async def measure(self) -> None:
        """Measure the newest version of each model; one that fails keeps no old figures."""
        found: dict[str, DriftReport] = {}
        for name in self._models.names:
            try:
                with self._models.use(name) as endpoint:
                    opened: Opened = endpoint.model.opened
                    if endpoint.is_raw or opened.predictor is None:
                        continue
                    measured = asyncio.get_running_loop().run_in_executor(self._thread, self._measured, opened)
                    try:
                        found[name] = await asyncio.shield(measured)
                    except asyncio.CancelledError:
                        await asyncio.wait([measured])  # it reads the model's files until its end
                        raise
            except RecspecError as error:
                log.warning("model '%s': drift is not measured: %s", name, error)
            except Exception:  # the next measurement must still come
                log.exception("model '%s': measuring drift failed", name)
        self._metrics.reports = found

    def _measured(self, opened: Opened) -> DriftReport:
        from recspec.loop import DriftReference, measure_drift, now_us

        predictor = opened.predictor
        assert predictor is not None
        reference = predictor.held.get(REFERENCE)
        if reference is None:
            origin = None if opened.copy is None else opened.copy.origin
            reference = predictor.held[REFERENCE] = DriftReference.of(predictor, origin=origin)
        return measure_drift(predictor, reference, self._journal, now_us())
