"""Losses."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def at_least_fp32(x: Tensor) -> Tensor:
    """`x`, as float32 if its type is narrower; losses and sums of squares need that many digits."""
    return x if x.dtype == torch.float64 else x.float()


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits and labels of equal shape, in nats, computed in float32 or wider."""
    logits = at_least_fp32(logits)
    return F.binary_cross_entropy_with_logits(logits, label.to(logits.dtype))


LOGITS = 3 << 18
"""Logits of rows x classes that a CPU holds at once; they stay in the cache between products and softmax."""
LOGITS_OF_GPU = 1 << 28
TINY = 1e-30
"""Share of a target below which its logarithm is computed from the logits."""
TOGETHER = 4
"""Blocks of rows whose share of the classes' gradient is one product."""


def softmax_loss(rows: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    """The sum of -log softmax(rows classes')[target] over rows (P, d), for classes (N, d) and targets (P,): a scalar.

    The logits (P, N) never exist as a whole. Gradients are computed beside the loss, block by block, as the gradient of
    the loss for the logits is softmax - one_hot(target). Products are in bf16 if autocast is on with bf16.
    """
    loss: Tensor = _SoftmaxLoss.apply(rows, classes, targets)  # type: ignore[no-untyped-call]
    return loss


class _SoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
        device, wide = rows.device.type, classes.dtype
        is_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        with torch.autocast(device, enabled=False):
            exact_rows = rows.to(wide)
            ours, theirs = (each.bfloat16() if is_half else each for each in (exact_rows, classes))
            of_rows = torch.empty_like(exact_rows) if any(ctx.needs_input_grad) else None
            of_classes = torch.zeros_like(classes) if of_rows is not None else None
            chosen = torch.empty(len(rows), dtype=wide, device=rows.device)
            most = LOGITS if device == "cpu" else LOGITS_OF_GPU
            step = max(16, most // len(classes) // 16 * 16)
            shares = ours.new_empty(min(len(ours), TOGETHER * step), len(classes))
            for start in range(0, len(ours), TOGETHER * step):
                whole = slice(start, min(len(ours), start + TOGETHER * step))
                for first in range(start, whole.stop, step):
                    part = slice(first, min(whole.stop, first + step))
                    share = shares[part.start - start : part.stop - start]
                    torch.softmax(ours[part] @ theirs.t(), 1, out=share)
                    chosen[part] = share.gather(1, targets[part, None]).squeeze(1)
                    if of_rows is not None:
                        of_rows[part] = share @ theirs
                if of_classes is not None:
                    of_classes += shares[: whole.stop - start].t() @ ours[whole]
            if of_rows is not None and of_classes is not None:
                of_rows -= classes[targets]
                of_classes.index_add_(0, targets, exact_rows, alpha=-1)
            tiny = torch.nonzero(chosen < TINY).squeeze(1)
            loss = -chosen.clamp(min=TINY).log().sum()
            if len(tiny):
                logits = exact_rows[tiny] @ classes.t()
                logs = logits.log_softmax(1).gather(1, targets[tiny, None])
                loss += len(tiny) * math.log(TINY) - logs.sum()
        ctx.of_rows, ctx.of_classes, ctx.dtype = of_rows, of_classes, rows.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return (ctx.of_rows * gradient).to(ctx.dtype), ctx.of_classes * gradient, None


def sampled_softmax(positive: Tensor, drawn: Tensor, log_expected: Tensor) -> Tensor:
    """The cross-entropy (B,) of a positive among all items, estimated from drawn ones, in nats.

        loss = -s + log(exp(s) + sum_j exp(s_j - log m_j))

    for the positive's logit s, and drawn items j that were expected m_j times among the draws: the sum over j is an
    unbiased estimate of the sum of exp over all other items. Bengio and Senecal: Adaptive Importance Sampling to
    Accelerate Training of a Neural Probabilistic Language Model, 2008; Blanc and Rendle: Adaptive Sampled Softmax with
    Kernel Based Sampling, ICML 2018, section 2.

    Args:
        positive: logits (B,).
        drawn: logits (n, B); -inf leaves a draw out, such as one that is the positive itself.
        log_expected: log m (n, B).
    """
    return torch.logsumexp(torch.cat([positive.unsqueeze(0), drawn - log_expected]), dim=0) - positive
