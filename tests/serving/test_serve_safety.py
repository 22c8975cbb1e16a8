"""What a server promises whoever asks: who may ask, what it holds at most, and that it always ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import textwrap
import threading
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("starlette")

from tritonclient.grpc import service_pb2  # noqa: E402

from recspec.base.errors import RequestError, SettingsError  # noqa: E402
from recspec.bench.load_test import Server as Asked  # noqa: E402
from recspec.serving.access import Access, check_certificate, check_hosts, is_public, refuse_other_origins  # noqa: E402
from recspec.serving.batching import Batcher  # noqa: E402
from recspec.serving.http_bodies import BodyReader  # noqa: E402
from recspec.serving.inference_grpc import MAX_FIELDS, SERVICE, Service  # noqa: E402
from recspec.serving.model_folders import Source  # noqa: E402
from recspec.serving.repository import Repository  # noqa: E402
from recspec.serving.server import HEAD_BYTES, Server, ServerOptions  # noqa: E402
from recspec.serving.settings import Limits, RepositorySettings, ServeSettings  # noqa: E402
from tests import processes  # noqa: E402
from tests.asking import Running  # noqa: E402
from tests.made_up import interactions  # noqa: E402
from tests.made_up_models import made_up_bundle  # noqa: E402
from tests.serving.test_server import grpc_request, raw_exchange  # noqa: E402

CERT = """-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUCPVanPJ9hWz6j8rUAuhMUehR0aAwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMjEwMTgwM1oYDzIxMjYxMDI5
MTAxODAzWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASaEI7NDBOpl6vMvHr7g2ssYp0CZY/K8KrF0jexOj3k4ELwK/p6JURN
2Y3CEbWvRxHknmYuVdh+rgzIsuItVT36o28wbTAdBgNVHQ4EFgQU41k36xUg/DQD
SfUqGEX2tbVyW+wwHwYDVR0jBBgwFoAU41k36xUg/DQDSfUqGEX2tbVyW+wwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhAJA/YXcZ6VthMXHj0GgyAtEQYrFgY9Vdg+CQ+tq+b5OmAiAj
7DS6DToGoSeMfRmVF+hRNx07P4LIN4BC3Lf2qcoSpQ==
-----END CERTIFICATE-----
"""
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgaBfNWNPa8qhaxUq6
XnRho0gWM6+431DPoJcnHpyaWlShRANCAASaEI7NDBOpl6vMvHr7g2ssYp0CZY/K
8KrF0jexOj3k4ELwK/p6JURN2Y3CEbWvRxHknmYuVdh+rgzIsuItVT36
-----END PRIVATE KEY-----
"""
"""Of localhost, made for these tests alone."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return made_up_bundle(folder / "neumf", interactions(folder / "interactions"), "neumf")


@pytest.fixture(scope="module")
def running(bundle: Path) -> Iterator[Running]:
    with Running([Source("neumf", bundle)]) as server:
        yield server


# --- who may ask -----------------------------------------------------------------------------------------------------


def host(name: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", name.encode("latin-1"))]


@pytest.mark.parametrize(
    ("address", "name", "is_answered"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "LOCALHOST.:8000", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", "[0:0:0:0:0:0:0:1]", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "192.168.0.7", False),
        ("192.168.0.7", "192.168.0.7:80", True),
        ("films.example", "films.example", True),
        ("0.0.0.0", "192.168.0.7", True),
        ("::", "[fe80::1]:8000", True),
        ("0.0.0.0", "evil.example", False),
    ],
)
def test_a_server_answers_to_the_machine_s_names_and_its_own_address(
    address: str, name: str, is_answered: bool
) -> None:
    access = Access.of(address)
    if is_answered:
        access.refuse_host(host(name), "1.1")
    else:
        with pytest.raises(RequestError, match="is not answered; start the server with --allowed-host") as refused:
            access.refuse_host(host(name), "1.1")
        assert refused.value.status == 403


def test_further_names_are_answered_where_they_are_allowed() -> None:
    access = Access.of("127.0.0.1", more=["Films.example", "*.films.example"])
    for name in ("films.example", "a.films.example:443", "a.b.FILMS.example"):
        access.refuse_host(host(name), "1.1")
    with pytest.raises(RequestError, match=r"host 'notfilms\.example' is not answered"):
        access.refuse_host(host("notfilms.example"), "1.1")
    Access.of("127.0.0.1", more=["*"]).refuse_host(host("any.example"), "1.1")
    with pytest.raises(SettingsError, match=r"--allowed-host: found 'a b', 'x:80'; expected a name"):
        check_hosts(["a b", "x:80", "*", "*.ok.example", "::1"])


@pytest.mark.parametrize(
    "headers", [[], [*host("localhost"), *host("localhost")], host(""), host("a/b"), host("a@b"), host("a" * 2000)]
)
def test_a_host_that_is_missing_twice_or_none_is_a_400(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(RequestError, match="expected one header 'Host' with a name or address; found") as refused:
        Access().refuse_host(headers, "1.1")
    assert refused.value.status == 400
    Access().refuse_host([], "1.0")  # which knows no such header


def test_pages_of_other_origins_are_refused() -> None:
    refuse_other_origins(host("localhost:8000"))
    refuse_other_origins([*host("LocalHost:8000"), (b"origin", b"http://localhost:8000")])
    for origin in (b"http://localhost", b"http://evil.example", b"null", b"http://[bad"):
        with pytest.raises(RequestError, match="pages of other origins"):
            refuse_other_origins([*host("localhost:8000"), (b"origin", origin)])
        with pytest.raises(RequestError, match="pages of other origins"):
            refuse_other_origins([*host("localhost:8000"), (b"origin", origin), (b"origin", b"http://localhost:8000")])


def test_a_token_is_known_whatever_the_case_of_bearer() -> None:
    access = Access("s3cret")
    for given in ("Bearer s3cret", "bearer s3cret", b"BEARER  s3cret "):
        assert access.knows(given), given
    for given in ("", "s3cret", "Bearer", "Bearer S3CRET", "Basic s3cret", "Bearer s3cretü", b"\xff\xfe"):
        assert not access.knows(given), given
    assert Access().knows("")


def test_addresses_that_other_machines_reach_are_public() -> None:
    assert not any(is_public(each) for each in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"))
    assert all(is_public(each) for each in ("0.0.0.0", "::", "192.168.0.7", "films.example"))


def refusal(bundle: Path, token: str | None = None, *, control: bool = False, **settings: Any) -> str:
    async def start() -> None:
        opening = RepositorySettings(watch=0, control=control)
        chosen = ServeSettings(http_port=0, grpc_port=0, **settings)
        await Server(ServerOptions([Source("m", bundle)], chosen, opening, token=token)).start()

    with pytest.raises(SettingsError) as refused:
        asyncio.run(start())
    return str(refused.value)


def test_settings_that_let_in_more_than_was_meant_are_refused(bundle: Path, tmp_path: Path) -> None:
    assert "--host 0.0.0.0: admits other machines without a token" in refusal(bundle, host="0.0.0.0")
    assert "--host ::: admits other machines" in refusal(bundle, host="::")
    assert "--control: any client could unload the models" in refusal(bundle, control=True)
    assert "--allowed-host: found 'a b'" in refusal(bundle, allowed_host=("a b",))
    (tmp_path / "cert").write_text(CERT)
    assert "--tls-cert and --tls-key together" in refusal(bundle, tls_cert=tmp_path / "cert")
    with pytest.raises(SettingsError, match="expected a certificate and its own key, in PEM, without a password"):
        check_certificate(tmp_path / "cert", tmp_path / "cert")
    with pytest.raises(SettingsError, match="No such file"):
        check_certificate(tmp_path / "cert", tmp_path / "none")


def test_other_machines_get_in_with_a_token_and_grpc_listens_where_http_does(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Running([Source("neumf", bundle)], host="0.0.0.0", insecure=True) as open_to_all:
        assert "no token is needed" in caplog.text
        for address in (open_to_all.host, open_to_all.grpc):
            port = int(address.rpartition(":")[2])
            socket.create_connection(("127.0.0.1", port), timeout=600).close()
            with pytest.raises(OSError):
                socket.create_connection(("::1", port), timeout=600).close()
    Running([Source("neumf", bundle)], token="t", host="0.0.0.0").stop()
    assert "the token is sent unencrypted" in caplog.text


def test_both_protocols_speak_tls(bundle: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text(CERT)
    key.write_text(KEY)
    with Running([Source("neumf", bundle)], tls_cert=cert, tls_key=key) as secure:
        context = ssl.create_default_context(cadata=CERT)
        with urllib.request.urlopen(f"https://{secure.host}/v2/health/ready", context=context, timeout=600) as told:
            assert told.status == 200
        assert Asked(f"https://{secure.host}", tls_ca=cert).get("/v2/health/ready")[0] == 200
        with pytest.raises(SettingsError, match="name its certificate with --tls-ca"):
            Asked(f"https://{secure.host}").get("/v2/health/ready")
        with grpc.secure_channel(secure.grpc, grpc.ssl_channel_credentials(CERT.encode())) as channel:
            call = channel.unary_unary(SERVICE + "ServerLive")
            assert service_pb2.ServerLiveResponse.FromString(call(b"", timeout=600)).live
        assert not raw_exchange(secure, b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")


# --- what is held at most --------------------------------------------------------------------------------------------


def call(running: Running, method: str, message: bytes, **more: Any) -> Any:
    with grpc.insecure_channel(running.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        return channel.unary_unary(SERVICE + method)(message, timeout=600, **more)


def test_malformed_messages_are_told_without_a_word_of_python(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    fields = b"\x2a\x00" * (MAX_FIELDS + 1)
    for message, told in (
        (b"\xff\xff\xff\xff", "the message is malformed; expected inference.ModelInferRequest"),
        (b"\x0a\xff", "the message is malformed"),
        (b"\x0a\x01\xff", "the message is malformed"),
        (b"\x0b\x0c", "the message is malformed"),
        (b"\x80" * 20, "the message is malformed"),
        (fields, f"the message has more than {MAX_FIELDS} fields"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call(running, "ModelInfer", message)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, message[:20]
        assert told in refused.value.details()
        assert "class" not in refused.value.details()
    assert not caplog.records


def test_packed_messages_are_refused_before_they_are_unpacked(running: Running) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call(running, "ModelInfer", b"\x0a\x05neumf" * 100, compression=grpc.Compression.Gzip)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "gzip" in refused.value.details()


def test_shared_memory_beside_tensors_is_told_as_such(running: Running) -> None:
    request = grpc_request(raw_input_contents=[b"1234"])
    request.inputs[1].parameters["shared_memory_region"].string_param = "region"
    with pytest.raises(grpc.RpcError) as refused:
        call(running, "ModelInfer", request.SerializeToString())
    assert refused.value.details() == "input 'item_id': shared memory is not supported; send the tensor"


class Call:
    """A call whose message comes when the test says so."""

    def __init__(self, message: bytes) -> None:
        self.message, self.comes, self.read_began = message, asyncio.Event(), False
        self.aborted: list[object] = []
        self.look: Callable[[], object] = bool

    async def read(self) -> bytes:
        self.read_began = True
        await self.comes.wait()
        return self.message

    def set_trailing_metadata(self, _: object) -> None: ...

    async def abort(self, *told: object) -> None:
        self.aborted = [*told, self.look()]
        raise grpc.aio.AbortError


class Parsed:
    """A parsed message; `ModelInfer`'s holds tensors."""

    model_name = "films"


