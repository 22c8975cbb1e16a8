"""Features of your own table: their columns, kinds and vectors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from ibis.expr.types import Column as Values
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import DataError, SettingsError, listed, nearest, shortened, unknown
from recspec.data.encoding import BucketEncoder, ClockEncoder, raw_values, renumbered, vectors_of
from recspec.data.prepare import (
    EVENT_WEIGHT,
    FILE_SPLIT,
    GROUP,
    IS_TARGET,
    ITEM,
    LABEL,
    LARGEST,
    PER_SECOND,
    ROW,
    SEEN,
    SERIES,
    SPLIT,
    SPLIT_BEFORE,
    TIMESTAMP,
    USER,
    WEIGHT,
    Backend,
    Column,
    Kind,
    Notes,
    fetch,
    figures,
    splits,
)
from recspec.datasets.table_settings import Role, Settings
from recspec.feature_spec import OUTPUTS

CLOCK_CODES = dict.fromkeys(("%Y", "%m", "%d", "%H", "%M", "%S", "%f")).keys()
"""Codes of formats whose texts make features of time: those that no language changes."""
KINDS = ("numeric", "categorical", "lists", "vectors", "text")  # settings that name features by what they hold
OURS = (ROW, FILE_SPLIT, WEIGHT, SEEN, IS_TARGET, SPLIT_BEFORE)  # columns of rows that no file has
CONTENT, MIXED = "__first_row__", "__mixed__"  # the first row with the same values; a random order
RESERVED = (ROW, USER, ITEM, LABEL, GROUP, SERIES, TIMESTAMP, EVENT_WEIGHT, SPLIT, CONTENT, MIXED)
"""Names of features with a fixed meaning."""
LONGEST_NAME = 200  # bytes of UTF-8; file systems take 255, of which the name of an unfinished file needs some


@dataclass(frozen=True)
class Tables:
    """The rows, and the files of users and items."""

    backend: Backend
    settings: Settings
    notes: Notes
    rows: Table
    users: Table | None
    items: Table | None
    window: splits.Window | None = None  # of test, if the rows are split by windows of time

    def of(self, role: Role) -> Table | None:
        return {"user": self.users, "item": self.items}.get(role)

    @property
    def time(self) -> str | None:
        """The column of the time, if the rows have it."""
        return self.settings.timestamp if self.settings.timestamp in self.rows.columns else None


@dataclass(frozen=True)
class _Place:
    """A feature and its column; `asked` is its name in the settings."""

    role: Role
    asked: str
    name: str
    column: str
    in_file: bool  # whether the column is in the users' or items' file and not in the rows


@dataclass(frozen=True)
class FeaturePlan:
    """The features, by role, and their raw columns."""

    columns: Mapping[Role, Sequence[Column]]
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
        return {*RESERVED, *(column.name for column in chain(*self.columns.values(), self.crosses))}

    def note_places(self, tables: Tables) -> None:
        """Note the features whose name differs from their column's."""
        for place in self.places:
            if place.name == place.column:
                continue
            why = "of the rows, whose plain name is taken"
            if place.in_file:
                why = f"of {getattr(tables.settings, f'{place.role}s')}, because the plain name is another column's"
            tables.notes.changed.append(f"{place.role} feature '{place.name}' is the column '{place.column}' {why}")


def plan_features(tables: Tables, raw: Path) -> FeaturePlan:
    """Find the column and the kind of each feature."""
    problems = _named_columns_problems(tables)
    tables = _with_texts(tables, problems)
    places = _places(tables, problems)
    settings = _by_feature(tables.settings, places)
    found: dict[Role, list[Column]] = {"user": [], "item": [], "context": []}
    for place in places:
        table = tables.of(place.role) if place.in_file else tables.rows
        assert table is not None
        called = None if place.in_file or place.name == place.column else place.column
        vectors = _text(place, table, settings, problems) or _vectors(place, table, settings, tables, raw, problems)
        columns = [vectors] if vectors else _columns(place, table[place.column], settings, problems)
        found[place.role] += [replace(column, called=called) for column in columns]
    if settings.label is not None and tables.time is not None:
        taken = {*tables.rows.columns, *(column.name for column in chain(*found.values()))}
        found["context"] += _clocks(tables, taken, problems)
    for name in (*settings.numeric, *settings.categorical, *settings.lists, *settings.vectors):
        if name not in settings.features:
            hint = nearest(name, settings.features)
            problems.append(f"'{name}' is set as numeric, categorical, list or vector, but is no feature{hint}")
    for setting in ("hashed", "buckets"):
        problems += [
            f"setting '{setting}': {_no_feature(name, settings, tables, settings.features)}"
            for name in getattr(settings, setting)
            if name not in settings.features
        ]
    crosses = _crosses([*chain(*found.values())], settings, tables, problems)
    SettingsError.refuse(f"{raw}: settings", problems)
    return FeaturePlan(found, crosses, places)


