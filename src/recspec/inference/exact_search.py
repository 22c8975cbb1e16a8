"""Exact search among rows of vectors, and search by inverted lists; the highest of many scores.

Shapes: R queries; N rows; d numbers of a vector; m candidates; k items of an answer; L inverted lists.

A fast product finds candidates, in float32 or over bf16 codes. Its error has a bound. Candidates are scored again by
exact sums, and if the bound does not prove that no other row belongs among the best, more rows are scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import DataError, require_extra

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

RUN = 64
"""Neighbouring scores whose best one is found first."""
SCORES = 1 << 24  # scores of queries x rows held at once: 64 MB
NUMBERS = 1 << 23  # numbers of gathered vectors held at once in float64: 64 MB
LARGEST_NORM = 1e18  # of a vector or query, so that no product leaves float32
COMPRESSED_ROWS = 20_000  # rows from which bf16 codes are faster for a few queries
FEW_QUERIES = 4  # of more, one float32 matrix product is faster than scans of bf16 codes
CODED_TOGETHER = 8  # numbers; faiss takes vectors of other widths one number at a time, 6 times as long
FLOAT32_STEP = 2.0**-24  # relative rounding of one float32 operation
ROWS_PER_CENTROID = 64  # that the centroids are computed from
BLOCK = 1 << 16  # rows that are assigned or added at once
MARGIN, SHARE_OF_MARGIN = 16, 0.25  # candidates beyond k, with which the best are proven
WIDER = 4  # times as many candidates where the first ones prove nothing
QUERIES, CANDIDATES = 256, 1 << 22  # that are answered at once; the second over all of these queries


def highest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values (R, k) and places (R, k) of the k highest of each row (R, N), best first, equal ones by place.

    Of long rows, the best of each run of neighbours is found first, in one pass at the speed of memory. The k runs with
    the highest best scores, equal ones by place, hold the k highest scores.
    """
    runs = scores.shape[1] // RUN
    if runs < 4 * k or not k:
        return _top(scores, k)
    whole = scores[:, : runs * RUN].view(len(scores), runs, RUN)
    chosen = _top(whole.amax(2), k)[1].sort(dim=1).values
    places = torch.cat(
        [
            (chosen.unsqueeze(2) * RUN + torch.arange(RUN, device=scores.device)).flatten(1),
            torch.arange(runs * RUN, scores.shape[1], device=scores.device).expand(len(scores), -1),
        ],
        dim=1,
    )
    best, found = _top(scores.gather(1, places), k)
    return best, places.gather(1, found)


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `highest`; rows where torch.topk keeps any of the equal scores at the list's end are sorted."""
    best, places = torch.topk(scores, k, dim=1)
    if k:
        last = best[:, -1:]
        cut = ((scores >= last).sum(dim=1) > k) & torch.isfinite(last[:, 0])
        places[cut] = torch.argsort(scores[cut], dim=1, descending=True, stable=True)[:, :k]
    places = places.sort(dim=1).values
    best = scores.gather(1, places)
    order = torch.argsort(best, dim=1, descending=True, stable=True)
    return best.gather(1, order), places.gather(1, order)


