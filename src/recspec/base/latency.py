"""Percentiles of call times, without the first calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Latency:
    """Milliseconds of a call."""

    batch_size: int
    calls: int
    p50: float
    p90: float
    p95: float
    p99: float
    mean: float

    @property
    def rows_per_second(self) -> float:
        """Throughput of one caller, from the mean."""
        return 1000 * self.batch_size / self.mean

    def to_dict(self) -> dict[str, object]:
        """The figures, rounded to microseconds and rows."""
        figures = {f"p{part}_ms": round(getattr(self, f"p{part}"), 3) for part in PERCENTILES}
        figures |= {"mean_ms": round(self.mean, 3), "rows_per_second": round(self.rows_per_second)}
        figures["rows_per_second_at_p50"] = round(1000 * self.batch_size / self.p50)
        return {"batch_size": self.batch_size, **figures, "calls": self.calls}


def measure(
    call: Callable[[], object], batch_size: int, *, seconds: float, warmup: int = 10, at_least: int = 20
) -> Latency:
    """Time a call for some seconds, and `at_least` so many times, after `warmup` calls.

    A call that takes longer than a tenth of `seconds` has one warm-up call and is timed three times.
    """
    first = _timed(call)
    if first > seconds / 10:
        warmup, at_least = 1, 3
    for _ in range(warmup):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < at_least or time.perf_counter() < end:
        times.append(_timed(call))
    return of_times(times, batch_size)


def of_times(seconds: list[float], batch_size: int) -> Latency:
    """Percentiles of measured seconds, by linear interpolation."""
    milliseconds = 1000 * np.array(seconds)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(milliseconds, PERCENTILES))
    return Latency(batch_size, len(seconds), p50, p90, p95, p99, float(milliseconds.mean()))


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
