"""The Open Inference Protocol over HTTP, with binary tensors and the extensions that NVIDIA's tritonclient uses.

The extensions are configuration, statistics and the model repository.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec.errors import RequestError
from recspec.export import Arrays
from recspec.serving import model_metadata
from recspec.serving.repository import Form, Model, Repository, refuse_load_parameters
from recspec.serving.request_body import BINARY, parse_object
from recspec.serving.responses import json_response
from recspec.serving.tensors import (
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

HEADER_LENGTH = "inference-header-content-length"

Handler = Callable[[Request], Awaitable[Response]]


def routes(repository: Repository) -> list[Route]:
    """Every route of the protocol."""

    def form(request: Request) -> Form:
        return repository.form(request.path_params["model"], request.path_params.get("version", ""))

    async def server_metadata(_: Request) -> Response:
        return json_response(model_metadata.SERVER)

    async def live(_: Request) -> Response:
        return Response()

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if repository.ready else 503)

    async def metadata(request: Request) -> Response:
        return json_response(model_metadata.metadata(repository, form(request)))

    async def model_ready(request: Request) -> Response:
        form(request)
        return Response()

    async def configuration(request: Request) -> Response:
        return json_response(model_metadata.configuration(repository, form(request)))

    async def statistics(request: Request) -> Response:
        name, version = request.path_params["model"], request.path_params.get("version", "")
        versions = [version] if version else repository.versions(name)
        return json_response(model_metadata.statistics([repository.form(name, each) for each in versions]))

    async def all_statistics(_: Request) -> Response:
        return json_response(model_metadata.statistics(repository.every_form()))

    async def infer(request: Request) -> Response:
        began = time.monotonic()
        form(request)  # an unknown model is an error before its tensors are read
        async with repository.body_reader.body(request) as body:
            read = partial(parse_infer, body, request.headers.get(HEADER_LENGTH), repository.limits.max_rows)
            parsed = await repository.body_reader.parsed(read, len(body))
            seconds = repository.limits.timeout_seconds - (time.monotonic() - began)
            timeout = max(0.0, seconds if parsed.timeout is None else min(parsed.timeout, seconds))
            name, version = request.path_params["model"], request.path_params.get("version", "")
            model, outputs = await repository.infer(name, version, parsed.inputs, timeout=timeout)
            return _inferred(name, model, parsed, outputs)

    async def index(request: Request) -> Response:
        async with repository.body_reader.body(request) as body:
            parsed = parse_object(body) if body else {}
            return json_response(repository.index(only_ready=parsed.get("ready") is True))

    async def load(request: Request) -> Response:
        repository.refuse_control()
        async with repository.body_reader.body(request) as body:
            if body:
                refuse_load_parameters(parse_object(body).get("parameters"))
        await repository.load(request.path_params["model"])
        return json_response({})

    async def unload(request: Request) -> Response:
        repository.refuse_control()
        async with repository.body_reader.body(request) as body:
            if body:
                parse_object(body)
        await repository.unload(request.path_params["model"])
        return json_response({})

    of_model: list[tuple[str, Handler]] = [
        ("", metadata),
        ("/ready", model_ready),
        ("/config", configuration),
        ("/stats", statistics),
    ]
    found = [
        Route("/v2", server_metadata),
        Route("/v2/", server_metadata),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/v2/models/stats", all_statistics),
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/repository/models/{model}/load", load, methods=["POST"]),
        Route("/v2/repository/models/{model}/unload", unload, methods=["POST"]),
    ]
    for place in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [Route(place + end, handler) for end, handler in of_model]
        found.append(Route(place + "/infer", infer, methods=["POST"]))
    return found


# --- a request to infer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InferRequest:
    """A request for inference, parsed but not yet checked against a model."""

    id: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, bool]
    """Name -> whether the answer holds it in binary, in the order of the answer."""
    timeout: float | None
    """Seconds; None for the server's limit."""


