"""What people may ask a server in JSON: the typed requests, their OpenAPI 3.1 document, and a page that shows it.

The page is plain HTML that this module writes: nothing is loaded from elsewhere, and it has no script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.config import JsonDict
from pydantic.json_schema import models_json_schema

from recspec import __version__
from recspec.bodies import parse_object
from recspec.errors import RequestError
from recspec.gaps import row_at

SHOWN = 10
"""Problems of a request that its answer names."""

RawId = Annotated[str, StringConstraints(max_length=1000)] | Annotated[int, Field(ge=-(2**63), lt=2**63)]
RowSchema: JsonDict = {"type": "object", "additionalProperties": {"$ref": "#/components/schemas/RawValue"}}


class Question(BaseModel):
    """What every request may say."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str | None = Field(None, max_length=200, description="its name; may be left out where there is one")
    version: str | None = Field(None, max_length=20, description="the newest where it is left out")


class RankRequest(Question):
    """Candidates to rank for one request."""

    user: RawId | None = Field(None, description="the user's raw id, in short for the request's column of that name")
    request: dict[str, Any] = Field(
        default_factory=dict, description="raw columns of the user and the context", json_schema_extra=RowSchema
    )
    candidates: list[Any] = Field(
        description="raw item ids, or rows of the items' raw columns",
        json_schema_extra={"items": {"anyOf": [{"type": ["string", "integer"]}, RowSchema]}},
    )
    top_k: int | None = Field(None, ge=1, description="how many to answer with; all where it is left out")


class RecommendRequest(Question):
    """A user to recommend to."""

    user: RawId = Field(description="the user's raw id")
    k: int = Field(10, ge=1, le=10_000, description="how many items")
    exclude_seen: bool = Field(True, description="without items that the user acted on")
    liked: int = Field(0, ge=0, le=1000, description="how many items that the user acted on to show beside them")


class PredictRequest(Question):
    """Rows to score."""

    rows: list[dict[str, Any]] = Field(
        description="raw columns of each row; null where a value is missing", json_schema_extra={"items": RowSchema}
    )


QUESTIONS: tuple[type[Question], ...] = (RankRequest, RecommendRequest, PredictRequest)

AskedType = TypeVar("AskedType", bound=Question)


def read_question(kind: type[AskedType], body: bytes) -> AskedType:
    """A request of a kind.

    Raises:
        RequestError: naming each field that is wrong, with its place.
    """
    try:
        return kind.model_validate(parse_object(body))
    except ValidationError as error:
        problems = {
            f"{_place(found['loc'])}: {found['msg'][:1].lower()}{found['msg'][1:200]}; found {_found(found['input'])}"
            for found in error.errors(include_url=False, include_context=False)
        }
        raise RequestError.of("request", sorted(problems)[:SHOWN]) from None


def _place(path: tuple[int | str, ...]) -> str:
    """`row 4 (rows[3])` for ("rows", 3), `request.age` else; the kinds that a value may have are left out."""
    if len(path) == 2 and path[0] in ("rows", "candidates") and isinstance(path[1], int):
        return row_at(path[1], str(path[0]))
    told = ""
    for part in path:
        if isinstance(part, int):
            told += f"[{part}]"
        elif part not in ("int", "str", "constrained-str", "constrained-int"):
            told += f".{part[:80]}" if told else part[:80]
    return told or "the body"


def _found(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:60] if isinstance(value, (str, int, float, type(None))) else type(value).__name__


