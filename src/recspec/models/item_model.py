"""Models that rank items by a user's events, and models that are fitted instead of trained by gradient steps.

A fitted model is computed in closed form, or by a solver of its own.

Shapes: U users; N items; B rows; R requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, TypeVar, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from recspec.base import config, machine
from recspec.base.errors import DataError, SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.base import LossNeeds, Model, Shapes, at_once, on_meta_device
from recspec.models.interactions import Ids, Interactions
from recspec.models.known_items import KnownEvents, KnownItems, Stored
from recspec.models.layers import Batch, RowsHeld

ItemModelType = TypeVar("ItemModelType", bound="ItemModel")

SCORES = 1 << 24
"""Scores of users x items computed at once on a CPU: 64 MB."""


class ItemModel(Model):
    """A model of user and item ids, which ranks items by the events that it knows of each user.

    A score is no logit by itself. `set_line` sets the line that turns scores into logits: logit = a * score + b with
    a > 0, so that no order changes.
    """

    needs = ("user", "item", "label")
    metric: ClassVar[str] = "full/ndcg@10"
    """PROTOCOL/METRIC on valid by which its settings or epochs are chosen."""
    reads_order: bool = False
    """Whether it reads `Interactions.events`: the order of events, repeats, times or weights."""
    reads_dislikes: bool = False
    """Whether it reads `Interactions.dislikes`."""
    line: Tensor

    def __init__(self, spec: FeatureSpec, settings: config.Settings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.user_id, self.item_id = spec.user_id, spec.item_id
        self.num_users, self.num_items = spec.num_ids(self.user_id), spec.num_ids(self.item_id)
        self.register_buffer("line", torch.tensor([1.0, 0.0]))

    def features(self) -> tuple[str, ...]:
        """The user's and the item's id."""
        return self.user_id, self.item_id

    @abstractmethod
    def know(self, interactions: Interactions) -> None:
        """Take other interactions as those of the users, with the same weights of items."""

    def knowing(self: ItemModelType, interactions: Interactions) -> ItemModelType:
        """The same model, with its weights shared, that knows other interactions, of any number of users."""
        other = cast(ItemModelType, shallow_copy(self))
        other.know(interactions)
        return other

    def with_items(self: ItemModelType, items: Batch) -> ItemModelType:
        """The same model with further items, whose ids follow its own; of models that score unseen items."""
        raise TypeError(f"{self.name} scores no items by their features: {sorted(items)}")

    def score_events(self, interactions: Interactions) -> Tensor:
        """(U, N) scores of every item for events that belong to no known user, such as baskets."""
        with torch.inference_mode():
            users = torch.arange(interactions.num_users, device=self.device)
            return self.knowing(interactions).score_users(users)

    def allocate_buffers(self, weights: Mapping[str, Tensor]) -> list[str]:
        problems, line = super().allocate_buffers(weights), weights.get("line")
        if line is not None and line.numel() and not float(line.flatten()[0]) > 0:
            problems.append("weight 'line': the slope is not above 0, so it would turn the order of items around")
        return problems

    def set_line(self, slope: float, intercept: float) -> None:
        """Turn scores into logits by slope * score + intercept."""
        assert slope > 0
        device = None if self.line.is_meta else self.line.device
        self.line = torch.tensor([slope, intercept], dtype=torch.float32, device=device)

    @property
    def gives_logits(self) -> bool:
        return self.line.tolist() != [1.0, 0.0]

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,), or scores of a model without such a line."""
        users, items = batch[self.user_id].long(), batch[self.item_id].long()
        return self._as_logits(self.score_pairs(users, items) if users.shape[0] else users.float())

    def side_scores(self, request: Batch, items: Batch) -> Tensor:
        """`score_items`: each user's scores of all items, of which those asked for are kept."""
        scores, ids = self.score_users(request[self.user_id].long()), items[self.item_id].long()
        first = None if torch.compiler.is_compiling() else _first_of(ids)
        chosen = scores.index_select(1, ids) if first is None else scores[:, first : first + len(ids)]
        return self._as_logits(chosen)

    def _as_logits(self, scores: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not self.gives_logits:
            return scores.float()
        return torch.addcmul(self.line[1], scores.float(), self.line[0])

    def score_pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores of pairs; here from all scores of each user."""
        if torch.compiler.is_compiling():
            return self.score_users(users).gather(1, items.unsqueeze(1)).squeeze(1)
        distinct, places = torch.unique(users, return_inverse=True)
        scores = torch.empty(len(users), device=users.device)
        step = max(1, at_once(SCORES, users.device) // self.num_items)
        for start in range(0, len(distinct), step):
            here = torch.nonzero((places >= start) & (places < start + step)).squeeze(1)
            scores[here] = self.score_users(distinct[start : start + step])[places[here] - start, items[here]].float()
        return scores

    @abstractmethod
    def score_users(self, users: Tensor) -> Tensor:
        """(R, N) scores of every item for each user, in a tensor that the caller may change; the caller bounds R."""


class TrainedItemModel(ItemModel):
    """An item model trained by steps over users: a training row is a user, whose events the loss predicts.

    A batch of training holds ids of users alone; the model reads their events from `known`. The loss is a sum over
    events, divided by the users of the batch and by the mean number of events of a trained user. So the losses of the
    parts of a batch add up to that of the batch, and it is a mean over events as far as batches are alike.
    """

    reads_order = True
    fewest_events: ClassVar[int] = 2
    """Events of a user without which nothing is learned from them."""
    item_inputs: tuple[str, ...] = ()
    """Features of items, besides the id, that it reads by item; see `describe`."""

    def __init__(self, spec: FeatureSpec, settings: config.Settings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.known = KnownEvents(self.num_users, self.num_items)
        self.mean_events = 1.0

    def know(self, interactions: Interactions) -> None:
        self.known.set(interactions.events, self.device)

    def learn_from(self, interactions: Interactions) -> None:
        """Take these interactions as those to train on."""
        self.know(interactions)
        lengths = interactions.events.lengths[self.trained_users(interactions)]
        self.mean_events = float(lengths.mean()) if len(lengths) else 1.0

    def describe(self, items: Batch) -> None:
        """Take the features `item_inputs` of every item, by id."""
        assert not items

    @classmethod
    def trained_users(cls, interactions: Interactions) -> Ids:
        """Users with enough events to learn from, ascending."""
        return np.flatnonzero(interactions.events.lengths >= cls.fewest_events)

    @classmethod
    def shapes(cls, settings: config.Settings) -> Shapes:  # noqa: ARG003
        """Changing, as the events of a batch do."""
        return "changing"

    def loss_needs(self) -> LossNeeds:
        """The user's id."""
        return LossNeeds((self.user_id,))

    def loss(self, batch: Batch) -> Tensor:
        """The loss of the users' events, in nats an event."""
        users = batch[self.user_id].long()
        return self.loss_of_users(users) / (max(1, len(users)) * self.mean_events)

    @abstractmethod
    def loss_of_users(self, users: Tensor) -> Tensor:
        """The sum of the losses of the events of users (B,): a scalar."""


def _first_of(ids: Tensor) -> int | None:
    """The first of ids (N,) that follow each other, whose scores need no copy; None for others."""
    first = int(ids[0])
    return first if torch.equal(ids, torch.arange(first, first + len(ids), device=ids.device)) else None


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same tensors, in which other ones can be put without changing the first.

    So too in the parts that know users' events; the others are those of the first.
    """
    other = object.__new__(type(module))  # as copy.copy makes it, in a tenth of the time
    other.__dict__.update(module.__dict__)
    other._parameters, other._buffers = module._parameters.copy(), module._buffers.copy()
    other._modules = {
        name: shallow_copy(each) if each is not None and _knows(each) else each
        for name, each in module._modules.items()
    }
    return other


def _knows(module: nn.Module) -> bool:
    """Whether a module, or a part of it, may know users' events."""
    return isinstance(module, (Stored, Model)) or any(each is not None and _knows(each) for each in module.children())


MEMORY_SHARE = 0.5
"""Share of the machine's memory that a fit may fill."""

ROWS_PAY = 64
"""One user's scores of all items cost about as much as this share of them one by one: they are read in order."""

OF_A_PAIR = 400.0
"""Operations that a core could do in fp64 in the time (20 ns) of counting a pair of items and choosing the largest."""

FittedItemType = TypeVar("FittedItemType", bound="FittedItemModel")

Grid = Sequence[Mapping[str, object]]
"""Combinations of settings in the order of their worth; the first one is used where nothing can be tried."""


def rounded(value: float) -> float:
    """Three digits of a value computed from the data, for people to read."""
    return float(f"{value:.3g}")


class FittedModel(Model):
    """A model with `fit` instead of `loss`; everything after training treats it like any other.

    Its weights are buffers. It may be built without memory: `fit`, or the weights of a bundle, fill it.
    """

    reads: ClassVar[tuple[str, ...]] = (
        "train_splits",
        "label",
        "metric",
        "minutes",
        "valid_users",
        "seed",
        "threads",
        "affinity",
        "mlflow",
        "tensorboard",
    )
    """Settings of training that it reads."""

    def loss(self, batch: Batch) -> Tensor:  # noqa: ARG002
        raise SettingsError(f"{self.name} is fitted in one go, not trained by steps, so it has no loss")

    space: ClassVar[Mapping[str, object]] = MappingProxyType({})

    metric: ClassVar[str]
    """PROTOCOL/METRIC on valid by which its settings are chosen."""

    @classmethod
    def searched(cls) -> tuple[str, ...]:
        """Names of the settings that are chosen on valid."""
        names = (name.removeprefix("settings.") for name in cls.space)
        return tuple(name for name in names if name in cls.Settings.model_fields)

    def how(self) -> str:
        """How the model will be fitted, for the plan.

        Raises:
            SettingsError: if it would take more memory than there is, before any work is done.
        """
        needs, room = self.most_bytes(), MEMORY_SHARE * machine.total_memory()
        if needs > room:
            raise SettingsError(
                f"{self.name}: weights of {needs / 1e9:,.1f} GB, and {room / 1e9:,.1f} GB are free for them (half of "
                "the machine's memory); take smaller sizes, or prepare fewer users and items"
            )
        return f"{self.num_parameters():,} weights, without gradient steps"

    def most_bytes(self) -> int:
        """Most bytes that its weights may take."""
        return sum(each.nbytes for each in self.buffers())

    def doubt(self) -> str:
        """What makes the fitted weights worthless, and what to do; empty if nothing does."""
        return ""

    def operations(self) -> float:
        """Rough number of arithmetic operations of one fit that the numbers of users and items cause by themselves.

        0 for a fit whose time depends on the number of interactions alone, which is seconds.
        """
        return 0.0


class FittedItemModel(FittedModel, ItemModel):
    """A fitted model of user and item ids, which ranks items by the users' interactions alone."""

    at_scoring: ClassVar[Mapping[str, tuple[float, ...]]] = MappingProxyType({})
    """Settings that change scores and not the fit -> values tried with the best fit, besides the default."""

    @classmethod
    def grid(cls, interactions: Interactions) -> Grid:  # noqa: ARG003
        """Combinations of settings of the fit that suit these interactions, to choose from on valid."""
        return [{}]

    def fit(self, interactions: Interactions, *, seed: int = 0) -> None:
        """Fill the weights.

        Raises:
            DataError: without a single interaction.
            MissingExtraError: if a library of the extra `baselines` is missing.
        """
        if not interactions.num_pairs:
            raise DataError("there is no positive to fit on; is the label 1 anywhere in the training split?")
        self.set_line(1.0, 0.0)
        self._fit(interactions.weighted(), seed)

    def varied(self: FittedItemType, settings: Mapping[str, object], interactions: Interactions) -> FittedItemType:
        """The same fit with other values of settings `at_scoring`; `interactions` are those that it knows."""
        assert set(settings) <= {*self.at_scoring, "dislike_weight"}
        other = on_meta_device(lambda: type(self)(self.spec, self.settings.model_copy(update=dict(settings))))
        fitted = shallow_copy(self)
        for name, module in fitted._modules.items():
            if name != "known":
                other._modules[name] = module
        other._buffers.update(fitted._buffers)
        other.set_line(1.0, 0.0)
        other.know(interactions)
        return other.train(self.training)

    @abstractmethod
    def _fit(self, interactions: Interactions, seed: int) -> None:
        """Fill the weights from at least one interaction, weighted if its events are."""


class Recency(config.Settings):
    """Settings of a model that weighs the user's items by recency, and disliked ones against others."""

    recency: float = Field(
        1.0,
        gt=0,
        le=1,
        description="weight of a user's item relative to the next newer one; 1 weighs all alike; by default chosen on "
        "valid",
    )
    dislike_weight: float = Field(
        0.0,
        ge=0,
        le=1e3,
        description=(
            "weight of a disliked item, relative to the mean weight of the user's others; by default chosen on valid"
        ),
    )

    def weigh(self, interactions: Interactions) -> Interactions:
        """The interactions weighted by recency, and with disliked items."""
        return interactions.weighted(self.recency).with_dislikes(self.dislike_weight)


RECENCIES: Mapping[str, tuple[float, ...]] = MappingProxyType({"recency": (0.9, 0.7)})
"""Values of recency tried beside 1; on ML-1M by leave-one-out, .7 and .9 gave 1.9 to 2.4 times its NDCG@10."""


class KnownItemsModel(FittedItemModel):
    """A model that scores an item by weights from the user's items, which weigh by recency."""

    reads_order = reads_dislikes = True
    at_scoring = RECENCIES
    settings: Recency
    pair_cost: ClassVar[int] = 1
    """Cost of the score of one pair, in those of a model that reads one weight for each of the user's items."""

    def __init__(self, spec: FeatureSpec, settings: Recency, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        weighted = settings.recency < 1 or settings.dislike_weight > 0 or "event_weight" in spec.metadata
        self.known = KnownItems(self.num_users, self.num_items, weighted=weighted)

    def know(self, interactions: Interactions) -> None:
        self.known.set(self.settings.weigh(interactions), self.device)

    def score_pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores; from all scores of a user if many of them are asked for."""
        pays = ROWS_PAY * self.pair_cost
        if torch.compiler.is_compiling() or len(users) * pays < len(torch.unique(users)) * self.num_items:
            return self._pairs(users, items)
        return super().score_pairs(users, items)

    @abstractmethod
    def _pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores of pairs one by one."""
