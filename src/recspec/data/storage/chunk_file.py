"""What every chunk type provides: how a column is stored, a reader and a writer, and the problems found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.base.files import temporary_name
from recspec.data.storage.ragged import Array, Column, Columns, Ragged, concatenate, offsets_of, rows_of
from recspec.feature_spec import MOST_IDS, Feature, FeatureSpec

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


TOO_LARGE = "too large for an id"
EMPTY = "is empty; every row needs a value"


@dataclass(frozen=True)
class Limits:
    """The values a column may hold, and the sentences for those outside."""

    low: float
    high: float
    too_low: str
    too_high: str
    only_ends: bool = False  # whether `low` and `high` are the only values allowed, as for a label


@dataclass(frozen=True)
class ColumnPlan:
    """How one column is read and written, worked out once for all blocks."""

    name: str
    feature: Feature
    dtype: np.dtype[np.generic]
    shift: int
    result: np.dtype[np.generic]  # wide enough for a shifted id
    kinds: str  # numpy's letters for the types it may be stored in
    limits: Limits

    @classmethod
    def of(cls, name: str, feature: Feature, shift: int = 0, *, is_label: bool = False) -> Self:
        """The plan of a feature whose ids are raised by `shift`."""
        dtype, cardinality = feature.storage_dtype, feature.cardinality
        most = cardinality if isinstance(cardinality, int) else 2**63  # the largest id after a shift
        fits = shift == 0 or (dtype.kind in "iu" and most <= np.iinfo(dtype.name).max)
        wide = np.dtype("int32" if most < 2**31 else "int64")
        kinds = "iubf" if dtype.kind == "f" else "iu" if feature.is_categorical and dtype.kind != "b" else "iub"
        limits = _LABEL_LIMITS if is_label else _limits(feature, dtype)
        return cls(name, feature, dtype, shift, dtype if fits else wide, kinds, limits)

    @classmethod
    def of_spec(cls, spec: FeatureSpec, name: str, *, shifted: bool) -> Self:
        """The plan of a feature of a dataset."""
        return cls.of(name, spec.features[name], spec.shift(name) if shifted else 0, is_label=name in spec.labels)

    def zeros(self, num_rows: int) -> Column:
        """Rows of zeros, or of empty lists."""
        if self.feature.is_list:
            return Ragged(np.zeros(0, self.result), np.zeros(num_rows + 1, np.int64))
        return np.zeros(num_rows, self.result)

    def rectangle(self, column: Column) -> Array:
        """A list as (rows, length), filled with its padding; a scalar as it is. Too few numbers are a `DataError`."""
        if not isinstance(column, Ragged):
            return column
        length = self.feature.length or 1
        if not self.feature.is_categorical and len(column) and column.lengths.min() < length:
            held = int(column.lengths[np.argmax(column.lengths < length)])
            raise DataError(
                f"the list '{self.name}' holds {held} of {length} numbers in some row; a list of numbers has no "
                "padding, so this chunk type can't hold it: write parquet, csv or tfrecord"
            )
        return column.pad(length, -1 if self.feature.padding is None else 0)


_NO_LABEL = "is not a label; a label is 0 or 1: convert the column, or name another one in channel_spec.label"
_LABEL_LIMITS = Limits(0, 1, _NO_LABEL, _NO_LABEL, only_ends=True)


def _limits(feature: Feature, dtype: np.dtype[np.generic]) -> Limits:
    if dtype.kind == "f":
        read_as = min(dtype, np.dtype("float32"), key=lambda each: each.itemsize)  # float64 beyond it would be infinite
        largest = float(np.finfo(read_as.name).max)
        too_large = f"does not fit {read_as}, whose largest value is {largest:.6g}"
        return Limits(-largest, largest, too_large, too_large)
    if dtype.kind == "b":
        return Limits(0, 1, "is not 0 or 1, as bool expects", "is not 0 or 1, as bool expects")
    least, last = int(np.iinfo(dtype.name).min), int(np.iinfo(dtype.name).max)
    fits = f"does not fit {dtype}, which ends at"
    if not feature.is_categorical:
        return Limits(least, last, f"{fits} {least}", f"{fits} {last}")
    negative = "is negative; an id lies in [0, cardinality)"
    if not isinstance(feature.cardinality, int):
        if last < MOST_IDS:
            return Limits(0, last, negative, f"{fits} {last}")
        return Limits(0, MOST_IDS - 1, negative, f"is {TOO_LARGE}, which ends at {MOST_IDS - 1}")
    last = feature.cardinality - 1
    too_high = f"is {TOO_LARGE}: the cardinality is {last + 1}, so ids are 0 to {last}"
    return Limits(0, last, f"{negative}: 0 to {last}", too_high)


def from_arrow(column: pa.ChunkedArray, plan: ColumnPlan, report: Report) -> Column:
    """The values of a column; empty cells are reported, empty lists are not."""
    if pa.types.is_dictionary(column.type):  # before chunks are combined, whose codes together may not fit their type
        column = column.cast(column.type.value_type)
    array = column.combine_chunks()
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return _numbers(array, plan, report)
    offsets = offsets_of(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False))
    return Ragged(_numbers(array.flatten(), plan, report.of_lists(offsets)), offsets)


def _numbers(array: pa.Array, plan: ColumnPlan, report: Report) -> Array:
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        expected = "ids" if plan.feature.is_categorical else "numbers"
        report.add("type", f"holds {kind}; expected {expected} ({plan.dtype})")
        return np.zeros(len(array), plan.dtype)
    if array.null_count:
        report.add_where(pc.is_null(array).to_numpy(zero_copy_only=False), "null", EMPTY)
        array = pc.fill_null(array, False if pa.types.is_boolean(kind) else pa.scalar(0).cast(kind))
    values: Array = array.to_numpy(zero_copy_only=False)
    return values


def to_arrow_list(lists: Ragged, values: pa.Array) -> pa.ListArray:
    """An Arrow column with the rows of `lists` and their values as `values`."""
    return pa.ListArray.from_arrays(pa.array(lists.offsets.astype(np.int32)), values)


def checked(raw: Column, plan: ColumnPlan, report: Report) -> Column:
    """The stored column in the promised type and shape; what breaks the promise is reported and becomes zeros.

    1. In a list, padding is dropped wherever it stands: id 0 where the feature declares `padding: 0`, else -1.
    2. Every id must lie in [0, cardinality). Every number must be finite and fit its dtype and float32, in which models
       read it. A label must be 0 or 1.
    3. A list keeps its first `length` values. Every row of a vector must hold exactly `length`.
    4. Ids are raised by the plan's shift, so that 0 means padding in every batch.
    """
    stored_lists = isinstance(raw, Ragged) or raw.ndim == 2
    if stored_lists != plan.feature.is_list:
        report.add("shape", _SHAPE_PROBLEMS[stored_lists])
        return plan.zeros(len(raw))
    if not stored_lists:
        assert not isinstance(raw, Ragged)
        return _raised(_checked_values(raw, plan, report), plan)
    lists = raw if isinstance(raw, Ragged) else Ragged.of_rectangle(raw)
    if plan.feature.is_categorical and lists.values.dtype.kind in "iu":
        real = lists.values != (-1 if plan.feature.padding is None else plan.feature.padding)
        lists = lists if real.all() else lists.where(real)
    values = _checked_values(lists.values, plan, report.of_lists(lists.offsets))
    if plan.feature.is_vector and (wrong := np.not_equal(lists.lengths, plan.feature.length or 1)).any():
        held = int(lists.lengths[np.argmax(wrong)])
        report.add_where(
            wrong, "count", f"holds {held} number{'s' * (held != 1)}; every row of a vector holds {plan.feature.length}"
        )
    cut = Ragged(values, lists.offsets).truncate(plan.feature.length or 1)
    return Ragged(_raised(cut.values, plan), cut.offsets)


_SHAPE_PROBLEMS = {
    True: "holds lists; expected one value a row (a list feature has a `length` in feature_spec)",
    False: "holds one value a row; expected lists, because the feature has a `length` in feature_spec",
}


def _raised(values: Array, plan: ColumnPlan) -> Array:
    """A copy in the result's dtype, ids shifted."""
    own = values.astype(plan.result)
    if plan.shift:
        own += plan.result.type(plan.shift)
    return own


