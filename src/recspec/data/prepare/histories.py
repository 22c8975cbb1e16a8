"""Histories of labelled rows: what their user did, and passed over, before them.

Rows come sorted by user, time and label. A row's history holds the positives (label 1) of its user at earlier times;
rows of one time, such as the impressions of a page, know nothing of each other's labels. Train rows see events of train
alone, rows of valid those of train and valid, and rows of test all earlier ones: a held-out label is never an input of
training, however the rows were split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray
from pydantic import Field, model_validator

from recspec.base.config import Duration
from recspec.base.config import Settings as BaseSettings
from recspec.base.errors import DataError, listed
from recspec.data.encoding import NumberEncoder, Vocabulary, VocabularyEncoder, extended
from recspec.data.prepare.backend import Backend, fetch
from recspec.data.prepare.catalogues import Before, Fitted, PreparedCatalogue, to_arrow
from recspec.data.prepare.names import (
    GAP,
    HISTORY,
    ITEM,
    LABEL,
    NEGATIVE_HISTORY,
    ROW,
    SPLIT,
    SPLITS,
    TIMESTAMP,
    USER,
    WRITTEN,
    Notes,
)
from recspec.data.prepare.negatives import Distribution, Draws, Seen
from recspec.data.prepare.tables import counts_by, is_dated
from recspec.data.storage import UNTIL, Columns, Ragged
from recspec.feature_spec import FOLD_IN, Feature

Ids = NDArray[np.int64]
Prefixes = Literal["all", "last"] | Annotated[int, Field(ge=1)]
UnknownTargets = Literal["drop", "keep"]

VALUES = 2_000_000  # most events in the lists made at once: 16 MB for each of about ten arrays
BYTES_PER_VALUE = 1_000  # of a memory limit, per event: a limit of 500 MB makes lists of 500,000 events at once
SECONDS_A_DAY = 86_400


class HistorySettings(BaseSettings):
    """Settings of datasets of interactions."""

    history: int | None = Field(
        None, ge=2, description="maximum number of latest events stored with each row; null: no histories"
    )
    min_history: int = Field(0, ge=0, description="minimum number of earlier events of a train row")
    prefixes: Prefixes = Field(
        "all", description="train rows to keep of each user: all, last, or a number of latest rows"
    )
    gaps: bool = Field(True, description="store the time gap between each event and the row, if there are times")
    negative_history: bool = Field(False, description="store a drawn negative for each event of a history")
    train_negatives: int = Field(
        0, ge=0, description="number of rows with label 0 and drawn items after each train row"
    )
    negatives: Distribution = Field(
        "uniform", description="distribution of the items drawn for label 0 and negative histories"
    )
    reject_seen: bool = Field(True, description="never draw items that the user acted on (for train rows: in train)")

    @model_validator(mode="after")
    def _of_histories(self) -> HistorySettings:
        given = _given(self, "min_history", "prefixes", "gaps", "negative_history")
        if self.history is None and given:
            raise ValueError(f"{given} say how histories are made; set history to their length too")
        return self

    def train_rows(self, timeline: Timeline, users: Ids, rows: Ids) -> Ids:
        """The train rows of a block that `min_history` and `prefixes` keep."""
        rows = rows[timeline.before[rows] - timeline.first[rows] >= self.min_history]
        if self.prefixes == "all":
            return rows
        most = 1 if self.prefixes == "last" else self.prefixes
        owner = users[rows]
        return rows[np.searchsorted(owner, owner, side="right") - np.arange(len(rows)) <= most]

    @property
    def leaves_out(self) -> list[str]:
        """The train rows that are left out, as phrases of a note."""
        found = [f"with fewer than {self.min_history} events before them (min_history)"] if self.min_history else []
        return found + ([f"beyond prefixes={self.prefixes}"] if self.prefixes != "all" else [])


HELDOUT_USERS = Field(
    None, ge=1, description="split=users: number of users for test, and as many for valid; null: the shares"
)
WINDOW = Field(
    None,
    description="split=time: length of test, such as 7d or 12h, and of valid before it; null: shares of the rows; a "
    "plain number is in the units of the timestamps",
)
EARLIER = Field(
    0,
    ge=0,
    le=10_000,
    description="split=time: number of windows by which test ends before the last row; later rows are left out",
)


def check_window(window: str | None, earlier: int, by_time: bool, shares: Collection[str]) -> None:
    """Refuse settings of windows that mean nothing. Raises ValueError."""
    if window is not None and not by_time:
        raise ValueError("window is for split time; set split=time too")
    if window is not None and shares:
        raise ValueError(f"window is the length of valid and test; leave out {' and '.join(sorted(shares))}")
    if earlier and window is None:
        raise ValueError("earlier counts windows; set window to their length, such as 7d")


class TimeSplitSettings(BaseSettings):
    """Settings of datasets that hold out each user's last rows, the latest of all rows, or whole users."""

    split: Literal["leave_one_out", "time", "users"] = Field(
        "leave_one_out",
        description="leave_one_out: each user's last row is test; time: the latest rows overall are test; users: some "
        "users are, of whom four fifths of the rows are known",
    )
    valid_share: float = Field(0.1, ge=0, lt=1, description="split=time, users: share of the rows or users for valid")
    test_share: float = Field(
        0.1, ge=0, lt=1, description="split=time, users: share of the latest rows, or of the users, for test"
    )
    heldout_users: int | None = HELDOUT_USERS
    window: Duration | None = WINDOW
    earlier: int = EARLIER
    unknown_targets: UnknownTargets = Field(
        "drop", description="split=time: drop or keep (with id 0) held-out rows whose item is not in train"
    )

    @model_validator(mode="after")
    def _of_time(self) -> TimeSplitSettings:
        of_time = ["valid_share", "test_share"] if self.split == "leave_one_out" else []
        if given := _given(self, *of_time, *(["unknown_targets"] if self.split != "time" else [])):
            raise ValueError(f"{given} are for split time; set split=time too")
        if self.split != "users" and self.heldout_users is not None:
            raise ValueError("heldout_users is for split users; set split=users too")
        shares = self.model_fields_set & {"valid_share", "test_share"}
        check_window(self.window, self.earlier, self.split == "time", shares)
        if self.split == "users" and "num_negatives" in self.model_fields_set and vars(self)["num_negatives"]:
            raise ValueError("split users ranks all items, so no candidates are drawn; leave out num_negatives")
        if (taken := self.valid_share + self.test_share) >= 1:
            raise ValueError(f"valid_share and test_share take {taken:g} of the rows; leave some for train")
        return self


