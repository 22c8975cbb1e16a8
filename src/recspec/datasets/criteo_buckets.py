"""Boundaries of the buckets that Criteo's integers are cut into."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def log_squared_boundaries(values: NDArray[np.int64], counts: NDArray[np.int64], least: int) -> list[int]:
    """Boundaries between buckets of integers: each integer up to 2, then floor(ln(x)^2).

    A bucket in fewer than `least` rows joins the next above; the highest joins the next below.

    Args:
        values: Distinct integers, ascending.
        counts: The number of rows of each.
    """
    kinds = _log_squared(values)
    starts = np.flatnonzero(np.diff(kinds, prepend=kinds[:1] - 1))
    sizes = np.add.reduceat(counts, starts) if len(starts) else counts
    cuts: list[int] = []
    inside = 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        if inside >= max(least, 1):
            cuts.append(_first_of(int(values[start])))
            inside = 0
        inside += size
    if cuts and inside < least:
        cuts.pop()
    return cuts


def _log_squared(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of buckets: integers up to 2 are their own, larger ones follow from 3."""
    return np.where(values <= 2, values, 2 + np.floor(np.log(np.maximum(values, 1)) ** 2).astype(np.int64))


def _first_of(value: int) -> int:
    """The smallest integer in the same bucket."""
    if value <= 2:
        return value
    name = int(_log_squared(np.array([value]))[0])
    near = math.floor(math.exp(math.sqrt(name - 2)))
    candidates = np.arange(max(near - 2, 3), near + 3)
    return int(candidates[_log_squared(candidates) >= name][0])
