"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`, with tritonclient's messages.

Messages are read as bytes, each when there is room for it, and parsed after they are counted. gRPC's own deserializer
would take any number of them at once, and would send a Python error to the client of a malformed one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from inspect import isawaitable
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from grpc import aio
from tritonclient.grpc import service_pb2 as messages

from recspec.base.errors import RecspecError, RequestError
from recspec.serving import tensors
from recspec.serving.access import Access, bind_grpc
from recspec.serving.inference_protocol import SERVER, configuration_of, metadata_of, statistics_of
from recspec.serving.repository import Endpoint, Repository
from recspec.serving.server_metrics import NO_MODEL

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
COPIES = 2
"""Memory of a message in multiples of its bytes: gRPC's own and ours while it is read, then ours and its tensors."""
MAX_FIELDS = 20_000
"""Most fields of a message, without nested ones. A field takes 2 bytes before parsing and 100 after."""
CONNECTION_MS = 300_000
"""Age in milliseconds at which a connection is closed, so that a client that reads nothing cannot hold it for ever."""

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
Answer = Mapping[str, Any]
"""A method's answer as JSON spells it."""


async def start(
    repository: Repository,
    access: Access,
    host: str,
    port: int,
    *,
    is_shared: bool = False,
    max_connections: int,
    certificate: tuple[Path, Path] | None,
) -> tuple[aio.Server, int]:
    """A server that listens at a host's address, with a certificate and its key; also its port.

    If the port is shared, other processes of this user may listen there too.
    """
    limits = repository.limits
    server = aio.server(
        handlers=[Service(repository, access)],
        maximum_concurrent_rpcs=limits.max_requests,
        options=[
            ("grpc.max_receive_message_length", min(limits.max_body_bytes, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(is_shared)),
            ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a few KB could unpack to the largest message
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.max_concurrent_streams", 256),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.http2.bdp_probe", 0),  # otherwise the windows of unread streams grow to megabytes
            ("grpc.http2.lookahead_bytes", 64 << 10),
            ("grpc.max_connection_age_ms", CONNECTION_MS),
            ("grpc.max_connection_age_grace_ms", int(1000 * limits.timeout) + 1000),
        ],
    )
    add = server.add_insecure_port
    if certificate is not None:
        cert, key = (file.read_bytes() for file in certificate)
        add = partial(server.add_secure_port, server_credentials=grpc.ssl_server_credentials([(key, cert)]))
    port = bind_grpc(add, host, port, is_shared=is_shared)
    await server.start()
    return server, port


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The protocol's methods, each counted in the repository's metrics."""

    def __init__(self, repository: Repository, access: Access) -> None:
        self._repository, self._access = repository, access
        self._refused = _refusing(grpc.StatusCode.UNAUTHENTICATED, "expected metadata 'authorization: Bearer TOKEN'")
        unsupported = "not supported: this server has no streams, shared memory, trace or log settings"
        self._methods, answers = {}, _answers(repository)
        for method in messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            name = method.name
            if name == "ModelInfer":
                handler = self._counted(name, self._read_infer, self._infer)
            elif name in answers:
                read = partial(_parsed, getattr(messages, method.input_type.name))
                answer = partial(_answer, answers[name], getattr(messages, method.output_type.name))
                handler = self._counted(name, read, answer)
            else:
                handler = _refusing(grpc.StatusCode.UNIMPLEMENTED, unsupported)
            self._methods[SERVICE + name] = handler

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """The handler of a call, or a handler that refuses it before any message is read."""
        given = next((value for key, value in call.invocation_metadata or () if key == "authorization"), "")
        if self._access.knows(given) or call.method.removeprefix(SERVICE) in OPEN:
            return self._methods.get(call.method)
        return self._refused

    def _counted(
        self, name: str, read: Callable[[bytes], Any], answer: Callable[[Any, Any], Awaitable[Message]]
    ) -> grpc.RpcMethodHandler:
        """A method that returns errors as statuses, and counts and times its calls."""
        body_reader = self._repository.body_reader

        async def method(_: object, context: aio.ServicerContext) -> bytes:
            began, code, model = time.perf_counter(), grpc.StatusCode.CANCELLED, NO_MODEL
            more: tuple[tuple[str, str], ...] = ()
            try:
                try:
                    async with body_reader.reading(COPIES * body_reader.limits.max_body_bytes) as shrink:
                        request = await self._request(read, context, shrink)
                        model = getattr(request, "model_name", NO_MODEL)
                        try:
                            found: bytes = (await answer(request, context)).SerializeToString()
                        finally:
                            del request  # this frame lives on while an error is sent
                    code = grpc.StatusCode.OK
                    return found
                except RecspecError as error:
                    code = CODES.get(getattr(error, "status", 400), grpc.StatusCode.UNKNOWN)
                    message, wait = str(error)[:4000], getattr(error, "retry_after", None)
                    more = (("retry-after", str(wait)),) if wait is not None else ()
                except (asyncio.CancelledError, aio.AbortError):
                    raise
                except Exception:
                    log.exception("%s failed", name)
                    code, message = grpc.StatusCode.INTERNAL, "the server failed; its log says why"
                # Not inside `except`: abort's own exception would keep the error alive, and with it the whole message.
                context.set_trailing_metadata(more)
                await context.abort(code, message)
            finally:
                self._repository.count("grpc", name, model, code.name, time.perf_counter() - began)
            raise AssertionError("abort raises")

        return grpc.stream_unary_rpc_method_handler(method)

    async def _request(self, read: Callable[[bytes], Any], context: Any, shrink: Callable[[int], None]) -> Any:
        """A call's message, parsed. gRPC reads it only now, so it takes no memory before there is room."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                raw = await context.read()
        except TimeoutError:
            raise RequestError("the request's message did not come in time", status=408) from None
        if raw is aio.EOF:
            raise RequestError("the call has no message, or one that is too large; expected one")
        shrink(COPIES * len(raw))
        return await self._repository.body_reader.parsed(partial(read, raw), len(raw))

    def _read_infer(self, raw: bytes) -> tensors.InferRequest:
        """Parse a request for inference. Its tensors are copies, so the message can be freed."""
        request = _parsed(messages.ModelInferRequest, raw)
        self._repository.endpoint(request.model_name, request.model_version)  # an unknown model is the first error
        max_rows, contents = self._repository.limits.max_rows, list(request.raw_input_contents)
        if not contents:
            head = _head(request, max_rows)
            inputs = {
                declared.name: _typed(declared, each.contents)
                for each, declared in zip(request.inputs, head.inputs, strict=True)
            }
        else:
            if len(contents) != len(request.inputs):
                _head(request, max_rows)  # may know a better reason
                expected = f"expected one for each of {len(request.inputs)} inputs"
                raise RequestError(f"raw_input_contents has {len(contents)} entries; {expected}")
            del request.raw_input_contents[:]
            text = request.SerializeToString()
            head = _known_head(text, max_rows) if len(text) <= tensors.KNOWN_BYTES else _raw_head(text, max_rows)
            inputs = {
                declared.name: tensors.from_bytes(*declared, data)
                for declared, data in zip(head.inputs, contents, strict=True)
            }
        return tensors.InferRequest(
            request.model_name, request.model_version, request.id, inputs, head.outputs, head.timeout
        )

    async def _infer(self, asked: tensors.InferRequest, context: aio.ServicerContext) -> Message:
        times = [each for each in (asked.timeout, context.time_remaining()) if each is not None]
        model, outputs = await self._repository.infer(
            asked.model_name, asked.model_version, asked.inputs, timeout=max(0.0, min(times)) if times else None
        )
        answer = messages.ModelInferResponse(model_name=asked.model_name, model_version=model.version, id=asked.id)
        for name in tensors.outputs_of(asked.outputs, outputs):
            values = outputs[name]
            answer.outputs.add(name=name, datatype="FP32", shape=values.shape)
            answer.raw_output_contents.append(tensors.to_bytes(values))
        return answer


