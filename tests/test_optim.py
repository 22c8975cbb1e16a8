"""Optimizers and schedules against numbers worked by hand; rows against whole tables; parts of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from recspec import checkpoint, config, kernels
from recspec.errors import CheckpointError, SettingsError
from recspec.kernels import sum_rows
from recspec.optim import (
    BLOCK,
    SCHEDULES,
    Optimizers,
    OptimizerSettings,
    _follow_the_leader,
    learning_rate_factor,
    numbers_beside,
    polynomial_decay,
    sparse_pays,
    step_decay,
    updates_rows_exactly,
    warm_up,
)
from tests.closeness import assert_close

EVERY = get_args(OptimizerSettings.model_fields["optimizer"].annotation)


def settings(optimizer: str, **values: object) -> OptimizerSettings:
    return OptimizerSettings.model_validate({"optimizer": optimizer, "learning_rate": 0.5, **values})


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_takes_one_step_against_the_gradient(name: str) -> None:
    weight = nn.Parameter(torch.tensor([0.0, 0.0]))
    weight.grad = torch.tensor([1.0, -4.0])
    Optimizers([("weight", weight)], settings(name, learning_rate=0.1)).step()
    assert weight[0].item() < 0.0
    assert weight[1].item() > 0.0


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad", "rmsprop"])
def test_what_torch_has_is_as_torch_has_it(name: str, momentum: float) -> None:
    """torch's plain loops, given the same settings."""
    plain_class: Callable[..., torch.optim.Optimizer] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": partial(torch.optim.SGD, momentum=momentum),
        "adagrad": torch.optim.Adagrad,
        "rmsprop": partial(torch.optim.RMSprop, alpha=0.9, eps=1e-7, momentum=momentum),
    }[name]
    ours, plain = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    first = Optimizers([("weight", ours)], settings(name, learning_rate=0.1, weight_decay=0.01, momentum=momentum))
    second = plain_class([plain], lr=0.1, weight_decay=0.01, foreach=False)
    for gradient in ([1.0, -4.0], [0.5, 0.25], [-2.0, 3.0]):
        ours.grad, plain.grad = torch.tensor(gradient), torch.tensor(gradient)
        first.step()
        second.step()
    torch.testing.assert_close(ours, plain)


def test_sgd_with_momentum_by_hand() -> None:
    # Velocities 1 and 1.5: 1 - 0.1 - 0.15.
    seen = step_by_step(settings("sgd", learning_rate=0.1, momentum=0.5), [1.0], [1.0], [1.0])
    assert seen[-1] == [pytest.approx(0.75)]


def test_adam_takes_the_published_betas() -> None:
    weight = nn.Parameter(torch.ones(1))
    adam = Optimizers([("weight", weight)], settings("adam", learning_rate=0.0045, betas=(0.25, 0.5))).parts[""]
    assert adam.param_groups[0]["betas"] == (0.25, 0.5)
    assert adam.param_groups[0]["fused"]


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"train: setting 'optimizer' is 'adamm': input should be 'adam', 'adamw', "
    ):
        config.build(OptimizerSettings, "train", {"optimizer": "adamm"})


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


# --- several optimizers over parts -----------------------------------------------------------------------------------

SPARSE_EXACT = ("sgd", "adagrad", "rowwise_adagrad", "rmsprop", "ftrl")


def step_by_step(given: OptimizerSettings, start: list[float], *gradients: list[float]) -> list[list[float]]:
    """The weights after each of the gradients."""
    weight = nn.Parameter(torch.tensor(start))
    optimizers = Optimizers([("weight", weight)], given)
    seen = []
    for gradient in gradients:
        weight.grad = torch.tensor(gradient).view_as(weight)
        optimizers.step()
        seen.append(weight.detach().tolist())
    return seen


def sparse(rows: int, ids: list[int], values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor(ids, dtype=torch.int64)[None], values, (rows, values.shape[1]), check_invariants=True
    )


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    deep = nn.ModuleDict({"embeddings": nn.Embedding(5, 4, sparse=True), "mlp": nn.Linear(4, 2)})
    return nn.ModuleDict({"wide": nn.Linear(3, 1), "deep": deep})


