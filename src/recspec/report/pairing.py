"""Two runs' evaluations of one question, user by user.

Shapes: G users, groups or rows of an evaluation; U users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recspec.report.measured import MODEL, PROTOCOLS, Answer, Measured, is_lower_better
from recspec.report.run_facts import RunFacts

if TYPE_CHECKING:
    from recspec.evaluation import Comparison, SavedEvaluation

DRAWS = 1_000
RANGES = 5  # of users by activity
FEWEST = 10  # users of a range, and users to speak of ranges at all
QUESTION = ("num_negatives", "users", "seed", "known", "cold", "repeats")
"""Settings of an evaluation that decide which users and candidates it has."""

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Users:
    """Differences user by user, the right way round: above 0 the other run is better."""

    metric: str
    ids: list[str]  # (U,)
    events: NDArray[np.int64]  # (U,)
    base: Values  # (U,)
    other: Values  # (U,)
    what: str
    """What `events` counts."""

    @property
    def gains(self) -> Values:
        """(U,) by how much the other run is better."""
        return (self.base - self.other) if is_lower_better(self.metric) else (self.other - self.base)

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the users for whom the other run is better, and worse."""
        gains = self.gains
        return float((gains > 0).mean()), float((gains < 0).mean())

    def by_activity(self) -> list[Range]:
        """Users in ranges of about equally many, from few events to many."""
        if len(self.ids) < FEWEST:
            return []
        cuts = np.unique(np.quantile(self.events, np.arange(1, RANGES) / RANGES))
        of_users = np.searchsorted(cuts, self.events, side="left")
        found = []
        for place in range(len(cuts) + 1):
            chosen = of_users == place
            if int(chosen.sum()) >= FEWEST:
                low, high = int(self.events[chosen].min()), int(self.events[chosen].max())
                name = f"{low:,}" if low == high else f"{low:,} to {high:,}"
                found.append(Range(name, self._part(chosen)))
        return found

    def most(self, count: int, *, gaining: bool) -> list[str]:
        """Users who gain or lose most; of equal ones those with most events."""
        gains = self.gains if gaining else -self.gains
        order = np.lexsort((np.arange(len(gains)), -self.events, -gains))
        return [self.ids[place] for place in order[:count] if gains[place] > 0]

    def _part(self, chosen: NDArray[np.bool_]) -> Users:
        ids = [each for each, taken in zip(self.ids, chosen.tolist(), strict=True) if taken]
        return Users(self.metric, ids, self.events[chosen], self.base[chosen], self.other[chosen], self.what)


@dataclass(frozen=True, eq=False)
class Range:
    """Users of similar activity."""

    name: str
    users: Users

    @property
    def gain(self) -> Measured:
        """The mean gain of the other run."""
        gains = self.users.gains
        return Measured(float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains))))


@dataclass(frozen=True, eq=False)
class Pair:
    """Two runs under one protocol of one split, over the same users or rows."""

    base: Answer
    other: Answer

    @property
    def title(self) -> str:
        """Split and protocol."""
        return self.base.title

    @property
    def main(self) -> str:
        """The metric to look at first, of those that both have."""
        names = self.metrics
        return self.base.main if self.base.main in names else next(iter(names), "")

    @property
    def metrics(self) -> list[str]:
        """Metrics whose values both evaluations keep."""
        held = self.other.saved.groups[self.other.protocol].metrics
        return [name for name in self.base.saved.groups[self.base.protocol].metrics if name in held]

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """The paired comparison of each metric: `ours` is the base."""
        from recspec.evaluation import compare_values

        found = {}
        for name in self.metrics:
            ours, theirs = self.base.values(name), self.other.values(name)
            if ours is not None and theirs is not None and len(ours):
                found[name] = compare_values(ours, theirs, DRAWS)
        return found

    @cached_property
    def users(self) -> Users | None:
        """Differences user by user; None if the groups are not users."""
        metric = next((name for name in ("log_loss", *self.metrics) if name in self.metrics), "")
        metric = metric if self.base.protocol == "rows" else self.main
        ids = self.base.ids()
        base, other = self.base.values(metric), self.other.values(metric)
        if ids is None or base is None or other is None or not self._are_users:
            return None
        known = np.array([each is not None for each in ids], np.bool_)
        names = [each for each in ids if each is not None]
        base, other, events = base[known], other[known], self.base.values("events")
        if not len(names):
            return None
        if self.base.protocol != "rows":
            if events is None:
                return None
            return Users(metric, names, events[known].astype(np.int64), base, other, "events before the split")
        if metric != "log_loss":
            return None  # the values of AUC belong to no row alone
        distinct, place = np.unique(np.array(names), return_inverse=True)
        counts = np.bincount(place)
        base, other = (np.bincount(place, weights=each) / counts for each in (base, other))
        return Users(metric, distinct.tolist(), counts.astype(np.int64), base, other, "rows of the split")

    @property
    def _are_users(self) -> bool:
        feature = self.base.saved.groups[self.base.protocol].feature
        return bool(feature) and self.base.saved.groups[self.base.protocol].raw


