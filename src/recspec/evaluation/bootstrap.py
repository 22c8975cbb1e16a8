"""Bootstrap intervals of metrics, and paired tests of the difference between two evaluations.

Everything is over groups (users), or over rows under protocol `rows`; AUC by its values of rows
(`metrics.auc_of_rows`). Draws come from a seed, so the same task gives the same numbers.

Intervals come from the Bayesian bootstrap (Rubin, 1981): a draw gives every value a random weight instead of a random
count. Half a value at the lowest possible place and half a value at the highest join each draw, so an interval of hits
is Jeffreys'. Percentiles of resampled values are too narrow for rare hits: of 50 users with 10 % hits, they cover the
true NDCG in 89 % of samples, and of users with 2 % hits the true HR in 64 %.

Shapes: G groups, users or rows; D draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.base.errors import DataError, SettingsError
from recspec.evaluation.report import LEVEL, Comparison, Evaluation, Interval, Report, difference, is_lower_better
from recspec.evaluation.saved import EVENTS, ID, ROW, SavedEvaluation, held_values, raw_ids
from recspec.evaluation.warnings import FEWEST_ROWS
from recspec.feature_spec import FeatureSpec
from recspec.metrics import AT_K

Values = NDArray[np.float64]
Bounds = tuple[float, float]

SHARE: Bounds = (0.0, 1.0)
SHARES = (*AT_K, "mean_average_precision_with_leak", "mrr", "accuracy", "group_auc")
"""Metrics whose values lie from 0 to 1; those of groups of unequal weight about so."""

MOST_GROUPS = 1 << 15
"""Groups weighted one by one. More are first joined into as many bundles at random, whose sums are weighted: that keeps
the variance of a mean, and bounds the work."""

DRAWN = 1 << 22
"""Draws of groups held at once: 32 MB."""

PERMUTATIONS = 2_000
"""Sign flips of a paired test where the number of bootstrap draws does not say more."""


def intervals(evaluation: Evaluation, draws: int, seed: int = 0) -> dict[str, dict[str, Interval]]:
    """The interval of each metric that is a mean over groups or rows, by protocol; see `interval`. None without draws.

    Log loss has none on fewer than `FEWEST_ROWS` rows: one rare large loss would move it, and may be absent.
    """
    found: dict[str, dict[str, Interval]] = {}
    for protocol, named in evaluation.values.items() if draws else ():
        for name, values in ((name, of.astype(np.float64)) for name, of in named.items() if len(of)):
            if name == "log_loss" and len(values) < FEWEST_ROWS:
                continue
            if name == "auc" and evaluation.positive is not None:
                ends = interval_of_auc(values, evaluation.positive, draws, seed)
            else:
                ends = interval(values, draws, seed, SHARE if name.partition("@")[0] in SHARES else None)
            found.setdefault(protocol, {})[name] = Interval(float(values.mean()), *ends)
    return found


def compare(
    ours: Evaluation, theirs: Evaluation, draws: int = 1_000, seed: int = 0
) -> dict[str, dict[str, Comparison]]:
    """Paired comparisons of the metrics that both evaluations have, by protocol.

    Raises:
        SettingsError: if they are not of the same groups or rows.
    """
    found: dict[str, dict[str, Comparison]] = {}
    for protocol, named in ours.values.items():
        for name, values in named.items():
            other = theirs.values.get(protocol, {}).get(name)
            if other is None or not len(values):
                continue
            if len(other) != len(values):
                raise SettingsError(
                    f"{protocol}/{name}: {len(values):,} groups or rows against {len(other):,}; a paired test needs "
                    "two evaluations of the same ones"
                )
            found.setdefault(protocol, {})[name] = compare_values(values, other, draws, seed)
    return found


def compare_over(
    parts: Sequence[tuple[FeatureSpec, Evaluation, Evaluation]], draws: int = 1_000, seed: int = 0
) -> dict[str, dict[str, Comparison]]:
    """Paired comparisons over several datasets, such as windows of time, by protocol and metric.

    Means are over the values of all datasets. The values of a user count as one in the tests, as they depend on each
    other: of U users with N values, each has U / N times the sum of its own.
    """
    held: dict[str, dict[str, list[tuple[pa.Array, Values, Values]]]] = {}
    for place, (spec, ours, theirs) in enumerate(parts):
        for protocol, named in ours.values.items():
            groups = ours.groups.get(protocol)
            users = raw_ids(spec, groups.feature, groups.ids)[0] if groups is not None else pa.nulls(0, pa.string())
            for name, values in named.items():
                other = theirs.values.get(protocol, {}).get(name)
                if other is None or len(other) != len(values):
                    continue
                owners = pc.binary_join_element_wise(f"\0{place}", pa.array(range(len(values))).cast("string"), " ")
                owners = pc.coalesce(users, owners) if len(users) == len(values) else owners
                pairs = owners, values.astype(np.float64), other.astype(np.float64)
                held.setdefault(protocol, {}).setdefault(name, []).append(pairs)

    def compared(pairs: list[tuple[pa.Array, Values, Values]]) -> Comparison:
        owners, ours, theirs = zip(*pairs, strict=True)
        codes = pa.concat_arrays(owners).dictionary_encode().indices.to_numpy()
        users = int(codes.max()) + 1
        one, other = (np.bincount(codes, weights=np.concatenate(of)) * users / len(codes) for of in (ours, theirs))
        return compare_values(one, other, draws, seed)

    return {
        protocol: {name: compared(pairs) for name, pairs in named.items() if any(len(of) for _, of, _ in pairs)}
        for protocol, named in held.items()
    }


def compare_values(ours: NDArray[np.floating], theirs: NDArray[np.floating], draws: int, seed: int = 0) -> Comparison:
    """The paired comparison of the values (G,) of two evaluations on the same groups."""
    differences = theirs.astype(np.float64) - ours
    mean, count = float(differences.mean()), len(differences)
    error = float(differences.std(ddof=1) / math.sqrt(count)) if count > 1 else float("nan")
    most = float(np.abs(differences).max())
    low, high = interval(differences, draws, seed, (-most, most))  # rare differences may all have one sign
    return Comparison(
        ours=float(ours.mean()),
        theirs=float(theirs.mean()),
        difference=mean,
        standard_error=error,
        low=low,
        high=high,
        p_value=p_of_t(mean, error, count - 1),
        p_permutation=p_of_flips(differences, max(draws, PERMUTATIONS), seed),
    )


def interval(values: Values, draws: int, seed: int = 0, bounds: Bounds | None = None) -> tuple[float, float]:
    """The interval of the mean of values (G,), which lie in `bounds`; by default between the lowest and the highest."""
    return _ends(_drawn_means(values, draws, seed, bounds or (float(values.min()), float(values.max()))))


def interval_of_auc(values: Values, positive: NDArray[np.bool_], draws: int, seed: int = 0) -> tuple[float, float]:
    """The interval of an AUC of `auc_of_rows` (G,): each class is drawn alone, as the AUC is a mean over each.

    The class with fewer rows, which decides the error, gets the half values at 0 and 1.
    """
    area, rare = float(values.mean()), positive if 2 * positive.sum() <= len(positive) else ~positive
    means = np.full(draws, -area)
    for number, rows in enumerate((rare, ~rare)):
        won = area + (values[rows] - area) * (rows.sum() / len(rows))
        means += _drawn_means(won, draws, seed + number, None if number else SHARE)
    low, high = _ends(means)
    return max(0.0, low), min(1.0, high)


def p_of_flips(differences: Values, draws: int, seed: int = 0) -> float:
    """Two-sided p-value of the paired permutation test: how often random signs give a mean as far from 0.

    Without any difference 1. The observed signs count as one of the draws, so it is never 0 (Phipson and Smyth, 2010).
    Smucker, Allan and Carterette, "A comparison of statistical significance tests for information retrieval
    evaluation", CIKM 2007, recommend it beside the t-test and the bootstrap.
    """
    sums, _ = _bundles(differences, seed)
    reached = abs(float(sums.sum())) * (1 - 1e-12)  # equal sums may differ by rounding
    rng = np.random.default_rng([seed, 2])
    as_far = 0
    for part in _blocks(draws, len(sums)):
        signs = rng.integers(0, 2, (part.stop - part.start, len(sums)), dtype=np.int8).astype(np.float64) * 2 - 1
        as_far += int((np.abs(signs @ sums) >= reached).sum())
    return (1 + as_far) / (1 + draws)


def tested_difference(model: Evaluation, other: Evaluation, protocol: str, metric: str) -> tuple[float, float] | None:
    """The other's metric minus the model's over the same groups, and the p-value of the paired t-test; see `compare`.

    None where the values of groups are not known.
    """
    if (found := difference(model, other, protocol, metric)) is None:
        return None
    return found[0], p_of_t(*found, len(model.values[protocol][metric]) - 1)


def p_of_t(mean: float, standard_error: float, degrees: float) -> float:
    """Two-sided p-value of Student's t = mean / standard error; NaN without degrees of freedom."""
    from scipy.special import stdtr

    if degrees < 1 or math.isnan(standard_error):
        return float("nan")
    if standard_error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * float(stdtr(degrees, -abs(mean) / standard_error))


