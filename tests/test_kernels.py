"""Triton's kernels against their twins in plain torch; FBGEMM's tables against torch's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recspec import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def why_triton_is_not_tested() -> str:
    """Nothing where it can be; on a CPU the interpreter has to be chosen before Triton is imported."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if DEVICE.type == "cpu":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            return "triton is loaded already; set TRITON_INTERPRET=1"
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            import numpy as np
            import triton

            if triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
                return "triton 3.6's interpreter needs numpy < 2.4"
        except ImportError as error:
            return str(error)
    return ""


WHY_NOT = why_triton_is_not_tested()
with_triton = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it runs")

WIDTHS = [1, 19, 64, 128]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


# --- looking rows up -------------------------------------------------------------------------------------------------

SIZES = (5, 3, 40)


def tables(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """A store of three tables, where they begin and where they end."""
    stops = torch.tensor(SIZES, device=DEVICE).cumsum(0)
    return drawn(sum(SIZES), width), stops - torch.tensor(SIZES, device=DEVICE), stops


def ids_of(rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.stack([torch.randint(size, (rows,), device=DEVICE) for size in SIZES], dim=1).to(dtype)


@with_triton
@pytest.mark.parametrize("width", [*WIDTHS, 300])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_rows_of_many_tables_are_gathered_as_by_torch(width: int, rows: int) -> None:
    torch.manual_seed(0)
    store, firsts, stops = tables(width)
    ids = ids_of(rows, torch.int32 if rows == 1 else torch.int64)
    found, places = kernels.gather_rows(store, ids, firsts, stops, torch.float32)
    expected, their_places = kernels.gather_rows_plain(store, ids, firsts, stops, torch.float32)
    assert torch.equal(found, expected)
    assert torch.equal(places, their_places)


@with_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gathered_rows_come_in_the_type_asked_for(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    store, firsts, stops = tables(19)
    ids = ids_of(8)
    found, _ = kernels.gather_rows(store, ids, firsts, stops, dtype)
    assert found.dtype == dtype
    # An interval between neighbouring numbers: a GPU rounds to the nearest, the interpreter cuts bf16 off.
    torch.testing.assert_close(found.float(), store[ids + firsts], rtol=2**-7, atol=1e-6)


@with_triton
def test_an_id_outside_its_table_gives_no_other_tables_row() -> None:
    store, firsts, stops = tables(4)
    ids = torch.tensor([[4, 2, 39], [5, 0, 0], [0, -1, 0], [0, 0, 40]], device=DEVICE)
    for gather in (kernels.gather_rows, kernels.gather_rows_plain):
        found, places = gather(store, ids, firsts, stops, torch.float32)
        assert places.tolist() == [[4, 7, 47], [-1, 5, 8], [0, -1, 8], [0, 5, -1]]
        assert found.isnan().any(2).tolist() == (places < 0).tolist()


@with_triton
@pytest.mark.parametrize("sparse", [True, False])
def test_the_gradient_of_a_gather_is_the_embeddings(sparse: bool) -> None:
    torch.manual_seed(2)
    start, firsts, stops = tables(19)
    ids, slope = ids_of(16), drawn(16, 3, 19)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    kernels.Gather.apply(ours, ids, firsts, stops, torch.float32, sparse).mul(slope).sum().backward()
    torch.nn.functional.embedding(ids + firsts, theirs).mul(slope).sum().backward()
    assert ours.grad.is_sparse == sparse
    torch.testing.assert_close(ours.grad.to_dense() if sparse else ours.grad, theirs.grad)


# --- updating the rows seen ------------------------------------------------------------------------------------------

RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def states_of(rule: kernels.Rule, weight: Tensor) -> list[Tensor]:
    shapes = {"sgd": [], "adagrad": [weight.shape], "rowwise_adagrad": [(len(weight), 1)], "adam": [weight.shape] * 2}
    return [torch.rand(shape, device=DEVICE) for shape in shapes[rule]]


ID_LISTS = {
    "none": [],
    "one": [3],
    "one, many times": [7] * 41,
    "none twice": list(range(29, -1, -1)),
    "some many times": [5, 2, 5, 0, 5, 29, 2, *[11] * 33, 0],
    "as many as a block": [4] * 16 + [9] * 32,
}


@with_triton
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ID_LISTS)
def test_rows_are_updated_as_by_torch(rule: kernels.Rule, width: int, name: str) -> None:
    torch.manual_seed(3)
    ids = torch.tensor(ID_LISTS[name], dtype=torch.int64, device=DEVICE)
    weight, gradient = drawn(30, width), drawn(len(ids), width)
    states = states_of(rule, weight)
    settings = {
        "lr": 0.3,
        "eps": 1e-8,
        "betas": (0.9, 0.99),
        "corrections": torch.tensor([0.19, 0.0199], device=DEVICE),
    }
    results = []
    for update in (kernels.update_rows, kernels.update_rows_plain):
        own, state = weight.clone(), [each.clone() for each in states]
        update(rule, own, ids, gradient, state, **settings)
        results.append((own, *state))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    untouched = torch.ones(30, dtype=torch.bool, device=DEVICE)
    untouched[ids] = False
    assert torch.equal(results[0][0][untouched], weight[untouched])


@with_triton
@pytest.mark.parametrize("update", [kernels.update_rows, kernels.update_rows_plain])
def test_an_update_by_hand(update: object) -> None:
    # Row 1 is seen twice, with (1, 2) and (2, 2): its gradient is (3, 4), whose squares' mean is 12.5.
    ids, gradient = torch.tensor([1, 0, 1], device=DEVICE), torch.tensor([[1.0, 2.0], [0, 0], [2, 2]], device=DEVICE)
    weight, state = torch.ones(2, 2, device=DEVICE), torch.full((2, 1), 3.5, device=DEVICE)
    update("rowwise_adagrad", weight, ids, gradient, [state], lr=0.4)  # type: ignore[operator]
    torch.testing.assert_close(state.cpu(), torch.tensor([[3.5], [16.0]]))
    torch.testing.assert_close(weight.cpu(), torch.tensor([[1.0, 1.0], [0.7, 0.6]]))


@with_triton
def test_ids_outside_the_table_update_nothing() -> None:
    for update in (kernels.update_rows, kernels.update_rows_plain):
        weight = torch.zeros(3, 2, device=DEVICE)
        update("sgd", weight, torch.tensor([-1, 3, 1], device=DEVICE), torch.ones(3, 2, device=DEVICE), [], lr=1.0)
        assert weight.tolist() == [[0, 0], [-1, -1], [0, 0]]


# --- dot products of all pairs ---------------------------------------------------------------------------------------


@with_triton
@pytest.mark.parametrize("features", [1, 2, 5, 27])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 3])
def test_dot_products_and_their_gradient_are_torchs(features: int, width: int, rows: int) -> None:
    torch.manual_seed(4)
    start, pairs = drawn(rows, features, width), features * (features - 1) // 2
    slope = drawn(rows, pairs)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    found, expected = kernels.Dots.apply(ours), kernels.dots_plain(theirs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    (found * slope).sum().backward()
    (expected * slope).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.grad, kernels.dots_backward_plain(start, slope), rtol=1e-4, atol=1e-4)


