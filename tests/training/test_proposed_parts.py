"""Proposed settings of parts of a model: parts that are absent or frozen, and given settings that forbid a decay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.training import train
from recspec.training.defaults import Resolved, resolve
from recspec.training.settings import TrainSettings
from tests import made_up


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("parts") / "clicks")


def resolved(spec: FeatureSpec, model: str, own: Mapping[str, object] = {}, **given: object) -> Resolved:
    settings = TrainSettings.model_validate(given)
    chosen = MODELS[model]
    return resolve(chosen, spec, settings, chosen.Settings.model_validate(own), torch.device("cpu"))


def test_a_part_that_given_settings_leave_out_is_not_proposed(clicks: FeatureSpec) -> None:
    assert [*resolved(clicks, "wide_deep").settings.parts] == ["deep.embeddings", "wide.tables"]
    assert [*resolved(clicks, "wide_deep", {"use_wide": False}).settings.parts] == ["deep.embeddings"]
    neither = resolved(clicks, "wide_deep", {"use_wide": False, "deep_features": ["speed"]})
    assert neither.settings.parts == {}
    assert "train.parts" not in neither.proposed


def test_a_frozen_part_is_not_proposed(clicks: FeatureSpec) -> None:
    assert [*resolved(clicks, "wide_deep", frozen=["deep"]).settings.parts] == ["wide.tables"]
    assert resolved(clicks, "dcnv2", frozen=["embeddings"]).settings.parts == {}


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "sgd"},
        {"weight_decay": 1e-4},
        {"weight_decay": 0.0},
        {"sparse_gradients": "always"},
        {"embedding_backend": "fbgemm"},
    ],
)
def test_given_settings_that_a_decay_of_whole_tables_does_not_suit_win(
    clicks: FeatureSpec, given: dict[str, object]
) -> None:
    found = resolved(clicks, "dlrm", **given)
    assert found.settings.parts == {}
    assert "train.parts" not in found.proposed
    assert found.settings.batch_size is not None


def test_given_parts_win(clicks: FeatureSpec) -> None:
    parts = {"embeddings": {"learning_rate": 0.01}}
    assert resolved(clicks, "dcnv2", parts=parts).settings.parts == parts


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dlrm", "dcnv2", "wide_deep"])
def test_without_any_setting_the_model_beats_a_constant(model: str, clicks: FeatureSpec, tmp_path: Path) -> None:
    chosen = MODELS[model]
    settings = TrainSettings.model_validate({"tensorboard": False, "precision": "fp32"})
    result = train(model, clicks, tmp_path / "run", settings=settings, model_settings=chosen.Settings())
    assert result.metrics["rows"]["auc"] > 0.6
    assert result.metrics["rows"]["log_loss"] < 0.69
