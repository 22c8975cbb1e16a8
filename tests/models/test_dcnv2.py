"""DCNv2: the published sizes, a cross layer worked by hand, both structures."""

from __future__ import annotations

import pytest
import torch

from recspec.base.errors import SettingsError
from recspec.models.dcnv2 import CrossNetwork, DcnV2, DcnV2Settings
from tests.models.test_dlrm import TERABYTE_T15, criteo


def test_the_published_sizes_give_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = DcnV2(criteo(TERABYTE_T15), DcnV2Settings())
    assert model.width == 27 * 128 == 3456
    assert sum(weight.numel() for weight in model.cross.parameters()) == 10_627_200
    top = sum(weight.numel() for weight in (*model.top.parameters(), *model.out.parameters()))
    assert top == 5_245_953


def test_a_full_cross_layer_worked_by_hand() -> None:
    cross = CrossNetwork(2, num_layers=2, rank=0)
    with torch.no_grad():
        for layer in cross.up:
            layer.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))  # type: ignore[operator, union-attr]
            layer.bias.copy_(torch.tensor([1.0, 0.0]))  # type: ignore[operator, union-attr]
    # x0 = (1, 2). W x0 + b = (1 + 4 + 1, 2) = (6, 2); x1 = x0 * that + x0 = (7, 6).
    # W x1 + b = (7 + 12 + 1, 6) = (20, 6); x2 = x0 * that + x1 = (27, 18).
    assert cross(torch.tensor([[1.0, 2.0]])).tolist() == [[27.0, 18.0]]


def test_a_low_rank_layer_is_the_full_one_with_the_product_of_its_matrices() -> None:
    torch.manual_seed(0)
    low, full = CrossNetwork(5, num_layers=1, rank=2), CrossNetwork(5, num_layers=1, rank=0)
    with torch.no_grad():
        full.up[0].weight.copy_(low.up[0].weight @ low.down[0].weight)  # type: ignore[operator]
    x = torch.randn(3, 5)
    torch.testing.assert_close(low(x), full(x))


def test_tables_may_have_widths_of_their_own() -> None:
    settings = DcnV2Settings(embedding_dim="rule", embedding_dims={"C2": 5}, bottom=(), top=(4,), cross_rank=2)
    model = DcnV2(criteo((16, 100), numbers=1), settings)
    assert model.embeddings.widths == {"C1": 12, "C2": 5}
    assert model.width == 1 + 12 + 5


def test_a_width_for_a_feature_that_is_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match="embedding_dims: unknown categorical feature 'C9'"):
        DcnV2(criteo((3, 4)), DcnV2Settings(embedding_dims={"C9": 4}))
