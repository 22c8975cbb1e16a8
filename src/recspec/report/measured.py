"""Saved evaluations as pages show them, and two runs' evaluations user by user.

What a file holds is not trusted: anything of another kind than expected counts as absent.

Shapes: G users, groups or rows of an evaluation; U users.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import RecspecError
from recspec.evaluation import (
    Comparison,
    Paired,
    SavedEvaluation,
    favours,
    held_values,
    is_clear,
    is_lower_better,
    pair,
    real,
)
from recspec.report.page import number
from recspec.report.run_facts import RunFacts

MODEL = "model"
NORMAL = 1.959964  # standard errors on each side of a 95 % interval
PROTOCOLS = ("full", "sampled", "rows")
MAIN = ("ndcg", "auc", "mrr", "cascade_dr", "dr")
"""Starts of the names of metrics to look at first."""

MEANINGS = {
    "hit_rate": "share of users with a relevant item among the first k",
    "ndcg": "as the hit rate, but a relevant item counts less the lower it stands: 1 at the top",
    "recall": "share of a user's relevant items among the first k",
    "precision": "share of the first k items that are relevant",
    "mean_average_precision": "mean precision at the places of the relevant items",
    "mrr": "1 / place of the first relevant item",
    "auc": "share of pairs of a positive and a negative row that are in the right order; 0.5 is chance",
    "group_auc": "AUC within each group or user, averaged",
    "log_loss": "mean surprise at the labels, in nats; lower is better",
    "accuracy": "share of rows whose side of probability 0.5 is right",
    "calibration_error": "mean distance between probabilities and the rates that come true; lower is better",
    "coverage": "share of the items that at least one list holds",
    "novelty": "how rare the recommended items are, in bits; higher is rarer",
    "diversity": "how different the items of one list are, from 0 to 1",
    "revenue": "share of the prices of what users chose in the split that lies in their lists; by the column price",
    "disliked": "share of the items disliked in the split that are recommended to their users; lower is better",
    "rips": "clicks of a list that the model would draw, from logged lists; each slot weighs as the items above it",
    "sn_rips": "the same over the sums of weights: a small bias, less variance",
    "cascade_dr": "the same beside predicted clicks, which leaves less to chance",
    "ips": "clicks of the model's choice, estimated from logged choices",
    "snips": "the same over the sum of weights: a small bias, less variance",
    "dm": "clicks that a model predicts for the model's choice; as wrong as it is",
    "dr": "both together: right if either is",
    "popularity_lift": "how much more popular the recommended items are than those of the users' histories; 0 is equal",
}


@dataclass(frozen=True)
class Measured:
    """A metric, and its standard error where it is known."""

    value: float
    error: float | None = None
    is_share: bool = False
    """Whether it lies between 0 and 1, as its interval then does."""

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval; the value itself without one."""
        low = self.value - NORMAL * (self.error or 0.0)
        return max(0.0, low) if self.is_share else low

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""
        high = self.value + NORMAL * (self.error or 0.0)
        return min(1.0, high) if self.is_share else high

    @property
    def interval(self) -> str:
        """The 95 % interval in words; a dash without one."""
        return "–" if self.error is None else f"{number(self.low)} to {number(self.high)}"

    @property
    def is_clear(self) -> bool:
        """Whether a difference is more than noise, by the rule of all warnings."""
        return self.error is not None and is_clear(self.value, self.error)


