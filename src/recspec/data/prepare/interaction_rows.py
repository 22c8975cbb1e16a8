"""The rows that users' interactions give to each split, and the memory that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.base.errors import SettingsError, listed
from recspec.data.encoding import Vocabulary
from recspec.data.prepare.backend import Part
from recspec.data.prepare.catalogues import Decay, Fitted, PreparedCatalogue, stored_weights, take
from recspec.data.prepare.columns import Column
from recspec.data.prepare.histories import (
    HistoryColumns,
    HistoryPlan,
    HistorySettings,
    Ids,
    UnknownTargets,
    UserBlock,
    pieces,
)
from recspec.data.prepare.names import (
    EVENT_WEIGHT,
    IS_TARGET,
    ITEM,
    LABEL,
    SERIES,
    SPLIT,
    SPLIT_BEFORE,
    SPLITS,
    TIMESTAMP,
    USER,
    WRITTEN,
)
from recspec.data.prepare.negatives import Draws, Seen
from recspec.data.prepare.tables import blocks_of_part
from recspec.data.storage import BLOCK_ROWS, Columns, read_seen_pairs
from recspec.feature_spec import Feature


@dataclass(frozen=True)
class InteractionColumns:
    """Features, encoders and catalogues of all rows."""

    fitted: Fitted
    users: PreparedCatalogue
    items: PreparedCatalogue
    context: Sequence[Column]
    everyone: Vocabulary  # all users, known or not; it numbers users while splits are written
    user_ids: NDArray[np.int64]  # the id of each number of `everyone`
    item_counts: NDArray[np.int64]  # interactions of each item, for ids from 1, in the rows of the vocabulary
    train_counts: NDArray[np.int64]  # likewise in train
    history: HistoryColumns | None

    def vocabulary(self, name: str) -> Vocabulary:
        return self.fitted.encoders.vocabularies[name]


WRITING_BYTES = 370_000_000  # of the process while it writes splits without lists (measured: 330 to 370 MB)
LIST_BYTES = 10  # per list value of a row group: 4, held 2.5 times (570 MB for 10 million rows with two lists of 50)


def check_memory_limit(memory_limit: int | None, features: Mapping[str, Feature], rows: int) -> None:
    """Refuse lists whose row groups, one per split with at most `rows`, exceed the memory limit."""
    lists = {name: feature.length for name, feature in features.items() if feature.length}
    values = sum(lists.values())
    least = WRITING_BYTES + len(SPLITS) * LIST_BYTES * values * min(rows, BLOCK_ROWS)
    if memory_limit is not None and lists and least > memory_limit:
        held = f"rows with {values:,} values in lists ({listed(sorted(lists))})"
        raise SettingsError(
            f"--memory-limit of {memory_limit / 1e6:,.0f} MB is too little for {held}; give "
            f"{-(-least // 10**8) * 100:,} MB or more, or make the lists shorter"
        )


EVENT_BLOCK_ROWS = 1_000_000  # interactions of whole users in a block: about 100 MB with their candidates
BLOCK_ROWS_WITH_HISTORIES = 250_000  # the lists of histories take further memory


@dataclass(frozen=True)
class Plan:
    """The rows to write: their columns and negatives. Executors of a cluster receive it."""

    prepared: InteractionColumns
    settings: HistorySettings
    num_negatives: int
    seed: int
    memory_limit: int | None
    by_series: bool  # whether series are numbered, because a user may have several in valid and test
    unknown_targets: UnknownTargets = "drop"
    weighted: bool = False
    decay: Decay | None = None
    listed: NDArray[np.int64] | None = None  # candidates of test by the number of a user; drawn if None
    seen: Path | None = None  # file of every event, if the rows lack some; see `splits.write_seen`
    splits: Sequence[str] = SPLITS  # those that are written
    signals: Mapping[str, str] = field(default_factory=dict)  # splits of the rows of a split that are no targets

    def listed_for(self, split: str) -> NDArray[np.int64] | None:
        """The listed candidates of a split; None if they are drawn."""
        return self.listed if split == "test" else None

    def negatives_for(self, split: str) -> int:
        """How many rows of label 0 stand behind each positive."""
        listed = self.listed_for(split)
        if listed is not None:
            return int(listed.shape[1])
        return self.settings.train_negatives if split == "train" else self.num_negatives

    @cached_property
    def histories(self) -> HistoryPlan:
        prepared = self.prepared
        of_users = prepared.users, prepared.everyone, prepared.user_ids
        return HistoryPlan(
            self.settings, prepared.history, *of_users, prepared.vocabulary(ITEM), self.train_draws, self.seed
        )

    @cached_property
    def draws(self) -> Draws:
        """Draws candidates of test; their popularity is counted over the same rows as a positive's."""
        return Draws(self.settings.negatives, self.prepared.item_counts, self.settings.reject_seen)

    @cached_property
    def train_draws(self) -> Draws:
        """Draws what a model trains on, reads or is chosen by, without knowledge of later rows."""
        return Draws(self.settings.negatives, self.prepared.train_counts, self.settings.reject_seen)


