"""DIEN: a GRU over a user's history, an attention to the item on its states, and a second recurrence by it.

Zhou et al.: Deep Interest Evolution Network for Click-Through Rate Prediction, AAAI 2019.

Shapes: B rows; T events; D width of an item's vector; H of a state; P pairs of an event and the next one; R requests;
N items to score; L the longest history of a block.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch, num_rows
from recspec.errors import SettingsError
from recspec.models.base import Model
from recspec.models.din import Head, Inputs, SequenceSettings, blocks, columns_of
from recspec.nn import AttentionUnit, Events, Gru, NextEvent, RowsHeld, at_least_fp32, events_of, may_replace
from recspec.spec import FeatureSpec


class DienSettings(SequenceSettings):
    """Sizes of DIEN; the defaults are those published for Amazon Books, except `gru_hidden` and `length`."""

    gru_hidden: int | None = Field(
        None, ge=1, description="width of both recurrences' states; null: the width of an event. Published: 96"
    )
    length: int | None = Field(None, ge=1, description="number of latest events to read; null: all. Published: 10")
    softmax: bool = Field(True, description="normalise the attention of a row's events to a sum of 1, as in the paper")
    auxiliary: float | None = Field(
        None,
        ge=0,
        description="weight of the auxiliary loss, which needs the role negative_history; null: 1 if the dataset has "
        "that role, else 0",
    )
    auxiliary_hidden: tuple[int, ...] = Field(
        (100, 50), min_length=1, description="widths of the auxiliary network's hidden layers"
    )

    @field_validator("auxiliary_hidden")
    @classmethod
    def _has_width(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if any(width < 1 for width in widths):
            raise ValueError("every width is at least 1")
        return widths


class Dien(Model):
    """DIEN: interests as states of a GRU over a history, their evolution towards the item by AUGRU, then an MLP.

    In training, an auxiliary network tells the next event from a sampled item by each state. Predictions do not use it.
    """

    name: ClassVar[str] = "dien"
    steady_shapes: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("item", "history", "label")
    Settings: ClassVar[type[config.Settings]] = DienSettings
    settings: DienSettings

    def __init__(self, spec: FeatureSpec, settings: DienSettings, held: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, held)
        self.inputs = Inputs(spec, settings, self.name, held)
        self.auxiliary = _auxiliary_weight(settings, has_negatives=bool(self.inputs.histories.negatives))
        width = self.inputs.event_dim
        self.evolution = Evolution(width, settings)
        self.head = Head(width + self.evolution.hidden_dim + self.inputs.side_dim, settings)
        if self.auxiliary:
            self.next_event = NextEvent(self.evolution.hidden_dim, width, settings.auxiliary_hidden)

    def features(self) -> tuple[str, ...]:
        """The inputs and the histories."""
        return self.inputs.features

    def loss_features(self) -> tuple[str, ...]:
        """Those of `forward`, and the sampled ids if there is an auxiliary loss."""
        return (*self.features(), *(self.inputs.histories.negatives.values() if self.auxiliary else ()))

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,)."""
        return cast(Tensor, self.head(self._joined(batch, sampled=False)[0]))

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy plus the weighted auxiliary loss, in nats."""
        joined, auxiliary = self._joined(batch, sampled=self.auxiliary > 0)
        loss = self.head.loss(joined, batch[self.spec.label])
        return loss + self.auxiliary * auxiliary if self.auxiliary else loss

    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request; the GRU runs once a request, AUGRU once a pair."""
        if not may_replace(self):
            return super().score_items(request, items)
        requests, candidates = num_rows(request), num_rows(items)
        if not torch.compiler.is_compiling() and not (requests and candidates):
            return torch.zeros(requests, candidates, device=self.device)
        events = self._events(request)
        ours, theirs = self.inputs(request, events, target=False), self.inputs(items)
        states = self.evolution.interests(ours.events, events)
        own, others = self.inputs.side_columns(request, items)
        back = sorted(range(len(own) + len(others)), key=[*own, *others].__getitem__)
        scores = []
        for rows, happened, present in blocks(events, states, candidates * 3 * self.evolution.hidden_dim):
            pairs = events_of(present.repeat_interleave(candidates, dim=0))
            target = theirs.target.repeat(happened.shape[0], 1)
            last = self.evolution(pairs.flat(happened.repeat_interleave(candidates, dim=0)), target, pairs)
            both = ours.side[rows].repeat_interleave(candidates, dim=0), theirs.side.repeat(happened.shape[0], 1)
            side = columns_of(torch.cat(both, dim=1), back)
            scores.append(self.head(torch.cat([target, last, side], dim=1)).view(-1, candidates))
        return torch.cat(scores)

    def _joined(self, batch: Batch, *, sampled: bool) -> tuple[Tensor, Tensor]:
        """The MLP's input (B, its width) and the auxiliary loss, 0 if not `sampled`."""
        events = self._events(batch)
        read = self.inputs(batch, events, sampled=sampled)
        states = self.evolution.interests(read.events, events)
        last = self.evolution(states, read.target, events)
        joined = torch.cat([read.target, last, read.side], dim=1)
        none = joined.new_zeros(())
        return joined, self.next_event(states, read.events, read.sampled, events) if sampled else none

    def _events(self, batch: Batch) -> Events:
        return self.inputs.histories.events(batch, last=self.settings.length)


class Evolution(nn.Module):
    """Two recurrences over a history; the second is weighted by the relevance of the first one's states."""

    def __init__(self, event_dim: int, settings: DienSettings) -> None:
        super().__init__()
        self.hidden_dim = settings.gru_hidden or event_dim
        self.softmax = settings.softmax
        self.gru = Gru(event_dim, self.hidden_dim)
        self.unit = AttentionUnit(self.hidden_dim, event_dim, settings.attention_hidden, settings.attention_activation)
        self.augru = Gru(self.hidden_dim, self.hidden_dim)

    def interests(self, happened: Tensor, events: Events) -> Tensor:
        """The first recurrence's states: (T, D) -> (T, H)."""
        return cast(Tensor, self.gru(happened, events)[0])

    def forward(self, states: Tensor, target: Tensor, events: Events) -> Tensor:
        """The second recurrence's last state: (T, H), (B, D) -> (B, H)."""
        weights = self.unit(states, target, events)
        weights = events.softmax(at_least_fp32(weights)) if self.softmax else torch.sigmoid(weights)
        return cast(Tensor, self.augru(states, events, weights)[1])


def _auxiliary_weight(settings: DienSettings, *, has_negatives: bool) -> float:
    """The auxiliary loss's weight.

    Raises:
        SettingsError: if one is asked for and there are no sampled ids.
    """
    if settings.auxiliary is None:
        return 1.0 if has_negatives else 0.0
    if settings.auxiliary and not has_negatives:
        raise SettingsError(
            f"dien: auxiliary is {settings.auxiliary}, and no feature plays the role 'negative_history', which that "
            "loss tells the history from; prepare the dataset with --set negative_history=true, or set auxiliary to 0"
        )
    return settings.auxiliary
