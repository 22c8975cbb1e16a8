"""Raw values: their ids however they are spelled, lists, vectors, and the files that keep a vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.data.encoding import raw_columns
from recspec.data.encoding.encoder_kinds import (
    CrossEncoder,
    HashEncoder,
    VectorEncoder,
    VocabularyEncoder,
    vector_scale,
)
from recspec.data.encoding.encoders import Encoders, extended
from recspec.data.encoding.raw_columns import SMALL, split_lists, vectors_of
from recspec.data.encoding.vocabulary import Vocabulary

NUMBERS = Vocabulary.of([30, 10, 20])

NAMES = Vocabulary.of(["b", "é", "a"])


def test_ids_count_from_one_in_sorted_order_and_zero_is_unknown() -> None:
    assert NUMBERS.values.to_pylist() == [10, 20, 30]
    assert NUMBERS.encode([10, 30, 40, None, 20]).tolist() == [1, 3, 0, 0, 2]
    assert NAMES.encode(["é", "a", "c", None]).tolist() == [3, 1, 0, 0]
    assert NUMBERS.cardinality == 4
    assert Vocabulary.of([2, None, 2, 1]).values.to_pylist() == [1, 2]
    assert Vocabulary.of([False, True]).encode([True, 0, "1"]).tolist() == [2, 1, 2]
    assert Vocabulary.of(["7", "8"]).encode([7.0, None, 8.5]).tolist() == [1, 0, 0]
    with pytest.raises(DataError, match="must be distinct"):
        Vocabulary(pa.array([1, 1]))


def test_an_empty_vocabulary_knows_nothing() -> None:
    for values in (pa.array([], pa.int64()), pa.array([], pa.string())):
        empty = Vocabulary.of(values)
        assert empty.cardinality == 1
        assert empty.encode(["a", "1"]).tolist() == [0, 0]
        assert empty.encode([]).tolist() == []


@pytest.mark.parametrize("rows", [10, SMALL + 10])
def test_more_text_than_one_array_holds_is_text_like_any_other(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 2 GiB; here 20 bytes stand for it."""
    texts = [f"é{number % 7}x{number}" for number in range(rows)]
    usual = Vocabulary.of(texts)
    usual.save(tmp_path / "usual.parquet")
    monkeypatch.setattr(raw_columns, "TEXT_BYTES", 20)
    whole = pa.array([*texts, None, "new"])
    spellings = [
        whole,
        pa.chunked_array([whole[:3], whole[3:]]),
        whole.cast(pa.large_string()),
        pa.chunked_array([whole[:3].dictionary_encode(), whole[3:].dictionary_encode()]),
    ]
    large = Vocabulary.of(spellings[1][: len(texts)])
    assert pa.types.is_large_string(large.values.type)
    large.save(tmp_path / "large.parquet")
    assert (tmp_path / "large.parquet").read_bytes() == (tmp_path / "usual.parquet").read_bytes()
    for vocabulary in (usual, large, Vocabulary.load(tmp_path / "usual.parquet")):
        for values in spellings:
            ids = vocabulary.encode(values)
            assert vocabulary.decode(ids).to_pylist() == [*texts, None, None]
            assert (
                HashEncoder(cardinality=1000).ids(values).tolist()
                == HashEncoder(cardinality=1000).ids([*texts, None, "new"]).tolist()
            )
            crossed = CrossEncoder(columns=("a", "b"), cardinality=1000)
            assert crossed.ids([values, values]).tolist() == crossed.ids([[*texts, None, "new"]] * 2).tolist()
            encoder = VocabularyEncoder(vocabulary="a", missing=texts[0], strip=True, missing_values=("new",))
            assert encoder.present(values).to_pylist() == [*texts, texts[0], texts[0]]


@pytest.mark.parametrize(
    "spelled",
    [
        ["10", "40", "", "ten", " 20 "],
        [10.0, 40.0, None, 10.5, 20.0],
        [10, "40", None, "ten", "20.0"],
        np.array([10, 40, np.nan, 11, 20]),
        np.array([10, 40, 2**64 - 1, 11, 20], np.uint64),
        pa.array(["10", "40", None, "x", "20"]).dictionary_encode(),
        pa.chunked_array([[10, 40], [0, 11, 20]]),
        ["10", "99999999999999999999999", "-", "1e1", "20"],
    ],
)
def test_whole_numbers_are_found_however_they_are_spelled(spelled: object) -> None:
    assert NUMBERS.encode(spelled).tolist() == [1, 0, 0, 0, 2]


