"""Routes for people, beside the protocol's for programs: questions in raw values, a page to try them, metrics.

What is asked and answered is documented by `openapi`; every answer that is not a page is JSON.
"""

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
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec import answers
from recspec.answers import Directory
from recspec.bodies import answer
from recspec.errors import RequestError, listed
from recspec.gaps import row_at
from recspec.openapi import (
    AskedType,
    PredictRequest,
    Question,
    RankRequest,
    RecommendRequest,
    docs_page,
    document,
    read_question,
)
from recspec.predict import Predictor
from recspec.repository import Form, Model, Repository
from recspec.tensors import DATATYPES

PAGE = "page.html"
ASKED = "recspec.model"
"""Where a request's scope keeps the name of the model that was asked, for whoever counts requests."""
PARSED = 7
"""Times its bytes that a parsed body takes in memory beside them."""
MAX_QUERY, MAX_FOUND = 200, 100
"""Characters of what is looked for, and answers to it."""


def routes(repository: Repository) -> list[Route]:
    """Every route for people."""
    directories: WeakKeyDictionary[Model, dict[str, Directory]] = WeakKeyDictionary()

    async def rank(request: Request) -> Response:
        return await _answered(repository, request, RankRequest, _rank)

    async def recommend(request: Request) -> Response:
        return await _answered(repository, request, RecommendRequest, _recommend)

    async def predict(request: Request) -> Response:
        return await _answered(repository, request, PredictRequest, _predict)

    async def users(request: Request) -> Response:
        return answer(await _found(repository, request, directories, "user"))

    async def items(request: Request) -> Response:
        return answer(await _found(repository, request, directories, "item"))

    async def models(_: Request) -> Response:
        return answer({"models": [await _described(repository, name) for name in _names(repository)]})

    async def metrics(_: Request) -> Response:
        return Response(repository.telemetry.text(), media_type="text/plain; version=0.0.4")

    page, docs = _page(files("recspec").joinpath(PAGE).read_text(encoding="utf-8")), _page(docs_page())
    described = document()

    async def try_it(_: Request) -> Response:
        return page()

    async def documentation(_: Request) -> Response:
        return docs()

    async def openapi(_: Request) -> Response:
        return answer(described)

    return [
        Route("/rank", rank, methods=["POST"]),
        Route("/recommend", recommend, methods=["POST"]),
        Route("/predict", predict, methods=["POST"]),
        Route("/users", users),
        Route("/items", items),
        Route("/models", models),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        Route("/docs", documentation),
        Route("/", try_it),
    ]


# --- questions -------------------------------------------------------------------------------------------------------


async def _answered(
    repository: Repository,
    request: Request,
    kind: type[AskedType],
    question: Callable[[Predictor, AskedType], dict[str, Any]],
) -> Response:
    """Read a question, ask the model on its own thread, and tell how long it took."""
    began = time.perf_counter()
    limits, intake = repository.limits, repository.intake
    async with intake.body(request) as body:
        asked = await intake.parsed(partial(_read, kind, body, limits.max_rows), len(body))
        with (
            intake.holding(PARSED * len(body)),
            _opened(repository, request, asked.model, asked.version) as (form, predictor),
        ):
            left = max(0.0, limits.timeout_seconds - (time.perf_counter() - began))
            found = await form.model.batcher.call(partial(question, predictor, asked), timeout=left)
            milliseconds = round(1000 * (time.perf_counter() - began), 3)
            return answer({"model": form.name, "version": form.model.version, **found, "milliseconds": milliseconds})


def _read(kind: type[AskedType], body: bytes, max_rows: int) -> AskedType:
    asked = read_question(kind, body)
    rows = _rows(asked)
    if rows > max_rows:
        raise RequestError(f"the request has {rows} rows; at most {max_rows} are taken", status=413)
    return asked


def _rows(asked: Question) -> int:
    if isinstance(asked, RankRequest):
        return len(asked.candidates)
    return len(asked.rows) if isinstance(asked, PredictRequest) else 1


def _rank(predictor: Predictor, asked: RankRequest) -> dict[str, Any]:
    row = dict(asked.request)
    if asked.user is not None:
        name = answers.id_name(predictor, "user")
        if name is None:
            raise RequestError("user: this model knows no users; say what it reads of the request in 'request'")
        if name in row:
            raise RequestError(f"user: 'request' has '{name}' too; give one of them")
        row[name] = asked.user
    return answers.rank(predictor, row, _candidates(asked.candidates), top_k=asked.top_k).to_dict()


