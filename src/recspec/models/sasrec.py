"""SASRec: causal self-attention over a user's events predicts the next item.

Kang, McAuley: Self-Attentive Sequential Recommendation, ICDM 2018. With e the items' vectors and p a vector of each
place, counted from the end:

    x_t = sqrt(d) e[item_t] + p[T - t];  h = norm(blocks(x));  score of item i after event t = h_t . e_i

The loss is what made it strong (Klenitskiy, Vasilev: Turning Dross Into Gold Loss, RecSys 2023): a softmax over all
items, or over many drawn ones.

Shapes: B users; N items; P events that predict a next one; R requests; L the longest list; d width; K drawn items.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import SpecError
from recspec.feature_spec import FeatureSpec
from recspec.models.base import Shapes
from recspec.models.facts import DataFacts, Proposals
from recspec.models.interactions import Interactions
from recspec.models.item_model import TrainedItemModel
from recspec.models.known_items import KnownEvents, Stored
from recspec.models.layers import (
    Batch,
    Blocks,
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

GAPS = 48
"""Vectors of gaps between events: none known, and powers of two of the unit of time up to 2^46."""

LONG_LISTS, LENGTHS = 40, (50, 200)
"""Events of a user from which on two blocks read the latest 200 events, not one block the latest 50."""

DENSE_ITEMS = 50
"""Events of an item from which on little dropout is needed."""

MOST_LOGITS = {"cpu": 5e10, "cuda": 1e13}
"""Logits of an epoch under which the softmax is over all items: some 75 s on one core with bf16 units."""

STD = 0.02
"""Standard deviation of first embeddings, so that first logits are small."""


class SasRecSettings(config.Settings):
    """Settings of SASRec."""

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
    loss: Literal["full", "sampled"] = Field(
        "full", description="softmax over all items, or over the next item and drawn ones"
    )
    num_negatives: int = Field(
        512, ge=1, description="number of items drawn at each step, shared by its events, with loss sampled"
    )
    popularity_power: float = Field(
        0.0, ge=0, description="exponent of an item's popularity by which items are drawn; 0: uniform"
    )
    logq: bool = Field(
        True, description="correct the logits of drawn items by the log of how often they are drawn (logQ)"
    )

    side_features: bool = Field(
        False, description="add vectors of an item's other features, as categories and numbers, to its own"
    )
    time_gaps: bool = Field(
        False, description="add a vector of the time since the event before, in powers of two; needs event times"
    )

    @model_validator(mode="after")
    def _agree(self) -> SasRecSettings:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is no multiple of heads {self.heads}; every head has the same width")
        return self


class SasRec(TrainedItemModel):
    """SASRec (Kang, McAuley, 2018) with a softmax over many items."""

    name = "sasrec"
    Settings = SasRecSettings
    settings: SasRecSettings
    space = MappingProxyType(
        {"dim": [32, 64, 128], "blocks": [1, 2], "dropout": "0..0.7", "block": ["transformer", "ligr"]}
    )

    def __init__(self, spec: FeatureSpec, settings: SasRecSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        d = settings.dim
        self.items = nn.Parameter(torch.empty(self.num_items, d).normal_(std=STD))
        self.described = None
        if settings.side_features:
            self.described = DescribedItems(spec, d, table_rows)
            self.item_inputs = self.described.names
        self.positions = nn.Parameter(torch.empty(settings.length, d).normal_(std=STD))
        self.start = nn.Parameter(torch.zeros(d))
        """What stands for the events of a user without any."""
        self.gaps = None
        if settings.time_gaps:
            self.known = KnownEvents(self.num_users, self.num_items, with_times=True)
            self.gaps = nn.Parameter(torch.empty(GAPS, d).normal_(std=STD))
        kind = GatedBlock if settings.block == "ligr" else TransformerBlock
        own = settings
        self.blocks = Blocks(kind(d, own.heads, own.hidden, own.dropout) for _ in range(own.blocks))
        self.norm = nn.LayerNorm(d)
        self.drawn: Tensor | None = None  # (N,) probabilities by which negatives are drawn

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
        full = positives * facts.items <= MOST_LOGITS.get(facts.device, MOST_LOGITS["cpu"])
        found: dict[str, tuple[object, str]] = {
            "train.optimizer": ("adamw", "as usual for transformers"),
            "train.betas": ((0.9, 0.98), "as usual for transformers"),
            "train.batch_size": (users, f"users of a step; {described}"),
            "train.learning_rate": (2e-3 if users >= 256 else 1e-3, "lower with fewer users in a step"),
            "train.average": (round(1 - 1 / max(50, 2 * steps), 4), "a mean over about two epochs makes valid smooth"),
            "blocks": (1 + dense, described),
            "length": (LENGTHS[dense], described),
            "dropout": (0.5 if of_item < DENSE_ITEMS else 0.2, described),
            "loss": ("full", "a softmax over all items costs little")
            if full
            else ("sampled", f"a softmax over {facts.items:,} items would cost too much"),
        }
        if not full:
            found["num_negatives"] = (2048, "as many as cost little, shared by the events of a step")
        return found

    def learn_from(self, interactions: Interactions) -> None:
        super().learn_from(interactions)
        if self.settings.loss == "sampled":
            counts = torch.bincount(self.known.items.long(), minlength=self.num_items).double()
            shares = torch.where(counts > 0, counts.pow(self.settings.popularity_power), 0.0)
            self.drawn = (shares / shares.sum().clamp(min=1e-300)).float()

    def describe(self, items: Batch) -> None:
        """Take the other features of every item."""
        if self.described is not None:
            self.described.take(items)

    # --- vectors ------------------------------------------------------------------------------------------------------

    def item_vectors(self) -> Tensor:
        """(N, d) vectors of all items: a score is the product of a request's vector and an item's."""
        return self.items if self.described is None else self.items + self.described()

    def request_vector(self, users: Tensor) -> Tensor:
        """(R, d) vectors of users, after all events that are known of them."""
        return self._requests(users, self.item_vectors())

    def score_users(self, users: Tensor) -> Tensor:
        vectors = self.item_vectors()
        return self._requests(users, vectors) @ vectors.t()

    def _requests(self, users: Tensor, vectors: Tensor) -> Tensor:
        most = self.settings.length
        if torch.compiler.is_compiling():
            places, held = self.known.padded(users, most)
            if not places.shape[1]:
                return self.start.expand(len(users), -1)
            back = torch.arange(places.shape[1] - 1, -1, -1, device=places.device)
            x = self._of_events(places, back, self.known.offsets[users].unsqueeze(1), vectors)
            return torch.where(held[:, -1:], self.norm(self.blocks.padded(x, held)[:, -1]), self.start)
        lengths = self.known.lengths(users, most)
        order = lengths.argsort()
        order = order[int((lengths == 0).sum()) :]
        made = self.start.expand(len(users), -1).clone()
        if len(order):
            places, lengths, sizes = self.known.packed(users[order], most)
            x = self._of_packed(places, lengths, users[order], vectors)
            made[order] = self.norm(self.blocks.of_last(x, lengths, sizes)).to(made.dtype)
        return made

    def _of_packed(self, places: Tensor, lengths: Tensor, users: Tensor, vectors: Tensor) -> Tensor:
        """(P', d) what goes into the blocks: P events and some more rows up to a steady number."""
        ends, firsts = (
            each.repeat_interleave(lengths, output_size=len(places))
            for each in (lengths.cumsum(0), self.known.offsets[users])
        )
        back = ends - 1 - torch.arange(len(places), device=places.device)
        more = (0, -len(places) % STEADY)
        x = self._of_events(F.pad(places, more), F.pad(back, more), F.pad(firsts, more), vectors)
        return drop(x, self.settings.dropout) if self.training else x

    def _of_events(self, places: Tensor, back: Tensor, firsts: Tensor, vectors: Tensor) -> Tensor:
        """(..., d) of events at `places` in what is known.

        `back` is the number of later events that are read, `firsts` the place of the user's first event.
        """
        # Vaswani et al., 2017, section 3.4: times sqrt(d), so that items weigh as much as places.
        x: Tensor = F.embedding(self.known.items[places].long(), vectors) * self.settings.dim**0.5
        x = x + F.embedding(back, self.positions)
        if self.gaps is not None:
            times = self.known.times
            gap = torch.where(places > firsts, times[places] - times[(places - 1).clamp(min=0)], 0.0)
            x = x + F.embedding(gap_number(gap), self.gaps)
        return x

    # --- loss ---------------------------------------------------------------------------------------------------------

    def loss_of_users(self, users: Tensor) -> Tensor:
        lengths = self.known.lengths(users, self.settings.length + 1)
        users = users[lengths.argsort()]
        places, lengths, sizes = self.known.packed(users, self.settings.length, before=1)
        vectors = self.item_vectors()
        x = self._of_packed(places, lengths, users, vectors)
        h = self.norm(self.blocks(x, lengths, sizes)[: len(places)])
        targets = self.known.items[places + 1].long()
        return self._softmax(h, vectors, targets) + self._loss_of_start(users, vectors)

    def _softmax(self, h: Tensor, vectors: Tensor, targets: Tensor) -> Tensor:
        if self.drawn is None:
            return softmax_loss(h, vectors, targets)
        drawn = torch.multinomial(self.drawn, self.settings.num_negatives, replacement=True)
        logits = h @ vectors[drawn].t()
        if self.settings.logq:
            # Bengio and Senecal, 2008: the logit less the log of the expected number of draws, K q_j.
            logits = logits - (self.drawn[drawn] * len(drawn)).log()
        logits = at_least_fp32(logits).masked_fill(targets.unsqueeze(1) == drawn, -torch.inf)
        own = at_least_fp32(h * vectors[targets]).sum(1, keepdim=True)
        return (torch.cat((own, logits), 1).logsumexp(1) - own.squeeze(1)).sum()

    def _loss_of_start(self, users: Tensor, vectors: Tensor) -> Tensor:
        """The loss of the first events of users; it trains `start` alone, so that items are not drawn to it."""
        firsts = self.known.offsets[users].clamp(max=len(self.known.items) - 1)
        logits = vectors.detach() @ self.start
        shares = at_least_fp32(logits).log_softmax(0)[self.known.items[firsts].long()]
        return -torch.where(self.known.lengths(users, 1) > 0, shares, 0).sum()


def gap_number(gap: Tensor) -> Tensor:
    """The number of a gap's vector, of any shape: 0 without a gap, else 1 + floor(log2(gap)) within the vectors."""
    number = 1 + gap.clamp(min=1e-30).log2().floor().clamp(0, GAPS - 2)
    return torch.where(gap > 0, number, 0).long()


class DescribedItems(Stored):
    """Vectors of items from their features besides the id; training gives the features of every item.

    A category is looked up, a list of categories is the mean of its vectors, and numbers go through a linear map.
    """

    def __init__(self, spec: FeatureSpec, width: int, table_rows: RowsHeld | None = None) -> None:
        super().__init__()
        features, rows = spec.features, spec.num_ids(spec.item_id)
        self.names = tuple(name for name in spec.role("item") if name != spec.item_id)
        if not self.names:
            raise SpecError(
                f"{spec.folder}: items have no other features than the id '{spec.item_id}'; leave out side_features"
            )
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
