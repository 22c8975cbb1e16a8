"""Worker processes of a search: each runs trials of the same search until none is left to begin."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import SimpleQueue
from types import FrameType
from typing import Any

import torch

from recspec.errors import RecspecError
from recspec.signals import handled

END_SECONDS = 8.0
"""Time for workers to write their checkpoints."""


@dataclass(frozen=True)
class Workers:
    """Processes that work beside this one."""

    processes: tuple[SpawnProcess, ...] = ()
    errors: SimpleQueue[str] | None = None
    """Errors of the user that ended a process."""
    found: list[str] = field(default_factory=list)

    @property
    def work(self) -> bool:
        """Whether some process still works."""
        return any(process.is_alive() for process in self.processes)

    def problems(self) -> list[str]:
        """How each process ended that did not end well."""
        while self.errors is not None and not self.errors.empty():
            self.found.append(self.errors.get())
        told = list(self.found)
        for process in self.processes:
            if status := process.exitcode:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                told.append(f"worker process {process.pid} {how}; the others go on with its trial")
        return told


@contextmanager
def workers(number: int, work: Callable[..., object], given: Mapping[str, Any]) -> Iterator[Workers]:
    """Processes that call `work(stop_requested=..., **given)`, until the end of the block.

    They share the threads of this one, unless OMP_NUM_THREADS gives their number.
    """
    if number == 0:
        yield Workers()
        return
    before = torch.get_num_threads()
    threads = before if "OMP_NUM_THREADS" in os.environ else max(1, before // (1 + number))
    spawned = multiprocessing.get_context("spawn")
    errors: SimpleQueue[str] = spawned.SimpleQueue()
    arguments = (work, given, os.getpid(), threads, errors)
    found = Workers(tuple(spawned.Process(target=_run, args=arguments, daemon=True) for _ in range(number)), errors)
    torch.set_num_threads(threads)
    try:
        for process in found.processes:
            process.start()
        yield found
    finally:
        torch.set_num_threads(before)
        for process in found.processes:
            if process.is_alive():
                process.terminate()  # it stops at a checkpoint
        end = time.monotonic() + END_SECONDS
        for process in found.processes:
            if process.pid is not None:
                process.join(max(0.0, end - time.monotonic()))
                process.kill()  # it computes without a pause; its trial goes on from the last checkpoint
                process.join()


def _run(
    work: Callable[..., object], given: Mapping[str, Any], parent: int, threads: int, errors: SimpleQueue[str]
) -> None:
    """What a worker does; it also stops when the process that started it has died."""
    stopped = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    torch.set_num_threads(threads)
    try:
        with handled(stop):
            work(stop_requested=lambda: stopped or os.getppid() != parent, **given)
    except RecspecError as error:
        if not stopped:
            errors.put(f"worker process {os.getpid()} ended: {error}")