def _answers(repository: Repository) -> Mapping[str, Callable[[Message], Answer | Awaitable[Answer]]]:
    """The methods other than ModelInfer, by name."""

    def endpoint(request: Message) -> Endpoint:
        return repository.endpoint(request.name, request.version)

    def is_ready(request: Message) -> bool:
        try:
            endpoint(request)
        except RequestError:
            return False
        return True

    async def load(request: Message) -> Answer:
        repository.refuse_control()
        await repository.load_everywhere(request.model_name, dict(request.parameters))
        return {}

    async def unload(request: Message) -> Answer:
        repository.refuse_control()
        await repository.broadcast("unload", request.model_name)
        return {}

    return {
        "ServerLive": lambda _: {"live": True},
        "ServerReady": lambda _: {"ready": repository.ready},
        "ServerMetadata": lambda _: SERVER,
        "ModelReady": lambda request: {"ready": is_ready(request)},
        "ModelMetadata": lambda request: metadata_of(repository, endpoint(request)),
        "ModelConfig": lambda request: {"config": configuration_of(repository, endpoint(request))},
        "ModelStatistics": lambda request: statistics_of(repository.endpoints(request.name, request.version)),
        "RepositoryIndex": lambda request: {"models": repository.index(only_ready=request.ready)},
        "RepositoryModelLoad": load,
        "RepositoryModelUnload": unload,
    }


