"""Rows of JSON as a table of raw columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import pyarrow as pa

from recspec.encoding import Encoders, as_column, raw_names, renumbered, row_at
from recspec.errors import DataError, RequestError, listed
from recspec.spec import FeatureSpec

Row = Mapping[str, Any]
"""Raw column -> a text, number, boolean, null, or a list of these."""

SHOWN = 3
"""Problems of one kind that a message names."""
MOST_BITS = 128
"""Most bits of a whole number; a larger one is no id."""
MAX_NOT_READ = 100
"""Most columns of a request that the model's data lacks; a note names them, and more are refused."""


def table_of(rows: Sequence[Row], where: str, known: Set[str] | None = None) -> pa.Table:
    """Raw rows as columns; a row that lacks a column has null there. Numbers and texts together become texts.

    Columns other than the `known` ones are empty, as nothing is made from them.

    Raises:
        RequestError: naming the values that are no text, number, boolean, null or list of these.
    """
    columns, problems = {}, list[str]()
    for name in dict.fromkeys(name for row in rows for name in row):
        if known is not None and name not in known and name.strip() not in known:
            columns[name] = pa.nulls(len(rows))
            continue
        values = [row.get(name) for row in rows]
        wrong = _wrong_values(values)
        if wrong:
            problems += [f"{row_name(row, where, name[:80])} {what}" for row, what in wrong]
        else:
            columns[name] = _column(values)
    if problems:
        raise RequestError.of("request", problems)
    return pa.table(columns)


def known_columns(spec: FeatureSpec, encoders: Encoders | None) -> Set[str]:
    """The raw columns that a model's data has, whether the model reads them or not."""
    return {*spec.features, *raw_names(encoders, encoders.encoders if encoders is not None else ())}


def check_columns(rows: Sequence[Row], where: str, known: Set[str]) -> None:
    """Refuse too many columns before anything is built: each costs a look at every row, and a row may bring many."""
    strange = dict[str, None]()
    for row in rows:
        strange.update((name, None) for name in row if name not in known)
        if len(strange) > MAX_NOT_READ:
            shown = f"such as {listed(name[:40] for name in list(strange)[:SHOWN])}"
            message = f"more than {MAX_NOT_READ} columns are none of the model's, {shown}"
            raise RequestError(f"{where}: {message}; send those that GET /models names")


def _wrong_values(values: Sequence[Any]) -> list[tuple[int, str]]:
    """Rows, and what is wrong with their values."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {str, float, bool}:
        return []
    if list in kinds and len(kinds) > 1:
        row = next(row for row, value in enumerate(values) if value is not None and not isinstance(value, list))
        return [(row, "is a single value, where another row has a list; expected one or the other")]
    wrong = [(row, what) for row, value in enumerate(values) if (what := _wrong(value, may_be_list=True))]
    return wrong[:SHOWN]


def _wrong(value: Any, *, may_be_list: bool) -> str | None:
    if isinstance(value, list) and may_be_list:
        return next((f"holds what {what}" for each in value if (what := _wrong(each, may_be_list=False))), None)
    if isinstance(value, (dict, list)):
        return f"is {'an object' if isinstance(value, dict) else 'a list'}; expected a text, number, boolean or null"
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"is a whole number of {value.bit_length():,} bits; expected at most {MOST_BITS}"
    return None


def _column(values: Sequence[Any]) -> pa.Array:
    if any(isinstance(value, list) for value in values):
        lists = [value for value in values if value is not None]
        flat = as_column([each for value in lists for each in value])
        ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)])
        return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat)
    return as_column(values)


def row_name(place: int, where: str, field: str = "") -> str:
    """A row of a request as messages name it; the request itself is one row, so it needs no number."""
    if where == "request":
        return f"request.{field}" if field else "its value"
    return row_at(place, where, field)


def problems_by_row(error: DataError, name: Callable[[int], str]) -> list[str]:
    """The problems with raw rows, each row by another name."""
    return [renumbered(problem.removeprefix("raw rows: "), name) for problem in error.problems]
