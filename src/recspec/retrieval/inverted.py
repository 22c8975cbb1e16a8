"""Inverted lists: rows grouped around centroids, of which a query reads the nearest groups only.

The lists are made by faiss (IVF with bf16 codes). What is kept of them, in memory and in files, are the centroids and
the list of each row; faiss's own index is made of them when it is first needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.errors import require_extra
from recspec.retrieval.flat import FlatRows, Floats, Ids, Mask, coded_width, scanned, selected, widened

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
    kmeans = faiss.Kmeans(dim, num_lists, niter=10, seed=seed, spherical=True, min_points_per_centroid=1,
                          max_points_per_centroid=ROWS_PER_CENTROID)  # fmt: skip
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
