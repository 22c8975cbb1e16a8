"""Attention over packed lists beside its formula, and beside lists that are padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recspec.models.layers import BlockSizes, GatedBlock, TransformerBlock, buckets_of
from recspec.models.layers.attention import Attention
from tests.closeness import assert_close

KINDS = [TransformerBlock, GatedBlock]
LENGTHS = [0, 1, 1, 2, 3, 5, 9]


def block(kind: type[TransformerBlock], **more: Any) -> TransformerBlock:
    torch.manual_seed(0)
    return kind(BlockSizes(8, 2, 12, **more)).double()


def packed(rows: int, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def padded(x: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The lists at the right of rows that are filled up with noise."""
    longest = max(lengths)
    rows = packed(len(lengths) * longest).view(len(lengths), longest, -1)
    held = torch.arange(longest, 0, -1) <= torch.tensor(lengths).unsqueeze(1)
    rows[held] = x
    return rows, held


def test_attention_of_three_events_by_hand() -> None:
    torch.manual_seed(0)
    attention, x = Attention(4, 2).double(), packed(3, 4)
    q, k, v = attention.inner(x).chunk(3, 1)
    rows = []
    for event in range(3):
        heads = []
        for head in (slice(0, 2), slice(2, 4)):
            scores = torch.stack([q[event, head] @ k[other, head] / 2**0.5 for other in range(event + 1)])
            shares = scores.exp() / scores.exp().sum()
            heads.append(sum(share * v[other, head] for other, share in enumerate(shares)))
        rows.append(torch.cat(heads))
    by_hand = torch.stack(rows) @ attention.outer.weight.t() + attention.outer.bias
    assert_close(attention(x, buckets_of(torch.tensor([3]))), by_hand)


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.models.layers.attention.PADDING", 1)


def test_few_places_are_filled_up_rather_than_another_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.models.layers.attention.PADDING", 6)
    shapes = [each.shape for each in buckets_of(torch.tensor([0, 1, 1, 2, 3, 5]))]
    assert shapes == [(1, 1), (4, 5)]


def test_lists_of_similar_length_share_a_bucket() -> None:
    found = buckets_of(torch.tensor(LENGTHS))
    assert [(each.shape, each.lists, each.events) for each in found] == [
        ((2, 1), slice(1, 3), slice(0, 2)),
        ((2, 3), slice(3, 5), slice(2, 7)),
        ((2, 9), slice(5, 7), slice(7, 21)),
    ]
    assert found[1].slots.tolist() == [0, 1, 3, 4, 5]
    assert found[2].slots.tolist() == [*range(5), *range(9, 18)]
    assert buckets_of(torch.tensor([0, 0])) == buckets_of(torch.tensor([], dtype=torch.int64)) == []


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_padded_and_last_events_agree(kind: type[TransformerBlock], residual: bool, causal: bool) -> None:
    own, lengths = block(kind, residual=residual, causal=causal), torch.tensor(LENGTHS)
    x, buckets = packed(sum(LENGTHS)), buckets_of(lengths)
    out = own(x, buckets)
    rows, held = padded(x, LENGTHS)
    assert_close(own.padded(rows, held)[held], out)
    last = lengths.cumsum(0)[1:] - 1
    assert_close(own.of_last(x, buckets), out[last])
    more = own(torch.cat((x, packed(3))), buckets)
    assert_close(more[: len(x)], out)


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_sees_no_later_one_and_no_other_list(kind: type[TransformerBlock]) -> None:
    own, lengths = block(kind), torch.tensor([3, 5])
    x = packed(8).requires_grad_()
    own(x, buckets_of(lengths))[5].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum(1).bool().tolist() == [False] * 3 + [True] * 3 + [False] * 2
    x.grad = None
    block(kind, causal=False)(x, buckets_of(lengths))[5].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum(1).bool().tolist() == [False] * 3 + [True] * 5


def test_with_residual_the_input_of_attention_is_added_once_more() -> None:
    own, x = block(TransformerBlock, residual=True), packed(1)
    y = own.norms[0](x)
    x1 = x + own.attention(y, buckets_of(torch.tensor([1]))) + y
    assert_close(own(x, buckets_of(torch.tensor([1]))), x1 + own.feed_forward(own.norms[1](x1)))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_weights_are_dropped_in_training_alone(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain, dropping = Attention(4, 2, causal=causal).double(), Attention(4, 2, dropout=0.5, causal=causal).double()
    dropping.load_state_dict(plain.state_dict())
    x, buckets = packed(6, 4), buckets_of(torch.tensor([1, 2, 3]))
    assert_close(dropping.eval()(x, buckets), plain(x, buckets))
    dropping.train()
    monkeypatch.setattr("recspec.models.layers.attention.drop", lambda weights, _: weights)
    assert_close(dropping(x, buckets), plain(x, buckets))
    monkeypatch.setattr("recspec.models.layers.attention.drop", lambda weights, _: weights * 2)
    doubled = plain.outer.bias + 2 * (plain(x, buckets) - plain.outer.bias)
    assert_close(dropping(x, buckets), doubled)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_padded_lists(kind: type[TransformerBlock]) -> None:
    own, lengths = block(kind), [1, 2, 4]
    x = packed(7).requires_grad_()
    own(x, buckets_of(torch.tensor(lengths))).square().sum().backward()
    other = packed(7).requires_grad_()
    rows, held = padded(other, lengths)
    own.padded(rows, held)[held].square().sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    assert_close(x.grad, other.grad)


def test_the_gated_block_by_hand() -> None:
    own, x = block(GatedBlock), packed(1)
    assert isinstance(own, GatedBlock)
    value = own.attention.outer(own.attention.inner(own.norms[0](x))[:, 16:])  # an event alone sees itself
    x1 = x + torch.sigmoid(own.gates[0](x)) * value
    a, b = own.expand(own.norms[1](x1)).chunk(2, 1)
    x2 = x1 + torch.sigmoid(own.gates[1](x1)) * own.contract(a * torch.sigmoid(a) * b)
    assert_close(own(x, buckets_of(torch.tensor([1]))), x2)