def _candidates(given: list[Any]) -> list[Any]:
    """Raw ids, or rows; not both.

    Raises:
        RequestError: naming the first candidate that is something else.
    """
    for index, each in enumerate(given):
        if isinstance(each, bool) or not isinstance(each, (str, int, dict)):
            raise RequestError(
                f"{row_at(index, 'candidates')}: expected a raw item id (text or whole number) or an object"
            )
        if isinstance(each, dict) != isinstance(given[0], dict):
            kind = "an object" if isinstance(given[0], dict) else "an id"
            raise RequestError(f"{row_at(index, 'candidates')}: expected {kind} as those before it")
    return given


def _recommend(predictor: Predictor, asked: RecommendRequest) -> dict[str, Any]:
    return answers.recommend(predictor, asked.user, k=asked.k, exclude_seen=asked.exclude_seen, liked=asked.liked)


def _predict(predictor: Predictor, asked: PredictRequest) -> dict[str, Any]:
    return answers.predict(predictor, asked.rows).to_dict()


@contextmanager
def _opened(
    repository: Repository, request: Request, name: str | None, version: str | None
) -> Iterator[tuple[Form, Predictor]]:
    """The model that is asked, with its predictor.

    Raises:
        RequestError: if several could be meant, or the one that is meant knows no raw values.
    """
    names = _names(repository)
    if name is None and len(names) != 1:
        raise RequestError(f"model: say which one is asked; known: {listed(names)}", status=400 if names else 503)
    request.scope[ASKED] = name if name is not None else names[0]
    with repository.use(request.scope[ASKED], version or "") as form:
        predictor = form.model.opened.predictor
        if predictor is None:
            raise RequestError(
                f"model '{form.name}' is an export, which knows no raw values; serve its run, or ask "
                f"/v2/models/{form.name}/infer with features"
            )
        yield form, predictor


def _names(repository: Repository) -> list[str]:
    """Names of loaded models, raw forms left out."""
    return [name for name in repository.names if not repository.form(name).is_raw]


# --- finding, describing ---------------------------------------------------------------------------------------------


async def _found(
    repository: Repository,
    request: Request,
    directories: WeakKeyDictionary[Model, dict[str, Directory]],
    role: Literal["user", "item"],
) -> dict[str, Any]:
    asked = request.query_params
    query, limit = asked.get("query", ""), asked.get("limit", "10")
    if len(query) > MAX_QUERY:
        raise RequestError(f"query: has {len(query)} characters; at most {MAX_QUERY} are looked for")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_FOUND):
        raise RequestError(f"limit: is {limit[:20]!r}; expected a whole number from 1 to {MAX_FOUND}")
    with _opened(repository, request, asked.get("model"), asked.get("version")) as (form, predictor):

        def find() -> tuple[int, list[dict[str, Any]]]:
            if not answers.knows_users_and_items(predictor):
                raise RequestError(f"{role}s: model '{form.name}' keeps no list of them", status=404)
            held = directories.setdefault(form.model, {})
            directory = held.get(role) or held.setdefault(role, Directory(predictor, role))
            return len(directory), directory.find(query, int(limit))

        total, found = await form.model.batcher.call(find)
    return {"total": total, f"{role}s": found}


async def _described(repository: Repository, name: str) -> dict[str, Any]:
    """What a model can be asked, and with which columns."""
    with repository.use(name) as form:
        opened, predictor = form.model.opened, form.model.opened.predictor
        ports = opened.raw or (opened.signature.inputs if predictor is not None else ())
        recommends = predictor is not None and await form.model.batcher.call(partial(answers.can_recommend, predictor))
        features = opened.signature.inputs
        return {
            "name": name,
            "version": form.model.version,
            "kind": predictor.bundle.card.model if predictor is not None else opened.platform,
            "recommends": recommends,
            "ranks": predictor is not None and bool({*predictor.spec.role("item")} & {port.name for port in features}),
            "raw": predictor is not None,
            "columns": [
                {"name": port.name, "datatype": DATATYPES[port.dtype], "is_list": port.is_list} for port in ports
            ],
            "features": [
                {"name": port.name, "datatype": DATATYPES[port.dtype], "width": port.width, "num_ids": port.num_ids}
                for port in features
            ],
        }


# --- pages -----------------------------------------------------------------------------------------------------------


def _page(text: str) -> Callable[[], Response]:
    """A page that may run and load nothing but what stands in it, and talk to nobody but this server."""
    rules = {
        "default-src": "'none'",
        "script-src": _hashes("script", text),
        "style-src": _hashes("style", text),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return lambda: Response(text, media_type="text/html", headers=headers)


def _hashes(tag: str, text: str) -> str:
    """What a policy allows of a tag: the contents that stand in the page, by digest."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
