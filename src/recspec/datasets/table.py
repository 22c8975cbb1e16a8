"""Your own interactions: CSV, JSON lines or Parquet with columns that you name; `user_id,item_id,timestamp` is enough.

Without a label, each row is an interaction. The last of each user is for test and the last but one for valid, or the
latest of all are; negatives are drawn beside them, and rows may hold their user's history. With a label (clicked or
not), the rows are kept as given and split by share, time or group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ibis.expr.types import Table

from recspec.datasets.table_catalogues import Catalogues, as_ids
from recspec.datasets.table_features import FeaturePlan, Tables, free_name, note_places, plan_features
from recspec.datasets.table_settings import Settings as Settings
from recspec.errors import DataError, SettingsError, nearest
from recspec.prepare import (
    GROUP,
    ITEM,
    LABEL,
    ROW,
    SPLIT,
    TIMESTAMP,
    USER,
    Backend,
    Column,
    Notes,
    PrepareContext,
    Prepared,
    Progress,
    Roles,
    Source,
    clean,
    clicks,
    count_rows,
    fetch,
    find_raw_files,
    interactions,
    note_doubtful_time,
    note_untimed,
    prepared,
    read_raw_files,
    splits,
)
from recspec.spec import FeatureSpec

NAME = "table"


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare a file of CSV, JSON lines or Parquet, or a folder of such files.

    Raises:
        DataError: if the file lacks a column, a line is malformed, or `out` holds something else.
        SettingsError: if settings name columns that do not exist.
    """
    raw = context.raw
    paths = _paths(raw, settings)
    sides = {side: _side_path(raw, side, name) for side, name in (("users", settings.users), ("items", settings.items))}
    inputs = [*paths, *(path for path in sides.values() if path)]

    def build(folder: Path) -> FeatureSpec:
        with context.connect(folder / "work") as backend:
            context.progress("reading rows", 0, None)
            notes = Notes()
            tables = _read(backend, folder / "work", paths, sides, settings, notes)
            plan = plan_features(tables, settings, raw)
            if not count_rows(backend, tables.rows):
                raise DataError(f"{raw}: holds no row, a header at most; expected one row at least")
            note_places(plan, {"user": settings.users, "item": settings.items}, notes)
            written = _write_interactions if settings.label is None else _write_clicks
            spec = written(backend, folder, tables, plan, settings, notes, context.progress)
            further = {"cut_offs": list(settings.cut_offs)} if settings.cut_offs else {}
            return spec.replace(metadata={**spec.metadata, **further})

    return prepared.run(context, NAME, settings, inputs, build)


# --- files -----------------------------------------------------------------------------------------------------------


def _paths(raw: Path, settings: Settings) -> list[Path]:
    if raw.is_dir():
        return find_raw_files(raw, {name for name in (settings.users, settings.items) if name}, settings.files)
    if not raw.is_file():
        known = [found.name for found in raw.parent.iterdir()] if raw.parent.is_dir() else []
        raise DataError(f"{raw}: no such file or folder{nearest(raw.name, known)}; expected CSV, JSON lines or Parquet")
    if settings.files:
        raise SettingsError(f"setting 'files': {raw} is a file; name its folder, {raw.parent}")
    return [raw]


def _side_path(raw: Path, side: str, name: str | None) -> Path | None:
    if name is None:
        return None
    path = (raw if raw.is_dir() else raw.parent) / name
    if not path.is_file():
        known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        raise SettingsError(f"setting '{side}': {path}: no such file{nearest(path.name, known)}")
    return path


