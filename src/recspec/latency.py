"""How long calls take: percentiles over many of them, the first ones left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Latency:
    """Milliseconds of a call, and rows a second."""

    batch_size: int
    calls: int
    p50: float
    p90: float
    p95: float
    p99: float
    mean: float

    @property
    def rows_per_second(self) -> float:
        """Throughput of one caller."""
        return 1000 * self.batch_size / self.mean

    def to_dict(self) -> dict[str, object]:
        """Rounded to a microsecond and a row."""
        figures = {f"p{part}_ms": round(getattr(self, f"p{part}"), 3) for part in PERCENTILES}
        return {
            "batch_size": self.batch_size,
            **figures,
            "mean_ms": round(self.mean, 3),
            "rows_per_second": round(self.rows_per_second),
            "calls": self.calls,
        }


def measure(
    call: Callable[[], object], batch_size: int, *, seconds: float, warmup: int = 10, at_least: int = 20
) -> Latency:
    """Time a call over and over for some seconds, and `at_least` so many times; `warmup` calls come first.

    A call longer than a tenth of `seconds` is warmed up once and made three times.
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
    """Percentiles of measured seconds; linear between two of them."""
    milliseconds = 1000 * np.array(seconds)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(milliseconds, PERCENTILES))
    return Latency(batch_size, len(seconds), p50, p90, p95, p99, float(milliseconds.mean()))


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
