"""What the columns of your own table are for, where settings leave it open: by their names and their values.

Every choice leaves a note. A setting that was given is never changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import ibis
import pyarrow as pa
from ibis.expr.types import Column as Values
from ibis.expr.types import Table

from recspec.base.config import build
from recspec.base.errors import SettingsError, listed, shortened
from recspec.data.prepare import (
    CODE_NAME,
    FILE_SPLIT,
    LABELS,
    ROW,
    SPLIT_WORDS,
    Backend,
    ColumnRole,
    Notes,
    RawRows,
    column_of,
    columns_like_times,
    columns_of,
    count_rows,
    fetch,
    figures,
)
from recspec.datasets.table_checks import assigned, codes_among, is_label, label_outcomes, label_values, misfit
from recspec.datasets.table_settings import Settings

MOST_VALUES = 1_000  # of numbers that may be codes; pandas writes codes beside a missing one as 5620.0
ROWS_PER_VALUE = 20  # fewest rows per value of a number that may be a code
NUM_BUCKETS, FEWEST_BUCKETS = 32, 4  # of numbers with more values; below the fewest rows a number stays a number alone
MOST_WORDS = 101  # distinct values of a column of splits that are read
GLANCED = 1_000  # rows read to propose a label
CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")  # a time of day, and a zone such as +02:00
MIDNIGHT = re.compile(r"^0{1,2}:00(:00)?$")
REPEATED = 0.1  # least share of users (items) with several rows, among which a column is the same, to be theirs


def settled(settings: Settings, rows: RawRows, raw: Path) -> tuple[Settings, tuple[str, ...]]:
    """The settings with the roles of columns that they leave open, and the columns taken as features unasked.

    Raises SettingsError if the settings do not fit.
    """
    shape = _Shape(settings, rows)
    return shape.settled(raw), shape.taken


class _Shape:
    """Finds the roles of columns. One class because each role may only take columns that no earlier one has."""

    def __init__(self, settings: Settings, rows: RawRows) -> None:
        self.settings, self.rows, self.notes = settings, rows, rows.notes
        self.columns = [name for name in rows.table.columns if name not in (ROW, FILE_SPLIT)]
        self.update: dict[str, object] = {}
        self.taken: tuple[str, ...] = ()

    def settled(self, raw: Path) -> Settings:
        for name, column in self.rows.roles.items():
            if not self._given(name):
                self._set(name, column, f"{name}={column}, by the layout of the files")
        self._find_splits()
        self._find_id("user")
        self._find_id("item")
        self._find_label()
        labelled = self._now("label") is not None
        if labelled:
            self._drop_ids()
        self._find_time()
        if labelled:
            self._choose_split()
            self._take_features()
        else:
            self._check_ids(raw)
            self._find_rating()
            self._note_unused()
        given = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        return build(Settings, f"{raw}: settings", {**given, **self.update})

    def _now(self, name: str) -> object:
        return self.update.get(name, getattr(self.settings, name))

    def _given(self, name: str) -> bool:
        return name in self.settings.model_fields_set

    def _set(self, name: str, value: object, note: str | None = None) -> None:
        self.update[name] = value
        if note is not None:
            self.notes.inferred.append(note)

    @property
    def _named(self) -> set[str]:
        """Columns that settings name."""
        single = ("user", "item", "timestamp", "label", "group", "rating", "splits", "weight", "event")
        named = {value for name in single if isinstance(value := self._now(name), str)}
        return {*named, *self.settings.features}

    def _values(self, name: str) -> list[str] | None:
        """The distinct values of a column as text, if they are few."""
        table = self.rows.table
        if table[name].type().is_array():
            return None
        values = table.select(_value=table[name].cast("string")).distinct().order_by("_value").limit(MOST_WORDS + 1)
        found = fetch(self.rows.backend, values).column("_value").to_pylist()
        return [value.strip() for value in found if value is not None]

    # --- roles ----------------------------------------------------------------------------------------------------

    def _find_splits(self) -> None:
        if FILE_SPLIT in self.rows.table.columns or self._given("splits") or self._given("split"):
            return
        name = column_of("split", [name for name in self.columns if name not in self._named])
        values = self._values(name) if name is not None else None
        splits = {SPLIT_WORDS.get(value.lower()) for value in values or ()}
        if values and None not in splits and "train" in splits and len(splits) > 1:
            self._set(
                "splits",
                name,
                f"the splits are ready-made: column '{name}' holds {listed(values)} "
                "(splits=null, with split set, makes others)",
            )

    def _find_id(self, role: ColumnRole) -> None:
        asked = self._now(role)
        if self._given(role) or asked in self.columns:
            return
        name = column_of(role, [name for name in self.columns if name not in self._named])
        if name is not None:
            self._set(
                role,
                name,
                f"the {role} is column '{shortened(name)}', because of its name ({role}=COLUMN names another)",
            )

    def _find_label(self) -> None:
        """Take the first column named like a label whose values fit. Raises SettingsError if those of none fit."""
        settings = self.settings
        if self._given("label"):
            return
        free = [name for name in self.columns if name not in self._named]
        barred = self._bars_label(free)
        held = {name: label_values(self.rows, name) for name in columns_of("label", free)} if not barred else {}
        name = next((name for name, values in held.items() if is_label(values, settings)), None)
        if name is not None:
            values = listed(value for value in held[name] or () if value)
            self._set(
                "label",
                name,
                f"rows are labelled: column '{name}' holds {values}, so models "
                "learn to predict it (label=null makes every row an interaction)",
            )
            return
        if any(values != {} for values in held.values()):  # none without rows, which is refused later
            raise SettingsError.of(f"{self.rows.where}: settings", [misfit(*each) for each in held.items()])
        if given := [name for name in ("positive", "positive_from") if getattr(settings, name) is not None]:
            raise SettingsError(
                f"setting {listed(given)}: no column is named like a label, so nothing is 0 or 1; name "
                f"it with label=COLUMN; found {listed(self.columns)}"
            )
        self._set("label", None)

    def _bars_label(self, free: Sequence[str]) -> bool:
        """Whether settings say that rows are interactions, or ask for histories, which labelled rows have by times."""
        settings = self.settings
        if settings.of_interactions or settings.split == "leave_one_out" or settings.layout == "sequences":
            return True
        if settings.history is None:
            return False
        is_timed = settings.timestamp in self.columns or self._time_among(free, labelled=True) is not None
        return settings.timestamp is None or not is_timed

    def _drop_ids(self) -> None:
        for role in ("user", "item"):
            if not self._given(role) and self._now(role) not in self.columns:
                self._set(role, None, f"there is no {role}: no column is named like one ({role}=COLUMN names it)")

    def _check_ids(self, raw: Path) -> None:
        """Refuse rows without a label and without a column of users or of items, and propose columns of the file."""
        lacks = [role for role in ("user", "item") if not self._given(role) and self._now(role) not in self.columns]
        if not lacks:
            return
        what = " or ".join({"user": "a user", "item": "an item"}[role] for role in lacks)
        ids = " ".join(f"--set {role}=COLUMN" for role in lacks)
        glance = fetch(self.rows.backend, self.rows.table.order_by(ROW).limit(1).select(self.columns)).to_pylist()
        first = [str(value) for value in glance[0].values()] if glance else []
        alike = columns_like_times(self.rows.backend, self.rows.table, {FILE_SPLIT})
        if len(alike) == 1 and not self._given("timestamp"):
            ids += f" --set timestamp={alike[0]}"
        label = self._label_advice([name for name in self.columns if name not in self._named])
        found, count = listed(self.columns), len(self.columns)
        if nameless := all(re.fullmatch("column_[0-9]+", name) for name in self.columns):
            found = f"{count:,} columns without names, column_1 to column_{count}"
        if nameless and count >= 10 and all(re.fullmatch(r"-?[0-9.]+", value) for value in first):
            label += (
                ". If each line is a user and each column an item, write user, item and rating of each rated cell as "
                "a row, as stack() of pandas does"
            )
        raise SettingsError(
            f"{raw}: no column is named like {what}, and there is no label; found "
            f"{found}; the first row is {shortened(', '.join(first))!r}. If rows are interactions: "
            f"{ids}; if a column is to be predicted: {label}"
        )

    def _label_advice(self, free: Sequence[str]) -> str:
        """Settings that make a column the label: the last one that holds two values."""
        glance = fetch(self.rows.backend, self.rows.table.order_by(ROW).limit(GLANCED).select(ROW, *free))
        for name in reversed(free):
            held = Counter(str(value).strip() for value in glance.column(name).to_pylist() if value is not None)
            if len(held) != 2 or pa.types.is_nested(glance.column(name).type):
                continue
            rarer = min(held, key=held.__getitem__)
            is_plain = {LABELS.get(value.lower()) for value in held} == {0, 1}
            return assigned(label=name) if is_plain else assigned(label=name, positive=rarer)
        return "--set label=COLUMN, with --set positive=WORD or --set positive_from=NUMBER unless it holds 0 and 1"

    def _find_time(self) -> None:
        settings = self.settings
        if self._given("timestamp") or settings.timestamp in self.columns:
            return
        free = [name for name in self.columns if name not in self._named]
        found = self._time_among(free, labelled=self._now("label") is not None)
        if found is not None:
            name, why = found
            self._set("timestamp", name)
            self.notes.inferred.insert(
                0, f"the time is column '{shortened(name)}', because {why} (timestamp=null ignores it)"
            )

    def _time_among(self, free: Sequence[str], *, labelled: bool) -> tuple[str, str] | None:
        """The column of times, and why it is: because of its type, its name and its values, or its values alone."""
        told = [name for name in free if self._is_declared_time(name)]
        name = told[0] if len(told) == 1 else column_of("timestamp", told or free)
        if name is not None and told:
            return name, "it is declared time"
        if name is not None and (self.settings.time_format or self._looks_like_times(name)):
            return name, "of its name and its values"
        dated = self._dated(free, labelled=labelled)
        return (dated[0], "no other one holds times of the rows") if len(dated) == 1 else None

    def _is_declared_time(self, name: str) -> bool:
        declared = self.settings.declared.get(name)
        return declared is not None and declared.type == "time"

    def _looks_like_times(self, name: str) -> bool:
        known = {*self.columns, FILE_SPLIT} - {name}
        return name in columns_like_times(self.rows.backend, self.rows.table, known)

    def _dated(self, free: Sequence[str], *, labelled: bool) -> list[str]:
        """The columns of dates, but for those that are the same in all rows of a user or item: a birthday is theirs.

        Times split labelled rows, which may have no users and other dates as features. So there a date without a clock
        must also differ within a user or an item, and the column must leave rows for every split.
        """
        table, known = self.rows.table, {*self.columns, FILE_SPLIT} - {*free}
        alike = columns_like_times(self.rows.backend, table, known)
        dated = [name for name in alike if not table[name].type().is_numeric() and self._is_date(name)]
        most = self._most_within(dated)
        own = [name for name in dated if 1 not in most[name]]
        if not labelled:
            return own
        return [name for name in own if (most[name] or self._has_clock(name)) and self._leaves_rows(name)]

    def _most_within(self, names: Sequence[str]) -> dict[str, list[int]]:
        """The most distinct values of each column within a user and within an item, where one has several rows."""
        table = self.rows.table
        most: dict[str, list[int]] = {name: [] for name in names}
        for role in ("user", "item"):
            key = self._now(role)
            if not names or not isinstance(key, str) or key not in self.columns:
                continue
            each = table.group_by(_key=table[key]).aggregate(
                _rows=table.count(), **{f"_{place}": table[name].nunique() for place, name in enumerate(names)}
            )
            held = {f"_{place}": ibis._[f"_{place}"].max() for place in range(len(names))}
            found = fetch(self.rows.backend, each.filter(each["_rows"] > 1).aggregate(**held)).to_pylist()[0]
            for name, count in zip(names, found.values(), strict=True):
                most[name] += [] if count is None else [int(count)]
        return most

    def _has_clock(self, name: str) -> bool:
        """Whether some of a column's first dates have a time of day other than midnight."""
        glance = fetch(self.rows.backend, self.rows.table.order_by(ROW).select(name).limit(GLANCED)).column(name)
        return any(
            MIDNIGHT.search(clock) is None
            for value in glance.to_pylist()
            if value is not None
            for clock in CLOCK.findall(str(value))[:1]
        )

    def _leaves_rows(self, name: str) -> bool:
        """Whether every row has a value, and none has so many rows that a split by time could miss valid or test."""
        table = self.rows.table
        counted = table.group_by(_value=table[name]).aggregate(_rows=table.count())
        asked = counted.aggregate(
            most=counted["_rows"].max(), all=counted["_rows"].sum(), missing=counted["_value"].isnull().any()
        )
        found = fetch(self.rows.backend, asked).to_pylist()[0]
        shares = [share for share in (self.settings.valid, self.settings.test) if share]
        return not found["missing"] and all(int(found["most"]) <= share * int(found["all"]) for share in shares)

    def _is_date(self, name: str) -> bool:
        """Whether a column that looks like times holds no plain numbers."""
        table = self.rows.table
        if not table[name].type().is_string():
            return True
        glance = fetch(self.rows.backend, table.order_by(ROW).select(name).limit(1)).column(name).to_pylist()
        return not any(value is not None and value.strip().replace(".", "", 1).isdigit() for value in glance)

    def _choose_split(self) -> None:
        settings = self.settings
        is_given = FILE_SPLIT in self.rows.table.columns or self._now("splits") is not None
        if self._given("split") or is_given:
            return
        time, group = self._now("timestamp"), self._now("group")
        is_timed = (
            settings.group is None
            and isinstance(time, str)
            and time in self.columns
            and (self._given("timestamp") or self._is_declared_time(time) or self._looks_like_times(time))
        )
        if is_timed:
            self._set(
                "split",
                "time",
                f"the latest rows by '{time}' are valid and test, because rows have times "
                "(split=share takes random rows)",
            )
        elif group is not None:
            self._set(
                "split",
                "group",
                f"splits keep the rows of each '{group}' together, because the group is set "
                "(split=share or split=time splits otherwise)",
            )
        else:
            self._set(
                "split",
                "share",
                f"random rows are valid and test, by seed {settings.seed}: "
                f"{self._why_untimed(time)}, and no group is set (group=COLUMN keeps its rows together)",
            )

    def _why_untimed(self, time: object) -> str:
        """Why rows are not split by time, and what splits them so."""
        if isinstance(time, str) and time in self.columns:
            return f"the values of '{shortened(time)}' don't look like times (split=time sorts by them)"
        if self._given("timestamp"):
            return "no column is the time (timestamp=null)" if time is None else f"there is no column '{time}'"
        free = [name for name in self.columns if name not in self._named]
        alike = columns_like_times(self.rows.backend, self.rows.table, {*self.columns, FILE_SPLIT} - {*free})
        if not alike:
            return "no column looks like times"
        return (
            f"no column is taken as the time ({listed(alike)} may be the time, or dates of something else; "
            f"timestamp={alike[0]} makes the latest rows valid and test)"
        )

    # --- rating -------------------------------------------------------------------------------------------------------

    def _find_rating(self) -> None:
        if self._given("rating"):
            return
        name = column_of("rating", [name for name in self.columns if name not in self._named])
        if name is not None:
            self._set("rating", name)

    def _note_unused(self) -> None:
        unused = [name for name in self.columns if name not in self._named]
        if unused:
            self.notes.inferred.append(
                f"not used: {listed(unused)}; to use them, name them in user_features, "
                "item_features or context_features"
            )

    # --- features of labelled rows ------------------------------------------------------------------------------------

    def _take_features(self) -> None:
        if any(self._given(f"{role}_features") for role in ("user", "item", "context")):
            return
        free = [name for name in self.columns if name not in self._named]
        table = self.rows.table
        alike = columns_like_times(self.rows.backend, table, {*self._named, *self.settings.mentioned, FILE_SPLIT})
        dates = [name for name in alike if not table[name].type().is_numeric() and self._is_date(name)]
        dates += [name for name in free if self._is_declared_time(name)]
        if dates:
            self.notes.dropped.append(f"columns {listed(dates)}: they look like times, of which models make no feature")
        self.taken = tuple(name for name in free if name not in dates)
        if self.taken:
            self._set("context_features", self.taken)