def _given(settings: BaseSettings, *names: str) -> str:
    """Those of the settings that differ from their default."""
    fields = type(settings).model_fields
    return " and ".join(name for name in names if getattr(settings, name) != fields[name].default)


# --- the lists --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HistoryColumns:
    """The lists of a row's history."""

    length: int
    columns: Mapping[str, NDArray[np.generic]]  # scalar ids by item id (I + 1,): the item's own, its category, ...
    channels: Mapping[str, Sequence[str]]  # names of the lists
    left_out: Sequence[str]  # features without a list, because some item has no value, which would look like padding
    unit: float | None  # of the time gaps, in units of the timestamp; None without gaps

    def lists(self, prefix: str, items: Ids, offsets: Ids) -> Columns:
        """The lists of some items (T,)."""
        return {f"{prefix}_{name}": Ragged(column[items], offsets) for name, column in self.columns.items()}

    def of_events(self, items: Ids, times: NDArray[np.generic], now: NDArray[np.generic], events: Ragged) -> Columns:
        """The lists of histories (R,), given the items and times of all rows (N,) and the histories' own times (R,)."""
        columns = self.lists(HISTORY, items[events.values], events.offsets)
        if self.unit is not None:
            columns[GAP] = Ragged(gap_column(times, now, events, self.unit), events.offsets)
        return columns

    def note(self, notes: Notes) -> None:
        """Note the features without a list."""
        if self.left_out:
            why = "some item has no value, which would look like padding"
            notes.dropped.append(f"histories of {listed(self.left_out)}: {why}")


def prepare_history(
    fitted: Fitted,
    items: PreparedCatalogue,
    settings: HistorySettings,
    raw_item: str,
    *,
    timed: bool,
    dated: bool,
    lists: Collection[str] | None = None,
) -> HistoryColumns | None:
    """The columns of the lists; their features and encoders go to `fitted`. `raw_item` is the column of the ids.

    Rows are `timed` if their timestamps hold times and not only an order, and `dated` if these count seconds. `lists`
    names the histories that the dataset has had so far.
    """
    length = settings.history
    if length is None:
        return None
    columns: dict[str, NDArray[np.generic]] = {ITEM: np.arange(items.count + 1, dtype=np.int32)}
    for name, column in items.columns.items():
        if isinstance(column, np.ndarray) and fitted.features[name].is_categorical:
            columns[name] = np.append(column.dtype.type(0), column)
    left_out = [name for name, column in columns.items() if (column[1:] == 0).any()]
    if lists is not None:
        left_out = [name for name in columns if f"{HISTORY}_{name}" not in lists]
    kept = {name: column for name, column in columns.items() if name not in left_out}
    prefixes = (HISTORY, NEGATIVE_HISTORY) if settings.negative_history else (HISTORY,)
    channels = {prefix: [f"{prefix}_{name}" for name in kept] for prefix in prefixes}
    if taken := [name for name in (*chain(*channels.values()), GAP) if name in fitted.features]:
        end = "has a name that histories need; rename its column"
        raise DataError.of("rows", [f"feature '{name}' {end}" for name in taken])
    for prefix in prefixes:
        for name in kept:
            of = {"vocabulary": name, "length": length, "padding": 0}
            fitted.features[f"{prefix}_{name}"] = fitted.features[name].model_copy(update=of)
    raw = f"{HISTORY}_{raw_item}" if raw_item != ITEM else None
    encoder = VocabularyEncoder(column=raw, vocabulary=ITEM, separator="|", length=length, keep="last")
    fitted.add_encoder(f"{HISTORY}_{ITEM}", encoder)
    if not (settings.gaps and timed):
        return HistoryColumns(length, kept, channels, left_out, None)
    channels[HISTORY].append(GAP)
    fitted.features[GAP] = Feature(dtype="float32", length=length)
    fitted.add_encoder(GAP, NumberEncoder(log1p=True, separator="|", length=length, keep="last"))
    return HistoryColumns(length, kept, channels, left_out, SECONDS_A_DAY if dated else 1)


