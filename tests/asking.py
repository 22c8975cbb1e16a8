"""Asking a server's application without a network, and a server in a thread of its own where one is needed."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message

from recspec.serving.access import Access
from recspec.serving.model_folders import Source
from recspec.serving.pages import document
from recspec.serving.repository import Repository
from recspec.serving.server import Addresses, Server, ServerOptions, application
from recspec.serving.server_metrics import ServerMetrics
from recspec.serving.settings import Limits, RepositorySettings, ServeSettings
from recspec.serving.showing import Showing

T = TypeVar("T")


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
    app: ASGIApp,
    method: str,
    target: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    got: list[Message] | None = None,
) -> Answer:
    """One request; what is not bytes is sent as JSON. The messages of the answer are put into `got`."""
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
    got = [] if got is None else got

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
def asking(
    sources: Sequence[Source],
    *,
    limits: Limits | None = None,
    token: str | None = None,
    settings: RepositorySettings | None = None,
    showing: Showing | None = None,
) -> Iterator[Asked]:
    """The application of a server that holds models."""
    with asyncio.Runner() as runner:
        kept = Repository(sources, settings=settings or RepositorySettings(watch=0), limits=limits, showing=showing)
        runner.run(kept.start())
        try:
            yield Asked(runner, application(kept, access=Access(token)), kept)
        finally:
            runner.run(kept.close())


class Running:
    """A server on free ports, on its own loop in a thread of its own, until its `with` block ends."""

    def __init__(
        self,
        sources: Sequence[Source],
        limits: Limits | None = None,
        token: str | None = None,
        *,
        control: bool = False,
        watch: float = 0,
        journal: str | None = None,
        showing: Showing | None = None,
        **settings: Any,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        chosen = ServeSettings(**{"http_port": 0, "grpc_port": 0, "shutdown_seconds": 60, **settings})
        opening = RepositorySettings(watch=watch, control=control, journal=journal)
        options = ServerOptions(sources, chosen, opening, limits or Limits(), token, showing or Showing())

        async def start() -> tuple[Server, Addresses]:
            server = Server(options)
            return server, await server.start()

        try:
            self.server, self.addresses = self.call(start())
        except BaseException:
            self._end()
            raise
        self.repository = self.server.repository
        self.host = self.addresses.http.partition("://")[2]
        self.grpc = str(self.addresses.grpc)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(600)

    def stop(self) -> None:
        """End gracefully."""
        try:
            self.call(self.server.stop())
        finally:
            self._end()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def send(
        self, method: str, path: str, body: bytes | str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON (or bytes) of one request."""
        connection = http.client.HTTPConnection(self.host, timeout=600)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            told = connection.getresponse()
            data = told.read()
            named = {name.lower(): value for name, value in told.getheaders()}
            is_json = named.get("content-type", "").startswith("application/json")
            return told.status, named, json.loads(data) if is_json else data
        finally:
            connection.close()


@contextmanager
def serving(sources: Sequence[Source], *, token: str | None = None, **options: Any) -> Iterator[Addresses]:
    """A server without gRPC, until the block ends; for the options see `Running`."""
    with Running(sources, token=token, grpc_port=None, **options) as running:
        yield running.addresses


def sources(**paths: Path) -> tuple[Source, ...]:
    """Models by name."""
    return tuple(Source(name, path) for name, path in paths.items())


def fits(data: object, schema: str) -> None:
    """An answer is what the OpenAPI document says."""
    import jsonschema

    checked = {"$ref": f"#/components/schemas/{schema}", "components": document()["components"]}
    jsonschema.Draft202012Validator(checked).validate(data)
