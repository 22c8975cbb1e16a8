"""Classic models beside a trained one on valid, as far as they cost little beside its training.

Popularity takes one pass over the rows, and the constant nothing, so they are always measured. Those of `CHEAP` follow,
the cheapest first, each with its default settings, while their estimated time fits `SHARE` of the training's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from recspec.base.errors import RecspecError
from recspec.evaluation import Evaluation, EvaluationTask, evaluate_baselines, seconds_of_an_operation
from recspec.models import FittedItemModel, find_model, on_meta_device

CHEAP = ("markov", "ease", "item_knn")
"""Baselines beside popularity. iALS and GF-CF take many passes, whose number the sizes don't tell."""

SHARE = 0.1
"""Most time of the baselines, as a share of the training."""
LEAST, MOST = 1.0, 60.0
"""Seconds below which only popularity is measured, since estimates take half a second; and the most of any training."""
AS_POPULARITY = 5.0
"""Time to rank with such a model, in terms of popularity's."""


def item_baselines(
    question: EvaluationTask, splits: Sequence[str], model: str, seconds: float
) -> dict[str, Evaluation]:
    """The evaluations of popularity and of the other cheap baselines, fitted to some splits.

    Args:
        question: what valid asks under one protocol.
        splits: the splits that the model was trained on.
        model: the model's name, which is no baseline of itself.
        seconds: how long the model was trained; 0 measures popularity alone.
    """
    if question.lacks:
        return {}
    started = time.monotonic()
    found = _measured("popularity", question, splits) if model != "popularity" else {}
    once = time.monotonic() - started
    budget = min(MOST, SHARE * seconds)
    if budget < LEAST:
        return found
    one = seconds_of_an_operation()
    fits = {name: one * _operations(name, question) for name in CHEAP if name != model}
    for name, seconds_to_fit in sorted(fits.items(), key=lambda fit: fit[1]):
        if AS_POPULARITY * once + seconds_to_fit < budget - (time.monotonic() - started):
            found |= _measured(name, question, splits)
    return found


def _operations(name: str, question: EvaluationTask) -> float:
    kind = find_model(name)
    assert issubclass(kind, FittedItemModel)
    return on_meta_device(lambda: kind(question.spec, kind.Settings())).operations()


def _measured(name: str, question: EvaluationTask, splits: Sequence[str]) -> dict[str, Evaluation]:
    try:
        return evaluate_baselines(question, splits, names=(name,))[0]
    except RecspecError:  # data without users or items has no popularity
        return {}
