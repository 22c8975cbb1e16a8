"""Chunks of type `csv`: headerless text, columns in the order of the chunk, lists as cells such as `"[1, 2, 3]"`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from recspec.base.errors import DataError, listed, shortened
from recspec.base.files import LINE_BYTES
from recspec.data.storage.chunk_file import (
    EMPTY,
    ColumnPlan,
    FileWriter,
    GroupReader,
    Report,
    from_arrow,
    to_arrow_list,
)
from recspec.data.storage.ragged import Array, Column, Columns, Ragged, offsets_of

CSV_BLOCK_BYTES = 4 << 20  # text parsed at once; a random access to a CSV file costs as much


class CsvReader(GroupReader):
    """Opening reads the file once to count rows, to check its lines, and to note where blocks of about 4 MiB start."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        self._path, self._plans = path, plans
        self._starts, self.group_ends = _index(path)
        self.bytes_read = self._starts[-1]
        self.num_rows = int(self.group_ends[-1]) if len(self.group_ends) else 0

    def decode(self, group: int, first_row: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:
        with self._path.open("rb") as file:
            file.seek(self._starts[group])
            text = file.read(self._starts[group + 1] - self._starts[group])
        self.bytes_read += len(text)
        if group and text.startswith(_BYTE_ORDER_MARK):
            text = b"\n" + text  # Arrow would skip the mark, which belongs at the start of the file alone
        if any(plan.feature.is_list for plan in self._plans):
            text = _SPACE_BEFORE_QUOTE.sub(b'\\1"', text)  # a quote opens a cell only as its first character
        num_rows = int(self.group_ends[group]) - first_row
        table = self._table_of_numbers(text, plans)
        if table is None or table.num_rows != num_rows:
            table = self._table_of_text(text, plans, num_rows, first_row, report)
        if table is None:
            return {plan.name: plan.zeros(num_rows) for plan in plans}
        return {plan.name: _from_cells(table[plan.name], plan, report.of(plan.name, first_row)) for plan in plans}

    def _table_of_numbers(self, text: bytes, plans: Sequence[ColumnPlan]) -> pa.Table | None:
        """Every cell in its column's type, or None if some cell needs a closer look."""
        if b"x" in text or b"X" in text:  # Arrow takes 0x1f for an integer
            return None
        try:
            return self._table(text, {plan.name: _arrow_type(plan) for plan in plans})
        except pa.ArrowInvalid:  # some cell is not of its column's type
            return None

    def _table(self, text: bytes, types: Mapping[str, pa.DataType], block_bytes: int | None = None) -> pa.Table:
        cells = pa_csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=[""], strings_can_be_null=False
        )
        options = pa_csv.ReadOptions(column_names=[plan.name for plan in self._plans], block_size=block_bytes)
        return pa_csv.read_csv(pa.BufferReader(text), read_options=options, convert_options=cells)

    def _table_of_text(
        self, text: bytes, plans: Sequence[ColumnPlan], num_rows: int, first_row: int, report: Report
    ) -> pa.Table | None:
        """Every cell as text, to find the bad ones; None, with a report, for a header or a row that can't be split."""
        names = listed(plan.name for plan in self._plans)
        try:  # in one block, because a row longer than Arrow's blocks can't be read
            table = self._table(text, {plan.name: pa.string() for plan in plans}, len(text))
            problem = f"can't be read as CSV: its {num_rows:,} lines hold {table.num_rows:,} rows"
        except pa.ArrowInvalid as error:
            table, problem = None, f"can't be read as CSV: {error}"
        if table is None or table.num_rows != num_rows:
            row, what = _broken_row(text, len(self._plans), names) or (None, problem)
            report.add("text", what, None if row is None else first_row + row)
            return None
        if first_row == 0 and all(str(table[name][0]).strip().strip('"') == name for name in table.column_names):
            report.add("header", f"is a header line; a csv chunk has none, its columns are {names} in order", 0)
            return None
        return table


