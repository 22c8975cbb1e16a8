"""Losses of logits, and their calibration as a module, which an export holds inside its graph."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.metrics import Calibration
from recspec.models.layers.hand_written import SoftmaxLoss, may_replace


def at_least_fp32(x: Tensor) -> Tensor:
    """`x`, as float32 if its type is narrower; losses and sums of squares need that many digits."""
    return x if x.dtype == torch.float64 else x.float()


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits and labels of equal shape, in nats, computed in float32 or wider."""
    logits = at_least_fp32(logits)
    return F.binary_cross_entropy_with_logits(logits, label.to(logits.dtype))


def softmax_loss(rows: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    """The sum of -log softmax(rows classes')[target] over rows (P, d), for classes (N, d) and targets (P,): a scalar.

    The logits (P, N) never exist as a whole. Gradients are computed beside the loss, block by block, as the gradient of
    the loss for the logits is softmax - one_hot(target). Products are in bf16 if autocast is on with bf16.
    """
    if not may_replace():
        return F.cross_entropy(rows @ classes.t(), targets, reduction="sum")
    loss: Tensor = SoftmaxLoss.apply(rows, classes, targets)  # type: ignore[no-untyped-call]
    return loss


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
    # One logsumexp over the positive and the corrected draws: no exp can overflow.
    return torch.logsumexp(torch.cat([positive.unsqueeze(0), drawn - log_expected]), dim=0) - positive


class CalibrationMap(nn.Module):
    """Calibrated logits (B,) of logits (B,), as `Calibration` computes them, in fp32.

    The first knot's value, plus slope x (the part of the segment below the logit) for each segment: sums and products
    that every exported form has, instead of a search.
    """

    starts: Tensor
    lowest: Tensor
    widths: Tensor
    slopes: Tensor
    first: Tensor

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        knots, slopes = np.array(calibration.logits), calibration.slopes
        lowest, widths = np.zeros(len(slopes)), np.diff(knots)
        unbounded = float(torch.finfo(torch.float32).max)
        lowest[0], widths[-1] = -unbounded, unbounded  # the outer segments go on
        made = {"starts": knots[:-1], "lowest": lowest, "widths": widths, "slopes": slopes}
        for name, values in {**made, "first": np.array(calibration.calibrated[0])}.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        if len(self.slopes) == 1:
            return self.first + self.slopes[0] * (logits.float() - self.starts[0])
        covered = (logits.float().unsqueeze(-1) - self.starts).clamp(self.lowest, self.widths)
        return self.first + (covered * self.slopes).sum(-1)