def favours(name: str, comparison: Comparison) -> str:
    """Who a comparison favours: `ours`, `theirs`, or `neither` if the tests do not tell."""
    if not comparison.is_significant:
        return "neither"
    return "theirs" if (comparison.difference < 0) == is_lower_better(name) else "ours"


def better(report: Report, run: str, name: str, comparison: Comparison) -> str:
    """Who a comparison with a run favours; `neither` too if one of the two was trained on other data."""
    return "neither" if {"", run} & set(report.elsewhere) else favours(name, comparison)


def _drawn_means(values: Values, draws: int, seed: int, bounds: Bounds | None) -> Values:
    """(D,) means of values (G,) with random weights, and of half a value at each bound."""
    sums, counts = _bundles(values, seed)
    means = np.empty(draws)
    rng = np.random.default_rng([seed, 1])
    for part in _blocks(draws, len(sums)):
        weights = rng.standard_exponential((part.stop - part.start, len(sums)))
        halves = rng.standard_gamma(0.5 if bounds else 0.0, (len(weights), 2))
        means[part] = (weights @ sums + halves @ (bounds or SHARE)) / (weights @ counts + halves.sum(1))
    return means


def _ends(means: Values) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _bundles(values: Values, seed: int) -> tuple[Values, NDArray[np.int64]]:
    """Sums and sizes of random bundles of values: of one each up to `MOST_GROUPS`."""
    if len(values) <= MOST_GROUPS:
        return values, np.ones(len(values), dtype=np.int64)
    bundle = np.random.default_rng([seed, 0]).permutation(len(values)) % MOST_GROUPS
    sums: Values = np.bincount(bundle, weights=values, minlength=MOST_GROUPS).astype(np.float64)
    return sums, np.bincount(bundle, minlength=MOST_GROUPS).astype(np.int64)


