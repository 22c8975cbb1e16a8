"""The loop: events that a running server takes, what was shown, and what both say of the models."""

from recspec.loop.events import Event, ReadEvents, Refusal, read_events
from recspec.loop.exploration import Exploration, explore, generator, list_chances, slot_chances
from recspec.loop.journal import Exposure, Journal, now_us

__all__ = [
    "Event",
    "Exploration",
    "Exposure",
    "Journal",
    "ReadEvents",
    "Refusal",
    "explore",
    "generator",
    "list_chances",
    "now_us",
    "read_events",
    "slot_chances",
]
