"""The events of users that a journal holds and a model's dataset does not, for requests.

Which events the dataset lacks:

- of a user whom the dataset does not know, all;
- after an update from the journal, which says how far it has read (`trained_to`), those that arrived later, whatever
  their time;
- else those later than the second of the dataset's newest timestamp;
- of a dataset whose timestamps are no seconds since 1970, those of items that the user has no event of there.

So no event counts twice. One that the dataset never held, though it is old, counts from the next update on.

Impressions are no acts. Other types count as they do in the dataset: `event_weights`, `weight` (the event's value),
`min_rating` and `positive` say what a model reads, and `seen` what is not recommended again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec.base.errors import BundleError, problems_in
from recspec.feature_spec import FeatureSpec
from recspec.inference import LiveEvents, Predictor
from recspec.loop.events import IMPRESSION
from recspec.loop.journal import Journal
from recspec.models import UserEvents

MOST_EVENTS = 1_000
"""New events of a user that an answer knows: the newest."""
USUAL_TYPES = ("purchase", "cart", "view")
MICROSECONDS = 1_000_000
MOST_HALVINGS = 64
"""As in the weights of a dataset."""


class Decay(BaseModel):
    """Halves a weight once each half-life before the end, in seconds; a later event weighs more by the same rule."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    half_life: float = Field(gt=0, allow_inf_nan=False)
    end: float = Field(allow_inf_nan=False)


class EventRules(BaseModel):
    """How the events of a dataset count, as its metadata tell (`event_rules`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: dict[str, float] = {}
    """Of types; without any, each type weighs 1, and with some, no other type is read."""
    weighted: bool = False
    """Whether an event weighs as much as its value."""
    least: float | None = None
    """Least value of an event that is read."""
    read: tuple[str, ...] | None = None
    """Types that are read; by default all."""
    seen: tuple[str, ...] | None = None
    """Types whose items are not recommended again; by default all."""
    decay: Decay | None = None

    @classmethod
    def of(cls, spec: FeatureSpec) -> Self:
        """The rules of a dataset. Raises BundleError if they are damaged."""
        try:
            return cls.model_validate(spec.metadata.get("event_rules", {}))
        except ValidationError as error:
            raise BundleError.of(f"{spec.folder}: metadata.event_rules: damaged", problems_in(error)) from None

    def weight(self, kind: str, value: float | None) -> float:
        """How much an event counts for a model; 0 for one that it does not read."""
        if self.read is not None and kind not in self.read:
            return 0.0
        if self.least is not None and value is not None and value < self.least:
            return 0.0
        own = self.weights.get(kind, 0.0) if self.weights else 1.0
        return own * max(0.0, value) if self.weighted and value is not None else own

    @property
    def types(self) -> tuple[str, ...]:
        """Types that are read, the weightiest first; empty if all are."""
        weighted = sorted(
            (each for each in self.weights if self.weights[each] > 0), key=lambda each: -self.weights[each]
        )
        return tuple(each for each in weighted or self.read or () if self.read is None or each in self.read)

    def is_seen(self, kind: str) -> bool:
        """Whether the event's item is not recommended again."""
        return self.seen is None or kind in self.seen

    def ignores(self, kind: str) -> bool:
        """Whether a type counts for nothing, and no setting names it; so it may be misspelled."""
        named = {IMPRESSION, *self.weights, *(self.read or ()), *(self.seen or ())}
        return kind not in named and self.weight(kind, None) == 0

    def decayed(self, weights: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weights of events at some times."""
        if self.decay is None:
            return weights
        halvings = np.clip((times - self.decay.end) / self.decay.half_life, -MOST_HALVINGS, MOST_HALVINGS)
        return np.asarray(weights * np.exp2(halvings), np.float64)


@dataclass(frozen=True, eq=False)
class Histories:
    """The journal beside one model. Safe to use from several threads."""

    journal: Journal
    predictor: Predictor
    until: int | None = None
    """Newest event that is looked at; None for all."""
    most: int = MOST_EVENTS

    @property
    def event_types(self) -> tuple[str, ...]:
        """Types of events that the model reads, the weightiest first; the usual ones if it reads any."""
        return self._rules.types or USUAL_TYPES

    def ignores(self, kind: str) -> bool:
        """Whether a type of event counts for nothing; see `EventRules.ignores`."""
        return self._rules.ignores(kind)

    def as_of(self, seq: int) -> Histories:
        """The same without events that arrived after `seq`, such as an answer's `history_seq`."""
        return replace(self, until=seq)

    def of(self, users: Sequence[str | int]) -> LiveEvents:
        """What users did beside what the dataset holds, by raw ids.

        Raises:
            DataError: if the journal can't be read.
        """
        known = self.predictor.catalogues
        numbers, rows = known.user_ids(users), list[_Row]()
        lengths = np.zeros(len(users), np.int64)
        for place, (user, number) in enumerate(zip(users, numbers.tolist(), strict=True)):
            found = self.journal.history(str(user), most=self.most, until=self.until, **self._window(number))
            lengths[place] = len(found)
            rows += found
        if not rows:
            return replace(LiveEvents.none(len(users)), newest=self._trained_to)
        seqs, kinds, raw, values, times = zip(*rows, strict=True)
        items = known.item_ids(raw)
        seconds = np.array(times, np.float64) / MICROSECONDS
        rules = self._rules
        weights = np.array([rules.weight(*each) for each in zip(kinds, values, strict=True)])
        seen = np.array([rules.is_seen(kind) for kind in kinds])
        is_new = (items >= known.items.first_id) & ~self._are_held(numbers, lengths, items)
        events = UserEvents(
            np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            items.astype(np.int32),
            None if self._newest is None else seconds,
            rules.decayed(weights, seconds).astype(np.float32),
        )
        return LiveEvents(events.take(is_new & (weights > 0)), events.take(is_new & seen), max(self._trained_to, *seqs))

    def _window(self, number: int) -> dict[str, int]:
        """Which events of a user the dataset can't hold, by the user's prepared id."""
        if number < self.predictor.users.first_id:
            return {}
        if self._trained_to:
            return {"after": self._trained_to}
        return {} if self._newest is None else {"since": (self._newest + 1) * MICROSECONDS - 1}

    def _are_held(
        self, numbers: NDArray[np.int64], lengths: NDArray[np.int64], items: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which events are of an item that the user has an event of in the dataset, where times do not tell."""
        held = np.zeros(len(items), bool)
        if self._trained_to or self._newest is not None:
            return held
        ends = np.cumsum(lengths)
        for number, start, end in zip(numbers.tolist(), ends - lengths, ends, strict=True):
            if number >= self.predictor.users.first_id:
                held[start:end] = np.isin(items[start:end], self.predictor.recommender.seen.all_of(number).numpy())
        return held

    @cached_property
    def _rules(self) -> EventRules:
        return EventRules.of(self.predictor.spec)

    @cached_property
    def _trained_to(self) -> int:
        """The newest event of the journal that the dataset holds; 0 if it was not made from this one."""
        spec = self.predictor.spec
        return spec.trained_to if spec.metadata.get("journal") in (None, self.journal.id) else 0

    @cached_property
    def _newest(self) -> int | None:
        """The second of the dataset's newest timestamp; None if its timestamps are no seconds since 1970."""
        last = self.predictor.spec.summary.get("last")
        try:
            return int(datetime.fromisoformat(f"{last}+00:00").timestamp()) if isinstance(last, str) else None
        except ValueError:
            return None


_Row = tuple[int, str, str | None, float | None, int]
