"""Gradients written by hand are those of autograd, for every `torch.autograd.Function` of the package.

In float64 both agree to rounding, whatever the numbers: ordinary, tiny, nearly constant, zero, huge. In float32 the
hand-written ones are as near to autograd's in float64 as autograd's own are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recspec
from recspec.models.layers import events, kernels, recurrence_kernels
from recspec.models.layers.blocks import relu_and_drop_
from recspec.models.layers.event_networks import _padded_recurrence
from recspec.models.layers.gathered_rows import SumRows, TakeRows
from recspec.models.layers.hand_written import (
    DenseLayers,
    Dots,
    EventWeights,
    FusedRecurrence,
    Gather,
    NextEventLoss,
    Recurrence,
    ReluDropout,
    RowsOf,
    SoftmaxLoss,
    may_replace,
)
from recspec.models.layers.history_search import (
    Attend,
    Column,
    PaddedHistory,
    Places,
    attend,
    attend_by_rows,
    mean_with_one_more,
)
from tests.layers import plain_kernels

B, L, W = 30, 5, 3

torch_random = torch.Generator().manual_seed(0)
PRESENT = torch.rand(B, L, generator=torch_random) < torch.linspace(0, 1.2, B)[:, None]  # holes; the first rows empty
LABEL = (torch.rand(B, generator=torch_random) < 0.5).double()
EVENTS, PADDED = events.jagged_events(PRESENT), events.padded_events(PRESENT)
T = EVENTS.num_events
IDS = torch.randint(0, 7, (T,), generator=torch_random)
IN_ROWS = EVENTS.places.argsort()
"""The events row by row."""


def network(x: Tensor, kind: str, tail: Sequence[Tensor]) -> Tensor:
    """What `blocks.Tail` makes of what a first layer gives: numbers (n,)."""
    act = torch.sigmoid if kind == "sigmoid" else torch.relu
    x = act(x)
    for weight, bias in zip(tail[:-2:2], tail[1:-2:2], strict=True):
        x = act(F.linear(x, weight, bias))
    return F.linear(x, *tail[-2:]).squeeze(1)


def weights_plainly(kind: str) -> Callable[..., Tensor]:
    def plain(
        happened: Tensor, target: Tensor, own: Tensor, by_event: Tensor, by_product: Tensor, *tail: Tensor
    ) -> Tensor:
        rows = EVENTS.rows
        return network(own[rows] + happened @ by_event.t() + (happened * target[rows]) @ by_product.t(), kind, tail)

    return plain


def contrast_plainly(
    states: Tensor, happened: Tensor, sampled: Tensor, by_state: Tensor, by_event: Tensor, bias: Tensor, *tail: Tensor
) -> Tensor:
    """Row by row and event by event."""
    total = states.new_zeros(())
    for row in range(B):
        own = [int(place) for place in IN_ROWS if EVENTS.rows[place] == row]
        for before, after in pairwise(own):
            known = F.linear(states[before], by_state, bias)
            right, wrong = (
                network((known + F.linear(x[after], by_event))[None], "sigmoid", tail) for x in (happened, sampled)
            )
            total = total + (F.softplus(-right) + F.softplus(wrong)).sum() / (len(own) - 1)
    return total / B


def recurrence_plainly(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    attention, parameters = (rest[0], rest[1:]) if len(rest) == 4 else (None, rest)
    laid = EVENTS.padded(x).flatten(0, 1)
    weights = None if attention is None else EVENTS.padded(attention).flatten()
    states, last = _padded_recurrence(laid, weights, *parameters, PADDED)
    return states[EVENTS.places], last


def dots_plainly(vectors: Tensor) -> Tensor:
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
    return (vectors[:, row] * vectors[:, column]).sum(2)


def attend_plainly(first: Tensor, second: Tensor, queries: Tensor) -> Tensor:
    ids = PADDED_IDS
    vectors = torch.cat([F.embedding(ids, first), F.embedding(ids % 4, second)], 2)
    sums = attend(vectors, PRESENT, queries)[1]
    return torch.cat([sums, mean_with_one_more(vectors, PRESENT).unsqueeze(1)], 1)


def attend_by_hand(first: Tensor, second: Tensor, queries: Tensor) -> Tensor:
    places = Places.of(PRESENT)
    columns = [Column(first, places.take(PADDED_IDS)), Column(second, places.take(PADDED_IDS % 4))]
    return attend_by_rows(columns, places, queries, mean=True)[1]


PADDED_IDS = EVENTS.padded(IDS)


def dropped_by_hand(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return ReluDropout.apply(x.clone(), 0.75)  # type: ignore[no-untyped-call,no-any-return]


def dropped_plainly(x: Tensor) -> Tensor:
    kept = torch.ones_like(x)
    torch.manual_seed(3)
    relu_and_drop_(kept.view(-1), 0.75)
    return x.relu() * kept


def dense_by_hand(is_raw: bool, dropout: float) -> Callable[..., Tensor]:
    def by_hand(x: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(3)
        return DenseLayers.apply(x, is_raw, x.dtype, dropout, 2, *parameters)  # type: ignore[no-untyped-call,no-any-return]

    return by_hand


def dense_plainly(is_raw: bool, dropout: float) -> Callable[..., Tensor]:
    def plain(x: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(3)
        x = F.dropout(x.relu(), dropout) if is_raw else x[:, :W]
        for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
            x = F.dropout(F.linear(x, weight, bias).relu(), dropout)
        return F.linear(x, *parameters[-2:])

    return plain


FIRSTS, STOPS = torch.tensor([0, 4]), torch.tensor([4, 9])
"""Two tables in a store of 9 rows."""
OF_TABLES = torch.stack([IDS % 4, IDS % 5], dim=1)


def gathered(sparse: bool) -> Callable[[Tensor], Tensor]:
    return lambda store: Gather.apply(store, OF_TABLES, FIRSTS, STOPS, store.dtype, sparse)  # type: ignore[no-untyped-call]


IN_TABLE = torch.randint(0, 9, (B, L, 2), generator=torch_random)


def attend_in_table(store: Tensor, queries: Tensor) -> Tensor:
    return Attend.apply(store, queries, IN_TABLE, PRESENT, True)[1]  # type: ignore[no-untyped-call, no-any-return]


def attend_to_vectors(store: Tensor, queries: Tensor) -> Tensor:
    return PaddedHistory(store[IN_TABLE].flatten(2), PRESENT).attend(queries, mean=True)


@dataclass(frozen=True)
class Case:
    """A function by hand, the same by autograd, and the shapes of what both take."""

    by_hand: Callable[..., Tensor | tuple[Tensor, ...]]
    plain: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: Sequence[tuple[int, ...]]


TAIL = ((3, 4), (3,), (1, 3), (1,))
"""A second layer of 3 units, and a last one."""
OF_WEIGHTS = ((T, W), (B, W), (B, 4), (4, W), (4, W), *TAIL)
OF_RECURRENCE = ((6, W), (6, 2), (6,))
CASES: dict[str, Case] = {
    "SoftmaxLoss": Case(
        lambda *x: SoftmaxLoss.apply(*x, IDS),
        lambda rows, classes: F.cross_entropy(rows @ classes.t(), IDS, reduction="sum"),
        [(T, W), (7, W)],
    ),
    "EventWeights sigmoid": Case(
        lambda *x: EventWeights.apply(EVENTS, "sigmoid", *x), weights_plainly("sigmoid"), OF_WEIGHTS
    ),
    "EventWeights relu": Case(lambda *x: EventWeights.apply(EVENTS, "relu", *x), weights_plainly("relu"), OF_WEIGHTS),
    "NextEventLoss": Case(
        lambda *x: NextEventLoss.apply(EVENTS, *x),
        contrast_plainly,
        [(T, 2), (T, W), (T, W), (4, 2), (4, W), (4,), *TAIL],
    ),
    "Recurrence": Case(
        lambda x, *weights: Recurrence.apply(x, None, *weights, EVENTS), recurrence_plainly, [(T, W), *OF_RECURRENCE]
    ),
    "Recurrence with attention": Case(
        lambda *x: Recurrence.apply(*x, EVENTS), recurrence_plainly, [(T, W), (T,), *OF_RECURRENCE]
    ),
    "FusedRecurrence": Case(
        lambda x, *weights: FusedRecurrence.apply(x, None, *weights, EVENTS),
        recurrence_plainly,
        [(T, W), *OF_RECURRENCE],
    ),
    "FusedRecurrence with attention": Case(
        lambda *x: FusedRecurrence.apply(*x, EVENTS), recurrence_plainly, [(T, W), (T,), *OF_RECURRENCE]
    ),
    "RowsOf": Case(lambda store: RowsOf.apply(IDS, store), lambda store: store[IDS], [(9, W)]),
    "Gather": Case(gathered(sparse=False), lambda store: store[OF_TABLES + FIRSTS], [(9, W)]),
    "Gather sparse": Case(gathered(sparse=True), lambda store: store[OF_TABLES + FIRSTS], [(9, W)]),
    "DenseLayers": Case(dense_by_hand(False, 0.3), dense_plainly(False, 0.3), [(B, W + 2), (4, W), (4,), *TAIL]),
    "DenseLayers of raw input": Case(dense_by_hand(True, 0.3), dense_plainly(True, 0.3), [(B, W), (4, W), (4,), *TAIL]),
    "TakeRows": Case(lambda x: TakeRows.apply(x, IDS), lambda x: x[IDS], [(9, W)]),
    "SumRows": Case(
        lambda x: SumRows.apply(x, IDS, 9), lambda x: torch.zeros(9, W, dtype=x.dtype).index_add(0, IDS, x), [(T, W)]
    ),
    "Attend": Case(attend_in_table, attend_to_vectors, [(9, W), (B, 2, 2 * W)]),
    "Dots": Case(lambda x: Dots.apply(x), dots_plainly, [(B, 4, W)]),
    "AttendByRows": Case(attend_by_hand, attend_plainly, [(9, 2), (4, W), (B, 2, 2 + W)]),
    "ReluDropout": Case(dropped_by_hand, dropped_plainly, [(40, 50)]),
}
"""Each function by hand beside the same by autograd."""

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda x: x,
    "tiny": lambda x: x * 1e-12,
    "nearly constant": lambda x: 1 + 1e-5 * x,
    "zero": torch.zeros_like,
    "huge": lambda x: x * 1e6,
}


FUNCTION = re.compile(r"^class (\w+)\((?:torch\.)?(?:autograd\.)?Function\)", re.MULTILINE)


def test_every_function_by_hand_is_asked() -> None:
    found = [FUNCTION.findall(path.read_text()) for path in Path(recspec.__path__[0]).rglob("*.py")]
    assert {name for own in found for name in own} == {name.partition(" ")[0] for name in CASES}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last one of them smaller; kernels in plain torch, which `test_kernels` compares them with."""
    monkeypatch.setattr(events, "BLOCK", 8)
    monkeypatch.setattr("recspec.models.layers.blocks.DROPPED", 256)
    for name in ("gather_rows", "add_rows", "attend", "attend_backward", "dots", "dots_backward"):
        monkeypatch.setattr(kernels, name, getattr(plain_kernels, name))
    for name in ("recur", "recur_backward"):
        monkeypatch.setattr(recurrence_kernels, name, getattr(plain_kernels, name))
    EVENTS.__dict__.pop("blocks", None)


