"""Your own table: CSV, JSON lines, Parquet or sequences; `user_id,item_id,timestamp` is enough.

Without a label, each row is an interaction. Each user's last one is for test and the last but one for valid; with split
time, the latest of all are held out. Negatives are drawn beside them, and rows may hold their user's history. With a
label (clicked or not), rows are kept as given and split by share, time or group. Splits may also be ready-made. With
split none, every row is train: for the final model, whose settings were chosen on other splits of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ibis.expr.types import Table

from recspec.base.config import build as build_settings
from recspec.base.errors import DataError, SettingsError, listed, nearest
from recspec.data.prepare import (
    DESCRIBES,
    EVENT_WEIGHT,
    FILE_SPLIT,
    GROUP,
    ITEM,
    LABEL,
    ROW,
    SEEN,
    SPLIT,
    SPLIT_BEFORE,
    SPLITS,
    TIMESTAMP,
    USER,
    WEIGHT,
    Before,
    Cleaned,
    Column,
    DeclaredColumn,
    Notes,
    PrepareContext,
    Prepared,
    Progress,
    RawRows,
    Roles,
    Source,
    clean,
    clicks,
    count_rows,
    fetch,
    find_raw_files,
    interactions,
    keep_earliest,
    left_join,
    load_columns,
    named_files,
    nearest_file,
    note_doubtful_time,
    note_untimed,
    prepared,
    splits_by_name,
    stage,
    typed,
    with_splits,
)
from recspec.datasets.table_events import GrowthRules, keep_raw
from recspec.datasets.table_features import (
    CONTENT,
    OURS,
    FeaturePlan,
    Tables,
    as_ids,
    catalogue,
    free_name,
    plan_features,
    with_described,
)
from recspec.datasets.table_settings import Role, SideFile
from recspec.datasets.table_settings import Settings as Settings
from recspec.datasets.table_shape import settled, with_features
from recspec.datasets.table_splits import (
    given_split,
    note_shares,
    split_clicks,
    split_interactions,
    with_key,
    with_order,
    words_as_splits,
)
from recspec.datasets.table_warnings import warnings
from recspec.datasets.table_weights import decay_of, is_weighted, rated, weights, without_weightless
from recspec.feature_spec import FeatureSpec

NAME = "table"
IDS = ("user_id", "item_id")  # names of the columns of sequences, if settings name none


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare a file of CSV, JSON lines or Parquet, or a folder of such files."""
    raw, notes = context.raw, Notes()
    if not (raw.is_file() or raw.is_dir()):
        raise DataError(f"{raw}: no such file or folder{nearest_file(raw)}; expected CSV, JSON lines or Parquet")
    named = {
        name: str(value)
        for name in ("users", "items", "types")
        if isinstance(value := getattr(settings, name), (str, SideFile))
    }
    beside = {setting: named_files(raw, setting, [name])[0] for setting, name in named.items()}
    settings = _with_types(settings, beside.get("types"), raw)
    sides: dict[str, Path] = {side: beside[side] for side in ("users", "items") if side in beside}
    paths, asked = _paths(raw, settings, [*beside.values()], notes)

    def build(folder: Path) -> FeatureSpec:
        with context.connect(folder / "work") as backend:
            context.progress("reading rows", 0, None)
            ids = tuple(name or other for name, other in zip((asked.user, asked.item), IDS, strict=True))
            rows = stage(backend, paths, ids, asked.reading, notes, folder / "work")
            tables = _read(rows, folder / "work", sides, asked, raw)
            plan = plan_features(tables, raw)
            if not count_rows(backend, tables.rows):
                raise DataError(f"{raw}: holds no row, a header at most; expected one row at least")
            plan.note_places(tables)
            notes.warnings += warnings(rows, tables, asked)
            if tables.settings.label is None:
                tables = replace(tables, rows=backend.stage(_kept_columns(tables, plan)))  # they are read several times
                spec = write_interactions(folder, tables, plan, context.progress)
            else:
                spec = write_labelled(folder, tables, plan, context.progress)
            return spec.replace(metadata={**spec.metadata, **_told(tables.settings)})

    return prepared.run(context, NAME, settings, [*paths, *sides.values()], build)


def _with_types(settings: Settings, file: Path | None, raw: Path) -> Settings:
    """The settings with the types of the file that they name, if they name one."""
    if file is None:
        return settings
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    return build_settings(Settings, f"{raw}: settings", {**given, "types": load_columns(file)})