@dataclass(frozen=True, eq=False)
class Answer:
    """An evaluation under one of its protocols."""

    saved: SavedEvaluation
    protocol: str

    @property
    def title(self) -> str:
        """Split and protocol in words."""
        words = {
            "full": "every user, all items ranked",
            "sampled": "each list's own candidates ranked",
            "rows": "every row scored",
            "off_policy": "what the model's lists would earn",
        }
        return f"{self.saved.split}: {words.get(self.protocol, self.protocol)}"

    @property
    def who(self) -> str:
        """Whose values these are."""
        return {"rows": "rows", "full": "users", "off_policy": "users"}.get(self.protocol, "lists")

    @cached_property
    def metrics(self) -> dict[str, dict[str, Measured]]:
        """Model and baselines -> metric -> value."""
        errors = numbers(mapping(self.saved.report, "standard_errors", self.protocol))
        own = self.saved.metrics.get(self.protocol, {})
        found = {MODEL: {name: of_metric(name, value, errors.get(name)) for name, value in own.items()}}
        for who, held in self.saved.baseline_metrics.items():
            values = held.get(self.protocol, {})
            found[who] = {name: of_metric(name, value, self._error(f"{who}/{name}")) for name, value in values.items()}
        return {who: held for who, held in found.items() if held}

    @cached_property
    def main(self) -> str:
        """The metric to look at first."""
        names = [*self.saved.metrics.get(self.protocol, {})]
        usual = (name for start in MAIN for name in names if name.startswith(start))
        return next(usual, next(iter(names), ""))

    @property
    def best_baseline(self) -> str | None:
        """The baseline that is best by the main metric."""
        held = {who: of[self.main].value for who, of in self.metrics.items() if who != MODEL and self.main in of}
        return (min if is_lower_better(self.main) else max)(held, key=held.__getitem__) if held else None

    def difference(self, who: str, metric: str) -> Measured | None:
        """The model's metric minus a baseline's over the same users or rows; None if they are not kept."""
        ours, theirs = self.values(metric), self.values(f"{who}/{metric}")
        if ours is None or theirs is None:
            return None
        return _mean(ours.astype(np.float64) - theirs, self._thinned)

    def values(self, column: str) -> np.ndarray[Any, Any] | None:
        """(G,) the values of a metric, one of each user, group or row."""
        if self._table is None or column not in self._table.column_names:
            return None
        return held_values(self._table, column)

    def users_beside(self, who: str, metric: str) -> Users | None:
        """The users with a baseline's values as `base` and the model's as `other`; None if they are not kept."""
        base, other, table = self.values(f"{who}/{metric}"), self.values(metric), self._table
        if base is None or other is None or not {"id", "events"} <= {*table.column_names}:
            return None
        ids, events = table.column("id").to_pylist(), table.column("events").to_numpy()
        return Users(metric, list(map(str, ids)), events, base, other, "events before the split")

    @property
    def list_metrics(self) -> dict[str, dict[str, float]]:
        """Coverage and so on, of the model and each baseline."""
        held = mapping(self.saved.report, "beyond_accuracy")
        return {str(who): numbers(mapping(of)) for who, of in held.items()}

    def exposure(self, what: str, who: str = MODEL) -> list[float]:
        """`shares` of the recommendations by popularity, or numbers of `items`; empty if they were not measured."""
        found = mapping(self.saved.report, "exposure", who).get(what)
        return [value for each in found if (value := real(each)) is not None] if isinstance(found, list) else []

    @property
    def count(self) -> int:
        """Users, groups or rows whose values are kept."""
        return 0 if self._table is None else int(self._table.num_rows)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What the evaluation says about its candidates."""
        return mapping(self.saved.report, "protocols", self.protocol)

    @cached_property
    def _table(self) -> Any:
        try:
            return self.saved.table(self.protocol) if self.protocol in self.saved.groups else None
        except RecspecError:
            return None

    @property
    def _thinned(self) -> float:
        """Share of the users or rows whose values are kept."""
        held = self.saved.groups[self.protocol]
        return min(1.0, held.saved / max(1, held.of))

    def _error(self, column: str) -> float | None:
        values = self.values(column)
        return None if values is None else _mean(values, self._thinned).error


def answers_of(run: RunFacts) -> list[Answer]:
    """The evaluation to show of each split and protocol: of the present model, with baselines if any has them."""
    found: dict[tuple[str, str], Answer] = {}
    for saved in run.evaluations:
        for protocol in saved.metrics:
            best = found.get((saved.split, protocol))
            if best is None or _rank(saved) > _rank(best.saved):
                found[(saved.split, protocol)] = Answer(saved, protocol)
    return sorted(found.values(), key=_order)


def _order(answer: Answer) -> tuple[bool, str, int]:
    """Place among answers: test first, then other splits, each by its protocols."""
    return answer.saved.split != "test", answer.saved.split, (*PROTOCOLS, answer.protocol).index(answer.protocol)


def first_answer(run: RunFacts) -> Answer | None:
    """The evaluation by which the run is judged first."""
    found = answers_of(run)
    wanted = str(run.card.trained.get("valid_metric") or "").partition("/")[0]
    of_test = [each for each in found if each.saved.split == "test"] or found
    return next((each for each in of_test if each.protocol == wanted), next(iter(of_test), None))


def held_out(run: RunFacts) -> str:
    """The split whose items count as hits."""
    answer = first_answer(run)
    return "test" if answer is None else answer.saved.split


def slices_of(run: RunFacts, split: str, protocol: str) -> dict[str, Mapping[str, Any]]:
    """The slices of a split and protocol, of the newest evaluation of the present model that has each."""
    found: dict[str, Mapping[str, Any]] = {}
    for saved in sorted(run.evaluations, key=lambda each: (each.is_current, each.time), reverse=True):
        if saved.split == split:
            for by, parts in mapping(saved.report, "slices", protocol).items():
                found.setdefault(str(by), mapping(parts))
    return {by: parts for by, parts in found.items() if parts}


def of_slice(part: object, metric: str) -> Measured | None:
    """A metric of one slice."""
    values, errors = (numbers(mapping(part, name)) for name in ("metrics", "standard_errors"))
    return of_metric(metric, values[metric], errors.get(metric)) if metric in values else None


OF_ANY_SIZE = ("log_loss", "novelty", "popularity_lift", "rips", "sn_rips", "cascade_dr", "ips", "snips", "dm", "dr")
"""Starts of the names of metrics that are no shares from 0 to 1."""


def of_metric(name: str, value: float, error: float | None) -> Measured:
    """A value of a metric by its name."""
    return Measured(value, error, is_share=not name.startswith(OF_ANY_SIZE))


def meanings(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What some metrics mean, each once."""
    for name in dict.fromkeys(each.partition("@")[0] for each in names):
        if name in MEANINGS:
            yield name, MEANINGS[name]