async def _answer(
    answer: Callable[[Message], Answer | Awaitable[Answer]], kind: type[Message], request: Message, _: object
) -> Message:
    found = answer(request)
    return json_format.ParseDict(await found if isawaitable(found) else found, kind())


def _refusing(code: grpc.StatusCode, message: str) -> grpc.RpcMethodHandler:
    """A method that refuses every call before it reads a message."""

    async def refuse(_: object, context: aio.ServicerContext) -> NoReturn:
        await context.abort(code, message)
        raise AssertionError("abort raises")

    return grpc.stream_unary_rpc_method_handler(refuse)


def _parsed(kind: type[Message], raw: bytes) -> Message:
    try:
        _check_fields(raw)
        return kind.FromString(raw)
    except (DecodeError, IndexError):
        raise RequestError(f"the message is malformed; expected {kind.DESCRIPTOR.full_name}") from None


def _check_fields(raw: bytes) -> None:
    """Refuse a message of very many fields before parsing; bytes that end too early raise IndexError."""
    at = count = 0
    while at < len(raw):
        key, at = (raw[at], at + 1) if raw[at] < 0x80 else _varint(raw, at)
        kind = key & 7  # protobuf's wire type
        if kind == 2:
            length, at = (raw[at], at + 1) if raw[at] < 0x80 else _varint(raw, at)
            at += length
        elif kind == 0:
            _, at = _varint(raw, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise IndexError("groups, or no wire type")
        count += 1
        if count > MAX_FIELDS:
            raise RequestError(f"the message has more than {MAX_FIELDS} fields")


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


def _head(request: Message, max_rows: float) -> tensors.Head:
    timeout = None
    if "timeout" in request.parameters and (kind := request.parameters["timeout"].WhichOneof("parameter_choice")):
        timeout = getattr(request.parameters["timeout"], kind)
    declared = [(each.name, each.datatype, list(each.shape), each.parameters) for each in request.inputs]
    outputs = tensors.declare_outputs((each.name, each.parameters) for each in request.outputs)
    return tensors.Head(tensors.declare(declared, max_rows), outputs, tensors.timeout_of(timeout))


def _raw_head(text: bytes, max_rows: float) -> tensors.Head:
    """The head of a request with raw contents, from the message without them."""
    request = messages.ModelInferRequest.FromString(text)
    both = next((each.name for each in request.inputs if each.HasField("contents")), None)
    if both is not None:
        raise RequestError(f"input '{both}' has contents and raw_input_contents; send one of them")
    return _head(request, max_rows)


_known_head = lru_cache(maxsize=tensors.KNOWN)(_raw_head)
"""Heads, which clients send again and again; errors are not kept."""


def _typed(declared: tensors.Declared, contents: Message) -> tensors.Tensor:
    name, datatype, _ = declared
    field = CONTENTS.get(datatype)
    if field is None:
        if datatype in tensors.STORED:
            raise tensors.wrong_input(name, f"{datatype} has no typed contents; send raw_input_contents")
        return tensors.from_values(*declared, [])  # raises: the datatype is unknown
    data: list[Any] = list(getattr(contents, field))
    if datatype == "BYTES":
        try:
            data = [each.decode() for each in data]
        except UnicodeDecodeError:
            raise tensors.wrong_input(name, "a BYTES element is not text in UTF-8") from None
    return tensors.from_values(*declared, data)
