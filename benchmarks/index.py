"""The item index over made-up items: recall, latency, memory and filters, exact and approximate.

    python benchmarks/index.py [--items 1000000] [--dim 64] [--threads 2]

Items lie around `items / 1000` centres. Queries are of the same kind. A filter keeps 10 % of the items, at random or
whole clusters. Exact answers come from one float32 product in numpy.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Literal


def main() -> None:
    """Prints one line for each kind of index and filter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spread", type=float, default=0.6, help="standard deviation around a centre")
    parser.add_argument("--queries", type=int, default=300, help="single queries that are timed")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(asked.threads)

    import numpy as np
    import torch

    from recspec.inference import IndexSettings, ItemIndex
    from recspec.inference.index import INDEX_FILE

    torch.set_num_threads(asked.threads)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((max(1, asked.items // 1000), asked.dim), dtype=np.float32)

    def drawn(num: int) -> tuple[np.ndarray, np.ndarray]:
        cluster = rng.integers(0, len(centres), num)
        noise = rng.standard_normal((num, asked.dim), dtype=np.float32)
        return centres[cluster] + asked.spread * noise, cluster

    vectors, cluster = drawn(asked.items)
    queries, _ = drawn(asked.queries)
    masks = {
        "none": None,
        "10 % at random": rng.random(asked.items) < 0.1,
        "10 % by cluster": rng.permutation(len(centres))[cluster] < len(centres) // 10,
        "50 % at random": rng.random(asked.items) < 0.5,
    }

    def best(mask: np.ndarray | None) -> np.ndarray:
        found = []
        for start in range(0, 100, 20):
            scores = queries[start : start + 20] @ -vectors.T
            if mask is not None:
                scores[:, ~mask] = np.inf
            found.append(np.argpartition(scores, 100, axis=1)[:, :100])
        return np.concatenate(found)

    def timed(held: ItemIndex, rows: np.ndarray, **limits: Any) -> float:
        start = time.perf_counter()
        held.search(rows, 100, **limits)
        return (time.perf_counter() - start) * 1e3

    def one_by_one(held: ItemIndex, seen: list[np.ndarray] | None = None, mask: np.ndarray | None = None) -> str:
        spent = time.process_time()
        times = [
            timed(held, queries[[row]], allowed=mask, excluded=None if seen is None else [seen[row]])
            for row in range(len(queries))
        ]
        spent = (time.process_time() - spent) / len(queries) * 1e3
        p50, p99 = np.percentile(times, [50, 99])
        return f"{p50:.2f} / {p99:.2f} | {spent:.2f}"

    expected = {name: best(mask) for name, mask in masks.items()}
    many = np.tile(queries, (1 + 256 // len(queries), 1))[:256]
    seen = [rng.choice(asked.items, 200, replace=False) for _ in queries]
    print(f"{asked.items:,} items x {asked.dim} numbers, {asked.threads} threads; load {os.getloadavg()[0]:.1f}")
    print("| index | filter | recall@100 | first ms | 1 query p50 / p99 ms | CPU ms | 256 queries ms |")
    print("|---|---|---|---|---|---|---|")
    kinds: tuple[Literal["exact", "approximate"], ...] = ("exact", "approximate")
    for kind in kinds:
        start = time.perf_counter()
        held = ItemIndex.build(vectors, settings=IndexSettings(kind=kind))
        print(f"| {kind} | build: {time.perf_counter() - start:.1f} s; {held.note} |", flush=True)
        for name, mask in masks.items():
            first = timed(held, queries[:1], allowed=mask)
            _, found = held.search(queries[:100], 100, allowed=mask)
            recall = np.mean([len(np.intersect1d(a, b)) / 100 for a, b in zip(found, expected[name], strict=True)])
            row = f"| {kind} | {name} | {recall:.4f} | {first:.0f} | {one_by_one(held, mask=mask)}"
            print(f"{row} | {timed(held, many, allowed=mask):.0f} |", flush=True)
        print(f"| {kind} | without 200 seen items | | | {one_by_one(held, seen)} | |")
        with tempfile.TemporaryDirectory() as folder:
            held.save(Path(folder))
            start = time.perf_counter()
            ItemIndex.load(Path(folder))
            opened = time.perf_counter() - start
            megabytes = (Path(folder) / INDEX_FILE).stat().st_size / 1e6
        print(f"| {kind} | file {megabytes:.0f} MB, opened in {opened * 1e3:.0f} ms |")


if __name__ == "__main__":
    main()
