"""From who did what and when to a dataset of positives to train on and candidates to rank.

Every row of train is a positive (label 1). For each user, valid and test hold one series: the positive held out first,
then `num_negatives` items the user never had to do with (label 0). Datasets of implicit feedback (`movielens`, `ncf`,
`table`, `amazon`) bring their rows as an Ibis expression, already split; the rest happens here, a block of users at a
time. Asked for `Histories`, every row holds what its user did before.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec import storage
from recspec.datasets.columns import Catalogue, Column, Fitted, PreparedCatalogue, fit_in_table, take, to_arrow
from recspec.datasets.histories import (
    GAP,
    HISTORY,
    NEGATIVE_HISTORY,
    SECONDS_A_DAY,
    Histories,
    Timeline,
    UnknownTargets,
    gap_column,
    item_columns,
    pieces,
)
from recspec.datasets.negatives import Distribution, Draws, Seen
from recspec.datasets.notes import Notes
from recspec.datasets.prepared import Progress
from recspec.encoding import ENCODERS_FILE, VOCABULARIES, NumberEncoder, Vocabulary, VocabularyEncoder
from recspec.errors import DataError, SettingsError, listed
from recspec.feature_spec import Chunk, Feature, FeatureSpec
from recspec.splits import SPLIT
from recspec.storage import Columns, Ragged, SplitWriter
from recspec.tables import ROW, Backend, at_least, blocks, count_rows, counts_by, fetch, keep_earliest

USER, ITEM, TIMESTAMP = "user_id", "item_id", "timestamp"
LABEL, SERIES = "label", "series"
SPLITS = ("train", "valid", "test")
Repeats = Literal["first", "keep"]

SECONDS = (1e8, 1e10)
"""Timestamps between March 1973 and November 2286 are shown as dates."""

BLOCK_ROWS = 1_000_000
"""Interactions of whole users handled at once: about 100 MB with their candidates."""
BLOCK_ROWS_WITH_HISTORIES = 250_000
"""Likewise where lists are made of them, whose memory comes on top."""
WRITING_BYTES = 370_000_000
"""What the process takes while it writes splits without lists (measured: 330 to 370 MB)."""
LIST_BYTES = 10
"""Memory for each value of a list in a row group of each split that waits to be written (4 bytes, held two and a half
times: 570 MB measured for 10 million rows with two lists of 50)."""
USERS_PER_GROUP = 16_384
"""Users in a row group of their catalogue, where it holds histories."""


def _nothing(kept: int) -> Mapping[str, object]:  # noqa: ARG001
    return {}


@dataclass(frozen=True)
class Source:
    """What a dataset hands over to be written."""

    dataset: str
    rows: Table
    """Columns user_id, item_id, timestamp, row and split, and those that `context` names."""
    order: Sequence[str] = (TIMESTAMP, ROW)
    """Columns that order a user's rows in time."""
    users: Catalogue | None = None
    items: Catalogue | None = None
    context: Sequence[Column] = ()
    raw_names: Mapping[str, str] = field(default_factory=dict)
    """Raw columns of `user_id` and `item_id` where they are named otherwise."""
    candidates: pa.Table | None = None
    """Listed test candidates: columns user_id and negatives (lists of raw item ids); drawn where None."""
    vocabularies: Literal["all", "train"] = "all"
    """The rows whose users and items are known; with `train` a user may have several rows in valid and test."""
    unknown_targets: UnknownTargets = "drop"
    """What becomes of rows of valid and test whose item is not known; those of unknown users stay, with id 0."""
    timed: bool = True
    """Whether `timestamp` holds times, and not just an order."""
    missing_values: Sequence[str] = ()
    """Raw texts that stand for a missing value; `rows` hold none, rows to predict may."""
    summary: Callable[[int], Mapping[str, object]] = _nothing
    """What the dataset itself counted on the way, told how many interactions were kept. It may add to `notes`."""
    notes: Notes = field(default_factory=Notes)
    """What the dataset inferred, dropped and changed on the way; what happens here is added."""


