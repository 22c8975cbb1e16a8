"""The rows of your own table: splits, weights, interactions by their rating, and what an update needs of them.

DATA/growth.json          settings in which nothing is left to guess
DATA/raw/events.parquet   every raw event that was read, with its types and the split that it got; Spark writes a folder
DATA/raw/users.parquet, DATA/raw/items.parquet    the files of users and items, if there were any
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Literal, Self

import ibis
from ibis.expr.types import BooleanValue, Table
from ibis.expr.types import Column as Values
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec.base.config import duration_in
from recspec.base.errors import DataError, SettingsError, how_many, listed, problems_in
from recspec.base.files import PathError, confined, read_json, write_whole
from recspec.data.prepare import (
    CUTS,
    FILE_SPLIT,
    GROUP,
    IS_TARGET,
    ROW,
    SEEN,
    SPLIT,
    SPLIT_BEFORE,
    SPLIT_WORDS,
    SPLITS,
    TIMESTAMP,
    USER,
    WEIGHT,
    Backend,
    Before,
    Decay,
    Notes,
    count_rows,
    count_where,
    counts_by,
    fetch,
    figure,
    figures,
    is_dated,
    left_join,
    number_of,
    splits,
    with_splits,
)
from recspec.datasets.table_features import CONTENT, MIXED, OURS, Tables, free_name
from recspec.datasets.table_settings import Settings
from recspec.feature_spec import FOLD_IN, FeatureSpec
from recspec.metrics import FEWEST_USERS, blur_of

MOST_UNEQUAL = 0.1  # of copies: pairs with different labels, as a share of those in pairs of random rows
FEWEST_STEPS, SORTED = 50, 0.99  # from one item of a user to the next; the share that goes one way in a sorted file
MOST_COPIES = 0.75  # share of the rows; a row is hardly written more than four times


def with_key(tables: Tables, rows: Table, copies: bool | None) -> tuple[Table, str, bool]:
    """Rows with the column by which random shares are drawn: the row, or of copies the first one.

    Also returns the column's name, and whether rows of equal features are `copies`, which None leaves to be found.
    Copies are equal in all columns but the label. A key that held the label would leave a test row only those train
    rows of equal features that have the other label.
    """
    backend = tables.backend
    features = [
        name for name in rows.columns if name not in (*OURS, tables.settings.label, *tables.settings.other_labels)
    ]
    name = free_name(CONTENT, rows.columns)
    alike = rows[ROW].min().over(ibis.window(group_by=features)) if features else rows[ROW]
    found = backend.stage(rows.mutate(**{name: alike}))
    copies = _are_copies(tables, found, name) if copies is None else copies
    return found if copies else found.mutate(**{name: found[ROW]}), name, copies


def _are_copies(tables: Tables, rows: Table, key: str) -> bool:
    """Whether rows of equal features are copies of each other, as their labels agree; leaves a note.

    Rows of few distinct features are equal by chance: then their labels differ, or nearly all have an equal one.
    """
    label = rows[tables.settings.label]
    each = rows.group_by(key).aggregate(rows=rows.count(), positives=label.sum())
    several = each.filter(each["rows"] > 1)
    unequal = (2 * several["positives"] * (several["rows"] - several["positives"]) / (several["rows"] - 1)).sum()
    asked = {"keys": several.count(), "rows": several["rows"].sum(), "unequal": unequal}
    found = figures(tables.backend, several, asked)
    if not found["keys"]:
        return False
    total, rate = figures(tables.backend, rows, {"rows": rows.count(), "rate": label.mean()}).values()
    copies = int(found["rows"]) - int(found["keys"])
    by_chance = 2 * rate * (1 - rate) * float(found["rows"])  # pairs of a positive and a negative, were labels drawn
    are_copies: bool = found["unequal"] <= MOST_UNEQUAL * by_chance and copies <= MOST_COPIES * total
    tables.notes.inferred.append(
        f"{copies:,} of {total:,} rows are copies of an earlier one in all columns; they are kept, in the same split "
        "as the first"
        if are_copies
        else f"{copies:,} of {total:,} rows equal an earlier one in all columns but the label, as rows of few distinct "
        "values do by chance; each goes to a split of its own (group=COLUMN keeps rows together)"
    )
    return are_copies


def split_clicks(tables: Tables, rows: Table) -> Table:
    """Labelled rows with the column `split`."""
    settings = tables.settings
    shares = {"valid": settings.valid, "test": settings.test}
    if settings.chosen_split == "given":
        return _with_valid(tables, rows)
    if settings.chosen_split == "time":
        return _by_time(tables, rows, TIMESTAMP)
    if settings.chosen_split == "group":
        return splits.by_group(rows, group=GROUP, seed=settings.seed, **shares)
    if settings.chosen_split == "none":
        return splits.all_train(rows)
    return splits.by_share(rows, row=CONTENT, seed=settings.seed, **shares)


def _by_time(tables: Tables, rows: Table, time: str) -> Table:
    if tables.window is not None:
        return splits.by_window(rows, time=time, window=tables.window)
    return splits.by_time(rows, time=time, valid=tables.settings.valid, test=tables.settings.test)


def up_to_window(tables: Tables) -> Tables:
    """Tables without rows after the window of test, and with that window, if the settings name one."""
    settings = tables.settings
    if settings.window is None:
        return tables
    assert tables.time is not None
    given = settings.window, settings.earlier
    rows, window = splits.up_to_window(tables.backend, tables.rows, *given, time=tables.time, notes=tables.notes)
    return replace(tables, rows=rows, window=window)


def _with_valid(tables: Tables, rows: Table) -> Table:
    """Ready-made splits, with a part of train as valid if there is none."""
    settings = tables.settings
    if not _lacks_valid(tables, rows):
        return rows
    own, names = rows.filter(rows[SPLIT] == "train"), [*rows.columns]
    if tables.time is not None:
        made = splits.by_time(own.drop(SPLIT), time=TIMESTAMP, valid=settings.valid, test=0)
    else:
        made = splits.by_share(own.drop(SPLIT), row=ROW, seed=settings.seed, valid=settings.valid, test=0)
    return made.select(*names).union(rows.filter(rows[SPLIT] != "train").select(*names))


def note_shares(tables: Tables, counted: Mapping[str, int]) -> None:
    """Say where a split by time, of which the rows are counted, is not near the share that was asked for."""
    settings = tables.settings
    if settings.chosen_split != "time" or settings.window is not None:
        return
    total = sum(counted.values())
    other = "share draws rows at random" if settings.label is not None else "leave_one_out takes each user's last ones"
    for split, share in (("valid", settings.valid), ("test", settings.test)):
        held = counted.get(split, 0)
        if share and total >= 1 / share and not share / 2 <= held / total <= share * 2:
            tables.notes.inferred.append(
                f"the split {split} holds {held:,} of {total:,} rows ({held / total:.0%}), not a share of {share:g}: "
                f"the rows of one time stay together (split={other})"
            )


def warn_of_few_users(tables: Tables, rows: Table) -> None:
    """Warn of a split that judges few users, as most of its users have no row in train, so no model knows them."""
    held = {name: rows[SPLIT] == name for name in SPLITS}
    is_target = rows[IS_TARGET] if IS_TARGET in rows.columns else ibis.literal(True)
    each = rows.group_by(USER).aggregate(
        train=held["train"].any(), valid=(held["valid"] & is_target).any(), test=(held["test"] & is_target).any()
    )
    new, late = ~each["train"], each["valid"] & each["test"]
    asked = {"users": each.count(), "late": (new & late).sum()}
    for name in ("valid", "test"):
        asked |= {name: (each["train"] & each[name]).sum(), f"new_{name}": (new & each[name]).sum()}
    found = {name: int(count or 0) for name, count in figures(tables.backend, each, asked).items()}
    few = [name for name in ("valid", "test") if found[name] < min(FEWEST_USERS, found[f"new_{name}"])]
    if few:
        least = min(found[name] for name in few)
        each_told = "; ".join(
            f"{name} judges {found[name]:,}, and not the {found[f'new_{name}']:,} without a row in train"
            for name in few
        )
        late_told = f" ({found['late']:,} of them first seen in valid)" if found["late"] else ""
        tables.notes.warnings.append(
            f"of {found['users']:,} users, {each_told}{late_told}, whom models don't know: {blur_of(least)}; "
            "--set split=leave_one_out judges nearly all, larger shares for valid and test more"
        )


def split_interactions(tables: Tables, rows: Table, order: Sequence[str], folder: Path) -> Table:
    """Events with the column `split`; `order` sorts those of a user by time, without ties. `folder` takes files.

    Only events of the types that are predicted are held out. Another one has the split whose rows know of it first.

    Raises:
        DataError: if no event of the types that are predicted is left.
    """
    chosen = tables.settings.chosen_split
    if IS_TARGET not in rows.columns:
        return _split(tables, rows, order, folder)[0]
    if not count_rows(tables.backend, rows.filter(rows[IS_TARGET])):
        raise DataError(f"setting 'target': no event of {listed(tables.settings.target or ())} is left to predict")
    if chosen == "none":
        return splits.all_train(rows)
    if chosen == "leave_one_out":
        made = splits.leave_one_out(rows, by=USER, order=order, among=IS_TARGET)
        made, cut = made.filter(made[IS_TARGET]), CUTS.get(chosen)
    else:
        made, cut = _split(tables, rows.filter(rows[IS_TARGET]), order, folder)
    made, others = tables.backend.stage(made), rows.filter(~rows[IS_TARGET])
    cuts = made
    if SPLIT in others.columns:  # ready-made; of train's, those after a valid that was made of train are not train's
        others = others.mutate(**{SPLIT: others[SPLIT].nullif("train")})
        cuts = made.filter(made[SPLIT] != "test")
    placed = with_splits(others, cuts, cut)
    others = left_join(others.drop(SPLIT) if SPLIT in others.columns else others, placed.select(ROW, SPLIT), ROW)
    return made.select(*others.columns).union(others)


Cut = Literal["user", "all"] | None
"""Whose rows tell when a split begins; None: no split begins at a time."""


def _split(tables: Tables, rows: Table, order: Sequence[str], folder: Path) -> tuple[Table, Cut]:
    settings = tables.settings
    cut = CUTS.get(settings.chosen_split)
    if settings.chosen_split == "users":
        shares = {"valid": settings.valid, "test": settings.test}
        made = splits.by_users(
            tables.backend, rows, folder, **shares, number=settings.heldout_users, seed=settings.seed
        )
        return made, cut
    if settings.chosen_split == "time":
        return _by_time(tables, rows, TIMESTAMP), cut
    if settings.chosen_split == "leave_one_out":
        return splits.leave_one_out(rows, by=USER, order=order), cut
    if settings.chosen_split == "none":
        return splits.all_train(rows), cut
    if not _lacks_valid(tables, rows):
        return rows, cut
    if tables.time is not None:
        return splits.last_of_train(rows, by=USER, order=order), "user"
    mixed = splits.with_digest(rows, MIXED, row=ROW, seed=settings.seed)
    return splits.last_of_train(mixed, by=USER, order=[MIXED]).drop(MIXED), cut


def given_split(tables: Tables, rows: Table) -> ibis.expr.types.Column:
    """The split of each row, from its file or from a column. Raises DataError if the column holds other words."""
    name = tables.settings.splits
    split = words_as_splits(name, rows)
    if not isinstance(name, str):
        return split
    strange = fetch(
        tables.backend,
        rows.filter(split.isnull()).select(_value=rows[name].cast("string")).distinct().order_by("_value").limit(10),
    ).column("_value")
    if len(strange):
        held = listed("" if value is None else value for value in strange.to_pylist())
        raise DataError(f"column '{name}', the splits: holds {held}; expected train, valid or test in every row")
    return split


def words_as_splits(name: object, rows: Table) -> ibis.expr.types.Column:
    """The split of each row's file, or that of the words of a column; missing for other words."""
    if not isinstance(name, str):
        return rows[FILE_SPLIT]
    return rows[name].cast("string").strip().lower().cases(*SPLIT_WORDS.items(), else_=None)


