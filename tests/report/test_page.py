"""Pages: everything that is not markup is escaped, and numbers are shown alike."""

import math

import pytest
from markupsafe import Markup

from recspec.report import page
from recspec.report.page import coded, macro, num, plain, strong, table
from tests.report.pages import HOSTILE, Page


def test_a_table_by_hand() -> None:
    made = table(
        "A & b",
        ["Name", "#Count", ""],
        [["<i>", num(5000), Markup("<svg></svg>")], [strong("x"), num(0.5, best=True), None]],
    )
    found = Page(made)
    assert found.inside["th"] == ["Name", "Count", "<i>"]
    assert [each.get("data-value") for each in found.all("td")] == [None, "5000", None, "0.5", None]
    assert (found.inside["strong"], found.inside["span"], found.inside["caption"]) == (["x"], ["0.5000 ★"], ["A & b"])
    assert len(found.all("svg")) == 1


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_text_in_an_element_and_in_an_attribute(text: str) -> None:
    found = Page(table(text, [], []))
    assert [name for name, _ in found.elements] == ["div", "table", "caption", "thead", "tr", "tbody"]
    assert found.inside["caption"] == [found.all("div")[0]["aria-label"]]
    told = Page(macro("note", text)).inside["p"][0]
    for each in "\x00\x07\u202e":
        assert each not in found.inside["caption"][0] + told


def test_a_plain_text_is_short_and_can_be_written() -> None:
    assert plain("x" * 300, 5) == "xxxx…"
    assert plain("xxxxx", 5) == "xxxxx"
    assert plain("\ud800\r\n").encode() == "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\n".encode()


def test_code_stands_between_backticks() -> None:
    assert coded("run `recspec <x>`, then") == Markup("run <code>recspec &lt;x&gt;</code>, then")
    assert not isinstance(coded("one ` alone"), Markup)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (math.nan, "–"),
        (True, "True"),
        ("text", "text"),
        (0, "0"),
        (0.0, "0.0000"),
        (5000.0, "5,000"),
        (1234567, "1,234,567"),
        (0.12345, "0.1235"),
        (-0.5, "-0.5000"),
        (12.345, "12.345"),
        (0.00012345, "0.000123"),
        (123456.7, "123,457"),
        (math.inf, "infinite"),
        (-math.inf, "-infinite"),
        (10**400, "huge"),
        (1e300, "1e+300"),
    ],
)
def test_numbers(value: object, shown: str) -> None:
    assert page.number(value) == shown


def test_differences_have_a_sign() -> None:
    assert [page.signed(each) for each in (0.5, -0.5, 0.0)] == ["+0.5000", "-0.5000", "0.0000"]


def test_shares() -> None:
    assert [page.percent(each) for each in (0, 0.12345, 1, 0.0001, None)] == [
        "0.0 %",
        "12.3 %",
        "100.0 %",
        "under 0.1 %",
        "–",
    ]


def test_durations_sizes_and_moments() -> None:
    assert [page.duration(each) for each in (0.1234, 99, 250, 7500, None, math.inf)] == [
        "0.123 s",
        "99 s",
        "4 min 10 s",
        "2 h 5 min",
        "–",
        "–",
    ]
    assert [page.size(each) for each in (999, 1500, 2_500_000, 3e12, None)] == [
        "999 bytes",
        "1.5 KB",
        "2.5 MB",
        "3,000.0 GB",
        "–",
    ]
    assert [each(10**400) for each in (page.duration, page.size, page.percent, page.moment)] == ["–"] * 4
    assert [page.moment(each) for each in (0, 1e300, None)] == ["1970-01-01 00:00 UTC", "–", "–"]
    assert [page.p_value(each) for each in (0.0001, 0.04, math.nan)] == ["under 0.001", "0.040", "–"]
