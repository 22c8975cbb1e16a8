"""Tensors as streams of their rows, for tables that no rank holds whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Streamed:
    """A tensor as blocks of its rows in order, so that no process holds it whole.

    If ranks hold parts of it, all of them iterate together, and the first rank alone gets every block.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[torch.Tensor]]


def rows_of_block(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Rows of a tensor moved at once: about `BLOCK_BYTES`, and at least one row."""
    return max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))


BLOCK_BYTES = 1 << 26
