"""The item index: the items whose vectors have the largest inner products with a query's, proven exact.

Up to about a million items a search is exact. Above, inverted lists find nearly all of the best items, and the recall
that they reach is measured when they are made. Scores of found items are exact in both cases, and so are filters.

An index is one file, `index.safetensors`, read as a map of the file:

ids           (N,)   int64, ascending
vectors       (N, d) float32
centroids     (L, d) float32, of an approximate index only
assignments   (N,)   int32: the list of each row, of an approximate index only

The file's header tells how many lists are read, and the recall that this reached. No other program's format is read:
faiss's own files may crash the reader of a damaged one, and what it needs is made of these tensors in a fraction of
a second.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from recspec.base.errors import BundleError, CheckpointError, DataError, SettingsError, listed
from recspec.base.files import PathError, confined, parse_json
from recspec.bundle import checkpoint
from recspec.inference.exact_search import (
    FlatRows,
    Floats,
    Ids,
    InvertedLists,
    Mask,
    Selection,
    group,
    largest_norm,
    search,
)

INDEX_FILE = "index.safetensors"
FORMAT = 1

GATHERED_SHARE = 0.3  # of the rows, up to which copies are scanned faster than all rows under a mask
GATHERED_SHARE_OF_LISTS = 0.5  # likewise beside inverted lists, whose recall falls under a filter
GATHERED_BYTES = 512 << 20  # most bytes of the copies
KEPT_SELECTIONS, KEPT_BYTES = 16, 512 << 20  # filters whose rows are kept, and their copies' memory
RECALL_AT, RECALL_QUERIES = 100, 256
FIRST_PROBES = 16  # lists; doubled until the recall is reached


@dataclass(frozen=True)
class IndexSettings:
    """How an index searches."""

    kind: Literal["auto", "exact", "approximate"] = "auto"
    """With `auto`, an index of more than `most_exact` items is approximate if the library faiss is installed."""
    most_exact: int = 1_000_000  # items
    recall: float = 0.99
    """The share of the exact 100 best that sample queries must find; if lists can't reach it, the index is exact."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("auto", "exact", "approximate"):
            raise SettingsError(f"kind is {self.kind!r}; expected 'auto', 'exact' or 'approximate'")
        if not 0 < self.recall <= 1:
            raise SettingsError(f"recall is {self.recall}; expected more than 0, and at most 1")


