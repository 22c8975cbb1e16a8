"""The encoders of a dataset: raw rows to prepared columns, problems by name, and the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recspec.base.errors import DataError
from recspec.data.encoding.encoder_kinds import (
    BucketEncoder,
    CrossEncoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
)
from recspec.data.encoding.encoders import Encoders, raw_names
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


def test_a_column_may_bear_the_features_name() -> None:
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


AGE = BucketEncoder(boundaries=(18, 25, 30))


def column(encoder: object, values: object) -> list[float]:
    """A column encoded by one encoder, as plain numbers."""
    found = Encoders({"x": encoder}).encode_column("x", values)  # type: ignore[dict-item]
    assert isinstance(found, np.ndarray)
    return found.tolist()  # type: ignore[no-any-return]


CROSSED = Encoders(
    {
        "age_x_job": CrossEncoder(columns=("age", "job"), cardinality=1000, boundaries={"age": (18, 25)}),
        "job": VocabularyEncoder(vocabulary="job", column="job"),
        "city_id": VocabularyEncoder(vocabulary="city_id", column="city"),
        "city_x_job": CrossEncoder(columns=("city", "job"), cardinality=1000),
    },
    {"job": Vocabulary.of(["cook", "nurse"]), "city_id": Vocabulary.of(["Rome"])},
)


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


def test_a_cross_is_made_of_raw_columns_or_the_features_that_are_them() -> None:
    made = Encoders(
        {"hour": HashEncoder(cardinality=9, column="h"), "cross": CrossEncoder(columns=("h", "place"), cardinality=9)}
    )
    assert [*raw_names(made, ["hour"])] == ["hour", "h"]
    assert [*raw_names(made, ["cross"])] == ["h", "place", "hour"]
    assert [*raw_names(made, ["elsewhere"])] == ["elsewhere"]
    assert [*raw_names(None, ["hour"])] == ["hour"]
