"""Where embedding tables lie: on each rank's device, divided among the ranks, or in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from recspec import config, machine
from recspec.distributed.ranks import Ranks
from recspec.distributed.sharding_plan import ShardingPlan, Table, plan_sharding
from recspec.errors import SettingsError
from recspec.nn import Embeddings, RowsHeld, without_memory

MEMORY_SHARE = 0.5
"""Share of a device's memory that tables may fill; the rest is for activations, gradients and the MLPs."""


class PlacementSettings(config.Settings):
    """Settings of where embedding tables may lie."""

    shard_embeddings: Literal["never", "auto", "always"] = Field(
        "auto",
        description="divide embedding tables among the ranks, each row with its optimizer state on one of them; auto: "
        "if they exceed embedding_memory",
    )
    offload_embeddings: Literal["never", "auto", "always"] = Field(
        "auto",
        description="keep embedding tables in the host's memory and move the rows of each batch; auto: on a GPU, the "
        "largest tables until embedding_memory holds the others",
    )
    embedding_memory: str | None = Field(
        None,
        description="memory of a rank's device for embedding tables and their optimizer state, as 60GB; by default "
        "half of its memory",
    )

    @model_validator(mode="after")
    def _is_a_size(self) -> PlacementSettings:
        if self.embedding_memory is not None:
            machine.parse_bytes(self.embedding_memory)
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

    def held_by(self, rank: int) -> RowsHeld:
        """The rows of each store that a rank holds, for the model's constructor."""
        made: list[Embeddings] = []

        def held(embeddings: Embeddings, key: str) -> Sequence[range]:
            made.extend([] if embeddings in made else [embeddings])
            store = f"{self.order[made.index(embeddings)]}.stores.{key}"
            if store in self.plan.stores:
                return self.plan.held(store, rank)
            return (range(sum(len(table) for table in embeddings.tables[key].values())),)

        return held


def place(
    make: Callable[[RowsHeld | None], nn.Module],
    ranks: Ranks,
    settings: PlacementSettings,
    bytes_per_row: Callable[[str, int], float],
) -> Placement:
    """Choose the stores of embeddings that are divided among the ranks, and those that stay on the host.

    All stores are divided, or none. If a device lacks room for its share, the largest stores stay on the host until it
    has room for the rest.

    Args:
        make: builds the model; called on the meta device, where nothing takes memory.
        ranks: the ranks that hold the tables.
        settings: allowed placements.
        bytes_per_row: memory of a row, from the store's name and width.

    Raises:
        SettingsError: if the settings demand a placement and the model has no embedding tables.
    """
    made: list[Embeddings] = []

    def note(embeddings: Embeddings, _: str) -> Sequence[range]:
        made.extend([] if embeddings in made else [embeddings])
        return ()

    model = without_memory(lambda: make(note))
    names = {id(module): prefix for prefix, module in model.named_modules() if isinstance(module, Embeddings)}
    shard, offload = settings.shard_embeddings, settings.offload_embeddings
    asked = [f"{what}_embeddings" for what, choice in (("shard", shard), ("offload", offload)) if choice == "always"]
    if asked and not made:
        raise SettingsError(
            f"train.{' and train.'.join(asked)}: always, but {type(model).__name__} has no embedding tables that can "
            "be divided or left on the host; leave it at auto"
        )
    tables = [
        Table(name := f"{names[id(embeddings)]}.stores.{key}", table, rows.start, len(rows),
              round(bytes_per_row(name, int(key))))
        for embeddings in made
        for key, store in embeddings.tables.items()
        for table, rows in store.items()
    ]  # fmt: skip
    order = tuple(names[id(embeddings)] for embeddings in made)
    memory = settings.embedding_memory
    room = device_memory(ranks) if memory is None else machine.parse_bytes(memory)
    sizes: dict[str, int] = {}
    for table in tables:
        sizes[table.store] = sizes.get(table.store, 0) + table.rows * table.bytes_per_row
    total = sum(sizes.values())
    divided = ranks.world_size > 1 and (shard == "always" or (shard == "auto" and total > room))
    share = total / ranks.world_size if divided else float(total)
    offloaded: set[str] = set()
    for store, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if offload == "always" or (offload == "auto" and ranks.device.type != "cpu" and share > room):
            offloaded.add(store)
            share -= size / ranks.world_size if divided else size
    chosen = [table for table in tables if divided or table.store in offloaded]
    why = f"tables and their optimizer state take {total:,} bytes, and a rank has room for {room:,}"
    return Placement(plan_sharding(chosen, ranks.world_size), frozenset(offloaded), order, why)


def device_memory(ranks: Ranks) -> int:
    """Bytes for a rank's tables: `MEMORY_SHARE` of its GPU, or of its part of the machine's memory."""
    if ranks.device.type == "cuda":
        return int(MEMORY_SHARE * torch.cuda.get_device_properties(ranks.device).total_memory)
    return int(MEMORY_SHARE * machine.total_memory() / ranks.local_world_size)
