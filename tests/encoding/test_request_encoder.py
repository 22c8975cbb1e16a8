"""The quick ways from raw values to ids and numbers: what they answer, the encoders of whole columns answer too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recspec.base.errors import DataError
from recspec.data.encoding import encoders as encoding
from recspec.data.encoding.encoder_kinds import (
    BucketEncoder,
    CrossEncoder,
    Encoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
)
from recspec.data.encoding.encoders import Encoders, RequestEncoder
from recspec.data.encoding.raw_columns import SMALL, as_array
from recspec.data.encoding.raw_values import (
    MISSING_NUMBERS,
    UNKNOWN,
    KnownValues,
    cross_ids,
    encode_ids,
    encode_numbers,
    number,
    numbers_of,
    whole,
)
from recspec.data.encoding.vocabulary import Vocabulary
from recspec.feature_spec.signature import Port
from tests.closeness import assert_close

VOCABULARIES = {"texts": Vocabulary.of(["red", "green", "42", " b"]), "numbers": Vocabulary.of([7, 42, -3, 10**12])}
ENCODERS: dict[str, Encoder] = {
    "text": VocabularyEncoder(vocabulary="texts"),
    "text, blanks": VocabularyEncoder(vocabulary="texts", strip=True, missing_values=("?",), missing="red"),
    "text, buckets": VocabularyEncoder(vocabulary="texts", buckets=5),
    "number's id": VocabularyEncoder(vocabulary="numbers", missing_values=("-1",), otherwise=9),
    "hash": HashEncoder(cardinality=1000),
    "hash, whole": HashEncoder(cardinality=50, whole=True, missing_values=("", "-1")),
    "hash, blanks": HashEncoder(cardinality=50, strip=True, missing_values=("?", "007", "--5")),
    "number": NumberEncoder(),
    "number, cut": NumberEncoder(low=-2, high=50, outside=1.5, missing=3.0, log1p=True),
    "scale": ScaleEncoder(mean=3.0, std=1.7),
    "scale, log": ScaleEncoder(mean=0.3, std=2.0, log_plus=1.0),
    "scale, marked": ScaleEncoder(mean=3.0, std=1.7, missing_values=("-1",)),
    "bucket": BucketEncoder(boundaries=(-1.0, 2.5, 42.0)),
}
TEXTS = st.sampled_from(
    ["red", "green", "42", "042", "42.0", " b", " red ", "?", "", "-1", "7", "007", "blue", "ü" * 20]
)
WHOLE = st.sampled_from([0, 1, -1, 7, 42, -3, 10**12, 2**53, -(2**62), 2**63 - 1])
NUMBERS = st.sampled_from([0.0, -0.0, 1.5, -1.0, 42.0, 1e300, float("nan"), -7.25])
VALUES = st.one_of(
    st.lists(st.one_of(st.none(), TEXTS), min_size=1, max_size=6),
    st.lists(st.one_of(st.none(), WHOLE), min_size=1, max_size=6),
    st.lists(st.one_of(st.none(), NUMBERS, WHOLE), min_size=1, max_size=6),
    st.lists(st.one_of(st.none(), st.booleans()), min_size=1, max_size=3),
)


def port(name: str) -> Port:
    is_id = not isinstance(ENCODERS[name], (NumberEncoder, ScaleEncoder))
    return Port(name, "int64" if is_id else "float32", 1, "item", 1000 if is_id else None)


def slowly(name: str, values: Sequence[Any]) -> Any:
    encoders = Encoders(ENCODERS, VOCABULARIES)
    found = encoders.encode(pa.table({name: pa.array(values)}), [name])[name]
    assert not isinstance(found, tuple)
    return found.astype(port(name).dtype)


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=40, deadline=None)
@given(columns=st.lists(VALUES, min_size=1, max_size=3))
def test_it_answers_as_the_encoders_do_or_leaves_it_to_them(name: str, columns: list[list[Any]]) -> None:
    quick = RequestEncoder(Encoders(ENCODERS, VOCABULARIES), [port(name)])
    assert (name in quick.features) == (name != "scale, marked")
    for values in columns:  # one after the other: what is remembered must not differ
        with np.errstate(over="ignore"):
            found = quick.columns({name: values})
            if found:
                assert found[name].dtype == port(name).dtype
                assert_close(found[name][:, 0], slowly(name, values))


@pytest.mark.parametrize("name", sorted(set(ENCODERS) - {"scale, marked"}))
def test_clean_values_need_no_other_way(name: str) -> None:
    quick = RequestEncoder(Encoders(ENCODERS, VOCABULARIES), [port(name)])
    numbers = not isinstance(ENCODERS[name], (VocabularyEncoder, HashEncoder))
    for values in ([3.5, None, 2], [1.0]) if numbers else (["red", None, "?"], [42, None, 5], [1], [None, "new"]):
        found = quick.columns({name: values})
        assert found is not None, values
        assert_close(found[name][:, 0], slowly(name, values))


@pytest.mark.parametrize("values", [[True], [[1]], [{}], [1, "1"], [1.5], [None], ["\ud800"], ["x", "y" * 257]])
def test_ids_that_are_unusual_are_left_to_the_encoders(values: list[Any]) -> None:
    quick = RequestEncoder(Encoders(ENCODERS, VOCABULARIES), [port("hash")])
    assert quick.columns({"hash": values}) is None
    assert quick.columns({"hash": ["x" * 256]}) is not None


@pytest.mark.parametrize("values", [[True], ["1"], [float("inf")], [2**60], [10**400], [[1.0]]])
def test_numbers_that_are_unusual_are_left_to_the_encoders(values: list[Any]) -> None:
    for name in ("scale", "number, cut"):
        assert RequestEncoder(Encoders(ENCODERS, VOCABULARIES), [port(name)]).columns({name: values}) is None


@pytest.mark.parametrize("strict", [False, True])
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 3), numbers=st.lists(st.one_of(NUMBERS, WHOLE), min_size=24, max_size=24))
def test_features_together_are_encoded_as_each_alone(strict: bool, rows: int, numbers: list[Any]) -> None:
    more: dict[str, Encoder] = {
        "scale, wide": ScaleEncoder(mean=-40.0, std=900.0),
        "number, low": NumberEncoder(low=-1.0, outside=None),
        "number, high": NumberEncoder(high=9.0, outside=2.0),
        "number, other": NumberEncoder(high=3.0),
    }
    encoders: dict[str, Encoder] = {
        **{name: each for name, each in ENCODERS.items() if not isinstance(each, (VocabularyEncoder, HashEncoder))},
        **more,
    }
    del encoders["scale, marked"]
    ports = [Port(name, "int64" if name == "bucket" else "float32", 1, "item") for name in encoders]
    columns = {name: numbers[place : place + rows] for place, name in enumerate(encoders)}
    with np.errstate(over="ignore"):
        together = RequestEncoder(Encoders(encoders, {}), ports).columns(columns, strict=strict)
        alone = [RequestEncoder(Encoders(encoders, {}), [port]).columns(columns, strict=strict) for port in ports]
    if together is None:  # a whole number beside a huge one is left to the encoders too
        assert None in alone or max(map(abs, numbers)) >= encoding.WHOLE or np.isnan(numbers).any()
        return
    for each in alone:
        assert each is not None
        for name, values in each.items():
            assert together[name].dtype == values.dtype
            assert_close(together[name], values)


def test_a_missing_column_is_left_to_the_encoders_and_another_name_is_known() -> None:
    encoders = Encoders(
        {"size": NumberEncoder(column="raw_size"), "colour": HashEncoder(cardinality=9, column="c")}, {}
    )
    ports = [Port("size", "float32", 1, "item"), Port("colour", "int64", 1, "item", 9)]
    quick = RequestEncoder(encoders, ports)
    assert quick.sources == ("size", "raw_size", "colour", "c")
    found = quick.columns({"raw_size": [2.0], "c": ["x"]})
    assert found is not None
    assert found["size"].shape == found["colour"].shape == (1, 1)
    assert quick.columns({"raw_size": [2.0]}) is None
    assert quick.columns({"c": ["x"]}) is None


def test_lists_and_features_without_an_encoder_are_no_part_of_it() -> None:
    encoders = Encoders({"tags": HashEncoder(cardinality=9, length=2), "past": NumberEncoder(length=3)}, {})
    ports = [Port(name, "int64", 2, "item", 9, is_list=True) for name in ("tags", "past", "unheard")]
    assert RequestEncoder(encoders, ports).features == frozenset()


@pytest.mark.parametrize("name", ["hash", "text", "number's id"])
def test_what_is_remembered_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgetting in the middle of a call changes nothing, and unknown values are not remembered."""
    monkeypatch.setattr(encoding, "REMEMBERED", 2)
    quick = RequestEncoder(Encoders(ENCODERS, VOCABULARIES), [port(name)])
    for start in range(0, 60, 3):
        values: list[Any] = [42, *range(start, start + 4)]
        values = [str(value) for value in values] if name == "text" else values
        found = quick.columns({name: values})
        assert found is not None
        assert_close(found[name][:, 0], slowly(name, values))
        known = quick._ids[0][2]._known
        assert max(map(len, known.values())) <= 6
        assert UNKNOWN not in {id_ for ids in known.values() for id_ in ids.values()}


