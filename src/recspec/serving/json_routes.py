"""JSON routes: requests in raw values and what the models answer; users, items and columns to find and to show.

`POST /recommend` is in `recommend_routes`, which asks models by `computed` as the others do.

What only looks things up is answered on the thread that encodes raw values, so that no search delays a recommendation.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec.base.errors import RequestError, listed
from recspec.data.encoding import row_at
from recspec.feature_spec import Port
from recspec.inference import (
    Directory,
    ItemFields,
    LiveEvents,
    Predictor,
    RecommendRequest,
    facts_of_encoder,
    requests,
)
from recspec.serving import json_types as types
from recspec.serving.access import Access
from recspec.serving.http_bodies import json_response
from recspec.serving.journal_reader import NOT_READ
from recspec.serving.model_folders import REPORTS, has_report
from recspec.serving.operations import Operation, routes_of
from recspec.serving.repository import Endpoint, Repository
from recspec.serving.tensors import DATATYPES, refuse_rows

REQUESTED_MODEL = "recspec.model"
"""Key of a request's scope for the name of the requested model, for the metrics."""
ACCESS = "recspec.access"
"""Key of a request's scope for the server's `Access`."""
PARSED = 7
"""Memory of a parsed body in multiples of its bytes."""


Made = TypeVar("Made")
Compute = Callable[[Predictor, types.RequestType, float, LiveEvents | None], Made]
"""An answer from the model, the request, the deadline and the user's new events.

The deadline is a value of `time.monotonic()` after which no client waits for the answer.
"""


@dataclass(frozen=True, eq=False)
class Computed(Generic[Made]):
    """What a model made of a request."""

    made: Made
    endpoint: Endpoint
    history_seq: int | None
    """Newest event of the journal that was looked at; None if it was not asked."""
    notes: tuple[str, ...]

    def answer(self, request_id: str, made: Mapping[str, Any], began: float) -> dict[str, Any]:
        """The answer with its id, the version that made it, and the time that it took."""
        model = self.endpoint.model
        head: dict[str, Any] = {"request_id": request_id, "model": self.endpoint.name, "version": model.version}
        head |= {"update": model.opened.update, "digest": model.opened.digest}
        head |= {} if self.history_seq is None else {"history_seq": self.history_seq}
        milliseconds = round(1000 * (time.perf_counter() - began), 3)
        return {**head, **made, "notes": [*made["notes"], *self.notes], "milliseconds": milliseconds}


def new_request_id() -> str:
    """An id for an answer, which no other answer has."""
    return uuid.uuid4().hex


def routes(repository: Repository) -> list[Route]:
    """Every JSON route, and the metrics."""
    return routes_of(OPERATIONS, repository)


# --- rank, recommend, similar, predict -------------------------------------------------------------------------------


async def _answer(
    kind: type[types.RequestType],
    compute: Compute[types.RequestType, dict[str, Any]],
    repository: Repository,
    request: Request,
) -> Response:
    """Read a request and compute its answer."""
    began = time.perf_counter()
    body_reader = repository.body_reader
    async with body_reader.body(request) as body:
        wanted = await body_reader.parsed(partial(_read, kind, body, repository.limits.max_rows), len(body))
        with body_reader.holding(PARSED * len(body)):
            found = await computed(repository, request, wanted, compute, began)
            return json_response(found.answer(new_request_id(), found.made, began))


async def computed(
    repository: Repository,
    request: Request,
    wanted: types.RequestType,
    compute: Compute[types.RequestType, Made],
    began: float,
) -> Computed[Made]:
    """What the requested model makes of a request on its own thread, with the user's new events."""
    with opened(repository, request, wanted.model, wanted.version) as (endpoint, predictor):
        live, notes = None, tuple[str, ...]()
        if (histories := endpoint.model.histories) is not None and (user := _user(predictor, wanted)) is not None:
            live = await repository.journal_reader.read(histories, [user])
            notes = () if live is not None else (NOT_READ,)
        left = max(0.0, repository.limits.timeout - (time.perf_counter() - began))
        made = await endpoint.model.batcher.call(
            partial(compute, predictor, wanted, time.monotonic() + left, live), timeout=left
        )
        return Computed(made, endpoint, None if live is None else live.newest, notes)


def _user(predictor: Predictor, wanted: types.JsonRequest) -> str | int | None:
    """The raw id of the user whom a request names."""
    match wanted:
        case types.RecommendRequest():
            return wanted.user
        case types.RankRequest():
            named = requests.raw_ids_of(predictor, "user", [wanted.request])[0] if wanted.user is None else wanted.user
            return named if isinstance(named, (str, int)) else None
    return None


def _read(kind: type[types.RequestType], body: bytes, max_rows: int) -> types.RequestType:
    wanted = types.read_request(kind, body)
    match wanted:
        case types.RankRequest(candidates=rows) | types.PredictRequest(rows=rows):
            refuse_rows(len(rows), max_rows)
    return wanted


