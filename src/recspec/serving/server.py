"""A server: the repository's models behind HTTP and gRPC, from its start to its graceful end.

To add routes, write a function `routes(repository: Repository) -> list[Route]` (Starlette's) in a file of this folder
and add it to `ROUTES`. A handler reads a body with `repository.body_reader.body(request)`, keeps a model open with
`repository.use(name)`, and computes on the model's thread with `endpoint.model.batcher.call(...)`. It answers with
`json_response(data)`, or raises `RequestError(message, status=...)`; another `RecspecError` is a 400. Every route is
surrounded by the token, the checks of host and origin, the limit of requests, and the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import httptools
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from recspec.base.errors import RecspecError, RequestError, SettingsError
from recspec.serving import event_routes, inference_protocol, json_routes, pages, recommend_routes
from recspec.serving.access import (
    BACKLOG,
    Access,
    check_certificate,
    check_hosts,
    is_public,
    listen,
    refuse_other_origins,
)
from recspec.serving.http_bodies import error_response, json_response
from recspec.serving.model_folders import REPORTS, Source
from recspec.serving.repository import Repository
from recspec.serving.settings import Limits, RepositorySettings, ServeSettings
from recspec.serving.showing import Showing

if TYPE_CHECKING:
    from grpc import aio


ROUTES = (recommend_routes.routes, json_routes.routes, event_routes.routes, inference_protocol.routes, pages.routes)
"""The routes of each file, asked in order: those of many requests come first."""

OPEN = frozenset({"/v2/health/live", "/v2/health/ready", "/", "/docs", "/openapi.json"})
"""Paths without a token or a limit: health for load balancers, and pages without facts about the models."""

HEAD_BYTES = 64 << 10
"""Largest head of a request; browsers and proxies stay below 16 KB."""
HEAD_SECONDS = 20.0
"""Time limit for a request's head, from the connection or the request's first byte."""
LINGER_SECONDS = 5.0
"""Time limit for the rest of a refused body; then the connection is closed."""
LAST_SECONDS = 0.5
"""Time after a request to stop in which open connections may still send a request."""
FORCE_SECONDS = 5.0
"""Time after the graceful end until the process ends by force."""

WRITE_CHUNK_BYTES = 64 << 10
"""Bytes of an answer written at once."""

QUIET = {"uvicorn.error": logging.ERROR, "grpc._cython.cygrpc": logging.CRITICAL}
"""Logs that write a line for each malformed or cancelled request; clients could fill a disk with them."""

log = logging.getLogger("recspec.serve")


@dataclass(frozen=True)
class ServerOptions:
    """What a server serves, and how."""

    sources: Sequence[Source]
    settings: ServeSettings = field(default_factory=ServeSettings)
    repository: RepositorySettings = field(default_factory=RepositorySettings)
    limits: Limits = field(default_factory=Limits)
    token: str | None = None
    showing: Showing = field(default_factory=Showing)


@dataclass(frozen=True)
class Addresses:
    """Where a server listens."""

    http: str
    grpc: str | None

    @classmethod
    def of(cls, settings: ServeSettings, http_port: int, grpc_port: int | None) -> Addresses:
        """The addresses of a server at its host, on the ports that it got."""
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "https" if settings.tls_cert else "http"
        return cls(f"{scheme}://{host}:{http_port}", None if grpc_port is None else f"{host}:{grpc_port}")


@dataclass(frozen=True)
class Shared:
    """What a worker shares with the other workers of its server."""

    listening: socket.socket
    """Connections that any of them may accept."""
    grpc_port: int | None
    """Port at which each of them listens; the kernel divides the connections."""
    key: bytes
    """Signs addresses, so that each admits those of the others."""


def application(repository: Repository, *, access: Access | None = None) -> ASGIApp:
    """The HTTP application, with every route and check."""
    found = [route for each in ROUTES for route in each(repository)]
    direct = [route for route in found if route.path.endswith((inference_protocol.INFER, event_routes.PATH))]
    handlers: dict[Any, Any] = dict.fromkeys((RecspecError, RecursionError, HTTPException, Exception), _failed)
    return AccessMiddleware(
        Starlette(routes=found, exception_handlers=handlers), direct, repository, access or Access()
    )


async def _failed(request: Request, error: Exception) -> Response:
    """The answer to a request that failed; the traceback of our own bugs goes to uvicorn's log alone."""
    if isinstance(error, RecspecError):
        return error_response(error)
    if isinstance(error, RecursionError):  # nested lists that the JSON parser accepts, and no message can show
        return json_response({"error": "the body is nested too deeply"}, 400)
    if isinstance(error, HTTPException):
        messages = {404: f"no route {request.scope['path'][:100]!r}", 405: f"{request.method} is not answered here"}
        message = messages.get(error.status_code, error.detail)
        return json_response({"error": message}, error.status_code, error.headers)
    return json_response({"error": "the server failed; its log says why"}, 500)