def _clocks(tables: Tables, taken: Iterable[str], problems: list[str]) -> list[Column]:
    """Features of the hour and the weekday of each row's time, as `time_features` asks; else a note that it could."""
    settings, name = tables.settings, str(tables.time)
    times, declared = tables.rows[name], settings.declared.get(name)
    form = settings.time_format or (declared and declared.format) or tables.notes.time_format
    form = None if form in PER_SECOND else form
    wrong = ""
    if not times.type().is_numeric():
        wrong = "its values are no times"
    elif declared is not None and declared.zone is not None:
        wrong = "it declares a zone, and they are of UTC"
    elif form is not None and not {*re.findall("%.", form)} <= CLOCK_CODES:
        wrong = (
            f"it is written as {form}; expected ISO 8601, numbers since 1970, or a format of {' '.join(CLOCK_CODES)}"
        )
    else:
        ends = figures(tables.backend, tables.rows, {"least": times.min(), "most": times.max()})
        if np.isnan(raw_values.seconds_by_size(np.array([*ends.values()], np.float64))).any():
            wrong = f"its numbers, from {ends['least']:g} to {ends['most']:g}, are no times since 1970"
    if not settings.time_features:
        if not wrong:
            tables.notes.inferred.append(
                f"'{name}' makes no feature; --set 'time_features=[hour, weekday]' makes two, and rows to predict must "
                "then hold the time"
            )
        return []
    if wrong:
        problems.append(f"setting 'time_features': made of the times of '{name}': {wrong}")
    parts = dict.fromkeys(settings.time_features)
    return [
        Column(
            free_name(f"{name}_{part}", taken),
            "clock",
            raw=TIMESTAMP,
            called=name,
            encoder=ClockEncoder(column=name, part=part, format=form),
        )
        for part in parts
    ]


def _places(tables: Tables, problems: list[str]) -> list[_Place]:
    """Find each feature's column and give the feature a unique name.

    A column of the users' or items' file takes precedence over a column of the rows with the same name. Its feature
    then has the suffix `_user` or `_item`, because in rows to predict the plain name is the rows' own column. Names
    are compared without case, as engines do.
    """
    settings = tables.settings
    columns = {*tables.rows.columns} - {*OURS}
    in_rows = {name.lower() for name in columns}
    places: list[_Place] = []
    for role, names in settings.by_role.items():
        side = tables.of(role)
        of_file = {*side.columns} - {*OURS} if side is not None else set()
        for asked in dict.fromkeys(names):
            if asked == getattr(settings, role, None):
                own_id = f"the {role}'s id, which is a feature already; leave it out"
                problems.append(f"{role} feature '{asked}' is {own_id}")
                continue
            if asked in OUTPUTS:
                instead = f"rename the column, or leave it out by setting '{role}_features'"
                problems.append(f"{role} feature '{asked}': an output of every model has this name; {instead}")
            if len(asked.encode()) > LONGEST_NAME or not {"", ".", ".."}.isdisjoint(asked.split("/")):
                expected = f"expected one of at most {LONGEST_NAME} bytes, without '..' or empty parts between slashes"
                problems.append(f"{role} feature '{shortened(asked)}': its name is that of a file; {expected}")
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

    def table_of(given: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for one, value in given.items() for name in names.get(one, [one])}

    update: dict[str, object] = {name: all_of(getattr(settings, name)) for name in KINDS}
    for setting, kind in (("lists", "list"), ("vectors", "vector")):
        found = (p.name for p in places if (each := settings.declared.get(p.column)) and each.type == kind)
        update[setting] = tuple(dict.fromkeys((*all_of(getattr(settings, setting)), *found)))
    update |= {f"{role}_features": tuple(p.name for p in places if p.role == role) for role in settings.by_role}
    update |= {"hashed": table_of(settings.hashed), "buckets": table_of(settings.buckets)}
    return settings.model_copy(update={**update, "crosses": tuple(map(all_of, settings.crosses))})