def _read(
    backend: Backend,
    work: Path,
    paths: Sequence[Path],
    sides: Mapping[str, Path | None],
    settings: Settings,
    notes: Notes,
) -> Tables:
    reading, roles = settings.reading, _roles(settings)
    beside = replace(reading, rows=None, layout="rows", time_format=None)
    held: dict[str, Table] = {}
    for side, key, names in (
        ("users", settings.user, settings.user_features),
        ("items", settings.item, settings.item_features),
    ):
        path = sides[side]
        if path is not None:
            own = Roles(
                ids=(key,) if key else (),
                texts=_with_plain_names(roles.texts, side),
                categories=_with_plain_names(roles.categories, side),
                numbers=_with_plain_names(roles.numbers, side),
                features=_with_plain_names(names, side),
                shown=True,
            )
            held[side] = read_raw_files(backend, [path], own, beside, notes, work)
    elsewhere = {name for side, names in (("users", settings.user_features), ("items", settings.item_features))
                 if side in held for name in names if name in held[side].columns}  # fmt: skip
    features = [name for name in settings.features if name not in elsewhere or name in settings.context_features]
    rows = read_raw_files(backend, paths, replace(roles, features=features), reading, notes, work)
    timed = settings.timestamp is not None and settings.timestamp in rows.columns
    others = {name for name in (settings.user, settings.item, settings.group) if name is not None}
    if settings.label is None and settings.timestamp and not timed and settings.layout == "rows":
        note_untimed(backend, rows, settings.timestamp, others, notes)
    if timed and settings.timestamp and roles.time and "timestamp" not in settings.model_fields_set:
        note_doubtful_time(backend, rows, settings.timestamp, others, notes)
    return Tables(rows, held.get("users"), held.get("items"))


def _with_plain_names(given: Collection[str], side: str) -> set[str]:
    """Names of features, and the names that their columns may have in a file of users or items."""
    return {*given, *(name.removesuffix(f"_{side.removesuffix('s')}") for name in given)}


def _roles(settings: Settings) -> Roles:
    needs_time = (
        settings.label is None
        or settings.chosen_split == "time"
        or "timestamp" in settings.model_fields_set
        or bool(settings.user_features or settings.item_features)
    )
    return Roles(
        ids=tuple(name for name in (settings.user, settings.item) if name is not None),
        texts={*settings.lists, *settings.hashed, *([settings.group] if settings.group else [])},
        categories={*settings.categorical},
        numbers={*settings.numeric},
        features=settings.features,
        time=settings.timestamp if needs_time else None,
        label=settings.label,
        positive_from=settings.positive_from,
    )


# --- interactions ----------------------------------------------------------------------------------------------------


def _write_interactions(
    backend: Backend,
    folder: Path,
    tables: Tables,
    plan: FeaturePlan,
    settings: Settings,
    notes: Notes,
    progress: Progress,
) -> FeatureSpec:
    assert settings.user is not None
    assert settings.item is not None
    rows = tables.rows
    num_rows = count_rows(backend, rows)
    timed = _has_time(rows, settings)
    seconds = rows[settings.timestamp] if timed and settings.timestamp else rows[ROW]
    named = rows.select(
        **{USER: rows[settings.user], ITEM: rows[settings.item], TIMESTAMP: seconds, ROW: rows[ROW]},
        **{name: rows[column] for name, column in plan.in_rows("user", "item", "context").items()},
    )
    kept = named.drop(*plan.in_rows("user", "item"))
    order = (TIMESTAMP, ROW)
    cleaned = clean(backend, kept, min_interactions=settings.min_interactions, order=order, repeats=settings.repeats)
    if settings.chosen_split == "time":
        split = splits.by_time(cleaned.rows, time=TIMESTAMP, valid=settings.valid, test=settings.test)
    else:
        split = splits.leave_one_out(cleaned.rows, by=USER, order=order)
    if plan.in_rows("user", "item"):  # train is read several times
        split = backend.stage(split)
    train = named.semi_join(split.filter(split[SPLIT] == "train"), ROW)
    catalogues = Catalogues(backend, tables, plan, settings, notes, train, labelled=False)

    def summary(count: int) -> dict[str, object]:
        cleaned.note(backend, notes, count)
        return {"raw_rows": num_rows, **cleaned.summary(count), "order": _order_said(timed, settings)}

    source = Source(
        dataset=NAME,
        rows=split,
        order=order,
        users=catalogues.of("user"),
        items=catalogues.of("item"),
        context=plan.context,
        raw_names={USER: settings.user, ITEM: settings.item},
        summary=summary,
        missing_values=settings.missing_values,
        vocabularies="train" if settings.chosen_split == "time" else "all",
        unknown_targets=settings.unknown_targets,
        timed=timed,
        notes=notes,
    )
    return interactions.write(
        backend, folder, source, settings, num_negatives=settings.num_negatives, seed=settings.seed, progress=progress
    )