@dataclass(frozen=True, eq=False)
class FlatRows:
    """Vectors (N, d) of float32, in memory or mapped from a file."""

    vectors: Floats

    def __len__(self) -> int:
        return len(self.vectors)

    @cached_property
    def largest_norm(self) -> float:
        """The largest length of a vector."""
        return largest_norm(self.vectors, "vectors")

    def error(self, query_norms: Doubles) -> Doubles:
        """The most by which scores of `top` (R,) and `above` differ from the exact ones, by the queries' lengths."""
        dim = self.vectors.shape[1]
        product = (dim + 1) * FLOAT32_STEP * query_norms * self.largest_norm * 1.01
        smallest = (dim + 1) * float(np.finfo(np.float32).tiny)  # a processor may take smaller numbers as 0
        coded = query_norms * self._code_error * 1.01 if self._reads_codes(len(query_norms)) else 0.0
        bound: Doubles = product + coded + smallest
        return bound

    def top(self, queries: Floats, m: int, keep: Mask | None = None) -> tuple[Floats, Ids]:
        """Approximate scores (R, m) and rows (R, m) of the best kept rows, best first; row -1 fills a short list."""
        m = min(m, len(self))
        if self._reads_codes(len(queries)):
            return scanned(self._codes, queries, m, selected(keep))
        best = torch.full((len(queries), m), -torch.inf)
        rows = torch.full((len(queries), m), -1, dtype=torch.int64)
        for start, scores in self._scores(queries, keep):
            held, places = highest(torch.from_numpy(scores), min(m, scores.shape[1]))
            best, order = torch.cat([best, held], 1).topk(m)
            rows = torch.cat([rows, places + start], 1).gather(1, order)
        rows[best == -torch.inf] = -1
        return best.numpy(), rows.numpy()

    def above(self, query: Floats, least: float, keep: Mask | None = None) -> Ids:
        """The kept rows whose float32 score of one query (d,) is `least` or more."""
        found = [start + np.flatnonzero(scores[0] >= least) for start, scores in self._scores(query[None], keep)]
        rows: Ids = np.concatenate([np.zeros(0, np.int64), *found])
        return rows if keep is None else rows[keep[rows]]

    def _scores(self, queries: Floats, keep: Mask | None) -> Iterator[tuple[int, Floats]]:
        """Scores (R, n) of blocks of rows, each with its first row; -inf where a row is not kept."""
        step = max(1, SCORES // max(1, len(queries)))
        for start in range(0, len(self), step):
            block = self.vectors[start : start + step]
            # numpy's product stays in float32, whatever precision training has set for torch; OpenBLAS reads lanes that
            # it then drops (AVX-512, rows of five numbers), and what lies there may look like an invalid operation
            with np.errstate(invalid="ignore"):
                scores = (block @ queries[0])[None] if len(queries) == 1 else queries @ block.T
            if keep is not None:
                scores[:, ~keep[start : start + step]] = -np.inf
            yield start, scores

    def _reads_codes(self, num_queries: int) -> bool:
        return num_queries <= FEW_QUERIES and len(self) >= COMPRESSED_ROWS and find_spec("faiss") is not None

    @cached_property
    def _codes(self) -> Any:
        """The vectors as bf16, half their size, in a flat index of faiss."""
        faiss = require_extra("faiss", "retrieval")
        dim = coded_width(self.vectors.shape[1])
        codes = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_bf16, faiss.METRIC_INNER_PRODUCT)
        for start in range(0, len(self), COMPRESSED_ROWS):
            codes.add(widened(self.vectors[start : start + COMPRESSED_ROWS]))
        return codes

    @cached_property
    def _code_error(self) -> float:
        """The largest distance between a vector and its bf16 code."""
        codes, largest = self._codes, 0.0
        for start in range(0, len(self), COMPRESSED_ROWS):
            block = self.vectors[start : start + COMPRESSED_ROWS]
            coded = codes.reconstruct_n(start, len(block))[:, : block.shape[1]]
            largest = max(largest, largest_norm(coded - block, "codes"))
        return largest