_LARGEST_HALF = 65504.0  # of float16; in its bits, infinity and NaN are above every other number
_HALF_WITHOUT_SIGN, _HALF_INFINITY = np.uint16(0x7FFF), 0x7C00


def _checked_values(raw: Array, plan: ColumnPlan, report: Report) -> Array:
    """The values, or zeros where they are not what the specification says."""
    if raw.dtype.kind not in plan.kinds:
        numbers = f"numbers ({plan.dtype})" if plan.dtype.kind == "f" else str(plan.dtype)
        expected = f"ids of an integer type ({plan.dtype})" if plan.feature.is_categorical else numbers
        report.add("type", f"holds {raw.dtype}; expected {expected}")
        return np.zeros(len(raw), plan.dtype)
    if not len(raw) or raw.dtype.kind == "b":
        return raw
    # The extremes of sound data suffice: two passes at memory speed. NaN shows in both.
    if raw.dtype == np.float16 and plan.limits.high >= _LARGEST_HALF:  # numpy compares float16 one by one
        if (raw.view(np.uint16) & _HALF_WITHOUT_SIGN).max() < _HALF_INFINITY:
            return raw
    elif _lies_within(raw, plan.limits):
        return raw
    for kind, bad, what in _faults(raw, plan.limits):
        if bad.any():
            report.add_where(bad, kind, f"{raw[np.argmax(bad)].item()} {what}")
            raw = np.where(bad, raw.dtype.type(0), raw)
    return raw


def _lies_within(raw: Array, limits: Limits) -> bool:
    if raw.dtype == np.float16:
        raw = raw.astype(np.float32)
    if raw.min().item() < limits.low or not raw.max().item() <= limits.high:
        return False
    return not limits.only_ends or raw.dtype.kind != "f" or not _between_ends(raw, limits).any()


def _faults(raw: Array, limits: Limits) -> Iterator[tuple[str, NDArray[np.bool_], str]]:
    """Kind, the values it marks, and what was expected."""
    if raw.dtype.kind == "f":
        raw = raw.astype(np.float64)  # which holds every limit exactly
    finite = np.isfinite(raw)
    yield "finite", ~finite, "is not a finite number"
    low, high = np.less(raw, limits.low), np.greater(raw, limits.high)
    if limits.only_ends:  # one kind of fault for all other values
        yield "value", finite & (low | high | _between_ends(raw, limits)), limits.too_low
        return
    yield "low", finite & low, limits.too_low
    yield "high", finite & high, limits.too_high


def _between_ends(raw: Array, limits: Limits) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (raw != raw.dtype.type(limits.low)) & (raw != raw.dtype.type(limits.high))
    return found


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
        raise DataError(
            f"holds {found:,} rows of '{name}' where {num_rows:,} were counted: the file is damaged, or "
            "was changed while it was read"
        )


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