async def test_grpc_messages_count_with_their_copies_before_they_are_read() -> None:
    repository = Repository([], limits=Limits(max_body_mb=1024 / 2**20, max_held_mb=4 * 1024 / 2**20))
    reader, answering = repository.body_reader, asyncio.Event()

    async def answer(_: object, __: object) -> Any:
        await answering.wait()
        return service_pb2.ServerLiveResponse(live=True)

    method = Service(repository, Access())._counted("Any", lambda _: Parsed(), answer).stream_unary
    calls = [Call(b"x" * 1024) for _ in range(5)]
    tasks = [asyncio.create_task(method(None, each)) for each in calls]
    for _ in range(3):
        await asyncio.sleep(0)
    assert [each.read_began for each in calls] == [True, True, False, False, False]
    assert reader.held == 4 * 1024
    for each in calls:
        each.comes.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert reader.held == 4 * 1024, "two messages, each with a copy of its own"
    assert sum(each.read_began for each in calls) == 2
    answering.set()
    await asyncio.gather(*tasks)
    assert (reader.held, all(each.read_began for each in calls)) == (0, True)


async def test_a_refused_message_is_freed_before_its_error_is_sent() -> None:
    repository, kept = Repository([]), []

    def read(_: bytes) -> Parsed:
        parsed = Parsed()
        kept.append(weakref.ref(parsed))
        return parsed

    async def answer(_: object, __: object) -> Any:
        raise RequestError("not this one", status=413)

    method = Service(repository, Access())._counted("Any", read, answer).stream_unary
    call = Call(b"x")
    call.look = lambda: kept[0]()
    call.comes.set()
    with pytest.raises(grpc.aio.AbortError):
        await method(None, call)
    assert call.aborted == [grpc.StatusCode.RESOURCE_EXHAUSTED, "not this one", None]


