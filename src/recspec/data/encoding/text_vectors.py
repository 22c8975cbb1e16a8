"""Vectors of texts from hashed words and n-grams; only the fit needs more than numpy.

A text's words, pairs of words and the 3 and 4 letters in a row of a word are counted by their hash. With n the count of
gram g in text t and f the number of the N fitted texts that hold it,

    w = (1 + ln n) (1 + ln((1 + N) / (1 + f))),    vector = sum over g of w projection[g] / sqrt(sum over g of w^2)

The projection is that of latent semantic analysis: the largest right singular vectors of the fitted texts' weights.
An export copies this file and `hashing.py` into a Triton repository.

Shapes: B texts; K hashed grams that are kept; D numbers of a vector; Z counted grams of all texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recspec.data.encoding.hashing import fingerprint64_of_bytes

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_BUCKETS = 1 << 20
"""Hash values; of 32,768 kept grams about 3 percent share one."""
MOST_GRAMS = 1 << 15
"""Most kept grams: those in the most texts. With 32 numbers each, 4.3 MB."""
MOST_TEXTS = 20_000
"""Most different texts that a projection is fitted to."""
MOST_LETTERS = 2_000
"""Letters of a text that are read."""
AT_ONCE = 2_048
"""Texts whose grams are held at once."""
SPARE, ROUNDS = 8, 4  # of the subspace iteration: columns beyond D, and products with the texts' weights
_WORD = re.compile(r"\w+")


def grams_of(text: str) -> list[bytes]:
    """Words, pairs of words, and 3 and 4 letters of a word in a row, its ends marked; each kind has its own sign."""
    words = _WORD.findall(text[:MOST_LETTERS].lower())
    found = [f"w{word}" for word in words]
    found += [f"p{one} {other}" for one, other in pairwise(words)]
    for word in words:
        marked = f"<{word}>"
        for size in (3, 4):
            found += [f"c{marked[at : at + size]}" for at in range(len(marked) - size + 1)]
    return [gram.encode("utf-8", "replace") for gram in found]


def counts_of(texts: Sequence[str]) -> tuple[Ints, Ints, Ints]:
    """Row, bucket and count (Z,) of each different gram of each text, ascending."""
    grams = [grams_of(text) for text in texts]
    rows = np.repeat(np.arange(len(texts)), [len(each) for each in grams])
    prints = fingerprint64_of_bytes([gram for each in grams for gram in each]) % np.uint64(NUM_BUCKETS)
    keys, counts = np.unique(rows * NUM_BUCKETS + prints.astype(np.int64), return_counts=True)
    return keys // NUM_BUCKETS, keys % NUM_BUCKETS, counts


@dataclass(frozen=True)
class TextProjection:
    """What was fitted to texts."""

    buckets: Ints  # (K,) ascending
    rarity: NDArray[np.float32]  # (K,)
    weights: NDArray[np.float32]  # (K, D)

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors (B, D); zeros for a text without a known gram."""
        made = np.zeros((len(texts), self.weights.shape[1]), np.float32)
        for start in range(0, len(texts), AT_ONCE):
            rows, places, values = self.weighed(texts[start : start + AT_ONCE])
            if len(rows):
                owners, firsts = np.unique(rows, return_index=True)
                sums = np.add.reduceat(values[:, None] * self.weights[places], firsts, axis=0)
                made[start + owners] = sums
        return made

    def weighed(self, texts: Sequence[str]) -> tuple[Ints, Ints, Floats]:
        """Row, place among the kept grams and weight (Z,) of each text's known grams; squares of a row sum to 1."""
        rows, buckets, counts = counts_of(texts)
        if not len(self.buckets):
            return rows[:0], rows[:0], np.zeros(0)
        places = np.minimum(np.searchsorted(self.buckets, buckets), len(self.buckets) - 1)
        known = self.buckets[places] == buckets
        rows, places = rows[known], places[known]
        values = (1 + np.log(counts[known])) * self.rarity[places]
        norms = np.sqrt(np.bincount(rows, values * values, len(texts)))
        return rows, places, values / norms[rows]


