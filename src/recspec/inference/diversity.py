"""Lists that trade scores for variety: maximal marginal relevance.

Carbonell, Goldstein: The Use of MMR, Diversity-Based Reranking, SIGIR 1998. Of the items R that are not yet in the list
S, the next one is

    argmax over i in R of (1 - d) * relevance(i) - d * max over j in S of likeness(i, j)

with d the diversity. Relevance is the score, scaled to 0..1 over the pool of the best items.

Shapes: P items of the pool; D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Likeness = Callable[[int], NDArray[np.floating[Any]]]
"""Likeness (P,), at most 1, of every item of the pool to one of them, by its place."""

FEWEST, TIMES, MOST = 100, 5, 5_000  # items of the pool: as many times k, within these bounds


def pool_size(k: int) -> int:
    """Number of best items among which a list of k is chosen."""
    return max(k, min(MOST, max(FEWEST, TIMES * k)))


def diversified(scores: NDArray[np.floating[Any]], likeness: Likeness, k: int, diversity: float) -> NDArray[np.int64]:
    """Places of k items of a pool, in the order of choice; the pool's order decides between equal ones."""
    spread = float(scores.max() - scores.min()) if len(scores) else 0.0
    relevance = (scores - scores.min()) / spread if spread > 0 else np.zeros(len(scores))
    value, nearest = (1 - diversity) * relevance.astype(np.float64), np.full(len(scores), -np.inf)
    chosen: list[int] = []
    left = np.ones(len(scores), bool)
    for _ in range(min(k, len(scores))):
        penalty = diversity * nearest if chosen else 0.0
        place = int(np.argmax(np.where(left, value - penalty, -np.inf)))
        chosen.append(place)
        left[place] = False
        np.maximum(nearest, likeness(place), out=nearest)
    return np.array(chosen, np.int64)


def by_vectors(vectors: NDArray[np.floating[Any]]) -> Likeness:
    """Cosines of vectors (P, D); 0 with a vector of zeros."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)

    def cosines(place: int) -> NDArray[np.floating[Any]]:
        with np.errstate(invalid="ignore"):  # OpenBLAS may say so of lanes that it drops
            return np.asarray(unit @ unit[place])

    return cosines


def by_values(column: Any) -> Likeness:
    """1 for equal values (P,), else 0; of lists the share of their values that both hold (Jaccard).

    A missing value is like no other.
    """
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_nested(values.type):
        coded = values.dictionary_encode() if not pa.types.is_dictionary(values.type) else values
        codes = np.asarray(pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False))
        return lambda place: ((codes == codes[place]) & (codes[place] >= 0)).astype(np.float64)
    sets = [frozenset(map(str, each or ())) for each in values.to_pylist()]

    def shared(place: int) -> NDArray[np.float64]:
        own = sets[place]
        return np.array([len(own & each) / max(1, len(own | each)) for each in sets])

    return shared
