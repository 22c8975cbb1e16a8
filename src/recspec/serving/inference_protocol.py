"""The Open Inference Protocol over HTTP, with binary tensors and the model repository; and what models take.

Metadata, configuration and statistics are as the protocol and its extensions define them, over both HTTP and gRPC.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec import __version__
from recspec.base.errors import RequestError
from recspec.export import TYPES, Arrays
from recspec.serving import tensors
from recspec.serving.http_bodies import BINARY, json_response, parse_object
from recspec.serving.repository import Endpoint, Repository

INFER = "/infer"
"""End of the paths of requests for inference."""
HEADER_LENGTH = "inference-header-content-length"
SERVER = {
    "name": "recspec",
    "version": __version__,
    "extensions": ["binary_tensor_data", "model_repository", "model_configuration", "statistics"],
}
"""The protocol's server metadata."""


def routes(repository: Repository) -> list[Route]:
    """Every route of the protocol."""

    def named(request: Request) -> tuple[str, str]:
        return request.path_params["model"], request.path_params.get("version", "")

    def endpoint(request: Request) -> Endpoint:
        return repository.endpoint(*named(request))

    def plain(path: str, name: str, answer: Callable[[Request], object]) -> Route:
        """A route that computes nothing, under the name that the metrics show."""

        async def handle(request: Request) -> Response:
            return json_response(answer(request))

        handle.__name__ = name
        return Route(path, handle)

    def statistics(request: Request) -> dict[str, Any]:
        return statistics_of(repository.endpoints(*named(request)))

    async def live(_: Request) -> Response:
        return Response()

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if repository.ready else 503)

    async def model_ready(request: Request) -> Response:
        endpoint(request)
        return Response()

    async def infer(request: Request) -> Response:
        began = time.monotonic()
        endpoint(request)  # an unknown model is an error before its tensors are read
        name, version = named(request)
        async with repository.body_reader.body(request) as body:
            head_length = request.headers.get(HEADER_LENGTH)
            read = partial(parse_infer, body, head_length, repository.limits.max_rows, name, version)
            asked = await repository.body_reader.parsed(read, len(body))
            seconds = repository.limits.timeout - (time.monotonic() - began)
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
        await repository.load_everywhere(request.path_params["model"], (await body_of(request)).get("parameters"))
        return json_response({})

    async def unload(request: Request) -> Response:
        repository.refuse_control()
        await body_of(request)
        await repository.broadcast("unload", request.path_params["model"])
        return json_response({})

    found = [
        plain("/v2", "server_metadata", lambda _: SERVER),
        plain("/v2/", "server_metadata", lambda _: SERVER),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        plain("/v2/models/stats", "all_statistics", lambda _: statistics_of(repository.endpoints())),
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/repository/models/{model}/load", load, methods=["POST"]),
        Route("/v2/repository/models/{model}/unload", unload, methods=["POST"]),
    ]
    for place in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [
            plain(place, "metadata", lambda request: metadata_of(repository, endpoint(request))),
            Route(f"{place}/ready", model_ready),
            plain(f"{place}/config", "configuration", lambda request: configuration_of(repository, endpoint(request))),
            plain(f"{place}/stats", "statistics", statistics),
            Route(f"{place}{INFER}", infer, methods=["POST"]),
        ]
    return found


# --- what models take ------------------------------------------------------------------------------------------------


def metadata_of(repository: Repository, endpoint: Endpoint) -> dict[str, Any]:
    """The protocol's model metadata: names, datatypes and shapes with the batch first."""
    return {
        "name": endpoint.name,
        "versions": list(repository.versions(endpoint.name)),
        "platform": endpoint.model.opened.platform,
        "inputs": [
            {"name": port.name, "datatype": tensors.DATATYPES[port.dtype], "shape": [-1, port.width]}
            for port in endpoint.inputs
        ],
        "outputs": [
            {"name": name, "datatype": "FP32", "shape": [-1, 1]} for name in endpoint.model.opened.signature.outputs
        ],
    }


def configuration_of(repository: Repository, endpoint: Endpoint) -> dict[str, Any]:
    """The model configuration for Triton's clients, with the shapes of one row."""
    return {
        "name": endpoint.name,
        "platform": endpoint.model.opened.platform,
        "backend": "recspec",
        "version_policy": {"specific": {"versions": [int(each) for each in repository.versions(endpoint.name)]}},
        "max_batch_size": repository.limits.max_rows,
        "input": [
            {"name": port.name, "data_type": TYPES[port.dtype], "dims": [port.width]} for port in endpoint.inputs
        ],
        "output": [
            {"name": name, "data_type": "TYPE_FP32", "dims": [1]} for name in endpoint.model.opened.signature.outputs
        ],
        "dynamic_batching": {
            "preferred_batch_size": [repository.limits.max_batch],
            "max_queue_delay_microseconds": round(1000 * repository.limits.max_delay_ms),
        },
        "instance_group": [
            {
                "name": endpoint.name,
                "kind": "KIND_CPU" if repository.settings.device == "cpu" else "KIND_AUTO",
                "count": 1,
            }
        ],
    }


