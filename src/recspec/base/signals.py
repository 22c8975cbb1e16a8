"""Signals that ask a process to stop, noticed in time also while a library computes.

Python calls a handler between two of its own instructions, and one call of a linear-algebra library may take minutes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from recspec.base.errors import Interrupted
from recspec.base.machine import stop_signals

Handler = Callable[[int, FrameType | None], None]


@dataclass(frozen=True)
class Noticing:
    """A handler that lets others see that it ran."""

    handler: Handler
    noticed: threading.Event = field(default_factory=threading.Event)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noticed.set()
        self.handler(number, frame)


@contextmanager
def handled(handler: Handler, signals: Sequence[signal.Signals] | None = None) -> Iterator[threading.Event]:
    """Call `handler` at each signal to stop, or of `signals`, in the main thread; in others nothing is changed.

    Gives the event that is set once a handler has run, this one or one within the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield threading.Event()
        return
    numbers = stop_signals() if signals is None else signals
    outer = signal.getsignal(signal.SIGTERM)
    own = Noticing(handler, outer.noticed) if isinstance(outer, Noticing) else Noticing(handler)
    before = {number: signal.signal(number, own) for number in numbers}
    try:
        yield own.noticed
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def stopping_at_once(message: str, *, patience: float = 0.0) -> Iterator[None]:
    """Let a signal to stop end the block with `Interrupted`, because it has no place to stop and go on from.

    The block gets `patience` seconds to end by itself. The handler that was there is called first. Without one of
    Python's, as in other threads, nothing is changed.
    """
    outer = {number: signal.getsignal(number) for number in stop_signals()}
    ours = {number: each for number, each in outer.items() if callable(each)}
    if threading.current_thread() is not threading.main_thread() or signal.SIGTERM not in ours:
        yield
        return

    def end(*_: object) -> None:
        raise KeyboardInterrupt  # no handler of other errors keeps it

    def stop(number: int, frame: FrameType | None) -> None:
        ours[signal.Signals(number)](number, frame)
        if not patience:
            end()
        signal.setitimer(signal.ITIMER_REAL, patience)

    handlers: dict[signal.Signals, Handler] = {**dict.fromkeys(ours, stop), signal.SIGALRM: end}
    before = {number: signal.signal(number, each) for number, each in handlers.items()}
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, each in before.items():
            signal.signal(number, each)
