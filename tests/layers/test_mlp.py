"""Multi-layer perceptrons and their dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.models.layers.mlp import SMALL, Dice, Mlp, aligned_linear, follow_together, relu_dropout_

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


# --- Dice ---


class TestDice:
    def test_standardises_by_the_rows_given_while_training_and_by_running_values_else(self) -> None:
        dice = Dice(2, momentum=0.5, eps=0.0)
        with torch.no_grad():
            dice.slope.copy_(torch.tensor([0.0, 0.5]))
        x = torch.tensor([[1.0, 0.0], [3.0, 4.0]])  # means 2 and 2, variances 1 and 4
        low, high = torch.sigmoid(torch.tensor(-1.0)).item(), torch.sigmoid(torch.tensor(1.0)).item()
        wanted = torch.tensor([[low * 1, 0.0], [high * 3, 4 * (high + (1 - high) * 0.5)]])
        torch.testing.assert_close(dice(x), wanted)
        torch.testing.assert_close(dice.mean, torch.tensor([1.0, 1.0]))
        torch.testing.assert_close(dice.variance, torch.tensor([1.0, 2.5]))
        running = dice.eval()(x[:1])
        torch.testing.assert_close(running, dice(x)[:1])
        torch.testing.assert_close(running[0, 0], torch.sigmoid(torch.tensor(0.0)))

    def test_one_row_and_no_row_leave_numbers(self) -> None:
        dice = Dice(3)
        assert torch.isfinite(dice(torch.randn(1, 3))).all()
        before = dice.mean.clone()
        assert dice(torch.zeros(0, 3)).shape == (0, 3)
        assert torch.equal(dice.mean, before)

    def test_places_without_an_event_do_not_count(self) -> None:
        x, present = torch.randn(9, 3), torch.tensor([True, False, True] * 3)
        with_places, alone = Dice(3), Dice(3)
        torch.testing.assert_close(with_places(x, present)[present], alone(x[present]))
        torch.testing.assert_close(with_places.variance, alone.variance)

    def test_parts_of_a_step_move_the_running_values_once_and_as_the_whole_does(self) -> None:
        """Of rows 1, 3 and 8 the mean is 4, and the variance (9 + 1 + 16) / 3."""
        whole, split = Dice(1, momentum=0.5), Dice(1, momentum=0.5)
        x = torch.tensor([[1.0], [3.0], [8.0]])
        whole(x)
        split.parts = []
        for part in (x[:2], x[2:], x[:0]):
            split(part)
        assert (split.mean.item(), split.variance.item()) == (0.0, 1.0), "nothing moves before the step is whole"
        follow_together(split, torch.stack(split.parts))
        for dice in (whole, split):
            torch.testing.assert_close(dice.mean, torch.tensor([2.0]))
            torch.testing.assert_close(dice.variance, torch.tensor([(1 + 26 / 3) / 2]))
        follow_together(split, torch.zeros(0, 3))
        torch.testing.assert_close(split.mean, torch.tensor([2.0]))

    @pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4, 1e-6, 0.0])
    @pytest.mark.parametrize("middle", [0.0, 1.0, 100.0, 1e4])
    def test_gradients_of_units_that_hardly_vary_are_those_of_float64(self, middle: float, noise: float) -> None:
        """Values are the same numbers in both types, so that only the arithmetic differs."""
        torch.manual_seed(0)
        x, weights = middle + noise * torch.randn(200, 3), torch.randn(200, 3)
        found = []
        for dtype in (torch.float32, torch.float64):
            dice, own = Dice(3).to(dtype), x.detach().to(dtype).requires_grad_()
            torch.nn.init.constant_(dice.slope, 0.25)
            (dice(own) * weights.to(dtype)).sum().backward()
            assert own.grad is not None
            found.append(own.grad.double())
        assert (found[0] - found[1]).norm() < 2e-6 * found[1].norm()


@pytest.mark.parametrize("rows", [0, 1, SMALL // 8])
def test_parts_side_by_side_are_multiplied_as_their_columns(rows: int) -> None:
    torch.manual_seed(14)
    mlp, parts = Mlp((13, 8, 2)), [torch.randn(rows, 4), torch.randn(rows, 9)]
    whole = torch.cat(parts, dim=1)
    expected = mlp.first(whole)
    for x in (whole, [whole], parts):
        torch.testing.assert_close(aligned_linear(x, mlp.first), expected)
    torch.testing.assert_close(mlp.of_parts(parts), mlp(whole))
    calls = list[int]()
    mlp.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(mlp.of_parts(parts), mlp(whole))
    assert len(calls) == 2
