"""Chunks of type `tfrecord`: `tf.train.Example` records, of one row or of several.

A prebatched record holds several rows, feature by feature; the first record says how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recspec.storage.chunk_file import FileReader, FileWriter
from recspec.storage.column_plan import ColumnPlan
from recspec.storage.findings import Report
from recspec.storage.ragged import Column, Columns, Ragged, rows_of
from recspec.storage.tfrecord import Index, encode


class TfrecordReader(FileReader):
    """Opening reads the frame of every record and counts the rows of the first, which every other must match."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        self._path = path
        self._records = Index.of(path)
        self._rows_per_record = self._count_rows(plans)
        self.num_rows = len(self._records) * self._rows_per_record

    def read(self, start: int, stop: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:
        """Rows [start, stop), from the records that hold them."""
        per_record = self._rows_per_record
        first, last = start // per_record, -(-stop // per_record)
        found = self._records.read(first, last, [plan.name for plan in plans])
        columns = {
            plan.name: _from_examples(found[plan.name], plan, per_record, report.of(plan.name, first * per_record))
            for plan in plans
        }
        return rows_of(columns, start - first * per_record, stop - first * per_record)

    def _count_rows(self, plans: Sequence[ColumnPlan]) -> int:
        scalars = [plan.name for plan in plans if not plan.feature.is_list]
        if not scalars or not len(self._records):
            return 1
        return max(1, len(self._records.read(0, 1, scalars[:1])[scalars[0]].values))


def _from_examples(lists: Ragged, plan: ColumnPlan, per_record: int, report: Report) -> Column:
    """One feature of consecutive records as a column.

    A scalar has one value a row. A list has any number of values where a record is a row, and exactly `length` in
    prebatched records.
    """
    num_rows = len(lists) * per_record
    if plan.feature.is_list and per_record == 1:
        return lists
    expected = per_record * (plan.feature.length or 1)
    bad = np.not_equal(lists.lengths, expected)
    if bad.any():
        held = int(lists.lengths[np.argmax(bad)])
        what = f"its record holds {held} values; expected {expected}"
        report.add_where(np.repeat(bad, per_record), "count", what)
        return plan.zeros(num_rows)
    return lists.values.reshape(num_rows, -1) if plan.feature.is_list else lists.values


class TfrecordWriter(FileWriter):
    """One `tf.train.Example` a row."""

    def _append(self, columns: Columns) -> None:
        values = {}
        for plan in self._plans:
            column = columns[plan.name]
            values[plan.name] = column if isinstance(column, Ragged) else Ragged.of_rectangle(column.reshape(-1, 1))
        self._file.write(encode(values))