def _rank(predictor: Predictor, wanted: types.RankRequest, _until: float, live: LiveEvents | None) -> dict[str, Any]:
    row = dict(wanted.request)
    if wanted.user is not None:
        name = requests.id_name(predictor, "user")
        if name is None:
            raise RequestError("user: this model knows no users; put its columns into 'request'")
        if name in row:
            raise RequestError(f"user: 'request' has '{name}' too; give one of them")
        row[name] = wanted.user
    return requests.rank(predictor, row, _candidates(wanted.candidates), top_k=wanted.top_k, live=live).to_dict()


def _candidates(given: list[Any]) -> list[Any]:
    """Candidates that are all raw ids, or all rows."""
    given = [types.whole_id(each) for each in given]
    for index, each in enumerate(given):
        expected = None
        if isinstance(each, bool) or not isinstance(each, (str, int, dict)):
            expected = "a raw item id (text or whole number) or an object"
        elif isinstance(each, dict) != isinstance(given[0], dict):
            expected = f"{'an object' if isinstance(given[0], dict) else 'an id'} as those before it"
        if expected:
            raise RequestError(f"{row_at(index, 'candidates')}: expected {expected}")
    return given


def _similar(predictor: Predictor, wanted: types.SimilarRequest, until: float, _live: object) -> dict[str, Any]:
    asked = RecommendRequest(
        items=(wanted.item,), k=wanted.k, filter=wanted.filter, exclude=tuple(wanted.exclude), until=until
    )
    return requests.similar(predictor, asked)


def _predict(predictor: Predictor, wanted: types.PredictRequest, _until: float, _live: object) -> dict[str, Any]:
    return requests.predict(predictor, wanted.rows, explain=wanted.explain).to_dict()


@contextmanager
def opened(
    repository: Repository, request: Request, name: str | None, version: str | None
) -> Iterator[tuple[Endpoint, Predictor]]:
    """The requested model, with its predictor; refuses a request that fits several, and a model without raw values."""
    if name is None:
        names = _names(repository)
        if len(names) != 1:
            raise RequestError(f"model: expected the name of one; known: {listed(names)}", status=400 if names else 503)
        name = names[0]
    request.scope[REQUESTED_MODEL] = name
    with repository.use(name, version or "") as endpoint:
        predictor = endpoint.model.opened.predictor
        if predictor is None:
            instead = f"serve its run, or send features to /v2/models/{endpoint.name}/infer"
            raise RequestError(f"model '{endpoint.name}' is an export, which takes no raw values; {instead}")
        yield endpoint, predictor


def _names(repository: Repository) -> list[str]:
    """Names of loaded models, without raw forms."""
    return [name for name in repository.names if not repository.endpoint(name).is_raw]


# --- users, items, catalogue, columns --------------------------------------------------------------------------------


async def _look_up(
    kind: type[types.RequestType],
    find: Callable[[Endpoint, Predictor, types.RequestType], dict[str, Any]],
    repository: Repository,
    request: Request,
) -> Response:
    """Read a request from the body of a POST or the query of a GET, and look up its answer."""
    is_post = request.method == "POST"
    async with repository.body_reader.body(request) if is_post else nullcontext(request.query_params) as given:
        wanted = types.read_request(kind, given)
        with opened(repository, request, wanted.model, wanted.version) as (endpoint, predictor):
            return json_response(await endpoint.model.encoder.call(partial(find, endpoint, predictor, wanted)))


def _find(
    role: Literal["user", "item"], endpoint: Endpoint, predictor: Predictor, wanted: types.FindRequest
) -> dict[str, Any]:
    """Users or items whose id or title holds a text."""
    _refuse_without_lists(endpoint, predictor, f"{role}s")
    directory = predictor.held.get(role) or predictor.held.setdefault(role, Directory(predictor, role))
    are_typical = isinstance(wanted, types.FindUsersRequest) and wanted.order == "typical"
    return {"total": len(directory), f"{role}s": directory.find(wanted.query, wanted.limit, are_typical=are_typical)}


def _catalogue(endpoint: Endpoint, predictor: Predictor, wanted: types.CatalogueRequest) -> dict[str, Any]:
    return {"items": _fields(endpoint, predictor).of(wanted.items)}


def _columns(endpoint: Endpoint, predictor: Predictor, _: types.ColumnsRequest) -> dict[str, Any]:
    fields = _fields(endpoint, predictor) if requests.knows_users_and_items(predictor) else None
    found = {
        "items": () if fields is None else fields.columns,
        "context": requests.context_columns(predictor),
        "rows": [facts_of_encoder(port.name, predictor.encoders) for port in endpoint.model.opened.raw],
    }
    histories = endpoint.model.histories
    return {
        **{name: [each.to_dict() for each in facts] for name, facts in found.items()},
        "for_sale": None if fields is None else fields.for_sale,
        "event_types": [] if histories is None else list(histories.event_types),
    }


