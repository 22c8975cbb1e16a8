"""The log of a run."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TextIO

from recspec.errors import TrainingError

LOG, CURVES = "log.jsonl", "tensorboard"

Event = Mapping[str, object]
"""`{"event": "step", "step": 10, "loss": 0.5, ...}`: one JSON line of `log.jsonl`."""


class RunLog:
    """Writes the events of a run as JSON lines and TensorBoard curves, and passes them on; only on the first rank."""

    def __init__(self, folder: Path, on_event: Callable[[Event], None], *, is_first: bool, tensorboard: bool) -> None:
        self.folder, self.is_first, self.on_event, self.wants_curves = folder, is_first, on_event, tensorboard
        self.file: TextIO | None = None
        self.curves: _Curves | None = None

    def open(self) -> None:
        """Start appending."""
        if not self.is_first:
            return
        with self._reporting():
            self.file = (self.folder / LOG).open("a", encoding="utf-8")
        if self.wants_curves and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.curves = SummaryWriter(str(self.folder / CURVES))

    def write(self, event: str, **values: object) -> None:
        """Log one event."""
        if not self.is_first or self.file is None:
            return
        line: Event = {"event": event, "time": round(time.time(), 3), **values}
        with self._reporting():
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        self.on_event(line)
        if self.curves is not None and isinstance(values.get("step"), int):
            with self._reporting():
                for name, value in _numbers(values):
                    self.curves.add_scalar(f"{event}/{name}", value, values["step"])

    def close(self) -> None:
        """Flush and close the files."""
        with suppress(OSError):  # of a full disk, which `write` has reported
            if self.file is not None:
                self.file.close()
            if self.curves is not None:
                self.curves.close()
        self.file = self.curves = None

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"{self.folder}: the log could not be written: {error}; make room, and the same command with --resume "
                "continues from the last checkpoint"
            ) from None


class _Curves(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: object) -> None: ...

    def close(self) -> None: ...


def _numbers(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("step", "steps"):
            yield f"{prefix}{name}", float(value)
