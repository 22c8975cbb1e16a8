"""DIN: a sum of a user's events, weighted by their relevance to the item, then an MLP.

Zhou et al.: Deep Interest Network for Click-Through Rate Prediction, KDD 2018.

Shapes: B rows; T events; D width of an item's vector; S width of the other features; R requests; N items to score;
L the longest history; W width of the MLP's first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import MappingProxyType
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models import click_defaults as rules
from recspec.models.base import DECAY_SPACE, TRAINING_SPACE, LossNeeds, Model, Shapes, UniformStd, Widths, list_problems
from recspec.models.facts import DataFacts, Proposals
from recspec.models.layers import (
    ActivatedMlp,
    Activation,
    AfterFirst,
    AttentionUnit,
    Batch,
    Embeddings,
    Histories,
    RowsHeld,
    attention_to_items,
    cross_entropy,
    floats_at_once,
    floats_in_cache,
    ids_and_numbers,
    num_rows,
    number_widths,
    side_by_side,
    start_glorot,
    weighted_sums,
)

POPULARITY_SHARE = 0.1
"""Share of the decay of click models among negatives by popularity. Three times as much stopped DIN from learning on
two of three sets; none lost up to .14 of AUC."""


class SequenceSettings(config.Settings):
    """Settings of every model of a user's history."""

    embedding_dim: int = Field(16, ge=1, description="width of every embedding")
    embedding_std: UniformStd = None
    combiner: Literal["sum", "mean"] = Field("mean", description="pooling of a list's embeddings, except histories")
    hidden: Widths = Field((200, 80), description="widths of the MLP, before the logit")
    activation: Activation = Field("prelu", description="activation of the MLP's hidden layers")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after each hidden layer of the MLP")
    attention_hidden: Widths = Field((80, 40), description="widths of the attention unit's hidden layers")
    attention_activation: Activation = Field("sigmoid", description="activation of the attention unit's hidden layers")


class DinSettings(SequenceSettings):
    """Sizes of DIN; the defaults are those published for Amazon Books."""

    attention: Literal["unit", "dot"] = Field(
        "unit", description="weight of an event: unit, an MLP of event and item; dot, the product of their vectors"
    )
    softmax: bool = Field(False, description="normalise the weights of a row's events to a sum of 1, unlike the paper")


