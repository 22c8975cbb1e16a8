"""Models of self-attention over a user's latest events: what SASRec and BERT4Rec have in common.

With e the items' vectors and p a vector of each place, counted from the end:

    x_t = norm(sqrt(d) e[item_t] + p[T - t]);  h = norm(blocks(x));  score of item i = h_t . e_i

Shapes: B users; N items; C items that the softmax compares; P events; R requests; L the longest list; d width; K drawn
items.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import SettingsError, SpecError
from recspec.feature_spec import FeatureSpec
from recspec.models.base import Shapes, list_problems
from recspec.models.facts import DataFacts, Proposals
from recspec.models.interactions import Interactions
from recspec.models.item_model import TrainedItemModel, shallow_copy
from recspec.models.known_items import Stored
from recspec.models.layers import (
    Batch,
    Blocks,
    BlockSizes,
    Embeddings,
    GatedBlock,
    RowsHeld,
    TransformerBlock,
    at_least_fp32,
    drop,
    softmax_loss,
)

STEADY = 256
"""Rows of products are a multiple of this, as oneDNN prepares for each new shape."""

LONG_LISTS, LENGTHS = 40, (50, 200)
"""Events of a user from which on models are deeper, and read the latest 200 events instead of 50."""

DENSE_ITEMS = 50
"""Events of an item from which on little dropout is needed."""

MOST_LOGITS = {"cpu": 5e10, "cuda": 1e13}
"""Logits of an epoch under which the softmax is over all items: some 75 s on one core with bf16 units."""

STD = 0.02
"""Standard deviation of first embeddings, so that first logits are small."""


class SelfAttentionSettings(config.Settings):
    """Settings of every model of self-attention."""

    dim: int = Field(64, ge=1, description="width of item vectors and of every block")
    blocks: int = Field(1, ge=0, le=100, description="number of blocks")
    heads: int = Field(1, ge=1, description="number of attention heads")
    hidden: int = Field(64, ge=1, description="width of the hidden layer of feed-forward nets")
    block: Literal["transformer", "ligr"] = Field(
        "transformer",
        description="kind of the blocks; ligr: sublayers gated by a sigmoid, and SwiGLU (Borisyuk et al., 2025)",
    )
    length: int = Field(50, ge=1, description="number of a user's latest events that are read")
    dropout: float = Field(0.2, ge=0, lt=1, description="dropout of embeddings and behind every sublayer")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention weights")
    input_norm: bool = Field(False, description="normalise what goes into the first block (LayerNorm)")
    residual: bool = Field(False, description="add the input of every attention to its output once more")
    loss: Literal["full", "sampled"] = Field(
        "full", description="softmax over all items, or over the next item and drawn ones"
    )
    num_negatives: int = Field(
        512, ge=1, description="with loss sampled: items drawn at each step, shared by its events"
    )
    popularity_power: float = Field(
        0.0, ge=0, description="exponent of an item's popularity by which items are drawn; 0: uniform"
    )
    logq: bool = Field(
        True, description="with loss sampled: correct logits by the log of how often items are drawn (logQ)"
    )

    side_features: bool = Field(
        False, description="add vectors of an item's other features, as categories and numbers, to its own"
    )
    id_dropout: float = Field(
        0.1,
        ge=0,
        lt=1,
        description=(
            "with side_features: share of items whose own vector is hidden at each step, to learn from the other "
            "features"
        ),
    )

    @model_validator(mode="after")
    def _agree(self) -> SelfAttentionSettings:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is no multiple of heads {self.heads}; every head has the same width")
        return self


class SelfAttention(TrainedItemModel):
    """Vectors of items and places, blocks of self-attention over packed lists, and a softmax over many items."""

    settings: SelfAttentionSettings
    causal: ClassVar[bool]
    """Whether an event sees earlier ones alone."""
    space = MappingProxyType(
        {
            "dim": [32, 64, 128],
            "blocks": [1, 2],
            "dropout": "0..0.7",
            "block": ["transformer", "ligr"],
        }
    )
    seen: Tensor

    def __init__(self, spec: FeatureSpec, settings: SelfAttentionSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        own, d = settings, settings.dim
        self.items = nn.Parameter(torch.empty(self.num_items, d).normal_(std=STD))
        self.described = None
        if own.side_features:
            self.described = DescribedItems(spec, d, self.name, table_rows)
            self.item_inputs, self.traits = self.described.names, replace(self.traits, scores_unseen_items=True)
            # Numbers, not flags, since a running mean of the weights takes in buffers too.
            self.register_buffer("seen", torch.ones(self.num_items))
        self.positions = nn.Parameter(torch.empty(own.length, d).normal_(std=STD))
        self.input_norm = nn.LayerNorm(d) if own.input_norm else nn.Identity()
        kind = GatedBlock if own.block == "ligr" else TransformerBlock
        sizes = BlockSizes(
            d,
            own.heads,
            own.hidden,
            own.dropout,
            own.attention_dropout,
            residual=own.residual,
            causal=self.causal,
        )
        self.blocks = Blocks(kind(sizes) for _ in range(own.blocks))
        self.norm = nn.LayerNorm(d)
        self.drawn: Tensor | None = None  # (N,) probabilities by which negatives are drawn
        self.compared: Tensor | None = None  # (C,) items of the softmax, ascending; None: all

    @classmethod
    def shapes(cls, settings: config.Settings) -> Shapes:  # noqa: ARG003
        """Steady: a batch holds the same number of events at every step."""
        return "steady"

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        positives = facts.rows * (facts.positive_share if facts.task == "clicks" else 1)
        of_user, of_item = positives / max(1, facts.users), positives / max(1, facts.items)
        described = f"{of_user:,.0f} events a user, {of_item:,.0f} an item"
        dense = of_user >= LONG_LISTS
        read = min(of_user, LENGTHS[dense])
        # Powers of two: steps of some 1,500 to 12,000 events, and 40 of them or more an epoch.
        wanted = min(256, 12_000 / max(1.0, read), facts.users / 40)
        users = 1 << max(3, int(wanted).bit_length() - 1)
        steps = max(1, facts.users / users)
        dropout = 0.5 if of_item < DENSE_ITEMS else 0.2
        full = positives * facts.items <= MOST_LOGITS.get(facts.device, MOST_LOGITS["cpu"])
        found: dict[str, tuple[object, str]] = {
            "train.optimizer": ("adamw", "as usual for transformers"),
            "train.betas": ((0.9, 0.98), "as usual for transformers"),
            "train.batch_size": (users, f"users of a step; {described}"),
            "train.learning_rate": (2e-3 if users >= 256 else 1e-3, "lower with fewer users in a step"),
            "train.average": (round(1 - 1 / max(50, 2 * steps), 4), "a mean over about two epochs makes valid smooth"),
            "length": (LENGTHS[dense], described),
            "dropout": (dropout, described),
            "blocks": (1 + dense, described),
            "attention_dropout": (dropout * dense, described),
            "input_norm": (dense, described),
            "residual": (dense, described),
            "loss": ("full", "a softmax over all items costs little")
            if full
            else ("sampled", f"a softmax over {facts.items:,} items would cost too much"),
        }
        if not full:
            found["num_negatives"] = (2048, "as many as cost little, shared by the events of a step")
        return found

    def learn_from(self, interactions: Interactions) -> None:
        super().learn_from(interactions)
        counts = torch.bincount(self.known.items.long(), minlength=self.num_items)
        if self.settings.loss == "sampled":
            shares = torch.where(counts > 0, counts.double().pow(self.settings.popularity_power), 0.0)
            self.drawn = (shares / shares.sum().clamp(min=1e-300)).float()
        if self.described is not None:
            self.seen.copy_(counts > 0)
            # As negatives, items that training never saw would push down what their features share with others.
            self.compared = counts.nonzero().squeeze(1)

    def describe(self, items: Batch) -> None:
        """Take the other features of every item."""
        if self.described is not None:
            self.described.take(items)

    def with_items(self, items: Batch) -> Self:
        assert self.described is not None
        other, more = cast(Self, shallow_copy(self)), len(items[self.item_id])
        other.num_items += more
        other.items = nn.Parameter(F.pad(self.items.detach(), (0, 0, 0, more)), requires_grad=False)
        other.seen = F.pad(self.seen, (0, more))
        assert other.described is not None
        other.described.add(items)
        return other

    # --- vectors ------------------------------------------------------------------------------------------------------

    def item_vectors(self) -> Tensor:
        """(N, d) vectors of all items: a score is the product of a request's vector and an item's.

        With side features, an item that training never saw has their vector alone; so has, in training, a share
        `id_dropout` of the others.
        """
        if self.described is None:
            return self.items
        kept = self.seen
        if self.training and self.settings.id_dropout:
            kept = kept * (torch.rand_like(kept) >= self.settings.id_dropout)
        made: Tensor = self.items * kept.unsqueeze(1) + self.described()
        return made

    def request_vector(self, users: Tensor) -> Tensor:
        """(R, d) vectors of users, after all events that are known of them."""
        return self._requests(users, self.item_vectors())

    def score_users(self, users: Tensor) -> Tensor:
        vectors = self.item_vectors()
        return self._requests(users, vectors) @ vectors.t()

    @abstractmethod
    def _requests(self, users: Tensor, vectors: Tensor) -> Tensor:
        """`request_vector`, given the items' vectors."""

    def _placed(self, items: Tensor, back: Tensor, vectors: Tensor) -> Tensor:
        """(..., d) of events, given the rows of their items in `vectors` and the number of later events in the list."""
        # Vaswani et al., 2017, section 3.4: times sqrt(d), so that items weigh as much as places.
        x: Tensor = F.embedding(items, vectors) * self.settings.dim**0.5
        return x + F.embedding(back, self.positions)

    def _entered(self, x: Tensor) -> Tensor:
        """What goes into the blocks."""
        y: Tensor = self.input_norm(x)
        return drop(y, self.settings.dropout) if self.training else y

    # --- loss ---------------------------------------------------------------------------------------------------------

    def _softmax(self, h: Tensor, vectors: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of outputs (P, d), whose next items are `targets` (P,)."""
        if self.drawn is None:
            return softmax_loss(h, *self._among_compared(vectors, targets))
        drawn = torch.multinomial(self.drawn, self.settings.num_negatives, replacement=True)
        logits = h @ vectors[drawn].t()
        if self.settings.logq:
            # Bengio and Senecal, 2008: the logit less the log of the expected number of draws, K q_j.
            logits = logits - (self.drawn[drawn] * len(drawn)).log()
        logits = at_least_fp32(logits).masked_fill(targets.unsqueeze(1) == drawn, -torch.inf)
        own = at_least_fp32(h * vectors[targets]).sum(1, keepdim=True)
        return (torch.cat((own, logits), 1).logsumexp(1) - own.squeeze(1)).sum()

    def _among_compared(self, vectors: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors (C, d) of the items of the softmax, and the rows of the targets in them."""
        if self.compared is None:
            return vectors, targets
        return vectors[self.compared], torch.searchsorted(self.compared, targets)


def back_from_the_end(lengths: Tensor, events: int) -> Tensor:
    """(P,) the number of later events in the list of each event, for packed lists of these lengths (R,)."""
    ends = lengths.cumsum(0).repeat_interleave(lengths, output_size=events)
    return ends - 1 - torch.arange(events, device=ends.device)


class DescribedItems(Stored):
    """Vectors of items from their features besides the id; training gives the features of every item.

    A category is looked up, a list of categories is the mean of its vectors, and numbers and vectors, such
    as those of texts, go through a linear map.
    """

    def __init__(self, spec: FeatureSpec, width: int, who: str, table_rows: RowsHeld | None = None) -> None:
        super().__init__()
        features, rows = spec.features, spec.num_ids(spec.item_id)
        self.names = tuple(name for name in spec.role("item") if name != spec.item_id)
        if not self.names:
            raise SpecError(
                f"{spec.folder}: items have no other features than the id '{spec.item_id}'; leave out side_features"
            )
        if problems := list_problems(spec, [name for name in self.names if not features[name].is_categorical], who):
            raise SettingsError.of(who, problems)
        self.categories = tuple(name for name in self.names if features[name].is_categorical)
        for place, name in enumerate(self.names):
            length = features[name].length
            shape = (rows,) if length is None else (rows, length)
            dtype = torch.int32 if features[name].is_categorical else torch.float32
            self.register_buffer(f"values_{place}", torch.zeros(shape, dtype=dtype))
        widths = dict.fromkeys(self.categories, width)
        self.tables = Embeddings(spec, widths, combiner="mean", std=STD, table_rows=table_rows) if widths else None
        numbers = sum(self._values[name].reshape(rows, -1).shape[1] for name in self.names if name not in widths)
        self.numbers = nn.Linear(numbers, width, bias=False) if numbers else None
        if self.numbers is not None:
            nn.init.normal_(self.numbers.weight, std=STD)

    def allocate_buffers(self, stored: Mapping[str, Tensor]) -> list[str]:
        problems = []
        for place, name in enumerate(self.names):
            ids = stored.get(f"values_{place}")
            if name not in self.categories or ids is None or ids.dtype != torch.int32 or not ids.numel():
                continue
            assert self.tables is not None
            last = self.tables.num_rows[name] - 1
            if not 0 <= int(ids.min()) <= int(ids.max()) <= last:
                problems.append(f"'{name}' holds ids from {ids.min()} to {ids.max()}; expected 0 to {last}")
        return problems

    @property
    def _values(self) -> Batch:
        return {name: self.get_buffer(f"values_{place}") for place, name in enumerate(self.names)}

    def take(self, items: Batch) -> None:
        """Hold these features of every item, by id."""
        for name, held in self._values.items():
            held.copy_(items[name])

    def add(self, items: Batch) -> None:
        """Hold these features of further items behind the others."""
        for place, (name, held) in enumerate(self._values.items()):
            setattr(self, f"values_{place}", torch.cat([held, items[name].to(held)]))

    def forward(self) -> Tensor:
        """(N, d)."""
        values = self._values
        rows, made = len(values[self.names[0]]), []
        if self.tables is not None:
            looked_up = self.tables({name: values[name].long() for name in self.categories})
            made.append(looked_up.view(rows, len(self.categories), -1).sum(1))
        if self.numbers is not None:
            columns = [values[name].reshape(rows, -1) for name in self.names if name not in self.categories]
            made.append(self.numbers(torch.cat(columns, 1)))
        return torch.stack(made).sum(0)
