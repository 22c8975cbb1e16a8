"""Prometheus metrics of a server: names, labels and values, in a registry of their own."""

from __future__ import annotations

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from recspec.serving.server_metrics import ServerMetrics

NAMES = {
    "recspec_requests_total",
    "recspec_rows_total",
    "recspec_batches_total",
    "recspec_rejected_total",
    "recspec_loads_total",
    "recspec_queued_requests",
    "recspec_models",
    "recspec_held_bytes",
    "recspec_request_seconds",
    "recspec_queue_seconds",
    "recspec_compute_seconds",
    "recspec_batch_rows",
    "recspec_drift_calibration_ratio",
    "recspec_drift_events",
    "recspec_drift_flagged",
    "recspec_drift_ks_distance",
    "recspec_drift_psi",
    "recspec_drift_psi_limit",
    "recspec_drift_share_ratio",
    "recspec_drift_timestamp_seconds",
    "recspec_drift_unknown_ratio",
    "recspec_empty_lists_total",
    "recspec_event_times_total",
    "recspec_events_total",
    "recspec_exposures_total",
    "recspec_journal_commit_seconds",
    "recspec_journal_group_rows",
    "recspec_journal_waiting",
    "recspec_newest_event_timestamp_seconds",
    "recspec_recommend_seconds",
    "recspec_recommendations_total",
    "recspec_short_lists_total",
    "recspec_unknown_users_total",
    "recspec_variant_errors_total",
}


def test_every_metric_is_described_before_anything_is_counted() -> None:
    lines = ServerMetrics().text().decode().splitlines()
    assert {line.split()[2] for line in lines if line.startswith("# HELP ")} == NAMES
    assert {line.split()[2] for line in lines if line.startswith("# TYPE ")} == NAMES


def test_labels_are_quoted_and_gauges_are_read_at_each_scrape() -> None:
    metrics = ServerMetrics()
    name = 'a"b\\c\nd'
    metrics.requests.labels("http", "infer", name, "200").inc()
    metrics.models.set_function(lambda: 2)
    metrics.queued = lambda: [("m", "1", 5)]
    text = metrics.text().decode()
    assert '{model="a\\"b\\\\c\\nd",protocol="http",route="infer",status="200"} 1.0\n' in text
    assert "# TYPE recspec_models gauge\nrecspec_models 2.0\n" in text
    assert 'recspec_queued_requests{model="m",version="1"} 5.0\n' in text
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    assert [each.labels["model"] for each in samples if each.name == "recspec_requests_total"] == [name]
    assert not [each for each in samples if each.name.endswith("_created")]


def test_two_servers_of_a_process_count_apart() -> None:
    first, second = ServerMetrics(), ServerMetrics()
    first.rows.labels("m").inc(3)
    assert first.registry.get_sample_value("recspec_rows_total", {"model": "m"}) == 3
    assert second.registry.get_sample_value("recspec_rows_total", {"model": "m"}) is None
    assert not [family for family in REGISTRY.collect() if family.name.startswith("recspec")]