class ItemIndex:
    """Finds the items with the largest inner products; every method may be called from any thread."""

    def __init__(self, ids: Ids, flat: FlatRows, lists: InvertedLists | None, note: str) -> None:
        self.ids, self.flat, self.lists, self.note = ids, flat, lists, note
        """`ids` (N,) ascend; `note` says in a sentence how the index searches, and why."""
        self._selections: OrderedDict[bytes, Selection] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def build(
        cls,
        vectors: ArrayLike,
        ids: ArrayLike | None = None,
        *,
        settings: IndexSettings | None = None,
        queries: ArrayLike | None = None,
    ) -> Self:
        """An index of vectors (N, d) of items, by default with the ids 0 to N - 1.

        `queries` (Q, d) are typical queries, by which an approximate index measures its recall; without them it takes
        vectors of items.

        Raises:
            DataError: if ids repeat, or numbers are not finite.
            MissingExtraError: if `settings` ask for an approximate index and faiss is not installed.
        """
        asked, given = settings or IndexSettings(), _as_vectors(vectors, "vectors")
        numbers = np.arange(len(given)) if ids is None else _as_ids(ids)
        if len(numbers) != len(given):
            raise DataError(f"vectors: {len(given):,} rows, but {len(numbers):,} ids; expected an id for each row")
        order = np.argsort(numbers, kind="stable")
        if bool((order[1:] < order[:-1]).any()):
            given, numbers = given[order], numbers[order]
        repeated = np.flatnonzero(numbers[1:] == numbers[:-1])
        if len(repeated):
            raise DataError(f"ids: {numbers[repeated[0]]} is there twice; expected each once")
        if len(numbers) and numbers[0] < 0:
            raise DataError(f"ids: {numbers[0]} is negative; expected 0 or more")
        flat = FlatRows(given)
        flat.largest_norm  # noqa: B018  (refuses numbers that are not finite)
        note = f"exact search of {len(flat):,} items"
        if asked.kind == "exact" or (asked.kind == "auto" and len(flat) <= asked.most_exact) or not len(flat):
            return cls(numbers, flat, None, note)
        if asked.kind == "auto" and find_spec("faiss") is None:
            why = "above that, pip install 'recspec[retrieval]' makes it faster"
            return cls(numbers, flat, None, f"{note}, more than {asked.most_exact:,}; {why}")
        samples = None if queries is None else _as_vectors(queries, "queries", given.shape[1])
        return cls(numbers, flat, *_lists(flat, asked, samples))

    def __len__(self) -> int:
        """How many items the index holds."""
        return len(self.ids)

    @property
    def dim(self) -> int:
        """How many numbers a vector has."""
        return int(self.flat.vectors.shape[1])

    def search(
        self,
        queries: ArrayLike,
        k: int,
        *,
        allowed: ArrayLike | None = None,
        excluded: Sequence[ArrayLike] | None = None,
    ) -> tuple[Floats, Ids]:
        """Scores (R, K) and ids (R, K) of the best items of queries (R, d), best first; ties in the order of ids.

        K is k, or the number of items if it is smaller. A score of -inf and the id -1 fill a list for which no more
        items are allowed. The answer does not depend on the number of threads.

        Args:
            allowed: The items that may be found: a mask whose place i stands for id i, or ids. An id beyond the mask's
                end is not allowed.
            excluded: For each query the ids that it may not find, such as items its user has seen.

        Raises:
            DataError: if a query does not have d finite numbers.
        """
        asked = _as_vectors(queries, "queries", self.dim)
        if k < 1:
            raise DataError(f"k is {k}; expected 1 or more")
        if excluded is not None and len(excluded) != len(asked):
            raise DataError(f"excluded: {len(excluded)} lists for {len(asked)} queries; expected one for each")
        largest_norm(asked, "queries")
        chosen = self._selection(None if allowed is None else np.asarray(allowed))
        hidden = [chosen.hidden(self._rows_of(ids)) for ids in excluded or [()] * len(asked)]
        return search(self.ids, self.flat, chosen, asked, min(k, len(self)), hidden)

    def _rows_of(self, ids: ArrayLike) -> Ids:
        """The rows of those items that are in the index, ascending, each once."""
        wanted = np.unique(_as_ids(ids))
        places = np.searchsorted(self.ids, wanted)
        inside = places < len(self)
        rows: Ids = places[inside][self.ids[places[inside]] == wanted[inside]]
        return rows

    def _selection(self, allowed: NDArray[Any] | None) -> Selection:
        """The rows that may be found; those of recent filters are kept."""
        if allowed is None:
            return Selection(self.flat, lists=self.lists)
        wanted: Mask | Ids = allowed if allowed.dtype == np.bool_ else _as_ids(allowed)
        if wanted.ndim != 1:
            raise DataError(f"allowed has {wanted.ndim} dimensions; expected a mask or ids in one")
        content = np.packbits(wanted) if wanted.dtype == np.bool_ else wanted
        key = blake2b(content.tobytes(), key=f"{wanted.dtype} {len(wanted)}".encode(), digest_size=16).digest()
        with self._lock:
            if key in self._selections:
                self._selections.move_to_end(key)
                return self._selections[key]
        made = self._select(wanted)
        with self._lock:
            self._selections[key] = made
            kept = self._selections.values()
            while len(kept) > KEPT_SELECTIONS or sum(each.copied_bytes for each in kept) > KEPT_BYTES:
                self._selections.popitem(last=False)
        return made

    def _select(self, wanted: Mask | Ids) -> Selection:
        """The rows of a mask by id, or of ids."""
        keep = np.zeros(len(self), bool)
        if wanted.dtype == np.bool_:  # ids beyond the mask's end are not allowed
            inside = slice(int(np.searchsorted(self.ids, len(wanted))))
            keep[inside] = wanted[self.ids[inside]]
        else:
            keep[self._rows_of(wanted)] = True
        if keep.all():
            return Selection(self.flat, lists=self.lists)
        rows = np.flatnonzero(keep)
        share = GATHERED_SHARE if self.lists is None else GATHERED_SHARE_OF_LISTS
        if len(rows) <= share * len(keep) and len(rows) * self.dim * 4 <= GATHERED_BYTES:
            return Selection(FlatRows(self.flat.vectors[rows]), keep, copied=rows)
        return Selection(self.flat, keep, lists=self.lists)

    # --- its file -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write `index.safetensors` into a folder. Raises `BundleError` if the file can't be written."""
        arrays: dict[str, NDArray[Any]] = {"ids": self.ids, "vectors": self.flat.vectors}
        header = Header(note=self.note)
        if self.lists is not None:
            arrays |= {"centroids": self.lists.centroids, "assignments": self.lists.assignments}
            header = Header(note=self.note, num_probes=self.lists.num_probes, recall=self.lists.recall)
        # a copy of arrays that may not be written to, about which torch would warn
        tensors = {
            name: torch.from_numpy(each if each.flags.writeable else each.copy()) for name, each in arrays.items()
        }
        try:
            checkpoint.write_tensors(confined(folder, INDEX_FILE), tensors, header.model_dump(exclude={"digest"}))
        except (CheckpointError, PathError) as error:
            raise BundleError(str(error)) from None

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The index that `save` wrote into a folder; its vectors stay in the file until they are read.

        The file's sizes and numbers are checked. Whether it is the file that was written is for the manifest of its
        folder to say.

        Raises:
            BundleError: if the file is missing, damaged, or holds something else.
        """
        try:
            file = confined(folder, INDEX_FILE)
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
        BundleError.refuse(str(file), _shape_problems(tensors, header) or _content_problems(tensors, header))
        arrays: dict[str, NDArray[Any]] = {name: tensor.numpy() for name, tensor in tensors.items()}
        flat, lists, note = FlatRows(arrays["vectors"]), None, header.note
        try:
            flat.largest_norm  # noqa: B018  (refuses numbers that are not finite)
        except DataError as error:
            raise BundleError(f"{file}: {error}") from None
        if header.num_probes is not None and find_spec("faiss") is None:
            why = "because faiss is not installed: pip install 'recspec[retrieval]'"
            note = f"exact search of {len(flat):,} items, {why}"
        elif header.num_probes is not None:
            of_lists = arrays["centroids"], arrays["assignments"]
            lists = InvertedLists(flat, *of_lists, header.num_probes, header.recall)
        return cls(arrays["ids"], flat, lists, note)


class Header(BaseModel):
    """What the file tells beside its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = FORMAT
    note: str = Field(max_length=1_000)
    num_probes: int | None = Field(None, ge=1)
    recall: float | None = Field(None, ge=0, le=1)
    digest: str = ""


