"""The interactions that a dataset hands over to be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
from ibis.expr.types import Table

from recspec.prepare.columns import Catalogue, Column
from recspec.prepare.histories import UnknownTargets
from recspec.prepare.names import TIMESTAMP
from recspec.prepare.notes import Notes
from recspec.prepare.text_files import ROW


@dataclass(frozen=True)
class Source:
    """Interactions with their split, and everything known about users and items."""

    dataset: str
    rows: Table
    """Columns user_id, item_id, timestamp, row and split, and those of `context`."""
    order: Sequence[str] = (TIMESTAMP, ROW)
    """Columns that sort a user's rows by time."""
    users: Catalogue | None = None
    items: Catalogue | None = None
    context: Sequence[Column] = ()
    raw_names: Mapping[str, str] = field(default_factory=dict)
    """Raw columns of `user_id` and `item_id`, if their names differ."""
    candidates: pa.Table | None = None
    """Listed test candidates: columns user_id and negatives (lists of raw item ids); drawn if None."""
    vocabularies: Literal["all", "train"] = "all"
    """Rows whose users and items get an id; with `train`, a user may have several rows in valid and test."""
    unknown_targets: UnknownTargets = "drop"
    """Whether rows of valid and test with an unknown item stay; rows of unknown users always stay, with id 0."""
    timed: bool = True
    """Whether `timestamp` holds times and not only an order."""
    missing_values: Sequence[str] = ()
    """Raw texts that mean a missing value. `rows` contain none; rows to predict may."""
    summary: Callable[[int], Mapping[str, object]] = lambda _: {}
    """The dataset's own counts, given the number of kept interactions; it may add to `notes`."""
    notes: Notes = field(default_factory=Notes)
    """What the dataset inferred, dropped and changed; writing adds to it."""
