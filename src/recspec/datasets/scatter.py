"""Rows of any number put in order on disk: dealt into buckets by key, each bucket then sorted in memory.

Rows may come in any order and from several runs, so that an engine need not sort and a killed run need not start over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Rows = NDArray[np.void]

BUCKET_BYTES = 96 << 20
"""Of rows that are sorted in memory at once; sorting takes this twice."""
MAX_BUCKETS = 4096


def shuffled(rows: NDArray[np.int64], seed: int) -> Keys:
    """Keys that put rows in a random order, by their numbers and the seed alone; no two rows share one.

    Two rounds of SplitMix64's finaliser (Steele, Lea, Flood 2014), which maps 64 bits one to one.
    """
    start = _mix(np.full(1, seed, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return _mix(_mix(rows.astype(np.uint64) ^ start))


def _mix(bits: Keys) -> Keys:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class Scatter:
    """Buckets of rows on disk: `deal` as often as it takes, then read `ordered`.

    Args:
        dtypes: The columns of a row.
        keys: The lowest key there may be, and the first one beyond.
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
        """All that was dealt, by key, at most so many rows at a time."""
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
