"""Maximal marginal relevance against a case worked by hand; vectors of items are plain numbers for any model."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from recspec.inference.explanations import likeness_vectors
from recspec.inference.predictor import Predictor
from recspec.inference.ranking import by_values, by_vectors, diversified, pool_size
from recspec.models import MODELS
from recspec.models.two_tower import TwoTower
from tests.blas import flagging

SCORES = np.array([5.0, 4.5, 4.0, 1.0])  # relevance 1, .875, .75, 0
VECTORS = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.6, 0.8]])


@pytest.mark.parametrize(
    ("diversity", "expected"),
    [
        # 0: by score. .5, after item 0: .4375 - .5 = -.0625; .375 - 0 = .375; 0 - .3 = -.3, so item 2;
        # then -.0625 of item 1, and 0 - .5 x .8 = -.4 of item 3.
        (0.0, [0, 1, 2, 3]),
        (0.5, [0, 2, 1, 3]),
        # 1: by likeness alone. After item 0: 1, 0, .6, so item 2; then the largest of 1 and .8, so item 3.
        (1.0, [0, 2, 3, 1]),
    ],
)
def test_a_case_worked_by_hand(diversity: float, expected: list[int]) -> None:
    assert diversified(SCORES, by_vectors(VECTORS), 4, diversity).tolist() == expected
    assert diversified(SCORES, by_vectors(VECTORS), 2, diversity).tolist() == expected[:2]


def test_a_flag_that_the_product_sets_is_no_warning() -> None:
    assert diversified(SCORES, by_vectors(flagging(VECTORS)), 4, 1.0).tolist() == [0, 2, 3, 1]


def test_edges() -> None:
    assert diversified(np.zeros(0), by_vectors(np.zeros((0, 2))), 3, 0.5).tolist() == []
    assert diversified(np.ones(3), by_vectors(np.zeros((3, 2))), 3, 0.5).tolist() == [0, 1, 2]  # ties in order
    assert (pool_size(1), pool_size(100), pool_size(900), pool_size(9_000)) == (100, 500, 4_500, 9_000)


def test_values_are_alike_where_they_are_equal_and_lists_by_what_they_share() -> None:
    kinds = by_values(pa.array(["a", "b", "a", None, None]))
    assert [kinds(place).tolist() for place in (0, 1, 3)] == [[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0] * 5]
    lists = by_values(pa.chunked_array([[["x", "y"], ["y", "z"]], [["x", "y"], [], None]]))
    assert lists(0) == pytest.approx([1, 1 / 3, 1, 0, 0])
    assert lists(3).tolist() == [0] * 5


@pytest.mark.parametrize("name", ["sasrec", "bert4rec", "two_tower", "neumf", "ials"])
def test_vectors_are_numbers_without_gradients(films: Predictor, name: str) -> None:
    model = MODELS[name](films.spec, MODELS[name].Settings())
    vectors = likeness_vectors(model, films.catalogues)
    assert vectors is not None
    assert vectors.shape[0] == films.spec.num_ids("item_id")
    assert not vectors.requires_grad
    assert len(vectors.numpy()) == len(vectors)


def test_likeness_does_not_depend_on_how_popular_items_are(films: Predictor) -> None:
    """Biases grow to several units, beside vectors of length 1, and would decide which items are alike."""
    model = MODELS["two_tower"](films.spec, MODELS["two_tower"].Settings())
    assert isinstance(model, TwoTower)
    before = likeness_vectors(model, films.catalogues)
    with torch.no_grad():
        model.item_tower.out.bias[-1] += 3.0
    after = likeness_vectors(model, films.catalogues)
    assert before is not None
    assert after is not None
    assert before.shape[1] == model.settings.dim
    torch.testing.assert_close(after, before)
    assert model.item_vectors(films.catalogues.items.features).shape[1] == model.settings.dim + 1