@dataclass(frozen=True)
class Cleaned:
    """Interactions once repeats are settled and users who have too few are gone, and how many rows that cost."""

    rows: Table
    before: Table
    num_before: int
    distinct: Table
    num_distinct: int | None
    """Rows once the repeats are gone; None where no user was left out, so that it is the number kept."""
    min_interactions: int

    def summary(self, kept: int) -> dict[str, object]:
        """What was dropped, given how many interactions were kept in the end."""
        distinct = kept if self.num_distinct is None else self.num_distinct
        return {"repeats_dropped": self.num_before - distinct, "of_users_with_too_few_dropped": distinct - kept}

    def note(self, backend: Backend, notes: Notes, kept: int, *, remedy: str = "") -> None:
        """Say what was dropped, with an example.

        Args:
            remedy: How to keep the repeats, where a setting does.
        """
        distinct = kept if self.num_distinct is None else self.num_distinct
        if self.num_before > distinct:
            left_out = first_left_out(backend, self.before, self.distinct)
            notes.dropped.append(
                f"{self.num_before - distinct:,} of {self.num_before:,} rows repeat an earlier one of the same user "
                f"and item, such as user '{left_out[USER]}' and item '{left_out[ITEM]}'; the earliest counts{remedy}"
            )
        if distinct > kept:
            left_out = first_left_out(backend, self.distinct, self.rows)
            notes.dropped.append(
                f"{distinct - kept:,} rows of users with fewer than {self.min_interactions:,} items, such as user "
                f"'{left_out[USER]}' (min_interactions)"
            )


def first_left_out(backend: Backend, rows: Table, kept: Table) -> Mapping[str, object]:
    """User and item of the first row of the file that is not among those kept."""
    left_out = rows.select(ROW, USER, ITEM).anti_join(kept.select(ROW), ROW)
    return dict(fetch(backend, left_out.order_by(ROW).limit(1)).to_pylist()[0])


def clean(
    backend: Backend,
    rows: Table,
    *,
    min_interactions: int,
    keys: Sequence[str] = (USER, ITEM),
    order: Sequence[str],
    repeats: Repeats = "first",
) -> Cleaned:
    """Settle repeats, then keep users with enough interactions.

    Args:
        repeats: `first` keeps the earliest of a user's interactions with an item, `keep` keeps all of them.

    Raises:
        DataError: if there is no interaction, or no user has enough.
    """
    before = count_rows(backend, rows)
    if before == 0:
        raise DataError("the raw files hold no interaction, a header at most; expected one row at least")
    distinct = keep_earliest(rows, keys, order) if repeats == "first" else rows
    if min_interactions <= 1:
        return Cleaned(distinct, rows, before, distinct, None, min_interactions)
    staged = backend.stage(distinct)  # because the users are counted over it, and then it is read again
    kept = at_least(staged, USER, min_interactions)
    if count_rows(backend, kept) == 0:
        raise DataError(f"no user has {min_interactions:,} items or more; set min_interactions lower")
    return Cleaned(kept, rows, before, staged, count_rows(backend, staged), min_interactions)


def write(
    backend: Backend,
    folder: Path,
    source: Source,
    *,
    num_negatives: int,
    seed: int,
    progress: Progress,
    histories: Histories | None = None,
    train_negatives: int = 0,
    negatives: Distribution = "uniform",
    reject_seen: bool = True,
) -> FeatureSpec:
    """Write splits, vocabularies and catalogues into `folder`.

    Args:
        num_negatives: Items of label 0 behind each positive of valid and test; none that the user ever acted on.
        histories: What the rows tell of their users' earlier events.
        train_negatives: Items of label 0 behind each row of train; none that the user acted on in train, for to spare
            those of valid and test would give them away.
        negatives: How items are drawn, those that stand in negative histories too.
        reject_seen: Without, any item is drawn whatever the user did, as the published Amazon data has it.

    Raises:
        DataError: if no interaction is left, or a catalogue names an id twice.
    """
    progress("sorting interactions", 0, None)
    rows = backend.stage(source.rows.order_by([USER, *source.order]))
    total = count_rows(backend, rows)
    if total == 0:
        raise DataError(f"{source.dataset}: no interaction is left to prepare; expected one row at least")
    progress("finding ids", 0, None)
    times = time_range(backend, rows)
    prepared = _prepare_columns(backend, rows, source, histories, _is_date(times["first"]))
    prepared.fitted.encoders.save(folder)
    if histories is None:
        prepared.users.write(folder / "users.parquet")
    prepared.items.write(folder / "items.parquet")
    draws = Draws(negatives, prepared.item_counts, reject_seen)
    train_draws = Draws(negatives, prepared.train_counts, reject_seen)
    _check_memory_limit(backend.memory_limit, prepared, total * (1 + max(num_negatives, train_negatives)))
    plan = _Plan(source, prepared, draws, train_draws, num_negatives, train_negatives, seed, backend.memory_limit)
    counts = _write_splits(backend, folder, rows, total, plan, progress)
    summary = {
        "interactions": total,
        "users": len(prepared.vocabulary(USER)),
        "items": len(prepared.vocabulary(ITEM)),
        **times,
        **source.summary(total),
        **counts.summary(plan),
    }
    _note_left_out(plan, counts)
    summary |= source.notes.summary()
    return _specification(folder, plan, counts, summary)


