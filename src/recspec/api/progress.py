"""The quiet progress bar of the Python API: one line on a terminal or in a notebook, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any

Stages = Callable[[str, float, float | None], None]
"""Receives a stage, the amount done, and the total (None if unknown)."""
Events = Callable[[Mapping[str, object]], None]
"""Receives the events of a training, as in `log.jsonl`."""

PAUSE = 0.2
"""Seconds between two updates of a bar."""
BAR = 24
"""Characters of a bar on a terminal."""
COUNTED = {"full": "users", "rows": "rows"}
"""Stages of which the bar tells the amount done, and its unit."""


def event_number(event: Mapping[str, object], name: str) -> float:
    """A number of an event; NaN if it holds none."""
    value = event.get(name)
    return float(value) if isinstance(value, (int, float)) else float("nan")


class Bar:
    """A bar that is drawn over itself and disappears at the end."""

    def __init__(self) -> None:
        self._cell = _notebook_cell()
        self._on = self._cell is not None or sys.stderr.isatty()
        self._drawn_at, self._width = 0.0, 0
        self._began = self._done = 0.0
        self._total: float | None = None

    def stage(self, stage: str, done: float, total: float | None) -> None:
        """Show how far a stage is, and from a second on the time so far and the time left."""
        now = time.monotonic()
        if total != self._total or done <= self._done:
            self._began, self._total = now, total
        self._done = done
        if not self._on or (now - self._drawn_at < PAUSE and (total is None or done < total)):
            return
        self._drawn_at = now
        share = min(1.0, done / total) if total else None
        if total and (unit := COUNTED.get(stage)):
            stage = f"{stage}, {done:,.0f} of {total:,.0f} {unit}"
        if (seconds := now - self._began) > 1:
            left = f", {seconds / share - seconds:,.0f} s left" if share else ""
            stage = f"{stage}, {seconds:,.0f} s{left}"
        if self._cell is not None:
            at = "" if share is None else f" value='{share:.3f}'"
            self._cell.update(_Html(f"<progress{at} style='vertical-align:middle'></progress> {escape(stage)}"))
            return
        full = 0 if share is None else round(BAR * share)
        bar = f"[{'=' * full}{' ' * (BAR - full)}] {share:4.0%}  " if share is not None else ""
        self._draw(f"{bar}{stage}"[:110])

    def event(self, event: Mapping[str, object]) -> None:
        """Show where a training is: epoch, loss and the best value on valid so far."""
        if event["event"] == "step":
            total = None if event.get("open_ended") else event_number(event, "steps")
            where = f"epoch {event_number(event, 'epoch'):.1f}  loss {event_number(event, 'loss'):.4f}"
            self.stage(where, event_number(event, "step"), total)
        elif event["event"] == "epoch" and event.get("best") is not None:
            best = f"best {event.get('metric')} {event_number(event, 'best'):.4f}"
            self.stage(f"epoch {event_number(event, 'epoch'):g}  {best}", 0, None)

    def close(self) -> None:
        """Remove the bar."""
        if self._cell is not None:
            self._cell.update(_Html(""))
        elif self._width:
            self._draw("")
            sys.stderr.flush()

    def _draw(self, text: str) -> None:
        sys.stderr.write(f"\r{text.ljust(self._width)}\r{text}")
        sys.stderr.flush()
        self._width = len(text)


@contextmanager
def bar(progress: bool | None) -> Iterator[Bar | None]:
    """A bar until the end of the block; None if `progress` is False."""
    if progress is False:
        yield None
        return
    made = Bar()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def stages(progress: bool | Stages | None) -> Iterator[Stages]:
    """What receives the progress of stages: the caller's function, or a bar."""
    if callable(progress):
        yield progress
        return
    with bar(progress) as made:
        yield made.stage if made is not None else _silent


@contextmanager
def events(progress: bool | Events | None) -> Iterator[Events]:
    """What receives the events of a training: the caller's function, or a bar."""
    if callable(progress):
        yield progress
        return
    with bar(progress) as made:
        yield made.event if made is not None else lambda _: None


def _silent(stage: str, done: float, total: float | None) -> None:
    """Show nothing."""


class _Html:
    """HTML for a notebook's cell."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_html_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return ""


def _notebook_cell() -> Any:
    """A place in the output of a notebook's cell that can be written anew; None outside of a notebook's kernel."""
    shell = sys.modules.get("IPython")
    kernel = shell.get_ipython() if shell is not None else None
    if kernel is None or not hasattr(kernel, "kernel"):
        return None
    from IPython.display import display

    return display(_Html(""), display_id=True)
