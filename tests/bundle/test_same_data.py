"""Digests of datasets, and what a run's folder says about itself."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from recspec.base import config
from recspec.base.errors import BundleError, Interrupted
from recspec.base.machine import command_line
from recspec.bundle import data_digest, meaning_digest, run_record
from recspec.bundle import folder as bundle
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.training import TrainSettings, train
from tests import made_up


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("same") / "data", num_users=40, num_items=30, num_rows=500)


def copied(spec: FeatureSpec, folder: Path) -> Path:
    return Path(shutil.copytree(spec.folder, folder))


def test_equal_data_has_one_digest_wherever_and_whenever_it_was_prepared(data: FeatureSpec, tmp_path: Path) -> None:
    again = made_up.interactions(tmp_path / "again", num_users=40, num_items=30, num_rows=500)
    for digest in (data_digest, meaning_digest):
        assert digest(FeatureSpec.load(copied(data, tmp_path / digest.__name__))) == digest(data) == digest(again)


def test_whatever_changes_the_data_changes_its_digest(data: FeatureSpec, tmp_path: Path) -> None:
    other = made_up.interactions(tmp_path / "other", num_users=40, num_items=30, num_rows=500, seed=1)
    assert data_digest(other) != data_digest(data)
    folder = copied(data, tmp_path / "vocabulary")
    file = next((folder / "vocabularies").iterdir())
    file.write_bytes(file.read_bytes() + b"x")
    changed = FeatureSpec.load(folder)
    assert data_digest(changed) != data_digest(data)
    assert meaning_digest(changed) != meaning_digest(data)


def test_data_that_was_not_prepared_is_known_by_its_files(data: FeatureSpec, tmp_path: Path) -> None:
    folder = copied(data, tmp_path / "plain")
    found = []
    for text in (None, "{", "[]"):
        (folder / "prepare.json").unlink() if text is None else (folder / "prepare.json").write_text(text)
        found.append(data_digest(FeatureSpec.load(folder)))
    assert len({*found}) == 1, "a damaged file says nothing"
    spec = FeatureSpec.load(folder)
    file = spec.path(spec.sources["train"][0].files[0])
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    changed = data_digest(spec)
    file.unlink()
    assert len({data_digest(data), found[0], changed, data_digest(spec)}) == 4
    assert meaning_digest(spec) == meaning_digest(data)


def trained(data: FeatureSpec, run: Path, model: str = "popularity", **settings: object) -> Path:
    given = TrainSettings.model_validate({"tensorboard": False, **settings})
    own = config.build(MODELS[model].Settings, "", {} if model == "popularity" else {"factors": 4, "layers": (8, 4)})
    train(model, data, run, settings=given, model_settings=own)
    return run


def test_a_run_knows_its_data_model_and_machine(data: FeatureSpec, tmp_path: Path) -> None:
    runs = {"fitted": trained(data, tmp_path / "fit"), "trained": trained(data, tmp_path / "net", "neumf", epochs=1)}
    for kind, run in runs.items():
        record = run_record.read(run)
        assert record is not None
        assert (record.kind, record.model) == (kind, bundle.read_card(run / "bundle").model)
        assert record.data is not None
        assert (record.data.path, record.data.digest) == (str(data.folder.resolve()), data_digest(data))
        assert record.data.meaning == meaning_digest(bundle.load(run).spec), "the bundle's own"
        assert record.command is None, "pytest is not recspec"
        assert record.seconds is not None
        assert record.peak_memory is not None
        assert "cores" in record.machine
        start = json.loads((run / "log.jsonl").read_text().splitlines()[0])
        told = (start["precision"], start["threads"]) if kind == "trained" else ("", None)
        assert (record.precision, record.threads) == told
        assert run_record.home(run / "bundle") == run


def test_a_run_that_broke_off_and_went_on_keeps_the_time_of_its_start(data: FeatureSpec, tmp_path: Path) -> None:
    run, own = tmp_path / "run", MODELS["neumf"].Settings.model_validate({"factors": 4, "layers": (8, 4)})
    given = TrainSettings.model_validate({"tensorboard": False, "epochs": 2, "batch_size": 100})
    with pytest.raises(Interrupted):
        train("neumf", data, run, settings=given, model_settings=own, stop_requested=lambda: True)
    begun = run_record.read(run)
    assert begun is not None
    assert begun.seconds is None
    begun.model_copy(update={"started": "2020-02-02T02:02:02+00:00"}).write(run)
    train("neumf", data, run, settings=given, model_settings=own, resume=True)
    done = run_record.read(run)
    assert done is not None
    assert done.started == "2020-02-02T02:02:02+00:00"
    assert done.seconds is not None


def test_a_damaged_record_is_one_message(tmp_path: Path) -> None:
    assert run_record.read(tmp_path) is None
    file = tmp_path / "run.json"
    for text, what in (
        ("{", "damaged"),
        ('{"format": 7}', "format 7; this recspec reads 1"),
        ('{"format": 1, "kind": "odd"}', "2 problems"),
    ):
        file.write_text(text)
        with pytest.raises(BundleError, match=what) as caught:
            run_record.read(tmp_path)
        assert str(file) in str(caught.value)


def test_unknown_fields_of_a_later_version_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "kind": "trained", "model": "x", "new": [1]}))
    record = run_record.read(tmp_path)
    assert record is not None
    assert record.model == "x"


def test_the_command_is_known_where_the_program_is_recspec(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("/usr/bin/recspec", "/lib/recspec/__main__.py"):
        monkeypatch.setattr(sys, "argv", [program, "train", "neumf"])
        assert command_line() == ("recspec", "train", "neumf")
    for program in ("/usr/bin/ipython", "", "__main__.py"):
        monkeypatch.setattr(sys, "argv", [program, "train"])
        assert command_line() is None