class SequenceModel(Model):
    """A model of a user's history: its features, and those of an auxiliary loss that reads sampled ids."""

    needs = ("item", "history", "label")
    space = MappingProxyType(
        {
            **TRAINING_SPACE,
            "embedding_dim": [8, 16, 32, 64],
            "hidden": [(64, 32), (128, 64), (200, 80), (512, 256)],
            "activation": ["prelu", "dice"],
            "dropout": "0.0..0.6",
            "train.parts.inputs.embeddings.weight_decay": DECAY_SPACE,
        }
    )
    auxiliary = 0.0
    """The auxiliary loss's weight."""

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        """See `Model.defaults`: training as of click models on labelled rows, and beside negatives by popularity.

        Beside evenly drawn negatives, a tenth of the decay helped on one raw dataset and not on another; all of it cost
        40 percent of NDCG@10 among 99 items. So other interactions keep the class's settings.
        """
        if facts.task == "clicks":
            return rules.training(facts, {"inputs.embeddings": 1.0})
        drawn = rules.drawn_anew(facts)
        trained = rules.training(facts, {"inputs.embeddings": POPULARITY_SHARE}, interactions=True)
        return {**trained, **drawn} if drawn else {}

    @classmethod
    def shapes(cls, settings: config.Settings) -> Shapes:
        """Few, as long as the attention over events is computed in blocks."""
        kind = getattr(settings, "attention_activation", None)
        return "few" if kind in ("sigmoid", "relu") else "changing"

    def __init__(self, spec: FeatureSpec, settings: SequenceSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.inputs = Inputs(spec, settings, self.name, table_rows)
        self.histories = self.inputs.histories

    def features(self) -> tuple[str, ...]:
        """The inputs and the histories."""
        return self.inputs.features

    def loss_needs(self) -> LossNeeds:
        """The features of `forward`, and the sampled ids if there is an auxiliary loss."""
        return LossNeeds((*self.features(), *(self.histories.negatives.values() if self.auxiliary else ())))


class Din(SequenceModel):
    """DIN: the sum of a history's events, each weighted by an attention unit of event and item, then an MLP.

    The MLP also reads the item and the other features of user, item and context: ids are embedded, lists pooled, and
    numbers and vectors unchanged. Embeddings start uniform within 1 / sqrt(rows), layers Glorot-uniform.
    """

    name = "din"
    Settings = DinSettings
    settings: DinSettings

    def __init__(self, spec: FeatureSpec, settings: DinSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        width = self.inputs.event_dim
        if settings.attention == "unit":
            self.unit = AttentionUnit(width, width, settings.attention_hidden, settings.attention_activation)
        self.head = Head(2 * width + self.inputs.side_dim, settings)

    def forward(self, batch: Batch) -> Tensor:
        return cast(Tensor, self.head(self._joined(batch)))

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy, in nats."""
        return self.head.loss(self._joined(batch), batch[self.spec.label])

    def _joined(self, batch: Batch) -> Tensor:
        """The MLP's input: the item, the interest and the other features."""
        events = self.histories.events(batch)
        (target, happened), side = self.inputs(batch, [self.histories.target(batch), *self.histories.at(batch, events)])
        if self.settings.attention == "unit":
            weights = self.unit(happened, target, events)
        else:
            weights = (happened * events.spread(target)).sum(1)
        if self.settings.softmax:
            weights = events.softmax(weights)
        # Equation 3 of Zhou et al., KDD 2018: v_U(A) = sum_j a(e_j, v_A) e_j. Without a softmax, its length tells how
        # strong the interest is (section 4.3).
        return torch.cat([target, events.weighted_sum(happened, weights), side], dim=1)

    def side_scores(self, request: Batch, items: Batch) -> Tensor:
        """`score_items`, with the parts of events alone computed once a request, those of items alone once an item."""
        if self.training:  # Dice standardises by the rows of a call
            return self.pair_scores(request, items)
        events, width = self.histories.events(request), self.inputs.event_dim
        (values,), of_ours = self.inputs(request, self.histories.at(request, events))
        (target,), of_theirs = self.inputs(items, [self.histories.target(items)])
        columns = self.inputs.side_columns(request, items)
        of_target, of_interest, of_request, of_item = self.head.parts(width, width, *columns)
        own = F.linear(of_ours, of_request)
        other = F.linear(target, of_target, self.head.mlp.first.bias) + F.linear(of_theirs, of_item)
        happened, present = events.padded(values), events.present_mask
        if torch.compiler.is_compiling():
            made = self._interests(happened, present, target)
            first = F.linear(made, of_interest) + own.unsqueeze(1) + other
            return self.head.after_first(first.flatten(0, 1)).view(-1, num_rows(items))

        def interest(row: int, some: slice) -> list[Made]:
            mine = happened[row][present[row]]
            if not len(mine):
                return []
            by_unit = self.settings.attention == "unit"
            weights = attention_to_items(self.unit, mine, target[some]) if by_unit else mine @ target[some].t()
            weights = weights.softmax(0) if self.settings.softmax else weights
            return [weighted_sums([weights], mine, of_interest)]

        return self.head.scores_of_all(own, other, interest)

    def _interests(self, happened: Tensor, present: Tensor, target: Tensor) -> Tensor:
        """The interest (R, N, D) of requests' events (R, L, D) in items (N, D), in programs of any size."""
        if self.settings.attention == "dot":
            weights = happened @ target.t()
        else:
            # The first layer of the unit by parts: A h + C h, B t - C t + b, and P (h * t).
            first = self.unit.of_products(happened.unsqueeze(2) * target) + self.unit.of_targets(target)
            first = first + self.unit.of_events(happened).unsqueeze(2)
            weights = self.unit.after_first(first.flatten(0, 2)).view(*happened.shape[:2], -1)
        if self.settings.softmax:
            weights = weights.masked_fill(~present.unsqueeze(2), torch.finfo(weights.dtype).min).softmax(1)
        weights = weights * present.unsqueeze(2)
        return weights.transpose(1, 2) @ happened


# --- what DIN and DIEN share -----------------------------------------------------------------------------------------


Made = tuple[Tensor, Tensor]
"""An input of the head (N, X), and its columns of the head's first layer (W, X)."""


class Inputs(nn.Module):
    """Embeddings of item and history, which share tables, and of all other ids; numbers and vectors are unchanged."""

    def __init__(
        self, spec: FeatureSpec, settings: SequenceSettings, who: str, table_rows: RowsHeld | None = None
    ) -> None:
        super().__init__()
        ids, self.numbers = ids_and_numbers(spec, spec.inputs())
        SettingsError.refuse(who, list_problems(spec, self.numbers, who))
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
            table_rows=table_rows,
        )
        self.event_dim = len(pairs) * settings.embedding_dim
        self.number_widths = number_widths(spec, self.numbers)
        self.side_dim = len(self.others) * settings.embedding_dim + sum(self.number_widths.values())

    @property
    def features(self) -> tuple[str, ...]:
        """The features read, without sampled ids."""
        pairs = self.histories.pairs
        return (*pairs, *self.others, *self.numbers, *pairs.values())

    def forward(self, batch: Batch, asked: Sequence[Batch]) -> tuple[list[Tensor], Tensor]:
        """The vectors (n, D) of each of several sets of ids (n,), and the batch's other features side by side (B, S).

        All come from one lookup: the fewest gathers and one gradient a table. The sets hold ids by item feature.
        """
        pairs = self.histories.pairs
        ids = {name: torch.cat([part[name] for part in asked]) for name in pairs} if len(asked) > 1 else asked[0]
        beside, found = self.embeddings.beside(batch, [name for name in self.others if name in batch], ids)
        sizes = [next(iter(part.values())).shape[0] for part in asked]
        side = [found.new_zeros(num_rows(batch), 0) if beside is None else beside]
        if numbers := [batch[name] for name in self.numbers if name in batch]:
            side.append(side_by_side(numbers))
        vectors = list(torch.split(found, sizes)) if len(asked) > 1 else [found]
        return vectors, torch.cat(side, dim=1) if len(side) > 1 else side[0]

    def side_columns(self, *batches: Collection[str]) -> tuple[list[int], ...]:
        """The columns of `forward`'s other features that each batch provides, in order."""
        order = self.embeddings.order(self.others)
        widths = {name: self.embeddings.widths[name] for name in order} | self.number_widths
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
        return self.after_first(self.mlp.first(x))

    def loss(self, x: Tensor, label: Tensor, scale: float = 1.0) -> Tensor:
        """`scale` times the mean binary cross-entropy of the logits, in nats: (B, X), (B,) -> ()."""
        return scale * cross_entropy(self(x), label)

    def after_first(self, x: Tensor) -> Tensor:
        """Logits (B,) from the first layer's output."""
        x = self.mlp.after_first(x)
        with torch.autocast(x.device.type, enabled=False):
            return cast(Tensor, self.out(x.to(self.out.weight.dtype))).squeeze(1)

    def scores_of_all(self, own: Tensor, other: Tensor, made: Callable[[int, slice], list[Made]]) -> Tensor:
        """Logits (R, N) of every item for every request, one request and a block of items at a time.

        Args:
            own: (R, W) the requests' parts of the first layer.
            other: (N, W) the items' parts, with the bias.
            made: for a request and a block of n items, each further input (n, X) and its columns of the layer (W, X).
        """
        widest = max(layer.out_features for layer in cast(Sequence[nn.Linear], self.mlp.layers))
        step, few = (max(1, floats // widest) for floats in (floats_at_once(other), floats_in_cache(other)))
        scores, after_first = own.new_empty(len(own), len(other)), AfterFirst(self.mlp, self.out)
        for row, mine in enumerate(own):
            for some in (slice(start, start + step) for start in range(0, len(other), step)):
                inputs, theirs, found = made(row, some), other[some], scores[row, some]
                for part in (slice(start, start + few) for start in range(0, len(theirs), few)):
                    first = theirs[part] + mine
                    for each, columns in inputs:
                        first.addmm_(each[part], columns.t())
                    found[part] = after_first(first)
        return scores

    def parts(self, target: int, interest: int, *side: Sequence[int]) -> tuple[Tensor, ...]:
        """Columns of the first layer: `target` many, `interest` many, and for each `side` its columns of the rest."""
        weight = self.mlp.first.weight
        own, made, rest = torch.split(weight, [target, interest, weight.shape[1] - target - interest], dim=1)
        return own, made, *(columns_of(rest, columns) for columns in side)


def columns_of(x: Tensor, columns: Sequence[int]) -> Tensor:
    """Some columns of a matrix, without shapes that depend on values, for exported programs."""
    return x.index_select(1, torch.tensor(columns, dtype=torch.int64, device=x.device))
