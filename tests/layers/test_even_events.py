"""Even events: few numbers of rows from batch to batch, and the losses and gradients of all other forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recspec.models.layers.event_networks import AttentionUnit, Gru, NextEvent
from recspec.models.layers.events import BLOCK, _even_steps, _even_together, events_of, jagged_events
from recspec.models.layers.hand_written import own_precision
from recspec.models.layers.mlp import Activation


@given(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=30), st.integers(0, 500))
def test_steps_grow_by_an_eighth_at_most_and_have_few_numbers_of_rows(sizes: list[int], more: int) -> None:
    sizes = sorted(sizes, reverse=True)
    most = sizes[0] + more
    for evened in (_even_steps, _even_together):
        found = evened(sizes, most)
        assert all(size <= new <= most for size, new in zip(sizes, found, strict=True))
        assert found == sorted(found, reverse=True)
        assert sum(found) <= sum(sizes) + sum(max(32, size / 4) for size in sizes)
    last_blocks = {new % BLOCK for new in _even_steps(sizes, most) if new != most}
    assert last_blocks <= {
        0,
        *range(32, 257, 32),
        *range(320, 513, 64),
        *range(640, 1025, 128),
        *range(1280, 2048, 256),
    }


@pytest.mark.parametrize(("rows", "length"), [(900, 12), (40, 9)], ids=["even steps", "even together"])
@pytest.mark.parametrize("kind", ["sigmoid", "prelu", "dice"])
def test_even_events_train_as_the_others_do(rows: int, length: int, kind: Activation) -> None:
    torch.manual_seed(0)
    lengths = (torch.rand(rows) ** 2 * (length + 1)).long()
    present = torch.rand(rows, length) < (lengths / length).unsqueeze(1)
    vectors, sampled = torch.randn(2, rows, length, 4, dtype=torch.float64).unbind(0)
    target = torch.randn(rows, 4, dtype=torch.float64)

    def losses_and_gradients(even: bool) -> list[Tensor]:
        torch.manual_seed(1)
        first, second, unit, after = Gru(4, 4), Gru(4, 4), AttentionUnit(4, 4, (6, 3), kind), NextEvent(4, 4, (6, 3))
        modules = [each.double() for each in (first, second, unit, after)]
        given_ = [each.clone().requires_grad_() for each in (vectors, sampled, target)]
        events = jagged_events(present, even=even)
        assert events.in_even_steps == (even and rows > 100)
        assert (events.num_events > int(present.sum())) == even
        happened, wrong = events.flat(given_[0]), events.flat(given_[1])
        states, last = first(happened, events)
        weights = unit(states, given_[2], events)
        evolved = [second(states, events, each)[1] for each in (events.softmax(weights), weights.sigmoid())]
        found = [last, *evolved, events.weighted_sum(happened, weights), events.sum(states)]
        losses = [each.sin().sum() for each in found] + [after(states, happened, wrong, events)]
        leaves = [*given_, *(parameter for module in modules for parameter in module.parameters())]
        return [*losses, *torch.autograd.grad(torch.stack(losses).sum(), leaves)]

    for ours, theirs in zip(losses_and_gradients(True), losses_and_gradients(False), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_events_are_even_where_products_go_through_onednn() -> None:
    present = torch.arange(10) < torch.arange(300).unsqueeze(1) % 10
    x = torch.zeros(1)
    assert events_of(present).held is None
    torch.set_float32_matmul_precision("medium")
    try:
        large, small = events_of(present), events_of(present[:20])
        assert (large.in_even_steps, small.in_even_steps, small.held is None) == (True, False, False)
        large_by_blas, small_by_blas = (events_of(each, through_onednn=False) for each in (present, present[:20]))
        assert large_by_blas.held is None
        assert large_by_blas.in_large_steps
        assert small_by_blas.held is not None  # autocast sends them to oneDNN whatever products over large steps do
        with own_precision(x, large):
            assert torch.get_float32_matmul_precision() == "medium"
        for events in (small, None):
            with own_precision(x, events):
                assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")