# --- what the columns become -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prepared:
    """Features, encoders and catalogues of the whole dataset."""

    fitted: Fitted
    users: PreparedCatalogue
    items: PreparedCatalogue
    context: Sequence[Column]
    everyone: Vocabulary
    """Of all users, known or not: the numbers that tell users apart while splits are written."""
    user_ids: NDArray[np.int64]
    """The id of each of those numbers."""
    item_counts: NDArray[np.int64]
    """How often each item stands in the interactions that the vocabulary is made from, for ids from 1 on."""
    train_counts: NDArray[np.int64]
    """How often each item stands in train."""
    history: _PreparedHistory | None = None

    @property
    def features(self) -> Mapping[str, Feature]:
        return self.fitted.features

    def vocabulary(self, name: str) -> Vocabulary:
        return self.fitted.encoders.vocabularies[name]


@dataclass(frozen=True)
class _PreparedHistory:
    """Which lists a row's history is made of."""

    asked: Histories
    columns: Mapping[str, NDArray[np.generic]]
    """The item's scalar ids by item id (I + 1,): the item's own id, its category, ..."""
    channels: Mapping[str, Sequence[str]]
    """The lists' names."""
    left_out: Sequence[str]
    """Features of which some item has no value, so that its place in a list would look like padding."""
    unit: float | None
    """Of the gaps, in the timestamp's own; None without gaps."""


def _prepare_columns(
    backend: Backend, rows: Table, source: Source, histories: Histories | None, dated: bool
) -> _Prepared:
    fitted = Fitted(missing_values=source.missing_values)
    train = rows.filter(rows[SPLIT] == "train")
    known = rows if source.vocabularies == "all" else train
    counted = fetch(backend, counts_by(known, ITEM))
    items = _with_candidates(counted.column(ITEM), source.candidates)
    users = Vocabulary.of(_values(backend, known, USER))
    fitted.add_id(USER, users, source.raw_names.get(USER))
    item_ids = Vocabulary.of(items)
    fitted.add_id(ITEM, item_ids, source.raw_names.get(ITEM))
    item_counts = _counts_by_id(item_ids, counted)
    everyone = users if source.vocabularies == "all" else Vocabulary.of(_values(backend, rows, USER))
    unseen = "stand in no row" if source.vocabularies == "all" else "stand in no train row"
    prepared = _Prepared(
        fitted,
        fitted.add_catalogue("user", USER, source.users, notes=source.notes, unseen=unseen),
        fitted.add_catalogue(
            "item", ITEM, source.items, notes=source.notes, unseen=unseen, name_missing=histories is not None
        ),
        source.context,
        everyone,
        np.append(0, np.arange(1, len(users) + 1) if everyone is users else users.encode(everyone.values)),
        item_counts,
        item_counts if known is train else _counts_by_id(item_ids, fetch(backend, counts_by(train, ITEM))),
    )
    for column in source.context:
        fitted.add(column.name, *fit_in_table(backend, train, column))
    if histories is not None:
        prepared = replace(prepared, history=_prepare_history(prepared, source, histories, dated))
    fitted.features[LABEL] = Feature(dtype="float32")
    fitted.features[TIMESTAMP] = Feature(dtype="float64" if rows[TIMESTAMP].type().is_floating() else "int64")
    return prepared


def _check_memory_limit(memory_limit: int | None, prepared: _Prepared, rows: int) -> None:
    """Refuse lists whose row groups, one for each split of at most `rows`, take more than the limit leaves."""
    lists = {name: feature.length for name, feature in prepared.features.items() if feature.length}
    values = sum(lists.values())
    least = WRITING_BYTES + len(SPLITS) * LIST_BYTES * values * min(rows, storage.BLOCK_ROWS)
    if memory_limit is not None and lists and least > memory_limit:
        raise SettingsError(
            f"--memory-limit of {memory_limit / 1e6:,.0f} MB is too little for rows with {values:,} values in lists "
            f"({listed(sorted(lists))}); give {-(-least // 10**8) * 100:,} MB or more, or make the lists shorter"
        )


