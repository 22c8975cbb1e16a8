"""Numbers, times and sizes as pages show them."""

import math

import pytest

from recspec.report import page as numbers


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
    assert numbers.number(value) == shown


def test_differences_have_a_sign() -> None:
    assert [numbers.signed(each) for each in (0.5, -0.5, 0.0)] == ["+0.5000", "-0.5000", "0.0000"]


def test_shares() -> None:
    assert [numbers.percent(each) for each in (0, 0.12345, 1, 0.0001, None)] == [
        "0.0 %",
        "12.3 %",
        "100.0 %",
        "under 0.1 %",
        "–",
    ]


def test_durations_sizes_and_moments() -> None:
    assert [numbers.duration(each) for each in (0.1234, 99, 250, 7500, None, math.inf)] == [
        "0.123 s",
        "99 s",
        "4 min 10 s",
        "2 h 5 min",
        "–",
        "–",
    ]
    assert [numbers.size(each) for each in (999, 1500, 2_500_000, 3e12, None)] == [
        "999 bytes",
        "1.5 KB",
        "2.5 MB",
        "3,000.0 GB",
        "–",
    ]
    assert [each(10**400) for each in (numbers.duration, numbers.size, numbers.percent, numbers.moment)] == ["–"] * 4
    assert [numbers.moment(each) for each in (0, 1e300, None)] == ["1970-01-01 00:00 UTC", "–", "–"]
    assert [numbers.p_value(each) for each in (0.0001, 0.04, math.nan)] == ["under 0.001", "0.040", "–"]
