"""Every command that writes a folder refuses one that another process is writing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recspec.base.errors import DataError
from recspec.base.files import locked, locked_inside
from recspec.cli.app import app
from recspec.models import MODELS
from recspec.training import TrainSettings, train
from tests import made_up

COMMANDS = {
    "prepare": "prepare synthetic OUT OUT --set num_rows=100",
    "synthesize": "synthesize DATA OUT --rows 10",
    "transcode": "transcode DATA OUT --to csv",
    "train, fitted": "train popularity DATA OUT",
    "train, by steps": "train neumf DATA OUT",
    "train --force": "train popularity DATA RUN --force",
    "auto": "auto DATA OUT --minutes 1",
    "update": "update RUN DATA",
    "export": "export RUN OUT --format triton",
    "import-tf": "import-tf RUN OUT --columns RUN/run.json",
    "pipeline build": "pipeline build OUT --retriever RUN --ranker RUN",
    "pipeline blend": "pipeline blend OUT RUN RUN --data DATA",
    "recommend": "recommend RUN --all --out OUT",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("one_writer")
    data = made_up.interactions(folder / "data")
    own = MODELS["popularity"].Settings()
    train("popularity", data, folder / "run", settings=TrainSettings(tensorboard=False), model_settings=own)
    return {"DATA": str(folder / "data"), "RUN": str(folder / "run"), "OUT": str(folder / "out")}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_another_process_writes_is_refused(command: str, places: dict[str, str]) -> None:
    out, updates = Path(places["OUT"]), Path(places["RUN"]) / "updates"
    with ExitStack() as held:
        for lock in (locked(out, "writing"), locked_inside(out, "writing"), locked_inside(updates, "updating")):
            held.enter_context(lock)
        words = [word.replace("RUN/", f"{places['RUN']}/") for word in COMMANDS[command].split()]
        found = CliRunner().invoke(app, [places.get(word, word) for word in words])
    assert isinstance(found.exception, DataError), found.output
    said = str(found.exception)
    assert "another process is " in said
    assert "; wait for it, end it, or name another folder" in said
    assert (Path(places["RUN"]) / "bundle" / "bundle.json").is_file()