def coded_width(dim: int) -> int:
    """How many numbers a vector has in an index of faiss."""
    return -(-dim // CODED_TOGETHER) * CODED_TOGETHER


def widened(vectors: Floats) -> Floats:
    """Vectors with zeros behind them up to that width, in order in memory."""
    more = coded_width(vectors.shape[1]) - vectors.shape[1]
    return np.ascontiguousarray(np.pad(vectors, ((0, 0), (0, more))) if more else vectors)


def selected(keep: Mask | None, **settings: Any) -> Any:
    """Search parameters of faiss that keep to some rows; None for a flat search of all."""
    if keep is None and not settings:
        return None
    faiss = require_extra("faiss", "retrieval")
    kind = faiss.SearchParametersIVF if settings else faiss.SearchParameters
    if keep is None:
        return kind(**settings)
    return kind(sel=faiss.IDSelectorBitmap(np.packbits(keep, bitorder="little")), **settings)


def scanned(index: Any, queries: Floats, m: int, params: Any) -> tuple[Floats, Ids]:
    """Scores (R, m) and rows (R, m) of an index of faiss. One query takes one thread: others would only wait for it."""
    faiss = require_extra("faiss", "retrieval")
    threads = faiss.omp_get_max_threads()  # each calling thread has its own number
    if len(queries) == 1:
        faiss.omp_set_num_threads(1)
    try:
        scores, rows = index.search(widened(queries), m, params=params)
    finally:
        faiss.omp_set_num_threads(threads)
    return scores, rows.astype(np.int64, copy=False)


def exact_scores(queries: Floats, vectors: Floats) -> Floats:
    """Scores (R, m) of queries (R, d) and each one's vectors (R, m, d): float64 sums, rounded to float32.

    Products of float32 numbers are exact in float64, and the order of a sum depends on d alone. So a score is the same
    whatever the number of threads and however queries are grouped.
    """
    products = vectors.astype(np.float64)
    products *= queries[:, None, :]
    scores: Floats = products.sum(2).astype(np.float32)
    return scores


def norms(vectors: Floats) -> Doubles:
    """The length (R,) of each vector (R, d)."""
    lengths: Doubles = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    return lengths


def largest_norm(vectors: Floats, what: str) -> float:
    """The largest length of a vector. Raises `DataError` if a number is not finite, or a vector is too long."""
    largest, step = 0.0, max(1, NUMBERS // max(1, vectors.shape[1]))
    for start in range(0, len(vectors), step):
        lengths = norms(vectors[start : start + step])
        wrong = np.flatnonzero(~(lengths < LARGEST_NORM))
        if len(wrong):
            why = f"holds a number that is not finite, or is longer than {LARGEST_NORM:g}"
            raise DataError(f"{what}: row {start + int(wrong[0]) + 1} {why}")
        largest = max(largest, float(lengths.max(initial=0.0)))
    return largest


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


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows of an index that a search may find: all of them, those of a mask, or copies of a few."""

    flat: FlatRows
    """Vectors of all rows, or copies of those that may be found."""
    keep: Mask | None = None
    """(N,) which rows of the index may be found; None for all."""
    copied: Ids | None = None
    """The rows that `flat` holds, where it holds copies."""
    lists: InvertedLists | None = None
    """What is read first of all rows: most of the best rows, but perhaps not all."""

    @cached_property
    def count(self) -> int:
        """How many rows may be found."""
        return len(self.flat) if self.keep is None else int(np.count_nonzero(self.keep))

    @property
    def copied_bytes(self) -> int:
        """Memory that it takes beside the index."""
        return 0 if self.copied is None else self.flat.vectors.nbytes

    def top(self, queries: Floats, m: int, *, lists: InvertedLists | None) -> tuple[Floats, Ids]:
        """Approximate scores (R, m) and rows (R, m), best first, perhaps by lists; row -1 fills a short list."""
        if lists is not None:
            return lists.top(queries, m, self.keep, self.count / max(1, len(self.flat)))
        if self.copied is None:
            return self.flat.top(queries, m, self.keep)
        scores, places = self.flat.top(queries, m)
        return scores, np.where(places < 0, -1, self.copied[places])

    def above(self, query: Floats, least: float) -> Ids:
        """Every row whose float32 score is `least` or more."""
        if self.copied is None:
            return self.flat.above(query, least, self.keep)
        return self.copied[self.flat.above(query, least)]

    def hidden(self, rows: Ids) -> Ids:
        """Those of some rows that a search could find."""
        return rows if self.keep is None else rows[self.keep[rows]]


def search(
    ids: Ids, flat: FlatRows, chosen: Selection, queries: Floats, k: int, hidden: Sequence[Ids]
) -> tuple[Floats, Ids]:
    """Scores (R, k) and ids (R, k) of the best rows of a selection, without each query's hidden rows; ties by id."""
    scores, found = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
    if not k or not chosen.count:
        return scores, found
    lengths = np.array([len(rows) for rows in hidden], np.int64)
    plans = [(None, 1), (None, WIDER)] if chosen.lists is None else [(chosen.lists, 1), (None, 1), (None, WIDER)]
    order = np.argsort(lengths, kind="stable")  # a query that hides much makes only its neighbours read more
    wanted = k + int(SHARE_OF_MARGIN * k) + MARGIN
    step = max(1, min(QUERIES, CANDIDATES // min(chosen.count, WIDER * wanted + int(lengths.max(initial=0)))))
    for start in range(0, len(order), step):
        left = order[start : start + step]
        for lists, times in plans:
            m = min(chosen.count, times * wanted + int(lengths[left].max()))
            approximate, rows = chosen.top(queries[left], m, lists=lists)
            scores[left], found[left], survivors = _best(ids, flat, queries[left], rows, k, [hidden[q] for q in left])
            needed = np.minimum(k, chosen.count - lengths[left])
            proven = survivors >= needed
            if lists is None and chosen.count > m:  # the rows that were not found score at most this
                beyond = approximate[:, -1] + chosen.flat.error(norms(queries[left]))
                last = scores[left, np.maximum(needed - 1, 0)]
                proven &= (needed == 0) | (last > beyond.astype(np.float32))
            left = left[~proven]
            if not len(left):
                break
        for query in left:  # every row whose exact score may be as good as the last one
            least = float(scores[query, min(k, chosen.count - int(lengths[query])) - 1])
            error = float(chosen.flat.error(norms(queries[[query]]))[0])
            rows = chosen.above(queries[query], least - 2 * error - abs(least) * 2.0**-22)
            best = _best(ids, flat, queries[[query]], rows[None], k, [hidden[query]])
            scores[query], found[query] = best[0][0], best[1][0]
    return scores, found


def _best(
    ids: Ids, flat: FlatRows, queries: Floats, rows: Ids, k: int, hidden: Sequence[Ids]
) -> tuple[Floats, Ids, NDArray[np.int64]]:
    """Exact scores (R, k) and ids (R, k) of the best of rows (R, M), and how many rows (R,) are no hidden ones."""
    exact, dim = np.empty(rows.shape, np.float32), queries.shape[1]
    wide = max(1, NUMBERS // dim)
    tall = max(1, NUMBERS // (dim * max(1, min(rows.shape[1], wide))))
    for top in range(0, rows.shape[0], tall):
        for left in range(0, rows.shape[1], wide):
            part = np.s_[top : top + tall, left : left + wide]
            exact[part] = exact_scores(queries[top : top + tall], flat.vectors[np.maximum(rows[part], 0)])
    exact[rows < 0] = -np.inf
    for place, some in enumerate(hidden):
        if len(some):
            exact[place, np.isin(rows[place], some)] = -np.inf
    numbers = np.where(exact == -np.inf, -1, ids[rows])
    order = np.lexsort((numbers, -exact), axis=-1)[:, :k]
    survivors = np.count_nonzero(exact > -np.inf, axis=1)
    scores, found = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
    scores[:, : order.shape[1]] = np.take_along_axis(exact, order, 1)
    found[:, : order.shape[1]] = np.take_along_axis(numbers, order, 1)
    return scores, found, survivors
