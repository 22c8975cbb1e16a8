"""Filter expressions: what they mean, row by row, and what is refused."""

from __future__ import annotations

import operator
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recspec.base.errors import RequestError
from recspec.inference import Filter, filters
from recspec.inference.filters import TOKEN, TestedColumn, evaluate

SHOP = pa.table(
    {
        "price": [10.0, 49.99, None, 50.0, float("nan")],
        "small": pa.array([0.1, 0.2, None, 1, 2], pa.float32()),
        "category": ["shoes", "socks", None, "it's", "Shoes"],
        "in_stock": [True, False, True, None, True],
        "flag": [1, 0, 1, 1, None],
        "count": pa.array([2**53 + 1, 2**53, 0, -1, 5], pa.int64()),
        "spelled": ["1", " 2.5 ", "n/a", None, "true"],
        "tags": [["a", "b"], [], None, ["c", None], ["a"]],
        "sizes": pa.array([[1, 2], [3], None, [], [2]], pa.list_(pa.int32())),
        "since": [date(2024, 1, 31), date(2023, 5, 1), None, date(2024, 2, 1), date(1969, 12, 31)],
        "at": pa.array([0, 1_700_000_000, None, 3, 4], pa.timestamp("s", "UTC")),
        "two words": ["x", "y", "z", "x", None],
        "code": pa.array(["p", "q", "p", None, "q"]).dictionary_encode(),
        "nothing": pa.nulls(5),
        "odd": [{"a": 1}] * 5,
    }
)