def test_sgd_two_steps_by_hand() -> None:
    # 1 - 0.5 * 2 = 0; 0 + 0.5 * 1 = 0.5.
    assert step_by_step(settings("sgd"), [1.0], [2.0], [-1.0]) == [[0.0], [0.5]]


def test_adagrad_two_steps_by_hand() -> None:
    # n = 7 + 9 = 16: 1 - 0.5 * 3 / 4 = 0.625; n = 16 + 9 = 25: 0.625 + 0.5 * 3 / 5 = 0.925.
    seen = step_by_step(settings("adagrad", initial_accumulator=7.0), [1.0], [3.0], [-3.0])
    assert seen == [[pytest.approx(0.625)], [pytest.approx(0.925)]]


def test_adagrad_starts_from_nothing_unless_told() -> None:
    # n = 9: the first step is the learning rate itself.
    assert step_by_step(settings("adagrad"), [1.0], [3.0]) == [[pytest.approx(0.5)]]


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


def test_adam_two_steps_by_hand() -> None:
    # With betas 0.5: m = 1, 2; v = 2, 9 (g = 2, then 3 and 4^2 / 2); corrected by 1/2 and 3/4.
    seen = step_by_step(settings("adam", betas=(0.5, 0.5), eps=1e-12), [1.0], [2.0], [4.0])
    assert seen[0] == [pytest.approx(1 - 0.5 * 2 / 2)]
    assert seen[1] == [pytest.approx(0.5 - 0.5 * (2.5 / 0.75) / math.sqrt(9 / 0.75))]


@pytest.mark.parametrize("optimizer", EVERY)
def test_a_large_parameter_is_updated_like_a_small_one(optimizer: str) -> None:
    """Blocks and rows are how it is computed, not what is computed."""
    size = 3 * BLOCK * torch.get_num_threads() + 7
    torch.manual_seed(1)
    large, gradient = nn.Parameter(torch.zeros(size, 1)), torch.randn(size, 1)
    small = nn.Parameter(large.detach()[-5:].clone())
    one, other = (Optimizers([("weight", each)], settings(optimizer)) for each in (large, small))
    for _ in range(3):
        large.grad, small.grad = gradient, gradient[-5:].clone()
        one.step()
        other.step()
    torch.testing.assert_close(large.detach()[-5:], small.detach())


@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.parametrize("optimizer", SPARSE_EXACT)
def test_rows_that_come_and_go_end_where_the_dense_gradient_puts_them(optimizer: str, dim: int) -> None:
    torch.manual_seed(2)
    by_rows, whole = nn.Parameter(torch.zeros(40, dim)), nn.Parameter(torch.zeros(40, dim))
    given = settings(optimizer, learning_rate=0.05, **({"l1": 0.05, "l2": 0.1} if optimizer == "ftrl" else {}))
    first, second = (Optimizers([("table", each)], given) for each in (by_rows, whole))
    for step in range(60):
        ids = torch.randint(0, 40, (step % 9,)).tolist()  # none at all now and then, some twice
        by_rows.grad = sparse(40, ids, torch.randn(len(ids), dim))
        whole.grad = by_rows.grad.to_dense()
        first.step()
        second.step()
    torch.testing.assert_close(by_rows.detach(), whole.detach())
    assert whole.detach().abs().max() > 0.1


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


def test_lazy_adam_lets_unseen_rows_wait() -> None:
    # Betas 0.5, one row with g = 1, then a step without it, then g = 1 again.
    # m, v: 0.5, then (lazily) 0.5 still, then 0.75; the third step's correction is 1 - 0.5^3 = 0.875 for both.
    weight = nn.Parameter(torch.zeros(2, 1))
    optimizers = Optimizers([("table", weight)], settings("adam", betas=(0.5, 0.5), eps=1e-12))
    seen = []
    for ids in ([0], [1], [0]):
        weight.grad = sparse(2, ids, torch.ones(1, 1))
        optimizers.step()
        seen.append(weight[0].item())
    third = -0.5 - 0.5 * (0.75 / 0.875) / math.sqrt(0.75 / 0.875)
    assert seen == [pytest.approx(-0.5), pytest.approx(-0.5), pytest.approx(third)]


