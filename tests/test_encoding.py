"""Encoding: ids of raw values however they are spelled, scaled numbers, lists, and the files that keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from recspec import encoding
from recspec.encoding import (
    SMALL,
    BucketEncoder,
    CrossEncoder,
    Encoder,
    Encoders,
    Gap,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    Scaler,
    Vocabulary,
    VocabularyEncoder,
    split_lists,
)
from recspec.errors import DataError
from recspec.hashing import cross, fingerprint64

NUMBERS = Vocabulary.of([30, 10, 20])
NAMES = Vocabulary.of(["b", "é", "a"])


# --- vocabularies ----------------------------------------------------------------------------------------------------


def test_ids_count_from_one_in_sorted_order_and_zero_is_unknown() -> None:
    assert NUMBERS.values.to_pylist() == [10, 20, 30]
    assert NUMBERS.encode([10, 30, 40, None, 20]).tolist() == [1, 3, 0, 0, 2]
    assert NAMES.encode(["é", "a", "c", None]).tolist() == [3, 1, 0, 0]
    assert NUMBERS.cardinality == 4


def test_missing_and_repeated_values_have_no_id_of_their_own() -> None:
    assert Vocabulary.of([2, None, 2, 1]).values.to_pylist() == [1, 2]


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
    monkeypatch.setattr(encoding, "TEXT_BYTES", 20)
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


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.string())])
def test_lists_of_more_text_than_one_array_holds_are_lists_like_any_other(
    kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = pa.chunked_array([[["a", "bc"], [], None], [["d", "a", ""]]] * 5, kind)
    values, offsets = split_lists(column.combine_chunks(), None)
    monkeypatch.setattr(encoding, "TEXT_BYTES", 20)
    found, found_offsets = split_lists(encoding.combined(column), None)
    assert found.to_pylist() == values.to_pylist()
    assert found_offsets.tolist() == offsets.tolist()
    assert encoding.in_strings(encoding.widened(column)).to_pylist() == column.to_pylist()


@pytest.mark.slow
def test_more_than_two_gibibytes_of_text_fit_into_one_array() -> None:
    """One text of 64 MiB stands 33 times in the column and once in memory; the array takes 2.2 GB."""
    piece = pa.array(["x" * (64 << 20)])
    column = pa.chunked_array([piece] * 33)
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        column.combine_chunks()
    array = encoding.combined(column)
    assert (len(array), array.type) == (33, pa.large_string())
    assert encoding.in_strings(encoding.widened(column)).type == pa.string()


@pytest.mark.parametrize(
    "spelled",
    [
        ["10", "40", "", "ten", " 20 "],
        [10.0, 40.0, None, 10.5, 20.0],
        [10, "40", None, "ten", "20.0"],
        np.array([10, 40, 0, 11, 20]),
        np.array([10, 40, np.nan, 11, 20]),
        np.array([10, 40, 2**64 - 1, 11, 20], np.uint64),
        pa.array(["10", "40", None, "x", "20"]).dictionary_encode(),
        pa.chunked_array([[10, 40], [0, 11, 20]]),
        ["10", "99999999999999999999999", "-", "1e1", "20"],
    ],
)
def test_whole_numbers_are_found_however_they_are_spelled(spelled: object) -> None:
    assert NUMBERS.encode(spelled).tolist() == [1, 0, 0, 0, 2]


def test_numbers_are_found_among_text() -> None:
    codes = Vocabulary.of(["7", "8"])
    assert codes.encode([7, 8, 9]).tolist() == [1, 2, 0]
    assert codes.encode([7.0, None, 8.5]).tolist() == [1, 0, 0]


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


def test_true_and_false_are_one_and_zero() -> None:
    assert Vocabulary.of([False, True]).encode([True, 0, "1"]).tolist() == [2, 1, 2]


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


def test_a_vocabulary_with_a_repeated_value_is_refused() -> None:
    with pytest.raises(DataError, match="must be distinct"):
        Vocabulary(pa.array([1, 1]))


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


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_are_scaled_and_a_missing_one_is_the_mean() -> None:
    assert Scaler(10.0, 2.0).encode([12, None, 8.0]).tolist() == [1.0, 0.0, -1.0]
    assert Scaler(10.0, 2.0).encode(["12", "", "8"]).tolist() == [1.0, 0.0, -1.0]


def test_a_constant_or_missing_column_can_be_scaled() -> None:
    for scaler in (Scaler.of(5.0, 0.0), Scaler.of(None, None), Scaler.of(5.0, float("nan"))):
        assert np.isfinite(scaler.encode([5.0])).all()


def test_sums_in_another_order_give_the_same_scaler() -> None:
    assert Scaler.of(0.1 + 0.2 + 0.3, 1.0) == Scaler.of(0.3 + 0.2 + 0.1, 1.0)


# --- lists -----------------------------------------------------------------------------------------------------------


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


# --- encoders --------------------------------------------------------------------------------------------------------

ENCODERS = Encoders(
    {
        "user_id": VocabularyEncoder(vocabulary="user_id", column="userId"),
        "tags": VocabularyEncoder(vocabulary="tags", separator="|", length=2),
        "price": ScaleEncoder(mean=10.0, std=2.0),
        "speed": NumberEncoder(),
    },
    {"user_id": NUMBERS, "tags": NAMES},
)


def test_raw_rows_become_prepared_columns() -> None:
    raw = pa.table({"userId": [20, 99], "tags": ["b|zz|a|é", ""], "price": [12.0, None], "speed": ["1.5", None]})
    encoded = ENCODERS.encode(raw)
    assert encoded["user_id"].tolist() == [2, 0]  # type: ignore[union-attr]
    ids, offsets = encoded["tags"]
    assert (ids.tolist(), offsets.tolist()) == ([2, 1], [0, 2, 2])  # the unknown one left out, then cut to two
    assert encoded["price"].tolist() == [1.0, 0.0]  # type: ignore[union-attr]
    assert encoded["speed"].tolist() == [1.5, 0.0]  # type: ignore[union-attr]


def test_a_column_may_bear_the_features_name() -> None:
    assert ENCODERS.encode(pa.table({"user_id": ["30"]}), ["user_id"])["user_id"].tolist() == [3]  # type: ignore[union-attr]


def test_every_problem_of_raw_rows_is_named() -> None:
    raw = pa.table({"users_id": [1, 2], "tags": ["a", "b"], "price": ["12", "cheap"], "speed": [np.inf, 1.0]})
    with pytest.raises(DataError) as caught:
        ENCODERS.encode(raw)
    assert "no column 'user_id' (did you mean 'users_id'?)" in str(caught.value)
    assert "column 'price': row 2 is 'cheap'; expected a number" in str(caught.value)
    assert "column 'speed': row 1 is infinite; expected a finite number" in str(caught.value)


def test_an_unknown_feature_and_a_number_have_no_vocabulary() -> None:
    assert ENCODERS.vocabulary_of("tags") is NAMES
    with pytest.raises(DataError, match=r"unknown feature 'tag' \(did you mean 'tags'\?\)"):
        ENCODERS.vocabulary_of("tag")
    with pytest.raises(DataError, match="'price' is a number; it has no vocabulary"):
        ENCODERS.vocabulary_of("price")


def test_encoders_come_back_from_their_folder(tmp_path: Path) -> None:
    ENCODERS.save(tmp_path)
    loaded = Encoders.load(tmp_path)
    assert loaded.encoders == ENCODERS.encoders
    assert loaded.vocabulary_of("tags").values.equals(NAMES.values)


def test_the_file_of_encoders_is_pinned(tmp_path: Path) -> None:
    ENCODERS.save(tmp_path)
    assert (tmp_path / "encoders.json").read_text() == (
        '{\n  "user_id": {\n    "column": "userId",\n    "kind": "vocabulary",\n    "vocabulary": "user_id"\n  },\n'
        '  "tags": {\n    "kind": "vocabulary",\n    "vocabulary": "tags",\n'
        '    "separator": "|",\n    "length": 2\n  },\n'
        '  "price": {\n    "kind": "scale",\n    "mean": 10.0,\n    "std": 2.0\n  },\n'
        '  "speed": {\n    "kind": "number"\n  }\n}\n'
    )


def test_a_damaged_or_missing_file_of_encoders_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"encoders\.json: no such file"):
        Encoders.load(tmp_path)
    (tmp_path / "encoders.json").write_text('{"a": {"kind": "scale", "mean": 1.0}, "b": {"kind": "guess"}}')
    with pytest.raises(DataError) as caught:
        Encoders.load(tmp_path)
    assert len(caught.value.problems) == 2


# --- hashes, buckets, crosses, numbers -------------------------------------------------------------------------------

WORDS = HashEncoder(cardinality=100)
AGE = BucketEncoder(boundaries=(18, 25, 30))


def column(encoder: object, values: object) -> list[float]:
    """A column encoded by one encoder, as plain numbers."""
    found = Encoders({"x": encoder}).encode_column("x", values)  # type: ignore[dict-item]
    assert isinstance(found, np.ndarray)
    return found.tolist()  # type: ignore[no-any-return]


def test_a_hashed_value_is_its_fingerprint_within_the_cardinality_and_a_missing_one_zero() -> None:
    assert column(WORDS, ["a", "", None, "a"]) == [12917804110809363939 % 99 + 1, 0, 0, 12917804110809363939 % 99 + 1]
    assert column(WORDS, []) == []
    assert column(HashEncoder(cardinality=2), ["a", "b", None]) == [1, 1, 0]


@pytest.mark.parametrize(
    "spelled",
    [[42, -7, None], [42.0, -7.0, None], ["42", "-7", None], np.array([42, -7, np.nan]), pa.array([42, -7, None])],
)
def test_whole_numbers_are_hashed_alike_however_they_are_spelled(spelled: object) -> None:
    assert column(WORDS, spelled) == column(WORDS, ["42", "-7", ""])


@pytest.mark.parametrize("spell", [str, int, float])
def test_many_values_are_hashed_like_few(spell: type) -> None:
    values = [spell(number % 50) for number in range(SMALL)]
    assert column(WORDS, [*values, None]) == [*column(WORDS, values[:50]) * (SMALL // 50), *column(
        WORDS, values[: SMALL % 50]), 0]  # fmt: skip


def test_lists_are_hashed_value_by_value_without_empty_ones() -> None:
    hashed = HashEncoder(cardinality=100, separator=" ", length=2)
    values, offsets = Encoders({"x": hashed}).encode_column("x", ["a b c", "", None, "a  b"])
    a, b = column(WORDS, ["a", "b"])
    assert (np.asarray(values).tolist(), np.asarray(offsets).tolist()) == ([a, b, a, b], [0, 2, 2, 2, 4])


def test_a_bucket_is_one_more_than_the_boundaries_that_are_at_most_as_large() -> None:
    assert column(AGE, [17, 17.9, 18, 24, 25, 30, 99, None]) == [1, 1, 2, 2, 3, 4, 4, 0]
    assert column(AGE, ["18", " ", "30.5"]) == [2, 0, 4]
    assert AGE.cardinality == 5
    assert column(BucketEncoder(boundaries=()), [1, None]) == [1, 0]


@pytest.mark.parametrize(("boundaries", "message"), [((2, 1), "1 follows 2"), ((2, 2), "2 follows 2")])
def test_boundaries_must_rise(boundaries: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=f"boundaries must rise; {message}"):
        BucketEncoder(boundaries=boundaries)
    with pytest.raises(ValidationError, match=f"boundaries must rise; {message}"):
        CrossEncoder(columns=("a", "b"), cardinality=9, boundaries={"a": boundaries})
    with pytest.raises(ValidationError, match="finite number"):
        BucketEncoder(boundaries=(1, float("nan")))


CROSSED = Encoders(
    {
        "age_x_job": CrossEncoder(columns=("age", "job"), cardinality=1000, boundaries={"age": (18, 25)}),
        "job": VocabularyEncoder(vocabulary="job", column="job"),
        "city_id": VocabularyEncoder(vocabulary="city_id", column="city"),
        "city_x_job": CrossEncoder(columns=("city", "job"), cardinality=1000),
    },
    {"job": Vocabulary.of(["cook", "nurse"]), "city_id": Vocabulary.of(["Rome"])},
)


def crossed(*parts: list[int] | list[str]) -> list[int]:
    """Ids of a cross of cardinality 1000, of fingerprints' texts or buckets."""
    prints = [
        np.array(part).astype(np.uint64) if isinstance(part[0], int) else fingerprint64(pa.array(part))
        for part in parts
    ]
    return (1 + cross(prints) % np.uint64(999)).tolist()


