"""Your own interactions: CSV, JSON lines or Parquet whose columns you name; `user_id,item_id,timestamp` is enough.

Without a label each row is something a user did: the last of each user is for test, the last but one for valid (or the
latest of all are), beside drawn negatives; rows may hold what their user did before. With a label (clicked or not) the
rows are taken as given and split by share, time or group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import ibis
import pyarrow as pa
from ibis.expr.types import Column as Values
from ibis.expr.types import Table
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from recspec import splits
from recspec.datasets import clicks, interactions, prepared, raw_table
from recspec.datasets.clicks import GROUP, LABEL
from recspec.datasets.columns import Catalogue, Column, Kind
from recspec.datasets.histories import HistorySettings, UnknownTargets
from recspec.datasets.interactions import ITEM, SERIES, TIMESTAMP, USER, Repeats
from recspec.datasets.notes import Notes
from recspec.datasets.prepared import Prepared, Progress, silent
from recspec.encoding import BucketEncoder
from recspec.errors import DataError, SettingsError, listed, nearest, unknown
from recspec.feature_spec import FeatureSpec
from recspec.tables import ROW, Backend, connect, count_rows, counts_by, fetch, keep_earliest

NAME = "table"

Role = Literal["user", "item", "context"]
Value = TypeVar("Value")
Split = Literal["leave_one_out", "time", "share", "group"]
RESERVED = (ROW, USER, ITEM, LABEL, GROUP, SERIES, TIMESTAMP, splits.SPLIT)
"""Names that features made from other columns bear."""

Cardinality = Annotated[int, Field(ge=2, le=2**31)]
Buckets = Annotated[int, Field(ge=2)] | tuple[float, ...]


def _character(text: object) -> object:
    r"""A separator as a shell gives it: `\t` and `tab` are a tab."""
    return "\t" if text in ("\\t", "tab") else text


Separator = Annotated[str, BeforeValidator(_character), Field(min_length=1, max_length=1)]
TimeFormat = Annotated[str, AfterValidator(raw_table.check_time_format)]
Encoding = Annotated[str, AfterValidator(raw_table.check_encoding)]


class Settings(HistorySettings):
    """Which columns hold what, and how the rows are split."""

    user: str | None = Field("user_id", description="column of the user's id; null where there is none")
    item: str | None = Field("item_id", description="column of the item's id; null where there is none")
    timestamp: str | None = Field("timestamp", description="column of the time; the rows' order in the file when null")
    label: str | None = Field(None, description="column of what is to be predicted, 0 or 1; every row is a 1 when null")
    positive_from: float | None = Field(None, description="the label is 1 where its column is at least this, else 0")
    split: Split | None = Field(None, description="leave_one_out without a label and share with one when null")
    valid: float = Field(0.1, ge=0, lt=1, description="share of rows or groups for valid, unless leave_one_out")
    test: float = Field(0.1, ge=0, lt=1, description="share of rows or groups for test, unless leave_one_out")
    group: str | None = Field(None, description="column whose equal values are ranked together; the user when null")
    user_features: tuple[str, ...] = Field((), description="further columns about the user")
    item_features: tuple[str, ...] = Field((), description="further columns about the item")
    context_features: tuple[str, ...] = Field((), description="further columns about the moment")
    numeric: tuple[str, ...] = Field((), description="features taken as numbers whatever their type")
    categorical: tuple[str, ...] = Field((), description="features taken as categories whatever their type")
    lists: tuple[str, ...] = Field((), description="features with several values a row")
    list_separator: str = Field("|", min_length=1, description="between the values of a list that is text")
    hashed: dict[str, Cardinality] = Field({}, description="categories and lists to hash: {column: cardinality}")
    buckets: dict[str, Buckets] = Field(
        {}, description="numbers to cut into a feature NAME_bucket too: {column: [boundaries]} or {column: how many}"
    )
    crosses: tuple[tuple[str, ...], ...] = Field((), description="with a label: features hashed together, a_x_b")
    cross_cardinality: Cardinality = Field(10_000, description="ids of each cross")
    cut_offs: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="the k that `evaluate` takes where none is named, such as [12]"
    )
    users: str | None = Field(None, description="file with one row a user, beside the rows; joined by the user's id")
    items: str | None = Field(None, description="file with one row an item, beside the rows; joined by the item's id")
    title: str | None = Field(None, description="column of the items' file that people read; `title` when null")
    separator: Separator | None = Field(
        None, description="between the columns of a text file; a comma when null, in .tsv a tab, in sequences blanks"
    )
    encoding: Encoding | None = Field(None, description="of text files, such as cp1252; utf-8 when null")
    layout: raw_table.Layout = Field(
        "rows", description="sequences: a line is a user and then their items, the earliest first, without a header"
    )
    files: tuple[str, ...] = Field((), description="files of the folder RAW to read, in this order; all when none")
    rows: int | None = Field(None, ge=1, description="only the first so many rows are read; all when null")
    types: dict[str, raw_table.Type] = Field(
        {}, description="types of columns, string, int64 or float64: {column: type}; ids are text otherwise"
    )
    missing_values: tuple[Annotated[str, Field(coerce_numbers_to_str=True)], ...] = Field(
        (),
        description="texts that stand for a missing value in any column; in numbers n/a, NA, null, none, nan, - "
        "and ? do too",
    )
    time_format: TimeFormat | None = Field(
        None,
        description="how times are written, such as %m/%d/%Y, or seconds, milliseconds, microseconds or "
        "nanoseconds since 1970; numbers as they are and dates of ISO 8601 when null",
    )
    repeats: Repeats = Field(
        "first", description="without a label: first keeps the earliest of a user's rows of one item, keep all of them"
    )
    min_count: int = Field(1, ge=1, description="with a label: values in fewer train rows become unknown")
    min_interactions: int = Field(1, ge=1, description="without a label: users with fewer items are left out")
    num_negatives: int = Field(100, ge=0, description="without a label: candidates beside the positive in each series")
    unknown_targets: UnknownTargets = Field(
        "drop",
        description="split time without a label: drop, or keep with id 0, held out rows whose item is not in train",
    )
    seed: int = Field(1, ge=0, description="of the negatives, and of splits by share and group")

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        split = self.chosen_split
        if split == "leave_one_out" and self.label is not None:
            raise ValueError("split leave_one_out takes every row as a 1, so goes without a label; pick another split")
        if split in ("share", "group") and self.label is None:
            raise ValueError(f"split {split} needs a label; name its column, or use leave_one_out or time")
        if self.label is None and (self.user is None or self.item is None):
            raise ValueError(f"split {split} needs the columns of user and item, where there is no label")
        if self.label is not None and (given := self._of_interactions()):
            raise ValueError(f"{' and '.join(given)}: of rows without a label; leave out the label or these settings")
        if split == "time" and self.timestamp is None:
            raise ValueError("split time needs the column of the timestamp")
        if split == "group" and self.group is None and self.user is None:
            raise ValueError("split group needs the column of the group, or of the user")
        for name, boundaries in self.buckets.items():
            if not isinstance(boundaries, int) and list(boundaries) != sorted(set(boundaries)):
                raise ValueError(f"the boundaries of '{name}' must rise, found {list(boundaries)}")
        if self.crosses and self.label is None:
            raise ValueError("crosses need a label; name its column, or leave crosses out")
        for cross in self.crosses:
            if len(set(cross)) < max(2, len(cross)) or self.crosses.count(cross) > 1:
                raise ValueError(f"a cross is of two different features or more and named once, found {list(cross)}")
        if self.layout == "sequences" and (given := self._of_rows()):
            raise ValueError(f"layout sequences has users and items alone; leave out {' and '.join(given)}")
        if self.valid + self.test >= 1:
            raise ValueError(f"valid and test take {self.valid + self.test:g} of the rows; leave some for train")
        return self

    def _of_interactions(self) -> list[str]:
        """Settings given that rows with a label have no use for."""
        names = (*HistorySettings.model_fields, "unknown_targets", "repeats")
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    def _of_rows(self) -> list[str]:
        """Settings given that a layout without further columns has no use for."""
        names = ("label", "context_features", "group")
        given = [name for name in names if getattr(self, name)]
        return [*given, *(["split"] if self.chosen_split == "time" else [])]

    @property
    def reading(self) -> raw_table.Reading:
        """How raw files are read."""
        names = raw_table.Reading.__dataclass_fields__
        return raw_table.Reading(**{name: getattr(self, name) for name in names})

    @property
    def chosen_split(self) -> Split:
        """The split asked for, or the one that fits."""
        return self.split or ("leave_one_out" if self.label is None else "share")

    @property
    def features(self) -> tuple[str, ...]:
        """All further columns."""
        return (*self.user_features, *self.item_features, *self.context_features)

    @property
    def by_role(self) -> Mapping[Role, tuple[str, ...]]:
        """Likewise by what they are about."""
        return {"user": self.user_features, "item": self.item_features, "context": self.context_features}


def prepare(
    raw: Path,
    out: Path,
    settings: Settings,
    *,
    engine: str = "duckdb",
    memory_limit: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
    force: bool = False,
) -> Prepared:
    """Prepare a file of CSV, JSON lines or Parquet, or a folder of such files.

    Raises:
        DataError: if the file lacks a column, a line is malformed, or `out` holds something else.
        SettingsError: if settings name columns that are nowhere.
    """
    paths = _paths(raw, settings)
    sides = {side: _side_path(raw, side, name) for side, name in (("users", settings.users), ("items", settings.items))}
    job = prepared.Job(NAME, settings, [*paths, *(path for path in sides.values() if path)], out)

    def build(folder: Path) -> FeatureSpec:
        with connect(engine, folder=folder / "work", memory_limit=memory_limit, threads=threads) as backend:
            progress("reading rows", 0, None)
            notes = Notes()
            tables = _read(backend, folder / "work", paths, sides, settings, notes)
            plan = _plan(tables, settings, raw)
            if not count_rows(backend, tables.rows):
                raise DataError(f"{raw}: holds no row, a header at most; expected one row at least")
            _note_places(plan, {"user": settings.users, "item": settings.items}, notes)
            written = _write_interactions if settings.label is None else _write_clicks
            spec = written(backend, folder, tables, plan, settings, notes, progress)
            further = {"cut_offs": list(settings.cut_offs)} if settings.cut_offs else {}
            return spec.replace(metadata={**spec.metadata, **further})

    return prepared.run(job, build, force=force)


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tables:
    """The rows, and what is known of users and items."""

    rows: Table
    users: Table | None
    items: Table | None

    def of(self, role: Role) -> Table | None:
        """The file of users or items."""
        return {"user": self.users, "item": self.items}.get(role)


def _paths(raw: Path, settings: Settings) -> list[Path]:
    if raw.is_dir():
        return raw_table.find(raw, {name for name in (settings.users, settings.items) if name}, settings.files)
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
) -> _Tables:
    reading, roles = settings.reading, _roles(settings)
    beside = replace(reading, rows=None, layout="rows", time_format=None)
    held: dict[str, Table] = {}
    for side, key, names in (
        ("users", settings.user, settings.user_features),
        ("items", settings.item, settings.item_features),
    ):
        path = sides[side]
        if path is not None:
            own = raw_table.Roles(
                ids=(key,) if key else (),
                texts=_with_plain_names(roles.texts, side),
                categories=_with_plain_names(roles.categories, side),
                numbers=_with_plain_names(roles.numbers, side),
                features=_with_plain_names(names, side),
                shown=True,
            )
            held[side] = raw_table.read(backend, [path], own, beside, notes, work)
    elsewhere = {name for side, names in (("users", settings.user_features), ("items", settings.item_features))
                 if side in held for name in names if name in held[side].columns}  # fmt: skip
    features = [name for name in settings.features if name not in elsewhere or name in settings.context_features]
    rows = raw_table.read(backend, paths, replace(roles, features=features), reading, notes, work)
    timed = settings.timestamp is not None and settings.timestamp in rows.columns
    others = {name for name in (settings.user, settings.item, settings.group) if name is not None}
    if settings.label is None and settings.timestamp and not timed and settings.layout == "rows":
        raw_table.note_untimed(backend, rows, settings.timestamp, others, notes)
    if timed and settings.timestamp and roles.time and "timestamp" not in settings.model_fields_set:
        raw_table.note_doubtful_time(backend, rows, settings.timestamp, others, notes)
    return _Tables(rows, held.get("users"), held.get("items"))


def _with_plain_names(given: Collection[str], side: str) -> set[str]:
    """Names of features, and the names that their columns may have in a file of users or items."""
    return {*given, *(name.removesuffix(f"_{side.removesuffix('s')}") for name in given)}


def _roles(settings: Settings) -> raw_table.Roles:
    """What the settings ask of the rows' columns."""
    needs_time = (
        settings.label is None
        or settings.chosen_split == "time"
        or "timestamp" in settings.model_fields_set
        or bool(settings.user_features or settings.item_features)
    )
    return raw_table.Roles(
        ids=tuple(name for name in (settings.user, settings.item) if name is not None),
        texts={*settings.lists, *settings.hashed, *([settings.group] if settings.group else [])},
        categories={*settings.categorical},
        numbers={*settings.numeric},
        features=settings.features,
        time=settings.timestamp if needs_time else None,
        label=settings.label,
        positive_from=settings.positive_from,
    )