def _lacks_valid(tables: Tables, rows: Table) -> bool:
    """Whether ready-made splits have no valid and one is wanted; leaves a note."""
    held = {row[SPLIT] for row in fetch(tables.backend, counts_by(rows, SPLIT)).to_pylist()}
    if "train" not in held:
        raise DataError(f"splits: no row is for train; found {listed(sorted(held))}")
    settings = tables.settings
    lacks = "valid" not in held and settings.valid > 0
    if lacks:
        share = f"a share of {settings.valid:g} of train"
        if settings.label is None:
            share = f"of users with three train rows or more, {'the last' if tables.time else 'a random'} one"
        tables.notes.inferred.append(
            f"the splits have no valid, on which training would stop: {share} becomes valid "
            "(valid=0 leaves train whole)"
        )
    return lacks


# --- rows without times ----------------------------------------------------------------------------------------------


def with_order(tables: Tables) -> tuple[Tables, bool]:
    """Tables whose rows are in order of time or of the file; and whether they are in a random one instead.

    A file that is sorted by item says nothing of time: to hold out its last rows would hold out certain items.
    """
    settings, backend, rows = tables.settings, tables.backend, tables.rows
    way = _sorted_by_item(tables) if tables.time is None and settings.chosen_split != "users" else None
    if way is None:
        return tables, False
    tables.notes.inferred.append(
        f"rows have no time, and the items of a user {way}, so the file is sorted and its order is no time: each "
        f"user's rows are in random order by seed {settings.seed} (timestamp=COLUMN names the time)"
    )
    mixed = splits.with_digest(rows, MIXED, row=ROW, seed=settings.seed)
    place = ibis.row_number().over(ibis.window(order_by=MIXED)).cast("int64")
    return replace(tables, rows=backend.stage(mixed.mutate(**{ROW: place}).drop(MIXED))), True