def test_a_cross_is_hashed_from_its_raw_columns() -> None:
    raw = pa.table({"job": ["cook", "nurse", None, "cook"], "age": [17, 18, 40, None], "city": ["Rome"] * 4})
    found = CROSSED.encode(raw, ["age_x_job", "city_x_job"])
    assert np.asarray(found["age_x_job"]).tolist() == crossed([0, 1, 2, -1], ["cook", "nurse", "", "cook"])
    assert np.asarray(found["city_x_job"]).tolist() == crossed(["Rome"] * 4, ["cook", "nurse", "", "cook"])
    assert np.asarray(found["age_x_job"]).min() >= 1


def test_a_cross_of_many_rows_is_like_one_of_few() -> None:
    jobs = pa.array(["cook", "nurse", None])
    few = CROSSED.encode(pa.table({"job": jobs, "city": jobs}), ["city_x_job"])["city_x_job"]
    many = pa.concat_arrays([jobs] * SMALL)
    found = CROSSED.encode(pa.table({"job": many, "city": many}), ["city_x_job"])["city_x_job"]
    assert np.asarray(found).tolist() == np.asarray(few).tolist() * SMALL


def test_a_cross_finds_a_raw_column_by_the_name_of_its_feature() -> None:
    by_raw = CROSSED.encode(pa.table({"city": ["Rome"], "job": ["cook"]}), ["city_x_job"])
    by_feature = CROSSED.encode(pa.table({"city_id": ["Rome"], "job": ["cook"]}), ["city_x_job"])
    assert by_raw["city_x_job"] == by_feature["city_x_job"]
    assert CROSSED.can_encode("city_x_job", ["city_id", "job"])
    assert not CROSSED.can_encode("city_x_job", ["city_id"])


