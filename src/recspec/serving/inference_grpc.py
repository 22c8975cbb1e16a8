"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`, with tritonclient's messages.

Messages are read as bytes, each when there is room for it, and parsed after they are counted. gRPC's own deserializer
would take any number of them at once, and would send a Python error to the client of a malformed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from grpc import aio
from tritonclient.grpc import service_pb2 as messages

from recspec.errors import RecspecError, RequestError, SettingsError
from recspec.serving.access import Access, Certificate
from recspec.serving.model_metadata import SERVER, configuration, metadata, statistics
from recspec.serving.repository import Form, Repository, refuse_load_parameters
from recspec.serving.server_metrics import NO_MODEL
from recspec.serving.tensors import (
    STORED,
    Tensor,
    check_number,
    check_output,
    from_bytes,
    from_values,
    shape_of,
    timeout_of,
    to_bytes,
)
from recspec.spec import OUTPUTS

CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""HTTP status -> gRPC status."""

SERVICE = "/inference.GRPCInferenceService/"
OPEN = frozenset({"ServerLive", "ServerReady"})
"""Methods that need no token, for load balancers."""

READ_SECONDS = 10.0
"""Time limit for a call's message; while it is read, memory for the largest message is reserved."""
MAX_FIELDS = 20_000
"""Most fields of a message, without nested ones. A field takes 2 bytes before parsing and 100 after."""
CONNECTION_MS = 300_000
"""Age in milliseconds at which a connection is closed, so that a client that reads nothing cannot hold it for ever."""

UNSUPPORTED = (
    "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister", "TraceSetting", "LogSettings",
)  # fmt: skip

CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Datatype -> the field of a tensor's typed contents that holds its values."""

log = logging.getLogger("recspec.serve")

Message = Any
"""A protobuf message; the generated modules have no types."""


