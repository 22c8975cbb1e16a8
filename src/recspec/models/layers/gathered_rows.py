"""Rows of a tensor and their gradients: gathered, summed by their number, sparse.

torch's own operations reach a third of a GPU's bandwidth here, and add up equal rows in the rows' own type, one by one:
with 730 gradients in bf16 of one sign a row, sums are 30 % too small.

Shapes: N rows of a tensor; n rows taken; T rows summed to B; W their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recspec.models.layers import kernels


def sparse_rows(rows: Tensor, values: Tensor, shape: Sequence[int], *, is_coalesced: bool = False) -> Tensor:
    """A COO tensor of `shape` (N, D) with the values (n, D) of rows (n,), which may repeat unless coalesced.

    Nothing is checked, because that would wait for a GPU. `torch.sparse_coo_tensor` of torch 2.11 warns of that even if
    it is asked not to check; the operation below it does not.
    """
    made = torch.ops.aten.sparse_coo_tensor.indices_size(rows.view(1, -1), values, shape, is_coalesced=is_coalesced)
    return cast(Tensor, made)


def take_rows(x: Tensor, rows: Tensor, backend: kernels.Backend | None = None) -> Tensor:
    """The rows (n,) of a matrix (N, W) or of a vector (N,)."""
    if not kernels.uses_triton(backend, x.device) or x.dtype not in kernels.FLOATS or x.dim() > 2:
        return x.index_select(0, rows)
    if x.dim() == 1:
        return take_rows(x.unsqueeze(1), rows, backend).squeeze(1)
    return cast(Tensor, TakeRows.apply(x, rows))  # type: ignore[no-untyped-call]


def sum_by_row(x: Tensor, rows: Tensor, size: int, backend: kernels.Backend | None = None) -> Tensor:
    """The sums of the rows (T, W) that have equal numbers `rows` (T,): (size, W)."""
    if not kernels.uses_triton(backend, x.device) or x.dtype not in kernels.FLOATS:
        return x.new_zeros(size, x.shape[1]).index_add(0, rows, x)
    return cast(Tensor, SumRows.apply(x, rows, size))  # type: ignore[no-untyped-call]


class TakeRows(torch.autograd.Function):
    """`take_rows` by Triton; sums of equal rows' gradients are float32, whatever the type of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        vectors, found = kernels.gather_rows(x.contiguous(), rows.view(-1, 1), None, None, x.dtype)
        ctx.save_for_backward(found)
        ctx.shape = x.shape
        return vectors.view(-1, x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _summed(gradient, rows.flatten(), ctx.shape), None


class SumRows(torch.autograd.Function):
    """Sums of rows (T, W) by their number (T,): (B, W), added up in float32 by Triton."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(rows)
        return _summed(x, rows, (size, x.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        vectors, _ = kernels.gather_rows(gradient.contiguous(), rows.view(-1, 1), None, None, gradient.dtype)
        return vectors.view(-1, gradient.shape[1]), None, None


def _summed(x: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    found = x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
    kernels.add_rows(found, rows, x)
    return found.to(x.dtype)
