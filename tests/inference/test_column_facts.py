"""Facts of columns: kinds, values and ranges, from values and from encoders."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from recspec.data.encoding import (
    BucketEncoder,
    CrossEncoder,
    Encoders,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    VectorEncoder,
    Vocabulary,
    VocabularyEncoder,
)
from recspec.inference.raw_columns import (
    LONGEST_IMAGE,
    MOST_VALUES,
    ColumnFacts,
    facts_of_encoder,
    facts_of_values,
    shown_values,
)

PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="

COLUMNS: dict[str, tuple[Any, ColumnFacts]] = {
    "few texts": (pa.array(["b", "a", "a", None, "", "b", "a"]), ColumnFacts("x", "choice", ("a", "b"))),
    "a dictionary of texts": (
        pa.array(["b", "a", "a", "b"]).dictionary_encode(),
        ColumnFacts("x", "choice", ("a", "b")),
    ),
    "texts that are hardly twice there": (pa.array(["a", "b", "c", "a", "d"]), ColumnFacts("x", "text")),
    "many texts": (pa.array([str(n % (MOST_VALUES + 1)) for n in range(1000)]), ColumnFacts("x", "text")),
    "long texts": (pa.array(["a" * 101] * 9), ColumnFacts("x", "text")),
    "no text": (pa.array(["", None], pa.string()), ColumnFacts("x", "other")),
    "nothing": (pa.nulls(3), ColumnFacts("x", "other")),
    "lists in one text": (
        pa.array(["new|eco", "eco", "", "new|eco", "eco"]),
        ColumnFacts("x", "choices", ("eco", "new")),
    ),
    "lists": (pa.array([["a"], ["a", "b"], None, ["b", "a"]]), ColumnFacts("x", "choices", ("a", "b"))),
    "a vector": (pa.array([[0.5, 1.0]] * 3), ColumnFacts("x", "other")),
    "whole numbers": (pa.array([3, None, 7]), ColumnFacts("x", "number", (), 3.0, 7.0, is_whole=True)),
    "numbers": (pa.array([0.5, float("nan"), 7.0]), ColumnFacts("x", "number", (), 0.5, 7.0)),
    "decimals": (pa.array([Decimal("1.25"), Decimal("9.50")]), ColumnFacts("x", "number", (), 1.25, 9.5)),
    "no number": (pa.array([float("nan"), float("inf")]), ColumnFacts("x", "other")),
    "truths": (pa.array([True, None]), ColumnFacts("x", "truth")),
    "truths as numbers": (pa.array([1, 0, 1]), ColumnFacts("x", "truth")),
    "times": (
        pa.array([datetime(2024, 3, 1, 23, tzinfo=UTC), datetime(2023, 1, 2, tzinfo=UTC)]),
        ColumnFacts("x", "date", (), "2023-01-02", "2024-03-01"),
    ),
    "days": (pa.array([date(2024, 3, 1), None]), ColumnFacts("x", "date", (), "2024-03-01", "2024-03-01")),
    "days as texts": (
        pa.array(["2024-03-01", "2023-01-02 10:00", None]),
        ColumnFacts("x", "date", (), "2023-01-02", "2024-03-01"),
    ),
    "addresses of pictures": (
        pa.array(["https://a.example/1.PNG", "http://b.example/2.jpg?w=9", PIXEL.replace("gif", "png")][:2]),
        ColumnFacts("x", "image"),
    ),
    "other addresses": (pa.array(["https://a.example/1", "https://a.example/2"]), ColumnFacts("x", "text")),
    "a script": (
        pa.array(["javascript:alert(1)//.png"] * 2),
        ColumnFacts("x", "choice", ("javascript:alert(1)//.png",)),
    ),
    "bytes": (pa.array([b"a", b"b"]), ColumnFacts("x", "other")),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_the_values_of_a_column_tell_its_kind(case: str) -> None:
    column, expected = COLUMNS[case]
    assert facts_of_values("x", column) == expected
    assert facts_of_values("x", pa.chunked_array([column.slice(0, 1), column.slice(1)])) == expected


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("image", ["https://a.example/1", PIXEL], "image"),
        ("Image_URL", ["https://a.example/1", None], "image"),
        ("poster", ["ftp://a.example/1.png", "https://a.example/2.png"], "text"),
        ("image", ["data:image/svg+xml;base64,PHN2Zz4=", PIXEL], "text"),
        ("image", ["data:text/html;base64,AAAA", PIXEL], "text"),
        ("image", ["/pictures/1.png", "/pictures/2.png"], "text"),
        ("homepage", ["https://a.example/1", "https://a.example/2"], "text"),
    ],
)
def test_pictures_are_addresses_under_a_known_name_or_with_a_known_ending(
    name: str, values: list[str | None], kind: str
) -> None:
    assert facts_of_values(name, pa.array(values)).kind == kind


def test_values_are_shown_within_limits() -> None:
    def shown(kind: Any, *values: Any) -> list[Any]:
        return shown_values(ColumnFacts("x", kind), values)

    assert shown("text", "a" * 301, None, "b") == ["a" * 299 + "…", None, "b"]
    assert shown("number", 1.5, float("nan"), Decimal("2.5"), 3) == [1.5, None, 2.5, 3]
    assert shown("truth", 1, 0, None, True) == [True, False, None, True]
    assert shown("choices", "a||b", ["c"] * 30, "", None) == [["a", "b"], ["c"] * 20, [], None]
    assert shown("date", date(2024, 1, 2), "2024-01-03") == ["2024-01-02", "2024-01-03"]
    long = PIXEL + "A" * LONGEST_IMAGE
    assert shown("image", PIXEL, "javascript:alert(1)", "//a.example/1.png", 5, long, "HTTPS://a.example/1") == [
        PIXEL,
        None,
        None,
        None,
        None,
        "HTTPS://a.example/1",
    ]
    assert shown("text", b"\xff") == [None]


ENCODED: dict[str, tuple[Callable[[], Any], ColumnFacts]] = {
    "few values": (
        lambda: VocabularyEncoder(vocabulary="few"),
        ColumnFacts("x", "choice", ("a", "b"), example="a"),
    ),
    "few values of a list": (
        lambda: VocabularyEncoder(vocabulary="few", length=2),
        ColumnFacts("x", "choices", ("a", "b")),
    ),
    "many values": (lambda: VocabularyEncoder(vocabulary="many"), ColumnFacts("x", "text", example="0")),
    "many numbers": (
        lambda: VocabularyEncoder(vocabulary="numbers"),
        ColumnFacts("x", "number", is_whole=True, example=0),
    ),
    "hashed": (lambda: HashEncoder(cardinality=9), ColumnFacts("x", "text")),
    "hashed numbers": (lambda: HashEncoder(cardinality=9, whole=True), ColumnFacts("x", "number", is_whole=True)),
    "buckets": (lambda: BucketEncoder(boundaries=(1.0,)), ColumnFacts("x", "number")),
    "scaled": (
        lambda: ScaleEncoder(mean=0.42345, std=1.0, low=0.0, high=1.0),
        ColumnFacts("x", "number", (), 0.0, 1.0, example=0.423),
    ),
    "hours": (
        lambda: ScaleEncoder(mean=11.5454, std=7.0, low=0.0, high=23.0),
        ColumnFacts("x", "number", (), 0.0, 23.0, example=12.0),
    ),
    "counts": (  # e^2 - 1 = 6.39
        lambda: ScaleEncoder(mean=2.0, std=1.0, log1p=True),
        ColumnFacts("x", "number", example=6.39),
    ),
    "numbers as they are": (lambda: NumberEncoder(), ColumnFacts("x", "number")),
    "a list of numbers": (lambda: NumberEncoder(length=3), ColumnFacts("x", "other")),
    "a vector": (lambda: VectorEncoder(length=3), ColumnFacts("x", "other")),
    "a part of a cross": (
        lambda: CrossEncoder(columns=("x", "y"), cardinality=9, whole=("x",)),
        ColumnFacts("x", "number", is_whole=True),
    ),
}


@pytest.mark.parametrize("case", ENCODED)
def test_an_encoder_tells_what_a_request_may_hold(case: str) -> None:
    encoder, expected = ENCODED[case]
    words = {"few": ["a", "b"], "many": [str(n) for n in range(500)], "numbers": list(range(500))}
    vocabularies = {name: Vocabulary(pa.array(values)) for name, values in words.items()}
    feature = "crossed" if "cross" in case else "x"
    assert facts_of_encoder("x", Encoders({feature: encoder()}, vocabularies)) == expected


def test_a_column_without_an_encoder_is_a_text() -> None:
    assert facts_of_encoder("x", None, is_required=True) == ColumnFacts("x", "text", is_required=True)
    assert facts_of_encoder("x", Encoders({})) == ColumnFacts("x", "text")