def _counts_by_id(items: Vocabulary, counted: pa.Table) -> NDArray[np.int64]:
    counts = np.zeros(len(items), np.int64)
    counts[items.encode(counted.column(ITEM)) - 1] = counted.column("rows").to_numpy()
    return counts


def _prepare_history(prepared: _Prepared, source: Source, histories: Histories, dated: bool) -> _PreparedHistory:
    """The lists' columns, and in the specification and the encoders what they are."""
    fitted, length = prepared.fitted, histories.length
    columns: dict[str, NDArray[np.generic]] = {ITEM: np.arange(len(prepared.vocabulary(ITEM)) + 1, dtype=np.int32)}
    for name, column in prepared.items.columns.items():
        if isinstance(column, np.ndarray) and fitted.features[name].is_categorical:
            columns[name] = np.append(column.dtype.type(0), column)
    left_out = [name for name, column in columns.items() if (column[1:] == 0).any()]
    kept = {name: column for name, column in columns.items() if name not in left_out}
    channels = {HISTORY: [f"{HISTORY}_{name}" for name in kept]}
    if histories.negative:
        channels[NEGATIVE_HISTORY] = [f"{NEGATIVE_HISTORY}_{name}" for name in kept]
    gaps = histories.gaps and source.timed
    _check_names_are_free([*channels[HISTORY], *channels.get(NEGATIVE_HISTORY, ()), GAP], fitted.features)
    for prefix in (HISTORY, NEGATIVE_HISTORY) if histories.negative else (HISTORY,):
        for name in kept:
            of = {"vocabulary": name, "length": length, "padding": 0}
            fitted.features[f"{prefix}_{name}"] = fitted.features[name].model_copy(update=of)
    raw = source.raw_names.get(ITEM, ITEM)
    encoder = VocabularyEncoder(column=f"{HISTORY}_{raw}" if raw != ITEM else None, vocabulary=ITEM, separator="|",
                                length=length, keep="last")  # fmt: skip
    fitted.add_encoder(f"{HISTORY}_{ITEM}", encoder)
    if not gaps:
        return _PreparedHistory(histories, kept, channels, left_out, None)
    channels[HISTORY].append(GAP)
    fitted.features[GAP] = Feature(dtype="float32", length=length)
    fitted.add_encoder(GAP, NumberEncoder(log1p=True, separator="|", length=length, keep="last"))
    return _PreparedHistory(histories, kept, channels, left_out, SECONDS_A_DAY if dated else 1)


def _check_names_are_free(names: Sequence[str], features: Mapping[str, Feature]) -> None:
    taken = [
        f"feature '{name}' has a name that histories need; rename its column" for name in names if name in features
    ]
    if taken:
        raise DataError.of("rows", taken)


def _values(backend: Backend, rows: Table, name: str) -> pa.ChunkedArray:
    """Distinct raw values in sorted order."""
    return fetch(backend, counts_by(rows, name)).column(name)


def _with_candidates(items: pa.ChunkedArray, candidates: pa.Table | None) -> pa.ChunkedArray:
    if candidates is None:
        return items
    named = pc.unique(pc.list_flatten(candidates.column("negatives")))
    return pa.chunked_array([*items.chunks, named.cast(items.type)])


# --- the rows --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What is to be written."""

    source: Source
    prepared: _Prepared
    draws: Draws
    """Of candidates: a positive's popularity is measured over the same rows as a candidate's."""
    train_draws: Draws
    """Of all that a model trains on or reads; it knows nothing of held-out rows."""
    num_negatives: int
    train_negatives: int
    seed: int
    memory_limit: int | None

    @property
    def by_series(self) -> bool:
        """Whether a user may have several series in valid and in test, so that they are numbered."""
        return self.source.vocabularies == "train"