def _sorted_by_item(tables: Tables) -> str | None:
    """How the items of users go in the file if it is one way, in numbers; None if it is not."""
    settings, rows = tables.settings, tables.rows
    item = rows[settings.item].cast("string")
    number = item.try_cast("float64")
    before = ibis.window(group_by=settings.user, order_by=ROW)
    steps = rows.mutate(_item=item, _last=item.lag().over(before), _number=number, _least=number.lag().over(before))
    steps = steps.filter(steps["_item"] != steps["_last"])
    ways = {
        "ascend": [steps["_item"] > steps["_last"], steps["_number"] > steps["_least"]],
        "descend": [steps["_item"] < steps["_last"], steps["_number"] < steps["_least"]],
    }
    by_way = {(way, place): test for way, tests in ways.items() for place, test in enumerate(tests)}
    found = count_where(tables.backend, steps, {**by_way, ("", 0): steps["_item"].notnull()})
    count = found.pop(("", 0))
    most = max(found, key=found.__getitem__)
    if count < FEWEST_STEPS or found[most] < SORTED * count:
        return None
    return f"{most[0]} in {found[most]:,} of {count:,} steps"


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
    first = int(figure(backend, dropped, dropped[ROW].min()))
    tables.notes.dropped.append(f"{count:,} of {total:,} rows, whose weight is 0, such as row {first + 1:,} ({how})")
    return kept


