"""The race of a search's candidates for its time.

A race ends candidates: one that the best candidate leads, over the same users or rows, by more than it may still gain
and two standard errors (after Maron, Moore: Hoeffding Races, NIPS 1993, with paired errors). All that do not lead share
`LOSERS` of the time.

Models trained by steps are halved successively: a candidate trains in slices, each up to twice the time of all before.
After a slice it waits; the better half of those that had as many slices goes on (Li et al.: A System for Massively
Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2, with time as the resource and one worker). What waits goes on
when nothing better can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from recspec.training import Result
from recspec.training.search.candidates import LOSERS, ranks_items
from recspec.training.search.state import CLEAR, MOST_MEMBERS, Judged, Line, State
from recspec.training.search.study import FIRST_RUNG, most_gain

KEPT_BACK = 0.2
"""Share of the time kept for training the winner again, test and latency."""
GRID_GAIN = 0.6
"""What all combinations of a fitted model's settings gain at most on its first one, as a share of its value: GF-CF
gained .55 on Amazon's musical instruments, and no other one more than .2 on four sets."""
PACE = 2 / 3
"""Latest share of a training whose pace tells what it may gain. Of 308 epochs of 25 trainings on five sets, the
forecast was too low at 5, by at most 3.5 %; with the last third at 12, by up to 12 %."""
BEHIND = "behind"
"""Why the training of a candidate ended that can't win any more."""
GROWTH = 2
"""How many times as long a candidate has trained after each slice, and the inverse of the share that goes on."""


@dataclass
class Race:
    """Who may train, and for how long."""

    state: State
    minutes: float
    judged: dict[str, Judged] = field(default_factory=dict)
    """Candidates on valid, of those that trained in this call."""

    @property
    def left(self) -> float:
        """Seconds left of the whole time."""
        return self.minutes * 60 - self.state.spent

    @property
    def left_to_train(self) -> float:
        """Seconds left for training candidates."""
        return self.left - KEPT_BACK * self.minutes * 60

    @property
    def best(self) -> Line:
        """The best candidate so far."""
        return max(self.state.lines, key=lambda line: line.best)

    def room(self, line: Line) -> float:
        """Seconds that a candidate's next slice may take, all included; those that may be blended lead together."""
        leading = [self.best, *blend_candidates(self.state)]
        if line in leading and line.values:
            return self.left_to_train
        losers = sum(each.seconds for each in self.state.lines if each not in leading)
        return min(self.left_to_train, LOSERS * self.minutes * 60 - losers)

    def has_room(self, line: Line) -> bool:
        """Whether a slice would end in time. It costs more than training; for a first one that is estimated."""
        judging = self.state.each.get(line.model, 0.0) * (self.state.users or self.state.size)
        return self.room(line) > (line.beside or judging) + shortest(line)

    def fits(self) -> list[Line]:
        """Fitted models whose turn it is, first ones first, then the best; long ones after the others' first slices."""
        found = [line for line in self.state.lines if line.is_fitted and not line.is_over and self.has_room(line)]
        if any(not line.is_fitted and not line.values and self.has_room(line) for line in self.state.lines):
            share = LOSERS * self.minutes * 60 / len(self.state.lines)
            found = [line for line in found if shortest(line) <= share]
        return sorted(found, key=lambda line: (line.hope is not None, -line.best if line.values else 0.0))

    def seconds_to_fit(self, line: Line) -> float:
        """Seconds in which a fit may try settings: an even share, of a half if others train by steps."""
        fits = sum(line.is_fitted and not line.is_over for line in self.state.lines)
        others = any(not line.is_fitted for line in self.state.lines)
        return max(1.0, self.room(line) / (fits * (1 + others)))

    def end_hopeless(self) -> None:
        """End the candidates that can't win any more."""
        for line in self.state.lines:
            if line.values and not line.is_over and line.hope is not None:
                twice = 1.0 if line.is_fitted else min(1.0, self.left_to_train / (2 * line.trained + 1e-9))
                if self.is_behind(line, twice * line.hope):
                    line.ended = BEHIND

    def is_behind(self, line: Line, gain: float) -> bool:
        """Whether the best candidate leads clearly, even after such a gain; not if that is unknown."""
        if not {self.best.name, line.name} <= self.judged.keys():
            return False
        by, error = self.judged[self.best.name].lead(self.judged[line.name])
        return by - CLEAR * error > gain


def shortest(line: Line) -> float:
    """Seconds of a fit that can't be shorter: of one combination of settings; of two if others follow the first."""
    if not line.is_fitted:
        return 0.0
    return line.fit if line.hope is None else 2 * line.trained


def hope_of(result: Result, sign: float) -> float | None:
    """Most that a training may still gain if it goes on for twice its time; None before its pace is known."""
    values = result.trace.get(result.metric, ())
    best = np.minimum.accumulate(-sign * np.array(values))
    trace = {int(epoch): float(value) for epoch, value in zip(result.trace.get("epoch", ()), best, strict=True)}
    return most_gain(trace, PACE) if max(trace, default=0) >= FIRST_RUNG else None


def next_of(lines: Sequence[Line], may: Callable[[Line], bool] = lambda _: True) -> Line | None:
    """The candidate to train now, of those that `may`; None if there is none.

    First one that is among the better half after its number of slices, those with most slices first. Then one that has
    not begun, in order. Then the best of those that wait.
    """
    longest = max((len(each.values) for each in lines), default=0)
    for slices in range(longest, 0, -1):
        had = [each for each in lines if len(each.values) >= slices or (each.is_over and each.values)]
        # One that ended earlier keeps its last value.
        had.sort(key=lambda each: -each.values[min(slices, len(each.values)) - 1])
        better = had[: len(had) // GROWTH]
        if waiting := [each for each in better if len(each.values) == slices and not each.is_over and may(each)]:
            return waiting[0]
    begun = [each for each in lines if each.values and not each.is_over and may(each)]
    fresh = [each for each in lines if not each.values and not each.is_over and may(each)]
    return fresh[0] if fresh else max(begun, key=lambda each: each.values[-1], default=None)


def first_slice(seconds: float, num_candidates: int) -> float:
    """Seconds of the first slice: all first slices take a quarter of the time, and none less than two seconds."""
    return max(2.0, seconds / (4 * max(1, num_candidates)))


def blend_candidates(state: State) -> list[Line]:
    """The best candidate of each model that ranks items by the users' events, at most `MOST_MEMBERS`.

    None if there are fewer than two, or valid does not decide by full ranking.
    """
    best: dict[str, Line] = {}
    for line in state.ranked if state.deciding.startswith("full/") else ():
        if ranks_items(line.model):
            best.setdefault(line.model, line)
    return list(best.values())[:MOST_MEMBERS] if len(best) > 1 else []
