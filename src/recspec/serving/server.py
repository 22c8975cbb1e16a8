"""A server: the repository's models behind HTTP and gRPC, from its start to its graceful end.

To add routes, write a function `routes(repository: Repository) -> list[Route]` (Starlette's) in a file of this folder
and add it to `ROUTES`. A handler

- opens a model with `with repository.use(name) as form:`, which keeps it open if it is replaced meanwhile; its
  `form.model.opened.predictor` takes raw rows, users and items (None if the folder is an export);
- computes on the model's own thread, within the queue's limits: `await form.model.batcher.call(lambda: ...)`;
- reads a body with `async with repository.body_reader.body(request) as body:` and `request_body.parse_object(body)`;
- answers with `responses.json_response(data)`, or raises `RequestError(message, status=...)`; another `RecspecError` is
  a 400.

Every route is surrounded by the token, the checks of host and origin, the limit of requests, and the metrics. Paths in
`OPEN` need no token and have no limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from recspec import config
from recspec.errors import RecspecError, RequestError, SettingsError
from recspec.serving import inference_protocol, json_routes
from recspec.serving.access import Access, Certificate, check_hosts, is_public, refuse_other_origins
from recspec.serving.batching import Limits
from recspec.serving.opened_model import RepositorySettings
from recspec.serving.repository import Repository
from recspec.serving.responses import error_response, json_response
from recspec.serving.server_metrics import NO_MODEL
from recspec.serving.sources import Source

if TYPE_CHECKING:
    from grpc import aio

Routes = Callable[[Repository], Sequence[BaseRoute]]

ROUTES: tuple[Routes, ...] = (inference_protocol.routes, json_routes.routes)
"""The routes of each file; the first that fits a path answers."""

OPEN = frozenset({"/v2/health/live", "/v2/health/ready", "/", "/docs", "/openapi.json"})
"""Paths that need no token: health for load balancers, and pages without facts about the models."""

HEAD_BYTES = 64 << 10
"""Largest head of a request; browsers and proxies stay below 16 KB."""
HEAD_SECONDS = 20.0
"""Time limit for a request's head, from the connection or the request's first byte."""
LINGER_SECONDS = 5.0
"""Time limit for the rest of a refused body; then the connection is closed."""
FORCE_SECONDS = 5.0
"""Time after the graceful end until the process ends by force."""

PIECE = 64 << 10
"""Bytes of an answer written at once."""

QUIET = {"uvicorn.error": logging.ERROR, "grpc._cython.cygrpc": logging.CRITICAL}
"""Logs with a line for each malformed or cancelled request, with which clients could fill a disk."""

log = logging.getLogger("recspec.serve")


class ServeSettings(config.Settings):
    """Settings of a server's addresses, connections and end."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen at; 0.0.0.0 admits other machines")
    http_port: int = Field(8000, ge=0, le=65_535, description="HTTP port; 0 picks a free one")
    grpc_port: int | None = Field(
        8001, ge=0, le=65_535, description="gRPC port; 0 picks a free one, none turns gRPC off"
    )
    allowed_hosts: tuple[str, ...] = Field((), description="further host names of the server")
    insecure: bool = Field(False, description="admit other machines without a token")
    tls_cert: Path | None = Field(None, description="certificate in PEM, with its chain; HTTPS and gRPC over TLS")
    tls_key: Path | None = Field(None, description="the certificate's private key in PEM, without a password")
    shutdown_seconds: float = Field(30.0, ge=0, description="time for requests under way after a request to stop")
    keep_alive_seconds: int = Field(75, ge=1, description="time that an idle connection stays open")
    write_seconds: float = Field(30.0, gt=0, description="longest pause of a client while it reads its answer")
    max_connections: int = Field(512, ge=1, description="open connections of each protocol; more are closed")


@dataclass(frozen=True)
class Addresses:
    """Where a server listens."""

    http: str
    grpc: str | None


def application(repository: Repository, *, access: Access | None = None, routes: Sequence[Routes] = ROUTES) -> ASGIApp:
    """The HTTP application, with every route and check."""
    found = [route for each in routes for route in each(repository)]
    handlers: dict[Any, Any] = {
        RecspecError: _refused,
        RecursionError: _too_deep,
        HTTPException: _not_routed,
        Exception: _failed,
    }
    return _Front(Starlette(routes=found, exception_handlers=handlers), repository, access or Access())


async def _refused(_: Request, error: RecspecError) -> Response:
    return error_response(error)


async def _too_deep(_: Request, __: RecursionError) -> Response:
    """For nested lists that the JSON parser accepts, but Python can't format for a message."""
    return json_response({"error": "the body is nested too deeply"}, 400)


async def _not_routed(request: Request, error: HTTPException) -> Response:
    messages = {404: f"no route {request.scope['path'][:100]!r}", 405: f"{request.method} is not answered here"}
    return json_response({"error": messages.get(error.status_code, error.detail)}, error.status_code, error.headers)


async def _failed(_: Request, __: Exception) -> Response:
    """For our own bugs: the traceback goes to uvicorn's log, and not to the client."""
    return json_response({"error": "the server failed; its log says why"}, 500)


