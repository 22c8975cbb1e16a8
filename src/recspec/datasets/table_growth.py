"""A prepared dataset of your own table takes new events: all of its events are prepared again, with the ids it has.

New users, items and categories get the next ids. Fitted scales stay. In each split, rows that were there before come
first, so that training can go on from the new ones.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pa_dataset
from ibis.expr.datatypes import DataType
from ibis.expr.types import BooleanValue, Table
from ibis.expr.types import Column as Values
from numpy.typing import NDArray

import recspec
from recspec.base.errors import DataError, how_many, listed, nearest, shortened
from recspec.base.files import PathError, confined, special
from recspec.data.encoding import EVENT_SECONDS, TRUTH, Encoders
from recspec.data.prepare import (
    DESCRIBES,
    FILE_SPLIT,
    HOW,
    IS_TARGET,
    ITEM,
    ROW,
    SECONDS,
    SEEN,
    SPLIT_BEFORE,
    SPLITS,
    TIMESTAMP,
    USER,
    WEIGHT,
    Backend,
    Before,
    DuckDBBackend,
    Notes,
    RawRows,
    Roles,
    alike,
    count_rows,
    count_where,
    counts_by,
    fetch,
    figure,
    figures,
    fingerprint,
    is_missing_marker,
    number_of,
    silent,
    stage,
    time_range,
    typed,
)
from recspec.data.storage import PREPARE_FILE, open_split, preparation
from recspec.datasets.id_turnover import retire, waiting
from recspec.datasets.table import roles_of
from recspec.datasets.table_features import OURS, FeaturePlan, Tables, plan_features
from recspec.datasets.table_rows import EVENTS, GROWTH_FILE, GrowthRules, read_raw, reading_raw
from recspec.datasets.table_settings import Role, Settings
from recspec.datasets.table_write import write_interactions, write_labelled
from recspec.feature_spec import FeatureSpec

TYPES_SHOWN = 20  # of new events
MOST_GROUPS = 16  # row groups from which a sample of train is drawn
FEWEST_ALIKE = 5  # new ids that are spelled like known ones, from which the file is taken to be at fault


@dataclass(frozen=True)
class Grown:
    """A dataset with new events."""

    spec: FeatureSpec
    first_new: Mapping[str, int]
    """Split -> number of the first row that the dataset before did not hold there."""
    touched: NDArray[np.int64]
    """Ids of the users with new events, ascending."""
    counts: Mapping[str, int]
    """`events`, `users` and `items` that are new, and `left_out` rows of the file."""
    notes: tuple[str, ...] = ()
    """What was changed or left out of the file, what is missing of new users and items, and train rows held out now."""


def append_events(
    base: FeatureSpec,
    events: Path,
    out: Path,
    *,
    admit_after: int = 1,
    retire_after: str | None = None,
    retire_most: float = 1.0,
    metadata: Mapping[str, object] = MappingProxyType({}),
) -> Grown:
    """Write into the empty folder `out` the dataset `base` with the raw events of a file (CSV, JSON lines, Parquet).

    Args:
        base: the dataset.
        events: the file.
        out: where the new dataset goes.
        admit_after: events from which a new user or item gets an id.
        retire_after: time without an event after which a user or item is dropped, and its id stays blank.
        retire_most: largest share of the users or items that may be dropped so.
        metadata: what the new dataset says of itself beside its own.

    Raises:
        DataError: if the dataset takes no new events, the file lacks a column, or no event of it is new.
    """
    started = time.perf_counter()
    rules = GrowthRules.load(base)
    _check_rules(base, rules.settings)
    _check_new(base, events)
    before = Before(base, Encoders.load(base.folder), rules.dated)
    work = out / "work"
    with reading_raw(base.folder), DuckDBBackend(work / "tables", None, None) as backend:
        known = _known(backend, base, rules)
        plan = plan_features(known, base.folder)
        first = 1 + int(figure(backend, known.rows, known.rows[ROW].max()))
        new, told = _new_rows(events, rules, known, plan, first, work)
        num_rows = count_rows(backend, new)
        if not num_rows:
            raise DataError(f"{events}: holds no row")
        tables = replace(known, rows=backend.stage(_stacked(known.rows, new)), notes=Notes())
        if retire_after is not None:
            how = retire_after, rules.dated, retire_most
            tables, encoders, retired = retire(tables, before.encoders, *how)
            before, told = replace(before, encoders=encoders), [*told, *retired]
        held, waits = waiting(tables, admit_after)
        before, told = replace(before, waiting=held), [*told, *waits]
        if rules.settings.label is None:
            spec = write_interactions(out, tables, plan, silent, dataset=rules.dataset, before=before)
        else:
            spec = write_labelled(out, tables, plan, silent, before=before, copies=rules.copies)
        made = backend.read_parquet([out / EVENTS])
        kept = made.filter((made[ROW] >= first) & made[SPLIT_BEFORE].notnull())
        num_kept, user = count_rows(backend, kept), rules.settings.user
        users = None if user is None else fetch(backend, kept.select(user=kept[user]).distinct()).column("user")
        if not num_kept:
            raise DataError(
                f"{events}: holds no new event: each of its {num_rows:,} rows repeats a known one, or its "
                f"rating or weight is too low{''.join(f'; {each}' for each in waits)}"
            )
        notes = (*told, *before.notes, *_held_out_now(tables, made))
    shutil.rmtree(work, ignore_errors=True)
    after = Encoders.load(out)
    notes = (*notes, *_respelled(events, before.encoders, after))
    counts = {
        "events": num_kept,
        "users": len(after.vocabularies.get(USER, ())) - len(before.encoders.vocabularies.get(USER, ())),
        "items": len(after.vocabularies.get(ITEM, ())) - len(before.encoders.vocabularies.get(ITEM, ())),
        "left_out": num_rows - num_kept,
    }
    spec = _finished(base, spec, metadata)
    _record(base, spec, [] if metadata else [fingerprint(events)], counts, started)  # a journal has many parts
    touched = np.unique(after.vocabularies[USER].encode(users)) if users is not None else np.zeros(0, np.int64)
    return Grown(spec, before.first_new, touched[touched > 0], counts, notes)


def read_new_events(base: FeatureSpec, events: Path) -> tuple[pa.Table, tuple[str, ...]]:
    """The raw events of a file, read by the rules of a dataset, which does not take them; and notes on them.

    Raises:
        DataError: if the dataset takes no new events, holds those of this file, or can't read them.
    """
    rules = GrowthRules.load(base)
    _check_new(base, events)
    with (
        TemporaryDirectory(prefix="recspec-") as folder,
        reading_raw(base.folder),
        DuckDBBackend(Path(folder) / "tables", None, None) as backend,
    ):
        known = _known(backend, base, rules)
        new, told = _new_rows(events, rules, known, plan_features(known, base.folder), 0, Path(folder))
        return fetch(backend, new), tuple(told)


@dataclass(frozen=True)
class RawEvents:
    """The raw events that a dataset holds, and how they became its rows."""

    settings: Settings
    dated: bool
    """Whether times are seconds since 1970."""
    kinds: Mapping[str, pa.DataType]
    """Types of the columns."""
    place: Path

    @classmethod
    def of(cls, base: FeatureSpec) -> RawEvents:
        """Those of a dataset. Raises DataError if it takes no new events, or is damaged."""
        rules = GrowthRules.load(base)
        try:
            place = confined(base.folder, EVENTS)
            schema = pa_dataset.dataset(place).schema
        except (PathError, OSError, pa.ArrowException) as error:
            raise DataError(f"{base.folder}: {EVENTS} can't be read: {error}; prepare it again") from None
        return cls(rules.settings, rules.dated, dict(zip(schema.names, schema.types, strict=True)), place)

    @cached_property
    def newest(self) -> float | None:
        """The latest time; None without times."""
        time = self.settings.timestamp
        if time is None:
            return None
        found = pc.max(pa_dataset.dataset(self.place).to_table([time]).column(time)).as_py()
        return None if found is None else float(found)

    def blocks(
        self, split: str, names: Sequence[str] | None = None, *, drawn: np.random.Generator | None = None
    ) -> Iterator[pa.RecordBatch]:
        """A split's rows in blocks, by default with all columns of the file.

        With `drawn`, of at most `MOST_GROUPS` parts of the file, about 100,000 rows each, that are drawn by chance.

        Raises:
            DataError: if the file can't be read.
        """
        chosen = [name for name in self.kinds if name not in OURS] if names is None else list(names)
        try:
            parts = list(pa_dataset.dataset(self.place).get_fragments())
            if drawn is not None:
                parts = [group for part in parts for group in part.split_by_row_group()]
                if len(parts) > MOST_GROUPS:
                    parts = [parts[place] for place in np.sort(drawn.permutation(len(parts))[:MOST_GROUPS])]
            for part in parts:
                yield from part.to_batches(columns=chosen, filter=pc.field(SPLIT_BEFORE) == split)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.place}: can't be read: {error}; prepare the dataset again") from None

    def latest(self, key: str, names: Sequence[str]) -> pa.Table:
        """The latest value that events give of each of some columns, for each value of `key`."""
        time = [self.settings.timestamp] if self.settings.timestamp is not None else []
        table = pa_dataset.dataset(self.place).to_table([key, ROW, *time, *names])
        table = table.sort_by([(name, "ascending") for name in (*time, ROW)])
        keys = table.column(key).combine_chunks().dictionary_encode()
        codes, columns = np.asarray(keys.indices), {key: keys.dictionary}
        for name in names:
            given = np.flatnonzero(table.column(name).is_valid())
            last = np.full(len(keys.dictionary), -1)
            last[codes[given]] = given  # of several, the last one stays
            columns[name] = table.column(name).take(pa.array(last, mask=last < 0))
        return pa.table(columns)


def _check_rules(base: FeatureSpec, settings: Settings) -> None:
    """Refuse rules by which rows were not made that are there; these also bound how many negatives are drawn."""
    drawn, lists = settings.train_negatives, base.role("history")
    length = next((base.features[name].length for name in lists), None)
    negatives = settings.num_negatives if settings.label is None else 0
    pairs: Mapping[str, tuple[object, object]] = {
        "label": (settings.label is not None, "test_samples_per_series" not in base.metadata),
        "num_negatives": (negatives + 1, base.metadata.get("test_samples_per_series", 1)),
        "train_negatives": (drawn, base.metadata.get("train_negatives", 0)),
        "history": (settings.history, length),
    }
    wrong = [name for name, (of_rules, of_rows) in pairs.items() if of_rules != of_rows]
    rows = {split: open_split(base, split).num_rows for split in base.splits}
    if any(rows[split] % (negatives + 1) for split in SPLITS[1:] if split in rows):
        wrong.append("num_negatives")
    wrong += ["train_negatives"] if drawn >= max(1, rows.get("train", 0)) else []
    if wrong:
        names = listed(dict.fromkeys(wrong))
        raise DataError(f"{base.folder / GROWTH_FILE}: other rows than the dataset's, by {names}; prepare it again")


def _check_new(base: FeatureSpec, events: Path) -> None:
    """Refuse what is no file, and a file that the dataset holds already, as a job that is started again gives it."""
    if not events.is_file():
        what = "is a folder" if events.is_dir() else special(events) or "no such file"
        raise DataError(f"{events}: {what}; expected events in a file of CSV, JSON lines or Parquet")
    content = {**fingerprint(events), "name": None}
    if any({**each, "name": None} == content for each in _inputs(base)):
        held = f"the dataset {base.folder} holds the events of this file already"
        raise DataError(f"{events}: {held}; name a file of new events")


def _known(backend: Backend, base: FeatureSpec, rules: GrowthRules) -> Tables:
    """The events that a dataset holds, and its files of users and items."""
    found = {name: read_raw(backend, base.folder, name) for name in ("events", "users", "items")}
    events = found["events"]
    if events is None or count_rows(backend, events) != rules.events:
        raise DataError(f"{base.folder}: {EVENTS} is damaged: expected {rules.events:,} events; prepare it again")
    if wrong := _strange_columns(backend, events, rules.settings):
        raise DataError.of(f"{base.folder}: {EVENTS} is damaged; prepare it again", wrong)
    return Tables(backend, rules.settings, Notes(), events, found["users"], found["items"])


def _strange_columns(backend: Backend, events: Table, settings: Settings) -> list[str]:
    """What is wrong with the columns of known events that have a meaning of their own."""
    row, split = events[ROW], events[SPLIT_BEFORE]
    wrong = {
        f"'{ROW}' repeats a number, or has one below 0": (row.nunique() != events.count()) | (row.min() < 0),
        f"'{SPLIT_BEFORE}' holds another word than {listed(SPLITS)}": ~(split.isnull() | split.isin(SPLITS)).all(),
    }
    told = []
    for name, what in ((settings.timestamp, "time"), (settings.label, "label")):
        if name is None:
            continue
        if name not in events.columns or not events[name].type().is_numeric():
            told.append(f"'{name}', the {what}, is not there, or holds no numbers")
        elif what == "time":
            wrong[f"'{name}', the time, is empty"] = events[name].count() == 0
        else:
            is_label = events[name].isin([0, 1]).fill_null(False)
            wrong[f"'{name}', the label, holds other numbers than 0 and 1"] = ~is_label.all()
    return told + [what for what, is_so in figures(backend, events, wrong).items() if is_so]


# --- the new events --------------------------------------------------------------------------------------------------


def _new_rows(
    file: Path, rules: GrowthRules, known: Tables, plan: FeaturePlan, first: int, work: Path
) -> tuple[Table, list[str]]:
    """The events of a file as the known ones are, numbered from `first`, and notes on what was changed or dropped."""
    settings, backend = rules.settings, known.backend
    ids = tuple(name for name in (settings.user, settings.item) if name is not None)
    reading = replace(settings.reading, splits=(), found_time_format=rules.found_time_format, settable=False)
    rows = stage(backend, [file], ids, reading, Notes(), work)
    own_names = zip((settings.user, settings.item, settings.timestamp), (USER, ITEM, TIMESTAMP), strict=True)
    aliases = {own: name for own, name in own_names if own and own not in rows.raw.columns and name in rows.raw.columns}
    rows = replace(rows, raw=rows.raw.rename(aliases))
    _check_columns(rows, settings)
    there = {name for name in rows.raw.columns if name not in OURS}
    held = {name: name for name in known.rows.columns if name in there}
    kinds = {name: known.rows[name].type() for name in held}
    for name, (column, kind) in _described(known, plan, there).items():
        held[name], kinds[column] = column, kind
    table = typed(rows, _roles(settings, kinds))
    lists = {
        place.column: settings.list_separator
        for place in plan.places
        for column in plan.columns[place.role]
        if column.name == place.name and (column.kind == "list" or column.is_list)
    }
    checks: list[Check] = []
    if rules.dated:
        times = time_range(backend, known.rows.select(**{TIMESTAMP: known.rows[settings.timestamp]}))
        expected = f"seconds since 1970, as the dataset's times are, {times['first']} to {times['last']}"
        time = str(settings.timestamp)
        latest = (
            SECONDS[1] if figure(backend, known.rows, known.rows[time].max()) > EVENT_SECONDS[1] else EVENT_SECONDS[1]
        )
        checks.append((time, ~table[time].between(SECONDS[0], latest), expected))
    values = {
        name: _conformed(rows, table[column], kinds[column], lists.get(column), column == settings.timestamp, checks)
        for name, column in held.items()
    }
    _refuse(rows, table, checks)
    values |= {name: table[name] for name in (WEIGHT, SEEN, IS_TARGET) if name in table.columns}
    ready_made = settings.splits if isinstance(settings.splits, str) else FILE_SPLIT
    if ready_made in known.rows.columns and ready_made not in values:
        values[ready_made] = ibis.literal("train")
    new = backend.stage(table.select(**{ROW: table[ROW] + first}, **values))
    told = [*rows.notes.warnings, *rows.notes.dropped, *rows.notes.changed]
    return new, [*told, *(_new_types(backend, str(settings.event), known.rows, new) if settings.target else [])]


def _new_types(backend: Backend, event: str, known: Table, new: Table) -> list[str]:
    """A note on types of events that no known one has."""
    before, now = (counts_by(each.select(_type=each[event].cast("string").strip()), "_type") for each in (known, new))
    found = fetch(backend, now.anti_join(before, "_type").order_by(ibis.desc("rows"), "_type")).to_pylist()
    each = [f"{shortened(row['_type'])} ({how_many(row['rows'], 'event')})" for row in found[:TYPES_SHOWN]]
    more = f" and {len(found) - len(each):,} other types" if len(found) > len(each) else ""
    told = f"types of '{event}' that no known event has: {', '.join(each)}{more}; they are inputs alone"
    return [told] if each else []


def _check_columns(rows: RawRows, settings: Settings) -> None:
    there = [name for name in rows.raw.columns if name not in OURS]
    named = {"timestamp": "time", "weight": "weight", "label": "label", "group": "group"}
    needed = {settings.user: "", settings.item: ""}
    needed |= {getattr(settings, setting): f", the {what}" for setting, what in named.items()}
    by_type = settings.event_weights or settings.seen or settings.target or settings.dislikes
    needed |= {settings.event: ", the type of the event"} if by_type else {}
    if settings.rating is not None:
        needed[settings.rating] = f", the rating, which is {settings.min_rating:g} or more of an event"
    missing = [
        f"no column '{name}'{what}{nearest(name, there)}"
        for name, what in needed.items()
        if name is not None and name not in there
    ]
    if missing:
        between = "; " if len(missing) == 1 else "\n  "
        raise DataError(f"{DataError.of(rows.where, missing)}{between}found {listed(there)}", missing)


def _described(known: Tables, plan: FeaturePlan, there: Collection[str]) -> dict[str, tuple[str, DataType]]:
    """The columns of a file that describe users or items as their files do: by the name that events hold them under."""
    found: dict[str, tuple[str, DataType]] = {}
    sides: tuple[tuple[Role, str | None, Table | None], ...] = (
        ("user", known.settings.user, known.users),
        ("item", known.settings.item, known.items),
    )
    for role, key, side in sides:
        if side is None:
            continue
        features = {column: feature for feature, column in plan.in_file(role).items()}
        for column in side.columns:
            name = features.get(column, column)
            name = f"{column}_{role}" if name in known.rows.columns else name
            if name in there and column not in (key, *OURS):
                found[f"{DESCRIBES[role]}{column}"] = name, side[column].type()
    return found


def _roles(settings: Settings, kinds: Mapping[str, DataType]) -> Roles:
    """What the columns of a file of new events are for, given the types of the known ones."""
    roles = roles_of(settings)
    others = {name: kind for name, kind in kinds.items() if name not in (*roles.ids, roles.time)}
    texts = {name for name, kind in others.items() if kind.is_string()}
    features = [name for name in others if name not in texts]
    return replace(roles, texts=texts, categories=(), numbers={*roles.numbers} - texts, features=features)


Check = tuple[str, BooleanValue, str]
"""The name of a column, where its values are refused, and what is expected of them."""


def _conformed(
    rows: RawRows, values: Values, kind: DataType, separator: str | None, is_time: bool, checks: list[Check]
) -> Values:
    """A column of new events with the type that it has in known ones; adds what has to hold for that."""
    name, own = values.get_name(), values.type()
    if own.is_array() and kind.is_array():
        return values.cast(kind)
    if own.is_array() or kind.is_array():
        if separator is None or not (own.is_string() or kind.is_string()):
            raise DataError(
                f"{rows.where}: column '{name}' holds {own}; the events that the dataset holds have {kind} "
                "there, so write it in the same way"
            )
        if own.is_array():
            return values.cast("array<string>").join(separator)
        return values.split(separator).filter(lambda each: each != "").cast(kind)
    if kind.is_integer() and own.is_floating():
        whole = "a whole number of at most 64 bits, as the dataset's times are"
        whole = whole if is_time else "a whole number, as all known values are"
        checks.append((name, (values.abs() >= 2.0**63) | (values != values.floor()), whole))
        return values.cast(kind)
    if not own.is_string() or kind.is_string():
        return values.cast(kind)
    text = values.strip()
    number = number_of(text, "int64" if kind.is_integer() else "float64").cast(kind)
    made = ibis.coalesce(number, text.lower().cases(*TRUTH.items(), else_=None).cast(kind))
    wrong = (text != "") & ~is_missing_marker(text) & made.isnull()
    checks.append((name, wrong, f"a {'whole ' if kind.is_integer() else ''}number, as all known values are"))
    return made


def _refuse(rows: RawRows, table: Table, checks: Sequence[Check]) -> None:
    """Raise DataError for the first check that some rows fail; it names the first ones."""
    counts = count_where(rows.backend, table, {place: wrong for place, (_, wrong, _) in enumerate(checks)})
    for name, wrong, expected in (check for check, count in zip(checks, counts.values(), strict=True) if count):
        found = rows.first(table.filter(wrong).select(ROW, _value=table[name])).to_pydict()
        said = ", ".join(
            f"{place} is {value:.17g}" if isinstance(value, float) else f"{place} is {value!r}"
            for place, value in zip(rows.places(found[ROW]), found["_value"], strict=True)
        )
        raise DataError(f"{rows.where}: column '{name}': {said}; expected {expected}")


def _stacked(known: Table, new: Table) -> Table:
    """Known and new events one below the other; null where one lacks a column."""
    kinds = {**new.schema(), **known.schema()}
    both = [
        table.select(
            **{name: (table[name] if name in table.columns else ibis.null()).cast(kind) for name, kind in kinds.items()}
        )
        for table in (known, new)
    ]
    return both[0].union(both[1])


# --- what was made ----------------------------------------------------------------------------------------------------


def _held_out_now(tables: Tables, made: Table) -> list[str]:
    """A note on the rows of train before that are held out now."""
    trained = tables.rows.filter(tables.rows[SPLIT_BEFORE] == "train")
    held = made.filter(made[SPLIT_BEFORE].isin(["valid", "test"]))
    count = count_rows(tables.backend, held.semi_join(trained, ROW))
    if not count:
        return []
    why = "because late events moved the splits: the figures of this version are too good; train anew to measure it"
    return [f"{count:,} events that the model has trained on are held out now, {why}"]


def _respelled(events: Path, before: Encoders, after: Encoders) -> Iterator[str]:
    """Notes on new ids that are spelled like known ones. Raises DataError if that is how the file writes its ids."""
    for role, name in (("user", USER), ("item", ITEM)):
        if name not in before.vocabularies:
            continue
        known, ids = len(before.vocabularies[name]), after.vocabularies[name].values
        new = len(ids) - known
        if not new or not (pairs := alike(ids, known)):
            continue
        (one, other), *_ = pairs
        told = (
            f"{len(pairs):,} of {how_many(new, f'new {role}')} differ from a known one only {HOW}, such as "
            f"'{shortened(one)}' from '{shortened(other)}'"
        )
        if len(pairs) >= FEWEST_ALIKE and len(pairs) * 2 > new:
            raise DataError(f"{events}: {told}; write the ids as the dataset's events have them")
        yield f"{told}; they are others"


def _finished(base: FeatureSpec, spec: FeatureSpec, metadata: Mapping[str, object]) -> FeatureSpec:
    """The saved specification with further metadata of the earlier one. Raises DataError if the features differ."""
    now, then = (
        {name: feature.model_copy(update={"cardinality": None}) for name, feature in each.features.items()}
        for each in (spec, base)
    )
    if now != then or spec.channels != base.channels:
        raise DataError(f"{base.folder / GROWTH_FILE}: other features than the dataset's; prepare it again")
    old, own = base.summary, spec.summary
    updates = old.get("updates")
    summary = {**old, **own, "updates": 1 + (updates if isinstance(updates, int) else 0)}
    spec.replace(metadata={**base.metadata, **spec.metadata, **metadata, "summary": summary}).save(spec.folder)
    return FeatureSpec.load(spec.folder)


def _inputs(base: FeatureSpec) -> list[dict[str, object]]:
    """The raw files that a dataset was made from."""
    found = preparation(base.folder).get("inputs")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _record(
    base: FeatureSpec,
    spec: FeatureSpec,
    inputs: Sequence[Mapping[str, object]],
    counts: Mapping[str, int],
    started: float,
) -> None:
    """Write `prepare.json`."""
    record = {
        **preparation(base.folder),
        "inputs": [*_inputs(base), *inputs],
        "recspec": recspec.__version__,
        "grown_from": str(base.folder.resolve()),
        "new": dict(counts),
        "summary": spec.metadata.get("summary", {}),
        "seconds": round(time.perf_counter() - started, 3),
    }
    (spec.folder / PREPARE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
