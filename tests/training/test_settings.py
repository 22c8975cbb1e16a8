"""Settings of an optimizer: refusals, and what follows from the settings."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.training.optimizers import Optimizers
from recspec.training.settings import (
    OptimizerSettings,
    Schedule,
    TrainSettings,
    learning_rate_factor,
    numbers_beside,
    polynomial_decay,
    step_decay,
    updates_rows_exactly,
    warm_up,
)
from tests.training.stepping import EVERY, SPARSE_EXACT, settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "step"}, "schedule 'step' needs step_epochs, as [5, 8]"),
        (
            {"schedule": "step", "step_epochs": [1, 2, 3], "step_factors": [0.1, 0.2]},
            "step_factors holds 2 numbers for the 3 of step_epochs; give one for each, or one for all",
        ),
        (
            {"optimizer": "ftrl", "initial_accumulator": 0},
            "initial_accumulator is 0, and FTRL divides by its root; give a number above 0, as 0.1",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        config.build(OptimizerSettings, "train", values)
    assert str(error.value) == f"train: {message}"


def test_which_rows_are_updated_exactly() -> None:
    def exactly(name: str, *, from_zero: bool = True, **values: object) -> bool:
        return updates_rows_exactly(settings(name, **values), from_zero=from_zero)

    assert sorted(filter(exactly, EVERY)) == sorted(SPARSE_EXACT)
    assert not exactly("sgd", momentum=0.5)
    assert exactly("adagrad", momentum=0.5)  # Adagrad does not read it
    assert not exactly("adagrad", weight_decay=0.1)
    assert exactly("adagrad", schedule="linear", warmup_epochs=1)
    assert not exactly("ftrl", schedule="linear")
    assert not exactly("ftrl", warmup_epochs=1)
    assert not exactly("ftrl", from_zero=False)  # the whole gradient sets rows without a history to zero


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("name", get_args(OptimizerSettings.model_fields["optimizer"].annotation))
def test_what_an_optimizer_keeps_beside_a_table_is_what_is_counted(name: str, momentum: float) -> None:
    table = nn.Parameter(torch.zeros(1000, 8))
    settings = OptimizerSettings.model_validate({"optimizer": name, "momentum": momentum})
    optimizers = Optimizers([("table", table)], settings)
    sparse = momentum == 0 and name != "adamw"
    table.grad = (
        torch.sparse_coo_tensor([[3]], torch.ones(1, 8), table.shape, check_invariants=True)
        if sparse
        else torch.ones_like(table)
    )
    optimizers.step()
    kept = sum(tensor.numel() for tensor in optimizers.tensors().values() if tensor.dim())
    counted = numbers_beside(settings, 8) * table.numel()
    if name == "rmsprop" and not sparse:
        counted -= 1000  # which step a row was last seen in, kept for sparse gradients alone
    assert kept == counted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"l2": 0.1}, r"l2 is 0\.1, which 'ftrl' read; the optimizer is 'adam'"),
        ({"parts": {"wide": {"momentum": 0.5}}}, r"parts\.wide\.momentum is 0\.5, which 'rmsprop', 'sgd' read"),
        ({"negative_distribution": "popular"}, "Input should be 'uniform' or 'popularity'"),
        ({"metric": "auc"}, "metric is 'auc'; expected PROTOCOL/METRIC with one of the protocols 'rows', 'sampled'"),
    ],
)
def test_settings_that_nothing_would_read_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings.model_validate(values)
    TrainSettings.model_validate({"l2": 0.1, "parts": {"wide": {"optimizer": "ftrl"}}})


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


def test_linear_schedule_reaches_zero_just_after_the_last_step() -> None:
    assert [factor(step, steps=4, schedule="linear") for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_warm_up_comes_before_decay() -> None:
    factors = [factor(step, steps=2, epochs=3, schedule="linear", warmup_epochs=1) for step in range(6)]
    assert factors == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


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
