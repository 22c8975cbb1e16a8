"""Vectors of items, and why an item is recommended: the events of the history that spoke for it.

Shapes: N items with an id; D width of a vector; C chosen items.

A model that scores an item by the weights from the user's items (EASE, item-kNN) is explained exactly: the score is the
sum of one share for each event, of which the largest are named, and a rest. The score of a model of labelled rows, such
as LightGBM, is the sum of one share for each feature, and a rest. For other models, the events are named that are
nearest to the item by the model's vectors of items; they are no proof of what the model read.

Shapes: L events of a history; k items of an answer; C chosen items.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.bundle import Seen, TreeRanker
from recspec.inference.catalogue import Catalogues
from recspec.inference.live_events import LiveEvents
from recspec.inference.request_features import AnsweredBy, Context, RequestFeatures
from recspec.models import FittedRowModel, ItemModel, KnownItemsModel, Model, UserEvents
from recspec.models.layers import Batch, Embeddings, repeat_rows, take

BLOCK = 1 << 22
"""Pairs of items that are scored at once."""


def likeness_vectors(model: Model, known: Catalogues) -> Tensor | None:
    """The vectors (N, D) that a model has of every item by id, or the embeddings of the items' ids; None without.

    They tell which items are alike, so a bias is no part of them.
    """
    made = getattr(model, "likeness_vectors", getattr(model, "item_vectors", None))
    with torch.inference_mode():
        if made is not None:
            known.check_items(model.features())
            vectors: Tensor = made() if isinstance(model, ItemModel) else made(known.items.features)
            return vectors.detach().float()  # a model's own parameter may be what it returns
        if isinstance(model, ItemModel):
            factors = getattr(model, "items", None)  # of a factorisation
            return factors.detach().float() if isinstance(factors, Tensor) and factors.dim() == 2 else None
        name, ids = known.spec.item_id, known.items.features[known.spec.item_id]
        if (rows := getattr(model, "item_embeddings", None)) is not None:
            embedded: Tensor = rows(ids)
            return embedded.detach().float()
        tables = [each for each in model.modules() if isinstance(each, Embeddings) and name in each.widths]
        parts = [each({name: ids}, (name,)).float() for each in tables if each.widths[name] > 1]
        return torch.cat(parts, dim=1) if parts else None


def scores_of_single_items(model: ItemModel, events: Tensor, items: Tensor) -> Tensor:
    """(L, C) scores of items for baskets that each hold one event alone."""
    lists = UserEvents(np.arange(len(events) + 1, dtype=np.int64), events.cpu().numpy().astype(np.int32))
    with torch.inference_mode():
        informed = model.knowing(lists.interactions(model.num_items))
        parts = []
        step = max(1, BLOCK // max(1, len(items)))
        for rows in torch.split(torch.arange(len(events), device=model.device), step):
            users = rows.repeat_interleave(len(items))
            parts.append(informed.score_pairs(users, items.repeat(len(rows))).view(len(rows), len(items)))
        return torch.cat(parts).float() if parts else torch.zeros(0, len(items))


MOST_EVENTS = 1_000
"""Events of a history that nearest ones are looked for in: the latest."""
NAMED = 5
"""Events that an explanation names."""
CLOSE = 1e-3
"""Largest difference of the shares' sum from the score, relative to their sizes, at which shares are believed."""


@dataclass(frozen=True)
class Reason:
    """An event of the history, or a feature: its share of the score, or its cosine to the recommended item."""

    item: str | int
    title: str | None
    value: float


@dataclass(frozen=True)
class Explanation:
    """The events that spoke most for an item, largest first.

    `shares` and `rest` add up to the model's score; `nearest` are cosines, without a rest. `features` are shares, too:
    of features, whose names are the items, and the largest speak for the item or against it.
    """

    kind: Literal["shares", "nearest", "features"]
    events: tuple[Reason, ...]
    rest: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {"kind": self.kind, "events": [asdict(each) for each in self.events], "rest": self.rest}


