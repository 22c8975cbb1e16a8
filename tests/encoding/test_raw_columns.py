"""Columns of raw values: lists, and more text than one array holds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from recspec.data.encoding import raw_columns
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.raw_columns import split_lists


@pytest.mark.slow
def test_more_than_two_gibibytes_of_text_fit_into_one_array() -> None:
    """One text of 64 MiB stands 33 times in the column and once in memory; the array takes 2.2 GB."""
    piece = pa.array(["x" * (64 << 20)])
    column = pa.chunked_array([piece] * 33)
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        column.combine_chunks()
    array = raw_columns.combined(column)
    assert (len(array), array.type) == (33, pa.large_string())
    assert raw_columns.in_strings(raw_columns.widened(column)).type == pa.string()


def test_a_text_is_cut_at_its_separator_and_empty_values_are_left_out() -> None:
    values, offsets = split_lists(pa.array(["a|b", "", None, "|c||"]), "|")
    assert values.to_pylist() == ["a", "b", "c"]
    assert offsets.tolist() == [0, 2, 2, 2, 3]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64())])
def test_lists_may_be_lists_already(kind: pa.DataType) -> None:
    values, offsets = split_lists(pa.array([[1, 2], None, [], [3, None]], kind), None)
    assert values.to_pylist() == [1, 2, 3]
    assert offsets.tolist() == [0, 2, 2, 2, 3]


def test_a_slice_of_lists_holds_its_own_rows() -> None:
    values, offsets = split_lists(pa.array([[1], [2, 3], [4]]).slice(1), None)
    assert (values.to_pylist(), offsets.tolist()) == ([2, 3, 4], [0, 2, 3])


def test_without_a_separator_a_value_is_a_list_of_one() -> None:
    values, offsets = split_lists(pa.array(["a|b", None]), None)
    assert (values.to_pylist(), offsets.tolist()) == (["a|b"], [0, 1, 1])


def column(encoder: object, values: object) -> list[float]:
    """A column encoded by one encoder, as plain numbers."""
    found = Encoders({"x": encoder}).encode_column("x", values)  # type: ignore[dict-item]
    assert isinstance(found, np.ndarray)
    return found.tolist()  # type: ignore[no-any-return]