def _broken_row(text: bytes, num_cells: int, names: str) -> tuple[int, str] | None:
    """The first row of a block, counted from 0, that can't be split into cells, and what is wrong with it."""
    lines = (line for line in text.removeprefix(_BYTE_ORDER_MARK).splitlines() if line)
    for row, line in enumerate(lines):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            bad = line[max(0, error.start - 5) : error.end + 5]
            return row, f"holds bytes that are not UTF-8 text, near {bad!r}; save the file as UTF-8"
        if line.count(b'"') % 2 and _OPENING_QUOTE.search(line):
            return row, "has a double quote that none closes; a cell may not contain a line break"
        count = len(_CELL.findall(line))
        if count != num_cells:
            return row, f"has {count} cells; expected {num_cells}: {names}"
    return None


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OPENING_QUOTE = re.compile(rb'(?:^|,)[ \t]*"')
_SPACE_BEFORE_QUOTE = re.compile(rb'(^|,)[ \t]+"', re.MULTILINE)
_CELL = re.compile(rb'(?:^|,)(?:[ \t]*"[^"]*"[ \t]*|[^,]*)')


def _arrow_type(plan: ColumnPlan) -> pa.DataType:
    if plan.feature.is_list or plan.dtype.kind == "b":
        return pa.string()
    return pa.float64() if plan.dtype.kind == "f" else pa.int64()


def _index(path: Path) -> tuple[list[int], NDArray[np.int64]]:
    """Byte offsets where blocks of whole lines start (and the end of the file), and the row after each block."""
    starts, rows, position = [0], [0], 0
    with path.open("rb") as file:
        while text := file.read(CSV_BLOCK_BYTES):
            text += (rest := file.readline(LINE_BYTES))
            count = _count_rows(text)
            if len(rest) == LINE_BYTES and not rest.endswith(b"\n"):
                what = f"is longer than {LINE_BYTES:,} bytes, the most that are read of one row"
                raise DataError(f"row {rows[-1] + count:,} {what}; rows end with \\n or \\r\\n")
            if (alone := _carriage_return_alone(text)) is not None:
                row = rows[-1] + _count_rows(text[:alone] + b"0")
                what = "holds a carriage return (\\r) without a line feed (\\n) after it"
                raise DataError(f"row {row:,} {what}; end every row with \\n or \\r\\n")
            position += len(text)
            if count == 0 and len(starts) > 1:  # blank lines only: part of the block before
                starts[-1] = position
            elif count:
                starts.append(position)
                rows.append(rows[-1] + count)
    return starts, np.array(rows[1:], np.int64)


def _carriage_return_alone(text: bytes) -> int | None:
    """Where the first `\\r` without a `\\n` lies: Arrow would end a row there, and rows are counted by `\\n`."""
    if b"\r" not in text or text.count(b"\r") == text.count(b"\r\n"):
        return None
    found = _CARRIAGE_RETURN_ALONE.search(text)
    return None if found is None else found.start()


_CARRIAGE_RETURN_ALONE = re.compile(rb"\r(?!\n)")


def _count_rows(text: bytes) -> int:
    """Lines that are not empty."""
    text = text.removeprefix(_BYTE_ORDER_MARK)
    if text[:1] in b"\r\n" or b"\n\n" in text or b"\n\r\n" in text:
        return sum(1 for line in text.split(b"\n") if line not in (b"", b"\r"))
    return text.count(b"\n") + (not text.endswith(b"\n"))


def _from_cells(column: pa.ChunkedArray, plan: ColumnPlan, report: Report) -> Column:
    """A CSV column: numbers where Arrow parsed them, else text, which is parsed and checked cell by cell."""
    if not pa.types.is_string(column.type):
        return from_arrow(column, plan, report)
    array = column.combine_chunks()
    if plan.feature.is_list:
        return _parsed_lists(array, plan, report)
    empty = pc.equal(pc.utf8_trim(array, _BLANKS), "").to_numpy(zero_copy_only=False)
    if empty.any():
        report.add_where(empty, "null", EMPTY)
        array = pc.if_else(pa.array(empty), "0", array)
    return _parsed(array, plan, report)


_BLANKS = " \t"
_INTEGER = r"^-?[0-9]+$"
_SHORT_INTEGER = r"^-?[0-9]{1,18}$"  # always fits int64
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^-?([nN]a[nN]|[iI]nf)$"
_VALUES = r"([ \t]*[^\[\],\s\x0b]+(([ \t]*,[ \t]*|[ \t]+)[^\[\],\s\x0b]+)*)?[ \t]*"
_LIST = rf"^[ \t]*(\[{_VALUES}\]|{_VALUES})[ \t]*$"


