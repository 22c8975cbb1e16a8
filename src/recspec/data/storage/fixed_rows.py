"""Chunks of types `split_binary` and `torch_tensor`: rows of one size, in which a list takes `length` values."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recspec.base.errors import DataError, listed
from recspec.data.storage.chunk_file import ColumnPlan, FileReader, FileWriter, Report
from recspec.data.storage.ragged import Array, Columns, offsets_of


class BinaryReader(FileReader):
    """Rows mapped into memory."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        record = _record_dtype(plans)
        size = path.stat().st_size
        if size % record.itemsize:
            row = ", ".join(f"{plan.name} {plan.dtype}" for plan in plans)
            raise DataError(f"has {size:,} bytes, not a whole number of rows of {record.itemsize} bytes ({row})")
        self.num_rows = size // record.itemsize
        # An empty file can't be mapped. A plain array over the mapping is sliced faster than a memmap.
        self._rows = np.asarray(np.memmap(path, record, "r") if size else np.zeros(0, record))
        self._fields = {plan.name: str(number) for number, plan in enumerate(plans)}

    def read(self, start: int, stop: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:  # noqa: ARG002
        self.bytes_read += self._rows[start:stop].nbytes
        return {plan.name: self._rows[self._fields[plan.name]][start:stop] for plan in plans}


_MOST_ROW_BYTES = 2**31 - 1  # numpy keeps the size of a row in a C int


def _record_dtype(plans: Sequence[ColumnPlan]) -> np.dtype[np.void]:
    """A row of the file; fields are numbered because a feature may have any name."""
    sizes = {plan.name: plan.dtype.itemsize * (plan.feature.length or 1) for plan in plans}
    if sum(sizes.values()) > _MOST_ROW_BYTES:
        longest = max(sizes, key=lambda name: sizes[name])
        what = f"a row has {sum(sizes.values()):,} bytes, {sizes[longest]:,} of them of '{longest}'"
        raise DataError(f"{what}; a row of split_binary has at most {_MOST_ROW_BYTES:,}: give a smaller length")
    fields = []
    for number, plan in enumerate(plans):
        stored = np.dtype("uint8") if plan.dtype.kind == "b" else plan.dtype.newbyteorder("<")
        fields.append((str(number), stored, (plan.feature.length,) if plan.feature.length else ()))
    return np.dtype(fields)


class BinaryWriter(FileWriter):
    """Rows appended as they are read."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        super().__init__(path, plans)
        self._record = _record_dtype(plans)

    def _append(self, columns: Columns) -> None:
        first = columns[self._plans[0].name]
        rows = np.empty(len(first), self._record)
        for number, plan in enumerate(self._plans):
            rows[str(number)] = plan.rectangle(columns[plan.name])
        rows.tofile(self._file)


class TensorReader(FileReader):
    """A tensor mapped into memory; pickled objects are never loaded."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        self._rows = _load_tensor(path)
        *firsts, width = offsets_of([plan.feature.length or 1 for plan in plans]).tolist()
        self._places = {
            plan.name: slice(first, first + plan.feature.length) if plan.feature.length else first
            for plan, first in zip(plans, firsts, strict=True)
        }
        if self._rows.ndim == 1 and width == 1:
            self._rows = self._rows[:, None]
        if self._rows.ndim != 2 or self._rows.shape[1] != width:
            names = listed(plan.name for plan in plans)
            raise DataError(f"holds a tensor of shape {self._rows.shape}; expected (rows, {width}): {names}")
        self.num_rows = len(self._rows)

    def read(self, start: int, stop: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:  # noqa: ARG002
        self.bytes_read += self._rows[start:stop].nbytes
        return {plan.name: self._rows[start:stop, self._places[plan.name]] for plan in plans}


def _load_tensor(path: Path) -> Array:
    import torch  # only here and in the writer; all other chunk types work without it

    try:
        try:
            tensor = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format of torch before 1.6 can't be mapped
            with warnings.catch_warnings():  # it warns about pickle protocols before it refuses them
                warnings.simplefilter("ignore")
                tensor = torch.load(str(path), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise DataError("holds no plain tensor, and pickled objects are never loaded; use torch.save(tensor)") from None
    except Exception as error:  # damaged bytes make torch raise anything: KeyError, IndexError, ...
        raise DataError(f"can't be read as a tensor: {error!r}") from None
    if not isinstance(tensor, torch.Tensor):
        raise DataError(f"holds a {type(tensor).__name__}; expected one tensor (rows, columns)")
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    values: Array = tensor.detach().numpy()
    return values


class TensorWriter(FileWriter):
    """Rows go to a plain binary file first and become a tensor at the end, so that memory stays bounded."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        super().__init__(path, plans)
        self._width = sum(plan.feature.length or 1 for plan in plans)

    def _append(self, columns: Columns) -> None:
        parts = [plan.rectangle(columns[plan.name]).reshape(-1, plan.feature.length or 1) for plan in self._plans]
        np.concatenate(parts, axis=1).tofile(self._file)

    def close(self) -> None:
        if self._file.closed:
            return
        super().close()
        import torch

        dtype, shape = self._plans[0].dtype, (self.num_rows, self._width)
        rows = np.memmap(self.temporary, dtype, "r+", shape=shape) if self.num_rows else np.zeros(shape, dtype)
        tensor_file = self.temporary.with_suffix(".tensor.tmp")
        torch.save(torch.from_numpy(rows), tensor_file)
        tensor_file.replace(self.temporary)
