"""Types of the server's JSON, and its routes as the OpenAPI document shows them.

`read_request` checks requests. Answers are written without validation; tests compare them with their types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, StringConstraints, ValidationError
from pydantic.config import JsonDict

from recspec.base.errors import RequestError
from recspec.data.encoding import LONGEST_ID, row_at
from recspec.inference import LARGEST_K, MOST_BOOSTS, MOST_CONTEXT, MOST_EXCLUDED, MOST_ITEMS, MOST_SHOWN
from recspec.serving.http_bodies import parse_object

SHOWN = 10
"""Problems of a request that its answer names."""


def whole_id(value: object) -> object:
    """3 for 3.0; another value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2.0**53 else value


RawId = Annotated[
    Annotated[str, StringConstraints(max_length=LONGEST_ID)] | Annotated[int, Field(ge=-(2**63), le=2**64 - 1)],
    BeforeValidator(whole_id),
]
RowSchema: JsonDict = {"type": "object", "additionalProperties": {"$ref": "#/components/schemas/RawValue"}}

Scalar = str | float | bool | None


class RawValue(RootModel[Scalar | list[Scalar]]):
    """A value as it stands in the raw files; a list if the feature is one."""


class Body(BaseModel):
    """What is sent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    example: ClassVar[Mapping[str, Any]] = {}
    """A body, on the page of the routes."""


class JsonRequest(Body):
    """The fields of every request to a model."""

    model: str | None = Field(None, max_length=200, description="the model's name; optional if there is only one")
    version: str | None = Field(None, max_length=20, description="the model's version; by default the newest")


class RankRequest(JsonRequest):
    """Candidates to rank for one request."""

    example = {"user": 42, "candidates": [1, 50, 181], "top_k": 2}

    user: RawId | None = Field(None, description="the user's raw id; short for the request's user column")
    request: dict[str, Any] = Field(
        default_factory=dict, description="raw columns of the user and the context", json_schema_extra=RowSchema
    )
    candidates: list[Any] = Field(
        description="raw item ids, or rows of the items' raw columns",
        json_schema_extra={"items": {"anyOf": [{"type": ["string", "integer"]}, RowSchema]}},
    )
    top_k: int | None = Field(None, ge=1, description="number of items in the answer; by default all")


class ItemsRequest(JsonRequest):
    """The fields of every request whose answer names items."""

    k: int = Field(10, ge=1, le=LARGEST_K, description="number of items")
    filter: str | None = Field(
        None, max_length=10_000, description="expression over columns of the item catalogue, such as price < 50"
    )
    exclude: list[RawId] = Field([], max_length=MOST_EXCLUDED, description="raw ids of items to leave out")


class RecommendRequest(ItemsRequest):
    """A user, a basket or a context to recommend to."""

    example = {"user": 42, "k": 10, "liked": 5}

    user: RawId | None = Field(None, description="the user's raw id; without it, items or context answer")
    items: list[RawId] = Field(
        [], max_length=MOST_ITEMS, description="a basket, oldest first, in place of the user's history"
    )
    context: dict[str, Any] = Field(
        default_factory=dict,
        max_length=MOST_CONTEXT,
        description="raw columns of the request, for models that read them",
        json_schema_extra=RowSchema,
    )
    diversity: float = Field(0.0, ge=0, le=1, description="weight of variety against scores")
    diverse_by: str | None = Field(
        None, max_length=1000, description="column of the catalogue that tells which items are alike"
    )
    boosts: list[str] = Field([], max_length=MOST_BOOSTS, description="texts EXPRESSION: WEIGHT, such as is_new: 1.5")
    at_most: str | None = Field(
        None, max_length=1000, description="text COLUMN:N, such as category:2: at most N items with one value"
    )
    explain: bool = Field(False, description="name the events that spoke for each item")
    exclude_seen: bool = Field(True, description="leave out items that the user acted on")
    liked: int = Field(0, ge=0, le=1000, description="number of items to list that the user acted on")
    surface: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_./:-]{1,64}$", description="place where the list is shown, such as home or cart"
    )
    shown: bool = Field(True, description="false for a list that no user sees; the journal does not log it")


class SimilarRequest(ItemsRequest):
    """An item to find like ones of."""

    example = {"item": 50, "k": 5}

    item: RawId = Field(description="the item's raw id")


class PredictRequest(JsonRequest):
    """Rows to score."""

    example = {"rows": [{"user_id": 42, "item_id": 50}]}

    rows: list[dict[str, Any]] = Field(
        description="raw columns of each row; null for a missing value", json_schema_extra={"items": RowSchema}
    )
    explain: bool = Field(False, description="tell what each column contributes to the log-odds")


class CatalogueRequest(JsonRequest):
    """Items to show."""

    example = {"items": [50, 181]}

    items: list[RawId] = Field(max_length=MOST_SHOWN, description="raw ids of items")


class EventFields(Body):
    """The fields of an event that may be left out; further ones are columns of its context."""

    model_config = ConfigDict(extra="allow")

    item: RawId | None = Field(None, description="the item's raw id; only an impression may name none")
    value: float | None = Field(None, description="a number that belongs to the act, such as a rating or a price")
    time: float | str | None = Field(
        None, description="seconds since 1970, or ISO 8601 with a zone; by default the time of receipt"
    )
    id: RawId | None = Field(None, description="the event's own id; one that is sent again is stored once")
    request: str | None = Field(
        None, max_length=LONGEST_ID, description="the request_id of the answer that showed the item"
    )
    position: int | None = Field(None, ge=1, le=10_000, description="the item's place in that answer, from 1")


class SentEvent(EventFields):
    """An act of a user."""

    user: RawId = Field(description="the user's raw id")
    type: str = Field(max_length=64, description="what the user did, such as view, purchase or impression")


class EventsRequest(EventFields):
    """One event, or several in `events`."""

    example = {"user": "ann", "item": 50, "type": "purchase", "id": "order-17", "time": "2026-11-28T09:00:00Z"}

    user: RawId | None = Field(None, description="the user's raw id; every event has one")
    type: str | None = Field(
        None, max_length=64, description="what the user did, such as view, purchase or impression; every event has one"
    )
    events: list[SentEvent] | None = Field(None, description="several events, in place of one")


class ColumnsRequest(JsonRequest):
    """A question for the columns of a model, as query parameters."""

    model_config = ConfigDict(strict=False, extra="ignore")


class FindRequest(JsonRequest):
    """A search for users or items, as query parameters."""

    model_config = ConfigDict(strict=False, extra="ignore")

    query: str = Field("", max_length=200, description="part of an id or title; by default the most frequent")
    limit: int = Field(10, ge=1, le=100, description="number of results")


class FindUsersRequest(FindRequest):
    """A search for users, as query parameters."""

    order: Literal["busiest", "typical"] = Field(
        "busiest", description="without a query: users of most items first, or of nearest to the median number"
    )


# --- answers ---------------------------------------------------------------------------------------------------------

Id = str | int | float | bool | None


class Answer(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class Refusal(Answer):
    """The reason for a refused request."""

    error: str


class RefusedEvent(Answer):
    """An event that was not stored; `index` is its place in the request, from 0."""

    index: int
    reason: str


class StoredEvents(Answer):
    """What became of the events of a request; `error` is there if none of them was stored."""

    accepted: int
    duplicate: int
    refused: int
    clamped: int
    """Accepted events whose time was more than 5 minutes ahead; it is the time of receipt now."""
    late: int
    """Accepted events older than a day."""
    refusals: list[RefusedEvent]
    notes: list[str]
    """A sentence on each type of accepted events that no served model reads."""
    error: str | None = None


class Scored(Answer):
    """The fields of every answer with scores."""

    request_id: str
    """Names the answer; events that follow from it give it as `request`."""
    model: str
    version: str
    update: int
    """The number of the update (`recspec update`) that answered; 0 before the first."""
    digest: str
    """Tells the content of the model's folder."""
    milliseconds: float
    notes: list[str]


