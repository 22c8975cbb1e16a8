"""Chunks of type `parquet`: columns by name, one row group for each block, zstd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recspec.base.errors import DataError, listed, nearest
from recspec.base.files import open_parquet
from recspec.data.encoding import repeated
from recspec.data.storage.chunk_file import ColumnPlan, FileWriter, GroupReader, Report, from_arrow, to_arrow_list
from recspec.data.storage.ragged import Column, Columns, Ragged


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
