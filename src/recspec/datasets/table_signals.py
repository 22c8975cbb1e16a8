"""Settings of your own table for signals: the weights of events, and histories of labelled rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from recspec.prepare import HistorySettings, Weighting

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800, "y": 31_557_600}  # in seconds; y: 365.25 days
HALF_LIFE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *([a-z]?)")


def _half_life(text: str) -> str:
    found = HALF_LIFE.fullmatch(text.strip().lower())
    if found is None or (found[2] and found[2] not in UNITS) or not 0 < float(found[1]) < 1e15:
        raise ValueError("expected a time such as 90d, 12h or 2w (s, m, h, d, w, y), or a number in the units of the "
                         "timestamps")  # fmt: skip
    return text.strip().lower()


def _words(given: object) -> object:
    """One word in place of a list of one."""
    return given if given is None or isinstance(given, (list, tuple)) else [given]


Word = Annotated[str, Field(coerce_numbers_to_str=True)]
Words = Annotated[tuple[Word, ...] | None, BeforeValidator(_words)]
HalfLife = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_half_life)]
TypeWeight = Annotated[float, Field(ge=0, le=1e6)]


class SignalSettings(HistorySettings):
    """How much an event counts, by its own number, type and age."""

    negative_history: bool = Field(
        False,
        description="store a drawn negative for each event of a history; with a label, the event that the user skipped "
        "before it, if there is one",
    )
    weight: str | None = Field(
        None, description="column of a number that weighs each event, such as plays, minutes or quantity; 0 drops it"
    )
    event: str | None = Field(
        None, description="column of the type of each event, such as view, cart or purchase; see the next setting"
    )
    event_weights: dict[Word, TypeWeight] = Field(
        {}, description="weight of each type of `event`: {view: 1, cart: 3, purchase: 5}; 0 drops a type"
    )
    half_life: HalfLife | None = Field(
        None,
        description="time in which the weight of an event halves, counted back from the last event of train, such as "
        "90d or 12h; a plain number is in the units of the timestamps",
    )
    positive: Words = Field(
        None,
        description="the label is 1 where its column holds this text or one of these, else 0; with `event` alone, that "
        "column is the label",
    )

    seen: Words = Field(
        None,
        description="types of `event` whose items are never recommended again, such as purchase; null: those of every "
        "event, whatever its rating or weight",
    )

    @model_validator(mode="before")
    @classmethod
    def _label_by_type(cls, values: object) -> object:
        """Types that are positive make the column of the types the label."""
        if isinstance(values, Mapping) and values.get("event") and values.get("positive") and "label" not in values:
            return {**values, "label": values["event"]}
        return values

    @model_validator(mode="after")
    def _of_signals(self) -> SignalSettings:
        if self.event_weights and self.event is None:
            raise ValueError("event_weights are of the types of events; name their column with event")
        if self.seen is not None and not (self.seen and self.event):
            raise ValueError("seen names types of events, one at least; name their column with event")
        if self.event is not None and not (self.event_weights or self.positive or self.seen):
            raise ValueError(f"event names the column '{self.event}', of which nothing is used; give its types weights "
                             "with event_weights, or name those of label 1 with positive, or those that count as seen "
                             "with seen")  # fmt: skip
        if self.event_weights and not any(self.event_weights.values()):
            raise ValueError("event_weights are all 0, so no event is left; give one type a weight above 0")
        return self

    @property
    def weighting(self) -> Weighting:
        """The columns that weigh events."""
        return Weighting(self.weight, self.event, self.event_weights, self.seen or ())

    @property
    def half_life_in(self) -> tuple[float, bool]:
        """The half life in seconds, or in the units of the timestamps, and whether it is in seconds."""
        assert self.half_life is not None
        found = HALF_LIFE.fullmatch(self.half_life)
        assert found is not None
        return float(found[1]) * UNITS.get(found[2], 1), bool(found[2])
