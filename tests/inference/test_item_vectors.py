"""Vectors of items: plain numbers, whatever parameters of a model they come from."""

from __future__ import annotations

import pytest
import torch

from recspec.inference.explanations import item_vectors
from recspec.inference.predictor import Predictor
from recspec.models import MODELS
from recspec.models.two_tower import TwoTower


@pytest.mark.parametrize("name", ["sasrec", "two_tower", "neumf", "ials"])
def test_vectors_are_numbers_without_gradients(films: Predictor, name: str) -> None:
    model = MODELS[name](films.spec, MODELS[name].Settings())
    vectors = item_vectors(model, films.catalogues)
    assert vectors is not None
    assert vectors.shape[0] == films.spec.num_ids("item_id")
    assert not vectors.requires_grad
    assert len(vectors.numpy()) == len(vectors)


def test_likeness_does_not_depend_on_how_popular_items_are(films: Predictor) -> None:
    """Biases grow to several units, beside vectors of length 1, and would decide which items are alike."""
    model = MODELS["two_tower"](films.spec, MODELS["two_tower"].Settings())
    assert isinstance(model, TwoTower)
    before = item_vectors(model, films.catalogues)
    with torch.no_grad():
        model.item_tower.out.bias[-1] += 3.0
    after = item_vectors(model, films.catalogues)
    assert before is not None
    assert after is not None
    assert before.shape[1] == model.settings.dim
    torch.testing.assert_close(after, before)
    assert model.item_vectors(films.catalogues.items.features).shape[1] == model.settings.dim + 1
