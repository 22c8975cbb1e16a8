"""The Open Inference Protocol over HTTP, with binary tensors, configuration, statistics, and the model repository."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec.base.errors import RequestError
from recspec.export import Arrays
from recspec.serving import model_metadata, tensors
from recspec.serving.http_bodies import BINARY, first_values, json_response, parse_object
from recspec.serving.repository import Form, Repository, refuse_load_parameters

INFER = "/infer"
"""End of the paths of requests for inference."""
HEADER_LENGTH = "inference-header-content-length"


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
        return json_response(model_metadata.statistics(repository.forms(name, version)))

    async def all_statistics(_: Request) -> Response:
        return json_response(model_metadata.statistics(repository.forms()))

    async def infer(request: Request) -> Response:
        began = time.monotonic()
        form(request)  # an unknown model is an error before its tensors are read
        name, version = request.path_params["model"], request.path_params.get("version", "")
        async with repository.body_reader.body(request) as body:
            head_length = first_values(request.scope["headers"]).get(HEADER_LENGTH.encode())
            read = partial(parse_infer, body, head_length, repository.limits.max_rows, name, version)
            asked = await repository.body_reader.parsed(read, len(body))
            seconds = repository.limits.timeout_seconds - (time.monotonic() - began)
            timeout = max(0.0, seconds if asked.timeout is None else min(asked.timeout, seconds))
            model, outputs = await repository.infer(name, version, asked.inputs, timeout=timeout)
            return _answer(asked, model.version, outputs)

    async def body_of(request: Request) -> dict[str, Any]:
        async with repository.body_reader.body(request) as body:
            return parse_object(body) if body else {}

    async def index(request: Request) -> Response:
        parsed = await body_of(request)
        return json_response(repository.index(only_ready=parsed.get("ready") is True))

    async def load(request: Request) -> Response:
        repository.refuse_control()
        refuse_load_parameters((await body_of(request)).get("parameters"))
        await repository.everywhere.load(request.path_params["model"])
        return json_response({})

    async def unload(request: Request) -> Response:
        repository.refuse_control()
        await body_of(request)
        await repository.everywhere.unload(request.path_params["model"])
        return json_response({})

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
        found += [
            Route(place, metadata),
            Route(place + "/ready", model_ready),
            Route(place + "/config", configuration),
            Route(place + "/stats", statistics),
            Route(place + INFER, infer, methods=["POST"]),
        ]
    return found


# --- a request to infer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Head:
    """The JSON of a request."""

    id: str
    inputs: tuple[_Declared, ...]
    outputs: Mapping[str, bool]
    timeout: float | None


class _Declared(NamedTuple):
    """An input in the JSON of a request: its values, or the size of its binary part."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int | None
    data: object


def parse_infer(
    body: bytes, header_length: str | None = None, max_rows: float = math.inf, model: str = "", version: str = ""
) -> tensors.InferRequest:
    """Parse a request: JSON of `header_length` bytes, by default all, then the bytes of its binary tensors."""
    length = _header_length(header_length, len(body))
    may_know = header_length is not None and length <= tensors.KNOWN_BYTES
    head = (_known_head(body[:length], max_rows) if may_know else None) or _head(body[:length], max_rows)
    rest, inputs = memoryview(body)[length:], dict[str, tensors.Tensor]()
    for name, datatype, shape, size, data in head.inputs:
        if size is None:
            inputs[name] = tensors.from_values(name, datatype, shape, data)
            continue
        if size > len(rest):
            raise _wrong_size(name, size, f"the body has {len(rest)} bytes left for it")
        inputs[name] = tensors.from_bytes(name, datatype, shape, rest[:size])
        rest = rest[size:]
    if len(rest):
        raise RequestError(f"{len(rest)} bytes are left after the last binary tensor")
    return tensors.InferRequest(model, version, head.id, inputs, head.outputs, head.timeout)


