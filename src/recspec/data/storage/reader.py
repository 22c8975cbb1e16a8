"""Reading any rows of a split, whatever its chunks are made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import DataError, SpecError, listed, nearest, unknown
from recspec.data.storage.chunk_file import (
    BLOCK_ROWS,
    TOO_LARGE,
    ColumnPlan,
    FileReader,
    Findings,
    Report,
    check_lengths,
    checked,
    sentences,
)
from recspec.data.storage.formats import FORMATS
from recspec.data.storage.ragged import Columns, concatenate
from recspec.feature_spec import Chunk, FeatureSpec


def open_split(
    spec: FeatureSpec, split: str, features: Sequence[str] | None = None, *, shifted: bool = True
) -> SplitReader:
    """Open a split for reading some of its features, by default all; with `shifted=False`, ids stay as they are stored.

    Raises `SpecError` for an unknown split, and `DataError` for files that are missing or can't be read, chunks of
    unequal length, and no row at all.
    """
    held = spec.columns(split)
    problems = [unknown("feature", name, held) for name in features or () if name not in held]
    if problems:
        raise DataError.of(f"{spec.folder}, split '{split}'", problems)
    findings: Findings = {}
    chunks = open_chunks(spec, split, findings)
    problems = sentences(findings) or length_problems(split, chunks)
    if problems:
        raise DataError.of(str(spec.folder), problems)
    return SplitReader(spec, split, tuple(features if features is not None else held), chunks, shifted=shifted)


class SplitReader:
    """The rows of one split: its chunks joined side by side, each chunk's files one after another."""

    def __init__(
        self, spec: FeatureSpec, split: str, features: tuple[str, ...], chunks: Sequence[ChunkReader], *, shifted: bool
    ) -> None:
        self.spec, self.split, self.features = spec, split, features
        self.num_rows = chunks[0].num_rows
        self._chunks = [
            (chunk, [ColumnPlan.of_spec(spec, name, shifted=shifted) for name in held])
            for chunk in chunks
            if (held := [name for name in chunk.chunk.features if name in features])
        ]

    def read(self, start: int, stop: int) -> Columns:
        """Rows [start, stop) of every feature, as arrays of their own or `Ragged`. A `DataError` names bad values."""
        findings: Findings = {}
        start, stop = max(start, 0), min(stop, self.num_rows)
        columns: Columns = {}
        for chunk, plans in self._chunks:
            columns |= chunk.read(start, max(start, stop), plans, findings)
        if findings:
            problems = sentences(findings)
            raise DataError.of(str(self.spec.folder), [*published_records(self.spec, problems), *problems])
        return {name: columns[name] for name in self.features}

    def batches(self, rows: int = BLOCK_ROWS) -> Iterator[Columns]:
        """All rows in order, `rows` at a time."""
        for start in range(0, self.num_rows, rows):
            yield self.read(start, start + rows)

    def blocks(self, rows: int) -> NDArray[np.int64]:
        """Rows at which to cut the split into blocks of about `rows`: between row groups or CSV blocks, if any."""
        grouped = [chunk.group_ends for chunk, _ in self._chunks if len(chunk.group_ends)]
        if not grouped:
            return np.append(np.arange(0, self.num_rows, rows, dtype=np.int64), self.num_rows)
        cuts = [0]
        for end in max(grouped, key=lambda ends: ends[-1] / len(ends)).tolist():  # the largest groups
            if end - cuts[-1] >= rows or end == self.num_rows:
                cuts.append(end)
        return np.array(cuts, np.int64)

    @property
    def bytes_read(self) -> int:
        """Bytes of the split's files that reads have taken so far."""
        return sum(chunk.bytes_read for chunk, _ in self._chunks)

    @property
    def num_values(self) -> dict[str, int]:
        """Values each feature holds: the rows of a scalar; a list's stored count, or its maximum where unknown."""
        counts: dict[str, int] = {}
        for chunk, plans in self._chunks:
            for plan in plans:
                most = self.num_rows * (plan.feature.length or 1)
                stored = chunk.num_values(plan.name) if plan.feature.is_list else None
                counts[plan.name] = min(most, stored or most)
        return counts


