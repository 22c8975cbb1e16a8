"""Columns of raw values as arrow arrays: texts, numbers, whole numbers, lists and vectors, however they are written.

Shapes: B rows; L numbers of a vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.base.errors import DataError, listed, shortened
from recspec.data.encoding.raw_values import COMMA, GROUPED, MISSING_NUMBERS, POINT, number, whole

TEXT_BYTES = 2**31 - 1  # text that one array of type `string` can hold; more text is held as `large_string`
SMALL = 4096  # rows up to which looking each value up costs less than finding the different ones, or than a hash table

EXACT = 2.0**53  # float64 holds every whole number below

RawValues: TypeAlias = Any
"""A sequence of Python values, a numpy array, or a pyarrow array or chunked array (pyarrow has no types)."""
RawArray: TypeAlias = Any
"""A pyarrow array, or a chunked one."""


def split_lists(array: pa.Array, separator: str | None) -> tuple[pa.Array, NDArray[np.int64]]:
    """All values of a column of lists but empty ones, and the offset of each row; a text is cut at the separator."""
    if not _is_list(array.type):
        if separator is None:
            array = pc.list_slice(pa.array([[v] for v in array.to_pylist()], pa.list_(array.type)), 0)
        else:
            array = pc.split_pattern(pc.fill_null(as_text(array), ""), separator)
    array = array.cast(pa.large_list(array.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(array)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    kept = flat.is_valid()
    if is_text(flat.type):
        kept = pc.and_(kept, pc.fill_null(pc.not_equal(flat, ""), False))
    mask = kept.to_numpy(zero_copy_only=False)
    return flat.filter(kept), np.concatenate([np.zeros(1, np.int64), np.cumsum(mask)])[offsets]


def repeated(names: Sequence[str]) -> list[str]:
    """The problem of a table's columns that share a name, by which none of them can be read."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    return [f"has more than one column {listed(twice)}; rename them"] if twice else []


def as_column(values: Sequence[object]) -> pa.Array:
    """Raw values as JSON gives them; numbers and texts together become texts.

    Raises:
        DataError: for a text that UTF-8 can't hold, such as bytes of another encoding on a command line.
    """
    try:
        try:
            return pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            return pa.array([_text(value) for value in values], pa.string())
    except UnicodeEncodeError as error:
        raise DataError(f"{shortened(ascii(error.object))} is no UTF-8 text; write it in UTF-8") from None


def as_array(values: RawValues) -> pa.Array:
    """Raw values as one array of the types that `plain` gives; booleans as whole numbers."""
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        values = as_column(values)
    values = plain(values)
    if isinstance(values, pa.ChunkedArray):
        values = combined(values)
    return values.cast(pa.int64()) if pa.types.is_boolean(values.type) else values


def plain(values: RawArray) -> RawArray:
    """An array or a chunked one in the few types that recspec reads; all values together decide.

    Unsigned numbers of 64 bits, and decimals if all are whole, become int64 if all fit, else their digits as text.
    Other decimals become the nearest float64, as their digits in a text do. Dictionaries, views, run lengths and
    extension types become their values. All this holds within lists too.

    Raises:
        DataError: for a type of another system that Arrow can't read.
    """
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    found = _plain_numbers(pa.chunked_array([_decoded(each) for each in chunks or [pa.array([], values.type)]]))
    return found if isinstance(values, pa.ChunkedArray) else combined(found)


def _plain_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_uint64(kind):
        return _int64_or_text(column)
    if pa.types.is_decimal(kind):
        try:
            return _int64_or_text(column.cast(pa.decimal256(76, 0)))
        except pa.ArrowInvalid:  # a fraction
            return column.cast(pa.string()).cast(pa.float64())  # Arrow's own cast makes 0.35 0.35000000000000003
    if pa.types.is_float16(kind):
        return column.cast(pa.float32())
    if _is_list(kind) and (within := _plain_numbers(flat := pc.list_flatten(column))) is not flat:
        return pa.chunked_array([_lists(column, combined(within))])
    return column


def _int64_or_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return column.cast(pa.string())