def _no_feature(name: str, settings: Settings, tables: Tables, known: Sequence[str]) -> str:
    """The reason why a name is not a known feature."""
    for role, identity in (("user", settings.user), ("item", settings.item)):
        if name == identity:
            return f"'{name}' is the {role}'s id, which has a vocabulary; leave it out"
    if name in tables.rows.columns and name not in OURS:
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
            elif column is not None and (
                column.kind in ("number", "list", "vector", "text", "clock") or column.is_list
            ):
                what, do = {"vector": "a vector", "clock": "made of a time"}.get(column.kind, "a list"), "leave it out"
                if column.kind == "number":
                    what, do = "a number", "cross its bucket"
                problems.append(f"setting 'crosses': '{name}' is {what}, which can't be crossed; {do}")
        crossed = [ids.get(name, name) for name in cross]
        found.append(Column("_x_".join(cross), "cross", size=settings.cross_cardinality, crossed=crossed))
    named = [*settings.other_labels, *(column.name for column in (*features, *found))]
    doubled = [name for name in dict.fromkeys(named) if named.count(name) > 1]
    problems += [
        f"two columns would be named '{name}'; rename one" for name in doubled if settings.features.count(name) < 2
    ]
    return found


def _named_columns_problems(tables: Tables) -> list[str]:
    settings = tables.settings
    named = {"user": settings.user, "item": settings.item, "label": settings.label, "group": settings.group}
    named |= {"rating": settings.rating, "splits": settings.splits if isinstance(settings.splits, str) else None}
    named |= {"weight": settings.weight, "event": settings.event}
    named |= {f"other_labels.{place}": name for place, name in enumerate(settings.other_labels)}
    if "timestamp" in settings.model_fields_set or settings.chosen_split == "time" or settings.reads_times:
        named["timestamp"] = settings.timestamp
    columns = [name for name in tables.rows.columns if name not in OURS]
    problems = [
        f"setting '{setting}': no column '{name}'{nearest(name, columns)}; found {listed(columns)}"
        for setting, name in named.items()
        if name is not None and name not in columns
    ]
    problems += [
        f"setting 'other_labels': prepared rows have a column '{name}' of their own; rename this one"
        for name in settings.other_labels
        if name.lower() in RESERVED
    ]
    for setting, table, key in (("users", tables.users, settings.user), ("items", tables.items, settings.item)):
        if table is not None and (key is None or key not in table.columns):
            problems.append(
                f"setting '{setting}': the file has no column '{key}' to join by; "
                f"found {listed(name for name in table.columns if name not in OURS)}; name its own, such "
                f"as --set '{setting}={{file: {getattr(settings, setting)}, key: COLUMN}}'"
            )
    doubled = [(role, name) for role, names in settings.by_role.items() for name in names if names.count(name) > 1]
    return problems + [f"{role} feature '{name}' is named twice" for role, name in dict.fromkeys(doubled)]


def _place_problem(role: str, name: str, rows: Table, side: Table | None) -> str:
    columns = [column for table in (rows, side) if table is not None for column in table.columns if column not in OURS]
    return f"{role} feature '{name}' is no column{nearest(name, columns)}; found {listed(dict.fromkeys(columns))}"


def _columns(place: _Place, values: Values, settings: Settings, problems: list[str]) -> list[Column]:
    name, declared = place.name, settings.declared.get(place.column)
    column = _column(name, values, settings, problems, (declared and declared.separator) or settings.list_separator)
    if name not in settings.buckets:
        return [column]
    if column.kind != "number":
        problems.append(f"feature '{name}' is no number, so it can't be cut into buckets; set it as numeric")
    bucket = settings.buckets[name]
    if isinstance(bucket, int):
        return [column, Column(f"{name}_bucket", "bucket", raw=name, size=bucket)]
    encoder = BucketEncoder(column=name, boundaries=bucket)
    return [column, Column(f"{name}_bucket", "bucket", raw=name, encoder=encoder)]


