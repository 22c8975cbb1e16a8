"""The difference between two bundles as one safetensors file.

Its header names the digests of both manifests and, for each file of the new bundle, how it is made: `same` as the
base's, `whole` (its bytes are the tensor `whole/NAME`), or `tensors`: those of a safetensors file, each of which is
`same`, `whole` (`whole/NAME/TENSOR`), or `rows`: the base's tensor, cut or lengthened to a number of rows, of which
those at `places/NAME/TENSOR` are `rows/NAME/TENSOR`. What comes out is compared with the new manifest, file by file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from recspec.base.errors import BundleError, CheckpointError, listed
from recspec.base.files import PathError, confined, manifest, staging
from recspec.bundle.checkpoint import bytes_of, read_tensors, write_tensors

FORMAT = 1
TENSORS = ".safetensors"
WORTH = 0.9
"""Share of a tensor's bytes up to which its changed rows are written instead of all of them."""

Plan = Mapping[str, object]


def write(base: Path, new: Path, file: Path) -> int:
    """Write the delta from a bundle to another one; returns its bytes.

    It is applied once before it gets its name, so that base and delta give the new bundle bit for bit.

    Raises:
        BundleError: if a bundle can't be read, or the delta can't be written.
    """
    tensors: dict[str, Tensor] = {}
    files: dict[str, object] = {}
    try:
        held = {name: (base / name).read_bytes() for name in manifest.names(base) if not name.endswith(TENSORS)}
        for name in manifest.names(new):
            old = base / name
            if name.endswith(TENSORS) and old.is_file():
                files[name] = _tensors_between(name, old, new / name, tensors)
                continue
            content = (new / name).read_bytes()
            if held.get(name) == content:
                files[name] = "same"
            else:
                files[name] = "whole"
                tensors[f"whole/{name}"] = _as_tensor(content)
        tensors["manifest"] = _as_tensor((new / manifest.FILE_NAME).read_bytes())
        header = {"format": FORMAT, "base": manifest.digest(base), "result": manifest.digest(new), "files": files}
        with staging(file) as folder:
            written, applied = folder / "delta.safetensors", folder / "bundle"
            write_tensors(written, tensors, header)
            applied.mkdir()
            apply(base, written, applied)
            written.replace(file)
    except (OSError, CheckpointError) as error:
        raise BundleError(f"{file}: the delta could not be written: {error}") from None
    return file.stat().st_size


def apply(base: Path, file: Path, out: Path) -> None:
    """Write into the empty folder `out` the bundle that a delta makes of the bundle `base`.

    Raises:
        BundleError: if the delta is damaged or is one of another bundle, or what comes out is not the new bundle.
    """
    try:
        tensors, header = read_tensors(file)
    except CheckpointError as error:
        raise BundleError(str(error)) from None
    if header.get("format") != FORMAT:
        raise BundleError(f"{file}: delta format {header.get('format')!r}; this recspec reads {FORMAT}")
    if header.get("base") != manifest.digest(base):
        raise BundleError(
            f"{file}: is not a delta of {base}: the digests of the manifests differ; apply the deltas in "
            "order, or copy the whole run"
        )
    files = header.get("files")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files):
        raise BundleError(f"{file}: damaged: its header names no files")
    if foreign := [name for name in files if not manifest.covers(name)]:
        raise BundleError(
            f"{file}: brings {listed(foreign)}, which no manifest covers; a delta holds a bundle's files "
            "alone, so get it from its writer again"
        )
    try:
        for name, how in files.items():
            place = confined(out, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            if how == "same":
                place.write_bytes(confined(base, name).read_bytes())
            elif how == "whole":
                place.write_bytes(_as_bytes(tensors[f"whole/{name}"]))
            else:
                _write_tensors(name, how, base, tensors, place)
        (out / manifest.FILE_NAME).write_bytes(_as_bytes(tensors["manifest"]))
    except PathError as error:
        raise BundleError(f"{file}: {error}") from None
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError, OverflowError, CheckpointError) as error:
        raise BundleError(f"{file}: damaged: {error}") from None
    except OSError as error:
        raise BundleError(f"{out}: could not be written: {error}") from None
    if manifest.check(out) != header.get("result"):
        raise BundleError(f"{file}: base and delta give another bundle than the one it was made from")


