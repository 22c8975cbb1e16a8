"""The driver that measures a GPU, on a CPU and small: every kind of task, what fails, and who gets the device."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.model_cases import TRAINED_BY_STEPS

FOLDER = Path(__file__).parents[2] / "benchmarks" / "stress"


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(FOLDER))
    names = ("gpu_lease", "_gpu_tasks", "_gpu_subjects")
    lease, tasks, subjects = (importlib.import_module(name) for name in names)
    yield SimpleNamespace(lease=lease, tasks=tasks, subjects=subjects)
    sys.path.remove(str(FOLDER))
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tasks(modules: SimpleNamespace) -> ModuleType:
    found = modules.tasks
    assert isinstance(found, ModuleType)
    return found


def place(tasks: ModuleType, folder: Path) -> Any:
    return tasks.Place(torch.device("cpu"), True, folder, 0.002)


# --- what is measured ------------------------------------------------------------------------------------------------


def test_every_model_trained_by_steps_is_measured(modules: SimpleNamespace) -> None:
    assert set(modules.subjects.SUBJECTS) == set(modules.lease.MODELS) <= set(TRAINED_BY_STEPS)


def test_published_figures_and_sizes_are_those_of_one_a100(modules: SimpleNamespace) -> None:
    subjects = modules.subjects.SUBJECTS
    published = {name: (each.published, each.published_answers) for name, each in subjects.items() if each.published}
    assert published == {
        "neumf": (34.08e6, 82.7e6),
        "wide_deep": (2.31e6, 10.35e6),
        "dlrm": (4.55e6, 14.8e6),
        "sim": (0.565e6, 1.48e6),
        "dcnv2": (1.37e6, None),
        "mult_vae": (365_474, None),
    }
    assert sum(modules.subjects.CRITEO_T15) == 32_709_138
    batches = {name: subjects[name].batch for name in published}
    assert batches == {
        "neumf": 1 << 20,
        "wide_deep": 131072,
        "dlrm": 65536,
        "sim": 131072,
        "dcnv2": 65536,
        "mult_vae": 24576,
    }


@pytest.mark.parametrize(
    "name", ["dlrm", "sasrec", *(pytest.param(each, marks=pytest.mark.slow) for each in ("neumf", "sim"))]
)
def test_the_tasks_of_a_model_in_their_order(name: str, tasks: ModuleType, tmp_path: Path) -> None:
    found: dict[str, Mapping[str, Any]] = {}
    for task in tasks.tasks_of(name, 1, place(tasks, tmp_path)):
        task.ready()
        found[task.name] = task.run()
    assert not [each for each in found.values() if "error" in each]
    assert list(found)[:4] == [f"smoke:{name}", f"check:{name}", f"train:{name}:bf16", f"profile:{name}:bf16"]
    checked = found[f"check:{name}"]
    assert checked["fp32"]["loss_difference"] == 0.0  # this device is the CPU
    assert 0 < checked["bf16"]["loss_difference"] < 0.03
    trained = found[f"train:{name}:bf16"]
    assert trained["samples_per_second"] > 0
    if trained["published"]:
        assert trained["ratio"] == pytest.approx(trained["samples_per_second"] / trained["published"])
    profiled = found[f"profile:{name}:bf16"]
    assert profiled["launches"] > 0
    assert profiled["flops"] > 0
    assert profiled["largest"][0]["milliseconds"] >= profiled["largest"][1]["milliseconds"]
    answered = found[f"answer:{name}"]["bf16"]
    assert 0 < answered["mean_error"] <= answered["largest_error"] < 0.05
    assert -1 <= answered["correlation"] <= 1


@pytest.mark.parametrize("phase", [1, 2])
def test_no_two_tasks_of_a_phase_have_one_name(phase: int, modules: SimpleNamespace, tmp_path: Path) -> None:
    for process in modules.lease.PROCESSES:
        names = [task.name for task in modules.tasks.tasks_of(process, phase, place(modules.tasks, tmp_path))]
        assert len(names) == len(set(names)), process


def test_weights_that_are_off_are_an_error_with_the_figures(
    tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tasks.Bench("neumf", place(tasks, tmp_path))
    bench.state["cpu"] = [1.0], {"w": torch.ones(2)}
    monkeypatch.setattr(tasks.Bench, "_few_steps", lambda *_, **__: ([1.1], {"w": torch.zeros(2)}))
    assert bench.check("bf16")["error"] == "bf16: loss 1.0e-01 (<= 0.03), weights 1.0e+00 (<= 0.5)"


def test_a_loss_that_is_no_number_is_an_error(
    tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tasks.Bench("dlrm", place(tasks, tmp_path))
    monkeypatch.setattr(tasks, "endless", lambda _: iter([torch.tensor(float("nan"))]))
    with pytest.raises(AssertionError, match="the loss is nan"):
        bench.smoke()


# --- one clock, one device -------------------------------------------------------------------------------------------


class Ends:
    """A process's end of a pipe, as the lease sees it: what it says, and what it is answered."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def send(self, answer: bool) -> None:
        self.answers.append(answer)


