"""The running mean of the weights, worked by hand."""

from __future__ import annotations

import pytest
import torch

from recspec.training.step import WeightAverage


def test_the_average_of_the_weights_follows_its_formula() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 0.0)
    average = WeightAverage(layer, 0.15)
    for step, weight in enumerate((1.0, 2.0)):  # decays 1/10, then 0.15 since 2/11 is more
        torch.nn.init.constant_(layer.weight, weight)
        average.update(step)
    assert average.tensors["weight"].item() == pytest.approx(0.15 * 0.9 + 0.85 * 2.0)
    with average.in_place():
        assert layer.weight.item() == pytest.approx(1.835)
    assert layer.weight.item() == 2.0
