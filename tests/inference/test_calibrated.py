"""A calibrated bundle answers alike wherever it is asked, and ranks as before: every model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from recspec.base.errors import BundleError
from recspec.base.files import manifest
from recspec.bundle import folder as bundle
from recspec.bundle.folder import Card
from recspec.evaluation import evaluate, evaluate_model, read_rows, score_rows
from recspec.export.exported_model import EagerModel, as_inputs
from recspec.export.exporter import sample_of
from recspec.feature_spec import FeatureSpec
from recspec.feature_spec.signature import signature_of
from recspec.inference import Predictor
from recspec.metrics.calibration import Calibration
from recspec.metrics.measures import log_loss
from recspec.models import MODELS
from recspec.models.layers.batch import num_rows
from recspec.serving.model_folders import copy_version
from recspec.serving.opened_model import open_version
from recspec.serving.settings import RepositorySettings
from tests import made_up
from tests.model_cases import MODEL_CASES
from tests.models.test_models import build

ISOTONIC = Calibration(method="isotonic", logits=(-0.4, -0.1, 0.1, 0.3), calibrated=(-2.0, -0.3, 0.1, 1.5))
TEMPERATURE = Calibration(method="temperature", logits=(0.0, 1.0), calibrated=(-0.5, 0.25))


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("calibrated") / "clicks", num_rows=800)


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.sequences(tmp_path_factory.mktemp("calibrated") / "sequences", num_rows=400, length=6)


def saved(folder: Path, name: str, spec: FeatureSpec, calibration: Calibration | None) -> Path:
    model = build(name, spec, **MODEL_CASES[name].tiny)
    own = model.settings.model_dump(mode="json")
    return bundle.save(folder, model, Card(model=name, settings=own, calibration=calibration))


@pytest.mark.slow
@pytest.mark.parametrize("calibration", [ISOTONIC, TEMPERATURE], ids=["isotonic", "temperature"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_predictions_exports_and_the_server_give_the_calibrated_probabilities(
    name: str, calibration: Calibration, clicks: FeatureSpec, sequences: FeatureSpec, tmp_path: Path
) -> None:
    spec = sequences if "history" in MODELS[name].needs else clicks
    folder = saved(tmp_path / "bundle", name, spec, calibration)
    trained, plain = bundle.load(folder), bundle.load(saved(tmp_path / "plain", name, spec, None))
    batch = sample_of(trained, spec).batch
    with torch.inference_mode():
        logits = trained.model(batch).numpy()
        assert torch.equal(trained.model(batch), plain.model(batch))  # same operations: rankings stay
    expected = 1 / (1 + np.exp(-calibration(logits)))
    predicted = Predictor.open(folder, device="cpu").predict_batch(batch, num_rows(batch))["probability"]
    np.testing.assert_allclose(predicted, expected, atol=1e-6)
    signature = signature_of(spec, trained.model.features(), "rows")
    inputs = as_inputs(batch, signature)
    copy = copy_version(folder, tmp_path / "copy", verify=True)
    answers = {
        "eager": EagerModel(trained.model, signature).run(inputs),
        "server": open_version(copy, (), RepositorySettings(device="cpu")).run(inputs),
    }
    for who, answer in answers.items():
        np.testing.assert_allclose(answer["probability"][:, 0], expected, atol=1e-6, err_msg=who)
        np.testing.assert_allclose(answer["logit"][:, 0], logits, atol=1e-6, err_msg=who)


def test_an_evaluation_reports_losses_with_the_calibration_and_without(clicks: FeatureSpec, tmp_path: Path) -> None:
    trained = bundle.load(saved(tmp_path / "bundle", "dlrm", clicks, TEMPERATURE))
    plain = bundle.load(saved(tmp_path / "plain", "dlrm", clicks, None))
    found = evaluate(trained, clicks, "valid", protocols=["rows"])
    without = evaluate_model(plain.model, clicks, "valid", protocols=["rows"]).metrics["rows"]
    reached, labels = found.metrics["rows"], read_rows(clicks, "valid").labels
    logits = score_rows(plain.model, clicks, "valid")
    assert reached["log_loss"] == pytest.approx(log_loss(TEMPERATURE(logits), labels), rel=1e-6)
    assert reached["log_loss_uncalibrated"] == without["log_loss"]
    assert reached["calibration_error_uncalibrated"] == without["calibration_error"]
    assert reached["auc"] == without["auc"]
    assert found.to_dict()["probabilities"]["is_calibrated"] is True  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"calibrated": [0.0, 0.0]}, "calibration: Value error, slopes from 0 to 0"),
        ({"calibrated": [1.0, -1.0]}, "slopes from -2 to -2"),
        ({"logits": [0.0] * 99}, "at most 66 items"),
        ({"logits": ["a", "b"]}, "valid number"),
    ],
)
def test_a_damaged_calibration_is_refused_on_opening(
    change: dict[str, object], message: str, clicks: FeatureSpec, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "bundle", "dlrm", clicks, TEMPERATURE)
    card = json.loads((folder / "bundle.json").read_text())
    card["calibration"] |= change
    (folder / "bundle.json").write_text(json.dumps(card))
    manifest.write(folder)
    with pytest.raises(BundleError, match=r"bundle\.json: damaged") as raised:
        bundle.load(folder)
    assert message.removeprefix("calibration: ") in str(raised.value)


def test_a_card_keeps_warnings_for_whoever_opens_the_bundle(clicks: FeatureSpec, tmp_path: Path) -> None:
    warning = {"kind": "overconfident", "message": "the model is overconfident"}
    folder = saved(tmp_path / "bundle", "dlrm", clicks, None)
    trained = bundle.load(folder)
    card = trained.card.model_copy(update={"warnings": (warning,)})
    again = bundle.load(bundle.save(tmp_path / "again", trained.model, card))
    assert again.card.warnings == (warning,)