def decoded_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column whose dictionaries have become their values."""
    return _decoded(pa.nulls(0, kind)).type if "dictionary<" in str(kind) else kind


def _decoded(array: pa.Array) -> pa.Array:
    """An array without dictionaries, views, run lengths and extension types."""
    kind, types = array.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.opaque":
            raise DataError(f"holds {kind}; cast it to text or to a number")
        if kind.extension_name == "pandas.period":  # whose numbers count its own unit
            raise DataError(f"holds periods of pandas ({kind.freq}); make them times with .dt.to_timestamp()")
        return _decoded(array.storage)
    if types.is_dictionary(kind):  # a cast of the whole fails for dictionaries of views, as polars makes them
        return _decoded(array.dictionary).take(array.indices)
    if types.is_run_end_encoded(kind):
        return _decoded(pc.run_end_decode(array))
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return array.cast(pa.large_string() if types.is_string_view(kind) else pa.large_binary())
    if types.is_list_view(kind) or types.is_large_list_view(kind) or _is_list(kind):
        within = _decoded(flat := array.flatten())
        if within is flat and _is_list(kind):
            return array
        return _lists(array, within)
    return array


def _lists(array: RawArray, values: pa.Array) -> pa.Array:
    """Lists of the same lengths as those of an array, with other values."""
    lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    missing = array.is_null()
    return pa.LargeListArray.from_arrays(
        offsets, values, mask=combined(missing) if isinstance(missing, pa.ChunkedArray) else missing
    )


def combined(column: pa.ChunkedArray) -> pa.Array:
    """All of a column in one array, which holds more than 2 GiB of text if need be."""
    return widened(column).combine_chunks()


def widened(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column whose text can be copied into one array: beyond 2 GiB as large_string, in lists too."""
    held = column.type.value_type if _is_list(column.type) else column.type
    if not pa.types.is_string(held) or column.nbytes <= TEXT_BYTES:
        return column
    return column.cast(pa.large_string() if is_text(column.type) else pa.large_list(pa.large_string()))


def narrowed(array: pa.Array) -> pa.Array:
    """The array as string if its text fits, so that a vocabulary's type depends on its own size alone."""
    fits = pa.types.is_large_string(array.type) and array.nbytes <= TEXT_BYTES
    return array.cast(pa.string()) if fits else array


def in_strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """What `widened` made as it was before, in more pieces: a file does not show how its text was held."""
    held = column.type.value_type if _is_list(column.type) else column.type
    if not pa.types.is_large_string(held):
        return column
    kind = pa.string() if is_text(column.type) else pa.list_(pa.string())
    if column.nbytes <= TEXT_BYTES or len(column) < 2:
        return column.cast(kind)
    half = len(column) // 2
    return pa.chunked_array([*in_strings(column[:half]).chunks, *in_strings(column[half:]).chunks], kind)


def _text(value: object) -> str | None:
    """A value as `as_text` writes it: 3 for 3.0."""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer() and abs(value) < EXACT):
        value = int(value)
    return None if value is None else str(value)


def whole_or_text(array: pa.Array) -> pa.Array:
    """The array as int64 where its type is a whole number, else as text."""
    return array.cast(pa.int64()) if pa.types.is_integer(array.type) else as_text(array)


def as_text(array: pa.Array) -> pa.Array:
    """Values as texts; a whole number as its decimal digits, also where it is a float."""
    if is_text(array.type):
        return array
    if pa.types.is_floating(array.type):  # a table with missing values spells 42 as 42.0, and a missing value as NaN
        numbers = pc.if_else(pc.is_nan(array), None, array)
        return pc.coalesce(as_int64(array).cast(pa.string()), numbers.cast(pa.string()))
    if pa.types.is_nested(array.type):
        held = "lists" if _is_list(array.type) else "objects"
        raise DataError(f"holds {held}; expected one value a row")
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid as error:  # bytes that are no UTF-8
        raise DataError(f"holds {array.type} that is no text ({error}); expected text in UTF-8") from None


def as_int64(array: pa.Array) -> pa.Array:
    """Whole numbers, null where a value is not one."""
    if pa.types.is_integer(array.type):
        return array.cast(pa.int64())
    if pa.types.is_floating(array.type):
        array = array.cast(pa.float64())
        is_whole = pc.and_(pc.equal(pc.floor(array), array), pc.less(pc.abs(array), EXACT))
        return pc.if_else(pc.fill_null(is_whole, False), array, None).cast(pa.int64())
    return _parsed(as_text(array), whole, pa.int64())


