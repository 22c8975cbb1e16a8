"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from recspec.loop import DriftReport

NO_MODEL = "-"
"""Stands for the model of a request without one, or with an unknown one, so that clients can't make up label values."""

OF_EACH = frozenset({"recspec_models", "recspec_newest_event_timestamp_seconds"})
"""Gauges whose largest value over the workers counts; the others add up."""

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)


class JournalMetrics:
    """Counters, gauges and histograms of events and of their writer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"recspec_{name}", text, buckets=buckets, registry=registry)

        text = "Events received, by outcome: accepted, duplicate or refused."
        events = Counter("recspec_events_total", text, ["outcome"], registry=registry)
        text = "Accepted events whose time was more than 5 minutes ahead (clamped) or more than a day ago (late)."
        times = Counter("recspec_event_times_total", text, ["time"], registry=registry)
        self._counters = {name: events.labels(name) for name in ("accepted", "duplicate", "refused")}
        self._counters |= {name: times.labels(name) for name in ("clamped", "late")}
        text = "Time of receipt of the newest event that this server accepted or found, in seconds since 1970."
        self.newest = Gauge("recspec_newest_event_timestamp_seconds", text, registry=registry)
        text = "Events and answers that wait to be stored."
        self.waiting = Gauge("recspec_journal_waiting", text, registry=registry)
        self.group_rows = histogram("journal_group_rows", "Events and answers of a transaction.", ROWS)
        self.commit_seconds = histogram("journal_commit_seconds", "Time to store a transaction.", SECONDS)

    def count_events(self, counts: Mapping[str, Any], received_at: int) -> None:
        """Count the events of a request that was received at a time in microseconds since 1970."""
        for name, counter in self._counters.items():
            if counts[name]:
                counter.inc(counts[name])
        if counts["accepted"]:
            self.newest.set(received_at / 1e6)

    def count_group(self, rows: int, seconds: float) -> None:
        """Count a transaction."""
        self.group_rows.observe(rows)
        self.commit_seconds.observe(seconds)


class ShownMetrics:
    """Counters and histograms of recommended lists, by model and variant (- for none)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"recspec_{name}", text, ["model", "variant", *labels], registry=registry)

        text = "Lists recommended, by what they were answered by; popularity and basket_vectors are fallbacks."
        self._lists = counter("recommendations_total", text, "answered_by")
        self._flagged = {
            "unknown": counter("unknown_users_total", "Lists for users whom the model does not know."),
            "short": counter("short_lists_total", "Lists with fewer items than the request wanted, but some."),
            "empty": counter("empty_lists_total", "Lists without an item."),
            "error": counter("variant_errors_total", "Lists by another model because the variant's failed."),
        }
        self.exposures = counter("exposures_total", "Lists that the journal logged or lost.", "outcome")
        text = "Time from a request for a list to its answer, by variant."
        self._seconds = Histogram("recspec_recommend_seconds", text, ["variant"], buckets=SECONDS, registry=registry)

    def count(self, model: str, variant: str, answered_by: str, flags: Iterable[str], seconds: float) -> None:
        """Count a list; `flags` are of unknown, short, empty and error."""
        self._lists.labels(model, variant, answered_by).inc()
        for each in flags:
            self._flagged[each].labels(model, variant).inc()
        self._seconds.labels(variant).observe(seconds)


class DriftMetrics(Collector):
    """Gauges of the last measurement of drift, by model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reports: Mapping[str, DriftReport] = {}
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Every gauge, without values before the first measurement."""
        of_each = {
            "psi": ("Population stability index of a distribution against the training data.", "psi"),
            "psi_limit": ("99 % quantile of the index without drift.", "limit"),
            "flagged": ("1 if a distribution, or the calibration, has drifted.", "flagged"),
            "ks_distance": ("Largest difference of the distribution functions of a number.", "distance"),
            "unknown_ratio": ("Share of new values that the training data does not hold.", "unknown"),
        }
        for name, (text, attribute) in of_each.items():
            gauge = GaugeMetricFamily(f"recspec_drift_{name}", text, labels=("model", "distribution"))
            for model, report in self.reports.items():
                for each in report.shifts:
                    value = getattr(each, attribute)
                    if value is not None:
                        gauge.add_metric((model, each.name), float(value))
                if name == "flagged" and report.calibration is not None:
                    gauge.add_metric((model, "calibration"), float(report.calibration.flagged))
            yield gauge
        text = "Share of events by unknown users, of events on new items, and of shown items that are new."
        shares = GaugeMetricFamily("recspec_drift_share_ratio", text, labels=("model", "share"))
        text = "Mean predicted chance over the share of shown items that were acted on; 1 is calibrated."
        calibration = GaugeMetricFamily("recspec_drift_calibration_ratio", text, labels=("model",))
        events = GaugeMetricFamily("recspec_drift_events", "Events that were compared.", labels=("model",))
        text = "Time of the measurement, in seconds since 1970."
        measured = GaugeMetricFamily("recspec_drift_timestamp_seconds", text, labels=("model",))
        for model, report in self.reports.items():
            for share in report.shares:
                shares.add_metric((model, share.name), share.value)
            if report.calibration is not None:
                calibration.add_metric((model,), report.calibration.ratio)
            events.add_metric((model,), report.events)
            measured.add_metric((model,), report.until / 1e6)
        yield from (shares, calibration, events, measured)


