"""Saved evaluations as sections read them: metrics with intervals, of the model and of the baselines beside it.

What a file holds is not trusted: anything of another kind than expected counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from recspec.errors import RecspecError
from recspec.report.run_facts import main_metric

if TYPE_CHECKING:
    from recspec.evaluation import SavedEvaluation
    from recspec.report.run_facts import RunFacts

MODEL = "model"
NORMAL = 1.959964  # standard errors on each side of a 95 % interval
PROTOCOLS = ("full", "sampled", "rows")

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
    def is_clear(self) -> bool:
        """Whether a difference is not 0 at 95 %."""
        return self.error is not None and abs(self.value) > NORMAL * self.error


@dataclass(frozen=True, eq=False)
class Answer:
    """An evaluation under one of its protocols."""

    saved: SavedEvaluation
    protocol: str

    @property
    def title(self) -> str:
        """Split and protocol in words."""
        words = {
            "full": "every user, all items ranked", "sampled": "each list's own candidates ranked",
            "rows": "every row scored",
        }  # fmt: skip
        return f"{self.saved.split}: {words.get(self.protocol, self.protocol)}"

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
        found = main_metric({self.protocol: self.saved.metrics.get(self.protocol, {})})
        return found[1] if found else ""

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
        from recspec.evaluation import held_values

        return held_values(self._table, column)

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

    def order(answer: Answer) -> tuple[bool, str, int]:
        known = PROTOCOLS.index(answer.protocol) if answer.protocol in PROTOCOLS else len(PROTOCOLS)
        return answer.saved.split != "test", answer.saved.split, known

    return sorted(found.values(), key=order)


def first_answer(run: RunFacts) -> Answer | None:
    """The evaluation by which the run is judged first."""
    found = answers_of(run)
    wanted = str(run.card.trained.get("valid_metric") or "").partition("/")[0]
    of_test = [each for each in found if each.saved.split == "test"] or found
    return next((each for each in of_test if each.protocol == wanted), next(iter(of_test), None))


def of_metric(name: str, value: float, error: float | None) -> Measured:
    """A value of a metric by its name."""
    return Measured(value, error, is_share=not name.startswith(("log_loss", "novelty", "popularity_lift")))


def is_lower_better(metric: str) -> bool:
    """Whether less of a metric is better."""
    from recspec.evaluation import is_lower_better as known

    return known(metric)


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
    return {str(name): float(of) for name, of in value.items() if real(of) is not None}


def real(value: object) -> float | None:
    """A JSON value that is a finite number; None otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _rank(saved: SavedEvaluation) -> tuple[bool, bool, str]:
    return saved.is_current, bool(saved.baseline_metrics), saved.time


def _mean(values: np.ndarray[Any, Any], thinned: float) -> Measured:
    """The mean and its standard error, as it is over all of the values before they were thinned."""
    count = len(values)
    if count < 2:
        return Measured(float(values.mean()) if count else float("nan"))
    return Measured(float(values.mean()), float(values.std(ddof=1) / math.sqrt(count)) * math.sqrt(thinned))
