"""Off-policy estimates on the sample of the Open Bandit Dataset, beside what the other log shows.

    pip download obp==0.4.1 --no-deps --dest obp && unzip -d obp obp/*.whl
    python benchmarks/stress/off_policy.py obp/obp

Both logs have 10,000 single choices of each campaign at three slots. The target of the random log is Bernoulli Thompson
sampling with ZOZOTOWN's prior, whose chances come from 100,000 draws; the target of the other log is random.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.csv as csv
import yaml
from numpy.typing import NDArray

from recspec.loop.off_policy import (
    OF_CHOICES,
    LoggedLists,
    counts_p,
    effective_size,
    estimate,
    refusals,
)

CAMPAIGNS = ("all", "men", "women")
SLOTS = 3
DRAWS, SEED = 100_000, 12_345
FOLDS = 3


@dataclass(frozen=True)
class Log:
    """A log of single choices."""

    item: NDArray[np.int64]
    slot: NDArray[np.int64]
    click: NDArray[np.float64]
    chance: NDArray[np.float64]


def read_log(folder: Path, policy: str, campaign: str) -> Log:
    """The rows of a policy's log, in order of time."""
    rows = csv.read_csv(folder / "dataset" / "obd" / policy / campaign / f"{campaign}.csv")
    rows = rows.take(pc.sort_indices(rows, [("timestamp", "ascending")]))
    item, slot = (rows.column(name).to_numpy() for name in ("item_id", "position"))
    click, chance = (rows.column(name).to_numpy().astype(np.float64) for name in ("click", "propensity_score"))
    return Log(item, np.unique(slot, return_inverse=True)[1], click, chance)


def thompson_chances(folder: Path, campaign: str) -> NDArray[np.float64]:
    """(items, slots) chances of Bernoulli Thompson sampling with ZOZOTOWN's prior."""
    prior = yaml.safe_load((folder / "policy" / "conf" / "prior_bts.yaml").read_text())[campaign]
    alpha, beta = np.array(prior["alpha"]), np.array(prior["beta"])
    random, counts = np.random.RandomState(SEED), np.zeros((len(alpha), SLOTS))
    for _ in range(DRAWS // 1_000):
        best = random.beta(alpha, beta, (1_000, len(alpha))).argsort(axis=1)[:, ::-1][:, :SLOTS]
        for slot in range(SLOTS):
            counts[:, slot] += np.bincount(best[:, slot], minlength=len(alpha))
    return counts / DRAWS


def choices(log: Log, target: NDArray[np.float64]) -> LoggedLists:
    """The log beside a target policy (items, slots), each row a user of its own, with cross-fitted click rates."""
    own, num_items = target[log.item, log.slot], len(target)
    users = np.arange(len(log.item))
    predicted, expected = np.zeros(len(users)), np.zeros(len(users))
    for fold in range(FOLDS):
        out = users % FOLDS == fold
        rate = log.click[~out].mean()
        clicks, shown = (np.bincount(log.item[~out], each, num_items) for each in (log.click[~out], 1.0 * ~out[~out]))
        of_item = (clicks + 50 * rate) / (shown + 50)  # as many rows of the mean: an item has some 100
        predicted[out] = of_item[log.item[out]]
        expected[out] = (target * of_item[:, None]).sum(0)[log.slot[out]]
    columns = (log.chance, own, log.click, predicted, expected)
    chance, own, click, predicted, expected = (each[:, None] for each in columns)
    return LoggedLists(chance, own, click, users, predicted, expected)


def main(folder: Path) -> None:
    """Print the table."""
    for campaign in CAMPAIGNS:
        random, thompson = (read_log(folder, policy, campaign) for policy in ("random", "bts"))
        chances = thompson_chances(folder, campaign)
        uniform = np.full_like(chances, 1 / len(chances))
        print(f"{campaign}: V(random) {random.click.mean():.4f}, V(bts) {thompson.click.mean():.4f}")
        for name, log, target in (("random -> bts", random, chances), ("bts -> random", thompson, uniform)):
            lists = choices(log, target)
            weights = lists.weights[:, 0]
            found = {each: estimate(of(lists), lists.users) for each, of in OF_CHOICES.items()}
            told = ", ".join(f"{each} {of.value:.6f} ({of.low:.6f} to {of.high:.6f})" for each, of in found.items())
            spread = f"ESS {effective_size(weights):,.1f}, largest {weights.max():.2f}, mean {weights.mean():.4f}"
            print(f"  {name}: {told}; weights: {spread}")
            for problem in refusals(lists):
                print(f"    refused: {problem}")
        seen = np.zeros_like(uniform)
        np.add.at(seen, (random.item, random.slot), 1)
        due = uniform * np.bincount(random.slot, minlength=SLOTS)
        print(f"  counts of the random log against its chances: p {counts_p(seen, due):.3g}")
        seen[:] = 0
        np.add.at(seen, (thompson.item, thompson.slot), 1)
        due = chances * np.bincount(thompson.slot, minlength=SLOTS)
        print(f"  counts of the other log against the prior's chances, which it has left: p {counts_p(seen, due):.3g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
