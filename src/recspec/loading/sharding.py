"""Exchange of rows of embedding tables that are divided among the ranks, or stay in the host's memory.

Each rank holds the rows that a plan assigns to it, with their optimizer state. For a batch, each rank requests the
distinct rows from their owners and uses them like rows of local tables. After the backward pass the gradients go back
to the owners. So a step moves the rows of a batch, never a table, and the MLPs stay data parallel.

Requests go in rounds of all ranks: first the number of rows that each rank wants from each other one and their store,
then the row numbers, then the rows. In training all ranks make the same number of requests. In an evaluation a rank
that needs no more rows answers until all ranks are done (`Shards.finish`), before any gather.

Rows of a store on the host, which several ranks divide too, are moved to the device, and their gradients back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from recspec.loading.placement import Piece, Placement, ShardingPlan, stores_of
from recspec.loading.ranks import Ranks
from recspec.models.layers import RowsHeld, segments, sparse_rows, sum_rows, uncompiled


@dataclass(frozen=True)
class Streamed:
    """A tensor as blocks of its rows in order, so that no process holds it whole.

    If ranks hold parts of it, all of them iterate together, and the first rank alone gets every block.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[torch.Tensor]]


def rows_of_block(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Rows of a tensor moved at once: about `BLOCK_BYTES`, and at least one row."""
    return max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))


BLOCK_BYTES = 1 << 26


M = TypeVar("M", bound=nn.Module)

ROW_BITS = 40
"""Bits of a row's number under its owner's: 10^12 rows a rank."""


def build(make: Callable[[RowsHeld | None], M], ranks: Ranks, placement: Placement) -> tuple[M, Shards]:
    """The model on its device, with this rank's rows of the divided stores.

    Initial values are those of an undivided model on any number of ranks. While they are drawn, the host holds one
    whole table for a normal distribution, and one block for a uniform one.
    """
    if not placement.plan.pieces:
        return make(None).to(ranks.device), Shards({}, placement, ranks)
    model = make(placement.held_by(ranks.rank))
    return model, divide(model, ranks, placement)


def divide(model: nn.Module, ranks: Ranks, placement: Placement) -> Shards:
    """Move the model to its device, except offloaded stores, and let embeddings fetch rows of divided stores.

    The model's stores already hold this rank's rows.
    """
    found = {name: (module, key, store) for name, module, key, store in stores_of(model)}
    for name in placement.offloaded:
        module, key, _ = found[name]
        module.stores._parameters[key] = None  # so that `to` moves everything else
    model.to(ranks.device)
    for name in placement.offloaded:
        module, key, store = found[name]
        module.stores._parameters[key] = store
    shards = Shards({}, placement, ranks)
    for place, name in enumerate(placement.plan.stores):
        module, key, _ = found[name]
        shards.stores[name] = Store(place, module.stores[key], placement.plan, name, ranks)
        module.fetch[key] = partial(shards.fetch, shards.stores[name])
    return shards


class Store:
    """One rank's view of a store: the rows that it holds, and the owners of the others."""

    def __init__(self, place: int, weight: nn.Parameter, plan: ShardingPlan, name: str, ranks: Ranks) -> None:
        self.place, self.weight, self.device = place, weight, ranks.device
        self.width = weight.shape[1]
        pieces = plan.of(name)
        self.num_rows = pieces[-1].stop
        self.pieces = [piece for piece in pieces if piece.rank == ranks.rank and piece.rows]
        self.held = plan.held(name, ranks.rank)
        assert len(weight) == sum(len(rows) for rows in self.held)
        self._starts = torch.tensor([piece.first for piece in pieces[1:]], device=ranks.device)
        so_far, moves = [0] * ranks.world_size, []
        for piece in pieces:  # row r of the store is row r - first + so_far of its owner
            moves.append((piece.rank << ROW_BITS) + so_far[piece.rank] - piece.first)
            so_far[piece.rank] += piece.stop - piece.first
        self._moves = torch.tensor(moves, device=ranks.device)
        self.gradients: list[tuple[Tensor, Tensor]] = []
        """Rows held here and their gradients, from the passes since the last step."""

    def keys(self, rows: Tensor) -> Tensor:
        """1 + owner and owner's row in one number, for rows of the store (n,); 0 for -1."""
        piece = torch.bucketize(rows, self._starts, right=True)
        return torch.where(rows < 0, 0, rows + self._moves[piece] + 1)

    def vectors(self, rows: Tensor) -> Tensor:
        """Rows held here, on the device."""
        weight = self.weight.detach()
        return weight.index_select(0, rows.to(weight.device)).to(self.device)

    def gradient(self, *, sparse: bool) -> Tensor:
        """The summed gradients of the passes, sparse or of all rows held."""
        weight = self.weight
        given = self.gradients or [(weight.new_zeros(0, dtype=torch.int64), weight.new_zeros(0, self.width))]
        rows, values = (torch.cat([each.to(weight.device) for each in column]) for column in zip(*given, strict=True))
        self.gradients.clear()
        if sparse:
            return sparse_rows(rows, values, weight.shape)
        return torch.zeros_like(weight).index_add_(0, rows, values)

    def deliver(self, *, sparse: bool) -> None:
        """Set the gradient for the optimizer."""
        self.weight.grad = self.gradient(sparse=sparse)

    def parts(self, key: str, tensor: Tensor) -> Mapping[Piece, Tensor]:  # noqa: ARG002
        """The pieces of this rank, and their rows of a tensor (rows held here, ...) that `key` names."""
        return dict(zip(self.pieces, torch.split(tensor, [len(piece.rows) for piece in self.pieces]), strict=True))

    def take(self, key: str, tensor: Tensor) -> Tensor:  # noqa: ARG002
        """What the model or the optimizer keeps of a tensor (rows held here, ...) from a file."""
        return tensor


@dataclass(frozen=True)
class _Round:
    """The requests of a round, along which gradients go back."""

    table: Tensor
    """Fetched rows (m + 1, width), after a row of zeros."""
    requested: Sequence[int]
    """Number of rows requested from each rank."""
    wanted: Sequence[tuple[Store, Tensor]]
    """Rows that each rank requested from this one."""


class Shards:
    """The stores of one model that are divided among ranks or kept on the host, if any."""

    def __init__(self, stores: dict[str, Store], placement: Placement, ranks: Ranks) -> None:
        self.stores, self.placement, self.ranks = stores, placement, ranks
        self._rounds: list[_Round] = []

    def __contains__(self, name: object) -> bool:
        return name in self.stores

    @property
    def evaluating(self) -> Ranks:
        """The ranks for an evaluation; they answer every request before they gather."""
        return replace(self.ranks, before=self.finish) if self.stores and self.ranks.world_size > 1 else self.ranks

    # --- rows to the device ----------------------------------------------------------------------------------

    @uncompiled
    def fetch(self, store: Store, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of rows of a store (n,), with -1 for padding; see `layers.Fetch`."""
        keys, places = distinct(torch.cat([rows.new_zeros(1), store.keys(rows)]))  # with padding first
        keys = keys[1:] - 1
        asked = keys & ((1 << ROW_BITS) - 1)
        if self.ranks.world_size == 1:
            vectors, requested, wanted = store.vectors(asked), [len(asked)], [(store, asked)]
        else:
            requested = torch.bincount(keys >> ROW_BITS, minlength=self.ranks.world_size).tolist()
            vectors, wanted, _ = self._round(store, asked, requested, done=False)
        table = torch.cat([vectors.new_zeros(1, store.width), vectors])
        if torch.is_grad_enabled() and store.weight.requires_grad:
            self._rounds.append(_Round(table.requires_grad_(), requested, wanted))
        return table, places[1:]

    def finish(self) -> None:
        """Answer until no rank makes requests."""
        assert self.ranks.world_size > 1
        none = torch.zeros(0, dtype=torch.int64, device=self.ranks.device)
        first = next(iter(self.stores.values()))
        while not self._round(first, none, [0] * self.ranks.world_size, done=True)[2]:
            pass

    def _round(
        self, store: Store, rows: Tensor, requested: Sequence[int], *, done: bool
    ) -> tuple[Tensor, list[tuple[Store, Tensor]], bool]:
        """One round of requests and answers; the last value says whether all ranks are done."""
        ones, stores = [1] * self.ranks.world_size, list(self.stores.values())
        said = torch.tensor([[count, store.place, int(done)] for count in requested], device=rows.device)
        heard = self.ranks.swap(said, ones, ones).tolist()
        counts = [count for count, _, _ in heard]
        came = torch.split(self.ranks.swap(rows, requested, counts), counts)
        wanted = [(stores[place], part) for (_, place, _), part in zip(heard, came, strict=True)]
        answers = torch.cat([theirs.vectors(part).flatten() for theirs, part in wanted])
        send = [len(part) * theirs.width for theirs, part in wanted]
        receive = [count * store.width for count in requested]
        vectors = self.ranks.swap(answers, send, receive).view(-1, store.width)
        return vectors, wanted, all(ended for _, _, ended in heard)

    # --- gradients back --------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self) -> None:
        """Send the gradients of a backward pass to the owners of the rows, as the mean over ranks."""
        for each in self._rounds:
            gradient = whole_gradient(each.table)[1:].flatten()
            send = [count * each.table.shape[1] for count in each.requested]
            receive = [len(rows) * theirs.width for theirs, rows in each.wanted]
            parts = torch.split(self.ranks.swap(gradient, send, receive) / self.ranks.world_size, receive)
            for (theirs, rows), part in zip(each.wanted, parts, strict=True):
                theirs.gradients.append((rows, part.view(-1, theirs.width)))
        self._rounds.clear()

    def deliver(self, sparse: Callable[[str], bool]) -> None:
        """Set the stores' gradients for the optimizer; `sparse` names the stores with sparse gradients."""
        for name, store in self.stores.items():
            if store.weight.requires_grad:
                store.deliver(sparse=sparse(name))

    # --- files -----------------------------------------------------------------------------------------------

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Streamed]:
        """Weights or optimizer tensors by name; divided ones become streams of their rows."""
        if self.ranks.world_size == 1:
            return dict(tensors)
        return {
            key: self._streamed(key, tensor) if tensor.dim() and _parameter(key) in self.stores else tensor
            for key, tensor in tensors.items()
        }

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that were read as `held` says -> what the model or the optimizers keep of them."""
        stores = ((key, tensor, self.stores.get(_parameter(key))) for key, tensor in tensors.items())
        return {key: store.take(key, tensor) if store and tensor.dim() else tensor for key, tensor, store in stores}

    def held(self, key: str) -> Sequence[range] | None:
        """The rows of a tensor in a checkpoint or bundle that this rank holds; None for all."""
        store = self.stores.get(_parameter(key))
        return None if store is None else store.held

    def _streamed(self, key: str, tensor: Tensor) -> Streamed:
        """A tensor with a row for each row of the store, in the store's order."""
        name, ranks = _parameter(key), self.ranks
        store, beyond = self.stores[name], tensor.shape[1:]
        assert len(tensor) == len(store.weight)
        parts = store.parts(key, tensor.detach())

        def blocks() -> Iterator[Tensor]:
            step = rows_of_block(tensor.shape, tensor.dtype)
            for rows, side_by_side in groupby(self.placement.plan.of(name), lambda piece: piece.rows):
                pieces = [piece for piece in side_by_side if ranks.rank in (0, piece.rank)]
                for first in range(0, len(rows) if pieces else 0, step):
                    num_rows = min(step, len(rows) - first)
                    block = []
                    for piece in pieces:
                        if piece.rank == ranks.rank:
                            here = parts[piece][first : first + num_rows]
                        else:
                            here = tensor.new_empty(num_rows, *(beyond if piece.columns is None else (piece.width,)))
                        block.append(ranks.to_first(here, piece.rank))
                    yield block[0] if len(block) == 1 else torch.cat(block, dim=1)

        return Streamed(tensor.dtype, (store.num_rows, *beyond), blocks)


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct non-negative keys, ascending (m,), and the place of each key among them (n,)."""
    if keys.device.type != "cpu":
        return cast(tuple[Tensor, Tensor], torch.unique(keys, return_inverse=True))
    found, order, starts = segments(keys)
    counts = torch.diff(starts, append=torch.tensor([len(keys)]))
    places = torch.empty_like(keys)
    places[order] = torch.arange(len(found)).repeat_interleave(counts)
    return found, places


def whole_gradient(table: Tensor) -> Tensor:
    """The dense gradient of a fetched table."""
    if table.grad is None or not table.grad.is_sparse:
        return torch.zeros_like(table) if table.grad is None else table.grad
    rows, sums = sum_rows(table.grad)
    return torch.zeros_like(table).index_copy_(0, rows, sums)


def _parameter(key: str) -> str:
    """The parameter's name in `NAME`, `weights/NAME`, `PART/NAME/STATE` and `optimizer/PART/NAME/STATE`."""
    pieces = key.split("/")
    return pieces[-2] if len(pieces) > 2 else pieces[-1]
