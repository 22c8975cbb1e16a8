"""The chunk types: how each is read, written and named on disk; `csv` and `tfrecord` have files of their own.

`parquet` has columns by name, one row group for each block, zstd. `split_binary` and `torch_tensor` have rows of one
size, in which a list takes `length` values.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recspec.base.errors import DataError, listed, nearest
from recspec.base.files import open_parquet
from recspec.data.encoding import repeated
from recspec.data.storage.chunk_file import (
    ColumnPlan,
    FileReader,
    FileWriter,
    GroupReader,
    Report,
    from_arrow,
    to_arrow_list,
)
from recspec.data.storage.csv_chunks import CsvReader, CsvWriter
from recspec.data.storage.ragged import Array, Column, Columns, Ragged, offsets_of
from recspec.data.storage.tfrecord import TfrecordReader, TfrecordWriter
from recspec.feature_spec import ChunkType

# --- parquet ----------------------------------------------------------------------------------------------------------


class ParquetReader(GroupReader):
    """Columns are found by name; a read decodes the row groups that hold its rows."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        self._path = path
        try:
            self._metadata = pq.read_metadata(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"can't be read as Parquet: {error}") from None
        names = self._metadata.schema.to_arrow_schema().names
        missing = [plan.name for plan in plans if plan.name not in names]
        problems = repeated(names)
        problems += [f"has no column '{name}'{nearest(name, names)}; it holds {listed(names)}" for name in missing]
        if problems:
            raise DataError("; ".join(problems))
        groups = range(self._metadata.num_row_groups)
        self.num_rows: int = self._metadata.num_rows
        self.group_ends = np.cumsum([self._metadata.row_group(i).num_rows for i in groups], dtype=np.int64)
        held = int(self.group_ends[-1]) if len(self.group_ends) else 0
        if held != self.num_rows:
            told = f"states {self.num_rows:,} rows, but its row groups hold {held:,}"
            raise DataError(f"can't be read as Parquet: {told}; write the file again")

    def num_values(self, name: str) -> int | None:
        """How many values a column holds; an empty list counts as one."""
        groups = [self._metadata.row_group(group) for group in range(self._metadata.num_row_groups)]
        paths = [f"{groups[0].column(i).path_in_schema}." for i in range(self._metadata.num_columns)]
        column = next(i for i, path in enumerate(paths) if path.startswith(f"{name}."))
        return sum(int(group.column(column).num_values) for group in groups)

    def decode(self, group: int, first_row: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:
        try:
            with open_parquet(self._path, self._metadata) as file:
                table = file.read_row_group(group, columns=[plan.name for plan in plans])
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"row group {group + 1} is damaged: {error}") from None
        self.bytes_read += self._bytes_of(group, [plan.name for plan in plans])
        return {plan.name: from_arrow(table[plan.name], plan, report.of(plan.name, first_row)) for plan in plans}

    def _bytes_of(self, group: int, names: Sequence[str]) -> int:
        """Bytes that some columns of a row group take in the file."""
        held = self._metadata.row_group(group)
        columns = [held.column(place) for place in range(self._metadata.num_columns)]
        inside = (*(f"{name}." for name in names),)  # the values of a list
        taken = [each for each in columns if each.path_in_schema in names or each.path_in_schema.startswith(inside)]
        return sum(column.total_compressed_size for column in taken)


class ParquetWriter(FileWriter):
    """One row group for each block."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        super().__init__(path, plans)
        self._schema = pa.schema([(plan.name, _arrow_type(plan)) for plan in plans])
        self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd")

    def _append(self, columns: Columns) -> None:
        table = pa.Table.from_arrays([_to_arrow(columns[plan.name]) for plan in self._plans], schema=self._schema)
        self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()
        super().close()

    def discard(self) -> None:
        self.close()  # pyarrow warns when an open writer is collected
        super().discard()


def _arrow_type(plan: ColumnPlan) -> pa.DataType:
    value = pa.from_numpy_dtype(plan.dtype)
    return pa.list_(value) if plan.feature.is_list else value


def _to_arrow(column: Column) -> pa.Array:
    return to_arrow_list(column, pa.array(column.values)) if isinstance(column, Ragged) else pa.array(column)


# --- split_binary and torch_tensor ------------------------------------------------------------------------------------


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


# --- all chunk types --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """One chunk type."""

    suffix: str
    reader: type[FileReader]
    writer: type[FileWriter]
    fixed_length: bool = False  # whether a list takes its whole length in every row


FORMATS: Mapping[ChunkType, Format] = {
    "csv": Format(".csv", CsvReader, CsvWriter),
    "parquet": Format(".parquet", ParquetReader, ParquetWriter),
    "split_binary": Format(".bin", BinaryReader, BinaryWriter, fixed_length=True),
    "torch_tensor": Format(".pt", TensorReader, TensorWriter, fixed_length=True),
    "tfrecord": Format(".tfrecord", TfrecordReader, TfrecordWriter),
}
