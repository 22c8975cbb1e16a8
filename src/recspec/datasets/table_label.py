"""The label of your own table, where settings name none: a column named like one, if its values fit."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from recspec.datasets.table_settings import Settings
from recspec.errors import how_many, shortened
from recspec.prepare import LABELS, RawRows, fetch

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