# --- which column is what --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where the raw column of a feature stands."""

    role: Role
    asked: str
    """The name that the settings say."""
    name: str
    """The feature's name."""
    column: str
    in_file: bool
    """Whether it is a column of the users' or items' file, and not of the rows."""


@dataclass(frozen=True)
class _Plan:
    """The features, by role and by where their raw column stands."""

    user: Sequence[Column]
    item: Sequence[Column]
    context: Sequence[Column]
    crosses: Sequence[Column]
    places: Sequence[_Place]

    def in_rows(self, *roles: Role) -> dict[str, str]:
        """Features made from columns of the rows: {feature: column}."""
        return {place.name: place.column for place in self.places if place.role in roles and not place.in_file}

    def in_file(self, role: Role) -> dict[str, str]:
        """Features made from columns of the users' or items' file, likewise."""
        return {place.name: place.column for place in self.places if place.role == role and place.in_file}

    @property
    def taken(self) -> set[str]:
        """Names of features, which no column for people may bear."""
        columns = (*self.user, *self.item, *self.context, *self.crosses)
        return {*RESERVED, *(column.name for column in columns)}


def _plan(tables: _Tables, settings: Settings, raw: Path) -> _Plan:
    """Settle where each feature stands and what it is.

    Raises:
        SettingsError: naming every column that is nowhere.
    """
    problems = _named_columns_problems(tables, settings)
    places = _places(tables, settings, problems)
    settings = _by_feature(settings, places)
    found: dict[Role, list[Column]] = {"user": [], "item": [], "context": []}
    for place in places:
        table = tables.of(place.role) if place.in_file else tables.rows
        assert table is not None
        called = None if place.in_file or place.name == place.column else place.column
        found[place.role] += [
            replace(column, called=called) for column in _columns(place.name, table[place.column], settings, problems)
        ]
    for name in (*settings.numeric, *settings.categorical, *settings.lists):
        if name not in settings.features:
            hint = nearest(name, settings.features)
            problems.append(f"'{name}' is set as numeric, categorical or list, but is no feature{hint}")
    problems += [
        f"setting '{setting}': {_no_feature(name, settings, tables, settings.features)}"
        for setting, named in (("hashed", settings.hashed), ("buckets", settings.buckets))
        for name in named
        if name not in settings.features
    ]
    crosses = _crosses([column for columns in found.values() for column in columns], settings, tables, problems)
    if problems:
        raise SettingsError.of(f"{raw}: settings", problems)
    return _Plan(found["user"], found["item"], found["context"], crosses, places)