@dataclass
class _Counts:
    """Rows written to each split, and what was left out."""

    rows: dict[str, int]
    chunks: dict[str, tuple[Chunk, ...]]
    without_negatives: int = 0
    short_histories: int = 0
    unknown_targets: int = 0
    unknown_users: int = 0
    series: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    examples: dict[str, int] = field(default_factory=dict)
    """Of each count above a user's number, the first one met."""

    def count(self, name: str, users: NDArray[np.int64]) -> None:
        """Add the rows of some users to a count."""
        if len(users):
            setattr(self, name, getattr(self, name) + len(users))
            self.examples.setdefault(name, int(users[0]))

    def summary(self, plan: _Plan) -> dict[str, object]:
        told: dict[str, object] = {
            "rows": self.rows,
            "users_without_possible_negatives": self.without_negatives,
        }
        history = plan.prepared.history
        if history is not None:
            told["train_rows_dropped_by_histories"] = self.short_histories
            told |= {"without_history": list(history.left_out)} if history.left_out else {}
            told |= {"gap_unit": "days" if history.unit != 1 else "as the timestamp"} if history.unit else {}
        if plan.by_series:
            done = "dropped" if plan.source.unknown_targets == "drop" else "kept"
            told |= {f"unknown_targets_{done}": self.unknown_targets, "targets_of_unknown_users": self.unknown_users}
        return told


def _note_left_out(plan: _Plan, counts: _Counts) -> None:
    """Say which rows are in no split, or are there without an id."""
    notes, history = plan.source.notes, plan.prepared.history
    told = {
        "without_negatives": "held-out rows of users who acted on every item, so that no candidate is left beside them",
        "unknown_targets": "held-out rows whose item is not in train",
        "unknown_users": "held-out rows whose user is not in train; they have id 0",
    }
    if history is not None:
        told["short_histories"] = "train rows " + " or ".join(history.asked.leaves_out)
    for name, what in told.items():
        number = getattr(counts, name)
        if not number:
            continue
        kept = name == "unknown_users" or (name == "unknown_targets" and plan.source.unknown_targets == "keep")
        user = plan.prepared.everyone.decode(np.array([counts.examples[name]])).to_pylist()[0]
        end = "; they are kept with id 0 (unknown_targets)" if kept and name == "unknown_targets" else ""
        (notes.changed if kept else notes.dropped).append(f"{number:,} {what}{end}, such as one of user '{user}'")
    if history is not None and history.left_out:
        notes.dropped.append(
            f"histories of {listed(history.left_out)}: some item has no value, which would look like padding"
        )
    for split, rows in counts.rows.items():
        if not rows:
            notes.dropped.append(f"the split {split}: it has no row")


@dataclass(frozen=True)
class _Block:
    """Consecutive users with all their interactions, sorted by user and time."""

    users: NDArray[np.int64]
    """Their numbers among all users; ids, where all are known."""
    items: NDArray[np.int64]
    splits: NDArray[np.int64]
    """0 train, 1 valid, 2 test."""
    timestamps: NDArray[np.generic]
    context: Columns


def _write_splits(backend: Backend, folder: Path, rows: Table, total: int, plan: _Plan, progress: Progress) -> _Counts:
    listed_negatives = _listed(plan.source.candidates, plan.prepared)
    counts = _Counts(dict.fromkeys(SPLITS, 0), {})
    done = 0
    with ExitStack() as stack:
        writers = {name: stack.enter_context(SplitWriter(folder, name, _held(plan, name))) for name in SPLITS}
        users = stack.enter_context(_Users(folder / "users.parquet", plan.prepared))
        for block in _blocks(backend, rows, plan.prepared):
            made = _BlockRows(block, plan, counts, listed_negatives)
            for split in SPLITS:
                for columns in made.of(split):
                    writers[split].write(columns)
            users.write(made)
            done += len(block.users)
            progress("writing splits", done, total)
    if not writers["train"].num_rows and plan.prepared.history is not None:
        least = plan.prepared.history.asked.min_history
        raise DataError(f"{plan.source.dataset}: no train row has {least} events before it; lower min_history")
    for name, writer in writers.items():
        counts.rows[name] = writer.num_rows
        if writer.num_rows:
            counts.chunks[name] = writer.chunks
        else:
            _remove_empty(folder, writer)
    return counts


def _held(plan: _Plan, split: str) -> Mapping[str, Feature]:
    """The features that a split's files hold."""
    numbered = {SERIES: Feature(dtype="int64")} if plan.by_series and split != "train" else {}
    return {**plan.prepared.features, **numbered}


def _remove_empty(folder: Path, writer: SplitWriter) -> None:
    """A split without rows is left out: its file would say nothing."""
    for chunk in writer.chunks:
        for file in chunk.files:
            (folder / file).unlink()
    (folder / writer.split).rmdir()


