"""Methods: runs that differ by their seed alone, and tests of the difference between two over users and seeds.

The difference d of two methods a and b is that of their means over users and seeds. Users and seeds are crossed random
effects, and the seeds of two methods are independent, so

    SE^2 = var_u(m_b - m_a) / G + var_s(t_a) / S_a + var_s(t_b) / S_b

with m the mean over seeds of each user and t the mean over users of each seed. The noise between users and seeds counts
twice, so the error is never too small (Owen, "The pigeonhole bootstrap", 2007, section 3). d / SE is a Student's t with
the degrees of Satterthwaite, 1946: SE^4 / sum of term^2 / (count - 1). A method of one run has no term of its own.

P-values are corrected over all pairs of methods, metric by metric (Holm, "A simple sequentially rejective multiple test
procedure", 1979), so the method that is best on these data may be tested against every other one.

Shapes: G users, groups or rows; S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import BundleError
from recspec.bundle import folder as bundle
from recspec.evaluation.bootstrap import p_of_t, pair
from recspec.evaluation.report import LEVEL, is_lower_better
from recspec.evaluation.runs import FoundRun, brief
from recspec.evaluation.saved import SavedEvaluation

NOT_OF_A_METHOD = frozenset(
    "affinity checkpoint_minutes keep_checkpoints log_every mlflow seed tensorboard threads".split()
)
"""Settings of training in which runs of one method may differ."""
MOST_IN_NAME = 3
"""Settings in the name of a method."""


@dataclass(frozen=True)
class Method:
    """Runs of one model and one dataset that differ by their seed alone."""

    name: str
    """The model's name, with the settings that tell several methods of one model apart."""
    model: str
    runs: tuple[str, ...]
    seeds: tuple[int | None, ...]
    """The seed of each run; None for a model without one, such as a blend."""


