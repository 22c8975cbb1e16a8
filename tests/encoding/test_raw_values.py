"""The rules for single values: a few values get the ids and numbers that a column of them gets, of any length."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recspec.base.errors import DataError
from recspec.data.encoding.encoder_kinds import (
    CrossEncoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
)
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.raw_columns import SMALL, as_array
from recspec.data.encoding.raw_values import (
    MISSING_NUMBERS,
    KnownValues,
    cross_ids,
    encode_ids,
    encode_numbers,
    number,
    numbers_of,
    whole,
)
from tests.encoding.test_request_encoder import ENCODERS, TEXTS, VOCABULARIES, WHOLE

ALL = Encoders(ENCODERS, VOCABULARIES)
IDS = [name for name, encoder in ENCODERS.items() if isinstance(encoder, (VocabularyEncoder, HashEncoder))]
NUMBERS = [name for name in ENCODERS if name not in IDS]
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


@pytest.mark.parametrize("name", NUMBERS)
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
    numbers = KnownValues([7, 5])
    assert (len(numbers), numbers.is_numeric, KnownValues(["7"]).is_numeric) == (2, True, False)
    assert encode_ids(VocabularyEncoder(vocabulary="x"), [" 5", "07", "x", None], numbers).tolist() == [2, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "found"),
    [("042", 42), ("-7.00", -7), (" 1 ", 1), ("True", 1), ("4.5", None), ("1e1", None), ("-", None), ("9" * 19, None)],
)
def test_a_whole_number_is_one_however_it_is_spelled(text: str, found: int | None) -> None:
    assert whole(text) == found


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
