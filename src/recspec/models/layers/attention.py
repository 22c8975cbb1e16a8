"""Causal self-attention over packed lists, and the blocks built of it.

Lists of a batch lie one after the other in a tensor (P, d), so that linear maps and norms work on events alone.
Attention needs lists side by side: lists of similar length are padded to the longest of them.

Shapes: R lists; P events of all lists; B lists of a bucket; L the longest of them; d width; H heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from recspec.models.layers.blocks import drop
from recspec.models.layers.hand_written import may_replace

BUCKET = 0.7
"""A list shorter than this share of the longest one in a bucket begins another one,"""
PADDING = 2048
"""unless the bucket is filled up with fewer places than this, which cost less than another bucket."""
PADDING_OF_GPU = 1 << 16
"""On a GPU a bucket costs some 15 launches a block, forwards and backwards."""


@dataclass(frozen=True)
class Bucket:
    """Lists of similar length, which lie one after the other in the packed tensor."""

    events: slice
    lists: slice
    longest: int
    slots: Tensor
    """(events,) the place of each event in the padded tensor (B * L, d); a list begins at the left."""

    @property
    def shape(self) -> tuple[int, int]:
        """B and L."""
        return self.lists.stop - self.lists.start, self.longest


def buckets_of(lengths: Tensor, sizes: Sequence[int] | None = None) -> list[Bucket]:
    """Buckets of lists whose lengths (R,) ascend; empty lists are in none. `sizes` are the lengths, if read already."""
    known = lengths.tolist() if sizes is None else sizes
    padding = PADDING if lengths.device.type == "cpu" else PADDING_OF_GPU
    found: list[Bucket] = []
    stop, last = len(known), sum(known)
    while stop and known[stop - 1]:
        start, longest, more = stop, known[stop - 1], 0
        while start and known[start - 1] and (known[start - 1] >= BUCKET * longest or more < padding):
            start -= 1
            more += longest - known[start]
        own = lengths[start:stop]
        events = int(sum(known[start:stop]))
        firsts = torch.arange(stop - start, device=own.device) * longest - (own.cumsum(0) - own)
        slots = torch.arange(events, device=own.device) + torch.repeat_interleave(firsts, own, output_size=events)
        found.append(Bucket(slice(last - events, last), slice(start, stop), longest, slots))
        stop, last = start, last - events
    return found[::-1]


class Attention(nn.Module):
    """Multi-head self-attention in which an event sees itself and earlier events of its list; no dropout inside.

    softmax(q k' / sqrt(d / H)) v, with one linear map to q, k and v, and one behind.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor, buckets: Sequence[Bucket]) -> Tensor:
        """(P, d) -> (P, d); events after the last bucket get the bias alone."""
        inner = self.inner(x)
        parts = [self._of_bucket(inner, bucket) for bucket in buckets]
        used = buckets[-1].events.stop if buckets else 0
        parts.append(inner.new_zeros(len(x) - used, self.width))
        out: Tensor = self.outer(torch.cat(parts))
        return out

    def _of_bucket(self, inner: Tensor, bucket: Bucket) -> Tensor:
        lists, longest = bucket.shape
        if longest == 1:  # an event alone sees itself
            return inner[bucket.events, 2 * self.width :]
        padded = _padded(inner[bucket.events], bucket)
        q, k, v = padded.view(lists, longest, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = _attended(q, k, v, is_causal=True)
        return _unpadded(seen.transpose(1, 2).reshape(lists * longest, -1), bucket)

    def of_last(self, x: Tensor, buckets: Sequence[Bucket], lengths: Tensor) -> Tensor:
        """`forward` of the last event of each list in the buckets (lists, d); `lengths` (R,) of all lists."""
        weight, bias = self.inner.weight, self.inner.bias
        kv = F.linear(x, weight[self.width :], bias[self.width :])
        parts = []
        for bucket in buckets:
            lists, longest = bucket.shape
            own = lengths[bucket.lists]
            last = own.cumsum(0) - 1 + bucket.events.start
            q = F.linear(x[last], weight[: self.width], bias[: self.width]).view(lists, 1, self.heads, -1)
            padded = _padded(kv[bucket.events], bucket)
            k, v = padded.view(lists, longest, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
            held = torch.arange(longest, device=x.device) < own.unsqueeze(1)
            seen = _attended(q.transpose(1, 2), k, v, attn_mask=held[:, None, None])
            parts.append(seen.transpose(1, 2).reshape(lists, -1))
        out: Tensor = self.outer(torch.cat(parts))
        return out

    def padded(self, x: Tensor, held: Tensor) -> Tensor:
        """`forward` of lists that are padded at the left: (R, L, d), with `held` (R, L)."""
        rows, longest, _ = x.shape
        q, k, v = self.inner(x).view(rows, longest, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        places = torch.arange(longest, device=x.device)
        earlier = places <= places.unsqueeze(1)
        itself = places == places.unsqueeze(1)  # else the softmax of a place that does not count would be NaN
        mask = (earlier & held.unsqueeze(1)) | itself
        seen = _attended(q, k, v, attn_mask=mask.unsqueeze(1))
        out: Tensor = self.outer(seen.transpose(1, 2).reshape(rows, longest, -1))
        return out


class TransformerBlock(nn.Module):
    """A block with norms before its sublayers: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Feed-forward is linear, GELU, linear.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, buckets: Sequence[Bucket]) -> Tensor:
        """(P, d) -> (P, d)."""
        return self._behind(x, self.attention(self.norms[0](x), buckets))

    def of_last(self, x: Tensor, buckets: Sequence[Bucket], lengths: Tensor) -> Tensor:
        """`forward` of the last event of each list in the buckets."""
        firsts = buckets[0].lists.start
        last = lengths.cumsum(0)[firsts:] - 1
        return self._behind(x[last], self.attention.of_last(self.norms[0](x), buckets, lengths))

    def padded(self, x: Tensor, held: Tensor) -> Tensor:
        """`forward` of lists that are padded at the left: (R, L, d), with `held` (R, L)."""
        return self._behind(x, self.attention.padded(self.norms[0](x), held))

    def _behind(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self._drop(seen)
        return x + self._drop(self.feed_forward(self.norms[1](x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        made: Tensor = self.contract(F.gelu(self.expand(x)))
        return made

    def _drop(self, x: Tensor) -> Tensor:
        return drop(x, self.dropout) if self.training else x


class GatedBlock(TransformerBlock):
    """LiGR (Borisyuk et al., 2025): x + sigmoid(gate(x)) * sublayer(norm(x)), with SwiGLU as feed-forward.

    SwiGLU: contract(silu(a) * b), with a and b linear.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__(width, heads, hidden, dropout)
        self.expand = nn.Linear(width, 2 * hidden)
        self.gates = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, value = self.expand(x).chunk(2, -1)
        made: Tensor = self.contract(F.silu(gate) * value)
        return made

    def _behind(self, x: Tensor, seen: Tensor) -> Tensor:
        # Borisyuk et al., 2025: x + f(norm(x)) * sigmoid(x W), for both sublayers.
        x = x + torch.sigmoid(self.gates[0](x)) * self._drop(seen)
        return x + torch.sigmoid(self.gates[1](x)) * self._drop(self.feed_forward(self.norms[1](x)))


class Blocks(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: Iterable[TransformerBlock]) -> None:
        super().__init__()
        self.each = nn.ModuleList(blocks)

    @property
    def _typed(self) -> list[TransformerBlock]:
        return cast(list[TransformerBlock], list(self.each))

    def forward(self, x: Tensor, lengths: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """(P, d) -> (P, d) of lists whose lengths (R,) ascend; rows may follow that are in no list.

        `sizes` are the lengths, if they have been read already.
        """
        buckets = buckets_of(lengths, sizes)
        for block in self._typed:
            x = block(x, buckets)
        return x

    def of_last(self, x: Tensor, lengths: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """`forward` of the last event of each list that is not empty, in the same order."""
        buckets = buckets_of(lengths, sizes)
        if not buckets:
            return x[:0]
        if not may_replace(self):
            return cast(Tensor, self(x, lengths))[lengths.cumsum(0)[buckets[0].lists.start :] - 1]
        for block in self._typed[:-1]:
            x = block(x, buckets)
        if self._typed:
            return self._typed[-1].of_last(x, buckets, lengths)
        return x[lengths.cumsum(0)[buckets[0].lists.start :] - 1]

    def padded(self, x: Tensor, held: Tensor) -> Tensor:
        """`forward` of lists that are padded at the left: (R, L, d), with `held` (R, L)."""
        for block in self._typed:
            x = block.padded(x, held)
        return x


WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _attended(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """torch's attention; on a GPU not by cuDNN, which makes a plan for every new shape, and buckets have many."""
    if not q.is_cuda or torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, **how)
    with sdpa_kernel(WITHOUT_PLANS):
        return F.scaled_dot_product_attention(q, k, v, **how)


def _padded(x: Tensor, bucket: Bucket) -> Tensor:
    """(events, D) -> (B * L, D), with zeros behind the end of each list."""
    return x.new_zeros(bucket.shape[0] * bucket.longest, x.shape[1]).index_copy(0, bucket.slots, x)


def _unpadded(x: Tensor, bucket: Bucket) -> Tensor:
    """(B * L, D) -> (events, D)."""
    return x.index_select(0, bucket.slots)
