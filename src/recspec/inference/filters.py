"""Boolean expressions over the columns of a catalogue: `in_stock and price < 50 and category in ('shoes', 'socks')`.

    EXPRESSION = AND ["or" AND]...
    AND        = NOT ["and" NOT]...
    NOT        = "not" NOT | "(" EXPRESSION ")" | TEST
    TEST       = COLUMN ("==" | "!=" | "<" | "<=" | ">" | ">=") VALUE
               | COLUMN ["not"] "in" "(" VALUE ["," VALUE]... ")"
               | COLUMN ["not"] "contains" VALUE        a value of a list, or a part of a text
               | COLUMN "is" ["not"] "missing"
               | COLUMN                                 a column of true and false, or of 1 and 0
    COLUMN     = a name, in backticks if it has blanks or signs
    VALUE      = a number, true, false, or a text in quotes, in which a doubled quote stands for one

`=` means `==`, and `<>` means `!=`. Case does not count in words such as `and`. A test of a missing value is false,
whatever the operator, except for `is missing`; so `not (price < 50)` keeps items without a price, and `price >= 50`
does not. Dates and times are compared with texts of ISO 8601, which mean UTC unless they name a zone.
"""

from __future__ import annotations

import math
import operator
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.base.errors import RequestError, shortened
from recspec.data.encoding import EXACT, MISSING_NUMBERS, TRUTH, combined, is_text, plain
from recspec.inference.catalogue import is_list

LONGEST, DEEPEST, MOST_VALUES = 10_000, 50, 1_000  # characters, nested parentheses and nots, values of an expression

Value = str | int | float | bool
Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in", "contains", "missing", "true"]

