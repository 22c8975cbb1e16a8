"""Values in words for people."""

import pytest

from recspec.base.summaries import as_data, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2016, "2016"),
        (2016.0, "2016"),
        (1234567, "1234567"),
        (123456789012.0, "123456789012"),
        (-5.0, "-5"),
        (1234.5, "1234.5"),
        (7.78, "7.78"),
        (0.10000000149011612, "0.1"),
        (12345678.91, "12345678.91"),
        (float("nan"), "nan"),
        (1e300, "1e+300"),
        (None, ""),
        (True, "yes"),
        ("13,69", "13,69"),
        ([1999, 2000.5], "1999, 2000.5"),
    ],
)
def test_values_of_the_data_stand_as_they_are(value: object, text: str) -> None:
    assert as_data(value) == text


def test_counts_have_thousands_separators() -> None:
    assert shown(1234567) == "1,234,567"
