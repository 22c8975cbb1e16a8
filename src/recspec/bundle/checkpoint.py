"""Checkpoints: everything that an exact continuation of a run needs, in one safetensors file each, never pickle.

A file holds the weights, the optimizer's tensors and, as its JSON header, the counters. It is written under a temporary
name, flushed and renamed, so a file with a checkpoint's name is whole unless the disk lost part of it. A digest of the
content detects that too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recspec.base.errors import CheckpointError
from recspec.base.files import PathError, confined, parse_json, special, temporary_name
from recspec.loading import Streamed, rows_of_block

FORMAT = 1
PATTERN = "step-*.safetensors"
NAME = re.compile(r"step-[0-9]+\.safetensors")

Stored: TypeAlias = Tensor | Streamed  # a tensor to write, or one that no rank holds whole
RowsWanted: TypeAlias = Callable[[str], Sequence[range] | None]  # a tensor's rows to read, by name; None for all

SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Checkpoint:
    """Weights, optimizer tensors and counters of one moment of a run, and the weights' average if one is kept."""

    weights: Mapping[str, Stored]
    optimizer: Mapping[str, Stored]
    state: Mapping[str, object]
    average: Mapping[str, Stored] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False)

    @property
    def tensors(self) -> dict[str, Stored]:
        """All tensors, under their names in the file."""
        parts = {"weights": self.weights, "optimizer": self.optimizer, "average": self.average}
        return {f"{part}/{name}": tensor for part, held in parts.items() for name, tensor in held.items()}


def save(folder: Path, checkpoint: Checkpoint, *, step: int, keep: int) -> Path:
    """Write `step-N.safetensors` and delete all but the `keep` newest ones up to it.

    Checkpoints of later steps are deleted too: they were passed over as damaged when the run was continued.

    Raises:
        CheckpointError: if the file can't be written; older checkpoints are left as they are.
    """
    for leftover in folder.glob(".*.tmp"):  # of a process that was killed while it wrote
        leftover.unlink(missing_ok=True)
    path = folder / f"step-{step:010d}.safetensors"
    try:
        write_tensors(path, checkpoint.tensors, {"format": FORMAT, "state": dict(checkpoint.state)})
    except CheckpointError as error:
        raise CheckpointError(f"{error}, and once there is room --resume continues from it") from None
    known = _files(folder)
    for old in (*known[: known.index(path)], *known[known.index(path) + keep :]):
        old.unlink(missing_ok=True)
    return path


def newest(folder: Path) -> int | None:
    """The step of the newest checkpoint in a folder, whole or not; None if there is none."""
    known = _files(folder)
    return int(known[0].stem.removeprefix("step-")) if known else None


def newest_state(folder: Path) -> Mapping[str, object]:
    """The counters of the newest checkpoint whose header can be read; empty if there is none."""
    for path in _files(folder):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError):
            if special(path):
                continue
            with safe_open(path, framework="pt") as file:
                state = parse_json(file.metadata()["recspec"])["state"]  # type: ignore[index]
            if isinstance(state, dict):
                return state
    return {}


def load_latest(folder: Path, rows: RowsWanted | None = None) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that is whole, and a note for each newer one that is not.

    Raises:
        CheckpointError: if there is none.
    """
    notes: list[str] = []
    for path in _files(folder):
        try:
            return load(path, rows), notes
        except CheckpointError as error:
            notes.append(f"{error}; using the one before it")
    CheckpointError.refuse(f"{folder}: no checkpoint can be read", notes)
    raise CheckpointError(f"{folder}: no checkpoint to resume from; start the run without --resume")


def load(path: Path, rows: RowsWanted | None = None) -> Checkpoint:
    """Read a checkpoint onto the CPU: all of it, or the wanted rows of some tensors.

    Raises:
        CheckpointError: if it is damaged or was written in another format.
    """
    tensors, header = read_tensors(path, rows)
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {header.get('format')!r}; this recspec reads {FORMAT}")
    state = header.get("state")
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: damaged: its header has no state of a run")
    weights, optimizer, average = (
        {name.removeprefix(part): tensor for name, tensor in tensors.items() if name.startswith(part)}
        for part in ("weights/", "optimizer/", "average/")
    )
    return Checkpoint(weights, optimizer, state, average, path)


def write_tensors(path: Path, tensors: Mapping[str, Stored], header: Mapping[str, object]) -> None:
    """Write tensors and a JSON header under a temporary name, flush, rename.

    Streamed tensors are taken block by block, in the order of names, and never whole.

    Raises:
        CheckpointError: if the file can't be written.
    """
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            _write(file, tensors, header)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_names(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: could not be written: {error}; what was there before is untouched") from None


def _flush_names(folder: Path) -> None:
    """Have the disk keep a new name before older files are deleted, if the system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def take_part(tensors: Mapping[str, Stored]) -> None:
    """Hand over this rank's blocks while the first rank writes them."""
    for name in sorted(tensors):
        if isinstance(streamed := tensors[name], Streamed):
            for _ in streamed.blocks():
                pass


