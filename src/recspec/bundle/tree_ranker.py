"""LightGBM's lambdarank over the scores of retrievers: the ranker that `pipeline build --ranker lightgbm` grows.

Shapes: R users; N items; C candidates of each user; F columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from recspec.bundle.cards import Blend, BlendSettings
from recspec.feature_spec import FeatureSpec
from recspec.models import Interactions, Trees, at_once
from recspec.models.layers import Batch, RowsHeld

SCORES = 1 << 22
"""Scores of users x items of one member held at once on a CPU: 16 MB."""

OF_MEMBER = ("score", "rank", "spread")
"""Columns of each member: the score, the logarithm of the item's rank among all items, and the score's distance from
the user's mean in standard deviations."""


class TreeRanker(Blend):
    """Trees over each member's score of an item, its rank, its popularity and the number of the user's events."""

    name: ClassVar[str] = "lambdarank"
    counts: Tensor
    events: Tensor

    def __init__(self, spec: FeatureSpec, settings: BlendSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.add_trees()

    def add_trees(self) -> None:
        """Register what it has beside its members."""
        self.trees = Trees(len(self.column_names()))
        self.register_buffer("counts", torch.zeros(self.num_items, dtype=torch.int64))
        self.register_buffer("events", torch.zeros(self.num_users, dtype=torch.int64))

    def column_names(self) -> list[str]:
        """Names of the columns (F,)."""
        models = [each.model for each in self.settings.members]
        own = [
            f"{name} {models[:at].count(name) + 1}" if name in models[:at] else name for at, name in enumerate(models)
        ]
        return [f"{what} of {name}" for name in own for what in OF_MEMBER] + ["popularity", "events of the user"]

    def allocate_buffers(self, weights: Mapping[str, Tensor]) -> list[str]:
        own = {name.removeprefix("trees."): each for name, each in weights.items() if name.startswith("trees.")}
        return super().allocate_buffers(weights) + [
            f"weight 'trees': {each}" for each in self.trees.allocate_buffers(own)
        ]

    def know(self, interactions: Interactions) -> None:
        super().know(interactions)
        self.events = torch.from_numpy(interactions.offsets).diff().to(self.line.device)

    def columns(self, users: Tensor, items: Tensor) -> Tensor:
        """The matrix (R, C, F) in fp64 of users (R,) and their candidates (R, C)."""
        parts = list[Tensor]()
        for model in self.models:
            scores = model.score_users(users).float()
            order = scores.argsort(dim=1, descending=True, stable=True)
            places = torch.arange(1, scores.shape[1] + 1, device=scores.device).expand_as(order)
            ranks = torch.empty_like(order).scatter_(1, order, places)
            spread = (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True).clamp(min=1e-12)
            parts += [each.gather(1, items).double() for each in (scores, ranks, spread)]
            parts[-2] = parts[-2].log()
        parts.append(self.counts[items].double())
        parts.append(self.events[users].double().unsqueeze(1).expand(items.shape))
        return torch.stack(parts, dim=2)

    def side_scores(self, request: Batch, items: Batch) -> Tensor:
        """`score_items`: the trees' sums of the items asked for."""
        users, ids = request[self.user_id].long(), items[self.item_id].long()
        return self._as_logits(self._sums(users, ids.expand(len(users), -1)))

    def score_users(self, users: Tensor) -> Tensor:
        items = torch.arange(self.num_items, device=users.device)
        return self._sums(users, items.expand(len(users), -1))

    def score_pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores of pairs, user after user."""
        scores = torch.empty(len(users), device=users.device)
        distinct, of_user = torch.unique(users, return_inverse=True)
        for place, user in enumerate(distinct):
            here = torch.nonzero(of_user == place).squeeze(1)
            scores[here] = self._sums(user.unsqueeze(0), items[here].unsqueeze(0))[0]
        return scores

    def _sums(self, users: Tensor, items: Tensor) -> Tensor:
        """(R, C) sums of trees, for some users at once."""
        step = max(1, at_once(SCORES, users.device) // self.num_items)
        parts = [
            self.trees(self.columns(own, theirs).flatten(0, 1)).view(theirs.shape).float()
            for own, theirs in zip(torch.split(users, step), torch.split(items, step), strict=True)
        ]
        return torch.cat(parts)

    def contributions(self, batch: Batch) -> tuple[list[str], Tensor, float]:
        """Names of columns, their contributions (B, F) to the scores of rows of one user, and the base of all."""
        users, items = batch[self.user_id].long()[:1], batch[self.item_id].long().unsqueeze(0)
        return self.column_names(), self.trees.contributions(self.columns(users, items)[0]), self.trees.base()
