"""The trials of a search, as users see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trial:
    """One trial and its outcome."""

    number: int
    state: str
    """`complete`, `pruned` (stopped early), `failed` or `running`."""
    value: float | None
    """The metric on valid at its best epoch."""
    settings: Mapping[str, object]
    seconds: float | None
    reason: str = ""

    def to_dict(self) -> dict[str, object]:
        """The trial as a JSON value."""
        return dict(vars(self))


@dataclass(frozen=True)
class Found:
    """The findings of a search so far."""

    metric: str
    trials: Sequence[Trial]
    best: Trial | None
    recipe: Path
    left: int
    """Trials still to run."""

    @property
    def ended(self) -> int:
        """Number of trials that are over, failed ones included."""
        return sum(trial.state != "running" for trial in self.trials)

    def to_dict(self) -> dict[str, object]:
        """The findings as a JSON value."""
        return {
            "metric": self.metric,
            "best": self.best.to_dict() if self.best else None,
            "recipe": str(self.recipe) if self.best else None,
            "trials": [trial.to_dict() for trial in self.trials],
            "left": self.left,
        }
