"""Catalogues of the users and items of your own table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import ibis
import pyarrow as pa
from ibis.expr.types import Column as Values
from ibis.expr.types import Table

from recspec.datasets.table_features import FeaturePlan, Tables, free_name
from recspec.datasets.table_settings import Role, Settings
from recspec.errors import DataError, SettingsError, listed, nearest
from recspec.prepare import (
    ITEM,
    ROW,
    TIMESTAMP,
    USER,
    Backend,
    Catalogue,
    Notes,
    count_rows,
    counts_by,
    fetch,
    keep_earliest,
)


@dataclass(frozen=True)
class Catalogues:
    """Makes the catalogues of users and items.

    Args:
        train: Rows of train: ids, row, the features in the rows, and the timestamp if there is one.
        labelled: Whether rows keep their own values of features, whatever the catalogues hold.
    """

    backend: Backend
    tables: Tables
    plan: FeaturePlan
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
        order = [TIMESTAMP, ROW] if TIMESTAMP in self.train.columns else [ROW]
        train = self.backend.stage(self.train.select(key, *order, *names))
        self._note_varying(train, role, key, names)
        latest = keep_earliest(train, [key], [ibis.desc(each) for each in order])
        return fetch(self.backend, latest.select(key, *names).order_by(key))

    def _note_varying(self, train: Table, role: Role, key: str, names: Sequence[str]) -> None:
        """Note features with several values within one user or item, which may belong to the event."""
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
        """Columns for people: name in the catalogue -> column of the file; a feature's name has the suffix `_text`."""
        readable = {"title": title} if title is not None else {}
        own = {*self.plan.in_file(role)}
        for column in columns:
            if column == title:
                continue
            taken = {*self.plan.taken, *readable}
            name = (
                column if column.lower() not in {each.lower() for each in taken} else free_name(f"{column}_text", taken)
            )
            if name != column and column not in own:
                self.notes.changed.append(
                    f"column '{column}' of {file} is '{name}' in the prepared {role}s.parquet, because the plain name "
                    "is taken"
                )
            readable[name] = column
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


def _one_row_each(backend: Backend, side: Table, key: str, like: Values, file: str, notes: Notes) -> Table:
    """A file of users or items, with ids of the same type as in the rows.

    Raises:
        DataError: if it names an id twice.
    """
    without = count_rows(backend, side.filter(side[key].isnull()))
    if without:
        notes.dropped.append(f"{without:,} rows of {file}: they have no '{key}'")
    side = side.mutate(**{key: as_ids(side[key], like)})
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