def test_lazy_adam_is_adam_where_every_row_is_seen() -> None:
    torch.manual_seed(4)
    by_rows, whole = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))
    first, second = (Optimizers([("table", each)], settings("adam")) for each in (by_rows, whole))
    for _ in range(5):
        by_rows.grad = sparse(3, [2, 0, 1, 2], torch.randn(4, 2))
        whole.grad = by_rows.grad.to_dense()
        first.step()
        second.step()
    torch.testing.assert_close(by_rows.detach(), whole.detach())


def test_sparse_ftrl_leaves_rows_it_has_not_seen() -> None:
    """The stated difference: the dense formula makes weights that have no history zero."""
    by_rows, whole = nn.Parameter(torch.ones(2, 1)), nn.Parameter(torch.ones(2, 1))
    for weight in (by_rows, whole):
        gradient = sparse(2, [0], torch.ones(1, 1))
        weight.grad = gradient if weight is by_rows else gradient.to_dense()
        Optimizers([("table", weight)], settings("ftrl")).step()
    assert by_rows[0].item() == whole[0].item()
    assert (by_rows[1].item(), whole[1].item()) == (1.0, 0.0)


@pytest.mark.parametrize("rows", [1, 7, 1 << 40])
def test_equal_rows_are_summed(rows: int) -> None:
    last = rows - 1
    ids = [last, 0, last, 0, last]
    gradient = sparse(rows, ids, torch.arange(10.0).view(5, 2))
    distinct, sums = sum_rows(gradient)
    if rows == 1:
        assert (distinct.tolist(), sums.tolist()) == ([0], [[20.0, 25.0]])
    else:
        assert distinct.tolist() == [0, last]
        assert sums.tolist() == [[8.0, 10.0], [12.0, 15.0]]


def test_ids_too_large_to_pack_are_summed_all_the_same() -> None:
    high = (1 << 62) - 1
    distinct, sums = sum_rows(sparse(1 << 62, [high, 3, high], torch.tensor([[1.0], [2.0], [4.0]])))
    assert (distinct.tolist(), sums.tolist()) == ([3, high], [[2.0], [5.0]])


def test_no_row_and_one_row_are_summed() -> None:
    distinct, sums = sum_rows(sparse(4, [], torch.zeros(0, 2)))
    assert (distinct.tolist(), tuple(sums.shape)) == ([], (0, 2))
    distinct, sums = sum_rows(sparse(4, [3], torch.tensor([[1.0, 2.0]])))
    assert (distinct.tolist(), sums.tolist()) == ([3], [[1.0, 2.0]])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "rmsprop", "ftrl", "adam"])
def test_repeated_ids_count_as_one_row(optimizer: str) -> None:
    once, twice = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2))
    once.grad = sparse(4, [2], torch.tensor([[3.0, -1.0]]))
    twice.grad = sparse(4, [2, 2], torch.tensor([[1.0, 1.0], [2.0, -2.0]]))
    for weight in (once, twice):
        Optimizers([("table", weight)], settings(optimizer)).step()
    assert torch.equal(once, twice)
    assert torch.equal(once[[0, 1, 3]], torch.zeros(3, 2))


@pytest.mark.parametrize("optimizer", EVERY)
def test_a_parameter_without_gradient_stays(optimizer: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizers = Optimizers([("table", weight)], settings(optimizer))
    optimizers.step()
    assert torch.equal(weight, torch.ones(2, 2))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "rmsprop", "ftrl", "adam"])
