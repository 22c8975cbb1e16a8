"""Where embedding tables lie: on each rank's device, divided among the ranks, or in the host's memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from recspec.base import config, machine
from recspec.base.errors import SettingsError
from recspec.loading.ranks import Ranks
from recspec.models import on_meta_device
from recspec.models.layers import Embeddings, RowsHeld

MEMORY_SHARE = 0.5
"""Share of a device's memory that tables may fill; the rest is for activations, gradients and the MLPs."""


class PlacementSettings(config.Settings):
    """Settings of where embedding tables may lie."""

    shard_embeddings: Literal["never", "auto", "always"] = Field(
        "auto",
        description="shard embedding tables over the ranks; auto: if they exceed embedding_memory",
    )
    offload_embeddings: Literal["never", "auto", "always"] = Field(
        "auto",
        description=(
            "keep embedding tables in host memory; auto: on a GPU, the largest, until the others fit embedding_memory"
        ),
    )
    embedding_memory: str | None = Field(
        None,
        description=(
            "memory per rank for embedding tables and their optimizer state, such as 60GB; by default half of the "
            "device's"
        ),
    )
    shard_by: Literal["recspec", "torchrec"] = Field(
        "recspec",
        description="library that shards embedding tables: recspec or torchrec",
    )
    shard_cut: Literal["auto", "table_wise", "row_wise", "column_wise"] = Field(
        "auto", description="how TorchRec cuts tables; auto: as its planner chooses, table by table"
    )
    shard_precision: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32", description="type of the vectors and gradients that TorchRec sends between ranks; bf16: only on GPUs"
    )

    @model_validator(mode="after")
    def _agrees(self) -> PlacementSettings:
        if self.embedding_memory is not None:
            machine.parse_bytes(self.embedding_memory)
        given = {"shard_cut": self.shard_cut != "auto", "shard_precision": self.shard_precision != "fp32"}
        if self.shard_by != "torchrec" and any(given.values()):
            unread = [f"{name} is {getattr(self, name)}" for name, is_given in given.items() if is_given]
            raise ValueError(f"{' and '.join(unread)}, which only TorchRec reads; set shard_by=torchrec")
        return self


@dataclass(frozen=True)
class Placement:
    """The embedding tables of a model that are divided or offloaded."""

    plan: ShardingPlan = field(default_factory=lambda: ShardingPlan((), 1))
    offloaded: frozenset[str] = frozenset()
    """Stores of the plan that stay in the host's memory."""
    order: tuple[str, ...] = ()
    """All embeddings of the model, in the order of their construction."""
    why: str = ""
    by_torchrec: frozenset[str] = frozenset()
    """Stores of the plan that TorchRec divides."""

    def held_by(self, rank: int) -> RowsHeld:
        """The rows of each store that a rank holds, for the model's constructor."""
        prefixes, made = iter(self.order), dict[Embeddings, str]()

        def held(embeddings: Embeddings, key: str) -> Sequence[range]:
            if embeddings not in made:
                made[embeddings] = next(prefixes)
            store = f"{made[embeddings]}.stores.{key}"
            if store in self.plan.stores:
                return self.plan.held(store, rank)
            return (range(sum(len(table) for table in embeddings.tables[key].values())),)

        return held


def stores_of(model: nn.Module) -> Iterator[tuple[str, Embeddings, str, nn.Parameter]]:
    """Each store of embeddings: its name, its module, its key there and its weight."""
    for prefix, module in model.named_modules():
        for key, store in module.stores.items() if isinstance(module, Embeddings) else ():
            yield f"{prefix}.stores.{key}", module, key, store


def place(
    make: Callable[[RowsHeld | None], nn.Module],
    ranks: Ranks,
    settings: PlacementSettings,
    bytes_per_row: Callable[[str, int], float],
) -> Placement:
    """Choose the stores of embeddings that are divided among the ranks, and those that stay on the host.

    All stores are divided, or none. If a device lacks room for its share, the largest stores stay on the host until it
    has room for the rest. `make` builds the model, on the meta device, where nothing takes memory; `bytes_per_row`
    gives the memory of a row from the store's name and width.

    Raises:
        SettingsError: if the settings demand a placement and the model has no embedding tables.
    """
    made: dict[Embeddings, None] = {}

    def note(embeddings: Embeddings, _: str) -> Sequence[range]:
        made[embeddings] = None
        return ()

    model = on_meta_device(lambda: make(note))
    names = {module: prefix for prefix, module in model.named_modules() if isinstance(module, Embeddings)}
    shard, offload = settings.shard_embeddings, settings.offload_embeddings
    asked = [f"{what}_embeddings" for what, choice in (("shard", shard), ("offload", offload)) if choice == "always"]
    if asked and not made:
        raise SettingsError(
            f"train.{' and train.'.join(asked)}: always, but {type(model).__name__} has no embedding tables that can "
            "be divided or left on the host; leave it at auto"
        )
    tables = [
        Table(name := f"{names[each]}.stores.{key}", table, rows.start, len(rows), round(bytes_per_row(name, int(key))))
        for each in made
        for key, store in each.tables.items()
        for table, rows in store.items()
    ]
    memory = settings.embedding_memory
    room = device_memory(ranks) if memory is None else machine.parse_bytes(memory)
    sizes: Counter[str] = Counter()
    for table in tables:
        sizes[table.store] += table.rows * table.bytes_per_row
    total = sizes.total()
    divided = ranks.world_size > 1 and (shard == "always" or (shard == "auto" and total > room))
    parts = ranks.world_size if divided else 1
    share = total / parts
    offloaded: set[str] = set()
    for store, size in sizes.most_common():
        if offload == "always" or (offload == "auto" and ranks.device.type != "cpu" and share > room):
            offloaded.add(store)
            share -= size / parts
    chosen = [table for table in tables if divided or table.store in offloaded]
    why = "this model has no tables that can be divided or left on the host"
    if tables:
        why = f"tables and their optimizer state take {total:,} bytes, and a rank has room for {room:,}"
    order = tuple(names[each] for each in made)
    return Placement(plan_sharding(chosen, ranks.world_size), frozenset(offloaded), order, why)


