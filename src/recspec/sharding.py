"""Embedding tables that one device can't hold: divided among the ranks, or left in the host's memory.

Each rank holds the rows that a plan gives it, with their optimizer state. Where a batch looks up rows, each rank asks
the owners for the different ones among its own, and pools and multiplies what comes back as if the tables were here;
after the backward pass the rows' gradients go the way back. So a step moves the rows seen, never a table, and the MLPs
are data parallel as ever.

Ranks ask in rounds that all take part in: how many rows of which store each wants of each, then the rows' numbers, then
the rows. In training all ranks ask equally often. In an evaluation they need not: who has nothing left to ask goes on
answering until all are done (`Shards.finish`), which comes before anything that the ranks then gather.

A store that stays on the host goes the same way: the rows seen are gathered there, moved to the device, and their
gradients moved back. With several ranks such a store is divided too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from recspec import config, machine
from recspec.distributed import Ranks, ShardingPlan, Streamed, Table, plan_sharding, rows_of_block
from recspec.errors import SettingsError
from recspec.kernels import segments, sum_rows
from recspec.layers import Embeddings, RowsHeld, holding

M = TypeVar("M", bound=nn.Module)

MEMORY_SHARE = 0.5
"""Of a device's memory that tables may fill; the rest is for activations, gradients and the MLPs."""

ROW_BITS = 40
"""Bits of a row's number under its owner's: 10^12 rows a rank."""


class PlacementSettings(config.Settings):
    """Where embedding tables may lie."""

    shard_embeddings: Literal["never", "auto", "always"] = Field(
        "auto",
        description="divide embedding tables among the ranks, each row with its optimizer state on one of them: auto "
        "where they exceed embedding_memory",
    )
    offload_embeddings: Literal["never", "auto", "always"] = Field(
        "auto",
        description="leave embedding tables in the host's memory and move the rows of each batch: auto on a GPU, the "
        "largest tables until embedding_memory holds the others",
    )
    embedding_memory: str | None = Field(
        None,
        description="what a rank's device has for embedding tables and their optimizer state, as 60GB; half of its "
        "memory when not given",
    )

    @model_validator(mode="after")
    def _is_a_size(self) -> PlacementSettings:
        if self.embedding_memory is not None:
            machine.parse_bytes(self.embedding_memory)
        return self


@dataclass(frozen=True)
class Placement:
    """Where the embedding tables of a model lie that do not lie on each rank's device."""

    plan: ShardingPlan = field(default_factory=lambda: ShardingPlan((), 1))
    offloaded: frozenset[str] = frozenset()
    """The plan's stores that stay in the host's memory."""
    order: tuple[str, ...] = ()
    """All embeddings of the model, in the order in which it makes them."""
    why: str = ""

    def held_by(self, rank: int) -> RowsHeld:
        """What `layers.holding` is told while the model is made on a rank."""
        made: list[Embeddings] = []

        def held(embeddings: Embeddings, key: str) -> Sequence[range]:
            made.extend([] if embeddings in made else [embeddings])
            store = f"{self.order[made.index(embeddings)]}.stores.{key}"
            if store in self.plan.stores:
                return self.plan.held(store, rank)
            return (range(sum(len(table) for table in embeddings.tables[key].values())),)

        return held


def place(
    make: Callable[[], nn.Module],
    ranks: Ranks,
    settings: PlacementSettings,
    bytes_per_row: Callable[[str, int], float],
) -> Placement:
    """Decide which stores of embeddings are divided among the ranks, and which stay on the host.

    All are divided or none. What is left to hold on a device then stays on the host from the largest store on, until
    the device has room for the rest.

    Args:
        make: builds the model; it is called where nothing takes memory.
        ranks: who divides.
        settings: what may be done.
        bytes_per_row: memory of a row of a store, by the store's name and its width.

    Raises:
        SettingsError: if something is to be divided and the model has nothing that can be.
    """
    made: list[Embeddings] = []

    def note(embeddings: Embeddings, _: str) -> Sequence[range]:
        made.extend([] if embeddings in made else [embeddings])
        return ()

    with torch.device("meta"), holding(note):
        model = make()
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
    """Bytes that a rank's tables may fill: `MEMORY_SHARE` of its GPU, or of its part of the machine's memory."""
    if ranks.device.type == "cuda":
        return int(MEMORY_SHARE * torch.cuda.get_device_properties(ranks.device).total_memory)
    return int(MEMORY_SHARE * machine.total_memory() / ranks.local_world_size)


