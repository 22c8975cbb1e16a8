"""A prepared dataset of interactions takes new events: the dataset that preparing all events would give.

Ids of known values stay, and new values get the next ids. Fitted scales stay. New events pass the rules that
`growth.json` holds: what counts as an event, which split it is for, how negatives are drawn and histories made. The
train rows of before stay in their files, which the new folder shares by hard links; new train rows stand behind them.
Valid and test are written again. A row of train never leaves train.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

import recspec
from recspec.encoding import Encoders, VocabularyEncoder, combined, is_text, with_new_values
from recspec.errors import DataError, SpecError, listed, nearest
from recspec.files import PathError, confined, read_json, special
from recspec.prepare.backend import Backend
from recspec.prepare.columns import Column, Fitted, PreparedCatalogue, take, to_arrow
from recspec.prepare.duckdb_backend import DuckDBBackend
from recspec.prepare.growth import GROWTH_FILE, UNKNOWN_EVENTS_FILE, GrowthRules
from recspec.prepare.histories import HistoryColumns, Ids, Timeline
from recspec.prepare.interaction_columns import InteractionColumns
from recspec.prepare.interaction_rows import BLOCK_ROWS_WITH_HISTORIES, BlockRows, Counts, Plan
from recspec.prepare.names import GAP, HISTORY, ITEM, LABEL, ROW, SERIES, SPLIT, SPLITS, TIMESTAMP, USER
from recspec.prepare.negatives import Seen
from recspec.prepare.notes import Notes
from recspec.prepare.prepared import fingerprint
from recspec.prepare.raw_files import SHOWN, Reading, stage
from recspec.prepare.raw_table import Roles, typed
from recspec.prepare.shown_values import shown_values
from recspec.prepare.splits import MILLION
from recspec.prepare.tables import SECONDS, fetch
from recspec.spec import Chunk, Feature, FeatureSpec, Role
from recspec.storage import (
    PREPARE_FILE,
    SEEN_FILE,
    Columns,
    Ragged,
    SplitWriter,
    concatenate_column,
    copy_companions,
    open_split,
    write_seen_file,
)
from recspec.storage import Column as StoredColumn

Side = Literal["user", "item"]
SIDES: Mapping[Side, str] = {"user": USER, "item": ITEM}
"""The features of the ids."""
OLD, NEW = -1, 3
"""Codes of rows beside those of `SPLITS`: a train row that is written already; an event without a split yet."""


@dataclass(frozen=True)
class Grown:
    """A dataset with new events."""

    spec: FeatureSpec
    first_new: Mapping[str, int]
    """Split -> number of the first row that the dataset before did not hold there."""
    touched: Ids
    """Ids of the users with new events, ascending."""
    counts: Mapping[str, int]
    """`events`, `users` and `items` that are new, and `left_out` rows."""
    notes: tuple[str, ...] = ()
    """New users and items of which the events tell too little."""


def grow(base: FeatureSpec, events: Path, out: Path) -> Grown:
    """Write into the empty folder `out` the dataset `base` with the raw events of a file (CSV, JSON lines, Parquet).

    Raises:
        DataError: if the dataset takes no new events, the file lacks a column, or no event of it is new.
    """
    started = time.perf_counter()
    rules = GrowthRules.load(base.folder)
    _check_chunks(base)
    _check_rules(base, rules)
    _check_new(base, events)
    before = Encoders.load(base.folder)
    work = out / "work"
    raw, dropped = _read(events, rules, before, base, work)  # the dropped ones count as seen
    held = _unknown_events(base, rules, before)
    num_held = 0 if held is None else held.num_rows
    raw = raw if held is None else _one_below_the_other(held, raw, events)
    context = [name for name in base.role("context") if name in before.encoders]
    encoders = with_new_values(before, [(raw, [USER, ITEM, *context])])
    ids: dict[Side, Ids] = {role: np.asarray(encoders.encode_column(of, raw.column(of))) for role, of in SIDES.items()}
    encoders, catalogues, notes = _with_catalogues(base, before, encoders, raw, ids, rules)
    growing = _Growing(base, rules, before, encoders, catalogues)
    found = growing.events(raw, ids["user"], ids["item"], context, num_held)
    counts = {
        "events": int((found.splits == NEW).sum()),
        **{f"{name}s": len(encoders.vocabularies[of]) - len(before.vocabularies[of]) for name, of in SIDES.items()},
        "left_out": dropped.num_rows + raw.num_rows - num_held - int((found.splits == NEW).sum()),
    }  # fmt: skip
    if not counts["events"]:
        rows = raw.num_rows - num_held + dropped.num_rows
        if not rows:
            raise DataError(f"{events}: holds no row")
        raise DataError(
            f"{events}: holds no new event: each of its {rows:,} rows repeats a known one, or its rating is too low"
        )
    spec, first_new, touched = growing.write(out, found, counts)
    _write_seen(base, out, encoders, found, growing.codes(found), dropped)
    shutil.rmtree(work, ignore_errors=True)
    _record(base, spec, events, counts, started)
    return Grown(spec, first_new, touched, counts, notes)


def _check_chunks(base: FeatureSpec) -> None:
    for split, chunks in base.sources.items():
        if len(chunks) != 1 or chunks[0].type != "parquet":
            raise DataError(f"{base.folder}, split '{split}': takes new events as one chunk of parquet, as prepare "
                            "writes it; found other chunks (recspec transcode DATA OUT --to parquet)")  # fmt: skip
    if len(base.sources.get("train", ())) != 1:
        raise SpecError(f"{base.folder}: has no split train to add events to")


def _check_rules(base: FeatureSpec, rules: GrowthRules) -> None:
    """Refuse rules by which rows were not made that are there; these also bound how many negatives are drawn."""
    drawn, history = rules.histories.train_negatives, base.role("history")
    pairs: Mapping[str, tuple[object, object]] = {
        "num_negatives": (rules.num_negatives + 1, base.metadata.get("test_samples_per_series", 1)),
        "histories.train_negatives": (drawn, base.metadata.get("train_negatives", 0)),
        "histories.history": (rules.histories.history is not None, bool(history)),
        "gap_unit": (rules.gap_unit is not None, GAP in history),
    }
    wrong = [name for name, (of_rules, of_rows) in pairs.items() if of_rules != of_rows]
    rows = {split: open_split(base, split).num_rows for split in base.splits}
    wrong += [
        "num_negatives" for split, count in rows.items() if split != "train" and count % (rules.num_negatives + 1)
    ]
    wrong += ["histories.train_negatives"] if drawn >= max(1, rows["train"]) else []
    if wrong:
        names = listed(dict.fromkeys(wrong))
        raise DataError(f"{base.folder / GROWTH_FILE}: other rows than the dataset's, by {names}; prepare it again")


def _check_new(base: FeatureSpec, events: Path) -> None:
    """Refuse a file that the dataset holds already, as a job that is started again gives it."""
    if events.is_file():
        content = {**fingerprint(events), "name": None}
        if any({**each, "name": None} == content for each in _inputs(base)):
            held = f"the dataset {base.folder} holds the events of this file already"
            raise DataError(f"{events}: {held}; name a file of new events")


def _inputs(base: FeatureSpec) -> list[dict[str, object]]:
    """The raw files that a dataset was made from."""
    found = _recorded(base).get("inputs")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _recorded(base: FeatureSpec) -> dict[str, object]:
    """What `prepare.json` says; nothing if it can't be read."""
    try:
        found = read_json(confined(base.folder, PREPARE_FILE))
    except PathError:
        return {}
    return found if isinstance(found, dict) else {}


