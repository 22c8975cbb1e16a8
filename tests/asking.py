"""Asking a server's application without a network, and a server in a thread of its own where one is needed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from recspec.serving.access import Access
from recspec.serving.batching import Limits
from recspec.serving.model_folders import Source
from recspec.serving.opened_model import RepositorySettings
from recspec.serving.repository import Repository
from recspec.serving.server import Addresses, Server, ServeSettings, application
from recspec.serving.server_metrics import ServerMetrics


def total(metrics: ServerMetrics, name: str, **labels: str) -> float:
    """A sample of a server's metrics, summed over the labels that are not given."""
    samples = [each for family in metrics.collect() for each in family.samples if each.name == name]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        """The JSON."""
        return json.loads(self.body)


async def ask(
    app: ASGIApp, method: str, target: str, body: object = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """One request; what is not bytes is sent as JSON."""
    path, _, query = target.partition("?")
    sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    told = {"host": "localhost", **({"content-type": "application/json"} if sent else {}), **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in told.items()],
        "client": ("127.0.0.1", 1),
        "server": ("here", 80),
        "state": {},
    }
    left: list[Message] = [{"type": "http.request", "body": sent, "more_body": False}]
    got: list[Message] = []

    async def receive() -> Message:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        got.append(message)

    await app(scope, receive, send)
    kept = {name.decode().lower(): value.decode() for name, value in got[0]["headers"]}
    return Answer(got[0]["status"], kept, b"".join(message.get("body", b"") for message in got[1:]))


class Asked:
    """An application on its own event loop, asked one request after the other."""

    def __init__(self, runner: asyncio.Runner, app: ASGIApp, repository: Repository) -> None:
        self.runner, self.app, self.repository = runner, app, repository

    def __call__(self, method: str, target: str, body: object = None, **headers: str) -> Answer:
        """One request; `content_type` is the header content-type."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.runner.run(ask(self.app, method, target, body, named))


@contextmanager
def asking(sources: Sequence[Source], *, limits: Limits | None = None, token: str | None = None) -> Iterator[Asked]:
    """The application of a server that holds models."""
    with asyncio.Runner() as runner:
        kept = Repository(sources, settings=RepositorySettings(watch_seconds=0), limits=limits)
        runner.run(kept.start())
        try:
            yield Asked(runner, application(kept, access=Access(token)), kept)
        finally:
            runner.run(kept.close())


@contextmanager
def serving(sources: Sequence[Source], *, token: str | None = None, grpc: bool = False) -> Iterator[Addresses]:
    """A server on free ports, in a thread, until the block ends."""
    loop = asyncio.new_event_loop()
    kept = Repository(sources, settings=RepositorySettings(watch_seconds=0))
    settings = ServeSettings(http_port=0, grpc_port=0 if grpc else None, shutdown_seconds=60)
    server = Server(kept, settings, token=token)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        addresses = asyncio.run_coroutine_threadsafe(server.start(), loop).result(600)
        try:
            yield addresses
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(600)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def sources(**paths: Path) -> tuple[Source, ...]:
    """Models by name."""
    return tuple(Source(name, path) for name, path in paths.items())