class Explainer:
    """Explains answers of one model."""

    def __init__(
        self, known: Catalogues, request_features: RequestFeatures, seen: Seen, vectors: Tensor | None
    ) -> None:
        self._known, self._request_features, self._seen, self._vectors = known, request_features, seen, vectors

    def explain(
        self,
        user: int,
        how: AnsweredBy,
        context: Context,
        items: NDArray[np.int64],
        scores: NDArray[np.float32],
        live: LiveEvents | None = None,
    ) -> list[Explanation | None]:
        """Explanations (k,) of a user's items, whose scores are without boosts; None where nothing explains them."""
        if how == "popularity" or not len(items):
            return [None] * len(items)
        model, request = self._request_features.batch(np.array([user]), context, live)
        if isinstance(model, (FittedRowModel, TreeRanker)):
            return self._of_features(model, request, items, scores)
        if how != "basket_vectors" and (shares := self._shares(model, request, items, scores)) is not None:
            return [self._of_shares(*shares, column, score) for column, score in enumerate(scores.tolist())]
        events = self._history(user, how, context, live)
        if self._vectors is None or not len(events):
            return [None] * len(items)
        cosines = (self._vectors[torch.from_numpy(events)] @ self._vectors[torch.from_numpy(items)].T).numpy()
        return [Explanation("nearest", self._reasons(events, column)) for column in cosines.T]

    def _of_features(
        self, model: FittedRowModel | TreeRanker, request: Batch, items: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> list[Explanation | None]:
        places = torch.from_numpy(items).to(model.device)
        batch = {**repeat_rows(request, len(items)), **take(self._known.items.features, places)}
        with torch.inference_mode():
            names, shares, _ = model.contributions(batch)
        made: list[Explanation | None] = []
        for own, score in zip(shares.cpu().numpy(), scores.tolist(), strict=True):
            best = np.argsort(-np.abs(own), kind="stable")[:NAMED]
            reasons = tuple(Reason(names[each], None, round(float(own[each]), 6)) for each in best if own[each])
            made.append(Explanation("features", reasons, round(score - sum(each.value for each in reasons), 6)))
        return made

    @staticmethod
    def _shares(
        model: Model, request: Batch, items: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Events (L,) and their shares (L, k) of the scores; None for a model whose scores are no such sums."""
        if not isinstance(model, KnownItemsModel):
            return None
        lists, weights = model.known.lists(request[model.user_id])
        kept = weights[0] != 0
        events, line = lists[0][kept], model.line.double().cpu()
        singles = scores_of_single_items(model, events, torch.from_numpy(items).to(model.device)).double()
        shares = (singles * weights[0][kept].double().unsqueeze(1)).cpu() * line[0]
        sums = shares.sum(0) + line[1]
        sizes = shares.abs().sum(0) + line[1].abs() + 1e-6
        if bool(((sums - torch.from_numpy(scores)).abs() > CLOSE * sizes).any()):
            return None
        return events.cpu().numpy(), shares.numpy()

    def _of_shares(
        self, events: NDArray[np.int64], shares: NDArray[np.float64], column: int, score: float
    ) -> Explanation:
        named = self._reasons(events, shares[:, column])
        return Explanation("shares", named, round(score - sum(each.value for each in named), 6))

    def _reasons(self, events: NDArray[np.int64], values: NDArray[np.floating]) -> tuple[Reason, ...]:
        """The events of the largest values above 0."""
        best = np.argsort(-values, kind="stable")[:NAMED]
        best = best[values[best] > 0]
        raw = self._known.raw_ids("item", events[best]).to_pylist()
        titles = self._known.items.titles_of(events[best]).to_pylist()
        found = zip(raw, titles, values[best].tolist(), strict=True)
        return tuple(Reason(item, title, round(value, 6)) for item, title, value in found)

    def _history(self, user: int, how: AnsweredBy, context: Context, live: LiveEvents | None) -> NDArray[np.int64]:
        """The latest events of the basket or the user, each item once."""
        if how in ("basket", "basket_vectors"):
            events = context.basket
        else:
            events = np.zeros(0, np.int64) if user < self._known.users.first_id else self.history(user)
            if live is not None:
                events = np.concatenate([events, live.events.items.astype(np.int64)])
        events = np.asarray(events[events >= self._known.items.first_id][-MOST_EVENTS:])
        return np.unique(events)

    def history(self, user: int) -> NDArray[np.int64]:
        """The items (L,) of a known user's events, oldest first where the bundle holds lists of them."""
        if (name := self._request_features.item_history) in self._known.users.lists:
            return self._known.users.lists_of(str(name), np.array([user])).values.astype(np.int64)
        return self._seen.known_of(user).long().numpy()