async def test_room_is_given_in_turn_and_one_request_alone_always_finds_it() -> None:
    body_reader, order = (
        BodyReader(Limits(max_held_mb=1024 / 2**20, max_body_mb=1024 / 2**20, timeout=30)),
        list[str](),
    )
    first = body_reader.reading(5000)
    shrink = await first.__aenter__()

    async def wait(name: str, size: int) -> None:
        async with body_reader.reading(size):
            order.append(name)

    waiting = [asyncio.ensure_future(wait(*each)) for each in (("large", 1000), ("small", 10), ("gone", 10))]
    await asyncio.sleep(0)
    waiting[2].cancel()
    shrink(500)
    await asyncio.sleep(0)
    assert (order, body_reader.held) == ([], 500)  # the small one does not overtake the large one
    with pytest.raises(RequestError, match="fill the memory set aside") as refused, body_reader.holding(600):
        pass
    assert refused.value.status == 503
    await first.__aexit__(None, None, None)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (order, body_reader.held) == (["large", "small"], 0)


async def test_waiting_for_room_ends() -> None:
    body_reader = BodyReader(Limits(max_held_mb=1024 / 2**20, max_body_mb=1024 / 2**20, timeout=0.01))
    with body_reader.holding(1000), pytest.raises(RequestError, match="fill the memory") as refused:
        async with body_reader.reading(1000):
            pass
    assert (refused.value.status, body_reader.held) == (503, 0)


