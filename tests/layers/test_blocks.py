"""An MLP forward and backward, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.models.layers.blocks import Scratch, Tail
from recspec.models.layers.mlp import ActivatedMlp, Activation


def a_tail(mlp: ActivatedMlp) -> tuple[Tensor, ...]:
    """Its further layers, and one of one unit."""
    last = torch.nn.Linear(mlp.layers[-1].out_features, 1)  # type: ignore[arg-type]
    return (*mlp.tail, *last.parameters())


def of_whole_batch(mlp: ActivatedMlp, tail: Sequence[Tensor], first: Tensor, slope: Tensor) -> list[Tensor]:
    """Logits (B,), and the gradients of what the first layer gives and of all weights, by torch's own backward pass."""
    first = first.clone().requires_grad_()
    logits = F.linear(mlp.after_first(first * 1), *tail[-2:]).squeeze(1)
    return [logits.detach(), *torch.autograd.grad(logits, [first, *tail], slope)]


def of_blocks(mlp: ActivatedMlp, tail: Sequence[Tensor], first: Tensor, slope: Tensor, rows: int) -> list[Tensor]:
    """The same, `rows` rows at a time."""
    network, scratch = Tail(mlp.kind, [each.detach() for each in tail]), Scratch(first, rows)
    logits, slopes = torch.empty(len(first)), torch.empty_like(first)
    for start in range(0, len(first), rows):
        some = slice(start, start + rows)
        layers = network.layers(first[some].clone(), scratch)
        assert network.forward(layers, logits[some]) is not None
        slopes[some] = network.backward(slope[some], layers, scratch)
    return [logits, slopes, *network.slopes]


@pytest.mark.parametrize("kind", ["relu", "sigmoid"])
@pytest.mark.parametrize("dims", [[7, 6], [7, 6, 5, 4]])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 6, 17])
def test_blocks_give_the_logits_and_gradients_of_all_rows_at_once(
    dims: list[int], num_rows: int, kind: Activation
) -> None:
    torch.manual_seed(12)
    mlp = ActivatedMlp(dims, kind)
    tail, first, slope = a_tail(mlp), torch.randn(num_rows, 6), torch.randn(num_rows)
    expected = of_whole_batch(mlp, tail, first, slope)
    for one, other in zip(of_blocks(mlp, tail, first, slope, rows=5), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_block_worked_by_hand() -> None:
    # Units (1, 0) of (1, -2); second layer 3 * 1 + 4 * 0 - 1 = 2; logit 2 * 5 + 7 = 17.
    tail = [torch.tensor([[3.0, 4.0]]), torch.tensor([-1.0]), torch.tensor([[5.0]]), torch.tensor([7.0])]
    network, scratch = Tail("relu", tail), Scratch(tail[0], 1)
    layers = network.layers(torch.tensor([[1.0, -2.0]]), scratch)
    assert network.forward(layers, torch.empty(1)).tolist() == [17.0]
    # With a gradient of 1: 5 of the second layer's unit, so (5 * 3, stopped) of the first's.
    assert network.backward(torch.tensor([1.0]), layers, scratch).tolist() == [[15.0, 0.0]]
    assert [gradient.tolist() for gradient in network.slopes] == [[[5.0, 0.0]], [5.0], [[2.0]], [1.0]]