def decay_of(tables: Tables, rows: Table) -> Decay | None:
    """The decay of weights with age, counted back from the last event of train."""
    settings = tables.settings
    if settings.half_life is None:
        return None
    half_life = duration_in(settings.half_life, "half_life", dated=is_dated(tables.backend, rows))
    train = rows.filter(rows[SPLIT] == "train")
    end = figure(tables.backend, train, train[TIMESTAMP].max())
    if end is None:
        raise DataError("setting 'half_life': no row is for training, so there is no last event of train")
    return Decay(half_life, float(end))


def event_rules(settings: Settings, least: float | None, decay: Decay | None) -> dict[str, object]:
    """Metadata by which later events count as the rows do: what weighs, and what is read, by type and value.

    `least` is the value from which an event of a rating is one.
    """
    found = {
        "weights": dict(settings.event_weights),
        "weighted": settings.weight is not None,
        "least": least if settings.label is None else settings.positive_from,
        # The words of a label that is no type of an event, such as `clicked: yes`, name no type.
        "read": list(settings.positive) if settings.positive and settings.event in (None, settings.label) else None,
        "seen": None if settings.seen_types is None else list(settings.seen_types),
        "decay": None if decay is None else {"half_life": decay.half_life, "end": decay.end},
    }
    told = {name: value for name, value in found.items() if not (value is None or value is False or value == {})}
    return {"event_rules": told} if told else {}