def test_a_gradient_without_rows_moves_nothing(optimizer: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = sparse(2, [], torch.zeros(0, 2))
    Optimizers([("table", weight)], settings(optimizer)).step()
    assert torch.equal(weight, torch.ones(2, 2))
    assert weight.grad is not None
    assert weight.grad.is_sparse


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (settings("adamw"), "optimizer 'adamw'"),
        (settings("sgd", momentum=0.9), "momentum 0.9"),
        (settings("rmsprop", momentum=0.5), "momentum 0.5"),
        (settings("adam", weight_decay=0.01), "weight_decay 0.01"),
        (settings("ftrl", weight_decay=0.01), "weight_decay 0.01"),
    ],
)
def test_what_moves_every_row_is_refused_with_a_sparse_gradient(given: OptimizerSettings, what: str) -> None:
    tables = [(name, nn.Parameter(torch.ones(2, 2))) for name in ("deep.users", "deep.items", "deep.mlp")]
    for _, table in tables[:2]:
        table.grad = sparse(2, [1], torch.ones(1, 2))
    tables[2][1].grad = torch.ones(2, 2)
    with pytest.raises(SettingsError) as error:
        Optimizers(tables, given).step()
    assert str(error.value) == (
        f"{what} moves every row of a table at every step, but 'deep.users', 'deep.items' have sparse gradients, "
        "of the rows seen alone; turn sparse gradients off, or give that part another optimizer (train.parts)"
    )
    assert all(torch.equal(table, torch.ones(2, 2)) for _, table in tables)


@pytest.mark.parametrize("optimizer", EVERY)
def test_weight_decay_is_added_to_the_gradient_or_decoupled(optimizer: str) -> None:
    decayed, plain = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    decayed.grad = torch.full((2, 2), 0.5)
    plain.grad = torch.full((2, 2), 0.5 if optimizer == "adamw" else 0.75)
    Optimizers([("table", decayed)], settings(optimizer, weight_decay=0.25)).step()
    Optimizers([("table", plain)], settings(optimizer, weight_decay=0.0)).step()
    # Decoupled, in AdamW: 1 loses 0.5 * 0.25 beside the step.
    torch.testing.assert_close(decayed.detach(), plain.detach() - (0.125 if optimizer == "adamw" else 0.0))


def test_parts_cover_every_parameter_once_and_the_longest_wins() -> None:
    net = model()
    parts = {"wide": settings("ftrl"), "deep": settings("rmsprop"), "deep.embeddings": settings("adagrad")}
    optimizers = Optimizers(net.named_parameters(), settings("sgd"), parts)
    names = {
        part: [name for group in optimizer.param_groups for name in group["param_names"]]
        for part, optimizer in optimizers.parts.items()
    }
    assert names == {
        "wide": ["wide.weight", "wide.bias"],
        "deep": ["deep.mlp.weight", "deep.mlp.bias"],
        "deep.embeddings": ["deep.embeddings.weight"],
    }


def test_what_no_part_names_follows_the_settings() -> None:
    optimizers = Optimizers(model().named_parameters(), settings("sgd"), {"wide": settings("ftrl")})
    assert {part: type(optimizer).__name__ for part, optimizer in optimizers.parts.items()} == {
        "": "Sgd",
        "wide": "Ftrl",
    }


def test_a_part_is_whole_words() -> None:
    with pytest.raises(SettingsError, match=r"no parameter's name begins with 'dee' \(did you mean 'deep'\?\)"):
        Optimizers(model().named_parameters(), settings("sgd"), {"dee": settings("sgd")})


def test_parts_that_have_no_parameter_are_named_all_at_once() -> None:
    parts = {name: settings("sgd") for name in ("", "widee", "deep", "deep.mlp", "deep.embeddings", "deep.mpl")}
    del parts[""]
    with pytest.raises(SettingsError) as error:
        Optimizers(model().named_parameters(), settings("sgd"), parts)
    some = "some do with 'deep', 'deep.embeddings', 'deep.mlp', 'wide', 'wide.bias', 'wide.weight'"
    assert str(error.value) == (
        "train.parts: 3 problems"
        "\n  - all parameters of 'deep' belong to longer parts; remove it"
        f"\n  - no parameter's name begins with 'deep.mpl' (did you mean 'deep.mlp'?); {some}"
        f"\n  - no parameter's name begins with 'widee' (did you mean 'wide'?); {some}"
    )