def _places(tables: _Tables, settings: Settings, problems: list[str]) -> list[_Place]:
    """Where each feature's column stands, under a name that no other feature and no other column has.

    A column of the users' or items' file goes before one of the rows that is named alike: what belongs to a user or an
    item stands in its file. It gets the suffix `_user` or `_item` then, for in rows to predict the plain name is the
    rows' own column. Names count as alike whatever their case, as engines take them.
    """
    columns = {name for name in tables.rows.columns if name != ROW}
    in_rows = {name.lower() for name in columns}
    places: list[_Place] = []
    for role, names in settings.by_role.items():
        side = tables.of(role)
        of_file = {name for name in side.columns if name != ROW} if side is not None else set()
        for asked in dict.fromkeys(names):
            if asked == getattr(settings, role, None):
                problems.append(
                    f"{role} feature '{asked}' is the {role}'s id, which is a feature already; leave it out"
                )
                continue
            plain = asked.removesuffix(f"_{role}")
            in_file = asked in of_file
            if not in_file and asked not in columns:
                if plain not in of_file or plain.lower() not in {*RESERVED, *in_rows}:
                    problems.append(_place_problem(role, asked, tables.rows, side))
                    continue
                in_file, asked = True, plain
            taken = {*RESERVED, *(place.name.lower() for place in places), *(in_rows if in_file else ())}
            same = (p for p in places if (p.column, p.in_file) == (asked, in_file) and (not in_file or p.role == role))
            twin = next(same, None)
            if twin is not None:
                problems.append(f"feature '{asked}' is named as {twin.role} feature and as {role} feature; leave one")
                continue
            name = asked if asked.lower() not in taken else _free(f"{asked}_{role}", taken)
            places.append(_Place(role, asked, name, asked, in_file))
    return places