def fit_projection(texts: Sequence[str], dim: int) -> TextProjection:
    """The projection to `dim` numbers of different texts; their mean squared length becomes `dim`.

    If the texts allow fewer directions, the last numbers are 0.
    """
    buckets, rarity = _kept(texts)
    plain = TextProjection(buckets, rarity, np.zeros((len(buckets), 0), np.float32))
    parts = [plain.weighed(texts[start : start + AT_ONCE]) for start in range(0, len(texts), AT_ONCE)]
    rows = np.concatenate([part[0] + at * AT_ONCE for at, part in enumerate(parts)] or [np.zeros(0, np.int64)])
    places, values = (np.concatenate([part[at] for part in parts] or [np.zeros(0)]) for at in (1, 2))
    weights = np.zeros((len(buckets), dim))
    if len(rows):
        from scipy import sparse

        entries = (values, (rows, places.astype(np.int64)))
        found = _directions(sparse.csr_array(entries, shape=(len(texts), len(buckets))), dim)
        weights[:, : found.shape[1]] = found
    made = TextProjection(buckets, rarity, weights.astype(np.float32))
    vectors = made.vectors(texts).astype(np.float64)
    filled = vectors[vectors.any(axis=1)]
    scale = float(f"{np.square(filled).mean() ** -0.5:.9g}") if len(filled) else 1.0
    return TextProjection(buckets, rarity, (weights * scale).astype(np.float32))


def _kept(texts: Sequence[str]) -> tuple[Ints, NDArray[np.float32]]:
    """The kept buckets, ascending, and their rarity: those of several texts, if there are such."""
    frequencies = np.zeros(NUM_BUCKETS, np.int64)
    for start in range(0, len(texts), AT_ONCE):
        _, buckets, _ = counts_of(texts[start : start + AT_ONCE])
        frequencies += np.bincount(buckets, minlength=NUM_BUCKETS)
    found = np.flatnonzero(frequencies > 1)
    found = found if len(found) else np.flatnonzero(frequencies)
    best = found[np.argsort(-frequencies[found], kind="stable")[:MOST_GRAMS]]
    best.sort()
    return best, (1 + np.log((1 + len(texts)) / (1 + frequencies[best]))).astype(np.float32)


# --- singular vectors ------------------------------------------------------------------------------------------------
# Sums run in a fixed order: products of large matrices by einsum, as those of BLAS depend on the number of threads.


def _directions(matrix: csr_array, dim: int) -> Floats:
    """The right singular vectors (columns, at most `dim`) of the largest singular values, by subspace iteration.

    The largest entry of each is positive.
    """
    width = min(dim + SPARE, *matrix.shape)
    basis = _orthonormal(np.random.default_rng(0).standard_normal((matrix.shape[1], width)))
    for _ in range(ROUNDS):
        basis = _orthonormal(matrix.T @ (matrix @ basis))
    image = matrix @ basis
    lengths, turn = np.linalg.eigh(np.einsum("ki,kj->ij", image, image))
    best = np.argsort(-lengths, kind="stable")
    best = best[lengths[best] > 1e-9 * lengths.max()][:dim]
    found = np.einsum("ki,ij->kj", basis, turn[:, best])
    signs = np.sign(found[np.abs(found).argmax(axis=0), np.arange(found.shape[1])])
    signed: Floats = found * signs
    return signed


def _orthonormal(columns: Floats) -> Floats:
    """An orthonormal basis of the columns' span; columns that depend on others are left out."""
    for _ in range(2):  # the second time for what rounding left
        lengths, turn = np.linalg.eigh(np.einsum("ki,kj->ij", columns, columns))
        kept = lengths > 1e-12 * lengths.max()
        columns = np.einsum("ki,ij->kj", columns, turn[:, kept] / np.sqrt(lengths[kept]))
    return columns
