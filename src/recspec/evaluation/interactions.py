"""Items that each user acted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recspec.errors import require_extra
from recspec.evaluation.rows import Ids, blocks, id_feature, scalar
from recspec.spec import FeatureSpec
from recspec.storage import Ragged, open_split

if TYPE_CHECKING:
    from scipy.sparse import csr_array

KEYS_HELD = 1 << 25
"""Pairs of user and item held before repeated ones are dropped: 256 MB, or twice the distinct pairs."""


@dataclass(frozen=True, eq=False)
class Interactions:
    """Which items each user acted on: user u's are `items[offsets[u]:offsets[u + 1]]`, ascending, each once."""

    offsets: NDArray[np.int64]  # (U + 1,)
    items: NDArray[np.int32]
    num_items: int

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
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        found: NDArray[np.bool_] = self.keys[place] == wanted
        return found

    def of(self, users: Ids) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Every item of some users: the place of the user in `users`, and the item."""
        starts, lengths = self.offsets[users], self.offsets[users + 1] - self.offsets[users]
        rows = np.repeat(np.arange(len(users)), lengths)
        first = np.cumsum(lengths) - lengths
        return rows, self.items[np.arange(len(rows)) + (starts - first)[rows]]

    def matrix(self) -> csr_array:
        """The interactions as a scipy CSR matrix (U, N) of fp32 ones.

        Raises:
            MissingExtraError: if scipy is not installed.
        """
        sparse = require_extra("scipy.sparse", "baselines")
        ones = np.ones(self.num_pairs, dtype=np.float32)
        return sparse.csr_array((ones, self.items, self.offsets), shape=(self.num_users, self.num_items))


def positives(spec: FeatureSpec, splits: Sequence[str]) -> Interactions:
    """The (user, item) pairs with a positive label in some splits, and the pairs in the histories of their rows.

    A user's first events, and events before the rows that were kept, occur in histories alone.
    """
    user, item, history = spec.user_id, spec.item_id, history_of_items(spec)
    num_items = spec.num_ids(item)
    keys, most = [np.zeros(0, dtype=np.int64)], KEYS_HELD
    for split in splits:
        held = history if history in spec.columns(split) else None
        names = (user, item, spec.label) if held is None else (user, item, spec.label, held)
        for _, block in blocks(open_split(spec, split, names)):
            positive = scalar(block[spec.label]).astype(np.float32) > 0
            firsts = scalar(block[user]).astype(np.int64) * num_items
            keys.append(firsts[positive] + scalar(block[item])[positive].astype(np.int64))
            lists = block[held] if held is not None else None
            if isinstance(lists, Ragged):
                keys.append(np.unique(np.repeat(firsts, lists.lengths) + lists.values.astype(np.int64)))
            if sum(map(len, keys)) > most:  # an event occurs in the histories of many rows
                keys = [np.unique(np.concatenate(keys))]
                most = max(most, 2 * len(keys[0]))
    pairs = np.concatenate(keys)
    return Interactions.from_pairs(
        pairs // num_items, pairs % num_items, num_users=spec.num_ids(user), num_items=num_items
    )


def history_of_items(spec: FeatureSpec) -> str | None:
    """The history feature of item ids, if there is one."""
    item = id_feature(spec, "item")
    lists = [n for n in spec.role("history") if spec.features[n].is_list and spec.features[n].is_categorical]
    if item is None or not lists:
        return None
    sharing = [name for name in lists if spec.vocabulary(name) == spec.vocabulary(item)]
    if sharing:
        return sharing[0]
    described = [n for n in spec.role("item") if spec.features[n].is_categorical and not spec.features[n].is_list]
    return lists[described.index(item)] if len(lists) == len(described) else None
