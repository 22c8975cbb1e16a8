"""Reading any rows of a split, whatever its chunks are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from recspec.errors import DataError, listed, unknown
from recspec.spec import FeatureSpec
from recspec.storage.chunk_file import BLOCK_ROWS
from recspec.storage.chunk_reader import ChunkReader, length_problems, open_chunks
from recspec.storage.column_plan import TOO_LARGE, ColumnPlan
from recspec.storage.findings import Findings
from recspec.storage.ragged import Columns


def open_split(
    spec: FeatureSpec, split: str, features: Sequence[str] | None = None, *, shifted: bool = True
) -> SplitReader:
    """Open a split for reading some of its features (all by default).

    With `shifted=False` ids stay as they are stored, for `transcode`.

    Raises:
        DataError: files that are missing or can't be read, chunks of unequal length, no row at all.
        SpecError: an unknown split.
    """
    held = spec.columns(split)
    problems = [unknown("feature", name, held) for name in features or () if name not in held]
    if problems:
        raise DataError.of(f"{spec.folder}, split '{split}'", problems)
    findings = Findings()
    chunks = open_chunks(spec, split, findings)
    problems = findings.problems() or length_problems(split, chunks)
    if problems:
        raise DataError.of(str(spec.folder), problems)
    return SplitReader(spec, split, tuple(features if features is not None else held), chunks, shifted=shifted)


class SplitReader:
    """The rows of one split: its chunks joined side by side, each chunk's files one after another."""

    def __init__(
        self, spec: FeatureSpec, split: str, features: tuple[str, ...], chunks: Sequence[ChunkReader], *, shifted: bool
    ) -> None:
        self.spec = spec
        self.split = split
        self.features = features
        self.num_rows = chunks[0].num_rows
        self._chunks = [
            (chunk, [ColumnPlan.of_spec(spec, name, shifted=shifted) for name in held])
            for chunk in chunks
            if (held := [name for name in chunk.chunk.features if name in features])
        ]

    def read(self, start: int, stop: int) -> Columns:
        """Rows [start, stop) of every feature: arrays of their own, (rows,), or `Ragged` for lists.

        Raises:
            DataError: values that are not what the specification says, each with its file, column and row.
        """
        findings = Findings()
        start, stop = max(start, 0), min(stop, self.num_rows)
        columns: Columns = {}
        for chunk, plans in self._chunks:
            columns |= chunk.read(start, max(start, stop), plans, findings)
        if findings:
            problems = findings.problems()
            raise DataError.of(str(self.spec.folder), [*published_records(self.spec, problems), *problems])
        return {name: columns[name] for name in self.features}

    def batches(self, rows: int = BLOCK_ROWS) -> Iterator[Columns]:
        """All rows in order, `rows` at a time."""
        for start in range(0, self.num_rows, rows):
            yield self.read(start, start + rows)

    def blocks(self, rows: int) -> NDArray[np.int64]:
        """Row numbers at which to cut the split so that each block of about `rows` rows is decoded once.

        Cuts fall between Parquet row groups or CSV blocks, which are never divided: a block is larger than `rows`
        where they are. Files mapped into memory are cut evenly.
        """
        ends = max((chunk.group_ends for chunk, _ in self._chunks), key=_mean_group, default=np.zeros(0, np.int64))
        if not len(ends):
            return np.append(np.arange(0, self.num_rows, rows, dtype=np.int64), self.num_rows)
        cuts = [0]
        for end in ends.tolist():
            if end - cuts[-1] >= rows or end == self.num_rows:
                cuts.append(end)
        return np.array(cuts, np.int64)

    @property
    def num_values(self) -> dict[str, int]:
        """Values each feature holds: the rows of a scalar; a list's stored count, or its maximum where unknown."""
        counts: dict[str, int] = {}
        for chunk, plans in self._chunks:
            for plan in plans:
                length = plan.feature.length
                most = self.num_rows * (length or 1)
                counts[plan.name] = most if length is None else min(most, chunk.num_values(plan.name) or most)
        return counts


def _mean_group(ends: NDArray[np.int64]) -> float:
    return float(ends[-1]) / len(ends) if len(ends) else 0.0


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