def answers(function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What a function gives, and the gradients of a random weighting of it."""
    given = [each.detach().clone().requires_grad_() for each in inputs]
    found = function(*given)
    outputs = list(found) if isinstance(found, tuple) else [found]
    random = torch.Generator().manual_seed(5)
    weightings = [torch.randn(out.shape, generator=random, dtype=torch.float64).to(out.dtype) for out in outputs]
    slopes = torch.autograd.grad(outputs, given, weightings, allow_unused=True, materialize_grads=True)
    return [*(out.detach() for out in outputs), *(slope.to_dense() for slope in slopes)]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_hand_are_those_of_autograd(name: str, numbers: str) -> None:
    case, random = CASES[name], torch.Generator().manual_seed(4)
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in case.shapes]
    narrow = [NUMBERS[numbers](each).float() for each in drawn]
    inputs = [each.double() for each in narrow]
    largest = max(1.0, *(each.abs().max().item() for each in inputs))
    wanted, found = answers(case.plain, inputs), answers(case.by_hand, inputs)
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.dtype == torch.float64
        # A gradient may be a small difference of products of two inputs.
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-14 * largest**2, msg=lambda s, p=place: f"{p}: {s}")
    if name.partition(" ")[0] in ("DenseLayers", "ReluDropout"):  # whose masks are other ones in float32
        wanted = answers(case.plain, narrow)
    alike = zip(answers(case.by_hand, narrow), answers(case.plain, narrow), wanted, strict=True)
    for place, (ours, autograd_s, theirs) in enumerate(alike):
        assert torch.isfinite(ours).all()
        error, allowed = ((each.double() - theirs).norm().item() for each in (ours, autograd_s))
        size = theirs.norm().item()
        most = 1e-5 * size + 4 * allowed + (1e-7 if numbers != "huge" else 0.0)
        assert error <= most, f"{place}: off by {error}, autograd by {allowed}, of {size}"


@pytest.mark.parametrize("name", [name for name in CASES if name != "Gather sparse"])  # gradcheck takes none
def test_gradients_by_hand_are_finite_differences(name: str) -> None:
    case, random = CASES[name], torch.Generator().manual_seed(7)
    inputs = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in case.shapes]
    assert torch.autograd.gradcheck(case.by_hand, inputs, fast_mode=True)


# --- stepping aside --------------------------------------------------------------------------------------------------


def test_modules_that_expect_a_call_may_not_be_replaced() -> None:
    def nothing(*_: object) -> None: ...

    module = nn.Sequential(nn.Linear(2, 2))
    for register in (
        module[0].register_forward_hook,
        module[0].register_forward_pre_hook,
        module[0].register_full_backward_hook,
        module.register_full_backward_pre_hook,
    ):
        handle = register(nothing)  # type: ignore[operator]
        assert not may_replace(module)
        handle.remove()
        assert may_replace(module)
    module[0].forward = module[0].forward  # type: ignore[method-assign]
    assert not may_replace(module)
    assert not may_replace(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))

    class Own(nn.Linear): ...

    Own.__module__ = "elsewhere"
    assert not may_replace(Own(2, 2))


def test_a_profile_changes_nothing() -> None:
    with FlopCounterMode(display=False):  # it sets hooks of all modules
        assert may_replace(nn.Linear(2, 2))


def test_nothing_is_replaced_under_a_transform_of_torch_func() -> None:
    found = []
    torch.func.grad(lambda x: (found.append(may_replace(nn.Linear(2, 2))), x.sum())[1])(torch.ones(2))
    assert found == [False]
