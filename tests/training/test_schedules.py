"""Learning-rate schedules against numbers worked by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.training.settings import (
    OptimizerSettings,
    Schedule,
    learning_rate_factor,
    polynomial_decay,
    step_decay,
    warm_up,
)


def factor(step: int, *, steps: int, epochs: int = 1, **values: object) -> float:
    settings = OptimizerSettings.model_validate(values)
    return learning_rate_factor(settings, step, steps_per_epoch=steps, epochs=epochs)


def test_warm_up_climbs_linearly_and_its_first_step_learns() -> None:
    assert [warm_up(step, steps=4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warm_up(0, steps=0) == 1.0


def test_polynomial_decay_by_hand() -> None:
    factors = [polynomial_decay(step, start=2, stop=6, power=2.0) for step in range(8)]
    assert factors == [1.0, 1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    assert polynomial_decay(3, start=2, stop=2, power=1.0) == 0.0


def test_step_decay_by_hand() -> None:
    assert [step_decay(step, at=[2, 4], factors=[0.5]) for step in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert step_decay(9, at=[], factors=[0.5]) == 1.0


def test_step_decay_with_a_factor_for_each_entry() -> None:
    assert [step_decay(step, at=[1, 3], factors=[0.5, 0.1]) for step in range(4)] == [1.0, 0.5, 0.5, 0.05]


def test_linear_schedule_reaches_zero_just_after_the_last_step() -> None:
    assert [factor(step, steps=4, schedule="linear") for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_warm_up_comes_before_decay() -> None:
    factors = [factor(step, steps=2, epochs=3, schedule="linear", warmup_epochs=1) for step in range(6)]
    assert factors == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_decay_waits_for_its_start() -> None:
    late = {"schedule": "polynomial", "decay_start": 0.5, "decay_power": 2}
    assert [factor(step, steps=4, **late) for step in range(4)] == [1.0, 1.0, 1.0, 0.25]


def test_step_schedule_and_constant() -> None:
    at = {"step_epochs": [1.0, 5 / 3], "step_factors": [0.1]}  # steps 3 and 5
    assert factor(5, steps=3, epochs=3, schedule="step", **at) == pytest.approx(0.01)
    assert factor(4, steps=3, epochs=3, schedule="step", **at) == pytest.approx(0.1)
    assert factor(5, steps=3, epochs=3, schedule="constant") == 1.0


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_every_schedule_starts_at_one_and_never_grows(schedule: str) -> None:
    factors = [factor(step, steps=20, schedule=schedule, step_epochs=[0.25, 0.45]) for step in range(20)]
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"setting 'schedule' is 'linaer': input should be 'constant', 'linear', "):
        config.build(OptimizerSettings, "train", {"schedule": "linaer"})


def test_the_schedule_published_for_criteo_terabyte() -> None:
    """Warm-up to step 8,000, constant to 48,000, ((72,000 - step) / 24,000)^2 after; one epoch is 64,014 steps."""
    ends = {"warmup_epochs": 8000 / 64_014, "decay_start": 48_000 / 64_014, "decay_end": 72_000 / 64_014}
    published = {"schedule": "polynomial", "decay_power": 2.0, **ends}

    def at(step: int) -> float:
        return factor(step, steps=64_014, **published)

    assert at(3999) == 0.5
    assert at(30_000) == at(48_000) == 1.0
    assert at(60_000) == pytest.approx(0.25)
    assert at(64_013) == pytest.approx((7_987 / 24_000) ** 2)
