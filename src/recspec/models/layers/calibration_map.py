"""A calibration as a module, which an export holds inside its graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from recspec.metrics import Calibration


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
