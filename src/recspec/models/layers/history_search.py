"""Searching a long history for what concerns the target: the best k events, and attention over them.

A history has one of three forms with equal results. *Padded* is plain torch on vectors (B, L, D) and a mask, on any
device and in exported programs. The others read events where they stand in embedding tables: *stored* on a CPU, and
*table* by Triton on a GPU (`kernels.attend`).

Shapes: B rows; L the longest history; T events, row by row; H heads; D width of an event's vector, W of one
table's; N rows of a table; k events kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recspec.models.layers import kernels
from recspec.models.layers.gathered_rows import sparse_rows, take_rows
from recspec.models.layers.hand_written import may_replace
from recspec.models.layers.losses import at_least_fp32

LOWEST = -(2**31)
"""Below the ordered integer of any float's bits."""


# --- the best k ------------------------------------------------------------------------------------------------------


def latest_best(scores: Tensor, allowed: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The places of each row's k highest scores (..., L), float32 without NaN; of equal scores, the later places.

    Returns:
        places (..., min(k, L)) in no particular order, and which of them are `allowed` (..., L): a row with fewer than
        k allowed places returns others too.
    """
    scores, length = scores.detach(), scores.shape[-1]
    if torch.compiler.is_compiling():
        # Exporters cannot reinterpret bits. A stable sort keeps the order of equals, so the later ones go first.
        # Sorts of ONNX are stable, and torch.onnx does not know the argument.
        latest_first = torch.where(allowed, scores, torch.finfo(scores.dtype).min).flip(-1)
        sort = partial(latest_first.sort, dim=-1, descending=True)
        order = (sort() if torch.compiler.is_exporting() else sort(stable=True)).indices[..., :k]
        places = length - 1 - order
        return places, allowed.gather(-1, places)
    # A distinct integer for each place: the score's bits, which order as integers once negative ones are inverted, then
    # the place. Adding 0.0 turns -0.0 into 0.0.
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)
    bits = torch.where(allowed, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)
    keys = (bits.long() << 32) | torch.arange(length, device=scores.device)
    if length > k and keys.device.type == "cpu" and may_replace():  # tensors of torch.func have no memory for NumPy
        # Seven times as fast as torch.topk, which orders pairs of value and index: 4096 x 190 in 3.6 ms on one thread.
        keys = torch.from_numpy(np.partition(keys.numpy(), length - k, axis=-1)[..., length - k :])
    elif length > k:
        keys = keys.topk(k, dim=-1, sorted=False).values
    return keys & 0xFFFFFFFF, (keys >> 32) > LOWEST


# --- padded ----------------------------------------------------------------------------------------------------------


def attend(vectors: Tensor, present: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Dot products of each row's `present` (B, L) events (B, L, D) with its queries (B, H, D), and weighted sums.

    Returns:
        scores (B, H, L), arbitrary at places without an event; the events' sums weighted by the softmax of their scores
        (B, H, D), zeros for a row without events.
    """
    scores = torch.bmm(queries, vectors.transpose(1, 2))
    kept = present.unsqueeze(1)
    # Not -inf, which gives NaN for a row without events. The product removes the even shares of such a row.
    weights = torch.where(kept, scores, torch.finfo(scores.dtype).min).softmax(2) * kept
    return scores, torch.bmm(weights, torch.where(present.unsqueeze(2), vectors, 0))


def mean_with_one_more(vectors: Tensor, present: Tensor) -> Tensor:
    """The sum of each row's events divided by their number plus one: (B, L, D), (B, L) -> (B, D)."""
    total = torch.where(present.unsqueeze(2), vectors, 0).sum(1)
    return total / (1 + present.sum(1, keepdim=True))


def attend_by_rows(
    columns: Sequence[Column], places: Places, queries: Tensor, *, mean: bool = False
) -> tuple[Tensor, Tensor]:
    """`attend` over events whose vectors, D numbers, are the columns' rows side by side, on a CPU.

    Returns:
        scores (H, T), without gradient; sums (B, H, D), with `mean_with_one_more` if `mean` (B, H + 1, D).
    """
    stores = [column.store for column in columns]
    found = AttendByRows.apply(at_least_fp32(queries), places, mean, columns, *stores)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], found)