@dataclass(frozen=True)
class SeedValues:
    """A metric of a method."""

    seeds: tuple[float, ...]
    """(S,) its value in each run."""
    users: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """(G,) its values of users, groups or rows, averaged over the runs; empty if they are not known."""
    spread: float = 0.0
    """Variance over runs of the mean over users; 0 for one run."""

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return mean(self.seeds)

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds, with S - 1; NaN for one."""
        return stdev(self.seeds) if len(self.seeds) > 1 else math.nan


@dataclass(frozen=True)
class MethodPair:
    """How a method differs from another in a metric."""

    metric: str
    method: str
    other: str
    difference: float
    """The method minus the other."""
    standard_error: float
    """Over users and seeds."""
    p_value: float
    """Two-sided, of the t-test over users and seeds."""
    p_holm: float
    """The same, corrected for the number of pairs."""

    @property
    def better(self) -> str:
        """The better one; empty if the test does not tell."""
        if not self.p_holm < 1 - LEVEL:
            return ""
        return self.method if (self.difference < 0) == is_lower_better(self.metric) else self.other


Measured = Mapping[str, SeedValues]
"""PROTOCOL/METRIC -> its values."""


def methods_of(runs: Sequence[FoundRun]) -> tuple[list[Method], list[str]]:
    """Group runs by everything but their seed, in order of their paths, and say which runs are left out and why.

    Settings that a model without training steps chose on valid belong to the method's work, so they may differ.
    """
    groups: dict[str, list[tuple[FoundRun, int | None]]] = {}
    settings: dict[str, dict[str, object]] = {}
    notes = []
    for run in sorted(runs, key=lambda each: each.path):
        try:
            card = bundle.read_card(bundle.find(Path(run.path)))
        except BundleError as error:
            notes.append(f"{run.path}: left out: {error}")
            continue
        tried = card.trained.get("tried")
        rows = [each for each in tried if isinstance(each, dict)] if isinstance(tried, list) else []
        chosen = {name for each in rows for name in each.get("settings", ())}
        own = {name: "chosen on valid" if name in chosen else value for name, value in card.settings.items()}
        train = {f"train.{name}": value for name, value in card.train.items() if name not in NOT_OF_A_METHOD}
        about = {**own, **train, "data": run.data_digest}
        key = f"{card.model} {sorted(about.items())!r}"
        seed = card.train.get("seed")
        number = seed if isinstance(seed, int) else None
        if twin := next((each.path for each, of in groups.get(key, ()) if of == number), ""):
            notes.append(f"{run.path}: left out: the settings and the seed are those of {twin}")
            continue
        groups.setdefault(key, []).append((run, number))
        settings[key] = about
    models = {key: group[0][0].model for key, group in groups.items()}
    found: list[Method] = []
    for key, group in groups.items():
        alike = [settings[each] for each in groups if models[each] == models[key]]
        name = _name(models[key], settings[key], alike)
        if any(each.name == name for each in found):
            name = f"{name} ({group[0][0].path})"
        ordered = sorted(group, key=lambda each: -1 if each[1] is None else each[1])
        found.append(Method(name, models[key], tuple(run.path for run, _ in ordered), tuple(of for _, of in ordered)))
    return found, notes


def measured_methods(methods: Mapping[str, Sequence[SavedEvaluation]]) -> dict[str, dict[str, SeedValues]]:
    """The values of each method from the evaluations of its runs, of the metrics that all have.

    Raises:
        DataError: if two evaluations are not of the same task.
        BundleError: if a file of values is gone or damaged.
    """
    every = [each for group in methods.values() for each in group]
    first, found = every[0], dict[str, dict[str, SeedValues]]()
    protocols = [name for name in first.groups if all(name in each.groups for each in every)]
    for name, group in methods.items():
        sums: dict[str, NDArray[np.float64]] = {}
        means: dict[str, list[float]] = {}
        for each in group:
            for protocol in protocols:
                for metric, values in pair(first, each, protocol).theirs.items():
                    key = f"{protocol}/{metric}"
                    if len(values) and metric in each.metrics.get(protocol, {}):
                        sums[key] = sums[key] + values if key in sums else values
                        means.setdefault(key, []).append(float(values.mean()))
        found[name] = {
            key: SeedValues(
                tuple(each.metrics[key.partition("/")[0]][key.partition("/")[2]] for each in group),
                total / len(group),
                float(np.var(means[key], ddof=1)) if len(group) > 1 else 0.0,
            )
            for key, total in sums.items()
            if len(means[key]) == len(group)
        }
    common = [key for key in next(iter(found.values())) if all(key in of for of in found.values())]
    return {name: {key: of[key] for key in common} for name, of in found.items()}


def compare_methods(methods: Mapping[str, Measured]) -> list[MethodPair]:
    """Each pair of methods in each metric, with p-values corrected over the pairs of the metric."""
    found = []
    for metric in next(iter(methods.values()), {}):
        pairs = list(combinations(methods, 2))
        tests = [_test(methods[one][metric], methods[other][metric]) for one, other in pairs]
        corrected = holm([p for *_, p in tests])
        found += [MethodPair(metric, *names, *test, p) for names, test, p in zip(pairs, tests, corrected, strict=True)]
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values: the k-th smallest of n times n - k + 1, at least the one before it, at most 1.

    NaN, of a test that could not be made, stays NaN and does not count.
    """
    order = sorted((at for at, p in enumerate(p_values) if not math.isnan(p)), key=p_values.__getitem__)
    corrected, least = [math.nan] * len(p_values), 0.0
    for rank, at in enumerate(order):
        least = corrected[at] = min(1.0, max(least, p_values[at] * (len(order) - rank)))
    return corrected


def _test(ours: SeedValues, theirs: SeedValues) -> tuple[float, float, float]:
    """The difference ours - theirs, its standard error, and the p-value; see the top of the file."""
    difference, count = ours.mean - theirs.mean, len(ours.users)
    if count < 2:
        return difference, math.nan, math.nan
    terms = [(float(np.var(ours.users - theirs.users, ddof=1)) / count, count - 1)]
    terms += [(each.spread / len(each.seeds), len(each.seeds) - 1) for each in (ours, theirs) if len(each.seeds) > 1]
    variance = sum(term for term, _ in terms)
    weights = sum(term**2 / degrees for term, degrees in terms)
    degrees = max(1.0, variance**2 / weights) if weights > 0 else count - 1
    error = math.sqrt(variance)
    return difference, error, p_of_t(difference, error, degrees)


def _name(model: str, own: Mapping[str, object], alike: Sequence[Mapping[str, object]]) -> str:
    """The model, and the settings in which it differs from others of the same model."""
    names = dict.fromkeys(name for each in alike for name in each)
    apart = [name for name in names if len({repr(each.get(name)) for each in alike}) > 1]
    told = [brief(f"{name.removeprefix('train.')}={str(own.get(name))[:20]}") for name in apart[:MOST_IN_NAME]]
    return f"{model} {' '.join(told)}{' ...' if len(apart) > MOST_IN_NAME else ''}" if told else model
