"""Popularity: the number of users who acted on an item; the same list for everyone."""

from __future__ import annotations

import torch
from torch import Tensor

from recspec.base import config
from recspec.feature_spec import FeatureSpec
from recspec.models.interactions import Interactions
from recspec.models.item_model import FittedItemModel
from recspec.models.layers import RowsHeld


class PopularitySettings(config.Settings):
    """Popularity has no settings."""


class Popularity(FittedItemModel):
    """Ranks items by the number of users who acted on them, the same for every user."""

    name = "popularity"
    Settings = PopularitySettings
    counts: Tensor

    def __init__(self, spec: FeatureSpec, settings: PopularitySettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.register_buffer("counts", torch.zeros(self.num_items))

    def _fit(self, interactions: Interactions, seed: int) -> None:  # noqa: ARG002
        self.counts = torch.from_numpy(interactions.counts).float()

    def know(self, interactions: Interactions) -> None:
        """Nothing: users don't matter."""

    def score_pairs(self, users: Tensor, items: Tensor) -> Tensor:  # noqa: ARG002
        return self.counts[items]

    def score_users(self, users: Tensor) -> Tensor:
        return self.counts.expand(users.shape[0], -1).clone()
