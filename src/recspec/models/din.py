"""DIN: a sum of a user's events, weighted by their relevance to the item, then an MLP.

Zhou et al.: Deep Interest Network for Click-Through Rate Prediction, KDD 2018.

Shapes: B rows; T events; D width of an item's vector; S width of the other features; R requests; N items to score;
L the longest history of a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch, num_rows
from recspec.errors import SettingsError
from recspec.models.base import Model
from recspec.nn import (
    ActivatedMlp,
    Activation,
    AttentionUnit,
    Embeddings,
    Events,
    Histories,
    RowsHeld,
    cross_entropy,
    ids_and_numbers,
    may_replace,
    start_glorot,
)
from recspec.spec import FeatureSpec

SCORE_FLOATS = 1 << 22
"""Numbers of the widest layer that `score_items` computes at once: 16 MB."""


class SequenceSettings(config.Settings):
    """Settings of every model of a user's history."""

    embedding_dim: int = Field(16, ge=1, description="width of every embedding")
    embedding_std: float | None = Field(
        None, ge=0, description="standard deviation of initial embeddings; null: uniform within 1 / sqrt(rows)"
    )
    combiner: Literal["sum", "mean"] = Field("mean", description="pooling of a list's embeddings, except histories")
    hidden: tuple[int, ...] = Field((200, 80), min_length=1, description="widths of the MLP, before the logit")
    activation: Activation = Field("prelu", description="activation of the MLP's hidden layers")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after each hidden layer of the MLP")
    attention_hidden: tuple[int, ...] = Field(
        (80, 40), min_length=1, description="widths of the attention unit's hidden layers"
    )
    attention_activation: Activation = Field("sigmoid", description="activation of the attention unit's hidden layers")

    @field_validator("hidden", "attention_hidden")
    @classmethod
    def _positive(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if any(width < 1 for width in widths):
            raise ValueError("every width is at least 1")
        return widths


class DinSettings(SequenceSettings):
    """Sizes of DIN; the defaults are those published for Amazon Books."""

    attention: Literal["unit", "dot"] = Field(
        "unit", description="weight of an event: unit, an MLP of event and item; dot, the product of their vectors"
    )
    softmax: bool = Field(False, description="make the weights of a row's events sum to 1; the paper doesn't")


class Din(Model):
    """DIN: the sum of a history's events, each weighted by an attention unit of event and item, then an MLP.

    The MLP also reads the item and the other features of user, item and context: ids are embedded, lists pooled, and
    numbers unchanged. Embeddings start uniform within 1 / sqrt(rows), layers Glorot-uniform.
    """

    name: ClassVar[str] = "din"
    steady_shapes: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("item", "history", "label")
    Settings: ClassVar[type[config.Settings]] = DinSettings
    settings: DinSettings

    def __init__(self, spec: FeatureSpec, settings: DinSettings, held: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, held)
        self.inputs = Inputs(spec, settings, self.name, held)
        width = self.inputs.event_dim
        if settings.attention == "unit":
            self.unit = AttentionUnit(width, width, settings.attention_hidden, settings.attention_activation)
        self.head = Head(2 * width + self.inputs.side_dim, settings)

    def features(self) -> tuple[str, ...]:
        """The inputs and the histories."""
        return self.inputs.features

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,)."""
        return cast(Tensor, self.head(self._joined(batch)))

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy, in nats."""
        return self.head.loss(self._joined(batch), batch[self.spec.label])

    def _joined(self, batch: Batch) -> Tensor:
        """The MLP's input: the item, the interest and the other features."""
        events = self.inputs.histories.events(batch)
        read = self.inputs(batch, events)
        if self.settings.attention == "unit":
            weights = self.unit(read.events, read.target, events)
        else:
            weights = (read.events * events.spread(read.target)).sum(1)
        if self.settings.softmax:
            weights = events.softmax(weights)
        interest = events.weighted_sum(read.events, weights)
        return torch.cat([read.target, interest, read.side], dim=1)

    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request.

        The parts of events alone are computed once a request, the parts of items alone once an item.
        """
        if not may_replace(self):
            return super().score_items(request, items)
        requests, candidates = num_rows(request), num_rows(items)
        if not torch.compiler.is_compiling() and not (requests and candidates):
            return torch.zeros(requests, candidates, device=self.device)
        events = self.inputs.histories.events(request)
        ours, theirs = self.inputs(request, events, target=False), self.inputs(items)
        width = self.inputs.event_dim
        of_target, of_interest, of_request, of_item = self.head.parts(
            width, width, *self.inputs.side_columns(request, items)
        )
        own = F.linear(ours.side, of_request)
        other = F.linear(theirs.target, of_target, self.head.mlp.first.bias) + F.linear(theirs.side, of_item)
        scores = []
        for rows, happened, present in blocks(events, ours.events, candidates * self._width):
            first = F.linear(self._interests(happened, present, theirs.target), of_interest)
            first = first + own[rows].unsqueeze(1) + other
            scores.append(self.head.after_first(first.flatten(0, 1)).view(-1, candidates))
        return torch.cat(scores)

    @property
    def _width(self) -> int:
        return max(self.inputs.event_dim, *self.settings.attention_hidden)

    def _interests(self, happened: Tensor, present: Tensor, target: Tensor) -> Tensor:
        """The interest (R, N, D) of some requests' events (R, L, D) in items (N, D)."""
        if self.settings.attention == "dot":
            weights = happened @ target.t()
        else:
            parts = []
            events, of_targets = self.unit.of_events(happened).unsqueeze(2), self.unit.of_targets(target)
            step = max(1, SCORE_FLOATS // max(1, happened.shape[0] * happened.shape[1] * self._width))
            for some, of_some in zip(*(split(each, step) for each in (target, of_targets)), strict=True):
                first = self.unit.of_products(happened.unsqueeze(2) * some) + events + of_some
                parts.append(self.unit.after_first(first.flatten(0, 2)).view(*happened.shape[:2], -1))
            weights = torch.cat(parts, dim=2)
        if self.settings.softmax:
            weights = weights.masked_fill(~present.unsqueeze(2), torch.finfo(weights.dtype).min).softmax(1)
        weights = weights * present.unsqueeze(2)
        return weights.transpose(1, 2) @ happened


# --- what DIN and DIEN share -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """A batch's features as vectors; empty if not requested."""

    target: Tensor
    """The item's vector (B, D), of the features with histories."""
    events: Tensor
    """(T, D)."""
    sampled: Tensor
    """The sampled ids of the events (T, D)."""
    side: Tensor
    """The other features of the batch (B, S)."""


class Inputs(nn.Module):
    """Embeddings of item and history, which share tables, and of all other ids; numbers are unchanged."""

    def __init__(self, spec: FeatureSpec, settings: SequenceSettings, who: str, held: RowsHeld | None = None) -> None:
        super().__init__()
        ids, self.numbers = ids_and_numbers(spec, spec.inputs())
        problems = [
            f"feature '{name}' is a list of numbers, which {who} does not take; take it out of channel_spec"
            for name in self.numbers
            if spec.features[name].is_list
        ]
        if problems:
            raise SettingsError.of(who, problems)
        self.histories = Histories(spec, who)
        pairs = self.histories.pairs
        self.others = tuple(name for name in ids if name not in pairs)
        self.embeddings = Embeddings(
            self.histories.spec,
            dict.fromkeys((*pairs, *self.others), settings.embedding_dim),
            combiner=settings.combiner,
            start="uniform",
            std=settings.embedding_std,
            more_ids=self.histories.ids_per_event,
            held=held,
        )
        self.event_dim = len(pairs) * settings.embedding_dim
        self.side_dim = len(self.others) * settings.embedding_dim + len(self.numbers)

    @property
    def features(self) -> tuple[str, ...]:
        """The features read, without sampled ids."""
        pairs = self.histories.pairs
        return (*pairs, *self.others, *self.numbers, *pairs.values())

    def forward(
        self, batch: Batch, events: Events | None = None, *, target: bool = True, sampled: bool = False
    ) -> Read:
        """Vectors of the item, the events and the other features of the batch."""
        others = [name for name in self.others if name in batch]
        found = self.histories.vectors(self.embeddings, batch, events, target=target, sampled=sampled, others=others)
        none = self.embeddings.stores[next(iter(self.embeddings.stores))].new_zeros(num_rows(batch), 0)
        side = [none if found.others is None else found.others]
        side += [batch[name].unsqueeze(1) for name in self.numbers if name in batch]
        return Read(
            none if found.target is None else found.target,
            none if found.events is None else found.events,
            none if found.sampled is None else found.sampled,
            torch.cat(side, dim=1) if len(side) > 1 else side[0],
        )

    def side_columns(self, *batches: Collection[str]) -> tuple[list[int], ...]:
        """The columns of `Read.side` that each batch provides, in order."""
        order = self.embeddings.order(self.others)
        widths = {name: self.embeddings.widths[name] for name in order} | dict.fromkeys(self.numbers, 1)
        names = [name for name, width in widths.items() for _ in range(width)]
        return tuple([place for place, name in enumerate(names) if name in batch] for batch in batches)


class Head(nn.Module):
    """The MLP over all inputs, and the logit, in fp32 even under autocast: (B, X) -> (B,)."""

    def __init__(self, width: int, settings: SequenceSettings) -> None:
        super().__init__()
        self.mlp = ActivatedMlp((width, *settings.hidden), settings.activation, dropout=settings.dropout)
        self.out = nn.Linear(settings.hidden[-1], 1)
        start_glorot(self.out)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B,)."""
        return self.after_first(self.mlp.first(x))

    def loss(self, x: Tensor, label: Tensor, scale: float = 1.0) -> Tensor:
        """`scale` times the mean binary cross-entropy of the logits, in nats: (B, X), (B,) -> ()."""
        return scale * cross_entropy(self(x), label)

    def after_first(self, x: Tensor) -> Tensor:
        """Logits (B,) from the first layer's output."""
        x = self.mlp.after_first(x)
        with torch.autocast(x.device.type, enabled=False):
            return cast(Tensor, self.out(x.to(self.out.weight.dtype))).squeeze(1)

    def parts(self, target: int, interest: int, *side: Sequence[int]) -> tuple[Tensor, ...]:
        """Columns of the first layer for the target, for the interest, and for each part of the other features.

        Args:
            target: the number of the target's columns.
            interest: the number of the interest's columns.
            side: for each part, its columns among the rest.
        """
        weight = self.mlp.first.weight
        own, made, rest = torch.split(weight, [target, interest, weight.shape[1] - target - interest], dim=1)
        return own, made, *(columns_of(rest, columns) for columns in side)


def blocks(events: Events, values: Tensor, floats: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of rows with the values of their events (R, L, D) and the mask of the events (R, L).

    `floats` is the number of floats that an event takes; a block takes `SCORE_FLOATS` or has one row. Exported
    programs take any number of items and have one block.
    """
    if torch.compiler.is_compiling():
        yield slice(None), events.padded(values), events.there
        return
    step = max(1, SCORE_FLOATS // max(1, events.length * floats))
    parts = torch.split(events.padded(values), step), torch.split(events.there, step)
    for start, (happened, there) in zip(range(0, events.num_rows, step), zip(*parts, strict=True), strict=True):
        yield slice(start, start + step), happened, there


def split(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """Parts of at most `size` rows; the whole in exported programs, which take any number of rows."""
    return (x,) if torch.compiler.is_compiling() else torch.split(x, size)


def columns_of(x: Tensor, columns: Sequence[int]) -> Tensor:
    """Some columns of a matrix, without shapes that depend on values, for exported programs."""
    return x.index_select(1, torch.tensor(columns, dtype=torch.int64, device=x.device))
