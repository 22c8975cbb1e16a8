"""Sparse gradients of embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor


def sparse_rows(rows: Tensor, values: Tensor, shape: Sequence[int], *, is_coalesced: bool = False) -> Tensor:
    """A COO tensor of `shape` (N, D) with the values (n, D) of rows (n,), which may repeat unless coalesced.

    Nothing is checked, because that would wait for a GPU. `torch.sparse_coo_tensor` of torch 2.11 warns of that even if
    it is asked not to check; the operation below it does not.
    """
    made = torch.ops.aten.sparse_coo_tensor.indices_size(rows.view(1, -1), values, shape, is_coalesced=is_coalesced)
    return cast(Tensor, made)