def kept(text: str, table: pa.Table = SHOP) -> list[int]:
    """The rows (from 0) that a filter keeps."""

    def column(name: str) -> TestedColumn:
        if name not in table.column_names:
            raise RequestError(f"no column '{name}'")
        return TestedColumn(table.column(name))

    return np.flatnonzero(evaluate(Filter.parse(text), column, table.num_rows)).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("price < 50", [0, 1]),
        ("price <= 50 and in_stock", [0]),
        ("in_stock", [0, 2, 4]),
        ("not in_stock", [1, 3]),
        ("count", [0, 1, 4]),  # a stock of -1 is oversold
        ("in_stock == false", [1]),
        ("flag", [0, 2, 3]),
        ("flag = true", [0, 2, 3]),
        ("price != 50", [0, 1]),
        ("price <> 50", [0, 1]),
        ("not (price < 50)", [2, 3, 4]),
        ("price is missing", [2, 4]),
        ("price is not null", [0, 1, 3]),
        ("PRICE_ is missing or price == -5", None),
        ("small == 0.1", [0]),
        ("small <= 0.2", [0, 1]),
        ("count == 9007199254740993", [0]),
        ("count > 99999999999999999999", []),
        ("count < 1e300", [0, 1, 2, 3, 4]),
        ("category in ('shoes', \"it's\")", [0, 3]),
        ("category not in ('shoes', 'it''s')", [1, 4]),
        ("category < 'b'", [4]),
        ("category contains 'hoe'", [0, 4]),
        ("category not contains 'hoe'", [1, 3]),
        ("spelled >= 1", [0, 1, 4]),
        ("spelled in (2.5, 1)", [0, 1, 4]),
        ("spelled == '1'", [0]),
        ("spelled", [0, 1, 4]),
        ("tags contains 'a'", [0, 4]),
        ("tags not contains 'a'", [1, 3]),
        ("tags is missing", [2]),
        ("sizes contains 2", [0, 4]),
        ("since >= '2024-01-31'", [0, 3]),
        ("since < '1970-01-01T00:00:00+00:00'", [4]),
        ("at > '2023-11-14 23:13:19+01:00'", [1]),
        ("at > '2023-11-14 22:13:20'", []),
        ("`two words` == 'x' AND NOT flag = 0", [0, 3]),
        ("code == 'p' or code == 'q' and price > 0", [0, 1, 2]),
        ("(code == 'p' or code == 'q') and price > 0", [0, 1]),
        ("nothing == 3 or nothing", []),
        ("nothing is missing", [0, 1, 2, 3, 4]),
        ("not not in_stock", [0, 2, 4]),
    ],
)
def test_what_a_filter_keeps(text: str, rows: list[int] | None) -> None:
    if rows is None:
        with pytest.raises(RequestError, match="no column 'PRICE_'"):
            kept(text)
    else:
        assert kept(text) == rows


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "filter, character 1: the filter ends; expected a column, 'not' or '('"),
        ("price <", "filter, character 8: the filter ends; expected a number, true, false, or a text in quotes"),
        ("price < fifty", "character 9: found 'fifty'; expected a number, true, false, or a text in quotes: 'fifty'"),
        ("price < 50 and", "character 15: the filter ends; expected a column, 'not' or '('"),
        ("(price < 50", "character 12: the filter ends; expected ')'"),
        ("price < 50)", "character 11: found ')'; expected 'and', 'or' or the end"),
        ("10 < price", "character 1: found '10'; expected a column first, as in `price < 50`"),
        ("price > 10 < 20", "character 12: found '<'; expected 'and' or 'or'; write a test of two bounds as"),
        ("price 50", "character 7: found '50'; expected 'and', 'or' or the end"),
        ("price in 5", "character 10: found '5'; expected '('"),
        ("price in ()", "character 11: found ')'; expected a number"),
        ("price not 5", "character 11: found '5'; expected 'in' or 'contains'"),
        ("price is 5", "character 10: found '5'; expected 'missing'"),
        ("category == 'shoes", "character 13: \"'\" can't be read; expected a closing ' after it"),
        ("category == '\udcff'", "filter, character 14: '\\udcff' is no UTF-8 text; write it in UTF-8"),
        ("price ; 1", "character 7: ';' can't be read; expected a column, a value or an operator"),
        ("price < 5x", "character 9: '5' can't be read"),
        ("price < " + "1" * 9_900 + "x", "character 9: '1' can't be read"),
        ("price < 1e999", "character 9: 1e999 is too large a number"),
        ("not " * 60 + "in_stock", "more than 50 nested parentheses and nots; write it flatter"),
        ("price in (" + "1," * 1_500 + "1)", "more than 1,000 values; give a list of allowed items instead"),
        ("x" * 10_001, "the filter has 10,001 characters; expected at most 10,000"),
        ("__import__('os')", "character 11: found '('; expected 'and', 'or' or the end"),
        (
            "category < 5",
            "filter: character 1: column 'category' holds texts such as 'shoes'; write the value in quotes",
        ),
        ("category", "holds texts such as 'shoes'; compare it, as in `category == 'VALUE'`"),
        ("price == 'x'", "column 'price' holds numbers, and 'x' is a text; write it without quotes"),
        ("in_stock == 'x'", "column 'in_stock' holds true and false, and 'x' is a text"),
        ("tags == 'a'", "column 'tags' holds lists; test it by `tags contains VALUE`"),
        ("tags contains 5", "column 'tags' holds texts such as 'a'; write the value in quotes"),
        ("category contains 5", "column 'category' holds texts; write the part to find in quotes"),
        ("price contains 5", "column 'price' holds double, neither lists nor texts; compare it with == or in"),
        ("since < 5", "column 'since' holds times, and 5 is none; expected a text such as '2024-01-31'"),
        ("since < 'soon'", "column 'since' holds times, and 'soon' is none"),
        ("at", "column 'at' holds times; compare it, as in `at > '2024-01-31'`"),
        ("odd == 1", "column 'odd' holds struct<a: int64>, which no filter can test"),
        ("price in (1, 'x')", "column 'price' holds numbers, and 'x' is a text; write it without quotes"),
        ("category in ('a', 5)", "column 'category' holds texts such as 'shoes'; write the value in quotes"),
        ("since in ('2024-01-31', 'soon')", "column 'since' holds times, and 'soon' is none"),
        ("tags in ('a')", "column 'tags' holds lists; test it by `tags contains VALUE`"),
        ("category < 5 and tags == 1", "filter: 2 problems\n  - character 1: column 'category'"),
    ],
)
def test_what_can_not_be_read_or_tested_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(RequestError) as error:
        kept(text)
    assert says in str(error.value)
    assert len(str(error.value)) < 2_000


OPERATORS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
NUMBERS = st.integers(-3, 3) | st.sampled_from([0.5, -1.5, 2.0])
TEXTS = st.sampled_from(["a", "b", "ab", "", "it's", 'say "x"', "ä", "A"])
ROWS = st.fixed_dictionaries(
    {
        "n": st.none() | NUMBERS,
        "t": st.none() | TEXTS,
        "b": st.none() | st.booleans(),
        "l": st.none() | st.lists(TEXTS, max_size=3),
    }
)
SCHEMA = pa.schema({"n": pa.float64(), "t": pa.string(), "b": pa.bool_(), "l": pa.list_(pa.string())})


def spelled(value: Any) -> str:
    """A value as an expression has it."""
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value).lower()


