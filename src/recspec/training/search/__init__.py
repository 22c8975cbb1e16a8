"""The best model for a dataset within a time."""

from recspec.training.search.auto import AutoSearch
from recspec.training.search.candidates import by_reason, main_reason
from recspec.training.search.search_space import describe, parse_space, sections_of
from recspec.training.search.state import Leaderboard, State
from recspec.training.search.study import Found
from recspec.training.search.tune import Tuning
