"""Negatives drawn when a dataset is prepared; a draw depends on the seed, the user's number and its own alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recspec.data.encoding import mix

Ids = NDArray[np.int64]
Distribution = Literal["uniform", "popularity"]

REDRAWS = 8  # by popularity, of an item that the user has seen, before a uniform draw of an unseen one
POOL = 1 << 26  # most interactions for a pool of items by popularity, 4 bytes each; a binary search is slower


@dataclass(frozen=True)
class Seen:
    """The items that each of some consecutive users has seen, so that others can be drawn.

    The r-th unseen item of a user is r plus the number of seen items before it. With the seen items sorted as
    s_0 < s_1 < ..., that number is how many s_i - i are at most r. So a draw takes one binary search, no draw is
    rejected, and all unseen items are equally likely.
    """

    first_user: int
    num_items: int
    starts: Ids  # place in `keys` of each user's first seen item, and one more
    keys: Ids  # (user - first_user) * (num_items + 1) + s_i - i, ascending

    @classmethod
    def of(cls, users: Ids, items: Ids, num_items: int) -> Seen:
        """From the rows of consecutive users; items are ids from 1, and rows with id 0, unknown, are ignored."""
        assert (np.diff(users) >= 0).all(), "users out of order"
        first = int(users[0])
        known = items > 0
        pairs = (users - first) * num_items + items - 1
        pairs = np.sort(pairs if known.all() else pairs[known])
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # np.unique hashes, ten times slower on sorted rows
        owner, item = pairs // num_items, pairs % num_items
        starts = np.searchsorted(owner, np.arange(int(users[-1]) - first + 2))
        rank = np.arange(len(pairs)) - starts[owner]
        return cls(first, num_items, starts, owner * (num_items + 1) + item - rank)

    def num_unseen(self, users: Ids) -> Ids:
        places = users - self.first_user
        return self.num_items - (self.starts[places + 1] - self.starts[places])

    def draw(self, users: Ids, numbers: Ids, seed: tuple[int, ...]) -> Ids:
        """Draw items (N,) that `users` have not seen, uniformly with replacement; `numbers` count a user's draws."""
        if not len(users):
            return np.zeros(0, np.int64)
        random = _random_bits(seed, users, numbers) >> np.uint64(32)
        # The high half of a product of 32-bit numbers: uniform over the unseen up to their number in 2**32.
        rank = ((random * self.num_unseen(users).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
        places = users - self.first_user
        before = np.searchsorted(self.keys, places * (self.num_items + 1) + rank, side="right") - self.starts[places]
        return rank + before + 1

    def has(self, users: Ids, items: Ids) -> NDArray[np.bool_]:
        """Whether each user (N,) has seen each item (N,)."""
        if not len(self.keys):
            return np.zeros(len(users), bool)
        at = np.searchsorted(self._pairs, pairs := (users - self.first_user) * self.num_items + items - 1)
        found: NDArray[np.bool_] = self._pairs[np.minimum(at, len(self._pairs) - 1)] == pairs
        return found

    @cached_property
    def _pairs(self) -> Ids:
        """(user - first_user) * num_items + item - 1 of everything seen, ascending."""
        owner = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        rank = np.arange(len(self.keys)) - self.starts[owner]
        return np.asarray(self.keys - owner * (self.num_items + 1) + rank + owner * self.num_items, np.int64)


@dataclass(frozen=True)
class Draws:
    """Draws the negatives of a dataset."""

    distribution: Distribution  # popularity: in proportion to an item's number of interactions
    counts: Ids  # of each item's interactions, for ids from 1
    reject_seen: bool = True  # never draws an item that the user has seen, unless the user has seen all items

    def draw(self, seen: Seen, users: Ids, numbers: Ids, seed: tuple[int, ...]) -> Ids:
        """Draw items (N,), ids from 1; see `Seen.draw`."""
        if self.distribution == "popularity":
            return self._by_popularity(seen, users, numbers, seed)
        if not self.reject_seen:
            return _any(users, numbers, seen.num_items, seed)
        return self._unseen(seen, users, numbers, seed)

    def _unseen(self, seen: Seen, users: Ids, numbers: Ids, seed: tuple[int, ...]) -> Ids:
        possible = seen.num_unseen(users) > 0
        if possible.all():
            return seen.draw(users, numbers, seed)
        items = _any(users, numbers, seen.num_items, seed)
        items[possible] = seen.draw(users[possible], numbers[possible], seed)
        return items

    def _by_popularity(self, seen: Seen, users: Ids, numbers: Ids, seed: tuple[int, ...]) -> Ids:
        items = self._popular(users, numbers, seed)
        if not self.reject_seen:
            return items
        again = np.flatnonzero(seen.has(users, items))
        for redraw in range(1, REDRAWS + 1):
            if not len(again):
                return items
            items[again] = self._popular(users[again], numbers[again], (*seed, redraw))
            again = again[seen.has(users[again], items[again])]
        items[again] = self._unseen(seen, users[again], numbers[again], seed)
        return items

    def _popular(self, users: Ids, numbers: Ids, seed: tuple[int, ...]) -> Ids:
        total = self._ends[-1]
        uniform = (_random_bits(seed, users, numbers) >> np.uint64(11)) * 2.0**-53
        places = np.minimum((uniform * total).astype(np.int64), total - 1)
        found = np.searchsorted(self._ends, places, side="right") + 1 if self._pool is None else self._pool[places]
        return np.asarray(found, np.int64)

    @cached_property
    def _ends(self) -> Ids:
        return np.cumsum(self.counts)

    @cached_property
    def _pool(self) -> NDArray[np.int32] | None:
        items = np.arange(1, len(self.counts) + 1, dtype=np.int32)
        return np.repeat(items, self.counts) if self._ends[-1] <= POOL else None


def _any(users: Ids, numbers: Ids, num_items: int, seed: tuple[int, ...]) -> Ids:
    random = _random_bits(seed, users, numbers) >> np.uint64(32)
    return ((random * np.uint64(num_items)) >> np.uint64(32)).astype(np.int64) + 1


def _random_bits(seed: tuple[int, ...], users: Ids, numbers: Ids) -> NDArray[np.uint64]:
    """64 bits for each draw: SplitMix64 (Steele, Lea, Flood 2014) as a function of the counters, which broadcast."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in seed:
            state = mix(state + golden + np.uint64(part % 2**64))
        state = mix(state + golden * (users.astype(np.uint64) + np.uint64(1)))
        return mix(state + golden * (numbers.astype(np.uint64) + np.uint64(1)))