def test_columns_that_a_cross_lacks_are_each_named_once() -> None:
    with pytest.raises(DataError) as caught:
        CROSSED.encode(pa.table({"ages": [1]}), ["age_x_job", "city_x_job", "job"])
    assert caught.value.problems == (
        "no column 'age' that 'age_x_job' is made from (did you mean 'ages'?)",
        "no column 'city' that 'city_x_job' is made from",
        "no column 'job' that 'age_x_job' is made from",
    )
    assert str(caught.value).endswith("that 'age_x_job' is made from\n  found 'ages'")
    with pytest.raises(DataError, match="raw rows: column 'age': row 1 is 'old'; expected a number"):
        CROSSED.encode(pa.table({"age": ["old"], "job": ["cook"]}), ["age_x_job"])


def test_a_number_that_its_buckets_lack_is_named_by_its_column() -> None:
    encoders = Encoders({"age_bucket": BucketEncoder(column="age", boundaries=(18,)), "age": NumberEncoder()})
    with pytest.raises(DataError) as caught:
        encoders.encode(pa.table({"job": ["cook"]}))
    assert str(caught.value) == "raw rows: no column 'age' that 'age_bucket' is made from; found 'job'"


def test_one_bad_cell_is_one_problem_whatever_is_made_from_it() -> None:
    encoders = Encoders(
        {
            "age": NumberEncoder(column="Age"),
            "age_bucket": BucketEncoder(column="Age", boundaries=(18,)),
            "age_x_pay": CrossEncoder(columns=("Age", "pay"), cardinality=9, boundaries={"Age": (18,), "pay": (1,)}),
        }
    )
    with pytest.raises(DataError) as caught:
        encoders.encode(pa.table({"Age": ["1", "old"], "pay": ["much", "2"]}))
    assert caught.value.problems == (
        "column 'Age': row 2 is 'old'; expected a number",
        "column 'pay': row 1 is 'much'; expected a number",
    )


