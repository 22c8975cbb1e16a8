"""The loop: events that a running server takes, what was shown, and what both say of the models."""

from recspec.loop.assignment import Experiment, Guardrails, Metric, Variant, assign, load_experiments, named
from recspec.loop.events import Event, ReadEvents, Refusal, read_events
from recspec.loop.experiment_report import Effect, ExperimentReport, GuardrailResult, MetricResult, analyse
from recspec.loop.forgetting import Forgotten, forget
from recspec.loop.histories import Histories
from recspec.loop.interleaving import INTERLEAVED, TEAMS, interleave
from recspec.loop.journal import Exposure, Journal, Outcome, is_sqlite, now_us
from recspec.loop.outcomes import ERROR, MILLISECONDS, read_outcomes
from recspec.loop.writer import JournalWriter, RemoteWriter, Writer, store_rows

__all__ = [
    "ERROR", "INTERLEAVED", "MILLISECONDS", "TEAMS", "Effect", "Event", "Experiment", "ExperimentReport", "Exposure",
    "Forgotten", "GuardrailResult", "Guardrails", "Histories", "Journal", "JournalWriter", "Metric", "MetricResult",
    "Outcome", "ReadEvents", "Refusal", "RemoteWriter", "Variant", "Writer", "analyse", "assign", "forget",
    "interleave", "is_sqlite", "load_experiments", "named", "now_us", "read_events", "read_outcomes", "store_rows",
]  # fmt: skip
