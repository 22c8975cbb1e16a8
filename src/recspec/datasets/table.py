"""Your own interactions: CSV, JSON lines or Parquet with columns that you name; `user_id,item_id,timestamp` is enough.

Without a label, each row is an interaction. Each user's last one is for test and the last but one for valid; with split
time, the latest of all are held out. Negatives are drawn beside them, and rows may hold their user's history. With a
label (clicked or not), rows are kept as given and split by share, time or group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ibis.expr.types import Table

from recspec.datasets.table_features import FeaturePlan, Tables, as_ids, catalogue, free_name, plan_features
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
    """Prepare a file of CSV, JSON lines or Parquet, or a folder of such files."""
    raw = context.raw
    paths = _paths(raw, settings)
    sides = {side: _side_path(raw, side, name) for side, name in (("users", settings.users), ("items", settings.items))}

    def build(folder: Path) -> FeatureSpec:
        with context.connect(folder / "work") as backend:
            context.progress("reading rows", 0, None)
            tables = _read(backend, folder / "work", paths, sides, settings)
            plan = plan_features(tables, raw)
            if not count_rows(backend, tables.rows):
                raise DataError(f"{raw}: holds no row, a header at most; expected one row at least")
            plan.note_places(tables)
            written = _write_interactions if settings.label is None else _write_clicks
            spec = written(folder, tables, plan, context.progress)
            further = {"cut_offs": list(settings.cut_offs)} if settings.cut_offs else {}
            return spec.replace(metadata={**spec.metadata, **further})

    return prepared.run(context, NAME, settings, [*paths, *filter(None, sides.values())], build)


# --- files -----------------------------------------------------------------------------------------------------------


def _paths(raw: Path, settings: Settings) -> list[Path]:
    if raw.is_dir():
        return find_raw_files(raw, {name for name in (settings.users, settings.items) if name}, settings.files)
    if not raw.is_file():
        raise DataError(f"{raw}: no such file or folder{_nearest_file(raw)}; expected CSV, JSON lines or Parquet")
    if settings.files:
        raise SettingsError(f"setting 'files': {raw} is a file; name its folder, {raw.parent}")
    return [raw]


def _side_path(raw: Path, side: str, name: str | None) -> Path | None:
    path = (raw if raw.is_dir() else raw.parent) / name if name is not None else None
    if path is not None and not path.is_file():
        raise SettingsError(f"setting '{side}': {path}: no such file{_nearest_file(path)}")
    return path


def _nearest_file(path: Path) -> str:
    return nearest(path.name, [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else [])


def _read(
    backend: Backend, work: Path, paths: Sequence[Path], sides: Mapping[str, Path | None], settings: Settings
) -> Tables:
    reading, roles, notes = settings.reading, _roles(settings), Notes()
    beside = replace(reading, rows=None, layout="rows", time_format=None)
    held: dict[str, Table] = {}
    keys = {"users": settings.user, "items": settings.item}
    named = {"users": settings.user_features, "items": settings.item_features}
    for side, path in sides.items():
        if path is not None:
            own = Roles(
                ids=(key,) if (key := keys[side]) else (),
                texts=_with_plain_names(roles.texts, side),
                categories=_with_plain_names(roles.categories, side),
                numbers=_with_plain_names(roles.numbers, side),
                features=_with_plain_names(named[side], side),
                shown=True,
            )
            held[side] = read_raw_files(backend, [path], own, beside, notes, work)
    elsewhere = {name for side, table in held.items() for name in named[side] if name in table.columns}
    features = [name for name in settings.features if name not in elsewhere or name in settings.context_features]
    rows = read_raw_files(backend, paths, replace(roles, features=features), reading, notes, work)
    tables = Tables(backend, settings, notes, rows, held.get("users"), held.get("items"))
    others = {name for name in (settings.user, settings.item, settings.group) if name is not None}
    if settings.timestamp and not tables.time and settings.label is None and settings.layout == "rows":
        note_untimed(backend, rows, settings.timestamp, others, notes)
    if tables.time and roles.time and "timestamp" not in settings.model_fields_set:
        note_doubtful_time(backend, rows, tables.time, others, notes)
    return tables


def _with_plain_names(given: Collection[str], side: str) -> set[str]:
    """Names of features, and the possible names of their columns in a file of users or items."""
    return {*given, *(name.removesuffix(f"_{side.removesuffix('s')}") for name in given)}


def _roles(settings: Settings) -> Roles:
    needs_time = settings.label is None or settings.chosen_split == "time" or "timestamp" in settings.model_fields_set
    needs_time |= bool(settings.user_features or settings.item_features)
    return Roles(
        ids=tuple(name for name in (settings.user, settings.item) if name is not None),
        texts={*settings.lists, *settings.hashed, *([settings.group] if settings.group else [])},
        categories={*settings.categorical}, numbers={*settings.numeric}, features=settings.features,
        time=settings.timestamp if needs_time else None, label=settings.label, positive_from=settings.positive_from,
    )  # fmt: skip


# --- interactions ----------------------------------------------------------------------------------------------------


def _write_interactions(folder: Path, tables: Tables, plan: FeaturePlan, progress: Progress) -> FeatureSpec:
    backend, settings, notes, rows = tables.backend, tables.settings, tables.notes, tables.rows
    assert settings.user is not None
    assert settings.item is not None
    num_rows = count_rows(backend, rows)
    seconds = rows[tables.time or ROW]
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
    order_said = f"by column '{tables.time}'" if tables.time else "as in the file: there is no timestamp"

    def summary(count: int) -> dict[str, object]:
        cleaned.note(backend, notes, count)
        return {"raw_rows": num_rows, **cleaned.summary(count), "order": order_said}

    source = Source(
        dataset=NAME, rows=split, order=order, timed=tables.time is not None,
        users=catalogue("user", tables, plan, train), items=catalogue("item", tables, plan, train),
        context=plan.columns["context"], raw_names={USER: settings.user, ITEM: settings.item},
        vocabularies="train" if settings.chosen_split == "time" else "all", unknown_targets=settings.unknown_targets,
        missing_values=settings.missing_values, summary=summary, notes=notes,
    )  # fmt: skip
    return interactions.write(
        backend, folder, source, settings, num_negatives=settings.num_negatives, seed=settings.seed, progress=progress
    )


# --- clicks ----------------------------------------------------------------------------------------------------------


def _write_clicks(folder: Path, tables: Tables, plan: FeaturePlan, progress: Progress) -> FeatureSpec:
    backend, settings, rows = tables.backend, tables.settings, tables.rows
    assert settings.label is not None
    group = settings.group or settings.user
    dated = settings.chosen_split == "time" or (tables.time is not None and bool(plan.in_rows("user", "item")))
    wanted = {
        ROW: ROW, LABEL: settings.label, GROUP: group, USER: settings.user, ITEM: settings.item,
        TIMESTAMP: settings.timestamp if dated else None, **plan.in_rows("user", "item", "context"),
    }  # fmt: skip
    kept = rows.select(**{name: rows[column] for name, column in wanted.items() if column is not None})
    split = _split(kept, settings)
    if plan.in_rows("user", "item"):  # train is read several times
        split = backend.stage(split)
    train = split.filter(split[SPLIT] == "train")
    names: Mapping[Literal["user", "item"], str] = {"user": USER, "item": ITEM}
    ids = {role: Column(name, "category") for role, name in names.items() if getattr(settings, role) is not None}
    catalogues = {role: catalogue(role, tables, plan, train) for role in ids}
    kept = split.drop(TIMESTAMP) if TIMESTAMP in split.columns else split
    kept = _joined(kept, USER, settings.user, tables.users, plan.in_file("user"))
    kept = _joined(kept, ITEM, settings.item, tables.items, plan.in_file("item"))
    positives = fetch(backend, kept.aggregate(count=kept[LABEL].sum())).column("count")[0].as_py()
    source = clicks.Source(
        dataset=NAME, rows=kept, ids=ids, raw_names={USER: settings.user, ITEM: settings.item},
        columns={**plan.columns, "context": [*plan.columns["context"], *plan.crosses]},
        users=catalogues.get("user"), items=catalogues.get("item"), grouped="values" if group is not None else False,
        min_count=settings.min_count, missing_values=settings.missing_values,
        summary={"split": settings.chosen_split, "positives": int(positives or 0)}, notes=tables.notes,
    )  # fmt: skip
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
