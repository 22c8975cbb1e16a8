"""Events of users that a model's dataset does not hold, such as those of a journal, and how models know of them.

Shapes: R users of a request; U users; N items; T events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recspec.bundle import Bundle
from recspec.inference.catalogue import Catalogues
from recspec.models import Interactions, UserEvents

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LiveEvents:
    """What the users of a request did beside what the dataset holds, by prepared ids of items."""

    events: UserEvents
    """Those that models read: R lists, oldest first. Times are in units of the dataset's timestamps, None if these are
    no seconds since 1970; then the events are later than all of the dataset."""
    seen: UserEvents
    """R lists of items that are not recommended again."""
    newest: int = 0
    """Number in the journal of the newest event that was looked at; `as_of` it, the answer can be given again."""

    @classmethod
    def none(cls, count: int) -> LiveEvents:
        """No events of so many users."""
        nothing = UserEvents(np.zeros(count + 1, np.int64), np.zeros(0, np.int32))
        return cls(nothing, nothing)

    def of(self, rows: Ids) -> LiveEvents:
        """The events of some users of the request."""
        if len(rows) == len(self.has) and bool((rows == np.arange(len(rows))).all()):
            return self
        if not len(self.events.items) and not len(self.seen.items):
            return replace(LiveEvents.none(len(rows)), newest=self.newest)
        return replace(self, events=self.events.of(rows), seen=self.seen.of(rows))

    @cached_property
    def has(self) -> NDArray[np.bool_]:
        """(R,) whether a model has a new event of the user to read."""
        return self.events.lengths > 0

    def seen_by(self, row: int) -> Ids:
        """The items that one user of the request is not recommended again."""
        own = slice(int(self.seen.offsets[row]), int(self.seen.offsets[row + 1]))
        return self.seen.items[own].astype(np.int64)


class StoredEvents:
    """The events that a bundle knows of its users."""

    def __init__(self, trained: Bundle, catalogues: Catalogues) -> None:
        self._trained, self._catalogues = trained, catalogues

    @cached_property
    def _known(self) -> UserEvents:
        """The items of each user that the model knows of, each once, by id."""
        seen = self._trained.seen
        assert seen is not None
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(seen.num_known.numpy())])
        items = seen.items if bool(seen.is_known.all()) else seen.items[seen.is_known]
        return UserEvents(offsets, items.numpy().astype(np.int32, copy=False))

    def with_live(self, users: Ids, live: LiveEvents, *, ordered: bool) -> Interactions:
        """What R users did, known ones or not, with their new events; `ordered` for a model that reads the order.

        So it is what a bundle would know whose dataset held these events.
        """
        own = np.where(users < self._catalogues.users.first_id, -1, users)
        pairs = self._known.of(own)
        stored = self._trained.events
        events = (pairs if stored is None or not ordered else stored.of(own)).joined(live.events)
        found = Interactions.from_pairs(
            np.concatenate([pairs.users, events.users]),
            np.concatenate([pairs.items, events.items]),
            num_users=len(users),
            num_items=self._trained.spec.num_ids(self._trained.spec.item_id),
        )
        return replace(found, order=events) if ordered else found
