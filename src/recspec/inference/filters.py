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
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from recspec.base.errors import RequestError, shortened

LONGEST, DEEPEST, MOST_VALUES = 10_000, 50, 1_000  # characters, nested parentheses and nots, values of an expression

Value = str | int | float | bool
Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in", "contains", "missing", "true"]


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