def _order_said(timed: bool, settings: Settings) -> str:
    return f"by column '{settings.timestamp}'" if timed else "as in the file: there is no timestamp"


def _has_time(rows: Table, settings: Settings) -> bool:
    return settings.timestamp is not None and settings.timestamp in rows.columns


# --- clicks ----------------------------------------------------------------------------------------------------------


def _write_clicks(
    backend: Backend,
    folder: Path,
    tables: Tables,
    plan: FeaturePlan,
    settings: Settings,
    notes: Notes,
    progress: Progress,
) -> FeatureSpec:
    rows = tables.rows
    assert settings.label is not None
    group = settings.group or settings.user
    dated = settings.chosen_split == "time" or (_has_time(rows, settings) and bool(plan.in_rows("user", "item")))
    wanted = {
        ROW: ROW, LABEL: settings.label, GROUP: group, USER: settings.user, ITEM: settings.item,
        TIMESTAMP: settings.timestamp if dated else None, **plan.in_rows("user", "item", "context"),
    }  # fmt: skip
    kept = rows.select(**{name: rows[column] for name, column in wanted.items() if column is not None})
    split = _split(kept, settings)
    if plan.in_rows("user", "item"):  # train is read several times
        split = backend.stage(split)
    catalogues = Catalogues(
        backend, tables, plan, settings, notes, split.filter(split[SPLIT] == "train"), labelled=True
    )
    users = catalogues.of("user") if settings.user is not None else None
    items = catalogues.of("item") if settings.item is not None else None
    kept = split.drop(TIMESTAMP) if TIMESTAMP in split.columns else split
    kept = _joined(kept, USER, settings.user, tables.users, plan.in_file("user"))
    kept = _joined(kept, ITEM, settings.item, tables.items, plan.in_file("item"))
    names: dict[Literal["user", "item"], str] = {"user": USER, "item": ITEM}
    ids = {role: Column(name, "category") for role, name in names.items() if getattr(settings, role) is not None}
    source = clicks.Source(
        dataset=NAME,
        rows=kept,
        ids=ids,
        columns={"user": plan.user, "item": plan.item, "context": [*plan.context, *plan.crosses]},
        users=users,
        items=items,
        raw_names={USER: settings.user, ITEM: settings.item},
        grouped="values" if group is not None else False,
        min_count=settings.min_count,
        missing_values=settings.missing_values,
        summary={"split": settings.chosen_split, "positives": _positives(backend, kept)},
        notes=notes,
    )
    return clicks.write(backend, folder, source, progress=progress)


def _joined(rows: Table, name: str, key: str | None, side: Table | None, wanted: Mapping[str, str]) -> Table:
    if side is None or key is None or not wanted:
        return rows
    ids = free_name(f"{name}_of_file", {*rows.columns, *wanted})
    found = side.select(**{ids: as_ids(side[key], rows[name])}, **{new: side[old] for new, old in wanted.items()})
    return rows.left_join(found, rows[name] == found[ids]).drop(ids)


def _split(rows: Table, settings: Settings) -> Table:
    shares = {"valid": settings.valid, "test": settings.test}
    if settings.chosen_split == "time":
        return splits.by_time(rows, time=TIMESTAMP, **shares)
    if settings.chosen_split == "group":
        return splits.by_group(rows, group=GROUP, seed=settings.seed, **shares)
    return splits.by_share(rows, row=ROW, seed=settings.seed, **shares)


def _positives(backend: Backend, rows: Table) -> int:
    return int(fetch(backend, rows.aggregate(count=rows[LABEL].sum())).column("count")[0].as_py() or 0)
