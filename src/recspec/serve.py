"""A server: the repository's models behind HTTP and gRPC, from its start to its graceful end.

How routes are added: a room on a line below this one has a function `routes(repository: Repository) -> list[Route]`
(Starlette's), and stands in `ROUTES`. A handler

- finds a model with `with repository.use(name) as form:`, which keeps it open while it is replaced meanwhile; its
  `form.model.predictor` speaks raw rows, users and items (None where the folder is an export);
- computes on the model's own thread, within the queue's limits: `await form.model.batcher.call(lambda: ...)`;
- reads a body with `async with repository.intake.body(request) as body:` and `bodies.parse_object(body)`;
- answers with `bodies.answer(data)`, and raises `RequestError(message, status=...)`; another `RecspecError` is a 400.

The token, the checks of host and origin, the limit of requests, counting and timing surround every route;
`repository.telemetry.text()` is what Prometheus reads. Paths in `OPEN` are answered without a token, and beyond the
limit.
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

from recspec import config, inference_protocol, people
from recspec.access import Access, Certificate, check_hosts, is_public, refuse_other_origins
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

HEAD_BYTES = 64 << 10
"""Of a request's head; browsers and proxies stay below 16 KB."""
HEAD_SECONDS = 20.0
"""From a connection, or a request's first byte, to the end of its head."""
LINGER_SECONDS = 5.0
"""For the rest of a body that was refused before it had come; then the connection is closed."""
FORCE_SECONDS = 5.0
"""Beyond the time for a graceful end, after which the process ends by force."""

PIECE = 64 << 10
"""Bytes of an answer that are written at once."""

QUIET = {"uvicorn.error": logging.ERROR, "grpc._cython.cygrpc": logging.CRITICAL}
"""Logs that tell of each request that is no HTTP, or that its client calls off: clients could fill a disk with them."""

log = logging.getLogger("recspec.serve")


