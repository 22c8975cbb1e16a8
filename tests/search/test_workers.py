"""Worker processes of a search: they share its trials, and one that is killed loses nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.training.run_folder import Event
from recspec.training.search import tune
from recspec.training.search.tune import Tuning, workers
from tests import made_up
from tests.processes import Running
from tests.search.test_tune import RATES, VALUES


def act(stop_requested: Callable[[], bool], folder: Path) -> None:
    """What a worker of the tests does: the first one that comes dies, the next one fails, and another one waits."""
    if claimed(folder / "dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    if claimed(folder / "fails"):
        raise SettingsError("the folder holds another search")
    (folder / "waits").mkdir()
    while not stop_requested():
        time.sleep(0.01)
    (folder / "stopped").mkdir()


def stay(stop_requested: Callable[[], bool], folder: Path) -> None:  # noqa: ARG001
    """A worker that computes without a pause."""
    tune.END_SECONDS = 0.1
    (folder / str(os.getpid())).mkdir()
    while True:
        time.sleep(0.01)


def claimed(role: Path) -> bool:
    try:
        role.mkdir()
    except FileExistsError:
        return False
    return True


@pytest.mark.slow
def test_a_worker_that_did_not_end_well_is_told_of_and_the_others_are_asked_to_stop(tmp_path: Path) -> None:
    with workers(3, act, {"folder": tmp_path}) as others:
        while len(others.problems()) < 2 or not (tmp_path / "waits").exists():
            time.sleep(0.01)
        assert others.work
        failed, killed = others.problems()
    assert "was killed by SIGKILL; the others go on with its trial" in killed
    assert failed.endswith(" ended: the folder holds another search")
    assert not others.work
    assert (tmp_path / "stopped").exists()


@pytest.mark.slow
def test_a_worker_ends_soon_after_the_process_that_started_it(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from recspec.training.search.tune import workers
from tests.search.test_workers import stay
with workers(1, stay, {"folder": Path(sys.argv[1])}):
    time.sleep(600)
"""
    parent = Running(code, str(tmp_path))
    while not (found := list(tmp_path.iterdir())):
        assert parent.runs, parent.ended().stderr
        time.sleep(0.01)
    os.kill(parent.pid, signal.SIGKILL)
    status = Path(f"/proc/{found[0].name}/stat")
    while status.exists() and ") Z " not in status.read_text():  # nobody may be there to collect its end
        time.sleep(0.01)


def test_one_worker_starts_no_process() -> None:
    with workers(0, act, {}) as others:
        assert (others.work, others.problems()) == (False, [])


@pytest.mark.slow
def test_the_trial_of_a_killed_worker_goes_on_in_another(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    data: FeatureSpec = made_up.interactions(tmp_path / "data")
    values = {**VALUES, "train": {**VALUES["train"], "epochs": 6}}
    killed: list[int] = []
    told: list[str] = []

    def see(trial: int, event: Event) -> None:
        if event["event"] == "worker":
            told.append(str(event["message"]))
        if not killed and event["event"] == "epoch":
            others = [path for path in (tmp_path / "search" / "trials").iterdir() if path.name != f"{trial:04d}"]
            if any((path / "log.jsonl").exists() for path in others if path.is_dir()):
                children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                killed.extend(pid for pid in map(int, children) if b"spawn_main" in cmdline(pid))
                os.kill(killed[0], signal.SIGKILL)

    found = Tuning(
        "neumf", data, tmp_path / "search", values, dict(RATES), trials=5, only=True, workers=2, on_event=see
    ).run()
    assert killed
    assert len(told) == 1
    assert "was killed by SIGKILL" in told[0]
    assert [trial.state for trial in found.trials].count("running") == 0
    assert found.left == 0


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