class Item(Answer):
    """An item with its title."""

    item: Id
    title: str | None


class FoundItem(Item):
    """An item and its number of events."""

    count: int


class FoundUser(Answer):
    """A user and the number of its events."""

    user: Id
    title: str | None
    count: int


class Users(Answer):
    """Users that a search found."""

    total: int
    users: list[FoundUser]


class Items(Answer):
    """Items that a search found."""

    total: int
    items: list[FoundItem]


class ItemFields(Item):
    """An item with its fields in the catalogue."""

    is_known: bool
    is_for_sale: bool
    """Whether it may be sold now: neither withdrawn nor blocked, and kept by the filter `for_sale` of `/columns`."""
    fields: dict[str, Any]


class Catalogue(Answer):
    """Items with their fields, in the order of the request."""

    items: list[ItemFields]


class Column(Answer):
    """A column as a form shows it: its kind, the values to choose from, the range of its numbers or dates."""

    name: str
    kind: Literal["choice", "choices", "number", "truth", "date", "image", "text", "other"]
    values: list[Id]
    low: float | str | None
    high: float | str | None
    is_whole: bool
    is_required: bool
    example: Id


class Columns(Answer):
    """Columns of the item catalogue, of a request's context, and of rows to score."""

    items: list[Column]
    context: list[Column]
    rows: list[Column]
    for_sale: str | None
    """The filter of items that are in stock, by a column such as `in_stock`; None without such a column."""
    event_types: list[str]
    """Types of events that the model reads, the weightiest first; usual ones if it reads any."""


class RankedScore(Item):
    """An item in the order of its score."""

    rank: int
    score: float


class Reason(Item):
    """An event of the history or a feature, with its share of the score or its cosine to the recommended item."""

    value: float


class Explanation(Answer):
    """The events that spoke for an item."""

    kind: Literal["shares", "nearest", "features"]
    events: list[Reason]
    rest: float | None