def _told(settings: Settings) -> dict[str, object]:
    """Metadata for training and evaluation."""
    told: dict[str, object] = {"split": settings.chosen_split}
    return {**told, "cut_offs": list(settings.cut_offs)} if settings.cut_offs else told


# --- files -----------------------------------------------------------------------------------------------------------


def _paths(raw: Path, settings: Settings, others: Collection[Path], notes: Notes) -> tuple[list[Path], Settings]:
    """The files of the rows, none of `others`, and the settings with the splits that the names of files tell."""
    if isinstance(settings.splits, dict):
        return _split_files(raw, settings.splits), settings
    if raw.is_dir():
        paths = find_raw_files(raw, others, settings.files, notes)
        if settings.files or {"split", "splits"} & settings.model_fields_set:
            return paths, settings
        found = splits_by_name(paths, notes)
        if not found:
            return paths, settings
        given = {name: getattr(settings, name) for name in settings.model_fields_set}
        named = {split: [path.name for path in files] for split, files in found.items()}
        asked = build_settings(Settings, f"{raw}: settings", {**given, "splits": named})
        return [path for files in found.values() for path in files], asked
    if settings.files:
        raise SettingsError(f"setting 'files': {raw} is a file; name its folder, {raw.parent}")
    return [raw], settings


def _split_files(raw: Path, named: Mapping[str, Sequence[str]]) -> list[Path]:
    paths = named_files(raw, "splits", [name for split in SPLITS for name in named.get(split, ())])
    twice = [path.name for path in dict.fromkeys(paths) if paths.count(path) > 1]
    if twice:
        raise SettingsError(f"setting 'splits': names {listed(twice)} more than once")
    return paths


def _read(raw_rows: RawRows, work: Path, sides: Mapping[str, Path], asked: Settings, raw: Path) -> Tables:
    backend, notes = raw_rows.backend, raw_rows.notes
    settings, taken = settled(asked, raw_rows, raw)
    settings = settings.model_copy(update={"layout": raw_rows.layout})
    settings = _declaring(settings, raw_rows.reading.types, raw)
    reading, roles = settings.reading, roles_of(settings)
    types = dict(settings.declared)
    beside = replace(reading, rows=None, layout="rows", time_format=None, columns=(), splits=())
    held: dict[str, Table] = {}
    keys = {"users": settings.user, "items": settings.item}
    named = {"users": settings.user_features, "items": settings.item_features}
    for side, path in sides.items():
        own = Roles(
            ids=(key,) if (key := keys[side]) else (),
            texts=_with_plain_names(roles.texts, side),
            categories=_with_plain_names(roles.categories, side),
            numbers=_with_plain_names(roles.numbers, side),
            cut=_with_plain_names(roles.cut, side),
            vectors=_with_plain_names(roles.vectors, side),
            features=_with_plain_names(named[side], side),
            shown=True,
        )
        mentioned = frozenset({*own.ids, *own.features, *([settings.title] if settings.title else [])})
        otherwise = {"mentioned": mentioned, "key": keys[side], **asked.of_side(side)}
        own_reading = replace(beside, **otherwise)  # type: ignore[arg-type]
        found = stage(backend, [path], own.ids, own_reading, notes, work)
        types |= {name: each for name, each in found.reading.types.items() if name not in types}
        held[side] = typed(_with_key(found, keys[side], side), own)
    settings = _declaring(settings, types, raw)
    present = [*raw_rows.table.columns, *(name for table in held.values() for name in table.columns)]
    known = [name for name in dict.fromkeys(present) if name not in OURS]
    absent = [f"no column '{name}'{nearest(name, known)}" for name in settings.declared if name not in known]
    if absent:
        raise SettingsError.of("setting 'types'", [f"{what}; found {listed(known)}" for what in absent])
    elsewhere = {name for side, table in held.items() for name in named[side] if name in table.columns}
    features = [name for name in settings.features if name not in elsewhere or name in settings.context_features]
    rows = typed(raw_rows, replace(roles, features=features))
    if taken:  # all values are read several times, and making them costs a regular expression or more each
        rows = backend.stage(rows)
    settings = with_features(settings, rows, backend, notes, taken=taken, raw=raw)
    tables = Tables(backend, settings, notes, rows, held.get("users"), held.get("items"))
    others = {name for name in (settings.user, settings.item, settings.group) if name is not None} | {FILE_SPLIT}
    if settings.timestamp and not tables.time and settings.label is None and not raw_rows.is_sequences:
        note_untimed(backend, rows, settings.timestamp, others, notes)
    chosen = "timestamp" not in asked.model_fields_set and settings.timestamp not in settings.declared
    if tables.time and roles.time and chosen:
        note_doubtful_time(backend, rows, tables.time, others, notes)
    return tables


