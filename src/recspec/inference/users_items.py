"""What a model knows of one user, and of one item for a user: the history, and the reasons for a score."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from recspec.errors import RequestError, shortened
from recspec.inference.explanations import Explanation
from recspec.inference.predictor import Predictor
from recspec.inference.wanted import Wanted
from recspec.models import KnownEvents


def history_of(predictor: Predictor, user: str | int) -> pa.Table:
    """The items of a user's events, one row each: `item` and `title`.

    Oldest first where the model or its bundle keeps the order of events, otherwise in order of the items' ids.

    Raises:
        RequestError: for an unknown user.
    """
    number = _user(predictor, user)
    known = getattr(predictor.model, "known", None)
    if isinstance(known, KnownEvents):
        events = known.items[int(known.offsets[number]) : int(known.offsets[number + 1])].long().cpu().numpy()
    else:
        events = predictor.recommender.explainer.history(number)
    events = events[events >= predictor.items.first_id]
    return pa.table({"item": predictor.raw_ids("item", events), "title": predictor.items.titles_of(events)})


def explain(predictor: Predictor, user: str | int, item: str | int) -> tuple[float, Explanation | None]:
    """The model's score of an item for a user, and what explains it; None if nothing does.

    Raises:
        RequestError: for an unknown user or item, or a model that reads a context.
    """
    recommender = predictor.recommender
    number, found = _user(predictor, user), predictor.catalogues.item_ids([item])
    if found[0] < predictor.items.first_id:
        hint = predictor.catalogues.nearest("item", item)
        raise RequestError(f"item '{shortened(str(item))}': is unknown to the model{hint}")
    asked = recommender.check(Wanted(users=(user,), explain=True))
    scores = recommender.scores_of_all(np.array([number]), asked.context)[0].numpy()[found - predictor.items.first_id]
    return float(scores[0]), recommender.explainer.explain(number, "user", asked.context, found, scores)[0]


def _user(predictor: Predictor, user: str | int) -> int:
    """The prepared id of a user whom the model knows."""
    _ = predictor.recommender.seen  # raises for a model without users and items
    number = int(predictor.catalogues.user_ids([user])[0])
    if number < predictor.users.first_id:
        hint = predictor.catalogues.nearest("user", user)
        raise RequestError(f"user '{shortened(str(user))}': is unknown to the model{hint}")
    return number
