"""Every promise of `Model`, asked of every registered model, on data whose best possible score is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from recspec import bundle, metrics
from recspec.batch import Batch, num_rows, take
from recspec.bundle import Card
from recspec.errors import RecspecError
from recspec.evaluate import evaluate_model, score_rows
from recspec.feature_spec import FeatureSpec
from recspec.loader import Loader
from recspec.models import MODELS
from recspec.models.base import Model
from recspec.sampling import item_features
from recspec.storage import open_split
from recspec.train import TrainSettings, train
from tests import made_up

SMALL: Mapping[str, Mapping[str, object]] = {
    "neumf": {"factors": 8, "layers": (16, 8), "dropout": 0.0},
    "wide_deep": {"hidden": (32, 16), "dropout": 0.0, "embedding_dim": 8},
    "dlrm": {"embedding_dim": 8, "bottom": (16, 8), "top": (32, 16)},
    "dcnv2": {"embedding_dim": 8, "bottom": (), "cross_layers": 2, "cross_rank": 16, "top": (32, 16)},
}
"""Settings under which a model fits the made-up data in seconds."""

NAMES = sorted(MODELS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("models") / "interactions")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("models") / "clicks")


def build(name: str, spec: FeatureSpec, **changed: object) -> Model:
    torch.manual_seed(0)
    model = MODELS[name](spec, MODELS[name].Settings.model_validate({**SMALL[name], **changed}))
    for parameter in model.parameters():  # large enough that rows differ
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def a_batch(spec: FeatureSpec, rows: int = 37) -> Batch:
    return next(iter(Loader(spec, "valid", batch_size=rows, seed=3).batches())).batch


def test_every_model_has_small_settings_here() -> None:
    assert set(SMALL) == set(MODELS)


@pytest.mark.parametrize("name", NAMES)
class TestEveryModel:
    def test_gives_one_finite_logit_a_row(self, name: str, data: FeatureSpec) -> None:
        logits = build(name, data)(a_batch(data))
        assert logits.shape == (37,)
        assert torch.isfinite(logits).all()

    def test_scores_a_row_alone_as_in_a_batch(self, name: str, data: FeatureSpec) -> None:
        model, batch = build(name, data), a_batch(data)
        alone = torch.cat([model(take(batch, slice(row, row + 1))) for row in range(num_rows(batch))])
        torch.testing.assert_close(alone, model(batch), atol=1e-5, rtol=1e-5)

    def test_does_not_look_at_the_label(self, name: str, data: FeatureSpec) -> None:
        model, batch = build(name, data), a_batch(data)
        without = {feature: tensor for feature, tensor in batch.items() if feature in model.features()}
        assert data.label not in without
        assert torch.equal(model(batch), model(without))

    def test_has_a_scalar_loss_that_reaches_every_parameter(self, name: str, data: FeatureSpec) -> None:
        model = build(name, data).train()
        loss = model.loss(a_batch(data))
        assert loss.shape == ()
        loss.backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []

    def test_scores_items_as_the_pairs_one_by_one(self, name: str, data: FeatureSpec) -> None:
        model = build(name, data)
        batch = a_batch(data, rows=5)
        item_names = [feature for feature in model.features() if feature in data.role("item")]
        items = item_features(data, ("train",), [feature for feature in item_names if feature != data.item_id])
        items[data.item_id] = torch.arange(data.num_ids(data.item_id))
        request = {feature: tensor for feature, tensor in batch.items() if feature not in item_names}
        with torch.inference_mode():
            scores = model.score_items(request, items)
            pairs = Model.score_items(model, request, items)
        assert scores.shape == (5, data.num_ids(data.item_id))
        torch.testing.assert_close(scores, pairs, atol=1e-5, rtol=1e-5)

    def test_comes_back_from_a_bundle_with_the_same_logits(self, name: str, data: FeatureSpec, tmp_path: Path) -> None:
        model, batch = build(name, data), a_batch(data)
        card = Card(model=name, settings=model.settings.model_dump(mode="json"))
        bundle.save(tmp_path / "bundle", model, card)
        back = bundle.load(tmp_path / "bundle").model
        for name, value in model.state_dict().items():
            assert torch.equal(back.state_dict()[name], value), name
        # A product's last bit may depend on where in memory a weight begins.
        torch.testing.assert_close(back(batch), model(batch), atol=1e-6, rtol=1e-6)

    def test_trains_on_labelled_rows_without_drawn_negatives(
        self, name: str, clicks: FeatureSpec, tmp_path: Path
    ) -> None:
        settings = TrainSettings(epochs=8, batch_size=256, learning_rate=0.01, tensorboard=False)
        train(
            name, clicks, tmp_path / "run", settings=settings,
            model_settings=MODELS[name].Settings.model_validate(SMALL[name]),
        )  # fmt: skip
        found = bundle.load(tmp_path / "run").card.metrics["rows"]["auc"]
        assert found > 0.55

    def test_reaches_most_of_what_the_best_possible_ranking_does(
        self, name: str, data: FeatureSpec, tmp_path: Path
    ) -> None:
        settings = TrainSettings(epochs=30, batch_size=1024, learning_rate=0.01, tensorboard=False)
        train(
            name, data, tmp_path / "run", settings=settings,
            model_settings=MODELS[name].Settings.model_validate(SMALL[name]),
        )  # fmt: skip
        best = data.metadata["summary"]["best_possible"]  # type: ignore[index]
        reached = evaluate_model(bundle.load(tmp_path / "run").model, data, "test", protocols=("sampled",))
        assert reached.metrics["sampled"]["ndcg@10"] > 0.75 * best["test"]["ndcg@10"]

    def test_says_what_is_missing_in_a_specification_with_nothing_but_a_label(self, name: str) -> None:
        bare = FeatureSpec.from_dict({"feature_spec": {"label": {}}, "channel_spec": {"label": ["label"]}})
        roles = f"{MODELS[name].__name__} needs a feature in the role '.*'; add one to"
        with pytest.raises(RecspecError, match=f"{roles}|there is no feature to read in the roles"):
            MODELS[name](bare, MODELS[name].Settings())

    def test_is_the_same_for_the_same_seed(self, name: str, data: FeatureSpec) -> None:
        made = []
        for _ in range(2):
            torch.manual_seed(5)
            made.append(MODELS[name](data, MODELS[name].Settings.model_validate(SMALL[name])))
        for left, right in zip(made[0].parameters(), made[1].parameters(), strict=True):
            assert torch.equal(left, right)

    def test_scores_a_split_in_its_order(self, name: str, data: FeatureSpec) -> None:
        model = build(name, data)
        scores = score_rows(model, data, "valid")
        whole = next(iter(Loader(data, "valid", batch_size=10**6, shuffle=False).batches())).batch
        np.testing.assert_allclose(scores, model(whole).detach().numpy(), atol=1e-5)
        labels = open_split(data, "valid").read(0, len(scores))[data.label]
        assert 0 < metrics.auc(scores, np.asarray(labels) > 0) < 1
