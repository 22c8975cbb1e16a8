"""Multi-layer perceptrons and their dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.nn.mlp import SMALL, Mlp, relu_dropout_

ROWS, WIDTH = 1024, 128


assert ROWS * WIDTH > SMALL


def dropped(x: Tensor, p: float) -> Tensor:
    kept, scale = relu_dropout_(x.clone(), p, training=True)
    return kept * scale


@pytest.mark.parametrize("p", [0.5, 0.1, 0.25, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_units_are_dropped_at_the_rate_and_the_mean_stays(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y = dropped(torch.ones(ROWS, WIDTH, dtype=dtype), p).double()
    count = ROWS * WIDTH
    # Five standard deviations of a share of `count` independent draws.
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=5 * (p * (1 - p) / count) ** 0.5 + 2**-17)
    assert y.max().item() == pytest.approx(1 / (1 - p), rel=1e-2 if dtype == torch.bfloat16 else 1e-4)
    assert y.mean().item() == pytest.approx(1, abs=5 * (p / (1 - p) / count) ** 0.5 + 1e-2 * (dtype == torch.bfloat16))


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_units_are_dropped_independently_of_each_other(p: float) -> None:
    torch.manual_seed(1)
    kept = (dropped(torch.ones(4096, 64), p) > 0).double() - (1 - p)
    rows = kept.T @ kept / (len(kept) * p * (1 - p))  # correlations between units
    off_diagonal = rows - torch.diag(rows.diagonal())
    assert off_diagonal.abs().max().item() < 6 / len(kept) ** 0.5
    flat = kept.view(-1)
    for distance in (1, 2, 31, 32, 64, 4096, 8192, 100_000):  # words, slices and rows
        correlation = (flat[distance:] * flat[:-distance]).mean().item() / (p * (1 - p))
        assert abs(correlation) < 6 / len(flat) ** 0.5


def test_each_draw_is_new_and_follows_torchs_seed() -> None:
    torch.manual_seed(2)
    first, second = dropped(torch.ones(ROWS, WIDTH), 0.5), dropped(torch.ones(ROWS, WIDTH), 0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert torch.equal(dropped(torch.ones(ROWS, WIDTH), 0.5), first)


def test_kept_units_are_their_relu() -> None:
    torch.manual_seed(3)
    x = torch.randn(ROWS + 3, WIDTH + 1)  # no multiple of 32
    y = dropped(x, 0.5)
    kept = y != 0
    torch.testing.assert_close(y[kept], 2 * x.relu()[kept])
    assert kept[x > 0].double().mean().item() == pytest.approx(0.5, abs=0.01)
    assert not kept[x <= 0].any()


def test_the_gradient_passes_where_the_output_is_not_zero() -> None:
    torch.manual_seed(4)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(ROWS, WIDTH)
    y, scale = relu_dropout_(x * 1, 0.25, training=True)
    (y * scale * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.where(y != 0, weight * scale, 0))


@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_without_dropout_it_is_relu(p: float, training: bool) -> None:
    x = torch.randn(ROWS, WIDTH)
    y, scale = relu_dropout_(x.clone(), p, training=training)
    assert torch.equal(y, x.relu())
    assert scale == 1.0


def test_small_and_strided_tensors_take_torchs_own_dropout() -> None:
    for x in (torch.ones(8, 8), torch.ones(ROWS, 2 * WIDTH)[:, ::2]):
        torch.manual_seed(5)
        expected = F.dropout(x, 0.5)
        torch.manual_seed(5)
        y, scale = relu_dropout_(x.clone() if x.is_contiguous() else x, 0.5, training=True)
        assert scale == 1.0
        assert torch.equal(y, expected)


def test_mlp_without_dropout_is_linear_layers_with_relu() -> None:
    torch.manual_seed(7)
    mlp = Mlp([6, 5, 4])
    x = torch.randn(3, 6)
    hidden = (x @ mlp.first.weight.T + mlp.first.bias).relu()
    second = mlp.layers[1]
    torch.testing.assert_close(mlp(x), (hidden @ second.weight.T + second.bias).relu())  # type: ignore[operator]


def test_mlp_takes_any_number_of_leading_dimensions() -> None:
    mlp = Mlp([6, 5, 4]).eval()
    x = torch.randn(2, 3, 6)
    assert mlp(x).shape == (2, 3, 4)
    torch.testing.assert_close(mlp(x)[1], mlp(x[1]))


def test_mlp_with_dropout_has_the_mean_of_many_draws_in_its_linear_part() -> None:
    # With one hidden layer and positive units, E[dropout(h)] = h; the second layer sees it through its weights.
    torch.manual_seed(8)
    mlp = Mlp([4, 64, 3], dropout=0.5)
    for parameter in mlp.parameters():
        parameter.data.abs_()  # nothing is stopped by ReLU
    x = torch.rand(4, 4)
    expected = mlp.eval()(x)
    many = mlp.train()(x.repeat(20_000, 1)).view(20_000, 4, 3).mean(0)
    torch.testing.assert_close(many, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("width", [79, 80, 81])
def test_a_width_that_is_no_multiple_of_8_changes_nothing_but_the_speed(width: int) -> None:
    torch.manual_seed(10)
    mlp, x = Mlp([width, 32]), torch.randn(ROWS, width, requires_grad=True)
    assert x.numel() > SMALL
    assert mlp.first.weight.shape == (32, width)
    y = F.relu(F.linear(x, mlp.first.weight, mlp.first.bias))
    slope = torch.randn_like(y)
    places = (x, mlp.first.weight, mlp.first.bias)
    expected = torch.autograd.grad(y, places, slope)
    found = mlp(x)
    torch.testing.assert_close(found, y)
    torch.testing.assert_close(torch.autograd.grad(found, places, slope), expected)


def test_mlp_starts_glorot_uniform() -> None:
    torch.manual_seed(9)
    weight = Mlp([300, 500]).first.weight
    bound = (6 / 800) ** 0.5
    assert weight.abs().max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
