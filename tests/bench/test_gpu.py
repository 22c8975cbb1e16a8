"""The script that measures a GPU, on a CPU and small: every kind of task, what fails, and what is kept."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module
    spec.loader.exec_module(module)
    return module


def small(gpu: ModuleType, out: Path, *more: str) -> int:
    given = ["--device", "cpu", "--small", "--here", "--seconds", "0.005", "--out", str(out), "--settings", "bf16,fp32"]
    return int(gpu.main([*given, *more]))


@pytest.fixture(scope="module")
def found(gpu: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    status = small(gpu, out)
    report = json.loads(out.read_text())
    assert status == 0, {task: each for task, each in report["tasks"].items() if "error" in each}
    return dict(report)


MODELS = ("neumf", "wide_deep", "dlrm", "sim")


def test_every_task_is_in_the_report_and_says_where_and_when(found: Mapping[str, Any]) -> None:
    tasks = {"machine", "kernels"}
    for name in MODELS:
        tasks |= {f"check:{name}", f"deterministic:{name}"}
        tasks |= {f"{kind}:{name}:{setting}" for kind in ("train", "answer") for setting in ("bf16", "fp32")}
    assert set(found["tasks"]) == tasks
    assert found["device"] == {"name": "cpu"}
    assert found["torch"] == torch.__version__
    assert {"machine", "date", "commit", "cuda"} <= set(found)


@pytest.mark.parametrize("name", MODELS)
def test_speeds_stand_beside_the_published_ones(name: str, gpu: ModuleType, found: Mapping[str, Any]) -> None:
    subject = gpu.SUBJECTS[name]
    for kind, rate, published in (
        ("train", "samples_per_second", subject.published),
        ("answer", "rows_per_second", subject.published_answers),
    ):
        own = {task: each for task, each in found["tasks"].items() if task.startswith(f"{kind}:{name}:")}
        for each in own.values():
            assert each["published"] == published
            assert each["ratio"] == pytest.approx(each[rate] / published)
            assert each["peak_memory_bytes"] > 0
        assert found["best"][f"{kind}:{name}"] == max(own, key=lambda task: own[task][rate])
    trained = found["tasks"][f"train:{name}:bf16"]
    assert trained["flops_per_step"] > 0
    assert trained["bytes_per_step"] > 0
    assert 0 < trained["share_of_matrix_rate"] < 10
    assert 0 < trained["share_of_bandwidth"] < 10


@pytest.mark.parametrize("name", MODELS)
def test_the_device_is_held_against_the_cpu(name: str, found: Mapping[str, Any]) -> None:
    checked = found["tasks"][f"check:{name}"]
    assert checked["fp32"]["loss_difference"] == 0.0  # this device is the CPU
    assert 0 < checked["bf16"]["loss_difference"] < 0.02
    assert len(checked["losses_on_cpu"]) == 8
    assert found["tasks"][f"deterministic:{name}"]["equal"] is True


def test_published_figures_are_those_of_one_a100(gpu: ModuleType) -> None:
    assert {name: (each.published, each.published_answers) for name, each in gpu.SUBJECTS.items()} == {
        "neumf": (34.08e6, 82.7e6),
        "wide_deep": (2.31e6, 10.35e6),
        "dlrm": (4.55e6, 14.8e6),
        "sim": (0.565e6, 1.48e6),
    }
    assert sum(gpu.CRITEO_T15) == 32_709_138
    batches = {name: (each.batch, each.answers) for name, each in gpu.SUBJECTS.items()}
    assert batches == {
        "neumf": (1 << 20, 1 << 20), "wide_deep": (131072, 131072), "dlrm": (65536, 32768), "sim": (131072, 131072)
    }  # fmt: skip


def test_a_gpu_has_all_settings_and_a_cpu_those_it_can(gpu: ModuleType) -> None:
    of_gpu, of_cpu = gpu.tasks_of(["dlrm"], "cuda")["dlrm"], gpu.tasks_of(["dlrm"], "cpu")["dlrm"]
    assert of_gpu[:3] == ["check:dlrm", "train:dlrm:bf16 compile", "answer:dlrm:bf16 compile"]
    assert {f"train:dlrm:{each}" for each in gpu.TRAINING} <= set(of_gpu)
    assert {f"answer:dlrm:{each}" for each in gpu.ANSWERS} <= set(of_gpu)
    assert not [task for task in of_cpu if "fp16" in task]
    assert gpu.tasks_of(["dlrm"], "cuda", ["fp32"])["dlrm"] == [
        "check:dlrm", "train:dlrm:fp32", "answer:dlrm:fp32", "deterministic:dlrm"
    ]  # fmt: skip


def test_tables_are_capped_to_what_a_device_holds(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = gpu.Scene(torch.device("cpu"), False, Path())
    for gigabytes, most in ((80, 2**31 - 1), (16, 1 << 21), (4, 1 << 19)):
        monkeypatch.setattr(gpu, "_memory", lambda _, gigabytes=gigabytes: gigabytes * 10**9)
        assert scene.most_ids("dlrm") == most
        assert sum(min(most, size) for size in gpu.CRITEO_T15) * 512 <= 0.6 * gigabytes * 10**9
    assert scene.most_ids("neumf") == 2**31 - 1


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_task_that_fails_is_told_and_the_others_go_on(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(gpu, "train", broken)
    monkeypatch.setattr(gpu, "deterministic", lambda *_: {"equal": True, "steps": 1, "costs": 0.5})
    out = tmp_path / "gpu.json"
    assert small(gpu, out, "--models", "neumf", "--settings", "fp32") == 1
    tasks = json.loads(out.read_text())["tasks"]
    assert tasks["train:neumf:fp32"] == {"error": "RuntimeError: CUDA error: an illegal memory access"}
    assert tasks["answer:neumf:fp32"]["rows_per_second"] > 0
    printed = capsys.readouterr().out
    assert "train:neumf:fp32                   FAILED: RuntimeError: CUDA error: an illegal memory access" in printed
    assert "equal bit for bit after 1 steps; costs +50% of the time" in printed
    # What is there is kept, what failed is tried again.
    monkeypatch.setattr(gpu, "train", lambda *_: {"samples_per_second": 1.0, "published": 2.0, "ratio": 0.5,
                                                  "milliseconds_per_step": 1.0, "peak_memory_bytes": 1})  # fmt: skip
    monkeypatch.setattr(gpu, "answer", broken)
    assert small(gpu, out, "--models", "neumf", "--settings", "fp32") == 0
    assert json.loads(out.read_text())["tasks"]["answer:neumf:fp32"] == tasks["answer:neumf:fp32"]


CHILD = """
import json, os, sys, time
for task in sys.argv[1:]:
    print(json.dumps({"begun": task}), flush=True)
    print("a line of somebody else", flush=True)
    if task == "dies":
        print("Segmentation fault (made up)", file=sys.stderr, flush=True)
        os._exit(139)
    if task == "hangs":
        time.sleep(60)
    print(json.dumps({"task": task, "found": {"pid": os.getpid()}}), flush=True)