# --- events that stand as rows in embedding tables, on a CPU ----------------------------------------------------------
#
# The vectors of long histories are never laid out. Dot products with events and weighted sums of events read the rows
# where they stand in the table, and the table's gradient is a weighted sum over each row's events. So the only tensors
# as long as the histories hold single numbers. With 4096 histories of 190 events, tables of 3,700 and 20 rows of 16
# numbers, and one query, forward and backward take 87 ms on one thread, against 827 by vectors that torch looks up.
# With 300,000 and 2,000 rows they take 199 against 872.


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
            dots = products_of_rows(column.vectors, column.rows, places.rows, places.offsets, part)
            total = dots if total is None else total.add_(dots)
        found.append(cast(Tensor, total))
    return found


def products_of_rows(table: Tensor, rows: Tensor, owners: Tensor, offsets: Tensor, queries: Tensor) -> Tensor:
    """query[b] table[rows[t]] for the events t of row b: (T,), without a tensor of T W numbers.

    `owners` (T,) is the row b of each event, and `offsets` (B + 1,) counts the events before each row.
    """
    shape = (len(queries), len(table))
    if shape[0] * shape[1] <= DENSE * len(rows):  # few rows, each asked for often: multiply each once
        with torch.autocast("cpu", enabled=False):  # they are summed with numbers of the tables' type
            products = queries @ table.t()
        return products.flatten().index_select(0, torch.add(rows, owners, alpha=len(table)))
    _know_of_csr()
    wanted = torch.sparse_csr_tensor(offsets, rows, table.new_zeros(len(rows)), shape, check_invariants=False)
    return cast(Tensor, torch.sparse.sampled_addmm(wanted, queries.contiguous(), table.t(), beta=0.0).values())


DENSE = 4
"""Products with all rows of a table, per event, up to which all are computed and then indexed."""


@cache
def _know_of_csr() -> None:
    """Silence torch's warning, once a process, that CSR tensors are in beta; tests cover our use of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def weighted_sums_of_rows(columns: Sequence[Column], places: Places, weights: Sequence[Tensor]) -> Tensor:
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


class AttendByRows(torch.autograd.Function):
    """`attend_by_rows`.

    For weights w = softmax(s) with s_t = q e_t, and the gradient G of the sum U = sum_t w_t e_t:

        dw_t = G e_t        ds_t = w_t (dw_t - sum_u w_u dw_u)        dq = sum_t ds_t e_t        de_t = ds_t q + w_t G

    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, places: Places, mean: bool, columns: Sequence[Column], *stores: Tensor
    ) -> tuple[Tensor, Tensor]:
        scores = dots_of_rows(columns, places, queries)
        weights = [places.take(places.to_padded(own, -torch.inf).softmax(1)) for own in scores]
        if mean:
            weights.append((1 + places.lengths).to(queries.dtype).reciprocal().index_select(0, places.rows))
        sums = weighted_sums_of_rows(columns, places, weights)
        ctx.save_for_backward(queries, *weights, *stores)  # a store that changes before the backward pass is an error
        ctx.places, ctx.columns, ctx.heads = places, columns, len(scores)
        found = torch.stack(scores)
        ctx.mark_non_differentiable(found)
        return found, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, *rest = ctx.saved_tensors
        places, heads, columns = ctx.places, ctx.heads, ctx.columns
        weights = rest[: -len(columns)]
        slopes = dots_of_rows(columns, places, gradient[:, :heads])
        for head in range(heads):
            # Not G U: for large vectors its last digits differ from those of dw, and q would multiply the difference.
            mean = gradient.new_zeros(places.num_rows).index_add_(0, places.rows, slopes[head] * weights[head])
            # ds_t = w_t (dw_t - sum_u w_u dw_u), the Jacobian of a softmax.
            slopes[head].sub_(mean.index_select(0, places.rows)).mul_(weights[head])
        of_queries = weighted_sums_of_rows(columns, places, slopes)
        pairs = [*zip(slopes, queries.unbind(1), strict=True), *zip(weights, gradient.unbind(1), strict=True)]
        of_stores: list[Tensor | None] = [None] * len(columns)
        first: dict[int, int] = {}  # columns of one store share its gradient: another one costs a pass over the store
        start = 0
        for place, column in enumerate(columns):
            stop = start + column.store.shape[1]
            if ctx.needs_input_grad[4 + place]:
                at = place if column.sparse else first.setdefault(id(column.store), place)
                terms = [(each, by[:, start:stop]) for each, by in pairs]
                of_stores[at] = column.gradient(places, terms, into=of_stores[at])
            start = stop
        return (of_queries, None, None, None, *of_stores)


