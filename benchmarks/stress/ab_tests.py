"""Who peeks is right: simulated experiments, looked at 20 times each, with and without an effect.

    python benchmarks/stress/ab_tests.py [--experiments 1000] [--looks 20] [--users 4000] [--lift 0.15]

Every look makes the whole report (`recspec.loop.analyse`) of the users so far. Users differ in how much they like to
click, before the experiment and in it. Three metrics:

- clicks: clicks of a user, with those before as covariate (CUPED)
- ctr: clicks per answer, a ratio of sums with users as units
- revenue: one user in five buys, at prices with a long tail

Without an effect (A/A), the table has the share of experiments with a false alarm at 5 %: of a z-test at any look, of
Welch's test at the planned end, and of the confidence sequence at any look. With an effect on every metric, it has the
share of experiments whose intervals hold the truth (of the confidence sequence: at all looks), the share that finds the
effect, and the users that the confidence sequence needed, of those that found it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from _side_by_side import where_and_when, write
from recspec.loop import Experiment, analyse, experiment_report
from recspec.loop.outcomes import Counted, Outcomes
from recspec.loop.statistics import UnitValues

METRICS = ("clicks", "ctr", "revenue")
ANSWERS = 3.0  # a user, beside the first


def simulated(rng: np.random.Generator, users: int, lift: float) -> Outcomes:
    """Outcomes of users who fall to two variants by a coin."""
    variant, liking = rng.integers(2, size=users), rng.gamma(2, 0.5, users)
    rate, more = 0.3 * liking / (1 + liking), 1 + lift * variant
    answers, before = 1.0 + rng.poisson(ANSWERS, size=(2, users))
    clicks = rng.binomial(answers.astype(int), np.minimum(rate * more, 1)).astype(float)
    clicks_before = rng.binomial(before.astype(int), rate).astype(float)
    revenue = (rng.random(users) < 0.2) * rng.lognormal(2, 1, users) * more
    nothing = UnitValues(np.zeros(users))
    counted = {
        "clicks": Counted(UnitValues(clicks), UnitValues(clicks_before)),
        "ctr": Counted(UnitValues(clicks, answers), UnitValues(clicks_before, before)),
        "revenue": Counted(UnitValues(revenue), nothing),
    }
    return Outcomes(variant, variant, counted)


def truths(lift: float) -> dict[str, float]:
    """The true difference of each metric, from ten million users."""
    liking = np.random.default_rng(1).gamma(2, 0.5, 10_000_000)
    rate = float(np.mean(0.3 * liking / (1 + liking)))
    revenue = 0.2 * float(np.exp(2 + 0.5))
    return {"clicks": lift * rate * (1 + ANSWERS), "ctr": lift * rate, "revenue": lift * revenue}


def looked_at(arguments: argparse.Namespace, lift: float, seed: int) -> dict[str, dict[str, float]]:
    """What the looks at simulated experiments found, by metric."""
    description = {
        "name": "simulated",
        "start": "2026-12-01",
        "users": arguments.users,
        "variants": [{"name": "control", "share": 0.5}, {"name": "new", "share": 0.5}],
        "metrics": [{"name": name, "event": name} for name in METRICS],
    }
    experiment, rng, truth = Experiment.model_validate(description), np.random.default_rng(seed), truths(lift)
    ends = np.linspace(arguments.users / arguments.looks, arguments.users, arguments.looks).astype(int)
    names = ("z", "welch", "sequence", "held", "held_by_welch", "ratio")
    found = {metric: dict.fromkeys(names, 0) for metric in METRICS}
    needed: dict[str, list[int]] = {metric: [] for metric in METRICS}
    for _ in range(arguments.experiments):
        whole = simulated(rng, arguments.users, lift)
        seen = {metric: dict.fromkeys(names, False) | {"held": True} for metric in METRICS}
        for end in ends:
            at = experiment.end_us - (end < arguments.users)
            counted = {name: Counted(each.after[:end], each.before[:end]) for name, each in whole.metrics.items()}
            report = analyse(experiment, Outcomes(whole.entered[:end], whole.variant[:end], counted), at)
            for each in report.metrics:
                effect, now = each.effect, seen[each.name]
                now["z"] |= abs(effect.difference) > 1.959964 * effect.standard_error
                now["welch"] = effect.fixed_p < 0.05
                if (effect.low > 0 or effect.high < 0) and not now["sequence"]:
                    now["sequence"] = True
                    needed[each.name].append(int(end))
                now["held"] &= effect.low <= truth[each.name] <= effect.high
                now["held_by_welch"] = effect.fixed_low <= truth[each.name] <= effect.fixed_high
                now["ratio"] |= report.has_mismatch
        for metric, flags in seen.items():
            for name, flag in flags.items():
                found[metric][name] += flag
    shares = {
        metric: {name: count / arguments.experiments for name, count in of.items()} for metric, of in found.items()
    }
    for metric, counts in needed.items():
        shares[metric]["users needed"] = float(np.median(counts)) if counts else float("nan")
    return shares


def main() -> None:
    """Print both tables, and write them as JSON where `--out` says."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--experiments", type=int, default=1_000)
    options.add_argument("--looks", type=int, default=20)
    options.add_argument("--users", type=int, default=4_000)
    options.add_argument("--lift", type=float, default=0.15)
    options.add_argument("--seed", type=int, default=41)
    options.add_argument("--out", type=Path)
    arguments = options.parse_args()
    experiment_report.LOOKS = 1  # the chart is not looked at
    started = time.perf_counter()
    equal, better = (looked_at(arguments, lift, arguments.seed) for lift in (0.0, arguments.lift))
    print(f"A/A, {arguments.experiments:,} experiments, {arguments.looks} looks: share with a false alarm at 5 %")
    for metric, of in equal.items():
        told = f"z-test at any look {of['z']:.3f}, Welch at the end {of['welch']:.3f}, confidence sequence"
        print(f"  {metric:8} {told} {of['sequence']:.3f}, wrong sample ratio {of['ratio']:.3f}")
    print(f"effect of {arguments.lift:.0%}: intervals that hold the truth, and effects found")
    for metric, of in better.items():
        told = f"Welch at the end {of['held_by_welch']:.3f}, confidence sequence at all looks {of['held']:.3f}; found"
        told = f"{told} {of['welch']:.3f} and {of['sequence']:.3f}, the latter after a median of"
        print(f"  {metric:8} {told} {of['users needed']:,.0f} of {arguments.users:,} users")
    print(f"{time.perf_counter() - started:.0f} s")
    if arguments.out is not None:
        values = {"arguments": {**vars(arguments), "out": None}, "equal": equal, "better": better}
        write({**where_and_when(), **values}, arguments.out)


if __name__ == "__main__":
    main()
