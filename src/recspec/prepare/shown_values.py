"""Raw values of new users and items, in the types of the columns that a catalogue shows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from recspec.encoding import is_text, raw_values


def shown_values(values: Sequence[object], kind: pa.DataType, separator: str | None) -> pa.Array:
    """Values as a column of this type; null where one is missing, or is nothing of this type.

    `separator` cuts a text where the column holds lists, and joins a list where it holds texts.
    """
    return pa.array([_shown(each, kind, separator) for each in values], kind)


def _shown(value: object, kind: pa.DataType, separator: str | None) -> object:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if isinstance(value, str):
            value = [each for each in (value.split(separator) if separator else [value]) if each]
        found = [_shown(each, kind.value_type, None) for each in (value if isinstance(value, list) else [value])]
        return [each for each in found if each is not None]
    if isinstance(value, list):
        texts = [_shown(each, pa.string(), None) for each in value]
        return separator.join(str(each) for each in texts if each is not None) if separator and is_text(kind) else None
    if is_text(kind):  # a table with missing values spells 42 as 42.0
        return str(int(value) if isinstance(value, float) and value.is_integer() else value)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _number(value, kind)
    try:
        return pa.scalar(value).cast(kind).as_py()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _number(value: object, kind: pa.DataType) -> object:
    """A number of this type; `true` is 1."""
    if not isinstance(value, (str, int, float)):
        return None
    try:
        found = float(raw_values.number(str(value)))
    except ValueError:
        return None
    if not math.isfinite(found) or (pa.types.is_integer(kind) and not found.is_integer()):
        return None
    if not pa.types.is_integer(kind):
        return found
    exact = raw_values.whole(value)  # beyond 2^53 too
    try:
        return pa.scalar(int(found) if exact is None else exact, kind).as_py()
    except (pa.ArrowInvalid, OverflowError):
        return None