# --- raw events ------------------------------------------------------------------------------------------------------


def _read(
    file: Path, rules: GrowthRules, encoders: Encoders, base: FeatureSpec, work: Path
) -> tuple[pa.Table, pa.Table]:
    """The raw events with typed ids and times under the dataset's names, in order; and the ids of those left out."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else special(file) or "no such file"
        raise DataError(f"{file}: {what}; expected events in a file of CSV, JSON lines or Parquet")
    backend: Backend
    with DuckDBBackend(work / "tables", None, None) as backend:
        mentioned = frozenset(filter(None, [rules.timestamp, rules.rating, *_raw_names(encoders, (USER, ITEM))]))
        reading = Reading(
            separator=rules.separator, encoding=rules.encoding, missing_values=rules.missing_values,
            time_format=rules.time_format, layout="rows", mentioned=mentioned, types=rules.types,
            found_time_format=rules.found_time_format, invalid_values=rules.invalid_values, settable=False,
        )  # fmt: skip
        rows = stage(backend, [file], (USER, ITEM), reading, Notes(), work)
        names = {of: encoders.sources(of, rows.table.columns)[0] for of in (USER, ITEM)}
        times = [name for name in dict.fromkeys((rules.timestamp, TIMESTAMP)) if name in rows.table.columns]
        told = dict(zip(names, _raw_names(encoders, names), strict=True))
        there = [name for name in rows.table.columns if name != ROW]
        missing = [f"no column '{told[of]}'{nearest(told[of], there)}" for of, found in names.items() if found is None]
        if rules.timestamp and not times:
            missing.append(f"no column '{rules.timestamp}', the time{nearest(rules.timestamp, there)}")
        if rules.rating and rules.min_rating is not None and rules.rating not in rows.table.columns:
            missing.append(f"no column '{rules.rating}', the rating, which is {rules.min_rating:g} or more of an event")
        if missing:
            between = "; " if len(missing) == 1 else "\n  "
            raise DataError(f"{DataError.of(str(file), missing)}{between}found {listed(there)}", missing)
        user, item = str(names[USER]), str(names[ITEM])
        rated = rules.min_rating is not None
        roles = Roles(ids=(user, item), time=times[0] if rules.timestamp else None,
                      numbers={rules.rating} if rated and rules.rating else ())  # fmt: skip
        table = fetch(backend, typed(rows, roles).order_by(ROW))
    kept = table
    if rules.rating and rules.min_rating is not None:
        kept = table.filter(pc.fill_null(pc.greater_equal(table.column(rules.rating), rules.min_rating), False))
    columns = {name: kept.column(name) for name in kept.column_names if name not in (user, item, USER, ITEM)}
    moment = kept.column(times[0]) if rules.timestamp else kept.column(ROW)
    dtype = np.dtype(str(base.features[TIMESTAMP].dtype))
    stamps = np.asarray(moment.to_numpy())

    def refuse(wrong: NDArray[np.bool_], expected: str) -> None:
        at = np.flatnonzero(wrong)[:SHOWN]
        if len(at):
            places = rows.places(kept.column(ROW).to_numpy()[at].tolist())
            said = ", ".join(f"{place} is {stamps[row]:.17g}" for place, row in zip(places, at, strict=True))
            raise DataError(f"{file}: column '{times[0]}': {said}; expected {expected}")

    if dtype.kind == "i" and stamps.dtype.kind == "f":
        whole = "a whole number of at most 64 bits, as the dataset's times are"
        refuse(~(np.abs(stamps) < 2.0**63) | (stamps % 1 != 0), whole)
    summary = _mapping(base.metadata.get("summary"))
    if rules.timestamp and isinstance(summary.get("first"), str):  # dates: all its times can be seconds since 1970
        dates = f"seconds since 1970, as the dataset's times are, {summary['first']} to {summary.get('last')}"
        refuse(~((stamps >= SECONDS[0]) & (stamps <= SECONDS[1])), dates)
    stamps = stamps.astype(dtype)
    told = {**columns, USER: kept.column(user), ITEM: kept.column(item), TIMESTAMP: pa.array(stamps)}
    low = table.filter(pc.invert(pc.is_in(table.column(ROW), value_set=kept.column(ROW).combine_chunks())))
    return pa.table(told), pa.table({USER: low.column(user), ITEM: low.column(item)})


def _write_seen(
    base: FeatureSpec, out: Path, encoders: Encoders, events: _Events, codes: Ids, dropped: pa.Table
) -> None:
    """The seen items of before and those of some events; dropped ones are known after all splits."""
    pairs: list[tuple[Ids, ...]] = [(events.users, events.items, np.maximum(codes, 0))]
    ids: list[Ids] = [np.asarray(encoders.encode_column(of, dropped.column(of))) for of in (USER, ITEM)]
    pairs.append((*ids, np.full(dropped.num_rows, SPLITS.index("test"))))
    if base.companions.get("seen"):
        held = pq.read_table(base.folder / SEEN_FILE)
        pairs.append(tuple(np.asarray(held.column(name)).astype(np.int64) for name in (USER, ITEM, SPLIT)))
    users, items, splits = (np.concatenate(each) for each in zip(*pairs, strict=True))
    order = np.lexsort((splits, items, users))
    keys = np.stack([users[order], items[order]])
    first = order[(np.diff(keys, prepend=-1) != 0).any(axis=0) & (keys > 0).all(axis=0)]
    columns = {name: pa.array(of[first]) for name, of in ((USER, users), (ITEM, items), (SPLIT, splits))}
    write_seen_file(out / SEEN_FILE, pa.table(columns).to_batches())


def _raw_names(encoders: Encoders, features: Iterable[str]) -> list[str]:
    return [getattr(encoders.encoder(name), "column", None) or name for name in features]


def _unknown_events(base: FeatureSpec, rules: GrowthRules, before: Encoders) -> pa.Table | None:
    """The raw held-out events whose user or item has no id yet; None if there are none."""
    if rules.split != "time":
        return None
    if rules.unknown_events is None:
        for split in (each for each in base.splits if each != "train"):
            for columns in open_split(base, split, (USER, ITEM, LABEL)).batches():
                ids = (np.asarray(columns[name]) == 0 for name in (USER, ITEM))
                if (np.logical_or(*ids) & (np.asarray(columns[LABEL]) > 0)).any():
                    raise DataError(
                        f"{base.folder}: takes no new events: an older recspec prepared it, which did not keep the "
                        "held-out events of users and items without an id; prepare it again"
                    )
        return None
    if not rules.unknown_events:
        return None
    try:
        place = confined(base.folder, UNKNOWN_EVENTS_FILE)
        names = sorted(each.name for each in place.iterdir()) if place.is_dir() else []  # Spark's
        parts = [f"{UNKNOWN_EVENTS_FILE}/{name}" for name in names if not name.startswith(("_", "."))]
        files = [confined(base.folder, part) for part in parts] or [place]
        held = pa.concat_tables([pq.read_table(file, partitioning=None) for file in files])
    except (PathError, OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{base.folder}: {UNKNOWN_EVENTS_FILE} can't be read: {error}; prepare it again") from None
    if held.num_rows != rules.unknown_events or not {USER, ITEM, TIMESTAMP} <= {*held.column_names}:
        raise DataError(f"{base.folder}: {UNKNOWN_EVENTS_FILE} is damaged: expected {rules.unknown_events:,} events")
    # Items that only a catalogue or a list of candidates names have ids, and their events are in valid and test.
    users, items = (np.asarray(before.encode_column(name, held.column(name))) for name in (USER, ITEM))
    return held.filter(pa.array((users == 0) | (items == 0)))


def _one_below_the_other(held: pa.Table, new: pa.Table, file: Path) -> pa.Table:
    """Held-out events and a file's new ones as one table: nulls where one lacks a column, text where one has text."""
    for name in [name for name in held.column_names if name in new.column_names]:
        kinds = [table.schema.field(name).type for table in (held, new)]
        if kinds[0] == kinds[1]:
            continue
        if any(map(pa.types.is_nested, kinds)):
            known = f"the events that the dataset holds have {kinds[0]} there"
            raise DataError(f"{file}: column '{name}' holds {kinds[1]}; {known}, so write it in the same way")
        if any(map(is_text, kinds)):
            held, new = (
                table.set_column(table.column_names.index(name), name, table.column(name).cast(pa.string()))
                for table in (held, new)
            )
    return pa.concat_tables([held, new], promote_options="permissive")


