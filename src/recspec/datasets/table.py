"""Your own table: CSV, JSON lines, Parquet or sequences; `user_id,item_id,timestamp` is enough.

Without a label, each row is an interaction. Each user's last one is for test and the last but one for valid; with split
time, the latest of all are held out. Negatives are drawn beside them, and rows may hold their user's history. With a
label (clicked or not), rows are kept as given and split by share, time or group. Splits may also be ready-made. With
split none, every row is train: for the final model, whose settings were chosen on other splits of the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ibis.expr.types import Table

from recspec.base.errors import DataError, SettingsError, listed, nearest, unknown
from recspec.data.prepare import (
    FILE_SPLIT,
    ROW,
    SPLITS,
    DeclaredColumn,
    Notes,
    PrepareContext,
    Prepared,
    RawRows,
    Roles,
    count_rows,
    find_raw_files,
    load_columns,
    named_files,
    nearest_file,
    note_doubtful_time,
    note_untimed,
    prepared,
    splits_by_name,
    stage,
    typed,
)
from recspec.datasets.table_checks import warnings
from recspec.datasets.table_features import OURS, Tables, plan_features
from recspec.datasets.table_roles import infer_settings, with_features
from recspec.datasets.table_settings import Settings as Settings
from recspec.datasets.table_settings import SideFile
from recspec.datasets.table_write import NAME, kept_columns, write_interactions, write_labelled
from recspec.feature_spec import FeatureSpec

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
            plan.note_places(tables)
            notes.warnings += warnings(rows, tables, asked)
            if tables.settings.label is None:
                tables = replace(tables, rows=backend.stage(kept_columns(tables, plan)))  # they are read several times
            if not count_rows(backend, tables.rows):
                raise DataError(f"{raw}: holds no row, a header at most; expected one row at least")
            if tables.settings.label is None:
                spec = write_interactions(folder, tables, plan, context.progress)
            else:
                spec = write_labelled(folder, tables, plan, context.progress)
            return spec.replace(metadata={**spec.metadata, **_told(tables.settings)})

    return prepared.run(context, NAME, settings, [*paths, *sides.values()], build)


def _with_types(settings: Settings, file: Path | None, raw: Path) -> Settings:
    """The settings with the types of the file that they name, if they name one."""
    if file is None:
        return settings
    return settings.rebuilt(raw, {"types": load_columns(file)})


def _told(settings: Settings) -> dict[str, object]:
    """Metadata for training and evaluation."""
    told: dict[str, object] = {"split": settings.chosen_split}
    if settings.target is not None:
        told |= {"target": list(settings.target), "seen_types": list(settings.seen_types or ())}
    if settings.items is not None and settings.title is not None:
        told["item_columns"] = {settings.title: "title"}
    for column, texts in settings.stock.items() if settings.items is not None else ():
        told["stock"] = {"column": column, **({"values": list(texts)} if texts else {})}
    if isinstance(settings.items, SideFile) and settings.items.key is not None:
        told["items_key"] = settings.items.key
    if settings.decimal == "comma":
        told["decimal"] = "comma"
    own = settings.items.decimal if isinstance(settings.items, SideFile) else None
    if settings.items is not None and (own or settings.decimal) == "comma":
        told["items_decimal"] = "comma"
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
        named = {split: [path.name for path in files] for split, files in found.items()}
        return [path for files in found.values() for path in files], settings.rebuilt(raw, {"splits": named})
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
    settings, taken = infer_settings(asked, raw_rows, raw)
    settings = settings.model_copy(update={"layout": raw_rows.layout})
    reading, roles = settings.reading, roles_of(settings)
    types = dict(settings.declared)
    beside = replace(reading, rows=None, layout="rows", time_format=None, columns=(), splits=())
    held: dict[str, Table] = {}
    present = [*raw_rows.table.columns]
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
        mentioned = frozenset({*own.ids, *own.features, *settings.stock, *([settings.title] if settings.title else [])})
        otherwise = {"mentioned": mentioned, "key": keys[side], **asked.of_side(side)}
        own_reading = replace(beside, **otherwise)  # type: ignore[arg-type]
        found = stage(backend, [path], own.ids, own_reading, notes, work)
        types |= {name: each for name, each in found.reading.types.items() if name not in types}
        found = _with_key(found, keys[side], side)
        present += found.raw.columns
        held[side] = typed(_without_unnamed(found, own, settings) if side == "users" else found, own)
    settings = _declaring(settings, types, raw)
    known = [name for name in dict.fromkeys(present) if name not in OURS]
    absent = [f"no column '{name}'{nearest(name, known)}" for name in settings.declared if name not in known]
    if absent:
        raise SettingsError.of("setting 'types'", [f"{what}; found {listed(known)}" for what in absent])
    elsewhere = {name for side, table in held.items() for name in named[side] if name in table.columns}
    features = [name for name in settings.features if name not in elsewhere or name in settings.context_features]
    rows = typed(raw_rows, replace(roles, features=features))
    if settings.label is not None:  # values are read several times, and making them costs regular expressions
        rows = backend.stage(rows)
    tables = Tables(backend, settings, notes, rows, held.get("users"), held.get("items"))
    tables = with_features(tables, taken, raw)
    settings = tables.settings
    others = {name for name in (settings.user, settings.item, settings.group) if name is not None} | {FILE_SPLIT}
    if settings.timestamp and not tables.time and settings.label is None and not raw_rows.is_sequences:
        note_untimed(backend, rows, settings.timestamp, others, notes)
    chosen = "timestamp" not in asked.model_fields_set and settings.timestamp not in settings.declared
    if tables.time and roles.time and chosen:
        note_doubtful_time(backend, rows, tables.time, others, notes)
    return tables


def _without_unnamed(users: RawRows, roles: Roles, settings: Settings) -> RawRows:
    """A file of users without the columns that no setting names, which may be personal."""
    known = [name for name in users.raw.columns if name not in OURS]
    if absent := [name for name in settings.user_columns if name not in known]:
        raise SettingsError(f"setting 'user_columns': {unknown('column', absent, known)}")
    named = {*roles.ids, *roles.features, *settings.text, *settings.user_columns}
    left_out = [name for name in known if name not in named]
    if left_out:
        users.notes.dropped.append(
            f"columns {listed(left_out)} of {Path(users.where).name}: no setting names them, so they are not copied "
            "(user_features=[...] takes them as features, user_columns=[...] keeps them for display)"
        )
    return replace(users, raw=users.raw.drop(*left_out)) if left_out else users


def _declaring(settings: Settings, types: Mapping[str, DeclaredColumn], raw: Path) -> Settings:
    """The settings with the types that the layouts of files declare."""
    if types.items() <= settings.declared.items():
        return settings
    return settings.rebuilt(raw, {"types": dict(types)})


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
        other_labels=settings.other_labels,
        positive_from=settings.positive_from,
        positive=settings.positive or (),
        cut={*settings.buckets},
        weights=settings.weighting,
    )
