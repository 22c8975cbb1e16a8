"""An item index in a folder: `index.safetensors`, read as a map of the file.

ids           (N,)   int64, ascending
vectors       (N, d) float32
centroids     (L, d) float32, of an approximate index only
assignments   (N,)   int32: the list of each row, of an approximate index only

The file's header tells how many lists are read, and the recall that this reached. No other program's format is read:
faiss's own files may crash the reader of a damaged one, and what it needs is made of these tensors in a fraction of
a second.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from recspec.base.errors import BundleError, CheckpointError, DataError, listed
from recspec.base.files import PathError, confined, parse_json
from recspec.bundle import checkpoint
from recspec.inference.flat import FlatRows
from recspec.inference.index import ItemIndex
from recspec.inference.index_rows import IndexRows, InvertedLists, no_rows

FILE_NAME = "index.safetensors"
FORMAT = 1


class Header(BaseModel):
    """What the file tells beside its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = FORMAT
    note: str = Field(max_length=1_000)
    num_probes: int | None = Field(None, ge=1)
    recall: float | None = Field(None, ge=0, le=1)
    digest: str = ""


def save(index: ItemIndex, folder: Path) -> Path:
    """Write an index into a folder. Raises `BundleError` if the file can't be written."""
    rows = index.rows.compact()
    tensors: dict[str, NDArray[Any]] = {"ids": rows.ids, "vectors": rows.base.vectors}
    header = Header(note=index.note)
    if rows.lists is not None:
        tensors |= {"centroids": rows.lists.centroids, "assignments": rows.lists.assignments}
        header = Header(note=index.note, num_probes=rows.lists.num_probes, recall=rows.lists.recall)
    about = header.model_dump(exclude={"digest"})
    try:
        path = confined(folder, FILE_NAME)
        checkpoint.write_tensors(path, {name: _tensor(each) for name, each in tensors.items()}, about)
    except (CheckpointError, PathError) as error:
        raise BundleError(str(error)) from None
    return path


def load(folder: Path) -> ItemIndex:
    """The index that `save` wrote into a folder; its vectors stay in the file until they are read.

    The file's sizes and numbers are checked. Whether it is the file that was written is for the manifest of its folder
    to say.

    Raises:
        BundleError: if the file is missing, damaged, or holds something else.
    """
    try:
        file = confined(folder, FILE_NAME)
        if not file.is_file():
            raise BundleError(f"{file}: no such file; this folder holds no item index")
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            header = Header.model_validate(parse_json((opened.metadata() or {})["recspec"]))
    except PathError as error:
        raise BundleError(str(error)) from None
    except ValidationError as error:
        problems = [f"header: {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise BundleError.of(f"{file}: damaged", problems) from None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise BundleError(f"{file}: damaged, or not an item index ({str(error)[:200]})") from None
    if header.format != FORMAT:
        raise BundleError(f"{file}: index format {header.format}; this recspec reads {FORMAT}")
    if problems := _shape_problems(tensors, header) or _content_problems(tensors, header):
        raise BundleError.of(str(file), problems)
    arrays: dict[str, NDArray[Any]] = {name: tensor.numpy() for name, tensor in tensors.items()}
    base, lists, note = FlatRows(arrays["vectors"]), None, header.note
    try:
        base.largest_norm  # noqa: B018  (refuses numbers that are not finite)
    except DataError as error:
        raise BundleError(f"{file}: {error}") from None
    if header.num_probes is not None and find_spec("faiss") is None:
        note = f"exact search of {len(base):,} items, because faiss is not installed: pip install 'recspec[retrieval]'"
    elif header.num_probes is not None:
        centroids, assignments = arrays["centroids"], arrays["assignments"]
        lists = InvertedLists(base, centroids, assignments, header.num_probes, header.recall)
    return ItemIndex(IndexRows(base, no_rows(base.vectors.shape[1]), arrays["ids"], lists), note)


def _shape_problems(tensors: dict[str, torch.Tensor], header: Header) -> list[str]:
    """What is wrong with the names, types and dimensions of a file's tensors."""
    kinds = {"ids": (torch.int64, 1), "vectors": (torch.float32, 2)}
    if header.num_probes is not None:
        kinds |= {"centroids": (torch.float32, 2), "assignments": (torch.int32, 1)}
    if sorted(tensors) != sorted(kinds):
        return [f"holds {listed(sorted(tensors))}; expected {listed(sorted(kinds))}"]
    return [
        f"'{name}' is {tensors[name].dtype} in {tensors[name].dim()} dimensions; expected {kind} in {dims}"
        for name, (kind, dims) in kinds.items()
        if (tensors[name].dtype, tensors[name].dim()) != (kind, dims)
    ]


def _content_problems(tensors: dict[str, torch.Tensor], header: Header) -> list[str]:
    """What is wrong with the sizes of tensors, and with what they hold."""
    problems = []
    ids, vectors = tensors["ids"], tensors["vectors"]
    if len(ids) != len(vectors) or not vectors.shape[1]:
        problems.append(f"'vectors' has shape {tuple(vectors.shape)}; expected a row for each of {len(ids):,} 'ids'")
    if len(ids) and (int(ids[0]) < 0 or bool((ids[1:] <= ids[:-1]).any())):
        problems.append("'ids' does not rise from 0 or more")
    if header.num_probes is not None:
        centroids, assignments = tensors["centroids"], tensors["assignments"]
        if not bool(centroids.isfinite().all()):
            problems.append("'centroids' holds numbers that are not finite")
        if centroids.shape[1] != vectors.shape[1] or not 0 < len(centroids) <= max(1, len(vectors)):
            problems.append(
                f"'centroids' has shape {tuple(centroids.shape)}; expected 1 to {len(vectors):,} rows of "
                f"{vectors.shape[1]}"
            )
        if len(assignments) != len(vectors):
            problems.append(f"'assignments' has {len(assignments):,} rows; expected {len(vectors):,}")
        elif len(assignments) and not 0 <= int(assignments.min()) <= int(assignments.max()) < len(centroids):
            problems.append(
                f"'assignments' holds {assignments.min()} to {assignments.max()}; expected 0 to {len(centroids) - 1}"
            )
        if header.num_probes > len(centroids):
            problems.append(f"header: num_probes is {header.num_probes}; expected at most {len(centroids)}")
    return problems


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """The array, or a copy of one that may not be written to, about which torch would warn."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
