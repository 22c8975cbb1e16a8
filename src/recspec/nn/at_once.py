"""How much a device computes at once."""

from __future__ import annotations

import torch

TIMES = 16
"""How many times as much a GPU takes. A CPU's blocks stay in its caches; a GPU ends an operation on such a block sooner
than the next one is launched."""
SHARE = 64
"""A tensor of a block takes at most one part in so many of a GPU's memory."""


def at_once(number: int, device: torch.device, *, width: int = 1) -> int:
    """Floats, or rows of `width` floats, that a device computes at once: `number` on a CPU, more on a GPU.

    It depends on the GPU's memory, not on what is free, so that the same run has the same blocks.
    """
    if device.type != "cuda":
        return number
    fits = torch.cuda.get_device_properties(device).total_memory // (SHARE * 4 * width)
    return min(TIMES * number, max(number, fits))
