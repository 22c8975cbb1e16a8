"""Recurrences over histories."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recspec.models.layers.event_networks import Gru
from recspec.models.layers.events import jagged_events
from recspec.models.layers.hand_written import last_states
from tests.layers.present import FORMS, PRESENT, present_of


def a_gru(input_dim: int = 3, hidden_dim: int = 2, dtype: torch.dtype = torch.float64) -> Gru:
    torch.manual_seed(0)
    made = Gru(input_dim, hidden_dim).to(dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def by_hand(made: Gru, x: Tensor, attention: Tensor | None, present: Tensor) -> Tensor:
    """Last states (B, H): the formula, event by event."""
    last = []
    for row, there in enumerate(present):
        h = x.new_zeros(made.hidden_dim)
        for column in there.nonzero().squeeze(1).tolist():
            x_u, x_r, x_c = (made.weight_x @ x[row, column] + made.bias).chunk(3)
            u_u, u_r, u_c = made.weight_h.chunk(3)
            u, r = torch.sigmoid(x_u + u_u @ h), torch.sigmoid(x_r + u_r @ h)
            u = u if attention is None else u * attention[row, column]
            h = (1 - u) * h + u * torch.tanh(x_c + r * (u_c @ h))
        last.append(h)
    return torch.stack(last) if last else x.new_zeros(0, made.hidden_dim)


@pytest.mark.parametrize("name", PRESENT)
@pytest.mark.parametrize("form", FORMS)
class TestGru:
    @pytest.mark.parametrize("attentive", [False, True])
    def test_is_its_formula_event_by_event(self, form: str, name: str, attentive: bool) -> None:
        present, made = present_of(name), a_gru()
        events = FORMS[form](present)
        x = torch.randn(*present.shape, 3, dtype=torch.float64, requires_grad=True)
        attention = torch.rand(present.shape, dtype=torch.float64, requires_grad=True) if attentive else None
        wanted = by_hand(made, x, attention, present)
        states, last = made(events.flat(x), events, None if attention is None else events.flat(attention))
        torch.testing.assert_close(last, wanted)
        ends = events.padded(states)
        for row, there in enumerate(present):
            if there.any():
                torch.testing.assert_close(ends[row][there][-1], wanted[row])
        leaves = [x, *made.parameters(), *([] if attention is None else [attention])]
        if not present.any():
            return
        ours = torch.autograd.grad(last.sin().sum(), leaves)
        theirs = torch.autograd.grad(wanted.sin().sum(), leaves)
        for got, want in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, want)

    def test_gradients_of_states_and_last_states_are_right(self, form: str, name: str) -> None:
        made, events = a_gru(2, 2), FORMS[form](present_of(name))
        x = torch.randn(events.num_events, 2, dtype=torch.float64, requires_grad=True)
        attention = torch.rand(events.num_events, dtype=torch.float64, requires_grad=True)
        parameters = [parameter.detach().requires_grad_() for parameter in made.parameters()]
        names = [key for key, _ in made.named_parameters()]

        def run(x: Tensor, attention: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
            found = torch.func.functional_call(made, dict(zip(names, values, strict=True)), (x, events, attention))
            states, last = found
            return events.sum(states), last  # places without an event have states that nobody reads

        if events.num_events and events.num_rows:
            assert torch.autograd.gradcheck(run, (x, attention, *parameters))


def test_without_attention_it_is_the_gru_of_torch() -> None:
    made = a_gru(3, 4)
    theirs = torch.nn.GRU(3, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():  # torch's update gate says what stays: sigmoid(-x) = 1 - sigmoid(x); its order is r, z, n
        for own, other in ((made.weight_x, theirs.weight_ih_l0), (made.weight_h, theirs.weight_hh_l0)):
            other.copy_(torch.cat([own[4:8], -own[:4], own[8:]]))
        theirs.bias_ih_l0.copy_(torch.cat([made.bias[4:8], -made.bias[:4], made.bias[8:]]))
        theirs.bias_hh_l0.zero_()
    lengths = torch.tensor([3, 1, 3, 2])
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    events = jagged_events(torch.arange(3) < lengths.unsqueeze(1))
    states, last = made(events.flat(x), events)
    torch.testing.assert_close(last, theirs(packed)[1][0])
    torch.testing.assert_close(states, theirs(packed)[0].data)


def test_recurrences_stay_in_fp32_under_autocast() -> None:
    made, events = a_gru(dtype=torch.float32), jagged_events(torch.ones(2, 3, dtype=torch.bool))
    x = torch.randn(6, 3)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = made(x.bfloat16(), events)[1]
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, made(x.bfloat16().float(), events)[1])


@pytest.mark.parametrize("name", PRESENT)
def test_a_recurrence_by_blocks_is_that_of_all_rows_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = a_gru(2, 3), []
    torch.manual_seed(0)
    x = torch.randn(int(present_of(name).sum()), 2, dtype=torch.float64, requires_grad=True)
    attention = torch.rand(len(x), dtype=torch.float64, requires_grad=True)
    for rows in (1, 2, 100):
        monkeypatch.setattr("recspec.models.layers.events.BLOCK", rows)
        states, last = made(x, jagged_events(present_of(name)), attention)
        loss = (states.sin().sum() + last.cos().sum(), [x, attention, *made.parameters()])
        found.append([states, last, *torch.autograd.grad(*loss)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_an_empty_history_ends_in_zeros_beside_what_is_no_number() -> None:
    # Histories of 2, 1 and 0 events; the second event of the first row is broken.
    events = jagged_events(torch.tensor([[True, True], [True, False], [False, False]]))
    states = torch.tensor([[1.0], [2.0], [float("nan")]])
    assert last_states(states, events)[1:].tolist() == [[2.0], [0.0]]
    assert last_states(states, events)[0].isnan().all()
