"""The settings that made a difference in a search, told from chance.

Watanabe, Bansal, Hutter: PED-ANOVA: Efficiently Quantifying Hyperparameter Importance in Arbitrary Subspaces,
IJCAI 2023: how far the values of the best trials are from those of all trials.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recspec.training.search_space import SearchSpace

FEWEST_TRIALS = 15
"""Judged trials below which nothing is said: the best third are five."""

MOST_TRIALS = 500
"""Judged trials that are compared, the latest ones: the time grows with their number."""

SHUFFLES = 99
"""A setting stands out if it matters more than in each of this many shuffles of the outcomes: 1 in 100 by chance."""


@dataclass(frozen=True)
class Importance:
    """A setting's share of the difference between the best trials and all."""

    share: float
    """From 0 to 1; the shares of all settings sum to 1."""
    stands_out: bool
    """Whether it is more than chance explains."""


@dataclass(frozen=True)
class Importances:
    """What mattered, or how many trials are missing to say it."""

    judged: int = 0
    """Trials with a value, those that were stopped early included."""
    settings: Mapping[str, Importance] = field(default_factory=dict)
    """By name, the largest first; empty if there are too few trials."""

    def to_dict(self) -> dict[str, object]:
        """A JSON value."""
        settings = {
            name: {"share": round(each.share, 4), "stands_out": each.stands_out} for name, each in self.settings.items()
        }
        return {"judged": self.judged, "needed": FEWEST_TRIALS, "settings": settings}

    def __str__(self) -> str:
        if not self.settings:
            return f"too few trials to say: {self.judged} judged, {FEWEST_TRIALS} needed"
        shown = {name: f"{name} {each.share:.0%}" for name, each in self.settings.items()}
        clear = [shown[name] for name, each in self.settings.items() if each.stands_out]
        rest = [shown[name] for name, each in self.settings.items() if not each.stands_out]
        if not clear:
            return f"nothing beyond chance in {self.judged} trials; {', '.join(rest[:3])} come first"
        return ", ".join(clear) + (f"; no more than chance: {', '.join(rest)}" if rest else "")


def importances(
    optuna: Any, space: SearchSpace, outcomes: Sequence[tuple[Mapping[str, object], float]], seed: int
) -> Importances:
    """The importance of each setting.

    Args:
        optuna: the module.
        space: the settings that were searched.
        outcomes: each judged trial's settings as the study holds them, and its best value; lower is better.
        seed: of the shuffles.
    """
    judged = [(params, value) for params, value in outcomes if set(params) == set(space)][-MOST_TRIALS:]
    if len(judged) < FEWEST_TRIALS:
        return Importances(len(judged))
    distributions = {name: each.distribution(optuna) for name, each in space.items()}
    study = optuna.create_study()
    for params, value in judged:
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    best = max(0.1, 5 / len(judged))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best)
    values = np.array([value for _, value in judged])

    def measured(values: np.ndarray) -> np.ndarray:
        found = evaluator.evaluate(study, list(space), target=lambda trial: float(values[trial.number]))
        return np.array([found[name] for name in space])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns whenever a target is given that lower values are better
        found = measured(values)
        random = np.random.default_rng(seed)
        by_chance = np.max([measured(random.permutation(values)) for _ in range(SHUFFLES)], axis=0)
    total = float(found.sum()) or 1.0
    order = np.argsort(-found, kind="stable")
    names = list(space)
    return Importances(
        len(judged),
        {names[at]: Importance(float(found[at]) / total, bool(found[at] > by_chance[at])) for at in order},
    )