def _head(text: bytes, max_rows: float) -> _Head:
    head = parse_object(text, "the request's head")
    parameters = _mapping(head.get("parameters"), "parameters")
    given = head.get("inputs")
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise RequestError("'inputs' is no list of objects; expected a tensor each")
    tensors.check_number(len(given))
    inputs: dict[str, _Declared] = {}
    for each in given:
        declared = _declared(each, max_rows)
        if declared.name in inputs:
            raise RequestError(f"input '{declared.name}' is there twice")
        inputs[declared.name] = declared
    identity = head.get("id", "")
    if not isinstance(identity, str):
        raise RequestError(f"'id' is {str(identity)[:40]}; expected a text")
    outputs, timeout = _outputs(head.get("outputs"), parameters), tensors.timeout_of(parameters.get("timeout"))
    return _Head(identity, tuple(inputs.values()), outputs, timeout)


@lru_cache(maxsize=tensors.KNOWN)
def _known_head(text: bytes, max_rows: float) -> _Head | None:
    """A head whose tensors are all binary, else None. Clients send the same ones again; errors are not kept."""
    head = _head(text, max_rows)
    return head if all(each.size is not None for each in head.inputs) else None


def _header_length(given: str | None, size: int) -> int:
    if given is None:
        return size
    if not (given.isascii() and given.isdecimal() and len(given) < 19 and int(given) <= size):
        expected = f"a whole number up to the body's {size} bytes"
        raise RequestError(f"Inference-Header-Content-Length is {given[:40]!r}; expected {expected}")
    return int(given)


def _mapping(given: object, what: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RequestError(f"{what} are {str(given)[:40]!r}; expected an object")
    return given


def _declared(given: Mapping[str, Any], max_rows: float) -> _Declared:
    name, datatype = given.get("name"), given.get("datatype")
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise RequestError("an input lacks its 'name' or its 'datatype'; expected texts")
    shape = tensors.shape_of(given.get("shape"), name, max_rows)
    parameters = _mapping(given.get("parameters"), f"input '{name}': parameters")
    tensors.refuse_shared_memory(name, parameters)
    if "binary_data_size" not in parameters:
        return _Declared(name, datatype, shape, None, given.get("data"))
    size = parameters["binary_data_size"]
    if "data" in given:
        raise RequestError(f"input '{name}' has 'data' and 'binary_data_size'; send one of them")
    if type(size) is not int or size < 0:
        raise _wrong_size(name, size, "expected a number of bytes")
    return _Declared(name, datatype, shape, size, None)


def _wrong_size(name: str, size: object, why: str) -> RequestError:
    return tensors.wrong_input(name, f"binary_data_size is {str(size)[:40]}; {why}")


def _outputs(given: object, parameters: Mapping[str, Any]) -> dict[str, bool]:
    binary = parameters.get("binary_data_output", False) is True
    if not given:
        return {tensors.EVERY: binary}
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise RequestError("'outputs' is no list of objects")
    wanted: dict[str, bool] = {}
    for each in given:
        own, name = _mapping(each.get("parameters"), "an output's parameters"), each.get("name")
        tensors.check_output(name, own, wanted)
        wanted[name] = own.get("binary_data", binary) is True
    return wanted


def _answer(asked: tensors.InferRequest, version: str, outputs: Arrays) -> Response:
    head: dict[str, Any] = {"model_name": asked.model_name, "model_version": version}
    if asked.id:
        head["id"] = asked.id
    found, parts = [], list[bytes]()
    for output, binary in tensors.outputs_of(asked.outputs, outputs).items():
        values = outputs[output]
        tensor: dict[str, Any] = {"name": output, "datatype": "FP32", "shape": list(values.shape)}
        if binary:
            parts.append(tensors.to_bytes(values))
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = values.ravel()
        found.append(tensor)
    head["outputs"] = found
    if not parts:
        return json_response(head)
    text = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    return _BinaryResponse(b"".join([text, *parts]), len(text))


class _BinaryResponse(Response):
    """JSON and binary tensors. Starlette's own headers take as long as the rest of an answer."""

    def __init__(self, body: bytes, head_length: int) -> None:
        self.status_code, self.background, self.body = 200, None, body
        self.raw_headers = [
            (HEADER_LENGTH.encode(), b"%d" % head_length),
            (b"content-length", b"%d" % len(body)),
            (b"content-type", BINARY.encode()),
        ]
