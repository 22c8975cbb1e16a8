"""Retrievers: models that find candidates among all items.

Shapes: R requests; N ids of items; C candidates; d numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import BundleError
from recspec.inference.exact_search import Floats, Ids, Mask
from recspec.inference.index import ItemIndex
from recspec.models import ItemModel, Model
from recspec.models.layers import Batch, at_once, num_rows, take

SCORES = 1 << 24
"""Scores of requests x items held at once on a CPU: 64 MB."""

VECTORS_AT_ONCE = 1 << 16
"""Items whose vectors are computed at once."""


@runtime_checkable
class UserVectors(Protocol):
    """An item model whose score is the product of a vector of the user and a vector of the item."""

    def request_vector(self, users: Tensor) -> Tensor:
        """(R, d) vectors of users."""

    def item_vectors(self) -> Tensor:
        """(N, d) vectors of all items."""


@runtime_checkable
class FeatureVectors(Protocol):
    """A model whose score is the product of a vector of the request's features and one of the item's features."""

    def request_vector(self, batch: Batch) -> Tensor:
        """(R, d) vectors of requests."""

    def item_vectors(self, items: Batch) -> Tensor:
        """(N, d) vectors of items."""


def has_vectors(model: Model) -> bool:
    """Whether an index of item vectors can stand for the model's scores."""
    return isinstance(model, UserVectors)


def can_retrieve(model: Model) -> bool:
    """Whether a model finds candidates fast: it has vectors, or ranks items by the users' events."""
    return has_vectors(model) or isinstance(model, ItemModel)


def request_vectors(model: Model, request: Batch) -> Floats:
    """(R, d) vectors of requests, of a model that has vectors."""
    with torch.inference_mode():
        if isinstance(model, ItemModel):
            vectors = cast(UserVectors, model).request_vector(request[model.user_id].long())
        else:
            vectors = cast(FeatureVectors, model).request_vector(request)
    return np.ascontiguousarray(vectors.float().cpu().numpy())


def vector_width(model: Model) -> int:
    """How many numbers the vectors have, of a model that has vectors; by the vector of an unknown request."""
    spec, request = model.spec, Batch()
    for name in [spec.user_id] if isinstance(model, ItemModel) else set(model.features()) - set(spec.role("item")):
        feature = spec.features[name]
        shape = (1, feature.length) if feature.length is not None else (1,)
        request[name] = torch.zeros(shape, dtype=torch.int64 if feature.is_categorical else torch.float32)
    return int(request_vectors(model, {name: each.to(model.device) for name, each in request.items()}).shape[1])


def item_vectors(model: Model, items: Batch) -> Floats:
    """(N, d) vectors of all items, whose features `items` holds by id, of a model that has vectors."""
    with torch.inference_mode():
        if isinstance(model, ItemModel):
            return np.ascontiguousarray(cast(UserVectors, model).item_vectors().float().cpu().numpy())
        own = {name: items[name] for name in model.spec.role("item") if name in items}
        starts = range(0, num_rows(own), VECTORS_AT_ONCE)
        parts = [take(own, slice(start, start + VECTORS_AT_ONCE)) for start in starts]
        made = [cast(FeatureVectors, model).item_vectors(part).float().cpu() for part in parts]
    return np.ascontiguousarray(torch.cat(made).numpy())


@dataclass(frozen=True, eq=False)
class Retriever:
    """A model with a name, which brings the items that it scores highest."""

    name: str
    model: Model
    index: ItemIndex | None
    """Vectors of the items that it may bring; without it, all items are scored."""
    found: Mask
    """(N,) the items that it may bring."""

    def top(
        self, model: Model, request: Batch, count: int, *, allowed: Mask | None, excluded: Sequence[Ids] | None
    ) -> Ids:
        """(R, count) ids of the best items, best first; -1 fills a short list.

        Args:
            model: the retriever's model, or the same one that knows other events.
            request: the features that it reads of each request.
            count: how many items are wanted.
            allowed: (N,) the items that may be brought; None for all.
            excluded: for each request the ids that it must not bring.
        """
        if self.index is not None:
            vectors = request_vectors(model, request)
            ids = self.index.search(vectors, count, allowed=allowed, excluded=excluded)[1]
            ids[~vectors.any(axis=1)] = -1  # all items have one score, as in `_best`
            return _widened(ids, count)
        mask = self.found if allowed is None else self.found & allowed
        rows, step = num_rows(request), max(1, at_once(SCORES, model.device) // len(mask))
        parts = [np.zeros((0, count), np.int64)]
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            hidden = excluded[part] if excluded is not None else None
            parts.append(self._best(model, take(request, part), count, mask, hidden))
        return np.concatenate(parts)

    def _best(
        self, model: Model, request: Batch, count: int, mask: Mask, excluded: Sequence[Ids] | None
    ) -> NDArray[np.int64]:
        """The best of all scores; items that share a score with items beyond the list are left out.

        A model of counts gives the same score, 0, to all items of which it knows nothing. They are no candidates.
        """
        assert isinstance(model, ItemModel)
        with torch.inference_mode():
            scores = model.score_users(request[model.user_id].long()).float()
            if not bool(scores.isfinite().all()):
                raise BundleError(f"retriever {self.name}: gives no finite score for some items; train it again")
            scores[:, torch.from_numpy(~mask).to(scores.device)] = -torch.inf
            for row, hidden in enumerate(excluded if excluded is not None else ()):
                scores[row, torch.from_numpy(hidden).to(scores.device)] = -torch.inf
            best, ids = torch.topk(scores, min(count + 1, scores.shape[1]), dim=1)
        last = best[:, -1:] if best.shape[1] > count else torch.full_like(best[:, :1], -torch.inf)
        kept = ((best > last) & best.isfinite()).cpu().numpy()[:, :count]
        numbers, values = ids.cpu().numpy()[:, :count], best.cpu().numpy()[:, :count]
        order = np.lexsort((numbers, -np.where(kept, values, -np.inf)), axis=1)
        made = np.where(np.take_along_axis(kept, order, 1), np.take_along_axis(numbers, order, 1), -1)
        return _widened(made, count)


def _widened(ids: NDArray[Any], count: int) -> Ids:
    """Lists of a steady length."""
    made = np.full((len(ids), count), -1, np.int64)
    made[:, : ids.shape[1]] = ids
    return made