class RecommendedItem(RankedScore):
    """A recommended item; with a probability if the model learned from labels."""

    probability: float | None = None
    boost: float | None = None
    because: Explanation | None = None
    retrieved_by: list[str] | None = None


class Recommendation(Scored):
    """The best items for a user."""

    user: Id
    unknown_user: bool
    answered_by: str
    history_seq: int | None = None
    """Number of the newest event of the journal that the answer knows; without a journal, it is left out."""
    experiment: str | None = None
    variant: str | None = None
    """Left out unless the user takes part in an experiment."""
    liked: list[Item]
    items: list[RecommendedItem]


class SimilarItems(Scored):
    """The items most like one."""

    item: Id
    title: str | None
    by: Literal["vectors", "scores"]
    items: list[RankedScore]


class RankedItem(RankedScore):
    """A candidate in the order of its score; with a probability if the model learned from labels."""

    index: int
    probability: float | None = None


class Ranking(Scored):
    """The best candidates for a request."""

    unknown_user: bool
    unknown_items: list[Id]
    history_seq: int | None = None
    items: list[RankedItem]


class MissingValues(Answer):
    """Numbers of missing and unknown values of a column."""

    missing: int
    unknown: int


class RowExplanation(Answer):
    """The base and what each column contributes, which add up to the log-odds of the probability."""

    log_odds: float
    base: float
    contributions: dict[str, float]
    """By raw column, the largest first."""


class RowScores(Scored):
    """The probability of each row, or its score if the model only ranks."""

    probabilities: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    scores: list[float] | None = None
    explanations: list[RowExplanation] | None = None
    gaps: dict[str, MissingValues]


class RawColumn(Answer):
    """A raw column that a model reads."""

    name: str
    datatype: str
    is_list: bool


class ModelFeature(Answer):
    """A feature that a model reads."""

    name: str
    datatype: str
    width: int
    num_ids: int | None


class ServedPipeline(Answer):
    """How a pipeline finds the candidates that its model ranks."""

    candidates: int
    filter: str | None
    retrievers: list[str]


class ServedModel(Answer):
    """A model, the requests that it answers, and its inputs."""

    name: str
    version: str
    update: int
    """The number of the update (`recspec update`) that answers; 0 before the first."""
    digest: str
    made_at: str
    """Time at which the newest of its files was written, ISO 8601 in UTC."""
    catalogue: int
    """The number of the last change of its catalogue (`recspec catalogue`); 0 before the first."""
    kind: str
    recommends: bool
    in_context: bool
    probabilities: bool
    ranks: bool
    raw: bool
    columns: list[RawColumn]
    features: list[ModelFeature]
    pipeline: ServedPipeline | None
    report: str | None


class ServedVariant(Answer):
    """A variant of an experiment, with the number of users who got it."""

    name: str
    share: float
    model: str | None
    version: str | None
    users: int | None


class ServedExperiment(Answer):
    """An experiment; users enter from `start` to `entry_end`, and are measured until `end`."""

    name: str
    start: str
    entry_end: str
    end: str
    state: Literal["planned", "entering", "measuring", "ended"]
    traffic: float
    interleave: bool
    variants: list[ServedVariant]


class Experiments(Answer):
    """Every experiment of the server."""

    experiments: list[ServedExperiment]


class ExperimentVerdict(Answer):
    """What an experiment says so far, as `recspec experiment report` does."""

    name: str
    at: str
    verdict: str
    notes: list[str]


class Models(Answer):
    """Every model of the server."""

    models: list[ServedModel]
    takes_events: bool
    """Whether the server keeps a journal."""


# --- reading ---------------------------------------------------------------------------------------------------------

RequestType = TypeVar("RequestType", bound=JsonRequest)


def read_request(kind: type[RequestType], given: bytes | Mapping[str, str]) -> RequestType:
    """A request of a kind, from a JSON body or from query parameters; the error names each wrong field."""
    try:
        return kind.model_validate(parse_object(given) if isinstance(given, bytes) else dict(given))
    except ValidationError as error:
        problems = {
            f"{_place(found['loc'])}: {found['msg'][:1].lower()}{found['msg'][1:200]}; found {_shown(found['input'])}"
            for found in error.errors(include_url=False, include_context=False)
        }
        raise RequestError.of("request", sorted(problems)[:SHOWN]) from None


def _place(path: tuple[int | str, ...]) -> str:
    """`row 4 (rows[3])` for ("rows", 3), else `request.age`; names of pydantic's types are left out."""
    if len(path) == 2 and path[0] in ("rows", "candidates") and isinstance(path[1], int):
        return row_at(path[1], str(path[0]))
    place = ""
    for part in path:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in ("int", "str", "constrained-str", "constrained-int"):
            place += f".{part[:80]}" if place else part[:80]
    return place or "the body"


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:60] if isinstance(value, (str, int, float, type(None))) else type(value).__name__