def _lists(base: FlatRows, asked: IndexSettings, queries: Floats | None) -> tuple[InvertedLists | None, str]:
    """Inverted lists that reach the recall asked for, or None; and a sentence about them."""
    num_lists = 1 << max(0, round(np.log2(4 * np.sqrt(len(base)))))
    lists = group(base, min(num_lists, len(base)), asked.seed)
    rng = np.random.default_rng(asked.seed)
    given = base.vectors if queries is None else queries
    sample = np.ascontiguousarray(given[rng.choice(len(given), min(len(given), RECALL_QUERIES), replace=False)])
    told = f"{len(sample)} {'vectors of items' if queries is None else 'of the given queries'}"
    ids, hidden, k = np.arange(len(base)), [np.zeros(0, np.int64)] * len(sample), min(RECALL_AT, len(base))
    _, expected = search(ids, base, Selection(base), sample, k, hidden)
    probes, recall = FIRST_PROBES, 0.0
    while probes <= max(FIRST_PROBES, len(lists.centroids) // 4):
        lists = replace(lists, num_probes=min(probes, len(lists.centroids)))
        _, found = search(ids, base, Selection(base, lists=lists), sample, k, hidden)
        recall = float(np.mean([len(np.intersect1d(a, b)) / k for a, b in zip(expected, found, strict=True)]))
        if recall >= asked.recall:
            how = f"{lists.num_probes:,} of {len(lists.centroids):,} lists are read"
            return replace(lists, recall=recall), f"approximate search: {how}; recall@{k} of {told}: {recall:.4f}"
        probes *= 2
    why = f"recall@{k} of {told} in a quarter of {len(lists.centroids):,} lists is {recall:.4f}, below {asked.recall}"
    return None, f"exact search of {len(base):,} items: {why}"


def _as_vectors(values: ArrayLike, what: str, dim: int | None = None) -> Floats:
    """Rows of vectors as float32, one after the other in memory."""
    try:
        found = np.ascontiguousarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}: not rows of equally many numbers: {error}") from None
    if found.ndim != 2 or not found.shape[1] or (dim is not None and found.shape[1] != dim):
        expected = "(rows, numbers)" if dim is None else f"(rows, {dim})"
        raise DataError(f"{what} have shape {found.shape}; expected {expected}")
    return found


def _as_ids(values: ArrayLike) -> Ids:
    """Ids as int64. Raises `DataError` for anything but whole numbers."""
    found = np.asarray(values)
    if found.size and found.dtype.kind not in "iu":
        raise DataError(f"ids are {found.dtype}; expected whole numbers")
    ids: NDArray[np.int64] = found.astype(np.int64, copy=False)
    return ids


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
