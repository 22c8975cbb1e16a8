"""Whole numbers of your own labelled table that tell things apart, as ids do, and have no order.

Shapes: V distinct values, in ascending order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.prepare import Backend, fetch

FEWEST_VALUES, MOST_VALUES = 100, 1_000_000
ROWS_PER_VALUE = 4  # fewest, to see whether a value's label rate is its own
RANGES = 32  # of neighbouring values, with about equally many rows
ORDERED = 0.25  # share of the variance of the values' rates that ranges must hold for numbers to have an order
CLEAR = 5.0  # standard deviations by which the rates must differ more than chance makes them


def codes_among(rows: Table, backend: Backend, label: str, distinct: Mapping[str, int], total: int) -> list[str]:
    """The columns of whole numbers whose values differ in label rate while their neighbours do not resemble them."""
    judged = [name for name, count in distinct.items()
              if FEWEST_VALUES <= count <= min(MOST_VALUES, total // ROWS_PER_VALUE)]  # fmt: skip
    return [name for name in judged if _are_codes(rows, backend, label, name)]


def _are_codes(rows: Table, backend: Backend, label: str, name: str) -> bool:
    present = rows.filter(rows[name].notnull())
    each = present.group_by(name).aggregate(_rows=present.count(), _positives=present[label].sum()).order_by(name)
    found = fetch(backend, each.select("_rows", "_positives"))
    return lack_order(*(found.column(column).to_numpy().astype(np.float64) for column in found.column_names))


def lack_order(counts: NDArray[np.float64], positives: NDArray[np.float64]) -> bool:
    """Whether rates of V values differ beyond chance, and those of ranges of neighbours hardly do.

    The variance of true rates is estimated by moments: of values that have their own rates, ranges have little of it.
    """
    rate = positives.sum() / counts.sum()
    noise = rate * (1 - rate)
    if not noise:
        return False
    excess = (positives - counts * rate) ** 2 / (counts * noise) - 1
    spread = np.sqrt((2 + np.maximum(0, 1 - 6 * noise) / (counts * noise)).sum())
    if excess.sum() < CLEAR * spread:
        return False
    place = np.minimum(RANGES - 1, (np.cumsum(counts) - counts / 2) * RANGES // counts.sum()).astype(np.int64)
    of_ranges = _variance(np.bincount(place, counts), np.bincount(place, positives), rate)
    return of_ranges < ORDERED * _variance(counts, positives, rate)


def _variance(counts: NDArray[Any], positives: NDArray[Any], rate: float) -> float:
    beyond_chance = (positives - counts * rate) ** 2 - counts * rate * (1 - rate)
    return float(beyond_chance.sum() / (counts**2).sum())
