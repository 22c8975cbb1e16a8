"""The loop: events that a running server takes, what was shown, and what both say of the models."""

from recspec.loop.events import Event, ReadEvents, Refusal, read_events
from recspec.loop.forgetting import Forgotten, forget
from recspec.loop.journal import Exposure, Journal, now_us
from recspec.loop.updates import JournalSettings, Outcome, Updater

__all__ = [
    "Event", "Exposure", "Forgotten", "Journal", "JournalSettings", "Outcome", "ReadEvents", "Refusal", "Updater",
    "forget", "now_us", "read_events",
]  # fmt: skip
