"""Settings of an optimizer: refusals, and what follows from the settings."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.training.optimizers import Optimizers
from recspec.training.settings import OptimizerSettings, numbers_beside, updates_rows_exactly
from tests.training.stepping import EVERY, SPARSE_EXACT, settings


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"train: setting 'optimizer' is 'adamm': input should be 'adam', 'adamw', "
    ):
        config.build(OptimizerSettings, "train", {"optimizer": "adamm"})


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


def test_a_decay_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay_end 0\.3 is not after decay_start 0\.5"):
        OptimizerSettings(schedule="linear", decay_start=0.5, decay_end=0.3)
