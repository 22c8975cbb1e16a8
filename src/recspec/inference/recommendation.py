"""Answers: recommended items with their titles, and notes on how they were found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recspec.inference.catalogue import Catalogues
from recspec.inference.requesters import AnsweredBy
from recspec.inference.wanted import Wanted


@dataclass(frozen=True)
class RecommendedItem:
    """One recommended item: its raw id, its title if the catalogue has one, and the score that it is ordered by.

    The score is the model's (a logit) and the boosts' together; `boost` is the boosts' part.
    """

    item: str | int
    title: str | None
    score: float
    boost: float | None = None
    retrieved_by: tuple[str, ...] | None = None
    """Of a pipeline: the retrievers that brought it, or popularity."""

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON; without what was not asked for."""
        retrieved_by = None if self.retrieved_by is None else list(self.retrieved_by)
        optional = {"boost": self.boost, "retrieved_by": retrieved_by}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"item": self.item, "title": self.title, "score": self.score, **given}


@dataclass(frozen=True)
class Recommendation:
    """The answer for one user, or for a basket or context without one; best item first."""

    user: str | int | None
    known: bool
    items: tuple[RecommendedItem, ...]
    notes: tuple[str, ...] = ()
    answered_by: AnsweredBy = "user"

    def to_dict(self) -> dict[str, object]:
        """The answer as plain values, for JSON."""
        items = [item.to_dict() for item in self.items]
        return {"user": self.user, "known": self.known, "answered_by": self.answered_by, "items": items,
                "notes": list(self.notes)}  # fmt: skip


def described(
    known: Catalogues,
    items: NDArray[np.int64],
    scores: NDArray[np.float32],
    boosts: NDArray[np.float32] | None = None,
    retrieved_by: Sequence[tuple[str, ...]] | None = None,
) -> tuple[RecommendedItem, ...]:
    """Items with their raw ids and titles."""
    raw, titles = known.raw_ids("item", items).to_pylist(), known.items.titles_of(items).to_pylist()
    parts = [None] * len(items) if boosts is None else [round(boost, 6) for boost in boosts.tolist()]
    names = [None] * len(items) if retrieved_by is None else retrieved_by
    return tuple(
        RecommendedItem(item, title, round(score, 6), boost, brought)
        for item, title, score, boost, brought in zip(raw, titles, scores.tolist(), parts, names, strict=True)
    )


def notes_of(how: AnsweredBy, wanted: Wanted, count: int, *, known: bool) -> Iterator[str]:
    """What an answer of `count` items is made from, unless it is the user; and why it is short."""
    who = "" if known or wanted.is_anonymous else "unknown user: "
    if how == "popularity":
        yield f"{who}these are the {count} most popular items; score is the number of users"
        return
    if how == "basket_vectors":
        yield f"{who}these are the items nearest to the basket by the model's vectors; score is the mean cosine"
    elif who:
        yield f"{who}answered by the {how}"
    if count < wanted.k:
        limits = [name for name in ("filter", "exclude") if getattr(wanted, name)]
        left = "items are left" if wanted.include_seen else "unseen items are left"
        yield f"only {count} {left}" + (f" by {' and '.join(limits)}" if limits else "")