def _with_texts(tables: Tables, problems: list[str]) -> Tables:
    """Name the columns of `text` as features, of the file or rows that hold them, unless a role names them."""
    settings = tables.settings
    roles: dict[Role, tuple[str, ...]] = {**settings.by_role}
    columns: dict[Role, set[str]] = {"context": {*tables.rows.columns} - {*OURS}}
    for part in ("user", "item"):
        side = tables.of(part)
        columns[part] = {*side.columns} - {*OURS} if side is not None else set()
    for name in settings.text:
        if name in settings.features:
            continue
        order: tuple[Role, ...] = ("item", "user", "context")
        role = next((role for role in order if name in columns[role]), None)
        if role is None:
            problems.append(f"setting 'text': {unknown('column', name, sorted(set().union(*columns.values())))}")
        else:
            roles[role] = (*roles[role], name)
    update = {f"{role}_features": names for role, names in roles.items()}
    return replace(tables, settings=settings.model_copy(update=update))


def _text(place: _Place, table: Table, settings: Settings, problems: list[str]) -> Column | None:
    """The column of the vectors of a feature's texts."""
    if place.name not in settings.text:
        return None
    if not table[place.column].type().is_string():
        problems.append(f"feature '{place.name}' holds {table[place.column].type()}, not texts; take it out of `text`")
    given = [kind for kind in (*KINDS, "hashed", "buckets") if kind != "text" and place.name in getattr(settings, kind)]
    if given:
        problems.append(f"feature '{place.name}' is in `text` and in {listed(given)}; leave it in one")
    return Column(f"{place.name}_vector", "text", raw=place.name, size=settings.text_dim)


def _vectors(
    place: _Place, table: Table, settings: Settings, tables: Tables, raw: Path, problems: list[str]
) -> Column | None:
    """The column of a feature that holds vectors."""
    name, declared = place.name, place.name in settings.vectors
    if name in (*settings.lists, *settings.categorical, *settings.hashed):
        if declared:
            problems.append(f"feature '{name}' is set as a vector and as something else; leave one")
        return None
    if not table[place.column].type().is_array():
        if declared:
            problems.append(f"feature '{name}' holds {table[place.column].type()}, not lists of numbers")
        return None
    where = str(raw if not place.in_file else getattr(settings, f"{place.role}s"))
    found = find_vectors(tables.backend, table, place.column, where, declared=declared)
    if found is None:
        return None
    if not declared:
        tables.notes.inferred.append(
            f"'{name}': vectors of {found.size} numbers, all scaled by one factor "
            f"(lists=[{place.asked}] takes their values as categories)"
        )
    if found.missing:
        lack = f"{found.missing:,} of {found.num_rows:,} rows {'has' if found.missing == 1 else 'have'} no vector"
        tables.notes.changed.append(f"'{name}': {lack}, such as row {found.first_missing:,}; zeros are taken")
    if name in settings.buckets:
        problems.append(f"feature '{name}' is a vector, so it can't be cut into buckets; leave it out")
    return Column(name, "vector", size=found.size)


def _column(name: str, values: Values, settings: Settings, problems: list[str], list_separator: str) -> Column:
    kind = values.type()
    chosen: Kind
    if name in settings.lists or kind.is_array():
        chosen = "list"
    elif name in settings.categorical or name in settings.hashed or (kind.is_string() and name not in settings.numeric):
        chosen = "category"
    else:
        chosen = "number"
    if chosen == "number" and not kind.is_numeric():
        remedy = (
            "take it out of `numeric`, or out of the features"
            if name in settings.numeric
            else ("take it out of the features, or write its values as columns of numbers or text")
        )
        problems.append(f"feature '{name}' holds {kind}, not numbers; {remedy}")
    if chosen == "category" and kind.is_floating() and name not in settings.hashed:
        problems.append(
            f"feature '{name}' holds {kind}; a category must be text or whole numbers, which pandas keeps "
            "beside missing ones as Int64"
        )
    if chosen == "list" and not (kind.is_array() or kind.is_string()):
        problems.append(f"feature '{name}' holds {kind}; a list must be text with a separator, or a Parquet list")
    if chosen == "list" and kind.is_array() and kind.value_type.is_nested():
        problems.append(f"feature '{name}' holds {kind}; a list must hold texts or numbers; leave it out")
    separator = list_separator if chosen == "list" and kind.is_string() else None
    if name in settings.hashed:
        return Column(name, "hash", separator=separator, size=settings.hashed[name], is_list=chosen == "list")
    free = chosen == "number" and settings.label is not None and name not in settings.numeric
    return Column(name, chosen, separator=separator, log1p=None if free else False, limited=free)