# --- catalogues ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Catalogue:
    """The file of a role's users or items, as it is now, without the rows of new ones."""

    old: pa.Table
    new: pa.Table | None  # the rows of new ones, without histories

    def prepared(self, id_name: str, features: Mapping[str, Feature], names: Sequence[str]) -> PreparedCatalogue:
        """As `BlockRows` reads it."""
        tables = [self.old.select([id_name, *names])]
        tables += [self.new.select([id_name, *names])] if self.new is not None else []
        whole = pa.concat_tables(tables)
        columns: Columns = {name: _from_arrow(whole.column(name), str(features[name].dtype)) for name in names}
        return PreparedCatalogue(id_name, whole.num_rows, columns, {}, [n for n in names if features[n].is_vector])


def _with_catalogues(
    base: FeatureSpec, before: Encoders, encoders: Encoders, raw: pa.Table, ids: Mapping[Side, Ids],
    rules: GrowthRules,
) -> tuple[Encoders, dict[Side, _Catalogue], tuple[str, ...]]:  # fmt: skip
    """The encoders with the values of new users' and items' features, both catalogues with rows for them, and notes.

    A new user or item is described by its latest event that is in the file.
    """
    named: dict[Side, tuple[str, list[str], NDArray[np.int64]]] = {}
    for role, id_name in SIDES.items():
        features = [name for name in base.role(role) if name != id_name]
        old = len(before.vocabularies[id_name])
        of = ids[role]
        rows = np.zeros(len(encoders.vocabularies[id_name]) - old, np.int64)
        fresh = np.flatnonzero(np.greater(of, old))
        rows[of[fresh] - old - 1] = fresh
        named[role] = id_name, features, rows
        encoders = with_new_values(encoders, [(raw.take(pa.array(rows)), features)])
    catalogues: dict[Side, _Catalogue] = {}
    notes = list[str]()
    for role, (id_name, features, rows) in named.items():
        path = base.catalogue(role)
        if path is None:
            raise DataError(f"{base.folder}: has no catalogue of {role}s; prepare it again")
        held = pq.read_table(path, partitioning=None)
        fresh_rows = None
        if len(rows):
            described = raw.take(pa.array(rows))
            made: dict[str, pa.Array] = {id_name: pa.array(np.arange(len(held) + 1, len(held) + 1 + len(rows)))}
            lacking: dict[str, NDArray[np.bool_]] = {}  # raw column -> the new ones without a value there
            for name, source in rules.readable.get(role, {}).items():
                if name in held.column_names and name not in features:
                    made[name] = _as_shown(described, source, held.schema.field(name).type, encoders)
                    lacking[source] = _missing(made[name])
            for name in features:
                made[name] = to_arrow(_encoded(encoders, name, described, base.features[name]))
                column, (raw_name,) = encoders.sources(name, described.column_names)[0], _raw_names(encoders, [name])
                lacks = _missing(described.column(column)) if column is not None else np.ones(len(rows), bool)
                lacking[raw_name] = lacks | lacking.get(raw_name, False)
            fresh_rows = pa.table({
                name: made[name].cast(kind) if name in made else pa.nulls(len(rows), kind)
                for name, kind in zip(held.column_names, held.schema.types, strict=True)
            })  # fmt: skip
            notes += _note_lacking(role, described.column(id_name), lacking)
        catalogues[role] = _Catalogue(held, fresh_rows)
    return encoders, catalogues, tuple(notes)


