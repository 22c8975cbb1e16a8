"""RMSprop, FTRL and row-wise Adagrad against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from recspec.training.optimizers import Optimizers
from recspec.training.row_optimizers import FormulaOptimizer, make_optimizer
from tests.training.stepping import settings, sparse, step_by_step


def test_rowwise_adagrad_two_steps_by_hand() -> None:
    # Row (1, 7): mean square 25, root 5: 0 - 0.5 * (0.2, 1.4). Then (12, 12): 25 + 144 = 169, root 13: - 0.5 * 12 / 13.
    # The other row's (2, 2): mean square 4: - 0.5 * 1; then nothing.
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizers = Optimizers([("table", weight)], settings("rowwise_adagrad"))
    for gradient in ([[1.0, 7.0], [2.0, 2.0]], [[12.0, 12.0], [0.0, 0.0]]):
        weight.grad = torch.tensor(gradient)
        optimizers.step()
    expected = torch.tensor([[-0.1 - 6 / 13, -0.7 - 6 / 13], [-0.5, -0.5]])
    torch.testing.assert_close(weight.detach(), expected)
    assert optimizers.tensors()["/table/sum"].tolist() == [[169.0], [4.0]]


def test_rmsprop_two_steps_by_hand() -> None:
    # v = 0.25 * 4 = 1: 1 - 0.5 * 2 / (1 + 1) = 0.5; v = 0.75 * 1 + 0.25 * 13 = 4: 0.5 - 0.5 * sqrt(13) / 3.
    seen = step_by_step(settings("rmsprop", rho=0.75, eps=1.0), [1.0], [2.0], [math.sqrt(13)])
    assert seen == [[pytest.approx(0.5)], [pytest.approx(0.5 - 0.5 * math.sqrt(13) / 3)]]


def test_rmsprop_with_momentum_by_hand() -> None:
    # u = 2 / (1 + 1) = 1: 1 - 0.5; v = 0.75, g = 0: u = 0.5: 0.5 - 0.25.
    seen = step_by_step(settings("rmsprop", rho=0.75, eps=1.0, momentum=0.5), [1.0], [2.0], [0.0])
    assert seen == [[pytest.approx(0.5)], [pytest.approx(0.25)]]


def test_ftrl_two_steps_by_hand() -> None:
    # n: 1 -> 4 -> 9 (roots 1, 2, 3). z = sqrt(3), w = -z / (2 / 0.5) = -sqrt(3) / 4.
    # Then s = (3 - 2) / 0.5 = 2: z = sqrt(3) + sqrt(5) - 2 w = 1.5 sqrt(3) + sqrt(5), w = -z / (3 / 0.5).
    seen = step_by_step(settings("ftrl", initial_accumulator=1.0), [0.0], [math.sqrt(3)], [math.sqrt(5)])
    first, second = -math.sqrt(3) / 4, -(1.5 * math.sqrt(3) + math.sqrt(5)) / 6
    assert seen == [[pytest.approx(first)], [pytest.approx(second)]]


def test_ftrl_with_l1_and_l2_by_hand() -> None:
    # z = (sqrt(3), -sqrt(3), 0.5): the last is within l1 of zero. Denominator: 2 / 0.5 + 2 * 3 = 10.
    given = settings("ftrl", initial_accumulator=1.0, l1=0.5, l2=3.0)
    seen = step_by_step(given, [0.0, 0.0, 0.0], [math.sqrt(3), -math.sqrt(3), 0.5])[0]
    moved = (math.sqrt(3) - 0.5) / 10
    assert seen == [pytest.approx(-moved), pytest.approx(moved), 0.0]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("rmsprop", {}),
        ("rmsprop", {"momentum": 0.5}),
        ("ftrl", {}),
        ("ftrl", {"l1": 0.3, "l2": 0.2}),
        ("rowwise_adagrad", {}),
    ],
)
def test_updates_of_many_parameters_together_are_those_of_each(name: str, more: dict[str, float]) -> None:
    """On a GPU all parameters of a group are updated together."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        [nn.Parameter(x.clone()) for x in (torch.ones(3, 4), torch.ones(5), torch.ones(()), torch.ones(0, 2))]
        for _ in range(2)
    ]
    one, other = (make_optimizer(settings(name, **more), [(str(n), x) for n, x in enumerate(own)]) for own in weights)
    assert isinstance(one, FormulaOptimizer)
    assert isinstance(other, FormulaOptimizer)
    with torch.no_grad():
        for _ in range(3):
            slopes = [torch.randn(x.shape, generator=generator) for x in weights[0]]
            for weight, slope in zip(weights[0], slopes, strict=True):
                one.update_whole(one.param_groups[0], weight, slope.clone())
            other.update_together(other.param_groups[0], [*weights[1]], [slope.clone() for slope in slopes])
            for weight, theirs in zip(*weights, strict=True):
                torch.testing.assert_close(theirs, weight)
                for key, value in one.state[weight].items():
                    torch.testing.assert_close(other.state[theirs][key], value)


def test_ftrl_starts_its_accumulator_at_a_tenth() -> None:
    # n: 0.1 -> 1.1: w = -z lr / sqrt(1.1).
    assert step_by_step(settings("ftrl"), [0.0], [1.0]) == [[pytest.approx(-0.5 / math.sqrt(1.1))]]


def test_ftrl_at_rate_zero_stands_still() -> None:
    weight = nn.Parameter(torch.tensor([0.25]))
    optimizers = Optimizers([("weight", weight)], settings("ftrl", schedule="linear"))
    optimizers.set_learning_rates(10, steps_per_epoch=10, epochs=1)
    weight.grad = torch.ones(1)
    optimizers.step()
    assert weight.item() == 0.25


def test_rmsprop_catches_up_when_a_dense_gradient_follows_sparse_ones() -> None:
    torch.manual_seed(3)
    mixed, whole = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(6, 2))
    first, second = (Optimizers([("table", each)], settings("rmsprop")) for each in (mixed, whole))
    for ids in ([0, 1], [5], [], None, [2, 2], None, [0]):
        values = torch.randn(6 if ids is None else len(ids), 2)
        mixed.grad = values if ids is None else sparse(6, ids, values)
        whole.grad = values if ids is None else mixed.grad.to_dense()
        first.step()
        second.step()
    torch.testing.assert_close(mixed.detach(), whole.detach())


def test_sparse_ftrl_leaves_rows_it_has_not_seen() -> None:
    """The stated difference: the dense formula makes weights that have no history zero."""
    by_rows, whole = nn.Parameter(torch.ones(2, 1)), nn.Parameter(torch.ones(2, 1))
    for weight in (by_rows, whole):
        gradient = sparse(2, [0], torch.ones(1, 1))
        weight.grad = gradient if weight is by_rows else gradient.to_dense()
        Optimizers([("table", weight)], settings("ftrl")).step()
    assert by_rows[0].item() == whole[0].item()
    assert (by_rows[1].item(), whole[1].item()) == (1.0, 0.0)