def _parsed(cells: pa.StringArray, plan: ColumnPlan, report: Report) -> Array:
    """Text as numbers; other text is reported and becomes 0."""
    text = pc.utf8_trim(cells, _BLANKS)
    if plan.dtype.kind == "b":
        text = pc.if_else(pc.is_in(text, pa.array(["true", "True", "TRUE"])), "1", text)
        text = pc.if_else(pc.is_in(text, pa.array(["false", "False", "FALSE"])), "0", text)
    floating = plan.dtype.kind == "f"
    bad = _not_matching(text, _NUMBER) if floating else _not_integers(text)
    if bad.any():
        expected = f"a number ({plan.dtype})" if floating else f"an integer ({plan.dtype})"
        report.add_where(bad, "parse", f"{_first(text, bad)} is not {expected}")
        text = pc.if_else(pa.array(bad), "0", text)
    values: Array = text.cast(pa.float64() if floating else pa.int64()).to_numpy(zero_copy_only=False)
    return values


def _not_matching(text: pa.StringArray, pattern: str) -> NDArray[np.bool_]:
    matching: NDArray[np.bool_] = pc.match_substring_regex(text, pattern).to_numpy(zero_copy_only=False)
    return ~matching


def _not_integers(text: pa.StringArray) -> NDArray[np.bool_]:
    """Which texts are no decimal integers of int64."""
    bad = _not_matching(text, _SHORT_INTEGER)
    for place in np.flatnonzero(bad).tolist() if bad.any() else ():
        bad[place] = not _fits_int64(text[place].as_py())
    return bad


def _fits_int64(text: str) -> bool:
    digits = text.removeprefix("-").lstrip("0")
    return re.fullmatch(_INTEGER, text) is not None and len(digits) < 20 and -(2**63) <= int(text) < 2**63


def _first(text: pa.StringArray, bad: NDArray[np.bool_]) -> str:
    return repr(shortened(text[int(np.argmax(bad))].as_py()))


def _parsed_lists(cells: pa.StringArray, plan: ColumnPlan, report: Report) -> Ragged:
    """Cells such as `[1, 2, 3]`, `[1 2 3]`, `1,2,3` and `[]`; an empty cell is the empty list too."""
    cells = pc.fill_null(cells, "")
    bad = _not_matching(cells, _LIST)
    if bad.any():
        expected = "expected such as [1, 2, 3], [1 2 3] or 1,2,3, with every value given"
        report.add_where(bad, "list", f"{_first(cells, bad)} is not a list; {expected}")
        cells = pc.if_else(pa.array(bad), "", cells)
    inner = pc.utf8_trim(pc.utf8_trim(cells, _BLANKS), "[]")
    parts = pc.ascii_split_whitespace(pc.utf8_trim(pc.replace_substring(inner, ",", " "), _BLANKS))
    values = parts.flatten()
    real = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
    offsets = offsets_of(pc.list_value_length(parts).to_numpy(zero_copy_only=False))
    lists = Ragged(np.arange(len(values)), offsets).where(real)
    texts = values.filter(pa.array(real))
    return Ragged(_parsed(texts, plan, report.of_lists(lists.offsets)), lists.offsets)


class CsvWriter(FileWriter):
    """No header; numbers in their shortest exact form, lists as `"[1, 2, 3]"`."""

    def _append(self, columns: Columns) -> None:
        arrays = [_cells(columns[plan.name], plan) for plan in self._plans]
        table = pa.Table.from_arrays(arrays, names=[plan.name for plan in self._plans])
        pa_csv.write_csv(table, self._file, pa_csv.WriteOptions(include_header=False))


def _cells(column: Column, plan: ColumnPlan) -> pa.Array:
    if isinstance(column, Ragged):
        texts = to_arrow_list(column, _numbers(column.values).cast("string"))
        return pc.binary_join_element_wise("[", pc.binary_join(texts, ", "), "]", "")
    return _numbers(column) if plan.dtype.kind != "b" else pa.array(column.view(np.uint8))


def _numbers(values: Array) -> pa.Array:
    return pa.array(values.astype(np.float32) if values.dtype == np.float16 else values)