def _declaring(settings: Settings, types: Mapping[str, DeclaredColumn], raw: Path) -> Settings:
    """The settings with the types that the layouts of files declare."""
    if types.items() <= settings.declared.items():
        return settings
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    return build_settings(Settings, f"{raw}: settings", {**given, "types": dict(types)})


def _with_key(rows: RawRows, key: str | None, side: str) -> RawRows:
    """A file of users or items whose column of ids has the rows' name for it."""
    own = rows.reading.key
    if key is None or own is None or own == key:
        return rows
    columns = [name for name in rows.raw.columns if name != ROW]
    if own not in columns or key in columns:
        what = f"no column '{own}'{nearest(own, columns)}" if own not in columns else f"a column '{key}' beside '{own}'"
        raise SettingsError(f"setting '{side}': the file has {what}; found {listed(columns)}")
    return replace(rows, raw=rows.raw.rename({key: own}))


def _with_plain_names(given: Collection[str], side: str) -> set[str]:
    """Names of features, and the possible names of their columns in a file of users or items."""
    return {*given, *(name.removesuffix(f"_{side.removesuffix('s')}") for name in given)}


def roles_of(settings: Settings) -> Roles:
    """What the columns of the rows are for."""
    needs_time = (
        settings.label is None
        or settings.chosen_split in ("time", "given", "none")
        or "timestamp" in settings.model_fields_set
    )
    needs_time |= bool(settings.user_features or settings.item_features) or settings.reads_times
    return Roles(
        ids=tuple(name for name in (settings.user, settings.item) if name is not None),
        texts={*settings.lists, *settings.hashed, *settings.text, *([settings.group] if settings.group else [])},
        categories={*settings.categorical},
        vectors={*settings.vectors},
        features=settings.features,
        numbers={*settings.numeric, *([settings.rating] if settings.rating else [])},
        time=settings.timestamp if needs_time else None,
        label=settings.label,
        positive_from=settings.positive_from,
        positive=settings.positive or (),
        cut={*settings.buckets},
        weights=settings.weighting,
    )


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
    num_rows = count_rows(backend, tables.rows)
    tables, is_drawn = with_order(tables) if before is None else (tables, False)
    kept, least = rated(tables)
    told = [name for name in kept.columns if name.startswith((*DESCRIBES.values(),))]
    rows = _without_copies(tables, without_weightless(tables, kept), but=(ROW, SPLIT_BEFORE, *told))
    named = rows.select(
        **{USER: rows[settings.user], ITEM: rows[settings.item], TIMESTAMP: rows[tables.time or ROW], ROW: rows[ROW]},
        **{name: rows[column] for name, column in plan.in_rows("user", "item", "context").items()},
        **{name: rows[name] for name in (*told, *([SPLIT_BEFORE] if before else []))},
        **({EVENT_WEIGHT: weights(rows)} if is_weighted(tables) else {}),
        **({SPLIT: given_split(tables, rows)} if settings.splits is not None else {}),
    )
    described = plan.in_rows("user", "item")
    kept = named.drop(*described, *told)
    order = (TIMESTAMP, ROW)
    cleaned = clean(backend, kept, min_interactions=settings.min_interactions, order=order, repeats=settings.repeats)
    split = backend.stage(split_interactions(tables, cleaned.rows, order))
    note_shares(tables, split)
    train = named.semi_join(split.filter(split[SPLIT] == "train"), ROW)
    events = left_join(named.drop(SPLIT) if SPLIT in named.columns else named, split.select(ROW, SPLIT), ROW)
    order_said = f"by column '{tables.time}'" if tables.time else "as in the file: there is no timestamp"
    order_said = f"random by seed {settings.seed}: the file is sorted by item" if is_drawn else order_said

    def counted(count: int) -> dict[str, object]:
        cleaned.note(backend, notes, count)
        if summary is not None:
            return {**summary(num_rows, cleaned), **cleaned.summary(count)}
        invalid = {"invalid_dropped": notes.num_invalid} if notes.num_invalid else {}
        return {"raw_rows": num_rows + notes.num_invalid, **invalid, **cleaned.summary(count), "order": order_said}

    source = Source(
        dataset=dataset,
        rows=split,
        order=order,
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
        decay=decay_of(tables, split),
        unseen_items=settings.unseen_items,
        seen=_seen(tables, tables.rows, split) if _leaves_out(tables, rated=least is not None) else None,
        holds_out=settings.chosen_split != "none",
        before=before,
    )
    spec = interactions.write(
        backend, folder, source, settings, num_negatives=settings.num_negatives, seed=settings.seed, progress=progress
    )
    if not is_drawn:  # events that come later have no place in a drawn order
        keep_raw(folder, tables, split, GrowthRules.of(tables, split, least, dataset, before))
    return spec


