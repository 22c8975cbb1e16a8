"""From who did what and when to a dataset of positives to train on and candidates to rank.

Every row of train is a positive (label 1). For each user, valid and test hold one series: the positive held out first,
then `num_negatives` items the user never had to do with (label 0). Datasets of implicit feedback (`movielens`, `ncf`,
`table`) bring their rows as an Ibis expression, already split; the rest happens here, a block of users at a time.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.datasets.columns import Catalogue, Column, Fitted, PreparedCatalogue, fit_in_table, take
from recspec.datasets.prepared import Progress
from recspec.encoding import ENCODERS_FILE, VOCABULARIES, Vocabulary
from recspec.errors import DataError
from recspec.feature_spec import Chunk, Feature, FeatureSpec
from recspec.splits import SPLIT
from recspec.storage import Columns, Ragged, SplitWriter
from recspec.tables import ROW, Backend, at_least, blocks, count_rows, counts_by, fetch, keep_earliest

USER, ITEM, TIMESTAMP = "user_id", "item_id", "timestamp"
LABEL = "label"
SPLITS = ("train", "valid", "test")

SECONDS = (1e8, 1e10)
"""Timestamps between March 1973 and November 2286 are shown as dates."""

BLOCK_ROWS = 1_000_000
"""Interactions of whole users handled at once: about 100 MB with their candidates."""


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
    summary: Callable[[int], Mapping[str, object]] = _nothing
    """What the dataset itself counted on the way, told how many interactions were kept."""


@dataclass(frozen=True)
class Cleaned:
    """Interactions without repeats and without users who have too few, and how many rows that cost."""

    rows: Table
    num_before: int
    num_distinct: int | None
    """Rows once the repeats are gone; None where no user was left out, so that it is the number kept."""

    def summary(self, kept: int) -> dict[str, object]:
        """What was dropped, given how many interactions were kept in the end."""
        distinct = kept if self.num_distinct is None else self.num_distinct
        return {"repeats_dropped": self.num_before - distinct, "of_users_with_too_few_dropped": distinct - kept}


def clean(
    backend: Backend, rows: Table, *, min_interactions: int, keys: Sequence[str] = (USER, ITEM), order: Sequence[str]
) -> Cleaned:
    """Keep the earliest of every user's interactions with an item, then users with enough different items."""
    before = count_rows(backend, rows)
    distinct = keep_earliest(rows, keys, order)
    if min_interactions <= 1:
        return Cleaned(distinct, before, None)
    staged = backend.stage(distinct)  # because the users are counted over it, and then it is read again
    return Cleaned(at_least(staged, USER, min_interactions), before, count_rows(backend, staged))


def write(
    backend: Backend, folder: Path, source: Source, *, num_negatives: int, seed: int, progress: Progress
) -> FeatureSpec:
    """Write splits, vocabularies and catalogues into `folder`.

    Raises:
        DataError: if no interaction is left, or a catalogue names an id twice.
    """
    progress("sorting interactions", 0, None)
    rows = backend.stage(source.rows.order_by([USER, *source.order]))
    total = count_rows(backend, rows)
    if total == 0:
        raise DataError(f"{source.dataset}: no interaction is left after the filters; loosen them")
    progress("finding ids", 0, None)
    prepared = _prepare_columns(backend, rows, source)
    prepared.fitted.encoders.save(folder)
    prepared.users.write(folder / "users.parquet")
    prepared.items.write(folder / "items.parquet")
    counts = _write_splits(backend, folder, rows, total, source, prepared, num_negatives, seed, progress)
    summary = {
        "interactions": total,
        "users": len(prepared.vocabulary(USER)),
        "items": len(prepared.vocabulary(ITEM)),
        **time_range(backend, rows),
        **source.summary(total),
        **counts.summary(),
    }
    return _specification(folder, source, prepared, counts, num_negatives, summary)


# --- what the columns become -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prepared:
    """Features, encoders and catalogues of the whole dataset."""

    fitted: Fitted
    users: PreparedCatalogue
    items: PreparedCatalogue
    context: Sequence[Column]

    @property
    def features(self) -> Mapping[str, Feature]:
        return self.fitted.features

    def vocabulary(self, name: str) -> Vocabulary:
        return self.fitted.encoders.vocabularies[name]