class Attend(torch.autograd.Function):
    """`kernels.attend`; scores have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, store: Tensor, queries: Tensor, rows: Tensor, present: Tensor, mean: bool
    ) -> tuple[Tensor, Tensor]:
        scores, sums = kernels.attend(store, rows, present, queries, mean=mean)
        ctx.save_for_backward(
            store, queries, rows, present
        )  # a store that changes before the backward pass is an error
        ctx.mean = mean
        ctx.mark_non_differentiable(scores)
        return scores, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        store, queries, rows, present = ctx.saved_tensors
        of_store = torch.zeros_like(store)
        return (
            of_store,
            kernels.attend_backward(store, rows, present, queries, gradient, of_store, mean=ctx.mean),
            *[None] * 3,
        )


# --- the forms of a history -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedHistory:
    """Events as vectors (B, L, D) and a mask."""

    vectors: Tensor
    present: Tensor
    """The places that hold an event (B, L)."""

    def scores(self, queries: Tensor) -> Tensor:
        """Dot products of each row's events with its query (B, D): (B, L), arbitrary without an event."""
        return torch.bmm(self.vectors, queries.unsqueeze(2)).squeeze(2)

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """`scores`, and the events' sums weighted by their softmax (B, D)."""
        scores, sums = attend(self.vectors, self.present, queries.unsqueeze(1))
        return scores.squeeze(1), sums.squeeze(1)

    def attend(self, queries: Tensor, *, mean: bool = False) -> Tensor:
        """Sums weighted by the softmax of several queries (B, H, D); with `mean`, `mean_with_one_more` too."""
        _, sums = attend(self.vectors, self.present, queries)
        if not mean:
            return sums
        return torch.cat([sums, mean_with_one_more(self.vectors, self.present).unsqueeze(1)], dim=1)

    def take(self, places: Tensor, chosen: Tensor) -> PaddedHistory:
        """The `chosen` (B, k) of the events at `places` (B, k)."""
        rows, length, width = self.vectors.shape
        flat = (torch.arange(rows, device=places.device).unsqueeze(1) * length + places).flatten()
        return PaddedHistory(self.vectors.flatten(0, 1).index_select(0, flat).view(*places.shape, width), chosen)

    def beside(self, table: Tensor, rows: Tensor) -> PaddedHistory:
        """The same events with rows (B, L) of another table appended to their vectors."""
        return PaddedHistory(torch.cat([self.vectors, F.embedding(rows, table)], dim=2), self.present)


@dataclass(frozen=True)
class StoredHistory:
    """Events as rows of tables, on a CPU; their columns' rows are (B, L). Methods are those of `PaddedHistory`."""

    columns: tuple[Column, ...]
    present: Tensor
    """(B, L)."""

    def scores(self, queries: Tensor) -> Tensor:
        places, columns = self._events()
        with torch.no_grad():
            (scores,) = dots_of_rows(columns, places, queries.float().unsqueeze(1))
        return places.to_padded(scores, 0.0)

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        places, columns = self._events()
        scores, sums = attend_by_rows(columns, places, queries.unsqueeze(1))
        return places.to_padded(scores[0], 0.0), sums.squeeze(1)

    def attend(self, queries: Tensor, *, mean: bool = False) -> Tensor:
        places, columns = self._events()
        return attend_by_rows(columns, places, queries, mean=mean)[1]

    def take(self, places: Tensor, chosen: Tensor) -> StoredHistory:
        return StoredHistory(
            tuple(replace(column, rows=column.rows.gather(1, places)) for column in self.columns), chosen
        )

    def beside(self, table: Tensor, rows: Tensor) -> StoredHistory:
        return StoredHistory((*self.columns, Column(table, rows)), self.present)

    def _events(self) -> tuple[Places, list[Column]]:
        places = Places.of(self.present)
        return places, [replace(column, rows=places.take(column.rows)) for column in self.columns]


