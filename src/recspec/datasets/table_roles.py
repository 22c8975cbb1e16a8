"""What the columns of your own table are for, where settings leave it open: by their names and their values.

Every choice leaves a note. A setting that was given is never changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa
from ibis.expr.types import Column as Values
from ibis.expr.types import Table

from recspec.base.errors import SettingsError, listed, shortened
from recspec.data.prepare import (
    CODE_NAME,
    FILE_SPLIT,
    LABELS,
    ROW,
    SPLIT_WORDS,
    Backend,
    ColumnRole,
    RawRows,
    column_of,
    columns_of,
    count_rows,
    fetch,
    figures,
    label_outcomes,
    likely_positive,
    looks_like_time,
    named_like,
)
from recspec.datasets.table_checks import assigned, codes_among, is_label, label_values, misfit
from recspec.datasets.table_features import Tables
from recspec.datasets.table_settings import ROLE_SETTINGS, Settings

MOST_VALUES = 1_000  # of numbers that may be codes; pandas writes codes beside a missing one as 5620.0
ROWS_PER_VALUE = 20  # fewest rows per value of a number that may be a code
NUM_BUCKETS, FEWEST_BUCKETS = 32, 4  # of numbers with more values; below the fewest rows a number stays a number alone
MOST_WORDS = 101  # distinct values of a column of splits that are read
GLANCED = 1_000  # rows read to propose a label
CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")  # a time of day, and a zone such as +02:00
MIDNIGHT = re.compile(r"^0{1,2}:00(:00)?$")
REPEATED = 0.1  # least share of users (items) with several rows, among which a column is the same, to be theirs


def infer_settings(settings: Settings, rows: RawRows, raw: Path) -> tuple[Settings, tuple[str, ...]]:
    """The settings with the roles of columns that they leave open, and the columns taken as features unasked.

    Raises SettingsError if the settings do not fit.
    """
    inference = ColumnRoleInference(settings, rows)
    return inference.infer(raw), inference.taken


class ColumnRoleInference:
    """Finds the roles of columns. One class because each role may only take columns that no earlier one has."""

    def __init__(self, settings: Settings, rows: RawRows) -> None:
        self.settings, self.rows, self.notes = settings, rows, rows.notes
        self.columns = [name for name in rows.table.columns if name not in (ROW, FILE_SPLIT)]
        self.update: dict[str, object] = {}
        self.taken: tuple[str, ...] = ()

    def infer(self, raw: Path) -> Settings:
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
            self._split_by_time()
            self._find_rating()
            self._note_unused()
        types = self.rows.reading.types  # with those that the layout of the files declares
        if not types.items() <= self.settings.declared.items():
            self.update["types"] = {**types}
        return self.settings.rebuilt(raw, self.update)

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
        named = {value for name in ROLE_SETTINGS if isinstance(value := self._now(name), str)}
        return {*named, *self.settings.other_labels, *self.settings.features}

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
            told = f"the splits are ready-made: column '{name}' holds {listed(values)} (splits=null, with split set, "
            self._set("splits", name, f"{told}makes others)")

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
        rows, alike = self.rows, columns_of("label", free) if not barred else ()
        held = {name: label_values(rows.table, rows.backend, name) for name in alike}
        name = next((name for name, values in held.items() if is_label(values, settings)), None)
        if name is not None:
            values = listed(value for value in held[name] or () if value)
            told = f"rows are labelled: column '{name}' holds {values}, so models learn to predict it "
            self._set("label", name, f"{told}(label=null makes every row an interaction)")
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
        glance = self._glance.slice(0, 1).to_pylist()
        first = [str(value) for value in glance[0].values()] if glance else []
        if len(self._alike) == 1 and not self._given("timestamp"):
            ids += f" --set timestamp={self._alike[0]}"
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
        for name in reversed(free):
            values = self._glance.column(name)
            held = Counter(str(value).strip() for value in values.to_pylist() if value is not None)
            if len(held) != 2 or pa.types.is_nested(values.type):
                continue
            is_plain = {LABELS.get(value.lower()) for value in held} == {0, 1}
            return assigned(label=name) if is_plain else assigned(label=name, positive=likely_positive(held))
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
        return name in self._alike

    def _dated(self, free: Sequence[str], *, labelled: bool) -> list[str]:
        """The columns of dates, but for those that are the same in all rows of a user or item: a birthday is theirs.

        Times split labelled rows, which may have no users and other dates as features. So there a date without a clock
        must also differ within a user or an item, and the column must leave rows for every split.
        """
        dated = self._dates(free)
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
            _, found = _most_kinds(self.rows.backend, table, key, {name: table[name].nunique() for name in names})
            for name, count in found.items():
                most[name] += [] if count is None else [int(count)]
        return most

    def _has_clock(self, name: str) -> bool:
        """Whether some of a column's first dates have a time of day other than midnight."""
        return any(
            MIDNIGHT.search(clock) is None
            for value in self._glance.column(name).to_pylist()
            if value is not None
            for clock in CLOCK.findall(str(value))[:1]
        )

    def _leaves_rows(self, name: str) -> bool:
        """Whether every row has a value, and none has so many rows that a split by time could miss valid or test."""
        table = self.rows.table
        counted = table.group_by(_value=table[name]).aggregate(_rows=table.count())
        rows = counted["_rows"]
        asked = {"most": rows.max(), "all": rows.sum(), "missing": counted["_value"].isnull().any()}
        found = figures(self.rows.backend, counted, asked)
        shares = [share for share in (self.settings.valid, self.settings.test) if share]
        return not found["missing"] and all(int(found["most"]) <= share * int(found["all"]) for share in shares)

    def _is_date(self, name: str) -> bool:
        """Whether a column that looks like times holds no plain numbers."""
        if not self.rows.table[name].type().is_string():
            return True
        first = self._glance.column(name)[:1].to_pylist()
        return not any(value is not None and value.strip().replace(".", "", 1).isdigit() for value in first)

    def _dates(self, names: Collection[str]) -> list[str]:
        """Those of the columns that look like times and hold no plain numbers."""
        kinds = {name: self.rows.table[name].type() for name in self._alike if name in names}
        return [name for name, kind in kinds.items() if not kind.is_numeric() and self._is_date(name)]

    @cached_property
    def _glance(self) -> pa.Table:
        """The first rows."""
        return fetch(self.rows.backend, self.rows.table.order_by(ROW).limit(GLANCED).select(self.columns))

    @cached_property
    def _alike(self) -> list[str]:
        """The columns whose first values look like times."""
        return [name for name in self.columns if looks_like_time(self._glance.column(name))]

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
            told = f"the latest rows by '{time}' are valid and test, because rows have times (split=share takes random "
            self._set("split", "time", f"{told}rows)")
        elif group is not None:
            told = f"splits keep the rows of each '{group}' together, because the group is set (split=share or "
            self._set("split", "group", f"{told}split=time splits otherwise)")
        else:
            told = f"random rows are valid and test, by seed {settings.seed}: {self._why_untimed(time)}, and no group "
            self._set("split", "share", f"{told}is set (group=COLUMN keeps its rows together)")

    def _split_by_time(self) -> None:
        """Events after a held-out one are no inputs, so few views would be left of who bought long ago."""
        time = self._now("timestamp")
        settings = self.settings
        if settings.target is None or settings.split is not None or self._now("splits") is not None:
            return
        if FILE_SPLIT not in self.rows.table.columns and time in self.columns:
            told = f"the latest events of {listed(settings.target)} by '{time}' are valid and test, by "
            self._set("split", "time", f"{told}target (split=leave_one_out takes each user's last ones)")

    def _why_untimed(self, time: object) -> str:
        """Why rows are not split by time, and what splits them so."""
        if isinstance(time, str) and time in self.columns:
            return f"the values of '{shortened(time)}' don't look like times (split=time sorts by them)"
        if self._given("timestamp"):
            return "no column is the time (timestamp=null)" if time is None else f"there is no column '{time}'"
        alike = [name for name in self._alike if name not in self._named]
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
        dates = self._dates({*free} - self.settings.mentioned)
        dates += [name for name in free if self._is_declared_time(name)]
        if dates:
            self.notes.dropped.append(f"columns {listed(dates)}: they look like times, of which models make no feature")
        self.taken = tuple(name for name in free if name not in dates)
        if self.taken:
            self._set("context_features", self.taken)


