"""Negatives drawn for users whose split lists positives only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recspec.evaluation.interactions import Interactions
from recspec.evaluation.rows import Ids, Rows

USERS_PER_DRAW = 4_096
"""Users whose negatives are drawn together: at most a few hundred MB of lookups."""


def draw_candidates(
    truth: Interactions, seen: Interactions, *, num_negatives: int, first_item: int = 0, seed: int = 0
) -> Rows:
    """Each user's positives and `num_negatives` different items, drawn uniformly from items the user never acted on.

    A user with fewer such items gets them all. The same seed gives the same draws on any number of ranks.
    """
    active = np.flatnonzero(np.diff(truth.offsets))
    users, items, labels = [], [], []
    for block in range(0, truth.num_users, USERS_PER_DRAW):
        here = active[np.searchsorted(active, block) : np.searchsorted(active, block + USERS_PER_DRAW)]
        rng = np.random.default_rng([seed, block])
        places, drawn = _draw_unseen(here, truth, seen, num_negatives, first_item, rng)
        rows, positive = truth.of(here)
        users += [here[rows], here[places]]
        items += [positive, drawn.astype(np.int32)]
        labels += [np.ones(len(rows), dtype=bool), np.zeros(len(places), dtype=bool)]
    who = np.concatenate([np.zeros(0, dtype=np.int64), *users])
    which = np.concatenate([np.zeros(0, dtype=np.int32), *items])
    return Rows(np.concatenate([np.zeros(0, dtype=bool), *labels]), who, who, which)


def _draw_unseen(
    users: Ids, truth: Interactions, seen: Interactions, num_negatives: int, first_item: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(place in `users`, item) of the negatives: by rejection, or by permutation if few items are left."""
    num_items = truth.num_items
    taken = np.diff(seen.offsets)[users] + np.diff(truth.offsets)[users]
    roomy = num_items - first_item - taken >= 4 * num_negatives
    places, drawn = [], []
    for place in np.flatnonzero(~roomy):
        free = np.ones(num_items, dtype=bool)
        free[:first_item] = False
        for known in (seen, truth):
            free[known.of(users[place : place + 1])[1]] = False
        unseen = np.flatnonzero(free)
        chosen = np.sort(rng.choice(unseen, min(num_negatives, len(unseen)), replace=False))
        places.append(np.full(len(chosen), place))
        drawn.append(chosen)
    rows = np.flatnonzero(roomy)
    picks = np.full((len(rows), num_negatives), -1, dtype=np.int64)
    open_rows, open_columns = np.nonzero(picks < 0)
    while len(open_rows):
        picks[open_rows, open_columns] = rng.integers(first_item, num_items, len(open_rows))
        touched = np.unique(open_rows)
        picks[touched] = np.sort(picks[touched], axis=1)
        here, who = picks[touched], users[rows[touched]][:, None]
        bad = seen.contain(who, here) | truth.contain(who, here)
        bad[:, 1:] |= here[:, 1:] == here[:, :-1]
        where = np.nonzero(bad)
        open_rows, open_columns = touched[where[0]], where[1]
    places.append(np.repeat(rows, num_negatives))
    drawn.append(picks.ravel())
    return np.concatenate(places), np.concatenate(drawn)
