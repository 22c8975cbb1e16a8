"""The candidates of a pipeline for users, baskets and contexts.

Shapes: R users; C candidates of a user; N ids of items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.bundle import Bundle
from recspec.inference.catalogue import Catalogues
from recspec.inference.pipeline import Asked, Candidates, Pipeline, rank
from recspec.inference.ranking import Choice
from recspec.inference.requesters import Context, Requesters
from recspec.inference.row_encoder import RowEncoder
from recspec.models import Model
from recspec.models.layers import Batch


@dataclass(frozen=True, eq=False)
class Scored:
    """Candidates of R users; ids ascend in each row, and a score of -inf leaves one out."""

    scores: Tensor  # (R, C)
    ids: Tensor  # (R, C); -1 fills a short list
    brought_by: NDArray[np.uint16] | None = None  # (R, C) see `retrieval.Candidates`
    flat: NDArray[np.bool_] | None = None  # (R,) users for whom the model scores all items alike

    def brought(self, items: NDArray[np.int64]) -> NDArray[np.uint16]:
        """(R, k) what brought items (R, k) of the candidates; 0 where nothing did."""
        found = np.zeros(items.shape, np.uint16)
        if self.brought_by is not None:
            for row, ids in enumerate(self.ids.numpy()):
                places = np.searchsorted(ids, items[row]).clip(max=max(0, len(ids) - 1))
                found[row] = np.where(items[row] >= 0, self.brought_by[row, places], 0) if len(ids) else 0
        return found


class Retrieving:
    """Asks the retrievers of a pipeline, and lets the ranker score what they bring."""

    def __init__(self, pipeline: Pipeline, trained: Bundle, known: Catalogues, ranker: Requesters) -> None:
        self.pipeline, self._trained, self._known, self._ranker = pipeline, trained, known, ranker
        models = [each.model for each in pipeline.retrievers]
        self._requesters = [Requesters(model, known, RowEncoder(known, model.features())) for model in models]

    def reads_basket(self, context: Context) -> bool:
        """Whether a retriever can answer the request's basket."""
        return any(each.answered_by(context)[1] == "basket" for each in self._requesters)

    def scored(
        self, users: NDArray[np.int64], context: Context, choice: Choice, k: int, *, include_seen: bool
    ) -> Scored:
        """The candidates of R users, with the ranker's scores.

        Args:
            users: (R,) prepared ids; one below the first is an unknown user's.
            context: what the request gives beside the user.
            choice: what may be recommended.
            k: how many items are wanted at least.
            include_seen: whether items that the user acted on may be candidates.

        Raises:
            BundleError: if the ranker gives a score that is not finite; `RequestError` if the context is to blame.
        """
        first, seen = self._known.users.first_id, self._trained.seen
        assert seen is not None
        asked = [self._asked(each, users, context, known=bool((users >= first).all())) for each in self._requesters]
        hidden = [
            choice.left_out
            if include_seen or user < first
            else np.concatenate([seen.of(user).numpy().astype(np.int64), choice.left_out])
            for user in users.tolist()
        ]
        found = self.pipeline.candidates(asked, len(users), count=k, allowed=choice.kept, excluded=hidden)
        made = self._ranked(*self._ranker.batch(users, context), found)
        if not bool(made.scores[made.ids >= 0].isfinite().all()):
            raise context.no_finite_score("ranker")
        return made

    def _ranked(self, model: Model, request: Batch, found: Sequence[Candidates]) -> Scored:
        """The ranker's scores of candidates."""
        ordered = [np.argsort(each.ids) for each in found]
        own = [each.ids[order] for each, order in zip(found, ordered, strict=True)]
        values = rank(model, request, self._known.items.features, own)
        shape = (len(found), max((len(ids) for ids in own), default=0))
        scores, ids = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
        bits = np.zeros(shape, np.uint16)
        for row, (each, order) in enumerate(zip(found, ordered, strict=True)):
            place = slice(shape[1] - len(order), None)
            scores[row, place], ids[row, place], bits[row, place] = values[row], own[row], each.brought_by[order]
        return Scored(torch.from_numpy(scores), torch.from_numpy(ids), bits)

    @staticmethod
    def _asked(requesters: Requesters, users: NDArray[np.int64], context: Context, *, known: bool) -> Asked:
        """A retriever's side of the requests; None if it can't answer them."""
        if any(name not in context.features for name in requesters.asked):
            return None
        if not known and requesters.answered_by(context)[1] not in ("basket", "context"):
            return None
        return requesters.batch(users, context)