class ServeSettings(config.Settings):
    """Where a server listens, and how it ends."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen at; 0.0.0.0 lets other machines in")
    http_port: int = Field(8000, ge=0, le=65_535, description="HTTP port; 0 picks a free one")
    grpc_port: int | None = Field(8001, ge=0, le=65_535, description="gRPC port; 0 picks a free one, none: no gRPC")
    allowed_hosts: tuple[str, ...] = Field((), description="further host names that clients call the server by")
    insecure: bool = Field(False, description="let other machines in without a token")
    tls_cert: Path | None = Field(None, description="certificate in PEM, with its chain; HTTPS and gRPC over TLS")
    tls_key: Path | None = Field(None, description="its private key in PEM, without a password")
    shutdown_seconds: float = Field(30.0, ge=0, description="for requests under way when the server is asked to stop")
    keep_alive_seconds: int = Field(75, ge=1, description="that an idle connection stays open")
    write_seconds: float = Field(30.0, gt=0, description="that a client may read nothing of its answer")
    max_connections: int = Field(512, ge=1, description="open at once, by protocol; more are closed")


@dataclass(frozen=True)
class Addresses:
    """Where a server listens."""

    http: str
    grpc: str | None


def application(repository: Repository, *, access: Access | None = None, routes: Sequence[Routes] = ROUTES) -> ASGIApp:
    """Everything that HTTP is answered by."""
    found = [route for each in routes for route in each(repository)]
    handlers: dict[Any, Any] = {
        RecspecError: _refused,
        RecursionError: _too_deep,
        HTTPException: _not_routed,
        Exception: _failed,
    }
    return _Front(Starlette(routes=found, exception_handlers=handlers), repository, access or Access())


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

    def __init__(self, app: ASGIApp, repository: Repository, access: Access) -> None:
        self._app, self._repository, self._access = app, repository, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), [499]  # of a client that went away, as nginx says

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                await send(message)
            else:
                await self._write(message, send)

        try:
            try:
                self._check(scope)
                with contextlib.nullcontext() if scope["path"] in OPEN else self._repository.intake.answering():
                    await self._app(scope, receive, counted)
            except RequestError as problem:  # the application answers its own
                await refusal(problem)(scope, receive, counted)
        finally:
            self._count(scope, status[0], time.perf_counter() - began)

    async def _write(self, message: Message, send: Send) -> None:
        """Send a body in pieces, each once most of those before it were read; until then it counts as held."""
        body = message.get("body", b"")
        if len(body) <= PIECE:
            await send(message)
            return
        last = (len(body) - 1) // PIECE * PIECE
        with self._repository.intake.writing(len(body)):
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
        told, asked = self._repository.telemetry, scope.get("path_params", {}).get("model", scope.get(people.ASKED))
        model = asked if asked in self._repository.names else NO_MODEL
        route = getattr(scope.get("endpoint"), "__name__", "none")
        told.count("recspec_requests_total", protocol="http", route=route, model=model, status=str(status))
        told.observe("recspec_request_seconds", seconds, protocol="http", route=route)


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
            SettingsError: if an address is taken, is not this machine's, or lets in whom it should not.
        """
        settings = self.settings
        self._check_access()
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
        self._http = self._make_http()
        self._tasks = [asyncio.create_task(self._http.serve([listening])), asyncio.create_task(self._hang_up())]
        while not self._http.started and not self._tasks[0].done():
            await asyncio.sleep(0.005)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme, http_port = "https" if self._certificate else "http", listening.getsockname()[1]
        return Addresses(f"{scheme}://{host}:{http_port}", f"{host}:{grpc_port}" if grpc_port is not None else None)

    async def stop(self) -> None:
        """Take no new requests, answer those under way within the bound, and close the models."""
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
        """Refuse settings that let in more than the user can have meant.

        Raises:
            SettingsError: saying what to set.
        """
        settings, token = self.settings, self._access.token
        problems = []
        if self.repository.settings.control and token is None:
            problems.append("--control: whoever may ask could unload the models; give a token too "
                            "(--token-file FILE, or the variable RECSPEC_TOKEN)")  # fmt: skip
        if is_public(settings.host) and token is None and not settings.insecure:
            problems.append(f"--host {settings.host}: lets other machines in without a token; give one "
                            "(--token-file FILE, or the variable RECSPEC_TOKEN), or say --insecure")  # fmt: skip
        if problems:
            raise SettingsError.of("serve", problems)
        check_hosts(settings.allowed_hosts)
        if is_public(settings.host) and token is None:
            log.warning("%s: whoever reaches this address may ask the models; no token is asked for", settings.host)
        if is_public(settings.host) and token is not None and self._certificate is None:
            log.warning("%s: the token travels unencrypted; give --tls-cert and --tls-key, or put a proxy before it",
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
        """Close connections whose clients read nothing: what is written for them would stay in memory."""
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
        from recspec.inference_grpc import listen, make_server

        server = make_server(self.repository, access=self._access, max_connections=self.settings.max_connections)
        port = listen(server, self.settings.host, self.settings.grpc_port, self._certificate)
        await server.start()
        self._grpc = server
        return port


def _certificate(settings: ServeSettings) -> Certificate | None:
    """The certificate of settings, if they name one.

    Raises:
        SettingsError: if they name half of it, or one that can't be used.
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
        ready: Is told where the server listens, once everything answers.
        force: Ends the process whatever its threads do, and is told why; called `FORCE_SECONDS` after the time for a
            graceful end. Should it not, or can't it run, the process ends with a traceback of its threads.

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
            held = Repository(sources, settings=repository, limits=limits, telemetry=Telemetry())
            runner.run(run(ending))
        if held.given_up:
            force("computations that were given up still run")


class _Ending:
    """SIGTERM and SIGINT: the first asks for an end and bounds its time, a second ends the process at once.

    The handlers need no event loop, so that a loop which is busy or stuck is ended as well.
    """

    def __init__(self, seconds: float, force: Callable[[str], object]) -> None:
        self._seconds, self._force = seconds, force
        self._timer: threading.Timer | None = None
        self._wake: Callable[[], object] = bool
        self._before: dict[signal.Signals, Any] = {}

    def on(self, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """An event of a loop that is set when the end is asked for."""
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
            self._force("asked to end twice")
            return
        self._timer = threading.Timer(self._seconds, self._force, ["requests or models did not end in time"])
        self._timer.daemon = True
        self._timer.start()
        if sys.__stderr__ is not None:  # should something hold the interpreter's lock, so that the timer can't run
            faulthandler.dump_traceback_later(self._seconds + 2, exit=True, file=sys.__stderr__)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._wake()


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
    try:  # :: means every address of both families, as it does to gRPC
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=host == "::")
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


class _Connection:
    """A transport that may be written to when it is closed already, as asyncio's may and uvloop's may not.

    uvicorn tells the last of pipelined requests alone that the client went away.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.close, self.is_closing = transport.close, transport.is_closing

    def write(self, data: bytes) -> None:
        """Write, or do nothing."""
        with contextlib.suppress(RuntimeError):
            self._transport.write(data)


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with bounds on a request's head and on connections, and with answers to half-closed ones."""

    def __init__(self, *given: Any, max_connections: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._max_connections = max_connections
        self._head: int | None = 0
        self._bound: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The head of the first request must come in time."""
        super().connection_made(transport)
        self._bound = self.loop.call_later(HEAD_SECONDS, self._refuse, 408)
        if len(self.connections) > self._max_connections:
            self._refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is expected."""
        self._stop_timer()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent its whole request, and closes its side of the connection, gets its answer."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self.scheme == "https":
            return False
        self.cycle.keep_alive = False  # of the last of pipelined requests; those before it are answered first
        return True

    def on_message_begin(self) -> None:
        """A head begins."""
        self._stop_timer()
        self._head = 0
        self._bound = self.loop.call_later(HEAD_SECONDS, self._refuse, 408)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._stop_timer()
        self._head = None
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = cast(Any, _Connection(self.transport))

    def on_message_complete(self) -> None:
        """A body is whole."""
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A body that was refused before it had come may not come forever."""
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing() and not self.pipeline:
            self._stop_timer()
            self._bound = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """More bytes, of a head or of a body."""
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
        if self.cycle is not None and not self.cycle.response_complete:  # an answer is being written
            self.transport.close()
            return
        words = {408: b"408 Request Timeout", 431: b"431 Request Header Fields Too Large",
                 503: b"503 Service Unavailable"}[status]  # fmt: skip
        self.transport.write(b"HTTP/1.1 " + words + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
