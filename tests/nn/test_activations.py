"""Dice."""

from __future__ import annotations

import pytest
import torch

from recspec.nn.activations import Dice, follow_together


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

    def test_huge_numbers_leave_finite_gradients(self) -> None:
        dice, x = Dice(2), torch.tensor([[1e15, -1e15], [-3e15, 1e12], [0.0, 0.0]], requires_grad=True)
        dice(x).sum().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
