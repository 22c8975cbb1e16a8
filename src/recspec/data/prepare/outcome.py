"""Checks of what a preparation made: implausible outcomes become warnings with numbers, names and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Column, Table
from numpy.typing import NDArray

from recspec.base.errors import how_many, listed, shortened
from recspec.data.prepare.backend import Backend, fetch, figures
from recspec.data.prepare.names import ROW, ColumnRole, columns_of, plain
from recspec.data.prepare.odd_ids import odd_ids
from recspec.data.prepare.raw_rows import number_of
from recspec.data.prepare.tables import SECONDS
from recspec.data.storage import label_columns, open_split, sample_rows, telling
from recspec.feature_spec import FeatureSpec

FEWEST_EVENTS = 20  # fewer are a trial, not a dataset
OWN_ID = 0.75  # ids per event, from which nearly every event has its own
LOST = 1 / 3  # share of the rows that are left out
FEW_VALUES, CERTAIN = 20, 30.0  # values of a column; -ln of the chance that all rows of one have the rarer label
FEW_TIMES, ROWS_PER_TIME = 100, 5  # distinct numbers that are hardly times, in so many rows each or more
TYPES = r"(event|action|behaviou?r|interaction|activity)(type|name)?|type|((order|payment|transaction)?status)"
CLOCK = r"^\d{1,5}(:\d{2}){0,2}(\.\d+)?( ?[AaPp][Mm])?$"  # 9, 9:30, 9:30:15.5, 09:30 PM, 34215
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


def warnings_of(spec: FeatureSpec) -> list[str]:
    """Warnings about a prepared dataset, by its counts and a sample of train."""
    counts = spec.summary
    rows = counts.get("rows")
    held = sum(map(_number, rows.values())) if isinstance(rows, Mapping) else 0
    kept = _number(counts.get("interactions")) or held
    told = chain(_own_ids(counts, kept), odd_ids(spec), _one_class(spec), _rows_lost(counts, kept))
    return [*told, *(told_label(name, auc) for name, auc in label_columns(spec).items())]


def told_label(name: str, auc: float) -> str:
    """What is said of a column that alone orders the labels."""
    return (
        f"column '{shortened(name)}' alone orders the labels of train with AUC {auc:.4f}: unless it is known before "
        "the label, metrics are too good; then prepare the data without it"
    )


def _own_ids(counts: Mapping[str, object], events: int) -> Iterator[str]:
    for role in ("item", "user") if "interactions" in counts else ("item",):
        ids = _number(counts.get(f"{role}s"))
        if events >= FEWEST_EVENTS and ids >= OWN_ID * events:
            yield (
                f"there are {ids:,} {role}s in {events:,} rows: nearly each {role} has one row, of which little can be "
                f"learnt; if they are no {role}s, --set {role}=COLUMN names the column of those"
            )


def _one_class(spec: FeatureSpec) -> Iterator[str]:
    """The splits whose labels are all equal. A split with both labels is read to the first block that holds both."""
    if spec.has_series:
        return
    for split, label in product(spec.splits, spec.labels):
        seen: set[bool] = set()
        for block in open_split(spec, split, [label]).batches() if label in spec.columns(split) else ():
            seen |= {*(np.unique(np.asarray(block[label])) > 0).tolist()}
            if len(seen) > 1:
                break
        if len(seen) != 1:
            continue
        so = "nothing can be learnt" if split == "train" else "it has no AUC"
        what = "the label" if label == spec.label else f"the label '{label}'"
        yield (
            f"every row of {split} has {what} {int(seen.pop())}, so {so}: check which values are positive (--set "
            "positive=WORD or --set positive_from=NUMBER), the files, and the split"
        )


def _rows_lost(counts: Mapping[str, object], kept: int) -> Iterator[str]:
    dropped = sum(_number(count) for name, count in counts.items() if name.endswith("_dropped"))
    raw = _number(counts.get("raw_rows")) or kept + dropped
    if raw >= FEWEST_EVENTS and raw - kept >= LOST * raw:
        yield (
            f"{raw - kept:,} of {raw:,} rows ({(raw - kept) / raw:.0%}) are left out; see `dropped`, which says why "
            "and names the settings"
        )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def unused_columns(backend: Backend, rows: Table, unused: Collection[str], roles: Collection[ColumnRole]) -> list[str]:
    """Warnings about columns that are named like one of the `roles`, which no column has, and are not used."""
    told = []
    for role in roles:
        for name in named_like(role, unused):
            text = rows[name].cast("string")
            found = figures(backend, rows, {"rows": text.count(), "kinds": text.nunique(), "one": text.min()})
            told.append(
                f"column '{shortened(name)}' is named like a {role}, and is not used: it holds "
                f"{how_many(found['kinds'], 'value')} in {how_many(found['rows'], 'row')}, such as "
                f"'{shortened(str(found['one']))}'; --set {role}={name} uses it, --set {role}=null leaves it unused"
            )
    return told


def named_like(role: ColumnRole, names: Collection[str]) -> list[str]:
    """The columns with a usual name for a role, or one like it."""
    alike = [name for name in names if re.fullmatch(LIKE[role], plain(name))]
    return [*dict.fromkeys([*columns_of(role, names), *alike])]


def _few_values(backend: Backend, rows: Table, name: str) -> list[str]:
    """The values of a column as text, ascending; empty if there is one, or more than `FEW_VALUES`."""
    kinds = rows.select(kind=rows[name].cast("string")).distinct().order_by("kind").limit(FEW_VALUES + 1)
    held = [kind for kind in fetch(backend, kinds).column("kind").to_pylist() if kind is not None]
    return held if 1 < len(held) <= FEW_VALUES else []


def unused_types(backend: Backend, rows: Table, unused: Collection[str]) -> list[str]:
    """Warnings about columns that are named like the types of events, hold several, and are not used."""
    told = []
    for name in unused:
        if not re.fullmatch(TYPES, plain(name.rpartition(".")[2])):
            continue
        if held := _few_values(backend, rows, name):
            told.append(
                f"events of all types in column '{shortened(name)}' count alike; --set 'event={name}' --set "
                f"'event_weights={json.dumps(dict.fromkeys(held, 1))}' weighs each type, 0 leaves it out"
            )
    return told


def days_without_clock(backend: Backend, rows: Table, unused: Collection[str], time: str) -> list[str]:
    """A warning if times are days, and columns that look like times of day are not used."""
    clocks = [name for name in unused if re.fullmatch(CLOCKS, plain(name)) and not rows[name].type().is_nested()]
    if clocks:
        others = {name: (~rows[name].cast("string").re_search(CLOCK)).sum() for name in clocks}
        clocks = [name for name, count in figures(backend, rows, others).items() if count == 0]
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
        if held := _few_values(backend, rows, name):
            told.append(
                f"column '{shortened(name)}' is named like a ready-made split, and makes none: it holds "
                f"{listed(held[:5])}; --set 'splits={name}' takes it once it holds train, valid and test"
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
