"""Every optimizer on rows and on whole tables, against numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from recspec.base.errors import SettingsError
from recspec.models.layers import kernels
from recspec.models.layers.kernels import sum_rows
from recspec.training.optimizers import Optimizers
from recspec.training.row_optimizers import BLOCK, FormulaOptimizer, make_optimizer, sparse_pays
from recspec.training.settings import OptimizerSettings
from tests.closeness import assert_close
from tests.processes import ended
from tests.training.stepping import (
    EVERY,
    LAYOUTS,
    SPARSE_EXACT,
    WITH_MOMENTUM,
    settings,
    sparse,
    step_by_step,
    steps_of,
)


def test_steps_load_no_compiler() -> None:
    """torch's own methods load its compiler, which takes as long as loading torch."""
    code = """
import sys
from tests.training.stepping import EVERY, SPARSE_EXACT, model, settings, sparse
import torch
from recspec.training.optimizers import Optimizers
for name in EVERY:
    parameters = dict(model().named_parameters())
    optimizers = Optimizers(parameters.items(), settings(name))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    if name in SPARSE_EXACT:
        parameters["deep.embeddings.weight"].grad = sparse(5, [1, 2, 1], torch.ones(3, 4))
    optimizers.step()
    optimizers.zero_grad()
    assert all(parameter.grad is None for parameter in parameters.values()), name
    assert "torch._dynamo" not in sys.modules, name
"""
    done = ended(code)
    assert done.returncode == 0, done.stderr


def test_a_step_calls_its_hooks_and_records_no_gradients() -> None:
    """Ours leaves out torch's wrapper, which turns gradients off."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = Optimizers([("weight", weight)], settings("adam")).parts[""]
    hooked: list[object] = []
    optimizer.register_step_post_hook(lambda *given: hooked.append(given[0]))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert hooked == [optimizer]
    assert weight.is_leaf
    assert not any(state.requires_grad for state in optimizer.state[weight].values())


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


SQRT3, SQRT5 = math.sqrt(3), math.sqrt(5)
BY_HAND = {
    # 1 - 0.5 * 2 = 0; 0 + 0.5 * 1 = 0.5.
    "sgd": (settings("sgd"), [1.0], [[2.0], [-1.0]], [[0.0], [0.5]]),
    # n = 7 + 9 = 16: 1 - 0.5 * 3 / 4 = 0.625; n = 16 + 9 = 25: 0.625 + 0.5 * 3 / 5 = 0.925.
    "adagrad": (settings("adagrad", initial_accumulator=7.0), [1.0], [[3.0], [-3.0]], [[0.625], [0.925]]),
    # n = 9: the first step is the learning rate itself.
    "adagrad from nothing": (settings("adagrad"), [1.0], [[3.0]], [[0.5]]),
    # With betas 0.5: m = 1, 2; v = 2, 9 (g = 2, then 3 and 4^2 / 2); corrected by 1/2 and 3/4.
    "adam": (
        settings("adam", betas=(0.5, 0.5), eps=1e-12),
        [1.0],
        [[2.0], [4.0]],
        [[1 - 0.5 * 2 / 2], [0.5 - 0.5 * (2.5 / 0.75) / math.sqrt(9 / 0.75)]],
    ),
    # v = 0.25 * 4 = 1: 1 - 0.5 * 2 / (1 + 1) = 0.5; v = 0.75 * 1 + 0.25 * 13 = 4: 0.5 - 0.5 * sqrt(13) / 3.
    "rmsprop": (
        settings("rmsprop", rho=0.75, eps=1.0),
        [1.0],
        [[2.0], [math.sqrt(13)]],
        [[0.5], [0.5 - 0.5 * math.sqrt(13) / 3]],
    ),
    # u = 2 / (1 + 1) = 1: 1 - 0.5; v = 0.75, g = 0: u = 0.5: 0.5 - 0.25.
    "rmsprop, momentum": (settings("rmsprop", rho=0.75, eps=1.0, momentum=0.5), [1.0], [[2.0], [0.0]], [[0.5], [0.25]]),
    # n: 1 -> 4 -> 9 (roots 1, 2, 3). z = sqrt(3), w = -z / (2 / 0.5) = -sqrt(3) / 4.
    # Then s = (3 - 2) / 0.5 = 2: z = sqrt(3) + sqrt(5) - 2 w = 1.5 sqrt(3) + sqrt(5), w = -z / (3 / 0.5).
    "ftrl": (
        settings("ftrl", initial_accumulator=1.0),
        [0.0],
        [[SQRT3], [SQRT5]],
        [[-SQRT3 / 4], [-(1.5 * SQRT3 + SQRT5) / 6]],
    ),
    # n: 0.1 -> 1.1: w = -z lr / sqrt(1.1).
    "ftrl from a tenth": (settings("ftrl"), [0.0], [[1.0]], [[-0.5 / math.sqrt(1.1)]]),
    # z = (sqrt(3), -sqrt(3), 0.5): the last is within l1 of zero. Denominator: 2 / 0.5 + 2 * 3 = 10.
    "ftrl, l1 and l2": (
        settings("ftrl", initial_accumulator=1.0, l1=0.5, l2=3.0),
        [0.0] * 3,
        [[SQRT3, -SQRT3, 0.5]],
        [[(0.5 - SQRT3) / 10, (SQRT3 - 0.5) / 10, 0.0]],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_steps_by_hand(case: str) -> None:
    given, start, gradients, expected = BY_HAND[case]
    assert step_by_step(given, start, *gradients) == [pytest.approx(weights) for weights in expected]


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


@pytest.mark.parametrize(
    ("rows", "ids", "distinct", "sums"),
    [
        (1, [0, 0, 0], [0], [6.0]),
        (1 << 40, [(1 << 40) - 1, 0, (1 << 40) - 1], [0, (1 << 40) - 1], [2.0, 4.0]),
        (1 << 62, [(1 << 62) - 1, 3, 3], [3, (1 << 62) - 1], [5.0, 1.0]),  # too large to pack
        (4, [3], [3], [1.0]),
        (4, [], [], []),
    ],
)
def test_equal_rows_are_summed(rows: int, ids: list[int], distinct: list[int], sums: list[float]) -> None:
    found, values = sum_rows(sparse(rows, ids, 1 + torch.arange(float(len(ids)))[:, None]))
    assert (found.tolist(), values.flatten().tolist(), values.shape[1]) == (distinct, sums, 1)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("optimizer", EVERY)
def test_without_a_gradient_or_its_rows_nothing_moves(optimizer: str, by_rows: bool) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = sparse(2, [], torch.zeros(0, 2)) if by_rows and optimizer != "adamw" else None
    Optimizers([("table", weight)], settings(optimizer)).step()
    assert torch.equal(weight, torch.ones(2, 2))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "rmsprop", "ftrl", "adam"])
def test_repeated_ids_count_as_one_row(optimizer: str) -> None:
    once, twice = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2))
    once.grad = sparse(4, [2], torch.tensor([[3.0, -1.0]]))
    twice.grad = sparse(4, [2, 2], torch.tensor([[1.0, 1.0], [2.0, -2.0]]))
    for weight in (once, twice):
        Optimizers([("table", weight)], settings(optimizer)).step()
    assert torch.equal(once, twice)
    assert torch.equal(once[[0, 1, 3]], torch.zeros(3, 2))


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


def test_sparse_gradients_pay_for_large_tables_and_few_ids() -> None:
    assert sparse_pays(100_000, 16, 8192)
    assert not sparse_pays(100_000, 16, 100_000)
    assert not sparse_pays(1000, 64, 8192)


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