def mapping(value: object, *keys: str) -> Mapping[str, Any]:
    """The object at a place of a JSON value; empty if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def texts(value: object, most: int = 50) -> list[str]:
    """The texts of a JSON list."""
    return [each for each in value if isinstance(each, str)][:most] if isinstance(value, list) else []


def numbers(value: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a JSON object."""
    return {str(name): finite for name, of in value.items() if (finite := real(of)) is not None}


def _rank(saved: SavedEvaluation) -> tuple[bool, bool, str]:
    return saved.is_current, bool(saved.baseline_metrics), saved.time


def _mean(values: np.ndarray[Any, Any], thinned: float) -> Measured:
    """The mean and its standard error, as it is over all of the values before they were thinned."""
    count = len(values)
    if count < 2:
        return Measured(float(values.mean()) if count else float("nan"))
    return Measured(float(values.mean()), float(values.std(ddof=1) / math.sqrt(count)) * math.sqrt(thinned))


# --- two runs ---------------------------------------------------------------------------------------------------------

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

    @property
    def gain(self) -> Measured:
        """The mean gain of the other run."""
        gains = self.gains
        return Measured(float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains))))

    def by_activity(self) -> dict[str, Users]:
        """Users in ranges of about equally many, from few events to many, by the range in words."""
        if len(self.ids) < FEWEST:
            return {}
        cuts = np.unique(np.quantile(self.events, np.arange(1, RANGES) / RANGES))
        of_users = np.searchsorted(cuts, self.events, side="left")
        found = {}
        for chosen in (of_users == place for place in range(len(cuts) + 1)):
            if int(chosen.sum()) >= FEWEST:
                low, high = int(self.events[chosen].min()), int(self.events[chosen].max())
                ids = [each for each, taken in zip(self.ids, chosen.tolist(), strict=True) if taken]
                part = replace(
                    self, ids=ids, events=self.events[chosen], base=self.base[chosen], other=self.other[chosen]
                )
                found[f"{low:,}" if low == high else f"{low:,} to {high:,}"] = part
        return found

    def most(self, count: int, *, gaining: bool) -> list[str]:
        """Users who gain or lose most; of equal ones those with most events."""
        gains = self.gains if gaining else -self.gains
        order = np.lexsort((np.arange(len(gains)), -self.events, -gains))
        return [self.ids[place] for place in order[:count] if gains[place] > 0]


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

    def favoured(self, metric: str) -> str:
        """`base`, `other` or `neither`, by both tests."""
        return {"ours": "base", "theirs": "other"}.get(favours(metric, self.comparisons[metric]), "neither")

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
        distinct, place, counts = np.unique(names, return_inverse=True, return_counts=True)
        base, other = (np.bincount(place, weights=each) / counts for each in (base, other))
        return Users(metric, distinct.tolist(), counts.astype(np.int64), base, other, "rows of the split")


def pairs_of(base: RunFacts, other: RunFacts) -> tuple[list[Pair], list[str]]:
    """The evaluations of two runs that can be compared user by user; or the reasons why there are none."""
    found: dict[tuple[str, str], Pair] = {}
    reasons: dict[str, None] = {}
    both = [(ours, theirs) for ours in base.evaluations for theirs in other.evaluations if ours.split == theirs.split]
    for ours, theirs in both:
        for protocol in (each for each in ours.groups if each in theirs.groups and (ours.split, each) not in found):
            runs = [run for run, saved in ((base, ours), (other, theirs)) if run.was_trained_elsewhere(saved)]
            if not (ours.is_current and theirs.is_current):
                reasons["An evaluation is of an earlier model that lay in the same folder."] = None
            elif runs:
                told = [f"{run.name} was trained on other data than it was measured on." for run in runs]
                reasons |= dict.fromkeys(told)
            else:
                try:
                    values = pair(ours, theirs, protocol)
                except RecspecError as error:
                    reasons[str(error)] = None
                    continue
                if values.ours:
                    found[(ours.split, protocol)] = Pair(Answer(ours, protocol), Answer(theirs, protocol), values)
    first = first_answer(base)
    wanted = None if first is None else (first.saved.split, first.protocol)
    pairs = [found[key] for key in sorted(found, key=lambda key: (key != wanted, *_order(found[key].base)[::2]))]
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
