"""The k best rows of an index, proven: fast candidates, exact scores, and the whole scan where these prove nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recspec.retrieval.flat import NUMBERS, Floats, Ids, Mask, exact_scores, norms
from recspec.retrieval.index_rows import IndexRows
from recspec.retrieval.selection import Selection, View

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
