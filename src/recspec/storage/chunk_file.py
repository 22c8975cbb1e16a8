"""What every chunk type provides: a reader and a writer of one file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from recspec.errors import DataError
from recspec.files import temporary_name
from recspec.storage.column_plan import ColumnPlan
from recspec.storage.findings import Report
from recspec.storage.ragged import Columns, concatenate, rows_of

BLOCK_ROWS = 65_536  # rows read or written at once, and rows of a Parquet row group


class FileReader(ABC):
    """One file of a chunk, as it is stored."""

    num_rows: int
    group_ends: NDArray[np.int64] = np.zeros(0, np.int64)
    """Rows after which a new unit of decoding starts; empty when any row is equally near."""
    bytes_read: int = 0
    """Bytes of the file that reads have taken so far."""

    @abstractmethod
    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        """Open a file; raises `DataError` if it does not hold the planned columns."""

    @abstractmethod
    def read(self, start: int, stop: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:
        """Rows [start, stop) of some columns. What can't be read is reported and given as zeros."""

    def forget(self) -> None:  # noqa: B027
        """Free what is kept of the last read."""

    def num_values(self, name: str) -> int | None:  # noqa: ARG002
        """How many values a column's lists hold, where the file says it without being read."""
        return None


class GroupReader(FileReader):
    """A file that is decoded group by group (row groups, blocks of text); the last group is kept."""

    _held: tuple[int, tuple[str, ...], Columns] | None = None

    @abstractmethod
    def decode(self, group: int, first_row: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:
        """All rows of a group, which starts at `first_row` of the file."""

    def read(self, start: int, stop: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:
        parts = []
        for group in range(int(np.searchsorted(self.group_ends, start, side="right")), len(self.group_ends)):
            first = int(self.group_ends[group - 1]) if group else 0
            if first >= stop:
                break
            columns = self._group(group, first, plans, report)
            parts.append(rows_of(columns, max(start - first, 0), min(stop, int(self.group_ends[group])) - first))
        return concatenate(parts) if parts else {plan.name: plan.zeros(0) for plan in plans}

    def forget(self) -> None:
        self._held = None

    def _group(self, group: int, first_row: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:
        names = tuple(plan.name for plan in plans)
        held = self._held  # read once: two iterators of one loader may run side by side
        if held is None or held[:2] != (group, names):
            self._held = held = None  # drop the previous group first, so that memory holds only one
            columns = self.decode(group, first_row, plans, report)
            check_lengths(columns, int(self.group_ends[group]) - first_row)
            self._held = held = (group, names, columns)
        return held[2]


def check_lengths(columns: Columns, num_rows: int) -> None:
    """Raises `DataError` if a read gave another number of rows than the file was opened with: rows would be lost."""
    wrong = {name: len(column) for name, column in columns.items() if len(column) != num_rows}
    for name, found in list(wrong.items())[:1]:
        raise DataError(f"holds {found:,} rows of '{name}' where {num_rows:,} were counted: the file is damaged, or "
                        "was changed while it was read")  # fmt: skip


class FileWriter(ABC):
    """An open file under a temporary name, to which blocks are appended."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        self.path, self.temporary = path, temporary_name(path)
        self.num_rows = 0
        self._plans = plans
        self._file: IO[bytes] = self.temporary.open("xb")

    def write(self, columns: Columns) -> None:
        """Append a block of rows."""
        self.num_rows += len(columns[self._plans[0].name])
        self._append(columns)

    @abstractmethod
    def _append(self, columns: Columns) -> None:
        """Write a block in the file's own format."""

    def close(self) -> None:
        """Finish the temporary file; a second call does nothing."""
        self._file.close()

    def discard(self) -> None:
        """Remove the temporary file."""
        self._file.close()
        self.temporary.unlink(missing_ok=True)