def published_records(spec: FeatureSpec, problems: Sequence[str]) -> list[str]:
    """Advice for ids that are too large in SIM's published records, whose specification declares no padding."""
    if not spec.leaves_padding_unsaid or not any(TOO_LARGE in problem for problem in problems):
        return []
    told = (
        f"{listed(spec.leaves_padding_unsaid)} are histories without `padding`, and ids are too large; if these are "
        "SIM's published records, in which ids count from 1, 0 is padding and a cardinality is the largest id, "
        "`recspec prepare amazon FOLDER OUT` reads them; else give the largest id plus one as cardinality"
    )
    return [told]


class ChunkReader:
    """A chunk's files, one after another."""

    def __init__(self, chunk: Chunk, files: Sequence[FileReader]) -> None:
        self.chunk, self._files = chunk, files
        self._last: FileReader | None = None
        self._ends = np.cumsum([file.num_rows for file in files], dtype=np.int64).tolist()
        self.num_rows: int = self._ends[-1] if self._ends else 0
        ends = [file.group_ends + end - file.num_rows for file, end in zip(files, self._ends, strict=True)]
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
            if self._last is not None and self._last is not self._files[number]:
                self._last.forget()  # else memory would hold a group of every file that was read
            self._last = self._files[number]
            try:
                raw = self._files[number].read(a, max(a, b), plans, report)
                check_lengths(raw, max(0, b - a))
            except DataError as error:
                report.add("damage", str(error))
                parts.append({plan.name: plan.zeros(max(0, b - a)) for plan in plans})
                continue
            parts.append({plan.name: checked(raw[plan.name], plan, report.of(plan.name, a)) for plan in plans})
        return concatenate(parts) if parts else {plan.name: plan.zeros(0) for plan in plans}

    @property
    def bytes_read(self) -> int:
        """Bytes of the files that reads have taken so far."""
        return sum(file.bytes_read for file in self._files)

    def num_values(self, name: str) -> int | None:
        """How many values a column's lists hold, where every file says it without being read."""
        counts = [file.num_values(name) for file in self._files]
        return None if None in counts else sum(count or 0 for count in counts)

    def describe_length(self) -> str:
        """`60 + 40 = 100 rows of 'a', 'b' in 'x.csv', 'y.csv'`."""
        counts = [file.num_rows for file in self._files]
        total = " + ".join(map(str, counts)) + (f" = {sum(counts)}" if len(counts) > 1 else "")
        return f"{total} rows of {listed(self.chunk.features)} in {listed(self.chunk.files)}"


def open_chunks(spec: FeatureSpec, split: str, findings: Findings) -> list[ChunkReader]:
    """The chunks of a split; files that can't be opened are added to the findings."""
    chunks = []
    for chunk in spec.sources[split]:
        plans = [ColumnPlan.of_spec(spec, name, shifted=False) for name in chunk.features]
        files: list[FileReader] = []
        for name in chunk.files:
            try:
                path = spec.path(name)
                _check_is_there(path)
                files.append(FORMATS[chunk.type].reader(path, plans))
            except (DataError, SpecError) as error:
                Report(findings, name).add("file", str(error))
        chunks.append(ChunkReader(chunk, files if len(files) == len(chunk.files) else []))
    return chunks


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
    if len({chunk.num_rows for chunk in chunks}) > 1:
        shown = "; ".join(chunk.describe_length() for chunk in chunks)
        return [f"split '{split}': its chunks must hold the same number of rows; found {shown}"]
    if chunks[0].num_rows == 0:
        files = listed(file for chunk in chunks for file in chunk.chunk.files)
        return [f"split '{split}' holds no row (files {files}); fill it, or leave it out of source_spec"]
    return []
