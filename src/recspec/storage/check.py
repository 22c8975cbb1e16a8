"""Checks of a prepared dataset: every file is read once and compared with the specification."""

from __future__ import annotations

from dataclasses import dataclass

from recspec.errors import DataError
from recspec.spec import FeatureSpec
from recspec.storage.chunk_file import BLOCK_ROWS
from recspec.storage.chunk_reader import length_problems, open_chunks
from recspec.storage.column_plan import ColumnPlan
from recspec.storage.companions import companion_problems, companions
from recspec.storage.findings import Findings
from recspec.storage.reader import open_split, published_records


def check(spec: FeatureSpec) -> None:
    """Read every file of a dataset once, in bounded memory, and report all that contradicts the specification.

    Files that are missing or of another format, chunks of unequal length, empty splits; values of a wrong type, ids
    outside [0, cardinality), numbers that are not finite or don't fit; series that do not divide valid and test;
    catalogues and vocabularies that are missing or of another length than their ids.

    Raises:
        DataError: with every problem, each with its file, column and row.
    """
    problems: list[str] = []
    for split in spec.splits:
        found = check_split(spec, split)
        problems += found.problems
        problems += _series_problems(spec, split, found.num_rows)
    try:
        companions(spec)
    except DataError as error:
        problems += error.problems
    problems += companion_problems(spec)
    if problems:
        raise DataError.of(str(spec.folder), [*published_records(spec, problems), *problems])


def count_rows(spec: FeatureSpec) -> dict[str, int]:
    """Rows of each split, without reading their values."""
    return {split: open_split(spec, split).num_rows for split in spec.splits}


def _series_problems(spec: FeatureSpec, split: str, num_rows: int | None) -> list[str]:
    series = spec.metadata.get("test_samples_per_series")
    if not isinstance(series, int) or split not in ("valid", "test") or num_rows is None or num_rows % series == 0:
        return []
    over = f"{num_rows % series} rows are left over"
    return [
        f"split '{split}' has {num_rows} rows, not a multiple of metadata.test_samples_per_series = {series}: {over}"
    ]


@dataclass(frozen=True)
class SplitFindings:
    """The problems of a whole split, and its number of rows where all chunks agree."""

    problems: tuple[str, ...]
    num_rows: int | None


def check_split(spec: FeatureSpec, split: str) -> SplitFindings:
    """Read every value of a split once, in bounded memory, and collect all problems."""
    findings = Findings()
    chunks = open_chunks(spec, split, findings)
    lengths = [] if findings else length_problems(split, chunks)
    for chunk in chunks:
        plans = [ColumnPlan.of_spec(spec, name, shifted=False) for name in chunk.chunk.features]
        for start in range(0, chunk.num_rows, BLOCK_ROWS):
            chunk.read(start, min(start + BLOCK_ROWS, chunk.num_rows), plans, findings)
    agree = not findings.of_files and len({chunk.num_rows for chunk in chunks}) == 1
    return SplitFindings((*findings.problems(), *lengths), chunks[0].num_rows if agree else None)
