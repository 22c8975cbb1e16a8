"""Facts of a dataset that rules for default settings look at, and what such a rule gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Task = Literal["clicks", "interactions"]
"""`clicks`: rows have labels of their own. `interactions`: train rows are positives, and negatives are drawn."""

Proposals = Mapping[str, tuple[object, str]]
"""Setting, named as in `--set` (`dropout`, `train.learning_rate`), -> value and reason."""


@dataclass(frozen=True)
class IdFacts:
    """A categorical feature."""

    num_ids: int
    """Rows of its embedding table."""
    rows_per_id: float
    """Mean number of training rows, or of events in lists, that hold an id."""
    is_list: bool = False


@dataclass(frozen=True)
class PreparedNegatives:
    """The rows with drawn items that the preparation put beside train's interactions."""

    number: int
    """For each interaction."""
    by_popularity: bool
    """Drawn in proportion to an item's interactions; otherwise evenly."""
    reject_seen: bool
    """Never an item that the user acted on."""


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Sizes and densities of a prepared dataset."""

    task: Task
    rows: int
    """Training rows as stored."""
    samples: int
    """Samples of an epoch: the rows and the negatives drawn for them."""
    positive_share: float
    """Share of positives among the samples."""
    ids: Mapping[str, IdFacts] = field(default_factory=dict)
    """Categorical features in the roles user, item, context and history."""
    numbers: int = 0
    """Number of numerical features in these roles, each number of a vector counted."""
    users: int = 0
    """Ids of users; 0 without users."""
    items: int = 0
    """Ids of items; 0 without items."""
    history: float = 0.0
    """Mean number of events in a row's history; 0 without histories."""
    longest_history: int = 0
    prepared_negatives: PreparedNegatives | None = None
    """None without any, and if it is not known how they were drawn."""
    valid_rows: int = 0
    """Rows of the split valid; 0 without one."""
    splits: tuple[str, ...] = ()
    candidates: int = 1
    """Rows beside each other on valid that are ranked: a positive and its prepared negatives."""
    negatives: int = 0
    """Negatives that are drawn for each positive unless a setting says how many."""
    list_metric: str = "full/ndcg@10"
    """PROTOCOL/METRIC by which models that rank all items are chosen."""
    device: str = "cpu"

    @property
    def density(self) -> float:
        """Training rows per pair of user and item; 0 without users or items."""
        return self.rows / (self.users * self.items) if self.users and self.items else 0.0