def _listed(candidates: pa.Table | None, prepared: _Prepared) -> NDArray[np.int64] | None:
    """Listed negatives by user id: (users + 1, negatives)."""
    if candidates is None:
        return None
    users = prepared.vocabulary(USER).encode(candidates.column(USER))
    lists = candidates.column("negatives")
    items = prepared.vocabulary(ITEM).encode(pc.list_flatten(lists)).reshape(len(users), -1)
    table = np.zeros((len(prepared.vocabulary(USER)) + 1, items.shape[1]), np.int64)
    table[users] = items
    return table


def _blocks(backend: Backend, rows: Table, prepared: _Prepared) -> Iterator[_Block]:
    """All interactions, whole users at a time."""
    waiting: list[_Block] = []
    size = BLOCK_ROWS if prepared.history is None else BLOCK_ROWS_WITH_HISTORIES
    for table in blocks(backend, rows, size):
        whole = _join([*waiting, _block_of(table, prepared)])
        assert (np.diff(whole.users) >= 0).all(), "the engine gave the rows out of their order"
        cut = int(np.searchsorted(whole.users, whole.users[-1]))  # the last user may go on in the next block
        if cut:
            yield _part(whole, 0, cut)
        waiting = [_part(whole, cut, len(whole.users))]
    yield from waiting


def _block_of(batch: pa.Table, prepared: _Prepared) -> _Block:
    codes = pc.index_in(batch.column(SPLIT), value_set=pa.array(SPLITS)).to_numpy()
    context = {
        column.name: prepared.fitted.encode(column.name, batch.column(column.source)) for column in prepared.context
    }
    return _Block(
        prepared.everyone.encode(batch.column(USER)),
        prepared.vocabulary(ITEM).encode(batch.column(ITEM)),
        codes.astype(np.int64),
        batch.column(TIMESTAMP).to_numpy(),
        context,
    )


def _join(blocks: Sequence[_Block]) -> _Block:
    return _Block(
        np.concatenate([block.users for block in blocks]),
        np.concatenate([block.items for block in blocks]),
        np.concatenate([block.splits for block in blocks]),
        np.concatenate([block.timestamps for block in blocks]),
        {name: _stack([block.context[name] for block in blocks]) for name in blocks[0].context},
    )


def _stack(parts: Sequence[NDArray[np.generic] | Ragged]) -> NDArray[np.generic] | Ragged:
    lists = [part for part in parts if isinstance(part, Ragged)]
    return Ragged.concatenate(lists) if lists else np.concatenate([p for p in parts if not isinstance(p, Ragged)])


def _part(block: _Block, start: int, stop: int) -> _Block:
    places = np.arange(start, stop)
    return _Block(
        block.users[start:stop],
        block.items[start:stop],
        block.splits[start:stop],
        block.timestamps[start:stop],
        {name: take(column, places) for name, column in block.context.items()},
    )