def make_server(repository: Repository, *, access: Access, max_connections: int) -> aio.Server:
    """A server without a port, not yet started."""
    limits = repository.limits
    return aio.server(
        handlers=[Service(repository, access)],
        maximum_concurrent_rpcs=limits.max_requests,
        options=[
            ("grpc.max_receive_message_length", min(limits.max_body_bytes, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a few KB could unpack to the largest message
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.max_concurrent_streams", 256),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.http2.bdp_probe", 0),  # otherwise the windows of unread streams grow to megabytes
            ("grpc.http2.lookahead_bytes", 64 << 10),
            ("grpc.max_connection_age_ms", CONNECTION_MS),
            ("grpc.max_connection_age_grace_ms", int(1000 * limits.timeout_seconds) + 1000),
        ],
    )


def listen(server: aio.Server, address: str, port: int, certificate: Certificate | None) -> int:
    """Let a server listen at one address alone; return the port.

    Raises:
        SettingsError: if the port is taken.
    """
    host = f"[{address}]" if ":" in address else address
    with contextlib.ExitStack() as held:
        if address == "0.0.0.0":  # gRPC takes it for every address of both families, unless IPv6's port is taken
            port = _hold_other_family(held, port)
        try:
            if certificate is None:
                return int(server.add_insecure_port(f"{host}:{port}"))
            pair = (certificate.key.read_bytes(), certificate.cert.read_bytes())
            return int(server.add_secure_port(f"{host}:{port}", grpc.ssl_server_credentials([pair])))
        except RuntimeError:
            raise SettingsError(f"gRPC: can't listen at {host}:{port}; take another port") from None


def _hold_other_family(held: contextlib.ExitStack, port: int) -> int:
    """Reserve the IPv6 port without listening; 0 picks a free one."""
    if not socket.has_ipv6:
        return port
    other = held.enter_context(socket.socket(socket.AF_INET6))
    other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    with contextlib.suppress(OSError):  # no IPv6 here, or the port is taken, so gRPC can't have it either
        other.bind(("::", port))
        return int(other.getsockname()[1])
    return port


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The protocol's methods, each counted in the repository's metrics.

    One class because gRPC asks one handler for the methods, and each of them is one procedure of the protocol.
    """

    def __init__(self, repository: Repository, access: Access) -> None:
        self._repository, self._access = repository, access
        answers: Mapping[str, tuple[type[Message], Callable[[Message, Any], Awaitable[Message]]]] = {
            "ServerLive": (messages.ServerLiveRequest, self._ServerLive),
            "ServerReady": (messages.ServerReadyRequest, self._ServerReady),
            "ServerMetadata": (messages.ServerMetadataRequest, self._ServerMetadata),
            "ModelReady": (messages.ModelReadyRequest, self._ModelReady),
            "ModelMetadata": (messages.ModelMetadataRequest, self._ModelMetadata),
            "ModelConfig": (messages.ModelConfigRequest, self._ModelConfig),
            "ModelStatistics": (messages.ModelStatisticsRequest, self._ModelStatistics),
            "RepositoryIndex": (messages.RepositoryIndexRequest, self._RepositoryIndex),
            "RepositoryModelLoad": (messages.RepositoryModelLoadRequest, self._RepositoryModelLoad),
            "RepositoryModelUnload": (messages.RepositoryModelUnloadRequest, self._RepositoryModelUnload),
        }
        self._methods = {
            SERVICE + name: grpc.stream_unary_rpc_method_handler(self._counted(name, partial(_parsed, kind), each))
            for name, (kind, each) in answers.items()
        }
        infer = self._counted("ModelInfer", self._read_infer, self._ModelInfer)
        self._methods[SERVICE + "ModelInfer"] = grpc.stream_unary_rpc_method_handler(infer)
        refused = grpc.stream_unary_rpc_method_handler(_refuse_method)
        self._methods |= {SERVICE + name: refused for name in (*UNSUPPORTED, "ModelStreamInfer")}
        self._refused = grpc.stream_unary_rpc_method_handler(_refuse_token)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """The handler of a call, or a handler that refuses it before any message is read."""
        given = next((value for key, value in call.invocation_metadata or () if key == "authorization"), "")
        if self._access.knows(given) or call.method.removeprefix(SERVICE) in OPEN:
            return self._methods.get(call.method)
        return self._refused

    def _counted(
        self, name: str, read: Callable[[bytes], Any], answer: Callable[[Any, Any], Awaitable[Message]]
    ) -> Callable[..., Awaitable[Any]]:
        """A method that returns errors as statuses, and counts and times its calls."""
        body_reader = self._repository.body_reader

        async def method(_: object, context: aio.ServicerContext) -> bytes:
            began, code, asked = time.perf_counter(), grpc.StatusCode.CANCELLED, [NO_MODEL]
            more: tuple[tuple[str, str], ...] = ()
            try:
                try:
                    async with body_reader.reading(body_reader.limits.max_body_bytes) as shrink:
                        request = await self._request(read, context, shrink)
                        asked[0] = getattr(request, "model_name", NO_MODEL)
                        found: bytes = (await answer(request, context)).SerializeToString()
                    code = grpc.StatusCode.OK
                    return found
                except RecspecError as error:
                    code, message, more = _status(error)
                except (asyncio.CancelledError, aio.AbortError):
                    raise
                except Exception:
                    log.exception("%s failed", name)
                    code, message = grpc.StatusCode.INTERNAL, "the server failed; its log says why"
                # Not inside `except`: abort's own exception would keep the error alive, and with it the whole message.
                context.set_trailing_metadata(more)
                await context.abort(code, message)
            finally:
                self._count(name, asked[0], code, time.perf_counter() - began)
            raise AssertionError("abort raises")

        return method

    async def _request(self, read: Callable[[bytes], Any], context: Any, shrink: Callable[[int], None]) -> Any:
        raw = await self._read(context)
        shrink(len(raw))
        return await self._repository.body_reader.parsed(partial(read, raw), len(raw))

    async def _read(self, context: aio.ServicerContext) -> bytes:
        """The bytes of a call's message. gRPC reads it only now, so it takes no memory before there is room."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                raw = await context.read()
        except TimeoutError:
            raise RequestError("the request's message did not come in time", status=408) from None
        if raw is aio.EOF:
            raise RequestError("the call has no message, or one that is too large; expected one")
        return bytes(raw)

    def _count(self, name: str, model: str, code: grpc.StatusCode, seconds: float) -> None:
        metrics = self._repository.metrics
        known = model if model in self._repository.names else NO_MODEL
        metrics.requests.labels("grpc", name, known, code.name).inc()
        metrics.request_seconds.labels("grpc", name).observe(seconds)

    def _form(self, request: Message) -> Form:
        return self._repository.form(request.name, request.version)

    # --- the server and its models ------------------------------------------------------------------------------

    async def _ServerLive(self, _: Message, __: object) -> Message:
        return messages.ServerLiveResponse(live=True)

    async def _ServerReady(self, _: Message, __: object) -> Message:
        return messages.ServerReadyResponse(ready=self._repository.ready)

    async def _ServerMetadata(self, _: Message, __: object) -> Message:
        return json_format.ParseDict(SERVER, messages.ServerMetadataResponse())

    async def _ModelReady(self, request: Message, _: object) -> Message:
        try:
            self._form(request)
        except RequestError:
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=True)

    async def _ModelMetadata(self, request: Message, _: object) -> Message:
        found = metadata(self._repository, self._form(request))
        return json_format.ParseDict(found, messages.ModelMetadataResponse())

    async def _ModelConfig(self, request: Message, _: object) -> Message:
        found = configuration(self._repository, self._form(request))
        return json_format.ParseDict({"config": found}, messages.ModelConfigResponse())

    async def _ModelStatistics(self, request: Message, _: object) -> Message:
        kept = self._repository
        if request.name:
            versions: Sequence[str] = [request.version] if request.version else kept.versions(request.name)
            forms = [kept.form(request.name, version) for version in versions]
        else:
            forms = kept.every_form()
        return json_format.ParseDict(statistics(forms), messages.ModelStatisticsResponse())

    async def _RepositoryIndex(self, request: Message, _: object) -> Message:
        found = self._repository.index(only_ready=request.ready)
        return json_format.ParseDict({"models": found}, messages.RepositoryIndexResponse())

    async def _RepositoryModelLoad(self, request: Message, _: object) -> Message:
        self._repository.refuse_control()
        refuse_load_parameters(dict(request.parameters))
        await self._repository.load(request.model_name)
        return messages.RepositoryModelLoadResponse()

    async def _RepositoryModelUnload(self, request: Message, _: object) -> Message:
        self._repository.refuse_control()
        await self._repository.unload(request.model_name)
        return messages.RepositoryModelUnloadResponse()

    # --- answers ------------------------------------------------------------------------------------------------

    def _read_infer(self, raw: bytes) -> _Asked:
        """Parse a request for inference. Its tensors are copies, so the message can be freed."""
        request = _parsed(messages.ModelInferRequest, raw)
        self._repository.form(
            request.model_name, request.model_version
        )  # an unknown model is an error before its tensors are read
        inputs = _inputs(request, self._repository.limits.max_rows)
        timeout = request.parameters["timeout"].int64_param if "timeout" in request.parameters else None
        return _Asked(request.model_name, request.model_version, request.id, inputs, _outputs(request),
                      timeout_of(timeout))  # fmt: skip

    async def _ModelInfer(self, asked: _Asked, context: aio.ServicerContext) -> Message:
        times = [each for each in (asked.timeout, context.time_remaining()) if each is not None]
        model, outputs = await self._repository.infer(
            asked.model_name, asked.model_version, asked.inputs, timeout=max(0.0, min(times)) if times else None
        )
        answer = messages.ModelInferResponse(model_name=asked.model_name, model_version=model.version, id=asked.id)
        for name in asked.outputs:
            values = outputs[name]
            answer.outputs.add(name=name, datatype="FP32", shape=values.shape)
            answer.raw_output_contents.append(to_bytes(values))
        return answer


