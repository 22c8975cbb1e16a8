"""A server: the repository's models behind HTTP and gRPC, from its start to its graceful end.

How routes are added: a room on a line below this one has a function `routes(repository: Repository) -> list[Route]`
(Starlette's), and stands in `ROUTES`. A handler

- finds a model with `with repository.use(name) as form:`, which keeps it open while it is replaced meanwhile; its
  `form.model.predictor` speaks raw rows, users and items (None where the folder is an export);
- computes on the model's own thread, within the queue's limits: `await form.model.batcher.call(lambda: ...)`;
- reads a body with `async with repository.intake.body(request) as body:` and `bodies.parse_object(body)`;
- answers with `bodies.answer(data)`, and raises `RequestError(message, status=...)`; another `RecspecError` is a 400.

The token, the check of the origin, counting and timing surround every route; `repository.telemetry.text()` is what
Prometheus reads. Paths in `OPEN` are answered without a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from recspec import config, inference_protocol, people
from recspec.batching import Limits
from recspec.bodies import answer, refusal
from recspec.errors import RecspecError, RequestError, SettingsError
from recspec.repository import Repository, RepositorySettings, Source
from recspec.telemetry import NO_MODEL, Telemetry

if TYPE_CHECKING:
    from grpc import aio

Routes = Callable[[Repository], Sequence[BaseRoute]]

ROUTES: tuple[Routes, ...] = (inference_protocol.routes, people.routes)
"""Each room's routes; the first that fits a path answers."""

OPEN = frozenset({"/v2/health/live", "/v2/health/ready", "/", "/docs", "/openapi.json"})
"""Paths that are answered without a token: those a load balancer asks, and pages that tell nothing of the models."""

TOKEN_VARIABLE = "RECSPEC_TOKEN"
HEAD_BYTES = 64 << 10
"""Of a request's head; browsers and proxies stay below 16 KB."""
HEAD_SECONDS = 20.0
"""From a connection, or a request's first byte, to the end of its head."""


class ServeSettings(config.Settings):
    """Where a server listens, and how it ends."""

    host: str = Field("127.0.0.1", description="address to listen at; 0.0.0.0 lets other machines in")
    http_port: int = Field(8000, ge=0, le=65_535, description="of HTTP; 0: any that is free")
    grpc_port: int | None = Field(8001, ge=0, le=65_535, description="of gRPC; none: HTTP alone")
    shutdown_seconds: float = Field(30.0, ge=0, description="for requests under way when the server is asked to stop")
    keep_alive_seconds: int = Field(75, ge=1, description="that an idle connection stays open")


@dataclass(frozen=True)
class Addresses:
    """Where a server listens."""

    http: str
    grpc: str | None


def read_token(environment: Mapping[str, str], file: Path | None = None) -> str | None:
    """The bearer token from a file, or else from the variable RECSPEC_TOKEN; None without. Never from argv.

    Raises:
        SettingsError: if it can't be read, is empty, or holds what a header can't.
    """
    where = f"token file {file}" if file is not None else TOKEN_VARIABLE
    if file is None and TOKEN_VARIABLE not in environment:
        return None
    try:
        token = (file.read_text(encoding="utf-8") if file is not None else environment[TOKEN_VARIABLE]).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where}: can't be read: {error}") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise SettingsError(f"{where}: expected one line of letters, digits and signs, without blanks")
    return token


def application(repository: Repository, *, token: str | None = None, routes: Sequence[Routes] = ROUTES) -> ASGIApp:
    """Everything that HTTP is answered by."""
    found = [route for each in routes for route in each(repository)]
    handlers: dict[Any, Any] = {
        RecspecError: _refused,
        RecursionError: _too_deep,
        HTTPException: _not_routed,
        Exception: _failed,
    }
    return _Front(Starlette(routes=found, exception_handlers=handlers), repository, token)


async def _refused(_: Request, error: RecspecError) -> Response:
    return refusal(error)


async def _too_deep(_: Request, __: RecursionError) -> Response:
    """Of lists in lists that JSON's reader still takes, but Python can't show in a message."""
    return answer({"error": "the body is nested too deeply"}, 400)


async def _not_routed(request: Request, error: HTTPException) -> Response:
    told = {404: f"no route {request.scope['path'][:100]!r}", 405: f"{request.method} is not answered here"}
    return answer({"error": told.get(error.status_code, error.detail)}, error.status_code, error.headers)


async def _failed(_: Request, __: Exception) -> Response:
    """Our own mistake: uvicorn's log has the traceback, the client none of it."""
    return answer({"error": "the server failed; its log says why"}, 500)


