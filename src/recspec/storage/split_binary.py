"""Chunks of type `split_binary`: raw little-endian rows, in which a list takes `length` values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recspec.errors import DataError
from recspec.storage.chunk_file import FileReader, FileWriter
from recspec.storage.column_plan import ColumnPlan
from recspec.storage.findings import Report
from recspec.storage.ragged import Columns


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
