"""SASRec beside its formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from recspec.base.errors import SettingsError, SpecError
from recspec.feature_spec import FeatureSpec
from recspec.models import DataFacts, Interactions, UserEvents
from recspec.models.layers.batch import Batch
from recspec.models.sasrec import SasRec, SasRecSettings, gap_number
from tests.closeness import assert_close
from tests.evaluation.tables import dataset

EVENTS: list[list[int]] = [[], [1, 2, 3, 4], [5], [2, 2, 6], [4, 1]]
"""The items of each user; users 0 and 2 have too few to learn from."""


@pytest.fixture
def spec(tmp_path: Path) -> FeatureSpec:
    rows = [(user, item, 1) for user, items in enumerate(EVENTS) for item in items]
    return dataset(tmp_path, {"train": rows}, users=len(EVENTS), items=7)


def acted(lists: list[list[int]] = EVENTS, times: list[list[float]] | None = None, num_items: int = 7) -> Interactions:
    users = np.repeat(np.arange(len(lists)), [len(each) for each in lists])
    flat = np.array([item for items in lists for item in items], dtype=np.int64)
    when = None if times is None else np.array([each for own in times for each in own], dtype=np.float64)
    return UserEvents.from_rows(users, flat, len(lists), when).interactions(num_items)


def made(spec: FeatureSpec, **settings: object) -> SasRec:
    """A model with weights that matter, which knows `EVENTS`."""
    torch.manual_seed(0)
    model = SasRec(
        spec,
        SasRecSettings.model_validate(
            {"dim": 4, "hidden": 6, "length": 3, "dropout": 0, "input_norm": True, **settings}
        ),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))
    model.double()
    model.learn_from(acted())
    return model


def users(*ids: int) -> Tensor:
    return torch.tensor(ids)


def batch(spec: FeatureSpec, *ids: int) -> Batch:
    return {spec.user_id: users(*ids)}


def hidden(model: SasRec, items: list[int]) -> Tensor:
    """h after the last of these items, without packing: what the formula says."""
    length = len(items)
    x = model.input_norm(model.items[items] * model.settings.dim**0.5 + model.positions[:length].flip(0))
    x = model.blocks.padded(x.unsqueeze(0), torch.ones(1, length, dtype=torch.bool))[0]
    made: Tensor = model.norm(x)[-1]
    return made


def test_scores_are_products_of_the_last_output_and_item_vectors(spec: FeatureSpec) -> None:
    model = made(spec, blocks=2, heads=2).eval()
    scores = model.score_users(users(3, 0, 1, 2))
    expected = [hidden(model, [2, 2, 6]), model.start, hidden(model, [2, 3, 4]), hidden(model, [5])]
    assert_close(scores, torch.stack(expected) @ model.items.t())
    assert_close(model.request_vector(users(0)), model.start.unsqueeze(0))
    assert_close(model.request_vector(users(1)) @ model.item_vectors().t(), scores[2:3])


def test_places_are_counted_from_the_end(spec: FeatureSpec) -> None:
    model = made(spec, blocks=0).eval()
    expected = model.norm(model.input_norm(2 * model.items[4] + model.positions[0]))
    assert_close(model.request_vector(users(1))[0], expected)
    x = model._of_packed(*model.known.packed(users(1, 2), 3)[:2], users(1, 2), model.items)[:4]
    assert_close(x[0], model.input_norm(2 * model.items[2] + model.positions[2]))
    assert_close(x[3], model.input_norm(2 * model.items[5] + model.positions[0]))


@pytest.mark.parametrize("block", ["transformer", "ligr"])
def test_the_loss_is_that_of_every_next_item(spec: FeatureSpec, block: str) -> None:
    model = made(spec, block=block)
    # Of 1, 2, 3, 4 the latest three events predict; inputs keep their places from the end of what predicts.
    x = model.input_norm(model.items[[1, 2, 3]] * 2 + model.positions[[2, 1, 0]])
    seen = model.norm(model.blocks.padded(x.unsqueeze(0), torch.ones(1, 3, dtype=torch.bool))[0])
    expected = -(seen @ model.items.t()).log_softmax(1)[range(3), [2, 3, 4]].sum()
    expected = expected - (model.items @ model.start).log_softmax(0)[1]
    assert_close(model.loss_of_users(users(1)), expected)


def test_next_items_are_ranked_above_a_disliked_one(spec: FeatureSpec) -> None:
    """User 1 disliked item 6, of which each of three events learns; user 4 nothing."""
    model, plain = made(spec, dislike_weight=0.5), made(spec)
    disliked = Interactions.from_pairs(np.array([1]), np.array([6]), num_users=5, num_items=7)
    model.learn_from(replace(acted(), dislikes=disliked))
    x = model.input_norm(model.items[[1, 2, 3]] * 2 + model.positions[[2, 1, 0]])
    seen = model.norm(model.blocks.padded(x.unsqueeze(0), torch.ones(1, 3, dtype=torch.bool))[0])
    lead = (seen * (model.items[[2, 3, 4]] - model.items[6])).sum(1)
    expected = plain.loss_of_users(users(1)) + 0.5 * (1 + (-lead).exp()).log().sum()
    assert_close(model.loss_of_users(users(1)).float(), expected.float())
    assert_close(model.loss_of_users(users(4)), plain.loss_of_users(users(4)))
    assert made(spec).disliked is None


def test_parts_of_a_batch_add_up(spec: FeatureSpec) -> None:
    model = made(spec)
    assert model.trained_users(acted()).tolist() == [1, 3, 4]
    assert model.mean_events == 3
    whole = model.loss(batch(spec, 1, 3, 4))
    parts = [model.loss(batch(spec, 1, 4)) * 2 / 3, model.loss(batch(spec, 3)) / 3]
    assert_close(whole, torch.stack(parts).sum())
    assert_close(model.loss(batch(spec, 4, 1, 3)), whole)
    assert model.loss(batch(spec, 0, 2)).isfinite()


def test_only_the_start_learns_from_first_events(spec: FeatureSpec) -> None:
    model = made(spec)
    model.loss(batch(spec, 2)).backward()
    learned = {name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()}
    assert learned == {"start"}


def test_a_sampled_softmax_with_logq_by_hand(spec: FeatureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(spec, loss="sampled", num_negatives=3, popularity_power=1.0, blocks=0)
    assert model.drawn is not None
    assert_close(model.drawn, torch.tensor([0, 2, 3, 1, 2, 1, 1]) / 10)
    monkeypatch.setattr(torch, "multinomial", lambda *_, **__: torch.tensor([2, 1, 2]))
    h = model.norm(model.input_norm(2 * model.items[4] + model.positions[0]))  # user 4 has 4, then 1
    own, other = (h @ model.items[1]).exp(), (h @ model.items[2]).exp()
    start = (model.items @ model.start).log_softmax(0)[4]
    for logq, weight in ((True, 1 / (3 * 0.3)), (False, 1.0)):
        model.settings = model.settings.model_copy(update={"logq": logq})
        expected = -(own / (own + 2 * weight * other)).log() - start  # the drawn item 1 is the next one itself
        assert_close(model.loss_of_users(users(4)).float(), expected.float())


def test_uniform_draws_take_items_of_training_alone(spec: FeatureSpec) -> None:
    model = made(spec, loss="sampled")
    assert model.drawn is not None
    assert_close(model.drawn, torch.tensor([0] + [1 / 6] * 6))
    assert model.loss(batch(spec, 1, 3)).isfinite()


@pytest.mark.parametrize("block", ["transformer", "ligr"])
def test_a_compiled_program_pads_and_gives_the_same(
    spec: FeatureSpec, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(spec, block=block, blocks=2).eval()
    eager = model.score_users(users(0, 1, 2, 3, 4))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(model.score_users(users(0, 1, 2, 3, 4)), eager)
    empty = model.knowing(acted([[], []]))
    assert_close(empty.score_users(users(0, 1)), eager[:1].expand(2, -1))


TIMES: list[list[float]] = [[], [10, 10, 14, 14.5], [3], [0, 7, 7 + 2**20], [1, 2]]


def with_gaps(spec: FeatureSpec) -> SasRec:
    model = made(spec, time_gaps=True, input_norm=False)
    model.learn_from(acted(times=TIMES))
    return model


def test_gaps_are_numbered_by_powers_of_two() -> None:
    gaps = torch.tensor([0.0, -3.0, 0.1, 1.0, 1.9, 2.0, 3.0, 4.0, 2.0**45, 2.0**46, 1e300])
    assert gap_number(gaps.double()).tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 46, 47, 47]


def test_an_event_has_the_vector_of_the_gap_before_it(spec: FeatureSpec) -> None:
    model = with_gaps(spec)
    assert model.gaps is not None
    asked = users(4, 3, 1)
    back = [1, 0, 2, 1, 0, 2, 1, 0]
    x = model._of_packed(*model.known.packed(asked, 3)[:2], asked, model.items)[:8]
    rest = x - 2 * model.items[[4, 1, 2, 2, 6, 2, 3, 4]] - model.positions[back]
    # Of user 1's latest three events, the first has the gap to an event that is not read.
    assert_close(rest, model.gaps[[0, 1, 0, 3, 21, 0, 3, 1]])


def test_gaps_are_padded_alike_and_baskets_have_none(spec: FeatureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_gaps(spec).eval()
    eager = model.score_users(users(0, 1, 2, 3, 4))
    basket = model.score_events(acted())
    assert_close(basket[[0, 2]], eager[[0, 2]])
    assert not torch.allclose(basket[3], eager[3])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(model.score_users(users(0, 1, 2, 3, 4)), eager)


def with_sides(folder: Path, **price: object) -> FeatureSpec:
    """Items with a category, a list of categories and a number beside the id."""
    features = {
        "user": {"dtype": "int32", "cardinality": len(EVENTS)},
        "item": {"dtype": "int32", "cardinality": 7},
        "brand": {"dtype": "int32", "cardinality": 3},
        "kinds": {"dtype": "int32", "cardinality": 4, "length": 2, "padding": 0},
        "price": {"dtype": "float32", **price},
        "label": {"dtype": "float32"},
    }
    channels = {"user": ["user"], "item": ["item", "brand", "kinds", "price"], "label": ["label"]}
    return FeatureSpec.from_dict({"feature_spec": features, "source_spec": {}, "channel_spec": channels}, folder)


def test_side_features_are_added_to_item_vectors(tmp_path: Path) -> None:
    model = made(with_sides(tmp_path), side_features=True, id_dropout=0)
    assert model.item_inputs == ("brand", "kinds", "price")
    items = {
        "brand": torch.tensor([0, 1, 2, 1, 0, 0, 0]),
        "kinds": torch.tensor([[0, 0], [1, 3], [2, 0], [0, 0], [0, 0], [0, 0], [0, 0]]),
        "price": torch.tensor([0.0, 2.0, -1.0, 0.0, 0.0, 0.0, 0.5]),
    }
    model.describe(items)
    described = model.described
    assert described is not None
    assert described.tables is not None
    assert described.numbers is not None
    tables = described.tables({name: items[name] for name in ("brand", "kinds")}, ("brand",))
    store, kinds = described.tables.stores["4"], described.tables.first_row["kinds"]
    price = described.numbers.weight[:, 0]
    assert_close(
        model.item_vectors()[1], model.items[1] + tables[1] + store[kinds + torch.tensor([1, 3])].mean(0) + 2 * price
    )
    assert_close(model.item_vectors()[6], model.items[6] + tables[6] + 0.5 * price)
    model.loss(batch(model.spec, 1, 3)).backward()
    assert price.grad_fn is not None
    assert described.numbers.weight.grad is not None
    other = SasRec(model.spec, model.settings).double()
    assert not other.allocate_buffers(model.state_dict())
    stored = {**model.state_dict(), "described.values_1": torch.full((7, 2), 9, dtype=torch.int32)}
    assert SasRec(model.spec, model.settings).allocate_buffers(stored) == [
        "weight 'described': 'kinds' holds ids from 9 to 9; expected 0 to 3"
    ]
    other.load_state_dict(model.state_dict())
    assert_close(other.eval().score_users(users(1, 3)), model.eval().score_users(users(1, 3)))


def described_items() -> Batch:
    """Features of seven items, of which item 0 shares those of item 1."""
    kinds = torch.tensor([[1, 3], [1, 3], [2, 0], [0, 0], [0, 0], [0, 0], [0, 0]])
    return {"brand": torch.tensor([1, 1, 2, 1, 0, 0, 0]), "kinds": kinds, "price": torch.ones(7)}


def test_an_item_that_training_never_saw_has_the_vector_of_its_features(tmp_path: Path) -> None:
    model = made(with_sides(tmp_path), side_features=True).eval()
    model.describe(described_items())
    assert model.traits.scores_unseen_items
    assert model.seen.tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert model.described is not None
    assert_close(model.item_vectors()[0], model.described()[0])
    assert_close(model.item_vectors()[1], model.items[1] + model.described()[1])
    plain = made(with_sides(tmp_path))
    assert not plain.traits.scores_unseen_items


@pytest.mark.parametrize("settings", [{}, {"loss": "sampled", "num_negatives": 50}])
def test_no_event_is_learned_from_items_that_training_never_saw(tmp_path: Path, settings: Mapping[str, object]) -> None:
    model = made(with_sides(tmp_path), side_features=True, id_dropout=0, **settings)
    vectors = model.item_vectors().detach().requires_grad_()
    model._softmax(torch.ones(2, 4, dtype=torch.float64), vectors, torch.tensor([1, 2])).backward()
    assert vectors.grad is not None
    assert vectors.grad.any(1).tolist() == [False] + [True] * 6
    model.loss_of_users(users(1, 3)).backward()
    assert model.items.grad is not None
    assert model.items.grad.any(1).tolist()[0] is False


def test_id_dropout_hides_vectors_of_items_in_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(with_sides(tmp_path), side_features=True, id_dropout=0.3)
    model.describe(described_items())
    assert model.described is not None
    monkeypatch.setattr(torch, "rand_like", lambda _: torch.tensor([0.9, 0.2, 0.4, 0.2, 0.9, 0.9, 0.3]))
    kept = torch.tensor([0, 0, 1, 0, 1, 1, 1]).double().unsqueeze(1)
    assert_close(model.item_vectors(), model.items * kept + model.described())
    model.eval()
    kept = torch.tensor([0, 1, 1, 1, 1, 1, 1]).double().unsqueeze(1)
    assert_close(model.item_vectors(), model.items * kept + model.described())


def test_a_list_of_numbers_is_no_vector_of_an_item(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="feature 'price' is a list of numbers, which sasrec does not take"):
        SasRec(with_sides(tmp_path, length=3), SasRecSettings(side_features=True))


def test_items_without_other_features_have_none_to_add(spec: FeatureSpec) -> None:
    with pytest.raises(SpecError, match="items have no other features than the id 'item'; leave out side_features"):
        SasRec(spec, SasRecSettings(side_features=True))


def proposed(rows: int, num_users: int, items: int, **more: object) -> dict[str, object]:
    facts = DataFacts(
        **{
            "task": "interactions",
            "rows": rows,
            "samples": rows,
            "positive_share": 1.0,
            "users": num_users,
            "items": items,
            **more,
        }
    )
    return {name: value for name, (value, _) in SasRec.defaults(facts).items()}


def test_defaults_follow_the_length_of_lists_and_the_density_of_items() -> None:
    sparse, dense = proposed(150_000, 22_000, 12_000), proposed(1_000_000, 6_000, 3_700)
    asked = (
        "blocks",
        "input_norm",
        "residual",
        "length",
        "dropout",
        "attention_dropout",
        "train.batch_size",
        "train.learning_rate",
        "loss",
    )
    assert [sparse[name] for name in asked] == [1, False, False, 50, 0.5, 0.0, 256, 2e-3, "full"]
    assert [dense[name] for name in asked] == [2, True, True, 200, 0.2, 0.2, 64, 1e-3, "full"]
    assert sparse["train.average"] == pytest.approx(0.9942, abs=1e-4)
    clicks = proposed(1_000_000, 6_000, 3_700, task="clicks", positive_share=0.1)
    assert clicks["length"] == 50


def test_defaults_draw_items_where_there_are_many_logits() -> None:
    large = proposed(10_000_000, 500_000, 100_000)
    assert (large["loss"], large["num_negatives"]) == ("sampled", 2048)
    assert proposed(10_000_000, 500_000, 100_000, device="cuda")["loss"] == "full"
    assert proposed(1, 1, 1)["train.batch_size"] == 8
    assert proposed(0, 0, 0)["loss"] == "full"
