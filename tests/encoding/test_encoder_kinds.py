"""Every kind of encoder: hashes, buckets, crosses, numbers, and the ids of imported models."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from recspec.data.encoding.encoder_kinds import (
    BucketEncoder,
    CrossEncoder,
    Encoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    Scaler,
    VocabularyEncoder,
)
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.hashing import cross, fingerprint64
from recspec.data.encoding.raw_columns import SMALL
from recspec.data.encoding.vocabulary import Vocabulary


def test_numbers_are_scaled_and_a_missing_one_is_the_mean() -> None:
    scale = ScaleEncoder(mean=10.0, std=2.0)
    assert column(scale, [12, None, 8.0]) == [1.0, 0.0, -1.0]
    assert column(scale, ["12", "", "8"]) == [1.0, 0.0, -1.0]


def test_a_number_beyond_float32_is_infinite_without_a_warning() -> None:
    assert column(ScaleEncoder(mean=0.0, std=1.0), [1e39, -1e39]) == [np.inf, -np.inf]


def test_a_constant_or_missing_column_can_be_scaled() -> None:
    for scaler in (Scaler.of(5.0, 0.0), Scaler.of(None, None), Scaler.of(5.0, float("nan"))):
        assert np.isfinite(column(ScaleEncoder(mean=scaler.mean, std=scaler.std), [5.0])).all()


def test_sums_in_another_order_give_the_same_scaler() -> None:
    assert Scaler.of(0.1 + 0.2 + 0.3, 1.0) == Scaler.of(0.3 + 0.2 + 0.1, 1.0)


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        (2.0**53 + 2, 1157.0),  # order numbers
        (1761001810123.25, 40.0),  # milliseconds since 1970
        (-1e9 - 0.37, 1.0),
        (2.0**53 + 2, 0.0),
        (123456789012.0, 1e12),
        (float("inf"), float("nan")),
    ],
)
def test_a_mean_that_is_large_beside_the_deviation_keeps_its_digits(mean: float, std: float) -> None:
    scaler = Scaler.of(mean, std)
    assert scaler.mean == mean or abs(scaler.mean - mean) <= 1e-4 * scaler.std
    assert Scaler.of(1234.56789012, 1.0).mean == 1234.56789  # 9 digits are enough here


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
    assert column(WORDS, [*values, None]) == [
        *column(WORDS, values[:50]) * (SMALL // 50),
        *column(WORDS, values[: SMALL % 50]),
        0,
    ]


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
