"""Checkpoints: everything that continuing a run exactly needs, in one safetensors file each, never pickle.

A file holds the weights, the optimizer's tensors and (as its JSON header) the counters. It is written to a temporary
name, flushed and renamed, so a file with a checkpoint's name is whole unless the disk lost it; a digest of its content
tells even then.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from recspec.errors import CheckpointError

FORMAT = 1
PATTERN = "step-*.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Weights, optimizer tensors and counters of one moment of a run, and the weights' average where one is kept."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, object]
    average: Mapping[str, Tensor] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False)


def save(folder: Path, checkpoint: Checkpoint, *, step: int, keep: int) -> Path:
    """Write `step-N.safetensors` and delete all but the newest `keep` checkpoints.

    Raises:
        CheckpointError: if the disk does not take it; older checkpoints are left as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:010d}.safetensors"
    tensors = {
        **{f"weights/{name}": tensor for name, tensor in checkpoint.weights.items()},
        **{f"optimizer/{name}": tensor for name, tensor in checkpoint.optimizer.items()},
        **{f"average/{name}": tensor for name, tensor in checkpoint.average.items()},
    }
    write_tensors(path, tensors, {"format": FORMAT, "state": dict(checkpoint.state)})
    for old in _files(folder)[keep:]:
        old.unlink(missing_ok=True)
    return path


def load_latest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that is whole, and a note for each newer one that is not.

    Raises:
        CheckpointError: if there is none.
    """
    notes: list[str] = []
    for path in _files(folder):
        try:
            return load(path), notes
        except CheckpointError as error:
            notes.append(f"{error}; using the one before it")
    if notes:
        raise CheckpointError.of(f"{folder}: no checkpoint can be read", notes)
    raise CheckpointError(f"{folder}: no checkpoint to resume from; start the run without --resume")


def load(path: Path) -> Checkpoint:
    """Read a checkpoint onto the CPU.

    Raises:
        CheckpointError: if it is damaged or was written in another format.
    """
    tensors, header = read_tensors(path)
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {header.get('format')!r}; this recspec reads {FORMAT}")
    state = header["state"]
    assert isinstance(state, dict)
    parts = (_part(tensors, "weights/"), _part(tensors, "optimizer/"))
    return Checkpoint(*parts, state, _part(tensors, "average/"), path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, object]) -> None:
    """Write tensors and a JSON header under a temporary name, flush, rename.

    Raises:
        CheckpointError: if the disk does not take it.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = json.dumps({**header, "digest": digest(plain)}, sort_keys=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(plain, temporary, metadata={"recspec": described})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: could not be written: {error}; what was there before is untouched") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors (on the CPU) and header of a file that `write_tensors` wrote, its content checked.

    Raises:
        CheckpointError: if the file is damaged, cut off, or not ours.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged or cut off ({error})") from None
    try:
        header = json.loads(metadata["recspec"])
        expected = header.pop("digest")
    except (KeyError, ValueError):
        raise CheckpointError(f"{path}: not written by recspec, or damaged") from None
    if digest(tensors) != expected:
        raise CheckpointError(f"{path}: damaged: its content does not match its digest")
    return tensors, header


def digest(tensors: Mapping[str, Tensor]) -> str:
    """BLAKE2b of names, types, shapes and bytes, in the order of names."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Checkpoints in a folder, newest first."""
    return sorted(folder.glob(PATTERN), reverse=True)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
