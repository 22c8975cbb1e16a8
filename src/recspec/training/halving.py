"""Which trials of a search stop early: successive halving that waits for slow starters.

Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016; in the
asynchronous form of Li et al.: A System for Massively Parallel Hyperparameter Tuning, MLSys 2020. Optuna's pruners are
not used: they forget trials that stopped improving before a rung, judge the second trial against the first alone, and
end a trial that still climbs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FIRST_RUNG = 9
"""Epochs that every trial gets: AUC on sparse data may be flat for six to eight epochs and then climb."""

REDUCTION = 3
"""The share of trials that go on from a rung is 1 / REDUCTION; the next rung has REDUCTION times as many epochs."""

FEWEST_OTHERS = 4
"""Number of other trials that must have reached a rung before one is stopped there."""

Trace = Mapping[int, float]
"""The best value so far after each evaluated epoch; lower is better."""


def is_hopeless(trace: Trace, others: Sequence[tuple[Trace, bool]]) -> bool:
    """Whether a trial stops at its newest epoch.

    It stops if that epoch is a rung, two thirds of the trials that got so far were better there, and its pace does not
    take it to the best third by the next rung. The pace is that of the last third of its epochs.

    Args:
        trace: the trial's.
        others: the other trials', each with whether it trained to its end. Such a trial counts at later epochs too.
    """
    epoch = max(trace, default=0)
    if not is_rung(epoch):
        return False
    known = [value for each, ended in others if (value := value_at(each, epoch, ended=ended)) is not None]
    if len(known) < FEWEST_OTHERS:
        return False
    go_on = max(1, (len(known) + 1) // REDUCTION)
    cut = sorted(known)[go_on - 1]
    past = min(at for at in trace if at >= epoch - epoch // REDUCTION)
    pace = (trace[past] - trace[epoch]) / max(1, epoch - past)
    return trace[epoch] - pace * epoch * (REDUCTION - 1) > cut


def is_rung(epoch: int) -> bool:
    """Whether trials are compared after this epoch: 9, 27, 81, ..."""
    rung = FIRST_RUNG
    while rung < epoch:
        rung *= REDUCTION
    return rung == epoch


def is_compared(epoch: int) -> bool:
    """Whether the value after this epoch is read at a rung: the rung's own, and the one before its last third."""
    return is_rung(epoch) or (
        epoch * REDUCTION % (REDUCTION - 1) == 0 and is_rung(epoch * REDUCTION // (REDUCTION - 1))
    )


def value_at(trace: Trace, epoch: int, *, ended: bool) -> float | None:
    """A trial's best value after an epoch, or None if it did not get so far and could have."""
    if not trace or (max(trace) < epoch and not ended):
        return None
    return min((value for at, value in trace.items() if at <= epoch), default=None)