def build(make: Callable[[], M], ranks: Ranks, placement: Placement) -> tuple[M, Shards]:
    """The model on its device, with the rows that this rank holds where the placement says.

    First values are those of a model in one piece, whatever the number of ranks; for a normal distribution the host
    holds one whole table at a time while they are drawn, for a uniform one a block.
    """
    if not placement.plan.pieces:
        return make().to(ranks.device), Shards({}, placement, ranks)
    with holding(placement.held_by(ranks.rank)):
        model = make()
    return model, divide(model, ranks, placement)


def divide(model: nn.Module, ranks: Ranks, placement: Placement) -> Shards:
    """Moves to the device what belongs there, and lets the embeddings fetch the rows of the stores that are divided.

    The model's stores hold this rank's rows already.
    """
    found = {
        f"{prefix}.stores.{key}": (module, key)
        for prefix, module in model.named_modules()
        if isinstance(module, Embeddings)
        for key in module.stores
    }
    here = {name: found[name][0].stores._parameters for name in placement.offloaded}
    kept = {name: parameters[found[name][1]] for name, parameters in here.items()}
    for name, parameters in here.items():
        parameters[found[name][1]] = None  # passed over by `to`, which moves all else
    model.to(ranks.device)
    for name, parameters in here.items():
        parameters[found[name][1]] = kept[name]
    stores: dict[str, _Store] = {}
    shards = Shards(stores, placement, ranks)
    for place, name in enumerate(placement.plan.stores):
        module, key = found[name]
        stores[name] = _Store(place, module.stores[key], placement.plan, name, ranks)
        module.fetch[key] = partial(shards.fetch, stores[name])
    return shards


class _Store:
    """What one rank knows of a store: the rows that it holds, and who holds the others."""

    def __init__(self, place: int, weight: nn.Parameter, plan: ShardingPlan, name: str, ranks: Ranks) -> None:
        self.place, self.weight, self.device = place, weight, ranks.device
        self.width = weight.shape[1]
        pieces = plan.of(name)
        self.num_rows = pieces[-1].stop
        self.held = plan.held(name, ranks.rank)
        assert len(weight) == sum(len(rows) for rows in self.held)
        self._starts = torch.tensor([piece.first for piece in pieces[1:]], device=ranks.device)
        so_far = [0] * ranks.world_size
        moves = []
        for piece in pieces:  # row r of the store is row r - first + so_far of its owner
            moves.append((piece.rank << ROW_BITS) + so_far[piece.rank] - piece.first)
            so_far[piece.rank] += piece.stop - piece.first
        self._moves = torch.tensor(moves, device=ranks.device)
        self.gradients: list[tuple[Tensor, Tensor]] = []
        """Rows here and their gradients, of the passes since the last step."""

    def keys(self, rows: Tensor) -> Tensor:
        """1 + owner and owner's row in one number, for rows of the store (n,); 0 for -1."""
        piece = torch.bucketize(rows, self._starts, right=True)
        return torch.where(rows < 0, 0, rows + self._moves[piece] + 1)

    def vectors(self, rows: Tensor) -> Tensor:
        """Rows held here, on the device."""
        weight = self.weight.detach()
        return weight.index_select(0, rows.to(weight.device)).to(self.device)

    def gradient(self, *, sparse: bool) -> Tensor:
        """The sum of what the passes brought; sparse, or of all rows held."""
        weight = self.weight
        rows = torch.cat(
            [rows.to(weight.device) for rows, _ in self.gradients] or [weight.new_zeros(0, dtype=torch.int64)]
        )
        values = [values.to(weight.device) for _, values in self.gradients]
        total = torch.cat(values) if values else weight.new_zeros(0, self.width)
        self.gradients.clear()
        if sparse:
            return torch.sparse_coo_tensor(rows.unsqueeze(0), total, weight.shape, check_invariants=False)
        return torch.zeros_like(weight).index_add_(0, rows, total)


