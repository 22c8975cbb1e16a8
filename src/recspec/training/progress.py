"""How far a training run is."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import TypeAdapter


@dataclass
class Progress:
    """The counters and the best evaluation of a run; a checkpoint's header holds them."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_epoch: float = 0.0
    best_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    stale: int = 0
    stopped: str = ""

    @property
    def samples_per_second(self) -> float:
        """The speed of the whole run so far."""
        return self.samples / max(self.seconds, 1e-9)


PROGRESS = TypeAdapter(Progress)
