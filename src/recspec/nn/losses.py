"""Losses, at least in single precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """`x`, as float32 if its type is narrower; losses and sums of squares need that many digits."""
    return x if x.dtype == torch.float64 else x.float()


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits and labels of equal shape, in nats, computed in float32 or wider."""
    logits = at_least_fp32(logits)
    return F.binary_cross_entropy_with_logits(logits, label.to(logits.dtype))
