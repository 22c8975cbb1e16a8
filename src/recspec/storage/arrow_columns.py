"""Arrow columns of numbers, or of lists of numbers, as numpy arrays and `Ragged`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recspec.storage.column_plan import ColumnPlan
from recspec.storage.findings import Report
from recspec.storage.ragged import Array, Column, Ragged, offsets_of

EMPTY = "is empty; every row needs a value"


def from_arrow(column: pa.ChunkedArray, plan: ColumnPlan, report: Report) -> Column:
    """The values of a column; empty cells are reported, empty lists are not."""
    array = column.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
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
