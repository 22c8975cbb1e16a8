"""Items like one item.

Shapes: N items of the catalogue; k items of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.bundle import Bundle
from recspec.errors import RequestError, shortened
from recspec.inference.catalogue import Catalogues
from recspec.inference.ranking import ranked
from recspec.inference.recommendation import SimilarItems, described, notes_of_short_list
from recspec.inference.recommender import Recommender
from recspec.inference.wanted import Wanted
from recspec.models import ItemModel, UserEvents


def similar(recommender: Recommender, trained: Bundle, known: Catalogues, wanted: Wanted) -> SimilarItems:
    """The items most like the one item of a request, by cosines of the model's vectors; equal ones by id.

    A model of users' events without vectors of items (EASE, item-kNN) ranks by its scores for a basket of the item
    alone. The request's filter and excluded items hold; the item itself is left out.

    Raises:
        RequestError: with every problem of the request.
    """
    assert len(wanted.items) == 1, "one item"
    _ = recommender.seen  # raises for a model that can't recommend
    if problems := wanted.problems():
        raise RequestError.of("similar", problems)
    choice = recommender.chooser.choose(wanted, problems)
    vectors = recommender.vectors
    if choice.basket is None or not len(choice.basket):
        hint = known.nearest("item", wanted.items[0])
        problems.append(f"no item '{str(wanted.items[0])[:200]}' in the catalogue of the model{hint}")
    if vectors is None and not isinstance(trained.model, ItemModel):
        problems.append("the model has no vectors of items, so it can't tell which are alike")
    if problems:
        raise RequestError.of("similar", problems)
    assert choice.basket is not None
    first, item = known.items.first_id, choice.basket[:1]
    scores = _cosines(vectors, item) if vectors is not None else _scores(trained, known, item)
    scores = scores[:, first:].masked_fill(~torch.from_numpy(choice.allowed[first:]), -torch.inf)
    ids = torch.arange(first, first + scores.shape[1]).unsqueeze(0)
    found = ranked(scores, ids, min(wanted.k, scores.shape[1]), choice)
    kept = found.items[0] >= 0
    items = described(known, found.items[0, kept], found.scores[0, kept])
    (own,) = described(known, item, np.zeros(1, np.float32))
    is_unseen = not recommender.chooser.scorable[item[0]]
    notes = (
        *choice.notes,
        *_notes_of_ties(scores[0], found.scores[0, kept], own.item, is_unseen=is_unseen),
        *notes_of_short_list(len(items), wanted, "item"),
    )
    return SimilarItems(own.item, own.title, "vectors" if vectors is not None else "scores", items, notes)


def _notes_of_ties(scores: Tensor, best: NDArray[np.float32], item: str | int, *, is_unseen: bool) -> Iterator[str]:
    """What to know of items that are listed by id, because the model scores them like others that are not listed."""
    if not len(best):
        return
    why = f"item '{shortened(str(item))}' has no interactions that the model was trained on, so " if is_unseen else ""
    tied = int((scores == float(best[-1])).sum())
    last = int(np.count_nonzero(best == best[-1]))
    if tied == int(scores.isfinite().sum()) and tied > 1:
        told = f"the model knows no items like it: it scores all {tied:,} items alike, and these are the first by id"
        yield f"{why}{told}"
    elif is_unseen:
        yield f"{why}the model knows little of what is like it"
    elif tied > last > 1:
        yield f"the last {last:,} are no more like it than {tied - last:,} others, and stand here by their ids"


def _cosines(vectors: Tensor, item: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    """(1, ids) cosines of vectors of length 1."""
    return vectors[torch.from_numpy(item)] @ vectors.T


def _scores(trained: Bundle, known: Catalogues, item: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    """(1, ids) scores for a basket of one item."""
    model = trained.model
    assert isinstance(model, ItemModel)
    basket = UserEvents(np.array([0, 1], np.int64), item.astype(np.int32))
    return model.score_events(basket.interactions(known.spec.num_ids(known.spec.item_id))).float().cpu()
