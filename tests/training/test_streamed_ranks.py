"""Runs on several ranks whose rows are streamed: killed within an epoch, they go on as if nothing had happened."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from recspec.data.storage import open_split, transcode
from recspec.feature_spec import FeatureSpec
from tests import made_up
from tests.processes import COMMAND, Ended, ranks, recspec

FIRST_DIES = """
import os, signal
from recspec import cli
from recspec.training.run_folder import RunLog

write = RunLog.write

def counted(log, event, **values):
    write(log, event, **values)
    if event == "step" and values["step"] == 16 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

RunLog.write = counted
cli.main()
"""


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    folder = tmp_path_factory.mktemp("streamed")
    transcode(made_up.clicks(folder / "parquet"), folder / "data", "split_binary")
    return FeatureSpec.load(folder / "data")


@pytest.fixture(scope="module")
def whole(clicks: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert [each.returncode for each in on(2, COMMAND, command(clicks, folder))] == [0, 0]
    return folder


def command(data: FeatureSpec, run: Path, *more: str) -> list[str]:
    assignments = [
        "embedding_dim=4",
        "bottom=[8,4]",
        "top=[8]",
        "dropout=0",
        "train.batch_size=333",
        "train.epochs=3",
        "train.memory_budget=20kB",
        "train.optimizer=adagrad",
        "train.log_every=1",
        "train.tensorboard=false",
        "train.precision=fp32",
        "train.checkpoint_minutes=0",
        "train.keep_best=false",
    ]
    chosen = [part for assignment in assignments for part in ("--set", assignment)]
    return ["train", "dlrm", str(data.folder), str(run), *chosen, *more]


def on(world_size: int, code: str, arguments: list[str]) -> list[Ended]:
    with ranks(code, world_size, *arguments) as processes:
        return [process.ended() for process in processes]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.slow
def test_each_rank_reads_its_share_of_an_epoch(clicks: FeatureSpec, whole: Path) -> None:
    (start,), epochs = events(whole, "start"), events(whole, "epoch")
    assert start["loader"] == "stream"
    assert start["choices"]["rows"].startswith("streamed from files, by each rank its share of each epoch: the rows ")
    rows = open_split(clicks, "train").num_rows
    assert (rows, start["steps_per_epoch"]) == (3189, 10), "the last batch is smaller"
    for epoch in epochs:
        first, second = epoch["bytes_read"]
        assert (first + second) % rows == 0, "every row once"
        assert first * rows == (first + second) * (9 * 167 + 96), "of a batch of 333 rows the first rank takes 167"


@pytest.mark.slow
def test_a_run_of_two_ranks_killed_within_an_epoch_goes_on_on_one_and_on_three(
    clicks: FeatureSpec, whole: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    done = on(2, FIRST_DIES, command(clicks, killed))
    assert [each.returncode for each in done] == [-signal.SIGKILL, 2]
    assert "the same command with --resume continues from the checkpoint of step 1" in done[1].stderr
    expected = [event["loss"] for event in events(whole, "step")]
    for world_size in (1, 3):
        resumed = tmp_path / f"on {world_size}"
        shutil.copytree(killed, resumed)
        again = command(clicks, resumed, "--resume")
        done = [recspec(*again)] if world_size == 1 else on(world_size, COMMAND, again)
        assert [each.returncode for each in done] == [0] * world_size, done
        at = events(resumed, "start")[-1]["resumed_at_step"]
        assert 10 < at < 16
        found = {event["step"]: event["loss"] for event in events(resumed, "step")}
        # From the third epoch on a run has as many lanes as ranks, and so other batches.
        assert [found[step] for step in range(1, 21)] == pytest.approx(expected[:20], abs=1e-5)
        assert sorted(found) == list(range(1, 31))


def test_two_ranks_see_other_batches_than_one_process_and_learn_as_well(
    clicks: FeatureSpec, whole: Path, tmp_path: Path
) -> None:
    one = tmp_path / "one"
    assert recspec(*command(clicks, one)).returncode == 0
    losses = [torch.tensor([event["loss"] for event in events(run, "step")]) for run in (one, whole)]
    assert losses[0].shape == losses[1].shape
    assert not torch.allclose(losses[0], losses[1], atol=1e-4)
    found = [events(run, "epoch")[-1]["metrics"]["rows"]["log_loss"] for run in (one, whole)]
    assert found[0] == pytest.approx(found[1], abs=0.02)
