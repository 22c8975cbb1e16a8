"""The attention unit of DIN, and the auxiliary network of DIEN."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from recspec.models.layers.event_networks import AttentionUnit, NextEvent
from recspec.models.layers.events import jagged_events
from recspec.models.layers.mlp import Activation
from tests.layers.present import FORMS, PRESENT, present_of

KINDS: tuple[Activation, ...] = ("prelu", "dice", "sigmoid", "relu")


@pytest.mark.parametrize("sliced", [0, 10**9], ids=["step by step", "event by event"])
@pytest.mark.parametrize("form", FORMS)
class TestAttentionUnit:
    @pytest.fixture(autouse=True)
    def _choose(self, monkeypatch: pytest.MonkeyPatch, sliced: int) -> None:
        monkeypatch.setattr("recspec.models.layers.events.SLICED", sliced)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("target_dim", [3, 2])
    def test_is_an_mlp_of_event_target_difference_and_product(
        self, form: str, kind: Activation, target_dim: int
    ) -> None:
        torch.manual_seed(0)
        unit = AttentionUnit(3, target_dim, (5, 4), kind)
        for parameter in unit.parameters():
            torch.nn.init.normal_(parameter)
        events = FORMS[form](present_of("some"))
        happened = torch.randn(events.num_events, 3, requires_grad=True)
        target = torch.randn(4, target_dim, requires_grad=True)
        wide = unit.project_target(target)[events.rows]
        joined = torch.cat([happened, wide, happened - wide, happened * wide], dim=1)
        wanted = unit.out(unit.mlp.after_first(unit.mlp.first(joined), events.mask)).squeeze(1)
        got = unit(happened, target, events)
        kept = events.mask if events.mask is not None else torch.ones(events.num_events, dtype=torch.bool)
        torch.testing.assert_close(got[kept], wanted[kept])
        leaves = (happened, target, *unit.parameters())
        for ours, theirs in zip(
            torch.autograd.grad(got[kept].square().sum(), leaves),
            torch.autograd.grad(wanted[kept].square().sum(), leaves),
            strict=True,
        ):
            # A gradient sums terms of both signs, so its rounding is that of the largest ones.
            torch.testing.assert_close(ours, theirs, atol=1e-4 * max(1.0, theirs.abs().max().item()), rtol=1e-4)

    def test_a_case_by_hand(self, form: str) -> None:
        unit = AttentionUnit(1, 1, (1,), "relu")
        with torch.no_grad():
            unit.mlp.first.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
            unit.mlp.first.bias.fill_(0.5)
            unit.out.weight.fill_(2.0)
            unit.out.bias.fill_(-1.0)
        events = FORMS[form](torch.tensor([[True]]))
        # h = 2, t = 3: 2 + 6 - 3 + 24 + 0.5 = 29.5, times 2, minus 1.
        assert unit(torch.tensor([[2.0]]), torch.tensor([[3.0]]), events).tolist() == [58.0]

    def test_any_histories_have_weights_and_gradients(self, form: str) -> None:
        for kind, name in product(KINDS, PRESENT):
            events = FORMS[form](present_of(name))
            unit = AttentionUnit(3, 3, (4, 2), kind)
            happened = torch.randn(events.num_events, 3, requires_grad=True)
            target = torch.randn(events.num_rows, 3, requires_grad=True)
            weights = unit(happened, target, events)
            assert weights.shape == (events.num_events,), (kind, name)
            events.weighted_sum(happened, weights).sum().backward()  # type: ignore[no-untyped-call]
            slopes = [each.grad for each in (happened, target, *unit.parameters()) if each.grad is not None]
            assert all(torch.isfinite(each).all() for each in slopes), (kind, name)


@pytest.mark.parametrize("name", PRESENT)
@pytest.mark.parametrize("hidden", [(4,), (4, 3)])
def test_the_auxiliary_loss_by_blocks_is_that_of_all_events_at_once(
    name: str, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recspec.models.layers.events.BLOCK", 2)
    torch.manual_seed(0)
    events, network = jagged_events(present_of(name)), NextEvent(2, 3, hidden).double()
    given = [torch.randn(events.num_events, width, dtype=torch.float64, requires_grad=True) for width in (2, 3, 3)]
    leaves = [*given, *network.parameters()]
    found = []
    for sliced in (0, 10**9):
        monkeypatch.setattr("recspec.models.layers.events.SLICED", sliced)
        loss = network(*given, events)
        found.append([loss, *torch.autograd.grad(3 * loss, leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=False, atol=1e-6, rtol=1e-5)
