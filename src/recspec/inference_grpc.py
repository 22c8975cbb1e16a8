"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`, on the messages that tritonclient ships."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf import json_format
from grpc import aio
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from recspec.errors import RecspecError, RequestError
from recspec.repository import SERVER, Form, Repository, refuse_load_parameters
from recspec.signature import OUTPUTS
from recspec.telemetry import NO_MODEL
from recspec.tensors import (
    LARGE,
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

CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The statuses of HTTP -> those of gRPC."""

OPEN = ("/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady")
"""What is answered without a token, as a load balancer asks it."""

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
"""Datatypes -> where their values stand in a tensor's typed contents."""

log = logging.getLogger("recspec.serve")

Message = Any
"""A protobuf message: the generated modules have no types."""


def make_server(repository: Repository, *, token: str | None = None) -> aio.Server:
    """A server without a port, and not started."""
    size = repository.limits.max_body_bytes
    server = aio.server(
        interceptors=[_Token(token)] if token is not None else [],
        options=[
            ("grpc.max_receive_message_length", min(size, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ],
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(repository), server)
    return server


class _Token(aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token in their metadata: `authorization: Bearer TOKEN`."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refused = grpc.unary_unary_rpc_method_handler(_refuse_token)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """The handler of a call, or the one that refuses it."""
        given = next((value for key, value in call.invocation_metadata or () if key == "authorization"), "")
        known = hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected)
        return await continuation(call) if known or call.method in OPEN else self._refused


async def _refuse_token(_: Message, context: aio.ServicerContext) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "expected metadata 'authorization: Bearer TOKEN'")
    raise AssertionError("abort raises")


async def _refuse_method(_: Message, context: aio.ServicerContext) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNIMPLEMENTED, "not supported: this server has no streams, shared memory, trace or log settings"
    )
    raise AssertionError("abort raises")


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The protocol's methods, each told to the repository's telemetry."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        for name in ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig",
                     "ModelStatistics", "ModelInfer", "RepositoryIndex", "RepositoryModelLoad",
                     "RepositoryModelUnload"):  # fmt: skip
            setattr(self, name, self._told(name, getattr(self, f"_{name}")))
        for name in (*UNSUPPORTED, "ModelStreamInfer"):
            setattr(self, name, _refuse_method)

    def _told(self, name: str, answer: Callable[[Message, Any], Awaitable[Message]]) -> Callable[..., Awaitable[Any]]:
        """A method with its errors as statuses, counted and timed."""

        async def method(request: Message, context: aio.ServicerContext) -> Message:
            began, code = time.perf_counter(), grpc.StatusCode.CANCELLED
            try:
                found = await answer(request, context)
                code = grpc.StatusCode.OK
                return found
            except RecspecError as error:
                status = error.status if isinstance(error, RequestError) else 400
                code = CODES.get(status, grpc.StatusCode.UNKNOWN)
                if isinstance(error, RequestError) and error.retry_after is not None:
                    context.set_trailing_metadata((("retry-after", str(error.retry_after)),))
                await context.abort(code, str(error)[:4000])
            except (asyncio.CancelledError, aio.AbortError):
                raise
            except Exception:
                code = grpc.StatusCode.INTERNAL
                log.exception("%s failed", name)
                await context.abort(code, "the server failed; its log says why")
            finally:
                self._count(name, request, code, time.perf_counter() - began)

        return method

    def _count(self, name: str, request: Message, code: grpc.StatusCode, seconds: float) -> None:
        told = self._repository.telemetry
        model = getattr(request, "model_name", "")
        known = model if model in self._repository.names else NO_MODEL
        told.count("recspec_requests_total", protocol="grpc", route=name, model=known, status=code.name)
        told.observe("recspec_request_seconds", seconds, protocol="grpc", route=name)

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
        told = self._repository.metadata(self._form(request))
        return json_format.ParseDict(told, messages.ModelMetadataResponse())

    async def _ModelConfig(self, request: Message, _: object) -> Message:
        told = self._repository.configuration(self._form(request))
        return json_format.ParseDict({"config": told}, messages.ModelConfigResponse())

    async def _ModelStatistics(self, request: Message, _: object) -> Message:
        kept = self._repository
        if request.name:
            versions: Sequence[str] = [request.version] if request.version else kept.versions(request.name)
            forms = [kept.form(request.name, version) for version in versions]
        else:
            forms = kept.every_form()
        return json_format.ParseDict(kept.statistics(forms), messages.ModelStatisticsResponse())

    async def _RepositoryIndex(self, request: Message, _: object) -> Message:
        told = self._repository.index(only_ready=request.ready)
        return json_format.ParseDict({"models": told}, messages.RepositoryIndexResponse())

    async def _RepositoryModelLoad(self, request: Message, _: object) -> Message:
        refuse_load_parameters(dict(request.parameters))
        await self._repository.load(request.model_name)
        return messages.RepositoryModelLoadResponse()

    async def _RepositoryModelUnload(self, request: Message, _: object) -> Message:
        await self._repository.unload(request.model_name)
        return messages.RepositoryModelUnloadResponse()

    # --- answers ------------------------------------------------------------------------------------------------

    async def _ModelInfer(self, request: Message, context: aio.ServicerContext) -> Message:
        self._repository.form(request.model_name, request.model_version)
        read = partial(_inputs, request, self._repository.limits.max_rows)
        inputs = read() if request.ByteSize() < LARGE else await asyncio.to_thread(read)
        wanted = _outputs(request)
        asked = request.parameters["timeout"].int64_param if "timeout" in request.parameters else None
        times = [each for each in (timeout_of(asked), context.time_remaining()) if each is not None]
        with self._repository.intake.holding(request.ByteSize()):
            model, outputs = await self._repository.infer(
                request.model_name, request.model_version, inputs, timeout=max(0.0, min(times)) if times else None
            )
        answer = messages.ModelInferResponse(model_name=request.model_name, model_version=model.version, id=request.id)
        for name in wanted:
            values = outputs[name]
            answer.outputs.add(name=name, datatype="FP32", shape=values.shape)
            answer.raw_output_contents.append(to_bytes(values))
        return answer


def _inputs(request: Message, max_rows: int) -> dict[str, Tensor]:
    """The tensors of a request: their bytes beside them, or their values inside.

    Raises:
        RequestError: saying what is wrong with one.
    """
    raw, given = request.raw_input_contents, request.inputs
    check_number(len(given))
    if raw and len(raw) != len(given):
        raise RequestError(f"raw_input_contents has {len(raw)} entries; expected one for each of {len(given)} inputs")
    inputs: dict[str, Tensor] = {}
    for place, each in enumerate(given):
        name = each.name
        if name in inputs:
            raise RequestError(f"input '{name}' is there twice")
        if "shared_memory_region" in each.parameters:
            raise RequestError(f"input '{name}': shared memory is not supported; send the tensor")
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
        return from_values(name, tensor.datatype, shape, [])  # which tells that it is unknown
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
