"""What a server counts and measures, in one place, and its text in the Prometheus exposition format (0.0.4).

Everything is written on the event loop's thread, so nothing is locked. The text is simple enough to write by hand;
prometheus_client would bring a global registry, and collectors that start at import.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]

NO_MODEL = "-"
"""Stands for the model of a request that asked none, or none that is served: names come from the server alone."""

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0, 65536.0)

COUNTERS: Mapping[str, str] = {
    "recspec_requests_total": "Requests answered, by protocol, route, model (- for none) and status.",
    "recspec_rows_total": "Rows scored through the Open Inference Protocol, by model and version.",
    "recspec_batches_total": "Batches computed for the Open Inference Protocol, by model and version.",
    "recspec_rejected_total": "Requests refused or given up, by model and reason (queue, time, stuck).",
    "recspec_loads_total": "Models loaded, reloaded or refused, by model and outcome.",
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "recspec_request_seconds": ("Time from a request's head to its answer, by protocol and route.", SECONDS),
    "recspec_queue_seconds": ("Time a request waited for its batch, by model.", SECONDS),
    "recspec_compute_seconds": ("Time a batch was computed, by model.", SECONDS),
    "recspec_batch_rows": ("Rows of a computed batch, by model.", ROWS),
}
GAUGES: Mapping[str, str] = {
    "recspec_queued_requests": "Requests that wait for a batch, by model and version.",
    "recspec_models": "Versions of models that are loaded.",
    "recspec_held_bytes": "Bytes of request bodies in memory.",
}


@dataclass
class _Histogram:
    counts: list[int]
    total: float = 0.0


@dataclass
class Telemetry:
    """Counters, histograms and gauges of one server."""

    _counters: dict[tuple[str, Labels], float] = field(default_factory=dict)
    _histograms: dict[tuple[str, Labels], _Histogram] = field(default_factory=dict)
    _gauges: dict[str, Callable[[], Mapping[Labels, float]]] = field(default_factory=dict)

    def count(self, name: str, by: float = 1, /, **labels: str) -> None:
        """Add to a counter of `COUNTERS`."""
        assert name in COUNTERS, name
        key = (name, tuple(labels.items()))
        self._counters[key] = self._counters.get(key, 0) + by

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Add a value to a histogram of `HISTOGRAMS`."""
        bounds = HISTOGRAMS[name][1]
        key = (name, tuple(labels.items()))
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = _Histogram([0] * (len(bounds) + 1))
        found.counts[bisect_left(bounds, value)] += 1
        found.total += value

    def gauge(self, name: str, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Ask `read` for a gauge of `GAUGES` whenever the text is made."""
        assert name in GAUGES, name
        self._gauges[name] = read

    def value(self, name: str, /, **labels: str) -> float:
        """A counter, or how many values a histogram holds, summed over the labels that are not given."""
        wanted = set(labels.items())
        counted = [count for (each, has), count in self._counters.items() if each == name and wanted <= set(has)]
        held = [sum(h.counts) for (each, has), h in self._histograms.items() if each == name and wanted <= set(has)]
        return sum(counted) + sum(held)

    def text(self) -> str:
        """Everything, for `GET /metrics` (content type `text/plain; version=0.0.4`)."""
        lines: list[str] = []
        for name, about in COUNTERS.items():
            lines += _family(name, "counter", about, self._of(name))
        for name, about in GAUGES.items():
            lines += _family(name, "gauge", about, self._gauges[name]() if name in self._gauges else {})
        for name, (about, bounds) in HISTOGRAMS.items():
            found = [(labels, each) for (owner, labels), each in self._histograms.items() if owner == name]
            lines += [f"# HELP {name} {about}", f"# TYPE {name} histogram"]
            for labels, each in found:
                lines += _histogram(name, labels, each, bounds)
        return "\n".join(lines) + "\n"

    def _of(self, name: str) -> dict[Labels, float]:
        return {labels: value for (owner, labels), value in self._counters.items() if owner == name}


def _family(name: str, kind: str, about: str, values: Mapping[Labels, float]) -> list[str]:
    told = [f"{name}{_labels(labels)} {value:.17g}" for labels, value in values.items()]
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *told]


def _histogram(name: str, labels: Labels, found: _Histogram, bounds: tuple[float, ...]) -> list[str]:
    lines, total = [], 0
    for bound, count in zip((*(f"{each:g}" for each in bounds), "+Inf"), found.counts, strict=True):
        total += count
        lines.append(f"{name}_bucket{_labels((*labels, ('le', bound)))} {total}")
    return [*lines, f"{name}_sum{_labels(labels)} {found.total:.9g}", f"{name}_count{_labels(labels)} {total}"]


def _labels(labels: Labels) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels) + "}" if labels else ""
