"""Processes meet, share rows, exchange tensors (three of them, on gloo), and end when one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.loading.ranks import RankLost, Ranks, _is_reported, join, pick_device
from tests import made_up
from tests.processes import PATIENCE, a_store, ranks, recspec


def test_without_torchrun_one_process_is_alone() -> None:
    with join("cpu") as alone:
        assert alone == Ranks(device=torch.device("cpu"))


EXCHANGE = """
import json, torch
from recspec.loading import join

with join("cpu") as ranks:
    rank = ranks.rank
    size = [2, 0, 5][rank]
    rows = torch.arange(size) + 10 * rank
    told = {
        "rank": rank,
        "world_size": ranks.world_size,
        "is_first": ranks.is_first,
        "gather": ranks.gather(rows).tolist(),
        "matrix": ranks.gather(rows[:, None].float() * torch.ones(3)).sum(1).tolist(),
        "bools": ranks.gather(rows % 2 == 0).tolist(),
        "halves": ranks.gather(rows.half()).tolist(),
        "nothing": list(ranks.gather(torch.zeros(0, 4)).shape),
        "sum": ranks.sum(torch.tensor([rank, 1])).tolist(),
        "any": [ranks.any(rank == 1), ranks.any(False)],
    }
    # Rank r sends r rows to each rank, rows that say who sent them and to whom.
    rows = torch.tensor([[rank, to] for to in range(3) for _ in range(rank)], dtype=torch.int64).view(-1, 2)
    told["swapped"] = ranks.swap(rows, [rank] * 3, [0, 1, 2]).tolist()
    told["told the first"] = [ranks.to_first(torch.tensor([rank]), 0).tolist()]  # its own: nobody else is asked
    if rank != 1:
        told["told the first"].append(ranks.to_first(torch.tensor([rank]), 2).tolist())
    told["here"] = ranks.local_world_size
    kept = torch.tensor([float(rank)])
    ranks.sum(kept)
    told["untouched"] = kept.item() == rank
    ranks.barrier()
    print(json.dumps(told))
"""


def run_ranks(
    code: str, world_size: int, killed: int | None = None, store: TCPStore | None = None, **environment: str
) -> list[dict[str, object]]:
    """What each rank's process prints, in the order of the ranks; one of them may be killed."""
    with ranks(code, world_size, store=store, **environment) as processes:
        done = [process.ended() for process in processes]
    for rank, each in enumerate(done):
        assert each.returncode == (-signal.SIGKILL if rank == killed else 0), each.stderr
    return [json.loads(each.stdout) for rank, each in enumerate(done) if rank != killed]


def test_three_processes_tell_each_other_the_same() -> None:
    told = run_ranks(EXCHANGE, 3)
    gathered = [0, 1, 20, 21, 22, 23, 24]
    assert [each.pop("rank") for each in told] == [0, 1, 2]
    assert [each.pop("is_first") for each in told] == [True, False, False]
    assert [each.pop("swapped") for each in told] == [[[1, to], [2, to], [2, to]] for to in range(3)]
    assert [each.pop("told the first") for each in told] == [[[0], [2]], [[1]], [[2], [2]]]
    assert [each.pop("here") for each in told] == [3, 3, 3]
    for each in told:
        assert each == {
            "world_size": 3,
            "gather": gathered,
            "matrix": [3.0 * row for row in gathered],
            "bools": [row % 2 == 0 for row in gathered],
            "halves": [float(row) for row in gathered],
            "nothing": [0, 4],
            "sum": [3, 3],
            "any": [True, False],
            "untouched": True,
        }


AGAIN = """
import json, torch
from recspec.loading import join

told = []
for turn in range(3):
    with join("cpu") as ranks:
        told.append(ranks.gather(torch.tensor([10 * turn + ranks.rank])).tolist())
print(json.dumps({"gathered": told}))
"""


def test_processes_may_meet_again_after_they_have_left() -> None:
    assert run_ranks(AGAIN, 2) == [{"gathered": [[0, 1], [10, 11], [20, 21]]}] * 2


# --- a rank that fails -----------------------------------------------------------------------------------------------

ENDING = """
import json, os, signal, torch
from recspec.loading import join
from recspec.base.errors import Interrupted, SettingsError

def fate(ranks):
    {fate}

told = {{}}
try:
    with join("cpu") as ranks:
        ranks.barrier()
        with ranks.guarded(lambda: "go on from step 7"):
            fate(ranks)
            while True:
                ranks.sum(torch.ones(1))
except Exception as error:
    told = {{"error": str(error), "kind": type(error).__name__, "told": getattr(error, "told", None)}}
print(json.dumps({{"pid": os.getpid(), **told}}))
"""


