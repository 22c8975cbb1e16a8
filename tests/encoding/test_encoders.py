"""The encoders of a dataset: raw rows to prepared columns by every kind, problems by name, and their file."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from recspec.base.errors import DataError
from recspec.data.encoding.encoder_kinds import (
    BucketEncoder,
    ClockEncoder,
    CrossEncoder,
    Encoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    Scaler,
    VocabularyEncoder,
)
from recspec.data.encoding.encoders import Encoders, raw_names
from recspec.data.encoding.hashing import cross, fingerprint64
from recspec.data.encoding.raw_columns import SMALL
from recspec.data.encoding.vocabulary import Vocabulary

NUMBERS = Vocabulary.of([30, 10, 20])

NAMES = Vocabulary.of(["b", "é", "a"])

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
    assert ENCODERS.encode(pa.table({"user_id": ["30"]}), ["user_id"])["user_id"].tolist() == [3]  # type: ignore[union-attr]


def test_every_problem_of_raw_rows_is_named() -> None:
    raw = pa.table({"users_id": [1, 2], "tags": ["a", "b"], "price": ["12", "cheap"], "speed": [np.inf, 1.0]})
    with pytest.raises(DataError) as caught:
        ENCODERS.encode(raw)
    assert "no column 'user_id' or 'userId' (did you mean 'users_id'?)" in str(caught.value)
    assert "column 'price': row 2 is 'cheap'; expected a number" in str(caught.value)
    assert "column 'speed': row 1 is infinite; expected a finite number" in str(caught.value)


def test_an_unknown_feature_and_a_number_have_no_vocabulary() -> None:
    assert ENCODERS.vocabulary_of("tags") is NAMES
    with pytest.raises(DataError, match=r"unknown feature 'tag' \(did you mean 'tags'\?\)"):
        ENCODERS.vocabulary_of("tag")
    with pytest.raises(DataError, match="'price' is a number; it has no vocabulary"):
        ENCODERS.vocabulary_of("price")


def test_a_damaged_or_missing_file_of_encoders_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"encoders\.json: no such file"):
        Encoders.load(tmp_path)
    (tmp_path / "encoders.json").write_text('{"a": {"kind": "scale", "mean": 1.0}, "b": {"kind": "guess"}}')
    with pytest.raises(DataError) as caught:
        Encoders.load(tmp_path)
    assert len(caught.value.problems) == 2


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


def test_every_kind_comes_back_from_its_file_and_is_pinned(tmp_path: Path) -> None:
    encoders = Encoders(
        {
            "word": HashEncoder(cardinality=9, separator=",", length=3),
            "age": BucketEncoder(boundaries=(18, 25, 30)),
            "pair": CrossEncoder(columns=("a", "b"), cardinality=5, boundaries={"a": (1.5,)}),
            "days": NumberEncoder(column="day", low=0, log1p=True),
            **ENCODERS.encoders,
        },
        {"user_id": NUMBERS, "tags": NAMES},
    )
    encoders.save(tmp_path)
    loaded = Encoders.load(tmp_path)
    assert loaded.encoders == encoders.encoders
    assert loaded.vocabulary_of("tags").values.equals(NAMES.values)
    assert (tmp_path / "encoders.json").read_text().startswith('{\n  "word": {\n    "kind": "hash",\n')
    assert json.loads((tmp_path / "encoders.json").read_text()) == {
        "word": {"kind": "hash", "cardinality": 9, "separator": ",", "length": 3},
        "age": {"kind": "bucket", "boundaries": [18, 25, 30]},
        "pair": {"kind": "cross", "columns": ["a", "b"], "cardinality": 5, "boundaries": {"a": [1.5]}},
        "days": {"column": "day", "low": 0, "log1p": True, "kind": "number"},
        "user_id": {"column": "userId", "kind": "vocabulary", "vocabulary": "user_id"},
        "tags": {"kind": "vocabulary", "vocabulary": "tags", "separator": "|", "length": 2},
        "price": {"kind": "scale", "mean": 10.0, "std": 2.0},
        "speed": {"kind": "number"},
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


def test_a_cross_is_made_of_raw_columns_or_the_features_that_are_them() -> None:
    made = Encoders(
        {"hour": HashEncoder(cardinality=9, column="h"), "cross": CrossEncoder(columns=("h", "place"), cardinality=9)}
    )
    assert [*raw_names(made, ["hour"])] == ["hour", "h"]
    assert [*raw_names(made, ["cross"])] == ["h", "place", "hour"]
    assert [*raw_names(made, ["elsewhere"])] == ["elsewhere"]
    assert [*raw_names(None, ["hour"])] == ["hour"]


# --- every kind -------------------------------------------------------------------------------------------------------


def test_numbers_are_scaled_and_a_missing_one_is_the_mean() -> None:
    scale = ScaleEncoder(mean=10.0, std=2.0)
    assert column(scale, [12, None, 8.0]) == [1.0, 0.0, -1.0]
    assert column(scale, ["12", "", "8"]) == [1.0, 0.0, -1.0]
    logarithm = ScaleEncoder(mean=1, std=2, log1p=True)
    assert column(logarithm, [0, np.e - 1, None]) == pytest.approx([-0.5, 0, 0])
    assert column(logarithm.model_copy(update={"missing": 0.0}), [None]) == pytest.approx([-0.5])


def test_a_constant_or_missing_column_can_be_scaled() -> None:
    for scaler in (Scaler.of(5.0, 0.0), Scaler.of(None, None), Scaler.of(5.0, float("nan"))):
        assert np.isfinite(column(ScaleEncoder(mean=scaler.mean, std=scaler.std), [5.0])).all()


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        (2.0**53 + 2, 1157.0),  # order numbers
        (1761001810123.25, 40.0),  # milliseconds since 1970
        (-1e9 - 0.37, 1.0),
        (2.0**53 + 2, 0.0),
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


MONDAY = 1_732_525_200  # 2024-11-25 09:00 UTC


@pytest.mark.parametrize(
    "spelled",
    [
        ["2024-11-25 09:00:30", "2024/11/25T09:59", "2024-11-25 11:00+02:00", "2024-11-25T09:00:00.123456789Z", ""],
        [MONDAY, MONDAY * 1_000, MONDAY * 10**6, MONDAY * 10**9, None],
        [str(MONDAY), f"{MONDAY}.5", f"{MONDAY}000", " 2024-11-25 09:00 UTC ", None],
        [dt.datetime(2024, 11, 25, 9, tzinfo=dt.UTC), *[dt.datetime(2024, 11, 25, 9, 59, tzinfo=dt.UTC)] * 3, None],
    ],
)
def test_the_hour_and_weekday_of_a_time_are_those_of_utc_however_it_is_written(spelled: list[object]) -> None:
    assert column(ClockEncoder(part="hour"), spelled) == [10, 10, 10, 10, 0]
    assert column(ClockEncoder(part="weekday"), spelled) == [1, 1, 1, 1, 0]


def test_a_time_has_the_format_that_its_encoder_names_and_what_is_none_is_named() -> None:
    german = ClockEncoder(part="weekday", format="%d.%m.%Y %H:%M")
    assert column(german, ["01.12.2024 23:59", " 02.12.2024 00:00"]) == [7, 1]
    assert column(ClockEncoder(part="hour"), ["2024-11-25", 5, 1e30][:1]) == [1], "a day begins at midnight"
    assert column(ClockEncoder(part="hour"), [5, 1e30]) == [0, 0]
    many = ["2024-11-25 09:00"] * 2 * SMALL
    with pytest.raises(DataError, match=rf"row {2 * SMALL + 1} is '25.11.2024'; expected a time such as 2026-11-28"):
        column(ClockEncoder(part="hour"), [*many, "25.11.2024"])
    with pytest.raises(DataError, match=r"row 1 is '2024-11-25'; expected a time written as %d.%m.%Y %H:%M"):
        column(german, ["2024-11-25"])


@pytest.mark.parametrize(("boundaries", "message"), [((2, 1), "1 follows 2"), ((2, 2), "2 follows 2")])
def test_boundaries_must_rise(boundaries: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=f"boundaries must rise; {message}"):
        BucketEncoder(boundaries=boundaries)
    with pytest.raises(ValidationError, match=f"boundaries must rise; {message}"):
        CrossEncoder(columns=("a", "b"), cardinality=9, boundaries={"a": boundaries})
    with pytest.raises(ValidationError, match=r"boundaries: unknown column 'ages' \(did you mean 'age'\?\)"):
        CrossEncoder(columns=("age", "job"), cardinality=9, boundaries={"ages": (1,)})
    with pytest.raises(ValidationError, match="whole: 'x' is no column of the cross, or is cut into buckets"):
        CrossEncoder(columns=("a", "b"), cardinality=9, whole=("x",))
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


def test_a_cross_is_hashed_from_its_raw_columns() -> None:
    raw = pa.table({"job": ["cook", "nurse", None, "cook"], "age": [17, 18, 40, None], "city": ["Rome"] * 4})
    found = CROSSED.encode(raw, ["age_x_job", "city_x_job"])
    jobs, cities = (fingerprint64(pa.array(texts)) for texts in (["cook", "nurse", "", "cook"], ["Rome"] * 4))
    for name, first in (("age_x_job", np.array([0, 1, 2, -1]).astype(np.uint64)), ("city_x_job", cities)):
        assert np.asarray(found[name]).tolist() == (1 + cross([first, jobs]) % np.uint64(999)).tolist()


def test_a_cross_of_many_rows_is_like_one_of_few() -> None:
    jobs = pa.array(["cook", "nurse", None])
    few = CROSSED.encode(pa.table({"job": jobs, "city": jobs}), ["city_x_job"])["city_x_job"]
    many = pa.concat_arrays([jobs] * SMALL)
    found = CROSSED.encode(pa.table({"job": many, "city": many}), ["city_x_job"])["city_x_job"]
    assert np.asarray(found).tolist() == np.asarray(few).tolist() * SMALL


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
    """TensorFlow 2.15.1: (-3, red, 7), (-1, "", 23), and bucket 2 and u1 are in buckets 421, 372 and 506 of 1000."""
    encoder = CrossEncoder(columns=("a", "b", "c"), cardinality=1001, whole=("a", "c"), needs_all=True)
    columns: tuple[list[object], ...] = ([-3, -1, 1, 1], ["red", "", None, "red"], [7, 23, 1, None])
    assert encoded(encoder, *columns) == [422, 373, 0, 0]
    texts = ([str(v) for v in columns[0]], columns[1], ["07", "23", "1", "noon"])
    assert encoded(encoder, *texts) == [422, 373, 0, 0]
    encoder = CrossEncoder(columns=("a", "b"), cardinality=1001, boundaries={"a": (18.0, 30.0)}, needs_all=True)
    assert encoded(encoder, [31.0, None, float("nan")], ["u1", "u1", "u1"]) == [507, 0, 0]
