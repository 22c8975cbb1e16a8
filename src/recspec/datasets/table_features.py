"""Features of your own table: which column each is made from, and its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TypeVar

from ibis.expr.types import Column as Values
from ibis.expr.types import Table

from recspec.datasets.table_settings import Role, Settings
from recspec.encoding import BucketEncoder
from recspec.errors import SettingsError, listed, nearest, unknown
from recspec.prepare import GROUP, ITEM, LABEL, ROW, SERIES, SPLIT, TIMESTAMP, USER, Column, Kind, Notes

RESERVED = (ROW, USER, ITEM, LABEL, GROUP, SERIES, TIMESTAMP, SPLIT)
"""Names of features with a fixed meaning."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Tables:
    """The rows, and the files of users and items."""

    rows: Table
    users: Table | None
    items: Table | None

    def of(self, role: Role) -> Table | None:
        """The file of users or items."""
        return {"user": self.users, "item": self.items}.get(role)


@dataclass(frozen=True)
class _Place:
    role: Role
    asked: str
    """The name in the settings."""
    name: str
    """The feature's name."""
    column: str
    in_file: bool
    """Whether the column is in the users' or items' file and not in the rows."""


@dataclass(frozen=True)
class FeaturePlan:
    """The features, by role, and their raw columns."""

    user: Sequence[Column]
    item: Sequence[Column]
    context: Sequence[Column]
    crosses: Sequence[Column]
    places: Sequence[_Place]

    def in_rows(self, *roles: Role) -> dict[str, str]:
        """Features made from columns of the rows: {feature: column}."""
        return {place.name: place.column for place in self.places if place.role in roles and not place.in_file}

    def in_file(self, role: Role) -> dict[str, str]:
        """Features made from columns of the users' or items' file: {feature: column}."""
        return {place.name: place.column for place in self.places if place.role == role and place.in_file}

    @property
    def taken(self) -> set[str]:
        """Names of features, which no column for people may have."""
        columns = (*self.user, *self.item, *self.context, *self.crosses)
        return {*RESERVED, *(column.name for column in columns)}


def plan_features(tables: Tables, settings: Settings, raw: Path) -> FeaturePlan:
    """Find the column and the kind of each feature.

    Raises:
        SettingsError: naming every column that does not exist.
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
    return FeaturePlan(found["user"], found["item"], found["context"], crosses, places)


def _places(tables: Tables, settings: Settings, problems: list[str]) -> list[_Place]:
    """Find each feature's column and give the feature a unique name.

    A column of the users' or items' file takes precedence over a column of the rows with the same name. Its feature
    then has the suffix `_user` or `_item`, because in rows to predict the plain name is the rows' own column. Names
    are compared without case, as engines do.
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
            name = asked if asked.lower() not in taken else free_name(f"{asked}_{role}", taken)
            places.append(_Place(role, asked, name, asked, in_file))
    return places


def free_name(name: str, taken: Iterable[str]) -> str:
    """The name, or the name with a number if it is taken; case is ignored."""
    lowered = {other.lower() for other in taken}
    numbered = (f"{name}_{number}" for number in count(2))
    return name if name.lower() not in lowered else next(each for each in numbered if each.lower() not in lowered)


def _by_feature(settings: Settings, places: Sequence[_Place]) -> Settings:
    """The settings with each column name replaced by the names of its features."""
    names: dict[str, list[str]] = {}
    for place in places:
        names.setdefault(place.asked, []).append(place.name)
    for place in places:  # a feature's own name takes precedence
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


def note_places(plan: FeaturePlan, files: Mapping[str, str | None], notes: Notes) -> None:
    """Note the features whose name differs from their column's."""
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


def _no_feature(name: str, settings: Settings, tables: Tables, known: Sequence[str]) -> str:
    """The reason why a name is not a known feature."""
    for role, identity in (("user", settings.user), ("item", settings.item)):
        if name == identity:
            return f"'{name}' is the {role}'s id, which has a vocabulary; leave it out"
    if name in tables.rows.columns and name != ROW:
        return f"'{name}' is a column, but no feature; add it to context_features"
    return unknown("feature", name, known)


def _crosses(features: Sequence[Column], settings: Settings, tables: Tables, problems: list[str]) -> list[Column]:
    """The crosses; each has the role context, because it may change with the event."""
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


def _named_columns_problems(tables: Tables, settings: Settings) -> list[str]:
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
