"""Dot products of all pairs."""

from __future__ import annotations

import torch

from recspec.models.layers.interactions import dot_interaction


def test_dot_products_worked_by_hand() -> None:
    # (1, 2), (3, 4), (5, 6): 3 + 8, 5 + 12, 15 + 24.
    assert dot_interaction(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])).tolist() == [[11.0, 17.0, 39.0]]


def test_dot_products_are_the_same_under_autocast() -> None:
    torch.manual_seed(12)
    vectors = torch.randn(300, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = dot_interaction(vectors)
    torch.testing.assert_close(found.float(), dot_interaction(vectors), rtol=0.02, atol=0.1)
