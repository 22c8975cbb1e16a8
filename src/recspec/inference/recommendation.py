"""Requests for recommendations, and their answers: items with titles, and notes on how they were found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import RequestError, shortened
from recspec.data.encoding import LONGEST_ID
from recspec.inference.catalogue import Catalogues
from recspec.inference.explanations import Explanation
from recspec.inference.request_features import AnsweredBy

RawId = str | int

MOST_ITEMS, MOST_EXCLUDED, MOST_BOOSTS, MOST_CONTEXT = 1_000, 10_000, 20, 1_000  # lengths of lists
LARGEST_K, LARGEST_WEIGHT = 10_000, 100.0
MOST_DIVERSE, MOST_EXPLAINED = 200, 100
"""Largest k with diversity, whose work grows with the square of k; and with explanations, as for rows to explain."""
LONGEST_BOOSTS = 10_000
"""Characters of all boosts together."""


class Draw(Protocol):
    """Draws a list by chance, in place of the best items."""

    pool: int
    """Best items among which it draws."""

    def __call__(
        self, scores: NDArray[np.floating[Any]], ids: NDArray[np.int64], k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Places (K,) of the drawn items, K <= k, and the chance (K,) of each given those before it.

        `scores` and `ids` are (C,), of all candidates; a score of -inf is no candidate.
        """


@dataclass(frozen=True)
class RecommendRequest:
    """A request for recommendations.

    Each user is answered by themselves. Without users, there is one answer: by the basket, by the context, or by both.
    """

    users: tuple[RawId, ...] = ()
    """Raw ids."""
    items: tuple[RawId, ...] = ()
    """A basket: raw ids of items, oldest first, in place of the user's own history."""
    context: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Raw columns of the request, for models that read them; also columns of a user, in place of the catalogue's."""
    k: int = 10
    filter: str | None = None
    """Expression over the columns of the item catalogue; other items are left out."""
    exclude: tuple[RawId, ...] = ()
    """Raw ids of items to leave out."""
    include_seen: bool = False
    """Keep items that the user acted on, and those of the basket."""
    diversity: float = 0.0
    """0 to 1: weight of unlikeness to the items before, against the score; see `ranking.diversified`."""
    diverse_by: str | None = None
    """Column of the catalogue that tells which items are alike; by default the model's vectors of items."""
    boosts: tuple[str, ...] = ()
    """Texts `EXPRESSION: WEIGHT`; see `Boost`."""
    at_most: str | None = None
    """Text `COLUMN:N`: at most N items of a list share a value of that column of the catalogue."""
    explain: bool = False
    """Say for each item which items of the history spoke for it."""
    until: float | None = None
    """`time.monotonic()` after which nobody waits for the answer; None for a caller who waits."""
    draw: Draw | None = None
    """Draws the list; by default it holds the best items. Filters and boosts come before, diversity after."""

    @property
    def is_anonymous(self) -> bool:
        """Whether it names no user, but a basket or a context."""
        return not self.users and bool(self.items or self.context)

    def problems(self) -> list[str]:
        """Sizes and numbers out of range, before any work."""
        found = []
        if isinstance(self.k, bool) or not isinstance(self.k, (int, np.integer)) or not 1 <= self.k <= LARGEST_K:
            found.append(f"k is {self.k!r}; expected a whole number from 1 to {LARGEST_K:,}")
        elif self.diversity and self.k > MOST_DIVERSE:
            found.append(f"k is {self.k:,}; expected at most {MOST_DIVERSE:,} with diversity")
        elif self.explain and self.k > MOST_EXPLAINED:
            found.append(f"k is {self.k:,}; expected at most {MOST_EXPLAINED:,} with explanations")
        if not 0 <= self.diversity <= 1:
            found.append(f"diversity is {self.diversity}; expected a number from 0 to 1")
        if self.diverse_by is not None and not self.diversity:
            found.append("diverse_by needs a diversity above 0")
        if self.at_most is not None and cap_of(self.at_most) is None:
            found.append(
                f"at_most is '{shortened(self.at_most)}'; expected COLUMN:N with N from 1 on, as in 'category:2'"
            )
        most = {"items": MOST_ITEMS, "exclude": MOST_EXCLUDED, "boosts": MOST_BOOSTS, "context": MOST_CONTEXT}
        for name, limit in most.items():
            if len(given := getattr(self, name)) > limit:
                found.append(f"{name} holds {len(given):,} entries; expected at most {limit:,}")
        if (length := sum(map(len, self.boosts))) > LONGEST_BOOSTS:
            found.append(f"boosts hold {length:,} characters; expected at most {LONGEST_BOOSTS:,} together")
        for name in ("users", "items", "exclude", "context"):
            if any(len(str(each)) > LONGEST_ID for each in getattr(self, name)):
                found.append(f"{name} holds a text of more than {LONGEST_ID:,} characters")
        return found


