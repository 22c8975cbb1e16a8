"""Searching a long history for what concerns the target: the best k events, and attention over them.

A history has one of three forms with equal results. *Padded* is plain torch on vectors (B, L, D) and a mask, on any
device and in exported programs. The others read events where they stand in embedding tables: *stored* on a CPU
(`stored_rows`), and *table* by Triton on a GPU (`kernels.attend`).

Shapes: B rows; L the longest history; T events, row by row; H heads; D width of an event's vector; k events kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.models.layers.gathered_rows import take_rows
from recspec.models.layers.hand_written import Attend, AttendByRows, may_replace
from recspec.models.layers.losses import at_least_fp32
from recspec.models.layers.stored_rows import Column, Places, dots_of_rows

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
        """See `PaddedHistory`."""
        places, columns = self._events()
        with torch.no_grad():
            (scores,) = dots_of_rows(columns, places, queries.float().unsqueeze(1))
        return places.to_padded(scores, 0.0)

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """See `PaddedHistory`."""
        places, columns = self._events()
        scores, sums = attend_by_rows(columns, places, queries.unsqueeze(1))
        return places.to_padded(scores[0], 0.0), sums.squeeze(1)

    def attend(self, queries: Tensor, *, mean: bool = False) -> Tensor:
        """See `PaddedHistory`."""
        places, columns = self._events()
        return attend_by_rows(columns, places, queries, mean=mean)[1]

    def take(self, places: Tensor, chosen: Tensor) -> StoredHistory:
        """See `PaddedHistory`."""
        return StoredHistory(
            tuple(replace(column, rows=column.rows.gather(1, places)) for column in self.columns), chosen
        )

    def beside(self, table: Tensor, rows: Tensor) -> StoredHistory:
        """See `PaddedHistory`."""
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
        """See `PaddedHistory`."""
        return self.search(queries)[0]

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """See `PaddedHistory`."""
        scores, sums = self._attended(queries.unsqueeze(1))
        return scores.squeeze(1), sums.squeeze(1)

    def attend(self, queries: Tensor, *, mean: bool = False) -> Tensor:
        """See `PaddedHistory`."""
        return self._attended(queries, mean=mean)[1]

    def take(self, places: Tensor, chosen: Tensor) -> TableHistory:
        """See `PaddedHistory`."""
        at = places.unsqueeze(2).expand(-1, -1, self.rows.shape[2])
        return replace(self, rows=self.rows.gather(1, at), present=chosen)

    def beside(self, table: Tensor, rows: Tensor) -> PaddedHistory:
        """See `PaddedHistory`."""
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
        return torch.bmm(self.query * self.query.shape[2] ** -0.5, self.key)
