"""What a request costs grows with its size and no faster, on every route and in every dimension of what it asks.

Work is counted, not timed: calls of functions, Python's and C's, on every thread.
Routes are found by walking the router, fields by walking the OpenAPI document and the protocol's messages, so that a
new one is asked as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("starlette")
grpc = pytest.importorskip("grpc")

from starlette.routing import Route  # noqa: E402
from tritonclient.grpc import service_pb2  # noqa: E402

from recspec.serving.access import Access  # noqa: E402
from recspec.serving.inference_grpc import SERVICE, Service  # noqa: E402
from recspec.serving.pages import document  # noqa: E402
from recspec.serving.repository import Repository  # noqa: E402
from recspec.serving.server import ROUTES, application  # noqa: E402
from recspec.serving.settings import RepositorySettings  # noqa: E402
from tests.asking import ask, sources  # noqa: E402
from tests.made_up import clicks  # noqa: E402
from tests.made_up_models import made_up_bundle  # noqa: E402

SIZES = (5, 50, 500)
LEAST = 40.0
"""Calls for an element of a request, however few there are: below these no growth is told apart from noise."""
FASTER = 3.0
"""How many times as much an element may cost in the largest request as in the middle one; of quadratic work 10."""

JSON: Mapping[str, Callable[[int], Any]] = {
    "a long text": lambda n: "x" * n,
    "a long number": lambda n: int("9" * min(n, 4000)),
    "numbers": lambda n: list(range(n)),
    "texts": lambda n: [f"x{each}" for each in range(n)],
    "lists in lists": lambda n: _nested(n),
    "an object of many columns": lambda n: {f"c{each}": each for each in range(n)},
    "rows": lambda n: [{"user_id": f"u{each}", "item_id": each} for each in range(n)],
    "rows of another column each": lambda n: [{f"c{each}": each} for each in range(n)],
    "rows of another spelling each": lambda n: [{" " * each + "user_id": each} for each in range(n)],
    "a row of many columns": lambda n: [{f"c{each}": each for each in range(n)}],
    "a row with a long text": lambda n: [{"user_id": "x" * n}],
    "a row with a long name": lambda n: [{"user_id" * n: 1}],
    "a row with a long list": lambda n: [{"tags": [f"t{each}" for each in range(n)]}],
    "a row with a deep list": lambda n: [{"tags": _nested(n)}],
    "tensors": lambda n: [_tensor(f"c{each}", 1) for each in range(n)],
    "tensors of one name": lambda n: [_tensor("user_id", 1) for _ in range(n)],
    "a tensor of many rows": lambda n: [_tensor("user_id", n)],
    "a tensor of many dimensions": lambda n: [{**_tensor("user_id", 1), "shape": [1] * n}],
    "a tensor in lists": lambda n: [{**_tensor("user_id", n), "data": _nested(n)}],
}
"""What stands in a field of a body, by its size; a field that wants something else refuses it."""

BASES: Mapping[str, Mapping[str, Any]] = {
    "/rank": {"user": "u1", "candidates": [{"item_id": 1, "price": 1.0}]},
    "/recommend": {"user": "u1"},
    "/predict": {"rows": [{"user_id": "u1"}]},
}
"""What stands beside the field, where the rest of a request is required."""


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth - 1):
        found = [found]
    return found


def _tensor(name: str, rows: int) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": [rows, 1], "data": list(range(rows))}


@dataclass
class Work:
    """Counts calls on every thread that is started after it, while it is asked to."""

    counting: bool = False
    calls: int = 0

    def note(self, _: FrameType, event: str, __: Any) -> None:
        if self.counting and event in ("call", "c_call"):
            self.calls += 1

    def of(self, runner: asyncio.Runner, work: Coroutine[Any, Any, Any]) -> int:
        """Calls of what runs on a loop."""
        self.calls, self.counting = 0, True
        try:
            runner.run(work)
        finally:
            self.counting = False
        return self.calls


@dataclass(frozen=True)
class Served:
    """A server's application whose work is counted."""

    runner: asyncio.Runner
    repository: Repository
    app: Any
    work: Work

    def check(self, requests: Callable[[int], Callable[[], Coroutine[Any, Any, Any]]], what: str) -> None:
        """Ask in each size, and compare what an element of the request costs."""
        self.runner.run(requests(SIZES[0])())  # so that what is loaded, or remembered, once is not counted
        small, middle, large = (self.work.of(self.runner, requests(size)()) for size in SIZES)
        in_middle, in_large = (middle - small) / (SIZES[1] - SIZES[0]), (large - small) / (SIZES[2] - SIZES[0])
        assert in_large <= max(FASTER * in_middle, LEAST), (
            f"{what}: calls grow faster than the request: {small:,}, {middle:,} and {large:,} at {SIZES}"
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, work = tmp_path_factory.mktemp("work"), Work()
    bundle = made_up_bundle(folder / "dlrm", clicks(folder / "clicks", num_rows=500), "dlrm")
    before = sys.getprofile()
    threading.setprofile(work.note)
    sys.setprofile(work.note)
    try:
        with asyncio.Runner() as runner:
            settings = RepositorySettings(watch=0, control=True)
            kept = Repository(sources(dlrm=bundle), settings=settings)
            runner.run(kept.start())
            kept.broadcast = _nothing  # what loading costs is no client's choice
            yield Served(runner, kept, application(kept, access=Access()), work)
            runner.run(kept.close())
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


async def _nothing(_: str, __: str) -> str:
    """Loads or unloads nothing."""
    return ""


def routes() -> list[Route]:
    kept = Repository(sources(m=Path()))
    return [route for each in ROUTES for route in each(kept) if isinstance(route, Route)]


def address(route: Route, **given: str) -> str:
    """A route's path with its parameters filled in."""
    return route.path.format(**{"model": "dlrm", "version": "1", "experiment": "none", **given})


def fields(path: str) -> list[str]:
    """The fields of a route's body: as the document says, or those of the Open Inference Protocol."""
    said = document()
    operation = said["paths"].get(path, {}).get("post", {})
    if "requestBody" not in operation:
        return ["inputs", "outputs", "parameters", "id"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return list(said["components"]["schemas"][name]["properties"])


ALL = {
    f"{method} {route.path}": (method, route)
    for route in routes()
    for method in sorted(route.methods or ())
    if method != "HEAD"
}


@pytest.mark.parametrize("name", ALL)
def test_work_of_a_route_grows_with_the_request_and_no_faster(served: Served, name: str) -> None:
    method, route = ALL[name]

    def asked(
        target: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Callable[[], Coroutine[Any, Any, Any]]:
        return lambda: ask(served.app, method, target, body, headers)

    base = {"inputs": [_tensor("user_id", 1)]} if route.path.endswith("/infer") else dict(BASES.get(route.path, {}))
    sent = base if method == "POST" else None
    for parameter in route.param_convertors:
        served.check(lambda n, p=parameter: asked(address(route, **{p: "x" * n}), sent), f"{name}, a long {parameter}")
    for what, query in (
        ("many", lambda n: "&".join(f"c{each}=1" for each in range(n))),
        ("a long one", lambda n: "query=" + "x" * n),
    ):
        served.check(lambda n, q=query: asked(f"{address(route)}?{q(n)}", sent), f"{name}, parameters: {what}")
    served.check(lambda n: asked(address(route), sent, {f"x-{e}": "1" for e in range(n)}), f"{name}, headers")
    for field in fields(route.path) if method == "POST" else ():
        for what, value in JSON.items():
            if "deep" in what or "in lists" in what:
                value = _shallow(value)
            served.check(
                lambda n, f=field, v=value: asked(address(route), {**base, f: v(n)}), f"{name}, {field}: {what}"
            )


def _shallow(value: Callable[[int], Any]) -> Callable[[int], Any]:
    """As deep as the test's own JSON may be."""
    return lambda n: value(min(n, 400))


# --- gRPC ------------------------------------------------------------------------------------------------------------


class Context:
    """The side of a call that a handler sees."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    async def read(self) -> bytes:
        return self._message

    async def abort(self, code: Any, details: str) -> None:
        raise grpc.aio.AbortError(code, details)

    def set_trailing_metadata(self, _: Any) -> None:
        pass

    def time_remaining(self) -> None:
        return None


def grown(kind: Any, size: int) -> Iterator[tuple[str, Any]]:
    """A message of a kind with each of its fields grown, and those of its messages."""
    for field in kind.DESCRIPTOR.fields:
        message, name = kind(), field.name
        many = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for each in range(size):
                _ = getattr(message, name)[f"c{each}"]
            yield name, message
        elif field.message_type is not None and many:
            for _ in range(size):
                getattr(message, name).add()
            yield name, message
            for inner, one in grown(type(getattr(kind(), name).add()), size):
                holder = kind()
                getattr(holder, name).append(one)
                yield f"{name}.{inner}", holder
        elif field.message_type is not None:
            for inner, one in grown(type(getattr(kind(), name)), size):
                holder = kind()
                getattr(holder, name).CopyFrom(one)
                yield f"{name}.{inner}", holder
        elif many:
            value = b"x" if field.type == field.TYPE_BYTES else 1
            getattr(message, name).extend([value] * size)
            yield name, message
        elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            setattr(message, name, "x" * size if field.type == field.TYPE_STRING else b"x" * size)
            yield name, message


METHODS = [each.name for each in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]


@pytest.mark.parametrize("name", METHODS)
def test_work_of_a_call_grows_with_its_message_and_no_faster(served: Served, name: str) -> None:
    called = Service(served.repository, Access()).service(Called(SERVICE + name))
    assert called is not None
    method = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[name]
    kind = getattr(service_pb2, method.input_type.name)

    async def answered(message: bytes) -> None:
        with contextlib.suppress(grpc.aio.AbortError):
            await called.stream_unary(None, Context(message))

    dimensions = [each for each, _ in grown(kind, 1)]
    for place, field in enumerate(dimensions):

        def asked(size: int, place: int = place) -> Callable[[], Coroutine[Any, Any, Any]]:
            message = list(grown(kind, size))[place][1]
            if hasattr(message, "model_name") and not message.model_name:
                message.model_name = "dlrm"
            raw = message.SerializeToString()
            return lambda: answered(raw)

        served.check(asked, f"{name}, {field}")


@dataclass(frozen=True)
class Called:
    method: str
    invocation_metadata: tuple[Any, ...] = ()