def test_missing_values_are_told_from_unknown_ones_once_a_column() -> None:
    encoders = Encoders(
        {
            "age_bucket": BucketEncoder(column="age", boundaries=(18,)),
            "age": ScaleEncoder(mean=1, std=1, missing_values=("?",)),
            "pay_bucket": BucketEncoder(column="pay", boundaries=(18,)),
            "days": NumberEncoder(missing=2.5),
            "speed": NumberEncoder(),
            "job": VocabularyEncoder(vocabulary="job", missing_values=("?",)),
            "user_id": VocabularyEncoder(vocabulary="user_id", column="userId"),
            "city": HashEncoder(cardinality=9),
            "full": HashEncoder(cardinality=9),
            "job_x_city": CrossEncoder(columns=("job", "city"), cardinality=9),
        },
        {"job": NAMES, "user_id": NUMBERS},
    )
    raw = pa.table(
        {
            "age": [1.0, None, 3.0],
            "pay": ["", "7", " "],
            "days": [None, 1, 2],
            "speed": [None, None, 2.0],
            "job": ["?", "astronaut", None],
            "userId": [20.0, 99.0, float("nan")],
            "city": ["Rome", "", None],
            "full": ["a", "b", "c"],
        }
    )
    assert encoders.gaps(raw, encoders.encode(raw)) == {
        "age": Gap(1, 0, "the mean"),
        "pay": Gap(2, 0, "the id of missing values"),
        "days": Gap(1, 0, "2.5"),
        "speed": Gap(2, 0, "0"),
        "job": Gap(2, 1, "the id of unknown values"),
        "user_id": Gap(1, 1, "the id of unknown values"),
        "city": Gap(2, 0, "the id of missing values"),
    }


