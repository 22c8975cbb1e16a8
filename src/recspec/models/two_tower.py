"""Two towers: a vector of the request and a vector of the item, whose product is the score.

Covington, Adams, Sargin: Deep Neural Networks for YouTube Recommendations, RecSys 2016; Yi et al.: Sampling-Bias-
Corrected Neural Modeling for Large Corpus Item Recommendations, RecSys 2019:

    logit = u . v / temperature + b

with u and v the outputs of two MLPs, by default of length 1, and b a number of the item's tower.

Shapes: B rows; M items that all rows of a batch are compared with; D width of a tower's vector; F features; E width of
an embedding; R requests; N items to score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models import click_defaults as rules
from recspec.models.base import (
    DECAY_SPACE,
    POSITIVE,
    TRAINING_SPACE,
    LossNeeds,
    Model,
    Traits,
    UniformStd,
    list_problems,
)
from recspec.models.facts import DataFacts, Proposals
from recspec.models.known_items import SeenIds
from recspec.models.layers import (
    Batch,
    Embeddings,
    Mlp,
    RowsHeld,
    at_least_fp32,
    cross_entropy,
    drawn_of,
    ids_and_numbers,
    log_expected_of,
    num_rows,
    sampled_softmax,
)

FEWEST_ROWS, MOST_ROWS, MOST_STEPS = 512, 4096, 400
"""The fewest and the most positives of a step, and steps of an epoch above which it grows: the products of a step's
rows with its shared negatives grow with the square of its rows."""

LEARNING_RATE, DECAY = 0.003, 3e-5
"""For steps of `FEWEST_ROWS`."""


class TwoTowerSettings(config.Settings):
    """Sizes, loss and regularisation of the two towers."""

    dim: int = Field(64, ge=1, description="width of the vectors of requests and items")
    embedding_dim: int = Field(64, ge=1, description="width of every embedding")
    hidden: Annotated[tuple[int, ...], POSITIVE] = Field(
        (), description="widths of the hidden layers of each tower; none: one linear layer"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after each hidden ReLU")
    id_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "share of training rows whose user id, and whose item id, is hidden, to learn from the other features; no "
            "effect on a tower of the id alone"
        ),
    )
    normalize: bool = Field(True, description="scale both vectors to length 1, so that their product is a cosine")
    temperature: float = Field(0.1, gt=0, description="divisor of the product of both vectors; lower is sharper")
    item_bias: bool = Field(True, description="add a number of the item's tower to the score, such as its popularity")
    loss: Literal["softmax", "binary"] = Field(
        "softmax",
        description=(
            "softmax of a positive among negatives that a batch shares, which gives no probabilities; binary: "
            "cross-entropy of labels, also without in_batch and train.negatives"
        ),
    )
    in_batch: bool = Field(
        True,
        description="softmax: the other positives of a batch are negatives, besides the drawn ones (train.negatives)",
    )
    dislike_weight: float = Field(
        0.0,
        ge=0,
        le=1e3,
        description="softmax: weight of a disliked item as a further negative of its user's rows",
    )
    combiner: Literal["sum", "mean"] = Field("mean", description="pooling of a list's embeddings, such as a history's")
    embedding_std: UniformStd = None


class TwoTower(Model):
    """Two towers, the retrieval model: vectors of requests and of items, whose product ranks the items.

    The request's tower reads the features of user, context and history, the item's tower those of the item. Each
    concatenates embeddings (lists pooled) and numbers, and ends in a linear layer. Embeddings start uniform within
    1 / sqrt(rows), layers Glorot-uniform.
    """

    name = "two_tower"
    needs = ("item", "label")
    traits = Traits(scores_unseen_items=True, scores_by_product=lambda _: True)
    Settings = TwoTowerSettings
    space = MappingProxyType(
        {
            **TRAINING_SPACE,
            "dim,embedding_dim": [(16, 16), (32, 32), (64, 64), (128, 128)],
            "hidden": [(), (64,), (128, 64), (256, 128)],
            "temperature": "0.03..0.5 log",
            "dropout": "0.0..0.5",
            "train.parts.request_tower.embeddings.weight_decay": DECAY_SPACE,
            "train.parts.item_tower.embeddings.weight_decay": DECAY_SPACE,
        }
    )
    settings: TwoTowerSettings

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        """For interactions: the softmax with mixed negatives; for labelled rows, the training of click models."""
        if facts.task != "interactions":
            return {
                "loss": ("binary", "rows have labels of their own"),
                **rules.training(facts, {"request_tower.embeddings": 1.0, "item_tower.embeddings": 1.0}),
            }
        wanted = max(FEWEST_ROWS, facts.rows // MOST_STEPS)
        step = min(MOST_ROWS, 1 << wanted.bit_length() - 1)  # a power of two
        rate = LEARNING_RATE * (step / FEWEST_ROWS) ** 0.5
        tables = ("request_tower.embeddings", "item_tower.embeddings")
        return {
            "hidden": ((128,), "with a hidden layer, other features can change the effect of an id"),
            "id_dropout": (0.1, "so that ids that training never saw are scored by their other features"),
            "train.negatives": (1, "the positives of a batch are negatives too; drawn ones show the rare items"),
            "train.batch_size": (2 * step, f"{step:,} of {facts.rows:,} positives a step, and a draw for each"),
            "train.learning_rate": (round(rate, 4), f"for {step:,} positives a step"),
            "train.parts": ({part: {"weight_decay": DECAY} for part in tables}, "rare ids overfit without decay"),
        }

    def __init__(self, spec: FeatureSpec, settings: TwoTowerSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.item_id = spec.item_id
        items = spec.role("item")
        sides = {"item": items, "request": [*_request_features(spec, items)]}
        numbers = [
            name for name in dict.fromkeys((*sides["request"], *items)) if not spec.features[name].is_categorical
        ]
        problems = list_problems(spec, numbers, self.name)
        if not sides["request"]:
            problems.append("there is no feature to read in the roles user, context and history")
        SettingsError.refuse(self.name, problems)
        user_id = spec.user_id if any(_is_id(spec, name) for name in spec.role("user")) else None
        self.request_tower = Tower(spec, sides["request"], user_id, settings, settings.dim, table_rows)
        self.item_tower = Tower(spec, items, self.item_id, settings, settings.dim + settings.item_bias, table_rows)

    def features(self) -> tuple[str, ...]:
        """Those of both towers."""
        return (*self.request_tower.features, *self.item_tower.features)

    def loss_needs(self) -> LossNeeds:
        """With the softmax, the negatives of the batch, and its positives unless `in_batch` is off."""
        if self.settings.loss == "binary":
            return LossNeeds(self.features())
        negatives: Literal["batch", "batch and positives"] = (
            "batch and positives" if self.settings.in_batch else "batch"
        )
        return LossNeeds(self.features(), negatives, dislike_weight=self.settings.dislike_weight)

    def request_vector(self, batch: Batch) -> Tensor:
        """The vector of each request, by which items are ranked: (R, D), and with `item_bias` a 1 behind it."""
        vector = self._length_one(at_least_fp32(self.request_tower(batch))) / self.settings.temperature
        return F.pad(vector, (0, 1), value=1.0) if self.settings.item_bias else vector

    def item_vectors(self, items: Batch) -> Tensor:
        """The vector of each item (N, D), and with `item_bias` its bias behind it.

        The product of a request's vector and an item's is the logit of the pair.
        """
        vectors = at_least_fp32(self.item_tower(items))
        if not self.settings.item_bias:
            return self._length_one(vectors)
        return torch.cat([self._length_one(vectors[:, :-1]), vectors[:, -1:]], dim=1)

    def likeness_vectors(self, items: Batch) -> Tensor:
        """The vectors (N, dim) by which items are alike: without the bias, which tells how popular an item is."""
        return self.item_vectors(items)[:, : self.settings.dim]

    def forward(self, batch: Batch) -> Tensor:
        # u . v / temperature + b: the temperature is in the request's vector, the bias meets its column of ones.
        logits: Tensor = (self.request_vector(batch) * self.item_vectors(batch)).sum(1)
        return logits

    def item_parts(self, items: Batch) -> Tensor:
        """The items' vectors."""
        return self.item_vectors(items)

    def side_scores(self, request: Batch, items: Tensor) -> Tensor:
        """`score_items`: the product of both towers' vectors."""
        return _products(self.request_vector(request), items)

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of the rows, in nats: with the softmax, that of each positive (`sampled_softmax`)."""
        if drawn_of(self.item_id) not in batch:
            return cross_entropy(self(batch), batch[self.spec.label])
        size = num_rows(batch)
        names = self.item_tower.features
        both = {name: _one_below_the_other(batch[name], batch[drawn_of(name)][0]) for name in names}
        vectors, requests = self.item_vectors(both), self.request_vector(batch)
        own, label = vectors[:size], batch[self.spec.label]
        logits = _products(vectors[size:], requests)  # (M, B)
        # Yi et al., RecSys 2019: s - log p_j corrects each logit by how often its item is drawn.
        loss = sampled_softmax((own * requests).sum(1), logits, batch[log_expected_of(self.item_id)].T)
        return (loss * label.to(loss.dtype)).mean()

    def _length_one(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1, eps=1e-6) if self.settings.normalize else x


class Tower(SeenIds):
    """The features of one side to a vector: (B, D).

    An id that training never saw, or that is unknown (id 0), has a vector of zeros, as an id that `id_dropout` hides.
    In a list it counts as padding.
    """

    known: Tensor

    def __init__(
        self,
        spec: FeatureSpec,
        names: Sequence[str],
        own_id: str | None,
        settings: TwoTowerSettings,
        dim: int,
        table_rows: RowsHeld | None,
    ) -> None:
        super().__init__()
        self.ids, self.numbers = ids_and_numbers(spec, names)
        self.features = (*self.ids, *self.numbers)
        width = len(self.ids) * settings.embedding_dim
        width += sum(spec.features[name].length or 1 for name in self.numbers)
        self.embedding_dim = settings.embedding_dim
        if self.ids:
            self.embeddings = Embeddings(
                spec,
                dict.fromkeys(self.ids, settings.embedding_dim),
                combiner=settings.combiner,
                start="uniform",
                std=settings.embedding_std,
                table_rows=table_rows,
            )
            order = self.embeddings.order()
            self.scalars = tuple(name for name in order if not spec.features[name].is_list)
            self.lists = order[len(self.scalars) :]
            self._make_known(spec)
        self.own_id, self.id_dropout = own_id, settings.id_dropout if len(self.features) > 1 else 0.0
        widths = (width, *settings.hidden)
        self.mlp = Mlp(widths, dropout=settings.dropout)
        self.out = nn.Linear(widths[-1], dim)
        nn.init.xavier_uniform_(self.out.weight)

    def _make_known(self, spec: FeatureSpec) -> None:
        """Make the mask of known ids: by default all but id 0, where no value has it."""
        self.space_of = {name: spec.vocabulary(name) for name in self.ids}
        sizes = {spec.vocabulary(name): spec.num_ids(name) for name in self.ids}
        self.places: dict[str, range] = {}
        for space, size in sizes.items():
            first = max((place.stop for place in self.places.values()), default=0)
            self.places[space] = range(first, first + size)
        # Numbers, not flags, since a running mean of the weights takes in buffers too.
        self.register_buffer("known", torch.ones(sum(sizes.values())))
        self.reserved = [self.places[self.space_of[name]].start for name in self.ids if spec.reserves_unknown(name)]
        self.known[self.reserved] = 0.0

    def set_seen_ids(self, present: Mapping[str, Tensor]) -> None:
        """Take every id for unknown that is not `present` (ids,) in a feature of its vocabulary."""
        for space, place in self.places.items() if self.ids else ():
            found = [present[name] for name in self.ids if self.space_of[name] == space]
            self.known[place.start : place.stop] = torch.stack(found).any(0).to(self.known)
        if self.ids:
            self.known[self.reserved] = 0.0

    def forward(self, batch: Batch) -> Tensor:
        """The vector of each row."""
        parts = [self._embedded(batch)] if self.ids else []
        for name in self.numbers:
            parts.append(batch[name].unsqueeze(1) if batch[name].dim() == 1 else batch[name])
        x = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return cast(Tensor, self.out(self.mlp(x) if len(self.mlp.layers) else x))

    def _embedded(self, batch: Batch) -> Tensor:
        """The vectors of all ids, side by side (B, F E)."""
        known = {name: self._is_known(name, batch[name]) for name in self.ids}
        if self.training and self.id_dropout and self.own_id in known:
            kept = torch.rand(known[self.own_id].shape, device=self.known.device) >= self.id_dropout
            known[self.own_id] = known[self.own_id] * kept
        ids = {name: batch[name] for name in self.scalars}
        ids |= {name: torch.where(known[name] > 0.5, batch[name], 0) for name in self.lists}
        x: Tensor = self.embeddings(ids)
        if not self.scalars:
            return x
        keep = torch.stack([known[name] for name in self.scalars], dim=1).to(x.dtype)  # (B, scalars)
        keep = F.pad(keep, (0, len(self.lists)), value=1.0).unsqueeze(2)
        return (x.view(-1, len(self.ids), self.embedding_dim) * keep).flatten(1)

    def _is_known(self, name: str, ids: Tensor) -> Tensor:
        """1 for a known id, 0 for others, in the shape of `ids`."""
        return self.known[ids.long() + self.places[self.space_of[name]].start]


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Products of every two rows, in fp32 even under autocast: bf16 makes ties of near scores."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.T


def _is_id(spec: FeatureSpec, name: str) -> bool:
    feature = spec.features[name]
    return bool(feature.is_categorical and not feature.is_list)


def _request_features(spec: FeatureSpec, items: Sequence[str]) -> list[str]:
    """Features of user, context and history, without lists of one number for each event, such as time gaps."""
    history = [name for name in spec.role("history") if spec.features[name].is_categorical]
    names = dict.fromkeys((*spec.role("user"), *spec.role("context"), *history))
    return [name for name in names if name not in items]


def _one_below_the_other(above: Tensor, below: Tensor) -> Tensor:
    """Rows of both; of lists, which may come in other widths, the narrower ones are padded with 0."""
    if above.dim() == 2 and above.shape[1] != below.shape[1]:
        width = max(above.shape[1], below.shape[1])
        above, below = (F.pad(each, (0, width - each.shape[1])) for each in (above, below))
    return torch.cat([above, below])
