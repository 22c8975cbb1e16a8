"""Optimizers by name, and schedules against numbers worked by hand."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from recspec.errors import SettingsError
from recspec.optim import (
    SCHEDULES,
    Optimizers,
    OptimizerSettings,
    learning_rate_factor,
    make_optimizer,
    numbers_beside,
    polynomial_decay,
    step_decay,
    warm_up,
)

NAMES = ("adam", "adamw", "sgd", "adagrad", "rmsprop")


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_takes_one_step_against_the_gradient(name: str) -> None:
    weight = parameter()
    optimizer = make_optimizer(name, [weight], learning_rate=0.1)
    weight.grad = torch.tensor([1.0, -4.0])
    optimizer.step()
    assert weight[0].item() < 1.0
    assert weight[1].item() > -2.0


@pytest.mark.parametrize("name", NAMES)
def test_a_fused_optimizer_gives_what_the_plain_one_gives(name: str) -> None:
    plain_class = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
    }[name]
    ours, plain = parameter(), parameter()
    first = make_optimizer(name, [ours], learning_rate=0.1, weight_decay=0.01)
    second = plain_class([plain], lr=0.1, weight_decay=0.01, foreach=False)
    if name == "adagrad":
        second.param_groups[0]["eps"] = 1e-8
    for gradient in ([1.0, -4.0], [0.5, 0.25], [-2.0, 3.0]):
        ours.grad, plain.grad = torch.tensor(gradient), torch.tensor(gradient)
        first.step()
        second.step()
    torch.testing.assert_close(ours, plain)


def test_sgd_with_momentum_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer("sgd", [weight], learning_rate=0.1, momentum=0.5)
    for _ in range(2):
        weight.grad = torch.tensor([1.0])
        optimizer.step()
    # Velocities 1 and 1.5: 1 - 0.1 - 0.15.
    assert weight.item() == pytest.approx(0.75)


def test_adam_takes_the_published_betas() -> None:
    optimizer = make_optimizer("adam", [parameter()], learning_rate=0.0045, betas=(0.25, 0.5))
    assert optimizer.param_groups[0]["betas"] == (0.25, 0.5)
    assert optimizer.param_groups[0]["fused"]


def test_an_unknown_optimizer_is_told_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match=r"unknown optimizer 'adamm' \(did you mean 'adam'\?\); known: 'adam', "):
        make_optimizer("adamm", [parameter()], learning_rate=0.1)


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


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", get_args(OptimizerSettings.model_fields["optimizer"].annotation))
def test_a_table_without_rows_takes_steps(name: str, sparse: bool) -> None:
    """As a rank has it that a plan gives nothing of a store."""
    table = nn.Parameter(torch.zeros(0, 8))
    optimizers = Optimizers([("table", table)], OptimizerSettings.model_validate({"optimizer": name}))
    for _ in range(2):
        none = torch.zeros(1, 0, dtype=torch.int64)
        table.grad = (
            torch.sparse_coo_tensor(none, torch.zeros(0, 8), table.shape, check_invariants=True)
            if sparse
            else torch.zeros(0, 8)
        )
        if name == "adamw" and sparse:
            with pytest.raises(SettingsError, match="moves every row"):
                optimizers.step()
            return
        optimizers.step()
    counts = [int(tensor) for tensor in optimizers.tensors().values() if not tensor.dim()]
    assert counts in ([], [2]), "steps are counted, as on the ranks that hold rows"
