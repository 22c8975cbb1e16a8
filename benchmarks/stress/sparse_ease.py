"""Sparse EASE against exact EASE where both fit, and its time and memory where only the sparse form does.

    python benchmarks/stress/sparse_ease.py near FILE [--neighbours 50 100 200]     (lines: user item item ...)
    python benchmarks/stress/sparse_ease.py large [--items 100000]

`near`: each user's last item is test, the one before valid. The L2 penalty of each form is chosen on valid, and NDCG@10
among all items is of test. `large`: made-up interactions of 100 topics, whose items' popularity falls as 1/rank, as in
many shops.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from recspec.models.ease import fit_primal, fit_sparse

Matrix = Any  # of scipy.sparse, in rows (U, N)
Ids = NDArray[np.int64]
STRENGTHS = (30.0, 100.0, 300.0, 1000.0)
SEED = 20261128
NUM_TOPICS = 100


def read(file: Path) -> tuple[Matrix, Ids, Ids]:
    """The users' items but the last two (U, N), and the last two."""
    lists = [[int(item) for item in line.split()[1:]] for line in file.read_text().splitlines()]
    lists = [items for items in lists if len(items) > 2]
    return matrix_of([items[:-2] for items in lists], 1 + max(max(items) for items in lists)), *(
        np.array([items[at] for items in lists]) for at in (-2, -1)
    )


def matrix_of(lists: list[Any], num_items: int) -> Matrix:
    """X (U, N), of ones."""
    offsets = np.concatenate([[0], np.cumsum([len(items) for items in lists])])
    items = np.concatenate(lists).astype(np.int32)
    found = sp.csr_array((np.ones(len(items), np.float32), items, offsets), shape=(len(lists), num_items))
    found.sum_duplicates()
    found.data[:] = 1
    return found


def made_up(num_items: int) -> tuple[Matrix, Ids]:
    """As many users as items; 20 items each, .8 of them from the user's two topics; and one held-out item of each."""
    rng = np.random.default_rng(SEED)
    popularity = 1 / np.arange(1, num_items + 1)
    topic = rng.integers(NUM_TOPICS, size=num_items)
    everything = rng.choice(num_items, size=(num_items, 21), p=popularity / popularity.sum())
    own = rng.integers(NUM_TOPICS, size=(num_items, 2))
    of_topic = [np.flatnonzero(topic == each) for each in range(NUM_TOPICS)]
    limits = [np.cumsum(popularity[items]) for items in of_topic]
    choice, draw = (
        own[np.arange(num_items)[:, None], rng.integers(2, size=(num_items, 21))],
        rng.random((num_items, 21)),
    )
    drawn = np.empty_like(choice)
    for each, (items, limit) in enumerate(zip(of_topic, limits, strict=True)):
        here = choice == each
        drawn[here] = items[np.searchsorted(limit, draw[here] * limit[-1])]
    lists = np.where(rng.random(drawn.shape) < 0.8, drawn, everything)
    return matrix_of(list(lists[:, :20]), num_items), lists[:, 20]


def ndcg(score: Callable[[slice], Any], known: Matrix, target: Ids, users: int) -> NDArray[np.float64]:
    """NDCG@10 of each of the first users, one target each, among items that they don't have; ties count half."""
    found = np.zeros(users)
    for start in range(0, users, 512):
        rows = slice(start, min(users, start + 512))
        scores = score(rows)
        scores = scores.toarray() if sp.issparse(scores) else np.asarray(scores)
        own = scores[np.arange(len(scores)), target[rows]].copy()
        user, item = known[rows].nonzero()
        scores[user, item] = -np.inf
        rank = (scores > own[:, None]).sum(1) + ((scores == own[:, None]).sum(1) - 1) / 2
        found[rows] = np.where(rank < 10, 1 / np.log2(2 + np.maximum(rank, 0)), 0)
    new = np.asarray(
        [target[user] not in known.indices[known.indptr[user] : known.indptr[user + 1]] for user in range(users)]
    )
    kept: NDArray[np.float64] = found[new]
    return kept


