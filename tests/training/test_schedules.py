"""Learning-rate schedules against numbers worked by hand."""

from __future__ import annotations

import pytest

from recspec.errors import SettingsError
from recspec.training.schedules import SCHEDULES, learning_rate_factor, polynomial_decay, step_decay, warm_up


def test_warm_up_climbs_linearly_and_its_first_step_learns() -> None:
    assert [warm_up(step, steps=4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warm_up(0, steps=0) == 1.0


def test_polynomial_decay_by_hand() -> None:
    factors = [polynomial_decay(step, start=2, stop=6, power=2.0) for step in range(8)]
    assert factors == [1.0, 1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    assert polynomial_decay(3, start=2, stop=2, power=1.0) == 0.0


def test_step_decay_by_hand() -> None:
    assert [step_decay(step, at=[2, 4], factor=0.5) for step in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert step_decay(9, at=[], factor=0.5) == 1.0


def test_linear_schedule_reaches_zero_just_after_the_last_step() -> None:
    factors = [learning_rate_factor("linear", step, total_steps=4) for step in range(5)]
    assert factors == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_warm_up_comes_before_decay() -> None:
    factors = [learning_rate_factor("linear", step, total_steps=6, warmup_steps=2) for step in range(6)]
    assert factors == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_decay_waits_for_its_start() -> None:
    factors = [learning_rate_factor("polynomial", step, total_steps=4, decay_start=0.5, power=2) for step in range(4)]
    assert factors == [1.0, 1.0, 1.0, 0.25]


def test_step_schedule_and_constant() -> None:
    assert learning_rate_factor("step", 5, total_steps=9, step_at=[3, 5], step_factor=0.1) == pytest.approx(0.01)
    assert learning_rate_factor("constant", 5, total_steps=9) == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_starts_at_one_and_never_grows(schedule: str) -> None:
    factors = [learning_rate_factor(schedule, step, total_steps=20, step_at=[5, 9]) for step in range(20)]
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)


def test_an_unknown_schedule_is_told_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match=r"unknown schedule 'linaer' \(did you mean 'linear'\?\)"):
        learning_rate_factor("linaer", 0, total_steps=1)


def test_step_decay_with_a_factor_for_each_entry() -> None:
    assert [step_decay(step, at=[1, 3], factor=[0.5, 0.1]) for step in range(4)] == [1.0, 0.5, 0.5, 0.05]


def test_the_schedule_published_for_criteo_terabyte() -> None:
    """Warm-up to step 8,000, constant to 48,000, ((72,000 - step) / 24,000)^2 after; one epoch is 64,014 steps."""

    def factor(step: int) -> float:
        ends = {"warmup_steps": 8000, "decay_start": 48_000 / 64_014, "decay_end": 72_000 / 64_014}
        return learning_rate_factor("polynomial", step, total_steps=64_014, power=2.0, **ends)  # type: ignore[arg-type]

    assert factor(3999) == 0.5
    assert factor(30_000) == factor(48_000) == 1.0
    assert factor(60_000) == pytest.approx(0.25)
    assert factor(64_013) == pytest.approx((7_987 / 24_000) ** 2)