@dataclass(frozen=True)
class _Round:
    """What a round asked for, by which gradients go back."""

    store: _Store
    table: Tensor
    """What was fetched (m + 1, width), after a row of zeros."""
    asked: Sequence[int]
    """Rows asked of each rank."""
    wanted: Sequence[tuple[_Store, Tensor]]
    """Rows that each rank wanted of this one."""


class Shards:
    """The stores of one model that are divided among ranks or kept on the host; empty where none is."""

    def __init__(self, stores: Mapping[str, _Store], placement: Placement, ranks: Ranks) -> None:
        self.stores, self.placement, self.ranks = stores, placement, ranks
        self._rounds: list[_Round] = []

    def __contains__(self, name: object) -> bool:
        return name in self.stores

    def num_rows(self, name: str) -> int:
        """Rows of a store on all ranks together."""
        return self.stores[name].num_rows

    @property
    def elsewhere(self) -> int:
        """Numbers of the model that other ranks hold."""
        return sum((store.num_rows - len(store.weight)) * store.width for store in self.stores.values())

    @property
    def evaluating(self) -> Ranks:
        """The ranks as an evaluation takes them: before they gather, whoever still asks is answered."""
        return replace(self.ranks, before=self.finish) if self.stores and self.ranks.world_size > 1 else self.ranks

    # --- rows there ------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def fetch(self, store: _Store, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of rows of a store (n,), -1 for padding: see `layers.Fetch`."""
        keys, places = distinct(torch.cat([rows.new_zeros(1), store.keys(rows)]))  # padding is there, and comes first
        vectors, asked, wanted = self._ask(store, keys[1:] - 1)
        table = torch.cat([vectors.new_zeros(1, store.width), vectors])
        if torch.is_grad_enabled() and store.weight.requires_grad:
            self._rounds.append(_Round(store, table.requires_grad_(), asked, wanted))
        return table, places[1:]

    def finish(self) -> None:
        """Go on answering until no rank asks any more."""
        assert self.ranks.world_size > 1
        none = torch.zeros(0, dtype=torch.int64, device=self.ranks.device)
        nothing = [0] * self.ranks.world_size
        first = next(iter(self.stores.values()))
        while not self._round(first, none, nothing, done=True)[2]:
            pass

    def _ask(self, store: _Store, keys: Tensor) -> tuple[Tensor, Sequence[int], Sequence[tuple[_Store, Tensor]]]:
        """Vectors of different rows by ascending keys, how many came of which rank, and what each rank wanted here."""
        rows = keys & ((1 << ROW_BITS) - 1)
        if self.ranks.world_size == 1:
            return store.vectors(rows), [len(rows)], [(store, rows)]
        asked = torch.bincount(keys >> ROW_BITS, minlength=self.ranks.world_size).tolist()
        vectors, wanted, _ = self._round(store, rows, asked, done=False)
        return vectors, asked, wanted

    def _round(
        self, store: _Store, rows: Tensor, asked: Sequence[int], *, done: bool
    ) -> tuple[Tensor, Sequence[tuple[_Store, Tensor]], bool]:
        """One round of questions and answers; the last of what it gives says whether all ranks are done."""
        ones, stores = [1] * self.ranks.world_size, list(self.stores.values())
        said = torch.tensor([[count, store.place, int(done)] for count in asked], device=rows.device)
        heard = self.ranks.swap(said, ones, ones).tolist()
        counts = [count for count, _, _ in heard]
        came = torch.split(self.ranks.swap(rows, asked, counts), counts)
        wanted = [(stores[place], part) for (_, place, _), part in zip(heard, came, strict=True)]
        answers = torch.cat([theirs.vectors(part).flatten() for theirs, part in wanted])
        send, receive = [len(part) * theirs.width for theirs, part in wanted], [count * store.width for count in asked]
        vectors = self.ranks.swap(answers, send, receive).view(-1, store.width)
        return vectors, wanted, all(ended for _, _, ended in heard)

    # --- gradients back --------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self) -> None:
        """Send the gradients of a backward pass to the ranks that hold the rows, as the mean over ranks."""
        for each in self._rounds:
            table, width = each.table, each.store.width
            gradient = _whole(table)[1:].flatten()
            send = [count * width for count in each.asked]
            receive = [len(rows) * theirs.width for theirs, rows in each.wanted]
            parts = torch.split(self.ranks.swap(gradient, send, receive) / self.ranks.world_size, receive)
            for (theirs, rows), part in zip(each.wanted, parts, strict=True):
                theirs.gradients.append((rows, part.view(-1, theirs.width)))
        self._rounds.clear()

    def deliver(self, sparse: Callable[[str], bool]) -> None:
        """Give the stores their gradients, for the optimizer; `sparse` says which have those of the rows seen alone."""
        for name, store in self.stores.items():
            if store.weight.requires_grad:
                store.weight.grad = store.gradient(sparse=sparse(name))

    # --- files -----------------------------------------------------------------------------------------------

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Streamed]:
        """Weights, or optimizer tensors, under their names: those that are divided as streams of their rows."""
        if self.ranks.world_size == 1:
            return dict(tensors)
        return {
            key: self._streamed(store, tensor) if tensor.dim() and (store := _parameter(key)) in self.stores else tensor
            for key, tensor in tensors.items()
        }

    def held(self, key: str) -> Sequence[range] | None:
        """Which rows of a tensor in a checkpoint or bundle this rank holds; None for all."""
        store = self.stores.get(_parameter(key))
        return None if store is None else store.held

    def _streamed(self, name: str, tensor: Tensor) -> Streamed:
        """A tensor with a row for each row of the store, in the store's order."""
        store, ranks = self.stores[name], self.ranks
        assert len(tensor) == len(store.weight)

        def blocks() -> Iterator[Tensor]:
            step, here = rows_of_block(tensor.shape, tensor.dtype), 0
            for piece in self.placement.plan.of(name):
                for first in range(piece.first, piece.stop, step):
                    rows = min(step, piece.stop - first)
                    if piece.rank == ranks.rank:
                        block = tensor.detach()[here : here + rows]
                        here += rows
                    elif ranks.is_first:
                        block = tensor.new_empty(rows, *tensor.shape[1:])
                    else:
                        continue
                    yield ranks.to_first(block, piece.rank)

        return Streamed(tensor.dtype, (store.num_rows, *tensor.shape[1:]), blocks)


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Different keys, none negative, ascending (m,), and the place of each key among them (n,)."""
    if keys.device.type != "cpu":
        return cast(tuple[Tensor, Tensor], torch.unique(keys, return_inverse=True))
    found, order, starts = segments(keys)
    counts = torch.diff(starts, append=torch.tensor([len(keys)]))
    places = torch.empty_like(keys)
    places[order] = torch.arange(len(found)).repeat_interleave(counts)
    return found, places


def _whole(table: Tensor) -> Tensor:
    """The gradient of a fetched table, of every row."""
    if table.grad is None or not table.grad.is_sparse:
        return torch.zeros_like(table) if table.grad is None else table.grad
    rows, sums = sum_rows(table.grad)
    return torch.zeros_like(table).index_copy_(0, rows, sums)


def _parameter(key: str) -> str:
    """The parameter's name in `NAME`, `weights/NAME`, `PART/NAME/STATE` and `optimizer/PART/NAME/STATE`."""
    pieces = key.split("/")
    return pieces[-2] if len(pieces) > 2 else pieces[-1]
