"""Vectors of items: plain numbers, whatever parameters of a model they come from."""

from __future__ import annotations

import pytest

from recspec.inference.item_vectors import item_vectors
from recspec.inference.predictor import Predictor
from recspec.models import MODELS


@pytest.mark.parametrize("name", ["sasrec", "two_tower", "neumf", "ials"])
def test_vectors_are_numbers_without_gradients(films: Predictor, name: str) -> None:
    model = MODELS[name](films.spec, MODELS[name].Settings())
    vectors = item_vectors(model, films.catalogues)
    assert vectors is not None
    assert vectors.shape[0] == films.spec.num_ids("item_id")
    assert not vectors.requires_grad
    assert len(vectors.numpy()) == len(vectors)