def cap_of(text: str) -> tuple[str, int] | None:
    """Column and number of `COLUMN:N`; None for another text."""
    column, _, number = text.rpartition(":")
    number = number.strip()
    is_number = number.isascii() and number.isdigit() and len(number) <= len(str(LARGEST_K)) and int(number) > 0
    return (column.strip(), int(number)) if is_number and column.strip() else None


@dataclass(frozen=True)
class Boost:
    """Adds `weight` times the spread of the user's scores to the score of every item that an expression keeps."""

    where: str
    weight: float

    @classmethod
    def parse(cls, text: str) -> Boost:
        """Read `EXPRESSION: WEIGHT`, as in `is_new and price < 50: 1.5`; the weight is after the last colon.

        Raises:
            RequestError: if there is no expression, or no weight from -100 to 100.
        """
        where, colon, number = text.rpartition(":")
        expected = f"expected EXPRESSION: WEIGHT with a weight from {-LARGEST_WEIGHT:g} to {LARGEST_WEIGHT:g}"
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not colon or not where.strip() or not abs(weight) <= LARGEST_WEIGHT:
            raise RequestError(f"boost '{shortened(text)}': {expected}, as in 'is_new: 1.5'")
        return cls(where.strip(), weight)


@dataclass(frozen=True)
class RecommendedItem:
    """One recommended item: its raw id, its title if the catalogue has one, and the score that it is ordered by.

    The score is the model's (a logit) and the boosts' together; `boost` is the boosts' part.
    """

    item: str | int
    title: str | None
    score: float
    boost: float | None = None
    because: Explanation | None = None
    retrieved_by: tuple[str, ...] | None = None
    """Of a pipeline: the retrievers that brought it, or popularity."""

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON; without what was not asked for."""
        because = None if self.because is None else self.because.to_dict()
        retrieved_by = None if self.retrieved_by is None else list(self.retrieved_by)
        optional = {"boost": self.boost, "because": because, "retrieved_by": retrieved_by}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"item": self.item, "title": self.title, "score": self.score, **given}


@dataclass(frozen=True)
class SimilarItems:
    """The items most like one, most similar first."""

    item: str | int
    title: str | None
    by: Literal["vectors", "scores"]
    """Cosines of the model's vectors of items, or its scores for a basket of this item alone."""
    items: tuple[RecommendedItem, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The answer as plain values, for JSON."""
        items = [item.to_dict() for item in self.items]
        return {"item": self.item, "title": self.title, "by": self.by, "items": items, "notes": list(self.notes)}


@dataclass(frozen=True)
class Recommendation:
    """The answer for one user, or for a basket or context without one; best item first."""

    user: str | int | None
    known: bool
    items: tuple[RecommendedItem, ...]
    notes: tuple[str, ...] = ()
    answered_by: AnsweredBy = "user"
    chances: tuple[float, ...] | None = None
    """Chance of each item given those before it; None if diversity chose among drawn items."""
    pool_size: int = 0
    """Items that could be in the list."""

    def to_dict(self) -> dict[str, object]:
        """The answer as plain values, for JSON."""
        items = [item.to_dict() for item in self.items]
        return {
            "user": self.user,
            "known": self.known,
            "answered_by": self.answered_by,
            "items": items,
            "notes": list(self.notes),
        }


def described(
    known: Catalogues,
    items: NDArray[np.int64],
    scores: NDArray[np.float32],
    boosts: NDArray[np.float32] | None = None,
    because: Sequence[Explanation | None] = (),
    retrieved_by: Sequence[tuple[str, ...]] | None = None,
) -> tuple[RecommendedItem, ...]:
    """Items with their raw ids and titles."""
    raw, titles = known.raw_ids("item", items).to_pylist(), known.items.titles_of(items).to_pylist()
    parts = [None] * len(items) if boosts is None else [round(boost, 6) for boost in boosts.tolist()]
    reasons = because or [None] * len(items)
    names = [None] * len(items) if retrieved_by is None else retrieved_by
    parts_of_items = zip(raw, titles, scores.tolist(), parts, reasons, names, strict=True)
    return tuple(
        RecommendedItem(item, title, round(score, 6), boost, reason, brought)
        for item, title, score, boost, reason, brought in parts_of_items
    )


def notes_of(
    how: AnsweredBy,
    wanted: RecommendRequest,
    count: int,
    *,
    known: bool,
    near: str = "",
    has_basket: bool = False,
    has_events: bool = False,
    unseen: int = 0,
    drawn: bool = False,
) -> Iterator[str]:
    """What an answer of `count` items is made from, unless it is the user; and why it is short.

    `near` is a hint at a known user whose id is like the unknown one's. A user whom the dataset does not know may have
    new events (`has_events`). `unseen` items are left out because they have no interactions.
    A `drawn` list holds items by chance.
    """
    if has_basket and how not in ("basket", "basket_vectors"):
        yield (
            "basket: the model can't rank by it, so its items are only left out"
            if not wanted.include_seen
            else ("basket: the model can't rank by it")
        )
    who = "" if known or wanted.is_anonymous else f"unknown user{near}: "
    if how == "popularity" and count:
        of_known = "the model scores all items alike for this user: " if known else ""
        best = f"{count} of the most popular items" if drawn else f"the {count} most popular items"
        yield f"{of_known or who}these are {best}; score is the number of users"
        if has_events and not known:
            yield "the model can't rank by the user's new events, so their items are only left out"
        return
    if how == "basket_vectors":
        yield f"{who}these are the items nearest to the basket by the model's vectors; score is the mean cosine"
    elif who and how != "popularity":
        yield f"{who}answered by the {how}"
    if count < wanted.k:
        yield from notes_of_short_list(count, wanted, "item" if wanted.include_seen else "unseen item")
        if unseen:
            items, are, them = ("item", "is", "it") if unseen == 1 else ("items", "are", "them")
            yield f"{unseen:,} {items} without interactions {are} left out, because the model knows nothing of {them}"


def notes_of_short_list(count: int, wanted: RecommendRequest, what: str) -> Iterator[str]:
    """Why a list of `count` items is shorter than wanted, if it is."""
    limits = [name for name in ("filter", "exclude") if getattr(wanted, name)]
    if count >= wanted.k:
        return
    if not count and limits == ["filter"]:
        yield f"no {what} passes the filter"
        return
    left = f"{count} {what}{'s are' if count > 1 else ' is'} left" if count else f"no {what} is left"
    yield f"{'only ' if count else ''}{left}" + (f" by {' and '.join(limits)}" if limits else "")


def note_of_unknown_users(count: int, how: AnsweredBy) -> str:
    """How users that the model does not know were answered, all alike."""
    are, get = ("is", "gets") if count == 1 else ("are", "get")
    given = {"popularity": "the most popular items", "basket_vectors": "the items nearest to the basket"}.get(how)
    answered = f"{get} {given}" if given else f"{are} answered by the {how}"
    return f"{count:,} of them {are} unknown, and {answered}"
