"""The item index: the items whose vectors have the largest inner products with a query's, proven exact.

Up to about a million items a search is exact. Above, inverted lists find nearly all of the best items, and the recall
that they reach is measured when they are made. Scores of found items are exact in both cases, and so are filters.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recspec.base.errors import DataError, SettingsError
from recspec.inference.flat import NUMBERS, FlatRows, Floats, Ids, Mask, exact_scores, largest_norm, norms
from recspec.inference.index_rows import IndexRows, InvertedLists, Selection, View, as_ids, group, no_rows

MARGIN, SHARE_OF_MARGIN = 16, 0.25  # candidates beyond k, with which the best are proven
WIDER = 4  # times as many candidates where the first ones prove nothing
QUERIES, CANDIDATES = 256, 1 << 22  # that are answered at once; the second over all of these queries


def search(
    held: IndexRows, chosen: Selection, queries: Floats, k: int, hidden: Sequence[Ids] | None
) -> tuple[Floats, Ids]:
    """Scores (R, k) and ids (R, k) of the best rows of a selection, without each query's hidden rows; ties by id."""
    scores, ids = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
    if not k or not chosen.count:
        return scores, ids
    hidden = [np.zeros(0, np.int64)] * len(queries) if hidden is None else [_among(chosen, rows) for rows in hidden]
    lengths = np.array([len(rows) for rows in hidden], np.int64)
    plans = [(chosen.views, 1), (chosen.exact, 1), (chosen.exact, WIDER)]
    if chosen.views is chosen.exact:
        plans = plans[1:]
    order = np.argsort(lengths, kind="stable")  # a query that hides much makes only its neighbours read more
    wanted = k + int(SHARE_OF_MARGIN * k) + MARGIN
    step = max(1, min(QUERIES, CANDIDATES // min(chosen.count, WIDER * wanted + int(lengths.max(initial=0)))))
    for start in range(0, len(order), step):
        left = order[start : start + step]
        for views, times in plans:
            m = min(chosen.count, times * wanted + int(lengths[left].max()))
            found = _attempt(held, views, queries[left], m, k, chosen.count, [hidden[query] for query in left])
            scores[left], ids[left] = found.scores, found.ids
            left = left[~found.proven]
            if not len(left):
                break
        for query in left:
            needed = min(k, chosen.count - int(lengths[query]))
            rows = _scan(chosen.exact, queries[query], float(scores[query, needed - 1]))
            best = _best(held, queries[[query]], rows[None], k, [hidden[query]])
            scores[query], ids[query] = best[0][0], best[1][0]
    return scores, ids


@dataclass(frozen=True)
class _Found:
    scores: Floats  # (R, k)
    ids: Ids  # (R, k)
    proven: Mask  # (R,): no other row belongs to the answer, or the search need not be exact


def _attempt(
    held: IndexRows, views: Sequence[View], queries: Floats, m: int, k: int, count: int, hidden: Sequence[Ids]
) -> _Found:
    """The best of m candidates of each view, and whether they are the best of all."""
    lengths = norms(queries)
    candidates, beyond = list[Ids](), np.full(len(queries), -np.inf)
    for view in views:
        approximate, rows = view.top(queries, m)
        candidates.append(rows)
        if view.count > m:  # the rows that were not found score at most this
            beyond = np.maximum(beyond, approximate[:, -1] + view.flat.error(lengths))
    scores, ids, survivors = _best(held, queries, np.concatenate(candidates, 1), k, hidden)
    needed = np.minimum(k, count - np.array([len(rows) for rows in hidden], np.int64))
    proven = survivors >= needed
    if all(view.is_exact for view in views):
        last = scores[np.arange(len(queries)), np.maximum(needed - 1, 0)]
        proven &= (needed == 0) | (last > beyond.astype(np.float32))
    return _Found(scores, ids, proven)


def _scan(views: Sequence[View], query: Floats, least: float) -> Ids:
    """Every row whose exact score may be `least` or more."""
    found = []
    for view in views:
        error = float(view.flat.error(norms(query[None]))[0])
        found.append(view.above(query, least - 2 * error - abs(least) * 2.0**-22))
    return np.concatenate(found)


def _best(
    held: IndexRows, queries: Floats, rows: Ids, k: int, hidden: Sequence[Ids]
) -> tuple[Floats, Ids, NDArray[np.int64]]:
    """Exact scores (R, k) and ids (R, k) of the best of rows (R, M), and how many rows (R,) are no hidden ones."""
    exact = _rescored(held, queries, np.maximum(rows, 0))
    exact[rows < 0] = -np.inf
    for place, some in enumerate(hidden):
        if len(some):
            exact[place, np.isin(rows[place], some)] = -np.inf
    numbers = np.where(exact == -np.inf, -1, held.ids[rows])
    order = np.lexsort((numbers, -exact), axis=-1)[:, :k]
    survivors = np.count_nonzero(exact > -np.inf, axis=1)
    scores = np.full((len(queries), k), -np.inf, np.float32)
    ids = np.full((len(queries), k), -1, np.int64)
    scores[:, : order.shape[1]] = np.take_along_axis(exact, order, 1)
    ids[:, : order.shape[1]] = np.take_along_axis(numbers, order, 1)
    return scores, ids, survivors


def _rescored(held: IndexRows, queries: Floats, rows: Ids) -> Floats:
    """Exact scores (R, M) of rows (R, M), a part at a time."""
    scores, dim = np.empty(rows.shape, np.float32), queries.shape[1]
    wide = max(1, NUMBERS // dim)
    tall = max(1, NUMBERS // (dim * max(1, min(rows.shape[1], wide))))
    for top in range(0, rows.shape[0], tall):
        for left in range(0, rows.shape[1], wide):
            part = np.s_[top : top + tall, left : left + wide]
            scores[part] = exact_scores(queries[top : top + tall], held.vectors_of(rows[part]))
    return scores


def _among(chosen: Selection, rows: Ids) -> Ids:
    """The rows that a search could find."""
    return rows if chosen.keep is None else rows[chosen.keep[rows]]


KEPT_SELECTIONS, KEPT_BYTES = 16, 512 << 20  # filters whose rows are kept, and their copies' memory
IDLE_SHARE, IDLE_ROWS = 0.1, 10_000  # added and removed rows beyond both of which all rows are put in order
RECALL_AT, RECALL_QUERIES = 100, 256
FIRST_PROBES = 16  # lists; doubled until the recall is reached


@dataclass(frozen=True)
class IndexSettings:
    """How an index searches."""

    kind: Literal["auto", "exact", "approximate"] = "auto"
    """With `auto`, an index of more than `most_exact` items is approximate if the library faiss is installed."""
    most_exact: int = 1_000_000  # items
    recall: float = 0.99
    """The share of the exact 100 best that sample queries must find; if lists can't reach it, the index is exact."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("auto", "exact", "approximate"):
            raise SettingsError(f"kind is {self.kind!r}; expected 'auto', 'exact' or 'approximate'")
        if not 0 < self.recall <= 1:
            raise SettingsError(f"recall is {self.recall}; expected more than 0, and at most 1")


class ItemIndex:
    """Finds the items with the largest inner products; every method may be called from any thread."""

    def __init__(self, rows: IndexRows, note: str) -> None:
        self._rows, self.note = rows, note
        """`note` says in a sentence how the index searches, and why."""
        self._selections: OrderedDict[bytes, Selection] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def build(
        cls,
        vectors: ArrayLike,
        ids: ArrayLike | None = None,
        *,
        settings: IndexSettings | None = None,
        queries: ArrayLike | None = None,
    ) -> Self:
        """An index of vectors (N, d) of items, by default with the ids 0 to N - 1.

        `queries` (Q, d) are typical queries, by which an approximate index measures its recall; without them it takes
        vectors of items.

        Raises:
            DataError: if ids repeat, or numbers are not finite.
            MissingExtraError: if `settings` ask for an approximate index and faiss is not installed.
        """
        asked, given = settings or IndexSettings(), _as_vectors(vectors, "vectors")
        numbers = np.arange(len(given)) if ids is None else as_ids(ids)
        if len(numbers) != len(given):
            raise DataError(f"vectors: {len(given):,} rows, but {len(numbers):,} ids; expected an id for each row")
        order = np.argsort(numbers, kind="stable")
        if bool((order[1:] < order[:-1]).any()):
            given, numbers = given[order], numbers[order]
        _check_ids(numbers)
        base = FlatRows(given)
        base.largest_norm  # noqa: B018  (refuses numbers that are not finite)
        rows = IndexRows(base, no_rows(given.shape[1]), numbers)
        if asked.kind == "exact" or (asked.kind == "auto" and len(base) <= asked.most_exact) or not len(base):
            return cls(rows, f"exact search of {len(base):,} items")
        if asked.kind == "auto" and find_spec("faiss") is None:
            why = "above that, pip install 'recspec[retrieval]' makes it faster"
            return cls(rows, f"exact search of {len(base):,} items, more than {asked.most_exact:,}; {why}")
        samples = None if queries is None else _as_vectors(queries, "queries", base.vectors.shape[1])
        lists, note = _lists(base, asked, samples)
        return cls(replace(rows, lists=lists), note)

    def __len__(self) -> int:
        """How many items the index holds."""
        return len(self._rows.sorted_ids[0])

    @property
    def dim(self) -> int:
        """How many numbers a vector has."""
        return int(self._rows.base.vectors.shape[1])

    @property
    def is_exact(self) -> bool:
        """Whether a search without a filter reads every item."""
        return self._rows.lists is None

    @property
    def recall(self) -> float | None:
        """What an approximate index measured when it was made; None for an exact one."""
        return None if self._rows.lists is None else self._rows.lists.recall

    @property
    def rows(self) -> IndexRows:
        """The index as it is now."""
        return self._rows

    def vectors_of(self, ids: ArrayLike) -> Floats:
        """The vectors (n, d) of some items. Raises `DataError` if one is not in the index."""
        held, wanted = self._rows, as_ids(ids)
        held.check_known(wanted)
        known, rows = held.sorted_ids
        return held.vectors_of(rows[np.searchsorted(known, wanted)])

    def search(
        self,
        queries: ArrayLike,
        k: int,
        *,
        allowed: ArrayLike | None = None,
        excluded: Sequence[ArrayLike] | None = None,
    ) -> tuple[Floats, Ids]:
        """Scores (R, K) and ids (R, K) of the best items of queries (R, d), best first; ties in the order of ids.

        K is k, or the number of items if it is smaller. A score of -inf and the id -1 fill a list for which no more
        items are allowed. The answer does not depend on the number of threads.

        Args:
            allowed: The items that may be found: a mask whose place i stands for id i, or ids. An id beyond the mask's
                end is not allowed.
            excluded: For each query the ids that it may not find, such as items its user has seen.

        Raises:
            DataError: if a query does not have d finite numbers.
        """
        held, asked = self._rows, _as_vectors(queries, "queries", self.dim)
        if k < 1:
            raise DataError(f"k is {k}; expected 1 or more")
        if excluded is not None and len(excluded) != len(asked):
            raise DataError(f"excluded: {len(excluded)} lists for {len(asked)} queries; expected one for each")
        largest_norm(asked, "queries")
        chosen = self._selection(held, None if allowed is None else np.asarray(allowed))
        hidden = [held.rows_of(ids) for ids in excluded] if excluded is not None else None
        return search(held, chosen, asked, min(k, len(held.sorted_ids[0])), hidden)

    def add(self, vectors: ArrayLike, ids: ArrayLike) -> None:
        """Add items, or replace the vectors of those that are there.

        Raises:
            DataError: if ids repeat, or numbers are not finite; the index is then as it was.
        """
        given, numbers = _as_vectors(vectors, "vectors", self.dim), as_ids(ids)
        if len(numbers) != len(given):
            raise DataError(f"vectors: {len(given):,} rows, but {len(numbers):,} ids; expected an id for each row")
        _check_ids(np.sort(numbers))
        largest_norm(given, "vectors")
        with self._lock:
            held = self._rows
            tail = FlatRows(np.concatenate([held.tail.vectors, given]))
            dead = held.dead_without(numbers)
            if dead is not None:
                dead = np.concatenate([dead, np.zeros(len(given), bool)])
            self._become(IndexRows(held.base, tail, np.concatenate([held.ids, numbers]), held.lists, dead))

    def remove(self, ids: ArrayLike) -> None:
        """Remove items. Raises `DataError` if one is not in the index, which is then as it was."""
        numbers = as_ids(ids)
        with self._lock:
            held = self._rows
            held.check_known(numbers)
            self._become(replace(held, dead=held.dead_without(numbers)))

    def _become(self, rows: IndexRows) -> None:
        """Take a new state, whose rows are put in order if many were added or removed."""
        idle = len(rows.tail) + (0 if rows.dead is None else int(np.count_nonzero(rows.dead)))
        self._rows = rows.compact() if idle > max(IDLE_ROWS, IDLE_SHARE * len(rows.ids)) else rows
        self._selections.clear()

    def _selection(self, held: IndexRows, allowed: NDArray[Any] | None) -> Selection:
        """The rows that may be found; those of recent filters are kept."""
        wanted = None if allowed is None else _as_mask_or_ids(allowed)
        key = b"" if wanted is None else _digest(wanted)
        with self._lock:
            if held is self._rows and key in self._selections:
                self._selections.move_to_end(key)
                return self._selections[key]
        made = held.select(wanted)
        with self._lock:
            if held is self._rows and made.copied_bytes <= KEPT_BYTES:
                self._selections[key] = made
                while (
                    len(self._selections) > KEPT_SELECTIONS
                    or sum(each.copied_bytes for each in self._selections.values()) > KEPT_BYTES
                ):
                    self._selections.popitem(last=False)
        return made


def _lists(base: FlatRows, asked: IndexSettings, queries: Floats | None) -> tuple[InvertedLists | None, str]:
    """Inverted lists that reach the recall asked for, or None; and a sentence about them."""
    num_lists = 1 << max(0, round(np.log2(4 * np.sqrt(len(base)))))
    lists = group(base, min(num_lists, len(base)), asked.seed)
    rng = np.random.default_rng(asked.seed)
    given = base.vectors if queries is None else queries
    sample = np.ascontiguousarray(given[rng.choice(len(given), min(len(given), RECALL_QUERIES), replace=False)])
    told = f"{len(sample)} {'vectors of items' if queries is None else 'of the given queries'}"
    rows = IndexRows(base, no_rows(base.vectors.shape[1]), np.arange(len(base)))
    k = min(RECALL_AT, len(base))
    _, expected = search(rows, rows.select(None), sample, k, None)
    probes, recall = FIRST_PROBES, 0.0
    while probes <= max(FIRST_PROBES, len(lists.centroids) // 4):
        rows = replace(rows, lists=replace(lists, num_probes=min(probes, len(lists.centroids))))
        _, found = search(rows, rows.select(None), sample, k, None)
        recall = float(np.mean([len(np.intersect1d(a, b)) / k for a, b in zip(expected, found, strict=True)]))
        if recall >= asked.recall:
            assert rows.lists is not None
            how = f"{rows.lists.num_probes:,} of {len(lists.centroids):,} lists are read"
            return replace(rows.lists, recall=recall), f"approximate search: {how}; recall@{k} of {told}: {recall:.4f}"
        probes *= 2
    why = f"recall@{k} of {told} in a quarter of {len(lists.centroids):,} lists is {recall:.4f}, below {asked.recall}"
    return None, f"exact search of {len(base):,} items: {why}"


def _as_vectors(values: ArrayLike, what: str, dim: int | None = None) -> Floats:
    """Rows of vectors as float32, one after the other in memory."""
    try:
        found = np.ascontiguousarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}: not rows of equally many numbers: {error}") from None
    if found.ndim != 2 or not found.shape[1] or (dim is not None and found.shape[1] != dim):
        expected = "(rows, numbers)" if dim is None else f"(rows, {dim})"
        raise DataError(f"{what} have shape {found.shape}; expected {expected}")
    return found


def _as_mask_or_ids(allowed: NDArray[Any]) -> Mask | Ids:
    wanted: Mask | Ids = allowed if allowed.dtype == np.bool_ else as_ids(allowed)
    if wanted.ndim != 1:
        raise DataError(f"allowed has {wanted.ndim} dimensions; expected a mask or ids in one")
    return wanted


def _digest(wanted: Mask | Ids) -> bytes:
    content = np.packbits(wanted) if wanted.dtype == np.bool_ else wanted
    return blake2b(content.tobytes(), key=f"{wanted.dtype} {len(wanted)}".encode(), digest_size=16).digest()


def _check_ids(ascending: Ids) -> None:
    """Refuse negative ids and ids that repeat."""
    repeated = np.flatnonzero(ascending[1:] == ascending[:-1])
    if len(repeated):
        raise DataError(f"ids: {ascending[repeated[0]]} is there twice; expected each once")
    if len(ascending) and ascending[0] < 0:
        raise DataError(f"ids: {ascending[0]} is negative; expected 0 or more")
