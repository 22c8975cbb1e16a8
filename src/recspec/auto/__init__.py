"""The best model for a dataset within a time."""

from recspec.auto.candidates import main_reason
from recspec.auto.leaderboard import Leaderboard
from recspec.auto.search import AutoSearch
from recspec.auto.state import State

__all__ = ["AutoSearch", "Leaderboard", "State", "main_reason"]
