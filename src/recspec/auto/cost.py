"""What an evaluation costs, estimated before training: models differ by a factor of a thousand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from recspec.batch import to_device
from recspec.evaluation import ModelRanker, Question, as_batch, seconds_of, users_at_once
from recspec.models import Model
from recspec.storage import open_split

MOST_USERS, FEWEST_USERS = 2000, 500
"""Users ranked between epochs: more hardly sharpen the choice, fewer are noise."""
ROWS = 16_384
"""Rows that are timed."""
MOST_TIMED = 2.0
"""Seconds that one timed call may take by what one user takes alone."""


def one_request(model: Model, question: Question) -> Callable[[], object]:
    """A call that scores every item for one user, or one row where rows are judged."""
    return _request(model, question, 1)


def seconds_each(model: Model, question: Question) -> float:
    """Seconds to judge a model on one user, or one row, of many that are scored together."""
    with torch.inference_mode():
        if not _ranks(question):
            rows = max(1, min(ROWS, size_of(question)))
            return seconds_of(_request(model, question, rows)) / rows
        one = seconds_of(_request(model, question, 1))
        users = min(users_at_once(question.truth.num_items, model.device), size_of(question))
        if one * users > MOST_TIMED:
            return one
        return min(one, seconds_of(_request(model, question, users)) / users)


def size_of(question: Question) -> int:
    """Users that are ranked, or rows that are judged."""
    return len(question.ranked_users) if _ranks(question) else len(question.rows.labels)


def users_of(question: Question) -> tuple[int, int]:
    """How many users protocol `full` ranks, and of how many that could be ranked."""
    return len(question.ranked_users), int(np.count_nonzero(np.diff(question.truth.offsets)))


def _ranks(question: Question) -> bool:
    return question.choose()[0] == ("full",)


def _request(model: Model, question: Question, number: int) -> Callable[[], object]:
    """A call that scores so many users or rows at once."""
    if _ranks(question):
        ranker, users = ModelRanker(model, question), question.ranked_users[:number]
        return lambda: ranker.score_users(users)
    reader = open_split(question.spec, question.split, model.features())
    batch = to_device(as_batch(reader.read(0, min(number, reader.num_rows)), question.spec), model.device)
    return lambda: model(batch).cpu()


def users_to_rank(each: Mapping[str, float], users: int, seconds: float) -> tuple[int, list[str]]:
    """How many users all models are judged on, and the models that take more than `seconds` for the fewest.

    `each` holds a model's seconds for one user.
    """
    fewest = min(FEWEST_USERS, users)
    too_slow = [name for name, one in each.items() if one * fewest > seconds]
    slowest = max((one for name, one in each.items() if name not in too_slow), default=0.0)
    affordable = int(seconds / 4 / slowest) if slowest > 0 else users
    return min(users, MOST_USERS, max(fewest, affordable)), too_slow