HIGHEST_RATING, MOST_RATINGS = 100, 101
FEWEST_RATINGS = 5  # distinct ones, from which a lone value stands out


def rated(tables: Tables) -> tuple[Table, float | None]:
    """The rows whose rating is high enough, and the least one; all of them without ratings."""
    settings, rows = tables.settings, tables.rows
    name = settings.rating
    if name is None:
        return rows, None
    least = _threshold(settings, rows, tables.backend, tables.notes)
    least = settings.dislike_below if least is None else least
    if least is None:
        return rows, None
    if settings.dislike_below is not None and settings.dislike_below > least:
        raise SettingsError(
            f"setting 'dislike_below': is {settings.dislike_below:g}, and '{name}' from {least:g} on is an "
            "interaction; set it lower, or min_rating higher"
        )
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


def disliked(tables: Tables) -> Table | None:
    """The rows that are dislikes, by their rating or type; None if no setting says which.

    Raises:
        SettingsError: if there are none.
    """
    settings, rows = tables.settings, tables.rows
    test = is_disliked(settings, rows)
    if test is None:
        return None
    found = rows.filter(test)
    if not count_rows(tables.backend, found):
        below = f"'{settings.rating}' below {settings.dislike_below}" if settings.dislike_below is not None else ""
        types = f"{listed(settings.dislikes)} in '{settings.event}'" if settings.dislikes else ""
        raise SettingsError(
            f"settings 'dislike_below' and 'dislikes': no row has {' or '.join(filter(None, (below, types)))}; name "
            "another rating or type, or leave them out"
        )
    return found


def is_disliked(settings: Settings, rows: Table) -> BooleanValue | None:
    """Whether each row is a dislike; None if no setting says which are."""
    found = []
    if settings.dislike_below is not None and settings.rating is not None:
        found.append(_number(rows[settings.rating]) < settings.dislike_below)
    if settings.dislikes and settings.event is not None:
        found.append(rows[settings.event].cast("string").strip().isin(settings.dislikes))
    return reduce(or_, (test.fill_null(False) for test in found)) if found else None


def _threshold(settings: Settings, rows: Table, backend: Backend, notes: Notes) -> float | None:
    """The rating from which a row is an interaction; None if all are."""
    name = settings.rating
    assert name is not None
    values = _number(rows[name])
    if settings.min_rating is not None:
        return settings.min_rating
    asked = {"least": values.min(), "most": values.max(), "kinds": values.nunique(), "present": values.count()}
    found = figures(backend, rows, asked)
    every = "every row is an interaction"
    if not found["present"] or found["kinds"] < 2:
        notes.inferred.append(f"'{name}' has one value in all rows, so {every}")
        return None
    least, most = float(found["least"]), float(found["most"])
    if FEWEST_RATINGS <= found["kinds"] <= MOST_RATINGS or least < 0:
        _warn_of_lone_value(name, rows.mutate(_value=values), backend, notes)
    if most > HIGHEST_RATING or found["kinds"] > MOST_RATINGS:
        held = f"'{name}' is no scale of ratings: it holds {found['kinds']:,} values from {least:g} to {most:g}"
        if least >= 0:
            notes.inferred.append(f"{held}, so {every} (min_rating sets a least one)")
            return None
        above = figure(backend, rows, values.min(where=values > 0))
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
    chosen = figure(backend, rows, values.min(where=values >= wanted))
    notes.inferred.append(
        f"rows are rated: '{name}' holds {least:g} to {most:g}, and ratings from {chosen:g} on, three quarters up the "
        "scale, are interactions (min_rating sets another one, rating=null takes every row)"
    )
    return float(chosen)