def _free(name: str, taken: Iterable[str]) -> str:
    """The name, with a number behind it while it is taken; case doesn't count."""
    lowered = {other.lower() for other in taken}
    numbered = (f"{name}_{number}" for number in count(2))
    return name if name.lower() not in lowered else next(each for each in numbered if each.lower() not in lowered)


def _by_feature(settings: Settings, places: Sequence[_Place]) -> Settings:
    """The settings with each column's name replaced by those of the features made from it."""
    names: dict[str, list[str]] = {}
    for place in places:
        names.setdefault(place.asked, []).append(place.name)
    for place in places:  # a feature's own name means that feature, whatever else is made from a column named so
        names[place.name] = [place.name]

    def all_of(given: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for one in given for name in names.get(one, [one]))

    def table_of(given: Mapping[str, Value]) -> dict[str, Value]:
        return {name: value for one, value in given.items() for name in names.get(one, [one])}

    return settings.model_copy(
        update={
            **{f"{role}_features": tuple(p.name for p in places if p.role == role) for role in settings.by_role},
            **{name: all_of(getattr(settings, name)) for name in ("numeric", "categorical", "lists")},
            "hashed": table_of(settings.hashed),
            "buckets": table_of(settings.buckets),
            "crosses": tuple(all_of(cross) for cross in settings.crosses),
        }
    )


