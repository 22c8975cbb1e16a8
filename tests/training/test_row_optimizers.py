"""Every optimizer on rows and on whole tables, against numbers worked by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from recspec.base.errors import SettingsError
from recspec.models.layers import kernels
from recspec.models.layers.kernels import sum_rows
from recspec.training.optimizers import Optimizers
from recspec.training.row_optimizers import BLOCK, sparse_pays
from recspec.training.settings import OptimizerSettings
from tests.closeness import assert_close
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


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_takes_one_step_against_the_gradient(name: str) -> None:
    weight = nn.Parameter(torch.tensor([0.0, 0.0]))
    weight.grad = torch.tensor([1.0, -4.0])
    Optimizers([("weight", weight)], settings(name, learning_rate=0.1)).step()
    assert weight[0].item() < 0.0
    assert weight[1].item() > 0.0


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
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
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


def test_sgd_with_momentum_by_hand() -> None:
    # Velocities 1 and 1.5: 1 - 0.1 - 0.15.
    seen = step_by_step(settings("sgd", learning_rate=0.1, momentum=0.5), [1.0], [1.0], [1.0])
    assert seen[-1] == [pytest.approx(0.75)]


def test_adam_takes_the_published_betas() -> None:
    weight = nn.Parameter(torch.ones(1))
    adam = Optimizers([("weight", weight)], settings("adam", learning_rate=0.0045, betas=(0.25, 0.5))).parts[""]
    assert adam.param_groups[0]["betas"] == (0.25, 0.5)
    assert adam.param_groups[0]["fused"]


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