def test_numbers_that_there_is_something_to_tell_of_are_left_to_the_encoders() -> None:
    for name, usual, strange in (
        ("scale", 170.0, 1e6),
        ("scale", -160.0, -1e6),
        ("scale, log", 5.0, 1e90),
        ("number, cut", 50.0, 51.0),
        ("number, cut", -2.0, -3.0),
    ):
        quick = RequestEncoder(Encoders(ENCODERS, VOCABULARIES), [port(name)])
        assert quick.columns({name: [usual]}, strict=True) is not None, name
        assert quick.columns({name: [usual, strange]}, strict=True) is None, name
        assert quick.columns({name: [usual, strange]}) is not None, name


# --- the rules for single values --------------------------------------------------------------------------------------


ALL = Encoders(ENCODERS, VOCABULARIES)
IDS = [name for name, encoder in ENCODERS.items() if isinstance(encoder, (VocabularyEncoder, HashEncoder))]
SCALARS = [name for name in ENCODERS if name not in IDS]
SPELLED = st.sampled_from(
    ["1", "+1", " .5 ", "5.", "1E5", "-0", "", "nan", "-1", "TRUE", "false ", "7.25", *MISSING_NUMBERS]
)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("values", [TEXTS, WHOLE], ids=["texts", "whole numbers"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_values_get_the_ids_that_a_column_gives_them(
    name: str, values: st.SearchStrategy[object], data: st.DataObject
) -> None:
    given_values = data.draw(st.lists(st.one_of(st.none(), values), min_size=1, max_size=6))
    kind = pa.string() if values is TEXTS else pa.int64()
    found = ALL.encode_values(name, given_values, are_texts=values is TEXTS)
    assert found.tolist() == np.asarray(ALL.encode_column(name, pa.array(given_values, kind))).tolist()


@pytest.mark.parametrize("name", IDS)
def test_values_get_the_ids_that_a_long_column_of_many_texts_gives_them(name: str) -> None:
    texts = ["red", " red ", "?", "", None, "042", "42", "-1", "new", *(f"x{place}" for place in range(SMALL + 1))]
    column = np.asarray(ALL.encode_column(name, pa.array(texts)))
    assert ALL.encode_values(name, texts[:40], are_texts=True).tolist() == column[:40].tolist()


@pytest.mark.parametrize("name", SCALARS)
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(SPELLED, min_size=1, max_size=6))
def test_texts_get_the_numbers_that_a_column_gives_them(name: str, texts: list[str]) -> None:
    encoder = ENCODERS[name]
    found = encode_numbers(encoder, numbers_of(encoder, texts))
    expected = np.asarray(ALL.encode_column(name, texts))
    assert found.astype(expected.dtype).tolist() == expected.tolist()


@pytest.mark.parametrize("needs_all", [False, True])
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.none() | TEXTS, st.none() | TEXTS, SPELLED), min_size=1, max_size=5))
def test_a_cross_of_values_is_that_of_columns(rows: list[tuple[str | None, str | None, str]], needs_all: bool) -> None:
    columns = ("text", "whole", "bucket")
    encoder = CrossEncoder(
        columns=columns,
        cardinality=500,
        whole=("whole",),
        boundaries={"bucket": (0.0, 5.0)},
        needs_all=needs_all,
        strip=True,
        missing_values=("?", "-1"),
    )
    parts = [[*values] for values in zip(*rows, strict=True)]
    table = pa.table({name: pa.array(part, pa.string()) for name, part in zip(columns, parts, strict=True)})
    expected = Encoders({"cross": encoder}).encode(table)["cross"]
    assert cross_ids(encoder, parts).tolist() == np.asarray(expected).tolist()


