"""Rows taken and summed by Triton against plain torch, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recspec.models.layers import gathered_rows, kernels
from recspec.models.layers.gathered_rows import sum_by_row, take_rows
from tests.closeness import assert_close
from tests.layers.test_kernels import DEVICE, drawn, with_triton

ROWS = [0, 3, 3, 1, 3, 0]


def slopes(x: Tensor, found: Tensor) -> Tensor:
    """The gradient of x where that of `found` is a number of each place."""
    weights = torch.arange(1, 1 + found.numel(), device=DEVICE, dtype=torch.float32).view(found.shape)
    (slope,) = torch.autograd.grad((found.float() * weights).sum(), x)
    return slope


@with_triton
@pytest.mark.parametrize("width", [1, 3, 16, 300])
def test_taken_rows_and_their_gradient_are_those_of_index_select(width: int) -> None:
    x, rows = drawn(4, width).requires_grad_(), torch.tensor(ROWS, device=DEVICE)
    found, expected = take_rows(x, rows, "triton"), x.index_select(0, rows)
    assert torch.equal(found, expected)
    assert_close(slopes(x, found), slopes(x, expected))


@with_triton
def test_numbers_of_a_vector_are_taken() -> None:
    x, rows = drawn(4).requires_grad_(), torch.tensor(ROWS, device=DEVICE)
    assert torch.equal(take_rows(x, rows, "triton"), x.index_select(0, rows))


@with_triton
def test_gradients_of_narrow_rows_are_added_in_float32() -> None:
    x, rows = torch.zeros(2, 1, dtype=torch.bfloat16, device=DEVICE).requires_grad_(), torch.ones(1000, device=DEVICE)
    take_rows(x, rows.long(), "triton").sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0], [1000.0]]  # one by one in bfloat16, the sum stays at 256


@with_triton
def test_a_row_outside_is_not_a_number_and_gets_no_gradient() -> None:
    x = drawn(4, 3).requires_grad_()
    found = take_rows(x, torch.tensor([1, 4, -1], device=DEVICE), "triton")
    assert found.isnan().all(1).tolist() == [False, True, True]
    found.nan_to_num().sum().backward()
    assert x.grad is not None
    assert x.grad.sum(1).tolist() == [0.0, 3.0, 0.0, 0.0]


@with_triton
@pytest.mark.parametrize("width", [1, 5, 32])
def test_sums_by_row_and_their_gradient_are_those_of_index_add(width: int) -> None:
    x, rows = drawn(len(ROWS), width).requires_grad_(), torch.tensor(ROWS, device=DEVICE)
    found = sum_by_row(x, rows, 5, "triton")
    expected = torch.zeros(5, width, device=DEVICE).index_add(0, rows, x)
    assert_close(found, expected)
    assert_close(slopes(x, found), slopes(x, expected))


@with_triton
def test_deterministic_sums_are_sorted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows = drawn(len(ROWS), 4), torch.tensor(ROWS, device=DEVICE)
    expected = sum_by_row(x, rows, 5, "triton")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    first, second = (sum_by_row(x, rows, 5, "triton") for _ in range(2))
    assert torch.equal(first, second)
    assert_close(first, expected)


def test_without_triton_torch_takes_and_sums_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TakeRows", "SumRows"):
        monkeypatch.setattr(gathered_rows, name, None)
    x, rows = drawn(4, 3), torch.tensor([2, 0, 2], device=DEVICE)
    assert torch.equal(take_rows(x, rows, "torch"), x[rows])
    assert_close(sum_by_row(x[:3], rows, 4, "torch")[2], x[0] + x[2])


def with_gaps(x: Tensor) -> Tensor:
    """The same values in memory that holds others between them."""
    return torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0]


@with_triton
def test_every_kernel_takes_tensors_with_gaps() -> None:
    """A mask that was a slice of columns gave SIM wrong losses on the first GPU."""
    torch.manual_seed(0)
    store, rows, gradient = drawn(9, 4), torch.tensor(ROWS, device=DEVICE), drawn(len(ROWS), 4)
    events, present = torch.randint(9, (3, 5, 2), device=DEVICE), torch.rand(3, 5, device=DEVICE) < 0.7
    queries, of_sums, vectors, of_dots = drawn(3, 2, 8), drawn(3, 3, 8), drawn(3, 5, 4), drawn(3, 10)

    def added(at: Tensor, of_rows: Tensor) -> Tensor:
        into = torch.zeros(9, 4, device=DEVICE)
        kernels.add_rows(into, at, of_rows)
        return into

    def updated(at: Tensor, of_rows: Tensor) -> Tensor:
        weight = store.clone()
        kernels.update_rows("sgd", weight, at, of_rows, [], lr=0.1)
        return weight

    def attended(at: Tensor, there: Tensor, asked: Tensor, slope: Tensor) -> Tensor:
        of_store = torch.zeros_like(store)
        scores, sums = kernels.attend(store, at, there, asked, mean=True)
        of_queries = kernels.attend_backward(store, at, there, asked, slope, of_store, mean=True)
        return torch.cat([each.flatten() for each in (scores.where(there.unsqueeze(1), 0), sums, of_queries, of_store)])

    for kernel, given in (
        (lambda at: kernels.gather_rows(store, at, None, None, torch.float32)[0], [rows.view(-1, 1)]),
        (added, [rows, gradient]),
        (updated, [rows, gradient]),
        (attended, [events, present, queries, of_sums]),
        (kernels.dots, [vectors]),
        (kernels.dots_backward, [vectors, of_dots]),
    ):
        gapped = [with_gaps(each) for each in given]
        assert not any(each.is_contiguous() for each in gapped)
        assert_close(kernel(*gapped), kernel(*given))
