"""The server's OpenAPI 3.1 document, and its pages: to try models, the routes, and the reports of runs.

No page loads anything from elsewhere. The page to try models is put together from the files of the folder `page`. Its
Content-Security-Policy allows the digests of its own script and style. Pictures of other hosts are allowed only at
`/?images=on`, because each tells its host what is looked at; the page asks its user first. The page of the routes has
no script.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec import __version__
from recspec.serving import event_routes, json_routes, recommend_routes
from recspec.serving import json_types as types
from recspec.serving.http_bodies import json_response
from recspec.serving.model_folders import REPORTS, read_report
from recspec.serving.operations import Operation, routes_of
from recspec.serving.repository import Repository

SCRIPTS = ("server.js", "fields.js", "finder.js", "results.js", "rows.js", "live.js", "page.js")
"""In the order in which they run."""

OWN_IMAGES, ALL_IMAGES = "data:", "data: https: http:"
REFERENCE = "#/components/schemas/{model}"
DESCRIPTION = "Trained recommenders that take raw values. The Open Inference Protocol is under /v2."

REFUSALS = {
    "400": "the request is wrong; the message names the field and its place",
    "401": "the bearer token is missing or wrong",
    "403": "a page of another origin sent the request, or the server does not answer to this host name",
    "404": "there is no such model or version",
    "408": "the body did not arrive in time",
    "413": "the body is too large, or has too many rows or events",
    "415": "the body is not JSON",
    "503": "a queue is full, the model is not loaded, or the journal fails; Retry-After says when to try again",
    "504": "no answer in time",
}


def routes(repository: Repository) -> list[Route]:
    """The pages, and the document."""
    return routes_of(OPERATIONS, repository)


# --- the document ----------------------------------------------------------------------------------------------------


def _described(operation: Operation) -> dict[str, Any]:
    """The operation object of OpenAPI."""
    found: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    if operation.request is not None and operation.method == "GET":
        fields = operation.request.model_json_schema()["properties"]
        found["parameters"] = [
            {"name": name, "in": "query", "description": schema.pop("description"), "schema": schema}
            for name, schema in fields.items()
        ]
    elif operation.request is not None:
        found["requestBody"] = {"required": True, "content": _json(operation.request)}
    elif operation.path_names:
        text = {"type": "string"}
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "description": f"name of the {name}", "schema": text}
            for name in operation.path_names
        ]
    if isinstance(operation.answer, str):
        kind = "object" if operation.answer == "application/json" else "string"
        content: dict[str, Any] = {operation.answer: {"schema": {"type": kind}}}
        return {**found, "responses": {"200": {"description": operation.summary, "content": content}}}
    codes = ("401", "403") if operation.request is None else REFUSALS
    refused = {code: {"$ref": "#/components/responses/Refused"} for code in codes}
    answered = {"200": {"description": operation.summary, "content": _json(operation.answer)}}
    return {**found, "responses": {**answered, **refused}}


def _json(kind: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(model=kind.__name__)}}}


def _operations() -> tuple[Operation, ...]:
    return (*recommend_routes.OPERATIONS, *json_routes.OPERATIONS, *event_routes.OPERATIONS, *OPERATIONS)


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    operations = _operations()
    bodies = [each.request for each in operations if each.request is not None and each.method == "POST"]
    answers = [each.answer for each in operations if not isinstance(each.answer, str)]
    shown: list[type[BaseModel]] = [*bodies, *answers, types.Refusal, types.RawValue]
    _, found = models_json_schema([(each, "validation") for each in shown], ref_template=REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "recspec serve",
            "version": __version__,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": {each.path: {each.method.lower(): _described(each)} for each in operations},
        "components": {
            "schemas": found["$defs"],
            "responses": {"Refused": {"description": "the reason for the refusal", "content": _json(types.Refusal)}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


# --- pages -----------------------------------------------------------------------------------------------------------


async def _page(_: Repository, request: Request) -> Response:
    return _static()["with pictures" if request.query_params.get("images") == "on" else "page"]


async def _fixed(name: str, _: Repository, __: Request) -> Response:
    return _static()[name]


async def _report(repository: Repository, request: Request) -> Response:
    """The report of a run, whose script can neither read what the page keeps, nor send requests in its name."""
    name = request.path_params["model"]
    with json_routes.opened(repository, request, name, None) as (_, predictor):
        found = await asyncio.to_thread(read_report, predictor.bundle.folder, name)
    sandbox = "sandbox allow-scripts; style-src 'unsafe-inline'; connect-src 'none'; img-src data:; font-src data:"
    return _response(found.decode("utf-8", "replace"), policy=sandbox)


@cache
def _static() -> Mapping[str, Response]:
    """The answers that are always the same."""
    text = page_text()
    pages = {"page": _response(text), "with pictures": _response(text, images=ALL_IMAGES)}
    return {**pages, "docs": _response(docs_page()), "openapi": json_response(document())}


def docs_page() -> str:
    """The page of the routes."""
    operations, bodies = _operations(), document()["components"]["schemas"]
    asked = {each.path: each.request for each in operations if each.request is not None}
    schemas = {path: bodies.get(kind.__name__) or kind.model_json_schema() for path, kind in asked.items()}
    pages = Environment(loader=PackageLoader("recspec.serving"), autoescape=True, trim_blocks=True)
    template = pages.get_template("routes.html")
    return template.render(text=DESCRIPTION, operations=operations, schemas=schemas, refusals=REFUSALS)


def page_text() -> str:
    """The page to try models as one HTML text."""
    folder = files("recspec.serving").joinpath("page")
    text, style = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    scripts = [folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = "'use strict';\n{\n" + "\n".join(scripts) + "}\n"
    parts = {
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script src="page.js"></script>': f"<script>{script}</script>",
    }
    for place, part in parts.items():
        assert text.count(place) == 1, place
        text = text.replace(place, part)
    return text


def _response(text: str, *, images: str = OWN_IMAGES, policy: str | None = None) -> Response:
    """A page that runs only its own content."""
    allowed = policy or f"style-src {_hashes('style', text)}; connect-src 'self'; img-src {images}"
    headers = {
        "content-security-policy": f"default-src 'none'; script-src {_hashes('script', text)}; {allowed}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return Response(text, media_type="text/html", headers=headers)


def _hashes(tag: str, text: str) -> str:
    """The sources that a policy allows for a tag: the digests of its contents in the page."""
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


OPERATIONS = (
    Operation("GET", "/", "A page to try a model on", "text/html", _page),
    Operation("GET", f"{REPORTS}{{model}}", "The report of a model's run", "text/html", _report),
    Operation("GET", "/docs", "These routes on a page", "text/html", partial(_fixed, "docs")),
    Operation("GET", "/openapi.json", "This document, OpenAPI 3.1", "application/json", partial(_fixed, "openapi")),
)
