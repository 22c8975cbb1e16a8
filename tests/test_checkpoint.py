"""Checkpoints are whole or refused; the one before a damaged one is used."""

from pathlib import Path

import pytest
import torch

from recspec import checkpoint
from recspec.checkpoint import Checkpoint
from recspec.errors import CheckpointError


def a_checkpoint(step: int) -> Checkpoint:
    return Checkpoint({"w": torch.full((3, 2), float(step))}, {"0/exp_avg": torch.arange(6.0)}, {"step": step})


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(7), step=7, keep=2)
    saved = checkpoint.load(path)
    assert torch.equal(saved.weights["w"], torch.full((3, 2), 7.0))
    assert torch.equal(saved.optimizer["0/exp_avg"], torch.arange(6.0))
    assert saved.state == {"step": 7}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 50, 500):
        checkpoint.save(tmp_path, a_checkpoint(step), step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-0000000050.safetensors",
        "step-0000000500.safetensors",
    ]


@pytest.mark.parametrize("keep_bytes", [0, 7, 8, 50, 200, -1])
def test_a_cut_off_checkpoint_is_refused_and_the_one_before_is_used(tmp_path: Path, keep_bytes: int) -> None:
    checkpoint.save(tmp_path, a_checkpoint(1), step=1, keep=2)
    path = checkpoint.save(tmp_path, a_checkpoint(2), step=2, keep=2)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    saved, notes = checkpoint.load_latest(tmp_path)
    assert saved.state == {"step": 1}
    assert len(notes) == 1
    assert "step-0000000002.safetensors" in notes[0]
    assert "using the one before it" in notes[0]


def test_one_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(1), step=1, keep=2)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="its content does not match its digest"):
        checkpoint.load(path)


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "step-0000000001.safetensors")
    with pytest.raises(CheckpointError, match="not written by recspec"):
        checkpoint.load(tmp_path / "step-0000000001.safetensors")


def test_nothing_to_resume_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from; start the run without --resume"):
        checkpoint.load_latest(tmp_path / "checkpoints")


def test_when_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, a_checkpoint(step), step=step, keep=2).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_latest(tmp_path)
    assert "2 problems" in str(caught.value)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(1), step=1, keep=2)
    before = path.read_bytes()
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    with pytest.raises((CheckpointError, OSError)):
        checkpoint.write_tensors(blocked / "step-1.safetensors", {"w": torch.zeros(1)}, {})
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))
