"""Pipelines: retrievers find candidates among all items, popular items fill the list up, and a ranker orders them.

Shapes: R requests; N ids of items; C candidates; d numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import BundleError, RequestError
from recspec.bundle import Bundle, PipelineCard
from recspec.bundle import cards as pipeline_card
from recspec.bundle import folder as bundle
from recspec.data.encoding import Encoders
from recspec.evaluation import EvaluationTask, ModelRanker, informed
from recspec.inference.catalogue import Catalogues
from recspec.inference.exact_search import Floats, Ids, Mask
from recspec.inference.index import ItemIndex
from recspec.inference.item_changes import BoundChanges
from recspec.inference.merging import joined
from recspec.inference.raw_columns import RawCatalogue
from recspec.loading import Ranks
from recspec.models import ItemModel, Model, Scores, at_once
from recspec.models.layers import Batch, num_rows, take

SCORES = 1 << 24
"""Scores of requests x items held at once on a CPU: 64 MB."""

VECTORS_AT_ONCE = 1 << 16
"""Items whose vectors are computed at once."""

BLOCK = 1 << 16
"""Items in order of popularity that are tested at once."""
RetrieverInput = tuple[Model, Batch] | None
"""A retriever's model and what it reads of the requests; None for a retriever that can't answer them."""


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


@dataclass(frozen=True)
class Candidates:
    """The candidates of one request."""

    ids: Ids
    """(C,) items, each once."""
    brought_by: NDArray[np.uint16]
    """(C,) bit i is set if retriever i brought the item; the bit after those of all retrievers is popularity's."""


