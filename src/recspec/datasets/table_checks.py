"""Checks of your own table: whether a column is a label or holds codes, and warnings about what looks wrong."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Column, Table
from numpy.typing import NDArray

from recspec.base.errors import how_many, listed, shortened
from recspec.data.prepare import (
    FEWEST_EVENTS,
    LABELS,
    ROW,
    SECONDS,
    Backend,
    ColumnRole,
    RawRows,
    columns_of,
    fetch,
    figures,
    number_of,
    plain,
)
from recspec.data.storage import sample_rows, telling
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
        "num_negatives": if_labelled,
        "min_count": if_not,
        "group": if_not,
        "valid": f"the split is {split}" if split in ("leave_one_out", "none") else "",
        "test": f"the split is {split}" if split in ("leave_one_out", "none", "given") else "",
        "unknown_targets": f"the split is {split}" if split not in ("time", "given") else "",
        "negatives": "" if settings.train_negatives or settings.negative_history else "none are drawn for train",
        "min_rating": "" if settings.rating else "no column is the rating (rating=COLUMN names it)",
        "time_format": "" if timed else "no column is the time (timestamp=COLUMN names it)",
        "half_life": "" if timed else "no column is the time (timestamp=COLUMN names it)",
        "rows_by": "" if settings.rows else "all rows are taken (rows=NUMBER takes some)",
        "title": "" if settings.items else "there is no file of items (items=FILE names it)",
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


FEW_VALUES, CERTAIN = 20, 30.0  # values of a column; -ln of the chance that all rows of one have the rarer label
FEW_TIMES, ROWS_PER_TIME = 100, 5  # distinct numbers that are hardly times, in so many rows each or more
TYPES = r"(event|action|behaviou?r|interaction|activity)(type|name)?|type|((order|payment|transaction)?status)"
CLOCKS = r".*(time|hour|hr|clock|minute|timeofday|hourofday)s?"
SPLIT_LIKE = r"is(train|valid|test|holdout)(ing|set)?|(train|valid|test|holdout)(flag|set)?|usage|(cv)?fold(s|id)?"
QUANTITIES = r".*(quantity|qty|count|units|amount)"
STAND_INS = tuple(sign * (10**digits - 1) for digits in (3, 4, 5, 6) for sign in (1, -1))
"""Numbers that stand for a missing one: 999, -999, 9999, ..."""
LIKE: Mapping[ColumnRole, str] = {
    "label": r"(is|was|has|did)?(y|label|target|click|convert|conversion|purchase|bought|buy|like|watch|response"
    r"|outcome|positive)(s|d|ed)?",
    "rating": r".*(rating|stars?|score)s?",
    "timestamp": r".*(time|timestamp|date|datetime|timems)",
}
"""Names of columns that may have a role, beside the usual ones."""


# --- columns of a table ----------------------------------------------------------------------------------------------


def unused_columns(backend: Backend, rows: Table, unused: Collection[str], roles: Collection[ColumnRole]) -> list[str]:
    """Warnings about columns that are named like one of the `roles`, which no column has, and are not used."""
    told = []
    for role in roles:
        alike = [name for name in unused if re.fullmatch(LIKE[role], plain(name))]
        for name in dict.fromkeys([*columns_of(role, unused), *alike]):
            text = rows[name].cast("string")
            found = figures(backend, rows, {"rows": text.count(), "kinds": text.nunique(), "one": text.min()})
            told.append(
                f"column '{shortened(name)}' is named like a {role}, and is not used: it holds "
                f"{how_many(found['kinds'], 'value')} in {how_many(found['rows'], 'row')}, such as "
                f"'{shortened(str(found['one']))}'; --set {role}={name} uses it, --set {role}=null leaves it unused"
            )
    return told


def unused_types(backend: Backend, rows: Table, unused: Collection[str]) -> list[str]:
    """Warnings about columns that are named like the types of events, hold several, and are not used."""
    told = []
    for name in unused:
        if not re.fullmatch(TYPES, plain(name.rpartition(".")[2])):
            continue
        kinds = rows.select(kind=rows[name].cast("string")).distinct().order_by("kind").limit(FEW_VALUES + 1)
        held = [kind for kind in fetch(backend, kinds).column("kind").to_pylist() if kind is not None]
        if 1 < len(held) <= FEW_VALUES:
            told.append(
                f"events of all types in column '{shortened(name)}' count alike; --set 'event={name}' --set "
                f"'event_weights={json.dumps(dict.fromkeys(held, 1))}' weighs each type, 0 leaves it out"
            )
    return told


def days_without_clock(backend: Backend, rows: Table, unused: Collection[str], time: str) -> list[str]:
    """A warning if times are days, and columns that are named like times of day are not used."""
    clocks = [name for name in unused if re.fullmatch(CLOCKS, plain(name))]
    if not clocks or not rows[time].type().is_numeric():
        return []
    found = figures(backend, rows, {"clocked": (rows[time] % 86_400 != 0).sum(), "least": rows[time].min()})
    if found["clocked"] or found["least"] is None or found["least"] < SECONDS[0]:
        return []
    unread = f"{listed(clocks)} {'is' if len(clocks) == 1 else 'are'} not used"
    told = (
        f"the time '{shortened(time)}' holds days, and {unread}: events of a day keep the order of the file, and equal "
    )
    return [told + "ones are one event; write day and time of day into one column, such as 2024-02-25 12:30:00"]


def unused_splits(backend: Backend, rows: Table, names: Collection[str], is_open: bool) -> list[str]:
    """Warnings about columns that are named like a ready-made split, hold few values, and make no split."""
    told = []
    for name in names if is_open else ():
        if not re.fullmatch(SPLIT_LIKE, plain(name)) or rows[name].type().is_array():
            continue
        kinds = rows.select(kind=rows[name].cast("string")).distinct().order_by("kind").limit(FEW_VALUES + 1)
        held = [kind for kind in fetch(backend, kinds).column("kind").to_pylist() if kind is not None]
        if 1 < len(held) <= FEW_VALUES:
            told.append(
                f"column '{shortened(name)}' is named like a ready-made split, and makes none: it holds "
                f"{listed(held[:VALUES_SHOWN])}; --set 'splits={name}' takes it once it holds train, valid and test"
            )
    return told


def returns(backend: Backend, rows: Table, unused: Collection[str]) -> list[str]:
    """Warnings about quantities below 0, as returned goods have, where each row counts as an event."""
    names = [name for name in unused if re.fullmatch(QUANTITIES, plain(name)) and not rows[name].type().is_array()]
    below = {name: (_as_number(rows[name]) < 0).sum() for name in names}
    found = figures(backend, rows, below) if below else {}
    return [
        f"{how_many(count, 'row')} {'has' if count == 1 else 'have'} '{shortened(name)}' below 0, as returns have, and "
        f"{'counts' if count == 1 else 'count'} as events; --set 'rating={name}' --set min_rating=1 leaves them out"
        for name, count in found.items()
        if count
    ]


def stand_ins(backend: Backend, rows: Table, names: Collection[str]) -> list[str]:
    """Warnings about features in which a number such as -999 lies further from all others than these span."""
    numbers = {name: rows[name] for name in names if rows[name].type().is_numeric()}
    asked: dict[tuple[str, str], Any] = {}
    for name, values in numbers.items():
        is_other = ~values.isin(STAND_INS)
        asked |= {(name, "least"): values.min(where=is_other), (name, "most"): values.max(where=is_other)}
        asked |= {(name, str(value)): (values == value).sum() for value in STAND_INS}
    found = figures(backend, rows, asked) if asked else {}
    told = []
    for name in numbers:
        least, most = found[name, "least"], found[name, "most"]
        for value in STAND_INS if least is not None else ():
            count = found[name, str(value)]
            if count and max(least - value, value - most) > most - least:
                held = f"'{shortened(name)}' holds {value} in {how_many(count, 'row')}, and else {least:g} to {most:g}"
                mend = f"--set 'types={{{name}: {{type: number, missing: [\"{value}\"]}}}}'"
                told.append(f"{held}: if {value} means no value, {mend}")
    return told


def _as_number(values: Column) -> Column:
    return number_of(values.strip(), "float64") if values.type().is_string() else values.cast("float64")


def doubtful_times(backend: Backend, rows: Table, name: str) -> list[str]:
    """A warning if a column of times holds few small numbers, as quantities do."""
    times = rows[name]
    asked = {"least": times.min(), "most": times.max(), "kinds": times.nunique(), "rows": times.count()}
    found = figures(backend, rows, asked)
    if not found["rows"] or found["most"] >= SECONDS[0] or found["kinds"] > FEW_TIMES:
        return []
    if found["kinds"] * ROWS_PER_TIME > found["rows"] or found["rows"] < FEWEST_EVENTS:
        return []
    held = f"{found['kinds']:,} numbers from {found['least']:g} to {found['most']:g} in {found['rows']:,} rows"
    told = f"the time '{shortened(name)}' holds {held}, which hardly tell the order of rows; --set timestamp=COLUMN "
    return [told + "names another column, --set timestamp=null takes rows in file order"]


def label_outcomes(
    backend: Backend, rows: Table, label: str, names: Sequence[str], total: int
) -> tuple[dict[str, float], list[str]]:
    """The columns of labelled rows that alone order the labels, by an even sample, and their AUC.

    Also sentences about columns of few values of which one occurs with the rarer label alone.
    """
    step = max(1, total // sample_rows(len(names)))
    some = rows.filter(rows[ROW] % step == 0).select(*names, label)
    found = fetch(backend, some)
    columns = {name: _codes(found.column(name)) for name in names}
    labels = found.column(label).to_numpy() > 0
    alone = telling(columns, labels)
    told = []
    for name in names:
        held = _certain(columns[name], labels)
        if name in alone or not held.any():
            continue
        first = int(held.argmax())
        value, own = found.column(name)[first].as_py(), labels[first]
        told.append(
            f"'{shortened(name)}': all {held.sum():,} sampled rows with '{shortened(str(value))}' have label "
            f"{int(own)}, and {(labels == own).mean():.0%} of all rows; if it is known only after '{label}', "
            "leave it out by naming the other features (context_features=[...])"
        )
    return alone, told


def _certain(values: NDArray[np.float64], labels: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Where a column of few values holds one that occurs with the rarer label alone, far beyond chance."""
    rarer = labels if labels.mean() <= 1 / 2 else ~labels
    kinds, codes = np.unique(values, return_inverse=True)
    if len(kinds) > FEW_VALUES or not rarer.any():
        return np.zeros(len(values), np.bool_)
    counts = np.bincount(codes)
    sure = (np.bincount(codes, weights=rarer) == counts) & (counts * -np.log(rarer.mean()) > CERTAIN)
    return codes == sure.argmax() if sure.any() else np.zeros(len(values), np.bool_)


def _codes(values: pa.ChunkedArray) -> NDArray[np.float64]:
    """Numbers as they are, lengths of lists, and codes of texts; NaN for missing ones."""
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = pc.list_value_length(values)
    elif not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        values = values.combine_chunks().dictionary_encode()
        values = (values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values).indices
    found: NDArray[np.float64] = values.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return found