def _prepare_columns(backend: Backend, rows: Table, source: Source) -> _Prepared:
    fitted = Fitted()
    items = _with_candidates(_values(backend, rows, ITEM), source.candidates)
    fitted.add_id(USER, Vocabulary.of(_values(backend, rows, USER)), source.raw_names.get(USER))
    fitted.add_id(ITEM, Vocabulary.of(items), source.raw_names.get(ITEM))
    prepared = _Prepared(
        fitted,
        fitted.add_catalogue("user", USER, source.users),
        fitted.add_catalogue("item", ITEM, source.items),
        source.context,
    )
    train = rows.filter(rows[SPLIT] == "train")
    for column in source.context:
        fitted.add(column.name, *fit_in_table(backend, train, column))
    fitted.features[LABEL] = Feature(dtype="float32")
    fitted.features[TIMESTAMP] = Feature(dtype="float64" if rows[TIMESTAMP].type().is_floating() else "int64")
    return prepared


def _values(backend: Backend, rows: Table, name: str) -> pa.Array:
    """Distinct raw values in sorted order."""
    return fetch(backend, counts_by(rows, name)).column(name).combine_chunks()


def _with_candidates(items: pa.Array, candidates: pa.Table | None) -> pa.Array:
    if candidates is None:
        return items
    return pa.concat_arrays([items, pc.unique(pc.list_flatten(candidates.column("negatives").combine_chunks()))])


# --- the rows --------------------------------------------------------------------------------------------------------


@dataclass
class _Counts:
    """Rows written to each split, and users whose series could not be made."""

    rows: dict[str, int]
    chunks: dict[str, tuple[Chunk, ...]]
    without_negatives: int = 0

    def summary(self) -> dict[str, object]:
        return {"rows": self.rows, "users_without_possible_negatives": self.without_negatives}


@dataclass(frozen=True)
class _Block:
    """Consecutive users with all their interactions, sorted by user and time."""

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    splits: NDArray[np.int64]
    """0 train, 1 valid, 2 test."""
    timestamps: NDArray[np.generic]
    context: Columns


def _write_splits(
    backend: Backend,
    folder: Path,
    rows: Table,
    total: int,
    source: Source,
    prepared: _Prepared,
    num_negatives: int,
    seed: int,
    progress: Progress,
) -> _Counts:
    listed_negatives = _listed(source.candidates, prepared)
    counts = _Counts(dict.fromkeys(SPLITS, 0), {})
    done = 0
    with ExitStack() as stack:
        writers = {name: stack.enter_context(SplitWriter(folder, name, prepared.features)) for name in SPLITS}
        for block in _blocks(backend, rows, prepared):
            seen = _Seen.of(block.users, block.items, prepared.vocabulary(ITEM).cardinality - 1)
            writers["train"].write(_train_columns(block, prepared))
            for code, split in ((1, "valid"), (2, "test")):
                held = np.flatnonzero(block.splits == code)
                given = listed_negatives if split == "test" else None
                if given is None:
                    possible = seen.num_unseen(block.users[held]) > 0
                    counts.without_negatives += int((~possible).sum())
                    held = held[possible]
                users = block.users[held]
                negatives = given[users] if given is not None else seen.draw(users, num_negatives, (seed, code))
                writers[split].write(_series_columns(block, held, negatives, prepared))
            done += len(block.users)
            progress("writing splits", done, total)
    for name, writer in writers.items():
        counts.rows[name] = writer.num_rows
        if writer.num_rows:
            counts.chunks[name] = writer.chunks
        else:
            _remove_empty(folder, writer)
    return counts


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
    lists = candidates.column("negatives").combine_chunks()
    items = prepared.vocabulary(ITEM).encode(pc.list_flatten(lists)).reshape(len(users), -1)
    table = np.zeros((len(prepared.vocabulary(USER)) + 1, items.shape[1]), np.int64)
    table[users] = items
    return table


def _blocks(backend: Backend, rows: Table, prepared: _Prepared) -> Iterator[_Block]:
    """All interactions, whole users at a time."""
    waiting: list[_Block] = []
    for table in blocks(backend, rows, BLOCK_ROWS):
        whole = _join([*waiting, _block_of(table, prepared)])
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
        prepared.vocabulary(USER).encode(batch.column(USER)),
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


def _train_columns(block: _Block, prepared: _Prepared) -> Columns:
    places = np.flatnonzero(block.splits == 0)
    return _columns(block, places, block.items[places], np.ones(len(places), np.float32), prepared)