def test_a_cross_has_boundaries_of_its_own_columns_only() -> None:
    with pytest.raises(ValidationError, match=r"boundaries: unknown column 'ages' \(did you mean 'age'\?\)"):
        CrossEncoder(columns=("age", "job"), cardinality=9, boundaries={"ages": (1,)})


def test_numbers_are_bounded_then_filled_then_their_logarithm_is_taken() -> None:
    number = NumberEncoder(low=0, high=100, outside=1, missing=7, log1p=True)
    assert column(number, [-1, 0, 3, 100, 101, None]) == pytest.approx(np.log([2, 1, 4, 101, 2, 8]).tolist())
    assert column(NumberEncoder(low=0), [-5, None, 2]) == [0, 0, 2]
    assert column(NumberEncoder(missing=3), [None, 1]) == [3, 1]
    assert column(NumberEncoder(log1p=True), [-1, None]) == pytest.approx([-np.log(2), 0])


def test_a_logarithm_of_value_and_offset_is_missing_where_there_is_none() -> None:
    assert column(NumberEncoder(log_plus=3), [1, -3, -4, None, -2]) == pytest.approx([np.log(4), 0, 0, 0, 0])
    assert column(ScaleEncoder(mean=1, std=2, log_plus=3), [1, -3]) == pytest.approx([(np.log(4) - 1) / 2, 0])
    with pytest.raises(ValueError, match="log1p and log_plus are two logarithms; give one of them"):
        NumberEncoder(log1p=True, log_plus=3)


