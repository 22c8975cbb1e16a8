"""JSON routes to find and show what a model knows: users and items by title, fields of items, columns for forms.

They are answered on the thread that encodes raw values, so that no search delays a recommendation.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec.base.errors import RequestError
from recspec.inference import Directory, ItemFields, Predictor, facts_of_encoder, requests
from recspec.serving import json_types as types
from recspec.serving.http_bodies import json_response
from recspec.serving.json_routes import opened
from recspec.serving.repository import Form, Repository


def routes(repository: Repository) -> list[Route]:
    """The routes that only look things up."""

    async def users(request: Request) -> Response:
        return await _find(repository, request, "user")

    async def items(request: Request) -> Response:
        return await _find(repository, request, "item")

    async def catalogue(request: Request) -> Response:
        async with repository.body_reader.body(request) as body:
            wanted = types.read_request(types.CatalogueRequest, body)
            with opened(repository, request, wanted.model, wanted.version) as (form, predictor):
                found = await form.model.encoder.call(lambda: _fields(form, predictor).of(wanted.items))
        return json_response({"items": found})

    async def columns(request: Request) -> Response:
        wanted = types.read_request(types.ColumnsRequest, request.query_params)
        with opened(repository, request, wanted.model, wanted.version) as (form, predictor):
            return json_response(await form.model.encoder.call(partial(_columns, form, predictor)))

    return [
        Route("/users", users),
        Route("/items", items),
        Route("/catalogue", catalogue, methods=["POST"]),
        Route("/columns", columns),
    ]


async def _find(repository: Repository, request: Request, role: Literal["user", "item"]) -> Response:
    """Users or items whose id or title holds a text."""
    wanted = types.read_request(types.FindRequest, request.query_params)
    with opened(repository, request, wanted.model, wanted.version) as (form, predictor):

        def find() -> tuple[int, list[dict[str, Any]]]:
            _refuse_without_lists(form, predictor, f"{role}s")
            held = form.model.directories
            directory = held.get(role) or held.setdefault(role, Directory(predictor, role))
            return len(directory), directory.find(wanted.query, wanted.limit)

        total, found = await form.model.encoder.call(find)
    return json_response({"total": total, f"{role}s": found})


def _columns(form: Form, predictor: Predictor) -> dict[str, list[dict[str, Any]]]:
    """The columns of the item catalogue, of a request's context, and of rows to score."""
    has_items = requests.knows_users_and_items(predictor)
    found = {
        "items": _fields(form, predictor).columns if has_items else (),
        "context": requests.context_columns(predictor),
        "rows": [facts_of_encoder(port.name, predictor.encoders) for port in form.model.opened.raw],
    }
    return {name: [each.to_dict() for each in facts] for name, facts in found.items()}


def _fields(form: Form, predictor: Predictor) -> ItemFields:
    _refuse_without_lists(form, predictor, "items")
    if form.model.item_fields is None:
        form.model.item_fields = ItemFields(predictor)
    return form.model.item_fields


def _refuse_without_lists(form: Form, predictor: Predictor, what: str) -> None:
    if not requests.knows_users_and_items(predictor):
        raise RequestError(f"{what}: model '{form.name}' keeps no list of them", status=404)
