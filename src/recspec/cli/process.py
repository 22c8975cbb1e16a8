"""The process that runs a command: signals, its end, its rank and the folders that it chooses."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

from recspec.base.machine import stop_signals
from recspec.base.signals import handled

NOTICE_SECONDS = 5.0
"""Time for a handler of a signal to run; Python calls it between two instructions of its own."""
STOPPED = 130
"""Exit status of a command that was stopped."""
FORCED = b"stopped as asked, in the middle of a computation; what was not finished does not count\n"


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: what is half-written is removed, and the status is 130.

    Only the first of them counts, so that a second one does not break the clearing up. Work that stops at a checkpoint
    has handlers of its own (`api.stop_on_signal`).
    """
    usual = (signal.SIG_DFL, signal.default_int_handler)
    numbers = [number for number in stop_signals() if signal.getsignal(number) in usual]
    ended = False

    def end(number: int, _: object) -> None:
        nonlocal ended
        if number == signal.SIGINT or not ended:
            ended = True
            raise KeyboardInterrupt

    with handled(end, numbers) as noticed, _forced(noticed, numbers):
        yield


@contextmanager
def _forced(noticed: threading.Event, numbers: Collection[int]) -> Iterator[None]:
    """End the process if a signal arrives and no handler runs within `NOTICE_SECONDS`, because a library computes.

    Files that were being written have their temporary names then, as after `kill -9`.
    """
    if not numbers or threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        while (number := os.read(reading, 1)[0]) != 0:
            if number in numbers and not noticed.wait(NOTICE_SECONDS):
                os.write(2, FORCED)
                os._exit(STOPPED)

    thread = threading.Thread(target=watch, name="recspec-signals", daemon=True)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # which the kernel's call writes to at once
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)


def end_by_force(why: str) -> None:
    """End the process with status 1, whatever its threads do."""
    logging.getLogger("recspec.serve").error("the server ends by force: %s", why)
    logging.shutdown()
    os._exit(1)


def fresh_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or the first of `name-2`, `name-3`, ... that is not there yet."""
    names = chain([name], map(f"{name}-{{}}".format, count(2)))
    return next(parent / each for each in names if not (parent / each).exists())


def is_first() -> bool:
    """Whether this is the only process, or the first that torchrun started, which shows progress."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"