def test_scaling_follows_the_logarithm_and_a_missing_number_is_the_mean_unless_filled() -> None:
    scale = ScaleEncoder(mean=1, std=2, log1p=True)
    assert column(scale, [0, np.e - 1, None]) == pytest.approx([-0.5, 0, 0])
    assert column(scale.model_copy(update={"missing": 0.0}), [None]) == pytest.approx([-0.5])


def test_the_new_kinds_come_back_from_their_file_and_are_pinned(tmp_path: Path) -> None:
    encoders = Encoders(
        {
            "word": HashEncoder(cardinality=9, separator=",", length=3),
            "age": AGE,
            "pair": CrossEncoder(columns=("a", "b"), cardinality=5, boundaries={"a": (1.5,)}),
            "days": NumberEncoder(column="day", low=0, log1p=True),
        }
    )
    encoders.save(tmp_path)
    assert Encoders.load(tmp_path) == encoders
    assert json.loads((tmp_path / "encoders.json").read_text()) == {
        "word": {"kind": "hash", "cardinality": 9, "separator": ",", "length": 3},
        "age": {"kind": "bucket", "boundaries": [18, 25, 30]},
        "pair": {"kind": "cross", "columns": ["a", "b"], "cardinality": 5, "boundaries": {"a": [1.5]}},
        "days": {"column": "day", "low": 0, "log1p": True, "kind": "number"},
    }
    with pytest.raises(DataError, match="feature 'word' is encoded by hash; it has no vocabulary"):
        encoders.vocabulary_of("word")


def test_what_stood_for_missing_when_fitted_is_missing_again(tmp_path: Path) -> None:
    said: dict[str, Any] = {"strip": True, "missing_values": ("?",)}
    encoders = Encoders(
        {
            "job": VocabularyEncoder(vocabulary="job", **said),
            "city": HashEncoder(cardinality=100, **said),
            "tags": HashEncoder(cardinality=100, separator="|", length=3, **said),
            "age": ScaleEncoder(mean=10, std=2, **said),
            "age_bucket": BucketEncoder(column="age", boundaries=(18,), **said),
            "age_x_job": CrossEncoder(columns=("age", "job"), cardinality=1000, boundaries={"age": (18,)}, **said),
        },
        {"job": Vocabulary.of(["?", "cook"])},
    )
    encoders.save(tmp_path)
    encoders = Encoders.load(tmp_path)
    marked = {"job": [" ?", " cook "], "city": ["?", " Rome"], "tags": ["?|a", " a"], "age": [" ?", " 40"]}
    plain = {"job": [None, "cook"], "city": [None, "Rome"], "tags": ["a", "a"], "age": [None, "40"]}
    for name, values in encoders.encode(pa.table(plain)).items():
        found = encoders.encode(pa.table(marked), [name])[name]
        np.testing.assert_array_equal(np.concatenate(found, axis=None), np.concatenate(values, axis=None), name)
    assert column(HashEncoder(cardinality=100), ["?", " a"]) != column(HashEncoder(cardinality=100), [None, "a"])


def test_blanks_around_a_columns_name_do_not_count_unless_the_feature_has_them() -> None:
    spaced = Encoders({" b": NumberEncoder(), "c": NumberEncoder()})
    assert spaced.named(["a", " b", " c ", " d", "d"]) == ["a", " b", "c", " d", "d"]


# --- encoders of imported models -------------------------------------------------------------------------------------


