"""Sorting on disk: rows of any order and of several runs go to buckets by key, which are sorted in memory."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.prepare.negatives import mix

Keys = NDArray[np.uint64]
BUCKET_BYTES = 48 << 20  # sorting a bucket needs twice this memory in each thread
MAX_BUCKETS = 4096
CACHED_ROWS = 2048


def shuffled(rows: NDArray[np.int64], seed: int) -> Keys:
    """Keys of a random order, all different: two rounds of SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    start = mix(np.full(1, seed, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return mix(mix(rows.astype(np.uint64) ^ start))


class Scatter:
    """Buckets of rows on disk: `deal` each block, then read `ordered`. `keys`: the lowest, one above the highest."""

    def __init__(self, dtypes: Mapping[str, np.dtype[np.generic]], num_rows: int, keys: tuple[int, int]) -> None:
        self.names = tuple(dtypes)
        fields = {str(place): kind for place, kind in enumerate(dtypes.values())}
        self._record = np.dtype([("key", np.uint64), *fields.items()])
        self.num_buckets = min(max(-(-num_rows * self._record.itemsize // BUCKET_BYTES), 1), MAX_BUCKETS)
        self.bucket_bytes = num_rows * self._record.itemsize // self.num_buckets
        low, high = keys
        cuts = [low + (high - low) * number // self.num_buckets for number in range(1, self.num_buckets)]
        self._cuts = np.array(cuts, np.uint64)

    def deal(self, folder: Path, keys: Keys, columns: Mapping[str, NDArray[np.generic]]) -> None:
        """Append rows to the buckets in a folder."""
        rows = np.empty(len(keys), self._record)
        given = [keys, *(columns[name] for name in self.names)]
        _copy(given, [rows[field] for field in self._record.fields or ()])
        buckets = np.searchsorted(self._cuts, keys, side="right").astype(np.uint16)
        if self.num_buckets > 1:
            rows = self._taken(rows, np.argsort(buckets, kind="stable"))
        ends = np.cumsum(np.bincount(buckets, minlength=self.num_buckets))
        for bucket, (start, end) in enumerate(pairwise([0, *ends])):
            if end > start:
                with (folder / _name(bucket)).open("ab") as file:
                    rows[start:end].tofile(file)

    def ordered(
        self, folders: Sequence[Path], rows: int, buckets: Sequence[int]
    ) -> Generator[dict[str, NDArray[np.generic]]]:
        """Yield all rows of some buckets by key, at most `rows` at a time."""
        for bucket in buckets:
            paths = [path for folder in folders if (path := folder / _name(bucket)).exists()]
            if not paths:
                continue
            held = np.concatenate([np.fromfile(path, self._record) for path in paths])
            order = np.argsort(held["key"])
            for start in range(0, len(order), rows):
                block = self._taken(held, order[start : start + rows])
                found = {name: np.empty(len(block), self._record[str(place)]) for place, name in enumerate(self.names)}
                _copy([block[str(place)] for place in range(len(self.names))], [*found.values()])
                yield found

    def _taken(self, rows: NDArray[np.void], order: NDArray[np.int64]) -> NDArray[np.void]:
        """Rows in an order; as plain bytes, because numpy takes fields one by one, seven times as slow."""
        return rows.view(f"V{self._record.itemsize}").take(order).view(self._record)


def _copy(columns: Sequence[NDArray[np.generic]], into: Sequence[NDArray[np.generic]]) -> None:
    """Copy columns some rows at a time, because one side lies in records, whose bytes should stay in the cache."""
    for start in range(0, len(into[0]), CACHED_ROWS):
        for column, target in zip(columns, into, strict=True):
            target[start : start + CACHED_ROWS] = column[start : start + CACHED_ROWS]


def _name(bucket: int) -> str:
    return f"{bucket:04d}.rows"
