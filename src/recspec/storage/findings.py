"""Problems found in files: for each kind in a column of a file, the first row and the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Findings = dict[tuple[str, str | None, str], tuple[int | None, str, int]]
"""For each file, column and kind of problem: the first row (from 0; None for the whole), the sentence, the rows."""


def sentences(findings: Findings) -> list[str]:
    """One sentence for each finding, with its place."""
    told = []
    for (file, column, _), (row, what, rows) in findings.items():
        place = (file if column is None else f"{file}, column '{column}'") + ("" if row is None else f", row {row + 1}")
        like_it = f" (and {rows - 1:,} more row{'s' * (rows > 2)} like it)" if row is not None and rows > 1 else ""
        told.append(f"{place}: {what}{like_it}")
    return told


@dataclass(slots=True)
class Report:
    """Collects the findings of one file, or of one column whose values start in some row."""

    findings: Findings
    file: str
    column: str | None = None
    first_row: int = 0
    offsets: NDArray[np.int64] | None = None  # in a column of lists: where the values of each row start

    def of(self, column: str, first_row: int) -> Report:
        """The report of a column whose values start in `first_row` of the file."""
        return Report(self.findings, self.file, column, first_row)

    def of_lists(self, offsets: NDArray[np.int64]) -> Report:
        """The report of a column whose values belong to lists."""
        return Report(self.findings, self.file, self.column, self.first_row, offsets)

    def add(self, kind: str, what: str, row: int | None = None, rows: int = 1) -> None:
        """Note a problem of some rows from `row` of the file on, or of the whole column or file."""
        key = (self.file, self.column, kind)
        row, what, before = self.findings.get(key, (row, what, 0))
        self.findings[key] = row, what, before + rows

    def add_where(self, bad: NDArray[np.bool_], kind: str, what: str) -> None:
        """Note the rows whose values are marked."""
        rows = np.flatnonzero(bad)
        if self.offsets is not None:
            rows = np.unique(np.searchsorted(self.offsets, rows, side="right") - 1)
        self.add(kind, what, self.first_row + int(rows[0]), len(rows))
