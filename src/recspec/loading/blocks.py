"""Blocks of rows: which rows of some splits are wanted, cut into shares of batches, and their way to a GPU."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.base.prefetch import prefetched
from recspec.data.encoding import mix
from recspec.data.storage import Columns, Ragged, open_split, scalar
from recspec.feature_spec import FeatureSpec
from recspec.models import Ids
from recspec.models.layers import Batch

QUEUED_BATCHES = 4


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of a global batch."""

    batch: Batch
    num_rows: int
    """This rank's rows. With 0, where a batch has fewer rows than there are ranks, `batch` is one filler row."""
    total_rows: int
    """Rows of the global batch."""
    first_row: int
    """Where this rank's rows begin in the global batch."""


def copied_to_device(batches: Generator[RankBatch], device: torch.device) -> Generator[RankBatch]:
    """The same batches, made by a thread that copies to a GPU on a stream of its own."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def sent() -> Generator[tuple[RankBatch, torch.cuda.Event]]:
        with closing(batches):
            while True:
                with torch.cuda.stream(stream):
                    share = next(batches, None)
                if share is None:
                    return
                yield share, stream.record_event()

    with closing(prefetched(sent(), QUEUED_BATCHES)) as arrived:
        for share, copied in arrived:
            here = torch.cuda.current_stream(device)
            here.wait_event(copied)
            for tensor in share.batch.values():
                tensor.record_stream(here)  # its memory belongs to the other stream
            yield share


@dataclass(frozen=True)
class HeldOutShare:
    """Some rows of a split: a share of them held out, or all others. Which ones depends on the seed alone."""

    share: float
    held_out: bool
    seed: int = 0

    def mask(self, reader: int, first: int, last: int) -> NDArray[np.bool_]:
        """Whether each of the rows [first, last) belongs to the part: a hash of its number, as a fraction of 2^64."""
        bits = np.arange(first, last, dtype=np.uint64) + np.uint64(mixed_seed(self.seed, reader))
        with np.errstate(over="ignore"):  # it wraps around
            chosen: NDArray[np.bool_] = mix(bits) < np.uint64(int(self.share * 2**64))
        return chosen if self.held_out else ~chosen


@dataclass(frozen=True)
class NewRowsAndReplay:
    """The rows of each split from a number on, and a share of those before, drawn by the seed: a replayed sample."""

    first: Sequence[int]  # of each split
    share: float
    seed: int = 0

    def mask(self, reader: int, first: int, last: int) -> NDArray[np.bool_]:
        """Whether each of the rows [first, last) of a split is among them."""
        kept: NDArray[np.bool_] = np.arange(first, last) >= self.first[reader]
        if self.share >= 1:
            return np.ones(last - first, dtype=bool)
        return kept | HeldOutShare(self.share, held_out=True, seed=self.seed).mask(reader, first, last)


@dataclass(frozen=True)
class Block:
    """Rows [first, last) of a split, of which `num_rows` are wanted, after `skipped` others that are part of it."""

    reader: int
    first: int
    last: int
    num_rows: int
    skipped: int = 0

    def part(self, start: int, stop: int) -> Block:
        """The wanted rows [start, stop) of the block; if all its rows are wanted, no other row is read."""
        if self.num_rows == self.last - self.first:
            return Block(self.reader, self.first + start, self.first + stop, stop - start)
        return Block(self.reader, self.first, self.last, stop - start, self.skipped + start)


class RowSource(Protocol):
    """Rows that a `Loader` makes batches of."""

    @property
    def num_values(self) -> Mapping[str, int]:
        """How many values each list feature holds, in all rows."""

    @property
    def bytes_read(self) -> int:
        """Bytes of files read so far."""

    def cut(self, rows: int) -> list[Block]:
        """All rows, in blocks of about `rows` rows."""

    def read(self, block: Block) -> Columns:
        """The rows of a block."""


class WantedRows:
    """The wanted rows of one or several splits: all, those with a positive label, those of a `part`."""

    def __init__(
        self,
        spec: FeatureSpec,
        splits: Sequence[str],
        features: Sequence[str],
        positives_only: bool,
        part: HeldOutShare | NewRowsAndReplay | None,
    ) -> None:
        self._spec, self._features, self._part = spec, features, part
        self._label = spec.label if positives_only else None
        self._chooses = positives_only or part is not None
        read = dict.fromkeys((*features, *([spec.label] if positives_only else [])))
        self._readers = [open_split(spec, name, tuple(read)) for name in splits]

    @property
    def num_values(self) -> dict[str, int]:
        """How many values each list feature holds, in all rows."""
        counts = [reader.num_values for reader in self._readers]
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    @property
    def bytes_read(self) -> int:
        """Bytes of files read so far, without the pass over the label."""
        return sum(reader.bytes_read for reader in self._readers)

    def cut(self, rows: int) -> list[Block]:
        """The blocks of all splits with their numbers of wanted rows: one pass over the label if it decides."""
        blocks = []
        for number, reader in enumerate(self._readers):
            labels = open_split(self._spec, reader.split, [self._label]) if self._label else None
            for first, last in pairwise(reader.blocks(rows).tolist()):
                count = last - first
                if self._chooses:
                    count = int(self._kept(number, first, last, labels.read(first, last) if labels else {}).sum())
                blocks.append(Block(number, first, last, count))
        return blocks

    def _kept(self, reader: int, first: int, last: int, columns: Columns) -> NDArray[np.bool_]:
        """Which rows [first, last) of a split are wanted."""
        keep = np.ones(last - first, dtype=bool)
        if self._label is not None:
            keep &= np.greater(scalar(columns[self._label]), 0)
        if self._part is not None:
            keep &= self._part.mask(reader, first, last)
        return keep

    def read(self, block: Block) -> Columns:
        """The wanted rows of a block."""
        columns = self._readers[block.reader].read(block.first, block.last)
        if not self._chooses:
            return columns
        keep = self._kept(block.reader, block.first, block.last, columns)
        chosen = np.flatnonzero(keep)[block.skipped : block.skipped + block.num_rows]
        keep[:] = False
        keep[chosen] = True
        return {name: where(columns[name], keep) for name in self._features}


def grouped(blocks: Sequence[Block], rows: int) -> Iterator[list[Block]]:
    """Consecutive blocks, at least one and else no more than hold `rows` rows."""
    group: list[Block] = []
    held = 0
    for block in blocks:
        if group and held + block.num_rows > rows:
            yield group
            group, held = [], 0
        group.append(block)
        held += block.num_rows
    if group:
        yield group


def mixed_seed(*numbers: int) -> int:
    """A seed that differs wherever one of the numbers does."""
    return int(np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(1, np.uint64)[0] >> 1)


def where(column: NDArray[np.generic] | Ragged, keep: NDArray[np.bool_]) -> NDArray[np.generic] | Ragged:
    """The marked rows."""
    if not isinstance(column, Ragged):
        return column[keep]
    lengths = column.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths[keep])]).astype(np.int64)
    return Ragged(column.values[np.repeat(keep, lengths)], offsets)


class UserRows:
    """A row for each of some users, which holds the user's id."""

    num_values: Mapping[str, int] = MappingProxyType({})
    bytes_read = 0

    def __init__(self, spec: FeatureSpec, users: Ids) -> None:
        self._name, self._users = spec.user_id, users

    def cut(self, rows: int) -> list[Block]:
        """Blocks of at most `rows` users."""
        ends = [*range(0, len(self._users), rows), len(self._users)]
        return [Block(0, first, last, last - first) for first, last in pairwise(ends)]

    def read(self, block: Block) -> Columns:
        """The users of a block."""
        return {self._name: self._users[block.first : block.last]}
