"""Values of new users and items take the type that a catalogue shows."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
import pytest

from recspec.prepare.shown_values import shown_values

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "kind", "separator", "expected"),
    [
        (["9.5", " 12 ", "n/a", None, "dear", "inf"], pa.float64(), None, [9.5, 12.0, None, None, None, None]),
        ([7, NAN, "1.5"], pa.float64(), None, [7.0, None, 1.5]),
        (["1987", "1987.0", 1987.0, "1.5", "true", "False"], pa.int64(), None, [1987, 1987, 1987, None, 1, 0]),
        ([str(2**53 + 1), 2**53 + 1, "300"], pa.int64(), None, [2**53 + 1, 2**53 + 1, 300]),
        (["300", "3"], pa.int8(), None, [None, 3]),
        ([42.0, 1.5, 7, "x", NAN], pa.string(), None, ["42", "1.5", "7", "x", None]),
        (["a|b", "a||b", "c", None], pa.list_(pa.string()), "|", [["a", "b"], ["a", "b"], ["c"], None]),
        (["a|b", ["a", None, "b"]], pa.list_(pa.string()), None, [["a|b"], ["a", "b"]]),
        (["1|x|2"], pa.large_list(pa.int64()), "|", [[1, 2]]),
        ([["a", "b"], "c"], pa.string(), "|", ["a|b", "c"]),
        ([["a", "b"], "c"], pa.string(), None, [None, "c"]),
        ([["a"]], pa.int64(), "|", [None]),
        (["2024-02-25 12:30:00", "soon"], pa.timestamp("s"), None, [datetime(2024, 2, 25, 12, 30), None]),
    ],
)
def test_values_take_the_type_of_the_column(
    values: list[object], kind: pa.DataType, separator: str | None, expected: list[object]
) -> None:
    found = shown_values(values, kind, separator)
    assert found.type == kind
    assert found.to_pylist() == expected
