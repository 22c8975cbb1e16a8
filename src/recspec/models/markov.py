"""Markov: items that followed the user's recent items in the events of all users.

With e_s the event at place s of a user's list, oldest first, the fit counts each pair of events within a window:

    count(i, j) = sum over users, over s < t <= s + window with e_s = i, e_t = j, of decay^(t - s - 1)
    weight(i, j) = count(i, j) / (events(i)^source events(j)^target),  kept for the k largest of each i
    score(u, j) = sum over the user's items i of recency^age(i) weight(i, j)

Items that follow none of the user's items have the score 0.

Shapes: U users; N items; T events; k successors; B rows; R requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field
from torch import Tensor

from recspec.feature_spec import FeatureSpec
from recspec.models.interactions import Interactions, UserEvents
from recspec.models.item_model import Grid, KnownItemsModel, Recency
from recspec.models.known_items import Successors, largest_entries
from recspec.models.layers import RowsHeld

if TYPE_CHECKING:
    from scipy.sparse import csr_array


BLOCK = 1 << 22
"""Pairs of events counted at once: about 100 MB."""


class MarkovSettings(Recency):
    """Settings of Markov."""

    recency: float = Field(
        0.6, gt=0, le=1, description="weight of a user's item relative to the next newer one; 1 weighs all alike"
    )
    window: int = Field(10, ge=1, le=1000, description="most places between an event and one that counts as its next")
    decay: float = Field(0.8, gt=0, le=1, description="weight of a pair of events, relative to one a place closer")
    source: float = Field(
        0.5, ge=0, le=2, description="power of the earlier item's number of events that divides the counts"
    )
    target: float = Field(
        0.1, ge=0, le=2, description="power of the later item's number of events that divides the counts"
    )
    k: int = Field(500, ge=1, description="items kept that follow an item, those of the largest weights")


class Markov(KnownItemsModel):
    """Markov: ranks items by how often they followed the user's recent items."""

    name = "markov"
    Settings = MarkovSettings
    settings: MarkovSettings
    at_scoring = MappingProxyType({"recency": (0.8, 0.4)})
    pair_cost = 10  # a binary search for each of the user's items
    space = MappingProxyType(
        {
            "settings.recency": "0.3..1.0",
            "settings.window": [1, 2, 3, 5, 10, 20],
            "settings.decay": "0.5..1.0",
            "settings.source": "0.0..1.0",
            "settings.target": "0.0..1.0",
        }
    )

    def __init__(self, spec: FeatureSpec, settings: MarkovSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.successors = Successors(self.num_items, settings.k)

    @classmethod
    def grid(cls, interactions: Interactions) -> Grid:  # noqa: ARG003
        return [{"source": source, "decay": decay} for source, decay in product((0.5, 0.3), (0.8, 0.9))]

    def most_bytes(self) -> int:
        return super().most_bytes() + self.successors.most_bytes

    def _fit(self, interactions: Interactions, seed: int) -> None:  # noqa: ARG002
        self.successors.set(next_counts(interactions.events, self.num_items, self.settings))
        self.know(interactions)

    def _pairs(self, users: Tensor, items: Tensor) -> Tensor:
        return self.successors.score_pairs(self.known, users, items)

    def score_users(self, users: Tensor) -> Tensor:
        return self.successors.score_users(self.known, users)


def next_counts(events: UserEvents, num_items: int, settings: MarkovSettings) -> Iterator[csr_array]:
    """The weights (N, N) of pairs of items in blocks of rows: at most k in a row."""
    from scipy import sparse

    items, weights = events.items, events.weights
    sizes = np.maximum(np.bincount(items, weights, minlength=num_items), 1e-9)
    left = np.repeat(events.offsets[1:], events.lengths) - 1 - np.arange(len(items))  # later events of the user
    order = np.argsort(items, kind="stable")
    counts = np.bincount(items, minlength=num_items)
    first, place = 0, 0
    step = max(1, BLOCK // settings.window)
    ends = np.cumsum(counts)
    while first < num_items:
        last = max(first + 1, int(np.searchsorted(ends, place + step, side="right")))
        sources = order[place : ends[last - 1]]
        found = sparse.csr_array((last - first, num_items), dtype=np.float32)
        for distance in range(1, settings.window + 1):
            sources = sources[left[sources] >= distance]
            if not len(sources):
                break
            values = np.full(len(sources), settings.decay ** (distance - 1), np.float32)
            if weights is not None:
                values *= weights[sources] * weights[sources + distance]
            rows, columns = items[sources] - first, items[sources + distance]
            found = found + sparse.csr_array((values, (rows, columns)), shape=found.shape)
        # weight(i, j) = count(i, j) / (events(i)^source events(j)^target): by rows, then by columns.
        found.data /= np.repeat(sizes[first:last] ** settings.source, np.diff(found.indptr))
        found.data /= sizes[found.indices] ** settings.target
        yield largest_entries(found, settings.k)
        first, place = last, int(ends[last - 1])