class ServerMetrics(Collector):
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"recspec_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(f"recspec_{name}", text, labels, buckets=buckets, registry=self.registry)

        text = "Requests answered, by protocol, route, model (- for none) and status."
        self.requests = counter("requests_total", text, "protocol", "route", "model", "status")
        self.rows = counter("rows_total", "Rows scored through the Open Inference Protocol, by model.", "model")
        text = "Batches computed for the Open Inference Protocol, by model."
        self.batches = counter("batches_total", text, "model")
        text = "Requests refused or given up, by model and reason (queue, time, stuck)."
        self.rejected = counter("rejected_total", text, "model", "reason")
        text = "Models loaded, reloaded, unloaded or refused, by model and outcome."
        self.loads = counter("loads_total", text, "model", "outcome")
        self.models = Gauge("recspec_models", "Versions of models that are loaded.", registry=self.registry)
        self.held_bytes = Gauge("recspec_held_bytes", "Bytes of request bodies in memory.", registry=self.registry)
        text = "Time from a request's head to its answer, by protocol and route."
        self.request_seconds = histogram("request_seconds", text, "protocol", "route")
        self.queue_seconds = histogram("queue_seconds", "Time a request waited for its batch, by model.", "model")
        self.compute_seconds = histogram("compute_seconds", "Time to compute a batch, by model.", "model")
        self.batch_rows = histogram("batch_rows", "Rows of a computed batch, by model.", "model", buckets=ROWS)
        self.journal, self.shown = JournalMetrics(self.registry), ShownMetrics(self.registry)
        self.drift = DriftMetrics(self.registry)
        self._of_requests: dict[tuple[str, str, str, str], tuple[Counter, Histogram]] = {}
        """Finding a metric by its labels takes longer than counting."""
        self.queued: Callable[[], Iterable[tuple[str, str, int]]] = tuple
        """Model, version and number of waiting requests, read at every scrape."""

    def count(self, protocol: str, route: str, model: str, status: str, seconds: float) -> None:
        """Count an answered request."""
        key = protocol, route, model, status
        found = self._of_requests.get(key)
        if found is None:
            found = self.requests.labels(*key), self.request_seconds.labels(protocol, route)
            self._of_requests[key] = found
        found[0].inc()
        found[1].observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Every metric, without the time at which each counter was made."""
        text = "Requests that wait for a batch, by model and version."
        queued = GaugeMetricFamily("recspec_queued_requests", text, labels=("model", "version"))
        for model, version, waiting in self.queued():
            queued.add_metric((model, version), waiting)
        yield queued
        for metric in self.registry.collect():
            metric.samples = [each for each in metric.samples if not each.name.endswith("_created")]
            yield metric

    def text(self) -> bytes:
        """Every metric in Prometheus's text format 0.0.4."""
        return generate_latest(self)


class _Families(Collector):
    """Metrics that were read from text."""

    def __init__(self, kept: Mapping[str, Metric]) -> None:
        self._kept = kept

    def collect(self) -> Iterable[Metric]:
        return self._kept.values()


def summed(texts: Sequence[str]) -> str:
    """The metrics of several workers as one: their sums, and the largest of the gauges in `OF_EACH`."""
    kept, values = dict[str, Metric](), dict[tuple[str, frozenset[tuple[str, str]]], float]()
    for family in (family for text in texts for family in text_string_to_metric_families(text)):
        metric = kept.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            if key not in values:
                metric.samples.append(sample)
                values[key] = sample.value
            elif family.name in OF_EACH:
                values[key] = max(values[key], sample.value)
            else:
                values[key] += sample.value
    for metric in kept.values():
        metric.samples = [
            each._replace(value=values[each.name, frozenset(each.labels.items())]) for each in metric.samples
        ]
    return generate_latest(_Families(kept)).decode()


def without_gauges(text: str) -> str:
    """The counters and histograms, which stay true after their worker has ended."""
    kept = {each.name: each for each in text_string_to_metric_families(text) if each.type != "gauge"}
    return generate_latest(_Families(kept)).decode()
