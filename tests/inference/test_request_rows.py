"""Rows of JSON as columns: one type a column, and values that no column holds."""

from __future__ import annotations

from typing import Any

import pytest

from recspec.base.errors import RequestError
from recspec.inference.request_features import table_of


def refused(message: str, call: Any, *given: Any, **named: Any) -> None:
    with pytest.raises(RequestError) as caught:
        call(*given, **named)
    assert message in str(caught.value)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, 2], [1, None, 2]),
        ([1, 2.5], [1.0, 2.5]),
        ([True, 3], ["1", "3"]),
        (["a", 1, 2.0, 2.5, False, None], ["a", "1", "2", "2.5", "0", None]),
        ([[1, 2], None, []], [[1, 2], [], []]),
        ([["a"], [1]], [["a"], ["1"]]),
        ([None, None], [None, None]),
        ([2**63 - 1, 0.5], ["9223372036854775807", "0.5"]),
        ([2**63, 3.0, None], ["9223372036854775808", "3", None]),
        ([[2**127], [1]], [["170141183460469231731687303715884105728"], ["1"]]),
    ],
)
def test_values_of_json_become_one_type(values: list[Any], expected: list[Any]) -> None:
    table = table_of([{"x": value} for value in values], "rows")
    assert table.column("x").to_pylist() == expected


def test_a_column_that_some_rows_lack_is_null_there() -> None:
    table = table_of([{"a": 1}, {"b": "x"}], "rows")
    assert table.to_pydict() == {"a": [1, None], "b": [None, "x"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, {}], "row 2 (rows[1].x) is an object; expected a text, number, boolean or null"),
        ([[[1]]], "row 1 (rows[0].x) holds what is a list; expected a text, number, boolean or null"),
        ([[1], 2], "row 2 (rows[1].x) is a single value, where another row has a list; expected one or the other"),
        ([10**9999], "row 1 (rows[0].x) is a whole number of 33,216 bits; expected at most 128"),
        ([[-(2**128)]], "row 1 (rows[0].x) holds what is a whole number of 129 bits; expected at most 128"),
    ],
)
def test_values_that_no_column_holds_are_named(values: list[Any], message: str) -> None:
    refused(message, table_of, [{"x": value} for value in values], "rows")
