"""Sorting on disk: rows are dealt into buckets by key, and each bucket is sorted in memory.

Rows may come in any order and from several runs, so engines need not sort and a killed run can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.prepare.negatives import mix

Keys = NDArray[np.uint64]
Rows = NDArray[np.void]

BUCKET_BYTES = 96 << 20
"""Size of a bucket; sorting needs twice this memory."""
MAX_BUCKETS = 4096


def shuffled(rows: NDArray[np.int64], seed: int) -> Keys:
    """Keys of a random order, from row numbers and the seed; all keys differ.

    Two rounds of SplitMix64's finaliser (Steele, Lea, Flood 2014), which maps 64 bits one to one.
    """
    start = mix(np.full(1, seed, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return mix(mix(rows.astype(np.uint64) ^ start))


class Scatter:
    """Buckets of rows on disk: call `deal` for each block of rows, then read `ordered`.

    Args:
        dtypes: The columns of a row.
        keys: The lowest possible key, and one above the highest.
    """

    def __init__(self, dtypes: Mapping[str, np.dtype[np.generic]], num_rows: int, keys: tuple[int, int]) -> None:
        self.names = tuple(dtypes)
        self._record = np.dtype(
            [("key", np.uint64), *((str(place), kind) for place, kind in enumerate(dtypes.values()))]
        )
        self.num_buckets = min(max(-(-num_rows * self._record.itemsize // BUCKET_BYTES), 1), MAX_BUCKETS)
        low, high = keys
        cuts = [low + (high - low) * number // self.num_buckets for number in range(1, self.num_buckets)]
        self._cuts = np.array(cuts, np.uint64)

    def deal(self, folder: Path, keys: Keys, columns: Mapping[str, NDArray[np.generic]]) -> None:
        """Append rows to the buckets in a folder."""
        rows = np.empty(len(keys), self._record)
        rows["key"] = keys
        for place, name in enumerate(self.names):
            rows[str(place)] = columns[name]
        if self.num_buckets == 1:
            _append(rows, folder / _name(0))
            return
        buckets = np.searchsorted(self._cuts, keys, side="right").astype(np.uint16)
        rows = rows[np.argsort(buckets, kind="stable")]
        ends = np.cumsum(np.bincount(buckets, minlength=self.num_buckets))
        for bucket, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if end > start:
                _append(rows[start:end], folder / _name(bucket))

    def ordered(self, folders: Sequence[Path], rows: int) -> Iterator[dict[str, NDArray[np.generic]]]:
        """Yield all rows by key, at most `rows` at a time."""
        for bucket in range(self.num_buckets):
            paths = [path for folder in folders if (path := folder / _name(bucket)).exists()]
            if not paths:
                continue
            held: Rows = np.concatenate([np.fromfile(path, self._record) for path in paths])
            order = np.argsort(held["key"])
            for start in range(0, len(order), rows):
                block = held[order[start : start + rows]]
                yield {name: np.ascontiguousarray(block[str(place)]) for place, name in enumerate(self.names)}


def _name(bucket: int) -> str:
    return f"{bucket:04d}.rows"


def _append(rows: Rows, path: Path) -> None:
    with path.open("ab") as file:
        rows.tofile(file)
