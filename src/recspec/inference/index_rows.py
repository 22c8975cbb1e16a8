"""The rows of an item index: ids, vectors, inverted lists, and which of them a search reads.

The lists are made by faiss (IVF with bf16 codes). What is kept of them, in memory and in files, are the centroids and
the list of each row; faiss's own index is made of them when it is first needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recspec.base.errors import DataError, require_extra
from recspec.inference.flat import FlatRows, Floats, Ids, Mask, coded_width, scanned, selected, widened

ROWS_PER_CENTROID = 64  # that the centroids are computed from
BLOCK = 1 << 16  # rows that are assigned or added at once


@dataclass(frozen=True, eq=False)
class InvertedLists:
    """The lists of some rows, and how many of them a query reads."""

    rows: FlatRows
    centroids: Floats  # (L, d)
    assignments: NDArray[np.int32]  # (N,): the list of each row
    num_probes: int
    recall: float | None = None
    """The share of the exact 100 best that sample queries found when the lists were made."""

    def top(self, queries: Floats, m: int, keep: Mask | None = None, share: float = 1.0) -> tuple[Floats, Ids]:
        """Scores (R, m) over bf16 codes and rows (R, m), best first; row -1 fills a short list.

        Where a filter keeps a `share` of the rows, as many more lists are read.
        """
        probes = min(len(self.centroids), int(np.ceil(self.num_probes / max(share, 1e-9))))
        return scanned(self._lists, queries, min(m, len(self.rows)), selected(keep, nprobe=probes))

    def assign(self, vectors: Floats) -> NDArray[np.int32]:
        """The list (N,) that each new vector belongs to."""
        return _assigned(_quantizer(self.centroids), vectors)

    @cached_property
    def _lists(self) -> Any:
        faiss = require_extra("faiss", "retrieval")
        quantizer = _quantizer(widened(self.centroids))
        dim, kind = coded_width(self.centroids.shape[1]), faiss.ScalarQuantizer.QT_bf16
        lists = faiss.IndexIVFScalarQuantizer(
            quantizer, dim, len(self.centroids), kind, faiss.METRIC_INNER_PRODUCT, False
        )
        lists.is_trained = True
        for start in range(0, len(self.rows), BLOCK):
            vectors = widened(self.rows.vectors[start : start + BLOCK])
            of_lists = self.assignments[start : start + BLOCK].astype(np.int64)
            ids = np.arange(start, start + len(vectors))
            lists.add_core(len(vectors), faiss.swig_ptr(vectors), faiss.swig_ptr(ids), faiss.swig_ptr(of_lists))
        return lists


def group(rows: FlatRows, num_lists: int, seed: int) -> InvertedLists:
    """Rows around centroids that k-means finds; a query reads one list until more are asked for."""
    faiss = require_extra("faiss", "retrieval")
    dim = rows.vectors.shape[1]
    rng = np.random.default_rng(seed)
    sample = np.sort(rng.choice(len(rows), min(len(rows), ROWS_PER_CENTROID * num_lists), replace=False))
    kmeans = faiss.Kmeans(
        dim,
        num_lists,
        niter=10,
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=ROWS_PER_CENTROID,
    )
    kmeans.train(np.ascontiguousarray(rows.vectors[sample]))
    centroids = np.array(kmeans.centroids, np.float32).reshape(num_lists, dim)
    return InvertedLists(rows, centroids, _assigned(_quantizer(centroids), rows.vectors), 1)


def _quantizer(centroids: Floats) -> Any:
    faiss = require_extra("faiss", "retrieval")
    quantizer = faiss.IndexFlatIP(centroids.shape[1])
    quantizer.add(np.ascontiguousarray(centroids))
    return quantizer


def _assigned(quantizer: Any, vectors: Floats) -> NDArray[np.int32]:
    found = np.empty(len(vectors), np.int32)
    for start in range(0, len(vectors), BLOCK):
        found[start : start + BLOCK] = quantizer.search(np.ascontiguousarray(vectors[start : start + BLOCK]), 1)[1][
            :, 0
        ]
    return found


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
