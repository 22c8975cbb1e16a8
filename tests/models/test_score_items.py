"""Models that compute a request's part once: the same logits as on the pairs, wherever the features stand."""

from __future__ import annotations

import pytest
import torch

from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.models.layers.batch import Batch
from tests.known_users import informed

SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "dlrm": ("dlrm", {"embedding_dim": 8, "bottom": (16, 8), "top": (32, 16)}),
    "dlrm, side by side": ("dlrm", {"embedding_dim": 8, "bottom": (16, 12), "top": (32, 16), "interaction": "cat"}),
    "dcnv2": ("dcnv2", {"embedding_dim": 8, "bottom": (16, 8), "top": (32, 16), "cross_rank": 4}),
    "dcnv2, parallel, full": (
        "dcnv2",
        {"embedding_dim": 8, "bottom": (), "top": (32, 16), "cross_rank": 0, "structure": "parallel"},
    ),
    "dcnv2, several widths": (
        "dcnv2",
        {"embedding_dims": {"u": 4, "tags": 6}, "embedding_dim": 8, "bottom": (12,), "top": (32,), "cross_rank": 3},
    ),
    "finalnet": ("finalnet", {"embedding_dim": 8, "gated": (32, 16), "plain": (16,)}),
    "wide_deep": ("wide_deep", {"hidden": (32, 16), "indicators": ("j", "tags")}),
}


def specification(numbers: str) -> FeatureSpec:
    """User and item features of every kind; each letter of `numbers` says whose the next number is."""
    ids = {"u": 11, "v": 7, "i": 13, "j": 5, "tags": 9, "liked": 9}
    lengths = {"tags": 3, "liked": 2}
    features: dict[str, dict[str, object]] = {
        name: {"cardinality": count, **({"length": lengths[name], "padding": 0} if name in lengths else {})}
        for name, count in ids.items()
    }
    channels = {"user": ["u", "v", "liked"], "item": ["j", "i", "tags"], "label": ["label"]}
    for name, owner in zip("xyz", numbers, strict=False):
        features[name] = {"dtype": "float32"} | ({"length": 3, "vector": True} if name == "y" else {})
        channels["item" if owner == "i" else "user"].append(name)
    return FeatureSpec.from_dict({"feature_spec": {**features, "label": {}}, "channel_spec": channels})


def made_up_batch(spec: FeatureSpec, names: tuple[str, ...], rows: int) -> Batch:
    batch: Batch = {}
    for name in names:
        feature = spec.features[name]
        shape = (rows, feature.length) if feature.length is not None else (rows,)
        batch[name] = torch.randint(0, spec.num_ids(name), shape) if feature.is_categorical else torch.randn(shape)
    return batch


@pytest.mark.parametrize("numbers", ["uuu", "iii", "uiu", ""])
@pytest.mark.parametrize("case", SETTINGS)
def test_scores_are_those_of_the_pairs_wherever_the_numbers_stand(case: str, numbers: str) -> None:
    torch.manual_seed(0)
    name, settings = SETTINGS[case]
    spec = specification(numbers)
    model = informed(MODELS[name](spec, MODELS[name].Settings.model_validate(settings)), spec).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    request, items = made_up_batch(spec, spec.role("user"), 4), made_up_batch(spec, spec.role("item"), 6)
    with torch.inference_mode():
        scores, pairs = model.score_items(request, items), model.pair_scores(request, items)
        nothing = {feature: tensor[:0] for feature, tensor in items.items()}
        nobody = {feature: tensor[:0] for feature, tensor in request.items()}
        assert model.score_items(request, nothing).shape == (4, 0)
        assert model.score_items(nobody, items).shape == (0, 6)
    assert scores.std() > 0.01
    torch.testing.assert_close(scores, pairs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["dlrm", "dcnv2"])
def test_requests_in_blocks_get_the_same_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    spec = specification("uiu")
    model = informed(MODELS[name](spec, MODELS[name].Settings.model_validate(SETTINGS[name][1])), spec).eval()
    request, items = made_up_batch(spec, spec.role("user"), 5), made_up_batch(spec, spec.role("item"), 6)
    with torch.inference_mode():
        together = model.score_items(request, items)
        monkeypatch.setattr("recspec.models.base.SCORE_FLOATS", 1)
        one_by_one = model.score_items(request, items)
    torch.testing.assert_close(one_by_one, together)
