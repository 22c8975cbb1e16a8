"""The weight of each event (a column of numbers, the weight of its type, or their product), and whether it is seen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import ibis
from ibis.expr.types import Column as Values

from recspec.base.errors import how_many, listed, nearest, shortened
from recspec.data.prepare.raw_files import RawRows, number_of
from recspec.data.prepare.tables import fetch

MOST = 1e9  # the largest weight: as float32 and in sums of many of them, larger ones lose digits
MOST_TYPES = 20  # of events, named in a message


@dataclass(frozen=True)
class Weighting:
    """Where the weights of events come from."""

    column: str | None = None  # of numbers
    event: str | None = None  # column of the event's type
    by_type: Mapping[str, float] = field(default_factory=dict)  # weights of the types of `event`
    seen: tuple[str, ...] = ()  # types of `event` that count as seen; all if empty

    def __bool__(self) -> bool:
        return self.column is not None or bool(self.by_type)


def event_weights(rows: RawRows, given: Weighting) -> Values:
    """The weight of each row, from 0; adds a problem for each column that holds something else.

    A column that the rows lack counts as 1: its name is refused with those of all other settings.
    """
    weight = ibis.literal(1.0, type="float64")
    if given.column is not None and given.column in rows.table.columns:
        weight = _numbers(rows, given.column)
    if given.event is not None and given.event in rows.table.columns and given.by_type:
        weight = weight * _of_types(rows, given.event, given.by_type)
    return weight


def seen_events(rows: RawRows, given: Weighting) -> Values:
    """Whether each row's event counts as seen, by its type; adds a problem for each type that no row has."""
    if given.event is None or given.event not in rows.table.columns:
        return ibis.literal(True)
    word, counts = _types(rows, given.event)
    _refuse_absent(rows, "seen", given.event, given.seen, counts)
    return word.isin(given.seen)


def _numbers(rows: RawRows, name: str) -> Values:
    values = rows.table[name]
    if not (values.type().is_string() or values.type().is_numeric()):
        rows.problems.append(f"column '{name}', the weight: holds {values.type()}; expected numbers")
        return ibis.literal(1.0, type="float64")
    number = number_of(values.strip(), "float64") if values.type().is_string() else values.cast("float64")
    advice = "expected a number from 0 to 1,000,000,000 in every row; 0 leaves the row out"
    rows.refuse(number.isnull() | (number < 0) | (number > MOST), name, advice, ", the weight")
    return number


def _of_types(rows: RawRows, name: str, by_type: Mapping[str, float]) -> Values:
    """The weight of each row's type; a problem for types of the settings or of the data that the other lacks."""
    word, counts = _types(rows, name)
    _refuse_absent(rows, "event_weights", name, by_type, counts)
    without = {kind: count for kind, count in counts.items() if kind and kind not in by_type}
    if without:
        rows.problems.append(
            f"setting 'event_weights': no weight for {_counted(without)} in column '{name}'; give "
            "each type a weight, or 0 to leave its rows out"
        )
    rows.refuse(word == "", name, "expected a type in every row", ", the type of the event")
    # As texts: Ibis takes the literal 1.5 for a float64 and drops its cast, and DuckDB makes a decimal of it.
    return word.cases(*((kind, repr(float(weight))) for kind, weight in by_type.items()), else_=None).cast("float64")


def _types(rows: RawRows, name: str) -> tuple[Values, dict[str, int]]:
    """The type of each row, empty if it is missing, and the rows of each type, the most frequent first."""
    word = rows.table[name].cast("string").strip().fill_null("")
    counted = rows.table.group_by(word=word).aggregate(rows=rows.table.count())
    found = fetch(rows.backend, counted.order_by(ibis.desc("rows"), "word").limit(10_000)).to_pylist()
    return word, {entry["word"]: entry["rows"] for entry in found}


def _refuse_absent(rows: RawRows, setting: str, name: str, named: Collection[str], counts: Mapping[str, int]) -> None:
    if not rows.reading.settable:  # new events may lack a type that the known ones have
        return
    known = {kind: count for kind, count in counts.items() if kind}
    rows.problems.extend(
        f"setting '{setting}': no row has the type '{shortened(kind)}' in column '{name}'{nearest(kind, [*known])}; "
        f"found {_counted(known)}"
        for kind in named
        if kind not in known
    )


def _counted(counts: Mapping[str, int]) -> str:
    shown = [f"{shortened(kind)} ({how_many(count, 'row')})" for kind, count in [*counts.items()][:MOST_TYPES]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more:,} other types" if more > 0 else "") if counts else listed([])