def statistics_of(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The protocol's statistics; both forms of a model share them."""
    found = []
    for endpoint in endpoints:
        counts = asdict(endpoint.model.batcher.statistics)
        sizes = [{"batch_size": rows, **parts} for rows, parts in sorted(counts.pop("by_rows").items())]
        head = {"name": endpoint.name, "version": endpoint.model.version}
        found.append({**head, **counts, "batch_stats": sizes, "memory_usage": []})
    return {"model_stats": found}


# --- a request to infer ----------------------------------------------------------------------------------------------


def parse_infer(
    body: bytes, header_length: str | None = None, max_rows: float = math.inf, model: str = "", version: str = ""
) -> tensors.InferRequest:
    """Parse a request: JSON of `header_length` bytes, by default all, then the bytes of its binary tensors."""
    length = _header_length(header_length, len(body))
    may_know = header_length is not None and length <= tensors.KNOWN_BYTES
    head, given = (_known_head(body[:length], max_rows) if may_know else None) or _head(body[:length], max_rows)
    rest, inputs = memoryview(body)[length:], dict[str, tensors.Tensor]()
    for declared, (size, data) in zip(head.inputs, given, strict=True):
        if size is None:
            inputs[declared.name] = tensors.from_values(*declared, data)
            continue
        if size > len(rest):
            raise _wrong_size(declared.name, size, f"the body has {len(rest)} bytes left for it")
        inputs[declared.name] = tensors.from_bytes(*declared, rest[:size])
        rest = rest[size:]
    if len(rest):
        raise RequestError(f"{len(rest)} bytes are left after the last binary tensor")
    return tensors.InferRequest(model, version, head.id, inputs, head.outputs, head.timeout)


Given = tuple[int | None, object]
"""The size of an input's binary part, or None; its values in the JSON."""


def _head(text: bytes, max_rows: float) -> tuple[tensors.Head, tuple[Given, ...]]:
    head = parse_object(text, "the request's head")
    parameters = _mapping(head.get("parameters"), "parameters")
    inputs = [
        (each, _mapping(each.get("parameters"), f"input '{each.get('name')}': parameters"))
        for each in _objects(head.get("inputs"), "inputs")
    ]
    declared = [(each.get("name"), each.get("datatype"), each.get("shape"), own) for each, own in inputs]
    outputs = [
        (each.get("name"), _mapping(each.get("parameters"), "an output's parameters"))
        for each in _objects(head.get("outputs") or [], "outputs")
    ]
    if not isinstance(identity := head.get("id", ""), str):
        raise RequestError(f"'id' is {str(identity)[:40]}; expected a text")
    binary = parameters.get("binary_data_output", False) is True
    found = tensors.Head(
        tensors.declare(declared, max_rows),
        tensors.declare_outputs(outputs, binary=binary),
        tensors.timeout_of(parameters.get("timeout")),
        identity,
    )
    return found, tuple((_size(each, own), each.get("data")) for each, own in inputs)


@lru_cache(maxsize=tensors.KNOWN)
def _known_head(text: bytes, max_rows: float) -> tuple[tensors.Head, tuple[Given, ...]] | None:
    """A head whose tensors are all binary, else None. Clients send the same ones again; errors are not kept."""
    head, given = _head(text, max_rows)
    return (head, given) if all(size is not None for size, _ in given) else None


def _header_length(given: str | None, size: int) -> int:
    if given is None:
        return size
    if not (given.isascii() and given.isdecimal() and len(given) < 19 and int(given) <= size):
        expected = f"a whole number up to the body's {size} bytes"
        raise RequestError(f"Inference-Header-Content-Length is {given[:40]!r}; expected {expected}")
    return int(given)


def _mapping(given: object, what: str) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise RequestError(f"{what} are {str(given)[:40]!r}; expected an object")
    return given or {}


def _objects(given: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise RequestError(f"'{name}' is no list of objects; expected a tensor each")
    return given


def _size(given: Mapping[str, Any], parameters: Mapping[str, Any]) -> int | None:
    """The bytes of an input's binary part; None if its values stand in the JSON."""
    if "binary_data_size" not in parameters:
        return None
    size, name = parameters["binary_data_size"], given["name"]
    if "data" in given:
        raise RequestError(f"input '{name}' has 'data' and 'binary_data_size'; send one of them")
    if type(size) is not int or size < 0:
        raise _wrong_size(name, size, "expected a number of bytes")
    return size


def _wrong_size(name: str, size: object, why: str) -> RequestError:
    return tensors.wrong_input(name, f"binary_data_size is {str(size)[:40]}; {why}")


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