class _Front:
    """Surrounds every route with access checks, limits and metrics."""

    def __init__(self, app: ASGIApp, repository: Repository, access: Access) -> None:
        self._app, self._repository, self._access = app, repository, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), [499]  # client closed the request, as in nginx

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                await send(message)
            else:
                await self._write(message, send)

        try:
            try:
                self._check(scope)
                with contextlib.nullcontext() if scope["path"] in OPEN else self._repository.body_reader.answering():
                    await self._app(scope, receive, counted)
            except RequestError as problem:  # raised here; the application answers its own
                await error_response(problem)(scope, receive, counted)
        finally:
            self._count(scope, status[0], time.perf_counter() - began)

    async def _write(self, message: Message, send: Send) -> None:
        """Send a body in pieces, each after most of the earlier ones are read; until then it counts as held."""
        body = message.get("body", b"")
        if len(body) <= PIECE:
            await send(message)
            return
        last = (len(body) - 1) // PIECE * PIECE
        with self._repository.body_reader.writing(len(body)):
            for start in range(0, last, PIECE):
                await send({**message, "body": body[start : start + PIECE], "more_body": True})
            await send({**message, "body": body[last:]})

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        self._access.refuse_host(headers, scope["http_version"])
        refuse_other_origins(headers)
        if scope["path"] not in OPEN and not self._access.knows(dict(headers).get(b"authorization", b"")):
            raise RequestError("expected the header 'Authorization: Bearer TOKEN'", status=401)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        metrics = self._repository.metrics
        requested = scope.get("path_params", {}).get("model", scope.get(json_routes.REQUESTED_MODEL))
        model = requested if requested in self._repository.names else NO_MODEL
        route = getattr(scope.get("endpoint"), "__name__", "none")
        metrics.requests.labels("http", route, model, str(status)).inc()
        metrics.request_seconds.labels("http", route).observe(seconds)


# --- lifecycle -------------------------------------------------------------------------------------------------------


