"""Histories: for each row the latest events of its user before it, oldest first, as lists of equal length."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from recspec.base.config import Settings as BaseSettings
from recspec.base.errors import DataError, listed
from recspec.data.encoding import NumberEncoder, VocabularyEncoder
from recspec.data.prepare.columns import Fitted, PreparedCatalogue
from recspec.data.prepare.names import GAP, HISTORY, ITEM, NEGATIVE_HISTORY, Notes
from recspec.data.prepare.negatives import Distribution
from recspec.data.storage import Columns, Ragged
from recspec.feature_spec import Feature

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


class TimeSplitSettings(BaseSettings):
    """Settings of datasets that hold out each user's last rows, or the latest of all rows."""

    split: Literal["leave_one_out", "time"] = Field(
        "leave_one_out",
        description="leave_one_out: each user's last row is test; time: the latest rows overall are test",
    )
    valid_share: float = Field(0.1, ge=0, lt=1, description="split=time: share of the rows for valid")
    test_share: float = Field(0.1, ge=0, lt=1, description="split=time: share of the rows for test, the latest")
    unknown_targets: UnknownTargets = Field(
        "drop", description="split=time: drop or keep (with id 0) held-out rows whose item is not in train"
    )

    @model_validator(mode="after")
    def _of_time(self) -> TimeSplitSettings:
        given = _given(self, "valid_share", "test_share", "unknown_targets")
        if self.split != "time" and given:
            raise ValueError(f"{given} are for split time; set split=time too")
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
