"""Softmax over many classes beside its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.models.layers import hand_written, softmax_loss
from tests.closeness import assert_close


def made_up(rows: int, classes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    h = torch.randn(rows, 4, generator=numbers, dtype=dtype)
    e = torch.randn(classes, 4, generator=numbers, dtype=dtype)
    return h.requires_grad_(), e.requires_grad_(), torch.randint(classes, (rows,), generator=numbers)


@pytest.mark.parametrize("rows", [1, 16, 17, 200])
def test_loss_and_gradients_are_those_of_cross_entropy(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_written, "LOGITS", 100)  # blocks of 16 rows
    h, e, targets = made_up(rows, 5)
    loss = softmax_loss(h, e, targets)
    mine = torch.autograd.grad(2 * loss, (h, e))
    plain = F.cross_entropy(h @ e.t(), targets, reduction="sum")
    assert_close(loss, plain)
    for ours, theirs in zip(mine, torch.autograd.grad(2 * plain, (h, e)), strict=True):
        assert_close(ours, theirs)


def test_two_classes_by_hand() -> None:
    h, e = torch.tensor([[1.0], [-2.0]]), torch.tensor([[0.0], [3.0]])
    loss = softmax_loss(h, e, torch.tensor([1, 1]))
    assert_close(loss, torch.tensor(0.0485874 + 6.0024757))  # log(1 + e^-3) and log(1 + e^6)


def test_logits_far_apart_do_not_overflow() -> None:
    h, e = torch.tensor([[1000.0]]), torch.tensor([[0.0], [1.0]])
    assert softmax_loss(h, e, torch.tensor([0])).item() == 1000.0
    assert softmax_loss(h, e, torch.tensor([1])).item() == 0.0


def test_no_row_loses_nothing() -> None:
    h, e, targets = made_up(0, 3)
    loss = softmax_loss(h, e, targets)
    loss.backward()
    assert loss.item() == 0
    assert e.grad is not None
    assert not e.grad.any()


def test_products_in_bf16_are_near() -> None:
    h, e, targets = made_up(100, 50, torch.float32)
    exact = softmax_loss(h, e, targets)
    with torch.autocast("cpu", torch.bfloat16):
        near = softmax_loss(h, e, targets)
    assert near.dtype == torch.float32
    assert near.item() != exact.item()
    assert abs(near.item() / exact.item() - 1) < 0.02
    gradient = torch.autograd.grad(near, e)[0]
    assert (gradient - torch.autograd.grad(exact, e)[0]).norm() < 0.02 * gradient.norm()