# --- tensors ---------------------------------------------------------------------------------------------------------


def _tensors_between(name: str, base: Path, new: Path, tensors: dict[str, Tensor]) -> Plan:
    """How the tensors of a file differ from those of the base's; what differs goes to `tensors`."""
    before, _ = read_tensors(base)
    after, header = read_tensors(new)
    plan: dict[str, object] = {}
    for own, tensor in after.items():
        old = before.get(own)
        if old is not None and old.dtype == tensor.dtype and old.shape == tensor.shape and _equal(old, tensor):
            plan[own] = "same"
        elif (rows := _changed_rows(old, tensor)) is not None:
            plan[own] = {"rows": len(tensor)}
            tensors[f"places/{name}/{own}"], tensors[f"rows/{name}/{own}"] = rows, tensor[rows].contiguous()
        else:
            plan[own] = "whole"
            tensors[f"whole/{name}/{own}"] = tensor
    return {"header": header, "tensors": plan}


def _changed_rows(old: Tensor | None, new: Tensor) -> Tensor | None:
    """The rows of a tensor that another one lacks or holds differently; None if writing all of it is no larger."""
    if old is None or new.dim() < 1 or old.dtype != new.dtype or old.shape[1:] != new.shape[1:] or not new.numel():
        return None
    both = min(len(old), len(new))
    same = bytes_of(old[:both]).view(both, -1) == bytes_of(new[:both]).view(both, -1)
    changed = torch.cat([torch.nonzero(~same.all(1)).flatten(), torch.arange(both, len(new))])
    row = new.element_size() * math.prod(new.shape[1:])
    return changed if len(changed) * (row + changed.element_size()) < WORTH * len(new) * row else None


def _write_tensors(name: str, how: object, base: Path, tensors: Mapping[str, Tensor], place: Path) -> None:
    """Write a safetensors file as a header describes it."""
    if not isinstance(how, dict) or not isinstance(how.get("tensors"), dict) or not isinstance(how.get("header"), dict):
        raise ValueError(f"'{name}' is neither same, whole nor tensors")
    before, _ = read_tensors(confined(base, name))
    made: dict[str, Tensor] = {}
    for own, part in cast(Mapping[str, object], how["tensors"]).items():
        if part == "same":
            made[own] = before[own]
        elif part == "whole":
            made[own] = tensors[f"whole/{name}/{own}"]
        else:
            made[own] = _with_rows(before[own], part, tensors[f"places/{name}/{own}"], tensors[f"rows/{name}/{own}"])
    write_tensors(place, made, cast(Mapping[str, object], how["header"]))


def _with_rows(old: Tensor, part: object, places: Tensor, rows: Tensor) -> Tensor:
    """The old tensor with so many rows, of which some are new."""
    count = part.get("rows") if isinstance(part, dict) else None
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= len(old) + len(rows):
        raise ValueError(f"a number of rows of {count!r}; expected at most {len(old) + len(rows)}")
    if places.dtype != torch.int64 or places.dim() != 1 or len(places) != len(rows) or rows.shape[1:] != old.shape[1:]:
        raise ValueError("places and rows do not fit together")
    if rows.dtype != old.dtype:
        raise ValueError(f"rows of {rows.dtype}; expected {old.dtype}")
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < count:
        raise ValueError(f"places from {int(places.min())} to {int(places.max())}; expected 0 to {count - 1}")
    kept = min(count, len(old))
    made = torch.cat([old[:kept], old.new_zeros(count - kept, *old.shape[1:])])
    made[places] = rows
    return made


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes are equal: zeros of both signs differ, and a number that is none equals itself."""
    return torch.equal(bytes_of(a), bytes_of(b))


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError("the content of a file is not bytes")
    return tensor.numpy().tobytes()
