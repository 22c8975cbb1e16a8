"""BERT4Rec beside its formulas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recspec.feature_spec import FeatureSpec
from recspec.models.bert4rec import Bert4Rec, Bert4RecSettings
from tests.closeness import assert_close
from tests.evaluation.tables import dataset
from tests.models.test_sasrec import EVENTS, acted, batch, users, with_sides


@pytest.fixture
def spec(tmp_path: Path) -> FeatureSpec:
    rows = [(user, item, 1) for user, items in enumerate(EVENTS) for item in items]
    return dataset(tmp_path, {"train": rows}, users=len(EVENTS), items=7)


def made(spec: FeatureSpec, **settings: object) -> Bert4Rec:
    """A model with weights that matter, which knows `EVENTS`."""
    torch.manual_seed(0)
    sizes = {"dim": 4, "hidden": 6, "length": 3, "dropout": 0, "input_norm": True, "residual": True, **settings}
    model = Bert4Rec(spec, Bert4RecSettings.model_validate(sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))
    model.double()
    model.learn_from(acted())
    return model


def outputs(model: Bert4Rec, items: Sequence[int | None]) -> Tensor:
    """h of these items, None for the mask, without packing: what the formula says."""
    rows = torch.stack([model.mask if item is None else model.items[item] for item in items])
    x = model.input_norm(rows * model.settings.dim**0.5 + model.positions[: len(items)].flip(0))
    h: Tensor = model.norm(model.blocks.padded(x.unsqueeze(0), torch.ones(1, len(items), dtype=torch.bool))[0])
    return h


def test_the_next_item_is_what_is_hidden_behind_a_mask_after_the_events(spec: FeatureSpec) -> None:
    model = made(spec, blocks=2, heads=2).eval()
    scores = model.score_users(users(3, 0, 1, 2))
    # Of at most three places, the mask takes the last.
    expected = [outputs(model, each)[-1] for each in ([2, 6, None], [None], [3, 4, None], [5, None])]
    assert_close(scores, torch.stack(expected) @ model.items.t())
    assert_close(model.request_vector(users(1)) @ model.item_vectors().t(), scores[2:3])


def test_hidden_events_are_predicted_from_both_sides(spec: FeatureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(spec)
    # Packed lists: 4, 1 of user 4, then the latest three of user 1, which are 2, 3, 4.
    draws = torch.tensor([0.9, 0.9, 0.9, 0.1, 0.9])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: draws)
    first, second = outputs(model, [4, None])[1], outputs(model, [2, None, 4])[1]
    shares = (torch.stack((first, second)) @ model.items.t()).log_softmax(1)
    expected = -(shares[0, 1] + shares[1, 3])  # the last event of user 4, who has none hidden by chance
    assert_close(model.loss_of_users(users(1, 4)), expected / model.settings.hidden_share)


def test_every_user_with_an_event_is_learned_from(spec: FeatureSpec) -> None:
    model = made(spec)
    assert model.trained_users(acted()).tolist() == [1, 2, 3, 4]
    assert model.loss(batch(spec, 0, 2, 1)).isfinite()
    assert model.loss(batch(spec, 0)) == 0


@pytest.mark.parametrize("length", [1, 3])
def test_a_compiled_program_pads_and_gives_the_same(
    spec: FeatureSpec, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(spec, blocks=2, length=length).eval()
    eager = model.score_users(users(0, 1, 2, 3, 4))
    nobody = model.knowing(acted([[], []]))
    assert_close(nobody.score_users(users(0, 1)), eager[:1].expand(2, -1))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(model.score_users(users(0, 1, 2, 3, 4)), eager)
    assert_close(nobody.score_users(users(0, 1)), eager[:1].expand(2, -1))


def test_side_features_and_sampled_negatives_are_those_of_sasrec(tmp_path: Path) -> None:
    model = made(with_sides(tmp_path), side_features=True, loss="sampled", num_negatives=3)
    model.loss(batch(model.spec, 1, 3)).backward()
    assert model.traits.scores_unseen_items
    assert model.described is not None
    assert all(each.grad is not None for each in model.described.parameters())
