"""The server's OpenAPI 3.1 document, from the types of its JSON; also as a page of plain HTML.

The page loads nothing from elsewhere and has no script.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from recspec import __version__
from recspec.serving import json_types as types

REFERENCE = "#/components/schemas/{model}"

REFUSALS = {
    "400": "the request is wrong; the message names the field and its place",
    "401": "the bearer token is missing or wrong",
    "403": "a page of another origin sent the request, or the server does not answer to this host name",
    "404": "there is no such model or version",
    "408": "the body did not arrive in time",
    "413": "the body is too large, or has too many rows",
    "415": "the body is not JSON",
    "503": "the queue is full, or the model is not loaded; Retry-After says when to try again",
    "504": "no answer in time",
}


@dataclass(frozen=True)
class Operation:
    """A route: its name, summary, request and answer."""

    name: str
    summary: str
    answer: type[BaseModel] | str
    """A typed answer, or a media type."""
    body: type[types.JsonRequest] | None = None
    query: type[types.JsonRequest] | None = None
    path: tuple[str, ...] = ()
    """Names in the path."""

    def described(self) -> dict[str, Any]:
        """The operation object of OpenAPI."""
        found: dict[str, Any] = {"operationId": self.name, "summary": self.summary}
        if self.query is not None:
            fields = self.query.model_json_schema()["properties"]
            found["parameters"] = [
                {"name": name, "in": "query", "description": schema.pop("description"), "schema": schema}
                for name, schema in fields.items()
            ]
        if self.path:
            text = {"type": "string"}
            found["parameters"] = [
                {"name": name, "in": "path", "required": True, "description": f"name of the {name}", "schema": text}
                for name in self.path
            ]
        if self.body is not None:
            found["requestBody"] = {"required": True, "content": _json(self.body)}
        if isinstance(self.answer, str):
            kind = "object" if self.answer == "application/json" else "string"
            content: dict[str, Any] = {self.answer: {"schema": {"type": kind}}}
            return {**found, "responses": {"200": {"description": self.summary, "content": content}}}
        codes = REFUSALS if self.body or self.query else ("401", "403")
        refused = {code: {"$ref": "#/components/responses/Refused"} for code in codes}
        answered = {"200": {"description": self.summary, "content": _json(self.answer)}}
        return {**found, "responses": {**answered, **refused}}


def _json(kind: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(model=kind.__name__)}}}


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/rank"): Operation("rank", "The best candidates for one request", types.Ranking, body=types.RankRequest),
    ("post", "/recommend"): Operation(
        "recommend", "The best items for a user, basket or context", types.Recommendation, body=types.RecommendRequest
    ),
    ("post", "/similar"): Operation(
        "similar", "The items most like one", types.SimilarItems, body=types.SimilarRequest
    ),
    ("post", "/predict"): Operation(
        "predict", "The probability or score of each row", types.RowScores, body=types.PredictRequest
    ),
    ("get", "/users"): Operation("users", "Users by part of their id or title", types.Users, query=types.FindRequest),
    ("get", "/items"): Operation("items", "Items by part of their id or title", types.Items, query=types.FindRequest),
    ("post", "/catalogue"): Operation(
        "catalogue", "Items with their fields in the catalogue", types.Catalogue, body=types.CatalogueRequest
    ),
    ("get", "/columns"): Operation(
        "columns", "Columns of items, contexts and rows, for forms", types.Columns, query=types.ColumnsRequest
    ),
    ("get", "/models"): Operation("models", "The models, the requests they answer, and their columns", types.Models),
    ("get", "/metrics"): Operation("metrics", "Counters and times, for Prometheus", "text/plain"),
    ("get", "/"): Operation("page", "A page to try a model on", "text/html"),
    ("get", "/report/{model}"): Operation("report", "The report of a model's run", "text/html", path=("model",)),
    ("get", "/docs"): Operation("docs", "These routes on a page", "text/html"),
    ("get", "/openapi.json"): Operation("openapi", "This document, OpenAPI 3.1", "application/json"),
}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    bodies = [each.body for each in OPERATIONS.values() if each.body is not None]
    answers = [each.answer for each in OPERATIONS.values() if not isinstance(each.answer, str)]
    shown: list[type[BaseModel]] = [*bodies, *answers, types.Refusal, types.RawValue]
    _, found = models_json_schema([(each, "validation") for each in shown], ref_template=REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "recspec serve",
            "version": __version__,
            "description": "Trained recommenders that take raw values. The Open Inference Protocol is under /v2.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": {path: {method: each.described()} for (method, path), each in OPERATIONS.items()},
        "components": {
            "schemas": found["$defs"],
            "responses": {"Refused": {"description": "the reason for the refusal", "content": _json(types.Refusal)}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


# --- the page --------------------------------------------------------------------------------------------------------

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
code,pre{font:14px/1.45 ui-monospace,monospace}pre{background:#f3f3f3;padding:.8rem;overflow:auto;border-radius:4px}
h2 code{font-size:1.1rem}
h2{margin-top:2.5rem;border-top:1px solid #ccc;padding-top:1rem}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;border-bottom:1px solid #ddd}
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#161616}pre{background:#242424}a{color:#8ab4f8}
h2,td,th{border-color:#444}}
"""

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/rank": {"user": 42, "candidates": [1, 50, 181], "top_k": 2},
    "/recommend": {"user": 42, "k": 10, "liked": 5},
    "/similar": {"item": 50, "k": 5},
    "/catalogue": {"items": [50, 181]},
    "/predict": {"rows": [{"user_id": 42, "item_id": 50}]},
}


def docs_page() -> str:
    """The page."""
    described = document()
    links = "<a href=/openapi.json>openapi.json</a>, <a href=/>try it</a>"
    parts = [f"<h1>Routes</h1><p>{escape(described['info']['description'])} {links}</p>"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>")
            parts.append(_fields(operation, described["components"]["schemas"]))
            if path in EXAMPLES:
                example = escape(orjson.dumps(EXAMPLES[path]).decode())
                parts.append(f"<pre>curl -H 'Content-Type: application/json' -d '{example}' localhost:8000{path}</pre>")
    codes = "".join(f"<tr><td>{code}<td>{escape(text)}" for code, text in REFUSALS.items())
    parts.append(f'<h2>Refusals</h2><p>Each is <code>{{"error": text}}</code>.</p><table>{codes}</table>')
    head = f"<meta charset=utf-8><title>recspec serve: routes</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The fields of a route's request, as a table."""
    rows = [(each["name"], each["schema"], each["description"]) for each in operation.get("parameters", ())]
    body = operation.get("requestBody")
    if body is not None:
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        required = schemas[name].get("required", ())
        rows += [
            (field, schema, f"{schema.get('description', '')}{' (required)' if field in required else ''}")
            for field, schema in schemas[name]["properties"].items()
        ]
    cells = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(schema))}<td>{escape(text)}"
        for field, schema, text in rows
    )
    return f"<table>{cells}</table>" if cells else ""


def _kind(schema: Mapping[str, Any]) -> str:
    kinds = [each["type"] for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return " or ".join(map(str, kinds or [schema.get("type", "")]))