def test_more_requests_than_are_answered_at_once_get_503() -> None:
    body_reader = BodyReader(Limits(max_requests=1, retry_seconds=3))
    with (
        body_reader.answering(),
        pytest.raises(RequestError, match="1 requests are being answered; try again in 3 s"),
        body_reader.answering(),
    ):
        pass
    with body_reader.answering():
        pass


def request_of(path: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode()


def test_a_half_closed_connection_gets_all_of_its_answers(running: Running) -> None:
    found = raw_exchange(running, request_of("/v2") + request_of("/v2/models/neumf"))
    assert found.count(b"HTTP/1.1 200 OK") == 2
    assert b'"platform"' in found


PREDICT = b'{"rows": [{"user_id": "u1", "item_id": 1}]}'
SMUGGLED = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "upgrade",
    [
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n",
        "Upgrade: foo\r\nConnection: upgrade\r\n",
        "connection: keep-alive, uPGRADE\r\nupgrade:websocket\r\nSec-WebSocket-Key: x\r\n",
        "Upgrade: h2c\r\nUpgrade: foo\r\nConnection: Upgrade\r\n",
        "Connection: Upgrade\r\n",
        "Upgrade: h2c\r\n",
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_request_to_upgrade_the_protocol_is_read_like_any_other(running: Running, upgrade: str, apart: bool) -> None:
    """Otherwise its body would be read as the next request."""

    def answered(head: str, body: bytes) -> list[bytes]:
        given = f"{head} HTTP/1.1\r\nHost: localhost\r\n{upgrade}".encode()
        parts = (given, body) if apart else (given + body,)
        return raw_exchange(running, *parts).split(b"HTTP/1.1 ")[1:]

    def sized(body: bytes) -> bytes:
        return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)

    def chunked(body: bytes) -> bytes:
        return b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    for packed in (sized, chunked):
        (found,) = answered("POST /predict", packed(PREDICT))
        assert found.startswith(b"200 OK"), found
        (found,) = answered("POST /predict", packed(SMUGGLED))
        assert b"the body is not JSON" in found
        found, following = answered("POST /predict", packed(PREDICT) + request_of("/v2", upgrade))
        assert found.startswith(b"200 OK")
        assert b'"extensions"' in following
    first, second = answered("GET /v2/health/live", b"\r\n" + SMUGGLED)
    assert first.startswith(b"200 OK")
    assert second.startswith(b"200 OK")
    (found,) = answered("GET /v2/health/live", b"Connection: close\r\n\r\n")
    assert b"connection: close" in found.lower()


def test_a_request_to_connect_elsewhere_is_refused_and_the_connection_closed(running: Running) -> None:
    for target in (b"example.com:443", b"/v2"):
        found = raw_exchange(running, b"CONNECT %b HTTP/1.1\r\nHost: localhost\r\n\r\n%b" % (target, SMUGGLED))
        assert found.count(b"HTTP/1.1 ") == 1
        assert found.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("parts", [1, 3])
def test_the_limit_of_heads_holds_however_their_bytes_come(running: Running, parts: int) -> None:
    def status(value: int, target: str = "/v2") -> bytes:
        sent = request_of(target, f"x: {'a' * value}\r\n")
        step = -(-len(sent) // parts)
        return raw_exchange(running, *(sent[at : at + step] for at in range(0, len(sent), step)))[9:12]

    assert status(HEAD_BYTES - 1000) == b"200"
    assert status(HEAD_BYTES) == b"431"
    assert status(1, "/v2?" + "x" * HEAD_BYTES) == b"431"


def test_hosts_are_checked_on_the_wire(running: Running) -> None:
    assert raw_exchange(running, b"GET /v2 HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw_exchange(running, request_of("/v2", "Host: localhost\r\n")).startswith(b"HTTP/1.1 400")
    assert raw_exchange(running, b"GET /v2 HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_clients_that_do_not_read_are_hung_up_on(bundle: Path) -> None:
    with Running([Source("neumf", bundle)], write_seconds=0.2) as hasty:
        name, _, port = hasty.host.rpartition(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((name, int(port)))
            with contextlib.suppress(ConnectionError):  # which is what it waits for: the server hangs up
                connection.settimeout(60)
                while True:
                    connection.sendall(request_of("/v2/models/neumf/config") * 100)
        assert hasty.send("GET", "/v2/health/live")[0] == 200


def test_connections_beyond_the_bound_are_closed(bundle: Path) -> None:
    with Running([Source("neumf", bundle)], max_connections=2) as crowded, contextlib.ExitStack() as held:
        name, _, port = crowded.host.rpartition(":")
        first, second, third = (held.enter_context(socket.create_connection((name, int(port)), 600)) for _ in "123")
        assert third.recv(100).startswith(b"HTTP/1.1 503")
        for each in (first, second):
            each.sendall(request_of("/v2/health/live"))
            assert each.recv(100).startswith(b"HTTP/1.1 200")


# --- computations that do not end ------------------------------------------------------------------------------------


def test_a_computation_that_does_not_end_is_given_up_and_others_are_answered() -> None:
    gates, begun = [threading.Event() for _ in range(2)], threading.Semaphore(0)

    async def go() -> None:
        batcher = Batcher(lambda inputs: inputs, Limits(timeout=0.05, retry_seconds=3), name="m")

        def stuck(place: int) -> None:
            begun.release()
            gates[place].wait(60)

        async def late(place: int) -> None:
            with pytest.raises(RequestError, match="no answer within") as refused:
                await batcher.call(lambda: stuck(place))
            assert refused.value.status == 504
            while batcher.num_abandoned == place:
                await asyncio.sleep(0.01)

        await late(0)
        assert await batcher.call(lambda: 7) == 7  # on a fresh thread
        await late(1)
        with pytest.raises(RequestError, match=r"model 'm': computations run for more than 0\.05 s; try again in 3 s"):
            await batcher.call(lambda: 7)
        gates[0].set()
        while batcher.num_abandoned == 2:
            await asyncio.sleep(0.01)
        assert await batcher.call(lambda: 8) == 8
        await batcher.close()  # although one still runs

    try:
        asyncio.run(go())
    finally:
        for gate in gates:
            gate.set()


STUCK = """
    import sys, threading, time
    from recspec.inference import requests as answers
    from recspec.serving import json_types, running, server
    from recspec.cli.process import end_by_force
    from recspec.serving.settings import Limits
    from recspec.serving.settings import RepositorySettings
    from recspec.serving.model_folders import sources_of

    def stuck(*given, **named):
        print("begun", flush=True)
        {stuck}

    {where} = stuck
    running.FORCE_SECONDS = server.FORCE_SECONDS = 1.0
    settings = server.ServeSettings(http_port=0, grpc_port=None, shutdown_seconds=0.5)
    options = server.ServerOptions(sources_of([sys.argv[1]]), settings, RepositorySettings(watch=0),
                                   Limits(timeout={seconds}))
    running.serve(options, ready=lambda addresses: print(addresses.http, flush=True), force=end_by_force)
"""


@pytest.mark.parametrize(
    ("where", "stuck", "seconds", "status"),
    [
        ("answers.predict", "threading.Event().wait()", 0.05, 1),  # given up before the end is asked for
        ("json_types.read_request", "while True: pass", 300, 1),  # the event loop itself
        pytest.param("answers.predict", "threading.Event().wait()", 300, 0, marks=pytest.mark.slow),
        pytest.param("answers.predict", "while True: pass", 300, 0, marks=pytest.mark.slow),
        pytest.param("json_types.read_request", "time.sleep(1e6)", 300, 1, marks=pytest.mark.slow),
    ],
)
def test_asked_to_end_the_process_ends_whatever_it_does(
    bundle: Path, where: str, stuck: str, seconds: float, status: int
) -> None:
    code = textwrap.dedent(STUCK.format(where=where, stuck=stuck, seconds=seconds))
    served = processes.Running(code, str(bundle))
    try:
        body = json.dumps({"rows": [{"user_id": 1, "item_id": 1}]}).encode()
        address = printed(served, 1)[0]
        asked = urllib.request.Request(f"{address}/predict", body, {"content-type": "application/json"})
        client = threading.Thread(target=_ask, args=(asked,))
        client.start()
        assert printed(served, 2)[1] == "begun"
        if seconds < 1:
            client.join()
        os.kill(served.pid, signal.SIGTERM)
        ended = served.ended()
        client.join()
        assert ended.returncode == status
        assert ("the server ends by force" in ended.stderr) == (status == 1)
    finally:
        served.kill()


def printed(served: processes.Running, lines: int) -> list[str]:
    """So many lines that a process has printed."""
    found: list[str] = []
    while len(found) < lines:
        assert served.runs, served.ended().stderr
        threading.Event().wait(0.01)
        with contextlib.suppress(FileNotFoundError):  # it has not begun
            found = served._said("out").splitlines()
    return found


def _ask(asked: urllib.request.Request) -> None:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(asked, timeout=120).close()