def _kept_columns(tables: Tables, plan: FeaturePlan) -> Table:
    """The rows with the columns that something is made from."""
    settings, rows = tables.settings, tables.rows
    named = (
        settings.user,
        settings.item,
        settings.timestamp,
        settings.rating,
        settings.weight,
        settings.event,
        settings.label,
        settings.group,
    )
    wanted = {
        *named,
        settings.splits if isinstance(settings.splits, str) else None,
        FILE_SPLIT,
        WEIGHT,
        SEEN,
        SPLIT_BEFORE,
    }
    wanted |= {*plan.in_rows("user", "item", "context").values()}
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
        events = events.filter(events[SEEN])
    time = {TIMESTAMP: events[tables.time or ROW]} if TIMESTAMP in rows.columns else {}
    given = {SPLIT: words_as_splits(settings.splits, events)} if settings.splits is not None else {}
    named = events.select(
        **{USER: events[settings.user], ITEM: events[settings.item], ROW: events[ROW]}, **time, **given
    )
    cuts: Mapping[str, Literal["user", "all"]] = {"leave_one_out": "user", "time": "all"}
    return with_splits(named, rows, cuts.get(settings.chosen_split))


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
    backend, settings = tables.backend, tables.settings
    rows = without_weightless(tables, tables.rows)
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
    }
    kept = rows.select(
        **{name: rows[column] for name, column in wanted.items() if column is not None},
        **({EVENT_WEIGHT: weights(rows)} if is_weighted(tables) else {}),
        **({SPLIT: given_split(tables, rows)} if settings.splits is not None else {}),
        **{name: rows[column] for name, column in content.items()},
        **{name: rows[name] for name in (*told, *([SPLIT_BEFORE] if before else []))},
    )
    split = split_clicks(tables, kept)
    if before is not None or plan.in_rows("user", "item") or settings.reads_times or _leaves_out(tables, rated=False):
        split = backend.stage(split)  # it is read several times
    note_shares(tables, split)
    train = split.filter(split[SPLIT] == "train")
    names: Mapping[Literal["user", "item"], str] = {"user": USER, "item": ITEM}
    ids = {role: Column(name, "category") for role, name in names.items() if getattr(settings, role) is not None}
    described = _with_described(tables, plan, split) if told else tables
    catalogues = {role: catalogue(role, described, plan, train) for role in ids}
    kept = split.drop(*told, *content)
    kept = _joined(kept, USER, settings.user, described.users, plan.in_file("user"))
    kept = _joined(kept, ITEM, settings.item, described.items, plan.in_file("item"))
    positives = _positives_by_split(tables, kept)
    source = clicks.Source(
        dataset=NAME,
        rows=kept,
        ids=ids,
        raw_names={USER: settings.user, ITEM: settings.item},
        columns={**plan.columns, "context": [*plan.columns["context"], *plan.crosses]},
        users=catalogues.get("user"),
        items=catalogues.get("item"),
        grouped="values" if group is not None else False,
        min_count=settings.min_count,
        missing_values=settings.missing_values,
        missing_by_column=settings.missing_by_column,
        summary={"split": settings.chosen_split, "positives": positives},
        notes=tables.notes,
        timed=dated,
        weighted=is_weighted(tables),
        decay=decay_of(tables, split),
        histories=settings if settings.history is not None else None,
        seed=settings.seed,
        seen=_seen_of_labelled(tables, split),
        before=before,
    )
    spec = clicks.write(backend, folder, source, progress=progress)
    held = tables if copies else replace(tables, rows=_kept_columns(tables, plan))  # copies are equal in all columns
    if not dated:  # times that nothing reads may be text of any form
        held = replace(held, settings=settings.model_copy(update={"timestamp": None}))
    keep_raw(folder, held, split, GrowthRules.of(held, split, None, NAME, before, copies))
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
    counted = fetch(tables.backend, rows.group_by(SPLIT).aggregate(count=rows[LABEL].sum())).to_pydict()
    found = {str(split): int(count or 0) for split, count in zip(counted[SPLIT], counted["count"], strict=True)}
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
