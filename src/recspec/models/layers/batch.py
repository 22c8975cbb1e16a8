"""Batch: a dict from feature name to tensor.

Shapes: B rows; L a list feature's length; n negatives drawn for a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

Batch = dict[str, torch.Tensor]
"""Feature name -> (B,) for a scalar, (B, L) for a list; the label is included and every row stands alone."""


def drawn_of(name: str) -> str:
    """The column with the ids drawn for each row (B, n) beside its own; see `models.LossNeeds`."""
    return f"{name} (drawn)"


def log_expected_of(name: str) -> str:
    """The column beside `drawn_of` with the log of the number of times (B, n) that n draws were expected to hold it."""
    return f"{name} (log expected)"


def num_rows(batch: Mapping[str, torch.Tensor]) -> int:
    """B, the number of rows; 0 for a batch without a feature."""
    return next((tensor.shape[0] for tensor in batch.values()), 0)


def to_device(batch: Mapping[str, torch.Tensor], device: torch.device) -> Batch:
    """The same batch on `device`, copied without waiting where the memory is pinned."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def take(batch: Mapping[str, torch.Tensor], rows: torch.Tensor | slice) -> Batch:
    """Some rows of a batch: by index (n,), or a view of a contiguous slice."""
    if isinstance(rows, slice):
        return {name: tensor[rows] for name, tensor in batch.items()}
    return {name: tensor.index_select(0, rows) for name, tensor in batch.items()}


def concatenate(batches: Iterable[Mapping[str, torch.Tensor]]) -> Batch:
    """Rows of several batches one after the other; they hold the same features."""
    parts = list(batches)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def repeat_rows(batch: Mapping[str, torch.Tensor], times: int) -> Batch:
    """Each row `times` times in a row: (B, ...) -> (B * times, ...)."""
    return {name: tensor.repeat_interleave(times, dim=0) for name, tensor in batch.items()}


def tile_rows(batch: Mapping[str, torch.Tensor], times: int) -> Batch:
    """The whole batch `times` times: (B, ...) -> (times * B, ...)."""
    return {name: tensor.repeat(times, *[1] * (tensor.dim() - 1)) for name, tensor in batch.items()}
