"""Batches of users, for models that know each user's events and learn from whole lists of them."""

from __future__ import annotations

import torch

from recspec.distributed import Ranks
from recspec.loading.loader import Loader
from recspec.loading.rows import Filling, Layout
from recspec.models import Ids
from recspec.spec import FeatureSpec


class UserLoader(Loader):
    """Batches of user ids, each user once an epoch, in an order that depends on seed and epoch alone."""

    def __init__(self, spec: FeatureSpec, users: Ids, *, batch_size: int, seed: int, ranks: Ranks) -> None:
        self.features, self.batch_size, self.device = (spec.user_id,), batch_size, ranks.device
        self.num_rows, self.mode = len(users), "memory"
        self._seed, self._shuffle, self._ranks = seed, True, ranks
        self._makes_orders_ahead, self._next_order, self._weights = False, {}, None
        rows = Filling(Layout.of(spec, self.features), len(users))
        rows.append({spec.user_id: users})
        self._resident = rows.finish().to(torch.device("cpu") if ranks.device.type != "cuda" else ranks.device)
