"""JSON routes: requests in raw values, the pages and the metrics."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec.encoding import row_at
from recspec.errors import RequestError, listed
from recspec.inference import Directory, Predictor, Wanted, requests
from recspec.serving import json_types as types
from recspec.serving.http_bodies import json_response
from recspec.serving.openapi import docs_page, document
from recspec.serving.repository import Form, Repository
from recspec.serving.tensors import DATATYPES, refuse_rows
from recspec.spec import Port

PAGE = "page.html"
REQUESTED_MODEL = "recspec.model"
"""Key of a request's scope for the name of the requested model, for the metrics."""
PARSED = 7
"""Memory of a parsed body in multiples of its bytes."""


def routes(repository: Repository) -> list[Route]:
    """Every JSON route, page and metrics route."""

    async def rank(request: Request) -> Response:
        return await _answer(repository, request, types.RankRequest, _rank)

    async def recommend(request: Request) -> Response:
        return await _answer(repository, request, types.RecommendRequest, _recommend)

    async def similar(request: Request) -> Response:
        return await _answer(repository, request, types.SimilarRequest, _similar)

    async def predict(request: Request) -> Response:
        return await _answer(repository, request, types.PredictRequest, _predict)

    async def users(request: Request) -> Response:
        return await _find(repository, request, "user")

    async def items(request: Request) -> Response:
        return await _find(repository, request, "item")

    async def models(_: Request) -> Response:
        return json_response({"models": [await _describe(repository, name) for name in _names(repository)]})

    async def metrics(_: Request) -> Response:
        return Response(repository.metrics.text(), media_type="text/plain; version=0.0.4")

    page = _page(files("recspec.serving").joinpath(PAGE).read_text(encoding="utf-8"))
    docs, described = _page(docs_page()), json_response(document())

    async def try_it(_: Request) -> Response:
        return page

    async def documentation(_: Request) -> Response:
        return docs

    async def openapi(_: Request) -> Response:
        return described

    return [
        Route("/rank", rank, methods=["POST"]),
        Route("/recommend", recommend, methods=["POST"]),
        Route("/similar", similar, methods=["POST"]),
        Route("/predict", predict, methods=["POST"]),
        Route("/users", users),
        Route("/items", items),
        Route("/models", models),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        Route("/docs", documentation),
        Route("/", try_it),
    ]


# --- rank, recommend, predict ----------------------------------------------------------------------------------------


async def _answer(
    repository: Repository,
    request: Request,
    kind: type[types.RequestType],
    compute: Callable[[Predictor, types.RequestType], dict[str, Any]],
) -> Response:
    """Read a request, compute its answer on the model's own thread, and add the time that it took."""
    began = time.perf_counter()
    limits, body_reader = repository.limits, repository.body_reader
    async with body_reader.body(request) as body:
        wanted = await body_reader.parsed(partial(_read, kind, body, limits.max_rows), len(body))
        with (
            body_reader.holding(PARSED * len(body)),
            _opened(repository, request, wanted.model, wanted.version) as (form, predictor),
        ):
            left = max(0.0, limits.timeout_seconds - (time.perf_counter() - began))
            found = await form.model.batcher.call(partial(compute, predictor, wanted), timeout=left)
            milliseconds = round(1000 * (time.perf_counter() - began), 3)
            head = {"model": form.name, "version": form.model.version}
            return json_response({**head, **found, "milliseconds": milliseconds})


def _read(kind: type[types.RequestType], body: bytes, max_rows: int) -> types.RequestType:
    wanted = types.read_request(kind, body)
    match wanted:
        case types.RankRequest(candidates=rows) | types.PredictRequest(rows=rows):
            refuse_rows(len(rows), max_rows)
    return wanted


def _rank(predictor: Predictor, wanted: types.RankRequest) -> dict[str, Any]:
    row = dict(wanted.request)
    if wanted.user is not None:
        name = requests.id_name(predictor, "user")
        if name is None:
            raise RequestError("user: this model knows no users; put its columns into 'request'")
        if name in row:
            raise RequestError(f"user: 'request' has '{name}' too; give one of them")
        row[name] = wanted.user
    return requests.rank(predictor, row, _candidates(wanted.candidates), top_k=wanted.top_k).to_dict()


def _candidates(given: list[Any]) -> list[Any]:
    """Candidates that are all raw ids, or all rows."""
    for index, each in enumerate(given):
        expected = None
        if isinstance(each, bool) or not isinstance(each, (str, int, dict)):
            expected = "a raw item id (text or whole number) or an object"
        elif isinstance(each, dict) != isinstance(given[0], dict):
            expected = f"{'an object' if isinstance(given[0], dict) else 'an id'} as those before it"
        if expected:
            raise RequestError(f"{row_at(index, 'candidates')}: expected {expected}")
    return given


