"""Columns on disk: one reader and one writer for each chunk type.

`open_split` reads any rows of a split, whatever its chunks are made of, and gives columns in one shape: numpy arrays,
and `Ragged` for lists. `SplitWriter` writes columns as chunks of one type, `transcode` a whole dataset.

What a reader does to the stored values, in this order:

1. In a list, padding is dropped wherever it stands: id 0 where the feature declares `padding: 0`, else -1.
2. Every id must lie in [0, cardinality), every number must be finite and fit its dtype, and float32, in which models
   read it; a label must be 0 or 1. What doesn't is a `DataError` with file, column and row (1 is the first row of that
   file).
3. A list keeps its first `length` values.
4. Ids are raised by `FeatureSpec.shift`, so that 0 means padding in every batch.
"""

from __future__ import annotations

import pickle
import re
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec import tfrecord
from recspec.errors import DataError, SpecError, listed, nearest, unknown
from recspec.feature_spec import CHUNK_TYPES, FILE_NAME, Chunk, ChunkType, Feature, FeatureSpec
from recspec.outputs import locked, temporary_name, whole_folder
from recspec.paths import confined, copy, local

PREPARE_FILE = "prepare.json"
"""Beside a specification: from what, and with which settings, the dataset was prepared."""

BLOCK_ROWS = 65_536  # rows read or written at once, and rows of a Parquet row group
PARQUET_FILE_ROWS = 64 * BLOCK_ROWS
CSV_BLOCK_BYTES = 4 << 20  # text parsed at once; also what a random access to a CSV file costs