def test_each_part_has_its_own_schedule() -> None:
    parts = {
        "wide": settings("ftrl", learning_rate=0.02),
        "deep.mlp": settings("adam", learning_rate=1.0, schedule="step", step_epochs=[1, 2], step_factors=[0.5, 0.1]),
    }
    given = settings("sgd", learning_rate=8.0, schedule="linear", warmup_epochs=0.5)
    optimizers = Optimizers(model().named_parameters(), given, parts)
    rates = []
    for step in (0, 1, 4, 8, 11):
        optimizers.set_learning_rates(step, steps_per_epoch=4, epochs=3)
        rates.append([optimizers.learning_rates[part] for part in ("wide", "deep.mlp", "")])
    # Warm-up over 2 of 12 steps, then to zero at step 12: 8 * (1/2, 1, 8/10, 4/10, 1/10).
    expected = [[0.02, 1.0, 4.0], [0.02, 1.0, 8.0], [0.02, 0.5, 6.4], [0.02, 0.05, 3.2], [0.02, 0.05, 0.8]]
    assert [[pytest.approx(rate) for rate in row] for row in expected] == rates


def test_parts_step_with_their_own_rates() -> None:
    net = model()
    optimizers = Optimizers(net.named_parameters(), settings("sgd", learning_rate=0.5), {"wide": settings("sgd")})
    optimizers.set_learning_rates(0, steps_per_epoch=1, epochs=1)
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    for _, weight in net.named_parameters():
        weight.grad = torch.ones_like(weight)
    optimizers.step()
    for name, weight in net.named_parameters():
        torch.testing.assert_close(weight.detach(), before[name] - 0.5)
    optimizers.zero_grad()
    assert all(weight.grad is None for weight in net.parameters())


@pytest.mark.parametrize("optimizer", [*EVERY, "sgd with momentum", "rmsprop with momentum"])
def test_a_restored_run_continues_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    kind, _, momentum = optimizer.partition(" with ")
    given = settings(kind, learning_rate=0.1, **({"momentum": 0.5} if momentum else {}))
    by_rows = kind != "adamw" and not momentum

    def steps(net: nn.ModuleDict, optimizers: Optimizers, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(number)
            for name, weight in net.named_parameters():
                weight.grad = torch.randn_like(weight)
                if by_rows and name == "deep.embeddings.weight":
                    weight.grad = sparse(5, torch.randint(0, 5, (3,)).tolist(), torch.randn(3, 4))
            optimizers.step()

    straight, stopped = model(), model()
    parts = {"wide": settings("ftrl", learning_rate=0.3)}
    whole = Optimizers(straight.named_parameters(), given, parts)
    steps(straight, whole, range(7))
    half = Optimizers(stopped.named_parameters(), given, parts)
    steps(stopped, half, range(3))
    checkpoint.write_tensors(tmp_path / "state.safetensors", half.tensors(), {})
    saved, _ = checkpoint.read_tensors(tmp_path / "state.safetensors")
    resumed = Optimizers(stopped.named_parameters(), given, parts)
    resumed.restore(saved)
    steps(stopped, resumed, range(3, 7))
    for name, weight in straight.named_parameters():
        assert torch.equal(weight, stopped.get_parameter(name)), name
    ours, theirs = whole.tensors(), resumed.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad", "rmsprop", "ftrl", "rowwise_adagrad"])
def test_state_of_another_shape_or_type_is_refused_before_a_kernel_reads_it(optimizer: str) -> None:
    """torch's fused optimizers take the shapes for granted: a forged checkpoint ended the process (SIGSEGV)."""
    weight = nn.Parameter(torch.ones(6, 4))
    given = {"optimizer": optimizer, "momentum": 0.9} if optimizer == "sgd" else {"optimizer": optimizer}
    own = Optimizers([("w", weight)], OptimizerSettings.model_validate(given))
    weight.grad = torch.ones_like(weight)
    own.step()
    saved = own.tensors()
    own.restore(saved)
    assert saved, "the optimizer keeps something"
    for name, tensor in saved.items():
        for forged in (tensor[None], tensor.reshape(-1)[:0], tensor.reshape(-1)[:1].repeat(3)):
            with pytest.raises(CheckpointError, match=f"'{name}' is .*; expected"):
                own.restore({**saved, name: forged})
        with pytest.raises(CheckpointError, match=f"'{name}' is torch.float16 .*; expected"):
            own.restore({**saved, name: tensor.half()})
        if len(saved) > 1:
            with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
                own.restore({other: each for other, each in saved.items() if other != name})
        with pytest.raises(CheckpointError, match="nothing that the optimizer keeps"):
            own.restore({**saved, f"{name}_": tensor})
    own.step()


def test_a_checkpoint_names_part_parameter_and_state() -> None:
    net = model()
    optimizers = Optimizers(net.named_parameters(), settings("sgd"), {"wide": settings("ftrl")})
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    optimizers.step()
    assert sorted(optimizers.tensors()) == [
        "wide/wide.bias/accumulator",
        "wide/wide.bias/linear",
        "wide/wide.weight/accumulator",
        "wide/wide.weight/linear",
    ]


def test_tensors_of_another_run_are_refused() -> None:
    optimizers = Optimizers(model().named_parameters(), settings("sgd"))
    with pytest.raises(CheckpointError) as error:
        optimizers.restore({"/deep.mpl.weight/sum": torch.zeros(1), "wide/wide.bias/linear": torch.zeros(1)})
    assert str(error.value) == (
        "optimizer tensors in the checkpoint: 2 problems"
        "\n  - '/deep.mpl.weight/sum' is of no part and parameter of this run"
        "\n  - 'wide/wide.bias/linear' is of no part and parameter of this run"
    )


def test_a_scaler_unscales_rows_and_whole_parameters_alike() -> None:
    """As on a GPU in fp16, where no GPU is: the scaler's factor goes, in either order of calls."""
    for unscale_first in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        table, layer = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))
        optimizers = Optimizers([("table", table), ("layer", layer)], settings("sgd"), {"layer": settings("adam")})
        scaler.scale(torch.zeros(()))  # makes the factor
        table.grad, layer.grad = sparse(3, [1, 1], torch.full((2, 2), 8.0)), torch.full((2,), 8.0)
        if unscale_first:
            optimizers.unscale(scaler)
        optimizers.step(scaler)
        scaler.update()
        assert table.tolist() == [[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]
        assert layer.tolist() == [pytest.approx(-0.5)] * 2


def test_a_scaler_skips_the_part_that_overflowed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    table, layer = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))
    optimizers = Optimizers([("table", table), ("layer", layer)], settings("sgd"), {"layer": settings("sgd")})
    scaler.scale(torch.zeros(()))
    table.grad, layer.grad = sparse(3, [1], torch.tensor([[math.inf, 1.0]])), torch.full((2,), 8.0)
    optimizers.step(scaler)
    scaler.update()
    assert torch.equal(table, torch.zeros(3, 2))
    assert layer.tolist() == [-0.5, -0.5]


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


