"""DIEN: its two recurrences, the auxiliary loss, what it reads and when."""

from __future__ import annotations

import math

import pytest
import torch

from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.dien import Dien, DienSettings
from recspec.models.layers.batch import Batch
from recspec.models.layers.event_networks import NextEvent
from recspec.models.layers.events import jagged_events, padded_events
from tests.models.test_din import ITEM, a_batch, a_spec

SMALL = {"embedding_dim": 3, "hidden": (6, 4), "attention_hidden": (5,), "auxiliary_hidden": (4,)}


def a_dien(spec: FeatureSpec | None = None, **settings: object) -> Dien:
    torch.manual_seed(0)
    model = Dien(spec or a_spec(), DienSettings.model_validate({**SMALL, **settings}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def without_negatives() -> FeatureSpec:
    spec = a_spec()
    channels = {name: members for name, members in spec.channels.items() if name != "negative_history"}
    return spec.replace(channels=channels)


@pytest.mark.parametrize("gru_hidden", [None, 4])
@pytest.mark.parametrize("softmax", [False, True])
def test_is_the_formula_row_by_row(gru_hidden: int | None, softmax: bool) -> None:
    model, batch = a_dien(gru_hidden=gru_hidden, softmax=softmax), a_batch()
    tables, evolution = model.inputs.embeddings, model.evolution
    assert evolution.hidden_dim == (gru_hidden or 6)
    rows = []
    for row in range(6):
        there = batch["history_item_id"][row] != 0
        one = jagged_events(there[there].unsqueeze(0))
        target = tables({name: batch[name][row : row + 1] for name in ("item_id", "category")}, ("item_id", "category"))
        ids = {"item_id": batch["history_item_id"][row][there], "category": batch["history_category"][row][there]}
        states = evolution.gru(tables(ids, ids), one)[0]
        weights = evolution.unit(states, target, one)
        weights = weights.softmax(0) if softmax else weights.sigmoid()
        rows.append(torch.cat([target[0], evolution.augru(states, one, weights)[1][0]]))
    wanted = model.head(torch.cat([torch.stack(rows), model.inputs(batch, [model.histories.target(batch)])[1]], dim=1))
    torch.testing.assert_close(model(batch), wanted)


@pytest.mark.parametrize("floats", [1, 1000, 1 << 22], ids=["a request", "some", "all"])
def test_scores_items_as_pairs(floats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.models.base.SCORE_FLOATS", floats)
    model, batch = a_dien(), a_batch(11)
    items = {name: batch[name] for name in ITEM}
    request = {name: value[:5] for name, value in batch.items() if name in model.features() and name not in ITEM}
    torch.testing.assert_close(model.score_items(request, items), model.pair_scores(request, items))
    assert model.score_items({name: value[:0] for name, value in request.items()}, items).shape == (0, 11)


def test_reads_the_latest_events_alone() -> None:
    model, whole = a_dien(length=2), a_dien()
    batch = a_batch()
    latest = dict(batch)
    for name in ("history_item_id", "history_category"):
        rows = [ids[ids != 0][-2:] for ids in batch[name]]
        latest[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    torch.testing.assert_close(model(batch), whole(latest))
    assert not torch.allclose(model(batch), whole(batch))


class TestAuxiliaryLoss:
    def test_a_case_by_hand(self) -> None:
        """Rows of three, one and two events; the network's logit is the state plus the event."""
        network = NextEvent(1, 1, (1,))
        network.mlp.activations[0] = torch.nn.Identity()
        with torch.no_grad():
            network.mlp.first.weight.fill_(1.0)
            network.out.weight.fill_(1.0)
        present = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
        states = torch.tensor([[0.1, 0.2, 9.0], [9.0, 9.0, 9.0], [0.3, 9.0, 9.0]])
        happened = torch.tensor([[7.0, 1.0, 2.0], [7.0, 7.0, 7.0], [7.0, 3.0, 7.0]])
        sampled = torch.tensor([[7.0, -1.0, -2.0], [7.0, 7.0, 7.0], [7.0, -3.0, 7.0]])

        def pair(state: float, right: float, wrong: float) -> float:
            return math.log1p(math.exp(-(state + right))) + math.log1p(math.exp(state + wrong))

        first = (pair(0.1, 1.0, -1.0) + pair(0.2, 2.0, -2.0)) / 2
        wanted = (first + 0 + pair(0.3, 3.0, -3.0)) / 3
        for events in (jagged_events(present), padded_events(present)):
            flat = [events.flat(each.unsqueeze(2)) for each in (states, happened, sampled)]
            assert network(*flat, events).item() == pytest.approx(wanted, abs=1e-6)

    def test_is_added_with_its_weight(self) -> None:
        batch = a_batch()
        losses = [a_dien(auxiliary=weight).loss(batch).item() for weight in (0.5, 1.0, 2.0)]
        assert losses[1] - losses[0] == pytest.approx((losses[2] - losses[1]) / 2, abs=1e-5)
        assert losses[1] > losses[0]

    def test_of_sure_and_wrong_logits_is_a_number(self) -> None:
        model = a_dien()
        with torch.no_grad():
            model.next_event.out.weight.mul_(1e6)
        loss = model.loss(a_batch())
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)

    def test_of_a_batch_is_that_of_its_rows(self) -> None:
        """So two processes that share a batch get what one gets."""
        model, batch = a_dien(), a_batch(6)
        halves = [model.loss({name: value[part] for name, value in batch.items()}) for part in (slice(2), slice(2, 6))]
        torch.testing.assert_close((2 * halves[0] + 4 * halves[1]) / 6, model.loss(batch))

    def test_is_read_by_training_alone(self) -> None:
        model = a_dien()
        sampled = {"negative_history_item_id", "negative_history_category"}
        assert not set(model.features()) & sampled
        assert set(model.loss_needs().features) == set(model.features()) | sampled
        assert not set(a_dien(auxiliary=0.0).loss_needs().features) & sampled

    def test_without_sampled_ids_there_is_none_unless_asked_for(self) -> None:
        model = a_dien(without_negatives())
        assert model.auxiliary == 0.0
        assert not hasattr(model, "next_event")
        some: Batch = {name: value for name, value in a_batch().items() if not name.startswith("negative")}
        assert torch.isfinite(model.loss(some))
        with pytest.raises(
            SettingsError,
            match=r"dien: auxiliary is 0.5, and no feature plays the role 'negative_hi.*"
            r"prepare the dataset with --set negative_history=true, or set auxiliary to 0",
        ):
            a_dien(without_negatives(), auxiliary=0.5)


def test_the_published_sizes() -> None:
    model = Dien(a_spec(), DienSettings(gru_hidden=96, length=10))
    assert model.evolution.gru.weight_x.shape == (3 * 96, 32)
    assert model.evolution.unit.bring.first.weight.shape == (96, 32)
    assert model.evolution.unit.mlp.first.weight.shape == (80, 4 * 96)
    assert model.next_event.mlp.first.weight.shape == (100, 96 + 32)
    with pytest.raises(ValueError, match="every width is at least 1"):
        DienSettings(auxiliary_hidden=(0,))