def single() -> st.SearchStrategy[tuple[str, Any]]:
    """One test as text, and as a function of a row."""

    def compared(name: str, sign: str, value: Any) -> tuple[str, Any]:
        return (
            f"{name} {sign} {spelled(value)}",
            lambda row: row[name] is not None and OPERATORS[sign](row[name], value),
        )

    def among(name: str, values: list[Any], negated: bool) -> tuple[str, Any]:
        text = f"{name} {'not ' * negated}in ({', '.join(map(spelled, values))})"
        return text, lambda row: row[name] is not None and (row[name] in values) != negated

    def containing(name: str, value: str, negated: bool) -> tuple[str, Any]:
        text = f"{name} {'NOT ' * negated}contains {spelled(value)}"
        return text, lambda row: row[name] is not None and (value in row[name]) != negated

    signs = st.sampled_from([*OPERATORS])
    return st.one_of(
        st.builds(compared, st.just("n"), signs, NUMBERS),
        st.builds(compared, st.just("t"), signs, TEXTS),
        st.builds(compared, st.just("b"), st.sampled_from(["==", "!="]), st.booleans()),
        st.builds(among, st.just("n"), st.lists(NUMBERS, min_size=1, max_size=3), st.booleans()),
        st.builds(among, st.just("t"), st.lists(TEXTS, min_size=1, max_size=3), st.booleans()),
        st.builds(containing, st.sampled_from("tl"), TEXTS, st.booleans()),
        st.builds(lambda name: (f"{name} is missing", lambda row: row[name] is None), st.sampled_from("ntbl")),
        st.just(("b", lambda row: bool(row["b"]))),
    )


def wider(part: st.SearchStrategy[tuple[str, Any]]) -> st.SearchStrategy[tuple[str, Any]]:
    """Expressions made of smaller ones."""

    def joined(word: str, left: tuple[str, Any], right: tuple[str, Any]) -> tuple[str, Any]:
        text = f"({left[0]}) {word} ({right[0]})"
        if word == "and":
            return text, lambda row: left[1](row) and right[1](row)
        return text, lambda row: left[1](row) or right[1](row)

    negated = st.builds(lambda one: (f"not ({one[0]})", lambda row: not one[1](row)), part)
    return negated | st.builds(joined, st.sampled_from(["and", "or"]), part, part)


@settings(max_examples=80)
@given(st.recursive(single(), wider, max_leaves=6), st.lists(ROWS, max_size=8))
def test_a_filter_is_what_python_says_of_each_row(expression: tuple[str, Any], rows: list[dict[str, Any]]) -> None:
    text, holds = expression
    table = pa.Table.from_pylist(rows, SCHEMA)
    assert kept(text, table) == [place for place, row in enumerate(rows) if holds(row)]


PARTS = "price tags and or not in ( ) 'a' 5 < == , is missing contains `"


@settings(max_examples=100)
@given(st.text(st.characters(), max_size=60) | st.lists(st.sampled_from(PARTS.split()), max_size=12).map(" ".join))
def test_any_text_is_a_filter_or_an_error_of_ours(text: str) -> None:
    try:
        rows = kept(text)
    except RequestError:
        return
    assert set(rows) <= set(range(5))


@pytest.mark.parametrize(
    ("many", "whole"),
    [
        ("1" * 1_000_000, True),
        ("1" * 1_000_000 + "x", False),
        ("1" * 500_000 + "." + "1" * 500_000 + "x", False),
        ("1." + "1" * 500_000 + "e" + "1" * 500_000 + "x", False),
        ("." + "1" * 1_000_000 + ".", False),
        ("'" + "a" * 1_000_000, False),
        ("'" + "''" * 500_000, False),
        ('"' + 'a""' * 300_000 + '"', True),
        ("`" + "a" * 1_000_000, False),
        ("a." * 500_000, True),
        (" " * 1_000_000 + ";", False),
    ],
)
def test_a_token_is_read_in_time_that_grows_with_its_length(many: str, whole: bool) -> None:
    """If the time grew with the square of the length, these million characters would take hours."""
    found = TOKEN.match(many)
    assert (found is not None and found.end() == len(many)) == whole