def test_step_decay_with_a_factor_for_each_entry() -> None:
    assert [step_decay(step, at=[1, 3], factor=[0.5, 0.1]) for step in range(4)] == [1.0, 0.5, 0.5, 0.05]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "every third row": lambda x: x.repeat_interleave(3, dim=0)[::3],
    "behind others": lambda x: torch.cat([torch.full((1, x.shape[1]), 7.0), x])[1:],
}
"""The same matrix, laid out in memory in several ways."""
WITH_MOMENTUM = [*EVERY, "sgd with momentum", "rmsprop with momentum"]


def steps_of(optimizer: str, weight: nn.Parameter, gradients: Iterable[Tensor], *, save: bool = False) -> Tensor:
    """The weight after a step for each gradient; with `save`, through the tensors of a checkpoint after each."""
    kind, _, momentum = optimizer.partition(" with ")
    given = settings(kind, learning_rate=0.1, **({"momentum": 0.5} if momentum else {}))
    optimizers = Optimizers([("weight", weight)], given)
    for gradient in gradients:
        weight.grad = gradient
        optimizers.step()
        assert weight.grad is gradient, "a gradient set by hand stays where it was"
        if save:
            kept = {name: tensor.contiguous() for name, tensor in optimizers.tensors().items()}
            optimizers = Optimizers([("weight", weight)], given)
            optimizers.restore(kept)
    return weight.detach().contiguous()


