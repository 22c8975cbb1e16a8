"""Raw vectors: lists of numbers and texts, missing ones, and what is wrong with others."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from recspec.base.errors import DataError
from recspec.data.encoding.encoder_kinds import VectorEncoder, vector_scale
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.raw_columns import vectors_of

NAN = [np.nan, np.nan]
SPELLINGS = [
    [[1.5, -2.0], None, []],
    ["[1.5, -2]", None, "[]"],
    ["1.5|-2", "", " "],
    ["(1.5 -2.0)", "nan", "none"],
    ["[+1.5;-2e0]", "n/a", "[ ]"],
    pa.array([["1.5", "-2"], None, [""]]),
    pa.array([[1.5, -2], None, [None, None]], pa.list_(pa.float32(), 2)),
    pa.chunked_array([[[1.5, -2]], [None, []]], pa.large_list(pa.float64())),
]


@pytest.mark.parametrize("values", SPELLINGS)
def test_a_vector_may_be_spelled_in_many_ways_and_may_be_missing(values: object) -> None:
    np.testing.assert_array_equal(vectors_of(values, 2), [[1.5, -2.0], NAN, NAN])


def test_a_column_without_a_value_holds_missing_vectors() -> None:
    assert np.isnan(vectors_of(pa.nulls(3), 2)).all()
    assert vectors_of(pa.array([], pa.list_(pa.float32())), 2).shape == (0, 2)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([[1.0, 2.0], [1.0, 2.0, 3.0]], "row 2 holds 3 numbers; expected a vector of 2"),
        ([[1.0, 2.0], [], [1.0]], "row 3 holds 1 number; expected a vector of 2"),
        ([[1.0, None]], "row 1 holds a missing value in its vector; expected 2 finite numbers"),
        ([[1.0, float("inf")]], "row 1 holds an infinite number in its vector; expected 2 finite numbers"),
        (["[1, 2]", "[1, two]"], "row 2 holds 'two' in its vector; expected a number"),
        ([1.0, 2.0], "holds double; expected a list of numbers in every row"),
        (pa.array([[True, False]]), "holds lists of bool; expected lists of numbers"),
    ],
)
def test_other_lists_are_refused_with_their_row(values: object, problem: str) -> None:
    with pytest.raises(DataError) as caught:
        vectors_of(values, 2)
    assert caught.value.problems == (problem,)


def test_one_factor_scales_a_whole_vector() -> None:
    """Squares of 3, 4, 0, 0 sum to 25 in four numbers, so their mean square is 6.25 and the factor 1 / 2.5."""
    assert vector_scale(25.0, 4) == 0.4
    assert vector_scale(0.0, 4) == vector_scale(0.0, 0) == vector_scale(float("inf"), 4) == 1.0
    encoders = Encoders({"v": VectorEncoder(length=2, scale=0.4)})
    values, offsets = encoders.encode_column("v", [[3, 4], None, [0, 0]])
    np.testing.assert_allclose(values, [1.2, 1.6, 0, 0, 0, 0], rtol=1e-6)
    assert offsets.tolist() == [0, 2, 4, 6]


def test_a_number_too_large_for_float32_is_refused() -> None:
    with pytest.raises(DataError, match="row 2 holds a missing or too large value in its vector"):
        Encoders({"v": VectorEncoder(length=1)}).encode_column("v", [[1.0], [1e300]])
