"""When training stops by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence


def stop_reason(
    values: Sequence[float],
    *,
    count: int,
    lower: bool,
    patience: int | None,
    falling_patience: int | None,
) -> str:
    """Why training should stop after these evaluations on valid; empty if it should go on.

    `patience`: no value of the last `patience` evaluations is better than the best one before. A flat metric may
    still climb: AUC of sparse ids can stay near one half for several epochs.

    `falling`: each of the last `falling_patience` values is worse than the best one by more than its standard error,
    and the last one is not better than the first of them, so no recovery is under way.

    Args:
        values: the metric after each evaluation, oldest first.
        count: number of rows, users or groups behind a value; of the rarer class for AUC.
        lower: whether lower values are better.
        patience: number of evaluations without improvement; None for no limit.
        falling_patience: number of evaluations clearly below the best one; None for no limit.
    """
    if not values:
        return ""
    gains = [-value if lower else value for value in values]
    best = max(gains)
    if patience is not None and len(gains) - 1 - gains.index(best) >= patience:
        return "patience"
    if falling_patience is not None and len(gains) > falling_patience:
        last = gains[-falling_patience:]
        limit = best - standard_error(abs(best), count, bounded=not lower)
        if all(gain < limit for gain in last) and last[-1] <= last[0]:
            return "falling"
    return ""


def standard_error(value: float, count: int, *, bounded: bool) -> float:
    """A bound on the standard error of a mean over `count`.

    The standard deviation of numbers from 0 to 1 with mean p is at most sqrt(p (1 - p)). That of losses, which have no
    upper bound, is taken to be their mean, as for an exponential distribution.
    """
    spread = math.sqrt(max(0.0, value * (1 - value))) if bounded else value
    return spread / math.sqrt(max(1, count))