def _recommend(predictor: Predictor, wanted: types.RecommendRequest) -> dict[str, Any]:
    asked = Wanted(
        users=() if wanted.user is None else (wanted.user,),
        items=tuple(wanted.items),
        context=wanted.context,
        k=wanted.k,
        filter=wanted.filter,
        exclude=tuple(wanted.exclude),
        include_seen=not wanted.exclude_seen,
        diversity=wanted.diversity,
        diverse_by=wanted.diverse_by,
        boosts=tuple(wanted.boosts),
        explain=wanted.explain,
    )
    return requests.recommend(predictor, asked, liked=wanted.liked)


def _similar(predictor: Predictor, wanted: types.SimilarRequest) -> dict[str, Any]:
    return requests.similar(predictor, wanted.item, k=wanted.k, filter=wanted.filter, exclude=wanted.exclude)


def _predict(predictor: Predictor, wanted: types.PredictRequest) -> dict[str, Any]:
    return requests.predict(predictor, wanted.rows).to_dict()


@contextmanager
def _opened(
    repository: Repository, request: Request, name: str | None, version: str | None
) -> Iterator[tuple[Form, Predictor]]:
    """The requested model, with its predictor; refuses a request that fits several, and a model without raw values."""
    names = _names(repository)
    if name is None and len(names) != 1:
        raise RequestError(f"model: expected the name of one; known: {listed(names)}", status=400 if names else 503)
    request.scope[REQUESTED_MODEL] = name if name is not None else names[0]
    with repository.use(request.scope[REQUESTED_MODEL], version or "") as form:
        predictor = form.model.opened.predictor
        if predictor is None:
            instead = f"serve its run, or send features to /v2/models/{form.name}/infer"
            raise RequestError(f"model '{form.name}' is an export, which takes no raw values; {instead}")
        yield form, predictor


def _names(repository: Repository) -> list[str]:
    """Names of loaded models, without raw forms."""
    return [name for name in repository.names if not repository.form(name).is_raw]


# --- users, items, models --------------------------------------------------------------------------------------------


async def _find(repository: Repository, request: Request, role: Literal["user", "item"]) -> Response:
    """Users or items whose id or title holds a text."""
    wanted = types.read_request(types.FindRequest, request.query_params)
    with _opened(repository, request, wanted.model, wanted.version) as (form, predictor):

        def find() -> tuple[int, list[dict[str, Any]]]:
            if not requests.knows_users_and_items(predictor):
                raise RequestError(f"{role}s: model '{form.name}' keeps no list of them", status=404)
            held = form.model.directories
            directory = held.get(role) or held.setdefault(role, Directory(predictor, role))
            return len(directory), directory.find(wanted.query, wanted.limit)

        total, found = await form.model.batcher.call(find)
    return json_response({"total": total, f"{role}s": found})


async def _describe(repository: Repository, name: str) -> dict[str, Any]:
    """A model, the requests that it answers, and its inputs."""
    with repository.use(name) as form:
        opened, predictor = form.model.opened, form.model.opened.predictor
        ports = opened.raw or (opened.signature.inputs if predictor is not None else ())
        recommends = predictor is not None and await form.model.batcher.call(partial(requests.can_recommend, predictor))
        features = opened.signature.inputs
        return {
            "name": name,
            "version": form.model.version,
            "kind": predictor.bundle.card.model if predictor is not None else opened.platform,
            "recommends": recommends,
            "ranks": predictor is not None and bool({*predictor.spec.role("item")} & {port.name for port in features}),
            "raw": predictor is not None,
            "columns": [{**_named(port), "is_list": port.is_list} for port in ports],
            "features": [{**_named(port), "width": port.width, "num_ids": port.num_ids} for port in features],
            "pipeline": _stages(predictor),
        }


def _stages(predictor: Predictor | None) -> dict[str, Any] | None:
    """How a pipeline finds candidates; None for a model alone."""
    card = None if predictor is None else predictor.bundle.pipeline
    if card is None:
        return None
    return {"candidates": card.candidates, "filter": card.filter, "retrievers": [each.name for each in card.retrievers]}


def _named(port: Port) -> dict[str, str]:
    return {"name": port.name, "datatype": DATATYPES[port.dtype]}


# --- pages -----------------------------------------------------------------------------------------------------------


def _page(text: str) -> Response:
    """A page that runs and loads only its own content, and connects only to this server."""
    policy = (
        f"default-src 'none'; script-src {_hashes('script', text)}; style-src {_hashes('style', text)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(text, media_type="text/html", headers=headers)


def _hashes(tag: str, text: str) -> str:
    """The sources that a policy allows for a tag: the digests of its contents in the page."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
