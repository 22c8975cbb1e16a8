"""DLRM: the published sizes, dot products worked by hand, data of every shape."""

from __future__ import annotations

import pytest
import torch

from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.dlrm import Dlrm, DlrmSettings, dot_interaction

TERABYTE_T15 = (
    7912889,
    33823,
    17139,
    7339,
    20046,
    4,
    7105,
    1382,
    63,
    5554114,
    582469,
    245828,
    11,
    2209,
    10667,
    104,
    4,
    968,
    15,
    8165896,
    2675940,
    7156453,
    302516,
    12022,
    97,
    35,
)
"""Rows of the 26 tables of Criteo Terabyte at a frequency limit of 15."""


def criteo(cardinalities: tuple[int, ...], numbers: int = 13) -> FeatureSpec:
    ids = {f"C{place}": {"cardinality": count} for place, count in enumerate(cardinalities, 1)}
    dense: dict[str, dict[str, object]] = {f"I{place}": {"dtype": "float32"} for place in range(1, numbers + 1)}
    return FeatureSpec.from_dict(
        {
            "feature_spec": {**dense, **ids, "label": {"dtype": "float32"}},
            "channel_spec": {"numerical": list(dense), "categorical": list(ids), "label": ["label"]},
        }
    )


def build(spec: FeatureSpec, **settings: object) -> Dlrm:
    torch.manual_seed(0)
    small = {"embedding_dim": 2, "bottom": (2,), "top": (4,)}
    return Dlrm(spec, DlrmSettings.model_validate({**small, **settings})).eval()


def test_the_published_sizes_give_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = Dlrm(criteo(TERABYTE_T15), DlrmSettings())
    assert sum(weight.numel() for weight in model.embeddings.parameters()) == 32_709_138 * 128
    assert sum(weight.numel() for weight in model.bottom.parameters()) == 171_392
    top = sum(weight.numel() for weight in (*model.top.parameters(), *model.out.parameters()))
    # Published with a 480th input that is always zero, for memory alignment: 1024 weights more.
    assert top == 2_198_529 - 1024


def test_dot_products_worked_by_hand() -> None:
    vectors = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[0.0, 1.0], [1.0, 0.0], [2.0, 3.0]]])
    # Pairs 10, 20, 21: 1*3 + 2*4 = 11, 1*5 + 2*6 = 17, 3*5 + 4*6 = 39.
    assert dot_interaction(vectors).tolist() == [[11.0, 17.0, 39.0], [0.0, 3.0, 2.0]]


def test_the_gradient_of_dot_products_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(dot_interaction, (vectors,))
    row, column = torch.tril_indices(4, 4, offset=-1)
    plain = torch.bmm(vectors, vectors.transpose(1, 2))[:, row, column]
    torch.testing.assert_close(dot_interaction(vectors), plain)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row_have_dot_products(rows: int) -> None:
    assert dot_interaction(torch.ones(rows, 3, 2)).shape == (rows, 3)


def test_the_top_reads_the_numbers_and_every_pair() -> None:
    model = build(criteo((3, 4), numbers=2))
    assert model.top.first.in_features == 2 + 3  # the bottom's output, and pairs of three vectors
    with torch.no_grad():
        model.embeddings.stores["2"].copy_(torch.arange(14.0).view(7, 2))  # C1 rows 0-2, C2 rows 3-6
        model.bottom.first.weight.copy_(torch.eye(2))
        model.bottom.first.bias.zero_()
    batch = {"I1": torch.tensor([1.0]), "I2": torch.tensor([-2.0]), "C1": torch.tensor([1]), "C2": torch.tensor([0])}
    # Bottom: relu(1, -2) = (1, 0). C1: (2, 3); C2: (6, 7). Pairs: (2,3).(1,0) = 2, (6,7).(1,0) = 6, (6,7).(2,3) = 33.
    assert torch.cat(model._interactions(batch), dim=1).tolist() == [[1.0, 0.0, 2.0, 6.0, 33.0]]


@pytest.mark.parametrize("interaction", ["dot", "cat"])
@pytest.mark.parametrize(("cardinalities", "numbers"), [((3, 4), 2), ((3, 4), 0), ((3,), 1)])
def test_any_number_of_features_is_taken(interaction: str, cardinalities: tuple[int, ...], numbers: int) -> None:
    spec = criteo(cardinalities, numbers)
    model = build(spec, interaction=interaction)
    batch = {name: torch.tensor([0, 1]) for name in spec.inputs(categorical=True)}
    batch |= {name: torch.tensor([0.5, 2.0]) for name in spec.inputs(categorical=False)}
    assert torch.isfinite(model(batch)).all()


def test_ids_beyond_the_largest_table_share_rows_and_id_0_keeps_its_own() -> None:
    model = build(criteo((100, 4), numbers=1), max_table_size=11)
    assert model.embeddings.stores["2"].shape == (11 + 4, 2)
    vectors = model.embeddings({"C1": torch.tensor([0, 3, 13, 10, 99]), "C2": torch.zeros(5, dtype=torch.long)})[:, :2]
    assert torch.equal(vectors[1], vectors[2])  # 1 + 2 mod 10 = 1 + 12 mod 10
    assert not torch.equal(vectors[0], vectors[3])  # 1 + 9 mod 10 is row 10
    assert torch.equal(vectors[4], model.embeddings.stores["2"][9])  # 1 + 98 mod 10


def test_widths_that_make_no_model_are_refused() -> None:
    with pytest.raises(SettingsError, match="the last width of bottom is 3, and embedding_dim is 2"):
        build(criteo((3, 4)), bottom=(3,))
    with pytest.raises(ValueError, match="every width is at least 1"):
        build(criteo((3, 4)), top=(0,))
    build(criteo((3, 4), numbers=0), bottom=(3,))  # no numbers, no bottom


def test_one_vector_alone_is_refused() -> None:
    with pytest.raises(SettingsError, match="there is one vector only, and dot products take two"):
        build(criteo((3,), numbers=0))
    build(criteo((3,), numbers=0), interaction="cat")
