"""The weights of the events of your own table."""

from __future__ import annotations

import ibis
from ibis.expr.types import Column as Values
from ibis.expr.types import Table

from recspec.datasets.table_features import Tables
from recspec.errors import DataError, SettingsError
from recspec.prepare import ROW, SPLIT, TIMESTAMP, WEIGHT, Decay, count_rows, fetch, is_dated


def is_weighted(tables: Tables) -> bool:
    """Whether rows have a weight."""
    settings = tables.settings
    return bool(settings.weighting) or settings.half_life is not None or settings.repeats == "sum"


def weights(rows: Table) -> Values:
    """The weight of each row, before its decay."""
    return rows[WEIGHT] if WEIGHT in rows.columns else ibis.literal(1.0, type="float64")


def without_weightless(tables: Tables, rows: Table) -> Table:
    """The rows whose weight is above 0. Raises DataError if none is left, or all that are left have the same label."""
    if WEIGHT not in rows.columns:
        return rows
    settings, backend = tables.settings, tables.backend
    kept, dropped = rows.filter(rows[WEIGHT] > 0), rows.filter(rows[WEIGHT] <= 0)
    count = count_rows(backend, dropped)
    if not count:
        return rows
    total = count_rows(backend, rows)
    how = "event_weights" if settings.weight is None else f"weight={settings.weight}"
    if count == total:
        raise DataError(f"setting '{how}': all {total:,} rows have the weight 0; expected one above 0 at least")
    if settings.label is not None:
        left = fetch(backend, kept.select(_label=kept[settings.label]).distinct()).column("_label").to_pylist()
        before = fetch(backend, rows.select(_label=rows[settings.label]).distinct()).num_rows
        if len(left) < before:
            raise DataError(f"setting '{how}': rows of weight 0 are left out, and these are all rows with label "
                            f"{1 - int(left[0])}; give them a weight above 0, or leave the setting out")  # fmt: skip
    first = int(fetch(backend, dropped.aggregate(row=dropped[ROW].min())).column("row")[0].as_py())
    tables.notes.dropped.append(f"{count:,} of {total:,} rows, whose weight is 0, such as row {first + 1:,} ({how})")
    return kept


def decay_of(tables: Tables, rows: Table) -> Decay | None:
    """The decay of weights with age, counted back from the last event of train."""
    settings = tables.settings
    if settings.half_life is None:
        return None
    half_life, in_seconds = settings.half_life_in
    if in_seconds and not is_dated(tables.backend, rows):
        raise SettingsError(f"setting 'half_life': is {settings.half_life}, but the times of column "
                            f"'{settings.timestamp}' are no dates; give a number in the same units")  # fmt: skip
    train = rows.filter(rows[SPLIT] == "train")
    end = fetch(tables.backend, train.aggregate(end=train[TIMESTAMP].max())).column("end")[0].as_py()
    if end is None:
        raise DataError("setting 'half_life': no row is for training, so there is no last event of train")
    return Decay(half_life, float(end))