def _note_places(plan: _Plan, files: Mapping[str, str | None], notes: Notes) -> None:
    for place in plan.places:
        if place.in_file and place.name != place.column:
            notes.changed.append(
                f"{place.role} feature '{place.name}' is the column '{place.column}' of {files[place.role]}, because "
                f"the plain name is another column's"
            )
        elif place.name != place.column:
            notes.changed.append(
                f"{place.role} feature '{place.name}' is the column '{place.column}' of the rows, whose plain name is "
                "taken"
            )


def _no_feature(name: str, settings: Settings, tables: _Tables, known: Sequence[str]) -> str:
    """Why a name is none of the features that may stand in its place."""
    for role, identity in (("user", settings.user), ("item", settings.item)):
        if name == identity:
            return f"'{name}' is the {role}'s id, which has a vocabulary; leave it out"
    if name in tables.rows.columns and name != ROW:
        return f"'{name}' is a column, but no feature; add it to context_features"
    return unknown("feature", name, known)


def _crosses(features: Sequence[Column], settings: Settings, tables: _Tables, problems: list[str]) -> list[Column]:
    """The crosses asked for; each counts as context, for it may change with the moment."""
    ids = {settings.user: USER, settings.item: ITEM}
    by_name = {column.name: column for column in features}
    known = [*(name for name in ids if name), *by_name]
    found = []
    for cross in settings.crosses:
        for name in cross:
            column = by_name.get(name)
            if name not in known:
                problems.append(f"setting 'crosses': {_no_feature(name, settings, tables, known)}")
            elif column is not None and (column.kind in ("number", "list") or column.is_list):
                what, do = ("a list", "leave it out") if column.kind != "number" else ("a number", "cross its bucket")
                problems.append(f"setting 'crosses': '{name}' is {what}, which can't be crossed; {do}")
        crossed = [ids.get(name, name) for name in cross]
        found.append(Column("_x_".join(cross), "cross", size=settings.cross_cardinality, crossed=crossed))
    named = [column.name for column in (*features, *found)]
    doubled = [name for name in dict.fromkeys(named) if named.count(name) > 1]
    problems += [f"two features would be named '{name}'; rename a column" for name in doubled
                 if settings.features.count(name) < 2]  # fmt: skip
    return found


