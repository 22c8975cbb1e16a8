"""A request's events against all items: the same numbers as the networks give pair by pair."""

import pytest
import torch

from recspec.models.layers import (
    AfterFirst,
    AttentionUnit,
    Gru,
    attention_to_items,
    event_networks,
    events_of,
    last_states_of_items,
    weighted_sums,
)
from recspec.models.layers.mlp import ActivatedMlp


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pairs(states: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of every item's copy of the events, in the order of `events_of`, and the events."""
    events = events_of(torch.ones(len(target), len(states), dtype=torch.bool))
    return events, events.flat(states.expand(len(target), -1, -1))


@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("kind", ["sigmoid", "relu", "prelu", "dice"])
def test_weights_are_those_of_the_pairs(kind: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = AttentionUnit(4, 6, (8, 5), kind).eval()
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    happened, target = torch.randn(length, 4), torch.randn(7, 6)
    with torch.inference_mode():
        events, copies = pairs(happened, target)
        wanted = events.padded(unit(copies, target, events)).t()
        projected = unit.project_target(target)
        torch.testing.assert_close(attention_to_items(unit, happened, projected), wanted, atol=1e-5, rtol=1e-5)
        monkeypatch.setattr(event_networks, "FLOATS", 1)
        monkeypatch.setattr(event_networks, "EVENTS", 2)
        torch.testing.assert_close(attention_to_items(unit, happened, projected), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_last_states_are_those_of_the_pairs(length: int) -> None:
    gru = Gru(4, 5)
    for parameter in gru.parameters():
        torch.nn.init.normal_(parameter)
    happened, weights = torch.randn(length, 4), torch.rand(length, 7)
    with torch.inference_mode():
        events, copies = pairs(happened, weights.t())
        wanted = gru(copies, events, events.flat(weights.t().unsqueeze(2)).squeeze(1))[1]
        torch.testing.assert_close(last_states_of_items(gru, happened, weights), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 4, 5, 9])  # of fewer events than their width, the columns are multiplied first
@pytest.mark.parametrize("heads", [1, 3])
def test_a_layers_product_of_weighted_sums_is_that_of_the_sums(heads: int, length: int) -> None:
    weights, vectors, columns = torch.randn(heads, length, 7), torch.randn(length, 4), torch.randn(6, heads * 4)
    made, of_made = weighted_sums(iter(weights), vectors, columns)
    wanted = torch.einsum("hln,ld,vhd->nv", weights, vectors, columns.view(6, heads, 4))
    torch.testing.assert_close(made @ of_made.t(), wanted, atol=1e-5, rtol=1e-5)
    assert made.shape[1] == heads * min(length, 4)


def test_without_events_there_are_no_weights_and_the_state_is_zero() -> None:
    unit, gru, nothing = AttentionUnit(4, 4, (8,), "sigmoid").eval(), Gru(4, 5), torch.zeros(0, 4)
    with torch.inference_mode():
        assert attention_to_items(unit, nothing, torch.randn(3, 4)).shape == (0, 3)
        assert torch.equal(last_states_of_items(gru, nothing, torch.zeros(0, 3)), torch.zeros(3, 5))


def test_logits_are_those_of_the_modules() -> None:
    mlp, out = ActivatedMlp((4, 6, 3), "prelu").eval(), torch.nn.Linear(3, 1)
    x = torch.randn(9, 4)
    with torch.inference_mode():
        found = AfterFirst(mlp, out)(mlp.first(x))
        torch.testing.assert_close(found, out(mlp(x)).squeeze(1))
