"""Checks of your own table: whether a column is a label or holds codes, and warnings about what looks wrong."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import how_many, shortened
from recspec.data.prepare import (
    LABELS,
    Backend,
    ColumnRole,
    RawRows,
    days_without_clock,
    doubtful_times,
    fetch,
    likely_positive,
    returns,
    stand_ins,
    unused_columns,
    unused_splits,
    unused_types,
)
from recspec.datasets.table_features import OURS, Tables
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


def label_values(table: Table, backend: Backend, name: str) -> Values | None:
    """The values of a column; None of lists, and of a column with many of them."""
    if table[name].type().is_array():
        return None
    text = table[name].cast("string").strip().fill_null("")
    counted = table.group_by(_value=text).aggregate(_rows=table.count()).order_by("_value").limit(MOST_VALUES + 1)
    found = fetch(backend, counted).to_pylist()
    return {each["_value"]: each["_rows"] for each in found} if len(found) <= MOST_VALUES else None


def is_label(held: Values | None, settings: Settings | None = None) -> bool:
    """Whether values are 0 and 1 in some spelling, or settings say which of them are 1."""
    if settings is not None and (settings.positive is not None or settings.positive_from is not None):
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
        return assigned(label=name, positive=likely_positive({value: held[value] for value in present}))
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


ROLES: tuple[ColumnRole, ...] = ("label", "rating", "timestamp")


def warnings(raw: RawRows, tables: Tables, asked: Settings) -> list[str]:
    """What looks wrong in the raw rows under the settings that were `asked` for and those that were inferred."""
    backend, settings, rows = tables.backend, tables.settings, tables.rows
    names = [name for name in rows.columns if name not in OURS]
    used = {*settings.features, *settings.declared, *settings.with_role}
    open_roles = [
        role
        for role in ROLES
        if settings.label is None and role not in asked.model_fields_set and getattr(settings, role) not in names
    ]
    unused = [name for name in names if name not in used]
    told = unused_columns(backend, rows, unused, open_roles)
    told += unused_types(backend, rows, unused) if settings.label is None and settings.event is None else []
    told += doubtful_times(backend, rows, tables.time) if tables.time and rows[tables.time].type().is_numeric() else []
    told += days_without_clock(backend, rows, unused, tables.time) if tables.time else []
    open_splits = settings.splits is None and not {"split", "splits"} & asked.model_fields_set
    told += unused_splits(backend, rows, [name for name in names if name not in settings.with_role], open_splits)
    told += returns(backend, rows, unused) if settings.label is None else []
    told += stand_ins(backend, rows, [name for name in names if name in settings.features])
    return told + without_effect(raw, tables, asked)


def without_effect(raw: RawRows, tables: Tables, asked: Settings) -> list[str]:
    """A sentence for each setting that was given and changed nothing."""
    settings, split = tables.settings, tables.settings.chosen_split
    is_labelled, timed = settings.label is not None, tables.time is not None
    if_labelled = "rows have a label" if is_labelled else ""
    if_not = "" if is_labelled else "rows have no label (label=COLUMN names it)"
    no_text = all(isinstance(part, Path) for part in raw.parts) and not (settings.users or settings.items)
    has_lists = settings.lists or any(each.type == "list" for each in settings.declared.values())
    why = {
        "min_interactions": if_labelled,
        "num_negatives": if_labelled or ("split users ranks all items" if split == "users" else ""),
        "min_count": if_not,
        "time_features": if_not,
        "group": if_not,
        "valid": f"the split is {split}" if split in ("leave_one_out", "none") else "",
        "test": f"the split is {split}" if split in ("leave_one_out", "none", "given") else "",
        "unknown_targets": f"the split is {split}" if split not in ("time", "given") else "",
        "negatives": "" if settings.train_negatives or settings.negative_history else "none are drawn for train",
        "min_rating": "" if settings.rating else "no column is the rating (rating=COLUMN names it)",
        "dislike_below": "" if settings.rating else "no column is the rating (rating=COLUMN names it)",
        "time_format": "" if timed else "no column is the time (timestamp=COLUMN names it)",
        "half_life": "" if timed else "no column is the time (timestamp=COLUMN names it)",
        "rows_by": "" if settings.rows else "all rows are taken (rows=NUMBER takes some)",
        "title": "" if settings.items else "there is no file of items (items=FILE names it)",
        "stock": "" if settings.items else "there is no file of items (items=FILE names it)",
        "text_dim": "" if settings.text else "no column is text (text=[COLUMN] names it)",
        "list_separator": "" if has_lists else "no column holds lists (lists=[COLUMN] names it)",
        "cross_cardinality": "" if settings.crosses else "nothing is crossed (crosses=[[COLUMN, COLUMN]])",
        "separator": "no file is text" if no_text else "",
        "encoding": "no file is text" if no_text else "",
    }
    given = [name for name in asked.model_fields_set if getattr(asked, name) != Settings.model_fields[name].default]
    return [
        f"setting '{name}' ({getattr(asked, name)}) has no effect: {why[name]}"
        for name in sorted(given)
        if why.get(name)
    ]
