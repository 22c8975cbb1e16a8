"""One choice of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value and the reason for it; `str` gives both in a line."""

    value: T
    reason: str

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, bool):
            shown = str(value).lower()
        elif isinstance(value, int):
            shown = f"{value:,}"
        else:
            shown = (", ".join(value) if isinstance(value, tuple) else str(value)) or "none"
        return f"{shown}: {self.reason}"
