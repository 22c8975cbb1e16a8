"""Which items each user acted on, and when: the data of models that rank items by a user's events.

Shapes: U users; N items; T events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array


Ids = NDArray[np.integer[Any]]
Scores = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class UserEvents:
    """The events of each user: user u's are `items[offsets[u]:offsets[u + 1]]`, oldest first; an item may repeat."""

    offsets: NDArray[np.int64]  # (U + 1,)
    items: NDArray[np.int32]  # (T,)
    times: NDArray[np.float64] | None = None  # (T,) None if they are not known, or not asked for
    weights: NDArray[np.float32] | None = None  # (T,) None if every event counts 1

    @classmethod
    def from_rows(
        cls,
        users: Ids,
        items: Ids,
        num_users: int,
        times: NDArray[np.float64] | None = None,
        weights: NDArray[np.float32] | None = None,
    ) -> UserEvents:
        """Events from rows of any users; rows of one user are in order of time."""
        order = np.argsort(users, kind="stable")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(users, minlength=num_users))])
        return cls(
            offsets,
            items[order].astype(np.int32),
            None if times is None else times[order],
            None if weights is None else weights[order],
        )

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(U,) number of events of each user."""
        return np.diff(self.offsets)

    @property
    def users(self) -> NDArray[np.int64]:
        """(T,) the user of each event."""
        return np.repeat(np.arange(self.num_users), self.lengths)

    def of(self, users: Ids) -> UserEvents:
        """The events of some users, in this order; a negative id has none."""
        if len(users) == 1:  # as a server asks, in a fifth of the time
            user = int(users[0])
            own = slice(int(self.offsets[user]), int(self.offsets[user + 1])) if user >= 0 else slice(0)
            return UserEvents(
                np.array([0, own.stop - (own.start or 0)], np.int64),
                self.items[own],
                None if self.times is None else self.times[own],
                None if self.weights is None else self.weights[own],
            )
        known = np.maximum(users, 0)
        starts = self.offsets[known]
        lengths = np.where(users < 0, 0, self.offsets[known + 1] - starts)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        times = None if self.times is None else self.times[places]
        return UserEvents(offsets, self.items[places], times, None if self.weights is None else self.weights[places])

    def joined(self, others: UserEvents) -> UserEvents:
        """These events and others of the same users, by time; the others are later at one time, or without times.

        The others have weights and times if these have.
        """
        users = np.concatenate([self.users, others.users])
        times = weights = None
        if self.times is not None:
            ends = self.of_last(self.times)[others.users]
            times = np.concatenate([self.times, ends if others.times is None else others.times])
        if self.weights is not None:
            given = np.ones(len(others.items), np.float32) if others.weights is None else others.weights
            weights = np.concatenate([self.weights, given])
        order = np.lexsort((users,) if times is None else (times, users))
        return UserEvents(
            self.offsets + others.offsets,
            np.concatenate([self.items, others.items])[order],
            None if times is None else times[order],
            None if weights is None else weights[order],
        )

    def of_last(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(U,) the value of each user's last event, of values (T,); 0 for a user without events."""
        return np.where(self.lengths > 0, values[np.maximum(self.offsets[1:] - 1, 0)] if len(values) else 0.0, 0.0)

    def take(self, kept: NDArray[np.bool_]) -> UserEvents:
        """Some of the events (T,), of the same users."""
        if kept.all():
            return self
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])[self.offsets]
        times = None if self.times is None else self.times[kept]
        return UserEvents(offsets, self.items[kept], times, None if self.weights is None else self.weights[kept])

    def without_repeats(self, num_items: int) -> UserEvents:
        """Each user's latest event of each item."""
        keys = self.users * num_items + self.items
        kept = np.zeros(len(keys), dtype=bool)
        kept[len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]] = True
        return self.take(kept)

    def interactions(self, num_items: int) -> Interactions:
        """Which items each user acted on, with these events."""
        found = Interactions.from_pairs(self.users, self.items, num_users=self.num_users, num_items=num_items)
        return replace(found, order=self)


