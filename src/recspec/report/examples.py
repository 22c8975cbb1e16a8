"""Users to show: their latest events, what the held-out split holds of them, and what a model recommends.

Shapes: U users of the model; S shown users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import RecspecError, how_many
from recspec.report.dataset_values import RawNames, numbers_of, top_values
from recspec.report.page import plain
from recspec.report.run_facts import RunFacts

if TYPE_CHECKING:
    from recspec.inference import Recommendation


LISTED = 10  # items of a list
HISTORY = 8  # events of a user that are shown
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Places of the shown users among all users in order of their number of events."""

KNOWN = ("train", "valid")
"""Splits whose events a bundle knows, so that it does not recommend their items."""

Raw = str | int


@dataclass(frozen=True)
class Shown:
    """A user, and what is known of them."""

    user: Raw
    events: str
    """How many there are, in words."""
    history: tuple[str, ...]
    """Items, the latest first, or the most popular first where their order is not known."""
    targets: frozenset[Raw]
    """Raw ids of the items that the held-out split holds."""
    held_out: tuple[tuple[str, bool], ...]
    """Titles of some of them, and whether the model knows the event already, so that it never recommends the item."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Gives users of a run with their histories and lists."""

    run: RunFacts
    split: str
    """The held-out split, whose items are marked as hits."""

    def typical(self) -> list[Raw]:
        """Five users, from few events to many."""
        lengths = self._lengths
        known = np.flatnonzero(lengths > 0)
        known = known[known >= self.run.predictor.users.first_id]
        if self._targets is not None:
            with_targets = known[np.isin(known, self._targets[0])]
            known = with_targets if len(with_targets) >= len(QUANTILES) else known
        order = known[np.argsort(lengths[known], kind="stable")]
        if not len(order):
            return []
        places = sorted({min(len(order) - 1, int(share * len(order))) for share in QUANTILES})
        return [*self._raw("user", order[places])]

    def of(self, users: Sequence[Raw]) -> list[Shown]:
        """What is known of some users."""
        ids = self.run.predictor.catalogues.user_ids(users)
        return [self._of(user, int(number)) for user, number in zip(users, ids, strict=True)]

    def recommended(self, users: Sequence[Raw]) -> list[Recommendation]:
        """The best items for some users as before the held-out split, whose items may be hits.

        Raises:
            RecspecError: if the model can't recommend, for example because it needs a context.
        """
        from recspec.inference import Wanted

        predictor = self.run.predictor
        found: list[Recommendation] = []
        for user, number in zip(users, predictor.catalogues.user_ids(users).tolist(), strict=True):
            seen = tuple(self._raw("item", self._seen_before(number)))
            asked = Wanted(users=(user,), k=LISTED, context=self.context, include_seen=True, exclude=seen)
            found += predictor.recommend(asked)
        return found

    def _seen_before(self, number: int) -> NDArray[np.int64]:
        """Items that a user has seen, without those that the held-out split alone holds."""
        seen = self.run.predictor.recommender.seen
        if not 0 <= number < seen.num_users:
            return np.zeros(0, np.int64)
        new = np.setdiff1d(self._held(number), seen.known_of(number).numpy())
        return np.setdiff1d(seen.of(number).numpy(), new)

    @cached_property
    def context(self) -> dict[str, object]:
        """The most usual raw value of each feature that differs from request to request; empty if there is none."""
        asked, data = self.run.predictor.recommender.requesters.asked, self.run.data
        if not asked or data is None or "train" not in data.splits:
            return {}
        names = RawNames(data)
        tops, numbers = top_values(data, "train", names, asked), numbers_of(data, "train", names)
        found: dict[str, object] = {name: numbers[name].quantiles[2] for name in asked if name in numbers}
        single = [name for name in asked if name in tops and not data.features[name].is_list and tops[name].values]
        found |= {name: tops[name].values[0][0] for name in single}
        return {name: found[name] for name in asked if name in found}

    @property
    def context_in_words(self) -> str:
        """The context of the lists in a sentence; empty without one."""
        told = ", ".join(f"{name} {plain(value, 40)}" for name, value in self.context.items())
        return f" The lists are made for the most usual context: {told}." if told else ""

    @property
    def has_order(self) -> bool:
        """Whether histories are in order of time."""
        return self._events is not None

    def _of(self, user: Raw, number: int) -> Shown:
        predictor = self.run.predictor
        if self._events is not None and 0 <= number < self._events.num_users:
            events = self._events
            items = events.items[events.offsets[number] : events.offsets[number + 1]].astype(np.int64)
            history = self._titled(items[::-1][:HISTORY])
        else:
            history = tuple(predictor.liked(user, k=HISTORY))
        held = self._held(number)
        seen = predictor.recommender.seen
        known = seen.known_of(number).numpy() if 0 <= number < len(self._lengths) else np.zeros(0, np.int64)
        length = int(self._lengths[number]) if 0 <= number < len(self._lengths) else 0
        titles = zip(self._titled(held), np.isin(held, known).tolist(), strict=True)
        return Shown(
            user, how_many(length, "event"), history, frozenset(self._raw("item", held)), tuple(titles)[:HISTORY]
        )

    def _held(self, number: int) -> NDArray[np.int64]:
        """Items of a user's held-out positives."""
        if self._targets is None:
            return np.zeros(0, np.int64)
        held: NDArray[np.int64] = self._targets[1][self._targets[0] == number]
        return held[held >= self.run.predictor.items.first_id]

    def _titled(self, items: NDArray[np.int64]) -> tuple[str, ...]:
        known = self.run.predictor.items
        kept = items[items >= known.first_id]
        titles = known.titles_of(kept).to_pylist()
        return tuple(str(title or raw) for title, raw in zip(titles, self._raw("item", kept), strict=True))

    def _raw(self, role: Any, ids: NDArray[np.int64]) -> list[Raw]:
        found: list[Raw] = self.run.predictor.raw_ids(role, ids).to_pylist()
        return found

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """(U,) items that each user acted on, as the model knows them."""
        found: NDArray[np.int64] = self.run.predictor.recommender.seen.num_known.numpy()
        return found

    @cached_property
    def _events(self) -> Any:
        """The events of every user before the held-out split, oldest first; None without the dataset."""
        from recspec.evaluation import read_events

        data, figures = self.run.data, self.run.figures
        if data is None or figures is None:
            return None
        before = [split for split in KNOWN if split in data.splits]
        try:
            return read_events(data, before)
        except RecspecError:
            return None

    @cached_property
    def _targets(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Users and items of the held-out positives; None without the dataset, or if the model knows the split."""
        from recspec.evaluation import read_rows

        data = self.run.data
        if data is None or self.run.figures is None or self.split not in data.splits or self.split in KNOWN:
            return None
        try:
            rows = read_rows(data, self.split)
        except RecspecError:
            return None
        if rows.users is None or rows.items is None:
            return None
        return rows.users[rows.labels].astype(np.int64), rows.items[rows.labels].astype(np.int64)
