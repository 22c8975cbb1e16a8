"""Stored values made into the values that the specification promises."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from recspec.storage.column_plan import ColumnPlan, Limits
from recspec.storage.findings import Report
from recspec.storage.ragged import Array, Column, Ragged


def checked(raw: Column, plan: ColumnPlan, report: Report) -> Column:
    """The column in the promised type and shape; what breaks the promise is reported and becomes zeros.

    In this order:

    1. In a list, padding is dropped wherever it stands: id 0 where the feature declares `padding: 0`, else -1.
    2. Every id must lie in [0, cardinality). Every number must be finite and fit its dtype and float32, in which models
       read it. A label must be 0 or 1.
    3. A list keeps its first `length` values.
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
        report.add("type", f"holds {raw.dtype}; expected {plan.expected}")
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


def _faults(raw: Array, limits: Limits) -> Iterator[tuple[str, NDArray[np.bool_], str]]:
    """Kind, the values it marks, and what was expected."""
    if raw.dtype.kind == "f":
        raw = raw.astype(np.float64)  # which holds every limit exactly
    finite = np.isfinite(raw)
    yield "finite", ~finite, "is not a finite number"
    if limits.only_ends:  # one kind of fault for all other values
        beyond = np.less(raw, limits.low) | np.greater(raw, limits.high) | _between_ends(raw, limits)
        yield "value", finite & beyond, limits.too_low
        return
    yield "low", finite & np.less(raw, limits.low), limits.too_low
    yield "high", finite & np.greater(raw, limits.high), limits.too_high


def _lies_within(raw: Array, limits: Limits) -> bool:
    if raw.dtype == np.float16:
        raw = raw.astype(np.float32)
    if raw.min().item() < limits.low or not raw.max().item() <= limits.high:
        return False
    return not limits.only_ends or raw.dtype.kind != "f" or not _between_ends(raw, limits).any()


def _between_ends(raw: Array, limits: Limits) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (raw != raw.dtype.type(limits.low)) & (raw != raw.dtype.type(limits.high))
    return found