class AccessMiddleware:
    """Surrounds every route with access checks, limits and metrics."""

    def __init__(self, app: ASGIApp, direct: Sequence[Route], repository: Repository, access: Access) -> None:
        self._app, self._direct, self._repository, self._access = app, direct, repository, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), 499  # client closed the request, as in nginx

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                await send(message)
            else:
                await self._write(message, send)

        try:
            try:
                headers, scope[json_routes.ACCESS] = scope["headers"], self._access
                self._access.refuse_host(headers, scope["http_version"])
                refuse_other_origins(headers)
                if not self._admits(scope):
                    raise RequestError("expected the header 'Authorization: Bearer TOKEN'", status=401)
                with contextlib.nullcontext() if scope["path"] in OPEN else self._repository.body_reader.answering():
                    await self._answer(scope, receive, counted)
            except RequestError as problem:  # raised here; the application answers its own
                await error_response(problem)(scope, receive, counted)
        finally:
            model = scope.get("path_params", {}).get("model", scope.get(json_routes.REQUESTED_MODEL))
            route = getattr(scope.get("endpoint"), "__name__", "none")
            self._repository.count("http", route, model, str(status), time.perf_counter() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the route. Requests to infer and events pass by Starlette's routing, which takes longer than they do."""
        asked = self._direct if scope["method"] == "POST" else ()
        found = ((route.endpoint, route.path_regex.match(scope["path"])) for route in asked)
        endpoint, match = next(((each, match) for each, match in found if match), (None, None))
        if endpoint is None or match is None:
            await self._app(scope, receive, send)
            return
        scope.update(path_params=match.groupdict(), endpoint=endpoint)
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except (RecspecError, RecursionError) as error:
            response = await _failed(request, error)
        except Exception as error:
            await (await _failed(request, error))(scope, receive, send)
            raise
        await response(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        """Whether a request needs no token, holds it, or comes by an address that the server signed."""
        path, access = scope["path"], self._access
        if path in OPEN or access.token is None or access.knows(dict(scope["headers"]).get(b"authorization", b"")):
            return True
        return bool(path.startswith(REPORTS)) and access.admits(path, scope["query_string"])

    async def _write(self, message: Message, send: Send) -> None:
        """Send a body in pieces, each after most of the earlier ones are read; until then it counts as held."""
        body = message.get("body", b"")
        if len(body) <= WRITE_CHUNK_BYTES:
            await send(message)
            return
        last = (len(body) - 1) // WRITE_CHUNK_BYTES * WRITE_CHUNK_BYTES
        with self._repository.body_reader.holding(len(body), may_refuse=False):
            for start in range(0, last, WRITE_CHUNK_BYTES):
                await send({**message, "body": body[start : start + WRITE_CHUNK_BYTES], "more_body": True})
            await send({**message, "body": body[last:]})


# --- lifecycle -------------------------------------------------------------------------------------------------------


class Server:
    """A repository that listens: `await start()`, then `await stop()`."""

    def __init__(self, options: ServerOptions, shared: Shared | None = None) -> None:
        self.settings, self._shared = options.settings, shared
        self.repository = Repository(
            options.sources, settings=options.repository, limits=options.limits, showing=options.showing
        )
        self._access = Access.of(self.settings.host, options.token, self.settings.allowed_host)
        if shared is not None:
            self._access = replace(self._access, key=shared.key)
        self._app = application(self.repository, access=self._access)
        self._certificate = check_certificate(self.settings.tls_cert, self.settings.tls_key)
        self._http: uvicorn.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._grpc: aio.Server | None = None

    async def start(self) -> Addresses:
        """Open the models, then listen."""
        settings, shared = self.settings, self._shared
        if shared is None:
            check_access(settings, token=self._access.token, control=self.repository.settings.control)
        listening = shared.listening if shared else listen(settings.host, settings.http_port)
        grpc_port = shared.grpc_port if shared else settings.grpc_port
        try:
            if grpc_port and shared is None:  # says so before the models open
                listen(settings.host, grpc_port, "gRPC").close()
            await self.repository.start()
            if grpc_port is not None:
                from recspec.serving import inference_grpc

                self._grpc, grpc_port = await inference_grpc.start(
                    self.repository,
                    self._access,
                    settings.host,
                    grpc_port,
                    is_shared=shared is not None,
                    max_connections=settings.max_connections,
                    certificate=self._certificate,
                )
        except BaseException:
            listening.close()
            await self.repository.close()
            raise
        self._http = self._make_http()
        self._tasks = [
            asyncio.create_task(self._http.serve([listening])),
            asyncio.create_task(self._close_stalled_connections()),
        ]
        while not self._http.started and not self._tasks[0].done():
            await asyncio.sleep(0.005)
        return Addresses.of(settings, listening.getsockname()[1], grpc_port)

    @property
    def num_abandoned(self) -> int:
        """Abandoned computations that still run."""
        return self.repository.num_abandoned

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

    def _make_http(self) -> uvicorn.Server:
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
        server = _Http(given)
        # HTTP and gRPC end together, so uvicorn leaves signals alone.
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        return server

    async def _close_stalled_connections(self) -> None:
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


def check_access(settings: ServeSettings, *, token: str | None, control: bool) -> None:
    """Refuse settings that admit clients by accident."""
    host = settings.host
    give = "(--token-file FILE, or the variable RECSPEC_TOKEN)"
    problems = []
    if control and token is None:
        problems.append(f"--control: any client could unload the models; give a token too {give}")
    if is_public(host) and token is None and not settings.insecure:
        problems.append(f"--host {host}: admits other machines without a token; give one {give}, or add --insecure")
    SettingsError.refuse("serve", problems)
    check_hosts(settings.allowed_host)
    if is_public(host) and token is None:
        log.warning("%s: every client that reaches this address may use the models; no token is needed", host)
    elif is_public(host) and settings.tls_cert is None:
        why = "the token is sent unencrypted; give --tls-cert and --tls-key, or use a proxy with TLS"
        log.warning("%s: %s", host, why)


def quiet() -> None:
    """Keep logs free of lines that clients choose."""
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop if it is installed, which saves a third of a small request's time."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Connection:
    """The transport of one answer: it sends the head with the first of the body, so that a client wakes up once.

    It also ignores writes after it is closed, as asyncio's does and uvloop's does not. uvicorn notices a closed
    connection for the last of pipelined requests only.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._head = transport, b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100"):
            self._head = data
            return
        data, self._head = self._head + data, b""
        with contextlib.suppress(RuntimeError):
            self._transport.write(data)

    def flush(self) -> None:
        """Send a head that no body follows."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()


class _Http(uvicorn.Server):
    """uvicorn's server, which at its end also answers the connections that wait to be accepted."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and close each connection after its request."""
        waiting = [each.dup() for each in sockets or ()]  # if a socket is closed, its waiting connections are lost
        for closing in (*self.servers, *(sockets or ())):
            closing.close()
        await asyncio.sleep(0)
        accepted: list[socket.socket] = []
        for listening in waiting:
            listening.setblocking(False)
            with listening, contextlib.suppress(OSError):  # at the latest BlockingIOError: none is left
                while len(accepted) < BACKLOG:
                    accepted.append(listening.accept()[0])
        if accepted:
            tasks = [asyncio.create_task(self._begin(each)) for each in accepted]
            for late in (await asyncio.wait(tasks, timeout=LAST_SECONDS))[1]:  # a TLS client may say nothing
                late.cancel()
        await super().shutdown(sockets)

    async def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        make = partial(self.config.http_protocol_class, config=self.config, ends=True, **state)  # type: ignore[call-arg]
        with contextlib.suppress(OSError):  # the client has gone
            await asyncio.get_running_loop().connect_accepted_socket(make, accepted, ssl=self.config.ssl)


class _Parser:
    """httptools' parser of requests, for a server that never changes the protocol of a connection.

    A server may ignore the header `Upgrade` (RFC 9110, 7.8). httptools does not: it takes the body of such a request
    for bytes of the other protocol, and the server would read them as the next request. So this parser reads the head
    of such a request once more, without that header, and then the body.
    """

    def __init__(self, protocol: _Protocol) -> None:
        self._protocol = protocol
        self._start()

    def _start(self) -> None:
        parser = self._parser = httptools.HttpRequestParser(self._protocol)
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3
            parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.get_http_version, self.get_method = parser.get_http_version, parser.get_method
        self.should_keep_alive, self.should_upgrade = parser.should_keep_alive, parser.should_upgrade

    def feed_data(self, data: bytes | memoryview) -> None:
        """Parse bytes of requests."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as paused:
                rest, head = rest[paused.args[0] :], self._head()
                self._start()
                self._parser.feed_data(head)
            else:
                return

    def _head(self) -> bytes:
        """The head of the request that asks for another protocol, without asking for it."""
        version = self.get_http_version().encode()
        first = b"%b %b HTTP/%b\r\n" % (self.get_method(), self._protocol.url, version)
        headers = (b"%b: %b\r\n" % each for each in self._protocol.headers if each[0] != b"upgrade")
        return b"%b%b\r\n" % (first, b"".join(headers))


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with limits on heads and connections, and with answers to half-closed connections."""

    parser: _Parser  # type: ignore[assignment]

    _bound: asyncio.TimerHandle
    """The time limit that runs, or the last one."""

    def __init__(self, *given: Any, max_connections: int, ends: bool = False, **named: Any) -> None:
        super().__init__(*given, **named)
        self._max_connections, self._ends = max_connections, ends
        self.parser = _Parser(self)
        self._head: int | None = 0
        """Bytes that came with a head that is not whole yet; None between heads."""

    def connection_made(self, transport: Any) -> None:
        """Start the time limit for the head of the first request."""
        super().connection_made(transport)
        self._bound = self.loop.call_later(HEAD_SECONDS, self._refuse, 408)
        if len(self.connections) > self._max_connections:
            self._refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bound.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Answer the request under way, or one that arrives within `LAST_SECONDS`, and close the connection."""
        self._ends = True
        if self.cycle is not None and not self.cycle.response_complete:
            super().shutdown()
        self.loop.call_later(LAST_SECONDS, super().shutdown)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that closes its side of the connection after a whole request."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self.scheme == "https":
            return False
        self.cycle.keep_alive = False  # the last of pipelined requests; earlier ones are answered first
        return True

    def on_message_begin(self) -> None:
        self._limit(HEAD_SECONDS, self._refuse, 408)
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._bound.cancel()
        self._head = None
        if len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers) > HEAD_BYTES:
            self._refuse(431)
            raise httptools.HttpParserError
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":  # it has no body, and asks to be connected elsewhere
                raise httptools.HttpParserError
            return  # the same head comes again; see `_Parser`
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = cast(Any, _Connection(self.transport))
            self.cycle.keep_alive &= not self._ends  # if it ends, the answer says so

    def on_message_complete(self) -> None:
        self._bound.cancel()
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time for the rest of a refused body."""
        cast(_Connection, self.cycle.transport).flush()
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing() and not self.pipeline:
            self._limit(LINGER_SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Take in bytes, and refuse a head that is too large, also one that never ends.

        Requests before it in the same bytes count too. So a client that sends requests without reading the answers is
        refused before thousands of them wait.
        """
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > HEAD_BYTES:
                self._refuse(431)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does not read on, unless it was refused already."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _limit(self, seconds: float, end: Callable[..., object], *given: object) -> None:
        self._bound.cancel()
        self._bound = self.loop.call_later(seconds, end, *given)

    def _refuse(self, status: int) -> None:
        self._bound.cancel()
        if self.transport is None or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else an answer is under way
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()