def with_points(texts: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Numbers with a decimal comma as numbers with a point; and where a point may be either mark.

    A point marks thousands in a column that has commas.
    """
    text = pc.utf8_trim_whitespace(texts)
    commas = pc.fill_null(pc.match_substring_regex(text, COMMA), False)
    grouped = pc.fill_null(pc.match_substring_regex(text, GROUPED), False)
    is_clear = pc.or_(commas, grouped) if pc.any(commas).as_py() else commas
    written = pc.replace_substring(pc.replace_substring(text, ".", ""), ",", ".")
    unclear = pc.and_(pc.fill_null(pc.match_substring_regex(text, POINT), False), pc.invert(is_clear))
    return pc.if_else(is_clear, written, texts), np.asarray(unclear)


def each_once(array: pa.Array, encode: Callable[[pa.Array], NDArray[Any]], missing: int = 0) -> NDArray[Any]:
    """What `encode` makes of values; of many rows each different value is encoded once, and null becomes `missing`."""
    if len(array) <= SMALL:
        return encode(array)
    coded = array.dictionary_encode()
    made = encode(coded.dictionary)
    made = np.append(made, np.array([missing], made.dtype))
    found: NDArray[Any] = made[pc.fill_null(coded.indices, len(made) - 1).to_numpy(zero_copy_only=False)]
    return found


def _parsed(texts: pa.Array, parse: Callable[[str], int | float | None], kind: pa.DataType) -> pa.Array:
    """What `parse` makes of each text; each different text is parsed once."""
    coded = texts.dictionary_encode()
    return pa.array([parse(text) for text in coded.dictionary.to_pylist()], kind).take(coded.indices)


def as_numbers(array: pa.Array) -> NDArray[np.float64]:
    """Numbers as float64, NaN where one is missing."""
    try:
        numbers = _floats(array)
    except (ValueError, pa.ArrowNotImplementedError):
        wrong = islice(_not_numbers(array), 3)
        problems = [f"row {row + 1} is {text!r}; expected a number" for row, text in wrong]
        raise DataError.of("numbers", problems or [f"holds {array.type}; expected numbers"]) from None
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise DataError(f"row {infinite[0] + 1} is infinite; expected a finite number")
    return numbers


def _floats(array: pa.Array) -> NDArray[np.float64]:
    """Numbers as float64, NaN where one is missing; infinite ones too."""
    if is_text(array.type):
        text = pc.utf8_trim_whitespace(array)
        array = pc.if_else(pc.equal(text, ""), None, text)
    numbers: NDArray[np.float64] = _cast_to_numbers(array).to_numpy(zero_copy_only=False)
    return numbers


def _cast_to_numbers(array: pa.Array) -> pa.Array:
    try:
        return array.cast(pa.float64(), safe=not pa.types.is_integer(array.type))  # beyond 2^53 to the nearest float64
    except pa.ArrowInvalid:
        if not is_text(array.type):
            raise
    says_missing = pc.is_in(pc.utf8_lower(array), pa.array(MISSING_NUMBERS, array.type))
    array = pc.if_else(says_missing, None, array)
    try:  # five times as fast as to parse the different texts
        return array.cast(pa.float64())
    except pa.ArrowInvalid:
        return _parsed(array, number, pa.float64())


def _not_numbers(array: pa.Array) -> Iterator[tuple[int, str]]:
    """The place and the beginning of each value that is no number."""
    for place, value in enumerate(array.to_pylist()):
        try:
            number(str(value) if value is not None else "")
        except ValueError:
            yield place, str(value).strip()[:60]


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is text, of whatever size."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


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
    kind, rows = flat.type, np.repeat(np.arange(len(array)), lengths)
    if not (is_text(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise DataError(f"holds lists of {kind}; expected lists of numbers")
    try:
        numbers = _floats(flat)
    except ValueError:
        place, text = next(_not_numbers(flat))
        raise DataError(f"row {first + rows[place] + 1} holds {text!r} in its vector; expected a number") from None
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
        return pc.split_pattern_regex(pc.utf8_trim(pc.fill_null(array, ""), BRACKETS), BETWEEN)
    kind = array.type
    if not _is_list(kind):
        raise DataError(f"holds {kind}; expected a list of numbers in every row")
    # the missing rows of fixed-size lists have values, which `flatten` leaves out
    return array.cast(pa.large_list(kind.value_type)) if pa.types.is_fixed_size_list(kind) else array
