"""Markup: everything that is not markup is escaped."""

import pytest

from recspec.report.page import Markup, coded, joined, plain, tag
from tests.report.pages import HOSTILE, Page


def test_an_element_by_hand() -> None:
    made = tag("p", "1 < 2 ", tag("b", 3), None, ["a", ("&",)], class_="soft", data_value=1.5, hidden=True, title=None)
    assert made == '<p class="soft" data-value="1.5" hidden>1 &lt; 2 <b>3</b>a&amp;</p>'
    assert tag("br") == "<br>"
    assert joined([Markup("<i></i>"), "<i>"]) == "<i></i>&lt;i&gt;"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_text_in_an_element_and_in_an_attribute(text: str) -> None:
    page = Page(tag("p", text, title=text))
    ((name, attributes),) = page.elements
    assert (name, [*attributes]) == ("p", ["title"])
    assert page.texts == [attributes["title"]]
    for each in "\x00\x07\u202e":
        assert each not in page.texts[0]


def test_a_plain_text_is_short_and_can_be_written() -> None:
    assert plain("x" * 300, 5) == "xxxx…"
    assert plain("xxxxx", 5) == "xxxxx"
    assert plain("\ud800\r\n").encode() == "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\n".encode()


def test_code_stands_between_backticks() -> None:
    assert joined(coded("run `recspec <x>`, then")) == "run <code>recspec &lt;x&gt;</code>, then"
    assert joined(coded("one ` alone")) == "one ` alone"
