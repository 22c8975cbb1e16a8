"""Models that are fitted in closed form, or by a solver of their own, instead of by gradient steps.

Shapes: U users; N items; B rows; R requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from recspec.base import config, machine
from recspec.base.errors import DataError, SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.base import Model
from recspec.models.interactions import Interactions
from recspec.models.item_model import ItemModel, shallow_copy
from recspec.models.known_items import KnownItems
from recspec.models.layers import Batch, RowsHeld, on_meta_device

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

    at_scoring: ClassVar[Mapping[str, Sequence[float]]] = MappingProxyType({})
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
        assert set(settings) <= set(self.at_scoring)
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
    """Settings of a model that weighs the user's items by recency."""

    recency: float = Field(
        1.0,
        gt=0,
        le=1,
        description="weight of a user's item relative to the next newer one; 1 weighs all alike; by default chosen on "
        "valid",
    )


RECENCIES = MappingProxyType({"recency": (0.9, 0.7)})
"""Values of recency tried beside 1; on ML-1M by leave-one-out, .7 and .9 gave 1.9 to 2.4 times its NDCG@10."""


class KnownItemsModel(FittedItemModel):
    """A model that scores an item by weights from the user's items, which weigh by recency."""

    reads_order = True
    at_scoring = RECENCIES
    settings: Recency
    pair_cost: ClassVar[int] = 1
    """Cost of the score of one pair, in those of a model that reads one weight for each of the user's items."""

    def __init__(self, spec: FeatureSpec, settings: Recency, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        weighted = settings.recency < 1 or "event_weight" in spec.metadata
        self.known = KnownItems(self.num_users, self.num_items, weighted=weighted)

    def know(self, interactions: Interactions) -> None:
        self.known.set(interactions.weighted(self.settings.recency), self.device)

    def score_pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores; from all scores of a user if many of them are asked for."""
        pays = ROWS_PAY * self.pair_cost
        if torch.compiler.is_compiling() or len(users) * pays < len(torch.unique(users)) * self.num_items:
            return self._pairs(users, items)
        return super().score_pairs(users, items)

    @abstractmethod
    def _pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores of pairs one by one."""
