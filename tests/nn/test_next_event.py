"""The auxiliary network of DIEN."""

from __future__ import annotations

import pytest
import torch

from recspec.nn.events import jagged_events
from recspec.nn.next_event import NextEvent
from tests.nn.present import PRESENT, present_of


@pytest.mark.parametrize("name", PRESENT)
@pytest.mark.parametrize("hidden", [(4,), (4, 3)])
def test_the_auxiliary_loss_by_blocks_is_that_of_all_events_at_once(
    name: str, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recspec.nn.events.BLOCK", 2)
    torch.manual_seed(0)
    events, network = jagged_events(present_of(name)), NextEvent(2, 3, hidden).double()
    given = [torch.randn(events.num_events, width, dtype=torch.float64, requires_grad=True) for width in (2, 3, 3)]
    leaves = [*given, *network.parameters()]
    found = []
    for sliced in (0, 10**9):
        monkeypatch.setattr("recspec.nn.events.SLICED", sliced)
        loss = network(*given, events)
        found.append([loss, *torch.autograd.grad(3 * loss, leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=False, atol=1e-6, rtol=1e-5)
