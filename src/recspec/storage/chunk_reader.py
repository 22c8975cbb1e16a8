"""Reading a chunk: its files one after another, with values checked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.errors import DataError, SpecError, listed, nearest
from recspec.spec import Chunk, FeatureSpec
from recspec.storage.chunk_file import FileReader
from recspec.storage.column_plan import ColumnPlan
from recspec.storage.findings import Findings, Report
from recspec.storage.formats import FORMATS
from recspec.storage.ragged import Columns, concatenate
from recspec.storage.values import checked


class ChunkReader:
    """A chunk's files, one after another."""

    def __init__(self, chunk: Chunk, files: Sequence[FileReader]) -> None:
        self.chunk = chunk
        self._files = files
        self._ends = np.cumsum([file.num_rows for file in files], dtype=np.int64).tolist()
        self.num_rows: int = self._ends[-1] if self._ends else 0
        starts = [0, *self._ends][: len(files)]
        ends = [file.group_ends + start for file, start in zip(files, starts, strict=True)]
        self.group_ends: NDArray[np.int64] = np.concatenate(ends) if ends else np.zeros(0, np.int64)

    def read(self, start: int, stop: int, plans: Sequence[ColumnPlan], findings: Findings) -> Columns:
        """Rows [start, stop) of some columns; what is wrong with them is added to the findings."""
        parts: list[Columns] = []
        for number in range(bisect_right(self._ends, start), len(self._files)):
            first = self._ends[number] - self._files[number].num_rows
            if first >= stop and parts:
                break
            a, b = max(start, first) - first, min(stop, self._ends[number]) - first
            report = Report(findings, self.chunk.files[number])
            try:
                raw = self._files[number].read(a, max(a, b), plans, report)
            except DataError as error:
                report.add("damage", str(error))
                raw = {plan.name: plan.zeros(max(0, b - a)) for plan in plans}
            parts.append({plan.name: checked(raw[plan.name], plan, report.of(plan.name, a)) for plan in plans})
        return concatenate(parts) if parts else {plan.name: plan.zeros(0) for plan in plans}

    def num_values(self, name: str) -> int | None:
        """How many values a column's lists hold, where every file says it without being read."""
        counts = [file.num_values(name) for file in self._files]
        return None if None in counts else sum(count or 0 for count in counts)

    def describe_length(self) -> str:
        """`60 + 40 = 100 rows of 'a', 'b' (files ...)`."""
        counts = [file.num_rows for file in self._files]
        total = " + ".join(map(str, counts)) + (f" = {sum(counts)}" if len(counts) > 1 else "")
        return f"{total} rows of {listed(self.chunk.features)} in {listed(self.chunk.files)}"


def open_chunks(spec: FeatureSpec, split: str, findings: Findings) -> list[ChunkReader]:
    """The chunks of a split; files that can't be opened are added to the findings."""
    return [_open_chunk(spec, chunk, findings) for chunk in spec.sources[split]]


def _open_chunk(spec: FeatureSpec, chunk: Chunk, findings: Findings) -> ChunkReader:
    plans = [ColumnPlan.of_spec(spec, name, shifted=False) for name in chunk.features]
    files: list[FileReader] = []
    for name in chunk.files:
        try:
            path = spec.path(name)
            _check_is_there(path)
            files.append(FORMATS[chunk.type].reader(path, plans))
        except (DataError, SpecError) as error:
            findings.add(name, None, None, "file", str(error))
    return ChunkReader(chunk, files if len(files) == len(chunk.files) else [])


def _check_is_there(path: Path) -> None:
    if path.is_file():
        return
    if path.exists():
        raise DataError("is a folder; expected a file")
    if not path.parent.is_dir():
        raise DataError(f"no such file: the folder {path.parent} does not exist")
    raise DataError(f"no such file{nearest(path.name, [found.name for found in path.parent.iterdir()])}")


def length_problems(split: str, chunks: Sequence[ChunkReader]) -> list[str]:
    """What is wrong with the numbers of rows: unequal, or none."""
    counts = [chunk.num_rows for chunk in chunks]
    if len(set(counts)) > 1:
        shown = "; ".join(chunk.describe_length() for chunk in chunks)
        return [f"split '{split}': its chunks must hold the same number of rows; found {shown}"]
    if counts[0] == 0:
        files = listed(file for chunk in chunks for file in chunk.chunk.files)
        return [f"split '{split}' holds no row (files {files}); fill it, or leave it out of source_spec"]
    return []
