"""Problems found in files: for each kind in a column of a file, the first row and the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class _Finding:
    row: int | None  # 0-based row of the file
    what: str
    rows: int


class Findings:
    """The problems of some files."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str | None, str], _Finding] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def of_files(self) -> bool:
        """Whether some file could not be opened, so that its rows are not known."""
        return any(kind == "file" for _, _, kind in self._found)

    def add(self, file: str, column: str | None, row: int | None, kind: str, what: str, rows: int = 1) -> None:
        """Note a problem; `row` is 0-based, None for a problem of the whole column or file."""
        found = self._found.setdefault((file, column, kind), _Finding(row, what, 0))
        found.rows += rows

    def problems(self) -> list[str]:
        """One sentence for each finding, with its place."""
        return [_sentence(file, column, found) for (file, column, _), found in self._found.items()]


def _sentence(file: str, column: str | None, found: _Finding) -> str:
    place = file if column is None else f"{file}, column '{column}'"
    if found.row is None:
        return f"{place}: {found.what}"
    more = found.rows - 1
    like_it = f" (and {more:,} more row{'s' if more > 1 else ''} like it)" if more else ""
    return f"{place}, row {found.row + 1}: {found.what}{like_it}"


@dataclass(slots=True)
class Report:
    """Collects the findings of one file, or of one column from some row on."""

    findings: Findings
    file: str
    column: str | None = None
    first_row: int = 0
    offsets: NDArray[np.int64] | None = None
    """In a column of lists: where the values of each row start."""

    def of(self, column: str, first_row: int) -> Report:
        """The report of a column whose values start in `first_row` of the file."""
        return Report(self.findings, self.file, column, first_row)

    def of_lists(self, offsets: NDArray[np.int64]) -> Report:
        """The report of a column whose values belong to lists."""
        return Report(self.findings, self.file, self.column, self.first_row, offsets)

    def add(self, kind: str, what: str, row: int | None = None) -> None:
        """Note a problem of a row of the file, or of the whole column or file."""
        self.findings.add(self.file, self.column, row, kind, what)

    def add_where(self, bad: NDArray[np.bool_], kind: str, what: str) -> None:
        """Note the rows whose values are marked."""
        rows = np.flatnonzero(bad)
        if self.offsets is not None:
            rows = np.unique(np.searchsorted(self.offsets, rows, side="right") - 1)
        self.findings.add(self.file, self.column, self.first_row + int(rows[0]), kind, what, len(rows))
