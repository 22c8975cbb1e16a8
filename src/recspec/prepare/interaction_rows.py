"""The rows that users' interactions give to each split: positives, negatives and histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.prepare.backend import Backend
from recspec.prepare.columns import take
from recspec.prepare.histories import Timeline, gap_column, item_columns, pieces
from recspec.prepare.interaction_columns import InteractionColumns
from recspec.prepare.interaction_source import Source
from recspec.prepare.names import GAP, HISTORY, ITEM, LABEL, NEGATIVE_HISTORY, SERIES, SPLIT, SPLITS, TIMESTAMP, USER
from recspec.prepare.negatives import Draws, Seen
from recspec.prepare.tables import blocks
from recspec.spec import Chunk
from recspec.storage import Columns, Ragged

BLOCK_ROWS = 1_000_000
"""Interactions of whole users in a block: about 100 MB with their candidates."""
BLOCK_ROWS_WITH_HISTORIES = 250_000
"""Interactions in a block with histories, whose lists take further memory."""


@dataclass(frozen=True)
class Plan:
    """The rows to write: their source, columns and negatives."""

    source: Source
    prepared: InteractionColumns
    draws: Draws
    """Draws candidates; their popularity is counted over the same rows as a positive's."""
    train_draws: Draws
    """Draws what a model trains on or reads, without knowledge of held-out rows."""
    num_negatives: int
    train_negatives: int
    seed: int
    memory_limit: int | None

    @property
    def by_series(self) -> bool:
        """Whether series are numbered, because a user may have several in valid and test."""
        return self.source.vocabularies == "train"


@dataclass
class Counts:
    """Rows written to each split, and rows left out."""

    rows: dict[str, int]
    chunks: dict[str, tuple[Chunk, ...]]
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows by reason: without_negatives, short_histories, unknown_targets, unknown_users."""
    series: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    """The number of the first user of each count."""

    def count(self, name: str, users: NDArray[np.int64]) -> None:
        """Add the rows of `users` to a count."""
        if len(users):
            self.left_out[name] += len(users)
            self.examples.setdefault(name, int(users[0]))

    def summary(self, plan: Plan) -> dict[str, object]:
        """The counts, for the specification."""
        found: dict[str, object] = {
            "rows": self.rows,
            "users_without_possible_negatives": self.left_out["without_negatives"],
        }
        history = plan.prepared.history
        if history is not None:
            found["train_rows_dropped_by_histories"] = self.left_out["short_histories"]
            found |= {"without_history": list(history.left_out)} if history.left_out else {}
            found |= {"gap_unit": "days" if history.unit != 1 else "as the timestamp"} if history.unit else {}
        if plan.by_series:
            done = "dropped" if plan.source.unknown_targets == "drop" else "kept"
            found[f"unknown_targets_{done}"] = self.left_out["unknown_targets"]
            found["targets_of_unknown_users"] = self.left_out["unknown_users"]
        return found


@dataclass(frozen=True)
class Block:
    """All interactions of consecutive users, sorted by user and time."""

    users: NDArray[np.int64]
    """Numbers among all users; equal to ids if all are known."""
    items: NDArray[np.int64]
    splits: NDArray[np.int64]
    """0 train, 1 valid, 2 test."""
    timestamps: NDArray[np.generic]
    context: Columns


def blocks_of_users(backend: Backend, rows: Table, prepared: InteractionColumns) -> Iterator[Block]:
    """Yield all interactions, whole users at a time."""
    waiting: list[pa.Table] = []
    size = BLOCK_ROWS if prepared.history is None else BLOCK_ROWS_WITH_HISTORIES
    for table in blocks(backend, rows, size):
        whole = pa.concat_tables([*waiting, table])
        users = whole.column(USER)
        cut = pc.index(users, users[-1]).as_py()  # the last user may continue in the next block
        if cut:
            yield _block_of(whole.slice(0, cut), prepared)
        waiting = [whole.slice(cut)]
    if waiting:
        yield _block_of(waiting[0], prepared)


def _block_of(batch: pa.Table, prepared: InteractionColumns) -> Block:
    codes = pc.index_in(batch.column(SPLIT), value_set=pa.array(SPLITS)).to_numpy()
    context = {
        column.name: prepared.fitted.encode(column.name, batch.column(column.source)) for column in prepared.context
    }
    users = prepared.everyone.encode(batch.column(USER))
    assert (np.diff(users) >= 0).all(), "the engine returned rows out of order"
    return Block(
        users,
        prepared.vocabulary(ITEM).encode(batch.column(ITEM)),
        codes.astype(np.int64),
        batch.column(TIMESTAMP).to_numpy(),
        context,
    )


class BlockRows:
    """Makes the rows of each split from a block of users, some at a time."""

    def __init__(self, block: Block, plan: Plan, counts: Counts, listed: NDArray[np.int64] | None) -> None:
        self.block, self._plan, self._counts, self._listed = block, plan, counts, listed
        self._num_items = len(plan.prepared.vocabulary(ITEM))
        self._history = plan.prepared.history

    def of(self, split: str) -> Iterator[Columns]:
        """Yield the columns of one split."""
        return self._train() if split == "train" else self._held(split)

    @cached_property
    def timeline(self) -> Timeline:
        """The events of histories."""
        return Timeline.of(self.block.users, self.block.items)

    @cached_property
    def _seen(self) -> Seen:
        return Seen.of(self.block.users, self.block.items, self._num_items)

    @cached_property
    def _seen_in_train(self) -> Seen:
        """For all users of the block, including those without train rows."""
        items = np.where(self.block.splits == 0, self.block.items, 0)
        return Seen.of(self.block.users, items, self._num_items)

    @cached_property
    def _place_of_user(self) -> NDArray[np.int64]:
        """The number of earlier rows of the same user, for each row."""
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
        """Rows of valid or test whose item has an id, or all rows with `unknown_targets` keep."""
        known = self.block.items[rows] > 0
        self._counts.count("unknown_targets", self.block.users[rows[~known]])
        rows = rows if self._plan.source.unknown_targets == "keep" else rows[known]
        users = self.block.users[rows]
        self._counts.count("unknown_users", users[self._plan.prepared.user_ids[users] == 0])
        return rows

    def _drawn(
        self, draws: Draws, seen: Seen, users: NDArray[np.int64], first: NDArray[np.int64], count: int, *seed: int
    ) -> NDArray[np.int64]:
        """Items for each row (R, count); `first` (R,) is the number of a row's first draw among its user's."""
        numbers = (first[:, None] + np.arange(count)).reshape(-1)
        drawn = draws.draw(seen, np.repeat(users, count), numbers, (self._plan.seed, *seed))
        return drawn.reshape(len(users), count)

    def _width(self, times: int) -> int:
        """Most list values of a row and its negatives."""
        return times * (self._history.asked.length if self._history is not None else 1)

    def _columns(
        self, rows: NDArray[np.int64], times: int, items: NDArray[np.int64], labels: NDArray[np.float32], code: int
    ) -> Columns:
        """Each row `times` times, with its items and the same user, context and history."""
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
        """The lists of histories (R,), given each row's own time."""
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
    """Positives, each followed by its negatives (R, n): all items, their labels, and rows per positive."""
    together = np.concatenate([items[:, None], negatives], axis=1)
    labels = np.zeros(together.shape, np.float32)
    labels[:, 0] = 1
    return together.reshape(-1), labels.reshape(-1), together.shape[1]
