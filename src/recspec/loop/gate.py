"""The gate: whether a new version may answer, by the newest events, which it has not learned from.

Each user gives the two versions one value each: the NDCG@10 of the list that `recommend` gives, where the items that
the user acted on then are relevant; or, of a model that gives probabilities, the mean log loss of the user's labelled
rows, with its sign turned. The versions are compared over these users, in pairs.

The new version passes if the lower bound of the 95 % interval of the mean difference is above -margin. Where that
interval is wider than the margin, users are too few: an equal model would often fail too. Then the new version passes
unless the whole interval is below 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recspec.base.errors import how_many
from recspec.datasets import RawEvents
from recspec.evaluation import compare_values
from recspec.inference import Predictor
from recspec.loop.event_file import Lists, losses_of, targets_of
from recspec.loop.raw_rows import LABEL, SEQ

K = 10
DRAWS = 1_000
MOST_USERS = 4_000
"""Users that are asked for lists; of more, as many are drawn."""


@dataclass(frozen=True)
class Judgement:
    """What the gate found."""

    passed: bool
    why: str
    metric: str = ""
    users: int = 0
    before: float | None = None
    """The metric of the version that answers."""
    after: float | None = None
    low: float | None = None
    """Of the 95 % interval of the difference; above 0 the new version is better."""
    high: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return dict(vars(self))


def judge(before: Predictor, after: Predictor, rows: pa.Table, raw: RawEvents, margin: float) -> Judgement:
    """Compare two versions on raw rows that neither has learned from; see the top of this file."""
    if after.bundle.gives_probabilities and before.bundle.gives_probabilities and LABEL in rows.column_names:
        metric, values = "log_loss", [_losses(each, rows, raw) for each in (before, after)]
    else:
        metric, values = f"ndcg@{K}", _gains(before, after, rows, raw)
    count = len(values[0])
    if count < 2:
        return Judgement(True, f"passed without a test: {how_many(count, 'user')} to judge by", metric, count)
    found = compare_values(values[0], values[1], DRAWS)
    sign = -1 if metric == "log_loss" else 1
    told = metric, count, sign * found.ours, sign * found.theirs, found.low, found.high
    interval = f"{metric} of {count:,} users: the difference is {found.low:+.4f} to {found.high:+.4f}"
    passed, rule = found.low > -margin, f"{'' if found.low > -margin else 'not '}above -{margin:g}"
    if not passed and found.high - found.low > margin:
        passed = found.high >= 0
        rule = "too few users for the margin, and not below 0" if passed else "too few users, and below 0 all the same"
    return Judgement(passed, f"{interval}, {rule}", *told)


def _losses(predictor: Predictor, rows: pa.Table, raw: RawEvents) -> NDArray[np.floating[Any]]:
    """(G,) minus the mean log loss of each user's rows; of each row where there are no users."""
    losses = -losses_of(predictor, rows.drop_columns([SEQ]), LABEL)[2]
    if raw.settings.user is None:
        return losses
    users = np.asarray(rows.column(raw.settings.user).combine_chunks().dictionary_encode().indices)
    found: NDArray[np.float64] = np.bincount(users, losses) / np.bincount(users)
    return found


def _gains(before: Predictor, after: Predictor, rows: pa.Table, raw: RawEvents) -> list[NDArray[np.floating[Any]]]:
    """(G,) the NDCG of each user's list, by both versions."""
    wanted = targets_of(after, rows, raw)
    users = [*wanted]
    if len(users) > MOST_USERS:
        users = [users[place] for place in np.sort(np.random.default_rng(0).permutation(len(users))[:MOST_USERS])]
    if not users:
        return [np.zeros(0)] * 2
    lists = (Lists(each, {user: wanted[user] for user in users}, K) for each in (before, after))
    return [each.evaluation((K,)).values["full"][f"ndcg@{K}"] for each in lists]
