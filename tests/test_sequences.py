"""Histories as events: what belongs together, the jagged form and the padded one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from recspec.batch import Batch
from recspec.errors import SpecError
from recspec.feature_spec import FeatureSpec
from recspec.layers import Embeddings
from recspec.sequences import (
    ActivatedMlp,
    Activation,
    AttentionUnit,
    Dice,
    Events,
    Gru,
    Histories,
    NextEvent,
    _last,
    follow_together,
    jagged_events,
    padded_events,
)

FORMS = {"jagged": jagged_events, "padded": padded_events}


def a_spec(**changed: object) -> FeatureSpec:
    features: dict[str, dict[str, object]] = {
        "user_id": {"cardinality": 7},
        "item_id": {"cardinality": 12},
        "category": {"cardinality": 5},
        "history_category": {"cardinality": 5, "vocabulary": "category", "length": 4, "padding": 0},
        "history_item_id": {"cardinality": 12, "vocabulary": "item_id", "length": 4, "padding": 0},
        "negative_history_item_id": {"cardinality": 12, "vocabulary": "item_id", "length": 4, "padding": 0},
        "negative_history_category": {"cardinality": 5, "vocabulary": "category", "length": 4, "padding": 0},
        "history_gap": {"dtype": "float32", "length": 4},
        "label": {"dtype": "float32"},
    }
    channels = {
        "user": ["user_id"],
        "item": ["item_id", "category"],
        "history": ["history_category", "history_item_id", "history_gap"],
        "negative_history": ["negative_history_item_id", "negative_history_category"],
        "label": ["label"],
    }
    return FeatureSpec.from_dict({"feature_spec": features, "channel_spec": {**channels, **changed}})


def a_batch() -> Batch:
    """Rows of two, no, four and one events."""
    return {
        "user_id": torch.tensor([1, 2, 3, 4]),
        "item_id": torch.tensor([5, 6, 7, 8]),
        "category": torch.tensor([1, 2, 3, 4]),
        "history_item_id": torch.tensor([[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]]),
        "history_category": torch.tensor([[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 1, 2], [3, 0, 0, 0]]),
        "negative_history_item_id": torch.tensor([[8, 9, 0, 0], [0, 0, 0, 0], [9, 8, 7, 1], [2, 0, 0, 0]]),
        "negative_history_category": torch.tensor([[4, 3, 0, 0], [0, 0, 0, 0], [2, 1, 1, 2], [3, 0, 0, 0]]),
        "history_gap": torch.tensor([[2.0, 1, 0, 0], [0, 0, 0, 0], [4, 3, 2, 1], [0.5, 0, 0, 0]]),
        "label": torch.tensor([1.0, 0, 1, 0]),
    }


PRESENT: dict[str, list[list[int]]] = {
    "some": [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    "holes": [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]],
    "ties": [[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]],
    "one row": [[1, 1, 0]],
    "one empty row": [[0, 0, 0]],
    "all empty": [[0, 0], [0, 0]],
    "no place": [[], []],
    "no row": [],
}


def present_of(name: str) -> Tensor:
    rows = PRESENT[name]
    return torch.tensor(rows, dtype=torch.bool).view(len(rows), len(rows[0]) if rows else 3)


class TestHistories:
    def test_belong_to_the_item_features_of_their_vocabulary(self) -> None:
        found = Histories(a_spec(), "Din")
        assert found.pairs == {"item_id": "history_item_id", "category": "history_category"}
        assert found.negatives == {"item_id": "negative_history_item_id", "category": "negative_history_category"}
        assert (found.mark, found.gaps) == ("history_item_id", ("history_gap",))
        assert found.features == ("history_item_id", "history_category", "history_gap")
        assert found.ids_per_event == {"item_id": 8, "category": 8}

    def test_without_shared_vocabularies_belong_by_order(self) -> None:
        spec = FeatureSpec.from_dict(
            {
                "feature_spec": {
                    "item": {"cardinality": 12},
                    "cat": {"cardinality": 5},
                    "item_seen": {"cardinality": 12, "dimensions": [4]},
                    "cat_seen": {"cardinality": 5, "dimensions": [4]},
                    "label": {},
                },
                "channel_spec": {
                    "target_item_features": ["item", "cat"],
                    "positive_history": ["item_seen", "cat_seen"],
                    "label": ["label"],
                },
            }
        )
        found = Histories(spec, "Din")
        assert (found.pairs, found.negatives) == ({"item": "item_seen", "cat": "cat_seen"}, {})
        # The reader shifts the lists' ids by one, so that 0 is padding, and leaves the scalars' as they are.
        assert (spec.shift("item"), spec.shift("item_seen")) == (0, 1)
        assert found.spec.num_ids("item") == 13
        ids = found.target({"item": torch.tensor([0, 3]), "cat": torch.tensor([1, 1])})
        assert (ids["item"].tolist(), ids["cat"].tolist()) == ([1, 4], [2, 2])

    def test_that_belong_to_no_item_feature_are_named(self) -> None:
        with pytest.raises(SpecError, match="'history_category' in the role 'history' shares its vocabulary with no"):
            Histories(a_spec(item=["item_id"], negative_history=[]), "Din")
        with pytest.raises(SpecError, match="'negative_history' shares the vocabulary of 'history_category'; exp"):
            Histories(a_spec(negative_history=["negative_history_item_id"]), "Din")
        with pytest.raises(SpecError, match="'history' holds no list of ids; expected one for an item feature"):
            Histories(a_spec(history=["history_gap"], negative_history=[]), "Din")
        with pytest.raises(SpecError, match="share a vocabulary; expected one of them for 'item_id'"):
            Histories(a_spec(history=["history_item_id", "negative_history_item_id"], negative_history=[]), "Din")
        with pytest.raises(SpecError, match="Din needs a feature in the role 'history'"):
            Histories(a_spec(history=[]), "Din")

    @pytest.mark.parametrize("others", [(), ("user_id",)])
    def test_vectors_are_those_of_one_table_a_vocabulary(self, others: tuple[str, ...]) -> None:
        found, batch = Histories(a_spec(), "Din"), a_batch()
        tables = Embeddings(found.spec, {"item_id": 3, "category": 2, "user_id": 2}, more_ids=found.ids_per_event)
        assert tables.ids_per_row("3") == 9
        events = found.events(batch)
        got = found.vectors(tables, batch, events, sampled=True, others=others)
        assert got.target is not None
        assert got.events is not None
        assert got.sampled is not None
        assert got.target.shape == (4, 5)
        assert got.events.shape == got.sampled.shape == (7, 5)
        for ids, categories, vectors in (
            ("item_id", "category", got.target),
            ("history_item_id", "history_category", got.events),
            ("negative_history_item_id", "negative_history_category", got.sampled),
        ):
            flat = {"item_id": batch[ids], "category": batch[categories]}
            if flat["item_id"].dim() == 2:
                flat = {name: events.flat(value) for name, value in flat.items()}
            assert torch.equal(vectors, tables(flat, ("item_id", "category")))
        assert got.others is None if not others else torch.equal(got.others, tables(batch, others))  # type: ignore[arg-type]

    def test_only_what_is_asked_for_is_looked_up(self) -> None:
        found, batch = Histories(a_spec(), "Din"), a_batch()
        tables = Embeddings(found.spec, dict.fromkeys(found.pairs, 2))
        items = {name: batch[name] for name in ("item_id", "category")}
        assert found.vectors(tables, items).target is not None
        request = {name: value for name, value in batch.items() if name not in items}
        got = found.vectors(tables, request, found.events(request), target=False)
        assert (got.target is None, got.events is None, got.sampled is None) == (True, False, True)

    @pytest.mark.parametrize(("last", "but_last", "kept"), [
        (2, 0, [[1, 2], [], [5, 6], [7]]),
        (1, 1, [[1], [], [5], []]),
        (None, 2, [[], [], [3, 4], []]),
        (None, 0, [[1, 2], [], [3, 4, 5, 6], [7]]),
    ])  # fmt: skip
    def test_the_latest_events_alone(self, last: int | None, but_last: int, kept: list[list[int]]) -> None:
        events = Histories(a_spec(), "Din").events(batch := a_batch(), last=last, but_last=but_last)
        items, rows = events.flat(batch["history_item_id"]), events.rows
        assert [items[rows == row].tolist() for row in range(4)] == kept
        assert events.lengths.tolist() == [len(row) for row in kept]

    def test_gaps_stand_beside_their_events(self) -> None:
        found, batch = Histories(a_spec(), "Din"), a_batch()
        events = found.events(batch)
        assert events.rows.tolist() == [2, 0, 3, 2, 0, 2, 2]
        assert found.gap_values(batch, events).squeeze(1).tolist() == [4, 2, 0.5, 3, 1, 2, 1]


@pytest.mark.parametrize("sliced", [0, 10**9], ids=["step by step", "event by event"])
@pytest.mark.parametrize("name", PRESENT)
class TestEvents:
    """Both forms, and both ways of the jagged one, give what a loop over rows gives."""

    @pytest.fixture(autouse=True)
    def _choose(self, monkeypatch: pytest.MonkeyPatch, sliced: int) -> None:
        monkeypatch.setattr("recspec.sequences.SLICED", sliced)

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
    def test_sums_means_and_shares_are_those_of_each_row(self, name: str, form: str) -> None:
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
            torch.testing.assert_close(events.mean(x)[row], want / max(1, int(present[row].sum())))
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
        if follows is not None:
            earlier, later = earlier[follows], later[follows]
        pairs = sorted(zip(events.places[earlier].tolist(), events.places[later].tolist(), strict=True))
        width = present.shape[1]
        assert pairs == [
            (row * width + step, row * width + step + 1)
            for row in range(len(present))
            for step in range(int(present[row].sum()) - 1)
        ]


# --- what an event weighs --------------------------------------------------------------------------------------------


class TestDice:
    def test_standardises_by_the_rows_given_while_training_and_by_running_values_else(self) -> None:
        dice = Dice(2, momentum=0.5, eps=0.0)
        with torch.no_grad():
            dice.slope.copy_(torch.tensor([0.0, 0.5]))
        x = torch.tensor([[1.0, 0.0], [3.0, 4.0]])  # means 2 and 2, variances 1 and 4
        low, high = torch.sigmoid(torch.tensor(-1.0)).item(), torch.sigmoid(torch.tensor(1.0)).item()
        wanted = torch.tensor([[low * 1, 0.0], [high * 3, 4 * (high + (1 - high) * 0.5)]])
        torch.testing.assert_close(dice(x), wanted)
        torch.testing.assert_close(dice.mean, torch.tensor([1.0, 1.0]))
        torch.testing.assert_close(dice.variance, torch.tensor([1.0, 2.5]))
        running = dice.eval()(x[:1])
        torch.testing.assert_close(running, dice(x)[:1])
        torch.testing.assert_close(running[0, 0], torch.sigmoid(torch.tensor(0.0)))

    def test_one_row_and_no_row_leave_numbers(self) -> None:
        dice = Dice(3)
        assert torch.isfinite(dice(torch.randn(1, 3))).all()
        before = dice.mean.clone()
        assert dice(torch.zeros(0, 3)).shape == (0, 3)
        assert torch.equal(dice.mean, before)

    def test_places_without_an_event_do_not_count(self) -> None:
        x, present = torch.randn(9, 3), torch.tensor([True, False, True] * 3)
        with_places, alone = Dice(3), Dice(3)
        torch.testing.assert_close(with_places(x, present)[present], alone(x[present]))
        torch.testing.assert_close(with_places.variance, alone.variance)

    def test_parts_of_a_step_move_the_running_values_once_and_as_the_whole_does(self) -> None:
        """Of rows 1, 3 and 8 the mean is 4, and the variance (9 + 1 + 16) / 3."""
        whole, split = Dice(1, momentum=0.5), Dice(1, momentum=0.5)
        x = torch.tensor([[1.0], [3.0], [8.0]])
        whole(x)
        split.parts = []
        for part in (x[:2], x[2:], x[:0]):
            split(part)
        assert (split.mean.item(), split.variance.item()) == (0.0, 1.0), "nothing moves before the step is whole"
        follow_together(split, torch.stack(split.parts))
        for dice in (whole, split):
            torch.testing.assert_close(dice.mean, torch.tensor([2.0]))
            torch.testing.assert_close(dice.variance, torch.tensor([(1 + 26 / 3) / 2]))
        follow_together(split, torch.zeros(0, 3))
        torch.testing.assert_close(split.mean, torch.tensor([2.0]))

    @pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4, 1e-6, 0.0])
    @pytest.mark.parametrize("middle", [0.0, 1.0, 100.0, 1e4])
    def test_gradients_of_units_that_hardly_vary_are_those_of_float64(self, middle: float, noise: float) -> None:
        """Values are the same numbers in both types, so that only the arithmetic differs."""
        torch.manual_seed(0)
        x, weights = middle + noise * torch.randn(200, 3), torch.randn(200, 3)
        found = []
        for dtype in (torch.float32, torch.float64):
            dice, own = Dice(3).to(dtype), x.detach().to(dtype).requires_grad_()
            torch.nn.init.constant_(dice.slope, 0.25)
            (dice(own) * weights.to(dtype)).sum().backward()
            assert own.grad is not None
            found.append(own.grad.double())
        assert (found[0] - found[1]).norm() < 2e-6 * found[1].norm()

    def test_huge_numbers_leave_finite_gradients(self) -> None:
        dice, x = Dice(2), torch.tensor([[1e15, -1e15], [-3e15, 1e12], [0.0, 0.0]], requires_grad=True)
        dice(x).sum().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()


KINDS: tuple[Activation, ...] = ("prelu", "dice", "sigmoid", "relu")


@pytest.mark.parametrize("sliced", [0, 10**9], ids=["step by step", "event by event"])
@pytest.mark.parametrize("form", FORMS)
class TestAttentionUnit:
    @pytest.fixture(autouse=True)
    def _choose(self, monkeypatch: pytest.MonkeyPatch, sliced: int) -> None:
        monkeypatch.setattr("recspec.sequences.SLICED", sliced)

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
        wide = unit.brought(target)[events.rows]
        joined = torch.cat([happened, wide, happened - wide, happened * wide], dim=1)
        wanted = unit.out(unit.mlp.after_first(unit.mlp.first(joined), events.present)).squeeze(1)
        got = unit(happened, target, events)
        kept = events.present if events.present is not None else torch.ones(events.num_events, dtype=torch.bool)
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

    @pytest.mark.parametrize("name", PRESENT)
    @pytest.mark.parametrize("kind", KINDS)
    def test_any_histories_have_weights_and_gradients(self, form: str, kind: Activation, name: str) -> None:
        events = FORMS[form](present_of(name))
        unit = AttentionUnit(3, 3, (4, 2), kind)
        happened = torch.randn(events.num_events, 3, requires_grad=True)
        target = torch.randn(events.num_rows, 3, requires_grad=True)
        weights = unit(happened, target, events)
        assert weights.shape == (events.num_events,)
        events.weighted_sum(happened, weights).sum().backward()  # type: ignore[no-untyped-call]
        assert all(
            torch.isfinite(each.grad).all() for each in (happened, target, *unit.parameters()) if each.grad is not None
        )


@pytest.mark.parametrize("name", PRESENT)
def test_a_weighted_sum_has_the_gradient_of_its_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.sequences.SLICED", 0)
    events = jagged_events(present_of(name))
    x = torch.randn(events.num_events, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(events.num_events, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(events.weighted_sum(x, weights), events.sum(x * weights.unsqueeze(1)))
    if events.num_events:
        assert torch.autograd.gradcheck(events.weighted_sum, (x, weights))


# --- recurrences -----------------------------------------------------------------------------------------------------


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


def test_an_event_without_attention_leaves_the_state() -> None:
    made, events = a_gru(), jagged_events(torch.ones(1, 3, dtype=torch.bool))
    x = torch.randn(3, 3, dtype=torch.float64)
    first = jagged_events(torch.ones(1, 1, dtype=torch.bool))
    one = made(x[:1], first, torch.ones(1, dtype=torch.float64))[1]
    later = made(x, events, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))[1]
    torch.testing.assert_close(later, one, atol=1e-14, rtol=0)


def test_recurrences_stay_in_fp32_under_autocast() -> None:
    made, events = a_gru(dtype=torch.float32), jagged_events(torch.ones(2, 3, dtype=torch.bool))
    x = torch.randn(6, 3)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = made(x.bfloat16(), events)[1]
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, made(x.bfloat16().float(), events)[1])


@pytest.mark.parametrize("name", PRESENT)
@pytest.mark.parametrize("hidden", [(4,), (4, 3)])
def test_the_auxiliary_loss_by_blocks_is_that_of_all_events_at_once(
    name: str, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recspec.sequences.BLOCK", 2)
    torch.manual_seed(0)
    events, network = jagged_events(present_of(name)), NextEvent(2, 3, hidden).double()
    given = [torch.randn(events.num_events, width, dtype=torch.float64, requires_grad=True) for width in (2, 3, 3)]
    leaves = [*given, *network.parameters()]
    found = []
    for sliced in (0, 10**9):
        monkeypatch.setattr("recspec.sequences.SLICED", sliced)
        loss = network(*given, events)
        found.append([loss, *torch.autograd.grad(3 * loss, leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=False, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", PRESENT)
def test_a_recurrence_by_blocks_is_that_of_all_rows_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = a_gru(2, 3), []
    torch.manual_seed(0)
    x = torch.randn(int(present_of(name).sum()), 2, dtype=torch.float64, requires_grad=True)
    attention = torch.rand(len(x), dtype=torch.float64, requires_grad=True)
    for rows in (1, 2, 100):
        monkeypatch.setattr("recspec.sequences.BLOCK", rows)
        states, last = made(x, jagged_events(present_of(name)), attention)
        loss = (states.sin().sum() + last.cos().sum(), [x, attention, *made.parameters()])
        found.append([states, last, *torch.autograd.grad(*loss)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


class TestCrossEntropy:
    """The mean binary cross-entropy of an MLP's logits, some rows at a time."""

    def test_of_two_rows_worked_by_hand(self) -> None:
        network, out = ActivatedMlp((1, 1), "relu"), torch.nn.Linear(1, 1)
        with torch.no_grad():
            for parameter, value in zip((*network.parameters(), *out.parameters()), (2.0, 0.0, 1.0, -1.0), strict=True):
                parameter.fill_(value)
        x = torch.tensor([[1.0], [-3.0]], requires_grad=True)
        # Logits 2 - 1 = 1 and 0 - 1 = -1, both answers right: each costs ln(1 + 1 / e) = 0.313262.
        loss = network.cross_entropy(x, out, torch.tensor([1.0, 0.0]), 0.5)
        assert loss.item() == pytest.approx(0.5 * 0.313262, abs=1e-6)
        loss.backward()
        # Of each logit (p - y) / 2 / 2 = -0.067235 and 0.067235; the second unit is 0, so x is not moved by it.
        torch.testing.assert_close(x.grad, torch.tensor([[2 * -0.067235], [0.0]]), atol=1e-6, rtol=0)
        torch.testing.assert_close(out.weight.grad, torch.tensor([[2 * -0.067235]]), atol=1e-6, rtol=0)
        torch.testing.assert_close(out.bias.grad, torch.zeros(1), atol=1e-7, rtol=0)

    @pytest.mark.parametrize("rows", [1, 2, 5])
    @pytest.mark.parametrize("kind", ["relu", "sigmoid"])
    def test_is_torchs(self, kind: Activation, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recspec.sequences.ROWS", 2)
        torch.manual_seed(0)
        network, out = ActivatedMlp((3, 4, 2), kind).double(), torch.nn.Linear(2, 1).double()
        x = (3 * torch.randn(rows, 3, dtype=torch.float64)).requires_grad_()
        label = torch.arange(rows).remainder(2).double()
        leaves = [x, *network.parameters(), *out.parameters()]
        ours = network.cross_entropy(x, out, label, 0.7)
        logits = out(network(x)).squeeze(1)
        theirs = 0.7 * torch.nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="sum") / rows
        torch.testing.assert_close(ours, theirs)
        gradients = [torch.autograd.grad(3 * loss, leaves) for loss in (ours, theirs)]
        torch.testing.assert_close(*gradients)

    def test_stays_finite_for_logits_that_are_far_out(self) -> None:
        network, out = ActivatedMlp((1, 1), "relu"), torch.nn.Linear(1, 1, bias=True)
        with torch.no_grad():
            for parameter, value in zip((*network.parameters(), *out.parameters()), (1.0, 0.0, 1.0, -1e4), strict=True):
                parameter.fill_(value)
        x = torch.tensor([[2e4], [0.0]], requires_grad=True)
        loss = network.cross_entropy(x, out, torch.tensor([0.0, 1.0]), 1.0)  # both wrong, by 10,000 nats
        loss.backward()
        assert loss.item() == 1e4
        torch.testing.assert_close(x.grad, torch.tensor([[0.5], [0.0]]))


# --- the last states -------------------------------------------------------------------------------------------------


def test_an_empty_history_ends_in_zeros_beside_what_is_no_number() -> None:
    # Histories of 2, 1 and 0 events; the second event of the first row is broken.
    events = jagged_events(torch.tensor([[True, True], [True, False], [False, False]]))
    states = torch.tensor([[1.0], [2.0], [float("nan")]])
    assert _last(states, events)[1:].tolist() == [[2.0], [0.0]]
    assert _last(states, events)[0].isnan().all()


def test_the_last_states_are_looked_up_where_they_are() -> None:
    with FakeTensorMode():
        events = SimpleNamespace(
            sizes=(2, 1),
            num_rows=3,
            lengths=torch.empty(3, dtype=torch.int64, device="cuda"),
            rank=torch.empty(3, dtype=torch.int64, device="cuda"),
        )
        assert _last(torch.empty(3, 4, device="cuda"), events).device.type == "cuda"  # type: ignore[arg-type]
