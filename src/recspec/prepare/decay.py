"""Weights of events that fade with age."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_HALVINGS = 64  # or doublings, of an event after the end: 2^64 and 2^-64 are float32 numbers with room for a weight


@dataclass(frozen=True)
class Decay:
    """Halves a weight w once each `half_life` before `end`: w 2^((t - end) / half_life) at time t.

    `end` is the last time of train. A later event, of a held-out split, weighs more by the same rule.
    """

    half_life: float
    end: float

    def factors(self, times: NDArray[np.generic]) -> NDArray[np.float64]:
        """What to multiply the weights at some times by, within 2^-64 and 2^64."""
        halvings = (times.astype(np.float64) - self.end) / self.half_life
        return np.asarray(np.exp2(np.clip(halvings, -MOST_HALVINGS, MOST_HALVINGS)), np.float64)


def stored_weights(
    weights: NDArray[np.float64], times: NDArray[np.generic] | None, decay: Decay | None
) -> NDArray[np.float32]:
    """The weights as they are stored: above 0, whatever their size."""
    decayed = weights if decay is None or times is None else weights * decay.factors(times)
    return np.maximum(decayed, np.finfo(np.float32).tiny).astype(np.float32)