Array = NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class Ragged:
    """A column of lists: row i holds `values[offsets[i]:offsets[i + 1]]`."""

    values: Array
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], dtype: np.typing.DTypeLike = np.int64) -> Ragged:
        """From Python lists."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.array([value for row in rows for value in row], dtype), offsets)

    @classmethod
    def of_rectangle(cls, rows: Array) -> Ragged:
        """From an array (rows, length): every list has the same length."""
        return cls(rows.reshape(-1), np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1])

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, one after another."""
        starts = np.cumsum([0, *(part.offsets[-1] - part.offsets[0] for part in parts)])
        offsets = [part.offsets[1:] - part.offsets[0] + start for part, start in zip(parts, starts, strict=False)]
        values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
        return cls(np.concatenate(values), np.concatenate([np.zeros(1, np.int64), *offsets]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many values each row holds."""
        return np.diff(self.offsets)

    def rows(self, start: int, stop: int) -> Ragged:
        """Rows [start, stop)."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def where(self, keep: NDArray[np.bool_]) -> Ragged:
        """Only the values whose place in `values` is marked."""
        kept = np.zeros(len(self.values) + 1, np.int64)
        np.cumsum(keep, out=kept[1:])
        return Ragged(self.values[keep], kept[self.offsets])

    def truncate(self, length: int) -> Ragged:
        """At most the first `length` values of each row."""
        lengths = self.lengths
        if not len(lengths) or lengths.max() <= length:
            return self
        return self.where(np.arange(len(self.values)) - np.repeat(self.offsets[:-1], lengths) < length)

    def pad(self, length: int, fill: float = 0) -> Array:
        """An array (rows, length): each row's values first, then `fill`."""
        padded = np.full((len(self), length), fill, self.values.dtype)
        cut = self.truncate(length)
        padded[np.arange(length) < cut.lengths[:, None]] = cut.values
        return padded

    def tolist(self) -> list[list[float]]:
        """As Python lists."""
        return [self.values[a:b].tolist() for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


Column = Array | Ragged
Columns = dict[str, Column]


def rows_of(columns: Mapping[str, Column], start: int, stop: int) -> Columns:
    """Rows [start, stop) of every column, as views."""
    return {
        name: column.rows(start, stop) if isinstance(column, Ragged) else column[start:stop]
        for name, column in columns.items()
    }


def concatenate(parts: Sequence[Mapping[str, Column]]) -> Columns:
    """The rows of all parts, one after another, column by column."""
    return {name: _concatenate([part[name] for part in parts]) for name in parts[0]}


def _concatenate(parts: Sequence[Column]) -> Column:
    if len(parts) == 1:
        return parts[0]
    lists = [part for part in parts if isinstance(part, Ragged)]
    return Ragged.concatenate(lists) if lists else np.concatenate([p for p in parts if not isinstance(p, Ragged)])


# --- reading a split -------------------------------------------------------------------------------------------------


def open_split(
    spec: FeatureSpec, split: str, features: Sequence[str] | None = None, *, shifted: bool = True
) -> SplitReader:
    """Open a split for reading some of its features (all by default).

    With `shifted=False` ids come as they are stored, as `transcode` needs them.

    Raises:
        DataError: files that are missing or can't be read, chunks of unequal length, no row at all.
        SpecError: an unknown split.
    """
    held = spec.columns(split)
    problems = [unknown("feature", name, held) for name in features or () if name not in held]
    if problems:
        raise DataError.of(f"{spec.folder}, split '{split}'", problems)
    findings = Findings()
    chunks = _open_chunks(spec, split, findings)
    problems = findings.problems() or _length_problems(split, chunks)
    if problems:
        raise DataError.of(str(spec.folder), problems)
    return SplitReader(spec, split, tuple(features if features is not None else held), chunks, shifted=shifted)


class SplitReader:
    """The rows of one split: its chunks joined side by side, each chunk's files one after another."""

    def __init__(
        self, spec: FeatureSpec, split: str, features: tuple[str, ...], chunks: Sequence[_ChunkReader], *, shifted: bool
    ) -> None:
        self.spec = spec
        self.split = split
        self.features = features
        self.num_rows = chunks[0].num_rows
        self._chunks = [
            (chunk, [_plan(spec, name, shifted) for name in chunk.chunk.features if name in features])
            for chunk in chunks
            if set(chunk.chunk.features) & set(features)
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
        """Values each feature holds: rows of a scalar; of a list the count where the files tell it, else the most."""
        counts: dict[str, int] = {}
        for chunk, plans in self._chunks:
            for plan in plans:
                length = plan.feature.length
                most = self.num_rows * (length or 1)
                counts[plan.name] = most if length is None else min(most, chunk.num_values(plan.name) or most)
        return counts

    @property
    def nbytes(self) -> int:
        """Estimated bytes of all columns in memory, lists as `Ragged`."""
        counts = self.num_values
        offsets = sum(8 * (self.num_rows + 1) for name in self.features if self.spec.features[name].is_list)
        return offsets + sum(count * self.spec.storage_dtype(name).itemsize for name, count in counts.items())


def _mean_group(ends: NDArray[np.int64]) -> float:
    return float(ends[-1]) / len(ends) if len(ends) else 0.0


@dataclass(frozen=True)
class SplitFindings:
    """What reading a whole split showed: its problems, and its rows where all chunks agree on them."""

    problems: tuple[str, ...]
    num_rows: int | None


TOO_LARGE = "too large for an id"


def published_records(spec: FeatureSpec, problems: Sequence[str]) -> list[str]:
    """What ids that are too large come from in SIM's published records, whose specification leaves it unsaid."""
    if not spec.leaves_padding_unsaid or not any(TOO_LARGE in problem for problem in problems):
        return []
    told = (
        f"{listed(spec.leaves_padding_unsaid)} are histories without `padding`, and ids are too large; if these are "
        "SIM's published records, in which ids count from 1, 0 is padding and a cardinality is the largest id, "
        "`recspec prepare amazon FOLDER OUT` reads them; else give the largest id plus one as cardinality"
    )
    return [told]


def check_split(spec: FeatureSpec, split: str) -> SplitFindings:
    """Read every value of a split once, in bounded memory, and gather all that is wrong with it."""
    findings = Findings()
    chunks = _open_chunks(spec, split, findings)
    lengths = [] if findings else _length_problems(split, chunks)
    for chunk in chunks:
        plans = [_plan(spec, name, shifted=False) for name in chunk.chunk.features]
        for start in range(0, chunk.num_rows, BLOCK_ROWS):
            chunk.read(start, min(start + BLOCK_ROWS, chunk.num_rows), plans, findings)
    agree = not findings.of_files and len({chunk.num_rows for chunk in chunks}) == 1
    return SplitFindings((*findings.problems(), *lengths), chunks[0].num_rows if agree else None)


def _open_chunks(spec: FeatureSpec, split: str, findings: Findings) -> list[_ChunkReader]:
    return [_open_chunk(spec, chunk, findings) for chunk in spec.sources[split]]


def _length_problems(split: str, chunks: Sequence[_ChunkReader]) -> list[str]:
    counts = [chunk.num_rows for chunk in chunks]
    if len(set(counts)) > 1:
        shown = "; ".join(chunk.describe_length() for chunk in chunks)
        return [f"split '{split}': its chunks must hold the same number of rows; found {shown}"]
    if counts[0] == 0:
        files = listed(file for chunk in chunks for file in chunk.chunk.files)
        return [f"split '{split}' holds no row (files {files}); fill it, or leave it out of source_spec"]
    return []


# --- what is wrong with files ----------------------------------------------------------------------------------------


@dataclass
class _Finding:
    row: int | None  # 0-based row of the file
    what: str
    rows: int


class Findings:
    """What is wrong in files: of each kind in a column of a file, the first row and how many rows."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str | None, str], _Finding] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def of_files(self) -> bool:
        """Whether some file could not be opened, so that its rows are not known."""
        return any(kind == "file" for _, _, kind in self._found)

    def add(self, file: str, column: str | None, row: int | None, kind: str, what: str, rows: int = 1) -> None:
        """Note a problem; `row` is 0-based, None when it is about the whole column or file."""
        found = self._found.get((file, column, kind))
        if found is None:
            self._found[file, column, kind] = _Finding(row, what, rows)
        else:
            found.rows += rows

    def problems(self) -> list[str]:
        """One sentence for each finding, with its place."""
        return [
            f"{_place(file, column, found.row)}: {found.what}{_and_more(found)}"
            for (file, column, _), found in self._found.items()
        ]


def _place(file: str, column: str | None, row: int | None) -> str:
    parts = [file, *([] if column is None else [f"column '{column}'"]), *([] if row is None else [f"row {row + 1}"])]
    return ", ".join(parts)


def _and_more(found: _Finding) -> str:
    more = found.rows - 1
    return "" if found.row is None or more == 0 else f" (and {more:,} more row{'s' if more > 1 else ''} like it)"


@dataclass(frozen=True)
class _Report:
    """Findings of one file."""

    findings: Findings
    file: str

    def add(self, column: str | None, row: int | None, kind: str, what: str, rows: int = 1) -> None:
        self.findings.add(self.file, column, row, kind, what, rows)

    def add_where(self, column: str, bad: NDArray[np.bool_], first_row: int, kind: str, what: str) -> None:
        """Note the rows that are marked."""
        self.add(column, first_row + int(np.argmax(bad)), kind, what, int(np.count_nonzero(bad)))


# --- from stored to checked values -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Limits:
    """The values a column may hold, and the sentences for those outside."""

    low: float
    high: float
    too_low: str
    too_high: str
    only_ends: bool = False
    """Whether `low` and `high` are the only values, so that 0.5 is none."""


@dataclass(frozen=True)
class _Plan:
    """How one column is read."""

    name: str
    feature: Feature
    dtype: np.dtype[np.generic]
    shift: int
    result: np.dtype[np.generic]  # wide enough for a shifted id
    kinds: str  # numpy's letters for the types it may be stored in
    limits: _Limits

    @classmethod
    def of(
        cls, name: str, feature: Feature, dtype: np.dtype[np.generic], shift: int = 0, *, is_label: bool = False
    ) -> _Plan:
        """Work out once what every block is asked."""
        cardinality = feature.cardinality
        fits = shift == 0 or (
            isinstance(cardinality, int) and dtype.kind in "iu" and cardinality <= _int_range(dtype)[1]
        )
        wide = np.dtype("int32" if isinstance(cardinality, int) and cardinality < 2**31 else "int64")
        kinds = "iubf" if dtype.kind == "f" else "iu" if feature.is_categorical and dtype.kind != "b" else "iub"
        limits = _LABEL_LIMITS if is_label else _limits(feature, dtype)
        return cls(name, feature, dtype, shift, dtype if fits else wide, kinds, limits)


def _plan(spec: FeatureSpec, name: str, shifted: bool) -> _Plan:
    shift = spec.shift(name) if shifted else 0
    return _Plan.of(name, spec.features[name], spec.storage_dtype(name), shift, is_label=name == spec.label)


_NO_LABEL = "is no label; a label is 0 or 1: rewrite the column so, or name another one in channel_spec.label"
_LABEL_LIMITS = _Limits(0, 1, _NO_LABEL, _NO_LABEL, only_ends=True)


def _limits(feature: Feature, dtype: np.dtype[np.generic]) -> _Limits:
    if dtype.kind == "f":
        read_as = min(dtype, np.dtype("float32"), key=lambda each: each.itemsize)  # float64 beyond it would be infinite
        largest = float(np.finfo(read_as.name).max)
        too_large = f"does not fit {read_as}, whose largest value is {largest:.6g}"
        return _Limits(-largest, largest, too_large, too_large)
    if dtype.kind == "b":
        return _Limits(0, 1, "is not 0 or 1, as bool expects", "is not 0 or 1, as bool expects")
    least, last = _int_range(dtype)
    fits = f"does not fit {dtype}, which ends at"
    if not feature.is_categorical:
        return _Limits(least, last, f"{fits} {least}", f"{fits} {last}")
    negative = "is negative; an id lies in [0, cardinality)"
    if not isinstance(feature.cardinality, int):
        return _Limits(0, last, negative, f"{fits} {last}")
    last = feature.cardinality - 1
    too_high = f"is {TOO_LARGE}: the cardinality is {last + 1}, so ids are 0 to {last}"
    return _Limits(0, last, f"{negative}: 0 to {last}", too_high)


def _int_range(dtype: np.dtype[np.generic]) -> tuple[int, int]:
    limits = np.iinfo(dtype.name)
    return int(limits.min), int(limits.max)


def _checked(raw: Column, plan: _Plan, first_row: int, report: _Report) -> Column:
    """Stored values as the specification promises them; what breaks it is reported and replaced by zeros."""
    stored_lists = isinstance(raw, Ragged) or raw.ndim == 2
    if stored_lists != plan.feature.is_list:
        report.add(plan.name, None, "shape", _SHAPE_PROBLEMS[stored_lists])
        return _zeros(plan, len(raw))
    if not stored_lists:
        assert not isinstance(raw, Ragged)
        values = _checked_values(raw, plan, report, lambda bad: bad, first_row)
        return _raised(values, plan)
    lists = raw if isinstance(raw, Ragged) else Ragged.of_rectangle(raw)
    if plan.feature.is_categorical and lists.values.dtype.kind in "iu":
        real = lists.values != (-1 if plan.feature.padding is None else plan.feature.padding)
        lists = lists if real.all() else lists.where(real)
    values = _checked_values(lists.values, plan, report, lambda bad: _rows_with(bad, lists.offsets), first_row)
    cut = Ragged(values, lists.offsets).truncate(plan.feature.length or 1)
    return Ragged(_raised(cut.values, plan), cut.offsets)


_SHAPE_PROBLEMS = {
    True: "holds lists; expected one value a row (a list feature has a `length` in feature_spec)",
    False: "holds one value a row; expected lists, for the feature has a `length` in feature_spec",
}


def _zeros(plan: _Plan, num_rows: int) -> Column:
    values = np.zeros(0 if plan.feature.is_list else num_rows, plan.result)
    return Ragged(values, np.zeros(num_rows + 1, np.int64)) if plan.feature.is_list else values


def _rows_with(bad: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows hold a marked value."""
    rows = np.zeros(len(offsets) - 1, np.bool_)
    rows[np.searchsorted(offsets, np.flatnonzero(bad), side="right") - 1] = True
    return rows


def _raised(values: Array, plan: _Plan) -> Array:
    """An array of the caller's own, in the result's dtype, ids shifted."""
    own = values.astype(plan.result)
    if plan.shift:
        own += plan.result.type(plan.shift)
    return own


_LARGEST_HALF = 65504.0  # of float16; in its bits, infinity and NaN are above every other number
_HALF_WITHOUT_SIGN, _HALF_INFINITY = np.uint16(0x7FFF), 0x7C00


def _checked_values(
    raw: Array, plan: _Plan, report: _Report, rows: Callable[[NDArray[np.bool_]], NDArray[np.bool_]], first_row: int
) -> Array:
    """The values, or zeros where they are not what the specification says."""
    if raw.dtype.kind not in plan.kinds:
        report.add(plan.name, None, "type", f"holds {raw.dtype}; expected {_expected(plan)}")
        return np.zeros(len(raw), plan.dtype)
    if not len(raw) or raw.dtype.kind == "b":
        return raw
    # The least and the largest value say whether values must be looked at one by one: sound data cost two passes at
    # memory speed. NaN shows in both.
    if raw.dtype == np.float16 and plan.limits.high >= _LARGEST_HALF:  # whose comparisons numpy does one by one
        if (raw.view(np.uint16) & _HALF_WITHOUT_SIGN).max() < _HALF_INFINITY:
            return raw
    elif _lies_within(raw, plan.limits):
        return raw
    for kind, bad, what in _faults(raw, plan.limits):
        if bad.any():
            report.add_where(plan.name, rows(bad), first_row, kind, f"{raw[np.argmax(bad)].item()} {what}")
            raw = np.where(bad, raw.dtype.type(0), raw)
    return raw


def _expected(plan: _Plan) -> str:
    if plan.feature.is_categorical:
        return f"ids of an integer type ({plan.dtype})"
    return f"numbers ({plan.dtype})" if plan.dtype.kind == "f" else str(plan.dtype)


def _faults(raw: Array, limits: _Limits) -> Iterator[tuple[str, NDArray[np.bool_], str]]:
    """Kind, the values it marks, and what was expected."""
    if raw.dtype.kind == "f":
        raw = raw.astype(np.float64)  # in which every limit can be compared
    finite = np.isfinite(raw)
    yield "finite", ~finite, "is not a finite number"
    if limits.only_ends:  # one kind of fault, whichever way a value is none of the two
        beyond = np.less(raw, limits.low) | np.greater(raw, limits.high) | _between_ends(raw, limits)
        yield "value", finite & beyond, limits.too_low
        return
    yield "low", finite & np.less(raw, limits.low), limits.too_low
    yield "high", finite & np.greater(raw, limits.high), limits.too_high


def _lies_within(raw: Array, limits: _Limits) -> bool:
    if raw.dtype == np.float16:
        raw = raw.astype(np.float32)
    if raw.min().item() < limits.low or not raw.max().item() <= limits.high:
        return False
    return not limits.only_ends or raw.dtype.kind != "f" or not _between_ends(raw, limits).any()


def _between_ends(raw: Array, limits: _Limits) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (raw != raw.dtype.type(limits.low)) & (raw != raw.dtype.type(limits.high))
    return found


# --- chunks ----------------------------------------------------------------------------------------------------------


class TableFile(Protocol):
    """One file of a chunk, as it is stored."""

    num_rows: int
    group_ends: NDArray[np.int64]  # rows after which a new unit of decoding starts; empty when any row is as near

    def read(self, start: int, stop: int, plans: Sequence[_Plan], report: _Report) -> Columns:
        """Rows [start, stop) of some columns. What can't be read is reported and given as zeros."""

    def num_values(self, name: str) -> int | None:
        """How many values a column's lists hold, where the file tells without being read."""


class _ChunkReader:
    """A chunk's files, one after another."""

    def __init__(self, chunk: Chunk, files: Sequence[TableFile]) -> None:
        self.chunk = chunk
        self._files = files
        self._ends = np.cumsum([file.num_rows for file in files], dtype=np.int64).tolist()
        self.num_rows: int = self._ends[-1] if self._ends else 0
        starts = [0, *self._ends][: len(files)]
        ends = [file.group_ends + start for file, start in zip(files, starts, strict=True)]
        self.group_ends: NDArray[np.int64] = np.concatenate(ends) if ends else np.zeros(0, np.int64)

    def read(self, start: int, stop: int, plans: Sequence[_Plan], findings: Findings) -> Columns:
        parts: list[Columns] = []
        for number in range(bisect_right(self._ends, start), len(self._files)):
            first = self._ends[number] - self._files[number].num_rows
            if first >= stop and parts:
                break
            a, b = max(start, first) - first, min(stop, self._ends[number]) - first
            report = _Report(findings, self.chunk.files[number])
            try:
                raw = self._files[number].read(a, max(a, b), plans, report)
            except DataError as error:
                report.add(None, None, "damage", str(error))
                raw = {plan.name: _zeros(plan, max(0, b - a)) for plan in plans}
            parts.append({plan.name: _checked(raw[plan.name], plan, a, report) for plan in plans})
        return concatenate(parts) if parts else {plan.name: _zeros(plan, 0) for plan in plans}

    def num_values(self, name: str) -> int | None:
        counts = [file.num_values(name) for file in self._files]
        return None if None in counts else sum(count or 0 for count in counts)

    def describe_length(self) -> str:
        """`60 + 40 = 100 rows of 'a', 'b' (files ...)`."""
        counts = [file.num_rows for file in self._files]
        total = " + ".join(map(str, counts)) + (f" = {sum(counts)}" if len(counts) > 1 else "")
        return f"{total} rows of {listed(self.chunk.features)} in {listed(self.chunk.files)}"


def _open_chunk(spec: FeatureSpec, chunk: Chunk, findings: Findings) -> _ChunkReader:
    """The files of a chunk that can be opened; those that can't are findings."""
    plans = [_plan(spec, name, shifted=False) for name in chunk.features]
    files: list[TableFile] = []
    for name in chunk.files:
        problem = None
        try:
            path = spec.path(name)
            problem = _missing(path)
            if problem is None:
                files.append(_READERS[chunk.type](path, plans))
        except (DataError, SpecError) as error:
            problem = str(error)
        if problem is not None:
            findings.add(name, None, None, "file", problem)
    return _ChunkReader(chunk, files) if len(files) == len(chunk.files) else _ChunkReader(chunk, [])


def _missing(path: Path) -> str | None:
    if path.is_file():
        return None
    if path.exists():
        return "is a folder; expected a file"
    if not path.parent.is_dir():
        return f"no such file: the folder {path.parent} does not exist"
    return f"no such file{nearest(path.name, [found.name for found in path.parent.iterdir()])}"


# --- csv -------------------------------------------------------------------------------------------------------------


class _CsvFile:
    """Headerless CSV, columns in the order of the chunk; lists are cells such as `"[1, 2, 3]"`.

    Opening reads the file once to count rows and to note where blocks of about 4 MiB start; a read parses the blocks
    it touches, and keeps the last.
    """

    def __init__(self, path: Path, plans: Sequence[_Plan]) -> None:
        self._path = path
        self._plans = plans
        self._starts, self.group_ends = _index_csv(path)
        self.num_rows = int(self.group_ends[-1]) if len(self.group_ends) else 0
        self._parsed: tuple[int, tuple[str, ...], Columns] | None = None

    def num_values(self, name: str) -> int | None:  # noqa: ARG002
        return None

    def read(self, start: int, stop: int, plans: Sequence[_Plan], report: _Report) -> Columns:
        return _read_groups(self.group_ends, start, stop, lambda group: self._group(group, plans, report), plans)

    def _group(self, group: int, plans: Sequence[_Plan], report: _Report) -> Columns:
        names = tuple(plan.name for plan in plans)
        held = self._parsed  # taken once: two iterators of one loader may read side by side
        if held is None or held[:2] != (group, names):
            with self._path.open("rb") as file:
                file.seek(self._starts[group])
                text = file.read(self._starts[group + 1] - self._starts[group])
            first_row = int(self.group_ends[group - 1]) if group else 0
            self._parsed = held = (group, names, self._parse(text, plans, first_row, report))
        return held[2]

    def _parse(self, text: bytes, plans: Sequence[_Plan], first_row: int, report: _Report) -> Columns:
        if any(plan.feature.is_list for plan in self._plans):
            text = _SPACE_BEFORE_QUOTE.sub(b'\\1"', text)  # a quote opens a cell only where it is its first character
        types = {plan.name: _csv_type(plan) for plan in plans}
        try:
            table = self._table(text, types)
        except pa.ArrowInvalid:
            return self._parse_slowly(text, plans, first_row, report)
        return {plan.name: _from_cells(table[plan.name], plan, first_row, report) for plan in plans}

    def _parse_slowly(self, text: bytes, plans: Sequence[_Plan], first_row: int, report: _Report) -> Columns:
        """For text that some column's type refuses: every cell as a string, to say which one and why."""
        types = {plan.name: pa.string() for plan in plans}
        try:
            table = self._table(text, types)
        except pa.ArrowInvalid as error:
            self._report_row(text, error, first_row, report)
            num_rows = _count_rows(text)
            return {plan.name: _zeros(plan, num_rows) for plan in plans}
        if first_row == 0 and self._is_header(table):
            names = listed(plan.name for plan in self._plans)
            report.add(None, 0, "header", f"is a header line; a csv chunk has none, its columns are {names} in order")
            return {plan.name: _zeros(plan, len(table)) for plan in plans}
        return {plan.name: _from_cells(table[plan.name], plan, first_row, report) for plan in plans}

    def _is_header(self, table: pa.Table) -> bool:
        return all(str(table[name][0]).strip().strip('"') == name for name in table.column_names)

    def _table(self, text: bytes, types: Mapping[str, pa.DataType]) -> pa.Table:
        return pa_csv.read_csv(
            pa.BufferReader(text),
            read_options=pa_csv.ReadOptions(column_names=[plan.name for plan in self._plans]),
            convert_options=pa_csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=[""], strings_can_be_null=False
            ),
        )

    def _report_row(self, text: bytes, error: pa.ArrowInvalid, first_row: int, report: _Report) -> None:
        """Text that is not a table: say which row has how many cells."""
        expected = len(self._plans)
        names = listed(plan.name for plan in self._plans)
        for row, line in enumerate(line for line in text.splitlines() if line):
            cells = len(_CELL.findall(line))
            if cells != expected:
                report.add(None, first_row + row, "cells", f"has {cells} cells; expected {expected}: {names}")
                return
        report.add(None, None, "text", f"can't be read as CSV: {error}")


_SPACE_BEFORE_QUOTE = re.compile(rb'(^|,)[ \t]+"', re.MULTILINE)
_CELL = re.compile(rb'(?:^|,)(?:[ \t]*"[^"]*"[ \t]*|[^,]*)')


def _csv_type(plan: _Plan) -> pa.DataType:
    if plan.feature.is_list or plan.dtype.kind == "b":
        return pa.string()
    return pa.float64() if plan.dtype.kind == "f" else pa.int64()


def _index_csv(path: Path) -> tuple[list[int], NDArray[np.int64]]:
    """Byte offsets where blocks of whole lines start (and the file's end), and the row after each block."""
    starts, rows, position = [0], [0], 0
    with path.open("rb") as file:
        while text := file.read(CSV_BLOCK_BYTES):
            text += file.readline()
            position += len(text)
            count = _count_rows(text)
            if count == 0 and len(starts) > 1:  # blank lines only: part of the block before
                starts[-1] = position
            elif count:
                starts.append(position)
                rows.append(rows[-1] + count)
    return starts, np.array(rows[1:], np.int64)


def _count_rows(text: bytes) -> int:
    """Lines that are not empty."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    if text[:1] in b"\r\n" or b"\n\n" in text or b"\n\r\n" in text:
        return sum(1 for line in text.split(b"\n") if line not in (b"", b"\r"))
    return text.count(b"\n") + (not text.endswith(b"\n"))


def _read_groups(
    ends: NDArray[np.int64], start: int, stop: int, group: Callable[[int], Columns], plans: Sequence[_Plan]
) -> Columns:
    """Rows [start, stop) from the groups (row groups, blocks) that hold them."""
    parts = []
    for number in range(int(np.searchsorted(ends, start, side="right")), len(ends)):
        first = int(ends[number - 1]) if number else 0
        if first >= stop:
            break
        parts.append(rows_of(group(number), max(start - first, 0), min(stop, int(ends[number])) - first))
    return concatenate(parts) if parts else {plan.name: _zeros(plan, 0) for plan in plans}


# --- Arrow columns, shared by csv and parquet ------------------------------------------------------------------------


def _from_cells(column: pa.ChunkedArray, plan: _Plan, first_row: int, report: _Report) -> Column:
    """A CSV column: numbers where Arrow parsed them, else text that is parsed here and blamed cell by cell."""
    array = column.combine_chunks()
    if not pa.types.is_string(array.type):
        return _from_arrow(array, plan, first_row, report)
    if plan.feature.is_list:
        return _parsed_lists(array, plan, first_row, report)
    empty = pc.equal(pc.utf8_trim_whitespace(array), "").to_numpy(zero_copy_only=False)
    if empty.any():
        report.add_where(plan.name, empty, first_row, "null", _NULL)
        array = pc.if_else(pa.array(empty), "0", array)
    return _parsed(array, plan, report, lambda bad: bad, first_row)


_NULL = "is empty; every row needs a value"
_INTEGER = r"^-?[0-9]{1,18}$"  # every one of them fits int64
_NUMBER = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^-?([nN]a[nN]|[iI]nf)$"


def _parsed(
    cells: pa.StringArray,
    plan: _Plan,
    report: _Report,
    rows: Callable[[NDArray[np.bool_]], NDArray[np.bool_]],
    first_row: int,
) -> Array:
    """Text as numbers; what is none is reported and becomes 0."""
    text = pc.utf8_trim_whitespace(cells)
    if plan.dtype.kind == "b":
        text = pc.replace_with_mask(text, pc.is_in(text, pa.array(["true", "True", "TRUE"])), pa.scalar("1"))
        text = pc.replace_with_mask(text, pc.is_in(text, pa.array(["false", "False", "FALSE"])), pa.scalar("0"))
    floating = plan.dtype.kind == "f"
    bad = ~pc.match_substring_regex(text, _NUMBER if floating else _INTEGER).to_numpy(zero_copy_only=False)
    if bad.any():
        shown = repr(text[int(np.argmax(bad))].as_py())
        expected = f"a number ({plan.dtype})" if floating else f"an integer ({plan.dtype})"
        report.add_where(plan.name, rows(bad), first_row, "parse", f"{shown} is not {expected}")
        text = pc.if_else(pa.array(bad), "0", text)
    values: Array = text.cast(pa.float64() if floating else pa.int64()).to_numpy(zero_copy_only=False)
    return values


def _parsed_lists(cells: pa.StringArray, plan: _Plan, first_row: int, report: _Report) -> Ragged:
    """Cells such as `[1, 2, 3]`, `[1 2 3]`, `1,2,3`, `[]` and nothing at all, which is the empty list too."""
    inner = pc.utf8_trim(pc.utf8_trim_whitespace(pc.fill_null(cells, "")), "[]")
    parts = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pc.replace_substring(inner, ",", " ")))
    values = parts.flatten()
    real = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(cells) + 1, np.int64)
    np.cumsum(pc.list_value_length(parts).to_numpy(zero_copy_only=False), out=offsets[1:])
    lists = Ragged(np.arange(len(values)), offsets).where(real)
    texts = values.filter(pa.array(real))
    return Ragged(_parsed(texts, plan, report, lambda bad: _rows_with(bad, lists.offsets), first_row), lists.offsets)


def _from_arrow(array: pa.Array, plan: _Plan, first_row: int, report: _Report) -> Column:
    """An Arrow column of numbers, or of lists of numbers, as numpy; empty cells are reported, empty lists are not."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not _is_arrow_list(array.type):
        return _numbers(array, plan, report, lambda bad: bad, first_row)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False), out=offsets[1:])
    return Ragged(
        _numbers(array.flatten(), plan, report, lambda bad: _rows_with(bad, offsets), first_row),
        offsets,
    )


def _is_arrow_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _numbers(
    array: pa.Array,
    plan: _Plan,
    report: _Report,
    rows: Callable[[NDArray[np.bool_]], NDArray[np.bool_]],
    first_row: int,
) -> Array:
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        expected = "ids" if plan.feature.is_categorical else "numbers"
        report.add(plan.name, None, "type", f"holds {kind}; expected {expected} ({plan.dtype})")
        return np.zeros(len(array), plan.dtype)
    if array.null_count:
        bad = rows(pc.is_null(array).to_numpy(zero_copy_only=False))
        report.add_where(plan.name, bad, first_row, "null", _NULL)
        array = pc.fill_null(array, False if pa.types.is_boolean(kind) else pa.scalar(0).cast(kind))
    values: Array = array.to_numpy(zero_copy_only=False)
    return values


# --- parquet ---------------------------------------------------------------------------------------------------------


class _ParquetFile:
    """Columns are found by name. A read decodes the row groups it touches, and keeps the last."""

    def __init__(self, path: Path, plans: Sequence[_Plan]) -> None:
        self._path = path
        try:
            self._metadata = pq.read_metadata(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"can't be read as Parquet: {error}") from None
        self._names = self._metadata.schema.to_arrow_schema().names
        problems = [
            f"has no column '{plan.name}'{nearest(plan.name, self._names)}; it holds {listed(self._names)}"
            for plan in plans
            if plan.name not in self._names
        ]
        if problems:
            raise DataError("; ".join(problems))
        groups = range(self._metadata.num_row_groups)
        self.num_rows: int = self._metadata.num_rows
        self.group_ends = np.cumsum([self._metadata.row_group(i).num_rows for i in groups], dtype=np.int64)
        self._decoded: tuple[int, tuple[str, ...], Columns] | None = None

    def num_values(self, name: str) -> int | None:
        paths = [self._metadata.row_group(0).column(i).path_in_schema for i in range(self._metadata.num_columns)]
        columns = [i for i, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]
        groups = range(self._metadata.num_row_groups)
        return sum(int(self._metadata.row_group(group).column(columns[0]).num_values) for group in groups)

    def read(self, start: int, stop: int, plans: Sequence[_Plan], report: _Report) -> Columns:
        return _read_groups(self.group_ends, start, stop, lambda group: self._group(group, plans, report), plans)

    def _group(self, group: int, plans: Sequence[_Plan], report: _Report) -> Columns:
        names = tuple(plan.name for plan in plans)
        held = self._decoded  # taken once: two iterators of one loader may read side by side
        if held is None or held[:2] != (group, names):
            self._decoded = held = None  # let go of the group before, so that only one is held
            first_row = int(self.group_ends[group - 1]) if group else 0
            try:
                with pq.ParquetFile(self._path, metadata=self._metadata) as file:
                    table = file.read_row_group(group, columns=list(names))
            except (pa.ArrowException, OSError, ValueError) as error:
                raise DataError(f"row group {group + 1} is damaged: {error}") from None
            columns = {p.name: _from_arrow(table[p.name].combine_chunks(), p, first_row, report) for p in plans}
            self._decoded = held = (group, names, columns)
        return held[2]


# --- split_binary ----------------------------------------------------------------------------------------------------


class _BinaryFile:
    """Raw little-endian rows, mapped into memory: the chunk's features one after another in each row.

    One feature a file is a plain column; numbers of one dtype side by side are a row-major matrix. A list takes
    `length` values.
    """

    group_ends: NDArray[np.int64] = np.zeros(0, np.int64)

    def __init__(self, path: Path, plans: Sequence[_Plan]) -> None:
        record = _record_dtype(plans)
        size = path.stat().st_size
        if size % record.itemsize:
            row = ", ".join(f"{plan.name} {plan.dtype}" for plan in plans)
            raise DataError(f"has {size:,} bytes, not a whole number of rows of {record.itemsize} bytes ({row})")
        self.num_rows = size // record.itemsize
        # An empty file can't be mapped; a plain array on the mapping is cut faster than a memmap.
        self._rows = np.asarray(np.memmap(path, record, "r") if size else np.zeros(0, record))
        self._fields = {plan.name: str(number) for number, plan in enumerate(plans)}

    def num_values(self, name: str) -> int | None:  # noqa: ARG002
        return None

    def read(self, start: int, stop: int, plans: Sequence[_Plan], report: _Report) -> Columns:  # noqa: ARG002
        return {plan.name: self._rows[self._fields[plan.name]][start:stop] for plan in plans}


def _record_dtype(plans: Sequence[_Plan]) -> np.dtype[np.void]:
    """A row of a binary file; its fields are numbered, for a feature may have any name."""
    fields = []
    for number, plan in enumerate(plans):
        stored = np.dtype("uint8") if plan.dtype.kind == "b" else plan.dtype.newbyteorder("<")
        fields.append((str(number), stored, (plan.feature.length,) if plan.feature.length else ()))
    return np.dtype(fields)


# --- torch_tensor ----------------------------------------------------------------------------------------------------


class _TensorFile:
    """A tensor (rows, columns), mapped into memory; a list takes `length` columns. Pickled objects are never loaded."""

    group_ends: NDArray[np.int64] = np.zeros(0, np.int64)

    def __init__(self, path: Path, plans: Sequence[_Plan]) -> None:
        self._rows = _load_tensor(path)
        self._columns: dict[str, tuple[int, int]] = {}
        width = 0
        for plan in plans:
            self._columns[plan.name] = (width, width := width + (plan.feature.length or 1))
        if self._rows.ndim == 1 and width == 1:
            self._rows = self._rows[:, None]
        if self._rows.ndim != 2 or self._rows.shape[1] != width:
            names = listed(plan.name for plan in plans)
            raise DataError(f"holds a tensor of shape {self._rows.shape}; expected (rows, {width}): {names}")
        self.num_rows = len(self._rows)

    def num_values(self, name: str) -> int | None:  # noqa: ARG002
        return None

    def read(self, start: int, stop: int, plans: Sequence[_Plan], report: _Report) -> Columns:  # noqa: ARG002
        columns: Columns = {}
        for plan in plans:
            first, last = self._columns[plan.name]
            values = self._rows[start:stop, first:last]
            columns[plan.name] = values if plan.feature.is_list else values[:, 0]
        return columns


def _load_tensor(path: Path) -> Array:
    import torch  # only here and in the writer: everything else reads and writes without it

    try:
        try:
            tensor = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format of torch before 1.6 can't be mapped
            with warnings.catch_warnings():  # about pickle protocols, before it refuses them
                warnings.simplefilter("ignore")
                tensor = torch.load(str(path), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise DataError("holds no plain tensor, and pickled objects are never loaded; use torch.save(tensor)") from None
    except Exception as error:  # torch's reader raises whatever damaged bytes lead it to: KeyError, IndexError, ...
        raise DataError(f"can't be read as a tensor: {error!r}") from None
    if not isinstance(tensor, torch.Tensor):
        raise DataError(f"holds a {type(tensor).__name__}; expected one tensor (rows, columns)")
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    values: Array = tensor.detach().numpy()
    return values


# --- tfrecord --------------------------------------------------------------------------------------------------------


class _TfrecordFile:
    """`tf.train.Example` records, one row each, or `rows_per_record` rows that stand feature by feature (prebatched).

    Opening reads the frame of every record; how many rows a record holds is told by the first one and checked in all.
    """

    group_ends: NDArray[np.int64] = np.zeros(0, np.int64)

    def __init__(self, path: Path, plans: Sequence[_Plan]) -> None:
        self._path = path
        self._records = tfrecord.Index.of(path)
        self._rows_per_record = self._count_rows(plans)
        self.num_rows = len(self._records) * self._rows_per_record

    def num_values(self, name: str) -> int | None:  # noqa: ARG002
        return None

    def read(self, start: int, stop: int, plans: Sequence[_Plan], report: _Report) -> Columns:
        per_record = self._rows_per_record
        first, last = start // per_record, -(-stop // per_record)
        found = self._records.read(first, last, [plan.name for plan in plans])
        columns = {
            plan.name: _from_examples(found[plan.name], plan, per_record, first * per_record, report) for plan in plans
        }
        return rows_of(columns, start - first * per_record, stop - first * per_record)

    def _count_rows(self, plans: Sequence[_Plan]) -> int:
        scalars = [plan.name for plan in plans if not plan.feature.is_list]
        if not scalars or not len(self._records):
            return 1
        return max(1, len(self._records.read(0, 1, scalars[:1])[scalars[0]].values))


def _from_examples(found: tfrecord.Values, plan: _Plan, per_record: int, first_row: int, report: _Report) -> Column:
    """One feature of consecutive records as a column: a scalar has one value a row; a list any number up to `length`
    where a record is a row, and exactly `length` in prebatched records."""
    lists = Ragged(found.values, found.offsets)
    num_rows = len(lists) * per_record
    if plan.feature.is_list and per_record == 1:
        return lists
    expected = per_record * (plan.feature.length or 1)
    bad: NDArray[np.bool_] = lists.lengths != expected
    if bad.any():
        held = int(lists.lengths[np.argmax(bad)])
        what = f"its record holds {held} values; expected {expected}"
        report.add_where(plan.name, np.repeat(bad, per_record), first_row, "count", what)
        return _zeros(plan, num_rows)
    return lists.values.reshape(num_rows, -1) if plan.feature.is_list else lists.values


_READERS: Mapping[ChunkType, Callable[[Path, Sequence[_Plan]], TableFile]] = {
    "csv": _CsvFile,
    "parquet": _ParquetFile,
    "split_binary": _BinaryFile,
    "torch_tensor": _TensorFile,
    "tfrecord": _TfrecordFile,
}


# --- writing ---------------------------------------------------------------------------------------------------------


class SplitWriter:
    """Writes one split as chunks of one type, a block at a time, and then says what it wrote in `chunks`.

    Columns are checked as they are when read: what is written can be read back. Files get their names when the writer
    closes; when it is left by an exception nothing remains.

    `parquet`, `csv` and `tfrecord` hold all features in one chunk. `split_binary` gives each categorical feature a
    file and `torch_tensor` each dtype of ids; both put numbers of one dtype into one file, and `label` into its own.
    Both store a list as `length` values, filled with its padding: 0 where it is declared, else -1.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        features: Mapping[str, Feature],
        type: ChunkType = "parquet",
        *,
        rows_per_file: int | None = None,
        label: str | None = None,
    ) -> None:
        if type not in _WRITERS:
            raise DataError(unknown("chunk type", type, CHUNK_TYPES))
        self.folder = Path(folder)
        self.split = split
        self.type: ChunkType = type
        self.num_rows = 0
        self.chunks: tuple[Chunk, ...] = ()
        self._plans = {
            name: _Plan.of(name, feature, _stored_dtype(feature), is_label=name == label)
            for name, feature in features.items()
        }
        _check_can_hold(self._plans.values(), type)
        self._rows_per_file = rows_per_file or (PARQUET_FILE_ROWS if type == "parquet" else None)
        self._groups = [_Group(*group) for group in _grouped(self._plans, type, label)]
        self._waiting: list[Columns] = []
        self._num_waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def write(self, columns: Mapping[str, Column]) -> None:
        """Add rows: arrays, and for lists `Ragged` or an array (rows, length).

        Raises:
            DataError: values that the specification forbids; columns that are missing, unknown or unequally long.
        """
        num_rows = self._check_columns(columns)
        findings = Findings()
        report = _Report(findings, f"split '{self.split}' being written")
        checked = {name: _checked(columns[name], plan, self.num_rows, report) for name, plan in self._plans.items()}
        if findings:
            raise DataError.of(str(self.folder), findings.problems())
        self.num_rows += num_rows
        self._waiting.append(checked)
        self._num_waiting += num_rows
        self._flush(BLOCK_ROWS)

    def close(self) -> None:
        """Write what is waiting, and give the files their names."""
        try:
            self._flush(1)
            for group in self._groups:
                if not group.outputs:
                    self._open(group)
            outputs = [output for group in self._groups for output in group.outputs]
            for output in outputs:
                output.close()
        except BaseException:
            self._discard()
            raise
        for output in outputs:
            output.temporary.replace(output.path)
        self.chunks = tuple(
            Chunk(
                type=self.type,
                features=group.features,
                files=tuple(f"{self.split}/{o.path.name}" for o in group.outputs),
            )
            for group in self._groups
        )

    def _check_columns(self, columns: Mapping[str, Column]) -> int:
        counts = {name: len(column) for name, column in columns.items()}
        problems = [f"column '{name}' is missing" for name in self._plans if name not in counts]
        problems += [unknown("feature", name, self._plans) for name in counts if name not in self._plans]
        if len(set(counts.values())) > 1:
            problems.append(f"columns must hold the same number of rows; found {counts}")
        if problems:
            raise DataError.of(f"{self.folder}, split '{self.split}' being written", problems)
        return next(iter(counts.values()), 0)

    def _flush(self, least: int) -> None:
        """Write blocks of `BLOCK_ROWS` rows while at least `least` rows wait."""
        while self._num_waiting >= least:
            parts, self._waiting = self._waiting, []
            waiting = {name: _concatenate([part.pop(name) for part in parts]) for name in self._plans}  # held once
            rows = min(BLOCK_ROWS, self._num_waiting)
            if self._rows_per_file is not None:
                written = self.num_rows - self._num_waiting
                rows = min(rows, self._rows_per_file - written % self._rows_per_file)
            for group in self._groups:
                if not group.outputs or self._file_is_full(group):
                    self._open(group)
                group.outputs[-1].write(rows_of({name: waiting[name] for name in group.features}, 0, rows))
            self._num_waiting -= rows
            if self._num_waiting:
                self._waiting = [_copied(rows_of(waiting, rows, rows + self._num_waiting))]

    def _file_is_full(self, group: _Group) -> bool:
        return self._rows_per_file is not None and group.outputs[-1].num_rows >= self._rows_per_file

    def _open(self, group: _Group) -> None:
        if group.outputs:
            group.outputs[-1].close()
        number = len(group.outputs)
        stem = f"{group.stem}-{number:05d}" if group.numbered or number else group.stem
        path = confined(self.folder, f"{self.split}/{stem}{_SUFFIXES[self.type]}")
        path.parent.mkdir(parents=True, exist_ok=True)
        group.outputs.append(_WRITERS[self.type](path, [self._plans[name] for name in group.features]))

    def _discard(self) -> None:
        for group in self._groups:
            for output in group.outputs:
                output.discard()


def _copied(columns: Columns) -> Columns:
    """Columns of their own: views would keep all rows of which they show some."""
    return {
        name: Ragged(column.values.copy(), column.offsets.copy()) if isinstance(column, Ragged) else column.copy()
        for name, column in columns.items()
    }


@dataclass
class _Group:
    """Features that share files."""

    stem: str
    features: tuple[str, ...]
    numbered: bool
    outputs: list[_Output] = field(default_factory=list)


_SUFFIXES = {
    "csv": ".csv",
    "parquet": ".parquet",
    "split_binary": ".bin",
    "torch_tensor": ".pt",
    "tfrecord": ".tfrecord",
}
_FIXED_LENGTH = ("split_binary", "torch_tensor")


def _grouped(
    plans: Mapping[str, _Plan], kind: ChunkType, label: str | None
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Stem of the file, features, whether files are numbered from the first on."""
    if kind not in _FIXED_LENGTH:
        yield "part", tuple(plans), True
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for name, plan in plans.items():
        if name == label:
            key = ("label", "")
        elif plan.feature.is_categorical:
            key = ("id", name if kind == "split_binary" else str(plan.dtype))
        else:
            key = ("number", str(plan.dtype))
        groups.setdefault(key, []).append(name)
    several = sum(role == "number" for role, _ in groups) > 1
    taken: set[str] = set()
    for number, ((role, dtype), names) in enumerate(groups.items()):
        if kind == "torch_tensor":
            yield f"data_{number}", tuple(names), False
        else:
            stem = names[0] if role != "number" else f"numerical_{dtype}" if several else "numerical"
            yield _safe(stem, taken), tuple(names), False


def _safe(stem: str, taken: set[str]) -> str:
    """A file's stem from a feature's name, which may hold anything; published ones already end in `.bin`."""
    safe = re.sub(r"[^\w.-]", "_", stem.removesuffix(".bin")) or "_"
    while safe.lower() in taken:
        safe += "_"
    taken.add(safe.lower())
    return safe


def _stored_dtype(feature: Feature) -> np.dtype[np.generic]:
    return np.dtype(feature.dtype or ("int64" if feature.is_categorical else "float32"))


def _check_can_hold(plans: Iterable[_Plan], kind: ChunkType) -> None:
    problems = []
    for plan in plans:
        needs_minus_one = plan.feature.is_list and plan.feature.is_categorical and plan.feature.padding is None
        if kind in _FIXED_LENGTH and needs_minus_one and plan.dtype.kind != "i":
            problems.append(
                f"the list '{plan.name}' needs -1 as padding in {kind}, which {plan.dtype} can't hold; "
                "give it a signed dtype, or declare `padding: 0`"
            )
        if kind == "tfrecord" and plan.dtype == np.float64:
            problems.append(f"'{plan.name}' is float64, but tfrecord holds float32 only; give it that dtype")
    if problems:
        raise DataError.of("feature_spec", problems)


class _Output(Protocol):
    """One file being written under a temporary name."""

    path: Path
    temporary: Path
    num_rows: int

    def write(self, columns: Columns) -> None: ...

    def close(self) -> None:
        """Finish the temporary file; a second call does nothing."""

    def discard(self) -> None:
        """Remove the temporary file."""


class _FileOutput(ABC):
    """An open file under a temporary name, to which blocks are appended."""

    def __init__(self, path: Path, plans: Sequence[_Plan]) -> None:
        self.path = path
        self.temporary = temporary_name(path)
        self.num_rows = 0
        self._plans = plans
        self._file: IO[bytes] = self.temporary.open("xb")

    def write(self, columns: Columns) -> None:
        self.num_rows += len(columns[self._plans[0].name])
        self._append(columns)

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        self._file.close()
        self.temporary.unlink(missing_ok=True)

    @abstractmethod
    def _append(self, columns: Columns) -> None:
        """Write a block in the file's own format."""


class _ParquetOutput(_FileOutput):
    """zstd, one row group for each block."""

    def __init__(self, path: Path, plans: Sequence[_Plan]) -> None:
        super().__init__(path, plans)
        self._schema = pa.schema([(plan.name, _arrow_type(plan)) for plan in plans])
        self._writer: pq.ParquetWriter | None = pq.ParquetWriter(self._file, self._schema, compression="zstd")

    def _append(self, columns: Columns) -> None:
        assert self._writer is not None
        table = pa.Table.from_arrays([_to_arrow(columns[plan.name], plan) for plan in self._plans], schema=self._schema)
        self._writer.write_table(table, row_group_size=BLOCK_ROWS)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        super().close()

    def discard(self) -> None:
        self.close()  # a writer of pyarrow that is not closed complains when it is collected
        super().discard()


def _arrow_type(plan: _Plan) -> pa.DataType:
    value = pa.from_numpy_dtype(plan.dtype)
    return pa.list_(value) if plan.feature.is_list else value


def _to_arrow(column: Column, plan: _Plan) -> pa.Array:
    if not isinstance(column, Ragged):
        return pa.array(column)
    return pa.ListArray.from_arrays(
        pa.array(column.offsets.astype(np.int32)), pa.array(column.values), _arrow_type(plan)
    )


class _CsvOutput(_FileOutput):
    """No header; numbers in their shortest exact form, lists as `"[1, 2, 3]"`."""

    def _append(self, columns: Columns) -> None:
        arrays = [_csv_cells(columns[plan.name], plan) for plan in self._plans]
        table = pa.Table.from_arrays(arrays, names=[plan.name for plan in self._plans])
        pa_csv.write_csv(table, self._file, pa_csv.WriteOptions(include_header=False))


def _csv_cells(column: Column, plan: _Plan) -> pa.Array:
    if isinstance(column, Ragged):
        texts = pa.ListArray.from_arrays(
            pa.array(column.offsets.astype(np.int32)), _csv_numbers(column.values).cast("string")
        )
        return pc.binary_join_element_wise("[", pc.binary_join(texts, ", "), "]", "")
    return _csv_numbers(column) if plan.dtype.kind != "b" else pa.array(column.view(np.uint8))


def _csv_numbers(values: Array) -> pa.Array:
    return pa.array(values.astype(np.float32) if values.dtype == np.float16 else values)


class _BinaryOutput(_FileOutput):
    """Little-endian rows, as `_BinaryFile` reads them."""

    def __init__(self, path: Path, plans: Sequence[_Plan]) -> None:
        super().__init__(path, plans)
        self._record = _record_dtype(plans)

    def _append(self, columns: Columns) -> None:
        first = columns[self._plans[0].name]
        rows = np.empty(len(first), self._record)
        for number, plan in enumerate(self._plans):
            rows[str(number)] = _rectangle(columns[plan.name], plan)
        rows.tofile(self._file)


def _rectangle(column: Column, plan: _Plan) -> Array:
    """A list as (rows, length) with its padding."""
    if not isinstance(column, Ragged):
        return column
    length = plan.feature.length or 1
    if not plan.feature.is_categorical and len(column) and column.lengths.min() < length:
        row = int(np.argmax(column.lengths < length))
        held = int(column.lengths[row])
        raise DataError(
            f"the list '{plan.name}' holds {held} of {length} numbers in some row; a list of numbers has no padding, "
            "so this chunk type can't hold it: write parquet, csv or tfrecord"
        )
    return column.pad(length, -1 if plan.feature.padding is None else 0)


class _TensorOutput(_FileOutput):
    """Rows are appended to a plain binary file first, and saved as a tensor from there: memory stays bounded."""

    def __init__(self, path: Path, plans: Sequence[_Plan]) -> None:
        super().__init__(path, plans)
        self._width = sum(plan.feature.length or 1 for plan in plans)
        self._saved = False

    def _append(self, columns: Columns) -> None:
        parts = [_rectangle(columns[plan.name], plan).reshape(-1, plan.feature.length or 1) for plan in self._plans]
        np.concatenate(parts, axis=1).tofile(self._file)

    def close(self) -> None:
        super().close()
        if self._saved:
            return
        import torch

        dtype, shape = self._plans[0].dtype, (self.num_rows, self._width)
        rows = np.memmap(self.temporary, dtype, "r+", shape=shape) if self.num_rows else np.zeros(shape, dtype)
        tensor_file = self.temporary.with_suffix(".tensor.tmp")
        torch.save(torch.from_numpy(rows), tensor_file)
        tensor_file.replace(self.temporary)
        self._saved = True


class _TfrecordOutput(_FileOutput):
    """One `tf.train.Example` a row."""

    def _append(self, columns: Columns) -> None:
        values = {}
        for plan in self._plans:
            column = columns[plan.name]
            lists = column if isinstance(column, Ragged) else Ragged.of_rectangle(column.reshape(-1, 1))
            values[plan.name] = tfrecord.Values(lists.values, lists.offsets)
        self._file.write(tfrecord.encode(values))


_WRITERS: Mapping[str, Callable[[Path, Sequence[_Plan]], _Output]] = {
    "csv": _CsvOutput,
    "parquet": _ParquetOutput,
    "split_binary": _BinaryOutput,
    "torch_tensor": _TensorOutput,
    "tfrecord": _TfrecordOutput,
}


# --- transcode -------------------------------------------------------------------------------------------------------


def transcode(
    spec: FeatureSpec,
    out: str | Path,
    to: ChunkType = "parquet",
    *,
    rows_per_file: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureSpec:
    """Write a dataset again in another chunk type, with a complete specification.

    A cardinality that is `auto` or was not given becomes the largest id of all splits plus one; one that was given
    is kept. A dtype that was not given becomes the narrowest integer for ids (int64 in `torch_tensor`, where features
    of one dtype share a file) and float32 for numbers; float64 becomes float32 in `tfrecord`, which has no other.
    Splits, channels and metadata stay, and the catalogues,
    vocabularies and encoders that the metadata names come along. Memory does not grow with the rows.

    `progress` is told how many rows of how many are written.

    Raises:
        DataError: values that contradict the specification; an `out` that holds a dataset already.
    """
    with new_dataset(out) as folder:
        written = _transcode(spec, folder, to, rows_per_file, progress)
    return written.replace(folder=Path(out))


def _transcode(
    spec: FeatureSpec,
    out: Path,
    to: ChunkType,
    rows_per_file: int | None,
    progress: Callable[[int, int], None] | None,
) -> FeatureSpec:
    readers = {split: open_split(spec, split, shifted=False) for split in spec.splits}
    features = _resolved(spec, readers, to)
    total, done = sum(reader.num_rows for reader in readers.values()), 0
    sources: dict[str, tuple[Chunk, ...]] = {}
    for split, reader in readers.items():
        held = {name: features[name] for name in reader.features}
        with SplitWriter(out, split, held, to, rows_per_file=rows_per_file, label=spec.label) as writer:
            for columns in reader.batches():
                writer.write(columns)
                done += len(columns[reader.features[0]])
                if progress is not None:
                    progress(done, total)
        sources[split] = writer.chunks
    copy_companions(spec, out)
    if spec.beside(PREPARE_FILE).is_file():
        copy(PREPARE_FILE, spec.folder, out)
    written = spec.replace(features=features, sources=sources, folder=out, allow_outside=False)
    written.save(out)
    return written


@contextmanager
def new_dataset(out: str | Path) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends well, and is removed when it doesn't.

    Raises:
        DataError: if `out` holds something, is a file or a URL, or another process is writing it.
    """
    folder = local(out, "OUT")
    with locked(folder, "writing"):
        if (folder / FILE_NAME).exists():
            raise DataError(f"{folder}: holds a dataset already; name an empty folder, or remove that one first")
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise DataError(f"{folder}: is there already and is no empty folder; name another place")
        with whole_folder(folder) as temporary:
            yield temporary


def _resolved(spec: FeatureSpec, readers: Mapping[str, SplitReader], to: ChunkType) -> dict[str, Feature]:
    """The features with every cardinality and dtype known."""
    found = _found_cardinalities(spec, readers)
    features = {}
    for name, feature in spec.features.items():
        cardinality = found.get(spec.vocabulary(name), 1) if feature.cardinality == "auto" else feature.cardinality
        features[name] = feature_to_write(feature, cardinality, to)
    return features


def feature_to_write(feature: Feature, cardinality: int | None, to: ChunkType) -> Feature:
    """The feature with its cardinality, and with the dtype that `to` will hold where none was given."""
    dtype = feature.dtype or _narrowest(cardinality, to)
    if to == "tfrecord" and dtype == "float64":
        dtype = "float32"
    return Feature.model_validate({**feature.model_dump(), "cardinality": cardinality, "dtype": dtype})


def _found_cardinalities(spec: FeatureSpec, readers: Mapping[str, SplitReader]) -> dict[str, int]:
    """Largest id plus one of every vocabulary that has a feature whose cardinality is `auto`."""
    found: dict[str, int] = {}
    auto = [name for name, feature in spec.features.items() if feature.cardinality == "auto"]
    for split, reader in readers.items():
        names = [name for name in auto if name in reader.features]
        if not names:
            continue
        for columns in open_split(spec, split, names, shifted=False).batches():
            for name, column in columns.items():
                values = column.values if isinstance(column, Ragged) else column
                space = spec.vocabulary(name)
                found[space] = max(found.get(space, 1), int(values.max(initial=0)) + 1)
    return found


def _narrowest(cardinality: int | None, to: ChunkType) -> str:
    if cardinality is None:
        return "float32"
    if to == "torch_tensor":
        return "int64"
    return next(name for name in ("int8", "int16", "int32", "int64") if cardinality - 1 <= np.iinfo(name).max)


def copy_companions(spec: FeatureSpec, out: Path) -> None:
    """Copy the files beside the specification that its metadata names: what makes raw values of ids, and back.

    Raises:
        DataError: as `companions`; or if something in a folder leads outside it or is a special file.
    """
    for name in companions(spec):
        copy(name, spec.folder, out)


def companions(spec: FeatureSpec) -> tuple[str, ...]:
    """Files and folders beside the specification that its metadata names.

    Raises:
        DataError: for one that is missing.
    """
    named = tuple(dict.fromkeys(spec.companions.values()))
    problems = [
        f"metadata names '{name}', which does not exist{nearest(name, _names_in(spec.folder))}"
        for name in named
        if not spec.beside(name).exists()
    ]
    if problems:
        raise DataError.of(str(spec.folder), problems)
    return named


def _names_in(folder: Path) -> list[str]:
    return [found.name for found in folder.iterdir()] if folder.is_dir() else []
