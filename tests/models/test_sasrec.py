"""SASRec beside its formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from recspec.batch import Batch
from recspec.models import Interactions, UserEvents
from recspec.models.sasrec import SasRec, SasRecSettings
from recspec.spec import FeatureSpec
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
    model = SasRec(spec, SasRecSettings.model_validate({"dim": 4, "hidden": 6, "length": 3, "dropout": 0, **settings}))
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
    x = model.items[items] * model.settings.dim**0.5 + model.positions[:length].flip(0)
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
    expected = model.norm(2 * model.items[4] + model.positions[0])
    assert_close(model.request_vector(users(1))[0], expected)
    x = model._embedded(*model.known.packed(users(1, 2), 3))[:4]
    assert_close(x[0], 2 * model.items[2] + model.positions[2])
    assert_close(x[3], 2 * model.items[5] + model.positions[0])


@pytest.mark.parametrize("block", ["transformer", "ligr"])
def test_the_loss_is_that_of_every_next_item(spec: FeatureSpec, block: str) -> None:
    model = made(spec, block=block)
    # Of 1, 2, 3, 4 the latest three events predict; inputs keep their places from the end of what predicts.
    x = model.items[[1, 2, 3]] * 2 + model.positions[[2, 1, 0]]
    seen = model.norm(model.blocks.padded(x.unsqueeze(0), torch.ones(1, 3, dtype=torch.bool))[0])
    expected = -(seen @ model.items.t()).log_softmax(1)[range(3), [2, 3, 4]].sum()
    expected = expected - (model.items @ model.start).log_softmax(0)[1]
    assert_close(model.loss_of_users(users(1)), expected)


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
    h = model.norm(2 * model.items[4] + model.positions[0])  # user 4 has 4, then 1
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


def test_baskets_are_scored_like_users(spec: FeatureSpec) -> None:
    model = made(spec).eval()
    assert_close(model.score_events(acted([[1, 1, 2, 3, 4], []])), model.score_users(users(1, 0)))


def test_scores_of_users_with_dropout_are_certain_after_training(spec: FeatureSpec) -> None:
    model = made(spec, dropout=0.5)
    assert not torch.equal(model.loss(batch(spec, 1)), model.loss(batch(spec, 1)))
    model.eval()
    assert torch.equal(model.score_users(users(1)), model.score_users(users(1)))


def test_heads_divide_the_width() -> None:
    with pytest.raises(ValueError, match="dim 6 is no multiple of heads 4; every head has the same width"):
        SasRecSettings(dim=6, heads=4)
