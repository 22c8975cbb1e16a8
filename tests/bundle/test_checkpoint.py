"""Checkpoints are whole or refused; the one before a damaged one is used."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recspec.base.errors import CheckpointError
from recspec.bundle import checkpoint
from recspec.bundle.checkpoint import Checkpoint
from recspec.loading.sharding import Streamed


def a_checkpoint(step: int) -> Checkpoint:
    return Checkpoint({"w": torch.full((3, 2), float(step))}, {"0/exp_avg": torch.arange(6.0)}, {"step": step})


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 50, 500):
        checkpoint.save(tmp_path, a_checkpoint(step), step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-0000000050.safetensors",
        "step-0000000500.safetensors",
    ]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_goes_on_before_a_damaged_checkpoint_leaves_it_behind(tmp_path: Path, keep: int) -> None:
    for step in (1, 2, 5):
        checkpoint.save(tmp_path, a_checkpoint(step), step=step, keep=3)
    (tmp_path / "step-0000000005.safetensors").write_bytes(b"")
    checkpoint.save(tmp_path, a_checkpoint(3), step=3, keep=keep)
    assert checkpoint.newest(tmp_path) == 3
    assert len(list(tmp_path.iterdir())) == keep


def test_what_a_killed_process_left_half_written_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "checkpoints") is None
    (tmp_path / ".step-0000000003.safetensors.4711.tmp").write_bytes(b"half")
    (tmp_path / "best.safetensors").write_bytes(b"another kind of file")
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save(tmp_path, a_checkpoint(4), step=4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors", "step-0000000004.safetensors"]


@pytest.mark.parametrize("keep_bytes", [0, 7, 8, 50, 200, -1])
def test_a_cut_off_checkpoint_is_refused_and_the_one_before_is_used(tmp_path: Path, keep_bytes: int) -> None:
    checkpoint.save(tmp_path, a_checkpoint(1), step=1, keep=2)
    path = checkpoint.save(tmp_path, a_checkpoint(2), step=2, keep=2)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    saved, (note,) = checkpoint.load_latest(tmp_path)
    assert saved.state == {"step": 1}
    assert torch.equal(saved.weights["w"], torch.full((3, 2), 1.0))
    assert torch.equal(saved.optimizer["0/exp_avg"], torch.arange(6.0))
    assert "step-0000000002.safetensors" in note
    assert "using the one before it" in note
    (tmp_path / "step-0000000001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="2 problems"):
        checkpoint.load_latest(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from; start the run without --resume"):
        checkpoint.load_latest(tmp_path / "checkpoints")


@pytest.mark.parametrize("flipped", [1, 255])
def test_one_changed_byte_is_noticed_wherever_it_stands(tmp_path: Path, flipped: int) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(1), step=1, keep=2)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ flipped]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=r"damaged|not written by recspec"):
            checkpoint.load(path)
    path.write_bytes(data)
    assert checkpoint.load(path).state == {"step": 1}


def test_a_file_cut_off_anywhere_or_with_more_behind_it_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(1), step=1, keep=2)
    data = path.read_bytes()
    for changed in (*(data[:size] for size in range(len(data))), data + b"\0", data + data):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="damaged or cut off"):
            checkpoint.load(path)


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "step-0000000001.safetensors")
    with pytest.raises(CheckpointError, match="not written by recspec"):
        checkpoint.load(tmp_path / "step-0000000001.safetensors")


MIXED = {
    "bits": torch.tensor([True, False, True]),
    "halves": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "many": torch.arange(14.0).view(7, 2),
    "none": torch.zeros(0, 4),
    "one": torch.tensor(7),
    "row": torch.arange(5, dtype=torch.int8),
}


def test_a_file_is_a_safetensors_file_of_any_types(tmp_path: Path) -> None:
    checkpoint.write_tensors(tmp_path / "file", MIXED, {"format": 1})
    for read in (load_file(tmp_path / "file"), checkpoint.read_tensors(tmp_path / "file")[0]):
        assert read.keys() == MIXED.keys()
        for name, tensor in MIXED.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("kind", [np.float32, np.bool_])
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_empty_tensors_of_numpy_are_kept(kind: type, shape: tuple[int, ...], tmp_path: Path) -> None:
    empty = torch.from_numpy(np.zeros(shape, kind))
    checkpoint.write_tensors(tmp_path / "file", {**MIXED, "empty": empty}, {"format": 1})
    found = checkpoint.read_tensors(tmp_path / "file")[0]["empty"]
    assert (found.dtype, found.shape) == (empty.dtype, empty.shape)


def test_a_tensor_in_blocks_is_written_as_the_whole_one(tmp_path: Path) -> None:
    many = MIXED["many"]
    blocks = Streamed(many.dtype, tuple(many.shape), lambda: iter([many[:3], many[3:3], many[3:]]))
    checkpoint.write_tensors(tmp_path / "whole", MIXED, {"format": 1})
    checkpoint.write_tensors(tmp_path / "blocks", {**MIXED, "many": blocks}, {"format": 1})
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "blocks").read_bytes()


def test_those_who_do_not_write_hand_over_their_blocks_in_the_order_of_names() -> None:
    taken: list[str] = []

    def stream(name: str) -> Streamed:
        return Streamed(torch.float32, (1,), lambda: iter([torch.zeros(0) for _ in [taken.append(name)]]))

    checkpoint.take_part({"b": stream("b"), "weight": torch.zeros(1), "a": stream("a")})
    assert taken == ["a", "b"]


@pytest.mark.parametrize("block_bytes", [1, 16, 24, 1 << 20])
def test_some_rows_of_a_file_are_read_and_all_of_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("recspec.loading.sharding.BLOCK_BYTES", block_bytes)
    file = tmp_path / "file"
    checkpoint.write_tensors(file, MIXED, {"format": 1})
    wanted = {"many": (range(1), range(2, 6), range(9, 12)), "none": (), "one": (range(1),), "halves": ()}
    read, _ = checkpoint.read_tensors(file, wanted.get)
    assert torch.equal(read["many"], MIXED["many"][[0, 2, 3, 4, 5]])
    assert read["halves"].shape == (0, 3)
    assert read["none"].shape == (0, 4)
    assert read["one"].item() == 7
    assert torch.equal(read["row"], MIXED["row"])
    data = file.read_bytes()
    file.write_bytes(data.replace(MIXED["many"][6].numpy().tobytes(), b"12345678"))
    with pytest.raises(CheckpointError, match="its content does not match its digest"):
        checkpoint.read_tensors(file, wanted.get)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(1), step=1, keep=2)
    before = path.read_bytes()
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match=r"could not be written: .*what was there before is untouched"):
        checkpoint.save(blocked, a_checkpoint(2), step=2, keep=2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("room", [0, 1, 100, 1000])
def test_a_full_disk_is_one_message_and_older_checkpoints_stay(tmp_path: Path, room: int) -> None:
    resource = pytest.importorskip("resource", reason="the room of a disk is played by the limit of a file's size")
    path = checkpoint.save(tmp_path, a_checkpoint(1), step=1, keep=1)
    before = path.read_bytes()
    large = Checkpoint({"w": torch.zeros(1000)}, {}, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path, large, step=2, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        f"{tmp_path / 'step-0000000002.safetensors'}: could not be written: [Errno 27] File too large; what was there "
        "before is untouched, and once there is room --resume continues from it"
    )
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before