class Killed:
    """A process that only notes that it is ended."""

    exitcode = -9

    def __init__(self) -> None:
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1

    def join(self, _: float) -> None:
        pass


def lease_of(modules: SimpleNamespace, tmp_path: Path, *wants: tuple[str, bool, float, float]) -> Any:
    arguments = argparse.Namespace(out=tmp_path, processes=[], device="cpu", seconds=100.0, phase=1)
    lease = modules.lease.Lease(arguments, time.monotonic() + 100, str(tmp_path))
    lease._start = lambda name, done=(), restarts=0: modules.lease.Worker(
        name, Killed(), Ends(), done=set(done), restarts=restarts
    )
    for place_in_queue, (name, alone, worth, seconds) in enumerate(wants):
        worker = modules.lease.Worker(name, Killed(), Ends(), doing=f"task of {name}")
        worker.wants = (alone, worth, seconds, place_in_queue)
        lease.workers.append(worker)
    return lease


def answers(lease: Any) -> dict[str, list[bool]]:
    return {worker.name: worker.conn.answers for worker in lease.workers}


def test_the_most_valuable_request_gets_the_device_alone(modules: SimpleNamespace, tmp_path: Path) -> None:
    lease = lease_of(modules, tmp_path, ("late", True, 3, 5), ("first", True, 1, 5), ("shares", False, 2, 5))
    lease._grant()
    assert answers(lease) == {"late": [], "first": [True], "shares": []}
    lease.workers[1].wants = lease.workers[1].has_since = None  # it is done
    lease._grant()
    lease._grant()
    assert answers(lease) == {"late": [], "first": [True], "shares": [True]}


def test_requests_that_share_get_the_device_together(modules: SimpleNamespace, tmp_path: Path) -> None:
    lease = lease_of(modules, tmp_path, ("a", False, 1, 5), ("b", False, 1, 5), ("alone", True, 2, 5))
    lease._grant()
    assert answers(lease) == {"a": [True], "b": [True], "alone": []}


def test_a_task_is_skipped_when_half_its_time_is_not_left(modules: SimpleNamespace, tmp_path: Path) -> None:
    lease = lease_of(modules, tmp_path, ("long", True, 1, 300), ("short", True, 2, 5))
    lease._grant()
    assert answers(lease) == {"long": [False], "short": [True]}


def test_a_late_task_ends_its_own_process_alone(modules: SimpleNamespace, tmp_path: Path) -> None:
    lease = lease_of(modules, tmp_path, ("hangs", False, 1, 5), ("works", False, 1, 5))
    lease._grant()
    process = lease.workers[0].process
    lease.workers[0].has_since -= 31
    lease._end_late()
    assert process.kills == 1
    assert lease.found == {"task of hangs": {"error": "ended after 30 s on the device"}}
    assert [(each.name, each.done, each.restarts) for each in lease.workers] == [
        ("works", set(), 0),
        ("hangs", {"task of hangs"}, 1),
    ]
    line = json.loads((tmp_path / "lines.jsonl").read_text())
    assert line["task"] == "task of hangs"


def test_a_process_is_started_anew_three_times_at_most(modules: SimpleNamespace, tmp_path: Path) -> None:
    lease = lease_of(modules, tmp_path, ("dies", False, 1, 5))
    for _ in range(4):
        lease._replace(lease.workers[0], "its process ended with status 139")
    assert lease.workers == []


# --- as it is typed --------------------------------------------------------------------------------------------------


def test_a_phase_leaves_lines_a_table_and_a_report(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "gpu_lease.py"), "--device", "cpu", "--small", "--seconds", "300"]
    chosen = ["--models", "device,neumf", "--only", "device,smoke:*,check:*", "--out", str(tmp_path)]
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "phase1.json").read_text())
    assert set(report["tasks"]) == {"device", "smoke:neumf", "check:neumf"}
    assert report["card"] is None
    assert report["torch"] == torch.__version__
    assert {"machine", "date", "commit", "python"} <= set(report)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert {line["task"] for line in lines} == set(report["tasks"])
    assert "3 tasks, 0 failed" in done.stdout


WITHOUT = """
import sys
for name in ("duckdb", "ibis", "onnx", "onnxruntime", "rich", "scipy", "pandas", "optuna", "sklearn", "implicit",
             "tensorboard", "starlette", "grpc", "fbgemm_gpu", "torchrec", "google_crc32c"):
    sys.modules[name] = None
import gpu_lease, _gpu_tasks
print("loaded")
"""


def test_the_driver_loads_with_torch_numpy_and_pyarrow_alone() -> None:
    path = os.pathsep.join([str(FOLDER), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.strip() == "loaded", done.stderr
