"""Recurrences by Triton's kernels against the padded form, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recspec.models.layers import kernels
from recspec.models.layers.event_networks import Gru
from recspec.models.layers.events import Events, events_on_gpu, padded_events
from recspec.models.layers.recurrence_kernels import MAX_HIDDEN
from tests.layers.present import FORMS, PRESENT, present_of
from tests.layers.test_kernels import DEVICE, with_triton

JAGGED: dict[str, Callable[[Tensor], Events]] = {name: form for name, form in FORMS.items() if name != "padded"}
LEAVES = ("x", "attention", "weight_x", "weight_h", "bias")


def a_gru(input_dim: int, hidden_dim: int, backend: kernels.Backend) -> Gru:
    torch.manual_seed(0)
    made = Gru(input_dim, hidden_dim).to(DEVICE)
    torch.nn.init.normal_(made.bias)
    made.backend = backend
    return made


def found(made: Gru, events: Events, x: Tensor, attention: Tensor | None, read: str = "both") -> dict[str, Tensor]:
    """Outputs and the gradients of what is read of them, for values of all places (B, L, X) and (B, L)."""
    x = x.clone().requires_grad_()
    attention = None if attention is None else attention.clone().requires_grad_()
    states, last = made(events.flat(x), events, None if attention is None else events.flat(attention))
    states = events.padded(states)
    states = torch.where(events.present_mask.unsqueeze(2), states, 0.0)  # nobody reads the others
    of_states, of_last = states.sin().sum(), last.cos().sum()
    loss = {"states": of_states, "last": of_last, "both": of_states + of_last}[read]
    every = zip(LEAVES, (x, attention, *made.parameters()), strict=True)
    leaves = {name: leaf for name, leaf in every if leaf is not None}
    slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"states": states, "last": last, **dict(zip(leaves, slopes, strict=True))}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@with_triton
@pytest.mark.parametrize("name", [name for name in PRESENT if name != "no place"])
@pytest.mark.parametrize("form", JAGGED)
@pytest.mark.parametrize("attentive", [False, True])
@pytest.mark.parametrize("read", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("states", "last")), "both"])
def test_it_is_the_recurrence_of_plain_torch(form: str, name: str, attentive: bool, read: str) -> None:
    present = present_of(name).to(DEVICE)
    x = torch.randn(*present.shape, 3, device=DEVICE)
    attention = torch.rand(present.shape, device=DEVICE) if attentive else None
    ours = found(a_gru(3, 5, "triton"), JAGGED[form](present), x, attention, read)
    assert_same(ours, found(a_gru(3, 5, "torch"), padded_events(present), x, attention, read))


@pytest.mark.parametrize("form", JAGGED)
def test_histories_without_a_place_end_in_zeros(form: str) -> None:
    present, made = present_of("no place").to(DEVICE), a_gru(3, 5, "triton")
    ours = found(made, JAGGED[form](present), torch.randn(2, 0, 3, device=DEVICE), torch.rand(2, 0, device=DEVICE))
    assert ours["last"].shape == (2, 5)
    assert not any(value.any() for value in ours.values())


LENGTHS = (0, 1, 6, 3, 6, 2)


def many(rows: int) -> Tensor:
    """Histories of 0 to 6 events: (rows, 6)."""
    lengths = torch.tensor(LENGTHS, device=DEVICE).repeat(-(-rows // len(LENGTHS)))[:rows]
    return torch.arange(6, device=DEVICE) < lengths.unsqueeze(1)


@pytest.mark.slow
@with_triton
@pytest.mark.parametrize("hidden", [1, 16, 40])
@pytest.mark.parametrize("short", [0, 32], ids=["jagged", "all rows at every step"])
@pytest.mark.parametrize("rows", [64, 70])
def test_states_of_any_width_in_many_programs(hidden: int, short: int, rows: int) -> None:
    present = many(rows)
    x, attention = torch.randn(*present.shape, 3, device=DEVICE), torch.rand(present.shape, device=DEVICE)
    ours = found(a_gru(3, hidden, "triton"), events_on_gpu(present, short=short), x, attention)
    assert_same(ours, found(a_gru(3, hidden, "torch"), padded_events(present), x, attention), rtol=1e-3, atol=1e-4)


@with_triton
def test_products_of_tf32_are_near() -> None:
    present, before = many(70), torch.get_float32_matmul_precision()
    x = torch.randn(*present.shape, 3, device=DEVICE)
    attention = torch.rand(present.shape, device=DEVICE)
    theirs = found(a_gru(3, 40, "torch"), padded_events(present), x, attention)
    try:
        torch.set_float32_matmul_precision("high")
        ours = found(a_gru(3, 40, "triton"), events_on_gpu(present), x, attention)
    finally:
        torch.set_float32_matmul_precision(before)
    for name, value in ours.items():  # tf32 has 10 bits; a weight's gradient is a sum over 216 events
        assert (value - theirs[name]).abs().max() <= 2**-7 * theirs[name].abs().max(), name


@with_triton
def test_states_stay_in_fp32_under_autocast() -> None:
    present = many(9)
    x, attention = torch.randn(*present.shape, 3, device=DEVICE).bfloat16(), torch.rand(present.shape, device=DEVICE)
    theirs = found(a_gru(3, 5, "torch"), padded_events(present), x.float(), attention)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        ours = found(a_gru(3, 5, "triton"), events_on_gpu(present), x, attention)
    assert ours["last"].dtype == torch.float32
    assert ours["x"].dtype == torch.bfloat16
    torch.testing.assert_close(ours.pop("x").float(), theirs.pop("x"), rtol=2**-7, atol=1e-5)
    assert_same(ours, theirs)


@with_triton
def test_gradients_repeat_bit_for_bit_and_a_second_backward_pass_is_the_first() -> None:
    present, made = many(70), a_gru(3, 20, "triton")
    events = events_on_gpu(present, short=0)
    x = torch.randn(events.num_events, 3, device=DEVICE, requires_grad=True)
    states, _ = made(x, events)
    leaves = [x, *made.parameters()]
    first, again = (torch.autograd.grad(states.sin().sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))


def test_the_kernels_are_chosen_on_a_gpu_and_not_with_the_setting_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: object) -> Tensor:
        raise RuntimeError("a kernel was launched")

    monkeypatch.setattr(kernels, "_picks_triton", lambda _: True)  # as on a GPU
    monkeypatch.setattr(kernels, "_compiled", launched)
    present = torch.ones(2, 3, dtype=torch.bool)
    x, events = torch.randn(6, 3), events_on_gpu(present)
    with pytest.raises(RuntimeError, match="a kernel was launched"):
        Gru(3, 4)(x, events)
    by_torch = Gru(3, 4)
    by_torch.backend = "torch"
    by_torch(x, events)
    Gru(3, MAX_HIDDEN + 1)(x, events)
    Gru(3, 4).double()(x.double(), events)
    Gru(3, 4)(x, padded_events(present))
