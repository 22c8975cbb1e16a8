"""Self-attention over packed lists, and the blocks built of it.

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
    lengths: Tensor
    """(B,) of the lists."""
    slots: Tensor
    """(events,) the place of each event in the padded tensor (B * L, d); a list begins at the left."""

    @property
    def shape(self) -> tuple[int, int]:
        """B and L."""
        return self.lists.stop - self.lists.start, self.longest

    @property
    def held(self) -> Tensor:
        """(B, 1, 1, L) which places of the padded tensor hold an event."""
        return (torch.arange(self.longest, device=self.lengths.device) < self.lengths.unsqueeze(1))[:, None, None]


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
        found.append(Bucket(slice(last - events, last), slice(start, stop), longest, own, slots))
        stop, last = start, last - events
    return found[::-1]


class Attention(nn.Module):
    """Multi-head self-attention within each list; if it is causal, an event sees itself and earlier events alone.

    softmax(q k' / sqrt(d / H)) v, with one linear map to q, k and v, and one behind; `dropout` is that of the softmax.
    """

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.width, self.heads, self.dropout, self.causal = width, heads, dropout, causal
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
        if longest == 1 and not (self.training and self.dropout):  # an event alone sees itself
            return inner[bucket.events, 2 * self.width :]
        padded = _padded(inner[bucket.events], bucket)
        q, k, v = padded.view(lists, longest, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = self._attended(q, k, v, None if self.causal else bucket.held)
        return _unpadded(seen.transpose(1, 2).reshape(lists * longest, -1), bucket)

    def of_last(self, x: Tensor, buckets: Sequence[Bucket]) -> Tensor:
        """`forward` of the last event of each list in the buckets: (lists, d)."""
        weight, bias = self.inner.weight, self.inner.bias
        kv = F.linear(x, weight[self.width :], bias[self.width :])
        parts = []
        for bucket in buckets:
            lists, longest = bucket.shape
            last = bucket.lengths.cumsum(0) - 1 + bucket.events.start
            q = F.linear(x[last], weight[: self.width], bias[: self.width]).view(lists, 1, self.heads, -1)
            padded = _padded(kv[bucket.events], bucket)
            k, v = padded.view(lists, longest, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
            seen = self._attended(q.transpose(1, 2), k, v, bucket.held)
            parts.append(seen.transpose(1, 2).reshape(lists, -1))
        out: Tensor = self.outer(torch.cat(parts))
        return out

    def padded(self, x: Tensor, held: Tensor) -> Tensor:
        """`forward` of lists that are padded at the left: (R, L, d), with `held` (R, L)."""
        rows, longest, _ = x.shape
        q, k, v = self.inner(x).view(rows, longest, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        places = torch.arange(longest, device=x.device)
        itself = places == places.unsqueeze(1)  # else the softmax of a place that does not count would be NaN
        others = held.unsqueeze(1)
        if self.causal:
            others = others & (places <= places.unsqueeze(1))
        seen = self._attended(q, k, v, (others | itself).unsqueeze(1))
        out: Tensor = self.outer(seen.transpose(1, 2).reshape(rows, longest, -1))
        return out

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q k' / sqrt(d / H)) v where `mask` is true; without one, an event sees itself and earlier ones."""
        dropout = self.dropout if self.training else 0.0
        if dropout and not q.is_cuda:
            # torch's attention with dropout on a CPU takes 1.1 to 3.4 times as long: its draws alone take 10 ns a
            # weight.
            if mask is None:
                mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            weights = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf).softmax(3)
            return drop(weights, dropout) @ v
        return _attended(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout)


@dataclass(frozen=True)
class BlockSizes:
    """What the blocks of a model have in common."""

    width: int
    heads: int
    hidden: int
    """Width of the hidden layer of the feed-forward net."""
    dropout: float = 0.0
    """Behind every sublayer."""
    attention_dropout: float = 0.0
    """Of attention weights."""
    residual: bool = False
    causal: bool = True


class TransformerBlock(nn.Module):
    """A block with norms before its sublayers: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Feed-forward is linear, GELU, linear. With `residual`, attention(y) + y stands in for attention(y).
    """

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.dropout, self.residual = sizes.dropout, sizes.residual
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, sizes.heads, dropout=sizes.attention_dropout, causal=sizes.causal)
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, buckets: Sequence[Bucket]) -> Tensor:
        """(P, d) -> (P, d)."""
        y = self.norms[0](x)
        return self._behind(x, y, self.attention(y, buckets))

    def of_last(self, x: Tensor, buckets: Sequence[Bucket]) -> Tensor:
        """`forward` of the last event of each list in the buckets: (lists, d)."""
        y = self.norms[0](x)
        last = torch.cat([bucket.lengths.cumsum(0) - 1 + bucket.events.start for bucket in buckets])
        return self._behind(x[last], y[last], self.attention.of_last(y, buckets))

    def padded(self, x: Tensor, held: Tensor) -> Tensor:
        """`forward` of lists that are padded at the left: (R, L, d), with `held` (R, L)."""
        y = self.norms[0](x)
        return self._behind(x, y, self.attention.padded(y, held))

    def _behind(self, x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
        """The block behind its attention: `y` goes into it, `seen` comes out."""
        x = x + self._drop(seen + y if self.residual else seen)
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

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__(sizes)
        width = sizes.width
        self.expand = nn.Linear(width, 2 * sizes.hidden)
        self.gates = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, value = self.expand(x).chunk(2, -1)
        made: Tensor = self.contract(F.silu(gate) * value)
        return made

    def _behind(self, x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
        # Borisyuk et al., 2025: x + f(norm(x)) * sigmoid(x W), for both sublayers.
        x = x + torch.sigmoid(self.gates[0](x)) * self._drop(seen + y if self.residual else seen)
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
            return self._typed[-1].of_last(x, buckets)
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