class Server:
    """A repository that listens: `await start()`, then `await stop()`."""

    def __init__(
        self,
        repository: Repository,
        settings: ServeSettings | None = None,
        *,
        token: str | None = None,
        routes: Sequence[Routes] = ROUTES,
    ) -> None:
        self.repository, self.settings = repository, settings or ServeSettings()
        self._access = Access.of(self.settings.host, token, self.settings.allowed_hosts)
        self._app = application(repository, access=self._access, routes=routes)
        self._certificate = _certificate(self.settings)
        self._http: _Uvicorn | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._grpc: aio.Server | None = None

    async def start(self) -> Addresses:
        """Open the models, then listen.

        Raises:
            BundleError: if a model can't be opened.
            SettingsError: if an address is taken or not this machine's, or the settings are unsafe.
        """
        settings = self.settings
        self._check_access()
        listening = _listen(settings.host, settings.http_port)
        try:
            if settings.grpc_port:  # for a taken port, gRPC itself would write to the log before it fails
                _listen(settings.host, settings.grpc_port, "gRPC").close()
            await self.repository.start()
            grpc_port = await self._start_grpc()
        except BaseException:
            listening.close()
            await self.repository.close()
            raise
        self._http = self._make_http()
        self._tasks = [asyncio.create_task(self._http.serve([listening])), asyncio.create_task(self._hang_up())]
        while not self._http.started and not self._tasks[0].done():
            await asyncio.sleep(0.005)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme, http_port = "https" if self._certificate else "http", listening.getsockname()[1]
        return Addresses(f"{scheme}://{host}:{http_port}", f"{host}:{grpc_port}" if grpc_port is not None else None)

    async def stop(self) -> None:
        """Take no new requests, answer those under way within the time limit, and close the models."""
        seconds = self.settings.shutdown_seconds
        ends: list[Any] = []
        if self._grpc is not None:
            ends.append(self._grpc.stop(seconds))
        if self._http is not None:
            self._http.should_exit = True
            ends.append(self._tasks[0])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + FORCE_SECONDS / 2):
                await asyncio.gather(*ends)
                await self.repository.close()
        for task in self._tasks:
            task.cancel()

    def _check_access(self) -> None:
        """Refuse settings that admit clients by accident.

        Raises:
            SettingsError: with the settings to change.
        """
        settings, token = self.settings, self._access.token
        problems = []
        if self.repository.settings.control and token is None:
            problems.append("--control: any client could unload the models; give a token too "
                            "(--token-file FILE, or the variable RECSPEC_TOKEN)")  # fmt: skip
        if is_public(settings.host) and token is None and not settings.insecure:
            problems.append(f"--host {settings.host}: admits other machines without a token; give one "
                            "(--token-file FILE, or the variable RECSPEC_TOKEN), or add --insecure")  # fmt: skip
        if problems:
            raise SettingsError.of("serve", problems)
        check_hosts(settings.allowed_hosts)
        if is_public(settings.host) and token is None:
            log.warning(
                "%s: every client that reaches this address may use the models; no token is needed", settings.host
            )
        if is_public(settings.host) and token is not None and self._certificate is None:
            log.warning("%s: the token is sent unencrypted; give --tls-cert and --tls-key, or use a proxy with TLS",
                        settings.host)  # fmt: skip

    def _make_http(self) -> _Uvicorn:
        settings = self.settings
        given = uvicorn.Config(
            self._app,
            http=partial(_Protocol, max_connections=settings.max_connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.keep_alive_seconds,
            timeout_graceful_shutdown=max(1, round(settings.shutdown_seconds)),
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        return _Uvicorn(given)

    async def _hang_up(self) -> None:
        """Close connections whose clients read nothing, because their answers stay in memory."""
        assert self._http is not None
        seen: dict[Any, int] = {}
        while True:
            await asyncio.sleep(self.settings.write_seconds)
            unread = {each: each.transport.get_write_buffer_size() for each in self._http.server_state.connections}
            for connection, size in unread.items():
                if size and seen.get(connection) == size:
                    connection.transport.abort()
            seen = {each: size for each, size in unread.items() if size}

    async def _start_grpc(self) -> int | None:
        if self.settings.grpc_port is None:
            return None
        from recspec.serving.inference_grpc import listen, make_server

        server = make_server(self.repository, access=self._access, max_connections=self.settings.max_connections)
        port = listen(server, self.settings.host, self.settings.grpc_port, self._certificate)
        await server.start()
        self._grpc = server
        return port


def _certificate(settings: ServeSettings) -> Certificate | None:
    """The certificate in the settings, if there is one.

    Raises:
        SettingsError: if its key is missing, or it can't be used.
    """
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise SettingsError(f"--tls-{'key' if cert is None else 'cert'}: expected --tls-cert and --tls-key together")
    found = Certificate(cert, key)
    found.check()
    return found


def serve(
    sources: Sequence[Source],
    settings: ServeSettings | None = None,
    *,
    repository: RepositorySettings | None = None,
    limits: Limits | None = None,
    token: str | None = None,
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
    settings = settings or ServeSettings()

    async def run(ending: _Ending) -> None:
        asked = ending.on(asyncio.get_running_loop())
        server = Server(held, settings, token=token)
        ready(await server.start())
        await asked.wait()
        await server.stop()

    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)
    with _Ending(settings.shutdown_seconds + FORCE_SECONDS, force) as ending:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            held = Repository(sources, settings=repository, limits=limits)
            runner.run(run(ending))
        if held.given_up:
            force("abandoned computations still run")


class _Ending:
    """SIGTERM and SIGINT: the first starts a graceful end with a time limit, a second ends the process at once.

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
        self._before = {each: signal.signal(each, self._ask) for each in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
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


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop if it is installed, which saves a third of a small request's time."""
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
    try:  # :: means every address of both families, as in gRPC
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=host == "::")
    except OSError as error:
        option = f"--{protocol.lower()}-port"
        why = str(error.strerror or error).partition(" (while attempting")[0]
        raise SettingsError(f"{protocol}: can't listen at {host}:{port}: {why}; take another {option}") from None


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers, because HTTP and gRPC end together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class _Connection:
    """A transport that ignores writes after it is closed, as asyncio's does and uvloop's does not.

    uvicorn notices a closed connection for the last of pipelined requests only.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.close, self.is_closing = transport.close, transport.is_closing

    def write(self, data: bytes) -> None:
        """Write, unless the transport is closed."""
        with contextlib.suppress(RuntimeError):
            self._transport.write(data)


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with limits on heads and connections, and with answers to half-closed connections."""

    def __init__(self, *given: Any, max_connections: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._max_connections = max_connections
        self._head: int | None = 0
        self._bound: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the time limit for the head of the first request."""
        super().connection_made(transport)
        self._bound = self.loop.call_later(HEAD_SECONDS, self._refuse, 408)
        if len(self.connections) > self._max_connections:
            self._refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that closes its side of the connection after a whole request."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self.scheme == "https":
            return False
        self.cycle.keep_alive = False  # the last of pipelined requests; earlier ones are answered first
        return True

    def on_message_begin(self) -> None:
        """Start the time limit of a head."""
        self._stop_timer()
        self._head = 0
        self._bound = self.loop.call_later(HEAD_SECONDS, self._refuse, 408)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the time limit of a head."""
        self._stop_timer()
        self._head = None
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = cast(Any, _Connection(self.transport))

    def on_message_complete(self) -> None:
        """Stop the timer at the end of a body."""
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time for the rest of a refused body."""
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing() and not self.pipeline:
            self._stop_timer()
            self._bound = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Take in bytes, and refuse a head that is too large."""
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > HEAD_BYTES:
                self._refuse(431)

    def _stop_timer(self) -> None:
        if self._bound is not None:
            self._bound.cancel()
            self._bound = None

    def _refuse(self, status: int) -> None:
        self._stop_timer()
        if self.transport is None or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # an answer is under way
            self.transport.close()
            return
        words = {408: b"408 Request Timeout", 431: b"431 Request Header Fields Too Large",
                 503: b"503 Service Unavailable"}[status]  # fmt: skip
        self.transport.write(b"HTTP/1.1 " + words + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