@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("optimizer", WITH_MOMENTUM)
def test_strides_move_no_number_elsewhere(optimizer: str, of_weight: str) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 3), [torch.randn(4, 3) for _ in range(3)]
    wanted = steps_of(optimizer, nn.Parameter(start.clone()), gradients)
    for of_gradient in LAYOUTS:
        for save in (False, True):
            weight = nn.Parameter(LAYOUTS[of_weight](start.clone()))
            found = steps_of(optimizer, weight, map(LAYOUTS[of_gradient], gradients), save=save)
            torch.testing.assert_close(found, wanted, msg=lambda said, of=of_gradient: f"gradient {of}: {said}")


@pytest.mark.parametrize("optimizer", WITH_MOMENTUM)
def test_an_expanded_gradient_is_its_copies(optimizer: str) -> None:
    """A row, a column, one number: their gradients have fewer numbers in memory than the weight."""
    start = torch.linspace(-1, 1, 12).view(4, 3)
    for one in (torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([[1.0], [-2.0], [3.0], [-4.0]]), torch.tensor([[0.5]])):
        expanded = one.expand(4, 3)
        found = steps_of(optimizer, nn.Parameter(start.clone()), [expanded] * 2)
        wanted = steps_of(optimizer, nn.Parameter(start.clone()), [expanded.contiguous()] * 2)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("optimizer", [name for name in EVERY if name != "adamw"])
def test_strides_of_sparse_gradients_move_no_number_elsewhere(optimizer: str, repeated: bool) -> None:
    torch.manual_seed(0)
    start, ids = torch.randn(6, 3), torch.tensor([[5, 0, 5, 2] if repeated else [0, 2, 4, 5]])
    steps = [torch.randn(4, 3) for _ in range(3)]

    def gradients(lay: Callable[[Tensor], Tensor]) -> list[Tensor]:
        made = [torch.sparse_coo_tensor(ids, lay(values), (6, 3), check_invariants=True) for values in steps]
        return made if repeated else [each._coalesced_(True) for each in made]

    wanted = steps_of(optimizer, nn.Parameter(start.clone()), gradients(LAYOUTS["contiguous"]))
    for of_weight in LAYOUTS:
        for of_values in LAYOUTS:
            weight = nn.Parameter(LAYOUTS[of_weight](start.clone()))
            found = steps_of(optimizer, weight, gradients(LAYOUTS[of_values]))
            torch.testing.assert_close(
                found, wanted, msg=lambda said, of=(of_weight, of_values): f"weight, values {of}: {said}"
            )


def test_which_rows_are_updated_exactly() -> None:
    exact = [name for name in EVERY if updates_rows_exactly(settings(name))]
    assert sorted(exact) == sorted(SPARSE_EXACT)
    assert not updates_rows_exactly(settings("sgd", momentum=0.5))
    assert not updates_rows_exactly(settings("adagrad", weight_decay=0.1))
    assert updates_rows_exactly(settings("adagrad", schedule="linear", warmup_epochs=1))
    assert not updates_rows_exactly(settings("ftrl", schedule="linear"))
    assert not updates_rows_exactly(settings("ftrl", warmup_epochs=1))


def test_sparse_gradients_pay_for_large_tables_and_few_ids() -> None:
    assert sparse_pays(100_000, 16, 8192)
    assert not sparse_pays(100_000, 16, 100_000)
    assert not sparse_pays(1000, 64, 8192)


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


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "rmsprop", "ftrl", "adam"])
def test_rows_are_updated_in_blocks_as_all_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    steps = [(torch.randint(30, (1, 90)), torch.randn(90, 8)) for _ in range(3)]
    found = []
    for numbers in (kernels.ROWS, 4 * 8, 1):  # all rows, four, one
        monkeypatch.setattr(kernels, "ROWS", numbers)
        table = nn.Parameter(torch.linspace(-1, 1, 40 * 8).view(40, 8))
        optimizers = Optimizers([("table", table)], OptimizerSettings.model_validate({"optimizer": name}))
        for ids, values in steps:
            table.grad = torch.sparse_coo_tensor(ids, values, table.shape, check_invariants=True)
            optimizers.step()
        found.append({"table": table.detach(), **optimizers.tensors()})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, tensor in other.items():
            assert_close(tensor, found[0][key], key)
    assert not torch.equal(found[0]["table"][:30], torch.linspace(-1, 1, 40 * 8).view(40, 8)[:30])


