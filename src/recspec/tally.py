"""AUC, log loss and accuracy of rows that come block by block, in bounded memory.

    with Tally(memory_rows) as tally:
        for scores, labels in blocks:
            tally.add(scores, labels)
        found = tally.finish()

Log loss and accuracy are running sums. AUC is exact, ties one half, and equal to `metrics.auc` in every digit: scores
become integers in the same order, `memory_rows` at a time are sorted and written to a temporary folder (4 bytes a row,
8 where scores are fp64), positives and negatives apart. Then the range of the integers is cut where at most
`memory_rows` rows lie between two cuts, which binary searches in the sorted runs tell, and the pairs within and across
the pieces are counted. Where more rows than that lie in the narrowest piece of one digit (16 bits), the next digit
decides; after the last one they are ties.

With several ranks each adds rows of its own. Counts of pieces are summed, and a piece is gathered when its turn comes,
so no rank holds more than `memory_rows` of all ranks' rows at once, and every rank gets the same numbers.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from recspec import metrics
from recspec.errors import DataError

Gather = Callable[[NDArray[Any]], NDArray[Any]]
"""An array (n_r, ...) of each rank -> (sum of n_r, ...), on every rank."""

DIGIT = 16  # bits by which a piece of the range is divided at once: 65,536 counts of each class


@dataclass(frozen=True)
class Totals:
    """What the rows of all ranks came to. A metric that is not defined is NaN, as in `metrics`."""

    rows: int
    positives: int
    auc: float
    log_loss: float
    accuracy: float


class Tally:
    """Rows of one rank, added block by block. Leaving the `with` block removes its temporary files."""

    def __init__(self, memory_rows: int, *, gather: Gather = lambda rows: rows, folder: Path | None = None) -> None:
        self.memory_rows = memory_rows
        self._gather = gather
        self._folder = tempfile.TemporaryDirectory(prefix="recspec-tally-", dir=folder)
        self._waiting: list[tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.bool_]]] = []
        self._num_waiting = 0
        self._runs: tuple[list[_Run], list[_Run]] = ([], [])  # of negatives, of positives
        self._rows = self._nan = 0
        self._right = 0.0
        self._losses: list[float] = []  # of each block
        self._bits = 32

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.clear()
        for runs in self._runs:
            runs.clear()  # unmapped before their files go
        self._folder.cleanup()

    def add(self, logits: NDArray[np.floating[Any]], labels: NDArray[np.bool_]) -> None:
        """A block of rows. NaN is told by `finish`, which every rank reaches."""
        sound = ~np.isnan(logits)
        if not sound.all():
            self._nan += int(np.count_nonzero(~sound))
            logits, labels = logits[sound], labels[sound]
        self._rows += len(logits)
        if not len(logits):
            return
        self._losses.append(metrics.log_loss(logits, labels) * len(logits))
        self._right += round(2 * metrics.accuracy(logits, labels) * len(logits)) / 2  # a row is right, wrong or half
        keys = in_order(logits)
        self._bits = 8 * keys.itemsize
        for start in range(0, len(keys), self.memory_rows):
            part = slice(start, start + self.memory_rows)
            if self._num_waiting + len(keys[part]) > self.memory_rows:
                self._write()
            self._waiting.append((keys[part], labels[part].astype(bool)))
            self._num_waiting += len(keys[part])

    def finish(self) -> Totals:
        """What all rows of all ranks come to.

        Raises:
            DataError: scores that are NaN, on whichever rank.
        """
        self._write()
        counts = self._gather(np.array([[self._rows, self._nan, self._bits]], dtype=np.int64))
        rows, nan = int(counts[:, 0].sum()), int(counts[:, 1].sum())
        if nan:
            raise DataError(
                f"{nan} of {rows + nan} scores are NaN: the model has diverged, or its weights or inputs hold NaN"
            )
        # fsum rounds once, so that which rank has which blocks changes no digit
        loss = math.fsum(self._gather(np.array(self._losses, dtype=np.float64)).tolist())
        right = float(self._gather(np.array([self._right])).sum())
        self._bits = int(counts[:, 2].max())  # a rank may have no row
        negatives, positives, twice = self._count(0, self._bits)
        pairs = 2 * negatives * positives
        return Totals(
            rows=rows,
            positives=positives,
            auc=twice / pairs if pairs else float("nan"),
            log_loss=loss / rows if rows else float("nan"),
            accuracy=right / rows if rows else float("nan"),
        )

    def _write(self) -> None:
        """What waits, as a sorted run of each class."""
        if not self._num_waiting:
            return
        for positive, runs in enumerate(self._runs):
            keys = np.concatenate([keys[labels == bool(positive)] for keys, labels in self._waiting])
            if len(keys):
                keys.sort()
                path = Path(self._folder.name) / f"{positive}-{len(runs)}"
                keys.tofile(path)
                runs.append(_Run(path, keys.dtype, len(keys)))
        self._waiting.clear()
        self._num_waiting = 0

    def _count(self, first: int, bits: int) -> tuple[int, int, int]:
        """(negatives, positives, twice the pairs in order) of the keys in [first, first + 2^bits), a tie being half."""
        digit = min(DIGIT, bits)
        width = 1 << (bits - digit)
        counts = self._counts_between(first, width, 1 << digit)
        below = np.concatenate([np.zeros((2, 1), np.int64), np.cumsum(counts, axis=1)], axis=1)  # (2, buckets + 1)
        if bits == digit:
            ordered = 2 * below[0, :-1].astype(object) + counts[0].astype(object)
            return int(below[0, -1]), int(below[1, -1]), int((ordered * counts[1].astype(object)).sum())
        twice = 0
        for start, stop in pairwise(_cuts(below.sum(axis=0), self.memory_rows)):
            negatives, positives = (int(count) for count in below[:, stop] - below[:, start])
            twice += 2 * positives * int(below[0, start])
            if not negatives or not positives:
                continue
            if stop == start + 1 and negatives + positives > self.memory_rows:
                twice += self._count(first + start * width, bits - digit)[2]
                continue
            low, high = first + start * width, first + stop * width
            held = [self._gather(self._between(runs, low, high)) for runs in self._runs]
            twice += metrics.twice_in_order(np.sort(held[0]), np.sort(held[1]))
        return int(below[0, -1]), int(below[1, -1]), twice

    def _counts_between(self, first: int, width: int, buckets: int) -> NDArray[np.int64]:
        """(2, buckets) negatives and positives of all ranks in each bucket of `width` keys, from key `first` on."""
        mine = np.zeros((1, 2, buckets), dtype=np.int64)
        starts = np.arange(buckets, dtype=np.uint64) * np.uint64(width) + np.uint64(first)
        for place, runs in enumerate(self._runs):
            for run in runs:
                low, high = run.before(first), run.before(first + width * buckets)
                if low < high:
                    found = np.searchsorted(run.keys[low:high], starts.astype(run.dtype))
                    mine[0, place] += np.diff(np.append(found, high - low))
        summed: NDArray[np.int64] = self._gather(mine).sum(axis=0)
        return summed

    def _between(self, runs: Sequence[_Run], first: int, end: int) -> NDArray[Any]:
        """This rank's keys in [first, end), as the integers of a sign that torch knows."""
        parts = [run.keys[run.before(first) : run.before(end)] for run in runs]
        dtype = np.dtype("uint32") if self._bits == 32 else np.dtype("uint64")
        whole: NDArray[Any] = np.concatenate([np.zeros(0, dtype), *parts])
        signed = np.dtype(f"int{self._bits}")
        # flipping the first bit keeps the order, from unsigned to signed
        return (whole ^ dtype.type(1 << (self._bits - 1))).view(signed)


