"""Typed JSON answers of the server, for its OpenAPI document.

The answers themselves are written without validation; tests compare them with these types.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Id = str | int | float | bool | None
Probability = Annotated[float, Field(ge=0, le=1)]


class Answer(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class Refusal(Answer):
    """The reason for a refused request."""

    error: str


class Scored(Answer):
    """The fields of every answer with scores."""

    model: str
    version: str
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


class RecommendedItem(Item):
    """An item in the order of its score."""

    rank: int
    score: float


class Recommendation(Scored):
    """The best items for a user."""

    user: Id
    unknown_user: bool
    liked: list[Item]
    items: list[RecommendedItem]


class RankedItem(RecommendedItem):
    """A candidate in the order of its score."""

    index: int
    probability: float


class Ranking(Scored):
    """The best candidates for a request."""

    unknown_user: bool
    unknown_items: list[Id]
    items: list[RankedItem]


class MissingValues(Answer):
    """Numbers of missing and unknown values of a column."""

    missing: int
    unknown: int


class RowScores(Scored):
    """The probability of each row."""

    probabilities: list[Probability]
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


class ServedModel(Answer):
    """A model, the requests that it answers, and its inputs."""

    name: str
    version: str
    kind: str
    recommends: bool
    ranks: bool
    raw: bool
    columns: list[RawColumn]
    features: list[ModelFeature]


class Models(Answer):
    """Every model of the server."""

    models: list[ServedModel]
