"""Histories of labelled rows: what their user did, and passed over, before them.

Rows come sorted by user, time and label. A row's history holds the positives (label 1) of its user at earlier times;
rows of one time, such as the impressions of a page, know nothing of each other's labels. Train rows see events of train
alone, rows of valid those of train and valid, and rows of test all earlier ones: a held-out label is never an input of
training, however the rows were split.
"""

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

from recspec.base.errors import DataError
from recspec.data.encoding import Vocabulary, extended
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.columns import Fitted, PreparedCatalogue, to_arrow
from recspec.data.prepare.histories import HistoryColumns, HistorySettings, Ids, Timeline, pieces, prepare_history
from recspec.data.prepare.interaction_columns import Before
from recspec.data.prepare.names import ITEM, LABEL, NEGATIVE_HISTORY, ROW, SPLIT, SPLITS, TIMESTAMP, USER, Notes
from recspec.data.prepare.negatives import Draws, Seen
from recspec.data.prepare.tables import counts_by, fetch, is_dated
from recspec.data.storage import Columns

ORDER = (USER, TIMESTAMP, LABEL, ROW)  # of the rows: of one time, the skipped ones come first


@dataclass(frozen=True)
class LabelledHistories:
    """How the histories of labelled rows are made."""

    settings: HistorySettings
    columns: HistoryColumns
    users: PreparedCatalogue
    everyone: Vocabulary  # all users, known or not
    user_ids: Ids  # the id of each number of `everyone`
    items: Vocabulary
    draws: Draws  # of negatives for events without a skipped one
    seed: int
    memory_limit: int | None
    counts: Counter[str] = field(default_factory=Counter)
    """Train rows left out by `short`, `events`, and events with a `skipped` one before them."""

    @classmethod
    def fit(
        cls,
        backend: Backend,
        rows: Table,
        fitted: Fitted,
        catalogues: dict[str, PreparedCatalogue],
        settings: HistorySettings,
        raw_item: str,
        seed: int,
        before: Before | None,
    ) -> LabelledHistories:
        """Add the features of the lists to `fitted`. Raises DataError if train has no positive row."""
        items, users = (fitted.encoders.vocabularies[name] for name in (ITEM, USER))
        positives = rows.filter((rows[SPLIT] == "train") & (rows[LABEL] > 0))
        counted = fetch(backend, counts_by(positives, ITEM))
        if not counted.num_rows:
            raise DataError("no train row has the label 1, so histories would be empty; leave out the setting history")
        counts = np.zeros(len(items) + 1, np.int64)  # items of few rows have the id 0
        np.add.at(counts, items.encode(counted.column(ITEM)), counted.column("rows").to_numpy())
        dated, lists = (before.dated, before.spec.role("history")) if before else (is_dated(backend, rows), None)
        columns = prepare_history(fitted, catalogues["item"], settings, raw_item, timed=True, dated=dated, lists=lists)
        assert columns is not None
        everyone = Vocabulary.of(fetch(backend, counts_by(rows, USER)).column(USER))
        everyone = extended(users, everyone) if before else everyone
        user_ids = np.append(0, users.encode(everyone.values))
        draws = Draws(settings.negatives, counts[1:], settings.reject_seen)
        return cls(settings, columns, catalogues["user"], everyone, user_ids, items, draws, seed, backend.memory_limit)

    def note(self, notes: Notes) -> None:
        """Note what was left out and drawn, after the last block."""
        self.columns.note(notes)
        if short := self.counts["short"]:
            notes.dropped.append(f"{short:,} train rows {' or '.join(self.settings.leaves_out)}")
        if self.settings.negative_history and (events := self.counts["events"]):
            skipped = self.counts["skipped"]
            notes.inferred.append(
                f"negative histories: of {events:,} positive events, {skipped:,} stand beside what "
                "the user skipped before them, the others beside a drawn item"
            )


