"""The loop: events that a running server takes, what was shown, and what both say of the models."""

from recspec.loop.events import Event, ReadEvents, Refusal, read_events
from recspec.loop.histories import Histories
from recspec.loop.journal import Exposure, Journal, Outcome, is_sqlite, now_us
from recspec.loop.writer import JournalWriter, RemoteWriter, Writer, store_rows
from recspec.loop.exploration import Exploration, explore, generator, list_chances, slot_chances

__all__ = [
    "Event",
    "Exploration",
    "Exposure",
    "Histories",
    "Journal",
    "JournalWriter",
    "Outcome",
    "ReadEvents",
    "Refusal",
    "RemoteWriter",
    "Writer",
    "is_sqlite",
    "now_us",
    "read_events",
    "store_rows",
    "explore",
    "generator",
    "list_chances",
    "now_us",
    "read_events",
    "slot_chances",
]
