"""Some of an index's rows, as a search reads them: all of its rows under a mask, or copies of the few that remain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from recspec.retrieval.flat import FlatRows, Floats, Ids, Mask
from recspec.retrieval.inverted import InvertedLists

GATHERED_SHARE = 0.3  # of the rows, up to which copies are scanned faster than all rows under a mask
GATHERED_SHARE_OF_LISTS = 0.5  # likewise beside inverted lists, whose recall falls under a filter
GATHERED_BYTES = 512 << 20  # most bytes of the copies


class View(Protocol):
    """Rows of one kind that a search reads."""

    @property
    def flat(self) -> FlatRows:
        """Their vectors, and perhaps those of other rows."""

    @property
    def is_exact(self) -> bool:
        """Whether `top` reads every row."""

    @property
    def count(self) -> int:
        """How many rows may be found."""

    def top(self, queries: Floats, m: int) -> tuple[Floats, Ids]:
        """Approximate scores (R, m) and rows (R, m) of an index, best first; row -1 fills a short list."""

    def above(self, query: Floats, least: float) -> Ids:
        """Every row whose float32 score is `least` or more."""


@dataclass(frozen=True, eq=False)
class Masked:
    """Consecutive rows of an index from `start`, all or those that `keep` marks."""

    flat: FlatRows
    start: int = 0
    keep: Mask | None = None
    is_exact = True

    @property
    def count(self) -> int:
        """How many rows may be found."""
        return len(self.flat) if self.keep is None else int(np.count_nonzero(self.keep))

    def top(self, queries: Floats, m: int) -> tuple[Floats, Ids]:
        """See `View`."""
        scores, rows = self.flat.top(queries, m, self.keep)
        return scores, np.where(rows < 0, -1, rows + self.start)

    def above(self, query: Floats, least: float) -> Ids:
        """See `View`."""
        return self.flat.above(query, least, self.keep) + self.start


@dataclass(frozen=True, eq=False)
class Gathered:
    """Copies of some rows of an index."""

    flat: FlatRows
    rows: Ids
    is_exact = True

    @property
    def count(self) -> int:
        """How many rows may be found."""
        return len(self.flat)

    def top(self, queries: Floats, m: int) -> tuple[Floats, Ids]:
        """See `View`."""
        scores, places = self.flat.top(queries, m)
        return scores, np.where(places < 0, -1, self.rows[places])

    def above(self, query: Floats, least: float) -> Ids:
        """See `View`."""
        return self.rows[self.flat.above(query, least)]


@dataclass(frozen=True, eq=False)
class Probed:
    """The first rows of an index by inverted lists: most of the best rows, but perhaps not all."""

    lists: InvertedLists
    flat: FlatRows
    keep: Mask | None = None
    is_exact = False

    @property
    def count(self) -> int:
        """How many rows may be found."""
        return Masked(self.flat, 0, self.keep).count

    def top(self, queries: Floats, m: int) -> tuple[Floats, Ids]:
        """See `View`; under a mask more lists are probed."""
        return self.lists.top(queries, m, self.keep, self.count / max(1, len(self.flat)))

    def above(self, query: Floats, least: float) -> Ids:
        """See `View`."""
        return self.flat.above(query, least, self.keep)


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows that a search may find, in the views that it reads first, and in exact ones."""

    views: tuple[View, ...]
    exact: tuple[View, ...]
    keep: Mask | None
    """Which rows of the index these are; None for all."""

    @property
    def count(self) -> int:
        """How many rows may be found."""
        return sum(view.count for view in self.exact)

    @property
    def copied_bytes(self) -> int:
        """Memory that it takes beside the index."""
        return sum(view.flat.vectors.nbytes for view in self.views if isinstance(view, Gathered))


def select(base: FlatRows, tail: FlatRows, lists: InvertedLists | None, keep: Mask | None) -> Selection:
    """The rows of an index that `keep` marks; the tail's follow those of the base."""
    if keep is None or keep.all():
        exact: tuple[View, ...] = (Masked(base), *_tail(base, tail, None))
        return Selection((Probed(lists, base), *exact[1:]) if lists is not None else exact, exact, None)
    rows = np.flatnonzero(keep)
    share = GATHERED_SHARE if lists is None else GATHERED_SHARE_OF_LISTS
    if len(rows) <= share * len(keep) and len(rows) * base.vectors.shape[1] * 4 <= GATHERED_BYTES:
        in_base = rows[: np.searchsorted(rows, len(base))]
        copies = np.concatenate([base.vectors[in_base], tail.vectors[rows[len(in_base) :] - len(base)]])
        gathered: tuple[View, ...] = (Gathered(FlatRows(copies), rows),)
        return Selection(gathered, gathered, keep)
    of_base = keep[: len(base)]
    exact = (Masked(base, 0, of_base), *_tail(base, tail, keep[len(base) :]))
    return Selection((Probed(lists, base, of_base), *exact[1:]) if lists is not None else exact, exact, keep)


def _tail(base: FlatRows, tail: FlatRows, keep: Mask | None) -> tuple[Masked, ...]:
    return (Masked(tail, len(base), keep),) if len(tail) else ()
