"""`recspec report` and `recspec describe --html`."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from recspec.base import config
from recspec.base.errors import BundleError, SettingsError
from recspec.cli import app as cli
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.training import TrainSettings, train
from tests import made_up


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("report") / "data", num_rows=600, num_users=40, num_items=20)


def invoke(*words: object) -> str:
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_report_writes_a_page_and_prints_its_path(data: FeatureSpec, tmp_path: Path) -> None:
    own = config.build(MODELS["popularity"].Settings, "", {})
    train("popularity", data, tmp_path / "run", settings=TrainSettings(tensorboard=False), model_settings=own)
    assert invoke("report", tmp_path / "run").strip() == str(tmp_path / "run" / "report.html")
    named = invoke("report", tmp_path / "run", "--out", tmp_path / "page.html", "--data", data.folder)
    assert named.strip() == str(tmp_path / "page.html")
    for page in (tmp_path / "run" / "report.html", tmp_path / "page.html"):
        assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(BundleError, match="no such folder"):
        invoke("report", tmp_path / "rum")


def test_describe_writes_a_page_or_prints_json(data: FeatureSpec, tmp_path: Path) -> None:
    assert invoke("describe", data.folder, "--html", tmp_path / "data.html").strip() == str(tmp_path / "data.html")
    assert "Suspected leaks" in (tmp_path / "data.html").read_text(encoding="utf-8")
    with pytest.raises(SettingsError, match="describe: --html and --json are two outputs; give one of them"):
        invoke("describe", data.folder, "--html", tmp_path / "data.html", "--json")
