"""What an evaluation costs, estimated before training: models differ by a factor of a thousand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from recspec.batch import to_device
from recspec.distributed import Ranks
from recspec.evaluation import EvaluateSettings, ModelRanker, Question, as_batch
from recspec.models import Model
from recspec.spec import FeatureSpec
from recspec.storage import open_split

MOST_USERS, FEWEST_USERS = 2000, 500
"""Users ranked between epochs: more hardly sharpen the choice, fewer are noise."""
ROWS = 16_384
"""Rows that are timed."""
TIMED = 0.5
"""Seconds after which timing ends."""


def one_request(model: Model, spec: FeatureSpec, protocol: str) -> tuple[Callable[[], object], int]:
    """A call that scores every item for one user, or one row where rows are judged; and their number in valid."""
    split = "valid" if "valid" in spec.splits else "train"
    if protocol != "full":
        return rows_request(model, spec, split, 1)
    question = Question(spec, split, (protocol,), EvaluateSettings(), reads=model.features())
    ranker = ModelRanker(model, question)
    user = question.ranked_users[:1]
    return lambda: ranker.score_users(user), len(question.ranked_users)


def rows_request(model: Model, spec: FeatureSpec, split: str, rows: int) -> tuple[Callable[[], object], int]:
    """A call that scores some rows at once; and how many the split holds."""
    reader = open_split(spec, split, model.features())
    batch = to_device(as_batch(reader.read(0, min(rows, reader.num_rows)), spec), model.device)
    return lambda: model(batch).cpu(), reader.num_rows


def seconds_each(model: Model, spec: FeatureSpec, protocol: str, ranks: Ranks) -> tuple[float, int]:
    """Seconds to judge a model on one user, or one row; and how many valid holds."""
    model.to(ranks.device).eval()
    with torch.inference_mode():
        if protocol == "full":
            call, size = one_request(model, spec, protocol)
            each = 1
        else:
            call, size = rows_request(model, spec, "valid" if "valid" in spec.splits else "train", ROWS)
            each = max(1, min(ROWS, size))
        times: list[float] = []
        while sum(times) < TIMED and len(times) < 5:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return min(times) / each, size


def users_to_rank(each: Mapping[str, float], users: int, seconds: float) -> tuple[int, list[str]]:
    """How many users all models are judged on, and the models that take more than `seconds` for the fewest.

    `each` holds a model's seconds for one user.
    """
    fewest = min(FEWEST_USERS, users)
    too_slow = [name for name, one in each.items() if one * fewest > seconds]
    slowest = max((one for name, one in each.items() if name not in too_slow), default=0.0)
    affordable = int(seconds / 4 / slowest) if slowest > 0 else users
    return min(users, MOST_USERS, max(fewest, affordable)), too_slow