class _BlockRows:
    """The rows that a block of users gives to each split, some at a time."""

    def __init__(self, block: _Block, plan: _Plan, counts: _Counts, listed: NDArray[np.int64] | None) -> None:
        self.block, self._plan, self._counts, self._listed = block, plan, counts, listed
        self._num_items = len(plan.prepared.vocabulary(ITEM))
        self._history = plan.prepared.history

    def of(self, split: str) -> Iterator[Columns]:
        """The columns of one split."""
        return self._train() if split == "train" else self._held(split)

    @cached_property
    def timeline(self) -> Timeline:
        """What histories hold."""
        return Timeline.of(self.block.users, self.block.items)

    @cached_property
    def _seen(self) -> Seen:
        return Seen.of(self.block.users, self.block.items, self._num_items)

    @cached_property
    def _seen_in_train(self) -> Seen:
        """Of all users of the block, those without train rows included."""
        items = np.where(self.block.splits == 0, self.block.items, 0)
        return Seen.of(self.block.users, items, self._num_items)

    @cached_property
    def _place_of_user(self) -> NDArray[np.int64]:
        """How many rows of its user stand before each row."""
        return np.arange(len(self.block.users)) - np.searchsorted(self.block.users, self.block.users)

    def _train(self) -> Iterator[Columns]:
        rows, count = np.flatnonzero(self.block.splits == 0), self._plan.train_negatives
        if self._history is not None:
            kept = self._history.asked.train_rows(self.timeline, self.block.users, rows)
            self._counts.count("short_histories", self.block.users[np.setdiff1d(rows, kept)])
            rows = kept
        for piece in pieces(rows, self._width(1 + count), self._plan.memory_limit):
            users = self.block.users[piece]
            items, labels = self.block.items[piece], np.ones(len(piece), np.float32)
            times = 1
            if count:
                first = self._place_of_user[piece] * count
                negatives = self._drawn(self._plan.train_draws, self._seen_in_train, users, first, count, 0)
                items, labels, times = _with_negatives(items, negatives)
            yield self._columns(piece, times, items, labels, 0)

    def _held(self, split: str) -> Iterator[Columns]:
        code, count = SPLITS.index(split), self._plan.num_negatives
        listed = self._listed if split == "test" else None
        rows = self._known_targets(np.flatnonzero(self.block.splits == code))
        if listed is None and self._plan.draws.reject_seen:
            possible = self._seen.num_unseen(self.block.users[rows]) > 0
            self._counts.count("without_negatives", self.block.users[rows[~possible]])
            rows = rows[possible]
        users = self.block.users[rows]
        first = (np.arange(len(rows)) - np.searchsorted(users, users)) * count
        width = self._width(1 + (count if listed is None else listed.shape[1]))
        for at in pieces(np.arange(len(rows)), width, self._plan.memory_limit):
            owners = users[at]
            negatives = (
                self._drawn(self._plan.draws, self._seen, owners, first[at], count, code)
                if listed is None
                else listed[owners]
            )
            items, labels, times = _with_negatives(self.block.items[rows[at]], negatives)
            columns = self._columns(rows[at], times, items, labels, code)
            if self._plan.by_series:
                columns[SERIES] = np.repeat(self._counts.series[split] + np.arange(len(at)), times)
                self._counts.series[split] += len(at)
            yield columns

    def _known_targets(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of valid or test whose item has an id, or all where that is asked for."""
        known = self.block.items[rows] > 0
        self._counts.count("unknown_targets", self.block.users[rows[~known]])
        rows = rows if self._plan.source.unknown_targets == "keep" else rows[known]
        users = self.block.users[rows]
        self._counts.count("unknown_users", users[self._plan.prepared.user_ids[users] == 0])
        return rows

    def _drawn(
        self, draws: Draws, seen: Seen, users: NDArray[np.int64], first: NDArray[np.int64], count: int, *seed: int
    ) -> NDArray[np.int64]:
        """Items for each row (R, count), of which the first is the user's draw `first` (R,)."""
        numbers = (first[:, None] + np.arange(count)).reshape(-1)
        drawn = draws.draw(seen, np.repeat(users, count), numbers, (self._plan.seed, *seed))
        return drawn.reshape(len(users), count)

    def _width(self, times: int) -> int:
        """Values of the longest lists that a row and those behind it hold."""
        return times * (self._history.asked.length if self._history is not None else 1)

    def _columns(
        self, rows: NDArray[np.int64], times: int, items: NDArray[np.int64], labels: NDArray[np.float32], code: int
    ) -> Columns:
        """Each row `times` times, with its items; user, context and history are the same in all of them."""
        block, prepared = self.block, self._plan.prepared
        places = np.repeat(rows, times)
        users = prepared.user_ids[block.users[places]]
        again = np.repeat(np.arange(len(rows)), times)
        return {
            USER: users.astype(np.int32),
            ITEM: items.astype(np.int32),
            **prepared.users.rows(users),
            **prepared.items.rows(items),
            **{name: take(column, places) for name, column in block.context.items()},
            **{name: take(column, again) for name, column in self._histories(rows, code).items()},
            LABEL: labels,
            TIMESTAMP: block.timestamps[places],
        }

    def _histories(self, rows: NDArray[np.int64], code: int) -> Columns:
        """The lists of each row's history, and of the items that stand for its events."""
        if self._history is None:
            return {}
        length = self._history.asked.length
        events = self.timeline.histories(rows, length)
        columns = self.history_columns(events, self.block.timestamps[rows])
        if not self._history.asked.negative:
            return columns
        inside = np.arange(len(events.values)) - np.repeat(events.offsets[:-1], events.lengths)
        numbers = np.repeat(self._place_of_user[rows] * length, events.lengths) + inside
        users = np.repeat(self.block.users[rows], events.lengths)
        seed = (self._plan.seed, len(SPLITS) + code)
        drawn = self._plan.train_draws.draw(self._seen_in_train, users, numbers, seed)
        return columns | item_columns(NEGATIVE_HISTORY, drawn, events.offsets, self._history.columns)

    def history_columns(self, events: Ragged, now: NDArray[np.generic]) -> Columns:
        """The lists of some histories (R,), given the time from which each looks back."""
        assert self._history is not None
        items = self.block.items[events.values]
        columns = item_columns(HISTORY, items, events.offsets, self._history.columns)
        if self._history.unit is not None:
            gaps = gap_column(self.block.timestamps, now, events, self._history.unit)
            columns[GAP] = Ragged(gaps, events.offsets)
        return columns


def _with_negatives(
    items: NDArray[np.int64], negatives: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:
    """Each positive, then its negatives (R, n): items and labels of all rows, and how many a positive has."""
    together = np.concatenate([items[:, None], negatives], axis=1)
    labels = np.zeros(together.shape, np.float32)
    labels[:, 0] = 1
    return together.reshape(-1), labels.reshape(-1), together.shape[1]


class _Users:
    """Writes the catalogue of users where it holds what each did last, block by block."""

    def __init__(self, path: Path, prepared: _Prepared) -> None:
        self._path, self._prepared = path, prepared
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []

    def __enter__(self) -> _Users:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._flush(1)
        if self._writer is not None:
            self._writer.close()

    def write(self, made: _BlockRows) -> None:
        """The users of a block that have an id, with their latest events in all splits."""
        history, users = self._prepared.history, made.block.users
        if history is None:
            return
        last = np.flatnonzero(np.diff(users, append=-1))
        ids = self._prepared.user_ids[users[last]]
        last, ids = last[ids > 0], ids[ids > 0]
        if not len(ids):
            return
        events = made.timeline.histories_of_users(last, history.asked.length)
        lists = made.history_columns(events, made.block.timestamps[last])
        table = self._prepared.users.table(int(ids[0]) - 1, len(ids))
        for name, column in lists.items():
            table = table.append_column(name, to_arrow(column))
        self._waiting.append(table)
        self._flush(USERS_PER_GROUP)

    def _flush(self, least: int) -> None:
        """Write row groups of equally many users while at least `least` wait: the blocks decide nothing."""
        while sum(table.num_rows for table in self._waiting) >= least:
            waiting = pa.concat_tables(self._waiting)
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, waiting.schema)
            self._writer.write_table(waiting.slice(0, USERS_PER_GROUP).combine_chunks())
            rest = waiting.slice(USERS_PER_GROUP)
            self._waiting = [rest] if rest.num_rows else []


# --- the specification -----------------------------------------------------------------------------------------------


def _specification(folder: Path, plan: _Plan, counts: _Counts, summary: dict[str, object]) -> FeatureSpec:
    source, prepared, num_negatives = plan.source, plan.prepared, plan.num_negatives
    if source.candidates is not None:
        num_negatives = len(source.candidates.column("negatives")[0])
    channels: dict[str, Sequence[str]] = {
        "user": (USER, *prepared.users.columns),
        "item": (ITEM, *prepared.items.columns),
        "context": tuple(column.name for column in prepared.context),
        **(prepared.history.channels if prepared.history is not None else {}),
        "label": (LABEL,),
        "group": (SERIES if plan.by_series else USER,),
    }
    metadata: dict[str, object] = {
        "dataset": source.dataset,
        "user_id": USER,
        "item_id": ITEM,
        "catalogues": {"user": "users.parquet", "item": "items.parquet"},
        "encoders": ENCODERS_FILE,
        "vocabularies": VOCABULARIES,
        "test_samples_per_series": num_negatives + 1,
        **({"train_negatives": plan.train_negatives} if plan.train_negatives else {}),
        "summary": summary,
    }
    return FeatureSpec(
        features={**prepared.features, **({SERIES: Feature(dtype="int64")} if plan.by_series else {})},
        sources=counts.chunks,
        channels={name: tuple(names) for name, names in channels.items() if names},
        metadata=metadata,
        folder=folder,
    )


def time_range(backend: Backend, rows: Table) -> dict[str, object]:
    """First and last timestamp; as dates where they can be seconds since 1970."""
    times = rows[TIMESTAMP]
    found = fetch(backend, rows.aggregate(first=times.min(), last=times.max())).to_pylist()[0]
    if SECONDS[0] <= found["first"] and found["last"] <= SECONDS[1]:
        return {name: _date(seconds) for name, seconds in found.items()}
    return dict(found)


def _is_date(time: object) -> bool:
    """Whether a timestamp counts seconds since 1970, so that `time_range` tells its date."""
    return isinstance(time, str)


def _date(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
