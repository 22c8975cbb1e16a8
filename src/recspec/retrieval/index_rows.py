"""The rows of an item index: ids, vectors, and which of them live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recspec.errors import DataError
from recspec.retrieval.flat import FlatRows, Floats, Ids, Mask
from recspec.retrieval.inverted import InvertedLists
from recspec.retrieval.selection import Selection, select


@dataclass(frozen=True, eq=False)
class IndexRows:
    """One state of an index, which never changes: rows of items, added rows after them, and which of them live."""

    base: FlatRows
    tail: FlatRows
    ids: Ids  # of every row
    lists: InvertedLists | None = None
    dead: Mask | None = None  # rows of items that were removed or replaced

    @cached_property
    def sorted_ids(self) -> tuple[Ids, Ids]:
        """The ids of living rows, ascending, and their rows."""
        rows = np.arange(len(self.ids)) if self.dead is None else np.flatnonzero(~self.dead)
        order = np.argsort(self.ids[rows], kind="stable")
        return self.ids[rows][order], rows[order]

    def rows_of(self, ids: ArrayLike) -> Ids:
        """The rows of the items that are there, ascending, each once."""
        wanted = np.unique(as_ids(ids))
        known, rows = self.sorted_ids
        if not len(known):
            return np.zeros(0, np.int64)
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return np.sort(rows[places[known[places] == wanted]])

    def check_known(self, ids: Ids) -> None:
        """Refuse ids that the index does not hold."""
        missing = np.setdiff1d(ids, self.sorted_ids[0])
        if len(missing):
            raise DataError(f"the item index does not hold {len(missing):,} of these ids, such as {missing[0]}")

    def dead_without(self, ids: Ids) -> Mask | None:
        """The dead rows once some items are gone too."""
        rows = self.rows_of(ids)
        if not len(rows):
            return self.dead
        dead = np.zeros(len(self.ids), bool) if self.dead is None else self.dead.copy()
        dead[rows] = True
        return dead

    def vectors_of(self, rows: Ids) -> Floats:
        """Vectors (..., d) of rows (...)."""
        if not len(self.tail):
            return self.base.vectors[rows]
        of_tail = rows >= len(self.base)
        found = np.empty((*rows.shape, self.base.vectors.shape[1]), np.float32)
        found[~of_tail] = self.base.vectors[rows[~of_tail]]
        found[of_tail] = self.tail.vectors[rows[of_tail] - len(self.base)]
        return found

    def select(self, allowed: Mask | Ids | None) -> Selection:
        """The living rows of the allowed items."""
        keep = None if self.dead is None else ~self.dead
        if allowed is not None and allowed.dtype == np.bool_:  # ids beyond the mask's end are not allowed
            known = (self.ids >= 0) & (self.ids < len(allowed))
            known[known] = allowed[self.ids[known]]
            keep = known if keep is None else keep & known
        elif allowed is not None:
            keep = np.zeros(len(self.ids), bool)
            keep[self.rows_of(allowed)] = True
        return select(self.base, self.tail, self.lists, keep)

    def compact(self) -> IndexRows:
        """The living rows in the order of their ids, all in the base."""
        ids, rows = self.sorted_ids
        if not len(self.tail) and len(rows) == len(self.ids) and bool((rows[1:] > rows[:-1]).all()):
            return self
        base, lists = FlatRows(self.vectors_of(rows)), self.lists
        if lists is not None:
            of_all = np.concatenate([lists.assignments, lists.assign(self.tail.vectors)])
            lists = replace(lists, rows=base, assignments=of_all[rows])
        return IndexRows(base, no_rows(base.vectors.shape[1]), ids, lists)


def no_rows(dim: int) -> FlatRows:
    """No vectors."""
    return FlatRows(np.zeros((0, dim), np.float32))


def as_ids(values: ArrayLike) -> Ids:
    """Ids as int64. Raises `DataError` for anything but whole numbers."""
    found = np.asarray(values)
    if found.size and found.dtype.kind not in "iu":
        raise DataError(f"ids are {found.dtype}; expected whole numbers")
    ids: NDArray[np.int64] = found.astype(np.int64, copy=False)
    return ids
