"""Masks of random bits."""

from __future__ import annotations

import pytest
import torch

from recspec.nn.dropout import bernoulli_words


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


def test_impossible_bits_are_all_zeros() -> None:
    assert bernoulli_words(3, 0.0, 32).tolist() == [0, 0, 0]
    assert bernoulli_words(3, 2.0**-17, 32).tolist() == [0, 0, 0]  # what is rounded to that
