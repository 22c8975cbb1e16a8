"""DIEN: a GRU over a user's history, an attention to the item on its states, and a second recurrence by it.

Zhou et al.: Deep Interest Evolution Network for Click-Through Rate Prediction, AAAI 2019.

Shapes: B rows; T events; D width of an item's vector; H of a state; P pairs of an event and the next one; R requests;
N items to score; L the longest history.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.base import Widths
from recspec.models.din import Head, Made, SequenceModel, SequenceSettings
from recspec.models.layers import (
    AttentionUnit,
    Batch,
    Events,
    Gru,
    Histories,
    NextEvent,
    RowsHeld,
    at_least_fp32,
    attention_to_items,
    events_of,
    last_states_of_items,
    num_rows,
)


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
        description="weight of the auxiliary loss; null: 1 if the dataset has the role negative_history, else 0",
    )
    auxiliary_hidden: Widths = Field((100, 50), description="widths of the auxiliary network's hidden layers")


class Dien(SequenceModel):
    """DIEN: interests as states of a GRU over a history, their evolution towards the item by AUGRU, then an MLP.

    In training, an auxiliary network tells the next event from a sampled item by each state. Predictions do not use it.
    """

    name = "dien"
    Settings = DienSettings
    settings: DienSettings

    def __init__(self, spec: FeatureSpec, settings: DienSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.auxiliary = auxiliary_weight(self.name, settings.auxiliary, self.histories)
        width = self.inputs.event_dim
        self.evolution = Evolution(width, settings)
        self.head = Head(width + self.evolution.hidden_dim + self.inputs.side_dim, settings)
        if self.auxiliary:
            self.next_event = NextEvent(self.evolution.hidden_dim, width, settings.auxiliary_hidden)

    def forward(self, batch: Batch) -> Tensor:
        return cast(Tensor, self.head(self._joined(batch, sampled=False)[0]))

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy plus the weighted auxiliary loss, in nats."""
        joined, auxiliary = self._joined(batch, sampled=self.auxiliary > 0)
        loss = self.head.loss(joined, batch[self.spec.label])
        return loss + self.auxiliary * auxiliary if self.auxiliary else loss

    def side_scores(self, request: Batch, items: Batch) -> Tensor:
        """`score_items`, with the GRU run once a request and AUGRU once a pair."""
        if self.training:  # Dice standardises by the rows of a call
            return self.pair_scores(request, items)
        events = self.histories.events(request, last=self.settings.length)
        (values,), of_ours = self.inputs(request, self.histories.at(request, events))
        (target,), of_theirs = self.inputs(items, [self.histories.target(items)])
        happened, present = events.padded(self.evolution.interests(values, events)), events.present_mask
        columns = self.inputs.side_columns(request, items)
        parts = self.head.parts(self.inputs.event_dim, self.evolution.hidden_dim, *columns)
        of_target, of_state, of_request, of_item = parts
        own = F.linear(of_ours, of_request)
        # W [t ; s ; r ; i] + b by parts: what items give is computed once an item, what requests give once a request.
        other = F.linear(target, of_target, self.head.mlp.first.bias) + F.linear(of_theirs, of_item)
        if torch.compiler.is_compiling():
            last = self.evolution.of_pairs(happened, present, target)
            first = F.linear(last, of_state) + own.unsqueeze(1) + other
            return self.head.after_first(first.flatten(0, 1)).view(-1, num_rows(items))
        projected = self.evolution.unit.project_target(target)

        def interest(row: int, some: slice) -> list[Made]:
            mine = happened[row][present[row]]
            return [(self.evolution.of_items(mine, projected[some]), of_state)] if len(mine) else []

        return self.head.scores_of_all(own, other, interest)

    def _joined(self, batch: Batch, *, sampled: bool) -> tuple[Tensor, Tensor]:
        """The MLP's input (B, its width) and the auxiliary loss, 0 if not `sampled`."""
        events = self.histories.events(batch, last=self.settings.length)
        asked = [self.histories.target(batch), *self.histories.at(batch, events, sampled=sampled)]
        (target, happened, *negatives), side = self.inputs(batch, asked)
        states = self.evolution.interests(happened, events)
        joined = torch.cat([target, self.evolution(states, target, events), side], dim=1)
        return joined, self.next_event(states, happened, *negatives, events) if sampled else joined.new_zeros(())


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

    def of_items(self, states: Tensor, projected: Tensor) -> Tensor:
        """`forward` of one request's states (L, H) for all items, targets (N, H) that the unit projected: (N, H)."""
        weights = attention_to_items(self.unit, states, projected)
        weights = at_least_fp32(weights).softmax(0) if self.softmax else torch.sigmoid(weights)
        return last_states_of_items(self.augru, states, weights)

    def of_pairs(self, states: Tensor, present: Tensor, target: Tensor) -> Tensor:
        """`forward` of requests' states (R, L, H) for items (N, D), in programs of any size: (R, N, H)."""
        requests, items = states.shape[0], target.shape[0]  # an exporter leaves shapes open, and fixes len()
        pairs = events_of(present.repeat_interleave(items, dim=0))
        happened = pairs.flat(states.repeat_interleave(items, dim=0))
        return cast(Tensor, self(happened, target.repeat(requests, 1), pairs)).view(requests, items, -1)


def auxiliary_weight(who: str, asked: float | None, histories: Histories) -> float:
    """The auxiliary loss's weight; raises `SettingsError` if one is asked for and there are no sampled ids."""
    if asked and not histories.negatives:
        raise SettingsError(
            f"{who}: auxiliary is {asked}, and no feature plays the role 'negative_history', which that "
            "loss tells the history from; prepare the dataset with --set negative_history=true, or set auxiliary to 0"
        )
    return float(bool(histories.negatives)) if asked is None else asked
