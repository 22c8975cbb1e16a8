"""Features of your own table: their columns, kinds, catalogues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

import ibis
import pyarrow as pa
from ibis.expr.types import Column as Values
from ibis.expr.types import Table

from recspec.base.errors import DataError, SettingsError, how_many, listed, nearest, unknown
from recspec.data.encoding import BucketEncoder
from recspec.data.prepare import (
    AS_IN_FILE,
    DESCRIBES,
    EVENT_WEIGHT,
    FILE_SPLIT,
    GROUP,
    ITEM,
    LABEL,
    ROW,
    SEEN,
    SERIES,
    SPLIT,
    SPLIT_BEFORE,
    TIMESTAMP,
    USER,
    WEIGHT,
    Backend,
    Catalogue,
    Column,
    Kind,
    Notes,
    count_rows,
    counts_by,
    fetch,
)
from recspec.datasets.table_settings import Role, Settings
from recspec.datasets.table_vectors import find_vectors
from recspec.feature_spec import OUTPUTS

KINDS = ("numeric", "categorical", "lists", "vectors", "text")  # settings that name features by what they hold
OURS = (ROW, FILE_SPLIT, WEIGHT, SEEN, SPLIT_BEFORE)  # columns of rows that no file has
CONTENT, MIXED = "__first_row__", "__mixed__"  # the first row with the same values; a random order
RESERVED = (
    ROW,
    USER,
    ITEM,
    LABEL,
    GROUP,
    SERIES,
    TIMESTAMP,
    EVENT_WEIGHT,
    SPLIT,
    CONTENT,
    MIXED,
)  # names of features with a fixed meaning


@dataclass(frozen=True)
class Tables:
    """The rows, and the files of users and items."""

    backend: Backend
    settings: Settings
    notes: Notes
    rows: Table
    users: Table | None
    items: Table | None

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
    if problems:
        raise SettingsError.of(f"{raw}: settings", problems)
    return FeaturePlan(found, crosses, places)


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
            elif column is not None and (column.kind in ("number", "list", "vector", "text") or column.is_list):
                what, do = (f"a {column.kind}" if column.kind == "vector" else "a list"), "leave it out"
                if column.kind == "number":
                    what, do = "a number", "cross its bucket"
                problems.append(f"setting 'crosses': '{name}' is {what}, which can't be crossed; {do}")
        crossed = [ids.get(name, name) for name in cross]
        found.append(Column("_x_".join(cross), "cross", size=settings.cross_cardinality, crossed=crossed))
    named = [column.name for column in (*features, *found)]
    doubled = [name for name in dict.fromkeys(named) if named.count(name) > 1]
    problems += [
        f"two features would be named '{name}'; rename a column"
        for name in doubled
        if settings.features.count(name) < 2
    ]
    return found


def _named_columns_problems(tables: Tables) -> list[str]:
    settings = tables.settings
    named = {"user": settings.user, "item": settings.item, "label": settings.label, "group": settings.group}
    named |= {"rating": settings.rating, "splits": settings.splits if isinstance(settings.splits, str) else None}
    named |= {"weight": settings.weight, "event": settings.event}
    if "timestamp" in settings.model_fields_set or settings.chosen_split == "time" or settings.reads_times:
        named["timestamp"] = settings.timestamp
    columns = [name for name in tables.rows.columns if name not in OURS]
    problems = [
        f"setting '{setting}': no column '{name}'{nearest(name, columns)}; found {listed(columns)}"
        for setting, name in named.items()
        if name is not None and name not in columns
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
    each = backend.stage(train.group_by(key).aggregate(**{name: train[name].nunique() for name in names}))
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
        several = each.filter(each[name] > 1)
        found = fetch(backend, several.aggregate(count=several.count(), first=several[key].min())).to_pylist()[0]
        if not found["count"]:
            continue
        own = train.filter((train[key] == found["first"]) & train[name].notnull())
        values = own.group_by(name).aggregate(_place=own[ROW].min()).order_by("_place").limit(2).select(name)
        one, other = (_shown(value) for value in fetch(backend, values).column(name).to_pylist())
        tables.notes.changed.append(
            f"{role} feature '{name}' varies within {found['count']:,} of {count_rows(backend, each):,} {role}s, such "
            f"as {role} '{found['first']}' ({one} and {other}); {done}"
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
