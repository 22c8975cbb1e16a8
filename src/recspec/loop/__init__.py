"""The loop: events that a running server takes, what was shown, and what both say of the models."""

from recspec.loop.events import Event, ReadEvents, Refusal, read_events
from recspec.loop.journal import Exposure, Journal, now_us

__all__ = [
    "Event",
    "Exposure",
    "Journal",
    "ReadEvents",
    "Refusal",
    "now_us",
    "read_events",
]