class _Front:
    """What stands before every route: who may ask, and what is counted."""

    def __init__(self, app: ASGIApp, repository: Repository, token: str | None) -> None:
        self._app, self._repository = app, repository
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), [499]  # of a client that went away, as nginx says

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            problem = self._problem(scope)
            if problem is not None:
                await refusal(problem)(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            self._count(scope, status[0], time.perf_counter() - began)

    def _problem(self, scope: Scope) -> RequestError | None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and _place(origin) != headers.get(b"host", b"").decode("latin-1").lower():
            # Any page that a user of this machine opens may post to localhost; only our own may be answered.
            return RequestError("requests from pages of other origins are not answered", status=403)
        if self._expected is None or scope["path"] in OPEN:
            return None
        if hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return None
        return RequestError("expected the header 'Authorization: Bearer TOKEN'", status=401)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        told, asked = self._repository.telemetry, scope.get("path_params", {}).get("model", scope.get(people.ASKED))
        model = asked if asked in self._repository.names else NO_MODEL
        route = getattr(scope.get("endpoint"), "__name__", "none")
        told.count("recspec_requests_total", protocol="http", route=route, model=model, status=str(status))
        told.observe("recspec_request_seconds", seconds, protocol="http", route=route)


def _place(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


# --- lifecycle -------------------------------------------------------------------------------------------------------


class Server:
    """A repository that listens: `await start()`, then `await stop()`; or `await run()` until a signal comes."""

    def __init__(
        self,
        repository: Repository,
        settings: ServeSettings | None = None,
        *,
        token: str | None = None,
        routes: Sequence[Routes] = ROUTES,
    ) -> None:
        self.repository, self.settings, self._token = repository, settings or ServeSettings(), token
        self._app = application(repository, token=token, routes=routes)
        self._http: _Uvicorn | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._grpc: aio.Server | None = None

    async def start(self) -> Addresses:
        """Open the models, then listen.

        Raises:
            BundleError: if a model can't be opened.
            SettingsError: if an address is taken, or is not this machine's.
        """
        settings = self.settings
        listening = _listen(settings.host, settings.http_port)
        try:
            if settings.grpc_port:  # gRPC itself would write of a taken port into the log before it fails
                _listen(settings.host, settings.grpc_port, "gRPC").close()
            await self.repository.start()
            grpc_port = await self._start_grpc()
        except BaseException:
            listening.close()
            await self.repository.close()
            raise
        http_port = listening.getsockname()[1]
        self._http = _Uvicorn(
            uvicorn.Config(
                self._app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=settings.keep_alive_seconds,
                timeout_graceful_shutdown=max(1, round(settings.shutdown_seconds)),
            )
        )
        self._http_task = asyncio.create_task(self._http.serve([listening]))
        while not self._http.started and not self._http_task.done():
            await asyncio.sleep(0.005)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        return Addresses(f"http://{host}:{http_port}", f"{host}:{grpc_port}" if grpc_port is not None else None)

    async def stop(self) -> None:
        """Take no new requests, answer those under way within the bound, and close the models."""
        seconds = self.settings.shutdown_seconds
        ends: list[Any] = []
        if self._grpc is not None:
            ends.append(self._grpc.stop(seconds))
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            ends.append(self._http_task)
        await asyncio.gather(*ends)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(1.0, seconds)):
                await self.repository.close()

    async def run(self, ready: Callable[[Addresses], None]) -> None:
        """Serve until SIGTERM or SIGINT; `ready` is told where, once everything answers."""
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, asked.set)
        try:
            ready(await self.start())
            await asked.wait()
            await self.stop()
        finally:
            for each in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(each)

    async def _start_grpc(self) -> int | None:
        if self.settings.grpc_port is None:
            return None
        from recspec.inference_grpc import make_server

        server = make_server(self.repository, token=self._token)
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        try:
            port = int(server.add_insecure_port(f"{host}:{self.settings.grpc_port}"))
        except RuntimeError:
            raise SettingsError(f"gRPC: can't listen at {host}:{self.settings.grpc_port}; take another port") from None
        await server.start()
        self._grpc = server
        return port


def serve(
    sources: Sequence[Source],
    settings: ServeSettings | None = None,
    *,
    repository: RepositorySettings | None = None,
    limits: Limits | None = None,
    token: str | None = None,
    ready: Callable[[Addresses], None] = lambda _: None,
) -> None:
    """Serve models until SIGTERM or SIGINT.

    Raises:
        BundleError, SettingsError: as `Server.start`.
    """

    async def run() -> None:
        held = Repository(sources, settings=repository, limits=limits, telemetry=Telemetry())
        await Server(held, settings, token=token).run(ready)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed, which takes a third off a small request's time."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _listen(host: str, port: int, protocol: str = "HTTP") -> socket.socket:
    """A socket that listens.

    Raises:
        SettingsError: if the address is taken, or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        option = f"--{protocol.lower()}-port"
        why = str(error.strerror or error).partition(" (while attempting")[0]
        raise SettingsError(f"{protocol}: can't listen at {host}:{port}: {why}; take another {option}") from None


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: HTTP and gRPC end together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with bounds on a request's head: httptools has none."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head: int | None = 0
        self._slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The head of the first request must come in time."""
        super().connection_made(transport)
        self._slow = self.loop.call_later(HEAD_SECONDS, self._refuse, 408)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is expected."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._stop_timer()
        self._head = 0
        self._slow = self.loop.call_later(HEAD_SECONDS, self._refuse, 408)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._stop_timer()
        self._head = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """More bytes, of a head or of a body."""
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > HEAD_BYTES:
                self._refuse(431)

    def _stop_timer(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _refuse(self, status: int) -> None:
        self._stop_timer()
        if self.transport is None or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # an answer is being written
            self.transport.close()
            return
        words = {408: b"408 Request Timeout", 431: b"431 Request Header Fields Too Large"}[status]
        self.transport.write(b"HTTP/1.1 " + words + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