@dataclass(frozen=True)
class _Run:
    """Sorted keys in a file."""

    path: Path
    dtype: np.dtype[Any]
    length: int

    @cached_property
    def keys(self) -> NDArray[Any]:
        """Mapped, so that only what is looked at is read."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.length,))

    def before(self, key: int) -> int:
        """How many keys are below one, which may be one above the largest there is."""
        if key >= 1 << (8 * self.dtype.itemsize):
            return self.length
        return int(np.searchsorted(self.keys, self.dtype.type(key)))


def in_order(scores: NDArray[np.floating[Any]]) -> NDArray[Any]:
    """Unsigned integers in the order of the scores, equal where those are: uint32 of fp32 and narrower, else uint64.

    The bits of IEEE numbers are ordered as integers are among positives, and in reverse among negatives.
    """
    wide = scores.dtype.itemsize > 4
    numbers: NDArray[Any] = scores.astype(np.float64 if wide else np.float32)
    bits: NDArray[Any] = (numbers + 0).view(np.uint64 if wide else np.uint32)  # -0 + 0 is 0, and the two are equal
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    keys: NDArray[Any] = np.where(bits & sign, ~bits, bits | sign)
    return keys


def _cuts(below: NDArray[np.int64], rows: int) -> Iterator[int]:
    """Places at which to cut buckets, of which place i has `below[i]` rows before it: at most `rows` rows between two
    cuts, or a single bucket."""
    start, last = 0, len(below) - 1
    yield start
    while start < last:
        start = min(last, max(start + 1, int(np.searchsorted(below, below[start] + rows, side="right")) - 1))
        yield start