GLANCED = 1_000  # rows with a value that decide whether a column holds vectors, and their size


@dataclass(frozen=True)
class Vectors:
    """A column of vectors."""

    size: int
    num_rows: int
    missing: int
    first_missing: int  # the number of the first row without a vector, from 1; 0 if there is none


def find_vectors(backend: Backend, table: Table, column: str, where: str, *, declared: bool) -> Vectors | None:
    """The size of a column's vectors, all rows checked; None if it holds other lists.

    Unless `declared`, lists are vectors if they hold numbers, some of them with a fraction, and most have one size of
    2 or more.

    Raises:
        DataError: naming the first row that does not hold as many finite numbers as most rows.
    """
    held = table[column].type()
    if not declared and not (held.value_type.is_string() or held.value_type.is_floating()):
        return None
    glance = fetch(backend, table.filter(table[column].notnull()).order_by(ROW).limit(GLANCED).select(column))
    size = _size([value for value in glance.column(column).to_pylist() if value], declared=declared)
    if size is None:
        if declared:
            raise DataError(f"{where}, column '{column}': no row holds a number; expected vectors")
        return None
    return _checked(backend, table, column, size, where)


def _size(values: list[list[object]], *, declared: bool) -> int | None:
    if not values:
        return None
    if declared:
        return Counter(map(len, values)).most_common(1)[0][0]
    read = [[_number(each) for each in value] for value in values]
    numbers = [row for row in read if None not in row]
    size, count = Counter(map(len, numbers)).most_common(1)[0] if numbers else (0, 0)
    if size < 2 or 2 * count <= len(values):
        return None
    return size if any(not each.is_integer() for row in numbers for each in row if each is not None) else None


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _checked(backend: Backend, table: Table, column: str, size: int, where: str) -> Vectors:
    """Read every row. Raises `DataError` for the first that holds no such vector."""
    num_rows = 0
    absent: list[NDArray[np.int64]] = []
    problems: list[tuple[int, str]] = []
    for batch in backend.batches(table.select(ROW, column)):
        rows = batch.column(0).to_numpy(zero_copy_only=False)
        num_rows += len(rows)
        try:
            vectors = vectors_of(batch.column(1), size)
            absent.append(rows[np.isnan(vectors).all(axis=1)])
            problems += [_too_large(vectors, rows, place) for place in _large(vectors)[:1]]
        except DataError as error:
            problems.append(_placed(error.problems[0], rows))
    if problems:
        advice = f"correct it, or take the values as categories with lists=[{column}]"
        raise DataError(f"{where}, column '{column}': {min(problems)[1]}; {advice}")
    missing = np.concatenate(absent) if absent else np.zeros(0, np.int64)
    return Vectors(size, num_rows, len(missing), int(missing.min()) + 1 if len(missing) else 0)


def _large(vectors: NDArray[np.float64]) -> NDArray[np.int64]:
    """The places of vectors with a number that float32 can't hold."""
    return np.flatnonzero((np.abs(vectors) > LARGEST).any(axis=1))


def _too_large(vectors: NDArray[np.float64], rows: NDArray[np.int64], place: int) -> tuple[int, str]:
    most = float(np.abs(vectors[place]).max())
    row = int(rows[place])
    return row, f"row {row + 1:,} holds a number as large as {most:g} in its vector; expected 3.4e38 at most"


def _placed(problem: str, rows: NDArray[np.int64]) -> tuple[int, str]:
    """The row of a problem in a block, and the problem with its row in the file."""
    found = [-1]

    def name(place: int) -> str:
        found[0] = int(rows[place])
        return f"row {found[0] + 1:,}"

    said = renumbered(problem, name)
    return found[0], said
