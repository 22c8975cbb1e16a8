"""Interleaving: one list from two models, in which each item belongs to the model that picked it.

A user who clicks more items of one model prefers it. That takes far fewer users than an A/B test, and says which model
is preferred, not by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recspec.loop.statistics import Values, sign_p

INTERLEAVED = "interleaved"
"""The variant of a unit whose lists are interleaved."""
TEAM_DRAFT = "team-draft"
"""Name of its policy, under which no item has a known chance."""
TEAMS = "teams"
"""Key of an exposure's policy: the team of each item, as `interleave` gives them."""
NEITHER = -1
"""Team of an item that stands where the other list had no more to pick; its clicks count for none."""


def interleave(
    list_a: Sequence[str], list_b: Sequence[str], rng: np.random.Generator, k: int | None = None
) -> tuple[list[str], list[int]]:
    """Draw one list by team draft (Radlinski et al., 2008): a coin a round says who picks first, then the other picks.

    Args:
        list_a: Items of the first model, the best first.
        list_b: Items of the second.
        rng: Source of the coins.
        k: Length of the drawn list; by default that of the longer list.

    Returns:
        Items, none twice, and the team of each: 0 for the first list, 1 for the second, or `NEITHER`.
    """
    most = max(len(list_a), len(list_b)) if k is None else k
    teams: dict[str, int] = {}
    picks = [(item for item in items if item not in teams) for items in (list_a, list_b)]
    while len(teams) < most:
        first = int(rng.integers(2))
        drawn = next(picks[first], None)
        if drawn is not None:
            teams[drawn] = first
        answer = next(picks[1 - first], None)
        if answer is not None:
            teams[answer] = 1 - first
        if drawn is None or answer is None:  # a round that one side can't play counts for none
            teams |= {item: NEITHER for item in (drawn, answer, *picks[0], *picks[1]) if item is not None}
            break
    return [*teams][:most], [*teams.values()][:most]


@dataclass(frozen=True)
class Preference:
    """What interleaving found: each user's share (U,) of preference, and how many users prefer which model.

    `shares` are (clicks of the second - clicks of the first) / all clicks of users with a click, from -1 to 1.
    """

    shares: Values
    first: int
    second: int
    tied: int

    @property
    def p_sign(self) -> float:
        """The binomial p-value over users who are not tied; valid at one planned look."""
        return sign_p(self.second, self.first)


def preference(clicks: NDArray[np.integer]) -> Preference:
    """The preference of users from their clicks (U, 2) on items of the first and of the second team."""
    seen = clicks[clicks.sum(axis=1) > 0].astype(np.float64)
    shares: Values = (seen[:, 1] - seen[:, 0]) / seen.sum(axis=1)
    return Preference(shares, int((shares < 0).sum()), int((shares > 0).sum()), int((shares == 0).sum()))
