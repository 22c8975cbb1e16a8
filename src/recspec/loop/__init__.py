"""The loop: events that a running server takes, what was shown, and what both say of the models."""

from recspec.loop.events import Event, ReadEvents, Refusal, read_events
from recspec.loop.exploration import Exploration, explore, generator, list_chances, slot_chances
from recspec.loop.forgetting import Forgotten, forget
from recspec.loop.histories import Histories
from recspec.loop.journal import Exposure, Journal, Outcome, is_sqlite, now_us
from recspec.loop.policy_evaluation import JournalSettings, evaluate_journal
from recspec.loop.writer import JournalWriter, RemoteWriter, Writer, store_rows

__all__ = [
    "Event", "Exploration", "Exposure", "Forgotten", "Histories", "Journal", "JournalSettings", "JournalWriter",
    "Outcome", "ReadEvents", "Refusal", "RemoteWriter", "Writer", "evaluate_journal", "explore", "forget",
    "generator", "is_sqlite", "list_chances", "now_us", "read_events", "slot_chances", "store_rows",
]  # fmt: skip