@dataclass(frozen=True)
class _Asked:
    """A request for inference, parsed but not yet checked against a model."""

    model_name: str
    model_version: str
    id: str
    inputs: Mapping[str, Tensor]
    outputs: Sequence[str]
    timeout: float | None
    """Seconds; None for the server's limit."""


def _status(error: RecspecError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status, message and metadata of a refused call."""
    status = error.status if isinstance(error, RequestError) else 400
    wait = error.retry_after if isinstance(error, RequestError) else None
    more = (("retry-after", str(wait)),) if wait is not None else ()
    return CODES.get(status, grpc.StatusCode.UNKNOWN), str(error)[:4000], more


async def _refuse_token(_: object, context: aio.ServicerContext) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "expected metadata 'authorization: Bearer TOKEN'")
    raise AssertionError("abort raises")


async def _refuse_method(_: object, context: aio.ServicerContext) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNIMPLEMENTED, "not supported: this server has no streams, shared memory, trace or log settings"
    )
    raise AssertionError("abort raises")


def _parsed(kind: type[Message], raw: bytes) -> Message:
    """A message of a kind.

    Raises:
        RequestError: if the bytes are none, or have more fields than are parsed.
    """
    try:
        _check_fields(raw)
        return kind.FromString(raw)
    except (DecodeError, IndexError):
        name = kind.DESCRIPTOR.full_name
        raise RequestError(f"the message is malformed; expected {name}") from None


def _check_fields(raw: bytes) -> None:
    """Refuse a message of very many fields before parsing: an empty field takes 2 bytes before, 100 after.

    Raises:
        RequestError: for too many.
        IndexError: for bytes that end too early.
    """
    at = count = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(raw, at)
        elif kind == 2:
            length, at = _varint(raw, at)
            at += length
        elif kind in FIXED:
            at += FIXED[kind]
        else:
            raise IndexError("groups, or no wire type")
        count += 1
        if count > MAX_FIELDS:
            raise RequestError(f"the message has more than {MAX_FIELDS} fields")


FIXED: Mapping[int, int] = {1: 8, 5: 4}
"""Protobuf's wire types of a fixed size -> their bytes."""


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number of up to 64 bits at a place, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("more than 64 bits")


def _inputs(request: Message, max_rows: int) -> dict[str, Tensor]:
    """The tensors of a request, from raw bytes or typed contents.

    Raises:
        RequestError: saying what is wrong with one.
    """
    raw, given = request.raw_input_contents, request.inputs
    check_number(len(given))
    for each in given:
        if "shared_memory_region" in each.parameters:
            raise RequestError(f"input '{each.name}': shared memory is not supported; send the tensor")
    if raw and len(raw) != len(given):
        raise RequestError(f"raw_input_contents has {len(raw)} entries; expected one for each of {len(given)} inputs")
    inputs: dict[str, Tensor] = {}
    for place, each in enumerate(given):
        name = each.name
        if name in inputs:
            raise RequestError(f"input '{name}' is there twice")
        shape = shape_of(list(each.shape), name, max_rows)
        if not raw:
            inputs[name] = _typed(name, each, shape)
        elif each.HasField("contents"):
            raise RequestError(f"input '{name}' has contents and raw_input_contents; send one of them")
        else:
            inputs[name] = from_bytes(name, each.datatype, shape, raw[place])
    return inputs


def _typed(name: str, tensor: Message, shape: Sequence[int]) -> Tensor:
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        if tensor.datatype in STORED:
            raise RequestError(f"input '{name}': {tensor.datatype} has no typed contents; send raw_input_contents")
        return from_values(name, tensor.datatype, shape, [])  # raises: the datatype is unknown
    data: list[Any] = list(getattr(tensor.contents, field))
    if tensor.datatype == "BYTES":
        try:
            data = [each.decode() for each in data]
        except UnicodeDecodeError:
            raise RequestError(f"input '{name}': a BYTES element is not text in UTF-8") from None
    return from_values(name, tensor.datatype, shape, data)


def _outputs(request: Message) -> Sequence[str]:
    wanted: dict[str, None] = {}
    for each in request.outputs:
        if "classification" in each.parameters or "shared_memory_region" in each.parameters:
            raise RequestError("an output's 'classification' and shared memory are not supported")
        check_output(each.name, wanted)
        wanted[each.name] = None
    return tuple(wanted) or OUTPUTS
