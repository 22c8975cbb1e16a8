"""Tests of a filter over columns of raw values: texts, numbers, true and false, dates, and lists of these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.encoding import MISSING_NUMBERS, TRUTH, is_text
from recspec.errors import RequestError, shortened
from recspec.retrieval.filters import Filter, Node, Not, Test, Value

Mask = NDArray[np.bool_]
Column: TypeAlias = Any
"""A pyarrow array, or a chunked one (pyarrow has no types)."""

COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def evaluate(asked: Filter, column: Callable[[str], Column], num_rows: int) -> Mask:
    """Which rows (N,) a filter keeps, given the raw column (N,) of each name that it tests.

    Raises:
        RequestError: naming every test that its column can't answer.
    """
    answers: dict[Test, Mask] = {}
    problems = []
    for test in dict.fromkeys(asked.tests):
        try:
            answers[test] = _answer(test, _plain(column(test.column)), num_rows)
        except RequestError as error:
            problems += [f"character {test.place}: {problem}" for problem in error.problems]
    if problems:
        raise RequestError.of("filter", problems)
    return _joined(asked.root, answers)


def _joined(node: Node, answers: Mapping[Test, Mask]) -> Mask:
    if isinstance(node, Test):
        return answers[node]
    if isinstance(node, Not):
        return ~_joined(node.part, answers)
    join = np.logical_and if node.word == "and" else np.logical_or
    found: Mask = join.reduce([_joined(part, answers) for part in node.parts])
    return found


def _plain(column: Column) -> Column:
    """One array, with NaN as missing, dictionaries as their values and decimals as float64."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # more than 2 GiB of text
        array = array.cast(pa.large_string()).combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_decimal(array.type) or pa.types.is_float16(array.type):
        array = array.cast(pa.float64())
    return pc.if_else(pc.is_nan(array), None, array) if pa.types.is_floating(array.type) else array


def _answer(test: Test, array: Column, num_rows: int) -> Mask:
    there: Mask = np.asarray(array.is_valid())
    if test.operator == "missing":
        return there if test.negated else ~there
    if pa.types.is_null(array.type):
        return np.zeros(num_rows, bool)
    if test.operator == "contains":
        found = _contains(test, array)
    elif _is_list(array.type):
        raise RequestError(f"column '{test.column}' holds lists; test it by `{_name(test)} contains VALUE`")
    elif test.operator == "true":
        found = _truth(test, array)
    elif test.operator == "in":
        if is_text(array.type) and all(isinstance(value, str) for value in test.values):
            found = _true(pc.is_in(array, value_set=pa.array(test.values, array.type)))
        else:
            found = np.logical_or.reduce([_compared(test.column, "==", array, value) for value in test.values])
    else:
        found = _compared(test.column, test.operator, array, test.values[0])
    return there & (~found if test.negated else found)


def _compared(name: str, sign: str, array: Column, value: Value) -> Mask:
    """Where values compare with one as asked; anything where they are missing."""
    kind, compare = array.type, COMPARISONS[sign]
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros = array.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False).cast(pa.int64())
        return np.asarray(compare(_numpy(micros), _moment(name, value)))
    if is_text(kind) and isinstance(value, str):
        function = {"==": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater,
                    ">=": pc.greater_equal}[sign]  # fmt: skip
        return _true(function(array, pa.scalar(value, kind)))
    numbers = _numbers(name, array, value)
    if isinstance(value, str):
        held = "true and false" if pa.types.is_boolean(kind) else "numbers"
        raise RequestError(f"column '{name}' holds {held}, and '{shortened(value)}' is a text; write it without quotes")
    if numbers.dtype == np.float32:  # 0.1 means the float32 that is nearest to it
        return np.asarray(compare(numbers, np.float32(value)))
    return np.asarray(compare(numbers, int(value) if isinstance(value, bool) else value))


def _numbers(name: str, array: Column, value: Value | None) -> NDArray[Any]:
    """Numbers of a column of numbers, truths, or texts that spell numbers; anything where they are missing."""
    kind = array.type
    if pa.types.is_boolean(kind):
        return _numpy(array.cast(pa.int8()))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _numpy(array)
    if not is_text(kind):
        raise RequestError(f"column '{name}' holds {kind}, which no filter can test")
    coded = array.dictionary_encode()
    spelled = [_number(text) for text in coded.dictionary.to_pylist()]
    wrong = [text for text, number in zip(coded.dictionary.to_pylist(), spelled, strict=True) if number is None]
    if wrong:
        how = "write the value in quotes" if value is not None else f"compare it, as in `{name} == 'VALUE'`"
        raise RequestError(f"column '{name}' holds texts such as '{shortened(wrong[0])}'; {how}")
    found = np.array([*spelled, np.nan], np.float64)  # the last one for missing texts
    values: NDArray[Any] = found[pc.fill_null(coded.indices, len(spelled)).to_numpy(zero_copy_only=False)]
    return values


def _number(text: str) -> float | None:
    """The number that a text spells, NaN where it spells a missing one, None where it spells none."""
    word = text.strip().lower()
    if not word or word in MISSING_NUMBERS:
        return np.nan
    if word in TRUTH:
        return TRUTH[word]
    try:
        return float(word) if word.isascii() and "_" not in word else None
    except ValueError:
        return None


def _truth(test: Test, array: Column) -> Mask:
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        raise RequestError(f"column '{test.column}' holds times; compare it, as in `{_name(test)} > '2024-01-31'`")
    numbers = _numbers(test.column, array, None)
    found: Mask = (numbers != 0) & (numbers == numbers)  # NaN of a text that spells a missing number
    return found


def _contains(test: Test, array: Column) -> Mask:
    value = test.values[0]
    if _is_list(array.type):
        lists = array.cast(pa.large_list(array.type.value_type))
        values = _plain(pc.list_flatten(lists))
        found = np.zeros(len(array), bool)
        if len(values) and not pa.types.is_null(values.type):
            matches = _compared(test.column, "==", values, value) & np.asarray(values.is_valid())
            found[_numpy(pc.list_parent_indices(lists))[matches]] = True
        return found
    if is_text(array.type):
        if not isinstance(value, str):
            raise RequestError(f"column '{test.column}' holds texts; write the part to find in quotes")
        return _true(pc.match_substring(array, value))
    raise RequestError(f"column '{test.column}' holds {array.type}, neither lists nor texts; compare it with == or in")


def _moment(name: str, value: Value) -> int:
    """Microseconds since 1970 of a text of ISO 8601."""
    try:
        told = datetime.fromisoformat(value.strip()) if isinstance(value, str) else None
    except ValueError:
        told = None
    if told is None:
        shown = f"'{shortened(value)}'" if isinstance(value, str) else value
        raise RequestError(f"column '{name}' holds times, and {shown} is none; expected a text such as '2024-01-31'")
    since = (told if told.tzinfo else told.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _numpy(array: Column) -> NDArray[Any]:
    """Values as numpy has them; 0 where one is missing."""
    filled = pc.fill_null(array, pa.scalar(0, array.type)) if array.null_count else array
    found: NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return found


def _true(matches: Column) -> Mask:
    return np.asarray(pc.fill_null(matches, False).to_numpy(zero_copy_only=False))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _name(test: Test) -> str:
    """The column as an expression names it."""
    return test.column if test.column.isidentifier() else f"`{test.column}`"