@dataclass
class Counts:
    """Rows written to each split, and rows left out."""

    rows: dict[str, int]
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows by reason: without_negatives, short_histories, unknown_targets, unknown_users."""
    series: Counter[str] = field(default_factory=Counter)
    new: Counter[str] = field(default_factory=Counter)  # rows of each split that were not in it before
    examples: dict[str, int] = field(default_factory=dict)  # the lowest number of a user of each count

    def count(self, name: str, users: Ids) -> None:
        """Add the rows of `users` to a count."""
        if len(users):
            self.left_out[name] += len(users)
            self._name(name, int(users.min()))

    def add(self, later: Counts) -> None:
        """Add the counts of the next users."""
        for name, rows in later.rows.items():
            self.rows[name] += rows
        self.new += later.new
        self.left_out += later.left_out
        for name, user in later.examples.items():
            self._name(name, user)

    def _name(self, name: str, user: int) -> None:
        """Keep the first user, whatever blocks and parts the rows come in."""
        self.examples[name] = min(user, self.examples.get(name, user))

    def summary(self, plan: Plan) -> dict[str, object]:
        found: dict[str, object] = {"rows": self.rows}
        found["users_without_possible_negatives"] = self.left_out["without_negatives"]
        history = plan.prepared.history
        if history is not None:
            found["train_rows_dropped_by_histories"] = self.left_out["short_histories"]
            found |= {"without_history": list(history.left_out)} if history.left_out else {}
            found |= {"gap_unit": "days" if history.unit != 1 else "as the timestamp"} if history.unit else {}
        if plan.by_series:
            done = "dropped" if plan.unknown_targets == "drop" else "kept"
            found[f"unknown_targets_{done}"] = self.left_out["unknown_targets"]
            found["targets_of_unknown_users"] = self.left_out["unknown_users"]
        return found


def blocks_of_users(part: Part, *, with_histories: bool) -> Iterator[pa.Table]:
    """Yield all rows of a part, whole users at a time."""
    waiting: list[pa.Table] = []
    for table in blocks_of_part(part, BLOCK_ROWS_WITH_HISTORIES if with_histories else EVENT_BLOCK_ROWS):
        whole = pa.concat_tables([*waiting, table])
        users = whole.column(USER)
        cut = pc.index(users, users[-1]).as_py()  # the last user may continue in the next block
        if cut:
            yield whole.slice(0, cut)
        waiting = [whole.slice(cut)]
    yield from waiting


def new_in_split(rows: pa.Table) -> NDArray[np.bool_] | None:
    """Whether each row was not in its split before; None if there was no dataset before."""
    if SPLIT_BEFORE not in rows.column_names:
        return None
    return np.asarray(~pc.fill_null(pc.equal(rows.column(SPLIT), rows.column(SPLIT_BEFORE)), False).to_numpy())


class BlockRows(UserBlock):
    """Makes the rows of each split from a block of users, some at a time."""

    def __init__(self, block: pa.Table, plan: Plan, counts: Counts) -> None:
        super().__init__(block, plan.histories)
        prepared = plan.prepared
        self._plan, self._counts = plan, counts
        encode = prepared.fitted.encode
        weights = block.column(EVENT_WEIGHT).cast("float64").to_numpy() if plan.weighted else None
        self._weights = None if weights is None else stored_weights(weights, self.times, plan.decay)
        self._context = {column.name: encode(column.name, block.column(column.source)) for column in prepared.context}
        self._is_new = new_in_split(block)
        self._is_target = block.column(IS_TARGET).to_numpy() if plan.signals else np.ones(len(self.users), bool)

    def of(self, split: str) -> Iterator[tuple[bool, Columns]]:
        """Yield the columns of one split, and whether its rows are new there; these come last."""
        rows, first = self._train() if split == "train" else self._held(split)
        if self._is_new is None:
            parts = [np.arange(len(rows))]
        else:
            parts = [np.flatnonzero(self._is_new[rows] == new) for new in (False, True)]
        for new, places in enumerate(parts):
            for some in self._pieces(places, 1 + self._plan.negatives_for(split)):
                yield bool(new), self._written(split, rows[some], first[some])

    def signals(self, split: str) -> Iterator[Columns]:
        """Yield the columns of the rows of a split that are no targets, of known users and items."""
        of_split = (self.splits == WRITTEN.index(split)) & ~self._is_target
        rows = np.flatnonzero(of_split & (self.items > 0) & (self._plan.prepared.user_ids[self.users] > 0))
        for some in self._pieces(rows, 1):
            yield self._columns(some, np.zeros((len(some), 0), np.int64), WRITTEN.index(split))

    @cached_property
    def _seen_up_to(self) -> dict[int, Seen]:
        """What users saw in all splits up to one, with the events that the rows lack, by the number of the split.

        Of rows that are no targets, only those of types that count as seen: most targets are of items that were viewed.
        """
        num_items, found = len(self.history_plan.items), {}
        for code in range(1, len(WRITTEN)):
            items = self.items_up_to(code)
            if self._plan.signals:
                items = np.where(self._is_target & (self.splits == code), items, 0)
            found[code] = _seen_by(code, self.users, items, num_items, self._plan)
        return found

    def _train(self) -> tuple[Ids, Ids]:
        """The rows of train, and the number of each one's first draw among its user's."""
        rows, settings = np.flatnonzero(self.splits == 0), self._plan.settings
        if self._plan.prepared.history is not None:
            kept = settings.train_rows(self.timeline(0), self.users, rows)
            self._counts.count("short_histories", self.users[np.setdiff1d(rows, kept)])
            rows = kept
        return rows, self.place_of_user[rows] * settings.train_negatives

    def _held(self, split: str) -> tuple[Ids, Ids]:
        """Likewise of valid or test."""
        rows = np.flatnonzero((self.splits == WRITTEN.index(split)) & self._is_target)
        known = self.items[rows] > 0
        self._counts.count("unknown_targets", self.users[rows[~known]])
        rows = rows if self._plan.unknown_targets == "keep" else rows[known]
        users = self.users[rows]
        self._counts.count("unknown_users", users[self._plan.prepared.user_ids[users] == 0])
        seen, draws = self._of_held(split)
        if self._plan.listed_for(split) is None and draws.reject_seen:
            possible = seen.num_unseen(users) > 0
            self._counts.count("without_negatives", users[~possible])
            rows, users = rows[possible], users[possible]
        return rows, (np.arange(len(rows)) - np.searchsorted(users, users)) * self._plan.negatives_for(split)

    def _of_held(self, split: str) -> tuple[Seen, Draws]:
        """What users of valid or test have seen, and what draws their candidates; those of valid know no test row."""
        return self._seen_up_to[WRITTEN.index(split)], self._plan.draws if split == "test" else self._plan.train_draws

    def _written(self, split: str, rows: Ids, first: Ids) -> Columns:
        """Some rows with their negatives, and with the numbers of their series if these have numbers."""
        code, users, plan = WRITTEN.index(split), self.users[rows], self._plan
        count, listed = plan.negatives_for(split), plan.listed_for(split)
        if listed is not None:
            negatives = listed[users]
        elif not count:
            negatives = np.zeros((len(rows), 0), np.int64)
        elif split == "train":
            negatives = self._drawn(plan.train_draws, self.seen_in_train, users, first, count, code)
        else:
            seen, draws = self._of_held(split)
            negatives = self._drawn(draws, seen, users, first, count, code)
        columns = self._columns(rows, negatives, code)
        if plan.by_series and split != "train":
            numbers = self._counts.series[split] + np.arange(len(rows))
            columns[SERIES] = np.repeat(numbers, 1 + count)
            self._counts.series[split] += len(rows)
        return columns

    def _drawn(self, draws: Draws, seen: Seen, users: Ids, first: Ids, count: int, code: int) -> Ids:
        """Items for each row (R, count); `first` (R,) is the number of a row's first draw among its user's."""
        numbers = (first[:, None] + np.arange(count)).reshape(-1)
        drawn = draws.draw(seen, np.repeat(users, count), numbers, (self._plan.seed, code))
        return drawn.reshape(len(users), count)

    def _pieces(self, rows: Ids, times: int) -> Iterator[Ids]:
        """Some rows at a time, of which each is written `times` times."""
        features, history = self._plan.prepared.fitted.features.values(), self._plan.prepared.history
        numbers = sum(feature.length or 0 for feature in features if feature.is_vector)
        values = max(1, numbers + (history.length if history else 0))
        return pieces(rows, times * values, self._plan.memory_limit)

    def _columns(self, rows: Ids, negatives: Ids, code: int) -> Columns:
        """Each row with its own item and label 1, then with each of its negatives (R, n) and label 0."""
        prepared = self._plan.prepared
        items = np.concatenate([self.items[rows][:, None], negatives], axis=1)
        times = items.shape[1]
        labels = np.zeros(items.shape, np.float32)
        labels[:, 0] = 1
        places, again = np.repeat(rows, times), np.repeat(np.arange(len(rows)), times)
        users, items = prepared.user_ids[self.users[places]], items.reshape(-1)
        return {
            USER: users.astype(np.int32),
            ITEM: items.astype(np.int32),
            **prepared.users.rows(users),
            **prepared.items.rows(items),
            **{name: take(column, places) for name, column in self._context.items()},
            **{name: take(column, again) for name, column in self.histories(rows, code).items()},
            LABEL: labels.reshape(-1),
            TIMESTAMP: self.times[places],
            **({EVENT_WEIGHT: self._weights[places]} if self._weights is not None else {}),
        }


def _seen_by(code: int, users: Ids, items: Ids, num_items: int, plan: Plan) -> Seen:
    """What a block's users saw in the splits up to one: its rows' `items`, and the events that the rows lack."""
    ids = plan.prepared.user_ids[users]
    if plan.seen is None or not ids.any():
        return Seen.of(users, items, num_items)
    number_of = np.zeros(ids.max() + 1, np.int64)
    number_of[ids] = users
    least = int(ids[ids > 0].min())
    owners, more = read_seen_pairs(plan.seen, SPLITS[: code + 1], range(least, len(number_of)))
    among = np.isin(owners, ids)
    users = np.concatenate([users, number_of[owners[among]]])
    order = np.argsort(users, kind="stable")
    return Seen.of(users[order], np.concatenate([items, more[among]])[order], num_items)