def _warn_of_lone_value(name: str, rows: Table, backend: Backend, notes: Notes) -> None:
    """Warn of a highest or lowest rating, such as 99 or -999, that lies further from the others than they span."""
    counted = rows.group_by("_value").aggregate(_rows=rows.count()).filter(ibis._["_value"].notnull())
    ends = [fetch(backend, counted.order_by(end("_value")).limit(2)).to_pydict() for end in (ibis.asc, ibis.desc)]
    (least, low), (most, high) = (end["_value"] for end in ends)
    for lone, end, apart in (
        (most, ends[1], most - high > high - least),
        (least, ends[0], least < 0 and low - least > most - low),
    ):
        if apart and low < most:
            held = how_many(end["_rows"][0], "row")
            others = f"{least:g} to {high:g}" if lone == most else f"{low:g} to {most:g}"
            notes.warnings.append(
                f"'{name}' holds {lone:g} in {held}, and else {others}: if "
                f"{lone:g} means no rating, --set 'missing_values=[{lone:g}]'"
            )


def _number(values: Values) -> Values:
    return number_of(values.strip(), "float64") if values.type().is_string() else values.cast("float64")


GROWTH_FILE = "growth.json"
RAW = "raw"
EVENTS = f"{RAW}/events.parquet"
FORMAT = 2
OUR_TYPES = {
    ROW: "int64",
    SPLIT_BEFORE: "string",
    FILE_SPLIT: "string",
    WEIGHT: "float64",
    **dict.fromkeys((SEEN, IS_TARGET), "boolean"),
}
"""The types of the columns of raw events that no file has."""


class GrowthRules(BaseModel):
    """How events became rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    dataset: str
    settings: Settings
    """As a table's, with every role, format and threshold that was found."""
    found_time_format: str | None = None
    """The format that the times had, where none was set."""
    dated: bool = False
    """Whether times are seconds since 1970."""
    copies: bool | None = None
    """Whether labelled rows of equal features are copies, which split share keeps together; None: another split."""
    events: int = Field(0, ge=0)
    """How many events `EVENTS` holds."""

    @classmethod
    def of(
        cls,
        tables: Tables,
        least: float | None,
        dataset: str,
        before: Before | None,
        *,
        dated: bool,
        copies: bool | None = None,
    ) -> Self:
        """The rules by which some tables became prepared; `least` is the rating of an interaction."""
        settings = tables.settings
        found = {
            "min_rating": least,
            "rating": settings.rating if least is not None else None,
            "timestamp": tables.time,
            "rows": None,
            "files": (),
            "earlier": 0,  # the rows after the window are gone
        }
        return cls(
            dataset=dataset,
            settings=settings.model_copy(update=found),
            found_time_format=tables.notes.time_format,
            dated=before.dated if before else tables.time is not None and dated,
            events=count_rows(tables.backend, tables.rows),
            copies=copies,
        )

    def save(self, folder: Path) -> None:
        """Write `growth.json` into a dataset's folder."""
        write_whole(folder / GROWTH_FILE, self.model_dump_json(indent=2, exclude_unset=True) + "\n")

    @classmethod
    def load(cls, base: FeatureSpec) -> GrowthRules:
        """Read the `growth.json` of a dataset. Raises DataError if there is none, or a damaged one."""
        folder = base.folder
        file = folder / GROWTH_FILE
        try:
            if not confined(folder, GROWTH_FILE).is_file():
                raise DataError(f"{folder}: takes no new events: {_why_none(base)}")
            found = read_json(file, most=1 << 20)
            if isinstance(found, dict) and found.get("format", FORMAT) != FORMAT:
                raise DataError(f"{file}: format {found['format']}; this recspec reads {FORMAT}")
            return cls.model_validate(found)
        except PathError as error:
            raise DataError(f"{folder}: {error}") from None
        except ValidationError as error:
            raise DataError.of(f"{file}: damaged", problems_in(error)) from None