def test_texts_are_read_as_numbers_once_however_many_values_they_are_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, number = list[str](), filters._number
    monkeypatch.setattr(filters, "_number", lambda text: read.append(text) or number(text))
    column = TestedColumn(pa.array([str(number) for number in range(500)] * 2))
    text = (
        f"id in ({', '.join(map(str, range(100)))}) or {' or '.join(f'id == {number}' for number in range(100, 300))}"
    )
    assert evaluate(Filter.parse(text), lambda _: column, 1_000).sum() == 600
    assert evaluate(Filter.parse("id not in (7, 8.0, '9')"), lambda _: column, 1_000).sum() == 994
    assert len(read) == 500


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("count in (9007199254740993, 7)", [0]),
        ("count in (9007199254740992.0, -1)", [0, 1, 3]),  # a number with a point is a float64, as with ==
        ("count in (2.5, 5, 99999999999999999999)", [4]),
        ("small in (0.1, 1, 1e300)", [0, 3]),
        ("price in (50, 49.99)", [1, 3]),
        ("price not in (50)", [0, 1]),
        ("in_stock in (true)", [0, 2, 4]),
        ("flag in (1)", [0, 2, 3]),
        ("spelled in (1, 'n/a')", [0, 2, 4]),
        ("since in ('2024-01-31', '1969-12-31')", [0, 4]),
        ("tiny in (300, 7)", [1]),
        ("large in (3, -1)", [2]),
        ("small == 1e300 or small < -1e300", []),
    ],
)
def test_several_values_are_found_as_one_is(text: str, rows: list[int]) -> None:
    table = SHOP.append_column("tiny", pa.array([44, 7, 0, 1, None], pa.int8()))
    table = table.append_column("large", pa.array([2**64 - 2, 0, 3, 4, None], pa.uint64()))
    assert kept(text, table) == rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("id == 9007199254740993", [0]),
        ("id != 9007199254740993", [1, 3, 4]),
        ("id > 9007199254740992", [0, 3]),
        ("id in (9007199254740993, 5.5)", [0, 4]),
        ("id == 170141183460469231731687303715884105727", [3]),
        ("wide == 170141183460469231731687303715884105727 or wide == 9223372036854775808", [0, 1]),
        ("count < 170141183460469231731687303715884105727", [0, 1, 2, 3, 4]),
        ("large == 18446744073709551615", [0]),
    ],
)
def test_whole_numbers_are_exact_of_any_size_and_type(text: str, rows: list[int]) -> None:
    table = pa.table(
        {
            "id": ["9007199254740993", "9007199254740992", None, f"{2**127 - 1}", "5.5"],
            "wide": pa.array([Decimal(2**127 - 1), Decimal(2**63), Decimal(1), None, Decimal(2)], pa.decimal256(60, 0)),
            "count": pa.array([2**62 + 1, 2**62, 1, 0, 5]),
            "large": pa.array([2**64 - 1, 2**64 - 2, 0, None, 3], pa.uint64()),
        }
    )
    assert kept(text, table) == rows


def test_times_with_and_without_zones_mean_utc_unless_they_say_otherwise() -> None:
    naive = pa.table({"at": pa.array([datetime(2024, 1, 1, 12)], pa.timestamp("ns"))})
    zoned = pa.table({"at": pa.array([datetime(2024, 1, 1, 12, tzinfo=UTC)], pa.timestamp("ms", "Asia/Tokyo"))})
    for table in (naive, zoned):
        assert kept("at == '2024-01-01T12:00'", table) == [0]
        assert kept("at == '2024-01-01T13:00+01:00'", table) == [0]
        assert kept("at < '2024-01-01T12:00'", table) == []


def test_a_column_in_several_pieces_is_one() -> None:
    table = pa.concat_tables([SHOP, SHOP.slice(1, 3), SHOP.slice(0, 0)])
    for text in ("tags contains 'a'", "category == 'socks'", "code == 'q'", "spelled > 1"):
        first = kept(text)
        assert kept(text, table) == first + [row + 4 for row in first if 1 <= row < 4]


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("Preis in EUR < 10", "Preis in EUR"),
        ("price and list price < 10", "list price"),
        ("a-b == 1", "a-b"),
        ("in == 1", "in"),
        ("2nd price < 3", "2nd price"),
        ("list price (net) > 3", "list price (net)"),
    ],
)
def test_a_column_that_lacks_its_backticks_is_named_with_them(text: str, column: str) -> None:
    columns = ["price", "Preis in EUR", "list price", "list price (net)", "a-b", "in", "2nd price"]
    with pytest.raises(RequestError, match=re.escape(f"put the column's name in backticks: `{column}` (near ")):
        Filter.parse(text, columns)
    assert Filter.parse(text.replace(column, f"`{column}`"), columns).tests[-1].column == column
    with pytest.raises(RequestError, match="expected"):
        Filter.parse("price <", columns)


@pytest.mark.parametrize("text", ["13,69", "1.234,50 EUR", "€ 5", "EUR 5.50", "12 %", "1'234.5", "1 234,5"])
def test_numbers_that_were_read_as_text_say_how_to_prepare_them(text: str) -> None:
    told = f"column 'price' was read as text, because its numbers are written as in '{text}'; write them with a point"
    with pytest.raises(RequestError, match=re.escape(told)):
        evaluate(Filter.parse("price < 10"), lambda _: TestedColumn(pa.array([text])), 1)
    for other in ("shoes", "v1.2.3", "2016.01.02", "AB 12 CD", "1984, a novel"):
        with pytest.raises(RequestError, match="write the value in quotes"):
            evaluate(Filter.parse("price < 10"), lambda _, text=other: TestedColumn(pa.array([text])), 1)  # type: ignore[misc]


def test_values_of_lists_cost_work_however_short_they_are() -> None:
    flags = TestedColumn(pa.array([[True, False] * 40, [], None]))
    assert flags.cost == 80 // filters.LISTED
    found = evaluate(Filter.parse("flags contains false"), {"flags": flags}.__getitem__, 3)
    assert found.tolist() == [True, False, False]
