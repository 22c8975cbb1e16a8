"""The route that takes events: checked, stored by the journal's writer, and answered once they are durable."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec.base.errors import RequestError
from recspec.serving import json_types as types
from recspec.serving.http_bodies import json_response, parse_object
from recspec.serving.operations import Operation, routes_of
from recspec.serving.repository import Repository

if TYPE_CHECKING:
    from recspec.loop import Outcome, ReadEvents

PATH = "/events"
PARSED = 12
"""Memory of parsed events in multiples of their bytes."""


def routes(repository: Repository) -> list[Route]:
    """The route."""
    return routes_of(OPERATIONS, repository)


async def _events(repository: Repository, request: Request) -> Response:
    """Store one event or several; 200 if any was stored, now or before, and 400 if every one was refused."""
    writer, limits, body_reader = repository.writer, repository.limits, repository.body_reader
    if writer is None:
        raise RequestError("this server keeps no journal; start it with --journal sqlite:///FILE", status=404)
    async with body_reader.body(request) as body:
        with body_reader.holding(PARSED * len(body)):
            found = await body_reader.parsed(partial(_read, body, limits.max_events), len(body))
            try:
                async with asyncio.timeout(limits.timeout):
                    outcomes = await writer.store(found.events)
            except TimeoutError:
                message = f"the journal did not store the events within {limits.timeout:g} s; send them again"
                raise RequestError(message, status=504) from None
    answer = _answer(found, outcomes)
    stored = Counter(each.type for each, outcome in zip(found.events, outcomes, strict=True) if outcome == "accepted")
    answer["notes"] = repository.notes_of_types(stored)
    repository.metrics.journal.count_events(answer, found.received_at)
    return json_response(answer, 400 if "error" in answer else 200)


def _read(body: bytes, max_events: int) -> ReadEvents:
    from recspec.loop import now_us, read_events

    data = parse_object(body)
    rows = data.get("events")
    if rows is None:
        rows = [data]
    elif not isinstance(rows, list) or len(data) > 1:
        raise RequestError("expected one event, or an object with 'events' alone: a list of events")
    if len(rows) > max_events:
        raise RequestError(f"events: {len(rows):,} in one request; expected at most {max_events:,}", status=413)
    return read_events(rows, now_us())


def _answer(found: ReadEvents, outcomes: list[Outcome]) -> dict[str, Any]:
    from recspec.loop import REFUSALS

    counts = Counter(outcomes)
    stored = {place for place, outcome in enumerate(outcomes) if outcome == "accepted"}
    refusals = [(each.index, each.reason) for each in found.refused]
    if len(stored) < len(outcomes):
        named = zip(found.places, outcomes, strict=True)
        refusals += [(place, REFUSALS[outcome]) for place, outcome in named if outcome in REFUSALS]
    answer: dict[str, Any] = {
        "accepted": counts["accepted"],
        "duplicate": counts["duplicate"],
        "refused": len(refusals),
        "clamped": len(found.clamped & stored),
        "late": len(found.late & stored),
        "refusals": [{"index": index, "reason": reason} for index, reason in sorted(refusals)],
    }
    if refusals and not (counts["accepted"] or counts["duplicate"]):
        index, reason = min(refusals)
        answer["error"] = reason if len(refusals) == 1 else f"no event was stored; events[{index}]: {reason}"
    return answer


OPERATIONS = (Operation("POST", PATH, "Store what users did", types.StoredEvents, _events, types.EventsRequest),)
