"""Masks of random bits, and dropout by them."""

from __future__ import annotations

import pytest
import torch

from recspec.models.layers.blocks import bernoulli_words, drop
from tests.closeness import assert_close


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("probability", [0.5, 0.75, 0.3, 1 / 3])
def test_every_bit_of_a_word_has_the_probability(bits: int, probability: float) -> None:
    torch.manual_seed(6)
    words = bernoulli_words(20_001, probability, bits)
    assert len(words) == 20_001
    places = torch.arange(bits, dtype=words.dtype)
    shares = ((words.view(-1, 1) >> places) & 1).double().mean(0)
    deviation = (probability * (1 - probability) / len(words)) ** 0.5
    assert (shares - probability).abs().max().item() < 6 * deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_keeps_the_mean_and_lets_gradients_through_what_it_kept(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((200, 101), 3.0, dtype=dtype, requires_grad=True)
    out = drop(x, 0.25)
    kept = out != 0
    assert_close(out, torch.where(kept, torch.tensor(4.0, dtype=dtype), 0.0))
    assert abs(kept.double().mean().item() - 0.75) < 0.02
    assert (kept[:, 1:] == kept[:, :-1]).double().mean().item() == pytest.approx(0.625, abs=0.02)
    out.sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.where(kept, torch.tensor(4 / 3, dtype=dtype), 0.0))


def test_dropout_of_nothing_is_nothing() -> None:
    x = torch.ones(3, 2)
    assert drop(x, 0.0) is x
    assert drop(x[:0], 0.5).shape == (0, 2)
    assert_close(drop(torch.ones(40, 30).t(), 0.5).unique(), torch.tensor([0.0, 2.0]))
