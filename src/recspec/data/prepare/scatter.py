"""Sorting on disk: rows of any order and of several runs go to buckets by key, which are sorted in memory."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.data.encoding import mix

Keys = NDArray[np.uint64]
BUCKET_BYTES = 48 << 20  # of records
MAX_BUCKETS = 4096
CACHED_ROWS = 2048
ROWS, ENDS = "rows.bin", "ends.bin"


def shuffled(rows: NDArray[np.int64], seed: int) -> Keys:
    """Keys of a random order, all different: two rounds of SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    start = mix(np.full(1, seed, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return mix(mix(rows.astype(np.uint64) ^ start))


class Scatter:
    """Rows on disk by bucket: `deal` each block, then read `ordered`. `keys`: the lowest, one above the highest.

    A folder has one file of rows, block after block, each sorted by bucket, and one that says where its buckets end.
    """

    def __init__(self, dtypes: Mapping[str, np.dtype[np.generic]], num_rows: int, keys: tuple[int, int]) -> None:
        self.names = tuple(dtypes)
        fields = {str(place): kind for place, kind in enumerate(dtypes.values())}
        self._record = np.dtype([("key", np.uint64), *fields.items()])
        self.num_buckets = min(max(-(-num_rows * self._record.itemsize // BUCKET_BYTES), 1), MAX_BUCKETS)
        low, high = keys
        cuts = [low + (high - low) * number // self.num_buckets for number in range(1, self.num_buckets)]
        self._cuts = np.array(cuts, np.uint64)

    def deal(self, folder: Path, keys: Keys, columns: Mapping[str, NDArray[np.generic]]) -> None:
        """Append rows to those in a folder."""
        rows = np.empty(len(keys), self._record)
        given = [keys, *(columns[name] for name in self.names)]
        _copy(given, [rows[field] for field in self._record.fields or ()])
        buckets = np.searchsorted(self._cuts, keys, side="right").astype(np.uint16)
        if self.num_buckets > 1:
            rows = self._taken(rows, np.argsort(buckets, kind="stable"))
        ends = np.cumsum([0, *np.bincount(buckets, minlength=self.num_buckets)], dtype=np.int64)
        with (folder / ROWS).open("ab") as file:
            ends += file.tell() // self._record.itemsize
            rows.tofile(file)
        with (folder / ENDS).open("ab") as file:
            ends.tofile(file)

    def largest(self, folders: Sequence[Path]) -> int:
        """Bytes of the largest bucket."""
        counts = np.zeros(self.num_buckets, np.int64)
        for folder in folders:
            for block in self._ends(folder):
                counts += np.diff(block)
        return int(counts.max()) * self._record.itemsize

    def ordered(
        self, folders: Sequence[Path], rows: int, buckets: Sequence[int]
    ) -> Generator[dict[str, NDArray[np.generic]]]:
        """Yield all rows of some buckets by key, at most `rows` at a time."""
        for bucket in buckets:
            held = self._bucket(folders, bucket)
            order = np.argsort(held["key"])
            for start in range(0, len(order), rows):
                block = self._taken(held, order[start : start + rows])
                columns = {
                    name: np.empty(len(block), self._record[str(place)]) for place, name in enumerate(self.names)
                }
                _copy([block[str(place)] for place in range(len(self.names))], [*columns.values()])
                yield columns

    def _bucket(self, folders: Sequence[Path], bucket: int) -> NDArray[np.void]:
        """The rows of a bucket, in any order."""
        found = [(folder, self._ends(folder)[:, bucket : bucket + 2].tolist()) for folder in folders]
        rows = np.empty(sum(end - start for _, ends in found for start, end in ends), self._record)
        size, place = self._record.itemsize, 0
        target = rows.view(np.uint8).data
        for folder, ends in found:
            if not ends:
                continue
            with (folder / ROWS).open("rb", buffering=0) as file:
                for start, end in ends:
                    file.seek(start * size)
                    read = file.readinto(target[place : place + (end - start) * size])
                    place += read or 0
        return rows[: place // size]

    def _ends(self, folder: Path) -> NDArray[np.int64]:
        """Where the buckets of each block begin and end: (blocks, num_buckets + 1), mapped from the file."""
        place = folder / ENDS
        held = np.memmap(place, np.int64, "r") if place.exists() else np.empty(0, np.int64)
        return held.reshape(-1, self.num_buckets + 1)

    def _taken(self, rows: NDArray[np.void], order: NDArray[np.int64]) -> NDArray[np.void]:
        """Rows in an order; as plain bytes, because numpy takes fields one by one, seven times as slow."""
        return rows.view(f"V{self._record.itemsize}").take(order).view(self._record)


def _copy(columns: Sequence[NDArray[np.generic]], into: Sequence[NDArray[np.generic]]) -> None:
    """Copy columns some rows at a time, because one side lies in records, whose bytes should stay in the cache."""
    for start in range(0, len(into[0]), CACHED_ROWS):
        for column, target in zip(columns, into, strict=True):
            target[start : start + CACHED_ROWS] = column[start : start + CACHED_ROWS]
