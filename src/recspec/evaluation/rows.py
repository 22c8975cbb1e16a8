"""Labels and ids of every row of a split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recspec.errors import DataError, SpecError
from recspec.spec import FeatureSpec
from recspec.storage import Column, Ragged, SplitReader, open_split

Ids = NDArray[np.integer[Any]]
Scores = NDArray[np.floating[Any]]

ROWS_PER_BLOCK = 65_536
"""Rows read at once."""


@dataclass(frozen=True)
class Rows:
    """Labels and ids of a split's rows, or of candidates drawn for it."""

    labels: NDArray[np.bool_]  # (rows,)
    groups: Ids | None
    users: Ids | None
    items: Ids | None
    leak: NDArray[np.bool_] | None = None  # (rows,) the flag that gives a label away, if the dataset has one

    @property
    def has_both_classes(self) -> bool:
        """Whether there are positives and negatives."""
        return bool(self.labels.any() and not self.labels.all())


def read_rows(spec: FeatureSpec, split: str) -> Rows:
    """Labels and ids of every row of a split."""
    user, item, group = id_feature(spec, "user"), id_feature(spec, "item"), group_of(spec, split)
    held = spec.columns(split)
    leak = _leak_of(spec)
    wanted = (spec.label, group, user, item, leak)
    names = tuple(dict.fromkeys(name for name in wanted if name is not None and name in held))
    reader = open_split(spec, split, names)
    columns: dict[str, NDArray[np.generic]] = {}
    for start, block in blocks(reader):
        for name in names:
            values = scalar(block[name])
            if name in (spec.label, leak):
                values = _as_flags(values, start, spec, split, name)
            whole = columns.setdefault(name, np.empty(reader.num_rows, dtype=values.dtype))
            whole[start : start + len(values)] = values

    def column(name: str | None) -> Ids | None:
        return columns.get(name) if name is not None else None  # type: ignore[return-value]

    labels: NDArray[np.bool_] = columns.get(spec.label, np.zeros(0, dtype=bool)).astype(bool)
    flags: NDArray[np.bool_] | None = columns[leak].astype(bool) if leak in columns else None
    return Rows(labels, column(group), column(user), column(item), flags)


def group_of(spec: FeatureSpec, split: str) -> str | None:
    """The feature that groups a split's rows, if the split holds one."""
    group = spec.group if spec.group is not None else id_feature(spec, "user")
    return group if group in spec.columns(split) else None


def _as_flags(values: NDArray[np.generic], start: int, spec: FeatureSpec, split: str, name: str) -> NDArray[np.bool_]:
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        what = "a label" if name == spec.label else "metadata.leak"
        raise DataError(
            f"{spec.folder}, split '{split}', feature '{name}': row {start + row + 1} is {values[row]}; "
            f"{what} is 0 or 1"
        )
    return values.astype(bool)


def id_feature(spec: FeatureSpec, role: Literal["user", "item"]) -> str | None:
    """The feature that identifies users or items, if there is one."""
    try:
        return spec.user_id if role == "user" else spec.item_id
    except SpecError:
        return None


def _leak_of(spec: FeatureSpec) -> str | None:
    """The feature that flags rows whose labels are known from elsewhere, if the dataset's metadata names one."""
    name = spec.metadata.get("leak")
    return name if isinstance(name, str) else None


def blocks(reader: SplitReader) -> Iterator[tuple[int, Mapping[str, Column]]]:
    """Every row in order: the number of a block's first row, and the block."""
    for start, stop in pairwise(reader.blocks(ROWS_PER_BLOCK).tolist()):
        yield start, reader.read(start, stop)


def scalar(column: Column) -> NDArray[np.generic]:
    """A column of ids or labels, which is never a list."""
    assert not isinstance(column, Ragged), "an id or a label is a scalar"
    return column
