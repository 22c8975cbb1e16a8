"""The best items for users, scored against every item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from recspec.batch import Batch
from recspec.bundle import Bundle, Seen
from recspec.errors import BundleError, listed
from recspec.evaluation import id_feature
from recspec.inference.catalogue import Catalogues

SCORES = 1 << 24
"""Scores of users x items held at once: 64 MB."""


@dataclass(frozen=True)
class RecommendedItem:
    """One recommended item: its raw id, its title if the catalogue has one, and the model's score (a logit)."""

    item: str | int
    title: str | None
    score: float


@dataclass(frozen=True)
class Recommendation:
    """The answer for one user, best item first."""

    user: str | int
    known: bool
    items: tuple[RecommendedItem, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The answer as plain values, for JSON."""
        items = [asdict(item) for item in self.items]
        return {"user": self.user, "known": self.known, "items": items, "notes": list(self.notes)}


class Recommender:
    """Recommends items to the users that a model knows."""

    def __init__(self, trained: Bundle, known: Catalogues) -> None:
        self._bundle, self._known, self._device = trained, known, known.device

    @property
    def seen(self) -> Seen:
        """Which items each user acted on."""
        if self._bundle.seen is None:
            lacks = "item to recommend" if id_feature(self._bundle.spec, "user") else "user to recommend to"
            raise BundleError(f"{self._bundle.folder}: this model has no {lacks}; score rows with `recspec predict`")
        return self._bundle.seen

    def recommend(self, users: Sequence[str | int], *, k: int = 10, include_seen: bool = False) -> list[Recommendation]:
        """The k best items of each raw user id; see `Predictor.recommend`."""
        _ = self.seen  # raises for a model that can't recommend
        ids = self._known.user_ids(users)
        known = np.flatnonzero(ids >= self._known.users.first_id)
        raw = self._known.raw_ids("user", ids[known]).to_pylist()
        answers: dict[int, Recommendation] = {}
        for start in range(0, len(known), self.block):
            places = known[start : start + self.block]
            scores, items = self.best(torch.from_numpy(ids[places]), k, include_seen=include_seen)
            for row, place in enumerate(places):
                answers[int(place)] = self._answer(raw[start + row], scores[row], items[row], k)
        popular = self._described(*self.most_popular(k)) if len(answers) < len(users) else ()
        note = f"unknown user: these are the {len(popular)} most popular items; score is the number of users"
        return [answers.get(place) or Recommendation(user, False, popular, (note,)) for place, user in enumerate(users)]

    def liked(self, user: str | int, *, k: int) -> tuple[RecommendedItem, ...]:
        """Some items the user acted on, the most popular first; their scores are 0."""
        number = max(0, int(self._known.user_ids([user])[0]))
        items = self.seen.of(number).long()
        best = items[torch.argsort(self.seen.counts[items], descending=True, stable=True)][:k]
        return self._described(best, torch.zeros(len(best)))

    def busiest_user(self) -> str | int:
        """The raw id of the user who acted on most items."""
        number = int(torch.argmax(self.seen.offsets.diff()))
        raw: str | int = self._known.raw_ids("user", np.array([number]))[0].as_py()
        return raw

    def best(self, users: Tensor, k: int, *, include_seen: bool) -> tuple[Tensor, Tensor]:
        """Scores (R, k) and ids (R, k) of the best items of R users; a score of -inf fills a short list."""
        seen, items = self.seen, self._known.items
        request = self._request(users)
        with torch.inference_mode():
            scores = self._bundle.model.score_items(request, items.candidates).float()
            if not bool(scores.isfinite().all()):
                why = "the model gives no finite score for some items; train it again"
                raise BundleError(f"{self._bundle.folder}: {why}")
            scores[:, (seen.counts[items.first_id :] == 0).to(self._device)] = -torch.inf
            if not include_seen:
                rows, columns = _pairs(seen, users, items.first_id)
                scores[rows.to(self._device), columns.to(self._device)] = -torch.inf
            best, places = _top(scores, min(k, scores.shape[1]))
        return best.cpu(), places.cpu() + items.first_id

    def _request(self, users: Tensor) -> Batch:
        known, past = self._known.users.features, self._known.users.lists
        wanted, owned = self._bundle.model.features(), {*known, *past, *self._bundle.spec.role("item")}
        lacking = [name for name in wanted if name not in owned]
        if lacking:
            raise BundleError(
                f"{self._bundle.folder}: the model reads {listed(lacking)}, which differ from request to request; "
                "recommend knows users and items only, so score rows with predict"
            )
        rows = users.to(self._device)
        request = {name: known[name].index_select(0, rows) for name in wanted if name in known}
        for name in (name for name in wanted if name in past):
            lists = self._known.users.lists_of(name, users.cpu().numpy())
            request[name] = torch.from_numpy(lists.pad(int(lists.lengths.max(initial=0)))).to(self._device)
        return request

    def _answer(self, user: str | int, scores: Tensor, items: Tensor, k: int) -> Recommendation:
        kept = torch.isfinite(scores)
        found = self._described(items[kept], scores[kept])
        notes = (f"only {len(found)} unseen items are left",) if len(found) < k else ()
        return Recommendation(user, True, found, notes)

    def most_popular(self, k: int) -> tuple[Tensor, Tensor]:
        """Ids of the k items that most users acted on, and their numbers of users; ties by id."""
        counts = self.seen.counts.clone()
        counts[: self._known.items.first_id] = 0
        order = torch.argsort(counts, descending=True, stable=True)[:k]
        order = order[counts[order] > 0]
        return order, counts[order].float()

    def _described(self, items: Tensor, scores: Tensor) -> tuple[RecommendedItem, ...]:
        raw, titles = self._known.raw_ids("item", items.numpy()).to_pylist(), self._known.items.titles_of(items.numpy())
        return tuple(
            RecommendedItem(item, title, round(score, 6))
            for item, title, score in zip(raw, titles.to_pylist(), scores.tolist(), strict=True)
        )

    @property
    def block(self) -> int:
        """Users scored at once: users x items within `SCORES`."""
        return max(1, SCORES // max(1, len(self._known.items)))


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values (R, k) and places (R, k) of the k highest of each row (R, N), best first, equal ones by place.

    torch.topk keeps any of the equal scores at the end of the list, so rows where it leaves some out are sorted.
    """
    best, places = torch.topk(scores, k, dim=1)
    if k:
        last = best[:, -1:]
        cut = ((scores >= last).sum(dim=1) > k) & torch.isfinite(last[:, 0])
        places[cut] = torch.argsort(scores[cut], dim=1, descending=True, stable=True)[:, :k]
    places = places.sort(dim=1).values
    best = scores.gather(1, places)
    order = torch.argsort(best, dim=1, descending=True, stable=True)
    return best.gather(1, order), places.gather(1, order)


def _pairs(seen: Seen, users: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """The user's row and the item's column of every item that the users acted on."""
    starts, counts = seen.offsets[users], seen.offsets[users + 1] - seen.offsets[users]
    rows = torch.repeat_interleave(torch.arange(len(users)), counts)
    within = torch.arange(len(rows)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return rows, seen.items[torch.repeat_interleave(starts, counts) + within].long() - first_id
