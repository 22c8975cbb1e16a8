"""The log of a run: one JSON line an event, curves for TensorBoard, and the caller's own display."""

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
"""What happened: `{"event": "step", "step": 10, "loss": 0.5, ...}`; one JSON line of `log.jsonl`."""


class RunLog:
    """Writes the events of a run; on ranks that are not the first it stays silent."""

    def __init__(self, folder: Path, on_event: Callable[[Event], None], *, is_first: bool, tensorboard: bool) -> None:
        self.folder, self.is_first, self.on_event, self.wants_curves = folder, is_first, on_event, tensorboard
        self.file: TextIO | None = None
        self.curves: _Curves | None = None
        self.notes: list[str] = []

    def open(self) -> None:
        """Start appending; only the first rank writes."""
        if not self.is_first:
            return
        with self._told():
            self.file = (self.folder / LOG).open("a", encoding="utf-8")
        if self.wants_curves and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.curves = SummaryWriter(str(self.folder / CURVES))
        for note in self.notes:
            self.write("note", message=note)

    def note(self, message: str) -> None:
        """Something to say once the log is open."""
        self.notes.append(message)

    def write(self, event: str, **values: object) -> None:
        """Tell one event."""
        if not self.is_first or self.file is None:
            return
        line: Event = {"event": event, "time": round(time.time(), 3), **values}
        with self._told():
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        self.on_event(line)
        if self.curves is not None and isinstance(values.get("step"), int):
            with self._told():
                for name, value in _numbers(values):
                    self.curves.add_scalar(f"{event}/{name}", value, values["step"])

    def close(self) -> None:
        """Flush and close what is open."""
        with suppress(OSError):  # of a full disk, which `write` has told
            if self.file is not None:
                self.file.close()
            if self.curves is not None:
                self.curves.close()
        self.file = self.curves = None

    @contextmanager
    def _told(self) -> Iterator[None]:
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