def test_known_values_have_ids_from_one_on() -> None:
    assert KnownValues(["b", "a"]).find(["a", None, "c", "b"]).tolist() == [2, 0, 0, 1]
    assert (whole("042"), whole("-7.00"), whole("True"), whole("4.5"), whole("9" * 19)) == (42, -7, 1, None, None)
    numbers = KnownValues([7, 5])
    assert (len(numbers), numbers.is_numeric, KnownValues(["7"]).is_numeric) == (2, True, False)
    assert encode_ids(VocabularyEncoder(vocabulary="x"), [" 5", "07", "x", None], numbers).tolist() == [2, 1, 0, 0]


@pytest.mark.parametrize("text", ["1" * 1_000_000, "1." + "1" * 1_000_000, "1" * 999 + "." * 1_000_000])
def test_a_text_is_read_as_a_number_in_time_that_grows_with_its_length(text: str) -> None:
    """If the time grew with the square of the length, these million characters would take hours."""
    with pytest.raises(ValueError, match=r"1' is no number; expected such as 1\.5|\.' is no number"):
        number(f"{text}x")


def test_a_text_that_is_no_number_is_refused_and_an_infinite_one_by_its_row() -> None:
    assert number(" 1.5 ") == 1.5
    assert np.isnan(number("N/A"))
    with pytest.raises(ValueError, match=r"'1_000' is no number; expected such as 1\.5"):
        number("1_000")
    with pytest.raises(ValueError, match="row 2 is infinite; expected a finite number"):
        numbers_of(NumberEncoder(), ["1", "inf"])
    with pytest.raises(DataError, match="row 2 is infinite; expected a finite number"):
        Encoders({"x": ScaleEncoder(mean=0, std=1)}).encode_column("x", ["1", "inf"])


@pytest.mark.parametrize("values", [["\ud800"], ["a", 5, "x\udcff"], ["\ud800", None]])
def test_a_text_that_utf_8_can_not_hold_is_named(values: list[str | int | None]) -> None:
    with pytest.raises(DataError, match=r"'x?\\ud...' is no UTF-8 text; write it in UTF-8"):
        as_array(values)