@with_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_products_in_half_precision(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bf16 by its bits")
    torch.manual_seed(5)
    x, slope = drawn(3, 7, 19, dtype=dtype), drawn(3, 21, dtype=dtype)
    close = {"rtol": 2e-2, "atol": 5e-2}
    assert kernels.dots(x).dtype == dtype
    torch.testing.assert_close(kernels.dots(x).float(), kernels.dots_plain(x.float()), **close)
    found = kernels.dots_backward(x, slope)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), kernels.dots_backward_plain(x.float(), slope.float()), **close)


@with_triton
def test_dot_products_of_vectors_that_lie_apart() -> None:
    apart = drawn(2, 5, 6)[:, ::2]
    torch.testing.assert_close(kernels.dots(apart), kernels.dots_plain(apart), rtol=1e-4, atol=1e-4)


# --- without a GPU ---------------------------------------------------------------------------------------------------

COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from recspec import kernels


def compiled(kernel, known, **types):
    kernel = kernels._compiled(kernel)
    signature = {name: "constexpr" if name in known else types.get(name, "*i64") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in known.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    assert compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]


gather = {"width": 19, "block_n": 64, "block_d": 32}
compiled(kernels._gather_rows, gather, ids="*i32", store="*fp32", out="*bf16", num_ids="i32", features="i32")
numbers = dict.fromkeys(("gradient", "weight", "first", "second", "corrections"), "*fp32")
scalars = dict.fromkeys(("lr", "eps", "rest1", "rest2"), "fp32")
for rule in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
    known = {"width": 19, "block_n": 16, "block_d": 32, "rule": rule}
    compiled(kernels._update_rows, known, num_ids="i32", num_rows="i32", **numbers, **scalars)
for number, precision in (("*fp32", "ieee"), ("*fp32", "tf32"), ("*bf16", "tf32")):
    known = {"features": 5, "width": 19, "block_f": 16, "block_d": 32, "precision": precision}
    for kernel in (kernels._dots, kernels._dots_backward):
        compiled(kernel, known, vectors=number, gradient=number, out=number)
"""


@with_triton
def test_every_kernel_compiles_for_a_gpu_that_need_not_be_here(tmp_path: Path) -> None:
    """The interpreter runs what the compiler refuses: names from outside the kernel, types that do not fit."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