def pairs_of(base: RunFacts, other: RunFacts) -> tuple[list[Pair], str]:
    """The evaluations of two runs that can be compared user by user; or the reason why there are none."""
    found: dict[tuple[str, str], Pair] = {}
    reasons = []
    for ours in base.evaluations:
        for theirs in other.evaluations:
            for protocol in ours.groups:
                place = (ours.split, protocol)
                if protocol not in theirs.groups or place in found or ours.split != theirs.split:
                    continue
                if why := _why_not(ours, theirs, protocol):
                    reasons.append(why)
                    continue
                pair = Pair(Answer(ours, protocol), Answer(theirs, protocol))
                if _same_order(pair):
                    found[place] = pair
                else:
                    reasons.append("they are about other users or rows")
    order = {name: place for place, name in enumerate(PROTOCOLS)}
    pairs = sorted(found.values(), key=lambda each: (each.base.saved.split != "test", order.get(each.base.protocol, 9)))
    if pairs:
        return pairs, ""
    if not base.evaluations or not other.evaluations:
        missing = [run.name for run in (base, other) if not run.evaluations]
        return [], f"{' and '.join(missing)} {'has' if len(missing) == 1 else 'have'} no saved evaluation"
    return [], reasons[0] if reasons else "they were evaluated on different splits or protocols"


def _why_not(ours: SavedEvaluation, theirs: SavedEvaluation, protocol: str) -> str:
    if not (ours.is_current and theirs.is_current):
        return "an evaluation is of an earlier model"
    if ours.data.digest != theirs.data.digest:
        return "they were evaluated on different data"
    names = QUESTION if protocol != "rows" else ()
    different = [name for name in names if _of(ours.settings, name) != _of(theirs.settings, name)]
    return f"their evaluations differ in {', '.join(different)}" if different else ""


def _of(settings: Mapping[str, Any], name: str) -> object:
    return settings.get(name)


def _same_order(pair: Pair) -> bool:
    """Whether both hold the values of the same users or rows, in the same order."""
    if not pair.base.count or pair.base.count != pair.other.count:
        return False
    if pair.base.protocol == "rows":
        return bool(np.array_equal(pair.base.values("row"), pair.other.values("row")))
    return pair.base.ids() == pair.other.ids()


def ranked(runs: Sequence[RunFacts], answers: Sequence[Answer | None]) -> list[tuple[RunFacts, Measured]]:
    """Runs with their main metric, the best first; of the runs that have the metric of the first one."""
    first = next((each for each in answers if each is not None), None)
    if first is None:
        return []
    held = [(run, answer.metrics[MODEL][first.main]) for run, answer in zip(runs, answers, strict=True)
            if answer is not None and answer.protocol == first.protocol and first.main in answer.metrics.get(MODEL, {})]  # fmt: skip
    return sorted(held, key=lambda each: each[1].value, reverse=not is_lower_better(first.main))
