"""Columns of raw vectors as matrices: lists of numbers, or texts such as `[0.5, -1.25]`.

Shapes: B rows; L numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.encoding.raw_columns import RawValues, as_array, is_text
from recspec.encoding.raw_values import MISSING_NUMBERS, number
from recspec.errors import DataError

BETWEEN = r"[\s,;|]+"
"""What separates the numbers of a vector that is one text; brackets may enclose it."""
BRACKETS = "[]() \t\r\n"


def vectors_of(values: RawValues, length: int, first: int = 0) -> NDArray[np.float64]:
    """Vectors (B, L) of a raw column, NaN in the whole row where one is missing; errors count rows from `first`.

    A vector is missing where the row is null, an empty list, an empty text, or holds no number at all.

    Raises:
        DataError: naming the first row that holds another number of values, or a value that is no finite number.
    """
    array = as_array(values)
    if pa.types.is_null(array.type):
        return np.full((len(array), length), np.nan)
    lists = split_vectors(array)
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = lists.flatten()
    numbers = _numbers(flat, lengths, first)
    rows = np.repeat(np.arange(len(array)), lengths)
    present = np.bincount(rows[~np.isnan(numbers)], minlength=len(array)) > 0
    wrong = np.flatnonzero(present & (lengths != length))
    if len(wrong):
        held = int(lengths[wrong[0]])
        raise DataError(
            f"row {first + wrong[0] + 1} holds {held} number{'s' * (held != 1)}; expected a vector of {length}"
        )
    bad = np.flatnonzero(present[rows] & ~np.isfinite(numbers))
    if len(bad):
        shown = "a missing value" if np.isnan(numbers[bad[0]]) else "an infinite number"
        raise DataError(f"row {first + rows[bad[0]] + 1} holds {shown} in its vector; expected {length} finite numbers")
    made = np.full((len(array), length), np.nan)
    made[present] = numbers[present[rows]].reshape(-1, length)
    return made


def split_vectors(array: pa.Array) -> pa.Array:
    """A column as lists: texts are cut into their numbers. Raises `DataError` for a column of single values."""
    if is_text(array.type):
        plain = pc.utf8_trim(pc.fill_null(array, ""), BRACKETS)
        return pc.split_pattern_regex(plain, BETWEEN)
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise DataError(f"holds {kind}; expected a list of numbers in every row")
    if pa.types.is_fixed_size_list(kind):  # its missing rows have values, which `flatten` leaves out
        return array.cast(pa.large_list(kind.value_type))
    return array


def _numbers(flat: pa.Array, lengths: NDArray[np.int64], first: int) -> NDArray[np.float64]:
    """The values of all rows as float64, NaN where one is missing."""
    if is_text(flat.type):
        text = pc.utf8_lower(pc.utf8_trim_whitespace(flat))
        gone = pc.or_(pc.equal(text, ""), pc.is_in(text, pa.array(MISSING_NUMBERS, text.type)))
        flat = pc.if_else(gone, None, text)
    elif not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type) or pa.types.is_null(flat.type)):
        raise DataError(f"holds lists of {flat.type}; expected lists of numbers")
    try:
        found: NDArray[np.float64] = flat.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return found
    except pa.ArrowInvalid:  # a text that is no number, or one that Arrow does not read, such as +1.5
        return _numbers_of_texts(flat.to_pylist(), lengths, first)


def _numbers_of_texts(texts: Sequence[str | None], lengths: NDArray[np.int64], first: int) -> NDArray[np.float64]:
    found = np.empty(len(texts))
    for place, text in enumerate(texts):
        try:
            found[place] = number(text or "")
        except ValueError:
            row = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
            shown = (text or "")[:60]
            raise DataError(f"row {first + row + 1} holds {shown!r} in its vector; expected a number") from None
    return found
