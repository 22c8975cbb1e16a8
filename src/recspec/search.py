"""Searching a long history for what concerns the target: the best k events, and attention over them.

Two forms of the same sums. *Padded*: vectors (B, L, D) of all places and a mask, plain torch, on any device and in a
program that is exported. *By rows*: on a CPU the vectors of a long history are never laid out at all. A dot product
with each event and a weighted sum of events read the rows where they stand in the embedding table, and the table's
gradient is a weighted sum over each row's events, so that the only things as long as the histories are single numbers.
With 4096 histories of 190 events, tables of 3,700 and 20 rows of 16 numbers, and one query, forward and backward take
87 ms on one thread, and 827 by way of vectors that torch looks up; with 300,000 and 2,000 rows 199 and 872.

Shapes: B rows; L the longest history; T events, row by row; H heads; D width of an event's vector, W of one table's; N
rows of a table; k events kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recspec import kernels
from recspec.mlp import at_least_fp32

LOWEST = -(2**31)
"""Below what any float's bits make as an ordered integer."""


# --- the best k ------------------------------------------------------------------------------------------------------


def latest_best(scores: Tensor, allowed: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Where the k highest scores of each row stand; of equal ones those of the later places.

    Args:
        scores: (..., L) float32, none of them NaN.
        allowed: (..., L), which places may be taken.
        k: how many to keep; with fewer places than that, all.

    Returns:
        places (..., min(k, L)) in no particular order, and which of them are allowed ones: a row with fewer than k
        gives others beside.
    """
    scores, length = scores.detach(), scores.shape[-1]
    if torch.compiler.is_compiling():
        # Exporters know no reinterpreted bits, and sorts keep the order of equals here: so the later ones go first.
        lowest = torch.finfo(scores.dtype).min
        order = torch.where(allowed, scores, lowest).flip(-1).sort(dim=-1, descending=True).indices[..., :k]
        places = length - 1 - order
        return places, allowed.gather(-1, places)
    # One integer a place, no two alike: the score's bits, which order as integers once negative ones are turned
    # around, and the place. -0.0 is made 0.0 first.
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)
    bits = torch.where(allowed, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)
    keys = (bits.long() << 32) | torch.arange(length, device=scores.device)
    if length > k and keys.device.type == "cpu":
        # Seven times as fast as torch.topk, which orders pairs of value and index: 4096 x 190 in 3.6 ms on one thread.
        keys = torch.from_numpy(np.partition(keys.numpy(), length - k, axis=-1)[..., length - k :])
    elif length > k:
        keys = keys.topk(k, dim=-1, sorted=False).values
    return keys & 0xFFFFFFFF, (keys >> 32) > LOWEST


# --- padded ----------------------------------------------------------------------------------------------------------


def attend(vectors: Tensor, present: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Dot products of each row's events with its queries, and the events' sums weighted by their softmax.

    Args:
        vectors: the events (B, L, D).
        present: which of them are there (B, L).
        queries: (B, H, D).

    Returns:
        scores (B, H, L), whatever where no event is; sums (B, H, D), zeros for a row without events.
    """
    scores = torch.bmm(queries, vectors.transpose(1, 2))
    kept = present.unsqueeze(1)
    # Not -inf: a row without events would make NaN. The product takes the even shares of such a row away.
    weights = torch.where(kept, scores, torch.finfo(scores.dtype).min).softmax(2) * kept
    return scores, torch.bmm(weights, torch.where(present.unsqueeze(2), vectors, 0))


def mean_with_one_more(vectors: Tensor, present: Tensor) -> Tensor:
    """The sum of each row's events over their number and one: (B, L, D), (B, L) -> (B, D)."""
    total = torch.where(present.unsqueeze(2), vectors, 0).sum(1)
    return total / (1 + present.sum(1, keepdim=True))


# --- by rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Where in (B, L) the T events stand that a search looks at, row by row."""

    flat: Tensor
    """Places in the flattened (B, L), ascending (T,)."""
    rows: Tensor
    """Which row each is of (T,)."""
    offsets: Tensor
    """How many of them stand before each row, and all (B + 1,)."""
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

    def lay(self, flat: Tensor, fill: float) -> Tensor:
        """(T,) -> (B, L), `fill` elsewhere."""
        shape = (self.num_rows, self.length)
        if len(flat) == self.num_rows * self.length:
            return flat.view(shape)
        return flat.new_full((self.num_rows * self.length,), fill).index_copy_(0, self.flat, flat).view(shape)


@dataclass(frozen=True)
class Column:
    """One feature of the events: a table, and which of its rows each event takes."""

    store: Tensor
    """One table or several, one after the other, of vectors of W numbers."""
    rows: Tensor
    """Counted from the table's first (T,), or (B, L) in a `StoredHistory`."""
    table: slice = field(default_factory=lambda: slice(None))
    """Which rows of the store the table has."""
    sparse: bool = False
    """Whether the store's gradient holds the rows seen alone."""


def attend_by_rows(
    columns: Sequence[Column], places: Places, queries: Tensor, *, mean: bool = False
) -> tuple[Tensor, Tensor]:
    """`attend` over events whose vectors are the columns' rows side by side, on a CPU.

    Args:
        columns: D is the sum of their tables' widths.
        places: where the events stand.
        queries: (B, H, D).
        mean: whether to give `mean_with_one_more` too.

    Returns:
        scores (H, T), without gradient; sums (B, H, D), with the mean (B, H + 1, D).
    """
    return cast(
        tuple[Tensor, Tensor],
        _AttendByRows.apply(
            at_least_fp32(queries), places, mean, [(column.rows, column.table, column.sparse) for column in columns],
            *[column.store for column in columns],
        ),  # type: ignore[no-untyped-call]
    )  # fmt: skip


class _AttendByRows(torch.autograd.Function):
    """`attend_by_rows`.

    With weights w = softmax(s), s_t = q e_t, and a gradient G of the sum U = sum_t w_t e_t:

        dw_t = G e_t        ds_t = w_t (dw_t - sum_u w_u dw_u)        dq = sum_t ds_t e_t        de_t = ds_t q + w_t G

    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        places: Places,
        mean: bool,
        columns: Sequence[tuple[Tensor, slice, bool]],
        *stores: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows, slices, sparse = (list(each) for each in zip(*columns, strict=True))
        tables = [store[part] for store, part in zip(stores, slices, strict=True)]
        scores = _dots(tables, rows, places, queries)
        weights = [places.take(places.lay(own, -torch.inf).softmax(1)) for own in scores]
        if mean:
            weights.append((1 + places.lengths).to(queries.dtype).reciprocal().index_select(0, places.rows))
        sums = _weighted(tables, rows, places, weights)
        ctx.save_for_backward(queries, *weights, *rows, *stores)
        ctx.places, ctx.slices, ctx.sparse, ctx.heads, ctx.sums = places, slices, sparse, len(scores), len(weights)
        found = torch.stack(scores)
        ctx.mark_non_differentiable(found)
        return found, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, *rest = ctx.saved_tensors
        places, heads, columns = ctx.places, ctx.heads, len(ctx.sparse)
        weights, rows, stores = rest[: ctx.sums], rest[ctx.sums : ctx.sums + columns], rest[ctx.sums + columns :]
        tables = [store[part] for store, part in zip(stores, ctx.slices, strict=True)]
        slopes = _dots(tables, rows, places, gradient[:, :heads])
        for head in range(heads):
            # Not G U: of large vectors its last digits are other ones than those of dw, and would be multiplied by q.
            mean = gradient.new_zeros(places.num_rows).index_add_(0, places.rows, slopes[head] * weights[head])
            slopes[head].sub_(mean.index_select(0, places.rows)).mul_(weights[head])
        of_queries = _weighted(tables, rows, places, slopes)
        pairs = [*zip(slopes, queries.unbind(1), strict=True), *zip(weights, gradient.unbind(1), strict=True)]
        of_stores: list[Tensor | None] = []
        start = 0
        for store, table, own, sparse, part, wanted in zip(
            stores, tables, rows, ctx.sparse, ctx.slices, ctx.needs_input_grad[4:], strict=True
        ):
            terms = [(each, by[:, start : start + table.shape[1]]) for each, by in pairs]
            start += table.shape[1]
            if wanted:
                seen, values = _of_rows(table, own, places, terms)
                of_stores.append(_gradient(store, seen + (part.start or 0), values, sparse=sparse))
            else:
                of_stores.append(None)
        return (of_queries, None, None, None, *of_stores)


def _dots(tables: Sequence[Tensor], rows: Sequence[Tensor], places: Places, queries: Tensor) -> list[Tensor]:
    """The dot product of every event with its row's query, for each head: H times (T,)."""
    found = []
    for query in queries.unbind(1):
        total: Tensor | None = None
        for table, own, part in zip(tables, rows, _split(query, tables), strict=True):
            dots = _products(table, own, places, part)
            total = dots if total is None else total.add_(dots)
        found.append(cast(Tensor, total))
    return found


def _products(table: Tensor, rows: Tensor, places: Places, queries: Tensor) -> Tensor:
    """query[b] table[rows[t]] for the events t of row b: (T,). Nothing of T W numbers is made."""
    shape = (len(queries), len(table))
    if shape[0] * shape[1] <= DENSE * len(rows):  # a few rows, often asked for: each is multiplied once
        with torch.autocast("cpu", enabled=False):  # what is summed with these has the tables' type
            products = queries @ table.t()
        return products.flatten().index_select(0, torch.add(rows, places.rows, alpha=len(table)))
    _know_of_csr()
    wanted = torch.sparse_csr_tensor(places.offsets, rows, table.new_zeros(len(rows)), shape, check_invariants=False)
    return cast(Tensor, torch.sparse.sampled_addmm(wanted, queries.contiguous(), table.t(), beta=0.0).values())


DENSE = 4
"""Products of all rows of a table, as many for an event, up to which they are made at once and then picked from."""


@cache
def _know_of_csr() -> None:
    """torch says once a process that its CSR tensors are in beta; the tests hold what is used of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def _weighted(tables: Sequence[Tensor], rows: Sequence[Tensor], places: Places, weights: Sequence[Tensor]) -> Tensor:
    """Each row's sum of its events, for each of several weights (T,): (B, len(weights), D)."""
    starts = places.offsets[:-1]
    sums = [[_bags(table, own, starts, each) for table, own in zip(tables, rows, strict=True)] for each in weights]
    return torch.stack([torch.cat(own, dim=1) if len(own) > 1 else own[0] for own in sums], dim=1)


def _bags(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of a table's rows, from each start to the next: (number of starts, W)."""
    return F.embedding_bag(rows, table.contiguous(), starts, mode="sum", per_sample_weights=weights)


def _split(x: Tensor, tables: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.split(x, [table.shape[1] for table in tables], dim=1)


def _of_rows(
    table: Tensor, rows: Tensor, places: Places, terms: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The table's rows that are seen (m,), and for each the sum over its events of weight (T,) times vector (B, W).

    Sorted by the table's rows, the events of one of them are a bag of vectors of the batch's rows. Where the table has
    few rows the weights of equal ones are summed first, (B, N), and a product does the rest.
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


def _gradient(store: Tensor, rows: Tensor, values: Tensor, *, sparse: bool) -> Tensor:
    """A store's gradient, of which some rows are not zeros."""
    if not sparse:
        return torch.zeros_like(store).index_copy_(0, rows, values)
    return torch.sparse_coo_tensor(rows.view(1, -1), values, store.shape, is_coalesced=True, check_invariants=False)


# --- a history, whichever form it has --------------------------------------------------------------------------------


class History(Protocol):
    """The events that a search looks at: padded or by rows."""

    @property
    def present(self) -> Tensor:
        """Which of the places (B, L) hold an event."""

    def scores(self, queries: Tensor) -> Tensor:
        """Dot products of each row's events with its query (B, D): (B, L), whatever where no event is."""

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """`scores`, and the events' sums weighted by their softmax (B, D)."""

    def attend(self, queries: Tensor, *, mean: bool = False) -> Tensor:
        """Sums weighted by the softmax of several queries (B, H, D); with `mean_with_one_more` (B, H + 1, D)."""

    def take(self, places: Tensor, chosen: Tensor) -> History:
        """The events at some places of each row (B, k), those that are chosen (B, k)."""

    def beside(self, table: Tensor, rows: Tensor) -> History:
        """The same events, the rows (B, L) of another table beside their vectors."""


@dataclass(frozen=True)
class PaddedHistory:
    """Events as vectors (B, L, D) and a mask."""

    vectors: Tensor
    """(B, L, D)."""
    present: Tensor
    """(B, L)."""

    def scores(self, queries: Tensor) -> Tensor:
        """See `History`."""
        return torch.bmm(self.vectors, queries.unsqueeze(2)).squeeze(2)

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """See `History`."""
        scores, sums = attend(self.vectors, self.present, queries.unsqueeze(1))
        return scores.squeeze(1), sums.squeeze(1)

    def attend(self, queries: Tensor, *, mean: bool = False) -> Tensor:
        """See `History`."""
        _, sums = attend(self.vectors, self.present, queries)
        if not mean:
            return sums
        return torch.cat([sums, mean_with_one_more(self.vectors, self.present).unsqueeze(1)], dim=1)

    def take(self, places: Tensor, chosen: Tensor) -> PaddedHistory:
        """See `History`."""
        rows, length, width = self.vectors.shape
        flat = (torch.arange(rows, device=places.device).unsqueeze(1) * length + places).flatten()
        return PaddedHistory(self.vectors.flatten(0, 1).index_select(0, flat).view(*places.shape, width), chosen)

    def beside(self, table: Tensor, rows: Tensor) -> PaddedHistory:
        """See `History`."""
        return PaddedHistory(torch.cat([self.vectors, F.embedding(rows, table)], dim=2), self.present)


@dataclass(frozen=True)
class StoredHistory:
    """Events as rows of tables, on a CPU; their columns' rows are (B, L)."""

    columns: tuple[Column, ...]
    present: Tensor
    """(B, L)."""

    def scores(self, queries: Tensor) -> Tensor:
        """See `History`."""
        places, columns = self._events()
        with torch.no_grad():
            tables = [column.store[column.table] for column in columns]
            rows = [column.rows for column in columns]
            (scores,) = _dots(tables, rows, places, queries.float().unsqueeze(1))
        return places.lay(scores, 0.0)

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """See `History`."""
        places, columns = self._events()
        scores, sums = attend_by_rows(columns, places, queries.unsqueeze(1))
        return places.lay(scores[0], 0.0), sums.squeeze(1)

    def attend(self, queries: Tensor, *, mean: bool = False) -> Tensor:
        """See `History`."""
        places, columns = self._events()
        return attend_by_rows(columns, places, queries, mean=mean)[1]

    def take(self, places: Tensor, chosen: Tensor) -> StoredHistory:
        """See `History`."""
        return StoredHistory(
            tuple(replace(column, rows=column.rows.gather(1, places)) for column in self.columns), chosen
        )

    def beside(self, table: Tensor, rows: Tensor) -> StoredHistory:
        """See `History`."""
        return StoredHistory((*self.columns, Column(table, rows)), self.present)

    def _events(self) -> tuple[Places, list[Column]]:
        places = Places.of(self.present)
        return places, [replace(column, rows=places.take(column.rows)) for column in self.columns]


# --- several heads ---------------------------------------------------------------------------------------------------


class TargetQueries(nn.Module):
    """What multi-head attention of a target asks events: (B, D_target) -> (B, H, D_event).

    Pi et al.: Search-based User Interest Modeling, CIKM 2020, equation 6: a head's scores are softmax((W_k z) (W_q a))
    over events z. (W_k z) (W_q a) = z (W_k^T W_q a), so the target is multiplied by both matrices and no event by any.
    Scores are divided by the square root of a head's width, as they are everywhere since; the paper leaves that out.
    """

    def __init__(self, target_dim: int, event_dim: int, *, heads: int, head_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(heads, target_dim, head_dim))
        self.key = nn.Parameter(torch.empty(heads, head_dim, event_dim))
        for weight in (self.query, self.key):
            bound = (6 / (weight.shape[1] + weight.shape[2])) ** 0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, target: Tensor) -> Tensor:
        """The queries."""
        projected = torch.matmul(target, self.query * self.query.shape[2] ** -0.5)  # (H, B, head_dim)
        return torch.bmm(projected, self.key).transpose(0, 1)