class Pipeline:
    """Finds the candidates that a ranker scores."""

    def __init__(self, card: PipelineCard, retrievers: Sequence[Retriever], counts: Ids, kept: Mask | None) -> None:
        self.card, self.retrievers, self._counts = card, tuple(retrievers), counts
        self.kept = kept
        """(N,) the items that may be recommended to anyone; None for all."""
        self._popular = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]

    @classmethod
    def open(cls, trained: Bundle) -> Pipeline:
        """The pipeline of a bundle that is one.

        Raises:
            BundleError: if a retriever is missing or damaged, or fits another dataset.
        """
        card, spec = trained.pipeline, trained.spec
        assert card is not None
        if trained.seen is None:
            raise BundleError(f"{trained.folder}: a pipeline needs users and items, and seen.safetensors is missing")
        counts = trained.seen.counts.numpy().astype(np.int64)
        first = int(spec.reserves_unknown(spec.item_id))
        retrievers, problems = [], list[str]()
        for each in card.retrievers:
            where = trained.folder / pipeline_card.RETRIEVERS / each.name
            found = bundle.load(where, device=trained.model.device, verify=False)
            if found.spec.content_hash() != spec.content_hash():
                problems.append(f"retriever '{each.name}' has other features than the ranker")
            elif not (has_vectors(found.model) if each.has_index else can_retrieve(found.model)):
                problems.append(f"retriever '{each.name}' holds {found.card.model}, which finds no candidates")
            elif not each.has_index and not isinstance(found.model, ItemModel):
                needs = f"{found.card.model}, which searches an index of item vectors"
                problems.append(f"retriever '{each.name}' holds {needs}; pipeline.json says that it has none")
            else:
                index = ItemIndex.load(where) if each.has_index else None
                mask = may_bring(found.model, counts, first)
                problems += [] if index is None else _index_problems(each.name, found.model, index, mask)
                found.model.prepare_for_inference()
                retrievers.append(Retriever(each.name, found.model, index, mask))
        BundleError.refuse(f"{trained.folder}: a damaged pipeline", problems)
        return cls(card, retrievers, np.where(np.arange(len(counts)) < first, 0, counts), _kept(trained))

    def with_changes(self, trained: Bundle, changes: BoundChanges | None) -> Pipeline:
        """The same pipeline after changes of items, which its own filter reads; withdrawn and blocked ones are gone."""
        return Pipeline(self.card, self.retrievers, self._counts, _kept(trained, changes))

    def knowing(self, informed: Callable[[Model], Model], counts: Ids) -> Pipeline:
        """The same pipeline with models that know other events of users, and other numbers of users of items (N,)."""
        made = [replace(each, model=informed(each.model)) for each in self.retrievers]
        return Pipeline(self.card, made, counts, self.kept)

    def names_of(self, bits: int) -> tuple[str, ...]:
        """What brought an item, from its bits."""
        names = (*(each.name for each in self.retrievers), pipeline_card.POPULARITY)
        return tuple(name for place, name in enumerate(names) if bits >> place & 1)

    @property
    def brings_unseen(self) -> bool:
        """Whether a retriever may bring items without interactions."""
        return any(each.model.traits.scores_unseen_items for each in self.retrievers)

    @property
    def popularity_bit(self) -> int:
        """The bit of `brought_by` for items that fill a list up."""
        return 1 << len(self.retrievers)

    def candidates(
        self,
        asked: Sequence[RetrieverInput],
        requests: int,
        *,
        count: int | None = None,
        allowed: Mask | None = None,
        excluded: Sequence[Ids] | None = None,
    ) -> list[Candidates]:
        """The candidates of each request: the retrievers' first items, their second ones and so on, each once.

        Popular items fill a list up.

        Args:
            asked: for each retriever its model and its side of the requests.
            requests: how many there are.
            count: how many candidates are wanted; by default the pipeline's number.
            allowed: (N,) the items that may be candidates, beside the pipeline's own filter.
            excluded: for each request the ids that are no candidates.
        """
        wanted = min(max(self.card.candidates, count or 0), len(self._counts))
        mask = allowed if self.kept is None else self.kept if allowed is None else self.kept & allowed
        if mask is not None and bool(mask.all()):
            mask = None
        found = [
            np.full((requests, 0), -1, np.int64)
            if one is None
            else each.top(*one, wanted, allowed=mask, excluded=excluded)
            for each, one in zip(self.retrievers, asked, strict=True)
        ]
        hidden = excluded if excluded is not None else [np.zeros(0, np.int64)] * requests
        most = wanted + max((len(ids) for ids in hidden), default=0)
        popular = self.most_popular(mask, most)
        return [
            Candidates(*joined([ids[row] for ids in found], popular, wanted, hidden[row])) for row in range(requests)
        ]

    def most_popular(self, mask: Mask | None, count: int) -> Ids:
        """The first items that some user acted on, the most popular first; ties by id."""
        if mask is None:
            return self._popular[:count]
        parts, held = [np.zeros(0, np.int64)], 0
        for start in range(0, len(self._popular), BLOCK):
            block = self._popular[start : start + BLOCK]
            parts.append(block[mask[block]][: count - held])
            held += len(parts[-1])
            if held == count:
                break
        return np.concatenate(parts)


def may_bring(model: Model, counts: Ids, first: int) -> Mask:
    """(N,) the items that a retriever may bring: those that users acted on, or all if it reads their features."""
    ids = np.arange(len(counts))
    may = ids >= first
    return np.asarray(may if model.traits.scores_unseen_items else may & (counts > 0))


def rank(model: Model, request: Batch, items: Batch, ids: Sequence[Ids]) -> list[Floats]:
    """The ranker's scores of the candidates of each request, given the features of all items by id."""
    scores = []
    with torch.inference_mode():
        for row, own in enumerate(ids):
            places = torch.from_numpy(own).to(model.device)
            one = take(request, slice(row, row + 1))
            scores.append(model.score_items(one, take(items, places))[0].float().cpu().numpy())
    return scores