def _missing(column: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    return np.asarray(column.is_null())


def _as_shown(rows: pa.Table, source: str, kind: pa.DataType, encoders: Encoders) -> pa.Array:
    """A raw column as a catalogue shows it, whose lists are cut as those of the feature from the same column."""
    if source not in rows.column_names:
        return pa.nulls(rows.num_rows, kind)
    column, separator = rows.column(source), getattr(encoders.encoders.get(source), "separator", None)
    return combined(column) if column.type == kind else shown_values(column.to_pylist(), kind, separator)


def _note_lacking(role: Side, ids: pa.ChunkedArray, lacking: Mapping[str, NDArray[np.bool_]]) -> list[str]:
    """A note on the new users or items without a value in some column, if there are any."""
    columns = [name for name, lacks in lacking.items() if lacks.any()]
    if not columns:
        return []
    some = np.logical_or.reduce([*lacking.values()])
    count, total, first = int(some.sum()), len(some), ids[int(np.argmax(some))].as_py()
    who = f"1 new {role}" if total == 1 else f"{count:,} of {total:,} new {role}s"
    who += f", such as '{first}', {'lacks' if count == 1 else 'lack'}"
    why = "an update reads only the file of new events, and known ones keep their values"
    remedy = "to give them, delete this version, add the columns to the file and update again"
    return [f"{who} values in {listed(columns)}: {why}; {remedy}"]


def _encoded(encoders: Encoders, name: str, rows: pa.Table, feature: Feature) -> StoredColumn:
    """A feature of raw rows; missing in all of them if they lack its column."""
    if encoders.can_encode(name, rows.column_names):
        made = encoders.encode(rows, [name])[name]
    else:
        made = encoders.encode_column(name, pa.nulls(rows.num_rows, pa.string()))
    dtype = str(feature.dtype)
    if isinstance(made, tuple):
        return Ragged(made[0].astype(dtype), np.asarray(made[1], np.int64))
    return made.astype(dtype)


def _from_arrow(column: pa.ChunkedArray, dtype: str) -> StoredColumn:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        array = combined(column)
        offsets = array.offsets.to_numpy().astype(np.int64)
        values = array.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        return Ragged(values.astype(dtype), offsets - offsets[0])
    return np.asarray(column.to_numpy()).astype(dtype)


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Events:
    """Events (T,) of some users, sorted by user and time; of equal times, known ones come first."""

    users: Ids
    items: Ids
    times: NDArray[np.generic]
    splits: Ids  # codes of `SPLITS`, or NEW
    context: Columns

    def take(self, rows: Ids) -> _Events:
        context = {name: take(column, rows) for name, column in self.context.items()}
        return _Events(self.users[rows], self.items[rows], self.times[rows], self.splits[rows], context)


class _GrownRows(BlockRows):
    """The rows of users with new events, of which those of train that are written already are left out."""

    def __init__(self, events: _Events, codes: Ids, plan: Plan, counts: Counts) -> None:
        self._plan, self._counts, self._history = plan, counts, plan.prepared.history
        self.users, self._items, self._splits = events.users, events.items, codes
        self._num_items = len(plan.prepared.vocabulary(ITEM))
        self._timestamps, self._weights, self._context = events.times, None, dict(events.context)

    @cached_property
    def _seen_in_train(self) -> Seen:
        items = np.where((self._splits == 0) | (self._splits == OLD), self._items, 0)
        return Seen.of(self.users, items, self._num_items)

    def latest(self) -> tuple[Ids, Columns]:
        """The users, and their latest events as a catalogue holds them; no columns without histories."""
        last = np.flatnonzero(np.diff(self.users, append=-1))
        if self._history is None:
            return self.users[last], {}
        timeline = Timeline.of(self.users, self._items)
        events = timeline.histories(last, self._history.length, with_own=True)
        own = self._history.of_events(self._items, self._timestamps, self._timestamps[last], events)
        return self.users[last], own


class _Growing:
    """A dataset while it grows."""

    def __init__(
        self, base: FeatureSpec, rules: GrowthRules, before: Encoders, encoders: Encoders,
        catalogues: Mapping[Side, _Catalogue],
    ) -> None:  # fmt: skip
        self.base, self.rules, self.before, self.encoders, self.catalogues = base, rules, before, encoders, catalogues
        sizes = {name: each.cardinality for name, each in encoders.vocabularies.items()}
        self.features = {
            name: feature.model_copy(update={"cardinality": sizes[base.vocabulary(name)]})
            if feature.is_categorical and self._has_vocabulary(name)
            else feature
            for name, feature in base.features.items()
        }

    def _has_vocabulary(self, name: str) -> bool:
        """Whether the ids of a feature are those of a vocabulary: its own, or that of the features it shares with."""
        space = self.base.vocabulary(name)
        encoder = self.before.encoders.get(space)
        return isinstance(encoder, VocabularyEncoder) and encoder.vocabulary == space

    def events(self, raw: pa.Table, users: Ids, items: Ids, context: Sequence[str], num_held: int) -> _Events:
        """The events of all users that may have other rows now: those with new events; with split time, everyone.

        The first `num_held` raw events are held out already.
        """
        new_context: Columns = {name: _encoded(self.encoders, name, raw, self.features[name]) for name in context}
        stamps: NDArray[np.generic] = np.asarray(raw.column(TIMESTAMP).to_numpy())
        touched = None if self.rules.split == "time" else np.unique(users)
        parts = list(self._old_events(touched, context))
        if self.rules.timestamp is None:  # an order, which goes on
            ends = [part.times.max() for part in self._old_events(None, ()) if len(part.times)]
            stamps = stamps + (max(ends, default=0) + 1 - (stamps.min() if len(stamps) else 0))
        splits = np.where(np.arange(len(users)) < num_held, SPLITS.index("test"), NEW)
        parts.append(_Events(users, items, stamps, splits, new_context))
        found = _Events(
            np.concatenate([part.users for part in parts]),
            np.concatenate([part.items for part in parts]),
            np.concatenate([part.times for part in parts]),
            np.concatenate([part.splits for part in parts]),
            {name: concatenate_column([part.context[name] for part in parts]) for name in context},
        )
        found = found.take(np.lexsort((np.arange(len(found.users)), found.times, found.users)))
        return found.take(self._kept(found)) if self.rules.once else found

    def _kept(self, events: _Events) -> Ids:
        """Known events, and the earliest of the new ones of each pair that is not known."""
        pairs = events.users * (len(self.encoders.vocabularies[ITEM]) + 1) + events.items
        order = np.lexsort((np.arange(len(pairs)), events.splits == NEW, pairs))
        first = np.ones(len(pairs), bool)
        first[order] = np.diff(pairs[order], prepend=-1) != 0
        return np.flatnonzero(first | (events.splits != NEW))

    def _old_events(self, touched: Ids | None, context: Sequence[str]) -> Iterator[_Events]:
        """The positives with known ids that the dataset holds, of some users; None: of all."""
        for code, split in enumerate(SPLITS):
            if split not in self.base.splits:
                continue
            reader = open_split(self.base, split, (USER, ITEM, TIMESTAMP, LABEL, *context))
            for columns in reader.batches():
                users, items = (np.asarray(columns[name]).astype(np.int64) for name in (USER, ITEM))
                kept = (np.asarray(columns[LABEL]) > 0) & (users > 0) & (items > 0)
                kept &= np.isin(users, touched) if touched is not None else True
                rows = np.flatnonzero(kept)
                own = {name: take(columns[name], rows) for name in context}
                times = np.asarray(columns[TIMESTAMP])[rows]
                yield _Events(users[rows], items[rows], times, np.full(len(rows), code), own)

    def codes(self, events: _Events) -> Ids:
        """The split of each event; OLD if it is in train already."""
        users, splits = events.users, events.splits
        codes = np.where(splits == NEW, 0, splits)
        if self.rules.split == "leave_one_out":
            ends = np.searchsorted(users, users, side="right")
            after, count = ends - 1 - np.arange(len(users)), ends - np.searchsorted(users, users)
            codes = np.where((after == 0) & (count > 1), 2, np.where((after == 1) & (count > 2), 1, 0))
        elif self.rules.split == "time":
            cuts = time_cuts(events.times, self.rules.valid_share, self.rules.test_share)
            codes = np.searchsorted(np.array(cuts), events.times, side="right")
        return np.where(splits == 0, OLD, codes)

    def write(self, out: Path, events: _Events, counts: Mapping[str, int]) -> tuple[FeatureSpec, dict[str, int], Ids]:
        """Write the dataset; returns its specification, where new rows begin, and the users with new events."""
        base, codes = self.base, self.codes(events)
        again = np.unique(events.users)
        held = self.rules.split != "given"  # whether valid and test are written again
        copy_companions(base, out)
        self.encoders.save(out)
        plan = self._plan(events)
        told = Counts(dict.fromkeys(SPLITS, 0), {})
        chunks: dict[str, tuple[Chunk, ...]] = {}
        first_new: dict[str, int] = {}
        numbers = (re.match(r"train-([0-9]{5,9})/", name) for name in base.sources["train"][0].files)
        number = 1 + max((int(found[1]) for found in numbers if found), default=0)
        latest: list[tuple[Ids, Columns]] = []
        with ExitStack() as stack:
            writers: dict[str, SplitWriter] = {}
            for split in SPLITS if held else ("train",):
                folder = split if split != "train" else f"train-{number:05d}"
                has_series = SERIES in base.features and split != "train"
                names = base.columns(split) if split in base.splits else None
                own = {n: f for n, f in self.features.items() if n != SERIES or has_series}
                own = own if names is None else {name: own[name] for name in names}
                writers[split] = stack.enter_context(SplitWriter(out, folder, own))
            for split in ("valid", "test") if held and self.rules.split != "time" else ():
                first_new[split] = self._copy_rows(split, again, writers[split])
            for start, stop in _blocks(events.users):
                rows = np.arange(start, stop)
                made = _GrownRows(events.take(rows), codes[rows], plan, told)
                for split, writer in writers.items():
                    for columns in made.of(split):
                        writer.write(columns)
                latest.append(made.latest())
        train = base.sources["train"][0]
        first_new["train"] = open_split(base, "train", (USER,)).num_rows
        for split, writer in writers.items():
            if writer.num_rows:
                chunks[split] = writer.chunks
            else:
                shutil.rmtree(out / writer.split, ignore_errors=True)
        for split, (chunk,) in base.sources.items():
            if split == "train" or split not in writers:
                _link(base, chunk, out)
                chunks.setdefault(split, (chunk,))
        if "train" in writers and writers["train"].num_rows:
            files = (*train.files, *writers["train"].chunks[0].files)
            chunks["train"] = (train.model_copy(update={"files": files}),)
        else:
            chunks["train"] = (train,)
        self._write_catalogues(out, latest)
        known = 0 if self.rules.split == "time" else self.rules.unknown_events  # everyone has an id now
        self.rules.model_copy(update={"unknown_events": known}).save(out)
        touched = np.unique(events.users[events.splits == NEW])
        ordered = {split: chunks[split] for split in SPLITS if split in chunks}
        metadata = self._metadata(writers, first_new, counts)
        spec = base.replace(features=self.features, sources=ordered, metadata=metadata, folder=out)
        spec.save(out)
        return FeatureSpec.load(out), first_new, touched

    def _plan(self, events: _Events) -> Plan:
        """The plan by which rows are made, with the grown features and catalogues."""
        base, features, encoders = self.base, self.features, self.encoders
        fitted = Fitted()
        fitted.features, fitted.encoders = dict(features), encoders
        prepared = {
            role: self.catalogues[role].prepared(key, features, [name for name in base.role(role) if name != key])
            for role, key in SIDES.items()
        }
        history = self._history(prepared["item"])
        counts = np.zeros(0, np.int64)
        if self.rules.histories.negatives == "popularity":
            counts = self._popularity(events)
        users = encoders.vocabularies[USER]
        columns = InteractionColumns(
            fitted, prepared["user"], prepared["item"], [Column(n, "number") for n in base.role("context")], users,
            np.arange(len(users) + 1), counts, counts, history,
        )  # fmt: skip
        rules, by_series = self.rules, SERIES in base.features
        return Plan(columns, rules.histories, rules.num_negatives, rules.seed, None, by_series)

    def _popularity(self, events: _Events) -> NDArray[np.int64]:
        """Events of each item, for ids from 1."""
        counts = np.bincount(events.items[events.splits == NEW], minlength=len(self.encoders.vocabularies[ITEM]) + 1)
        for part in self._old_events(None, ()):
            counts += np.bincount(part.items, minlength=len(counts))
        return counts[1:]

    def _history(self, items: PreparedCatalogue) -> HistoryColumns | None:
        length = self.rules.histories.history
        if length is None:
            return None
        base = self.base
        roles: tuple[Role, ...] = ("history", "negative_history")
        channels: dict[str, list[str]] = {role: list(base.role(role)) for role in roles if base.role(role)}
        columns: dict[str, NDArray[np.generic]] = {}
        for name in channels[HISTORY]:
            of = name.removeprefix(f"{HISTORY}_")
            if name == GAP:
                continue
            if of == ITEM:
                columns[of] = np.arange(items.count + 1, dtype=np.int32)
            else:
                column = items.columns[of]
                assert isinstance(column, np.ndarray)
                columns[of] = np.append(column.dtype.type(0), column)
        return HistoryColumns(length, columns, channels, (), self.rules.gap_unit)

    def _copy_rows(self, split: str, without: Ids, writer: SplitWriter) -> int:
        """Copy the rows of all other users; returns their number."""
        if split in self.base.splits:
            for columns in open_split(self.base, split).batches():
                rows = np.flatnonzero(~np.isin(np.asarray(columns[USER]), without))
                if len(rows):
                    writer.write({name: take(column, rows) for name, column in columns.items()})
        return writer.num_rows

    def _write_catalogues(self, out: Path, latest: Sequence[tuple[Ids, Columns]]) -> None:
        for role, name in SIDES.items():
            held = self.catalogues[role]
            whole = pa.concat_tables([held.old, *([held.new] if held.new is not None else [])]).combine_chunks()
            if role == "user" and self.rules.histories.history is not None:
                for users, columns in latest:
                    whole = _with_rows(whole, users - 1, columns)
            assert whole.num_rows == len(self.encoders.vocabularies[name])
            file = self.base.catalogue(role)
            assert file is not None
            pq.write_table(whole, out / file.relative_to(self.base.folder), row_group_size=16_384)

    def _metadata(
        self, writers: Mapping[str, SplitWriter], first_new: Mapping[str, int], counts: Mapping[str, int]
    ) -> dict[str, object]:
        """The metadata with the numbers of today."""
        summary = dict(_mapping(self.base.metadata.get("summary")))
        rows = dict(_mapping(summary.get("rows")))
        for split, writer in writers.items():
            rows[split] = writer.num_rows + (first_new["train"] if split == "train" else 0)
        total = summary.get("interactions")
        summary |= {"interactions": total + counts["events"]} if isinstance(total, int) else {}
        summary |= {f"{role}s": len(self.encoders.vocabularies[of]) for role, of in SIDES.items()}
        updates = summary.get("updates")
        summary |= {"rows": rows, "updates": 1 + (updates if isinstance(updates, int) else 0)}
        return {**self.base.metadata, "summary": summary}


def time_cuts(times: NDArray[np.generic], valid: float, test: float) -> tuple[float, float]:
    """The times at which valid and test begin, as `splits.by_time` cuts them; infinite for a split without rows."""
    different, counts = np.unique(times, return_counts=True)
    earlier, last = (np.cumsum(counts) - counts) * MILLION, len(different)
    half = int(np.searchsorted(earlier * 2, len(times) * MILLION))
    # The numbers of the times at which a split begins; `last` for a split without rows.
    begin, end = (int(np.searchsorted(earlier, len(times) * (MILLION - round(share * MILLION))))
                  for share in (test + valid, test))  # fmt: skip
    if test and end == last > half:
        end = last - 1
    if valid and begin >= end > half:
        begin = end - 1
    first, second = (float(different[place]) if place < last else float("inf") for place in (begin, end))
    return first, second


def _blocks(users: Ids) -> Iterator[tuple[int, int]]:
    """Parts of sorted rows, whole users at a time."""
    start = 0
    while start < len(users):
        stop = min(len(users), start + BLOCK_ROWS_WITH_HISTORIES)
        stop = int(np.searchsorted(users, users[stop - 1], side="right"))
        yield start, stop
        start = stop


def _with_rows(table: pa.Table, places: Ids, columns: Columns) -> pa.Table:
    """A catalogue with other values of some columns at some places."""
    index = np.arange(table.num_rows)
    index[places] = table.num_rows + np.arange(len(places))
    for name, column in columns.items():
        at, kind = table.column_names.index(name), table.schema.field(name).type
        values = pa.chunked_array([*table.column(name).chunks, to_arrow(column).cast(kind)])
        table = table.set_column(at, table.schema.field(name), combined(values).take(pa.array(index)))
    return table


def _link(base: FeatureSpec, chunk: Chunk, out: Path) -> None:
    """The files of a chunk in another folder too: as hard links, or copies where the file system has none."""
    for name in chunk.files:
        place = confined(out, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(base.path(name), place)
        except OSError:
            shutil.copyfile(base.path(name), place)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _record(base: FeatureSpec, spec: FeatureSpec, events: Path, counts: Mapping[str, int], started: float) -> None:
    """Write `prepare.json`."""
    record = {
        **_recorded(base),
        "inputs": [*_inputs(base), fingerprint(events)],
        "recspec": recspec.__version__,
        "grown_from": str(base.folder.resolve()),
        "new": dict(counts),
        "summary": spec.metadata.get("summary", {}),
        "seconds": round(time.perf_counter() - started, 3),
    }
    (spec.folder / PREPARE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