def device_memory(ranks: Ranks) -> int:
    """Bytes for a rank's tables: `MEMORY_SHARE` of its GPU, or of its part of the machine's memory."""
    if ranks.device.type == "cuda":
        return int(MEMORY_SHARE * torch.cuda.get_device_properties(ranks.device).total_memory)
    return int(MEMORY_SHARE * machine.total_memory() / ranks.local_world_size)


# --- which rank holds which rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """An embedding table: rows [first, first + rows) of its store."""

    store: str
    name: str
    first: int
    rows: int
    bytes_per_row: int
    """Bytes of weights and optimizer state."""

    @property
    def width(self) -> int:
        return int(self.store.rpartition(".")[2])


@dataclass(frozen=True)
class Piece:
    """Rows [first, stop) of a store, all of one table, on one rank; all columns, or some."""

    table: Table
    first: int
    stop: int
    rank: int
    columns: range | None = None

    @property
    def rows(self) -> range:
        return range(self.first, self.stop)

    @property
    def width(self) -> int:
        return self.table.width if self.columns is None else len(self.columns)

    @property
    def bytes(self) -> int:
        size = len(self.rows) * self.table.bytes_per_row
        return size if self.columns is None else size * len(self.columns) // self.table.width

    def __str__(self) -> str:
        first, stop, rows = self.first - self.table.first, self.stop - self.table.first, self.table.rows
        where = f"{rows:,} rows" if stop - first == rows else f"rows {first:,} to {stop - 1:,} of {rows:,}"
        if (columns := self.columns) is not None:
            where += f", columns {columns.start} to {columns.stop - 1} of {self.table.width}"
        return f"{self.table.store} {self.table.name} ({where})"


@dataclass(frozen=True)
class ShardingPlan:
    """Which rank holds which rows of which embedding table."""

    pieces: tuple[Piece, ...]
    """Ordered by store, row and column; the pieces of a store hold each of its numbers once."""
    world_size: int

    @property
    def stores(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(piece.table.store for piece in self.pieces))

    def of(self, store: str) -> tuple[Piece, ...]:
        """A store's pieces in the order of their rows."""
        return tuple(piece for piece in self.pieces if piece.table.store == store)

    def held(self, store: str, rank: int) -> tuple[range, ...]:
        """The rows of a store that a rank holds, ascending."""
        return tuple(dict.fromkeys(piece.rows for piece in self.of(store) if piece.rank == rank and piece.rows))

    @property
    def bytes(self) -> tuple[int, ...]:
        """Each rank's memory."""
        return tuple(sum(piece.bytes for piece in self.pieces if piece.rank == rank) for rank in range(self.world_size))

    def __str__(self) -> str:
        held = [", ".join(str(piece) for piece in self.pieces if piece.rank == rank) for rank in range(self.world_size)]
        sizes = enumerate(self.bytes)
        return "\n".join(f"rank {rank}: {size:,} bytes: {held[rank] or 'nothing'}" for rank, size in sizes)


def plan_sharding(tables: Sequence[Table], world_size: int) -> ShardingPlan:
    """Assign whole tables to ranks, the largest first, each to the rank with the least memory so far.

    A table larger than an equal share is cut by rows into the fewest even pieces that fit the share. So no rank holds
    more than its share and one piece.
    """
    share = sum(table.rows * table.bytes_per_row for table in tables) / world_size
    pieces = [piece for table in tables for piece in _cut(table, share, world_size)]
    load = [0] * world_size
    for place, piece in sorted(enumerate(pieces), key=lambda each: -each[1].bytes):
        rank = load.index(min(load))
        load[rank] += piece.bytes
        pieces[place] = replace(piece, rank=rank)
    return ShardingPlan(tuple(pieces), world_size)


def _cut(table: Table, share: float, world_size: int) -> Iterator[Piece]:
    """Even pieces of a table, none larger than the share, and at most one for each rank and row."""
    size = table.rows * table.bytes_per_row
    count = min(world_size, table.rows, max(1, math.ceil(size / share))) if size else 1
    for place in range(count):
        rows = Ranks(place, count).share(table.rows)
        yield Piece(table, table.first + rows.start, table.first + rows.stop, rank=0)
