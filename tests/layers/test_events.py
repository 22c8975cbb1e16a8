"""The jagged form and the padded one."""

from __future__ import annotations

import pytest
import torch

from recspec.models.layers.events import Events, jagged_events
from tests.layers.present import FORMS, PRESENT, present_of


@pytest.mark.parametrize("name", PRESENT)
class TestEvents:
    """Both forms give what a loop over rows gives."""

    def test_jagged_events_stand_step_by_step_longest_history_first(self, name: str) -> None:
        present = present_of(name)
        events = jagged_events(present)
        lengths = present.sum(1)
        order = sorted(range(len(present)), key=lambda row: -int(lengths[row]))
        wanted = [(step, row) for step in range(present.shape[1]) for row in order if step < lengths[row]]
        assert events.rows.tolist() == [row for _, row in wanted]
        columns = [present[row].nonzero().squeeze(1)[step] for step, row in wanted]
        assert events.places.tolist() == [
            row * present.shape[1] + int(column) for (_, row), column in zip(wanted, columns, strict=True)
        ]
        assert sum(events.sizes) == events.num_events == int(present.sum())

    @pytest.mark.parametrize("form", FORMS)
    def test_sums_and_shares_are_those_of_each_row(self, name: str, form: str) -> None:
        present = present_of(name)
        torch.manual_seed(0)
        values, scores = torch.randn(*present.shape, 3), torch.randn(present.shape)
        events = FORMS[form](present)
        x, own = events.flat(values), events.flat(scores)
        wanted = [values[row][present[row]].sum(0) for row in range(len(present))]
        sums = events.sum(x)
        assert sums.shape == (len(present), 3)
        for row, want in enumerate(wanted):
            torch.testing.assert_close(sums[row], want)
        shares = events.padded(events.softmax(own))
        for row in range(len(present)):
            torch.testing.assert_close(shares[row][present[row]], scores[row][present[row]].softmax(0))
        assert (shares[~present] == 0).all()
        torch.testing.assert_close(events.padded(x, -1.0), torch.where(present.unsqueeze(2), values, -1.0))

    @pytest.mark.parametrize("form", FORMS)
    def test_what_a_row_has_is_spread_to_its_events(self, name: str, form: str) -> None:
        events = FORMS[form](present_of(name))
        x = torch.randn(events.num_rows, 2)
        assert torch.equal(events.spread(x), x[events.rows])

    @pytest.mark.parametrize("form", FORMS)
    def test_gradients_are_right(self, name: str, form: str) -> None:
        events = FORMS[form](present_of(name))
        per_event = torch.randn(events.num_events, 2, dtype=torch.float64, requires_grad=True)
        per_row = torch.randn(events.num_rows, 2, dtype=torch.float64, requires_grad=True)
        scores = torch.randn(events.num_events, dtype=torch.float64, requires_grad=True)
        for function, value in ((events.sum, per_event), (events.spread, per_row), (events.softmax, scores)):
            if value.numel():
                assert torch.autograd.gradcheck(function, (value,))

    @pytest.mark.parametrize("form", FORMS)
    def test_each_event_has_its_successor(self, name: str, form: str) -> None:
        present = present_of(name) & (present_of(name).cumsum(1) == torch.arange(1, present_of(name).shape[1] + 1))
        events: Events = FORMS[form](present)
        earlier, later = events.successors()
        follows = events.follows(earlier, later)
        every = torch.arange(events.num_events)
        earlier, later = every[earlier], every[later]
        if follows is not None:
            earlier, later = earlier[follows], later[follows]
        pairs = sorted(zip(events.places[earlier].tolist(), events.places[later].tolist(), strict=True))
        width = present.shape[1]
        assert pairs == [
            (row * width + step, row * width + step + 1)
            for row in range(len(present))
            for step in range(int(present[row].sum()) - 1)
        ]


@pytest.mark.parametrize("name", PRESENT)
def test_a_weighted_sum_has_the_gradient_of_its_formula(name: str) -> None:
    events = jagged_events(present_of(name))
    x = torch.randn(events.num_events, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(events.num_events, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(events.weighted_sum(x, weights), events.sum(x * weights.unsqueeze(1)))
    if events.num_events:
        assert torch.autograd.gradcheck(events.weighted_sum, (x, weights))
