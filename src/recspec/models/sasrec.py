"""SASRec: causal self-attention over a user's events predicts the next item.

Kang, McAuley: Self-Attentive Sequential Recommendation, ICDM 2018. With e the items' vectors and p a vector of each
place, counted from the end:

    x_t = sqrt(d) e[item_t] + p[T - t];  h = norm(blocks(x));  score of item i after event t = h_t . e_i

The loss is what made it strong (Klenitskiy, Vasilev: Turning Dross Into Gold Loss, RecSys 2023): a softmax over all
items, or over many drawn ones.

Shapes: B users; N items; P events that predict a next one; R requests; L the longest list; d width; K drawn items.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from recspec import config
from recspec.models.facts import DataFacts, Proposals
from recspec.models.interactions import Interactions
from recspec.models.item_model import TrainedItemModel
from recspec.nn import Blocks, GatedBlock, RowsHeld, TransformerBlock, at_least_fp32, drop, softmax_loss
from recspec.spec import FeatureSpec

STEADY = 256
"""Rows of products are a multiple of this, as oneDNN prepares for each new shape."""

STD = 0.02
"""Standard deviation of first embeddings, so that first logits are small."""


class SasRecSettings(config.Settings):
    """Settings of SASRec."""

    dim: int = Field(64, ge=1, description="width of item vectors and of every block")
    blocks: int = Field(1, ge=0, description="number of blocks")
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

    @model_validator(mode="after")
    def _agree(self) -> SasRecSettings:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is no multiple of heads {self.heads}; every head has the same width")
        return self


class SasRec(TrainedItemModel):
    """SASRec (Kang, McAuley, 2018) with softmax over many items."""

    name = "sasrec"
    Settings = SasRecSettings
    settings: SasRecSettings
    steady_shapes = True
    space = MappingProxyType(
        {"dim": [32, 64, 128], "blocks": [1, 2], "dropout": "0..0.7", "block": ["transformer", "ligr"]}
    )

    def __init__(self, spec: FeatureSpec, settings: SasRecSettings, held: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, held)
        d = settings.dim
        self.items = nn.Parameter(torch.empty(self.num_items, d).normal_(std=STD))
        self.positions = nn.Parameter(torch.empty(settings.length, d).normal_(std=STD))
        self.start = nn.Parameter(torch.zeros(d))
        """What stands for the events of a user without any."""
        kind = GatedBlock if settings.block == "ligr" else TransformerBlock
        own = settings
        self.blocks = Blocks(kind(d, own.heads, own.hidden, own.dropout) for _ in range(own.blocks))
        self.norm = nn.LayerNorm(d)
        self.drawn: Tensor | None = None  # (N,) probabilities by which negatives are drawn

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:  # noqa: ARG003
        return {
            "train.batch_size": (256, "users; as published"),
            "train.optimizer": ("adamw", "as published"),
            "train.learning_rate": (2e-3, "the best on Beauty"),
            "train.betas": ((0.9, 0.98), "as usual for transformers"),
        }

    def learn_from(self, interactions: Interactions) -> None:
        super().learn_from(interactions)
        if self.settings.loss == "sampled":
            counts = torch.bincount(self.known.items.long(), minlength=self.num_items).double()
            shares = torch.where(counts > 0, counts.pow(self.settings.popularity_power), 0.0)
            self.drawn = (shares / shares.sum().clamp(min=1e-300)).float()

    # --- vectors ------------------------------------------------------------------------------------------------------

    def item_vectors(self) -> Tensor:
        """(N, d) vectors of all items: a score is the product of a request's vector and an item's."""
        return self.items

    def request_vector(self, users: Tensor) -> Tensor:
        """(R, d) vectors of users, after all events that are known of them."""
        if torch.compiler.is_compiling():
            return self._of_padded(users)
        lengths = self.known.lengths(users, self.settings.length)
        order = lengths.argsort()
        order = order[int((lengths == 0).sum()) :]
        made = self.start.expand(len(users), -1).clone()
        if len(order):
            places, lengths = self.known.packed(users[order], self.settings.length)
            last = self.blocks.of_last(self._embedded(places, lengths), lengths)
            made[order] = self.norm(last).to(made.dtype)
        return made

    def score_users(self, users: Tensor) -> Tensor:
        return self.request_vector(users) @ self.item_vectors().t()

    def _of_padded(self, users: Tensor) -> Tensor:
        places, held = self.known.padded(users, self.settings.length)
        if not places.shape[1]:
            return self.start.expand(len(users), -1)
        x = self._of_items(places) + self.positions[: places.shape[1]].flip(0)
        last = self.norm(self.blocks.padded(x, held)[:, -1])
        return torch.where(held[:, -1:], last, self.start)

    def _embedded(self, places: Tensor, lengths: Tensor) -> Tensor:
        """(P', d) what goes into the blocks: P events and some more rows up to a steady number."""
        back = lengths.cumsum(0).repeat_interleave(lengths) - 1 - torch.arange(len(places), device=places.device)
        more = -len(places) % STEADY
        x = self._of_items(F.pad(places, (0, more))) + F.embedding(F.pad(back, (0, more)), self.positions)
        return drop(x, self.settings.dropout) if self.training else x

    def _of_items(self, places: Tensor) -> Tensor:
        """(..., d) of events at places of what is known."""
        vectors: Tensor = F.embedding(self.known.items[places].long(), self.item_vectors()) * self.settings.dim**0.5
        return vectors

    # --- loss ---------------------------------------------------------------------------------------------------------

    def loss_of_users(self, users: Tensor) -> Tensor:
        lengths = self.known.lengths(users, self.settings.length + 1)
        users = users[lengths.argsort()]
        places, lengths = self.known.packed(users, self.settings.length + 1)
        is_last = torch.zeros(len(places), dtype=torch.bool, device=places.device)
        ends = lengths.cumsum(0)[lengths > 0]
        is_last[ends - 1] = True
        places, lengths = places[~is_last], (lengths - 1).clamp(min=0)
        h = self.norm(self.blocks(self._embedded(places, lengths), lengths)[: len(places)])
        targets = self.known.items[places + 1].long()
        return self._softmax(h, targets) + self._loss_of_start(users)

    def _softmax(self, h: Tensor, targets: Tensor) -> Tensor:
        if self.drawn is None:
            return softmax_loss(h, self.item_vectors(), targets)
        drawn = torch.multinomial(self.drawn, self.settings.num_negatives, replacement=True)
        vectors = self.item_vectors()
        logits = h @ vectors[drawn].t()
        if self.settings.logq:
            logits = logits - (self.drawn[drawn] * len(drawn)).log()
        logits = at_least_fp32(logits).masked_fill(targets.unsqueeze(1) == drawn, -torch.inf)
        own = at_least_fp32(h * vectors[targets]).sum(1, keepdim=True)
        return (torch.cat((own, logits), 1).logsumexp(1) - own.squeeze(1)).sum()

    def _loss_of_start(self, users: Tensor) -> Tensor:
        """The loss of the first events of users; it trains `start` alone, so that items are not drawn to it."""
        firsts = self.known.items[self.known.offsets[users][self.known.lengths(users, 1) > 0]].long()
        logits = self.item_vectors().detach() @ self.start
        shares = at_least_fp32(logits).log_softmax(0)
        return -shares[firsts].sum()
