"""A pipeline's first stage: the candidates of a request, from several retrievers, filled up with popular items.

Shapes: R requests; N ids of items; C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.base.errors import BundleError, RequestError
from recspec.bundle import Bundle, PipelineCard
from recspec.bundle import cards as pipeline_card
from recspec.bundle import folder as bundle
from recspec.data.encoding import Encoders
from recspec.inference.exact_search import Floats, Ids, Mask
from recspec.inference.index import ItemIndex
from recspec.inference.merging import joined
from recspec.inference.raw_catalogue import RawCatalogue
from recspec.inference.retrievers import Retriever, can_retrieve, has_vectors, vector_width
from recspec.models import ItemModel, Model
from recspec.models.layers import Batch, take

BLOCK = 1 << 16
"""Items in order of popularity that are tested at once."""

Asked = tuple[Model, Batch] | None
"""A retriever's model and what it reads of the requests; None for a retriever that can't answer them."""


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
        """(N,) the items that the pipeline's own filter keeps; None without a filter."""
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
        if problems:
            raise BundleError.of(f"{trained.folder}: a damaged pipeline", problems)
        return cls(card, retrievers, np.where(np.arange(len(counts)) < first, 0, counts), _kept(trained))

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
        asked: Sequence[Asked],
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


def _kept(trained: Bundle) -> Mask | None:
    """The items that the pipeline's own filter keeps."""
    assert trained.pipeline is not None
    if trained.pipeline.filter is None:
        return None
    encoders = Encoders.load(trained.folder) if trained.spec.metadata.get("encoders") else None
    try:
        return RawCatalogue(trained.spec, encoders).mask(trained.pipeline.filter)
    except RequestError as error:
        raise BundleError(f"{Path(trained.folder)}: pipeline.json: {error}") from None


def _index_problems(name: str, model: Model, index: ItemIndex, mask: Mask) -> list[str]:
    ids, width = index.ids, index.dim
    if width != (wanted := vector_width(model)):
        return [f"the index of retriever '{name}' holds vectors of {width:,} numbers; its model's have {wanted:,}"]
    if len(ids) and (int(ids.max()) >= len(mask) or not mask[ids].all()):
        return [f"the index of retriever '{name}' holds items that are not in the dataset or have no interactions"]
    return []