def parse_infer(body: bytes, header_length: str | None = None, max_rows: int | None = None) -> InferRequest:
    """Parse a request: JSON of `header_length` bytes (by default all), then the bytes of its binary tensors in order.

    Raises:
        RequestError: if the request is malformed.
    """
    length = _header_length(header_length, len(body))
    head = parse_object(memoryview(body)[:length], "the request's head")
    parameters = _mapping(head.get("parameters"), "parameters")
    given = head.get("inputs")
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise RequestError("'inputs' is no list of objects; expected a tensor each")
    check_number(len(given))
    rest, inputs = memoryview(body)[length:], dict[str, Tensor]()
    for each in given:
        tensor, rest = _input(each, rest, max_rows)
        if tensor.name in inputs:
            raise RequestError(f"input '{tensor.name}' is there twice")
        inputs[tensor.name] = tensor
    if len(rest):
        raise RequestError(f"{len(rest)} bytes are left after the last binary tensor")
    identity = head.get("id", "")
    if not isinstance(identity, str):
        raise RequestError(f"'id' is {str(identity)[:40]}; expected a text")
    return InferRequest(
        identity, inputs, _outputs(head.get("outputs"), parameters), timeout_of(parameters.get("timeout"))
    )


def _header_length(given: str | None, size: int) -> int:
    if given is None:
        return size
    if not (given.isascii() and given.isdecimal() and len(given) < 19 and int(given) <= size):
        raise RequestError(
            f"Inference-Header-Content-Length is {given[:40]!r}; expected a whole number up to the body's {size} bytes"
        )
    return int(given)


def _mapping(given: object, what: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RequestError(f"{what} are {str(given)[:40]!r}; expected an object")
    return given


def _input(given: Mapping[str, Any], rest: memoryview, max_rows: int | None) -> tuple[Tensor, memoryview]:
    """A tensor, and the binary part after it."""
    name, datatype = given.get("name"), given.get("datatype")
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise RequestError("an input lacks its 'name' or its 'datatype'; expected texts")
    shape = shape_of(given.get("shape"), name, max_rows)
    parameters = _mapping(given.get("parameters"), f"input '{name}': parameters")
    if "shared_memory_region" in parameters:
        raise RequestError(f"input '{name}': shared memory is not supported; send the tensor")
    if "binary_data_size" not in parameters:
        return from_values(name, datatype, shape, given.get("data")), rest
    size = parameters["binary_data_size"]
    if "data" in given:
        raise RequestError(f"input '{name}' has 'data' and 'binary_data_size'; send one of them")
    if type(size) is not int or not 0 <= size <= len(rest):
        raise RequestError(
            f"input '{name}': binary_data_size is {str(size)[:40]}; the body has {len(rest)} bytes left for it"
        )
    return from_bytes(name, datatype, shape, rest[:size]), rest[size:]


def _outputs(given: object, parameters: Mapping[str, Any]) -> dict[str, bool]:
    binary = parameters.get("binary_data_output", False) is True
    if not given:
        return dict.fromkeys(OUTPUTS, binary)
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise RequestError("'outputs' is no list of objects")
    wanted: dict[str, bool] = {}
    for each in given:
        own = _mapping(each.get("parameters"), "an output's parameters")
        name = each.get("name")
        if own.get("classification") or "shared_memory_region" in own:
            raise RequestError("an output's 'classification' and shared memory are not supported")
        check_output(name, wanted)
        wanted[name] = own.get("binary_data", binary) is True
    return wanted


# --- the answer ------------------------------------------------------------------------------------------------------


def _inferred(name: str, model: Model, parsed: InferRequest, outputs: Arrays) -> Response:
    head: dict[str, Any] = {"model_name": name, "model_version": model.version}
    if parsed.id:
        head["id"] = parsed.id
    tensors, parts = [], list[bytes]()
    for output, binary in parsed.outputs.items():
        values = outputs[output]
        tensor: dict[str, Any] = {"name": output, "datatype": "FP32", "shape": list(values.shape)}
        if binary:
            parts.append(to_bytes(values))
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = values.ravel()
        tensors.append(tensor)
    head["outputs"] = tensors
    if not parts:
        return json_response(head)
    return _with_binary(head, parts)


def _with_binary(head: object, parts: Sequence[bytes]) -> Response:
    text = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {HEADER_LENGTH: str(len(text))}
    return Response(b"".join([text, *parts]), headers=headers, media_type=BINARY)
