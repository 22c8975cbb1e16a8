"""Arithmetic on events that stand as rows in embedding tables, on a CPU.

The vectors of long histories are never laid out. Dot products with events and weighted sums of events read the rows
where they stand in the table, and the table's gradient is a weighted sum over each row's events. So the only tensors as
long as the histories hold single numbers. With 4096 histories of 190 events, tables of 3,700 and 20 rows of 16 numbers,
and one query, forward and backward take 87 ms on one thread, against 827 by vectors that torch looks up. With 300,000
and 2,000 rows they take 199 against 872.

Shapes: B rows; L the longest history; T events, row by row; H heads; D width of an event's vector, W of one table's; N
rows of a table.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.models.layers import kernels
from recspec.models.layers.gathered_rows import sparse_rows


@dataclass(frozen=True)
class Places:
    """The places in (B, L) of the T events of a search, row by row."""

    flat: Tensor
    """Places in the flattened (B, L), ascending (T,)."""
    rows: Tensor
    """The row of each event (T,)."""
    offsets: Tensor
    """The number of events before each row, and of all (B + 1,)."""
    length: int
    """L."""

    @classmethod
    def of(cls, present: Tensor) -> Places:
        """The places that are true (B, L)."""
        length, counts = present.shape[1], present.sum(1)
        if present.all():
            flat = torch.arange(present.numel())
        else:
            flat = present.flatten().nonzero().squeeze(1)
        rows = torch.div(flat, max(length, 1), rounding_mode="floor")
        return cls(flat, rows, F.pad(counts.cumsum(0), (1, 0)), length)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Events of each row (B,)."""
        return self.offsets.diff()

    def take(self, padded: Tensor) -> Tensor:
        """(B, L) -> (T,)."""
        flat = padded.reshape(-1)
        return flat if len(self.flat) == len(flat) else flat.index_select(0, self.flat)

    def to_padded(self, flat: Tensor, fill: float) -> Tensor:
        """(T,) -> (B, L), with `fill` elsewhere."""
        shape = (self.num_rows, self.length)
        if len(flat) == self.num_rows * self.length:
            return flat.view(shape)
        return flat.new_full((self.num_rows * self.length,), fill).index_copy_(0, self.flat, flat).view(shape)


@dataclass(frozen=True)
class Column:
    """One feature of the events: a table, and the row of each event in it."""

    store: Tensor
    """One or several tables of vectors of W numbers, one after the other."""
    rows: Tensor
    """Rows counted from the table's first: (T,), or (B, L) in a `StoredHistory`."""
    table: slice = field(default_factory=lambda: slice(None))
    """The table's rows in the store."""
    sparse: bool = False
    """Whether the store's gradient holds only the rows seen."""

    @property
    def vectors(self) -> Tensor:
        """The table (N, W)."""
        return self.store[self.table]

    def gradient(self, places: Places, terms: Sequence[tuple[Tensor, Tensor]], into: Tensor | None = None) -> Tensor:
        """The store's gradient: for each row, the sum over its events of weight (T,) times vector (B, W).

        A whole gradient is added to `into`, if given.
        """
        seen, values = _bags_of_rows(self.vectors, self.rows, places, terms)
        rows = seen + (self.table.start or 0)
        if not self.sparse:
            return (torch.zeros_like(self.store) if into is None else into).index_add_(0, rows, values)
        return sparse_rows(rows, values, self.store.shape, is_coalesced=True)


def dots_of_rows(columns: Sequence[Column], places: Places, queries: Tensor) -> list[Tensor]:
    """The dot products of each event with its row's queries: H times (T,)."""
    widths, found = [column.store.shape[1] for column in columns], []
    for query in queries.unbind(1):
        total: Tensor | None = None
        for column, part in zip(columns, torch.split(query, widths, dim=1), strict=True):
            dots = _products(column.vectors, column.rows, places, part)
            total = dots if total is None else total.add_(dots)
        found.append(cast(Tensor, total))
    return found


def _products(table: Tensor, rows: Tensor, places: Places, queries: Tensor) -> Tensor:
    """query[b] table[rows[t]] for the events t of row b: (T,), without a tensor of T W numbers."""
    shape = (len(queries), len(table))
    if shape[0] * shape[1] <= DENSE * len(rows):  # few rows, each asked for often: multiply each once
        with torch.autocast("cpu", enabled=False):  # they are summed with numbers of the tables' type
            products = queries @ table.t()
        return products.flatten().index_select(0, torch.add(rows, places.rows, alpha=len(table)))
    _know_of_csr()
    wanted = torch.sparse_csr_tensor(places.offsets, rows, table.new_zeros(len(rows)), shape, check_invariants=False)
    return cast(Tensor, torch.sparse.sampled_addmm(wanted, queries.contiguous(), table.t(), beta=0.0).values())


DENSE = 4
"""Products with all rows of a table, per event, up to which all are computed and then indexed."""


@cache
def _know_of_csr() -> None:
    """Silence torch's warning, once a process, that CSR tensors are in beta; tests cover our use of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def weighted_sums(columns: Sequence[Column], places: Places, weights: Sequence[Tensor]) -> Tensor:
    """Each row's weighted sum of events for several weights (T,): (B, len(weights), D)."""
    starts = places.offsets[:-1]
    sums = [_bags(column.vectors, column.rows, starts, each) for each in weights for column in columns]
    return torch.unflatten(torch.cat(sums, dim=1), 1, (len(weights), -1))


def _bags(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of a table's rows, from each start to the next: (number of starts, W)."""
    return F.embedding_bag(rows, table.contiguous(), starts, mode="sum", per_sample_weights=weights)


def _bags_of_rows(
    table: Tensor, rows: Tensor, places: Places, terms: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The m table rows seen (m,), and for each the sum over its events of weight (T,) times vector (B, W).

    Sorted by table row, the events of one table row are a bag of vectors of batch rows. If the table has few rows, the
    weights of equal rows are summed first, (B, N), and a product does the rest.
    """
    if not len(rows):
        return rows, table.new_zeros(0, table.shape[1])
    if len(table) * places.num_rows <= DENSE * len(rows):
        seen = torch.zeros(len(table), dtype=torch.bool).index_fill_(0, rows, True).nonzero().squeeze(1)
        at, found = torch.add(rows, places.rows, alpha=len(table)), torch.zeros_like(table)
        for weights, vectors in terms:
            summed = weights.new_zeros(places.num_rows * len(table)).scatter_add_(0, at, weights)
            found.addmm_(summed.view(places.num_rows, len(table)).t(), vectors)
        return seen, found.index_select(0, seen)
    seen, order, starts = kernels.segments(rows)
    batch_row = places.rows.index_select(0, order)
    total: Tensor | None = None
    for weights, vectors in terms:
        term = _bags(vectors, batch_row, starts, weights.index_select(0, order))
        total = term if total is None else total.add_(term)
    return seen, cast(Tensor, total)
