"""LightGBM over retrievers: its columns by hand, what it may learn from, the same answers everywhere, refusals."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recspec.base.errors import DataError, SettingsError
from recspec.bundle import Bundle, TreeRanker
from recspec.bundle import folder as bundle
from recspec.evaluation import evaluate
from recspec.feature_spec import FeatureSpec
from recspec.inference import PipelineRanker, build_pipeline, ranker_growing
from recspec.inference.predictor import Predictor
from recspec.inference.ranker_growing import grow_ranker
from recspec.inference.requests import RecommendRequest
from recspec.models import MODELS
from recspec.training import TrainSettings, train
from tests import made_up
from tests.closeness import assert_close

pytest.importorskip("lightgbm")

RETRIEVERS = {"item_knn": {"k": 20, "shrink": 1.0, "recency": 1.0}, "popularity": {}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("growing") / "data")


@pytest.fixture(scope="module")
def runs(data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("growing")
    for name, given in RETRIEVERS.items():
        train(
            name, data, folder / name, settings=TrainSettings(tensorboard=False), model_settings=settings(name, given)
        )
    return {name: folder / name for name in RETRIEVERS}


def settings(name: str, given: object) -> Any:
    return MODELS[name].Settings.model_validate(given)


@pytest.fixture(scope="module")
def pipeline(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("growing") / "pipeline"
    build_pipeline(out, [str(each) for each in runs.values()], Path("lightgbm"), candidates=30)
    return out


def ranker_of(trained: Bundle) -> TreeRanker:
    assert isinstance(trained.model, TreeRanker)
    return trained.model


def test_columns_are_scores_ranks_and_spreads_of_members(pipeline: Path) -> None:
    model = ranker_of(bundle.load(pipeline))
    users, items = torch.tensor([3, 5]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.inference_mode():
        found = model.columns(users, items)
        scores = model.models[0].score_users(users).double()
    for row in range(2):
        own = scores[row, items[row]]
        assert_close(found[row, :, 0].float(), own.float())
        higher = [int((scores[row] > value).sum()) for value in own]
        for place, count in enumerate(higher):
            ties = int((scores[row] == own[place]).sum())
            assert math.log(1 + count) <= float(found[row, place, 1]) <= math.log(count + ties) + 1e-9
        assert_close(found[row, :, 2].float(), ((own - scores[row].mean()) / scores[row].std()).float())
    assert model.column_names()[-2:] == ["popularity", "events of the user"]
    assert found[:, :, -2].tolist() == model.counts[items].tolist()
    assert found[:, 0, -1].tolist() == model.events[users].tolist()


def test_pairs_lists_and_all_items_have_the_same_scores(pipeline: Path) -> None:
    model = ranker_of(bundle.load(pipeline))
    users, items = torch.tensor([4, 7]), torch.tensor([9, 2, 5])
    with torch.inference_mode():
        every = model.score_users(users)
        lists = model.score_items({model.user_id: users}, {model.item_id: items})
        pairs = model({model.user_id: users.repeat_interleave(3), model.item_id: items.repeat(2)})
    assert_close(lists, every[:, items])
    assert_close(pairs.view(2, 3), lists)


def test_the_better_retriever_decides_and_its_card_says_so(
    pipeline: Path, runs: dict[str, Path], data: FeatureSpec
) -> None:
    trained = bundle.load(pipeline)
    importance = trained.card.trained["importance"]
    assert isinstance(importance, dict)
    of_neighbours = sum(value for name, value in importance.items() if "item_knn" in name)
    assert of_neighbours > 0.5
    assert trained.card.model == "lambdarank"
    found = evaluate(trained, data, protocols=["full"], of_all=PipelineRanker).metrics["full"]["ndcg@10"]
    popular = evaluate(bundle.load(runs["popularity"]), data, protocols=["full"]).metrics["full"]["ndcg@10"]
    assert found > popular


def test_test_rows_are_not_read(runs: dict[str, Path], data: FeatureSpec) -> None:
    trained = [bundle.load(each) for each in runs.values()]
    whole, facts = grow_ranker(data, trained, 30)
    without = data.replace(sources={split: data.sources[split] for split in ("train", "valid")})
    again, _ = grow_ranker(without, trained, 30)
    weights = again.trees.state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in whole.trees.state_dict().items())
    assert 0 < int(str(facts["groups"])) <= int(str(facts["users"]))


def test_recommendations_name_what_spoke_for_an_item(pipeline: Path) -> None:
    predictor = Predictor(bundle.load(pipeline), torch.device("cpu"))
    users = tuple(predictor.catalogues.raw_ids("user", np.array([1])).to_pylist())
    (answer,) = predictor.recommend(RecommendRequest(users=users, k=3, explain=True))
    for each in answer.items:
        assert each.because is not None
        assert each.because.kind == "features"
        assert each.because.rest is not None
        total = sum(reason.value for reason in each.because.events) + each.because.rest
        assert total == pytest.approx(each.score, abs=1e-5)
    (basket,) = predictor.recommend(RecommendRequest(items=(answer.items[0].item,), k=3))
    assert len(basket.items) == 3


def test_retrievers_that_saw_valid_or_rank_by_features_are_refused(
    runs: dict[str, Path], data: FeatureSpec, tmp_path: Path
) -> None:
    both = TrainSettings(tensorboard=False, train_splits=("train", "valid"))
    train("popularity", data, tmp_path / "both", settings=both, model_settings=settings("popularity", {}))
    small = settings("two_tower", {"dim": 4, "embedding_dim": 4, "hidden": [8]})
    few = TrainSettings(tensorboard=False, epochs=1)
    train("two_tower", data, tmp_path / "towers", settings=few, model_settings=small)
    given = [str(runs["item_knn"]), f"late={tmp_path / 'both'}", str(tmp_path / "towers")]
    with pytest.raises(SettingsError) as refused:
        build_pipeline(tmp_path / "out", given, Path("lightgbm"))
    message = str(refused.value)
    assert "was trained on train and valid; train it on train alone" in message
    assert "two_tower ranks by features; it takes models of the users' events" in message
    assert not (tmp_path / "out" / "bundle").exists()


def test_without_valid_or_enough_hits_nothing_is_grown(
    runs: dict[str, Path], data: FeatureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = [bundle.load(each) for each in runs.values()]
    alone = data.replace(sources={"train": data.sources["train"]})
    with pytest.raises(SettingsError, match="has no split valid to learn the order from"):
        grow_ranker(alone, trained, 30)
    monkeypatch.setattr(ranker_growing, "MOST_USERS", 1)  # who can't both grow trees and stop the growth
    with pytest.raises(DataError, match="too few candidates are positives of valid; take more --candidates"):
        grow_ranker(data, trained, 30)
