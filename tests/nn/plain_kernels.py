"""What every Triton kernel computes, in plain torch; see the functions of the same names in `kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recspec.nn import kernels


def gather_rows(store: Tensor, ids: Tensor, firsts: Tensor, stops: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = ids.long() + firsts
    inside = (ids >= 0) & (rows < stops)
    vectors = store.index_select(0, rows.where(inside, 0).flatten()).view(*ids.shape, store.shape[1]).to(dtype)
    return vectors.masked_fill(~inside.unsqueeze(-1), torch.nan), rows.where(inside, -1)


def update_rows(
    rule: kernels.Rule,
    weight: Tensor,
    ids: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    *,
    lr: float | Tensor,
    eps: float = 0.0,
    betas: tuple[float, float] = (0.0, 0.0),
    corrections: Tensor | None = None,
) -> None:
    inside = (ids >= 0) & (ids < len(weight))
    rows, place = torch.unique(ids[inside], return_inverse=True)
    total = weight.new_zeros(len(rows), weight.shape[1], dtype=torch.float32)
    total.index_add_(0, place, gradient[inside].float())
    own, state = weight[rows].float(), [each[rows] for each in states]
    if rule == "sgd":
        own -= lr * total
    elif rule == "adam":
        assert corrections is not None
        state[0] += (total - state[0]) * (1 - betas[0])
        state[1] += (total.square() - state[1]) * (1 - betas[1])
        own -= lr * state[0] / (((state[1] / corrections[1]).sqrt() + eps) * corrections[0])
    else:
        square = total.square()
        state[0] += square.mean(1, keepdim=True) if rule == "rowwise_adagrad" else square
        own -= lr * total / (state[0].sqrt() + eps)
    weight[rows] = own.to(weight.dtype)
    for table, changed in zip(states, state, strict=True):
        table[rows] = changed


def dots(vectors: Tensor) -> Tensor:
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1, device=vectors.device)
    return torch.bmm(vectors, vectors.transpose(1, 2))[:, row, column]


def dots_backward(vectors: Tensor, gradient: Tensor) -> Tensor:
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1, device=vectors.device)
    both = gradient.new_zeros(len(vectors), vectors.shape[1], vectors.shape[1])
    both[:, row, column] = both[:, column, row] = gradient
    return torch.bmm(both, vectors)