def test_many_values_get_the_same_ids_as_few() -> None:
    vocabulary = Vocabulary.of([f"item {number}" for number in range(500)])
    few = [None, *(f"item {number}" for number in range(0, 1000, 7))]
    times = SMALL // len(few) + 1
    assert vocabulary.encode(few * times).tolist() == vocabulary.encode(few).tolist() * times
    different = [f"item {number}" for number in range(SMALL + 500)]
    assert vocabulary.encode(different).tolist() == [vocabulary.encode([text])[0] for text in different]


def test_an_unsorted_vocabulary_keeps_its_order() -> None:
    frequent_first = Vocabulary(pa.array([30, 10, 20]))
    assert frequent_first.encode([10, 20, 30, 5]).tolist() == [2, 3, 1, 0]
    assert frequent_first.decode([1, 0, 3]).to_pylist() == [30, None, 20]


def test_decode_is_the_way_back() -> None:
    assert NAMES.decode(NAMES.encode(["b", "é"])).to_pylist() == ["b", "é"]
    assert NAMES.decode([]).to_pylist() == []
    for wrong in (4, -1):
        with pytest.raises(DataError, match=f"id {wrong} is not one of the vocabulary's 4 ids"):
            NAMES.decode([1, wrong])


def test_lists_where_one_value_is_expected_are_an_error() -> None:
    for vocabulary in (NUMBERS, NAMES):
        with pytest.raises(DataError, match="holds lists; expected one value a row"):
            vocabulary.encode(pa.array([[1], [2]]))


def test_a_vocabulary_comes_back_from_its_file(tmp_path: Path) -> None:
    for vocabulary in (NUMBERS, NAMES, Vocabulary(pa.array([], pa.string()))):
        vocabulary.save(tmp_path / "v.parquet")
        assert Vocabulary.load(tmp_path / "v.parquet").values.equals(vocabulary.values)
    assert pq.read_table(tmp_path / "v.parquet").column_names == ["value"]
    assert [path.name for path in tmp_path.iterdir()] == ["v.parquet"]


def test_a_missing_or_foreign_vocabulary_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"v\.parquet: no such vocabulary"):
        Vocabulary.load(tmp_path / "v.parquet")
    (tmp_path / "v.parquet").write_text("x")
    with pytest.raises(DataError, match=r"v\.parquet: not a vocabulary"):
        Vocabulary.load(tmp_path / "v.parquet")


def test_a_vocabulary_of_numbers_grows_by_whole_numbers_of_64_bits_alone() -> None:
    known = Vocabulary.of([5, 7])
    assert extended(known, Vocabulary.of(["6", "7"])).values.to_pylist() == [5, 7, 6]
    assert extended(Vocabulary.of(["5"]), known).values.to_pylist() == ["5", "7"]
    with pytest.raises(DataError, match="'9223372036854775808' is no whole number of 64 bits, and all known values"):
        extended(known, Vocabulary.of([2**63, 5]))


# --- lists ------------------------------------------------------------------------------------------------------------


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
    assert (values.to_pylist(), offsets.tolist()) == (["a", "b", "c"], [0, 2, 2, 2, 3])
    values, offsets = split_lists(pa.array(["a|b", None]), None)
    assert (values.to_pylist(), offsets.tolist()) == (["a|b"], [0, 1, 1])


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64())])
def test_lists_may_be_lists_already(kind: pa.DataType) -> None:
    values, offsets = split_lists(pa.array([[1, 2], None, [], [3, None]], kind), None)
    assert (values.to_pylist(), offsets.tolist()) == ([1, 2, 3], [0, 2, 2, 2, 3])
    values, offsets = split_lists(pa.array([[1], [2, 3], [4]], kind).slice(1), None)
    assert (values.to_pylist(), offsets.tolist()) == ([2, 3, 4], [0, 2, 3])


# --- vectors ----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(DataError, match="row 2 holds a missing or too large value in its vector"):
        Encoders({"v": VectorEncoder(length=1)}).encode_column("v", [[1.0], [1e300]])
