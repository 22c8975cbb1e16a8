"""The server's OpenAPI 3.1 document, generated from its typed requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from recspec import __version__
from recspec.serving.json_answers import Items, Models, Ranking, Recommendation, Refusal, RowScores, Users
from recspec.serving.json_requests import (
    FindRequest,
    JsonRequest,
    PredictRequest,
    RankRequest,
    RawValue,
    RecommendRequest,
)

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
    body: type[JsonRequest] | None = None
    query: type[JsonRequest] | None = None

    def described(self) -> dict[str, Any]:
        """The operation object of OpenAPI."""
        found: dict[str, Any] = {"operationId": self.name, "summary": self.summary}
        if self.query is not None:
            fields = self.query.model_json_schema()["properties"]
            found["parameters"] = [
                {"name": name, "in": "query", "description": schema.pop("description"), "schema": schema}
                for name, schema in fields.items()
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
    ("post", "/rank"): Operation("rank", "The best candidates for one request", Ranking, body=RankRequest),
    ("post", "/recommend"): Operation("recommend", "The best items for a user", Recommendation, body=RecommendRequest),
    ("post", "/predict"): Operation("predict", "The probability of each row", RowScores, body=PredictRequest),
    ("get", "/users"): Operation("users", "Users by part of their id or title", Users, query=FindRequest),
    ("get", "/items"): Operation("items", "Items by part of their id or title", Items, query=FindRequest),
    ("get", "/models"): Operation("models", "The models, the requests they answer, and their columns", Models),
    ("get", "/metrics"): Operation("metrics", "Counters and times, for Prometheus", "text/plain"),
    ("get", "/"): Operation("page", "A page to try a model on", "text/html"),
    ("get", "/docs"): Operation("docs", "These routes on a page", "text/html"),
    ("get", "/openapi.json"): Operation("openapi", "This document, OpenAPI 3.1", "application/json"),
}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    bodies = [each.body for each in OPERATIONS.values() if each.body is not None]
    answers = [each.answer for each in OPERATIONS.values() if not isinstance(each.answer, str)]
    types: list[type[BaseModel]] = [*bodies, *answers, Refusal, RawValue]
    _, found = models_json_schema([(each, "validation") for each in types], ref_template=REFERENCE)
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
            "responses": {"Refused": {"description": "the reason for the refusal", "content": _json(Refusal)}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }
