"""A server in a thread of its own, beside other work of the process such as a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial

from recspec.serving.batching import Limits
from recspec.serving.opened_model import RepositorySettings
from recspec.serving.server import Addresses, ServeSettings, loop_factory, quiet
from recspec.serving.sources import Source
from recspec.serving.workers import server_of


class BackgroundServer:
    """A server that answers until `stop`; its thread does not keep the process alive."""

    def __init__(
        self,
        sources: Sequence[Source],
        settings: ServeSettings,
        *,
        repository: RepositorySettings | None = None,
        limits: Limits | None = None,
        token: str | None = None,
    ) -> None:
        self._make = partial(server_of, sources, settings, repository=repository, limits=limits, token=token)
        self._started = threading.Event()
        self._failed: BaseException | None = None
        self._addresses: Addresses | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="recspec-serve", daemon=True)

    def start(self) -> Addresses:
        """Open the models and listen; returns once the server answers.

        Raises:
            BundleError, SettingsError: as `serve`.
        """
        quiet()
        self._thread.start()
        self._started.wait()
        if self._failed is not None:
            self._thread.join()
            raise self._failed
        assert self._addresses is not None
        return self._addresses

    def stop(self) -> None:
        """Answer the requests under way, then close the models; a second call does nothing."""
        if self._thread.ident is None:
            return
        if self._loop is not None and self._asked is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._asked.set)
        self._thread.join()

    @property
    def runs(self) -> bool:
        """Whether the server answers."""
        return self._addresses is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._started.is_set():
                raise
            self._failed = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        server = self._make()
        self._loop, self._asked = asyncio.get_running_loop(), asyncio.Event()
        self._addresses = await server.start()
        self._started.set()
        await self._asked.wait()
        await server.stop()