# --- the events before a row -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """The events of consecutive users in order of time: the rows with known items."""

    events: Ids  # places among the rows
    before: Ids  # number of events before each row, and before the end (N + 1,)
    first: Ids  # number of events before the first row of each row's user (N,)

    @classmethod
    def of(cls, users: Ids, items: Ids, times: NDArray[np.generic] | None = None) -> Timeline:
        """From rows sorted by user and time; id 0 is no event.

        A row sees the events that stand before it; with `times`, only those of earlier times.
        """
        known = items > 0
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(known)])
        if times is not None:
            changes = np.flatnonzero((np.diff(users, prepend=-1) != 0) | (np.diff(times, prepend=times[:1]) != 0))
            firsts = np.repeat(changes, np.diff(changes, append=len(users)))
            before = np.append(before[firsts], before[-1])
        return cls(np.flatnonzero(known), before, before[np.searchsorted(users, users)])

    def histories(self, rows: Ids, length: int, *, with_own: bool = False) -> Ragged:
        """Places of the user's latest events before each row, or up to it (`with_own`), oldest first."""
        stop = self.before[rows + with_own]
        counts = np.minimum(stop - self.first[rows], length)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        places = np.arange(offsets[-1]) + np.repeat(stop - counts - offsets[:-1], counts)
        return Ragged(self.events[places], offsets)


