"""The rows of your own table as a prepared dataset: splits, catalogues of users and items, and the raw events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import ibis
import pyarrow as pa
from ibis.expr.types import Column as Values
from ibis.expr.types import Table, Value

from recspec.base.errors import DataError, SettingsError, how_many, listed, nearest
from recspec.data.encoding import STOCK_NAMES
from recspec.data.prepare import (
    AS_IN_FILE,
    CUTS,
    DESCRIBES,
    EVENT_WEIGHT,
    GROUP,
    IS_TARGET,
    ITEM,
    LABEL,
    ROW,
    SEEN,
    SPLIT,
    SPLIT_BEFORE,
    TARGET,
    TIMESTAMP,
    USER,
    WEIGHT,
    Before,
    Catalogue,
    Cleaned,
    Column,
    Progress,
    Source,
    clean,
    clicks,
    count_rows,
    counts_by,
    fetch,
    figures,
    interactions,
    is_dated,
    keep_earliest,
    left_join,
    splits,
    time_range,
    with_splits,
)
from recspec.datasets.table_features import CONTENT, OURS, FeaturePlan, Tables, free_name
from recspec.datasets.table_rows import (
    GrowthRules,
    decay_of,
    disliked,
    event_rules,
    given_split,
    is_disliked,
    is_weighted,
    keep_raw,
    note_shares,
    rated,
    split_clicks,
    split_interactions,
    up_to_window,
    warn_of_few_users,
    weights,
    with_key,
    with_order,
    without_weightless,
    words_as_splits,
)
from recspec.datasets.table_settings import Role
from recspec.datasets.table_settings import Settings as Settings
from recspec.feature_spec import FeatureSpec

NAME = "table"
FEWEST_PIECES, LEAST_SOLD_OUT = 4, 0.01  # distinct numbers, and the share of 0, of a column that may be the stock


# --- interactions ----------------------------------------------------------------------------------------------------


def write_interactions(
    folder: Path,
    tables: Tables,
    plan: FeaturePlan,
    progress: Progress,
    *,
    dataset: str = NAME,
    summary: Callable[[int, Cleaned], Mapping[str, object]] | None = None,
    before: Before | None = None,
) -> FeatureSpec:
    """Write rows without a label: splits, catalogues, and the raw events that an update needs.

    `summary` gives a dataset's own counts, from the number of raw rows and what is left of them. With `before`, the
    rows are those of a dataset and new ones.
    """
    backend, settings, notes = tables.backend, tables.settings, tables.notes
    assert settings.user is not None
    assert settings.item is not None
    tables = up_to_window(tables)
    num_rows = count_rows(backend, tables.rows)
    tables, is_drawn = with_order(tables) if before is None else (tables, False)
    kept, least = rated(tables)
    kept = without_waiting(kept, before)
    dislikes = disliked(tables)
    if (left_out := is_disliked(settings, kept)) is not None:
        kept = kept.filter(~left_out)
    told = [name for name in kept.columns if name.startswith((*DESCRIBES.values(),))]
    rows = _without_copies(tables, without_weightless(tables, kept), but=(ROW, SPLIT_BEFORE, *told))
    named = rows.select(
        **{USER: rows[settings.user], ITEM: rows[settings.item], TIMESTAMP: rows[tables.time or ROW], ROW: rows[ROW]},
        **{name: rows[column] for name, column in plan.in_rows("user", "item", "context").items()},
        **{name: rows[name] for name in (*told, *([SPLIT_BEFORE] if before else []))},
        **({EVENT_WEIGHT: weights(rows)} if is_weighted(tables) else {}),
        **({SPLIT: given_split(tables, rows)} if settings.splits is not None else {}),
        **({IS_TARGET: rows[IS_TARGET]} if IS_TARGET in rows.columns else {}),
    )
    described = plan.in_rows("user", "item")
    kept = named.drop(*described, *told)
    order = (TIMESTAMP, ROW)
    cleaned = clean(backend, kept, min_interactions=settings.min_interactions, order=order, repeats=settings.repeats)
    of_users = settings.chosen_split == "users"
    split = split_interactions(tables, cleaned.rows, order, folder / "work")
    if SEEN in tables.rows.columns and IS_TARGET not in split.columns:
        split = split.mutate(**{IS_TARGET: ibis.literal(True)})
    split = backend.stage(split)
    unknown = splits.note_unknown_items(backend, notes, cleaned.rows, split) if of_users else 0
    if settings.chosen_split == "time":
        judged = split.filter(split[IS_TARGET]) if IS_TARGET in split.columns else split
        counted_splits = fetch(backend, counts_by(judged, SPLIT)).to_pylist()
        note_shares(tables, {row[SPLIT]: row["rows"] for row in counted_splits})
    if settings.chosen_split in ("time", "given") and before is None:
        warn_of_few_users(tables, split)
    train = named.semi_join(split.filter(split[SPLIT] == "train"), ROW)
    events = left_join(named.drop(SPLIT) if SPLIT in named.columns else named, split.select(ROW, SPLIT), ROW)
    order_said = f"by column '{tables.time}'" if tables.time else "as in the file: there is no timestamp"
    order_said = f"random by seed {settings.seed}: the file is sorted by item" if is_drawn else order_said

    def counted(count: int) -> dict[str, object]:
        count += unknown
        cleaned.note(backend, notes, count)
        if summary is not None:
            return {**summary(num_rows, cleaned), **cleaned.summary(count)}
        invalid = {"invalid_dropped": notes.num_invalid} if notes.num_invalid else {}
        return {"raw_rows": num_rows + notes.num_invalid, **invalid, **cleaned.summary(count), "order": order_said}

    decay = decay_of(tables, split)
    leaves_out = _leaves_out(tables, rated=least is not None or dislikes is not None)
    source = Source(
        dataset=dataset,
        rows=split,
        order=(TARGET, *order) if of_users else order,
        timed=tables.time is not None,
        users=catalogue("user", tables, plan, train, events),
        items=catalogue("item", tables, plan, train, events),
        context=plan.columns["context"],
        raw_names={USER: settings.user, ITEM: settings.item},
        vocabularies="train" if settings.chosen_split in ("time", "given") else "all",
        unknown_targets=settings.unknown_targets,
        missing_values=settings.missing_values,
        missing_by_column=settings.missing_by_column,
        summary=counted,
        notes=notes,
        weighted=is_weighted(tables),
        decay=decay,
        unseen_items=settings.unseen_items,
        seen=_seen(tables, tables.rows, split) if leaves_out else None,
        dislikes=None if dislikes is None else _seen(tables, dislikes, split),
        holds_out=settings.chosen_split != "none",
        folds_in=of_users,
        before=before,
    )
    num_negatives = 0 if of_users else settings.num_negatives
    spec = interactions.write(
        backend, folder, source, settings, num_negatives=num_negatives, seed=settings.seed, progress=progress
    )
    spec = spec.replace(metadata={**spec.metadata, **event_rules(settings, least, decay)})
    if is_drawn:  # events that come later have no place in a drawn order
        return spec.replace(metadata={**spec.metadata, "ordered": False})
    if not of_users:  # nor among drawn users
        times = spec.metadata["summary"]
        dated = isinstance(times, Mapping) and isinstance(times["first"], str)
        keep_raw(folder, tables, split, GrowthRules.of(tables, least, dataset, before, dated=dated))
    return spec


def without_waiting(rows: Table, before: Before | None) -> Table:
    """The rows without those of users and items that get no id yet."""
    return rows if before is None or before.waiting is None else rows.anti_join(before.waiting, ROW)


def kept_columns(tables: Tables, plan: FeaturePlan) -> Table:
    """The rows with the columns that something is made from."""
    settings, rows = tables.settings, tables.rows
    wanted = {*settings.with_role, *OURS, *plan.in_rows("user", "item", "context").values()} - {ROW}
    sides = [name.lower() for side in (tables.users, tables.items) if side is not None for name in side.columns]
    wanted |= {name for name in rows.columns if name != ROW and name.lower() in sides}  # features avoid their names
    told = (*DESCRIBES.values(),)
    return rows.select(ROW, *(name for name in rows.columns if name in wanted or name.startswith(told)))


def _leaves_out(tables: Tables, *, rated: bool) -> bool:
    """Whether the prepared rows lack events that users had, or hold some that do not count as seen."""
    return rated or not {WEIGHT, SEEN}.isdisjoint(tables.rows.columns)


def _seen(tables: Tables, events: Table, rows: Table) -> Table:
    """The events that count as seen, with the split whose rows know of them first; `rows` have their splits."""
    settings = tables.settings
    if SEEN in events.columns:
        dislikes = is_disliked(settings, events)
        events = events.filter(events[SEEN] if dislikes is None else events[SEEN] | dislikes)
    time = {TIMESTAMP: events[tables.time or ROW]} if TIMESTAMP in rows.columns else {}
    given = {SPLIT: words_as_splits(settings.splits, events)} if settings.splits is not None else {}
    named = events.select(
        **{USER: events[settings.user], ITEM: events[settings.item], ROW: events[ROW]}, **time, **given
    )
    return with_splits(named, rows, CUTS.get(settings.chosen_split))


def _without_copies(tables: Tables, rows: Table, *, but: Collection[str]) -> Table:
    """Rows with times without copies of an earlier one, unless `repeats` is set; notes the repeats that are left.

    Copies are equal in all columns that are used, `but` for some.
    """
    settings, backend, notes = tables.settings, tables.backend, tables.notes
    if "repeats" in settings.model_fields_set:
        return rows
    total = count_rows(backend, rows)
    pairs = count_rows(backend, rows.select(settings.user, settings.item).distinct())
    if tables.time is not None and pairs < total:
        before, rows = (
            rows,
            backend.stage(keep_earliest(rows, [name for name in rows.columns if name not in but], [ROW])),
        )
        total, copies = (left := count_rows(backend, rows)), total - left
        if copies:
            first = fetch(backend, before.anti_join(rows.select(ROW), ROW).order_by(ROW).limit(1)).to_pylist()[0]
            example = f"user '{first[str(settings.user)]}' and item '{first[str(settings.item)]}'"
            notes.dropped.append(
                f"{copies:,} of {total + copies:,} rows equal an earlier one in all that is "
                f"used, '{tables.time}' included, such as that of {example}; they are one event "
                "(repeats=keep takes each as an event)"
            )
    if pairs < total:
        notes.inferred.append(
            f"{total - pairs:,} of {total:,} rows repeat an earlier one of the same user and item; all are kept, as "
            "visits or purchases are (repeats=first or repeats=last keeps one of each, repeats=sum adds their weights)"
        )
    return rows


# --- clicks ----------------------------------------------------------------------------------------------------------


def write_labelled(
    folder: Path,
    tables: Tables,
    plan: FeaturePlan,
    progress: Progress,
    *,
    before: Before | None = None,
    copies: bool | None = None,
) -> FeatureSpec:
    """Write rows with a label: splits, catalogues, and the raw rows that an update needs.

    With `before`, the rows are those of a dataset and new ones, and `copies` is what the dataset found of them.
    """
    tables = up_to_window(tables)
    backend, settings = tables.backend, tables.settings
    rows = without_waiting(without_weightless(tables, tables.rows), before)
    assert settings.label is not None
    group = settings.group or settings.user
    dated = settings.chosen_split in ("time", "given", "none") or settings.reads_times
    dated |= bool(plan.in_rows("user", "item"))
    dated &= tables.time is not None and not rows[tables.time].type().is_string()  # of features found later, text
    told = [name for name in rows.columns if name.startswith((*DESCRIBES.values(),))]
    content: dict[str, str] = {}
    if settings.chosen_split == "share":
        rows, content[CONTENT], copies = with_key(tables, rows, copies)
    wanted = {
        ROW: ROW,
        LABEL: settings.label,
        GROUP: group,
        USER: settings.user,
        ITEM: settings.item,
        TIMESTAMP: settings.timestamp if dated else None,
        **plan.in_rows("user", "item", "context"),
        **{name: name for name in settings.other_labels},
    }
    kept = rows.select(
        **{name: rows[column] for name, column in wanted.items() if column is not None},
        **({EVENT_WEIGHT: weights(rows)} if is_weighted(tables) else {}),
        **({SPLIT: given_split(tables, rows)} if settings.splits is not None else {}),
        **{name: rows[column] for name, column in content.items()},
        **{name: rows[name] for name in (*told, *([SPLIT_BEFORE] if before else []))},
    )
    split = backend.stage(split_clicks(tables, kept))  # it is read several times
    positives = _positives_by_split(tables, split)
    train = split.filter(split[SPLIT] == "train")
    names: Mapping[Literal["user", "item"], str] = {"user": USER, "item": ITEM}
    ids = {role: Column(name, "category") for role, name in names.items() if getattr(settings, role) is not None}
    described = _with_described(tables, plan, split) if told else tables
    catalogues = {role: catalogue(role, described, plan, train) for role in ids}
    kept = split.drop(*told, *content)
    kept = _joined(kept, USER, settings.user, described.users, plan.in_file("user"))
    kept = _joined(kept, ITEM, settings.item, described.items, plan.in_file("item"))
    decay = decay_of(tables, split)
    source = clicks.Source(
        dataset=NAME,
        rows=kept,
        ids=ids,
        raw_names={USER: settings.user, ITEM: settings.item},
        columns={**plan.columns, "context": [*plan.columns["context"], *plan.crosses]},
        users=catalogues.get("user"),
        items=catalogues.get("item"),
        grouped="values" if group is not None else False,
        other_labels=settings.other_labels,
        min_count=settings.min_count,
        missing_values=settings.missing_values,
        missing_by_column=settings.missing_by_column,
        summary={
            "split": settings.chosen_split,
            "positives": positives,
            **(time_range(backend, split) if dated else {}),
        },
        notes=tables.notes,
        timed=dated,
        weighted=is_weighted(tables),
        decay=decay,
        histories=settings if settings.history is not None else None,
        seed=settings.seed,
        seen=_seen_of_labelled(tables, split),
        before=before,
    )
    spec = clicks.write(backend, folder, source, progress=progress)
    spec = spec.replace(metadata={**spec.metadata, **event_rules(settings, None, decay)})
    held = tables if copies else replace(tables, rows=kept_columns(tables, plan))  # copies are equal in all columns
    if not dated:  # times that nothing reads may be text of any form
        held = replace(held, settings=settings.model_copy(update={"timestamp": None}))
    dated = before is None and held.time is not None and is_dated(backend, split)
    keep_raw(folder, held, split, GrowthRules.of(held, None, NAME, before, dated=dated, copies=copies))
    return spec


def _with_described(tables: Tables, plan: FeaturePlan, rows: Table) -> Tables:
    """The tables with the users and items that only rows of new events describe."""
    settings = tables.settings

    def more(side: Table | None, key: str | None, role: Role, name: str) -> Table | None:
        if side is None or key is None:
            return side
        return tables.backend.stage(with_described(side, key, role, name, rows, plan))

    users = more(tables.users, settings.user, "user", USER)
    return replace(tables, users=users, items=more(tables.items, settings.item, "item", ITEM))


def _seen_of_labelled(tables: Tables, rows: Table) -> Table | None:
    """Events that count as seen: all, where the label is made from ratings or types; else those of label 1."""
    settings, events = tables.settings, tables.rows
    of_kinds = settings.positive_from is not None or settings.positive is not None
    if settings.user is None or settings.item is None or not (of_kinds or _leaves_out(tables, rated=False)):
        return None
    if not of_kinds and SEEN not in events.columns:
        events = events.filter(events[settings.label] > 0)
    return _seen(tables, events, rows)


def _positives_by_split(tables: Tables, rows: Table) -> int:
    """The number of positive rows. A ready-made split without any is refused if the label is one of several words."""
    settings = tables.settings
    each = rows.group_by(SPLIT).aggregate(rows=rows.count(), positives=rows[LABEL].sum())
    counted = fetch(tables.backend, each).to_pylist()
    note_shares(tables, {row[SPLIT]: row["rows"] for row in counted})
    found = {str(row[SPLIT]): int(row["positives"] or 0) for row in counted}
    none = sorted(split for split, count in found.items() if not count)
    if none and settings.splits is not None and settings.positive is not None and any(found.values()):
        shown = "' or '".join(settings.positive)
        raise DataError(
            f"no row of {listed(none)} has the label '{shown}', and rows of "
            f"{listed(sorted({*found} - {*none}))} have it: the files spell it differently; give it one spelling, or "
            "leave the split out"
        )
    return sum(found.values())


def _joined(rows: Table, name: str, key: str | None, side: Table | None, wanted: Mapping[str, str]) -> Table:
    if side is None or key is None or not wanted:
        return rows
    ids = free_name(f"{name}_of_file", {*rows.columns, *wanted})
    found = side.select(**{ids: as_ids(side[key], rows[name])}, **{new: side[old] for new, old in wanted.items()})
    return rows.left_join(found, rows[name] == found[ids]).drop(ids)


# --- catalogues ------------------------------------------------------------------------------------------------------


def catalogue(
    role: Literal["user", "item"], tables: Tables, plan: FeaturePlan, train: Table, events: Table | None = None
) -> Catalogue | None:
    """The catalogue of users or items: the latest values of features in `train`, and the columns of its file.

    `events` may hold columns of that file too, which describe the users or items that it lacks.
    """
    settings = tables.settings
    name, columns = USER if role == "user" else ITEM, plan.columns[role]
    in_rows = [*plan.in_rows(role)]
    latest = _latest(tables, train, role, name, in_rows) if in_rows else None
    side, file, key = tables.of(role), str(getattr(settings, f"{role}s")), getattr(settings, role)
    if side is None:
        return Catalogue(latest.select([name]), name, columns, latest=latest) if latest is not None else None
    title = settings.title if role == "item" else None
    if title is not None and title not in side.columns:
        raise SettingsError(f"setting 'title': no column '{title}'{nearest(title, side.columns)} in the items' file")
    if role == "item":
        check_stock(tables, side)
    side = side if events is None else with_described(side, key, role, name, events, plan)
    table = fetch(tables.backend, _one_row_each(tables, side, key, train[name], file))
    features = {feature: table.column(column) for feature, column in plan.in_file(role).items()}
    vectors = {plan.in_file(role).get(column.name) for column in columns if column.kind == "vector"}
    by_column = {column: feature for feature, column in plan.in_file(role).items()}
    shown = {
        column: by_column.get(column, f"{AS_IN_FILE}{column}")
        for column in side.columns
        if column not in (key, *OURS, *vectors)
    }
    arrays = {name: table.column(key), **features, **{new: table.column(old) for old, new in shown.items()}}
    readable = {new: shown[old] for new, old in _readable(tables, plan, role, file, title, [*shown]).items()}
    return Catalogue(pa.table(arrays), name, columns, readable, file=file, latest=latest)


def check_stock(tables: Tables, items: Table) -> None:
    """Refuse a column of stock that does not tell, and note one that looks like it; see the setting `stock`."""
    backend, settings, notes = tables.backend, tables.settings, tables.notes
    for name, texts in settings.stock.items():
        if name not in items.columns:
            raise SettingsError(f"setting 'stock': no column '{name}'{nearest(name, items.columns)} in the items' file")
        if (is_text := items[name].type().is_string()) != bool(texts):
            found = f"column '{name}' of the items' file holds {'texts' if is_text else 'no texts'}"
            told = f"'stock={{{name}: [TEXT]}}' names those of items in stock" if is_text else f"stock={name} is enough"
            raise SettingsError(f"setting 'stock': {found}; --set {told}")
    if settings.stock or any(name.lower() in STOCK_NAMES for name in items.columns):
        return
    free = [
        each for each in items.columns if each not in (*OURS, *settings.with_role) and items[each].type().is_integer()
    ]
    asked = {(each, "least"): items[each].min() for each in free}
    asked |= {(each, "kinds"): items[each].nunique() for each in free}
    asked |= {(each, "none"): (items[each] == 0).mean() for each in free}
    numbers = figures(backend, items, asked) if asked else {}
    for each in free:
        least, kinds, none = (numbers[each, what] for what in ("least", "kinds", "none"))
        if least == 0 and kinds >= FEWEST_PIECES and none >= LEAST_SOLD_OUT:
            notes.inferred.append(
                f"'{each}' of the items' file holds whole numbers from 0, 0 in {none:.0%} of the items: if they are "
                f"pieces in stock, --set stock={each} makes the items with 0 not for sale"
            )


def with_described(side: Table, key: str, role: Role, name: str, events: Table, plan: FeaturePlan) -> Table:
    """A file of users or items with rows for those that it lacks, from the latest values that events give.

    Features take values of train alone.
    """
    told = [column for column in side.columns if f"{DESCRIBES[role]}{column}" in events.columns]
    if not told:
        return side
    features = {*plan.in_file(role).values()}
    ids = events[name].try_cast(side[key].type())
    others = events.mutate(_id=ids).anti_join(side, ids == side[key])
    train = others[SPLIT] == "train"
    values = {column: others[f"{DESCRIBES[role]}{column}"] for column in told}
    given = {
        column: each.notnull() & train if column in features else each.notnull() for column, each in values.items()
    }
    order = (TIMESTAMP, ROW) if TIMESTAMP in others.columns else (ROW,)
    latest = latest_given(others, "_id", order, values, given)
    first = ibis.row_number().over(ibis.window(order_by=latest["_id"])) + side.count().as_scalar()
    made = {key: latest["_id"], ROW: first, **{column: latest[column] for column in told}}
    kinds = side.schema()
    return side.union(
        latest.select(
            **{column: made.get(column, ibis.null(kinds[column])).cast(kinds[column]) for column in side.columns}
        )
    )


def latest_given(
    rows: Table, key: str, order: Sequence[str], values: Mapping[str, Values], given: Mapping[str, Values]
) -> Table:
    """For each value of `key` the latest of each of `values` in the rows where it is `given`, else null."""
    place = ibis.row_number().over(ibis.window(group_by=key, order_by=list(order)))
    flags = {f"_given_{number}": given[name] for number, name in enumerate(values)}
    placed = rows.select(key, **values, **flags, _place=place)
    return placed.group_by(key).aggregate(
        **{
            name: placed[name].argmax(placed["_place"], where=placed[f"_given_{number}"])
            for number, name in enumerate(values)
        }
    )


def _latest(tables: Tables, train: Table, role: Role, key: str, names: Sequence[str]) -> pa.Table:
    order = [TIMESTAMP, ROW] if TIMESTAMP in train.columns else [ROW]
    train = tables.backend.stage(train.select(key, *order, *names))
    _note_varying(tables, train, role, key, names)
    values = {name: train[name] for name in names}
    latest = latest_given(train, key, order, values, {name: each.notnull() for name, each in values.items()})
    return fetch(tables.backend, latest.order_by(key))


def _note_varying(tables: Tables, train: Table, role: Role, key: str, names: Sequence[str]) -> None:
    """Note features with several values within one user or item, which may belong to the event."""
    backend = tables.backend
    each = train.group_by(key).aggregate(**{name: train[name].nunique() for name in names})
    asked: dict[tuple[str, str], Value] = {("", "each"): each.count()}
    for name in names:
        several = each[name] > 1
        asked |= {(name, "count"): several.cast("int64").sum(), (name, "first"): each[key].min(where=several)}
    found = figures(backend, each, asked)
    if tables.settings.label is None:
        done = (
            f"every row has its {role}'s latest value of train; if the value belongs to the event, name the column "
            "in context_features"
        )
    else:
        done = (
            f"rows keep their own; what a request leaves out is taken from {role}s.parquet, which has the latest "
            "value of train"
        )
    for name in names:
        count, first = found[name, "count"], found[name, "first"]
        if not count:
            continue
        own = train.filter((train[key] == first) & train[name].notnull())
        values = own.group_by(name).aggregate(_place=own[ROW].min()).order_by("_place").limit(2).select(name)
        one, other = (_shown(value) for value in fetch(backend, values).column(name).to_pylist())
        tables.notes.changed.append(
            f"{role} feature '{name}' varies within {count:,} of {found['', 'each']:,} {role}s, such as {role} "
            f"'{first}' ({one} and {other}); {done}"
        )


def _readable(
    tables: Tables, plan: FeaturePlan, role: Role, file: str, title: str | None, columns: Sequence[str]
) -> dict[str, str]:
    """Columns for people: name in the catalogue -> column of the file; a feature's name has the suffix `_text`.

    Notes the columns whose name in the catalogue is another one.
    """
    readable = {"title": title} if title is not None else {}
    for column in columns:
        if column == title:
            continue
        taken = {*plan.taken, *readable}
        is_free = column.lower() not in {each.lower() for each in taken}
        readable[column if is_free else free_name(f"{column}_text", taken)] = column
    renamed = [f"'{column}' is '{name}'" for name, column in readable.items() if name != column]
    if renamed:
        tables.notes.changed.append(
            f"columns of {file} have other names in the prepared {role}s.parquet, for display: {', '.join(renamed)}"
        )
    return readable


def _shown(value: object) -> str:
    text = str(value)
    return f"'{text}'" if len(text) <= 40 else f"'{text[:40]}...'"


def as_ids(values: Values, like: Values) -> Values:
    """Ids of a file with the type of ids in the rows; null if they do not convert."""
    kind = like.type()
    if values.type() == kind:
        return values
    return values.cast("string") if kind.is_string() else values.try_cast(kind)


def _one_row_each(tables: Tables, side: Table, key: str, like: Values, file: str) -> Table:
    """A file of users or items, with ids of the same type as in the rows."""
    backend, notes = tables.backend, tables.notes
    without = count_rows(backend, side.filter(side[key].isnull()))
    if without:
        notes.dropped.append(f"{how_many(without, 'row')} of {file} without '{key}'")
    side = side.mutate(**{key: as_ids(side[key], like)})
    strange = count_rows(backend, side.filter(side[key].isnull())) - without
    if strange:
        notes.dropped.append(
            f"{how_many(strange, 'row')} of {file} whose '{key}' is no whole number, as the ids of all rows are"
        )
    side = side.filter(side[key].notnull())
    counted = counts_by(side, key)
    twice = fetch(backend, counted.filter(counted["rows"] > 1).order_by(key).limit(5))
    if twice.num_rows:
        names = listed(map(str, twice.column(key).to_pylist()))
        raise DataError(f"{file}: names {names} more than once in column '{key}'; expected one row each")
    return side.order_by(ROW)
