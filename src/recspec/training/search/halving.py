"""Successive halving over time: which candidate trains next, and how long.

A candidate trains in slices, each up to twice the time of all before. After a slice it waits; the better half of those
that had as many slices goes on (Li et al.: A System for Massively Parallel Hyperparameter Tuning, MLSys 2020, algorithm
2, with time as the resource and one worker). What waits is not lost: it goes on when nothing better can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

GROWTH = 2
"""How many times as long a candidate has trained after each slice, and the inverse of the share that goes on."""


class Candidate(Protocol):
    """What the choice looks at."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def values(self) -> Sequence[float]:
        """The best value so far after each slice; more is better."""

    @property
    def is_over(self) -> bool:
        """Whether its training has ended by itself, or failed."""


def next_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate to train now; None if all are over.

    First one that is among the better half after its number of slices, those with most slices first. Then one that has
    not begun, in order. Then the best of those that wait.
    """
    longest = max((len(each.values) for each in candidates), default=0)
    for slices in range(longest, 0, -1):
        had = [each for each in candidates if len(each.values) >= slices or (each.is_over and each.values)]
        had.sort(key=lambda each: -_after(each, slices))
        better = had[: len(had) // GROWTH]
        if waiting := [each for each in better if len(each.values) == slices and not each.is_over]:
            return waiting[0]
    begun = [each for each in candidates if each.values and not each.is_over]
    fresh = [each for each in candidates if not each.values and not each.is_over]
    return fresh[0] if fresh else max(begun, key=lambda each: each.values[-1], default=None)


def _after(candidate: Candidate, slices: int) -> float:
    """The best value after so many slices; one that ended earlier keeps its last."""
    return candidate.values[min(slices, len(candidate.values)) - 1]


def first_slice(seconds: float, candidates: int) -> float:
    """Seconds of the first slice: all first slices take a quarter of the time, and none less than two seconds."""
    return max(2.0, seconds / (4 * max(1, candidates)))