# Every repetition is possessive: it gives nothing back, so reading takes time in proportion to the text.
TOKEN = re.compile(
    r"""\s*+(?:
        (?P<number>[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?(?![\w.]))
      | (?P<text>'[^']*+(?:''[^']*+)*+'|"[^"]*+(?:""[^"]*+)*+")
      | (?P<quoted>`[^`]++`)
      | (?P<word>[^\W\d][\w.]*+)
      | (?P<sign>==|!=|<>|<=|>=|[=<>(),])
      | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
SIGNS: dict[str, Operator] = {"=": "==", "==": "==", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
WORDS = ("and", "or", "not", "in", "contains", "is", "missing", "null", "true", "false")
Mask = NDArray[np.bool_]
Column: TypeAlias = Any
"""A pyarrow array, or a chunked one (pyarrow has no types)."""
COMPARISONS: Mapping[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "==": (operator.eq, pc.equal),
    "!=": (operator.ne, pc.not_equal),
    "<": (operator.lt, pc.less),
    "<=": (operator.le, pc.less_equal),
    ">": (operator.gt, pc.greater),
    ">=": (operator.ge, pc.greater_equal),
}
"""Of numbers, and of texts."""
MOST_TESTED = 1 << 25
"""Most items that the tests of a request read; see `TestedColumn.cost`. Parts of texts are found in 3.4 s."""
ALWAYS = 8
"""Tests of a request that are made however many items there are."""
WIDE = 32
"""Bytes of an item's value that cost as much to test as a short one."""
LISTED = 8
"""Values of an item's list that cost as much to test as one short value."""
WHOLE = re.compile(r"\s*[+-]?[0-9]{1,300}\s*", re.ASCII)
WRITTEN_NUMBER = re.compile(
    r"""(?:[$€£¥]\s*|[A-Z]{3}\s+)?
        [+-]?(?:[0-9]{1,3}(?:[.,' \xa0][0-9]{3})+|[0-9]+)(?:[.,][0-9]+)?
        (?:\s*[$€£¥%]|\s+[A-Za-z]{2,3})?""",
    re.VERBOSE,
)
"""A text that means a number, which people write so: with a decimal comma, thousands separators or a currency."""


@dataclass(frozen=True)
class Test:
    """One test of a column. `negated` tests are false for a missing value too, except `is not missing`."""

    column: str
    operator: Operator
    values: tuple[Value, ...] = ()
    negated: bool = False
    place: int = 0
    """Where the column's name begins in the text, from 1."""

    __test__ = False  # no class of tests for pytest


@dataclass(frozen=True)
class Not:
    """True where the part is false."""

    part: Node


@dataclass(frozen=True)
class Joined:
    """All or any of several parts."""

    word: Literal["and", "or"]
    parts: tuple[Node, ...]


Node = Test | Not | Joined


@dataclass(frozen=True)
class Filter:
    """A parsed expression."""

    text: str
    root: Node

    @classmethod
    def parse(cls, text: str, columns: Iterable[str] = ()) -> Filter:
        """Read an expression. Raises `RequestError` with the place of what can't be read.

        If the place lies in the name of one of `columns` without backticks, the message says so.
        """
        if len(text) > LONGEST:
            raise RequestError(f"the filter has {len(text):,} characters; expected at most {LONGEST:,}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"filter, character {error.start + 1}: {text[error.start]!a} is no UTF-8 text; write it in UTF-8"
            ) from None
        return cls(text, _Parser(text, columns).expression())

    @cached_property
    def tests(self) -> tuple[Test, ...]:
        """Every test, in the order of the text."""
        return tuple(_tests(self.root))


def _tests(node: Node) -> Iterator[Test]:
    if isinstance(node, Test):
        yield node
    else:
        for part in (node.part,) if isinstance(node, Not) else node.parts:
            yield from _tests(part)


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Token:
    kind: str  # number, text, name, sign, end; of a word with a meaning the word itself
    text: str
    place: int  # from 1


class _Parser:
    """Reads tokens from left to right, one function for each rule of the grammar."""

    def __init__(self, text: str, columns: Iterable[str]) -> None:
        self._text, self._values, self._depth = text, 0, 0
        self._columns = [name for name in columns if name and quoted_name(name) != name]
        self._tokens = list(self._read())
        self._next = 0

    def expression(self) -> Node:
        node = self._or()
        if self._now.kind != "end":
            if self._now.text in SIGNS:
                raise self._unexpected("'and' or 'or'; write a test of two bounds as `price > 10 and price < 50`")
            raise self._unexpected("'and', 'or' or the end")
        return node

    def _read(self) -> Iterator[_Token]:
        start = 0
        while True:
            found = TOKEN.match(self._text, start)
            if found is None:
                place = start + len(self._text[start:]) - len(self._text[start:].lstrip())
                sign, what = self._text[place], "a column, a value or an operator"
                if sign in "'\"`":
                    what = f"a closing {sign} after it"
                raise self._error(place + 1, f"{sign!r} can't be read; expected {what}")
            kind, text = str(found.lastgroup), found[str(found.lastgroup)]
            word = text.lower()
            if kind == "word":
                kind = word if word in WORDS else "name"
            elif kind == "quoted":
                kind, text = "name", text[1:-1]
            yield _Token("missing" if kind == "null" else kind, text, found.start(str(found.lastgroup)) + 1)
            if kind == "end":
                return
            start = found.end()

    def _or(self) -> Node:
        return self._joined("or", self._and)

    def _and(self) -> Node:
        return self._joined("and", self._not)

    def _joined(self, word: Literal["and", "or"], part: Callable[[], Node]) -> Node:
        parts = [part()]
        while self._take(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Joined(word, tuple(parts))

    def _not(self) -> Node:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._error(self._now.place, f"more than {DEEPEST} nested parentheses and nots; write it flatter")
        node: Node
        if self._take("not"):
            node = Not(self._not())
        elif self._take("("):
            node = self._or()
            self._expect(")")
        else:
            node = self._test()
        self._depth -= 1
        return node

    def _test(self) -> Test:
        column = self._now
        if column.kind != "name":
            if column.kind in ("number", "text"):
                raise self._unexpected("a column first, as in `price < 50`")
            raise self._unexpected("a column, 'not' or '('")
        self._next += 1
        if self._now.text in SIGNS and self._now.kind == "sign":
            operator = SIGNS[self._now.text]
            self._next += 1
            return Test(column.text, operator, (self._value(),), place=column.place)
        if self._take("is"):
            negated = self._take("not")
            self._expect("missing")
            return Test(column.text, "missing", negated=negated, place=column.place)
        negated = self._take("not")
        if self._take("in"):
            self._expect("(")
            values = [self._value()]
            while self._take(","):
                values.append(self._value())
            self._expect(")")
            return Test(column.text, "in", tuple(values), negated, column.place)
        if self._take("contains"):
            return Test(column.text, "contains", (self._value(),), negated, column.place)
        if negated:
            raise self._unexpected("'in' or 'contains'")
        return Test(column.text, "true", place=column.place)

    def _value(self) -> Value:
        token = self._now
        self._values += 1
        if self._values > MOST_VALUES:
            raise self._error(token.place, f"more than {MOST_VALUES:,} values; give a list of allowed items instead")
        self._next += 1
        if token.kind == "text":
            mark = token.text[0]
            return token.text[1:-1].replace(mark * 2, mark)
        if token.kind in ("true", "false"):
            return token.kind == "true"
        if token.kind == "number":
            number = float(token.text)
            if not math.isfinite(number):
                raise self._error(token.place, f"{shortened(token.text)} is too large a number")
            return int(token.text) if re.fullmatch("[+-]?[0-9]{1,300}", token.text) else number
        self._next -= 1
        if token.kind == "name":
            raise self._unexpected(f"a number, true, false, or a text in quotes: '{shortened(token.text)}'")
        raise self._unexpected("a number, true, false, or a text in quotes")

    @property
    def _now(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, what: str) -> bool:
        """Whether the next token is this word or sign, which is then behind us."""
        found = self._now.kind == what or (self._now.kind == "sign" and self._now.text == what)
        self._next += found
        return found

    def _expect(self, what: str) -> None:
        if not self._take(what):
            raise self._unexpected(f"'{what}'")

    def _unexpected(self, expected: str) -> RequestError:
        token = self._now
        found = "the filter ends" if token.kind == "end" else f"found '{shortened(token.text)}'"
        return self._error(token.place, f"{found}; expected {expected}")

    def _error(self, place: int, problem: str) -> RequestError:
        near = self._text[max(0, place - 21) : place + 20].strip()
        if column := self._column_at(place):
            problem = f"put the column's name in backticks: {quoted_name(column)}"
        return RequestError(f"filter, character {place}: {problem} (near {near!r})")

    def _column_at(self, place: int) -> str | None:
        """The longest column whose name, which needs backticks, stands at a place (from 1) without them."""
        found = [name for name in self._columns for at in _places(name, self._text) if at < place <= at + len(name)]
        return max(found, key=len, default=None)


def _places(name: str, text: str) -> Iterator[int]:
    """Where a name begins in a text, from 0."""
    at = text.find(name)
    while at >= 0:
        yield at
        at = text.find(name, at + 1)


def quoted_name(column: str) -> str:
    """A column as an expression names it: in backticks if it has to be."""
    is_word = re.fullmatch(r"[^\W\d][\w.]*", column) is not None and column.lower() not in WORDS
    return column if is_word else f"`{column}`"


class TestedColumn:
    """A raw column as tests read it. What they need of it is made once, however many values it is compared with."""

    __test__ = False  # no class of tests for pytest

    def __init__(self, column: Column) -> None:
        self.values = _plain(column)

    @property
    def cost(self) -> int:
        """Work of one test: 1 for each item, and more if items hold long texts or lists."""
        listed = len(self.held[0].values) if is_list(self.values) else 0
        return max(len(self.values), int(self.values.nbytes) // WIDE, listed // LISTED)

    @cached_property
    def there(self) -> Mask:
        """Where a value is not missing."""
        return np.asarray(self.values.is_valid())

    @cached_property
    def micros(self) -> NDArray[np.int64]:
        """Dates and times as microseconds since 1970; anything where they are missing."""
        zone = getattr(self.values.type, "tz", None)
        return _numpy(self.values.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64()))

    @cached_property
    def numbers(self) -> NDArray[Any]:
        """Numbers, or truths as 1 and 0; 0 where they are missing."""
        return _numpy(self.values.cast(pa.int8()) if pa.types.is_boolean(self.values.type) else self.values)

    @cached_property
    def spelled(self) -> tuple[NDArray[np.float64], str | None]:
        """The numbers that texts spell, NaN where they are missing; the first text that spells none."""
        texts, places = self._coded
        numbers = [_number(text) for text in texts]
        wrong = next((text for text, number in zip(texts, numbers, strict=True) if number is None), None)
        return np.array([*numbers, None], np.float64)[places], wrong  # None becomes NaN

    @cached_property
    def ranked(self) -> tuple[list[int | float], NDArray[np.float64]]:
        """The different numbers that texts spell, ascending, and the place of each row's; NaN where it is missing.

        Whole numbers are exact, of however many digits.
        """
        texts, places = self._coded
        exact = [int(text) if WHOLE.fullmatch(text) else _number(text) or 0.0 for text in texts]
        numbers = sorted({number for number in exact if number == number})
        ranks = {number: rank for rank, number in enumerate(numbers)}
        return numbers, np.array([*(ranks.get(number) for number in exact), None], np.float64)[places]

    @cached_property
    def _coded(self) -> tuple[list[str], NDArray[np.int64]]:
        """The different texts, and the place of each row's text among them; a missing one is behind the last."""
        coded = self.values.dictionary_encode()
        texts = coded.dictionary.to_pylist()
        return texts, pc.fill_null(coded.indices, len(texts)).to_numpy(zero_copy_only=False)

    @cached_property
    def held(self) -> tuple[TestedColumn, NDArray[np.int64]]:
        """All values of a column of lists, and where each row's begin and end among them (N + 1,)."""
        lists = self.values.cast(pa.large_list(self.values.type.value_type))
        return TestedColumn(pc.list_flatten(lists)), np.append(0, np.cumsum(_numpy(pc.list_value_length(lists))))


def evaluate(asked: Filter, column: Callable[[str], TestedColumn], num_rows: int, until: float | None = None) -> Mask:
    """Which rows (N,) a filter keeps, given the column (N,) of each name that it tests.

    Raises:
        RequestError: naming every test that its column can't answer, or once `time.monotonic()` is past `until`.
    """
    answers: dict[Test, Mask] = {}
    problems = []
    for test in dict.fromkeys(asked.tests):
        if until is not None and time.monotonic() > until:
            raise RequestError("the time for the answer was over before every item was tested", status=504)
        try:
            answers[test] = _answer(test, column(test.column), num_rows)
        except RequestError as error:
            problems += [f"character {test.place}: {problem}" for problem in error.problems]
    RequestError.refuse("filter", problems)
    return _joined(asked.root, answers)


def check_work(asked: Iterable[Filter], column: Callable[[str], TestedColumn], num_rows: int) -> None:
    """Refuse the filters of one request before any is evaluated, if they test too many items too often.

    Raises:
        RequestError: with the number of tests and the most for these columns.
    """
    tests = [test for each in asked for test in dict.fromkeys(each.tests)]
    if len(tests) <= ALWAYS:
        return
    work = 0
    for test in tests:
        with suppress(RequestError):  # `evaluate` names a test that no column answers
            work += column(test.column).cost
    if work > MOST_TESTED:
        raise RequestError(
            f"filter and boosts: {len(tests):,} tests of {num_rows:,} items cost {work:,}; expected at most "
            f"{MOST_TESTED:,}, so about {max(ALWAYS, len(tests) * MOST_TESTED // work):,} such tests; join those of "
            "equal values as `COLUMN in (VALUE, ...)`, or send fewer"
        )


def _joined(node: Node, answers: Mapping[Test, Mask]) -> Mask:
    if isinstance(node, Test):
        return answers[node]
    if isinstance(node, Not):
        return ~_joined(node.part, answers)
    join = np.logical_and if node.word == "and" else np.logical_or
    found = _joined(node.parts[0], answers).copy()
    for part in node.parts[1:]:
        join(found, _joined(part, answers), out=found)
    return found


def _plain(column: Column) -> Column:
    """One array of the types that `recspec.data.encoding.plain` gives, with NaN as missing."""
    array = plain(column)
    if isinstance(array, pa.ChunkedArray):
        array = combined(array)
    return pc.if_else(pc.is_nan(array), None, array) if pa.types.is_floating(array.type) else array


def _answer(test: Test, column: TestedColumn, num_rows: int) -> Mask:
    there, kind = column.there, column.values.type
    if test.operator == "missing":
        return there if test.negated else ~there
    if pa.types.is_null(kind):
        return np.zeros(num_rows, bool)
    if test.operator == "contains":
        found = _contains(test, column)
    elif is_list(column.values):
        raise RequestError(f"column '{test.column}' holds lists; test it by `{_name(test)} contains VALUE`")
    elif test.operator == "true":
        found = _truth(test, column)
    elif test.operator == "in":
        found = _among(test.column, column, test.values)
    else:
        found = _compared(test.column, test.operator, column, test.values[0])
    return there & (~found if test.negated else found)


def _compared(name: str, sign: str, column: TestedColumn, value: Value) -> Mask:
    """Where values compare with one as asked; anything where they are missing."""
    kind, (compare, compare_texts) = column.values.type, COMPARISONS[sign]
    if _is_time(kind):
        return np.asarray(compare(column.micros, _moment(name, value)))
    if is_text(kind) and isinstance(value, str):
        return _true(compare_texts(column.values, pa.scalar(value, kind)))
    numbers = _numbers(name, column, value)
    if is_text(kind) and _is_large(value):
        known, ranks = column.ranked
        return np.asarray(compare(ranks, _rank(value, known)))
    if numbers.dtype == np.float32:  # 0.1 means the float32 that is nearest to it
        return np.asarray(compare(numbers, _as_floats([value], numbers.dtype)))
    return np.asarray(compare(numbers, int(value) if isinstance(value, bool) else value))


def _among(name: str, column: TestedColumn, values: Sequence[Value]) -> Mask:
    """Where a value equals one of several, as `_compared` has it; one look-up for each row, however many they are."""
    kind = column.values.type
    if _is_time(kind):
        return np.isin(column.micros, [_moment(name, value) for value in values])
    texts = [value for value in values if isinstance(value, str)] if is_text(kind) else []
    found = np.zeros(len(column.values), bool)
    if texts:
        found |= _true(pc.is_in(column.values, value_set=pa.array(texts, kind)))
    others = [value for value in values if not (texts and isinstance(value, str))]
    if not others:
        return found
    numbers = _numbers(name, column, next((value for value in others if isinstance(value, str)), others[0]))
    if is_text(kind) and any(map(_is_large, others)):
        known, ranks = column.ranked
        return found | np.isin(ranks, [_rank(value, known) for value in others])
    if numbers.dtype.kind == "f":
        return found | np.isin(numbers, _as_floats(others, numbers.dtype))
    bounds = np.iinfo(numbers.dtype)
    whole = [int(value) for value in others if isinstance(value, int) and bounds.min <= value <= bounds.max]
    broken = [value for value in others if isinstance(value, float)]
    found |= np.isin(numbers, np.array(whole, numbers.dtype))
    return found | np.isin(numbers.astype(np.float64), broken) if broken else found


def _rank(value: Value, numbers: Sequence[int | float]) -> float:
    """The place of a number among ascending ones; between two of them if it is none."""
    assert not isinstance(value, str)
    place = bisect_left(numbers, value)
    return place if place < len(numbers) and numbers[place] == value else place - 0.5


def _is_large(value: Value) -> bool:
    """Whether a number is beyond those whole ones that float64 tells apart."""
    return isinstance(value, int) and abs(value) >= EXACT


def _as_floats(values: Sequence[Value], dtype: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # beyond the largest float32 lies infinity
        return np.array(values, dtype)


def _numbers(name: str, column: TestedColumn, value: Value | None) -> NDArray[Any]:
    """Numbers of a column of numbers, truths, or texts that spell numbers; anything where they are missing.

    Raises:
        RequestError: if the column holds something else, or if `value`, with which they are compared, is a text.
    """
    kind = column.values.type
    if is_text(kind):
        numbers, wrong = column.spelled
        if wrong is not None:
            if WRITTEN_NUMBER.fullmatch(wrong.strip()):
                raise RequestError(
                    f"column '{name}' was read as text, because its numbers are written as in '{shortened(wrong)}'; "
                    "write them with a point and no other signs, such as 13.69, in the items' file and prepare the "
                    "data again"
                )
            how = "write the value in quotes" if value is not None else f"compare it, as in `{name} == 'VALUE'`"
            raise RequestError(f"column '{name}' holds texts such as '{shortened(wrong)}'; {how}")
        return numbers
    is_truth = pa.types.is_boolean(kind)
    if not (is_truth or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise RequestError(f"column '{name}' holds {kind}, which no filter can test")
    if isinstance(value, str):
        held = "true and false" if is_truth else "numbers"
        raise RequestError(f"column '{name}' holds {held}, and '{shortened(value)}' is a text; write it without quotes")
    return column.numbers


def _number(text: str) -> float | None:
    """The number that a text spells, NaN where it spells a missing one, None where it spells none."""
    word = text.strip().lower()
    if not word or word in MISSING_NUMBERS:
        return np.nan
    if word in TRUTH:
        return TRUTH[word]
    try:
        return float(word) if word.isascii() and "_" not in word else None
    except ValueError:
        return None


def _truth(test: Test, column: TestedColumn) -> Mask:
    if _is_time(column.values.type):
        raise RequestError(f"column '{test.column}' holds times; compare it, as in `{_name(test)} > '2024-01-31'`")
    numbers = _numbers(test.column, column, None)
    found: Mask = numbers > 0  # a stock below 0 is oversold
    return found


def _contains(test: Test, column: TestedColumn) -> Mask:
    value, kind = test.values[0], column.values.type
    if is_list(column.values):
        held, ends = column.held
        if not len(held.values) or pa.types.is_null(held.values.type):
            return np.zeros(len(column.values), bool)
        equal = _compared(test.column, "==", held, value) & held.there
        before = np.append(0, np.cumsum(equal))[ends]
        return before[1:] > before[:-1]
    if is_text(kind):
        if not isinstance(value, str):
            raise RequestError(f"column '{test.column}' holds texts; write the part to find in quotes")
        return _true(pc.match_substring(column.values, value))
    raise RequestError(f"column '{test.column}' holds {kind}, neither lists nor texts; compare it with == or in")


def _moment(name: str, value: Value) -> int:
    """Microseconds since 1970 of a text of ISO 8601."""
    try:
        told = datetime.fromisoformat(value.strip()) if isinstance(value, str) else None
    except ValueError:
        told = None
    if told is None:
        shown = f"'{shortened(value)}'" if isinstance(value, str) else value
        raise RequestError(f"column '{name}' holds times, and {shown} is none; expected a text such as '2024-01-31'")
    since = (told if told.tzinfo else told.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _numpy(array: Column) -> NDArray[Any]:
    """Values as numpy has them; 0 where one is missing."""
    filled = pc.fill_null(array, pa.scalar(0, array.type)) if array.null_count else array
    found: NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return found


def _true(matches: Column) -> Mask:
    return np.asarray(pc.fill_null(matches, False).to_numpy(zero_copy_only=False))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _name(test: Test) -> str:
    """The column as an expression names it."""
    return quoted_name(test.column)