def sparse_form(known: Matrix, m: int, penalties: NDArray[np.float64]) -> Matrix:
    """B (N, N) of m neighbours, fitted."""
    return as_matrix(*fit_sparse(known, penalties, m))


def as_matrix(items: NDArray[np.int32], weight: NDArray[np.float32]) -> Matrix:
    """B (N, N) of the sparse form."""
    num_items, m = items.shape
    columns = np.repeat(np.arange(num_items), m)
    return sp.csr_array(sp.coo_array((weight.ravel(), (items.ravel(), columns)), shape=(num_items, num_items)))


def peak_gb() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def near(file: Path, neighbours: list[int]) -> None:
    """Both forms, with the L2 penalty that is best on valid."""
    known, valid, test = read(file)
    users = min(4000, known.shape[0])
    print(f"{file.name}: {known.shape[0]:,} users, {known.shape[1]:,} items, {known.nnz:,} interactions", flush=True)
    forms: dict[str, Callable[[Any], Any]] = {
        f"sparse, {m} neighbours": partial(sparse_form, known, m) for m in neighbours
    }
    forms["exact"] = partial(fit_primal, known)
    both = known + sp.csr_array((np.ones(len(valid)), (np.arange(len(valid)), valid)), shape=known.shape)
    measured: dict[str, NDArray[np.float64]] = {}
    for name, fit in forms.items():
        best = (-1.0, 0.0, 0.0, np.zeros(0))
        for strength in STRENGTHS:
            started = time.process_time()
            weights = fit(np.full(known.shape[1], strength))
            seconds = time.process_time() - started
            value = float(ndcg(lambda rows: known[rows] @ weights, known, valid, users).mean())  # noqa: B023
            if value > best[0]:
                best = value, strength, seconds, ndcg(lambda rows: both[rows] @ weights, both, test, users)  # noqa: B023
        measured[name] = best[3]
        print(
            f"{name}: l2 {best[1]:g}, {best[2]:.1f} CPU s a fit, NDCG@10 valid {best[0]:.4f}, test {best[3].mean():.4f}"
        )
    for name, values in measured.items():
        difference = values - measured["exact"]
        error = difference.std() / np.sqrt(len(difference))
        print(f"{name}: {difference.mean():+.4f} from exact, error {error:.4f}; peak {peak_gb():.1f} GB", flush=True)


def large(num_items: int, neighbours: list[int]) -> None:
    """The time and memory of one fit of the sparse form."""
    known, target = made_up(num_items)
    before = peak_gb()
    print(f"made up: {known.shape[0]:,} users, {num_items:,} items, {known.nnz:,} interactions, {before:.2f} GB")
    popular, users = np.asarray(known.sum(0)).ravel(), min(2000, known.shape[0])
    value = ndcg(lambda rows: np.tile(popular, (rows.stop - rows.start, 1)), known, target, users).mean()
    print(f"popularity: NDCG@10 {value:.4f}", flush=True)
    for m in neighbours:
        started = time.process_time()
        items, weight = fit_sparse(known, np.full(num_items, 100.0), m)
        seconds, weights = time.process_time() - started, as_matrix(items, weight)
        value = ndcg(lambda rows: known[rows] @ weights, known, target, users).mean()  # noqa: B023
        print(f"{m} neighbours: {seconds:.0f} CPU s, peak {peak_gb():.2f} GB, NDCG@10 {value:.4f}", flush=True)


def main() -> None:
    """Do what the command line asks."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("verb", choices=("near", "large"))
    options.add_argument("file", type=Path, nargs="?")
    options.add_argument("--items", type=int, default=100_000)
    options.add_argument("--neighbours", type=int, nargs="+", default=[100])
    asked = options.parse_args()
    if asked.verb == "near":
        near(asked.file, asked.neighbours)
    else:
        large(asked.items, asked.neighbours)


if __name__ == "__main__":
    main()
