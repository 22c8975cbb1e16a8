"""Requests that an evaluation accepts or refuses."""

from pathlib import Path

import numpy as np
import pytest

from recspec import config
from recspec.errors import SettingsError, SpecError
from recspec.evaluation.evaluations import evaluate, evaluate_baselines, evaluate_model, evaluate_ranker
from recspec.evaluation.item_baselines import BASELINES
from recspec.evaluation.question import EvaluateSettings, Question
from recspec.evaluation.row_baselines import ROW_BASELINES
from recspec.spec import FeatureSpec
from tests.evaluation.tables import (
    HELD_OUT,
    RichModel,
    TableModel,
    TableRanker,
    Trained,
    dataset,
    displays,
    rich_dataset,
    with_histories,
)


def test_full_and_sampled_wait_to_be_asked_where_requests_differ(tmp_path: Path) -> None:
    spec = rich_dataset(tmp_path, catalogue=True)
    result = evaluate_model(RichModel(spec, np.zeros((1, 1))), spec, "test")
    assert set(result.metrics) == {"rows"}
    assert result.left_out == {
        "full": "requests differ by 'hour', 'history'; ask for it with the protocol's name",
        "sampled": "the dataset names no group; ask for it with the protocol's name",
    }


def test_a_model_that_ignores_histories_is_asked_for_full_without_being_told(tmp_path: Path) -> None:
    spec = with_histories(tmp_path, {"train": HELD_OUT, "test": HELD_OUT})
    assert "full" in evaluate_model(TableModel(spec, np.eye(4, 8)), spec, "test").metrics
    assert "full" in Question(spec, "test", None, EvaluateSettings()).choose()[1]


def test_unknown_protocols_and_splits_are_refused(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]})
    with pytest.raises(SettingsError, match=r"unknown protocol 'sample' \(did you mean 'sampled'\?\)"):
        evaluate_ranker(TableRanker(np.eye(4, 6)), spec, "test", protocols=["sample"])
    message = r"protocols: unknown protocols 'row' \(did you mean 'rows'\?\), 'x'; known: 'rows', 'sampled', 'full'$"
    with pytest.raises(SettingsError, match=message):
        evaluate_ranker(TableRanker(np.eye(4, 6)), spec, "test", protocols=["row", "x"])
    with pytest.raises(SpecError, match="unknown split 'tset'"):
        evaluate_ranker(TableRanker(np.eye(4, 6)), spec, "tset")


def test_ranking_without_users_and_items_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("0.5,1\n0.1,0\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"x": {}, "label": {}},
            "source_spec": {"test": [{"type": "csv", "features": ["x", "label"], "files": ["test.csv"]}]},
            "channel_spec": {"context": ["x"], "label": ["label"]},
        },
        tmp_path,
    )
    with pytest.raises(SpecError, match="protocol 'full' needs a feature in the role 'item'"):
        Question(spec, "test", ["full"], EvaluateSettings())
    question = Question(spec, "test", None, EvaluateSettings())
    found, missing = evaluate_baselines(question)
    assert not found
    assert missing["logistic_regression"] == missing["ease"] == "the dataset has no split 'train' to fit them on"
    found, missing = evaluate_baselines(question, ["test"])
    assert set(found) == set(ROW_BASELINES)
    assert missing["ease"] == "the dataset has no user and no item"
    assert question.choose()[1] == {
        "full": "the dataset has no user and no item",
        "sampled": "the dataset has no user and no item, and no group",
    }


def test_a_dataset_with_an_item_but_no_user_lacks_the_user_alone(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("7,0,1\n7,1,0\n8,1,1\n8,0,0\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"shown": {"dtype": "int64"}, "ad": {"cardinality": 2}, "label": {}},
            "source_spec": {"train": [{"type": "csv", "features": ["shown", "ad", "label"], "files": ["train.csv"]}]},
            "channel_spec": {"item": ["ad"], "group": ["shown"], "label": ["label"]},
        },
        tmp_path,
    )
    question = Question(spec, "train", None, EvaluateSettings())
    assert question.choose() == (("rows", "sampled"), {"full": "the dataset has no user"})
    found, missing = evaluate_baselines(question)
    assert set(found) == set(ROW_BASELINES)
    assert missing == dict.fromkeys(BASELINES, "the dataset has no user")


def test_users_that_no_feature_tells_apart_have_no_baselines(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("0.5,0,1\n0.1,1,0\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"age": {}, "ad": {"cardinality": 2}, "label": {}},
            "source_spec": {"train": [{"type": "csv", "features": ["age", "ad", "label"], "files": ["train.csv"]}]},
            "channel_spec": {"user": ["age"], "item": ["ad"], "label": ["label"]},
        },
        tmp_path,
    )
    _, missing = evaluate_baselines(Question(spec, "train", None, EvaluateSettings()))
    assert missing == dict.fromkeys(BASELINES, "the dataset has no user")


def test_groups_of_positives_only_cannot_be_ranked_without_users_and_items(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("7,1\n8,1\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"shown": {"dtype": "int64"}, "label": {}},
            "source_spec": {"test": [{"type": "csv", "features": ["shown", "label"], "files": ["test.csv"]}]},
            "channel_spec": {"group": ["shown"], "label": ["label"]},
        },
        tmp_path,
    )
    assert Question(spec, "test", None, EvaluateSettings()).choose()[1]["sampled"] == (
        "the split lists no negatives, and the dataset has no user and no item to draw them for"
    )
    question = Question(spec, "test", ["sampled"], EvaluateSettings())
    with pytest.raises(SpecError, match=r"'sampled' on the split 'test', which lists no negatives, needs .* 'user'"):
        _ = question.candidates


def test_another_dataset_than_the_models_is_refused(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]})
    model = TableModel(spec, np.eye(4, 6))
    larger = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]}, items=7)
    with pytest.raises(SpecError, match="feature 'item' has 7 ids; the model was trained on 6"):
        evaluate(Trained(model), larger, "test")
    with pytest.raises(
        SpecError, match=r"unknown features 'user', 'item'; known: 'display', 'label', 'score', 'leak'$"
    ):
        evaluate(Trained(model), displays(tmp_path, [(0, 0, 0.5, 0)]), "test")


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(SettingsError, match="ks"):
        config.build(EvaluateSettings, "evaluate", {"ks": [0]})
