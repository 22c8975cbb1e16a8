"""A plan of which rank holds which rows of which embedding table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from recspec.distributed.ranks import Ranks


@dataclass(frozen=True)
class Table:
    """An embedding table: rows [first, first + rows) of its store."""

    store: str
    name: str
    first: int
    rows: int
    bytes_per_row: int
    """Bytes of weights and optimizer state."""


@dataclass(frozen=True)
class Piece:
    """Rows [first, stop) of a store, all of one table, on one rank."""

    table: Table
    first: int
    stop: int
    rank: int

    @property
    def bytes(self) -> int:
        """Memory of the piece."""
        return (self.stop - self.first) * self.table.bytes_per_row

    def __str__(self) -> str:
        first, stop, rows = self.first - self.table.first, self.stop - self.table.first, self.table.rows
        where = f"{rows:,} rows" if stop - first == rows else f"rows {first:,} to {stop - 1:,} of {rows:,}"
        return f"{self.table.store} {self.table.name} ({where})"


@dataclass(frozen=True)
class ShardingPlan:
    """Which rank holds which rows of which embedding table."""

    pieces: tuple[Piece, ...]
    """Ordered by store and row; the pieces of a store hold each of its rows once."""
    world_size: int

    @property
    def stores(self) -> tuple[str, ...]:
        """The divided stores."""
        return tuple(dict.fromkeys(piece.table.store for piece in self.pieces))

    def of(self, store: str) -> tuple[Piece, ...]:
        """A store's pieces in the order of their rows."""
        return tuple(piece for piece in self.pieces if piece.table.store == store)

    def held(self, store: str, rank: int) -> tuple[range, ...]:
        """The rows of a store that a rank holds, ascending."""
        return tuple(range(piece.first, piece.stop) for piece in self.of(store) if piece.rank == rank)

    @property
    def bytes(self) -> tuple[int, ...]:
        """Each rank's memory."""
        return tuple(sum(piece.bytes for piece in self.pieces if piece.rank == rank) for rank in range(self.world_size))

    def __str__(self) -> str:
        lines = []
        for rank, size in enumerate(self.bytes):
            held = [str(piece) for piece in self.pieces if piece.rank == rank]
            lines.append(f"rank {rank}: {size:,} bytes: {', '.join(held) or 'nothing'}")
        return "\n".join(lines)


def plan_sharding(tables: Iterable[Table], world_size: int) -> ShardingPlan:
    """Assign whole tables to ranks, the largest first, each to the rank with the least memory so far.

    A table larger than an equal share is cut by rows into the fewest even pieces that fit the share. So no rank holds
    more than its share and one piece.
    """
    known = list(tables)
    share = sum(table.rows * table.bytes_per_row for table in known) / world_size
    pieces = [piece for table in known for piece in _cut(table, share, world_size)]
    load = [0] * world_size
    placed = []
    for piece in sorted(pieces, key=lambda piece: -piece.bytes):
        rank = load.index(min(load))
        load[rank] += piece.bytes
        placed.append(Piece(piece.table, piece.first, piece.stop, rank))
    order = {table: place for place, table in enumerate(known)}
    return ShardingPlan(tuple(sorted(placed, key=lambda piece: (order[piece.table], piece.first))), world_size)


def _cut(table: Table, share: float, world_size: int) -> Iterator[Piece]:
    """Even pieces of a table, none larger than the share, and at most one for each rank and row."""
    size = table.rows * table.bytes_per_row
    count = min(world_size, table.rows, max(1, math.ceil(size / share))) if size else 1
    for place in range(count):
        rows = Ranks(place, count).share(table.rows)
        yield Piece(table, table.first + rows.start, table.first + rows.stop, rank=0)