def ending(fate: str) -> str:
    return ENDING.format(fate=fate)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_is_killed_ends_the_others_and_one_of_them_says_how_to_go_on(victim: int) -> None:
    told = run_ranks(ending(f"if ranks.rank == {victim}: os.kill(os.getpid(), signal.SIGKILL)"), 3, killed=victim)
    for each in told:
        assert each["kind"] == "RankLost"
        assert re.fullmatch(
            r"rank [0-2]: an exchange with the other ranks broke off \([^\n]+\); torchrun's report names the rank that "
            "failed first; go on from step 7",
            str(each["error"]),
        )
    assert sorted(bool(each["told"]) for each in told) == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SettingsError", "Interrupted"])
def test_an_error_of_all_ranks_is_told_once(kind: str) -> None:
    told = run_ranks(ending(f"raise {kind}('no such setting')"), 3)
    assert [each["error"] for each in told] == ["no such setting"] * 3
    assert sorted(bool(each["told"]) for each in told) == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "told"), [("ValueError", None), ("SettingsError", False)])
def test_a_rank_that_fails_ends_the_others_and_alone_says_why(kind: str, told: bool | None) -> None:
    first, second = run_ranks(ending(f"if ranks.rank == 1: raise {kind}('no number')"), 2)
    assert second == {"pid": second["pid"], "error": "no number", "kind": kind, "told": told}
    assert str(first["error"]).startswith("rank 0: an exchange with the other ranks broke off (")
    assert (first["kind"], first["told"]) == ("RankLost", True)


def test_an_error_is_told_where_the_store_is_gone() -> None:
    store = a_store()
    mistake, lost = SettingsError("no such setting"), RankLost("gone")
    assert [_is_reported(error, store) for error in (mistake, mistake, lost)] == [False, True, True]
    assert not _is_reported(SettingsError("another one"), store), "an error of its own"

    class Gone:
        def add(self, *_: object) -> int:
            raise torch.distributed.DistNetworkError("Connection reset by peer")

    assert not _is_reported(lost, Gone())  # type: ignore[arg-type]


def test_ranks_started_anew_find_each_other_beside_the_words_of_the_dead() -> None:
    code = """
import json, torch
from recspec.loading import join

with join("cpu") as ranks:
    told = {"restarted": ranks.restarted, "sum": ranks.sum(torch.ones(1)).item()}
    ranks.barrier()
print(json.dumps(told))
"""
    store = a_store()
    store.set("recspec/asks/1", "a question of the dead")  # torchrun keeps one store over its restarts
    told = run_ranks(code, 2, store=store, TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_RESTART_COUNT="1")
    assert told == [{"restarted": True, "sum": 2.0}] * 2


# --- a job that loses a process --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("distributed") / "data")


