"""How long a call takes, and an operation on this machine: what work will cost, before it is begun."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SIDE = 768
"""Rows of the matrices whose product tells the machine's speed: some 50 ms."""
TIMED = 0.5
"""Seconds after which timing ends."""


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of a call, the fewest of a few."""
    times: list[float] = []
    while sum(times) < TIMED and len(times) < 5:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def seconds_of_an_operation() -> float:
    """Seconds of one of many fp64 operations on one thread, from the product of two matrices."""
    threads, square = torch.get_num_threads(), torch.ones(SIDE, SIDE, dtype=torch.float64)
    torch.set_num_threads(1)
    try:
        return seconds_of(lambda: square @ square) / (2 * SIDE**3)
    finally:
        torch.set_num_threads(threads)
