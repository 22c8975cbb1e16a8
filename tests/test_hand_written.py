"""Gradients written by hand are those of autograd: every `torch.autograd.Function` of the package, found by itself.

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
from torch import Tensor

import recspec
from recspec import mlp, sequences
from recspec.layers import _BesideDots, _DotInteraction, _RowsOf
from recspec.mlp import _relu_and_drop_, _ReluDropout
from recspec.models.din import _Apart
from recspec.models.neumf import _PairLoss
from recspec.search import Column, Places, attend, attend_by_rows, mean_with_one_more
from recspec.sequences import _Contrast, _CrossEntropy, _Recurrence, _Spread, _Sum, _WeightedSum, _Weights

OF_TRITON = {"Gather", "Dots"}
"""Compared with torch by `tests/test_kernels.py`, where Triton is there."""

B, L, W = 30, 5, 3

torch_random = torch.Generator().manual_seed(0)
PRESENT = torch.rand(B, L, generator=torch_random) < torch.linspace(0, 1.2, B)[:, None]  # holes; the first rows empty
LABEL = (torch.rand(B, generator=torch_random) < 0.5).double()
EVENTS, PADDED = sequences.jagged_events(PRESENT), sequences.padded_events(PRESENT)
T = EVENTS.num_events
IDS = torch.randint(0, 7, (T,), generator=torch_random)
IN_ROWS = EVENTS.places.argsort()
"""The events row by row."""


def network(x: Tensor, kind: str, tail: Sequence[Tensor]) -> Tensor:
    """What `mlp.Tail` makes of what a first layer gives: numbers (n,)."""
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
    states, last = sequences._padded_recurrence(laid, weights, *parameters, PADDED)
    return states[EVENTS.places], last


def dots_plainly(vectors: Tensor) -> Tensor:
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
    return (vectors[:, row] * vectors[:, column]).sum(2)


def beside_plainly(first: Tensor, others: Tensor) -> Tensor:
    return torch.cat([first, dots_plainly(torch.cat([first, others], 1).view(len(first), -1, first.shape[1]))], 1)


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


def pairs_plainly(
    gmf_weight: Tensor, user_first: Tensor, user_gmf: Tensor, item_first: Tensor, item_gmf: Tensor, item_bias: Tensor,
    *tail: Tensor,
) -> Tensor:  # fmt: skip
    user, item = USERS.expand(3, -1).reshape(-1), ITEMS.reshape(-1)
    logits = (user_gmf[user] * gmf_weight * item_gmf[item]).sum(1) + item_bias[item]
    logits = logits + network(user_first[user] + item_first[item], "relu", tail)
    return F.binary_cross_entropy_with_logits(logits, OF_PAIRS.reshape(-1).to(logits.dtype))


USERS, ITEMS = torch.arange(B) % 6, torch.randint(0, 9, (3, B), generator=torch_random)
OF_PAIRS = torch.stack([LABEL, 1 - LABEL, LABEL])


def pairs_by_hand(gmf_weight: Tensor, *tables: Tensor) -> Tensor:
    return _PairLoss.apply(21, (USERS, ITEMS), OF_PAIRS, 1.0, gmf_weight, *tables)  # type: ignore[no-untyped-call,no-any-return]


def dropped_by_hand(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return _ReluDropout.apply(x.clone(), 0.75)  # type: ignore[no-untyped-call,no-any-return]


def dropped_plainly(x: Tensor) -> Tensor:
    kept = torch.ones_like(x)
    torch.manual_seed(3)
    _relu_and_drop_(kept.view(-1), 0.75)
    return x.relu() * kept


def apart_by_hand(store: Tensor) -> Tensor:
    first, second, _ = _Apart.apply(store, 3)  # type: ignore[no-untyped-call]
    return torch.cat([F.embedding(IDS, first, sparse=True), F.embedding(IDS.flip(0)[:9] % 2, second, sparse=True)])


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
    "_Sum": Case(
        lambda x: _Sum.apply(x, EVENTS), lambda x: x.new_zeros(B, W).index_add(0, EVENTS.rows, x), [(T, W)]
    ),
    "_Spread": Case(lambda x: _Spread.apply(x, EVENTS), lambda x: x[EVENTS.rows], [(B, W)]),
    "_WeightedSum": Case(
        lambda x, w: _WeightedSum.apply(x, w, EVENTS),
        lambda x, w: x.new_zeros(B, W).index_add(0, EVENTS.rows, x * w[:, None]),
        [(T, W), (T,)],
    ),
    "_Weights sigmoid": Case(lambda *x: _Weights.apply(EVENTS, "sigmoid", *x), weights_plainly("sigmoid"), OF_WEIGHTS),
    "_Weights relu": Case(lambda *x: _Weights.apply(EVENTS, "relu", *x), weights_plainly("relu"), OF_WEIGHTS),
    "_Contrast": Case(
        lambda *x: _Contrast.apply(EVENTS, *x), contrast_plainly, [(T, 2), (T, W), (T, W), (4, 2), (4, W), (4,), *TAIL]
    ),
    "_CrossEntropy": Case(
        lambda x, *layers: _CrossEntropy.apply("sigmoid", 0.7, x, LABEL.to(x.dtype), *layers),
        lambda x, w, b, *tail: 0.7
        * F.binary_cross_entropy_with_logits(network(F.linear(x, w, b), "sigmoid", tail), LABEL.to(x.dtype)),
        [(B, W), (4, W), (4,), *TAIL],
    ),
    "_Recurrence": Case(
        lambda x, *weights: _Recurrence.apply(x, None, *weights, EVENTS), recurrence_plainly, [(T, W), *OF_RECURRENCE]
    ),
    "_Recurrence with attention": Case(
        lambda *x: _Recurrence.apply(*x, EVENTS), recurrence_plainly, [(T, W), (T,), *OF_RECURRENCE]
    ),
    "_RowsOf": Case(lambda store: _RowsOf.apply(IDS, store), lambda store: store[IDS], [(9, W)]),
    "_DotInteraction": Case(lambda x: _DotInteraction.apply(x), dots_plainly, [(B, 4, W)]),
    "_BesideDots": Case(lambda *x: _BesideDots.apply(*x), beside_plainly, [(B, W), (B, 4 * W)]),
    "_AttendByRows": Case(attend_by_hand, attend_plainly, [(9, 2), (4, W), (B, 2, 2 + W)]),
    "_ReluDropout": Case(dropped_by_hand, dropped_plainly, [(40, 50)]),
    "_Apart": Case(apart_by_hand, lambda store: torch.cat([store[IDS], store[IDS.flip(0)[:9] % 2]]), [(9, W)]),
    "_PairLoss": Case(pairs_by_hand, pairs_plainly, [(W,), (6, 4), (6, W), (9, 4), (9, W), (9,), *TAIL]),
}  # fmt: skip

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda x: x,
    "tiny": lambda x: x * 1e-12,
    "nearly constant": lambda x: 1 + 1e-5 * x,
    "zero": torch.zeros_like,
    "huge": lambda x: x * 1e6,
}


def found_functions() -> set[str]:
    source = "\n".join(path.read_text() for path in Path(recspec.__path__[0]).rglob("*.py"))
    return set(re.findall(r"^class (\w+)\((?:torch\.)?(?:autograd\.)?Function\)", source, re.MULTILINE))


def test_every_function_by_hand_is_asked() -> None:
    assert {name.partition(" ")[0] for name in CASES} == found_functions() - OF_TRITON


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last one of them smaller."""
    monkeypatch.setattr(sequences, "BLOCK", 8)
    monkeypatch.setattr(sequences, "ROWS", 8)
    monkeypatch.setattr(_BesideDots, "ROWS", 8)
    monkeypatch.setattr(mlp, "DROPPED", 256)
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
    if name == "_ReluDropout":  # whose masks are other ones in float32
        wanted = answers(case.plain, narrow)
    alike = zip(answers(case.by_hand, narrow), answers(case.plain, narrow), wanted, strict=True)
    for place, (ours, autograd_s, theirs) in enumerate(alike):
        assert torch.isfinite(ours).all()
        error, allowed = ((each.double() - theirs).norm().item() for each in (ours, autograd_s))
        size = theirs.norm().item()
        most = 1e-5 * size + 4 * allowed + (1e-7 if numbers != "huge" else 0.0)
        assert error <= most, f"{place}: off by {error}, autograd by {allowed}, of {size}"
