"""Training on a Ray cluster: two workers learn as one process, and a worker that is killed loses nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recspec import api
from recspec.base.errors import MissingExtraError, SettingsError
from recspec.feature_spec import FeatureSpec
from tests import made_up

SETTINGS: dict[str, object] = {
    "embedding_dim": 4,
    "bottom": [8, 4],
    "top": [8],
    "dropout": 0.0,
    "train.epochs": 3,
    "train.batch_size": 333,
    "train.tensorboard": False,
    "train.precision": "fp32",
    "train.log_every": 1,
    "train.checkpoint_minutes": 0,
}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("ray") / "data")


def has_ray() -> bool:
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def workers() -> list[int]:
    """Process ids of Ray's training workers on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if line.startswith(b"ray::") and b"TrainWorker" in line:
            found.append(int(path.parent.name))
    return found


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_processes_need_a_launcher_and_ray_its_extra(clicks: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="processes is 2 without a launcher; take launcher ray, or start torchrun"):
        api.train("dlrm", clicks.folder, tmp_path / "run", processes=2, progress=False)
    if has_ray():
        return
    with pytest.raises(MissingExtraError, match=r"needs the library 'ray'.*pip install 'recspec\[ray\]'"):
        api.train("dlrm", clicks.folder, tmp_path / "run", processes=2, launcher="ray", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray warns of its own settings
def test_two_ray_workers_train_as_one_process_even_if_one_is_killed(
    clicks: FeatureSpec, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    killed: list[float] = []
    seen: list[str] = []

    def see(event: Any) -> None:
        seen.append(event["event"])
        if event["event"] == "step" and event["step"] == 14 and not killed:
            killed.append(time.monotonic())
            os.kill(workers()[-1], signal.SIGKILL)
        if event["event"] == "start" and len(killed) == 1:
            killed.append(time.monotonic())

    run = tmp_path / "ray"
    trained = api.train("dlrm", clicks.folder, run, settings=SETTINGS, launcher="ray", processes=2, progress=see)
    first, second = events(run, "start")
    assert first["world_size"] == second["world_size"] == 2
    assert second["resumed_at_step"] >= 13
    assert seen.count("done") == 1
    assert trained.predict is not None
    assert not (run / ".ray").exists()
    record_property("seconds from the kill to the next start", round(killed[1] - killed[0], 1))

    alone = tmp_path / "alone"
    api.train("dlrm", clicks.folder, alone, settings=SETTINGS, progress=False)
    expected = {event["step"]: event["loss"] for event in events(alone, "step")}
    found = {event["step"]: event["loss"] for event in events(run, "step")}
    assert found == pytest.approx(expected, abs=1e-5)
    with pytest.raises(SettingsError, match="--processes is 1000000, but the Ray cluster has"):
        api.train("dlrm", clicks.folder, tmp_path / "many", launcher="ray", processes=1_000_000, progress=False)