def _named_columns_problems(tables: _Tables, settings: Settings) -> list[str]:
    named = {"user": settings.user, "item": settings.item, "label": settings.label, "group": settings.group}
    if "timestamp" in settings.model_fields_set or settings.chosen_split == "time":
        named["timestamp"] = settings.timestamp
    columns = [name for name in tables.rows.columns if name != ROW]
    problems = [
        f"setting '{setting}': no column '{name}'{nearest(name, columns)}; found {listed(columns)}"
        for setting, name in named.items()
        if name is not None and name not in columns
    ]
    for setting, table, key in (("users", tables.users, settings.user), ("items", tables.items, settings.item)):
        if table is not None and (key is None or key not in table.columns):
            problems.append(f"setting '{setting}': the file has no column '{key}' to join by; "
                            f"found {listed(name for name in table.columns if name != ROW)}")  # fmt: skip
    doubled = [(role, name) for role, names in settings.by_role.items() for name in names if names.count(name) > 1]
    return problems + [f"{role} feature '{name}' is named twice" for role, name in dict.fromkeys(doubled)]


def _place_problem(role: str, name: str, rows: Table, side: Table | None) -> str:
    columns = [column for table in (rows, side) if table is not None for column in table.columns if column != ROW]
    return f"{role} feature '{name}' is no column{nearest(name, columns)}; found {listed(dict.fromkeys(columns))}"


def _columns(name: str, values: Values, settings: Settings, problems: list[str]) -> list[Column]:
    """A raw column as the feature of its name, and as buckets where they are asked for."""
    column = _column(name, values, settings, problems)
    if name not in settings.buckets:
        return [column]
    if column.kind != "number":
        problems.append(f"feature '{name}' is no number, so it can't be cut into buckets; set it as numeric")
    bucket = settings.buckets[name]
    if isinstance(bucket, int):
        return [column, Column(f"{name}_bucket", "bucket", raw=name, size=bucket)]
    encoder = BucketEncoder(column=name, boundaries=bucket)
    return [column, Column(f"{name}_bucket", "bucket", raw=name, encoder=encoder)]


def _column(name: str, values: Values, settings: Settings, problems: list[str]) -> Column:
    kind = values.type()
    chosen: Kind
    if name in settings.lists or kind.is_array():
        chosen = "list"
    elif name in settings.categorical or name in settings.hashed or (kind.is_string() and name not in settings.numeric):
        chosen = "category"
    else:
        chosen = "number"
    if chosen == "number" and not kind.is_numeric():
        problems.append(f"feature '{name}' holds {kind}, not numbers; take it out of `numeric`, or out of the features")
    if chosen == "category" and kind.is_floating() and name not in settings.hashed:
        problems.append(f"feature '{name}' holds fractions; a category must be text or whole numbers")
    if chosen == "list" and not (kind.is_array() or kind.is_string()):
        problems.append(f"feature '{name}' holds {kind}; a list must be text with a separator, or a Parquet list")
    separator = settings.list_separator if chosen == "list" and kind.is_string() else None
    if name in settings.hashed:
        return Column(name, "hash", separator=separator, size=settings.hashed[name], is_list=chosen == "list")
    return Column(name, chosen, separator=separator)


# --- interactions ----------------------------------------------------------------------------------------------------