def read_tensors(path: Path, rows: RowsWanted | None = None) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors (on the CPU) and header of a file that `write_tensors` wrote; its content is checked.

    `rows` gives the ranges of a tensor's rows to keep, one after the other, or None for all rows. Memory then holds
    those and a block. A tensor of one number has no rows and is always read.

    Raises:
        CheckpointError: if the file is damaged, cut off, or not ours.
    """
    if problem := special(path):
        raise CheckpointError(f"{path}: {problem}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            kept: dict[str, Tensor] = {}
            total = new_digest()
            for name in sorted(file.keys()):
                wanted = rows(name) if rows is not None else None
                if wanted is None or not file.get_slice(name).get_shape():
                    kept[name] = file.get_tensor(name)
                    add_tensor(total, name, kept[name].dtype, tuple(kept[name].shape), [kept[name]])
                else:
                    kept[name] = _read_rows(file.get_slice(name), name, wanted, total)
        with path.open("rb") as raw:
            text = raw.read(int.from_bytes(raw.read(8), "little"))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: damaged or cut off ({error})") from None
    try:
        header = dict(parse_json(metadata["recspec"]))  # type: ignore[call-overload]
        expected = str(header.pop("digest"))
    except (KeyError, ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: not written by recspec, or damaged") from None
    total.update(text.replace(expected.encode(), UNKNOWN.encode()))
    if total.hexdigest() != expected:
        raise CheckpointError(f"{path}: damaged: its content does not match its digest")
    return kept, header


UNKNOWN = "0" * 32  # placeholder in the header until the digest is computed

new_digest = partial(hashlib.blake2b, digest_size=16)
"""BLAKE2b of the tensors in the order of their names, then of the header."""


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor (n,), uint8 on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # An empty array of NumPy's has strides of 0, of which torch gives no view in another type.
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def add_tensor(
    total: hashlib.blake2b,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    blocks: Iterable[Tensor],
    write: Callable[[memoryview], object] | None = None,
) -> None:
    """Add a tensor to a digest, as blocks of its rows; `write` gets their bytes too."""
    total.update(f"{name} {dtype} {shape}".encode())
    for block in blocks:
        data = bytes_of(block).numpy().data
        total.update(data)
        if write is not None:
            write(data)


def _write(file: BinaryIO, tensors: Mapping[str, Stored], header: Mapping[str, object]) -> None:
    """A safetensors file: the header's length (8 bytes, little-endian), the header as JSON, the tensors' bytes.

    Wide types stand first, so that every tensor is aligned. The digest is known last and written into the header then;
    its length never differs.
    """
    entries: dict[str, object] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        offsets[name], end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        kind, shape = SAFETENSORS_TYPES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [offsets[name], end]}

    def described(digest: str) -> bytes:
        about = {"recspec": json.dumps({**header, "digest": digest}, sort_keys=True)}
        text = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
        return text + b" " * (-len(text) % 8)

    total = new_digest()
    start = 8 + len(described(UNKNOWN))
    for name in sorted(tensors):
        tensor = tensors[name]
        file.seek(start + offsets[name])
        blocks = tensor.blocks() if isinstance(tensor, Streamed) else [tensor]
        add_tensor(total, name, tensor.dtype, tuple(tensor.shape), blocks, file.write)
    total.update(described(UNKNOWN))
    text = described(total.hexdigest())
    file.seek(0)
    file.write(len(text).to_bytes(8, "little") + text)


def _read_rows(stored: Any, name: str, wanted: Sequence[range], total: hashlib.blake2b) -> Tensor:
    """The wanted rows that a tensor in a file has; all of its rows go into the digest, block by block."""
    shape = tuple(stored.get_shape())
    wanted = [range(min(part.start, shape[0]), min(part.stop, shape[0])) for part in wanted]
    row = stored[0:0]
    kept = torch.empty(sum(len(part) for part in wanted), *shape[1:], dtype=row.dtype)
    starts = [sum(len(part) for part in wanted[:place]) for place in range(len(wanted))]

    def blocks() -> Iterator[Tensor]:
        step = rows_of_block(shape, row.dtype)
        for first in range(0, shape[0], step):
            block = stored[first : min(first + step, shape[0])]
            for part, start in zip(wanted, starts, strict=True):
                here = range(max(part.start, first), min(part.stop, first + len(block)))
                if here:
                    place = start + here.start - part.start
                    kept[place : place + len(here)] = block[here.start - first : here.stop - first]
            yield block

    add_tensor(total, name, row.dtype, shape, blocks())
    return kept


def _files(folder: Path) -> list[Path]:
    """Checkpoints in a folder, newest first."""
    found = [path for path in folder.glob(PATTERN) if NAME.fullmatch(path.name)]
    for path in found:
        try:
            confined(folder, path.name)
        except PathError as error:
            raise CheckpointError(f"{folder}: {error}") from None
    return sorted(found, reverse=True)
