"""Splits of the rows of your own table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ibis
from ibis.expr.types import Table

from recspec.base.errors import DataError, listed
from recspec.data.prepare import (
    FILE_SPLIT,
    GROUP,
    ROW,
    SPLIT,
    SPLIT_WORDS,
    TIMESTAMP,
    USER,
    counts_by,
    fetch,
    figures,
    splits,
)
from recspec.datasets.table_features import CONTENT, MIXED, OURS, Tables, free_name

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
    features = [name for name in rows.columns if name not in (*OURS, tables.settings.label)]
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
    asked = several.aggregate(keys=several.count(), rows=several["rows"].sum(), unequal=unequal)
    found = fetch(tables.backend, asked).to_pylist()[0]
    if not found["keys"]:
        return False
    total, rate = fetch(tables.backend, rows.aggregate(rows=rows.count(), rate=label.mean())).to_pylist()[0].values()
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
        return splits.by_time(rows, time=TIMESTAMP, **shares)
    if settings.chosen_split == "group":
        return splits.by_group(rows, group=GROUP, seed=settings.seed, **shares)
    if settings.chosen_split == "none":
        return splits.all_train(rows)
    return splits.by_share(rows, row=CONTENT, seed=settings.seed, **shares)


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


def note_shares(tables: Tables, rows: Table) -> None:
    """Say where a split by time is not near the share that was asked for, because rows of one time stay together."""
    settings = tables.settings
    if settings.chosen_split != "time":
        return
    counted = {row[SPLIT]: row["rows"] for row in fetch(tables.backend, counts_by(rows, SPLIT)).to_pylist()}
    total = sum(counted.values())
    other = "share draws rows at random" if settings.label is not None else "leave_one_out takes each user's last ones"
    for split, share in (("valid", settings.valid), ("test", settings.test)):
        held = counted.get(split, 0)
        if share and total >= 1 / share and not share / 2 <= held / total <= share * 2:
            tables.notes.inferred.append(
                f"the split {split} holds {held:,} of {total:,} rows ({held / total:.0%}), not a share of {share:g}: "
                f"the rows of one time stay together (split={other})"
            )


def split_interactions(tables: Tables, rows: Table, order: Sequence[str]) -> Table:
    """Events with the column `split`; `order` sorts those of a user by time, without ties."""
    settings = tables.settings
    if settings.chosen_split == "time":
        return splits.by_time(rows, time=TIMESTAMP, valid=settings.valid, test=settings.test)
    if settings.chosen_split == "leave_one_out":
        return splits.leave_one_out(rows, by=USER, order=order)
    if settings.chosen_split == "none":
        return splits.all_train(rows)
    if not _lacks_valid(tables, rows):
        return rows
    if tables.time is not None:
        return splits.last_of_train(rows, by=USER, order=order)
    mixed = splits.with_digest(rows, MIXED, row=ROW, seed=settings.seed)
    return splits.last_of_train(mixed, by=USER, order=[MIXED]).drop(MIXED)


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
    way = _sorted_by_item(tables) if tables.time is None else None
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
    asked = {
        f"{way}_{place}": test.cast("int64").sum() for way, tests in ways.items() for place, test in enumerate(tests)
    }
    found = figures(tables.backend, steps, {"steps": steps.count(), **asked})
    count = int(found.pop("steps"))
    most = max(found, key=lambda name: found[name] or 0)
    if count < FEWEST_STEPS or (found[most] or 0) < SORTED * count:
        return None
    return f"{most.partition('_')[0]} in {found[most]:,} of {count:,} steps"
