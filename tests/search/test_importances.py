"""What mattered in a search: a setting that decides stands out, chance does not, and few trials say nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

pytest.importorskip("optuna", reason="the extra `tune` is not installed")

import optuna

from recspec.training.search.search_space import OneOf, Range
from recspec.training.search.study import FEWEST_TRIALS, Importances, importances, quiet

SPACE = {
    "train.learning_rate": Range(1e-4, 1e-1, log=True),
    "settings.dropout": Range(0.0, 0.5),
    "settings.item_bias": OneOf((False, True)),
}


def measured(value_of: Callable[[Mapping[str, float]], float], trials: int) -> Importances:
    random = np.random.default_rng(5)
    outcomes = []
    for _ in range(trials):
        rate, dropout, bias = 10 ** random.uniform(-4, -1), random.uniform(0, 0.5), random.random() < 0.5
        params = {
            "train.learning_rate": rate,
            "settings.dropout": dropout,
            "settings.item_bias": "true" if bias else "false",
        }
        outcomes.append((params, value_of({"rate": np.log10(rate), "dropout": dropout, "bias": bias})))
    with quiet(optuna):
        return importances(optuna, SPACE, outcomes, seed=0)


def test_the_setting_that_decides_stands_out_and_the_others_do_not() -> None:
    found = measured(lambda x: (x["rate"] + 2.5) ** 2, 40)
    assert next(iter(found.settings)) == "train.learning_rate"
    assert [name for name, each in found.settings.items() if each.stands_out] == ["train.learning_rate"]
    assert sum(each.share for each in found.settings.values()) == pytest.approx(1)
    assert str(found).startswith("train.learning_rate ")
    assert "; no more than chance: " in str(found)


def test_chance_is_called_chance() -> None:
    noise = np.random.default_rng(1)
    found = measured(lambda _: float(noise.random()), 30)
    assert not any(each.stands_out for each in found.settings.values())
    assert str(found).startswith("nothing beyond chance in 30 trials; ")


def test_optuna_alone_gives_chance_a_share_like_any_setting() -> None:
    random, study = np.random.default_rng(0), optuna.create_study()
    distributions = {name: each.distribution(optuna) for name, each in SPACE.items()}
    for _ in range(30):
        params = {"train.learning_rate": 10 ** random.uniform(-4, -1), "settings.dropout": random.uniform(0, 0.5)}
        params["settings.item_bias"] = random.choice(["true", "false"])
        trial = optuna.trial.create_trial(params=params, distributions=distributions, value=random.random())
        study.add_trial(trial)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    assert max(optuna.importance.get_param_importances(study, evaluator=evaluator).values()) > 0.4


def test_equal_outcomes_say_nothing() -> None:
    assert not any(each.stands_out for each in measured(lambda _: 1.0, 20).settings.values())


def test_few_trials_say_nothing() -> None:
    found = measured(lambda x: x["rate"], FEWEST_TRIALS - 1)
    assert found == Importances(FEWEST_TRIALS - 1)
    assert str(found) == f"too few trials to say: {FEWEST_TRIALS - 1} judged, {FEWEST_TRIALS} needed"
    assert found.to_dict() == {"judged": FEWEST_TRIALS - 1, "needed": FEWEST_TRIALS, "settings": {}}
    assert measured(lambda x: x["rate"], FEWEST_TRIALS).settings
