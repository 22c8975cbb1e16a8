"""Ranks: shares, devices, and what processes tell each other (three of them, on gloo)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from recspec.distributed import Ranks, join, pick_device
from recspec.errors import SettingsError


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("n", [0, 1, 2, 6, 7, 8, 9, 100, 101])
def test_the_shares_of_all_ranks_are_all_rows_once_and_in_order(n: int, world_size: int) -> None:
    shares = [Ranks(rank, world_size).share(n) for rank in range(world_size)]
    assert [row for share in shares for row in range(n)[share]] == list(range(n))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_one_process_tells_itself_what_it_knows() -> None:
    ranks = Ranks()
    rows = torch.tensor([[1, 2], [3, 4]])
    assert ranks.is_first
    assert torch.equal(ranks.gather(rows), rows)
    assert torch.equal(ranks.sum(rows), rows)
    assert (ranks.any(True), ranks.any(False)) == (True, False)
    ranks.barrier()
    with join("cpu") as alone:
        assert alone == Ranks(device=torch.device("cpu"))


EXCHANGE = """
import json, torch
from recspec.distributed import join

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


def run_ranks(code: str, world_size: int) -> list[dict[str, object]]:
    """What each rank's process prints, in the order of the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": f"{world_size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "OMP_NUM_THREADS": "1",
    }

    def start(rank: int) -> subprocess.Popen[str]:
        environment: Mapping[str, str] = {**os.environ, **shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=pipe, stderr=pipe, text=True)

    processes = [start(rank) for rank in range(world_size)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(printed) for printed, _ in outputs]


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
