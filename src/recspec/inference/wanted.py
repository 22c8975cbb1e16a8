"""What a recommendation is asked for: who, how many items, and which."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from recspec.base.errors import RequestError, shortened
from recspec.data.encoding import LONGEST_ID

RawId = str | int

MOST_ITEMS, MOST_EXCLUDED, MOST_BOOSTS, MOST_CONTEXT = 1_000, 10_000, 20, 1_000  # lengths of lists
LARGEST_K, LARGEST_WEIGHT = 10_000, 100.0
MOST_DIVERSE, MOST_EXPLAINED = 200, 100
"""Largest k with diversity, whose work grows with the square of k, and with explanations."""
LONGEST_BOOSTS = 10_000
"""Characters of all boosts together."""


@dataclass(frozen=True)
class Wanted:
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
    """0 to 1: weight of unlikeness to the items before, against the score; see `diversity.diversified`."""
    diverse_by: str | None = None
    """Column of the catalogue that tells which items are alike; by default the model's vectors of items."""
    boosts: tuple[str, ...] = ()
    """Texts `EXPRESSION: WEIGHT`; see `Boost`."""
    explain: bool = False
    """Say for each item which items of the history spoke for it."""
    until: float | None = None
    """`time.monotonic()` after which nobody waits for the answer; None for a caller who waits."""

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