# --- the document ----------------------------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    _, found = models_json_schema(
        [(each, "validation") for each in QUESTIONS], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "recspec serve",
            "version": __version__,
            "description": "Trained recommenders, asked in raw values. The Open Inference Protocol is under /v2.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": _PATHS,
        "components": {
            "schemas": {**found["$defs"], **_SCHEMAS},
            "responses": {"Refused": _json("why the request is refused", {"$ref": "#/components/schemas/Refusal"})},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _object(properties: Mapping[str, Any], *optional: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _list(of: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": dict(of)}


def _json(description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": dict(schema)}}}


_TEXT, _WHOLE, _NUMBER, _YES_OR_NO = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
_ID: dict[str, Any] = {"type": ["string", "integer", "number", "boolean", "null"]}
_TITLE: dict[str, Any] = {"type": ["string", "null"]}
_ANSWERED = {"model": _TEXT, "version": _TEXT, "milliseconds": _NUMBER, "notes": _list(_TEXT)}
_GAP = _object({"missing": _WHOLE, "unknown": _WHOLE})

_SCHEMAS: dict[str, Any] = {
    "RawValue": {
        "description": "as it stands in the raw files; a list where the feature is one",
        "anyOf": [
            {"type": ["string", "number", "boolean", "null"]},
            _list({"type": ["string", "number", "boolean", "null"]}),
        ],
    },
    "Refusal": _object({"error": _TEXT}),
    "Ranking": _object(
        {
            **_ANSWERED,
            "unknown_user": _YES_OR_NO,
            "unknown_items": _list(_ID),
            "items": _list(
                _object(
                    {
                        "rank": _WHOLE,
                        "index": _WHOLE,
                        "item": _ID,
                        "title": _TITLE,
                        "score": _NUMBER,
                        "probability": _NUMBER,
                    }
                )
            ),
        }
    ),
    "Recommendation": _object(
        {
            **_ANSWERED,
            "user": _ID,
            "unknown_user": _YES_OR_NO,
            "liked": _list(_object({"item": _ID, "title": _TITLE})),
            "items": _list(_object({"rank": _WHOLE, "item": _ID, "title": _TITLE, "score": _NUMBER})),
        }
    ),
    "RowScores": _object(
        {
            **_ANSWERED,
            "probabilities": _list({"type": "number", "minimum": 0, "maximum": 1}),
            "gaps": {"type": "object", "additionalProperties": _GAP},
        }
    ),
    "Users": _object(
        {"total": _WHOLE, "users": _list(_object({"user": _ID, "title": _TITLE, "count": _WHOLE}))},
    ),
    "Items": _object(
        {"total": _WHOLE, "items": _list(_object({"item": _ID, "title": _TITLE, "count": _WHOLE}))},
    ),
    "Models": _object(
        {
            "models": _list(
                _object(
                    {
                        "name": _TEXT,
                        "version": _TEXT,
                        "kind": _TEXT,
                        "recommends": _YES_OR_NO,
                        "ranks": _YES_OR_NO,
                        "raw": _YES_OR_NO,
                        "columns": _list(_object({"name": _TEXT, "datatype": _TEXT, "is_list": _YES_OR_NO})),
                        "features": _list(
                            _object(
                                {
                                    "name": _TEXT,
                                    "datatype": _TEXT,
                                    "width": _WHOLE,
                                    "num_ids": {"type": ["integer", "null"]},
                                }
                            )
                        ),
                    }
                )
            )
        }
    ),
}

_REFUSALS = {
    "400": "the request is wrong; the message names the field and its place",
    "401": "the bearer token is missing or wrong",
    "403": "a page of another origin asks, or the server is called by a name that it does not answer to",
    "404": "there is no such model or version",
    "408": "the body did not come in time",
    "413": "the body or its rows are more than the server takes",
    "415": "the body is not JSON",
    "503": "the queue is full, or the model is not loaded; Retry-After says when to try again",
    "504": "no answer in time",
}


def _operation(name: str, summary: str, answer: str, *, parameters: Any = (), asks: str = "") -> dict[str, Any]:
    said: dict[str, Any] = {"operationId": name, "summary": summary}
    if parameters:
        said["parameters"] = list(parameters)
    if asks:
        schema = {"$ref": f"#/components/schemas/{asks}"}
        said["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    codes = _REFUSALS if asks or parameters else {code: _REFUSALS[code] for code in ("401", "403")}
    refused = {code: {"$ref": "#/components/responses/Refused"} for code in codes}
    return {**said, "responses": {"200": _json(summary, {"$ref": f"#/components/schemas/{answer}"}), **refused}}


def _plain(name: str, summary: str, kind: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": {"description": summary, "content": {kind: {"schema": _TEXT}}}},
    }


def _asked(name: str, schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": dict(schema), "description": description}


_FIND = (
    _asked("query", {"type": "string", "maxLength": 200}, "part of an id or title; the busiest without"),
    _asked("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 10}, "how many"),
    _asked("model", _TEXT, "its name; may be left out where there is one"),
)

_PATHS: dict[str, Any] = {
    "/rank": {
        "post": _operation("rank", "The best candidates for one request", "Ranking", asks="RankRequest"),
    },
    "/recommend": {
        "post": _operation("recommend", "The best items for a user", "Recommendation", asks="RecommendRequest"),
    },
    "/predict": {
        "post": _operation("predict", "The probability of each row", "RowScores", asks="PredictRequest"),
    },
    "/users": {"get": _operation("users", "Users by part of their id or title", "Users", parameters=_FIND)},
    "/items": {"get": _operation("items", "Items by part of their id or title", "Items", parameters=_FIND)},
    "/models": {"get": _operation("models", "What can be asked, and with which columns", "Models")},
    "/metrics": {"get": _plain("metrics", "Counters and times, for Prometheus", "text/plain")},
    "/": {"get": _plain("page", "A page to try a model on", "text/html")},
    "/docs": {"get": _plain("docs", "These routes on a page", "text/html")},
    "/openapi.json": {"get": {
        "operationId": "openapi",
        "summary": "This document",
        "responses": {"200": _json("OpenAPI 3.1", {"type": "object"})},
    }},
}  # fmt: skip


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
    "/predict": {"rows": [{"user_id": 42, "item_id": 50}]},
}


def docs_page() -> str:
    """The document as HTML."""
    said = document()
    links = "<a href=/openapi.json>openapi.json</a>, <a href=/>try it</a>"
    parts = [f"<h1>Routes</h1><p>{escape(said['info']['description'])} {links}</p>"]
    for path, methods in said["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>")
            parts.append(_asked_html(operation, said["components"]["schemas"]))
            if path in EXAMPLES:
                example = escape(orjson.dumps(EXAMPLES[path]).decode())
                parts.append(f"<pre>curl -H 'Content-Type: application/json' -d '{example}' localhost:8000{path}</pre>")
    codes = "".join(f"<tr><td>{code}<td>{escape(text)}" for code, text in _REFUSALS.items())
    parts.append(f'<h2>Refusals</h2><p>Each is <code>{{"error": text}}</code>.</p><table>{codes}</table>')
    head = f"<meta charset=utf-8><title>recspec serve: routes</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _asked_html(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """What a route is asked with, as a table."""
    rows = [(each["name"], each["schema"], each["description"]) for each in operation.get("parameters", ())]
    body = operation.get("requestBody")
    if body is not None:
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        required = schemas[name].get("required", ())
        rows += [
            (field, said, f"{said.get('description', '')}{' (required)' if field in required else ''}")
            for field, said in schemas[name]["properties"].items()
        ]
    cells = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(said))}<td>{escape(text)}" for field, said, text in rows
    )
    return f"<table>{cells}</table>" if cells else ""


def _kind(said: Mapping[str, Any]) -> str:
    kinds = [each["type"] for each in said.get("anyOf", ()) if each.get("type") != "null"] or [said.get("type", "")]
    return " or ".join(map(str, kinds))