def _fields(endpoint: Endpoint, predictor: Predictor) -> ItemFields:
    _refuse_without_lists(endpoint, predictor, "items")
    found = predictor.held.get("fields") or predictor.held.setdefault("fields", ItemFields(predictor))
    assert isinstance(found, ItemFields)
    return found


def _refuse_without_lists(endpoint: Endpoint, predictor: Predictor, what: str) -> None:
    if not requests.knows_users_and_items(predictor):
        raise RequestError(f"{what}: model '{endpoint.name}' keeps no list of them", status=404)


# --- models and metrics ----------------------------------------------------------------------------------------------


async def _models(repository: Repository, request: Request) -> Response:
    access: Access = request.scope[ACCESS]
    models = [await _describe(repository, name, access) for name in _names(repository)]
    return json_response({"models": models, "takes_events": repository.writer is not None})


async def _describe(repository: Repository, name: str, access: Access) -> dict[str, Any]:
    """A model, the requests that it answers, and its inputs."""
    with repository.use(name) as endpoint:
        opened, predictor = endpoint.model.opened, endpoint.model.opened.predictor
        changes = None if predictor is None else predictor.catalogues.changes
        made_at = max(nanoseconds for _, nanoseconds, *_ in opened.content) / 1e9
        ports = opened.raw or (opened.signature.inputs if predictor is not None else ())
        features, answers = opened.signature.inputs, dict.fromkeys(("recommends", "in_context", "probabilities"), False)
        if predictor is not None:
            answers = await endpoint.model.encoder.call(partial(_answers, predictor))
        return {
            "name": name,
            "version": endpoint.model.version,
            "update": opened.update,
            "digest": opened.digest,
            "made_at": datetime.fromtimestamp(made_at, UTC).isoformat(timespec="seconds"),
            "catalogue": 0 if changes is None else changes.changes.version,
            "kind": predictor.bundle.card.model if predictor is not None else opened.platform,
            **answers,
            "ranks": predictor is not None and bool({*predictor.spec.role("item")} & {port.name for port in features}),
            "raw": predictor is not None,
            "columns": [{**_named(port), "is_list": port.is_list} for port in ports],
            "features": [{**_named(port), "width": port.width, "num_ids": port.num_ids} for port in features],
            "pipeline": _stages(predictor),
            "report": access.signed(f"{REPORTS}{name}") if predictor and has_report(predictor.bundle.folder) else None,
        }


def _answers(predictor: Predictor) -> dict[str, bool]:
    """What a model can be asked."""
    return {
        "recommends": requests.can_recommend(predictor),
        "in_context": requests.can_recommend_in_context(predictor),
        "probabilities": predictor.bundle.gives_probabilities,
    }


def _stages(predictor: Predictor | None) -> dict[str, Any] | None:
    """How a pipeline finds candidates; None for a model alone."""
    card = None if predictor is None else predictor.bundle.pipeline
    if card is None:
        return None
    return {"candidates": card.candidates, "filter": card.filter, "retrievers": [each.name for each in card.retrievers]}


def _named(port: Port) -> dict[str, str]:
    return {"name": port.name, "datatype": DATATYPES[port.dtype]}


async def _metrics(repository: Repository, _: Request) -> Response:
    return Response(await repository.broadcast("metrics", ""), media_type="text/plain; version=0.0.4")


# --- the routes ------------------------------------------------------------------------------------------------------


def _computed(
    path: str,
    summary: str,
    kind: type[types.RequestType],
    answer: type[types.Answer],
    compute: Compute[types.RequestType, dict[str, Any]],
) -> Operation:
    return Operation("POST", path, summary, answer, partial(_answer, kind, compute), kind)


def _looked_up(
    address: str,
    summary: str,
    kind: type[types.RequestType],
    answer: type[types.Answer],
    find: Callable[[Endpoint, Predictor, types.RequestType], dict[str, Any]],
) -> Operation:
    method, path = address.split()
    return Operation(method, path, summary, answer, partial(_look_up, kind, find), kind)


OPERATIONS = (
    _computed("/rank", "The best candidates for one request", types.RankRequest, types.Ranking, _rank),
    _computed("/similar", "The items most like one", types.SimilarRequest, types.SimilarItems, _similar),
    _computed("/predict", "The probability or score of each row", types.PredictRequest, types.RowScores, _predict),
    _looked_up(
        "GET /users", "Users by part of their id or title", types.FindUsersRequest, types.Users, partial(_find, "user")
    ),
    _looked_up(
        "GET /items", "Items by part of their id or title", types.FindRequest, types.Items, partial(_find, "item")
    ),
    _looked_up(
        "POST /catalogue",
        "Items with their fields in the catalogue",
        types.CatalogueRequest,
        types.Catalogue,
        _catalogue,
    ),
    _looked_up(
        "GET /columns", "Columns of items, contexts and rows, for forms", types.ColumnsRequest, types.Columns, _columns
    ),
    Operation("GET", "/models", "The models, the requests they answer, and their columns", types.Models, _models),
    Operation("GET", "/metrics", "Counters and times, for Prometheus", "text/plain", _metrics),
)
