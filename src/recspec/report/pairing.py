"""Two runs' evaluations of one question, user by user.

Shapes: G users, groups or rows of an evaluation; U users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recspec.errors import RecspecError
from recspec.report.measured import MODEL, PROTOCOLS, Answer, Measured, first_answer, is_lower_better
from recspec.report.run_facts import RunFacts

if TYPE_CHECKING:
    from recspec.evaluation import Comparison, Paired

RANGES = 5  # of users by activity
FEWEST = 10  # users of a range, and users to speak of ranges at all

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
    values: Paired

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
        return [*self.values.ours]

    @property
    def count(self) -> int:
        """Users, groups or rows."""
        return next((len(of) for of in self.values.ours.values()), 0)

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """The paired comparison of each metric: `ours` is the base."""
        return self.values.compare()

    @cached_property
    def users(self) -> Users | None:
        """Differences user by user; None if the groups are not users."""
        of_rows = self.base.protocol == "rows"
        metric = "log_loss" if of_rows else self.main  # the values of AUC belong to no row alone
        saved = self.base.saved.groups[self.base.protocol]
        base, other = self.values.ours.get(metric), self.values.theirs.get(metric)
        if base is None or other is None or self.values.ids is None or not (saved.feature and saved.raw):
            return None
        known = self.values.ids.is_valid().to_numpy(zero_copy_only=False)
        names = np.array(self.values.ids.drop_null().to_pylist(), dtype=object)
        base, other = base[known], other[known]
        if not len(names):
            return None
        if not of_rows:
            events = self.values.events
            if events is None:
                return None
            return Users(metric, names.tolist(), events[known].astype(np.int64), base, other, "events before the split")
        distinct, place = np.unique(names, return_inverse=True)
        counts = np.bincount(place)
        base, other = (np.bincount(place, weights=each) / counts for each in (base, other))
        return Users(metric, distinct.tolist(), counts.astype(np.int64), base, other, "rows of the split")


def pairs_of(base: RunFacts, other: RunFacts) -> tuple[list[Pair], list[str]]:
    """The evaluations of two runs that can be compared user by user; or the reasons why there are none."""
    from recspec.evaluation import pair

    found: dict[tuple[str, str], Pair] = {}
    reasons: dict[str, None] = {}
    for ours in base.evaluations:
        for theirs in other.evaluations:
            for protocol in ours.groups:
                if protocol not in theirs.groups or (ours.split, protocol) in found or ours.split != theirs.split:
                    continue
                if not (ours.is_current and theirs.is_current):
                    reasons["An evaluation is of an earlier model that lay in the same folder."] = None
                    continue
                if elsewhere := [
                    run for run, saved in ((base, ours), (other, theirs)) if run.was_trained_elsewhere(saved)
                ]:
                    reasons |= dict.fromkeys(f"{run.name} was trained on other data than it was measured on."
                                             for run in elsewhere)  # fmt: skip
                    continue
                try:
                    values = pair(ours, theirs, protocol)
                except RecspecError as error:
                    reasons[str(error)] = None
                    continue
                if values.ours:
                    found[(ours.split, protocol)] = Pair(Answer(ours, protocol), Answer(theirs, protocol), values)
    order, first = {name: place for place, name in enumerate(PROTOCOLS)}, first_answer(base)
    wanted = None if first is None else (first.saved.split, first.protocol)

    def place(pair: Pair) -> tuple[bool, bool, int]:
        split, protocol = pair.base.saved.split, pair.base.protocol
        return (split, protocol) != wanted, split != "test", order.get(protocol, len(order))

    pairs = sorted(found.values(), key=place)
    if missing := [run.name for run in (base, other) if not run.evaluations]:
        return pairs, [f"{' and '.join(missing)} {'has' if len(missing) == 1 else 'have'} no saved evaluation."]
    return pairs, [*reasons] or ["They were evaluated on different splits or under different protocols."]


def ranked(runs: Sequence[RunFacts], answers: Sequence[Answer | None]) -> list[tuple[RunFacts, Measured]]:
    """Runs with their main metric, the best first; of the runs that have the metric of the first one."""
    first = next((each for each in answers if each is not None), None)
    if first is None:
        return []
    held = [
        (run, answer.metrics[MODEL][first.main])
        for run, answer in zip(runs, answers, strict=True)
        if answer is not None
        and answer.protocol == first.protocol
        and answer.saved.split == first.saved.split
        and first.main in answer.metrics.get(MODEL, {})
    ]
    return sorted(held, key=lambda each: each[1].value, reverse=not is_lower_better(first.main))