def pieces(rows: Ids, length: int, memory_limit: int | None = None) -> Iterator[Ids]:
    """Yield so many rows at a time that their lists of this length stay small."""
    values = VALUES if memory_limit is None else min(VALUES, memory_limit // BYTES_PER_VALUE)
    step = max(1, values // max(1, length))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def gap_column(
    timestamps: NDArray[np.generic], now: NDArray[np.generic], events: Ragged, unit: float
) -> NDArray[np.float32]:
    """ln(1 + units between each event and the time of its row (R,)), at least 0: (T,)."""
    passed = np.repeat(now, events.lengths) - timestamps[events.values]
    return np.asarray(np.log1p(np.maximum(passed / unit, 0)), np.float32)


ORDER = (USER, TIMESTAMP, LABEL, ROW)  # of the rows: of one time, the skipped ones come first


@dataclass(frozen=True)
class HistoryPlan:
    """How the histories of the rows of users are made."""

    settings: HistorySettings
    columns: HistoryColumns | None
    users: PreparedCatalogue
    everyone: Vocabulary  # all users, known or not; it numbers users while splits are written
    user_ids: Ids  # the id of each number of `everyone`
    items: Vocabulary
    draws: Draws  # of negatives, by what train holds
    seed: int


class UserBlock:
    """The rows of some users, sorted by user and time, and the events that each of them may know of.

    All rows are events, or those where `is_event` says so; then rows of one time know nothing of each other.
    """

    def __init__(self, block: pa.Table, plan: HistoryPlan, is_event: NDArray[np.bool_] | None = None) -> None:
        self.history_plan = plan
        self.users: Ids = plan.everyone.encode(block.column(USER))  # numbers, equal to ids if all users are known
        assert (np.diff(self.users) >= 0).all(), "the engine returned rows out of order"
        self.items: Ids = plan.items.encode(block.column(ITEM))
        self.splits: Ids = pc.index_in(block.column(SPLIT), value_set=pa.array(WRITTEN)).to_numpy().astype(np.int64)
        self.times: NDArray[np.generic] = block.column(TIMESTAMP).to_numpy()
        self._is_event = is_event
        self._timelines: dict[int, Timeline] = {}

    def items_up_to(self, code: int) -> Ids:
        """The items of events in the splits up to one; 0 for other rows.

        Held-out users know what is folded in; their rows in valid and test are targets, which know nothing of each
        other.
        """
        folded = self.splits == WRITTEN.index(FOLD_IN)
        seen = folded | (self.splits == 0) if code and folded.any() else self.splits <= code
        return np.where(seen if self._is_event is None else seen & self._is_event, self.items, 0)

    def timeline(self, code: int) -> Timeline:
        """The events that rows of a split may see: those of train, also those of valid, or all of them."""
        if code not in self._timelines:
            times = None if self._is_event is None else self.times
            self._timelines[code] = Timeline.of(self.users, self.items_up_to(code), times)
        return self._timelines[code]

    @cached_property
    def seen_in_train(self) -> Seen:
        """For all users of the block, including those without train rows."""
        return Seen.of(self.users, self.items_up_to(0), len(self.history_plan.items))

    @cached_property
    def place_of_user(self) -> Ids:
        """The number of earlier rows of the same user, for each row."""
        return np.arange(len(self.users)) - np.searchsorted(self.users, self.users)

    def skipped(self, code: int) -> Ids | None:  # noqa: ARG002
        """For each event the item that its user passed over before it, else 0 (N,); None if rows don't tell."""
        return None

    def histories(self, rows: Ids, code: int) -> Columns:
        """The lists of some rows of a split."""
        plan, made = self.history_plan, self.history_plan.columns
        if made is None:
            return {}
        events = self.timeline(code).histories(rows, made.length)
        columns = made.of_events(self.items, self.times, self.times[rows], events)
        if not plan.settings.negative_history:
            return columns
        inside = np.arange(len(events.values)) - np.repeat(events.offsets[:-1], events.lengths)
        numbers = np.repeat(self.place_of_user[rows] * made.length, events.lengths) + inside
        users = np.repeat(self.users[rows], events.lengths)
        items = plan.draws.draw(self.seen_in_train, users, numbers, (plan.seed, len(SPLITS) + code))
        if (skipped := self.skipped(code)) is not None:
            items = np.where(skipped[events.values] > 0, skipped[events.values], items)
        return columns | made.lists(NEGATIVE_HISTORY, items, events.offsets)

    def catalogue(self) -> pa.Table | None:
        """The catalogue of the block's users with an id, with their latest events; None without histories or users."""
        plan = self.history_plan
        last = np.flatnonzero(np.diff(self.users, append=-1))
        ids = plan.user_ids[self.users[last]]
        last, ids = last[ids > 0], ids[ids > 0]
        if plan.columns is None or not len(ids):
            return None
        events = self.timeline(len(SPLITS) - 1).histories(last, plan.columns.length, with_own=True)
        table = plan.users.table(int(ids[0]) - 1, len(ids))
        for name, column in plan.columns.of_events(self.items, self.times, self.times[last], events).items():
            table = table.append_column(name, to_arrow(column))
        if plan.columns.unit is not None and UNTIL not in table.column_names:
            table = table.append_column(UNTIL, pa.array(self.times[last]))
        return table


# --- labelled rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledHistories(HistoryPlan):
    """How the histories of labelled rows are made."""

    columns: HistoryColumns
    memory_limit: int | None = None
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


class LabelledBlock(UserBlock):
    """The labelled rows of some users, of which the positive ones are events."""

    def __init__(self, block: pa.Table, plan: LabelledHistories) -> None:
        self._is_positive = block.column(LABEL).to_numpy() > 0
        super().__init__(block, plan, self._is_positive)
        self._plan = plan
        if plan.settings.negative_history:
            plan.counts["events"] += len(self.timeline(len(SPLITS) - 1).events)
            plan.counts["skipped"] += int((self.skipped(len(SPLITS) - 1) > 0).sum())

    def rows(self, split: str) -> Iterator[Ids]:
        """Yield the rows of a split, some at a time."""
        rows, plan = np.flatnonzero(self.splits == SPLITS.index(split)), self._plan
        if split == "train":
            kept = plan.settings.train_rows(self.timeline(0), self.users, rows)
            plan.counts["short"] += len(rows) - len(kept)
            rows = kept
        return pieces(rows, plan.columns.length, plan.memory_limit)

    def skipped(self, code: int) -> Ids:
        """For each positive event the item that its user skipped last since the positive one before it, else 0 (N,).

        So no skipped event stands beside two positive ones. An item that was skipped and then taken is no negative.
        """
        places = np.arange(len(self.users))
        is_skipped = ~self._is_positive & (self.items > 0) & (self.splits <= code)
        latest = np.maximum.accumulate(np.where(is_skipped, places, -1))
        events = self.timeline(code).events
        earliest = np.maximum(
            np.concatenate([[-1], events[:-1]])[: len(events)] + 1, np.searchsorted(self.users, self.users[events])
        )
        has = (latest[events] >= earliest) & (self.items[latest[events]] != self.items[events])
        found = np.zeros(len(self.users), np.int64)
        found[events[has]] = self.items[latest[events[has]]]
        return found