def _blocks(draws: int, groups: int) -> Iterator[slice]:
    step = max(1, DRAWN // max(1, groups))
    for start in range(0, draws, step):
        yield slice(start, min(start + step, draws))


SAME_FACTS = ("candidates", "groups", "rows", "positives", "fewest_candidates", "most_candidates", "repeats", "cold")
"""Facts on a protocol that must agree: its groups, targets and candidates."""


@dataclass(frozen=True)
class Paired:
    """The values of two evaluations on the same groups, in the same order."""

    protocol: str
    ours: Mapping[str, NDArray[np.float64]]
    """Metric -> (G,) values; of the metrics that both have. Under `rows`, those of `group_auc` are one a group."""
    theirs: Mapping[str, NDArray[np.float64]]
    ids: pa.Array | None
    """(G,) ids in text."""
    events: NDArray[np.int64] | None
    """(G,) items that each user acted on before the split."""

    def compare(self, draws: int = 1_000, seed: int = 0) -> dict[str, Comparison]:
        """The paired comparison of each metric; a difference is theirs minus ours."""
        return {name: compare_values(of, self.theirs[name], draws, seed) for name, of in self.ours.items() if len(of)}


def pair(ours: SavedEvaluation, theirs: SavedEvaluation, protocol: str) -> Paired:
    """Pair two evaluations under a protocol.

    Raises:
        DataError: with everything in which their tasks differ, or if one of them lacks the protocol.
        BundleError: if a file of values is gone or damaged.
    """
    if problems := how_tasks_differ(ours, theirs, protocol):
        raise DataError.of(f"{ours.file} and {theirs.file} can't be compared under {protocol}", problems)
    first, second = ours.table(protocol), theirs.table(protocol)
    if len(first) != len(second) or any(_column(first, name) != _column(second, name) for name in (ID, ROW)):
        raise DataError(f"{ours.file} and {theirs.file} hold other groups under {protocol}; evaluate both again")
    common = [name for name in ours.groups[protocol].metrics if name in theirs.groups[protocol].metrics]
    common = [name for name in common if name in first.column_names and name in second.column_names]
    values = [{name: held_values(each, name) for name in common} for each in (first, second)]
    return Paired(
        protocol,
        values[0],
        values[1],
        first.column(ID).combine_chunks() if ID in first.column_names else None,
        first.column(EVENTS).to_numpy() if EVENTS in first.column_names else None,
    )


def how_tasks_differ(ours: SavedEvaluation, theirs: SavedEvaluation, protocol: str) -> list[str]:
    """In what the tasks of two evaluations differ under a protocol, so that their values can't be paired."""
    both = ours, theirs
    problems = [f"{each.file} has no values under {protocol}" for each in both if protocol not in each.groups]
    asked: dict[str, list[object]] = {
        "the data's digest": [each.data.digest[:12] for each in both],
        "the split": [each.split for each in both],
        "known": [each.settings.get("known") for each in both],
    }
    facts = [_facts(each, protocol) for each in both]
    asked |= {name: [each.get(name) for each in facts] for name in SAME_FACTS}
    return problems + [f"{name}: {here!r} and {there!r}" for name, (here, there) in asked.items() if here != there]


def _column(table: pa.Table, name: str) -> pa.ChunkedArray | None:
    return table.column(name) if name in table.column_names else None


def _facts(found: SavedEvaluation, protocol: str) -> Mapping[str, object]:
    protocols = found.report.get("protocols")
    facts = protocols.get(protocol) if isinstance(protocols, dict) else None
    return facts if isinstance(facts, dict) else {}
