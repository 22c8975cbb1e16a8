"""Routes as the OpenAPI document shows them: address, purpose, request and answer."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec.serving.json_types import Body
from recspec.serving.repository import Repository


@dataclass(frozen=True)
class Operation:
    """A route: its address, what it is for, its answer and its request, and the function that answers."""

    method: str
    """GET or POST."""
    path: str
    summary: str
    answer: type[BaseModel] | str
    """A typed answer, or a media type."""
    handle: Callable[[Repository, Request], Awaitable[Response]]
    request: type[Body] | None = None
    """The body of a POST, the query parameters of a GET."""

    @property
    def name(self) -> str:
        """`rank` for /rank, `report` for /report/{model}, as the metrics show it."""
        return self.path[1:].partition("/")[0].partition(".")[0] or "page"

    @property
    def path_names(self) -> list[str]:
        """Names in its path."""
        return re.findall(r"\{(\w+)\}", self.path)

    def route(self, repository: Repository) -> Route:
        """The route in a server."""

        async def answer(request: Request) -> Response:
            return await self.handle(repository, request)

        answer.__name__ = self.name
        return Route(self.path, answer, methods=[self.method])


def routes_of(operations: Sequence[Operation], repository: Repository) -> list[Route]:
    """The routes of operations in a server."""
    return [each.route(repository) for each in operations]