def test_the_schedule_published_for_criteo_terabyte() -> None:
    """Warm-up to step 8,000, constant to 48,000, ((72,000 - step) / 24,000)^2 after; one epoch is 64,014 steps."""

    def factor(step: int) -> float:
        ends = {"warmup_steps": 8000, "decay_start": 48_000 / 64_014, "decay_end": 72_000 / 64_014}
        return learning_rate_factor("polynomial", step, total_steps=64_014, power=2.0, **ends)  # type: ignore[arg-type]

    assert factor(3999) == 0.5
    assert factor(30_000) == factor(48_000) == 1.0
    assert factor(60_000) == pytest.approx(0.25)
    assert factor(64_013) == pytest.approx((7_987 / 24_000) ** 2)


def test_a_decay_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay_end 0\.3 is not after decay_start 0\.5"):
        OptimizerSettings(schedule="linear", decay_start=0.5, decay_end=0.3)


# --- rates that lie beside the parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_a_rate_beside_the_parameters_moves_them_as_a_number_does(name: str, sparse: bool) -> None:
    if sparse and name == "adamw":
        pytest.skip("it moves every row")
    ends = []
    for beside in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
        optimizers = Optimizers([("weight", weight)], settings(name, schedule="linear", warmup_epochs=0.5))
        if beside:
            optimizers.keep_rates_on_device()
        for step in range(5):
            optimizers.set_learning_rates(step, steps_per_epoch=4, epochs=1)  # 0 at the last
            gradient = torch.sin(torch.arange(12.0).view(4, 3) + step)
            gradient[1] = 0
            weight.grad = gradient.to_sparse(1) if sparse else gradient
            optimizers.step()
        assert optimizers.learning_rates == {"": 0.0}
        ends.append(weight.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


def test_adagrad_that_is_not_fused_never_asks_for_its_rate() -> None:
    """On a GPU torch's Adagrad asks the device for a rate that lies there; ours is held against torch's."""
    ends = []
    for beside in (False, True):
        weight, other = nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.ones(3))
        given = settings("adagrad", weight_decay=0.1)
        optimizers = Optimizers([("weight", weight), ("other", other)], given)
        optimizers.parts[""].param_groups[0]["fused"] = False
        if beside:
            optimizers.keep_rates_on_device()
        for _ in range(3):
            weight.grad = torch.tensor([0.5, -4.0])
            optimizers.step()
        assert [float(count) for count in optimizers.counters_on_host()] == [3.0, 0.0]
        ends.append(weight.detach())
    torch.testing.assert_close(ends[1], ends[0])


@pytest.mark.parametrize("l1", [0.0, 0.3])
@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_ftrl_with_a_rate_that_only_the_device_knows(rate: float, l1: float) -> None:
    weight, gradient = torch.tensor([0.4, -0.2, 0.0]), torch.tensor([1.0, 0.1, -2.0])
    accumulator, linear = torch.full((3,), 0.1), torch.tensor([0.2, 0.0, -0.1])
    root = (accumulator + gradient**2).sqrt()
    z = linear + gradient - (root - accumulator.sqrt()) / (rate or 1) * weight
    pulled = torch.where(z.abs() <= l1, torch.zeros(3), z - z.sign() * l1)
    expected = -pulled / (root / (rate or 1) + 2 * 0.05) if rate else weight.clone()
    _follow_the_leader(weight, accumulator, linear, gradient, torch.tensor(rate), l1, 0.05)
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(linear, z if rate else torch.tensor([0.2, 0.0, -0.1]))


def test_optimizers_are_told_that_they_are_recorded_and_afterwards_not() -> None:
    optimizers = Optimizers([("weight", nn.Parameter(torch.ones(2)))], settings("adam"))
    with optimizers.being_recorded():
        assert optimizers.parts[""].param_groups[0]["capturable"]
    assert not optimizers.parts[""].param_groups[0]["capturable"]


def test_what_updates_whole_parameters_is_told() -> None:
    optimizers = Optimizers(model().named_parameters(), settings("adam"), {"wide": settings("ftrl")})
    told = "adam (fused: one pass over weights and state), wide: ftrl (own formula, block by block on a CPU)"
    assert optimizers.described == told