def encoded(encoder: Encoder, *columns: list[object], vocabulary: Vocabulary | None = None) -> list[int]:
    """The ids that an encoder of columns a, b, ... gives."""
    names = "abc"[: len(columns)]
    vocabularies = {"words": vocabulary} if vocabulary is not None else {}
    table = pa.table(dict(zip(names, columns, strict=True)))
    made = Encoders({"a": encoder}, vocabularies).encode(table)["a"]
    assert isinstance(made, np.ndarray)
    return made.tolist()


def test_values_beyond_a_vocabulary_take_buckets_after_it() -> None:
    """TensorFlow 2.15.1: pink, 11 and -7 are in buckets 1, 4 and 2 of 5."""
    words, numbers = Vocabulary(pa.array(["red", "green"])), Vocabulary(pa.array([5, 10]))
    encoder = VocabularyEncoder(vocabulary="words", buckets=5)
    assert encoded(encoder, ["green", "pink", "", None], vocabulary=words) == [2, 3 + 1, 0, 0]
    assert encoded(encoder, [10, 11, -7, None], vocabulary=numbers) == [2, 3 + 4, 3 + 2, 0]
    assert encoded(encoder, ["10", "011", "-7.0", "x"], vocabulary=numbers) == [2, 3 + 4, 3 + 2, 0]


def test_values_beyond_a_vocabulary_may_take_one_id() -> None:
    encoder = VocabularyEncoder(vocabulary="words", otherwise=2)
    assert encoded(encoder, ["red", "pink", "", None], vocabulary=Vocabulary(pa.array(["red", "green"]))) == [
        1,
        2,
        0,
        0,
    ]


def test_a_number_may_stand_for_a_missing_value() -> None:
    encoder = VocabularyEncoder(vocabulary="words", otherwise=2, missing_values=("-1", "?"))
    numbers = Vocabulary(pa.array([5, 10]))
    for given in ([-1, 5, 7], [-1.0, 5.0, 7.0], ["-1", "5", "7"]):
        assert encoded(encoder, list(given), vocabulary=numbers) == [0, 1, 2]


def test_whole_numbers_are_hashed_as_their_digits() -> None:
    """TensorFlow 2.15.1: 42, -7 and 4999 are in buckets 16, 22 and 30 of 40."""
    encoder = HashEncoder(cardinality=41, whole=True, missing_values=("-1",))
    assert encoded(encoder, [42, -7, 4999, -1, None]) == [17, 23, 31, 0, 0]
    assert encoded(encoder, ["042", "-7.0", "4999", "-1", "many"]) == [17, 23, 31, 0, 0]


def test_a_cross_takes_whole_numbers_as_they_are_and_may_need_all() -> None:
    """TensorFlow 2.15.1: (-3, red, 7) and (-1, "", 23) are in buckets 421 and 372 of 1000."""
    encoder = CrossEncoder(columns=("a", "b", "c"), cardinality=1001, whole=("a", "c"), needs_all=True)
    columns: tuple[list[object], ...] = ([-3, -1, 1, 1], ["red", "", None, "red"], [7, 23, 1, None])
    assert encoded(encoder, *columns) == [422, 373, 0, 0]
    texts = ([str(v) for v in columns[0]], columns[1], ["07", "23", "1", "noon"])
    assert encoded(encoder, *texts) == [422, 373, 0, 0]


def test_a_cross_of_buckets_may_need_all() -> None:
    """TensorFlow 2.15.1: bucket 2 and u1 are in bucket 506 of 1000."""
    encoder = CrossEncoder(columns=("a", "b"), cardinality=1001, boundaries={"a": (18.0, 30.0)}, needs_all=True)
    assert encoded(encoder, [31.0, None, float("nan")], ["u1", "u1", "u1"]) == [507, 0, 0]


def test_a_cross_names_whole_columns_that_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="whole: 'x' is no column of the cross, or is cut into buckets"):
        CrossEncoder(columns=("a", "b"), cardinality=9, whole=("x",))