# --- features by their values ----------------------------------------------------------------------------------------


def with_features(tables: Tables, taken: Collection[str], raw: Path) -> Tables:
    """The tables with settings that name roles and kinds for the features `taken` by themselves, from all values."""
    settings, rows, backend, notes = tables.settings, tables.rows, tables.backend, tables.notes
    names = [name for name in settings.context_features if name in taken]
    if not names:
        return tables
    total = count_rows(backend, rows)
    counts, present, dropped = _counts(rows, backend, names, total)
    declared = settings.with_kind
    dropped += [name for name in names if name not in dropped and _names_each_row(rows, name, counts[name], total)]
    constant = [
        name
        for name in names
        if name not in (*dropped, *declared)
        and counts[name] < 2
        and not rows[name].type().is_array()
        and present[name] in (0, total)  # a value in some rows alone tells them apart
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
    names = _without_outcomes(tables, names, total)
    roles = _roles_of(tables, names)
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

    def tell(found: Collection[str], what: str) -> None:
        if found:
            notes.inferred.append(f"{listed(found)}: {what}")

    tell(codes, "whole numbers, taken as categories because of their names (numeric=[...] takes them as numbers)")
    tell(
        ids,
        "whole numbers with a label rate each, unlike that of their neighbours, taken as categories (numeric=[...] "
        "takes them as numbers)",
    )
    tell(
        each,
        "numbers with few values, taken as numbers and, each value, as categories (NAME_bucket); numeric=[...] or "
        "categorical=[...] takes one",
    )
    tell(
        cut,
        f"taken as numbers and, cut into at most {size} buckets with about equal numbers of train rows, as categories "
        "(NAME_bucket); numeric=[...] takes the numbers alone",
    )
    return replace(tables, settings=settings.rebuilt(raw, update))


def _without_outcomes(tables: Tables, names: list[str], total: int) -> list[str]:
    """The features without those that alone order the labels almost perfectly, unless settings name them."""
    settings, rows, backend, notes = tables.settings, tables.rows, tables.backend, tables.notes
    kinds = {name: rows[name].type() for name in names if name not in settings.with_kind}
    judged = [name for name, kind in kinds.items() if kind.is_numeric() or kind.is_string() or kind.is_array()]
    assert settings.label is not None
    labels = [name for name in (settings.label, *settings.other_labels) if name in rows.columns]
    for label in labels if judged else ():
        found, told = label_outcomes(backend, rows, label, judged, total)
        notes.warnings += told
        if found:
            each = ", ".join(f"'{name}' (AUC {auc:.4f})" for name, auc in found.items())
            notes.dropped.append(
                f"columns that alone order the labels, as what is known only after '{label}' does: "
                f"{each}; context_features=[...] takes columns by name"
            )
        names, judged = ([name for name in each if name not in found] for each in (names, judged))
    notes.warnings += [
        f"'{shortened(name)}' is named like a label, and is a feature: if it is known only after '{settings.label}', "
        f"leave it out by naming the other features (context_features=[...]), or --set other_labels={name} predicts "
        "it too"
        for name in named_like("label", judged)
        if is_label(label_values(rows, backend, name))
    ]
    return names


def _counts(
    rows: Table, backend: Backend, names: Sequence[str], total: int
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """The numbers of distinct values (0 of lists) and of values, and the columns that number the rows from 0 or 1."""
    asked: dict[tuple[str, object], Values] = {}
    for name in names:
        asked[name, "present"] = rows[name].count()
        if not rows[name].type().is_array():
            asked[name, "kinds"] = rows[name].nunique()
        if rows[name].type().is_integer():
            asked |= {(name, start): (rows[name] == rows[ROW] + start).cast("int64").sum() for start in (0, 1)}
    found = figures(backend, rows, asked)
    numbering = [name for name in names if total > 1 and total in (found.get((name, 0)), found.get((name, 1)))]
    counts, present = ({name: int(found.get((name, what), 0)) for name in names} for what in ("kinds", "present"))
    return counts, present, numbering


def _most_kinds(
    backend: Backend, rows: Table, key: str, kinds: Mapping[str, Values]
) -> tuple[tuple[int, int], dict[str, int | None]]:
    """How many users (or items) there are, how many have several rows, and the most `kinds` in one of these."""
    held = {f"_{place}": each for place, each in enumerate(kinds.values())}
    each = rows.group_by(_key=rows[key]).aggregate(_rows=rows.count(), **held)
    has_several = each["_rows"] > 1
    asked = {"all": each.count(), "several": has_several.cast("int64").sum()}
    asked |= {name: each[name].max(where=has_several) for name in held}
    count, several, *most = figures(backend, each, asked).values()
    return (int(count), int(several or 0)), dict(zip(kinds, most, strict=True))


def _names_each_row(rows: Table, name: str, distinct: int, total: int) -> bool:
    """Whether nearly every row has a text of its own."""
    return rows[name].type().is_string() and total >= ROWS_PER_VALUE and distinct * 10 > total * 9


def _roles_of(tables: Tables, names: Sequence[str]) -> dict[str, list[str]]:
    """The features of each role: of the user or item where all rows of one have the same value, else of the event."""
    settings, rows = tables.settings, tables.rows
    found: dict[str, list[str]] = {"user": [], "item": [], "context": []}
    left = list(names)
    for role, key in (("user", settings.user), ("item", settings.item)):
        scalar = [name for name in left if not rows[name].type().is_array()]
        if key is None or key not in rows.columns or not scalar:
            continue
        kinds = {name: rows[name].nunique() + rows[name].isnull().any().cast("int64") for name in scalar}
        (count, several), most = _most_kinds(tables.backend, rows, key, kinds)
        if several and several >= REPEATED * count:
            found[role] = [name for name in scalar if most[name] == 1]
            left = [name for name in left if name not in found[role]]
    found["context"] = left
    return found
