"""Histories: for each row the latest events of its user before it, oldest first, as lists of equal length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from recspec.config import Settings as BaseSettings
from recspec.prepare.negatives import Distribution
from recspec.storage import Ragged

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


# --- the events before a row -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """The events of consecutive users in order of time: the rows with known items."""

    events: Ids  # places among the rows
    before: Ids  # number of events before each row, and before the end (N + 1,)
    first: Ids  # number of events before the first row of each row's user (N,)

    @classmethod
    def of(cls, users: Ids, items: Ids) -> Timeline:
        """From rows sorted by user and time; id 0 is unknown."""
        known = items > 0
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(known)])
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