def _write_interactions(
    backend: Backend, folder: Path, tables: _Tables, plan: _Plan, settings: Settings, notes: Notes, progress: Progress
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
    cleaned = interactions.clean(
        backend, kept, min_interactions=settings.min_interactions, order=order, repeats=settings.repeats
    )
    if settings.chosen_split == "time":
        split = splits.by_time(cleaned.rows, time=TIMESTAMP, valid=settings.valid, test=settings.test)
    else:
        split = splits.leave_one_out(cleaned.rows, by=USER, order=order)
    if plan.in_rows("user", "item"):  # which rows are for training is asked several times
        split = backend.stage(split)
    train = named.semi_join(split.filter(split[splits.SPLIT] == "train"), ROW)
    catalogues = _Catalogues(backend, tables, plan, settings, notes, train, labelled=False)

    def summary(count: int) -> dict[str, object]:
        cleaned.note(backend, notes, count)
        return {"raw_rows": num_rows, **cleaned.summary(count), "order": _order_said(timed, settings)}

    source = interactions.Source(
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
        backend,
        folder,
        source,
        num_negatives=settings.num_negatives,
        seed=settings.seed,
        progress=progress,
        histories=settings.histories,
        train_negatives=settings.train_negatives,
        negatives=settings.negatives,
        reject_seen=settings.reject_seen,
    )


def _order_said(timed: bool, settings: Settings) -> str:
    return f"by column '{settings.timestamp}'" if timed else "as in the file: there is no timestamp"


def _has_time(rows: Table, settings: Settings) -> bool:
    return settings.timestamp is not None and settings.timestamp in rows.columns


@dataclass(frozen=True)
class _Catalogues:
    """Makes what is known of users and items.

    Args:
        train: Rows that a model may learn from: ids, row, the features in the rows, and the timestamp if there is one.
        labelled: Whether rows keep the values that they were given, whatever the catalogues say.
    """

    backend: Backend
    tables: _Tables
    plan: _Plan
    settings: Settings
    notes: Notes
    train: Table
    labelled: bool

    def of(self, role: Literal["user", "item"]) -> Catalogue | None:
        """The catalogue of a role: the latest values of its features in train, and the columns of its file."""
        name, columns = (USER, self.plan.user) if role == "user" else (ITEM, self.plan.item)
        in_rows = [*self.plan.in_rows(role)]
        latest = self._latest(role, name, in_rows) if in_rows else None
        side, file = self.tables.of(role), getattr(self.settings, f"{role}s")
        if side is None:
            return Catalogue(latest.select([name]), name, columns, latest=latest) if latest is not None else None
        key = getattr(self.settings, role)
        title = self.settings.title if role == "item" else None
        if title is not None and title not in side.columns:
            raise SettingsError(
                f"setting 'title': no column '{title}'{nearest(title, side.columns)} in the items' file"
            )
        table = fetch(self.backend, _one_row_each(self.backend, side, key, self.train[name], file, self.notes))
        features = {feature: table.column(column) for feature, column in self.plan.in_file(role).items()}
        shown = {column: f"\0{column}" for column in side.columns if column not in (key, ROW)}
        arrays = {name: table.column(key), **features, **{new: table.column(old) for old, new in shown.items()}}
        readable = self._readable(role, file, title, [*shown])
        return Catalogue(
            pa.table(arrays),
            name,
            columns,
            {new: shown[old] for new, old in readable.items()},
            file=file,
            latest=latest,
        )

    def _latest(self, role: Role, key: str, names: Sequence[str]) -> pa.Table:
        """The latest values of each user or item, in order of time."""
        order = [TIMESTAMP, ROW] if TIMESTAMP in self.train.columns else [ROW]
        train = self.backend.stage(self.train.select(key, *order, *names))
        self._note_varying(train, role, key, names)
        latest = keep_earliest(train, [key], [ibis.desc(each) for each in order])
        return fetch(self.backend, latest.select(key, *names).order_by(key))

    def _note_varying(self, train: Table, role: Role, key: str, names: Sequence[str]) -> None:
        """Say which features have several values within one user or item: they may belong to the event."""
        each = train.group_by(key).aggregate(**{name: train[name].nunique() for name in names})
        each = self.backend.stage(each)
        for name in names:
            several = each.filter(each[name] > 1)
            found = fetch(self.backend, several.aggregate(count=several.count(), first=several[key].min())).to_pylist()
            if not found[0]["count"]:
                continue
            first = found[0]["first"]
            own = train.filter((train[key] == first) & train[name].notnull())
            values = own.group_by(name).aggregate(_place=own[ROW].min()).order_by("_place").limit(2).select(name)
            one, other = (_shown(value) for value in fetch(self.backend, values).column(name).to_pylist())
            done = (
                f"rows keep their own; what a request leaves out is taken from {role}s.parquet, which has the latest "
                "value of train"
                if self.labelled
                else f"every row has its {role}'s latest value of train; if the value belongs to the event, name the "
                "column in context_features"
            )
            self.notes.changed.append(
                f"{role} feature '{name}' varies within {found[0]['count']:,} of {count_rows(self.backend, each):,} "
                f"{role}s, such as {role} '{first}' ({one} and {other}); {done}"
            )

    def _readable(self, role: Role, file: str, title: str | None, columns: Sequence[str]) -> dict[str, str]:
        """Columns for people: name in the catalogue -> column of the file. A feature's name gets the suffix `_text`."""
        readable = {"title": title} if title is not None else {}
        own = {*self.plan.in_file(role)}
        for column in columns:
            if column == title:
                continue
            taken = {*self.plan.taken, *readable}
            name = column if column.lower() not in {each.lower() for each in taken} else _free(f"{column}_text", taken)
            if name != column and column not in own:
                self.notes.changed.append(
                    f"column '{column}' of {file} is '{name}' in the prepared {role}s.parquet, because the plain name "
                    "is taken"
                )
            readable[name] = column
        return readable


def _shown(value: object) -> str:
    """A value as a note shows it."""
    text = str(value)
    return f"'{text}'" if len(text) <= 40 else f"'{text[:40]}...'"


def _as_ids(values: Values, like: Values) -> Values:
    """Ids of a file with the type that they have in the rows; null where the rows can't hold such an id."""
    kind = like.type()
    if values.type() == kind:
        return values
    return values.cast("string") if kind.is_string() else values.try_cast(kind)


def _one_row_each(backend: Backend, side: Table, key: str, like: Values, file: str, notes: Notes) -> Table:
    """A file of users or items whose ids have the type of those in the rows.

    Raises:
        DataError: if it names an id twice.
    """
    without = count_rows(backend, side.filter(side[key].isnull()))
    if without:
        notes.dropped.append(f"{without:,} rows of {file}: they have no '{key}'")
    side = side.mutate(**{key: _as_ids(side[key], like)})
    strange = count_rows(backend, side.filter(side[key].isnull())) - without
    if strange:
        notes.dropped.append(f"{strange:,} rows of {file}: no row has an id such as theirs, which is no whole number")
    side = side.filter(side[key].notnull())
    counted = counts_by(side, key)
    twice = fetch(backend, counted.filter(counted["rows"] > 1).order_by(key).limit(5))
    if twice.num_rows:
        names = listed(map(str, twice.column(key).to_pylist()))
        raise DataError(f"{file}: names {names} more than once in column '{key}'; expected one row each")
    return side.order_by(ROW)


# --- clicks ----------------------------------------------------------------------------------------------------------


def _write_clicks(
    backend: Backend, folder: Path, tables: _Tables, plan: _Plan, settings: Settings, notes: Notes, progress: Progress
) -> FeatureSpec:
    rows = tables.rows
    assert settings.label is not None
    group = settings.group or settings.user
    wanted: dict[str, Values] = {ROW: rows[ROW], LABEL: rows[settings.label]}
    if group is not None:
        wanted[GROUP] = rows[group]
    if settings.user is not None:
        wanted[USER] = rows[settings.user]
    if settings.item is not None:
        wanted[ITEM] = rows[settings.item]
    in_rows = plan.in_rows("user", "item", "context")
    dated = settings.chosen_split == "time" or (_has_time(rows, settings) and bool(plan.in_rows("user", "item")))
    if dated and settings.timestamp is not None:
        wanted[TIMESTAMP] = rows[settings.timestamp]
    kept = rows.select(**wanted, **{name: rows[column] for name, column in in_rows.items()})
    split = _split(kept, settings)
    if plan.in_rows("user", "item"):  # which rows are for training is asked several times
        split = backend.stage(split)
    catalogues = _Catalogues(
        backend, tables, plan, settings, notes, split.filter(split[splits.SPLIT] == "train"), labelled=True
    )
    users = catalogues.of("user") if settings.user is not None else None
    items = catalogues.of("item") if settings.item is not None else None
    kept = split.drop(TIMESTAMP) if TIMESTAMP in split.columns else split
    kept = _joined(kept, USER, settings.user, tables.users, plan.in_file("user"))
    kept = _joined(kept, ITEM, settings.item, tables.items, plan.in_file("item"))
    ids: dict[Literal["user", "item"], Column] = {}
    if settings.user is not None:
        ids["user"] = Column(USER, "category")
    if settings.item is not None:
        ids["item"] = Column(ITEM, "category")
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
    """The rows with the features that stand in a file of users or items."""
    if side is None or key is None or not wanted:
        return rows
    ids = _free(f"{name}_of_file", {*rows.columns, *wanted})
    found = side.select(**{ids: _as_ids(side[key], rows[name])}, **{new: side[old] for new, old in wanted.items()})
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
