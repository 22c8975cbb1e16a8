"""The weights of the events of your own table, and rows that are interactions by their rating."""

from __future__ import annotations

import ibis
from ibis.expr.types import Column as Values
from ibis.expr.types import Table

from recspec.base.errors import DataError, SettingsError, how_many
from recspec.data.prepare import (
    ROW,
    SPLIT,
    TIMESTAMP,
    WEIGHT,
    Backend,
    Decay,
    Notes,
    count_rows,
    fetch,
    is_dated,
    number_of,
)
from recspec.datasets.table_features import Tables
from recspec.datasets.table_settings import Settings


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
            raise DataError(
                f"setting '{how}': rows of weight 0 are left out, and these are all rows with label "
                f"{1 - int(left[0])}; give them a weight above 0, or leave the setting out"
            )
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
        raise SettingsError(
            f"setting 'half_life': is {settings.half_life}, but the times of column "
            f"'{settings.timestamp}' are no dates; give a number in the same units"
        )
    train = rows.filter(rows[SPLIT] == "train")
    end = fetch(tables.backend, train.aggregate(end=train[TIMESTAMP].max())).column("end")[0].as_py()
    if end is None:
        raise DataError("setting 'half_life': no row is for training, so there is no last event of train")
    return Decay(half_life, float(end))


HIGHEST_RATING, MOST_RATINGS = 100, 101
FEWEST_RATINGS = 5  # distinct ones, from which a lone value stands out


def rated(tables: Tables) -> tuple[Table, float | None]:
    """The rows whose rating is high enough, and the least one; all of them without ratings."""
    settings, rows = tables.settings, tables.rows
    name = settings.rating
    if name is None:
        return rows, None
    least = _threshold(settings, rows, tables.backend, tables.notes)
    if least is None:
        return rows, None
    kept = rows.filter(rows[name] >= least)
    left = count_rows(tables.backend, kept)
    if not left:
        raise SettingsError(f"setting 'min_rating': no row has '{name}' of {least:g} or more; set it lower")
    total = count_rows(tables.backend, rows)
    if left < total:
        left_out = rows.filter((rows[name] < least) | rows[name].isnull())
        first = fetch(tables.backend, left_out.order_by(ROW).limit(1)).to_pylist()[0]
        example = f"user '{first[str(settings.user)]}' and item '{first[str(settings.item)]}'"
        tables.notes.dropped.append(
            f"{total - left:,} of {total:,} rows with '{name}' below {least:g} or without one, "
            f"such as that of {example} (min_rating)"
        )
    return kept, least


def _threshold(settings: Settings, rows: Table, backend: Backend, notes: Notes) -> float | None:
    """The rating from which a row is an interaction; None if all are."""
    name = settings.rating
    assert name is not None
    values = _number(rows[name])
    found = fetch(
        backend,
        rows.aggregate(
            least=values.min(), most=values.max(), kinds=values.nunique(), present=values.count(), rows=rows.count()
        ),
    ).to_pylist()[0]
    if settings.min_rating is not None:
        return settings.min_rating
    every = "every row is an interaction"
    if not found["present"] or found["kinds"] < 2:
        notes.inferred.append(f"'{name}' has one value in all rows, so {every}")
        return None
    least, most = float(found["least"]), float(found["most"])
    if FEWEST_RATINGS <= found["kinds"] <= MOST_RATINGS or least < 0:
        _warn_of_lone_value(name, least, rows.mutate(_value=values), backend, notes)
    if most > HIGHEST_RATING or found["kinds"] > MOST_RATINGS:
        held = f"'{name}' is no scale of ratings: it holds {found['kinds']:,} values from {least:g} to {most:g}"
        if least >= 0:
            notes.inferred.append(f"{held}, so {every} (min_rating sets a least one)")
            return None
        above = fetch(backend, rows.filter(values > 0).aggregate(least=values.min())).column("least")[0].as_py()
        if above is None:
            raise SettingsError(
                f"setting 'min_rating': {held}, none above 0; set min_rating to the least that is an "
                "interaction, or rating=null to take every row"
            )
        notes.inferred.append(
            f"{held}, so those above 0 are interactions (min_rating sets a least one, rating=null takes every row)"
        )
        return float(above)
    wanted = least + 0.75 * (most - least)
    chosen = fetch(backend, rows.filter(values >= wanted).aggregate(least=values.min())).column("least")[0].as_py()
    notes.inferred.append(
        f"rows are rated: '{name}' holds {least:g} to {most:g}, and ratings from {chosen:g} on, three quarters up the "
        "scale, are interactions (min_rating sets another one, rating=null takes every row)"
    )
    return float(chosen)


def _warn_of_lone_value(name: str, least: float, rows: Table, backend: Backend, notes: Notes) -> None:
    """Warn of a highest rating, such as 99, that is further from the next one than that is from the lowest."""
    counted = rows.group_by("_value").aggregate(_rows=rows.count()).filter(ibis._["_value"].notnull())
    found = fetch(backend, counted.order_by(ibis.desc("_value")).limit(2)).to_pydict()
    most, second = found["_value"]
    if most - second > second - least:
        held = how_many(found["_rows"][0], "row")
        notes.warnings.append(
            f"'{name}' holds {most:g} in {held}, and else {least:g} to {second:g}: if "
            f"{most:g} means no rating, --set 'missing_values=[{most:g}]'"
        )


def _number(values: Values) -> Values:
    return number_of(values.strip(), "float64") if values.type().is_string() else values.cast("float64")