# --- features by their values ----------------------------------------------------------------------------------------


def with_features(
    settings: Settings, rows: Table, backend: Backend, notes: Notes, *, taken: Collection[str], raw: Path
) -> Settings:
    """The settings with roles and kinds for the features `taken` by themselves, from all values of typed rows."""
    names = [name for name in settings.context_features if name in taken]
    if not names:
        return settings
    total = count_rows(backend, rows)
    counts, dropped = _counts(rows, backend, names, total)
    declared = {
        *settings.numeric,
        *settings.categorical,
        *settings.lists,
        *settings.vectors,
        *settings.text,
        *settings.hashed,
        *settings.buckets,
    }
    dropped += [name for name in names if name not in dropped and _names_each_row(rows, name, counts[name], total)]
    constant = [
        name
        for name in names
        if name not in (*dropped, *declared)
        and counts[name] < 2
        and not rows[name].type().is_array()
        and not _may_miss(rows, backend, name)
    ]
    dropped = [name for name in dropped if name not in declared]
    if dropped:
        notes.dropped.append(
            f"columns {listed(dropped)}: they number or name each row, so they tell nothing of "
            "other rows (context_features=[...] takes columns by name)"
        )
    if constant:
        notes.dropped.append(f"columns {listed(constant)}: they hold one value in all rows")
    names = [name for name in names if name not in (*dropped, *constant)]
    names = _without_outcomes(settings, rows, backend, notes, names, declared, total)
    roles = _roles_of(settings, rows, backend, names)
    update: dict[str, object] = {f"{role}_features": tuple(found) for role, found in roles.items()}
    numbers = [name for name in names if name not in declared and rows[name].type().is_numeric()]
    codes = [name for name in numbers if rows[name].type().is_integer() and CODE_NAME.search(name)]
    taken_names = {column.lower() for column in rows.columns}
    free = [
        name
        for name in numbers
        if name not in codes and counts[name] > 2 and f"{name}_bucket".lower() not in taken_names
    ]
    each = {
        name: counts[name] for name in free if counts[name] <= MOST_VALUES and counts[name] * ROWS_PER_VALUE <= total
    }
    whole = {name: counts[name] for name in free if name not in each and rows[name].type().is_integer()}
    ids = codes_among(rows, backend, str(settings.label), whole, total)
    free = [name for name in free if name not in ids]
    size = min(NUM_BUCKETS, total // ROWS_PER_VALUE)
    cut = {name: size for name in free if name not in each} if size >= FEWEST_BUCKETS else {}
    update["categorical"] = (*settings.categorical, *codes, *ids)
    update["buckets"] = {**settings.buckets, **each, **cut}
    told = [f"{role} {listed(found)}" for role, found in roles.items() if found]
    notes.inferred.append(
        f"features are all further columns: {'; '.join(told) or 'none'}; a column that is the same "
        "in all rows of a user (or item) is the user's (item's)"
    )
    if codes:
        notes.inferred.append(
            f"{listed(codes)}: whole numbers, taken as categories because of their names "
            "(numeric=[...] takes them as numbers)"
        )
    if ids:
        notes.inferred.append(
            f"{listed(ids)}: whole numbers with a label rate each, unlike that of their neighbours, "
            "taken as categories (numeric=[...] takes them as numbers)"
        )
    if each:
        notes.inferred.append(
            f"{listed(each)}: numbers with few values, taken as numbers and, each value, as "
            "categories (NAME_bucket); numeric=[...] or categorical=[...] takes one"
        )
    if cut:
        notes.inferred.append(
            f"{listed(cut)}: taken as numbers and, cut into at most {size} buckets with about equal "
            "numbers of train rows, as categories (NAME_bucket); numeric=[...] takes the numbers "
            "alone"
        )
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    return build(Settings, f"{raw}: settings", {**given, **update})


def _without_outcomes(
    settings: Settings,
    rows: Table,
    backend: Backend,
    notes: Notes,
    names: list[str],
    declared: Collection[str],
    total: int,
) -> list[str]:
    """The features without those that alone order the labels almost perfectly, unless settings name them."""
    kinds = {name: rows[name].type() for name in names if name not in declared}
    judged = [name for name, kind in kinds.items() if kind.is_numeric() or kind.is_string() or kind.is_array()]
    label = settings.label
    assert label is not None
    found, told = label_outcomes(backend, rows, label, judged, total) if judged else ({}, [])
    notes.warnings += told
    if found:
        each = ", ".join(f"'{name}' (AUC {auc:.4f})" for name, auc in found.items())
        notes.dropped.append(
            f"columns that alone order the labels, as what is known only after '{label}' does: "
            f"{each}; context_features=[...] takes columns by name"
        )
    return [name for name in names if name not in found]


def _counts(rows: Table, backend: Backend, names: Sequence[str], total: int) -> tuple[dict[str, int], list[str]]:
    """The number of distinct values of each column, 0 of lists, and the columns that number the rows from 0 or 1."""
    scalar = [name for name in names if not rows[name].type().is_array()]
    whole = [name for name in scalar if rows[name].type().is_integer()]
    asked: dict[str, Values] = {f"_{place}": rows[name].nunique() for place, name in enumerate(scalar)}
    for place, name in enumerate(whole):
        asked |= {f"_{start}_{place}": (rows[name] == rows[ROW] + start).cast("int64").sum() for start in (0, 1)}
    found = figures(backend, rows, asked)
    counts = dict.fromkeys(names, 0) | {name: int(found[f"_{place}"]) for place, name in enumerate(scalar)}
    return counts, [
        name for place, name in enumerate(whole) if total > 1 and total in (found[f"_0_{place}"], found[f"_1_{place}"])
    ]


def _may_miss(rows: Table, backend: Backend, name: str) -> bool:
    """Whether a column has a value in some rows and none in others, which tells them apart."""
    present = count_rows(backend, rows.filter(rows[name].notnull()))
    return 0 < present < count_rows(backend, rows)


def _names_each_row(rows: Table, name: str, distinct: int, total: int) -> bool:
    """Whether nearly every row has a text of its own."""
    return rows[name].type().is_string() and total >= ROWS_PER_VALUE and distinct * 10 > total * 9


def _roles_of(settings: Settings, rows: Table, backend: Backend, names: Sequence[str]) -> dict[str, list[str]]:
    """The features of each role: of the user or item where all rows of one have the same value, else of the event."""
    found: dict[str, list[str]] = {"user": [], "item": [], "context": []}
    left = list(names)
    for role, key in (("user", settings.user), ("item", settings.item)):
        scalar = [name for name in left if not rows[name].type().is_array()]
        if key is None or key not in rows.columns or not scalar:
            continue
        each = rows.group_by(_key=rows[key]).aggregate(
            _rows=rows.count(),
            **{
                f"_{place}": rows[name].nunique() + rows[name].isnull().any().cast("int64")
                for place, name in enumerate(scalar)
            },
        )
        several = each.filter(each["_rows"] > 1)
        most = {f"_{place}": ibis._[f"_{place}"].max() for place in range(len(scalar))}
        held = fetch(backend, several.aggregate(_count=several.count(), **most)).to_pylist()[0]
        if held["_count"] and held["_count"] >= REPEATED * count_rows(backend, each):
            found[role] = [name for place, name in enumerate(scalar) if held[f"_{place}"] == 1]
            left = [name for name in left if name not in found[role]]
    found["context"] = left
    return found