def _series_columns(
    block: _Block, held: NDArray[np.int64], negatives: NDArray[np.int64], prepared: _Prepared
) -> Columns:
    """For each row held out its positive, then its negatives; user and context are the same in all of a series."""
    items = np.concatenate([block.items[held][:, None], negatives], axis=1)
    labels = np.zeros(items.shape, np.float32)
    labels[:, 0] = 1
    return _columns(block, np.repeat(held, items.shape[1]), items.reshape(-1), labels.reshape(-1), prepared)


def _columns(
    block: _Block,
    places: NDArray[np.int64],
    items: NDArray[np.int64],
    labels: NDArray[np.float32],
    prepared: _Prepared,
) -> Columns:
    users = block.users[places]
    return {
        USER: users.astype(np.int32),
        ITEM: items.astype(np.int32),
        **prepared.users.rows(users),
        **prepared.items.rows(items),
        **{name: take(column, places) for name, column in block.context.items()},
        LABEL: labels,
        TIMESTAMP: block.timestamps[places],
    }


# --- negatives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """Which items each of some consecutive users had to do with, so that others can be drawn.

    Of a user's unseen items the r-th is r plus the number of seen items before it. With a user's seen items sorted as
    s_0 < s_1 < ..., that number is how many s_i - i are at most r: one binary search a draw, none rejected, and every
    unseen item equally likely however many the user has seen.
    """

    first_user: int
    num_items: int
    starts: NDArray[np.int64]
    """Place in `keys` of each user's first seen item, and one more."""
    keys: NDArray[np.int64]
    """(user - first_user) * (num_items + 1) + s_i - i, ascending."""

    @classmethod
    def of(cls, users: NDArray[np.int64], items: NDArray[np.int64], num_items: int) -> _Seen:
        """From the rows of consecutive users; items are ids from 1."""
        first = int(users[0])
        pairs = np.sort((users - first) * num_items + items - 1)
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # np.unique hashes: ten times slower on the sorted rows
        owner, item = pairs // num_items, pairs % num_items
        starts = np.searchsorted(owner, np.arange(int(users[-1]) - first + 2))
        rank = np.arange(len(pairs)) - starts[owner]
        return cls(first, num_items, starts, owner * (num_items + 1) + item - rank)

    def num_unseen(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many items each user has not seen."""
        places = users - self.first_user
        return self.num_items - (self.starts[places + 1] - self.starts[places])

    def draw(self, users: NDArray[np.int64], count: int, seed: tuple[int, ...]) -> NDArray[np.int64]:
        """For each user so many unseen items, uniform, with replacement: (users, count) ids from 1.

        A draw is a function of the seed, the user's id and the draw's number alone.
        """
        if not len(users) or not count:
            return np.zeros((len(users), count), np.int64)
        random = _random_bits(seed, users, count) >> np.uint64(32)
        # The high half of a product of 32-bit numbers: uniform over the unseen up to their number in 2**32.
        rank = ((random * self.num_unseen(users)[:, None].astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
        places = users - self.first_user
        keys = places[:, None] * (self.num_items + 1) + rank
        before = np.searchsorted(self.keys, keys, side="right") - self.starts[places][:, None]
        return rank + before + 1


def _random_bits(seed: tuple[int, ...], users: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
    """(users, count) of 64 bits each: SplitMix64 (Steele, Lea and Flood, 2014) as a function of the counters."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in seed:
            state = _mix(state + golden + np.uint64(part % 2**64))
        state = _mix(state[:, None] + golden * (users[:, None].astype(np.uint64) + np.uint64(1)))
        return _mix(state + golden * np.arange(1, count + 1, dtype=np.uint64))


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


# --- the specification -----------------------------------------------------------------------------------------------


def _specification(
    folder: Path, source: Source, prepared: _Prepared, counts: _Counts, num_negatives: int, summary: dict[str, object]
) -> FeatureSpec:
    if source.candidates is not None:
        num_negatives = len(source.candidates.column("negatives")[0])
    channels = {
        "user": (USER, *prepared.users.columns),
        "item": (ITEM, *prepared.items.columns),
        "context": tuple(column.name for column in prepared.context),
        "label": (LABEL,),
        "group": (USER,),
    }
    metadata: dict[str, object] = {
        "dataset": source.dataset,
        "user_id": USER,
        "item_id": ITEM,
        "catalogues": {"user": "users.parquet", "item": "items.parquet"},
        "encoders": ENCODERS_FILE,
        "vocabularies": VOCABULARIES,
        "test_samples_per_series": num_negatives + 1,
        "summary": summary,
    }
    return FeatureSpec(
        features=prepared.features,
        sources=counts.chunks,
        channels={name: names for name, names in channels.items() if names},
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


def _date(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