def _kept(trained: Bundle, changes: BoundChanges | None = None) -> Mask | None:
    """The items that pass the pipeline's own filter, and are neither withdrawn, blocked nor retired; None for all."""
    assert trained.pipeline is not None
    encoders = Encoders.load(trained.folder) if trained.spec.metadata.get("encoders") else None
    retired = Catalogues(trained.spec, encoders, torch.device("cpu"), changes=changes).retired
    masks = [*(() if changes is None else (changes.available,)), *(() if retired is None else (~retired,))]
    try:
        if trained.pipeline.filter is not None:
            masks.append(RawCatalogue(trained.spec, encoders, changes).mask(trained.pipeline.filter))
        return np.logical_and.reduce(masks) if masks else None
    except RequestError as error:
        raise BundleError(f"{Path(trained.folder)}: pipeline.json: {error}") from None


def _index_problems(name: str, model: Model, index: ItemIndex, mask: Mask) -> list[str]:
    ids, width = index.ids, index.dim
    if width != (wanted := vector_width(model)):
        return [f"the index of retriever '{name}' holds vectors of {width:,} numbers; its model's have {wanted:,}"]
    if len(ids) and (int(ids.max()) >= len(mask) or not mask[ids].all()):
        return [f"the index of retriever '{name}' holds items that are not in the dataset or have no interactions"]
    return []


class PipelineRanker:
    """Scores by which the candidates come first, in the order that `recommend` gives them.

    The best of C candidates has the score C, the worst 1. The other items follow in the order of popularity, from 0
    down. Items that the ranker, or popularity, does not tell apart are level. Items that the pipeline's filter leaves
    out share the lowest score. Popularity is that of the events that models may know: those of valid, which the bundle
    counts too, would tell what valid asks.
    """

    def __init__(self, trained: Bundle, question: EvaluationTask) -> None:
        self._question, self._trained = question, trained
        counts = question.known_positives.counts
        self._pipeline = Pipeline.open(trained).knowing(lambda model: informed(model, question), counts)
        self._hits = self._positives = 0
        self._others = -np.unique(-counts, return_inverse=True)[1].astype(np.float32)
        if self._pipeline.kept is not None:
            self._others[~self._pipeline.kept] = -len(counts)

    @cached_property
    def _ranker(self) -> ModelRanker:
        """The ranker with the requests of the split, read when items are first ranked."""
        return ModelRanker(informed(self._trained.model, self._question), self._question)

    @cached_property
    def _retrievers(self) -> list[ModelRanker]:
        """Likewise for each retriever."""
        return [ModelRanker(each.model, self._question) for each in self._pipeline.retrievers]

    def score_users(self, users: NDArray[np.integer[Any]]) -> Scores:
        """(R, N) scores of every item for each user."""
        seen, truth = self._question.excluded, self._question.truth
        hidden = [seen.of(users[row : row + 1])[1].astype(np.int64) for row in range(len(users))]
        asked = [(each.model, each.request_of(users)) for each in self._retrievers]
        found = self._pipeline.candidates(asked, len(users), excluded=hidden)
        scores = np.tile(self._others, (len(users), 1))
        with torch.inference_mode():
            request = self._ranker.request_of(users)
            values = rank(self._ranker.model, request, self._ranker.items, [each.ids for each in found])
        for row, (each, of_each) in enumerate(zip(found, values, strict=True)):
            scores[row, each.ids] = 1 + np.unique(of_each, return_inverse=True)[1]
            targets = truth.of(users[row : row + 1])[1]
            self._hits += int(np.isin(targets, each.ids).sum())
            self._positives += len(targets)
        return scores

    def score_pairs(self, users: NDArray[np.integer[Any]], items: NDArray[np.integer[Any]]) -> Scores:
        """(P,) scores of pairs."""
        return np.array([self.score_users(users[at : at + 1])[0, items[at]] for at in range(len(users))], np.float32)

    def facts(self, ranks: Ranks) -> Mapping[str, object]:
        """What was ranked, and the share of all positives that were among the candidates."""
        mine = torch.tensor([[self._hits, self._positives]])
        hits, positives = ranks.gather(mine).sum(0).tolist()
        recall = hits / max(1, positives)
        stages = (
            f"{self._pipeline.card.described}, ranked by {self._trained.card.model}; then the other items by popularity"
        )
        return {"stages": stages, "candidates_recall": round(recall, 6)}