@dataclass(frozen=True)
class TableHistory:
    """Events as rows of one table, on a GPU, where kernels read them. Methods are those of `PaddedHistory`."""

    store: Tensor
    """(N, W), W numbers a row."""
    rows: Tensor
    """The rows of each event (B, L, C), whose vector is C of them side by side; -1 gives NaN."""
    present: Tensor
    """(B, L)."""

    def scores(self, queries: Tensor) -> Tensor:
        return self.search(queries)[0]

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        scores, sums = self._attended(queries.unsqueeze(1))
        return scores.squeeze(1), sums.squeeze(1)

    def attend(self, queries: Tensor, *, mean: bool = False) -> Tensor:
        return self._attended(queries, mean=mean)[1]

    def take(self, places: Tensor, chosen: Tensor) -> TableHistory:
        at = places.unsqueeze(2).expand(-1, -1, self.rows.shape[2])
        return replace(self, rows=self.rows.gather(1, at), present=chosen)

    def beside(self, table: Tensor, rows: Tensor) -> PaddedHistory:
        vectors = take_rows(self.store, self.rows.flatten(), "triton").view(*self.present.shape, -1)
        return PaddedHistory(vectors, self.present).beside(table, rows)

    def _attended(self, queries: Tensor, *, mean: bool = False) -> tuple[Tensor, Tensor]:
        given = self.store, queries.float(), self.rows, self.present, mean
        return cast(tuple[Tensor, Tensor], Attend.apply(*given))  # type: ignore[no-untyped-call]


History = PaddedHistory | StoredHistory | TableHistory
"""The events of a search."""


# --- several heads ---------------------------------------------------------------------------------------------------


class TargetQueries(nn.Module):
    """The queries of a target's multi-head attention: (B, D_target) -> (B, H, D_event).

    Pi et al.: Search-based User Interest Modeling, CIKM 2020, equation 6: a head's scores are softmax((W_k z) (W_q a))
    over events z. (W_k z) (W_q a) = z (W_k^T W_q a), so the product of both matrices multiplies the target and none
    an event. Scores are divided by the square root of a head's width, as is usual; the paper does not.
    """

    def __init__(self, target_dim: int, event_dim: int, *, heads: int, head_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(heads, target_dim, head_dim))
        self.key = nn.Parameter(torch.empty(heads, head_dim, event_dim))
        for weight in (self.query, self.key):
            bound = (6 / (weight.shape[1] + weight.shape[2])) ** 0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, target: Tensor) -> Tensor:
        """The queries, in fp32 even under autocast: bf16 makes ties of near scores, and a search orders by them."""
        with torch.autocast(target.device.type, enabled=False):
            both = self._both()
            return torch.unflatten(target.to(both.dtype) @ both.transpose(0, 1).flatten(1), 1, (len(both), -1))

    def of_events(self, events: Tensor) -> Tensor:
        """What a target is multiplied by instead of its queries by the events: (L, D_event) -> (H, L, D_target)."""
        with torch.autocast(events.device.type, enabled=False):
            both = self._both()
            return events.to(both.dtype) @ both.transpose(1, 2)

    def _both(self) -> Tensor:
        """The product of both matrices (H, D_target, D_event), with the scale of the scores."""
        # W_q^T W_k / sqrt(width of a head), once for all rows.
        return torch.bmm(self.query * self.query.shape[2] ** -0.5, self.key)