@dataclass(frozen=True, eq=False)
class Interactions:
    """Which items each user acted on: user u's are `items[offsets[u]:offsets[u + 1]]`, ascending, each once.

    One class because every method reads the same pairs.
    """

    offsets: NDArray[np.int64]  # (U + 1,)
    items: NDArray[np.int32]
    num_items: int
    order: UserEvents | None = None
    """The events behind them, if their order was asked for."""
    weights: NDArray[np.float32] | None = None
    """(P,) weight of each interaction; None if all of them count 1. See `weighted`."""
    dislikes: Interactions | None = None
    """Items that users disliked, none of which they acted on; None if none are known."""

    def weighted(self, recency: float = 1.0) -> Interactions:
        """The same interactions, each weighted by its events.

        A weight is the largest one of the pair's events, times `recency` to the power of the item's age: its place
        among the user's distinct items by their latest events, newest first, from 0. Interactions without events
        count as older than all others. Without an order, nothing is weighted.
        """
        if self.order is None or (recency == 1 and self.order.weights is None):
            return self
        latest = self.order.without_repeats(self.num_items)
        lengths, users = latest.lengths, latest.users
        ages = latest.offsets[users + 1] - 1 - np.arange(len(users))
        owners = np.repeat(np.arange(self.num_users), np.diff(self.offsets))
        weights = np.ones(len(self.keys), np.float64)
        age = lengths[owners].copy()
        places, found = self._places(users, latest.items)
        age[places[found]] = ages[found]
        if self.order.weights is not None:
            places, found = self._places(self.order.users, self.order.items)
            largest = np.full(len(weights), -np.inf)
            np.maximum.at(largest, places[found], self.order.weights[found])
            weights = np.where(np.isfinite(largest), largest, 1.0)
        return replace(self, weights=(weights * recency**age).astype(np.float32))

    def with_dislikes(self, weight: float) -> Interactions:
        """The same interactions and the disliked items, which weigh -`weight` times the mean of the user's others."""
        if not weight or self.dislikes is None:
            return self
        own = np.ones(self.num_pairs, np.float32) if self.weights is None else self.weights
        lengths = np.diff(self.offsets)
        sums = np.bincount(np.repeat(np.arange(self.num_users), lengths), own, self.num_users)
        means = np.where(lengths > 0, sums / np.maximum(lengths, 1), 1.0)
        theirs = np.repeat(-weight * means, np.diff(self.dislikes.offsets))
        keys = np.concatenate([self.keys, self.dislikes.keys])
        order = np.argsort(keys, kind="stable")
        weights = np.concatenate([own, theirs]).astype(np.float32)[order]
        items = (keys[order] % self.num_items).astype(np.int32)
        return replace(self, offsets=self.offsets + self.dislikes.offsets, items=items, weights=weights)

    def _places(self, users: Ids, items: Ids) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The place of each pair among the interactions, and whether it is among them."""
        wanted = users.astype(np.int64) * self.num_items + items
        places = np.searchsorted(self.keys, wanted)
        return places, self.contain(users, items)

    @property
    def events(self) -> UserEvents:
        """The events in order of time; by item, each once, if their order is not known."""
        return UserEvents(self.offsets, self.items) if self.order is None else self.order

    @classmethod
    def from_pairs(cls, users: Ids, items: Ids, *, num_users: int, num_items: int) -> Interactions:
        """Interactions from pairs in any order; a repeated pair counts once."""
        keys = users.astype(np.int64) * num_items + items
        keys.sort()
        new = np.ones(len(keys), dtype=bool)
        np.not_equal(keys[1:], keys[:-1], out=new[1:])
        keys = keys[new]
        offsets = np.searchsorted(keys, np.arange(num_users + 1, dtype=np.int64) * num_items)
        return cls(offsets, (keys % num_items).astype(np.int32), num_items)

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.offsets) - 1

    @property
    def num_pairs(self) -> int:
        """Number of interactions."""
        return len(self.items)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """(N,) number of users who acted on each item."""
        return np.bincount(self.items, minlength=self.num_items)

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """`user * num_items + item` of every interaction, ascending."""
        users = np.repeat(np.arange(self.num_users, dtype=np.int64), np.diff(self.offsets))
        return users * self.num_items + self.items

    def contain(self, users: Ids, items: Ids) -> NDArray[np.bool_]:
        """Whether each pair is among the interactions; the arguments broadcast."""
        wanted = users.astype(np.int64) * self.num_items + items
        if not len(self.keys):
            return np.zeros(wanted.shape, dtype=bool)
        found: NDArray[np.bool_] = self.keys.take(np.searchsorted(self.keys, wanted), mode="clip") == wanted
        return found

    def without(self, other: Interactions) -> Interactions:
        """Those that are not among others of the same users and items."""
        users, items = np.divmod(self.keys, self.num_items)
        new = ~other.contain(users, items)
        if new.all():
            return self
        return Interactions.from_pairs(users[new], items[new], num_users=self.num_users, num_items=self.num_items)

    def with_others(self, other: Interactions) -> Interactions:
        """Those that are in either, of the same users and items; without their events."""
        users, items = np.divmod(np.concatenate([self.keys, other.keys]), self.num_items)
        return Interactions.from_pairs(users, items, num_users=self.num_users, num_items=self.num_items)

    def of(self, users: Ids) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Every item of some users: the place of the user in `users`, and the item."""
        starts, lengths = self.offsets[users], self.offsets[users + 1] - self.offsets[users]
        rows = np.repeat(np.arange(len(users)), lengths)
        first = np.cumsum(lengths) - lengths
        return rows, self.items[np.arange(len(rows)) + (starts - first)[rows]]

    @property
    def scale(self) -> float:
        """Square root of the mean number of interactions of an active user or item; 0 without interactions.

        X's singular values grow so, and with them the regularisation that suits: ml-1m, ml-100k and ml-latest-small
        have 10.1, 6.1 and 3.1.
        """
        active = int(np.count_nonzero(np.diff(self.offsets))) + int(np.count_nonzero(self.counts))
        return float(np.sqrt(self.num_pairs / max(1, active)))

    def by_item(self) -> Interactions:
        """The same interactions with users and items exchanged: the users of each item."""
        order = np.argsort(self.items, kind="stable")
        users = np.repeat(np.arange(self.num_users, dtype=np.int32), np.diff(self.offsets))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])
        weights = None if self.weights is None else self.weights[order]
        return Interactions(offsets, users[order], self.num_users, weights=weights)

    def matrix(self) -> csr_array:
        """The weights as a scipy CSR matrix (U, N) in fp32: ones, if nothing is weighted."""
        from scipy import sparse

        weights = np.ones(self.num_pairs, dtype=np.float32) if self.weights is None else self.weights
        # With offsets of 64 bits, scipy would take such indices in all that is computed from it.
        offsets = self.offsets.astype(np.int32) if self.num_pairs < 2**31 else self.offsets
        return sparse.csr_array((weights, self.items, offsets), shape=(self.num_users, self.num_items))