class BlockHistories:
    """The histories of a block of users."""

    def __init__(self, block: pa.Table, plan: LabelledHistories) -> None:
        self._plan = plan
        self.users: Ids = plan.everyone.encode(block.column(USER))
        assert (np.diff(self.users) >= 0).all(), "the engine returned rows out of order"
        self._items: Ids = plan.items.encode(block.column(ITEM))
        self._splits: Ids = pc.index_in(block.column(SPLIT), value_set=pa.array(SPLITS)).to_numpy().astype(np.int64)
        self._is_positive = block.column(LABEL).to_numpy() > 0
        self._times: NDArray[np.generic] = block.column(TIMESTAMP).to_numpy()
        self._made: dict[int, Timeline] = {}
        if plan.settings.negative_history:
            last = self._timeline(len(SPLITS) - 1)
            plan.counts["events"] += len(last.events)
            plan.counts["skipped"] += int((self._skipped(len(SPLITS) - 1) > 0).sum())

    def rows(self, split: str) -> Iterator[Ids]:
        """Yield the rows of a split, some at a time."""
        rows, plan = np.flatnonzero(self._splits == SPLITS.index(split)), self._plan
        if split == "train":
            kept = plan.settings.train_rows(self._timeline(0), self.users, rows)
            plan.counts["short"] += len(rows) - len(kept)
            rows = kept
        return pieces(rows, plan.columns.length, plan.memory_limit)

    def of(self, rows: Ids, split: str) -> Columns:
        """The lists of some rows of a split."""
        code, length = SPLITS.index(split), self._plan.columns.length
        events = self._timeline(code).histories(rows, length)
        columns = self._plan.columns.of_events(self._items, self._times, self._times[rows], events)
        if not self._plan.settings.negative_history:
            return columns
        inside = np.arange(len(events.values)) - np.repeat(events.offsets[:-1], events.lengths)
        numbers = np.repeat((rows - np.searchsorted(self.users, self.users[rows])) * length, events.lengths) + inside
        users = np.repeat(self.users[rows], events.lengths)
        drawn = self._plan.draws.draw(self._seen_in_train, users, numbers, (self._plan.seed, len(SPLITS) + code))
        skipped = self._skipped(code)[events.values]
        items = np.where(skipped > 0, skipped, drawn)
        return columns | self._plan.columns.lists(NEGATIVE_HISTORY, items, events.offsets)

    def catalogue(self) -> pa.Table | None:
        """The catalogue of the block's users with an id, with their latest events; None without such users."""
        plan = self._plan
        last = np.flatnonzero(np.diff(self.users, append=-1))
        ids = plan.user_ids[self.users[last]]
        last, ids = last[ids > 0], ids[ids > 0]
        if not len(ids):
            return None
        events = self._timeline(len(SPLITS) - 1).histories(last, plan.columns.length, with_own=True)
        table = plan.users.table(int(ids[0]) - 1, len(ids))
        for name, column in plan.columns.of_events(self._items, self._times, self._times[last], events).items():
            table = table.append_column(name, to_arrow(column))
        return table

    def _timeline(self, code: int) -> Timeline:
        """The positive events that rows of a split may see."""
        if code not in self._made:
            seen = self._is_positive & (self._splits <= code)
            self._made[code] = Timeline.of(self.users, np.where(seen, self._items, 0), self._times)
        return self._made[code]

    def _skipped(self, code: int) -> Ids:
        """For each positive event the item that its user skipped last since the positive one before it, else 0 (N,).

        So no skipped event stands beside two positive ones. An item that was skipped and then taken is no negative.
        """
        places = np.arange(len(self.users))
        is_skipped = ~self._is_positive & (self._items > 0) & (self._splits <= code)
        latest = np.maximum.accumulate(np.where(is_skipped, places, -1))
        events = self._timeline(code).events
        earliest = np.maximum(
            np.concatenate([[-1], events[:-1]])[: len(events)] + 1, np.searchsorted(self.users, self.users[events])
        )
        has = (latest[events] >= earliest) & (self._items[latest[events]] != self._items[events])
        found = np.zeros(len(self.users), np.int64)
        found[events[has]] = self._items[latest[events[has]]]
        return found

    @cached_property
    def _seen_in_train(self) -> Seen:
        taken = self._is_positive & (self._splits == 0)
        return Seen.of(self.users, np.where(taken, self._items, 0), len(self._plan.items))