def training(data: FeatureSpec, run: Path, epochs: int = 5) -> list[str]:
    """Arguments of `recspec`."""
    model = {"factors": 4, "layers": [8, 4], "dropout": 0.2}
    of_training = {"epochs": epochs, "batch_size": 1000, "learning_rate": 0.01, "log_every": 1}
    of_training |= {"checkpoint_minutes": 0, "tensorboard": False, "precision": "fp32"}
    chosen = {**model, **{f"train.{name}": value for name, value in of_training.items()}}
    assignments = [part for name, value in chosen.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    return ["train", "neumf", str(data.folder), str(run), *assignments]


def torchrun(*arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    """Two processes of `recspec`; their words on standard error."""
    options = "--nproc-per-node 2 --master-port 0 --rdzv-backend c10d --rdzv-endpoint localhost:0"
    options += f" --max-restarts {restarts}"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options.split(), "-m", "recspec", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def kill_second(job: subprocess.Popen[str], run: Path, how: signal.Signals = signal.SIGKILL) -> int:
    """Kill the second process of a job once a checkpoint is there; gives its number."""
    while not list((run / "checkpoints").glob("step-*")):
        assert job.poll() is None, job.communicate()[1]
        time.sleep(0.01)
    (second,) = [child for child in children(job.pid) if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()]
    os.kill(second, how)
    return second


def ended_with(job: subprocess.Popen[str]) -> int:
    """The job's status once it has ended; what it said stands in a failing test's output."""
    sys.stderr.write(job.communicate(timeout=PATIENCE)[1])
    return job.returncode


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def weights(run: Path) -> bytes:
    return (run / "bundle" / "weights.safetensors").read_bytes()


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="the processes of a job are found in /proc"
)


@pytest.mark.slow
@needs_proc
def test_a_job_that_loses_a_process_ends_and_goes_on(data: FeatureSpec, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = torchrun(*training(data, run, epochs=100_000))
    killed = kill_second(job, run)
    said = job.communicate(timeout=PATIENCE)[1]
    assert job.returncode != 0
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: rank 0: an exchange with the other ranks broke off (")
    step = max(int(path.stem.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert error.endswith(f"; the same command with --resume continues from the checkpoint of step {step}")
    assert f"exitcode  : -9 (pid: {killed})" in said, "torchrun's report names the process"
    assert "recspec/" not in said, "no traceback of ours"
    start = json.loads((run / "log.jsonl").read_text().splitlines()[0])
    epochs = step * 100_000 // start["steps"] + 1  # of which the last is under way
    alone = recspec(*training(data, run, epochs), "--resume")
    assert alone.returncode == 0, alone.stderr
    assert f"continuing from step {step}" in alone.stderr


@needs_proc
@pytest.mark.slow
def test_a_job_that_goes_on_ends_with_the_weights_of_one_that_never_stopped(data: FeatureSpec, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    job = torchrun(*training(data, whole))
    assert ended_with(job) == 0
    job = torchrun(*training(data, run))
    kill_second(job, run)
    assert ended_with(job) != 0
    job = torchrun(*training(data, run), "--resume")
    assert ended_with(job) == 0
    assert weights(run) == weights(whole)


@needs_proc
@pytest.mark.slow
def test_a_job_stops_soon_where_one_process_is_asked_to(data: FeatureSpec, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = torchrun(*training(data, run), "--set", "train.log_every=1000000", "--set", "train.epochs=100000")
    kill_second(job, run, signal.SIGTERM)
    said = job.communicate(timeout=PATIENCE)[1]
    step = max(int(path.stem.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    told = [line for line in said.splitlines() if line.startswith("stopped at step")]
    assert told == [f"stopped at step {step} as asked; nothing is lost: the same command with --resume continues"]


@needs_proc
@pytest.mark.slow
def test_torchrun_starts_a_job_anew_and_it_goes_on_by_itself(data: FeatureSpec, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    job = torchrun(*training(data, whole))
    assert ended_with(job) == 0
    job = torchrun(*training(data, run), restarts=3)
    kill_second(job, run)
    assert ended_with(job) == 0
    starts = [
        event for event in map(json.loads, (run / "log.jsonl").read_text().splitlines()) if event["event"] == "start"
    ]
    assert [start["resumed_at_step"] > 0 for start in starts] == [False, True]
    assert weights(run) == weights(whole)


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_devices_of_a_machine_without_a_gpu() -> None:
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(SettingsError) as caught:
        pick_device("cuda")
    assert str(caught.value) == f"device is 'cuda', but torch {torch.__version__} sees no GPU here; use cpu or auto"


@pytest.mark.usefixtures("two_gpus")
def test_devices_of_a_machine_with_two_gpus() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:0")
    assert pick_device("auto", local_rank=1) == torch.device("cuda:1")
    assert pick_device("cuda:1", local_rank=0) == torch.device("cuda:1")
    for name, local_rank in (("cuda:2", 0), ("cuda", 2)):
        with pytest.raises(SettingsError) as caught:
            pick_device(name, local_rank)
        assert str(caught.value) == "device is 'cuda:2', but torch sees 2 GPUs, the first is cuda:0"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "cudas", "", "mps"])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        pick_device(name)
    assert str(caught.value) == f"device is '{name}'; expected auto, cpu, cuda or cuda:N"


# --- one rank's share of rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 101])
def test_the_shares_of_all_ranks_are_all_rows_once_and_in_order(n: int, world_size: int) -> None:
    shares = [Ranks(rank, world_size).share(n) for rank in range(world_size)]
    assert [row for share in shares for row in range(n)[share]] == list(range(n))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_one_process_tells_itself_what_it_knows() -> None:
    alone = Ranks()
    rows = torch.tensor([[1, 2], [3, 4]])
    assert alone.is_first
    assert torch.equal(alone.gather(rows), rows)
    assert torch.equal(alone.sum(rows), rows)
    assert (alone.any(True), alone.any(False)) == (True, False)
    alone.barrier()
