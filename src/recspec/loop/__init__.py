"""The loop: events that a running server takes, what was shown, and what both say of the models."""

from recspec.loop.events import Event, ReadEvents, Refusal, read_events
from recspec.loop.forgetting import Forgotten, forget
from recspec.loop.journal import REFUSALS, Exposure, Journal, Outcome, is_sqlite, now_us
from recspec.loop.journal_files import ImportedEvents, export_days, import_events
from recspec.loop.upkeep import JournalSummary, prune_journal, summarize, verify_journal
from recspec.loop.writer import JournalWriter, RemoteWriter, Writer, store_rows

__all__ = [
    "REFUSALS", "Event", "Exposure", "Forgotten", "ImportedEvents", "Journal", "JournalSummary", "JournalWriter",
    "Outcome", "ReadEvents", "Refusal", "RemoteWriter", "Writer", "export_days", "forget", "import_events", "is_sqlite",
    "now_us", "prune_journal", "read_events", "store_rows", "summarize", "verify_journal",
]  # fmt: skip
