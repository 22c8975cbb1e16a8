"""Histories: for each row the latest events of its user before it, as lists beside the target.

All lists of a row have the same length and run from the oldest event to the latest; value j belongs to event j.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from recspec.config import Settings as BaseSettings
from recspec.prepare.negatives import Distribution
from recspec.storage import Columns, Ragged

Ids = NDArray[np.int64]
Prefixes = Literal["all", "last"] | Annotated[int, Field(ge=1)]
UnknownTargets = Literal["drop", "keep"]

VALUES = 2_000_000
"""Most events in the lists made at once: 16 MB for each of about ten arrays."""
BYTES_PER_VALUE = 1_000
"""Bytes of a memory limit per event: a limit of 500 MB makes lists of 500,000 events at once."""
SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Histories:
    """The histories of a dataset's rows.

    Args:
        length: Most events of a history, the latest ones.
        min_history: Train rows with fewer events before them are left out.
        prefixes: Train rows of each user: all, the last, or a number of the latest.
        gaps: Whether to keep the time between each event and the row.
        negative: Whether to draw a negative for each event, for an auxiliary loss.
    """

    length: int
    min_history: int = 0
    prefixes: Literal["all", "last"] | int = "all"
    gaps: bool = True
    negative: bool = False

    def train_rows(self, timeline: Timeline, users: Ids, rows: Ids) -> Ids:
        """The train rows of a block that are kept."""
        rows = rows[timeline.num_before(rows) >= self.min_history]
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


class HistorySettings(BaseSettings):
    """Settings of datasets of interactions."""

    history: int | None = Field(
        None, ge=2, description="most events of a user's history beside each row, the latest; no histories if null"
    )
    min_history: int = Field(0, ge=0, description="train rows with fewer events before them are left out")
    prefixes: Prefixes = Field("all", description="train rows of each user: all, last, or a number of the latest")
    gaps: bool = Field(True, description="time between each event of a history and the row, if there are times")
    negative_history: bool = Field(False, description="a drawn item beside each event of a history")
    train_negatives: int = Field(0, ge=0, description="rows of label 0 with drawn items behind each train row")
    negatives: Distribution = Field("uniform", description="how items are drawn for label 0 and negative histories")
    reject_seen: bool = Field(True, description="never draw items that the user acted on; for train rows, in train")

    @model_validator(mode="after")
    def _of_histories(self) -> HistorySettings:
        if self.history is None:
            given = [name for name in ("min_history", "prefixes", "gaps", "negative_history")
                     if getattr(self, name) != type(self).model_fields[name].default]  # fmt: skip
            if given:
                raise ValueError(f"{' and '.join(given)} say how histories are made; set history to their length too")
        return self

    @property
    def histories(self) -> Histories | None:
        """The histories to make, or None."""
        if self.history is None:
            return None
        return Histories(self.history, self.min_history, self.prefixes, self.gaps, self.negative_history)


class TimeSplitSettings(BaseSettings):
    """Settings of datasets that hold out each user's last rows, or the latest of all rows."""

    split: Literal["leave_one_out", "time"] = Field(
        "leave_one_out", description="leave_one_out: each user's last row for test; time: the latest of all rows"
    )
    valid_share: float = Field(0.1, ge=0, lt=1, description="split time: share of the rows for valid")
    test_share: float = Field(0.1, ge=0, lt=1, description="split time: share of the rows for test, the latest")
    unknown_targets: UnknownTargets = Field(
        "drop", description="split time: drop, or keep with id 0, rows of valid and test whose item is not in train"
    )

    @model_validator(mode="after")
    def _of_time(self) -> TimeSplitSettings:
        if self.split != "time":
            given = [name for name in ("valid_share", "test_share", "unknown_targets")
                     if getattr(self, name) != type(self).model_fields[name].default]  # fmt: skip
            if given:
                raise ValueError(f"{' and '.join(given)} are for split time; set split=time too")
        if self.valid_share + self.test_share >= 1:
            taken = self.valid_share + self.test_share
            raise ValueError(f"valid_share and test_share take {taken:g} of the rows; leave some for train")
        return self


# --- the events before a row -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """The events of consecutive users in order of time: the rows with known items.

    Args:
        events: Places of the events among the rows.
        before: Number of events before each row, and before the end (N + 1,).
        first: Number of events before the first row of each row's user (N,).
    """

    events: Ids
    before: Ids
    first: Ids

    @classmethod
    def of(cls, users: Ids, items: Ids) -> Timeline:
        """From rows sorted by user and time; id 0 is unknown."""
        known = items > 0
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(known)])
        return cls(np.flatnonzero(known), before, before[np.searchsorted(users, users)])

    def num_before(self, rows: Ids) -> Ids:
        """The number of the user's events before each row."""
        return self.before[rows] - self.first[rows]

    def histories(self, rows: Ids, length: int) -> Ragged:
        """Places of the latest events before each row, oldest first."""
        return self._windows(self.first[rows], self.before[rows], length)

    def histories_of_users(self, last_rows: Ids, length: int) -> Ragged:
        """Places of the latest events of users, given each one's last row."""
        return self._windows(self.first[last_rows], self.before[last_rows + 1], length)

    def _windows(self, first: Ids, stop: Ids, length: int) -> Ragged:
        counts = np.minimum(stop - first, length)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        places = np.arange(offsets[-1]) + np.repeat(stop - counts - offsets[:-1], counts)
        return Ragged(self.events[places], offsets)


def pieces(rows: Ids, length: int, memory_limit: int | None = None) -> Iterator[Ids]:
    """Yield so many rows at a time that their lists of this length stay small."""
    values = VALUES if memory_limit is None else min(VALUES, memory_limit // BYTES_PER_VALUE)
    step = max(1, values // max(1, length))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


# --- their columns ---------------------------------------------------------------------------------------------------


def item_columns(prefix: str, items: Ids, offsets: Ids, columns: Mapping[str, NDArray[np.generic]]) -> Columns:
    """Lists of items (T,) and of their features: `PREFIX_X` for the feature X by id (I + 1,)."""
    return {f"{prefix}_{name}": Ragged(column[items], offsets) for name, column in columns.items()}


def gap_column(
    timestamps: NDArray[np.generic], now: NDArray[np.generic], events: Ragged, unit: float
) -> NDArray[np.float32]:
    """ln(1 + units between each event and the time of its row (R,)), at least 0: (T,)."""
    passed = np.repeat(now, events.lengths) - timestamps[events.values]
    return np.asarray(np.log1p(np.maximum(passed / unit, 0)), np.float32)
