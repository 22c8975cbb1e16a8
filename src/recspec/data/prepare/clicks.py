"""From labelled rows (clicked or not) to a dataset for models of click-through rate.

Vocabularies and scales are fitted on train alone, so valid and test are as unknown as future rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import DataError, listed
from recspec.data.encoding import NumberEncoder, ScaleEncoder, Vocabulary
from recspec.data.prepare.backend import Backend, Part, PartFiles, fetch, figures, part_writers, write_parts
from recspec.data.prepare.catalogues import (
    Catalogue,
    Fitted,
    PreparedCatalogue,
    Rows,
    metadata,
    note_new,
    stored_weights,
    take,
)
from recspec.data.prepare.columns import Column, fit_columns, fit_in_table
from recspec.data.prepare.histories import ORDER as HISTORY_ORDER
from recspec.data.prepare.histories import HistorySettings, LabelledBlock, LabelledHistories
from recspec.data.prepare.interaction_rows import (
    blocks_of_users,
    check_memory_limit,
    new_in_split,
)
from recspec.data.prepare.names import EVENT_WEIGHT, GROUP, ITEM, LABEL, NEW, ROW, SPLIT, SPLITS, TIMESTAMP
from recspec.data.prepare.prepared import Progress
from recspec.data.prepare.splits import write_seen
from recspec.data.prepare.tables import blocks_of_part, counts_by, stage_by_number
from recspec.data.storage import SEEN_FILE, Columns, SplitWriter
from recspec.feature_spec import Chunk, Feature, FeatureSpec

BLOCK_ROWS = 262_144  # rows encoded at once
BLOCK_NUMBERS = 1 << 24  # numbers of vectors encoded at once

Role = Literal["user", "item", "context"]


@dataclass(frozen=True, kw_only=True)
class Source(Rows):
    """Labelled rows: columns row, split, label (0 or 1), group if `grouped`, timestamp if `timed`, event_weight if
    `weighted`, and those of `ids` and `columns`."""

    ids: Mapping[Literal["user", "item"], Column]
    columns: Mapping[Role, Sequence[Column]]
    """The other features. Those of a catalogue are in the rows too, so that unknown items have theirs."""
    raw_names: Mapping[str, str | None] = field(default_factory=dict)  # raw columns of the ids, if their names differ
    grouped: Literal[False, "values", "ids"] = False
    """Whether rows are ranked in groups: by any values, or by whole numbers from 0, kept as they are."""
    kept: Sequence[str] = ()  # numbers kept as they are, without a role, so that no model reads them
    other_labels: Sequence[str] = ()  # columns of 0 and 1 that are labels too
    timed: bool = False  # whether rows have times, which are kept as they are, without a role
    histories: HistorySettings | None = None  # if given, rows hold the earlier events of their user, in order of time
    seed: int = 1  # of the items drawn for negative histories
    min_count: int = 1  # values in fewer train rows become unknown
    strip: bool = False  # ignores blanks around raw texts; `rows` contain none, rows to predict may
    summary: Mapping[str, object] = field(default_factory=dict)


def write(backend: Backend, folder: Path, source: Source, *, progress: Progress) -> FeatureSpec:
    """Write splits, vocabularies and catalogues. Raises DataError if train is empty or a catalogue repeats an id."""
    progress("splitting rows", 0, None)
    key, *order = HISTORY_ORDER if source.histories is not None else (ROW,)
    rows = backend.stage_by(source.rows, key, order)
    counted = {entry[SPLIT]: entry["rows"] for entry in fetch(backend, counts_by(rows, SPLIT)).to_pylist()}
    total = sum(counted.values())
    if not total:
        raise DataError(f"{source.dataset}: the files hold no row; expected one at least for training")
    if not counted.get("train"):
        raise DataError(f"{source.dataset}: none of {total:,} rows is for training; give valid and test smaller shares")
    progress("finding ids", 0, None)
    fitted, histories = _fit(backend, rows, source, folder, counted["train"])
    if histories is not None and source.before is not None:
        rows = stage_by_number(backend, rows, histories.everyone, order, folder)
    if histories is not None:
        check_memory_limit(backend.memory_limit, fitted.features, total)
    chunks = _write_splits(backend, folder, rows, source, fitted, histories, counted, progress)
    if len(source.ids) == 2:
        write_seen(backend, folder, rows.filter(rows[LABEL] > 0) if source.seen is None else source.seen)
    return _specification(folder, source, fitted, histories, chunks, counted)


def _fit(
    backend: Backend, rows: Table, source: Source, folder: Path, num_train: int
) -> tuple[Fitted, LabelledHistories | None]:
    """Fit all features and write the encoders and catalogues; users with histories are written with the rows."""
    train = rows.filter(rows[SPLIT] == "train")
    before = source.before.encoders if source.before else None
    fitted = Fitted(source.missing_values, source.missing_by_column, before, strip=source.strip)
    for column in source.ids.values():
        _, vocabulary = fit_in_table(backend, train, column, source.min_count)
        assert vocabulary is not None
        fitted.add_id(column.name, vocabulary, source.raw_names.get(column.name))
    columns = [*chain(*source.columns.values())]
    single = [fitted.fixed(column) for column in columns if column.kind != "cross"]
    found = fit_columns(backend, train, num_train, single, source.min_count)
    for column in columns:
        if column.kind == "cross":
            fitted.add_cross(column)
        else:
            fitted.add(column.name, *next(found))
    _note_logarithms(source, fitted)
    for name in source.kept:
        fitted.add(name, NumberEncoder(), None)
    given: dict[Literal["user", "item"], Catalogue | None] = {"user": source.users, "item": source.items}
    catalogues: dict[str, PreparedCatalogue] = {}
    few = "occur in no train row" if source.min_count <= 1 else f"occur in fewer than {source.min_count} train rows"
    for role, column in source.ids.items():
        catalogues[role] = fitted.add_catalogue(role, column.name, given[role], notes=source.notes, unseen=few)
        if role == "item" or source.histories is None:
            catalogues[role].write(folder / f"{role}s.parquet")
        if source.before is not None and (held := given[role]) is not None:
            source.before.notes.extend(note_new(role, column.name, held, source.before.encoders, fitted.encoders))
    histories = None
    if source.histories is not None:
        raw_item = source.raw_names.get(ITEM) or ITEM
        histories = LabelledHistories.fit(
            backend, rows, fitted, catalogues, source.histories, raw_item, source.seed, source.before
        )
    if source.timed:
        fitted.features[TIMESTAMP] = Feature(dtype="float64" if rows[TIMESTAMP].type().is_floating() else "int64")
    if source.weighted:
        fitted.features[EVENT_WEIGHT] = Feature(dtype="float32")
    fitted.encoders.save(folder)
    return fitted, histories


def _note_logarithms(source: Source, fitted: Fitted) -> None:
    """Note the numbers whose logarithm was chosen."""
    free = [column.name for column in chain(*source.columns.values()) if column.log1p is None]
    logs = [name for name in free if getattr(fitted.encoders.encoders[name], "log1p", False)]
    if logs:
        source.notes.inferred.append(
            f"{listed(logs)}: skewed in train, so models read the scaled "
            "logarithm ln(1 + x) (numeric=[...] keeps the numbers)"
        )


def _write_splits(
    backend: Backend,
    folder: Path,
    rows: Table,
    source: Source,
    fitted: Fitted,
    histories: LabelledHistories | None,
    counted: Mapping[str, int],
    progress: Progress,
) -> dict[str, tuple[Chunk, ...]]:
    groups = None
    if source.grouped == "values":
        groups = Vocabulary.of(fetch(backend, counts_by(rows, GROUP)).column(GROUP))
        fitted.features[GROUP] = Feature(dtype="int32", cardinality=groups.cardinality)
    elif source.grouped == "ids":
        fitted.features[GROUP] = Feature(dtype="int64", cardinality=_group_cardinality(backend, rows))
    fitted.features |= {name: Feature(dtype="float32") for name in (LABEL, *source.other_labels)}
    sent = replace(source, rows=None, users=None, items=None, seen=None, before=None)  # executors need no tables
    splits = [name for name in SPLITS if name in counted]
    plan = _Plan(sent, fitted, groups, histories, splits, grows=source.before is not None)
    found, first_new = _Counts(), source.before.first_new if source.before else None
    write_part, total = partial(_write_part, plan), sum(counted.values())
    chunks = write_parts(backend, folder, rows, total, write_part, found, first_new, progress)
    held_out = sum(found.rows.values()) - found.rows["train"]
    if histories is not None:
        histories.counts.update(found.histories)
        if not found.rows["train"]:
            assert source.histories is not None
            least = source.histories.min_history
            raise DataError(f"{source.dataset}: no train row has {least} events before it; lower min_history")
        histories.note(source.notes)
    source.notes.changed += [
        f"{count:,} of {held_out:,} held-out rows have {role} id 0: train lacks their {role}"
        for role, count in found.unknown.items()
        if count
    ]
    source.notes.changed += [
        f"'{name}': {count:,} of {held_out:,} held-out rows are beyond the range of train, and take "
        "its nearer end (numeric=[...] keeps numbers)"
        for name, count in found.beyond.items()
        if count
    ]
    if source.min_count > 1:
        few = f"ids and categories in fewer than {source.min_count:,} train rows"
        source.notes.changed.append(f"{few} share id 0 with unknown ones (min_count)")
    return chunks


@dataclass(frozen=True)
class _Plan:
    """How labelled rows are encoded. Executors of a cluster receive it."""

    source: Source  # without its tables
    fitted: Fitted
    groups: Vocabulary | None
    histories: LabelledHistories | None
    splits: Sequence[str]
    grows: bool  # whether rows that are new in their split are written apart

    @property
    def columns(self) -> Sequence[Column]:
        """Those of the ids first."""
        return (*self.source.ids.values(), *chain(*self.source.columns.values()))


@dataclass(frozen=True)
class _Counts:
    """Rows by split, and what is noted of them."""

    rows: Counter[str] = field(default_factory=Counter)
    new: Counter[str] = field(default_factory=Counter)  # those that a dataset before did not hold in their split
    unknown: Counter[str] = field(default_factory=Counter)  # held-out rows with id 0, by role
    beyond: Counter[str] = field(default_factory=Counter)  # held-out rows beyond the range of train, by number
    histories: Counter[str] = field(default_factory=Counter)  # see `LabelledHistories.counts`

    def add(self, other: _Counts) -> None:
        self.rows.update(other.rows)
        self.new.update(other.new)
        self.unknown.update(other.unknown)
        self.beyond.update(other.beyond)
        self.histories.update(other.histories)


def _write_part(plan: _Plan, part: Part) -> tuple[PartFiles, _Counts]:
    """Encode and write the rows of a part."""
    counts, fitted = _Counts(), plan.fitted
    histories = None if plan.histories is None else replace(plan.histories, counts=counts.histories)
    limited = [column for column in plan.columns if column.limited]
    if histories is not None:
        blocks = blocks_of_users(part, with_histories=True)
    else:
        numbers = sum(feature.length or 0 for feature in fitted.features.values() if feature.is_vector)
        blocks = blocks_of_part(part, max(1, min(BLOCK_ROWS, BLOCK_NUMBERS // max(1, numbers))))
    names = [f"{name}{end}" for end in (("", NEW) if plan.grows else ("",)) for name in plan.splits]
    with part_writers(part.folder, dict.fromkeys(names, fitted.features)) as (writers, users):
        for block in blocks:
            own = LabelledBlock(block, histories) if histories is not None else None
            for name in plan.splits:
                for rows, lists in _rows_of_split(block, name, own):
                    columns = _columns(rows, plan) | lists
                    _write_rows(columns, new_in_split(rows), writers[name], writers.get(f"{name}{NEW}"))
                    if name != "train":
                        for role, identity in plan.source.ids.items():
                            counts.unknown[role] += int((np.asarray(columns[identity.name]) == 0).sum())
                        counts.beyond.update({column.name: _num_outside(fitted, column, rows) for column in limited})
            if own is not None and (table := own.catalogue()) is not None:
                users.write(table)
            part.done(block.num_rows)
    for name in plan.splits:
        counts.new[name] = writers[f"{name}{NEW}"].num_rows if plan.grows else 0
        counts.rows[name] = writers[name].num_rows + counts.new[name]
    return PartFiles.of(part.folder, writers), counts


def _write_rows(columns: Columns, is_new: NDArray[np.bool_] | None, held: SplitWriter, new: SplitWriter | None) -> None:
    """Write the rows that are new in their split apart, if a dataset was there before."""
    if is_new is None or new is None:
        held.write(columns)
        return
    for writer, places in ((held, np.flatnonzero(~is_new)), (new, np.flatnonzero(is_new))):
        if len(places):
            writer.write({name: take(column, places) for name, column in columns.items()})


def _rows_of_split(batch: pa.Table, split: str, own: LabelledBlock | None) -> Iterator[tuple[pa.Table, Columns]]:
    """The rows of a split in a block, some at a time, with their histories."""
    if own is None:
        part = batch.filter(pc.equal(batch.column(SPLIT), split))
        if part.num_rows:
            yield part, {}
        return
    for rows in own.rows(split):
        yield batch.take(pa.array(rows)), own.histories(rows, SPLITS.index(split))


def _num_outside(fitted: Fitted, column: Column, rows: pa.Table) -> int:
    encoder = fitted.encoders.encoders[column.name]
    return int(encoder.is_outside(rows.column(column.source)).sum()) if isinstance(encoder, ScaleEncoder) else 0


def _group_cardinality(backend: Backend, rows: Table) -> int:
    """One more than the largest group; refuses groups that are missing or negative."""
    group = rows[GROUP]
    assert group.type().is_integer(), group.type()
    asked = {"least": group.min(), "most": group.max(), "missing": group.isnull().sum()}
    least, most, missing = figures(backend, rows, asked).values()
    if missing or least < 0:
        had = f"{missing:,} rows without one" if missing else f"the number {least}"
        raise DataError(f"groups: found {had}; expected a whole number from 0 on in every row")
    return int(most) + 1


def _columns(batch: pa.Table, plan: _Plan) -> Columns:
    fitted = plan.fitted
    sources = {column.name: column.source for column in plan.columns}
    columns: Columns = {
        column.name: fitted.encode_cross(column, [batch.column(sources[name]) for name in column.crossed])
        if column.kind == "cross"
        else fitted.encode(column.name, batch.column(column.source))
        for column in plan.columns
    }
    columns |= {name: fitted.encode(name, batch.column(name)) for name in plan.source.kept}
    if plan.source.grouped == "ids":
        columns[GROUP] = batch.column(GROUP).to_numpy().astype(np.int64)
    elif plan.groups is not None:
        columns[GROUP] = plan.groups.encode(batch.column(GROUP)).astype(np.int32)
    labels = (LABEL, *plan.source.other_labels)
    columns |= {name: batch.column(name).to_numpy().astype(np.float32) for name in labels}
    times = batch.column(TIMESTAMP).to_numpy() if plan.source.timed else None
    if times is not None:
        columns[TIMESTAMP] = times
    if plan.source.weighted:
        weights = batch.column(EVENT_WEIGHT).cast("float64").to_numpy()
        columns[EVENT_WEIGHT] = stored_weights(weights, times, plan.source.decay)
    return columns


def _specification(
    folder: Path,
    source: Source,
    fitted: Fitted,
    histories: LabelledHistories | None,
    chunks: Mapping[str, tuple[Chunk, ...]],
    counted: Mapping[str, int],
) -> FeatureSpec:
    ids: dict[str, str] = {role: identity.name for role, identity in source.ids.items()}
    channels: dict[str, tuple[str, ...]] = {role: (name,) for role, name in ids.items()}
    rows = {name: counted[name] for name in SPLITS if name in counted}
    if histories is not None:
        rows["train"] -= histories.counts["short"]
    summary: dict[str, object] = {"rows": rows}
    summary |= {f"{role}s": len(fitted.encoders.vocabularies[name]) for role, name in ids.items()}
    for part, columns in source.columns.items():
        if columns:
            channels[part] = (*channels.get(part, ()), *(column.name for column in columns))
    if histories is not None:
        summary["train_rows_dropped_by_histories"] = histories.counts["short"]
        channels |= {role: tuple(names) for role, names in histories.columns.channels.items()}
    channels["label"] = (LABEL, *source.other_labels)
    if source.grouped:
        channels["group"] = (GROUP,)
    named = {"timestamp": TIMESTAMP} if source.timed else {}
    named |= {"event_weight": EVENT_WEIGHT} if source.weighted else {}
    named |= {"seen": SEEN_FILE} if len(ids) == 2 else {}
    told = metadata(source.dataset, ids, {**summary, **source.summary, **source.notes.summary()}, **named)
    return FeatureSpec(fitted.features, chunks, channels, told, folder)
