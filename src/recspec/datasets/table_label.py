"""The label of your own table where settings name none, and the whole numbers that are ids beside it.

Shapes: V distinct values, in ascending order.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import how_many, shortened
from recspec.data.prepare import LABELS, Backend, RawRows, fetch
from recspec.datasets.table_settings import Settings

FEWEST_CODES, MOST_CODES = 100, 1_000_000
ROWS_PER_VALUE = 4  # fewest, to see whether a value's label rate is its own
RANGES = 32  # of neighbouring values, with about equally many rows
ORDERED = 0.25  # share of the variance of the values' rates that ranges must hold for numbers to have an order
CLEAR = 5.0  # standard deviations by which the rates must differ more than chance makes them


def codes_among(rows: Table, backend: Backend, label: str, distinct: Mapping[str, int], total: int) -> list[str]:
    """The columns of whole numbers whose values differ in label rate while their neighbours do not resemble them."""
    judged = [
        name for name, count in distinct.items() if FEWEST_CODES <= count <= min(MOST_CODES, total // ROWS_PER_VALUE)
    ]
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


MOST_VALUES = 101  # distinct values of a column that are read to judge whether it is a label
VALUES_SHOWN = 5

Values = Mapping[str, int]
"""The rows of each value of a column as text; "" for a missing one."""


def label_values(rows: RawRows, name: str) -> Values | None:
    """The values of a column; None of lists, and of a column with many of them."""
    table = rows.table
    if table[name].type().is_array():
        return None
    text = table[name].cast("string").strip().fill_null("")
    counted = table.group_by(_value=text).aggregate(_rows=table.count()).order_by("_value").limit(MOST_VALUES + 1)
    found = fetch(rows.backend, counted).to_pylist()
    return {each["_value"]: each["_rows"] for each in found} if len(found) <= MOST_VALUES else None


def is_label(held: Values | None, settings: Settings) -> bool:
    """Whether values are 0 and 1 in some spelling, or settings say which of them are 1."""
    if settings.positive is not None or settings.positive_from is not None:
        return True
    return {LABELS.get(value.lower()) for value in held or () if value} == {0, 1}


def misfit(name: str, held: Values | None) -> str:
    """Why a column that is named like a label is none, and the settings for what it may be."""
    return (
        f"column '{shortened(name)}' is named like a label, and holds {_shown(held)}; a label holds both 0 and 1, true "
        f"and false, or yes and no. If it is the label: {_if_label(name, held)}; if rows are interactions: "
        f"{_if_interactions(name, held)}"
    )


def assigned(**settings: str) -> str:
    """Settings as a shell takes them."""
    return " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in settings.items())


def _if_label(name: str, held: Values | None) -> str:
    present = [value for value in held or () if value]
    if held is None or not present:
        return f"{assigned(label=name)} with --set positive=WORD or --set positive_from=NUMBER"
    if len(present) == 1:
        other = "write the other value where it holds none" if "" in held else "add the rows with the other value"
        spelt = assigned(label=name) if present[0].lower() in LABELS else assigned(label=name, positive=present[0])
        return f"{other}, or go on without them by {spelt}"
    numbers = _numbers(held)
    if len(present) == 2 or not numbers:
        return assigned(label=name, positive=min(present, key=lambda value: (held[value], value)))
    high = next(number for number in numbers if number >= numbers[0] + 0.75 * (numbers[-1] - numbers[0]))
    return assigned(label=name, positive_from=f"{high:g}")


def _if_interactions(name: str, held: Values | None) -> str:
    every = f"{assigned(label='null')} takes every row"
    return every if len(_numbers(held or {})) < 3 else f"{assigned(rating=name)} takes the high ones, {every}"


def _shown(held: Values | None) -> str:
    if held is None:
        return f"lists, or more than {MOST_VALUES} values"
    each = [f"'{shortened(value)}' in {how_many(rows, 'row')}" for value, rows in [*held.items()][:VALUES_SHOWN]]
    return ", ".join(each) + (f" and {len(held) - len(each)} more values" if len(held) > len(each) else "")


def _numbers(held: Values) -> list[float]:
    """The values as ascending numbers; none if one is no number."""
    try:
        return sorted(number for value in held if value and math.isfinite(number := float(value)))
    except ValueError:
        return []