"""


def test_a_process_that_dies_takes_one_task_with_it_and_one_that_hangs_is_ended(
    gpu: ModuleType, tmp_path: Path
) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    command = [sys.executable, str(child)]
    done = dict(gpu.supervise(command, ["first", "dies", "second", "third"], 30))
    assert list(done) == ["first", "dies", "second", "third"]
    assert done["dies"] == {"error": "its process ended with status 139: Segmentation fault (made up)"}
    assert done["first"]["pid"] != done["second"]["pid"] == done["third"]["pid"]
    late = dict(gpu.supervise(command, ["first", "hangs", "second"], 1.5))
    assert "pid" in late["first"]
    assert late["hangs"] == {"error": "not done within the 0.0 minutes of --minutes"}
    assert late["second"] == {"error": "not begun: the time of --minutes was over"}


def test_weights_that_are_off_fail_the_check(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([([1.0], {"w": torch.ones(2)}), ([1.0], {"w": torch.ones(2)}), ([1.1], {"w": torch.zeros(2)})])
    monkeypatch.setattr(gpu, "_few_steps", lambda *_: next(ends))
    with pytest.raises(AssertionError, match=r"^bf16: loss 1\.00e-01 \(at most 0\.02\), weights 1\.00e\+00 \(0\.5\)$"):
        gpu.check("neumf", gpu.Scene(torch.device("cpu"), True, tmp_path))


def test_traffic_counts_what_operations_read_and_write(gpu: ModuleType) -> None:
    table, ids, x = torch.ones(100, 4), torch.tensor([1, 2]), torch.ones(8)
    traffic = gpu.Traffic()
    with traffic:
        rows: Tensor = table.index_select(0, ids)  # 32 bytes taken, not the table's 1600, and written
        _ = (x + x).view(2, 4)  # twice 32 read, 32 written; a view costs nothing
    assert rows.shape == (2, 4)
    assert traffic.bytes == 2 * 32 + 3 * 32


# --- without what the machine lacks ----------------------------------------------------------------------------------

WITHOUT = """
import sys
for name in ("duckdb", "ibis", "onnx", "onnxruntime", "rich", "scipy", "pandas", "optuna", "sklearn", "implicit",
             "tensorboard", "starlette", "grpc", "fbgemm_gpu", "torchrec"):
    sys.modules[name] = None
import runpy
runpy.run_path({script!r}, run_name="gpu")
print("loaded")
"""


def test_the_script_loads_with_torch_numpy_and_pyarrow_alone() -> None:
    code = WITHOUT.replace("{script!r}", repr(str(SCRIPT)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "loaded", done.stderr