def _why_none(base: FeatureSpec) -> str:
    """Why a dataset has no `growth.json`, and what to do."""
    order, dataset = base.summary.get("order"), base.metadata.get("dataset")
    if isinstance(order, str) and order.startswith("random"):
        return (
            "its file is sorted by item and has no times, so its rows are in a random order, in which later rows "
            "have no place; prepare a file with times"
        )
    if FOLD_IN in base.splits:
        return (
            "its users are divided by a draw over all of them, in which new ones have no place; to update a model, "
            "prepare the events with another split"
        )
    if dataset == "ncf":
        return (
            "its test candidates are listed for the paper's events alone, and figures on other events do not "
            "compare with theirs; to update a model, prepare the events by `recspec prepare table`"
        )
    again = "prepare all rows again and train anew"
    return f"it has no {GROWTH_FILE}, which `recspec prepare` writes for table and movielens; {again}"


def keep_raw(folder: Path, tables: Tables, split: Table, rules: GrowthRules) -> None:
    """Write the raw events with the splits that they got, the files of users and items, and the rules."""
    backend, rows = tables.backend, tables.rows
    (folder / RAW).mkdir()
    events = rows.drop(SPLIT_BEFORE) if SPLIT_BEFORE in rows.columns else rows
    events = left_join(events, split.select(ROW, **{SPLIT_BEFORE: split[SPLIT]}), ROW)
    backend.stage(events.order_by(ROW), folder / EVENTS)
    for name, side in (("users", tables.users), ("items", tables.items)):
        if side is not None:
            backend.stage(side.order_by(ROW), folder / RAW / f"{name}.parquet")
    rules.save(folder)


def read_raw(backend: Backend, folder: Path, name: str) -> Table | None:
    """A table that `keep_raw` wrote; None if it wrote none. Raises DataError if it is damaged, or has other columns."""
    try:
        place = confined(folder, f"{RAW}/{name}.parquet")
        names = sorted(each.name for each in place.iterdir()) if place.is_dir() else []  # Spark's
        parts = [f"{RAW}/{place.name}/{name}" for name in names if not name.startswith(("_", "."))]
        files = [confined(folder, part) for part in parts] or [place]
        if not all(file.is_file() for file in files):
            return None
        table = backend.read_parquet(files, foreign=True)
        needed = {ROW, SPLIT_BEFORE} if name == "events" else {ROW}
        kinds = {column: str(kind.copy(nullable=True)) for column, kind in table.schema().items()}
        for column, kind in OUR_TYPES.items():
            if kinds.get(column, None if column in needed else kind) != kind:
                raise DataError(f"column '{column}' holds {kinds.get(column, 'nothing')}; expected {kind}")
        return table
    except (PathError, OSError, DataError, ValueError) as error:
        raise _unreadable(folder, name, error) from None


def _unreadable(folder: Path, name: str, error: Exception) -> DataError:
    return DataError(f"{folder}: {RAW}/{name}.parquet can't be read: {error}; prepare it again")


@contextmanager
def reading_raw(folder: Path) -> Iterator[None]:
    """Errors of files that `read_raw` gave as errors of the dataset; they are read once, later."""
    try:
        yield
    except DataError as error:
        for name in ("events", "users", "items"):
            if str(error).startswith(str(folder / RAW / f"{name}.parquet")):
                raise _unreadable(folder, name, error) from None
        raise
